"""Requests do not wait for a Redis that has stopped answering, and it is found again without them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import random
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from limitgate import AsyncRedisStore, RedisStore, StoreError
from limitgate.stores.redis.breaker import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, Breaker, Tally
from tests.support.crowds import a_plan
from tests.support.redis_server import RedisServer
from tests.support.server_features import REPLICAS, needs
from tests.support.threads import Began

PATIENT = 20.0
"""Seconds within which a store finds Redis again however busy the machine is; how long it pauses is a matter of `Breaker`."""
HASTY = 0.05
"""Seconds that a request waits for a Redis that is frozen anyway."""
FAILURE = StoreError("no answer", "timeout")


class Store:
    """A store of either kind; ``idle`` lets time pass for it."""

    def __init__(self, url: str) -> None:
        self.store: Any = RedisStore(url)

    def fault(self, timeout: float = 0.2) -> str | None:
        """How a request fails, None if it does not."""
        try:
            self.store.spend(a_plan(), timeout)
        except StoreError as error:
            return error.fault
        return None

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self.store.close()


class AsyncStore(Store):
    def __init__(self, url: str) -> None:
        self.store = AsyncRedisStore(url)
        self.runner = asyncio.Runner()

    def fault(self, timeout: float = 0.2) -> str | None:
        try:
            self.runner.run(self.store.aspend(a_plan(), timeout))
        except StoreError as error:
            return error.fault
        return None

    def idle(self, seconds: float) -> None:
        self.runner.run(asyncio.sleep(seconds))

    def close(self) -> None:
        self.runner.run(self.store.aclose())
        self.runner.close()


@pytest.fixture(params=[Store, AsyncStore], ids=["threads", "asyncio"])
def it(request: pytest.FixtureRequest, own_redis: RedisServer) -> Iterator[Store]:
    with contextlib.closing(request.param(own_redis.url)) as store:
        assert store.fault(5) is None
        yield store


def fail(it: Store, times: int = FAILURES, timeout: float = 0.2) -> None:
    assert None not in [it.fault(timeout) for _ in range(times)]


def until(it: Store, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENT
    while not true():
        assert time.monotonic() < deadline
        it.idle(0.01)


def test_a_breaker_opens_after_failures_in_a_row() -> None:
    """One success in between starts the count afresh."""
    tally = Tally()
    breaker = Breaker(tally=tally)
    opened = [breaker.failed(FAILURE, 0.0) for _ in range(FAILURES - 1)]
    breaker.succeeded()
    opened += [breaker.failed(FAILURE, 0.0) for _ in range(FAILURES + 2)]
    assert [place for place, opens in enumerate(opened) if opens] == [2 * FAILURES - 2]
    assert (breaker.is_closed, tally.outages, tally.failures) == (False, 1, 2 * FAILURES + 1)
    with pytest.raises(StoreError, match="no answer") as raised:
        breaker.check(lambda: 0.0)
    assert raised.value.fault == "timeout"
    breaker.succeeded()
    breaker.check(lambda: 0.0)


def an_open_breaker(now: float = -math.inf) -> Breaker:
    breaker = Breaker()
    breaker.sending(a_plan())
    for _ in range(FAILURES):
        breaker.failed(FAILURE, now)
    return breaker


def test_pauses_grow_and_differ() -> None:
    """Probes come fewer and fewer up to a bound, and not all processes send theirs at once; recovery starts over."""
    breaker = an_open_breaker()
    pauses = [breaker.pause_before_probe(1000.0) or 0 for _ in range(40)]
    assert FIRST_PAUSE / 2 <= pauses[0] <= FIRST_PAUSE
    assert all(LONGEST_PAUSE / 2 <= pause <= LONGEST_PAUSE for pause in pauses[10:])
    assert len(set(pauses[10:])) > 20
    breaker.succeeded()
    assert breaker.pause_before_probe(1000.0) is None
    for _ in range(FAILURES):
        breaker.failed(FAILURE, 0.0)
    assert 0 < (breaker.pause_before_probe(1000.0) or 0) <= FIRST_PAUSE


def test_a_probe_half_opens_a_breaker() -> None:
    """Requests still fail at once while it is on its way; what comes of it closes the breaker, or leads to the next one."""
    breaker = an_open_breaker(1000.0)
    assert breaker.state == "open"
    probe = breaker.begin_probe(1000.0)
    assert probe is not None
    assert (probe.verb, breaker.state) == ("reset", "half-open")
    with pytest.raises(StoreError):
        breaker.check(lambda: 1000.0)
    assert not breaker.failed(FAILURE, 1000.0)
    assert breaker.pause_before_probe(1000.0) is not None
    assert breaker.state == "open"
    breaker.begin_probe(1001.0)
    breaker.succeeded()
    assert breaker.state == "closed"
    assert (breaker.pause_before_probe(1001.0), breaker.begin_probe(1001.0)) == (None, None)


def test_a_probe_that_hung_was_pause_enough() -> None:
    """The next one is due so long after the last one began, not after it ended."""
    breaker = an_open_breaker()
    breaker.begin_probe(1000.0)
    assert breaker.pause_before_probe(1000.0 + LONGEST_PAUSE) == 0


def test_a_breaker_that_was_replaced_probes_no_more() -> None:
    """As after a store was closed."""
    store = RedisStore("redis://127.0.0.1:1")
    breaker = store.breaker()
    for _ in range(FAILURES):
        breaker.failed(FAILURE, 0.0)
    store.breaker(instead_of=breaker)
    assert (breaker.pause_before_probe(1000.0), breaker.begin_probe(1000.0)) == (None, None)


def test_the_applications_own_chance_is_left_alone() -> None:
    """An application that has seeded Python's random numbers gets the same ones whether or not probes are sent."""
    state = random.getstate()
    assert an_open_breaker().pause_before_probe(1000.0)
    assert random.getstate() == state


