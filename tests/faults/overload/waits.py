"""How long somebody waits who is not to wait: for a Redis that stands still, and for names that are looked up slowly.

What the machine takes is measured by a thread that sleeps, and not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Self
from unittest import mock
from uuid import uuid4

import fastapi
import flask
from django.core.wsgi import get_wsgi_application

from limitgate import (
    AsyncLimiter,
    AsyncRedisStore,
    Configured,
    Limiter,
    LimitGate,
    LimitGateWSGI,
    RedisStore,
    Rule,
    StoreError,
    limit,
)
from limitgate.fastapi import RateLimit
from tests.faults.link import Late, Link
from tests.support.doors import Wire, http_scope, wsgi_reply
from tests.support.redis_server import RedisServer

TIMEOUT = 0.1
"""The default, in seconds."""
RESPONSIVE = 0.02
"""Seconds that a request may take besides, of a loop that responds."""
SLACK = 0.05
"""Seconds that this machine may make of it."""
TICK = 0.005
FAILING, OPENED, LATELY = 12, 10, 3
"""Requests one after the other until the store is taken for broken, at most; after that; and where replies are late."""
LATE = 0.9
"""Part of the timeout after which replies come that are late, each in time if it were the only one."""
ORDERS = Configured("orders")
BY_OUTCOME = [Rule("failed", "1000/day", key=["ip"], charge_if={"status": [401]}), Rule("flying", key=["ip"], concurrency=1000)]

Ask = Callable[[], object]
AskAsync = Callable[[], Any]


class Machine:
    """``with Machine() as machine``; ``machine.late`` is by how much a thread has overslept so far, in seconds."""

    def __init__(self) -> None:
        self.late = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            time.sleep(TICK)
            self.late += time.monotonic() - began - TICK


@dataclass
class Wait:
    """Who waited for how long."""

    situation: str
    door: str
    timeout: float
    spent: list[float] = field(default_factory=list)
    """Seconds of each request while the store was not yet taken for broken."""
    opened: list[float] = field(default_factory=list)
    """Seconds of each request after that."""
    opens: bool = True
    """Whether the store has to be taken for broken."""

    def complaints(self, slack: float = SLACK) -> list[str]:
        """What was not as it has to be, on a machine that makes ``slack`` seconds of it."""
        found = []
        if max(self.spent) > self.timeout + RESPONSIVE + slack:
            found.append(f"waited {max(self.spent):.3f} s, timeout {self.timeout}")
        if self.opens and not self.opened:
            found.append("a Redis that stands still was not taken for broken")
        if max(self.opened, default=0.0) > RESPONSIVE + slack:
            found.append(f"waited {max(self.opened):.3f} s for a store that was taken for broken")
        return found

    def row(self) -> str:
        """The line of a table."""
        cells = [self.situation, self.door, f"{1000 * self.timeout:.0f}", f"{1000 * max(self.spent):.0f}"]
        cells += [f"{1000 * max(self.opened):.0f}" if self.opened else "", "; ".join(self.complaints())]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| situation | door | may wait ms | longest wait ms | after opening ms | not as it has to be |\n|---|---|---|---|---|---|\n"
)


# --- under threads ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def gate(store: RedisStore, timeout: float) -> Iterator[Ask]:
    """One rule."""
    app = LimitGateWSGI(_hello, rules=[Rule("all", "1000/day", key=["ip"])], store=store, timeout=timeout)
    yield lambda: wsgi_reply(app)


@contextlib.contextmanager
def decorator(store: RedisStore, timeout: float) -> Iterator[Ask]:
    """A rule, and a decorated view of Flask's."""
    app = flask.Flask(__name__)
    app.add_url_rule("/", "hello", limit("1000/day", key=["ip"])(lambda: "hello"))
    app.wsgi_app = LimitGateWSGI(app.wsgi_app, rules=[Rule("all", "1000/day", key=["ip"])], store=store, timeout=timeout)
    yield lambda: wsgi_reply(app)


@contextlib.contextmanager
def throttle(store: RedisStore, timeout: float) -> Iterator[Ask]:
    """A rule, and then a throttle of REST framework."""
    from tests.faults.overload import rest

    with mock.patch.dict("os.environ", LIMITGATE_TIMEOUT=str(timeout)), rest.project(store):
        app = get_wsgi_application()
        yield lambda: wsgi_reply(app, "/login")


