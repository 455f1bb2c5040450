"""What a connection says has the same outcome on asyncio and under threads: one suite for both drivers of a session."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import pytest

from limitgate import Limit, StoreError
from limitgate.limits.bucket import bucket_of
from limitgate.limits.plan import Plan
from limitgate.stores.redis.breaker import FAILURES
from limitgate.stores.redis.threads.connection import ListenDeadline
from limitgate.stores.redis.threads.pool import LOOK_EVERY
from tests.support.clusters import KINDS
from tests.support.crowds import a_plan, giving_back
from tests.support.proxy import CUT, Proxy, in_a_loop, until
from tests.support.redis_server import RedisServer

PATIENT = 20.0


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
        return round(reading.buckets[0].before[0] / bucket_of("50/day").weights[0])

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
async def test_what_gives_back_is_sent_on_no_connection_that_has_ended(redis_server: RedisServer, kind: str) -> None:
    """As it is not sent again, somebody looks first; nothing is lost where the server has closed what lay idle."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        plan = a_plan(cost=9)
        assert await client.ask(plan) is True
        proxy.lines[0].cut()
        await until(proxy.lines[0].task.done)
        await asyncio.sleep(0.05)
        assert await client.ask(giving_back(plan.charges[0].key)) is True
        assert (client.door.store.failures, len(proxy.lines)) == (0, 2)


@pytest.mark.parametrize("kind", KINDS)
@in_a_loop
async def test_what_was_taken_in_advance_is_asked_for_again(redis_server: RedisServer, kind: str) -> None:
    """A call that takes a lease may be sent again: if both were carried out, too much was charged, and nothing given back."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        limit: Any = Limit("1000 per 366 days", lease=5)
        proxy.instead[len(proxy.calls)] = CUT
        assert await client.ask(a_plan(limit)) is True
        assert len(client.door.store.leases) == 1
        assert client.door.store.leases.pending == set()


@pytest.mark.parametrize("kind", KINDS)
@in_a_loop
async def test_neighbours_of_what_gives_back_are_sent_again(redis_server: RedisServer, kind: str) -> None:
    """In a call that several share, what gives back fails alone."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        plans = [a_plan(), giving_back(a_plan().charges[0].key), a_plan()]

        def together() -> list[Any]:
            store = client.door.store
            if kind == "threads":
                return store._servers.exchange(plans, ListenDeadline(PATIENT))  # type: ignore[no-any-return]

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


# --- answers ----------------------------------------------------------------------------------------------------------

ERRORS = {
    "read only": (b"-READONLY You can't write against a read only replica.\r\n", "reply"),
    "loading": (b"-LOADING Redis is loading the dataset in memory\r\n", "connection"),
    "no permission": (b"-NOPERM this user has no permissions\r\n", "reply"),
    "moved": (b"-MOVED 1 127.0.0.1:1\r\n", "reply"),
    "ask": (b"-ASK 1 127.0.0.1:1\r\n", "reply"),
    "try again": (b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n", "reply"),
    "cluster down": (b"-CLUSTERDOWN Hash slot not served\r\n", "reply"),
    "no script, twice": (b"-NOSCRIPT No matching script.\r\n", "reply"),
    "text": (b"+OK\r\n", "reply"),
    "too short": (b"*1\r\n:0\r\n", "reply"),
    "no RESP": (b"HTTP/1.1 400 Bad Request\r\n", "connection"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("reply", "fault"), ERRORS.values(), ids=ERRORS)
@in_a_loop
async def test_an_error_is_a_failure_and_costs_the_connection(
    redis_server: RedisServer, kind: str, reply: bytes, fault: str
) -> None:
    """The request fails, the failure is counted once, and the next request gets another connection."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        known = len(proxy.calls)
        proxy.instead.update({known: reply, known + 1: reply} if b"NOSCRIPT" in reply else {known: reply})
        assert await client.ask(a_plan()) == fault
        assert client.door.store.failures == 1
        assert await client.ask(a_plan()) is True
        assert len(proxy.lines) == 2
        await until(lambda: not proxy.lines[0].open)


@pytest.mark.parametrize("kind", KINDS)
@in_a_loop
async def test_a_full_redis_keeps_its_connection(redis_server: RedisServer, kind: str) -> None:
    """It answers, so that no failure is counted, and those before it are forgotten."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        known = len(proxy.calls)
        for place in range(FAILURES - 1):
            proxy.instead[known + place] = ERRORS["text"][0]
        proxy.instead[known + FAILURES - 1] = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
        proxy.instead[known + FAILURES] = ERRORS["text"][0]
        faults = [await client.ask(a_plan()) for _ in range(FAILURES + 1)]
        assert faults == ["reply"] * (FAILURES - 1) + ["oom", "reply"]
        assert client.door.store.healthy
        assert len(proxy.lines) == FAILURES


@pytest.mark.parametrize("kind", KINDS)
@in_a_loop
async def test_a_script_that_was_forgotten_is_sent_again(redis_server: RedisServer, kind: str) -> None:
    """On the same connection, and nobody notices."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        plan, known = a_plan(), len(proxy.calls)
        proxy.instead[known] = b"-NOSCRIPT No matching script.\r\n"
        assert await client.ask(plan) is True
        assert [call[0] for call in proxy.calls[known:]] == [b"EVALSHA", b"EVAL"]
        assert await client.used(plan.charges[0].key) == 1
        assert (client.door.store.failures, len(proxy.lines)) == (0, 1)


@pytest.mark.parametrize("kind", KINDS)
@in_a_loop
async def test_push_messages_are_no_answers(redis_server: RedisServer, kind: str) -> None:
    """Neither while a call is on its way nor in between."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        push = b">2\r\n+invalidate\r\n*1\r\n+key\r\n"
        proxy.hold()
        asking = asyncio.create_task(client.ask(a_plan()))
        await proxy.called(len(proxy.calls) + 1)
        proxy.lines[0].say(push)
        proxy.release()
        assert await asking is True
        proxy.lines[0].say(push)
        assert await client.ask(a_plan()) is True
        assert len(proxy.lines) == 1


@pytest.mark.parametrize("kind", KINDS)
@in_a_loop
async def test_an_answer_that_nobody_has_asked_for(redis_server: RedisServer, kind: str) -> None:
    """It is not taken for the answer to the next call, which goes elsewhere. Threads look once in a second."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        plan = a_plan(cost=50)
        assert await client.ask(plan) is True
        proxy.lines[0].say(b"*10\r\n" + b":0\r\n" * 10)
        await asyncio.sleep(0.05 if kind == "asyncio" else LOOK_EVERY)
        assert await client.ask(plan) is False
        assert len(proxy.lines) == 2
        assert client.door.store.failures == 0


@pytest.mark.parametrize("kind", KINDS)
@in_a_loop
async def test_a_call_that_cannot_be_sent_is_no_failure_of_redis(redis_server: RedisServer, kind: str) -> None:
    """A key that is no Unicode: the request fails alone, and the connection goes on."""
    async with Proxy(redis_server) as proxy, Client(kind, proxy.url) as client:
        assert [await client.ask(a_plan(key="\ud800")) for _ in range(FAILURES)] == ["connection"] * FAILURES
        assert await client.ask(a_plan()) is True
        assert client.door.store.failures == 0
        assert len(proxy.lines) == 1
