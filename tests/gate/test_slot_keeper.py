"""What a process holds: `slot` of a limiter, how places are renewed in time, and what becomes of those of a dead process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from limitgate import (
    AsyncLimiter,
    ConfigError,
    Limit,
    Limiter,
    LimitGateWSGI,
    MemoryStore,
    RateLimited,
    Rule,
    StoreError,
)
from limitgate.gate.flow import run
from limitgate.gate.slot_keeper import SlotKeeper
from limitgate.limits.plan import Plan, Reading
from limitgate.stores.redis import wire
from tests.support.clock import Clock
from tests.support.clusters import KINDS, charge, key_on, plan, settled
from tests.support.doors import PATIENCE, PROCESS_PATIENCE, wsgi_environ
from tests.support.outcomes import Watched
from tests.support.proxy import in_a_loop, until
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer
from tests.support.threads import Began

PATIENT = 10.0
RENEW, HELD = 0.08, 1.5
"""Seconds, in tests that wait for them: on a busy machine, who renews a place may well be late."""

LONG = 1_000.0
"""Seconds that no test waits for."""


@pytest.fixture
def in_haste(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leases are short, and renewed as often."""
    monkeypatch.setattr("limitgate.gate.slot_keeper.RENEW", RENEW)
    monkeypatch.setattr("limitgate.gate.slot_keeper.AGAIN", RENEW / 2)
    monkeypatch.setattr("limitgate.algorithms.concurrency.HELD_US", round(HELD * 1e6))
    wire._packed.cache_clear()
    yield
    wire._packed.cache_clear()


def taken(limiter: Limiter, key: str, limit: str = "2 at once") -> int:
    return limiter.peek(key, limit).windows[0].used


def waited(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- slot -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "redis"])
def url(request: pytest.FixtureRequest, redis_server: RedisServer) -> str:
    return "memory://" if request.param == "memory" else redis_server.url


def test_a_slot_is_held_inside_of_with(url: str) -> None:
    """Within it the place is taken, after it the place is free; who finds no room is told so."""
    key = uuid4().hex
    with Limiter(url, timeout=PATIENT) as limiter:
        with limiter.slot(key, 2) as first, limiter.slot(key, "2 at once") as second:
            assert (first.remaining, second.remaining, taken(limiter, key)) == (1, 0, 2)
            with pytest.raises(RateLimited) as refused, limiter.slot(key, Limit("2 at once")):
                pytest.fail("there is no room")
            assert (refused.value.decision.allowed, refused.value.decision.retry_after) == (False, 1.0)
            with limiter.slot(key + "another", 2) as other:
                assert other.remaining == 1
        assert (taken(limiter, key), len(limiter._slot_keeper)) == (0, 0)


def test_an_async_slot(url: str) -> None:
    """The same on an event loop, and no task is left there."""
    key = uuid4().hex

    async def scene() -> None:
        async with AsyncLimiter(url, timeout=PATIENT) as limiter:
            async with limiter.slot(key, 1) as decision:
                assert decision.remaining == 0
                with pytest.raises(RateLimited):
                    async with limiter.slot(key, 1):
                        pytest.fail("there is no room")
            assert (await limiter.peek(key, "1 at once")).remaining == 1
            (keeper,) = limiter._slot_keeper._in_loops.values()
            assert (keeper._task, len(limiter._slot_keeper)) == (None, 0)

    asyncio.run(scene())


def test_a_slot_goes_back_after_an_error(url: str) -> None:
    """An exception passes through and the place is free, under threads and on an event loop."""
    key = uuid4().hex

    async def scene() -> None:
        async with AsyncLimiter(url, timeout=PATIENT) as limiter:
            with pytest.raises(LookupError):
                async with limiter.slot(key, 1):
                    raise LookupError
            assert (await limiter.peek(key, "1 at once")).remaining == 1

    asyncio.run(scene())
    with Limiter(url, timeout=PATIENT) as limiter:
        with pytest.raises(LookupError), limiter.slot(key, 1):
            raise LookupError
        assert taken(limiter, key, "1 at once") == 0


