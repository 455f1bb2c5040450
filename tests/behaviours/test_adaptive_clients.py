"""Places of requests that wait for their clients: how slowly a body comes, or an answer is read, keeps nobody else out."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import flask
import pytest

from limitgate import Adaptive, LimitGate, LimitGateWSGI, Rule, testing
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter
from tests.support.doors import PATIENCE, Wire, asgi_reply, http_scope, wsgi_environ, wsgi_reply

DELAY_S = 0.02
RULE = Rule("all", adaptive=Adaptive(min=1, max=1, delay=DELAY_S))


pytestmark = pytest.mark.usefixtures("punctual_loops")


class Time:
    """What the places of a gate take for the time, in seconds."""

    def __init__(self, gated: Any) -> None:
        rules = gated.gate.rules.planner._every["default"]
        places = rules[0].places
        assert isinstance(places, ConcurrencyLimiter)
        self.now = 1000.0
        self.limit = places.limit
        places._clock = lambda: self.now


async def work(scope: Any, receive: Any, send: Any) -> None:
    """Read all of a body, and answer."""
    while scope["path"] != "/other" and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"do", "more_body": True})
    await send({"type": "http.response.body", "body": b"ne"})


async def settled() -> None:
    """Have whatever can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("pause_s", [0.004, 0.012, 0.019])
def test_a_body_that_comes_in_small_parts_keeps_its_place_no_longer_than_one_that_does_not_come(pause_s: float) -> None:
    gated = LimitGate(work, rules=[RULE])
    time = Time(gated)

    async def main() -> None:
        parts: asyncio.Queue[Any] = asyncio.Queue()
        wire = Wire()
        slow = asyncio.create_task(gated(http_scope(method="POST"), parts.get, wire.send))
        waited_s, statuses = 0.0, []
        for _ in range(20):
            await settled()
            time.now += pause_s
            waited_s += pause_s
            statuses.append(((await asgi_reply(gated, "/other")).status, waited_s))
            parts.put_nowait({"type": "http.request", "body": b"x", "more_body": True})
        assert {status for status, waited_s in statuses if waited_s < DELAY_S - 1e-9} <= {503}
        assert {status for status, waited_s in statuses if waited_s > DELAY_S} == {200}
        assert time.limit.in_flight == 0
        parts.put_nowait({"type": "http.request", "body": b"x"})
        async with asyncio.timeout(PATIENCE):
            await slow
        assert (wire.sent[0]["status"], time.limit.in_flight) == (200, 0)

    asyncio.run(main())


@pytest.mark.parametrize("held_up", ["http.response.start", "http.response.body"])
def test_a_client_that_does_not_read_has_no_place_meanwhile(held_up: str) -> None:
    """Servers hold up the first message, too, where answers before it were not read."""
    gated = LimitGate(work, rules=[RULE])
    time = Time(gated)

    async def main() -> None:
        reads = asyncio.Event()
        sent = []

        async def send(message: Any) -> None:
            sent.append(message["type"])
            if message["type"] == held_up:
                await reads.wait()

        slow = asyncio.create_task(gated(http_scope(), Wire({"type": "http.request", "body": b""}).receive, send))
        await settled()
        assert sent[-1] == held_up
        assert (await asgi_reply(gated, "/other")).status == 503
        time.now += DELAY_S
        assert (await asgi_reply(gated, "/other")).status == 200
        reads.set()
        async with asyncio.timeout(PATIENCE):
            await slow
        assert time.limit.in_flight == 0

    asyncio.run(main())


def test_a_client_that_is_slow_both_to_send_and_to_read_has_no_more_time() -> None:
    gated = LimitGate(work, rules=[RULE])
    time = Time(gated)

    async def main() -> None:
        go: asyncio.Queue[Any] = asyncio.Queue()

        async def receive() -> Any:
            await go.get()
            return {"type": "http.request", "body": b"x"}

        async def send(message: Any) -> None:
            await go.get()

        slow = asyncio.create_task(gated(http_scope(method="POST"), receive, send))
        for _ in range(2):  # the body, and the beginning of the answer
            await settled()
            assert (await asgi_reply(gated, "/other")).status == 503
            time.now += 0.6 * DELAY_S
            go.put_nowait(None)
        await settled()
        assert (await asgi_reply(gated, "/other")).status == 200
        for _ in range(2):
            go.put_nowait(None)
        async with asyncio.timeout(PATIENCE):
            await slow

    asyncio.run(main())


def test_the_time_for_which_a_client_was_waited_for_is_not_that_of_the_work() -> None:
    gated = LimitGate(work, rules=[RULE])
    time = Time(gated)

    async def main() -> None:
        parts: asyncio.Queue[Any] = asyncio.Queue()
        slow = asyncio.create_task(gated(http_scope(method="POST"), parts.get, Wire().send))
        await settled()
        time.now += 5
        parts.put_nowait({"type": "http.request", "body": b"x"})
        async with asyncio.timeout(PATIENCE):
            await slow

    asyncio.run(main())
    assert time.limit.base_s_by_class == {("POST", None): 0.0}


def test_whoever_waits_for_a_place_is_called_when_another_waits_for_its_client() -> None:
    """In time, though nothing else happens."""
    gated = LimitGate(work, rules=[Rule("all", adaptive=RULE.adaptive, max_delay=60)])

    async def main() -> None:
        slow = asyncio.create_task(gated(http_scope(method="POST"), asyncio.Queue().get, Wire().send))
        await settled()
        async with asyncio.timeout(PATIENCE):
            assert (await asgi_reply(gated, "/other")).status == 200
        slow.cancel()
        await asyncio.wait([slow])

    asyncio.run(main())


