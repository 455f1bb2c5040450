"""Crowds that come in one turn of the event loop, to a gate in this process, with a real Redis behind it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any
from uuid import uuid4

from limitgate import AsyncRedisStore, LimitGate, Rule
from tests.faults.overload.apps import LOGIN
from tests.faults.overload.attack import ATTACKER, RATE
from tests.faults.overload.outcome import Demand, Honest, Outcome
from tests.support.doors import http_scope
from tests.support.redis_cluster import RedisCluster, eventually
from tests.support.redis_server import RedisServer

ALL = 5000
"""What everybody together may ask for in an hour, where a second node counts that."""
SETTLES_WITHIN = 5.0
"""Seconds until what refused requests had taken from other nodes is given back."""
HELLO = b"hello"
DEGRADED = (b"x-degraded", b"1")
OVERFLOW = Demand(bursts=2, degrades=True)
"""Where there are more requests than room to queue, this process limits the others by itself; nothing else is granted."""


class Told(logging.Handler):
    """Counts lines that LimitGate logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1


@contextlib.contextmanager
def listening() -> Iterator[Told]:
    """Count what is logged while the block runs."""
    told, log = Told(), logging.getLogger("limitgate")
    log.addHandler(told)
    try:
        yield told
    finally:
        log.removeHandler(told)


class Door:
    """A gate around an application that answers ``hello``, and what became of those who asked."""

    def __init__(self, url: str, *rules: Rule, **options: Any) -> None:
        self.store = AsyncRedisStore(url)
        self.gate = LimitGate(self._app, rules=list(rules), store=self.store, **options)
        self.degraded = 0

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        degraded = scope["limitgate"].degraded
        self.degraded += degraded
        await send({"type": "http.response.start", "status": 200, "headers": [DEGRADED] if degraded else []})
        await send({"type": "http.response.body", "body": HELLO})

    async def ask(self, path: str, address: str) -> tuple[int, dict[bytes, bytes]]:
        """Status and fields of the answer."""
        found: dict[str, Any] = {}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                found.update(message)

        await self.gate(http_scope(path, peer=address), _silent, send)
        return found["status"], dict(found["headers"])

    async def warm_up(self) -> None:
        """Ask until the store has decided: connecting may take longer than a request waits."""
        for _ in range(50):
            before = self.degraded
            if (await self.ask("/hello", "192.0.2.77"))[0] == 200 and self.degraded == before:
                break
        self.degraded = 0

    async def crowd(self, path: str, address: str, size: int) -> Counter[int]:
        """The statuses of so many requests that come in one turn."""
        answers = await asyncio.gather(*[self.ask(path, address) for _ in range(size)])
        statuses = Counter(status for status, _ in answers)
        self.degraded += statuses[503]
        return statuses


async def _silent() -> dict[str, Any]:
    return {"type": "http.request", "body": b""}


def login_rule(*key: str) -> Rule:
    """The limit of logins, by address."""
    return Rule("login", LOGIN, path="/login", key=list(key) or ["ip"])


async def one_turn(url: str, size: int, *, warm: bool, store: str = "single", policy: Any = "open") -> Outcome:
    """Guesses in one turn of the loop, on connections that are there already or not."""
    found = Outcome(
        f"{size:,} guesses in one turn, {'warm' if warm else 'cold'}", "in process", "gate", policy, store, OVERFLOW
    )
    door = Door(url, login_rule(), key_prefix=uuid4().hex, on_error=policy)
    with listening() as told:
        if warm:
            await door.ask("/login", "192.0.2.77")
        found.began = time.monotonic()
        found.logins = await door.crowd("/login", ATTACKER, size)
        found.over = time.monotonic()
    found.degraded, found.outages, found.lines = door.degraded, door.store.outages, told.lines
    if found.outages:
        found.further.append("the store was taken for broken, which was there")
    await door.store.aclose()
    return found