@pytest.mark.parametrize("times", [1, 2])
def test_a_slot_goes_back_when_it_is_cancelled(redis_server: RedisServer, times: int) -> None:
    """A task that is cancelled gives its place back, even if it is cancelled once more while it does."""
    key = uuid4().hex

    async def holds(limiter: AsyncLimiter, inside: asyncio.Event) -> None:
        async with limiter.slot(key, 1):
            inside.set()
            await asyncio.get_running_loop().create_future()

    async def scene() -> None:
        async with AsyncLimiter(redis_server.url, timeout=PATIENT) as limiter:
            task = asyncio.create_task(holds(limiter, inside := asyncio.Event()))
            await inside.wait()
            for _ in range(times):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            while (await limiter.peek(key, "1 at once")).remaining == 0:
                assert len(limiter._slot_keeper) == 0

    asyncio.run(scene())


def test_a_take_that_is_cancelled_is_taken_back(redis_server: RedisServer, in_haste: None) -> None:
    """Who is cancelled while Redis is being asked does not leave a place behind."""
    key = uuid4().hex

    async def scene() -> None:
        async with AsyncLimiter(redis_server.url, timeout=PATIENT) as limiter:
            await limiter.peek(key, "1 at once")
            task = asyncio.create_task(limiter.slot(key, 1).__aenter__())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            (keeper,) = limiter._slot_keeper._in_loops.values()
            assert len(keeper.releases) == 1
            await until(lambda: not keeper.releases)
            assert (await limiter.peek(key, "1 at once")).remaining == 1

    asyncio.run(scene())


def test_a_slot_of_several_places_at_once(url: str) -> None:
    """``cost`` is how many; more than there are is refused for ever, none takes none."""
    key = uuid4().hex
    with Limiter(url, timeout=PATIENT) as limiter:
        with limiter.slot(key, 5, cost=3), limiter.slot(key, 5, cost=2), limiter.slot(key, 5, cost=0):
            assert taken(limiter, key, "5 at once") == 5
        with pytest.raises(RateLimited) as refused, limiter.slot(key, 5, cost=6):
            pytest.fail("there are not as many")
        assert refused.value.decision.retry_after == float("inf")
        assert taken(limiter, key, "5 at once") == 0


@pytest.mark.parametrize("limit", ["5/second", Limit("5/second"), -1, 2.5, True, None, "many", 10_001], ids=str)
def test_what_is_no_limit_of_places(limit: Any) -> None:
    """Anything but a count or such a limit is a ConfigError that says what was expected."""
    with pytest.raises(ConfigError, match="expected"):
        Limiter(MemoryStore()).slot("key", limit)


def test_a_banned_key_gets_no_slot() -> None:
    """A ban holds for places, too."""
    limiter = Limiter(MemoryStore(Clock()))
    limiter.ban("key", 60)
    with pytest.raises(RateLimited) as refused, limiter.slot("key", 1):
        pytest.fail("it is banned")
    assert refused.value.decision.retry_after == 60


def test_a_slot_whose_store_fails_at_the_end(in_haste: None) -> None:
    """The error is nobody's who was done; it is given back as soon as the store answers."""
    store = Watched()
    limiter = Limiter(store)
    with limiter.slot("key", 2):
        store.fails = ("correct",)
    store.plans.clear()
    waited(lambda: len(store.plans) > 2)
    store.fails = ()
    waited(lambda: taken(limiter, "key") == 0)
    waited(lambda: not limiter._slot_keeper._in_threads._runs)


def test_a_slot_whose_store_fails_at_the_beginning(in_haste: None) -> None:
    """That is a StoreError; in case that it was taken it is given back."""
    store = Watched()
    limiter = Limiter(store)
    store.fails = ("take",)
    with pytest.raises(StoreError), limiter.slot("key", 2):
        pytest.fail("nothing was charged")
    waited(lambda: store.corrections == 1)


