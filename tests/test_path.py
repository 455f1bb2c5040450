"""How far a request goes through the package: the calls that it makes, the files that it visits, and how often it comes back.

The budgets are what the way takes today. A change that needs more raises them in the same commit and says why.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from operator import gt
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import pytest

import limitgate
from limitgate import Caller, LimitGate, LimitGateWSGI, Rule
from tests.support.redis_server import RedisServer

PACKAGE = str(Path(limitgate.__file__).parent)
WARM = 1100
"""Requests after which nothing is looked for any more that only the first ones are checked for."""
TRACED = 5
"""Requests of which the shortest way counts.

A window that ends, or a call while an earlier one is under way, takes more now and then.
"""
WIDE = ("900000/second", "1000000/minute")


class Way(NamedTuple):
    """Figures of one request, or what they may be at most."""

    calls: int
    files: int
    returns: int
    """Number of times that it comes back to a file which it had left."""


class Tracer:
    """Notes the files of the package's functions while it is entered, in the order of their calls."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.files.append(frame.f_code.co_filename)

    def way(self) -> Way:
        """The figures of what was traced."""
        entered = [file for file, before in zip(self.files, [None, *self.files]) if file != before]
        return Way(len(self.files), len(set(entered)), len(entered) - len(set(entered)))


async def receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b""}


statuses: list[int] = []


async def send(message: dict[str, Any]) -> None:
    if message["type"] == "http.response.start":
        statuses.append(message["status"])


def shortest(ways: list[tuple[int, Way]]) -> Way:
    """The shortest way, of refused requests if there are any: on a busy machine a limit may have room again in between."""
    highest = max([status for status, _ in ways])
    return min([way for status, way in ways if status == highest])


async def asgi_app(_: object, __: object, send: Callable[..., Any]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"yes"})


def wsgi_app(_: object, start_response: Callable[..., Any]) -> list[bytes]:
    start_response("200 OK", [])
    return [b"yes"]


def way_of_asgi(warm: int, **options: Any) -> Way:
    gate = LimitGate(asgi_app, **options)

    async def ask() -> None:
        scope = {"type": "http", "method": "GET", "path": "/api/hello", "root_path": "", "query_string": b""}
        scope |= {"headers": [(b"x-id", b"ann")], "client": ("203.0.113.9", 1), "server": ("here", 80), "scheme": "http"}
        await gate(scope, receive, send)

    async def trace() -> Way:
        for _ in range(warm):
            await ask()
        ways = []
        for _ in range(TRACED if warm else 1):
            with Tracer() as tracer:
                await ask()
            ways.append((statuses[-1], tracer.way()))
        return shortest(ways)

    return asyncio.run(trace())


def way_of_wsgi(warm: int, **options: Any) -> Way:
    gate = LimitGateWSGI(wsgi_app, **options)

    def ask() -> None:
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/api/hello", "REMOTE_ADDR": "203.0.113.9", "HTTP_X_ID": "ann"}
        body: Any = gate(environ | {"wsgi.input": BytesIO()}, lambda status, *_: statuses.append(int(status[:3])))
        list(body)
        getattr(body, "close", bool)()

    for _ in range(warm):
        ask()
    ways = []
    for _ in range(TRACED if warm else 1):
        with Tracer() as tracer:
            ask()
        ways.append((statuses[-1], tracer.way()))
    return shortest(ways)


def rule(*limits: str, **options: Any) -> list[Rule]:
    return [Rule("rule", *(limits or WIDE), path="/api/**", **options)]


def narrow() -> list[Rule]:
    """Its first limit refuses at whatever speed requests come. The way is longer by one call if the second does."""
    return [Rule("narrow", "5/hour", "100/day", path="/api/**")]