@contextlib.contextmanager
def limiter(store: RedisStore, timeout: float) -> Iterator[Ask]:
    """A limit that is kept in the store, which has to be asked for it first."""
    Limiter(store, timeout=5).configure("orders", "1000/day")

    def ask() -> None:
        with contextlib.suppress(StoreError):
            Limiter(store, timeout=timeout).hit(uuid4().hex, ORDERS)

    yield ask


@contextlib.contextmanager
def outcome(store: RedisStore, timeout: float) -> Iterator[Ask]:
    """A limit that is charged by the outcome, which gives it back, and one of requests in flight."""
    app = LimitGateWSGI(_hello, rules=BY_OUTCOME, store=store, timeout=timeout)
    yield lambda: wsgi_reply(app)


def _hello(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


Asker = Callable[[RedisStore, float], AbstractContextManager[Ask]]
UNDER_THREADS: Mapping[str, Asker] = {
    "wsgi gate": gate,
    "flask decorator": decorator,
    "REST throttle": throttle,
    "wsgi gate, by outcome": outcome,
    "Limiter.hit(Configured)": limiter,
}


def frozen(url: str, redis: RedisServer, name: str, timeout: float = TIMEOUT, *, warm: bool = True, at_once: int = 1) -> Wait:
    """Redis stands still; threads ask, one after the other or several at once."""
    found = Wait(f"Redis frozen, {'warm' if warm else 'cold'}, {at_once} at once", name, timeout)
    with contextlib.closing(RedisStore(url)) as store, Machine() as machine, UNDER_THREADS[name](store, timeout) as ask:
        if warm:
            ask()
        with redis.frozen(), ThreadPoolExecutor(at_once) as threads:
            while store.outages == 0 and len(found.spent) < FAILING * at_once:
                found.spent += threads.map(lambda _: _seconds(ask, machine), range(at_once))
            if store.outages:
                found.opened += [_seconds(ask, machine) for _ in range(OPENED)]
    return found


def late(redis: RedisServer, name: str, timeout: float = TIMEOUT) -> Wait:
    """Each reply comes so late that a request has no time for a second one."""
    found = Wait(f"replies {1000 * LATE * timeout:.0f} ms late", name, timeout, opens=False)
    with (
        Link(redis.port) as link,
        contextlib.closing(RedisStore(f"redis://127.0.0.1:{link.port}/0")) as store,
        Machine() as machine,
        UNDER_THREADS[name](store, timeout) as ask,
    ):
        ask()
        link.manner = Late(LATE * timeout)
        found.spent += [_seconds(ask, machine) for _ in range(LATELY)]
    return found


def _seconds(ask: Ask, machine: Machine) -> float:
    """Seconds that it takes to ask, without those that the machine has taken."""
    late, began = machine.late, time.monotonic()
    ask()
    return time.monotonic() - began - (machine.late - late)


# --- on asyncio -------------------------------------------------------------------------------------------------------


def _agate(store: AsyncRedisStore, timeout: float) -> AskAsync:
    """One rule."""
    app = LimitGate(_ahello, rules=[Rule("all", "1000/day", key=["ip"])], store=store, timeout=timeout)
    return lambda: _areply(app)


def _outcome(store: AsyncRedisStore, timeout: float) -> AskAsync:
    """A limit that is charged by the outcome, which gives it back, and one of requests in flight."""
    app = LimitGate(_ahello, rules=BY_OUTCOME, store=store, timeout=timeout)
    return lambda: _areply(app)


def _dependencies(store: AsyncRedisStore, timeout: float) -> AskAsync:
    """A rule, and then two dependencies of FastAPI, which are charged one after the other."""
    app = fastapi.FastAPI()
    limits = [RateLimit("1000/day", name=f"limit{number}", key=["ip"]) for number in range(2)]

    async def hello() -> str:
        return "hello"

    app.add_api_route("/", hello, dependencies=[fastapi.Depends(each) for each in limits])
    app.add_middleware(LimitGate, rules=[Rule("all", "1000/day", key=["ip"])], store=store, timeout=timeout)
    return lambda: _areply(app)


def _alimiter(store: AsyncRedisStore, timeout: float) -> AskAsync:
    """A limit that is kept in the store, which has to be asked for it first."""

    async def ask() -> None:
        with contextlib.suppress(StoreError):
            await AsyncLimiter(store, timeout=timeout).hit(uuid4().hex, ORDERS)

    return ask


async def _ahello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def _areply(app: Any) -> None:
    await Wire({"type": "http.request"}).call(app, http_scope())


ON_ASYNCIO: Mapping[str, Callable[[AsyncRedisStore, float], AskAsync]] = {
    "asgi gate": _agate,
    "asgi gate, by outcome": _outcome,
    "FastAPI dependencies": _dependencies,
    "AsyncLimiter.hit(Configured)": _alimiter,
}


async def afrozen(
    url: str, redis: RedisServer, name: str, timeout: float = TIMEOUT, *, warm: bool = True, at_once: int = 1
) -> Wait:
    """Redis stands still; tasks ask, one after the other or several at once."""
    found = Wait(f"Redis frozen, {'warm' if warm else 'cold'}, {at_once} at once", name, timeout)
    store = AsyncRedisStore(url)
    await AsyncLimiter(AsyncRedisStore(url), timeout=5).configure("orders", "1000/day")
    ask = ON_ASYNCIO[name](store, timeout)
    with Machine() as machine:
        if warm:
            await ask()
        with redis.frozen():
            while store.outages == 0 and len(found.spent) < FAILING * at_once:
                found.spent += await asyncio.gather(*[_aseconds(ask, machine) for _ in range(at_once)])
            if store.outages:
                found.opened += [await _aseconds(ask, machine) for _ in range(OPENED)]
        await store.aclose()
    return found


async def alate(redis: RedisServer, name: str, timeout: float = TIMEOUT) -> Wait:
    """Each reply comes so late that a request has no time for a second one."""
    found = Wait(f"replies {1000 * LATE * timeout:.0f} ms late", name, timeout, opens=False)
    with Link(redis.port) as link, Machine() as machine:
        store = AsyncRedisStore(f"redis://127.0.0.1:{link.port}/0")
        await AsyncLimiter(store, timeout=5).configure("orders", "1000/day")
        ask = ON_ASYNCIO[name](store, timeout)
        await ask()
        link.manner = Late(LATE * timeout)
        found.spent += [await _aseconds(ask, machine) for _ in range(LATELY)]
        await store.aclose()
    return found


async def _aseconds(ask: AskAsync, machine: Machine) -> float:
    """Seconds that it takes to ask, without those that the machine has taken."""
    late, began = machine.late, time.monotonic()
    await ask()
    return time.monotonic() - began - (machine.late - late)


# --- names ------------------------------------------------------------------------------------------------------------


async def slow_names(lookup: float, asking: float, workers: int | None = None) -> Wait:
    """Seconds that the application waits for a thread of its own, while names are looked up slowly.

    A look-up takes ``lookup`` seconds; requests come for ``asking`` seconds before. ``workers`` are the threads that the
    application has for itself, as many as asyncio has by default if not given.
    """
    found = Wait(f"a look-up takes {lookup:.0f} s, {workers or 'all'} threads", "asyncio.to_thread", TIMEOUT, opens=False)
    if workers:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(workers))
    over, real = threading.Event(), socket.getaddrinfo

    def look_up(*args: Any, **options: Any) -> Any:
        over.wait(lookup)
        return real("127.0.0.1", *args[1:], **options)

    store = AsyncRedisStore("redis://store.test:1/0")
    with mock.patch("socket.getaddrinfo", look_up), Machine() as machine:
        end = time.monotonic() + asking
        while not found.spent or time.monotonic() < end:
            found.spent = [await _aseconds(_aflimiter(store), machine)]
            await asyncio.sleep(TICK * 10)
        found.spent.append(await _aseconds(lambda: asyncio.to_thread(int), machine))
        over.set()
        await store.aclose()
    return found


def _aflimiter(store: AsyncRedisStore) -> AskAsync:
    """A limit as it is."""

    async def ask() -> None:
        with contextlib.suppress(StoreError):
            await AsyncLimiter(store, timeout=TIMEOUT).hit("somebody", "1000/day")

    return ask
