"""One Django application, bare and behind each limiter, under WSGI and ASGI, in as many copies as are measured.

Django has one configuration for each process. So every copy is a handler of its own with one route of its own, made while its
settings were in force; the bare one has no middleware at all. Only the cache that django-ratelimit counts in has to be named
before each turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.conf import settings
from django.core.handlers.asgi import ASGIHandler, ASGIRequest
from django.core.handlers.wsgi import WSGIHandler, WSGIRequest
from django.http import HttpRequest, HttpResponse
from django.test.utils import override_settings
from django.urls import path

from benchmarks.contenders import PATH, PATIENCE, Quotas, rule
from benchmarks.drive import Crowd, Tally

IN_MEMORY, ON_REDIS = "memory", "redis"
_KEPT = 100_000
"""Entries of the cache in memory; it throws some away beyond 300 unless told otherwise."""


def view(_: HttpRequest) -> HttpResponse:
    """A view as most are."""
    return HttpResponse("hello", content_type="text/plain")


async def async_view(_: HttpRequest) -> HttpResponse:
    """The same on asyncio."""
    return HttpResponse("hello", content_type="text/plain")


@contextmanager
def configured(redis_url: str) -> Iterator[None]:
    """Django with two caches, one in memory and one in Redis."""
    if not settings.configured:
        settings.configure()
    caches = {
        "default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
        IN_MEMORY: {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "OPTIONS": {"MAX_ENTRIES": _KEPT}},
        ON_REDIS: {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": redis_url},
    }
    with override_settings(
        ALLOWED_HOSTS=["*"], CACHES=caches, MIDDLEWARE=[], RATELIMIT_USE_CACHE=IN_MEMORY, ROOT_URLCONF=_urlconf(view)
    ):
        yield


def wsgi(view: Callable[..., Any] = view) -> Any:
    """Django under WSGI, with one route."""
    handler = WSGIHandler()
    handler.request_class = type("Request", (WSGIRequest,), {"urlconf": _urlconf(view)})
    return handler


def asgi(view: Callable[..., Any] = view) -> Any:
    """Django under ASGI, with one route."""
    handler = ASGIHandler()
    handler.request_class = type("Request", (ASGIRequest,), {"urlconf": _urlconf(view)})
    return handler


def async_asgi() -> Any:
    """The same with a view on asyncio."""
    return asgi(async_view)


def limitgate_wsgi(url: str, quotas: Quotas) -> Any:
    """LimitGate's middleware under WSGI."""
    with _limited(url, quotas):
        return wsgi()


def limitgate_asgi(url: str, quotas: Quotas) -> Any:
    """The same under ASGI."""
    with _limited(url, quotas):
        return asgi()


def limitgate_async(url: str, quotas: Quotas) -> Any:
    """The same with a view on asyncio."""
    with _limited(url, quotas):
        return async_asgi()


def ratelimit_wsgi(_: str, quotas: Quotas) -> Any:
    """django-ratelimit under WSGI; where it counts, `counting` says."""
    return wsgi(_ratelimited(quotas))


def ratelimit_asgi(_: str, quotas: Quotas) -> Any:
    """The same under ASGI."""
    return asgi(_ratelimited(quotas))


def counting(crowd: Crowd, url: str) -> Crowd:
    """A crowd for which django-ratelimit counts in the cache on Redis, or without a URL in memory."""

    def send(numbers: Iterator[int], concurrency: int) -> Tally:
        settings.RATELIMIT_USE_CACHE = ON_REDIS if url else IN_MEMORY
        return crowd(numbers, concurrency)

    return send


def _limited(url: str, quotas: Quotas) -> Any:
    """Settings under which handlers are made that have LimitGate's middleware."""
    options = {"RULES": [rule(quotas)], "STORE": url or "memory://", "ON_ERROR": "closed", "TIMEOUT": PATIENCE}
    return override_settings(MIDDLEWARE=["limitgate.django.LimitGateMiddleware"], LIMITGATE=options)


def _ratelimited(quotas: Quotas) -> Callable[..., Any]:
    """The view with a decorator for each window."""
    from django_ratelimit.decorators import ratelimit

    limited: Callable[..., Any] = view
    for unit, count in quotas.items():
        limited = ratelimit(key="ip", rate=f"{count}/{unit[0]}")(limited)
    return limited


def _urlconf(view: Callable[..., Any]) -> tuple[Any, ...]:
    return (path(PATH.removeprefix("/"), view),)