def test_requests_do_not_wait_for_a_frozen_redis(it: Store, own_redis: RedisServer) -> None:
    """After a few requests have waited in vain, the others fail at once."""
    with own_redis.frozen():
        fail(it, timeout=HASTY)
        assert not it.store.healthy
        begun = time.monotonic()
        fail(it, 100)
        assert time.monotonic() - begun < 100 * 0.2 / 2, "they waited"


def test_redis_is_found_again_while_nobody_asks(it: Store, own_redis: RedisServer) -> None:
    """Probes find it, and the first request after that is served."""
    own_redis.kill()
    fail(it)
    it.idle(0.3)
    assert not it.store.healthy
    own_redis.start()
    until(it, lambda: it.store.healthy)
    assert it.fault(5) is None


def test_a_thawed_redis_is_found_again(it: Store, own_redis: RedisServer) -> None:
    """However long it was frozen."""
    with own_redis.frozen():
        fail(it, timeout=HASTY)
        it.idle(1.5)
    until(it, lambda: it.store.healthy)
    assert it.fault(5) is None


def test_a_redis_that_cannot_write_is_not_believed(it: Store, own_redis: RedisServer) -> None:
    """A master that became a replica answers, but not us: probes write, so that they are not taken in."""
    with own_redis.client() as client:
        client.replicaof("127.0.0.1", "1")
        fail(it)
        it.idle(0.3)
        assert not it.store.healthy
        client.replicaof("NO", "ONE")
    until(it, lambda: it.store.healthy)
    assert it.fault(5) is None


def test_a_redis_that_only_answers_with_errors_is_left_in_peace(it: Store, own_redis: RedisServer) -> None:
    """While Redis refuses calls, and so every probe takes another connection, there is a pause between two of them."""
    needs(REPLICAS)
    with own_redis.client() as client:
        client.config_set("min-replicas-to-write", 1)
        faults = [it.fault() for _ in range(FAILURES)]
        assert faults == ["reply"] * FAILURES
        begun, before = time.monotonic(), client.info("stats")["total_connections_received"]
        it.idle(1.0)
        made = client.info("stats")["total_connections_received"] - before
        assert made < 10 * (time.monotonic() - begun)
        client.config_set("min-replicas-to-write", 0)
    until(it, lambda: it.store.healthy)
    assert it.fault(5) is None


def test_a_full_redis_answers(it: Store, own_redis: RedisServer) -> None:
    """Out of memory it still says who is refused, so requests go on asking."""
    with own_redis.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
        assert {it.fault(5) for _ in range(3 * FAILURES)} == {"oom"}
    assert it.store.healthy


def test_a_lost_connection_counts_once(own_redis: RedisServer) -> None:
    """However many calls were on it: a Redis that closes a connection is still there."""

    async def visit() -> tuple[int, bool]:
        store = AsyncRedisStore(own_redis.url)
        await store.aspend(a_plan(), 5)
        with own_redis.client() as client:
            client.client_pause(5000)
            requests = []
            for _ in range(3 * FAILURES):
                requests.append(asyncio.create_task(store.aspend(a_plan(), 5)))
                await asyncio.sleep(0)
            await asyncio.sleep(0.02)
            own_redis.kill()
            answers = await asyncio.gather(*requests, return_exceptions=True)
        failed = sum(isinstance(answer, StoreError) for answer in answers)
        healthy = store.healthy
        await store.aclose()
        return failed, healthy

    assert asyncio.run(visit()) == (3 * FAILURES, True)


