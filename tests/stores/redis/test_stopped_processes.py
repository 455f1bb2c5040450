"""Processes that stand still between requests: nobody probes meanwhile, so the next request has to find out by itself.

So it is in serverless functions, under CPU throttling, and where an event loop runs for as long as a request only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from limitgate import AsyncRedisStore, StoreError
from limitgate.limits.plan import Plan
from limitgate.stores.redis.aio import batcher
from limitgate.stores.redis.breaker import FAILURES, LATE, LONGEST_PAUSE, Breaker
from tests.stores.redis.test_breaker import FAILURE, an_open_breaker
from tests.stores.test_stores import AsyncDoor
from tests.support.clusters import charge, key_on, plan
from tests.support.drops import ForgetfulNat
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer

TIMEOUT = 2.0
OVERDUE = LONGEST_PAUSE + LATE + 0.1
"""Seconds after which a probe is overdue in any case."""


HASTY_PAUSE = 0.3
HASTY_OVERDUE = HASTY_PAUSE + LATE + 0.1
"""The same where probes come as often as that."""


@pytest.fixture
def _in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes have no long pauses."""
    monkeypatch.setattr("limitgate.stores.redis.breaker.LONGEST_PAUSE", HASTY_PAUSE)


class Stepped:
    """A clock that is told the time."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def knows(breaker: Breaker, clock: Stepped) -> bool:
    """Whether requests are refused."""
    with contextlib.suppress(StoreError):
        breaker.check(clock)
        return False
    return True


def test_a_breaker_is_outdated_once_a_probe_is_overdue() -> None:
    """Requests are sent from then on; a failure of one of them is as good as a probe's."""
    clock, breaker = Stepped(), an_open_breaker(Stepped.now)
    pause = breaker.pause_before_probe(clock.now) or 0.0
    assert knows(breaker, clock)
    clock.now += pause + LATE / 2
    assert knows(breaker, clock)
    clock.now += LATE
    assert not knows(breaker, clock)
    assert breaker.failed(FAILURE, clock.now) is False
    assert knows(breaker, clock)
    clock.now += LONGEST_PAUSE + LATE
    assert not knows(breaker, clock)
    breaker.succeeded()
    assert breaker.is_closed


def test_a_probe_that_is_under_way_is_known_while_somebody_listens() -> None:
    """However long it takes. If nobody has listened for a while, or it came late itself, its answer is not waited for."""
    clock, breaker = Stepped(), an_open_breaker(Stepped.now)
    clock.now += breaker.pause_before_probe(clock.now) or 0.0
    breaker.begin_probe(clock.now)
    for _ in range(50):
        clock.now += LATE / 2
        assert knows(breaker, clock)
        breaker.is_probing(clock.now)
    clock.now += 2 * LATE
    assert not knows(breaker, clock)
    breaker.is_probing(clock.now)
    assert not knows(breaker, clock)
    late = an_open_breaker(Stepped.now)
    late.pause_before_probe(clock.now)
    clock.now += OVERDUE
    late.begin_probe(clock.now)
    assert not knows(late, clock)
    late.pause_before_probe(clock.now)
    assert knows(late, clock)


def test_a_probe_that_was_stopped_tells_nothing() -> None:
    """It may have failed long ago, so requests are sent until one fails."""
    clock, breaker = Stepped(), an_open_breaker(Stepped.now)
    clock.now += breaker.pause_before_probe(clock.now) or 0.0
    breaker.begin_probe(clock.now)
    clock.now += OVERDUE
    breaker.is_probing(clock.now)
    breaker.failed(FAILURE, clock.now)
    assert not knows(breaker, clock)
    breaker.pause_before_probe(clock.now)
    assert not knows(breaker, clock)
    breaker.failed(FAILURE, clock.now)
    assert knows(breaker, clock)