# --- renewing ---------------------------------------------------------------------------------------------------------


def test_threads_renew_what_they_hold(redis_server: RedisServer, in_haste: None) -> None:
    """A place that is held for longer than a lease lasts stays taken; the thread that renews it ends with the last one."""
    key, threads = uuid4().hex, Began()
    with Limiter(redis_server.url, timeout=PATIENT) as limiter:
        with limiter.slot(key, 1):
            began = time.monotonic()
            while time.monotonic() < began + 1.2 * HELD:
                assert taken(limiter, key, "1 at once") == 1
                time.sleep(0.01)
        assert taken(limiter, key, "1 at once") == 0
        waited(lambda: not limiter._slot_keeper._in_threads._runs)
    waited(lambda: not threads.names())


def test_an_event_loop_renews_what_it_holds(redis_server: RedisServer, in_haste: None) -> None:
    """The same by a timer, and all places in one call."""
    key = uuid4().hex

    async def scene() -> None:
        async with AsyncLimiter(redis_server.url, timeout=PATIENT) as limiter, contextlib.AsyncExitStack() as stack:
            for _ in range(20):
                await stack.enter_async_context(limiter.slot(key, 20))
            began = time.monotonic()
            while time.monotonic() < began + 1.2 * HELD:
                assert (await limiter.peek(key, "20 at once")).remaining == 0
                await asyncio.sleep(0.01)

    asyncio.run(scene())


def test_all_that_is_held_is_renewed_in_one_call(in_haste: None) -> None:
    """However many keys there are, as many slots are one call as plans may share one."""
    store = Watched()

    async def scene() -> list[int]:
        limiter = AsyncLimiter(store)
        async with contextlib.AsyncExitStack() as stack:
            for number in range(150):
                await stack.enter_async_context(limiter.slot(f"key {number}", 1))
            store.plans.clear()
            await until(lambda: len(store.plans) >= 2)
            return [len(plan.charges) for plan in store.plans]

    assert asyncio.run(scene()) == [64, 64, 22]


def test_a_timer_that_rings_while_nothing_is_held_is_the_last() -> None:
    """One timer serves all places that come and go; if it finds nothing to renew it asks no store and sets no other one."""
    store = Watched()

    async def scene() -> None:
        limiter = AsyncLimiter(store)
        for _ in range(3):
            timers = set()
            for _ in range(3):
                async with limiter.slot("key", 2), limiter.slot("key", 2):
                    (keeper,) = limiter._slot_keeper._in_loops.values()
                    timers.add(keeper._timer)
            assert len(timers) == 1
            keeper._on_timer()
            assert (keeper._timer, keeper._task, keeper.due_at) == (None, None, None)

    asyncio.run(scene())
    assert sum(plan.verb == "spend" for plan in store.plans) == 18


def test_a_process_that_slept_takes_its_place_again(caplog: pytest.LogCaptureFixture) -> None:
    """A place that ended while its process slept is taken again if there is room, else that is logged, once."""
    clock = Clock()
    store = MemoryStore(clock)
    mine, others = Limiter(store), Limiter(store)

    def rounds() -> None:
        steps = mine._slot_keeper._in_threads.renewal()
        with contextlib.suppress(StopIteration):
            plan, _ = next(steps)
            while True:
                plan, _ = steps.send(store.spend(plan))

    with mine.slot("key", 1):
        clock.advance(31)
        assert taken(others, "key", "1 at once") == 0
        rounds()
        assert taken(others, "key", "1 at once") == 1
        clock.advance(31)
        with others.slot("key", 1), caplog.at_level(logging.WARNING, "limitgate"):
            rounds()
            rounds()
            assert ["lost its slot" in record.message for record in caplog.records] == [True]
            assert taken(others, "key", "1 at once") == 1
        rounds()
        assert taken(others, "key", "1 at once") == 1
    assert taken(others, "key", "1 at once") == 0


