"""What a limiter adds to a request in each framework, beside the limiter that the framework's users would take otherwise.

All copies of a framework's application take turns, under README's rule: the bare one, and one for each limiter and store.
Django under ASGI hands every request to a new thread, at a price that varies by more than a limiter costs when threads move
between cores; so all this happens on one core.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from benchmarks.contenders import PATH, PATIENCE, README, Build, Quotas, fastapi, flask, flask_limiter, rule
from benchmarks.cpu import in_memory, on_redis
from benchmarks.drive import Crowd, Crowds
from benchmarks.figures import Failed, Outcome, Outcomes
from benchmarks.rounds import Plan, alternate
from limitgate import LimitGate
from tests.support.redis_server import RedisServer


@dataclass(frozen=True)
class Limiter:
    """A limiter in a framework."""

    name: str
    build: Build
    remark: str
    crowd: Callable[[Crowd, str], Crowd] = lambda crowd, _: crowd
    """What has to be put in place before each turn, by the store's URL."""


@dataclass(frozen=True)
class Framework:
    """A framework, bare, and the limiters in it."""

    name: str
    bare: Callable[[], Any]
    limiters: Sequence[Limiter]
    door: Literal["asgi", "wsgi"] = "asgi"
    is_slow: bool = False
    """Whether the bare framework itself takes so long that half the requests are enough to wait for."""


def frameworks() -> Sequence[Framework]:
    """What is measured. Django is imported here and not before: a served application needs none of it."""
    from benchmarks import django_side

    gate = "One rule with rate headers: one script call for any number of windows."
    ratelimit = (
        "A decorator for each window. Fixed windows, no rate headers. It counts in Django's cache (LocMemCache or "
        "RedisCache) and can't decorate async views."
    )
    return (
        Framework(
            "FastAPI",
            fastapi,
            (
                Limiter("LimitGate", limitgate_fastapi, gate),
                Limiter("slowapi", slowapi, "Its decorator on the route. Fixed windows, no rate headers by default."),
            ),
        ),
        Framework(
            "Flask",
            flask,
            (
                Limiter("LimitGate", limitgate_flask, gate),
                Limiter("Flask-Limiter", flask_limiter, "Default limits. Fixed windows, no rate headers by default."),
            ),
            door="wsgi",
        ),
        Framework(
            "Django under WSGI",
            django_side.wsgi,
            (
                Limiter("LimitGate", django_side.limitgate_wsgi, gate),
                Limiter("django-ratelimit", django_side.ratelimit_wsgi, ratelimit, django_side.counting),
            ),
            door="wsgi",
        ),
        Framework(
            "Django under ASGI",
            django_side.asgi,
            (
                Limiter("LimitGate", django_side.limitgate_asgi, gate),
                Limiter("django-ratelimit", django_side.ratelimit_asgi, ratelimit, django_side.counting),
            ),
            is_slow=True,
        ),
        Framework(
            "Django under ASGI, async view",
            django_side.async_asgi,
            (Limiter("LimitGate", django_side.limitgate_async, gate),),
            is_slow=True,
        ),
    )


def limitgate_fastapi(url: str, quotas: Quotas) -> Any:
    """LimitGate in FastAPI."""
    app = fastapi()
    app.add_middleware(LimitGate, rules=[rule(quotas)], store=url or "memory://", on_error="closed", timeout=PATIENCE)
    return app


def limitgate_flask(url: str, quotas: Quotas) -> Any:
    """LimitGate as an extension of Flask."""
    from limitgate.flask import LimitGate as Extension

    app = flask()
    Extension(app, rules=[rule(quotas)], store=url or "memory://", on_error="closed", timeout=PATIENCE)
    return app


def slowapi(url: str, quotas: Quotas) -> Any:
    """As its documentation sets slowapi up in FastAPI."""
    from fastapi import FastAPI
    from slowapi import Limiter as Peer, _rate_limit_exceeded_handler
    from slowapi.errors import RateLimitExceeded
    from slowapi.util import get_remote_address

    limiter = Peer(key_func=get_remote_address, storage_uri=f"redis+{url}" if url else "memory://")
    app = FastAPI()
    app.state.limiter = limiter
    app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)

    @app.get(PATH, response_class=PlainTextResponse)
    @limiter.limit(";".join(f"{count}/{unit}" for unit, count in quotas.items()))  # type: ignore[untyped-decorator]
    async def hello(request: Request) -> str:  # noqa: ARG001 - slowapi looks for this name
        return "hello"

    return app


def added(server: RedisServer, concurrencies: Sequence[int], plan: Plan) -> dict[str, dict[int, Outcomes]]:
    """By framework and concurrency: the bare copy, called as the framework, and the limiters' by `on_redis` and `in_memory`."""
    from benchmarks import django_side

    with django_side.configured(server.url), _on_one_core():
        return {framework.name: _added(framework, server, concurrencies, plan) for framework in frameworks()}


def _added(framework: Framework, server: RedisServer, concurrencies: Sequence[int], plan: Plan) -> dict[int, Outcomes]:
    plan = replace(plan, requests=plan.requests // 2) if framework.is_slow else plan
    with Crowds() as crowd_of:
        door = crowd_of.wsgi if framework.door == "wsgi" else crowd_of.asgi
        crowds: dict[str, Crowd] = {framework.name: door(framework.bare())}
        broken: dict[str, Outcome] = {}
        for limiter, (store, url) in product(framework.limiters, ((on_redis, server.url), (in_memory, ""))):
            name = store(limiter.name)
            try:
                crowds[name] = limiter.crowd(door(limiter.build(url, README)), url)
            except Exception as error:  # noqa: BLE001 - whatever keeps it from being built is what is to be shown
                broken[name] = Failed(type(error).__name__)
        return {concurrency: {**broken, **alternate(crowds, concurrency, plan, server)} for concurrency in concurrencies}


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Keep this thread and those that it starts on one core, where the system can do that; Redis has the others."""
    if sys.platform != "linux":
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
