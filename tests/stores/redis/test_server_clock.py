"""A server's clock that leaps is noticed, and one that runs as it should is not, however its replies come."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from redis.asyncio.connection import ConnectionPool as AsyncPool
from redis.connection import ConnectionPool

from limitgate import RedisStore
from limitgate.stores.redis.aio.batcher import Batcher
from limitgate.stores.redis.aio.listening import ListeningClock
from limitgate.stores.redis.dialer import Dialer
from limitgate.stores.redis.replies import APART, DRIFT, ServerClock
from limitgate.stores.redis.threads.connection import ListenDeadline
from limitgate.stores.redis.threads.node import Node
from tests.faults.stages import Clock, compiler
from tests.stores.test_stores import PATIENT, REDIS, Door, a_plan, eventually
from tests.support.redis_server import RedisServer

HOUR = 3600
START = 1_700_000_000_000_000


@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 10), st.floats(0, 10)), min_size=2, max_size=20),
    st.floats(0.9, 1 + DRIFT / 2),
)
def test_a_clock_that_runs_is_never_ahead_property(calls: Any, rate: float) -> None:
    """However long calls take on their way there and back, and in whatever order they are answered."""
    clock = ServerClock("Redis")
    replies = [(START + round((sent + there) * rate * 1e6), sent, sent + there + back) for sent, there, back in calls]
    replies.sort(key=itemgetter(2))
    assert [clock.leap(*reply) for reply in replies] == [0.0] * len(replies)


@given(st.floats(APART + 1.1, 1e6), st.floats(0, 0.5), st.floats(0, 0.5))
def test_a_leap_is_noticed_once_property(leap: float, there: float, back: float) -> None:
    """A step ahead is noticed at the next reply and told by about its size, and the clock that it led to is right."""
    clock = ServerClock("Redis")
    found = []
    for second in range(4):
        told = START + round((second + there + (leap if second >= 2 else 0)) * 1e6)
        found.append(clock.leap(told, float(second), second + there + back))
    assert [bool(each) for each in found] == [False, False, True, False]
    assert leap - there - back - 1e-3 < found[2] < leap + 1e-3


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    if compiler() is None:
        pytest.skip("no C compiler in PATH, needed to step a server's clock")
    return Clock(tmp_path)


@pytest.fixture
def redis_of(clock: Clock) -> Iterator[RedisServer]:
    """A Redis that goes by the clock."""
    server = RedisServer(environment=clock.environment)
    yield server
    server.stop()


def is_ahead(server: RedisServer, seconds: int) -> bool:
    with server.client() as client:
        told, _ = client.time()
    return abs(told - time.time() - seconds) < HOUR / 2


@pytest.mark.parametrize("kind", REDIS.values(), ids=REDIS)
def test_redis_an_hour_ahead(
    kind: Callable[[str], Door], redis_of: RedisServer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the clock of Redis steps ahead, slots in flight are forgotten: that is said once, and every step counted."""
    with contextlib.closing(kind(redis_of.url)) as door:
        ask = partial(door.spend, a_plan("99/day"))
        for seconds, leaps, steps in [(0, 0, 0), (HOUR, 1, 0), (HOUR, 1, 0), (0, 1, 1), (HOUR, 2, 1)]:
            clock.step(seconds)
            assert eventually(lambda ahead=seconds: is_ahead(redis_of, ahead))  # Valkey 9.1 looks at the clock now and then
            ask()
            assert (door.store.clock_leaps, door.store.clock_steps) == (leaps, steps)
    told = [message for message in caplog.messages if message.startswith("LG017")]
    assert len(told) == 1
    assert re.match(r"LG017 the clock of Redis jumped (3599|3600)[.]", told[0])


def test_each_server_has_a_clock_of_its_own(redis_of: RedisServer, own_redis: RedisServer, clock: Clock) -> None:
    """Nodes of a cluster whose clocks differ are each compared with themselves."""
    clock.step(HOUR)
    with contextlib.closing(RedisStore(own_redis.url)) as store:
        urls = [own_redis.url, redis_of.url]
        nodes = [Node(Dialer(url, ConnectionPool, store.inspection, socket_timeout=5).dial, store) for url in urls]
        for node in nodes * 3:
            assert node.exchange([a_plan()], ListenDeadline(PATIENT))[0].admitted
        for node in nodes:
            node.retire()

        async def alike() -> None:
            listening = ListeningClock()
            dialers = [Dialer(url, AsyncPool, store.inspection, socket_timeout=None) for url in urls]
            batchers = [Batcher(partial(dialer.adial, listening), store, listening) for dialer in dialers]
            for batcher in batchers * 3:
                assert (await batcher.spend(a_plan(), PATIENT)).admitted
            for batcher in batchers:
                await batcher.close()

        asyncio.run(alike())
        assert store.clock_leaps == 0