def test_a_renewal_that_fails_is_tried_again_soon(in_haste: None) -> None:
    """Places outlast a store that is away for less than a lease."""
    store = Watched()

    async def scene() -> None:
        limiter = AsyncLimiter(store)
        async with limiter.slot("key", 1):
            store.fails = ("correct",)
            await until(lambda: store.corrections == 3)
            store.fails = ()
            await until(lambda: store.corrections == 5)
            assert (await limiter.peek("key", "1 at once")).remaining == 0
        assert (await limiter.peek("key", "1 at once")).remaining == 1

    asyncio.run(scene())


@in_a_loop
async def test_a_renewal_that_comes_late_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that is given back while it is being renewed is given back once more: the renewal might have come after."""
    store = Watched()
    monkeypatch.setattr("limitgate.gate.slot_keeper.RENEW", 0.01)
    spend, held_up, renewing = store.spend, asyncio.Event(), asyncio.Event()

    async def aspend(plan: Plan, timeout: float = 0) -> Reading:
        if plan.charges[0].adjustment and plan.charges[0].adjustment.back[0] < 0:
            renewing.set()
            await held_up.wait()
        return spend(plan)

    monkeypatch.setattr(store, "aspend", aspend)
    limiter = AsyncLimiter(store)
    async with limiter.slot("key", 1):
        await renewing.wait()
    held_up.set()
    await until(lambda: store.corrections == 3)
    assert (await limiter.peek("key", "1 at once")).remaining == 1


def test_what_is_held_for_somebody_who_is_gone_is_given_back(in_haste: None) -> None:
    """A response that no server has closed does not keep its place for ever."""
    store = Watched()
    gate = LimitGateWSGI(lambda _, start: start("200 OK", []) and iter([b"x"]), rules=[Rule("a", "1 at once")], store=store)
    chunks = gate(wsgi_environ(), lambda *_: print)
    time.sleep(2 * RENEW)
    assert len(gate.gate.refunds.slot_keeper) == 1
    plan = Plan.peek(store.plans[0].charges)
    assert not store.spend(plan._replace(charges=tuple([charge._replace(slot=0) for charge in plan.charges]))).admitted
    store.plans.clear()
    del chunks
    gc.collect()
    waited(lambda: len(gate.gate.refunds.slot_keeper) == 0)
    waited(lambda: store.spend(plan).buckets[0].before[0].taken == 0)


def test_releases_end_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be given back is forgotten when it has ended by itself, and no more than so many are remembered."""
    store = Watched()
    holding = SlotKeeper(store, 1.0)
    monkeypatch.setattr("limitgate.gate.slot_keeper.MAX_RELEASES", 3)
    monkeypatch.setattr("limitgate.algorithms.concurrency.HELD_US", -1)
    monkeypatch.setattr(holding._in_threads, "_set_timer", lambda: None)
    limiter = Limiter(store)
    for number in range(5):
        with limiter.slot(f"key {number}", 1):
            pass
    for taking in [asked for asked in store.plans if asked.verb == "spend"]:
        holding.release_later(taking.charges)
    assert len(holding._in_threads.releases) == 3
    assert list(holding._in_threads.renewal()) == []
    assert holding._in_threads.releases == {}


