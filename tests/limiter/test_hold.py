"""Reservations with a hold: given back in time, whatever happens to who made them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest
import redis

from limitgate import AsyncLimiter, AsyncRedisStore, Configured, Limit, Limiter, MemoryStore, RedisStore, StoreError, testing
from limitgate.limiter.holding import Hold, Holds
from limitgate.limits.limit import NAMES
from limitgate.stores.redis.cluster import hash_slot
from tests.limiter.test_operations import Subject, opened
from tests.limiter.test_reserve import Slow
from tests.support.clock import Clock
from tests.support.doors import PATIENCE, until
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer
from tests.support.scripted import Scripted
from tests.support.virtual import World

LIMIT = "100/day"
LIMITS: list[Any] = [LIMIT, *[Limit(LIMIT, algorithm=name) for name in NAMES if name.endswith(("window", "log"))]]


class Shared:
    """A store for limiters of either kind, which can be away."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.away: list[str] = []
        """What becomes of the next calls: fine, lost (not carried out), silent (carried out, no reply)."""
        self.calls = 0

    def spend(self, plan: Any, timeout: float = 0) -> Any:
        self.calls += 1
        fate = self.away.pop(0) if self.away else "fine"
        if fate == "lost":
            raise StoreError("Redis is away", "connection")
        reading = self.store.spend(plan, timeout)
        if fate == "silent":
            raise StoreError("no reply", "timeout")
        return reading

    async def aspend(self, plan: Any, timeout: float = 0) -> Any:
        await asyncio.sleep(0)
        return self.spend(plan, timeout)

    def close(self) -> None: ...

    async def aclose(self) -> None: ...


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "script"])
def store(request: pytest.FixtureRequest, clock: Clock, client: redis.Redis) -> Shared:
    return Shared(MemoryStore(clock) if request.param == "memory" else Scripted(client, clock))


@pytest.fixture(params=["sync", "async"])
def subject(request: pytest.FixtureRequest, store: Shared) -> Iterator[Subject]:
    prefix = uuid4().hex
    if request.param == "sync":
        yield Subject(Limiter(store, key_prefix=prefix), lambda answer: answer)
    else:
        with asyncio.Runner() as runner:
            yield Subject(AsyncLimiter(store, key_prefix=prefix), runner.run)


def used(subject: Subject, *limits: Any) -> list[int]:
    return [window.used for window in subject.peek("key", *(limits or (LIMIT,))).windows]


def look(subject: Subject, *limits: Any) -> list[int]:
    """What is used after a call that gives back what has expired; it costs nothing and is settled at once."""
    subject.run(subject.reserve("key", *(limits or (LIMIT,)), cost=0, hold=1000).cancel())
    return used(subject, *limits)


@pytest.mark.parametrize("limit", LIMITS, ids=repr)
def test_what_nobody_settles_is_given_back(subject: Subject, clock: Clock, limit: Any) -> None:
    """At the end of the hold, by the next reservation with a hold of these limits, before it is decided on."""
    subject.reserve("key", limit, cost=60, hold="2m")
    subject.reserve("key", limit, cost=40, hold=300)
    assert not subject.reserve("key", limit, cost=60, hold=1).decision.allowed
    clock.advance(119.9)
    assert not subject.reserve("key", limit, cost=60, hold=1).decision.allowed
    clock.advance(0.1)
    assert used(subject, limit) == [100]
    assert subject.reserve("key", limit, cost=60, hold=10).decision.allowed
    assert used(subject, limit) == [100]
    clock.advance(180)
    assert look(subject, limit) == [0]


