"""How requests are sent: straight into an application, without a server, by a fixed number of senders at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from typing import Any

import uvloop

from benchmarks.contenders import PATH

CLIENTS = 1_000
"""Addresses that requests come from, in turn."""
CROWD = 100_000
"""As many where there are many."""
FEW_CLIENTS = 250
_THREADS = 32
"""As many as a crowd of threads may have at once."""

Tally = Counter[int | str]
"""How many requests ended how: by status, or by the name of the error that the application raised."""
Crowd = Callable[[Iterator[int], int], Tally]
"""Sends the requests of these numbers, as many at once as the second argument says."""
Visit = Callable[[int], dict[str, Any]]
"""The scope of the request with a number."""
Lane = Callable[[Iterator[int], Tally], Awaitable[None]]
"""Sends requests one after the other."""


class Crowds(ExitStack):
    """Makes crowds, each with an event loop or threads of its own: what one leaves running costs no other anything."""

    def asgi(self, app: Any, *, clients: int = CLIENTS, path: str = PATH, visit: Visit | None = None) -> Crowd:
        """A crowd of asyncio tasks in front of an ASGI application; ``visit`` makes requests of other kinds."""
        return self.tasks(_asking(app, visit or (lambda number: scope(path, address(number % clients)))))

    def tasks(self, lane: Lane) -> Crowd:
        """A crowd of asyncio tasks that each follow ``lane``."""
        runner = self.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))

        async def send_all(numbers: Iterator[int], concurrency: int) -> Tally:
            tally: Tally = Counter()
            await asyncio.gather(*[lane(numbers, tally) for _ in range(concurrency)])
            return tally

        return lambda numbers, concurrency: runner.run(send_all(numbers, concurrency))

    def wsgi(self, app: Any, *, clients: int = CLIENTS) -> Crowd:
        """A crowd of threads in front of a WSGI application."""
        threads = self.enter_context(ThreadPoolExecutor(_THREADS))
        lane = partial(_asking_wsgi, app, clients)

        def send_all(numbers: Iterator[int], concurrency: int) -> Tally:
            if concurrency == 1:
                return lane(numbers)
            return sum(threads.map(lane, [numbers] * concurrency), Counter[int | str]())

        return send_all


def _asking(app: Any, visit: Visit) -> Lane:

    async def lane(numbers: Iterator[int], tally: Tally) -> None:
        outcome: int | str = "no answer"
        is_read = False

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if is_read:  # nobody leaves before the answer; Django listens for that
                await asyncio.Future()
            is_read = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            nonlocal outcome
            if message["type"] == "http.response.start":
                outcome = message["status"]

        for number in numbers:
            outcome, is_read = "no answer", False
            try:
                await app(visit(number), receive, send)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is what is to be shown
                outcome = type(error).__name__
            tally[outcome] += 1

    return lane


def _asking_wsgi(app: Any, clients: int, numbers: Iterator[int]) -> Tally:
    tally: Tally = Counter()
    outcome: int | str = "no answer"

    def start_response(status: str, _: Any, __: Any = None) -> None:
        nonlocal outcome
        outcome = int(status[:3])

    for number in numbers:
        outcome = "no answer"
        try:
            chunks = app(_environ(address(number % clients)), start_response)
            list(chunks)
            if hasattr(chunks, "close"):
                chunks.close()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is to be shown
            outcome = type(error).__name__
        tally[outcome] += 1
    return tally


def address(number: int) -> str:
    """The address of one of 16 million clients."""
    return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"


def trouble(tally: Tally, expected: Container[int | str] = (200,)) -> str:
    """The commonest outcome that was not expected: an error's name, or a status. "" if there was none."""
    unexpected = Counter({outcome: count for outcome, count in tally.items() if outcome not in expected})
    return f"{unexpected.most_common(1)[0][0]}" if unexpected else ""


def scope(path: str, client: str, method: str = "GET", fields: Iterable[tuple[bytes, bytes]] = ()) -> dict[str, Any]:
    """An ASGI scope of a request, with these header fields besides the usual ones."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"localhost"),
            (b"user-agent", b"benchmark"),
            (b"accept", b"*/*"),
            (b"connection", b"keep-alive"),
            *fields,
        ],
        "client": (client, 50000),
        "server": ("127.0.0.1", 8000),
    }


def _environ(client: str) -> dict[str, Any]:
    return {
        "REQUEST_METHOD": "GET",
        "SCRIPT_NAME": "",
        "PATH_INFO": PATH,
        "QUERY_STRING": "",
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "8000",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": client,
        "HTTP_HOST": "localhost",
        "HTTP_USER_AGENT": "benchmark",
        "HTTP_ACCEPT": "*/*",
        "HTTP_CONNECTION": "keep-alive",
        "wsgi.input": BytesIO(),
        "wsgi.url_scheme": "http",
    }