def test_many_releases_are_made_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where thousands are cancelled in a second, places go back before there are too many, unless the store fails."""
    monkeypatch.setattr("limitgate.gate.slot_keeper.MANY_RELEASES", 3)
    monkeypatch.setattr("limitgate.gate.slot_keeper.AGAIN", LONG)
    store = Watched()
    limiter, holding = Limiter(store), SlotKeeper(store, 1.0)
    renewer = holding._in_threads
    monkeypatch.setattr(renewer, "_set_timer", lambda: None)
    for number in range(3):
        with limiter.slot(f"key {number}", 1):
            pass
    takings = [asked.charges for asked in store.plans if asked.verb == "spend"]
    begun = time.monotonic()

    def is_soon() -> bool:
        assert renewer.due_at is not None
        return renewer.due_at < begun + LONG

    for charges in takings[:2]:
        holding.release_later(charges)
    assert not is_soon()
    holding.release_later(takings[2])
    assert is_soon()
    renewer.due_at, store.fails = None, ("correct",)
    run(store, renewer.renewal())
    holding.release_later(takings[2])
    assert not is_soon()
    store.fails = ()
    run(store, renewer.renewal())
    assert renewer.releases == {}


def test_a_release_that_comes_during_a_renewal_does_not_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timer may ring while the renewal is not over, for nothing."""
    monkeypatch.setattr("limitgate.gate.slot_keeper.RENEW", LONG)
    store = Watched()
    limiter, holding = Limiter(store), SlotKeeper(store, 1.0)
    renewer = holding._in_threads
    monkeypatch.setattr(renewer, "_set_timer", lambda: None)
    with limiter.slot("first", 1), limiter.slot("second", 1):
        first, second = [asked.charges for asked in store.plans]
    holding.release_later(first)
    renewal = renewer.renewal()
    plan, _ = next(renewal)
    holding.release_later(second)
    renewer.due_at, begun = None, time.monotonic()
    with pytest.raises(StopIteration):
        renewal.send(store.spend(plan))
    assert [key for key, _ in renewer.releases] == [second[0].key]
    assert renewer.due_at is not None
    assert renewer.due_at < begun + LONG


def test_thousands_that_are_cancelled_at_once_leave_no_place_behind(redis_server: RedisServer) -> None:
    """All of them have their places when they are cancelled, and do not know it yet."""
    key, crowd = uuid4().hex, 2_000

    async def scene() -> None:
        async with AsyncLimiter(redis_server.url, timeout=PATIENT) as limiter:
            await limiter.peek(key, f"{crowd} at once")
            tasks = [asyncio.create_task(limiter.slot(key, crowd).__aenter__()) for _ in range(crowd)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            (keeper,) = limiter._slot_keeper._in_loops.values()
            await until(lambda: not keeper.releases)
            assert (await limiter.peek(key, f"{crowd} at once")).remaining == crowd

    asyncio.run(scene())


def test_without_threads_it_is_tried_again(monkeypatch: pytest.MonkeyPatch, in_haste: None) -> None:
    """Where no thread can be started now, the next one who takes a place starts it."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    limiter = Limiter(MemoryStore())
    with limiter.slot("key", 2):
        pass
    waited(lambda: not limiter._slot_keeper._in_threads._runs)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        first = limiter.slot("key", 2)
        first.__enter__()
    assert not limiter._slot_keeper._in_threads._runs
    with limiter.slot("key", 2):
        assert limiter._slot_keeper._in_threads._runs
    first.__exit__(None, None, None)


def test_event_loops_one_after_the_other(url: str) -> None:
    """What was held in a loop that is closed is forgotten with it, and the next one has a timer of its own."""
    limiter, key = AsyncLimiter(url, timeout=PATIENT), uuid4().hex

    async def scene() -> None:
        async with limiter.slot(key, 5):
            assert len(limiter._slot_keeper) == 1
        if url != "memory://":
            await limiter._store.aclose()

    async def leaves() -> None:
        await limiter.slot(key, 5).__aenter__()
        if url != "memory://":
            await limiter._store.aclose()

    asyncio.run(scene())
    asyncio.run(leaves())
    asyncio.run(scene())
    assert len(limiter._slot_keeper) == 0
    assert len(limiter._slot_keeper._in_loops) <= 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_child_of_a_fork_holds_nothing(in_haste: None) -> None:
    """What the parent holds is the parent's to renew and to give back; the child begins anew, with names of its own."""
    store = Watched()
    limiter = Limiter(store)
    with limiter.slot("key", 3):
        child = os.fork()
        if not child:
            try:
                with limiter.slot("key", 3):
                    right = len(limiter._slot_keeper) == 1 and limiter._slot_keeper._in_threads._runs
                right &= len({charge.slot for plan in store.plans if plan.verb == "spend" for charge in plan.charges}) >= 3
                os._exit(0 if right else 1)
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)
        assert len(limiter._slot_keeper) == 1
    assert os.waitstatus_to_exitcode(status) == 0


