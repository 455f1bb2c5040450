"""CPU per request for all contenders, on ASGI and on WSGI, under README's own rule.

Beside them stands what they could at best be made of: one redis-py call, or ready-made calls that requests share, see
`benchmarks.floor`. They are made where a limiter makes its own, in front of the application: after a process has waited for
Redis, all that it does is slower than in a loop that makes nothing but calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

from redis.asyncio import Redis

from benchmarks.contenders import BARE, EASY, LIMITGATE, PEERS, README, WSGI, Contender, Quotas, flask, limitgate_by_address
from benchmarks.drive import CLIENTS, CROWD, FEW_CLIENTS, Crowd, Crowds
from benchmarks.figures import Failed, Outcome, Outcomes
from benchmarks.floor import Floor
from benchmarks.redis_side import Command, overheard
from benchmarks.rounds import Plan, alternate, numbers_of
from tests.support.redis_server import RedisServer

NO_OP = "one evalsha of `return 1`"
CALLER = "Starlette"
"""The application that they are made in front of."""
SCRIPT = "one evalsha of LimitGate's script"
FLOOR = "prepacked, shared calls of LimitGate's script"
FLOOR_MEMORY = "the same, plus LimitGate in memory"
CALLS = (NO_OP, SCRIPT, FLOOR, FLOOR_MEMORY)
"""What limiters could at best be made of."""
Naming = Callable[[str], str]
"""`on_redis` or `in_memory`."""
_FILLING = 32
"""Requests at once while all clients make their first."""


def gate(server: RedisServer, concurrencies: Sequence[int], plan: Plan) -> dict[int, Outcomes]:
    """README's rule beside all ASGI contenders on both stores, by concurrency; named as `on_redis` and `in_memory` say."""
    with Crowds() as crowd_of:
        crowds, broken = _crowds(server, crowd_of, (LIMITGATE, *PEERS), CLIENTS)
        crowds |= _calls(server, crowds[on_redis(LIMITGATE.name)], crowd_of)
        for name, app in ((FLOOR, BARE[CALLER]()), (FLOOR_MEMORY, LIMITGATE.build("", README))):
            crowds[name] = crowd_of.asgi(Floor(app, server))
        return {concurrency: {**broken, **alternate(crowds, concurrency, plan, server)} for concurrency in concurrencies}


def crowded(server: RedisServer, concurrencies: Sequence[int], plan: Plan, clients: int = CROWD) -> dict[int, Outcomes]:
    """README's rule beside one peer, with as many clients as a large service has; all of them were there once before."""
    with Crowds() as crowd_of:
        crowds, broken = _crowds(server, crowd_of, (LIMITGATE, PEERS[0]), clients)
        for crowd in crowds.values():
            crowd(iter(range(clients)), _FILLING)
        return {
            concurrency: {**broken, **alternate(crowds, concurrency, plan, server, first=place * numbers_of(plan))}
            for place, concurrency in enumerate(concurrencies)
        }


def easy(server: RedisServer, concurrency: int, plan: Plan) -> Outcomes:
    """The case that is easy for LimitGate, beside one peer: a key of one part, few clients, and buckets that never drain."""
    with Crowds() as crowd_of:
        ours = Contender(LIMITGATE.name, limitgate_by_address)
        crowds, broken = _crowds(server, crowd_of, (ours, PEERS[0]), FEW_CLIENTS, EASY)
        return {**broken, **alternate(crowds, concurrency, plan, server)}


def wsgi(server: RedisServer, concurrencies: Sequence[int], plan: Plan) -> dict[int, Outcomes]:
    """README's rule beside all WSGI contenders on both stores, by concurrency in threads."""
    with Crowds() as crowd_of:
        crowds: dict[str, Crowd] = {"Flask": crowd_of.wsgi(flask(), clients=CLIENTS)}
        for contender in WSGI:
            crowds[on_redis(contender.name)] = crowd_of.wsgi(contender.build(server.url, README), clients=CLIENTS)
            crowds[in_memory(contender.name)] = crowd_of.wsgi(contender.build("", README), clients=CLIENTS)
        return {concurrency: alternate(crowds, concurrency, plan, server) for concurrency in concurrencies}


def _crowds(
    server: RedisServer, crowd_of: Crowds, contenders: Iterable[Contender], clients: int, quotas: Quotas = README
) -> tuple[dict[str, Crowd], dict[str, Outcome]]:
    """The bare applications and the contenders in front of them on both stores, and those that could not be built."""
    broken: dict[str, Outcome] = {}
    contenders = list(contenders)
    needed = {contender.bare for contender in contenders}
    crowds = {name: crowd_of.asgi(bare(), clients=clients) for name, bare in BARE.items() if name in needed}
    for contender in contenders:
        for name, url in ((in_memory(contender.name), ""), (on_redis(contender.name), server.url)):
            try:
                crowds[name] = crowd_of.asgi(contender.build(url, quotas), clients=clients)
            except Exception as error:  # noqa: BLE001 - whatever keeps it from being built is what is to be shown
                broken[name] = Failed(type(error).__name__)
    return crowds, broken


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