def test_a_process_that_stops_before_it_looks_for_redis_sends_requests() -> None:
    """Its breaker has just opened, and no thread has begun to probe."""
    clock, breaker = Stepped(), an_open_breaker(Stepped.now)
    assert knows(breaker, clock)
    clock.now += OVERDUE
    assert not knows(breaker, clock)
    breaker.pause_before_probe(clock.now)
    assert not knows(breaker, clock)
    breaker.failed(FAILURE, clock.now)
    assert knows(breaker, clock)


@pytest.mark.parametrize("stops", ["before its failure is noted", "before the next one is due"])
def test_a_process_that_stops_while_a_probe_ends_sends_requests(stops: str) -> None:
    """The failure is old by then, so it doesn't refuse requests."""
    clock, breaker = Stepped(), an_open_breaker(Stepped.now)
    clock.now += breaker.pause_before_probe(clock.now) or 0.0
    breaker.begin_probe(clock.now)
    clock.now += OVERDUE if stops == "before its failure is noted" else 0.001
    breaker.failed(FAILURE, clock.now)
    clock.now += OVERDUE if stops == "before the next one is due" else 0.001
    breaker.pause_before_probe(clock.now)
    assert not knows(breaker, clock)
    breaker.failed(FAILURE, clock.now)
    assert knows(breaker, clock)


def ends(door: AsyncDoor, asked: Plan, times: int, pause: float = 0.0) -> list[bool | str]:
    """What becomes of requests, between which the event loop does not run."""
    found: list[bool | str] = []
    for _ in range(times):
        time.sleep(pause)
        try:
            found.append(door.spend(asked, TIMEOUT).admitted)
        except StoreError as error:
            found.append(error.fault)
    return found


@pytest.mark.usefixtures("_in_haste")
def test_an_event_loop_that_runs_for_requests_only(own_redis: RedisServer) -> None:
    """Once Redis is back, the next request after a pause is decided by it."""
    asked = plan(charge(uuid4().hex, "5/hour"))
    with contextlib.closing(AsyncDoor(AsyncRedisStore(own_redis.url, local_refusals=False))) as door:
        assert ends(door, asked, 1) == [True]
        own_redis.kill()
        assert ends(door, asked, FAILURES + 3) == ["connection"] * (FAILURES + 3)
        assert not door.store.healthy
        own_redis.start()
        assert ends(door, asked, 1, HASTY_OVERDUE) == [True]
        assert ends(door, asked, 5) == [True] * 4 + [False]


@pytest.mark.usefixtures("_in_haste")
def test_requests_that_come_together_after_a_stop(own_redis: RedisServer) -> None:
    """All of them find out, not only the first."""
    asked = plan(charge(uuid4().hex, "5/hour"))
    with contextlib.closing(AsyncDoor(AsyncRedisStore(own_redis.url, local_refusals=False))) as door:
        ends(door, asked, 1)
        own_redis.kill()
        ends(door, asked, FAILURES)
        own_redis.start()
        time.sleep(HASTY_OVERDUE)
        assert [reading.admitted for reading in door.crowd([asked] * 20)] == [True] * 5 + [False] * 15


def test_a_redis_that_is_still_away(own_redis: RedisServer) -> None:
    """Where it is silent, a request now and then finds out, and those right after it do not wait."""
    asked = plan(charge(uuid4().hex, "5/hour"))
    with contextlib.closing(AsyncDoor(AsyncRedisStore(own_redis.url, local_refusals=False))) as door:
        ends(door, asked, 1)
        with own_redis.frozen():
            for _ in range(FAILURES):
                with pytest.raises(StoreError):
                    door.spend(asked, 0.02)
            time.sleep(OVERDUE)
            waits = []
            for _ in range(20):
                with pytest.raises(StoreError) as caught:
                    door.spend(asked, 0.02)
                waits.append(caught.value.waited > 0)
        assert waits[0]
        assert sum(waits) < len(waits) / 2


