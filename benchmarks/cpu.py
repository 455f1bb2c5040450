"""CPU per request for all contenders, on ASGI and on WSGI, and for what they could at best be made of: one redis-py call.

The one call is made where a limiter makes its own, in front of the application: after a process has waited for Redis, all
that it does is slower than in a loop that makes nothing but calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from redis.asyncio import Redis

from benchmarks.contenders import BARE, EASY, LIMITGATE, PEERS, WSGI, flask
from benchmarks.drive import CLIENTS, Crowd, Crowds
from benchmarks.figures import Failed, Outcome, Outcomes
from benchmarks.redis_side import Command, overheard
from benchmarks.rounds import Plan, alternate
from tests.support.redis_server import RedisServer

NO_OP = "one evalsha of `return 1`"
CALLER = "Starlette"
"""The application that they are made in front of."""
SCRIPT = "one evalsha of LimitGate's script"


def asgi(server: RedisServer, concurrencies: Sequence[int], plan: Plan) -> dict[int, Outcomes]:
    """All ASGI contenders on both stores, by concurrency; named as `on_redis` and `in_memory` say."""
    with Crowds() as crowd_of:
        broken: dict[str, Outcome] = {}
        crowds = {name: crowd_of.asgi(bare()) for name, bare in BARE.items()}
        for contender in (LIMITGATE, *PEERS):
            for name, url in ((on_redis(contender.name), server.url), (in_memory(contender.name), "")):
                try:
                    crowds[name] = crowd_of.asgi(contender.build(url, EASY))
                except Exception as error:  # noqa: BLE001 - whatever keeps it from being built is what is to be shown
                    broken[name] = Failed(type(error).__name__)
        crowds |= _calls(server, crowds[on_redis(LIMITGATE.name)], crowd_of)
        return {concurrency: {**broken, **alternate(crowds, concurrency, plan, server)} for concurrency in concurrencies}


def wsgi(server: RedisServer, concurrencies: Sequence[int], plan: Plan) -> dict[int, Outcomes]:
    """All WSGI contenders on both stores, by concurrency in threads."""
    with Crowds() as crowd_of:
        crowds: dict[str, Crowd] = {"Flask": crowd_of.wsgi(flask())}
        for contender in WSGI:
            crowds[on_redis(contender.name)] = crowd_of.wsgi(contender.build(server.url, EASY))
            crowds[in_memory(contender.name)] = crowd_of.wsgi(contender.build("", EASY))
        return {concurrency: alternate(crowds, concurrency, plan, server) for concurrency in concurrencies}


def on_redis(name: str) -> str:
    """What a contender is called where it counts in Redis."""
    return f"{name} on Redis"


def in_memory(name: str) -> str:
    """What a contender is called where it counts in memory."""
    return f"{name} in memory"


def _calls(server: RedisServer, gate: Crowd, crowd_of: Crowds) -> Mapping[str, Crowd]:
    """One redis-py call instead of a limiter: a script that does nothing, and the calls that LimitGate was heard to make."""
    with server.client() as untyped:
        client: Any = untyped
        no_op: str = client.script_load("return 1")
    gate(iter(range(CLIENTS)), 1)
    heard = overheard(server, lambda: gate(iter(range(CLIENTS)), 1))
    commands: dict[str, Sequence[Command]] = {NO_OP: [(b"EVALSHA", no_op.encode(), b"0")], SCRIPT: heard}
    return {name: crowd_of.asgi(_Calling(BARE[CALLER](), server, calls)) for name, calls in commands.items() if calls}


class _Calling:
    """Makes one redis-py call before each request, taking turns among ``commands``."""

    def __init__(self, app: Any, server: RedisServer, commands: Sequence[Command]) -> None:
        self._app = app
        self._client: Any = Redis.from_url(server.url)
        self._commands = cycle(commands)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._client.execute_command(*next(self._commands))
        await self._app(scope, receive, send)