def test_a_request_that_waits_for_its_client_while_everything_is_forgotten_takes_nothing_from_others() -> None:
    gated = LimitGate(work, rules=[RULE])

    async def main() -> None:
        parts: asyncio.Queue[Any] = asyncio.Queue()
        slow = asyncio.create_task(gated(http_scope(method="POST"), parts.get, Wire().send))
        await settled()
        testing.reset()
        time = Time(gated)
        for _ in range(3):
            parts.put_nowait({"type": "http.request", "body": b"x", "more_body": True})
            await settled()
            time.now += 1
        assert (await asgi_reply(gated, "/other")).status == 200
        assert time.limit.in_flight == 0
        parts.put_nowait({"type": "http.request", "body": b"x"})
        async with asyncio.timeout(PATIENCE):
            await slow
        assert time.limit.in_flight == 0

    asyncio.run(main())


class Stream(io.RawIOBase):
    """A body of which each part comes when it is asked for and something has happened."""

    def __init__(self, before: Callable[[], object]) -> None:
        super().__init__()
        self._before = before
        self._left = 20

    def read(self, size: int = -1) -> bytes:
        self._before()
        self._left -= 1
        return b"x" if self._left >= 0 else b""

    readline = read  # type: ignore[assignment]

    def readlines(self, hint: int | None = -1) -> list[bytes]:  # type: ignore[override]
        return list(iter(self.read, b""))

    def readinto(self, buffer: Any) -> int:
        part = self.read()
        buffer[: len(part)] = part
        return len(part)


READS: dict[str, Callable[[Any], object]] = {
    "read": lambda stream: list(iter(lambda: stream.read(1), b"")),
    "readline": lambda stream: list(iter(stream.readline, b"")),
    "readlines": lambda stream: stream.readlines(),
    "readinto": lambda stream: list(iter(lambda: stream.readinto(bytearray(1)), 0)),
    "iteration": list,
}


@pytest.mark.parametrize("length", ["20", None], ids=["a length", "chunked"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_body_that_comes_slowly_has_no_place_under_wsgi(read: Callable[[Any], object], length: str | None) -> None:
    """Once all of it is there the work has a place again, if there is room."""
    at_work = []

    def app(environ: Any, start_response: Any) -> Any:
        if environ["PATH_INFO"] != "/other":
            read(environ["wsgi.input"])
            at_work.append(time.limit.in_flight)
        start_response("200 OK", [])
        return [b"done"]

    gated = LimitGateWSGI(app, rules=[RULE])
    time = Time(gated)
    statuses: list[int] = []

    def part() -> None:
        time.now += 0.004
        environ = wsgi_environ("/other")
        gated(environ, lambda status, *_: statuses.append(int(status[:3])))

    environ = wsgi_environ(method="POST", **{"wsgi.input": Stream(part)})
    environ |= {"HTTP_TRANSFER_ENCODING": "chunked"} if length is None else {"CONTENT_LENGTH": length}
    assert gated(environ, lambda *_: None) == [b"done"]
    assert statuses[:4] == [503] * 4
    assert set(statuses[5:]) == {200}
    assert at_work == [1]
    assert time.limit.in_flight == 0


def test_a_body_that_comes_slowly_has_no_place_under_flask() -> None:
    """Which reads a body by way of a stream of its own."""
    app = flask.Flask(__name__)

    @app.post("/")
    def view() -> str:
        return str(len(flask.request.get_data()))

    @app.get("/other")
    def other() -> str:
        return "done"

    gated = LimitGateWSGI(app.wsgi_app, rules=[RULE])
    time = Time(gated)
    statuses = []

    def part() -> None:
        time.now += 0.004
        statuses.append(wsgi_reply(gated, "/other").status)

    environ = wsgi_environ(method="POST", **{"wsgi.input": Stream(part), "CONTENT_LENGTH": "20"})
    assert b"".join(gated(environ, lambda *_: None)) == b"20"
    assert statuses[0] == 503
    assert set(statuses[6:]) == {200}


@pytest.mark.parametrize("way", ["chunks", "write"])
def test_a_client_that_does_not_read_has_no_place_under_wsgi(way: str) -> None:
    def app(environ: Any, start_response: Any) -> Iterator[bytes] | list[bytes]:
        write = start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "4")])
        if environ["PATH_INFO"] == "/other":
            return [b"done"]
        if way == "write":
            write(b"do")
            write(b"ne")
            return []
        return iter([b"do", b"ne"])

    gated = LimitGateWSGI(app, rules=[RULE])
    time = Time(gated)
    statuses = []

    def sends(_: bytes = b"") -> None:
        statuses.append(wsgi_reply(gated, "/other").status)
        time.now += DELAY_S
        statuses.append(wsgi_reply(gated, "/other").status)

    chunks = gated(wsgi_environ(), lambda *_: sends)
    for _ in chunks:
        sends()
    assert statuses == [503, 200, 200, 200]
    assert time.limit.in_flight == 0


def test_a_thread_that_waits_for_a_place_is_called_when_another_waits_for_its_client() -> None:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        if environ["PATH_INFO"] != "/other":
            environ["wsgi.input"].read()
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"done"]

    gated = LimitGateWSGI(app, rules=[Rule("all", adaptive=RULE.adaptive, max_delay=60)])
    comes, reads = threading.Event(), threading.Event()

    def part() -> None:
        reads.set()
        comes.wait(PATIENCE)

    environ = wsgi_environ(method="POST", **{"wsgi.input": Stream(part), "CONTENT_LENGTH": "1"})
    slow = threading.Thread(target=gated, args=(environ, lambda *_: None))
    slow.start()
    try:
        assert reads.wait(PATIENCE)
        assert wsgi_reply(gated, "/other").status == 200
    finally:
        comes.set()
        slow.join(PATIENCE)
