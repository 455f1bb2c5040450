"""`Page` for ASGI. One task per event loop reads for all viewers, and ends streams with the server."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from contextvars import Context
from inspect import isawaitable
from typing import Any, cast
from weakref import WeakKeyDictionary

from limitgate.errors import called_as
from limitgate.gate.flow import arun
from limitgate.http.request import ASGIRequest, Scope
from limitgate.internal_errors import logged_errors
from limitgate.limits.limit import Duration
from limitgate.messages.text import Names
from limitgate.page.actions import ACTIONS
from limitgate.page.site import MOST_BODY, NOT_ADMITTED, STREAM, Answer, Guard, Site, error
from limitgate.process.clock import monotonic
from limitgate.stores import open_store

STREAM_S = 20.0
"""Seconds until a stream ends. The browser then reconnects."""
PERIOD_S = 2.0
SLOWEST_S = 10.0
SHARE = 0.015
"""Share of a core that reading may take; large fleets are read less often."""
LOOK_S = 0.5
"""Seconds between checks whether the server is stopping."""
MOST_STREAMS = 250
"""Further viewers poll."""


class Page:
    """The live page, an ASGI application: ``app.mount("/limits", Page(store, guard=staff_only))``.

    ``store`` is the service's, or its URL. ``guard`` takes a `limitgate.Request` and returns the viewer's name, or None for a
    403; it may be async. ``names`` shows clients ``masked``, in ``full``, or ``off``. With ``actions``, the page can ban,
    pardon and reset clients; the journal records the viewer's name. ``rules``, ``key_prefix`` and ``secret`` are by default
    those of the `LimitGate` around the page, or ``LIMITGATE_*``. ``timeout`` is the longest wait for a store call:
    seconds above 0, at most 60, or text such as ``2s``. Raises `ConfigError` for invalid options.
    """

    @called_as("Page(store, guard=...): options have names")
    def __init__(
        self,
        store: Any,
        *,
        guard: Guard | None = None,
        names: Names = "masked",
        actions: bool = False,
        rules: Any = None,
        key_prefix: str | None = None,
        secret: str | None = None,
        timeout: Duration = 2.0,
    ) -> None:
        self._site = Site(
            store,
            guard,
            names,
            open_store=open_store,
            streams=True,
            actions=actions,
            rules=rules,
            key_prefix=key_prefix,
            secret=secret,
            timeout=timeout,
        )
        self._watchers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watcher] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer a request. Lifespan events close a store that was opened from a URL."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        request = ASGIRequest(scope)
        route = self._site.prepare(request)
        found = await self._answer(request, route, receive)
        if found is None:
            await self._stream(receive, send)
        else:
            headers = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in found.headers]
            await send({"type": "http.response.start", "status": found.status, "headers": headers})
            await send({"type": "http.response.body", "body": b"" if request.sent_method == "HEAD" else found.body})

    async def _answer(self, request: ASGIRequest, route: str, receive: Any) -> Answer | None:
        site = self._site
        given = site.guard(request)
        who = site.named(await given if isawaitable(given) else given)
        if who is None:
            return error(403, NOT_ADMITTED)
        if not route:
            # The browser asks for the figures as soon as it has the document.
            self._watcher.prepare()
        found = site.at_once(request, route, who)
        if found is not None:
            return found
        if route == "figures":
            return site.figures(await self._watcher.read(), request)
        if route == "events":
            stream = None if self._watcher.has_room else error(503, "there are too many viewers")
            return Answer(200, STREAM, b"") if request.sent_method == "HEAD" else stream
        body = await _body(receive) if route in ACTIONS else b""
        if body is None:
            return error(413, f"the body has more than {MOST_BODY} bytes, expected fewer")
        read = await self._watcher.read() if route in ACTIONS else {}
        found = await arun(site.store, site.answering(request, route, who, body, read))
        if route in ACTIONS:
            self._watcher.hurry()
        return found

    @property
    def _watcher(self) -> _Watcher:
        loop = asyncio.get_running_loop()
        found = self._watchers.get(loop)
        if found is None:
            found = self._watchers[loop] = _Watcher(self._site)
        return found

    async def _stream(self, receive: Any, send: Any) -> None:
        watcher, deadline = self._watcher, monotonic() + STREAM_S
        headers = [(name.lower().encode(), value.encode()) for name, value in STREAM]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        leaving = asyncio.ensure_future(_leave(receive))
        watcher.enter()
        try:
            await send({"type": "http.response.body", "body": b"retry: 1000\n\n", "more_body": True})
            seen = 0
            while not leaving.done() and not watcher.is_over and (left := deadline - monotonic()) > 0:
                if watcher.version != seen:
                    seen = watcher.version
                    await send({"type": "http.response.body", "body": watcher.event, "more_body": True})
                else:
                    await asyncio.wait({leaving, watcher.turn}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not leaving.done():
                await send({"type": "http.response.body", "body": b""})
        finally:
            watcher.leave()
            leaving.cancel()

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._site.owns_store:
            with logged_errors():
                await self._site.store.aclose()
        await send({"type": "lifespan.shutdown.complete"})


class _Watcher:
    """Reads for all viewers of an event loop."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[Mapping[str, Any]] | None = None
        self._is_late = False
        self.version = 0
        self.event = b""
        self.is_over = False
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the next reading is there."""

    @property
    def has_room(self) -> bool:
        return self._viewers < MOST_STREAMS and not is_stopping()

    async def read(self) -> Mapping[str, Any]:
        return await self._site.reader.aread()

    def prepare(self) -> None:
        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.get_running_loop().create_task(self.read(), context=Context())

    def hurry(self) -> None:
        self._site.reader.expire()
        self._is_late = True

    def enter(self) -> None:
        self._viewers += 1
        if self._task is None or self._task.done():
            self.is_over = False
            self._task = asyncio.get_running_loop().create_task(self._watch(), context=Context())

    def leave(self) -> None:
        self._viewers -= 1

    async def _watch(self) -> None:
        while self._viewers:
            began = time.thread_time()
            reading = asyncio.ensure_future(self.read())
            while not reading.done():
                if self._has_ended():
                    reading.cancel()
                    return
                await asyncio.wait({reading}, timeout=LOOK_S)
            with logged_errors():
                self.event = b"data: " + self._site.on_screen(reading.result()) + b"\n\n"
                self.version += 1
            self._next_turn()
            self._is_late = False
            until = monotonic() + min(SLOWEST_S, max(PERIOD_S, (time.thread_time() - began) / SHARE))
            while monotonic() < until and not self._is_late:
                if self._has_ended():
                    return
                await asyncio.sleep(LOOK_S)

    def _has_ended(self) -> bool:
        """True if nobody watches, or if the server is stopping."""
        if self._viewers and is_stopping():
            self.is_over = True
            self._next_turn()
        return self.is_over or not self._viewers

    def _next_turn(self) -> None:
        turn, self.turn = self.turn, asyncio.get_running_loop().create_future()
        turn.set_result(None)


async def _leave(receive: Any) -> None:
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass


async def _body(receive: Any) -> bytes | None:
    body = b""
    while True:
        message = await receive()
        body += cast("bytes", message.get("body", b""))
        if len(body) > MOST_BODY:
            return None
        if not message.get("more_body"):
            return body


def is_stopping() -> bool:
    """True once uvicorn or gunicorn got a signal to stop.

    Servers inform applications only after all responses have ended. But their signal handler is a method of the object with
    the state. Other servers, and gunicorn's worker on uvloop, wait for the streams or time out.
    """
    return any(getattr(owner, "should_exit", False) is True or getattr(owner, "alive", True) is False for owner in _owners())


def _owners() -> Iterator[Any]:
    handlers: Any = None
    with suppress(RuntimeError):
        # Handlers set by ``add_signal_handler``.
        handlers = getattr(asyncio.get_running_loop(), "_signal_handlers", None)
    for number in (signal.SIGTERM, signal.SIGINT):
        yield getattr(signal.getsignal(number), "__self__", None)
        if handlers and number in handlers:
            yield getattr(getattr(handlers[number], "_callback", None), "__self__", None)