# --- never more than so many ------------------------------------------------------------------------------------------


def test_never_more_than_so_many_threads(redis_server: RedisServer) -> None:
    """However many threads want a place at once, no more than the count are inside, and nothing is left behind."""
    key, lock, now, most, got = uuid4().hex, threading.Lock(), [0], [0], [0]
    full = threading.Barrier(3)
    with Limiter(redis_server.url, timeout=PATIENT) as limiter:

        def work() -> None:
            while got[0] < 100:
                with contextlib.suppress(RateLimited), limiter.slot(key, 3):
                    with lock:
                        now[0] += 1
                        most[0] = max(most[0], now[0])
                        got[0] += 1
                        waits = got[0] <= full.parties
                    if waits:
                        full.wait(PATIENCE)
                    with lock:
                        now[0] -= 1

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert taken(limiter, key, "3 at once") == 0
    assert (most[0], full.broken) == (3, False)


def test_never_more_than_so_many_tasks(redis_server: RedisServer) -> None:
    """Nor tasks, some of which are cancelled in the midst of it."""
    key, now, most, got = uuid4().hex, [0], [0], [0]

    async def work(limiter: AsyncLimiter) -> None:
        for _ in range(10):
            with contextlib.suppress(RateLimited):
                async with limiter.slot(key, 4):
                    now[0] += 1
                    most[0] = max(most[0], now[0])
                    got[0] += 1
                    try:
                        await asyncio.sleep(0.002)
                    finally:
                        now[0] -= 1

    async def scene() -> None:
        async with AsyncLimiter(redis_server.url, timeout=PATIENT) as limiter:
            tasks = [asyncio.create_task(work(limiter)) for _ in range(60)]
            for task in tasks[::7]:
                await asyncio.sleep(0.002)
                task.cancel()
            await asyncio.wait(tasks)
            (keeper,) = limiter._slot_keeper._in_loops.values()
            keeper._on_timer()
            await until(lambda: keeper.is_idle)
            assert (await limiter.peek(key, "4 at once")).remaining == 4

    asyncio.run(scene())
    assert most[0] <= 4 < got[0]


WORKER = """
import sys, time
from limitgate import Limiter, RateLimited
from limitgate.gate import slot_keeper
from limitgate.algorithms import concurrency
import redis

slot_keeper.RENEW, concurrency.HELD_US = {renew}, {held_us}
url, key, what = sys.argv[1:]
server = redis.Redis.from_url(url)
with Limiter(url, timeout=10) as limiter:
    if what == "holds":
        with limiter.slot(key, 3), limiter.slot(key, 3):
            print("holding", flush=True)
            time.sleep(60)
    most = 0
    for _ in range(60):
        try:
            with limiter.slot(key, 3):
                most = max(most, server.incr(key + ":inside"))
                time.sleep(0.001)
                server.decr(key + ":inside")
        except RateLimited:
            time.sleep(0.0005)
print(most)
"""


def worker(url: str, key: str, what: str, renew: float = 10.0, held: float = 30.0) -> subprocess.Popen[str]:
    program = WORKER.format(renew=renew, held_us=round(held * 1e6))
    return subprocess.Popen([sys.executable, "-c", program, url, key, what], stdout=subprocess.PIPE, text=True)


def test_never_more_than_so_many_in_several_processes(redis_server: RedisServer) -> None:
    """Processes share the places of one key on Redis."""
    key = uuid4().hex
    workers = [worker(redis_server.url, key, "works") for _ in range(3)]
    found = [int(each.communicate(timeout=PROCESS_PATIENCE)[0]) for each in workers]
    assert max(found) <= 3
    assert max(found) > 0
    with Limiter(redis_server.url, timeout=PATIENT) as limiter:
        assert taken(limiter, key, "3 at once") == 0