def test_each_change_is_said_once(it: Store, own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """One line when requests stop waiting, one of its restart, one when it answers again, however many requests."""
    caplog.set_level(logging.INFO, "limitgate.store")
    own_redis.kill()
    fail(it, 10 * FAILURES)
    it.idle(0.3)
    own_redis.start()
    until(it, lambda: it.store.healthy and len(caplog.messages) >= 3)  # the last is logged after the change
    told = [re.split("[,:]", message)[0] for message in caplog.messages]
    assert told == ["Redis does not answer", "LG019 Redis was restarted or replaced", "Redis answers again"]


def test_one_probe_at_a_time(it: Store, own_redis: RedisServer) -> None:
    """While Redis is frozen, no more than one connection at a time is on its way to it."""
    began = Began()
    with own_redis.frozen():
        fail(it, 4 * FAILURES, HASTY)
        for _ in range(20):
            it.idle(0.05)
            assert began.names().count("limitgate-probe") <= 1
    until(it, lambda: it.store.healthy)
    with own_redis.client() as client:
        assert len(client.client_list()) <= 3


def test_a_closed_store_stops_probing(it: Store, own_redis: RedisServer) -> None:
    """Nothing is left that would look for Redis, and the store can be used again."""
    began = Began()
    own_redis.kill()
    fail(it)
    if isinstance(it, AsyncStore):
        it.runner.run(it.store.aclose())
    else:
        it.store.close()
    assert it.store.healthy
    until(it, lambda: "limitgate-probe" not in began.names())
    own_redis.start()
    assert it.fault(5) is None


def test_a_forgotten_store_stops_probing(own_redis: RedisServer) -> None:
    """The thread that probes does not keep a store alive that nobody has any more."""
    began, it = Began(), Store(own_redis.url)
    assert it.fault(5) is None
    own_redis.kill()
    fail(it)
    forgotten = weakref.ref(it.store)
    del it
    deadline = time.monotonic() + PATIENT
    while forgotten() is not None or "limitgate-probe" in began.names():
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)


@pytest.mark.parametrize("may_start", [False, True])
def test_where_no_thread_can_be_started_requests_look_for_redis(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, may_start: bool
) -> None:
    """Without a thread that would look for Redis, now and then a request does, or starts one once that is possible again."""
    with contextlib.closing(Store(own_redis.url)) as it:
        assert it.fault(5) is None
        with own_redis.frozen():
            open_without_threads(it, monkeypatch)
            for _ in range(200):
                it.fault(0.05)
            assert not it.store.healthy
        if may_start:
            monkeypatch.undo()
        deadline = time.monotonic() + PATIENT
        while it.fault(0.5) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert it.store.outages == 1
    assert len([record for record in caplog.records if record.name == "limitgate.store"]) == 2


def test_where_no_thread_can_be_started_requests_look_for_redis_ever_more_seldom(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look costs a request its whole timeout."""
    with contextlib.closing(Store(own_redis.url)) as it:
        assert it.fault(5) is None
        with own_redis.frozen():
            open_without_threads(it, monkeypatch)
            end = time.monotonic() + 2
            while time.monotonic() < end:
                it.fault(0.05)
                time.sleep(0.005)
        # After pauses of at least 0.025, 0.05, 0.1, 0.2 and 0.4 s.
        assert FAILURES < it.store.failures <= FAILURES + 8


def open_without_threads(it: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls fail until the breaker opens. From then on, no thread can start."""
    fail(it, FAILURES - 1, HASTY)
    monkeypatch.setattr(threading.Thread, "start", refused)
    fail(it, 1, HASTY)


def refused(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_servers_may_come_while_somebody_asks_how_all_are() -> None:
    """While threads ask whether a store is healthy, others may find nodes, or close it."""
    store = RedisStore("redis://127.0.0.1:1")
    until = time.monotonic() + 0.5
    before = sys.getswitchinterval()

    def find_nodes() -> None:
        while time.monotonic() < until:
            found = [store.breaker() for _ in range(20)]
            store.breaker(instead_of=found[0])

    def ask() -> bool:
        healthy = True
        while time.monotonic() < until:
            healthy = healthy and store.healthy
        return healthy

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            finding, *asking = pool.submit(find_nodes), pool.submit(ask), pool.submit(ask)
            finding.result()
            assert [asked.result() for asked in asking] == [True, True]
    finally:
        sys.setswitchinterval(before)