async def on_two_nodes(cluster: RedisCluster, size: int, seconds: float = 4.4) -> Outcome:
    """One address sends guesses in one turn, again and again; they count on one node, and on another one for everybody."""
    prefix = uuid4().hex
    found = Outcome(f"{size:,} guesses a turn on two nodes", "in process", "gate", "open", "cluster", OVERFLOW)
    door = Door(cluster.url, login_rule(), Rule("all", f"{ALL}/hour", key=["global"]), key_prefix=prefix)
    with listening() as told:
        await door.warm_up()
        elsewhere = _node_of(cluster, f"{prefix}*all*")
        address, tried = await _address_not_on(door, cluster, prefix, elsewhere)
        found.began = time.monotonic()
        honest = asyncio.create_task(_be_honest(door, found, seconds))
        logins = Counter[int]()
        while time.monotonic() < found.began + seconds:
            logins += await door.crowd("/login", address, size)
        await honest
        found.over, found.logins = time.monotonic(), logins
        admitted = 1 + tried + logins[200] + sum(each.status == 200 for each in found.honest)
        charged = await _charged(door, lambda charged: charged <= admitted)
    found.situation += f" ({charged} charged to all, {admitted} admitted)"
    if charged > admitted + 1:
        found.further.append(f"{charged} stay charged for {admitted} that were admitted")
    found.degraded, found.outages, found.lines = door.degraded, door.store.outages, told.lines
    if found.outages:
        found.further.append("the store was taken for broken, which was there")
    await door.store.aclose()
    return found


async def _address_not_on(door: Door, cluster: RedisCluster, prefix: str, elsewhere: RedisServer) -> tuple[str, int]:
    """An address whose logins count on another node than this; and how many requests finding it has taken."""
    for number in count(1):
        address = f"203.0.113.{number}"
        with _forgotten(cluster, f"{prefix}*login*"):
            await door.ask("/login", address)
            if _node_of(cluster, f"{prefix}*login*") is not elsewhere:
                return address, number
    raise RuntimeError("no address counts on another node")


@contextlib.contextmanager
def _forgotten(cluster: RedisCluster, pattern: str) -> Iterator[None]:
    """Forget the keys of a pattern at the end."""
    yield
    for node in cluster.masters:
        with node.client() as client:
            for key in client.keys(pattern):
                client.delete(key)


def _node_of(cluster: RedisCluster, pattern: str) -> RedisServer:
    """The node that holds a key of a pattern."""
    holders: list[RedisServer] = []

    def is_there() -> bool:
        holders[:] = [node for node in cluster.masters if _has(node, pattern)]
        return bool(holders)

    eventually(is_there, f"a key like {pattern}")
    return holders[0]


def _has(node: RedisServer, pattern: str) -> bool:
    with node.client() as client:
        return bool(client.keys(pattern))


async def _be_honest(door: Door, found: Outcome, seconds: float) -> None:
    """Requests of others at a steady rate, that only count for everybody."""
    begun = time.monotonic()

    async def ask(number: int) -> None:
        sent = time.monotonic()
        status, fields = await door.ask("/hello", f"198.51.100.{number % 200}")
        found.honest.append(Honest(sent, time.monotonic(), status, degraded=status == 503 or DEGRADED[0] in fields))

    async with asyncio.TaskGroup() as asking:
        for number in range(int(seconds * RATE)):
            await asyncio.sleep(max(0.0, begun + number / RATE - time.monotonic()))
            asking.create_task(ask(number))


async def _charged(door: Door, is_enough: Callable[[int], bool]) -> int:
    """What is charged to everybody's bucket, as soon as it is enough, or after some seconds. Asking takes from it, too."""
    deadline = time.monotonic() + SETTLES_WITHIN
    for asked in count(1):
        _, fields = await door.ask("/hello", "192.0.2.78")
        if b"x-ratelimit-remaining" in fields:
            charged = ALL - int(fields[b"x-ratelimit-remaining"]) - asked
            if is_enough(charged) or time.monotonic() > deadline:
                return charged
        elif time.monotonic() > deadline:
            return ALL
        await asyncio.sleep(0.2)
    raise RuntimeError("never reached")
