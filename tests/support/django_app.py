"""A Django project for tests. Settings are global to a process, so they are made here once; a test overrides what it is about.

``ROOT_URLCONF`` may be a tuple of patterns, so every test has URLs of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import django
import httpx
from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.db.backends.signals import connection_created
from django.dispatch import receiver
from django.http import HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path
from django.utils import translation

from limitgate import MemoryStore, Rule, limit
from tests.support.clock import Clock
from tests.support.doors import Reply, Wire, http_scope, wsgi_reply
from tests.support.guard import Guard

GATE = "limitgate.django.LimitGateMiddleware"
SESSIONS = "django.contrib.sessions.middleware.SessionMiddleware"
AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"
LOCALE = "django.middleware.locale.LocaleMiddleware"

_guard = Guard("limitgate-django-")
atexit.register(_guard.dismiss)

settings.configure(
    SECRET_KEY="for tests only, never anywhere else",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF="tests.support.django_app",
    INSTALLED_APPS=[
        "django.contrib.contenttypes",
        "django.contrib.auth",
        "django.contrib.sessions",
        "rest_framework",
        "limitgate.django",
    ],
    MIDDLEWARE=[GATE],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": _guard.folder / "db.sqlite3"}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    LANGUAGES=[("en", "English"), ("de", "German"), ("fr", "French")],
    LANGUAGE_CODE="en",
    LOGGING_CONFIG=None,
    PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
    REST_FRAMEWORK={"DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"]},
    TEMPLATES=[
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "OPTIONS": {"loaders": [("django.template.loaders.locmem.Loader", {"hello.html": "hello {{ name }}"})]},
        }
    ],
    USE_TZ=True,
)
django.setup()


@receiver(connection_created)
def _without_waiting(connection: Any, **_: Any) -> None:
    """Commits are not waited for until they are on the disk: the database is for one process, and gone afterwards."""
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA synchronous=OFF")
        cursor.execute("PRAGMA journal_mode=MEMORY")


from django.contrib.auth.models import AnonymousUser, User  # noqa: E402, F401 - they want the settings first
from django.contrib.sessions.models import Session  # noqa: E402, F401


def hello(request: Any) -> HttpResponse:
    return HttpResponse("hello")


# --- middleware for tests ---------------------------------------------------------------------------------------------


class SyncOnly:
    """Whatever stands before it is run in threads, even under ASGI."""

    sync_capable, async_capable = True, False

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> Any:
        return self.get_response(request)


class AsyncOnly:
    """Whatever stands before it is run on an event loop, even under WSGI."""

    sync_capable, async_capable = False, True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response
        markcoroutinefunction(self)

    async def __call__(self, request: Any) -> Any:
        return await self.get_response(request)


class Changing:
    """Does to each request what `changing` was told, and hands it on."""

    sync_capable = async_capable = True
    change: Callable[[Any], object] = bool

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: Any) -> Any:
        Changing.change(request)
        return self.get_response(request)


CHANGING = f"{__name__}.Changing"


# --- a project behind one door ----------------------------------------------------------------------------------------


class Way:
    """How a request comes to the gate: through which of Django's handlers, and in threads or on an event loop."""

    def __init__(self, handler: str, *forcing: str) -> None:
        self.handler = handler
        self.forcing = [f"{__name__}.{name}" for name in forcing]
        self.awaits = forcing == ("AsyncOnly",) or (handler == "asgi" and not forcing)

    @contextlib.contextmanager
    def project(
        self,
        *patterns: Any,
        rules: Any = (),
        before: tuple[str, ...] = (),
        behind: tuple[str, ...] = (),
        gates: int = 1,
        **options: Any,
    ) -> Iterator[Project]:
        """A project with these URLs, rules, and middleware before and behind the gate.

        Options are those of ``LIMITGATE``; in upper case, other settings.
        """
        others = {name: options.pop(name) for name in list(options) if name.isupper()}
        others.setdefault("ROOT_URLCONF", patterns)
        others.setdefault("MIDDLEWARE", [*before, *[GATE] * gates, *behind, *self.forcing])
        others.setdefault("LIMITGATE", {"rules": list(rules), "store": MemoryStore(Clock()), **options})
        try:
            with override_settings(**others):
                yield Project(self.handler)
        finally:
            translation.deactivate()  # a request leaves its language to the thread, which is that of all tests

    def handled(self, wrap: Callable[[Any], Any] = lambda app: app) -> Callable[..., int]:
        """Gives the status of a request to Django's own handler, made as a server makes it, below a mount point or not."""
        replied = self.replied(wrap)
        return lambda path, mount="": replied(path, mount).status

    def replied(self, wrap: Callable[[Any], Any] = lambda app: app) -> Callable[..., Reply]:
        """Gives the reply to such a request."""
        if self.handler == "wsgi":
            wsgi = wrap(get_wsgi_application())
            return lambda path, mount="": wsgi_reply(wsgi, path, SCRIPT_NAME=mount)
        asgi = wrap(get_asgi_application())
        return lambda path, mount="": asyncio.run(self._handled_by_asgi(asgi, mount + path, mount))

    async def _handled_by_asgi(self, app: Any, path: str, mount: str) -> Reply:
        wire = await Wire({"type": "http.request"}).call(app, http_scope(path, root_path=mount))
        start, *rest = wire.sent
        return Reply(start["status"], httpx.Headers(start["headers"]), b"".join(message.get("body", b"") for message in rest))