@pytest.mark.usefixtures("_in_haste")
def test_a_cluster_while_nobody_runs_the_loop(redis_cluster: RedisCluster) -> None:
    """A node that is back is asked, in plans on one node and on several."""
    plans = [plan(charge(key_on(1), "50/hour")), plan(charge(key_on(0), "50/hour"), charge(key_on(1), "50/hour"))]
    with contextlib.closing(AsyncDoor(AsyncRedisStore(redis_cluster.url, local_refusals=False))) as door:
        for each in plans:
            assert ends(door, each, 1) == [True]
        with redis_cluster.masters[1].frozen():
            for _ in range(FAILURES):
                with pytest.raises(StoreError):
                    door.spend(plans[0], 0.02)
        time.sleep(HASTY_OVERDUE)
        for each in plans:
            assert ends(door, each, 1) == [True]


def test_a_connection_that_hangs(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was begun while nothing came through is not waited for by requests that come much later."""
    monkeypatch.setattr(batcher, "CONNECT_TIMEOUT", 0.2)
    asked = plan(charge(uuid4().hex, "5/hour"))
    with (
        ForgetfulNat(redis_server) as nat,
        contextlib.closing(AsyncDoor(AsyncRedisStore(nat.url, local_refusals=False))) as door,
    ):
        nat.is_shut = True
        for _ in range(2):
            with pytest.raises(StoreError):
                door.spend(asked, 0.02)
        nat.is_shut = False
        assert ends(door, asked, 1, 0.3) == [True]


def test_what_failed_before_is_no_failure_of_now(redis_server: RedisServer) -> None:
    """A connection that was refused while nobody ran the event loop is tried again for the request that hears of it."""
    asked = plan(charge(uuid4().hex, "5/hour"))
    store = AsyncRedisStore(redis_server.url, local_refusals=False)
    dial, dialled = store._dialer.adial, 0

    async def refused_once(*place: Any) -> Any:
        nonlocal dialled
        dialled += 1
        if dialled == 1:
            await asyncio.sleep(0.05)
            raise ConnectionRefusedError
        return await dial(*place)

    store._dialer.adial = refused_once  # type: ignore[method-assign]
    with contextlib.closing(AsyncDoor(store)) as door:
        with pytest.raises(StoreError):
            door.spend(asked, 0.01)
        assert ends(door, asked, 1, 0.1) == [True]


CHILD = {
    "asyncio": """
        import asyncio, sys
        from limitgate import AsyncLimiter, StoreError

        async def main():
            reader = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
            async with AsyncLimiter(sys.argv[1], timeout=2.0) as limiter:
                while await reader.readline():
                    try:
                        end = (await limiter.hit("key", "5/hour")).allowed
                    except StoreError:
                        end = "failed"
                    print(end, flush=True)

        asyncio.run(main())
    """,
    "threads": """
        import sys
        from limitgate import Limiter, StoreError

        with Limiter(sys.argv[1], timeout=2.0) as limiter:
            while sys.stdin.readline():
                try:
                    end = limiter.hit("key", "5/hour").allowed
                except StoreError:
                    end = "failed"
                print(end, flush=True)
    """,
}


class Process:
    """A process that asks when told to."""

    def __init__(self, kind: str, url: str) -> None:
        command, pipe = [sys.executable, "-c", textwrap.dedent(CHILD[kind]), url], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def ask(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=CHILD)
def child(request: pytest.FixtureRequest, own_redis: RedisServer) -> Iterator[Process]:
    with contextlib.closing(Process(request.param, own_redis.url)) as child:
        yield child


def test_a_process_that_is_stopped_between_requests(child: Process, own_redis: RedisServer) -> None:
    """The request that wakes it up is decided by the Redis that has come back meanwhile."""
    assert child.ask() == "True"
    own_redis.kill()
    assert [child.ask() for _ in range(FAILURES + 3)] == ["failed"] * (FAILURES + 3)
    os.kill(child.process.pid, signal.SIGSTOP)
    own_redis.start()
    time.sleep(OVERDUE)
    assert child.process.stdin is not None
    child.process.stdin.write("\n")  # it waits there when the process goes on
    child.process.stdin.flush()
    os.kill(child.process.pid, signal.SIGCONT)
    assert [child.process.stdout.readline().strip(), *[child.ask() for _ in range(5)]] == ["True"] * 5 + ["False"]  # type: ignore[union-attr]