@pytest.mark.parametrize("call", ["hit", "peek", "wait", "reserve", "hit_up_to"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_every_call_of_a_limiter_sees_the_end_of_its_holds(
    kind: str, call: str, clock: Clock, redis_server: RedisServer
) -> None:
    """Also under other limits, and of several reservations only those that have ended."""
    options: dict[str, Any] = {"hit_up_to": {"cost": 1}, "wait": {"timeout": 0.001}}.get(call, {})
    with opened(kind, "memory", clock, redis_server) as subject:

        def decided() -> bool:
            answer = getattr(subject, call)("key", "5/day", **options)
            return bool((answer.decision if call == "reserve" else answer).allowed)

        subject.reserve("key", "5/day", cost=3, hold=10)
        renewed = subject.reserve("key", "5/day", "100/hour", cost=2, hold=10)
        settled = subject.reserve("settled", "5/day", cost=5, hold=10)
        subject.run(settled.settle(5))
        assert not decided()
        clock.advance(5)
        assert subject.run(renewed.renew())
        clock.advance(4.9)
        assert not decided()
        clock.advance(0.1)
        assert decided()
        assert subject.peek("settled", "5/day").remaining == 0
        clock.advance(5)
        assert subject.peek("key", "100/hour").remaining == 100


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_holds_on_redis_end_by_the_clock_of_the_process(kind: str, clock: Clock, redis_server: RedisServer) -> None:
    with opened(kind, "redis", clock, redis_server) as subject:
        subject.reserve("key", "5/day", cost=5, hold=0.05)
        until(lambda: subject.hit("key", "5/day").allowed)


def test_few_keys_of_holds_are_remembered(clock: Clock) -> None:
    """A limiter forgets the oldest; the store refunds them with the next reservation, as for a process that has died."""
    limiter = Limiter(MemoryStore(clock))
    for number in range(1_001):
        limiter.reserve(f"key{number}", "5/day", cost=5, hold=10)
    assert len(limiter._holds.of_key) == 1_000
    clock.advance(10)
    assert limiter.hit("key1000", "5/day").allowed
    assert not limiter.hit("key0", "5/day").allowed
    assert limiter.reserve("key0", "5/day", hold=10).decision.allowed


@pytest.mark.parametrize("limit", LIMITS, ids=repr)
def test_what_is_settled_in_time_stays_settled(subject: Subject, clock: Clock, limit: Any) -> None:
    first, second, third = [subject.reserve("key", limit, cost=20, hold=10) for _ in range(3)]
    clock.advance(5)
    subject.run(first.settle(7))
    subject.run(second.settle(23))
    subject.run(third.cancel())
    for each in (first, second, third):
        with pytest.raises(RuntimeError, match="settled or cancelled already"):
            subject.run(each.settle(1))
        with pytest.raises(RuntimeError, match="cannot be renewed: it was settled or cancelled"):
            subject.run(each.renew())
    clock.advance(100)
    assert look(subject, limit) == [30]


@pytest.mark.parametrize("limit", LIMITS, ids=repr)
@pytest.mark.parametrize("is_given_back_before", [False, True])
def test_settling_too_late_charges_the_real_cost(
    subject: Subject, store: Shared, clock: Clock, limit: Any, *, is_given_back_before: bool
) -> None:
    """All of it, as the estimate has been given back; a late cancel changes nothing."""
    first, second = [subject.reserve("key", limit, cost=20, hold=10) for _ in range(2)]
    clock.advance(11)
    if is_given_back_before:
        assert look(subject, limit) == [0]
    before = store.calls
    subject.run(first.settle(7))
    assert store.calls == before + 2
    assert used(subject, limit) == [7]
    subject.run(second.cancel())
    assert store.calls == before + 4  # with the peek
    assert look(subject, limit) == [7]


@pytest.mark.parametrize("limit", LIMITS, ids=repr)
def test_renewing(subject: Subject, clock: Clock, limit: Any) -> None:
    """Begins another hold of the same length; after the end there is nothing to renew."""
    kept, lost = [subject.reserve("key", limit, cost=20, hold="10s") for _ in range(2)]
    for _ in range(5):
        clock.advance(9)
        assert subject.run(kept.renew()) is True
    assert subject.run(lost.renew()) is False
    assert used(subject, limit) == [20]
    subject.run(lost.settle(30))
    clock.advance(10)
    assert subject.run(kept.renew()) is False
    assert used(subject, limit) == [30]


def test_what_cannot_be_renewed(subject: Subject) -> None:
    with pytest.raises(RuntimeError, match=r"it has no hold, expected reserve\(..., hold='2m'\)"):
        subject.run(subject.reserve("key", LIMIT).renew())
    with pytest.raises(RuntimeError, match="cannot be renewed: it was refused"):
        subject.run(subject.reserve("key", LIMIT, cost=101, hold=1).renew())


@pytest.mark.parametrize("hold", [0, -1, True, "soon", 367 * 86_400, float("nan")])
def test_a_hold_is_a_duration(subject: Subject, store: Shared, hold: Any) -> None:
    with pytest.raises(ValueError, match="hold is "):
        subject.reserve("key", LIMIT, hold=hold)
    assert not store.calls


def test_limits_with_costs_of_their_own(subject: Subject, clock: Clock) -> None:
    """The requests and the tokens are given back together, and owed together."""
    tokens = [Limit(text, algorithm="fixed_window") for text in ("200000/day", "100000/day")]
    limits = "500/day", (tokens[0], 900), (tokens[1], 500)
    first, second = [subject.reserve("key", *limits, hold=10) for _ in range(2)]
    subject.run(first.settle([100, 50]))
    assert used(subject, *limits) == [2, 1000, 550]
    clock.advance(10)
    assert look(subject, *limits) == [1, 100, 50]
    subject.run(second.settle([1000, 600]))
    assert used(subject, *limits) == [2, 1100, 650]


def test_several_algorithms_together(subject: Subject, clock: Clock) -> None:
    subject.reserve("key", *LIMITS, cost=30, hold=10)
    clock.advance(5)
    subject.run(subject.reserve("key", *LIMITS, cost=30, hold=10).settle(1))
    assert used(subject, *LIMITS) == [31] * 4
    clock.advance(5)
    assert look(subject, *LIMITS) == [1] * 4


def test_limits_that_warm_up(subject: Subject, clock: Clock) -> None:
    """What is given back is as warm as it was."""
    limit = Limit("100 per 100 seconds", warm_up=20)
    subject.reserve("key", limit, cost=10, hold=5)
    assert subject.peek("key", limit).retry_after == 20
    clock.advance(5)
    assert look(subject, limit) == [0]


def test_other_limits_have_other_holds(subject: Subject, clock: Clock) -> None:
    """Reservations of one key under other limits are given back by calls with those limits."""
    subject.reserve("key", LIMIT, cost=10, hold=10)
    subject.reserve("key", LIMIT, "1000/hour", cost=20, hold=10)
    clock.advance(10)
    assert look(subject) == [20]
    assert look(subject, LIMIT, "1000/hour") == [0, 0]


def test_limits_that_are_configured(subject: Subject, store: Shared, clock: Clock) -> None:
    if not isinstance(store.store, MemoryStore):
        pytest.skip("the script alone cannot keep limits")
    memory = Limiter(store.store)
    memory.configure("orders", LIMIT, per_process=True)
    reservation = memory.reserve("key", Configured("orders"), cost=10, hold=10)
    clock.advance(10)
    assert memory.reserve("key", Configured("orders"), cost=100, hold=10).decision.allowed
    reservation.settle(5)
    assert memory.peek("key", Configured("orders")).windows[0].used == 105


def test_a_lease_is_not_used(redis_server: RedisServer) -> None:
    """It would not know of the hold."""
    with contextlib.closing(RedisStore(redis_server.url)) as store:
        limiter, limit = Limiter(store, timeout=5), Limit("1000/day", lease=100)
        limiter.hit("key", limit)
        assert len(store.leases) == 1
        with limiter.reserve("key", limit, cost=10, hold=60) as reservation:
            reservation.settle(0)
        assert limiter.peek("key", "1000/day").windows[0].used == 101


def test_a_hold_begins_when_the_turn_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it took."""
    world = World(monkeypatch)
    limiter = Limiter(MemoryStore(world))
    limiter.reserve("key", "100 per 100 seconds", cost=100)
    limiter.reserve("key", "100 per 100 seconds", cost=100, timeout=200, hold=10)
    world.advance(9.9)
    assert limiter.reserve("key", "100 per 100 seconds", cost=0, hold=10).renew()
    assert limiter.peek("key", "100 per 100 seconds").windows[0].used > 85
    world.advance(0.1)
    limiter.reserve("key", "100 per 100 seconds", cost=0, hold=10)
    assert limiter.peek("key", "100 per 100 seconds").windows[0].used == 0


def test_while_limits_are_off(subject: Subject, store: Shared) -> None:
    """As for every other call: everything passes, and nothing is asked."""
    with testing.off():
        reservation = subject.reserve("key", LIMIT, cost=1000, timeout=1, hold=10)
        assert reservation.decision.allowed
        assert subject.run(reservation.renew()) is True
        subject.run(reservation.settle(7))
        subject.run(subject.reserve("key", LIMIT, cost=1000, hold=10).cancel())
    assert not store.calls


def test_while_time_is_frozen(redis_server: RedisServer) -> None:
    with testing.frozen() as frozen, contextlib.closing(RedisStore(redis_server.url)) as store:
        limiter = Limiter(store)
        limiter.reserve("key", LIMIT, cost=100, hold=10)
        frozen.advance(10)
        assert limiter.reserve("key", LIMIT, cost=100, hold=10).decision.allowed


def test_the_key_waits_for_bans_as_ever(subject: Subject, clock: Clock) -> None:
    subject.ban("key", 10)
    assert not subject.reserve("key", LIMIT, hold=10).decision.allowed
    clock.advance(10)
    assert subject.reserve("key", LIMIT, hold=10).decision.allowed


@pytest.mark.parametrize("step", [-3600, -1, 3600])
def test_a_clock_that_steps(subject: Subject, clock: Clock, step: int) -> None:
    """Back: a hold lasts as long as it did. Ahead: it ends, as time has passed for all that the store knows."""
    limit = Limit(LIMIT, algorithm="fixed_window", align="first-request")
    kept = subject.reserve("key", limit, cost=10, hold=10)
    clock.advance(step)
    assert look(subject, limit) == [0 if step > 0 else 10]
    clock.advance(9)
    assert subject.run(kept.renew()) is (step < 0)
    clock.advance(10)
    assert look(subject, limit) == [0]


# --- failures ---------------------------------------------------------------------------------------------------------


def test_redis_is_away_at_reserve(subject: Subject, store: Shared, clock: Clock) -> None:
    store.away = ["lost"]
    with pytest.raises(StoreError):
        subject.reserve("key", LIMIT, cost=10, hold=10)
    assert used(subject) == [0]


@pytest.mark.parametrize("fate", ["lost", "silent"])
def test_redis_is_away_when_the_hold_is_registered(subject: Subject, store: Shared, clock: Clock, fate: str) -> None:
    """The charge is refunded once, also if the registration was carried out."""
    subject.hit("key", LIMIT, cost=50)
    store.away = ["fine", fate]
    with pytest.raises(StoreError):
        subject.reserve("key", LIMIT, cost=10, hold=10)
    assert used(subject) == [50]
    clock.advance(10)
    assert look(subject)[0] == 50
    clock.advance(100)
    assert look(subject)[0] == 50


@pytest.mark.parametrize(("fate", "left"), [("lost", 60), ("silent", 50)])
def test_a_hold_that_ends_before_its_registration_is_undone(clock: Clock, fate: str, left: int) -> None:
    """It may have been given back, so the refund is left out."""

    class Late(Shared):
        def spend(self, plan: Any, timeout: float = 0) -> Any:
            if self.calls == 3:
                clock.advance(2)
            return super().spend(plan, timeout)

    store = Late(MemoryStore(clock))
    limiter = Limiter(store)
    limiter.hit("key", LIMIT, cost=50)
    store.away = ["fine", fate]
    with pytest.raises(StoreError):
        limiter.reserve("key", LIMIT, cost=10, hold=1)
    assert limiter.reserve("key", LIMIT, cost=0, hold=1).decision.allowed
    assert limiter.peek("key", LIMIT).windows[0].used == left


@pytest.mark.parametrize(("fates", "left"), [(["lost", "lost"], 60), (["silent", "lost"], 50), (["silent", "silent"], 50)])
def test_redis_stays_away(subject: Subject, store: Shared, clock: Clock, fates: list[str], left: int) -> None:
    """Without a registration, the estimate stays."""
    subject.hit("key", LIMIT, cost=50)
    store.away = ["fine", *fates]
    with pytest.raises(StoreError):
        subject.reserve("key", LIMIT, cost=10, hold=10)
    clock.advance(10)
    assert look(subject)[0] == left


@pytest.mark.parametrize(("fate", "left"), [("lost", 50), ("silent", 53)])
def test_redis_is_away_at_settle(subject: Subject, store: Shared, clock: Clock, fate: str, left: int) -> None:
    """The estimate stays until the hold ends; nothing is given back twice."""
    subject.hit("key", LIMIT, cost=50)
    reservation = subject.reserve("key", LIMIT, cost=10, hold=10)
    store.away = [fate]
    with pytest.raises(StoreError):
        subject.run(reservation.settle(3))
    assert used(subject) == [60 if fate == "lost" else 53]
    with pytest.raises(RuntimeError):
        subject.run(reservation.settle(3))
    clock.advance(10)
    assert look(subject)[0] == left


@pytest.mark.parametrize("fate", ["lost", "silent"])
def test_redis_is_away_at_renew(subject: Subject, store: Shared, clock: Clock, fate: str) -> None:
    """It can be tried again."""
    reservation = subject.reserve("key", LIMIT, cost=10, hold=10)
    clock.advance(9)
    store.away = [fate]
    with pytest.raises(StoreError):
        subject.run(reservation.renew())
    assert subject.run(reservation.renew()) is True
    clock.advance(9)
    subject.run(reservation.settle(3))
    assert look(subject) == [3]


def test_more_than_can_be_held(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The charge is refunded, and the error says so."""
    monkeypatch.setattr("limitgate.algorithms.holds.MAX_ENTRIES", 5)
    limiter = Limiter(MemoryStore(clock))
    kept = [limiter.reserve("key", LIMIT, hold=10) for _ in range(5)]
    with pytest.raises(StoreError, match="cannot be held, because 5 reservations of these limits are held already"):
        limiter.reserve("key", LIMIT, hold=10)
    assert limiter.peek("key", LIMIT).windows[0].used == 5
    kept.pop().cancel()
    limiter.reserve("key", LIMIT, hold=10)
    clock.advance(10)
    assert limiter.reserve("key", LIMIT, cost=100, hold=10).decision.allowed


@pytest.mark.parametrize("timeout", [0, 200])
def test_every_await_can_be_cancelled(monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    """Whatever the step, nothing is left charged or held, and nothing is given back twice."""
    world = World(monkeypatch)
    store = Slow(world)
    limiter, hit = AsyncLimiter(store), Limiter(store)
    limit, begun = "100 per 100 seconds", list[Any]()

    async def begin() -> None:
        async with await limiter.reserve("key", limit, cost=10, timeout=timeout, hold=60) as reservation:
            begun.append(reservation)
            await reservation.renew()
            await asyncio.sleep(100)

    async def main() -> None:
        ends = set()
        for steps in range(60):
            before = hit.peek("key", limit).windows[0].used
            task = asyncio.ensure_future(begin())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await task
            except (asyncio.CancelledError, KeyError) as error:
                ends.add(type(error))
            for _ in range(30):
                await asyncio.sleep(0)
            assert hit.peek("key", limit).windows[0].used in (before, before - 1), steps
            probe = hit.reserve("key", limit, cost=0, hold=1)
            assert not len(limiter._wait_queues)
            assert not len(limiter._bookings)
            (own,) = _held(store, probe)
            assert own == probe._booked._hold._name, steps
            probe.cancel()
        assert ends == {asyncio.CancelledError}
        assert begun == [] if timeout else len(begun) > 20

    hit.hit("key", limit, cost=100 if timeout else 50)
    world.run(main())


@pytest.mark.parametrize("late", [False, True])
def test_a_settlement_that_is_cancelled(monkeypatch: pytest.MonkeyPatch, *, late: bool) -> None:
    """It is made, or it is not; then the estimate is given back by the hold, once."""
    world = World(monkeypatch)
    store = Slow(world)
    limiter, hit, limit = AsyncLimiter(store), Limiter(store), Limit(LIMIT, algorithm="fixed_window")
    seen = set()

    async def main() -> None:
        for steps in range(12):
            hit.reset("key", limit)
            hit.hit("key", limit, cost=50)
            reservation = await limiter.reserve("key", limit, cost=20, hold=10)
            if late:
                world.advance(11)
            task = asyncio.ensure_future(reservation.settle(7))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            world.advance(11)
            await (await limiter.reserve("key", limit, cost=0, hold=1)).cancel()
            seen.add(hit.peek("key", limit).windows[0].used)

    world.run(main())
    assert seen == {50, 57}


def _held(store: MemoryStore, reservation: Any) -> list[int]:
    """Names of the held reservations of these limits."""
    key = reservation._booked._hold._first.key
    _, _, _, [state] = store._bucket(key, store._shard(key)[key])
    return [entry.name for entry in state.entries if entry.refunds]


def test_a_fork(redis_server: RedisServer) -> None:
    """Of a reservation that parent and child both end, only one gives something back; the other one owes."""
    with contextlib.closing(RedisStore(redis_server.url)) as store:
        limiter = Limiter(store, timeout=5, key_prefix=uuid4().hex)
        limiter.hit("key", LIMIT, cost=50)
        reservation = limiter.reserve("key", LIMIT, cost=20, hold=60)
        child = os.fork()
        if not child:
            status = 1
            with contextlib.suppress(BaseException):
                reservation.cancel()
                own = limiter.reserve("key", LIMIT, cost=5, hold=60)
                own.settle(1)
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        reservation.cancel()
        assert limiter.peek("key", LIMIT).windows[0].used == 51


HOLDER = """
import sys, time
from limitgate import Limiter
url, prefix = sys.argv[1:]
limiter = Limiter(url, timeout=5, key_prefix=prefix)
with limiter.reserve("key", "100/day", cost=60, hold=1.5):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_process_that_is_killed(redis_server: RedisServer) -> None:
    """Another process gets what it held, after the hold and not before."""
    prefix = uuid4().hex
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, redis_server.url, prefix], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder, contextlib.closing(RedisStore(redis_server.url)) as store:
        assert holder.stdout.readline() == b"held\n"
        began = time.monotonic()
        holder.send_signal(signal.SIGKILL)
        limiter = Limiter(store, timeout=5, key_prefix=prefix)
        while not limiter.reserve("key", LIMIT, cost=60, hold=60).decision.allowed:
            assert time.monotonic() - began < PATIENCE
            time.sleep(0.02)
        assert time.monotonic() - began > 1.3
        assert limiter.peek("key", LIMIT).windows[0].used == 60


def test_the_hold_is_kept_while_nobody_asks(redis_server: RedisServer, client: redis.Redis) -> None:
    """Redis keeps it for as long as the charge would count, though its deadline has passed."""
    with contextlib.closing(RedisStore(redis_server.url)) as store:
        limiter = Limiter(store, timeout=5, key_prefix=uuid4().hex)
        limiter.reserve("key", LIMIT, cost=100, hold=0.05)
        time.sleep(0.3)
        assert limiter.reserve("key", LIMIT, cost=100, hold=60).decision.allowed


def test_on_a_cluster(redis_cluster: RedisCluster) -> None:
    """All keys are in one slot, whatever the limits."""
    with contextlib.closing(RedisStore(redis_cluster.url)) as store:
        limiter = Limiter(store, timeout=10, key_prefix=uuid4().hex)
        reservations = {key: limiter.reserve(key, *LIMITS, cost=60, hold=2) for key in ("a", "b", "c", "d", "e")}
        for key, reservation in reservations.items():
            assert not limiter.reserve(key, *LIMITS, cost=60, hold=60).decision.allowed
            assert reservation.renew()
        time.sleep(2.1)
        for key, reservation in reservations.items():
            assert limiter.reserve(key, *LIMITS, cost=60, hold=60).decision.allowed
            reservation.settle(10)
            assert [window.used for window in limiter.peek(key, *LIMITS).windows] == [70] * 4
            hold: Any = reservation._booked._hold
            assert {hash_slot(each.key) for each in hold._covered} == {hash_slot(hold._first.key)}


def test_many_at_once_on_redis(redis_server: RedisServer) -> None:
    """Two limiters with many tasks: what is used is what was settled."""

    async def work(limiter: AsyncLimiter, number: int) -> int:
        rnd = random.Random(number)
        async with await limiter.reserve("key", "100000/day", ("1000000/week", 500), cost=10, hold=60) as reservation:
            await asyncio.sleep(rnd.random() / 100)
            cost = rnd.randint(0, 900)
            if number % 3:
                await reservation.settle(cost)
                return cost
            await reservation.cancel()
            return 0

    async def main() -> None:
        stores = [AsyncRedisStore(redis_server.url) for _ in range(2)]
        prefix = uuid4().hex
        limiters = [AsyncLimiter(store, timeout=10, key_prefix=prefix) for store in stores]
        total = sum(await asyncio.gather(*[work(limiters[number % 2], number) for number in range(300)]))
        windows = (await limiters[0].peek("key", "100000/day", "1000000/week")).windows
        assert windows[1].used - total in range(-60, 1)
        assert windows[0].used in range(1990, 2001)
        for store in stores:
            await store.aclose()

    asyncio.run(main())


# --- a model ----------------------------------------------------------------------------------------------------------


class Model:
    """The sum of what is charged and held, in a window that does not end."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, int]] = {}
        """Cost and deadline of each reservation."""
        self.charged = 0

    def expire(self, now: int) -> None:
        self.held = {number: kept for number, kept in self.held.items() if kept[1] > now}

    @property
    def total(self) -> int:
        return self.charged + sum(cost for cost, _ in self.held.values())


@pytest.mark.parametrize("seed", range(8))
def test_the_sum_of_charged_and_held_property(subject: Subject, clock: Clock, seed: int) -> None:
    rnd, model, open_ = random.Random(seed), Model(), dict[int, Any]()
    limits: list[Any] = [Limit("1000/week", algorithm=name) for name in ("fixed_window", "sliding_window")]
    clock.now -= clock.now % (7 * 86_400_000_000)
    for number in range(60):
        clock.advance(rnd.choice((0, 0.001, 1, 5, 20)))
        what = rnd.choice(("reserve", "reserve", "settle", "cancel", "renew", "hit"))
        chosen = rnd.choice([*open_]) if open_ else None
        model.expire(clock.now)
        if what == "hit":
            # Without the holds, as much as is charged at the moment counts; so give back before.
            look(subject, *limits)
            model.charged += subject.hit("key", *limits, cost=rnd.choice((1, 30))).granted
        elif what == "reserve" or chosen is None:
            cost, hold = rnd.choice((0, 1, 50, 300)), rnd.choice((0.5, 5, 30, 100))
            reservation = subject.reserve("key", *limits, cost=cost, hold=hold)
            assert reservation.decision.allowed == (not cost or model.total + cost <= 1000)
            if reservation.decision.allowed:
                open_[number] = reservation, cost, hold
                model.held[number] = cost, clock.now + round(hold * 1_000_000)
        else:
            reservation, cost, hold = open_[chosen]
            if what == "renew":
                assert subject.run(reservation.renew()) is (chosen in model.held)
                if chosen in model.held:
                    model.held[chosen] = cost, clock.now + round(hold * 1_000_000)
            else:
                final = rnd.choice((0, cost // 2, cost, cost + 20))
                subject.run(reservation.settle(final) if what == "settle" else reservation.cancel())
                model.charged += final if what == "settle" else 0
                model.held.pop(chosen, None)
                del open_[chosen]
        assert look(subject, *limits) == [model.total] * 2, (seed, number, what)


def test_holds_of_threads_that_end_at_the_same_time_are_all_known() -> None:
    """One thread forgets a key whose last hold has ended, while another one adds a hold to it."""
    held, hold = Holds(object()), cast(Hold, SimpleNamespace(us=60_000_000, ends_at=0))

    def work(place: int) -> int:
        lost = 0
        for name in range(place * 10_000, (place + 1) * 10_000):
            held.add("key", name, hold)
            lost += name not in held.of_key.get("key", {})
            held.remove("key", name)
        return lost

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(work, range(4))) == 0
    finally:
        sys.setswitchinterval(interval)
    assert held.of_key == {}