def test_a_process_that_ends_gives_back(redis_server: RedisServer) -> None:
    """What a thread that goes on, a block that was never left and a generator hold when a process ends is free at once."""
    keys = [uuid4().hex for _ in range(3)]
    program = f"""
import threading, time
from limitgate import Limiter
limiter, held = Limiter({redis_server.url!r}, timeout=5), threading.Event()
thread, block, generator = keys = {keys}
def hold():
    with limiter.slot(thread, 9):
        held.set()
        time.sleep(60)
def hold_on():
    with limiter.slot(generator, 9):
        yield
threading.Thread(target=hold, daemon=True).start()
held.wait(20)
never_left = limiter.slot(block, 9)
never_left.__enter__()
held_on = hold_on()
next(held_on)
print([limiter.peek(key, "9 at once").windows[0].used for key in keys])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT * 3, check=True)
    assert (done.stdout, done.stderr) == ("[1, 1, 1]\n", "")
    with Limiter(redis_server.url, timeout=2) as limiter:
        assert [taken(limiter, key, "9 at once") for key in keys] == [0, 0, 0]


@pytest.mark.alone
def test_the_places_of_a_process_that_was_killed(redis_server: RedisServer) -> None:
    """They stay taken for as long as it lives and renews them, and are free when their leases are over, not before."""
    key, held = uuid4().hex, 0.6
    with (
        worker(redis_server.url, key, "holds", renew=0.15, held=held) as process,
        Limiter(redis_server.url, timeout=9) as limiter,
    ):
        try:
            assert process.stdout.readline() == "holding\n"
            time.sleep(1.3 * held)
            assert taken(limiter, key, "3 at once") == 2
        finally:
            process.kill()
        killed = time.monotonic()
        while taken(limiter, key, "3 at once") == 2:
            assert time.monotonic() < killed + held + 0.1
            time.sleep(0.01)
        assert taken(limiter, key, "3 at once") == 0
        assert time.monotonic() > killed + held - 0.25


@pytest.mark.parametrize("door", ["threads", "asyncio"])
def test_on_a_cluster(redis_cluster: RedisCluster, in_haste: None, door: str) -> None:
    """Places of keys on several nodes are renewed and given back on theirs, by threads and by event loops."""
    keys = [uuid4().hex for _ in range(12)]

    async def scene() -> None:
        async with AsyncLimiter(redis_cluster.url, timeout=PATIENT) as limiter:
            async with contextlib.AsyncExitStack() as stack:
                for key in keys:
                    await stack.enter_async_context(limiter.slot(key, 1))
                await asyncio.sleep(1.2 * HELD)
                assert [(await limiter.peek(key, "1 at once")).remaining for key in keys] == [0] * 12
            assert [(await limiter.peek(key, "1 at once")).remaining for key in keys] == [1] * 12

    if door == "asyncio":
        asyncio.run(scene())
        return
    with Limiter(redis_cluster.url, timeout=PATIENT) as limiter:
        with contextlib.ExitStack() as stack:
            for key in keys:
                stack.enter_context(limiter.slot(key, 1))
            time.sleep(1.2 * HELD)
            assert [taken(limiter, key, "1 at once") for key in keys] == [1] * 12
        assert [taken(limiter, key, "1 at once") for key in keys] == [0] * 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_on_another_node_gives_a_place_back(redis_cluster: RedisCluster, kind: str) -> None:
    """Where one node of a cluster refuses, the place that another has given is free again."""
    with contextlib.closing(KINDS[kind](redis_cluster.url, local_refusals=False)) as door:
        place, rate = charge(key_on(0), "1 at once")._replace(slot=1), charge(key_on(1), "1/day")
        assert door.spend(plan(rate)).admitted
        assert not door.spend(plan(place, rate)).admitted
        assert settled(door, lambda: door.spend(plan(place, verb="peek")).buckets[0].before[0].taken == 0)
        assert door.spend(plan(place)).admitted
