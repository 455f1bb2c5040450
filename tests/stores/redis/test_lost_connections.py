"""A connection that is lost under way: the same outcome on asyncio and under threads."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import pytest

from limitgate import Limit, StoreError
from limitgate.limits.bucket import bucket_of
from limitgate.limits.plan import Plan
from limitgate.stores.redis.breaker import FAILURES
from limitgate.stores.redis.threads.patience import Patience
from tests.support.clusters import KINDS
from tests.support.crowds import a_plan, giving_back
from tests.support.proxy import CUT, Proxy, in_a_loop
from tests.support.redis_server import RedisServer

PATIENT = 5.0


class Client:
    """A store of either kind behind a proxy, used in a thread of its own."""

    def __init__(self, kind: str, url: str) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._kind, self._url = kind, url
        self.door: Any = None

    async def run(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def __aenter__(self) -> Self:
        self.door = await self.run(lambda: KINDS[self._kind](self._url, local_refusals=False))
        assert await self.ask(a_plan())
        return self

    async def ask(self, plan: Plan) -> Any:
        """How a request ends: admitted or not, or the fault."""
        try:
            return (await self.run(lambda: self.door.spend(plan, PATIENT))).admitted
        except StoreError as error:
            return error.fault

    async def used(self, key: str) -> int:
        reading = await self.run(lambda: self.door.spend(a_plan(key=key, verb="peek"), PATIENT))
        return round(reading.states[0][0] / bucket_of("50/day").weights[0])

    async def __aexit__(self, *_: object) -> None:
        await self.run(self.door.close)
        self._thread.shutdown()


@pytest.mark.parametrize("kind", KINDS)
@in_a_loop
async def test_a_call_on_a_lost_connection_is_sent_again(redis_server: RedisServer, kind: str) -> None:
    """Once, on another connection, and no failure is counted. What loses that one as well has failed."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        plan = a_plan()
        proxy.instead[len(proxy.calls)] = CUT
        assert await client.ask(plan) is True
        assert client.door.store.failures == 0
        assert await client.used(plan.charges[0].key) == 1
        for place in (0, 1):
            proxy.instead[len(proxy.calls) + place] = CUT
        assert await client.ask(plan) == "connection"
        assert client.door.store.failures == 1
        assert await client.ask(plan) is True


@pytest.mark.parametrize("kind", KINDS)
@in_a_loop
async def test_what_gives_back_is_not_sent_again(redis_server: RedisServer, kind: str) -> None:
    """It might be given back twice, so it fails; nothing else does, and no failure is counted."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        plan = a_plan(cost=9)
        assert await client.ask(plan) is True
        known = len(proxy.calls)
        proxy.instead[known] = CUT
        assert await client.ask(giving_back(plan.charges[0].key)) == "connection"
        assert len(proxy.calls) == known + 1
        assert client.door.store.failures == 0
        assert await client.used(plan.charges[0].key) == 9


@pytest.mark.parametrize("kind", KINDS)
@in_a_loop
async def test_what_was_taken_in_advance_is_asked_for_again(redis_server: RedisServer, kind: str) -> None:
    """A call that takes a lease may be sent again: if both were carried out, too much was charged, and nothing given back."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        limit: Any = Limit("1000 per 366 days", lease=5)
        proxy.instead[len(proxy.calls)] = CUT
        assert await client.ask(a_plan(limit)) is True
        assert len(client.door.store.leases) == 1
        assert client.door.store.leases.asked == set()


@pytest.mark.parametrize("kind", KINDS)
@in_a_loop
async def test_neighbours_of_what_gives_back_are_sent_again(redis_server: RedisServer, kind: str) -> None:
    """In a call that several share, what gives back fails alone."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        plans = [a_plan(), giving_back(a_plan().charges[0].key), a_plan()]

        def together() -> list[Any]:
            store = client.door.store
            if kind == "threads":
                return store._servers.exchange(plans, Patience(PATIENT))  # type: ignore[no-any-return]

            async def gathered() -> list[Any]:
                return await asyncio.gather(*[store.aspend(plan, PATIENT) for plan in plans], return_exceptions=True)

            return client.door.run(gathered())  # type: ignore[no-any-return]

        proxy.instead[len(proxy.calls)] = CUT
        outcomes = await client.run(together)
        assert [getattr(outcome, "fault", None) or outcome.admitted for outcome in outcomes] == [True, "connection", True]


@pytest.mark.parametrize("kind", KINDS)
@in_a_loop
async def test_a_server_that_cuts_every_connection(redis_server: RedisServer, kind: str) -> None:
    """Each request fails once, and after some requests no longer wait."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        known = len(proxy.calls)
        proxy.instead.update(dict.fromkeys(range(known, known + 200), CUT))
        assert [await client.ask(a_plan()) for _ in range(FAILURES + 2)] == ["connection"] * (FAILURES + 2)
        assert client.door.store.outages == 1
        assert len(proxy.calls) <= known + 2 * FAILURES + 2