CASES: dict[str, dict[str, Any]] = {
    "admitted": {"rules": rule()},
    "refused": {"rules": narrow()},
    "identify": {"rules": rule(), "identify": lambda _: Caller("ann")},
    "header in the key": {"rules": rule(key=["header:x-id"])},
    "condition": {"rules": rule(when=lambda _: True)},
    "draft-11": {"rules": rule(), "headers": ("draft-11",)},
    "three rules": {"rules": [Rule(f"rule{number}", *WIDE, path="/api/**") for number in range(3)]},
    "outcome": {"rules": rule(charge_if={"status": [401]})},
    "slots": {"rules": rule("20 at once")},
    "adaptive": {"rules": rule(adaptive=True)},
    "in a fleet": {"rules": rule(), "fleet": True},
    "refused in a fleet": {"rules": narrow(), "fleet": True},
}
BUDGETS = {
    "asgi admitted": Way(17, 10, 3),
    "wsgi admitted": Way(19, 11, 5),
    "asgi refused": Way(32, 16, 7),
    "wsgi refused": Way(29, 15, 5),
    "asgi identify": Way(22, 13, 4),
    "wsgi identify": Way(24, 14, 6),
    "asgi header in the key": Way(33, 14, 5),
    "wsgi header in the key": Way(34, 15, 7),
    "asgi condition": Way(21, 12, 3),
    "wsgi condition": Way(23, 13, 5),
    "asgi draft-11": Way(25, 12, 4),
    "wsgi draft-11": Way(24, 13, 6),
    "asgi three rules": Way(18, 10, 3),
    "wsgi three rules": Way(20, 11, 5),
    "asgi outcome": Way(47, 17, 17),
    "wsgi outcome": Way(40, 16, 11),
    "asgi slots": Way(71, 20, 30),
    "wsgi slots": Way(83, 19, 31),
    "asgi adaptive": Way(32, 18, 10),
    "wsgi adaptive": Way(36, 18, 13),
    "asgi in a fleet": Way(18, 10, 3),
    "wsgi in a fleet": Way(20, 11, 6),
    "asgi refused in a fleet": Way(32, 16, 7),
    "wsgi refused in a fleet": Way(29, 15, 5),
    "redis asgi admitted": Way(45, 19, 19),
    "redis asgi refused": Way(41, 18, 11),
    "redis asgi header in the key": Way(61, 23, 21),
    "redis asgi outcome": Way(126, 27, 64),
    "redis asgi slots": Way(148, 30, 79),
    "first asgi admitted": Way(154, 23, 35),
    "first wsgi admitted": Way(152, 24, 37),
    "first asgi in a fleet": Way(170, 26, 48),
    "first wsgi in a fleet": Way(173, 28, 50),
}


def measured(doors: str, *cases: str, warm: int = WARM, store: str | None = None) -> dict[str, Way]:
    """The ways of some cases by these doors, in a process of its own: what other tests have loaded makes them longer."""
    given = {"doors": doors.split(), "cases": cases, "warm": warm, "store": store}
    program = f"import tests.test_path as here; here.measure(**{given!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {name: Way(*way) for name, way in json.loads(done.stdout).items()}


def measure(doors: list[str], cases: tuple[str, ...], warm: int, store: str | None) -> None:
    """Print the shortest ways."""
    ways = {"asgi": way_of_asgi, "wsgi": way_of_wsgi}
    under = {} if store is None else {"store": store, "timeout": 5.0}
    found = {f"{door} {case}": ways[door](warm, **CASES[case], **under) for door in doors for case in cases}
    sys.stdout.write(json.dumps(found))


def longer(prefix: str, found: dict[str, Way]) -> dict[str, tuple[Way, Way]]:
    """The ways that are longer than their budget, each with that."""
    budgets = {name: BUDGETS[f"{prefix}{name}"] for name in found}
    return {name: (way, budgets[name]) for name, way in found.items() if any(map(gt, way, budgets[name]))}


def test_the_way_of_a_request_stays_short_in_memory() -> None:
    assert not longer("", measured("asgi wsgi", *CASES))


def test_the_way_of_a_request_stays_short_on_redis(redis_server: RedisServer) -> None:
    assert not longer(
        "redis ", measured("asgi", "admitted", "refused", "header in the key", "outcome", "slots", store=redis_server.url)
    )


@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_the_first_request_of_a_process_takes_a_bounded_way(door: str) -> None:
    assert not longer("first ", measured(door, "admitted", "in a fleet", warm=0))