WAYS = {
    "wsgi": Way("wsgi"),
    "asgi": Way("asgi"),
    "wsgi on a loop": Way("wsgi", "AsyncOnly"),
    "asgi in threads": Way("asgi", "SyncOnly"),
}


class Project:
    """A Django project as Django's test clients see it."""

    def __init__(self, handler: str) -> None:
        self.client: Any = (AsyncClient if handler == "asgi" else Client)()
        self._handler = handler

    def ask(self, path: str = "/", method: str = "GET", **more: Any) -> Any:
        """A response, with whatever would be sent as its ``body``."""
        if self._handler == "asgi":
            return asyncio.run(self.aask(path, method, **more))
        response = self.client.generic(method, path, **more)
        response.body = b"".join(response.streaming_content) if response.streaming else response.content
        return response

    async def aask(self, path: str = "/", method: str = "GET", **more: Any) -> Any:
        """The same on a running event loop, under ASGI."""
        response = await self.client.generic(method, path, **more)
        if not response.streaming:
            response.body = response.content
        elif response.is_async:
            response.body = b"".join([chunk async for chunk in response.streaming_content])
        else:
            response.body = b"".join(response.streaming_content)
        return response

    def statuses(self, *paths: str, **more: Any) -> list[int]:
        return [self.ask(path, **more).status_code for path in paths]


def rate(response: Any) -> dict[str, str]:
    """The rate fields of a response; Django sends each once."""
    return {name.lower(): value for name, value in response.items() if "ratelimit" in name.lower()}


# --- served -----------------------------------------------------------------------------------------------------------

SERVED = {"RULES": [Rule("daily", "20/day", path="/daily", key=["header:x-who"])], "ON_ERROR": "closed", "TIMEOUT": 10}
"""``LIMITGATE`` on real servers; the store comes from ``LIMITGATE_STORE``."""


@limit("2/day", name="stream", key=["header:x-who"])
async def stream(request: Any) -> StreamingHttpResponse:
    async def words() -> AsyncIterator[str]:
        for word in ("one ", "two ", "three"):
            yield word

    return StreamingHttpResponse(words())


urlpatterns = [path("daily", hello), path("stream", stream)]


def asgi() -> Any:
    """The ASGI application, for ``uvicorn --factory``."""
    settings.LIMITGATE = SERVED
    return get_asgi_application()


def wsgi() -> Any:
    """The WSGI application."""
    with override_settings(LIMITGATE=SERVED):
        return get_wsgi_application()
