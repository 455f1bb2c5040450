"""The doors on asyncio, as ``tests.faults.overload.asgi:app``."""

from __future__ import annotations

from typing import Any

import fastapi
from fastapi.responses import Response

from limitgate import LimitGate
from limitgate.fastapi import RateLimit
from tests.faults.overload import apps, trouble


def gate() -> Any:
    """Rules alone, in front of a bare application."""
    store = apps.asgi_store()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            body = apps.answer(scope["path"], scope["limitgate"], store)
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    return LimitGate(app, rules=[apps.OF_LOGIN, apps.OF_ALL, *apps.FREE], store=store)


def dependency() -> Any:
    """A dependency of FastAPI limits logins, a rule everything."""
    store, app = apps.asgi_store(), fastapi.FastAPI()

    async def hello(request: fastapi.Request) -> Response:
        body = apps.answer(request.url.path, request.scope["limitgate"], store)
        return Response(body, media_type="application/json")

    login = fastapi.Depends(RateLimit(apps.LOGIN, name="login", key=["ip"]))
    app.add_api_route("/login", hello, dependencies=[login])
    for path in ("/hello", "/block", "/state", "/trouble/on", "/trouble/off"):
        app.add_api_route(path, hello)
    app.add_middleware(LimitGate, rules=[apps.OF_ALL, *apps.FREE], store=store)
    return app


def rest() -> Any:
    """A throttle of REST framework limits logins, a rule everything; Django runs it on asyncio."""
    from tests.faults.overload.rest import asgi

    return asgi()


apps.log_to_stderr()
trouble.begin()
app = {"gate": gate, "dependency": dependency, "throttle": rest}[apps.DOOR]()
