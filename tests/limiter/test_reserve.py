"""Reservations that wait in turn, move others up when they give something back, and end with a block."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any
from uuid import uuid4

import pytest

from limitgate import AsyncLimiter, ConfigError, Limit, Limiter, MemoryStore, RedisStore, StoreError
from tests.limiter.test_operations import Subject
from tests.support.doors import PATIENCE, until
from tests.support.redis_server import RedisServer
from tests.support.virtual import World

LIMIT = "100 per 100 seconds"
LOG = Limit(LIMIT, algorithm="sliding_log")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


class Async:
    """An async limiter in a world of its own time, and what is left by its store."""

    def __init__(self, world: World) -> None:
        self.world, self.store = world, MemoryStore(world)
        self.limiter, self.other = AsyncLimiter(self.store), Limiter(self.store)
        self.came: list[tuple[str, float]] = []
        """Names and times of the turns that came."""

    async def take(self, name: str, cost: int, used: int | None = None, after: float = 0, **options: Any) -> None:
        """Reserve, note the turn, and settle after a while."""
        limits = options.pop("limits", (LIMIT,))
        reservation = await self.limiter.reserve("key", *limits, cost=cost, **({"timeout": None} | options))
        if reservation.decision.allowed:
            self.came.append((name, round(self.world.now, 3)))
        if used is not None:
            await asyncio.sleep(after)
            await reservation.settle(used)

    async def used(self, limit: Any = LIMIT) -> int:
        return (await self.limiter.peek("key", limit)).windows[0].used


@pytest.fixture
def here(world: World) -> Async:
    return Async(world)


async def _together(*work: Any, apart: float = 0.001) -> None:
    """Begin one after the other, in this order."""
    tasks = []
    for each in work:
        tasks.append(asyncio.ensure_future(each))
        await asyncio.sleep(apart)
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("limit", [LIMIT, LOG, Limit(LIMIT, warm_up=1)], ids=repr)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_reservation_waits_for_its_turn(world: World, kind: str, limit: Any) -> None:
    """With one sleep; the reservation that comes back can be settled."""
    store = MemoryStore(world)
    subject = Subject(Limiter(store), lambda done: done) if kind == "sync" else Subject(AsyncLimiter(store), world.run)
    assert subject.reserve("key", limit, cost=100, timeout=10).decision.delay == 0
    began = world.now
    reservation = subject.reserve("key", limit, cost=10, timeout="10m")
    assert reservation.decision.allowed
    assert world.now - began == pytest.approx(reservation.decision.delay, abs=0.01)
    assert reservation.decision.delay > 9
    if kind == "sync":
        assert len(world.slept) == 1
    before = subject.peek("key", limit).windows[0].used
    subject.run(reservation.settle(4))
    assert before - subject.peek("key", limit).windows[0].used in (6, 7)
    with pytest.raises(RuntimeError, match="settled or cancelled already"):
        subject.run(reservation.cancel())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_turn_too_far_away_is_refused_at_once(world: World, kind: str) -> None:
    store = MemoryStore(world)
    subject = Subject(Limiter(store), lambda done: done) if kind == "sync" else Subject(AsyncLimiter(store), world.run)
    subject.reserve("key", LIMIT, cost=100)
    refused = subject.reserve("key", LIMIT, cost=10, timeout=9.5)
    assert (refused.decision.allowed, world.now) == (False, 0)
    assert 0 < refused.decision.retry_after <= 0.5
    with pytest.raises(RuntimeError, match="nothing was charged"):
        subject.run(refused.settle(1))
    assert not subject.reserve("key", LIMIT, cost=101, timeout=None).decision.allowed
    assert subject.peek("key", LIMIT).windows[0].used == 100


def test_limits_that_book_no_turns(here: Async) -> None:
    fixed = Limit(LIMIT, algorithm="fixed_window")
    with pytest.raises(ConfigError, match="can't book turns"):
        here.world.run(here.limiter.reserve("key", fixed, timeout=1))
    with pytest.raises(ConfigError, match="can't book turns"):
        here.other.reserve("key", fixed, timeout=1)
    assert here.other.reserve("key", fixed, timeout=0).decision.allowed


def test_settling_early_moves_the_next_ones_up(here: Async) -> None:
    """All of them, whatever they cost, in their order."""
    work = [
        here.take("first", 100, used=0, after=10),
        here.take("second", 60),
        here.take("third", 20),
        here.take("fourth", 60),
        here.take("fifth", 10),
    ]
    here.world.run(_together(*work))
    # Without the refund, the turns would come after 60, 80, 140 and 150 seconds.
    assert here.came == [
        ("first", 0),
        ("second", pytest.approx(10, abs=0.01)),
        ("third", pytest.approx(10, abs=0.01)),
        ("fourth", pytest.approx(50, abs=0.01)),
        ("fifth", pytest.approx(60, abs=0.01)),
    ]


def test_a_part_moves_them_up_by_a_part(here: Async) -> None:
    work = [here.take("first", 100, used=70, after=10), here.take("second", 60), here.take("third", 60)]
    here.world.run(_together(*work))
    assert [round(at) for _, at in here.came] == [0, 30, 90]


def test_several_windows_move_up_each_for_itself(here: Async) -> None:
    """A turn comes when each of them has room."""
    requests, tokens = "100 per 100 seconds", "1000 per 50 seconds"

    async def main() -> None:
        first = await here.limiter.reserve("key", requests, (tokens, 1000), cost=100)
        work = [
            here.take("second", 20, limits=(requests, (tokens, 800))),
            here.take("third", 10, limits=(requests, (tokens, 200))),
        ]
        waiting = asyncio.gather(*work)
        await asyncio.sleep(10)
        await first.settle(0)  # the tokens only: the requests stay
        await waiting

    here.world.run(main())
    # With the tokens, they would have come after 40 and 50 seconds.
    assert [(name, round(at)) for name, at in here.came] == [("second", 20), ("third", 30)]


def test_waiters_without_a_reservation_move_up_too(here: Async) -> None:
    async def main() -> float:
        first = await here.limiter.reserve("key", LIMIT, cost=100)
        waits = asyncio.ensure_future(here.limiter.wait("key", LIMIT, cost=50))
        await asyncio.sleep(5)
        async with asyncio.timeout(1):
            with pytest.raises(KeyError):
                async with first:
                    raise KeyError
            await waits
        return here.world.now

    assert here.world.run(main()) == pytest.approx(5, abs=0.01)


def test_a_caller_that_is_cancelled_leaves_nothing_behind(here: Async) -> None:
    """Whatever the costs: those behind it move up by its cost, and the store forgets it."""

    async def main() -> None:
        await here.limiter.reserve("key", LIMIT, cost=100)
        tasks = []
        for name, cost in [("a", 10), ("b", 50), ("c", 10), ("d", 30), ("e", 10)]:
            tasks.append(asyncio.ensure_future(here.take(name, cost)))
            await asyncio.sleep(0.001)
        await asyncio.sleep(1)
        tasks[1].cancel()
        await asyncio.sleep(1)
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    here.world.run(main())
    assert [(name, round(at)) for name, at in here.came] == [("a", 10), ("c", 20), ("e", 30)]
    assert here.world.run(here.used()) == 100


def test_turns_of_other_algorithms_stay(here: Async) -> None:
    """Their entries in the store are those of the old turns, so nobody overtakes them either."""

    async def main() -> None:
        first = await here.limiter.reserve("key", LOG, cost=100)
        tasks = [asyncio.ensure_future(here.take(name, 50, limits=(LOG,))) for name in "ab"]
        await asyncio.sleep(10)
        await first.settle(0)
        await asyncio.gather(*tasks)

    here.world.run(main())
    assert [round(at) for _, at in here.came] == [100, 100]


def test_new_callers_of_other_processes_profit_at_once(here: Async) -> None:
    """Those that sleep keep their turns, here for at most what was given back."""

    async def main() -> float:
        first = await here.limiter.reserve("key", LIMIT, cost=100)
        other = AsyncLimiter(here.store)
        sleeping = asyncio.ensure_future(other.wait("key", LIMIT, cost=50))
        await asyncio.sleep(10)
        await first.settle(0)
        assert (await other.hit("key", LIMIT, cost=40)).allowed
        await sleeping
        return here.world.now

    assert here.world.run(main()) == pytest.approx(50, abs=0.01)


@pytest.mark.parametrize("seed", range(25))
def test_never_more_than_the_limits_pass_property(here: Async, seed: int) -> None:
    """In any interval, whatever is estimated, used, cancelled and settled late."""
    rnd = random.Random(seed)
    limits = ["100 per 100 seconds", "300 per 600 seconds"][: rnd.choice((1, 1, 2))]
    passed: list[tuple[int, int]] = []

    async def work(begins: float, cost: int, used: int, lasts: float, gives_up: float) -> None:
        await asyncio.sleep(begins)
        try:
            async with asyncio.timeout(gives_up):
                reservation = await here.limiter.reserve("key", *limits, cost=cost, timeout=rnd.choice((0, 50, None)))
        except TimeoutError:
            return
        if reservation.decision.allowed:
            passed.append((here.world.us, used))
            await asyncio.sleep(lasts)
            await reservation.settle(used)

    async def main() -> None:
        tasks = []
        for _ in range(60):
            cost = rnd.choice((1, 10, 30, 60, 100))
            used = rnd.choice((0, cost, rnd.randint(0, cost)))
            times = rnd.uniform(0, rnd.choice((10, 300))), rnd.uniform(0.001, 80), rnd.choice((rnd.uniform(0.001, 60), 1e6))
            tasks.append(asyncio.ensure_future(work(times[0], cost, used, *times[1:])))
        await asyncio.gather(*tasks)

    here.world.run(main())
    assert len(passed) >= 10
    for limit in map(Limit, limits):
        check_bound(limit, passed)
        # At the end the bucket owes at least what one owes that was charged what was used, when it passed.
        level, last = 0.0, passed[0][0]
        for at, used in passed:
            level, last = max(0.0, level - (at - last) * limit.count / limit.period_us) + used, at
        assert here.world.run(here.used(limit)) >= level - (here.world.us - last) * limit.count / limit.period_us - 0.001


def check_bound(limit: Limit, passed: list[tuple[int, int]]) -> None:
    """In no interval more passed than the burst and what the limit earns meanwhile."""
    for first, (began, _) in enumerate(passed):
        total = 0
        for at, used in passed[first:]:
            total += used
            assert total <= limit.burst + limit.count * (at - began) / limit.period_us + 0.001, (limit, began, at)


class Slow(MemoryStore):
    """Answers a few steps of the event loop later, as Redis does."""

    async def aspend(self, plan: Any, timeout: float = 0) -> Any:
        for _ in range(2):
            await asyncio.sleep(0)
        reading = self.spend(plan)
        for _ in range(2):
            await asyncio.sleep(0)
        return reading


def test_every_await_of_a_turn_can_be_cancelled(here: Async) -> None:
    here.limiter = AsyncLimiter(Slow(here.world))
    here.world.run(here.limiter.hit("key", LIMIT, cost=100))

    async def begin() -> None:
        await here.limiter.reserve("key", LIMIT, cost=1, timeout=200)

    async def look() -> None:
        assert await here.used() == 100
        assert not len(here.limiter._wait_queues)
        assert not len(here.limiter._bookings)

    async def main() -> None:
        for steps in range(40):
            task = asyncio.ensure_future(begin())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await look()

    here.world.run(main())
    assert here.world.now < 1


@pytest.mark.parametrize("hold", [None, 60])
def test_every_await_of_a_reservation_without_a_turn_can_be_cancelled(here: Async, hold: float | None) -> None:
    """Nobody has the reservation then, to settle or to cancel it."""
    here.limiter = AsyncLimiter(Slow(here.world))

    async def main() -> int:
        cancelled = 0
        for steps in range(40):
            task = asyncio.ensure_future(here.limiter.reserve("key", LIMIT, cost=1, hold=hold))
            for _ in range(steps):
                await asyncio.sleep(0)
            if task.cancel():
                cancelled += 1
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await task.result().cancel()
            assert await here.used() == 0
            assert not len(here.limiter._bookings)
        return cancelled

    assert 3 <= here.world.run(main()) < 40


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("ends", ["well", "badly", "settled", "refused"])
def test_a_block_gives_back_all_of_it_if_it_raises(world: World, kind: str, ends: str) -> None:
    """Otherwise its end changes nothing; without a settlement the estimate stays."""
    store = MemoryStore(world)
    sync, other = Limiter(store), AsyncLimiter(store)
    sync.hit("key", LIMIT, cost=95 if ends == "refused" else 0)

    def leave(*, is_last: bool) -> None:
        if is_last and ends != "well":
            raise KeyError(ends)

    def block() -> None:
        with sync.reserve("key", LIMIT, cost=10) as reservation:
            leave(is_last=ends != "settled")
            reservation.settle(3)
            leave(is_last=True)

    async def ablock() -> None:
        async with await other.reserve("key", LIMIT, cost=10) as reservation:
            leave(is_last=ends != "settled")
            await reservation.settle(3)
            leave(is_last=True)

    def unsettled() -> None:
        with sync.reserve("key", LIMIT, cost=10):
            pass

    async def aunsettled() -> None:
        async with await other.reserve("key", LIMIT, cost=10):
            pass

    if ends == "well":
        unsettled() if kind == "sync" else world.run(aunsettled())
    else:
        with pytest.raises(KeyError, match=ends):
            block() if kind == "sync" else world.run(ablock())
    assert sync.peek("key", LIMIT).windows[0].used == {"well": 10, "badly": 0, "settled": 3, "refused": 95}[ends]


def test_a_block_that_is_cancelled_gives_back(here: Async) -> None:
    """Also if it is cancelled again while it gives back."""
    here.limiter = AsyncLimiter(Slow(here.world))
    inside = asyncio.Event()

    async def block() -> None:
        async with await here.limiter.reserve("key", LIMIT, cost=10):
            inside.set()
            await asyncio.sleep(100)

    async def main() -> None:
        task = asyncio.ensure_future(block())
        await inside.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)
        assert await here.used() == 0

    here.world.run(main())


def test_what_a_block_raises_is_not_hidden_by_a_store_that_fails(world: World) -> None:
    class Fails(MemoryStore):
        fails = False

        def spend(self, plan: Any, timeout: float = 0) -> Any:
            if self.fails:
                raise StoreError("away")
            return super().spend(plan)

    store = Fails(world)

    def block() -> None:
        with Limiter(store).reserve("key", LIMIT, cost=10):
            store.fails = True
            raise KeyError

    with pytest.raises(KeyError):
        block()
    store.fails = False
    assert Limiter(store).peek("key", LIMIT).windows[0].used == 10


def test_a_closed_generator_keeps_the_estimate(world: World) -> None:
    """The garbage collector may close it anywhere, even inside the store."""
    limiter = Limiter(MemoryStore(world))

    def generator() -> Any:
        with limiter.reserve("key", LIMIT, cost=10):
            yield

    running = generator()
    next(running)
    running.close()
    assert limiter.peek("key", LIMIT).windows[0].used == 10


def test_the_wrong_block_is_told(world: World) -> None:
    store = MemoryStore(world)

    async def enter() -> None:
        async with Limiter(store).reserve("key", LIMIT):  # type: ignore[attr-defined]
            pass

    with pytest.raises(TypeError, match="expected with"):
        world.run(enter())
    reservation: Any = world.run(AsyncLimiter(store).reserve("key", LIMIT))
    with pytest.raises(TypeError, match="expected async with"), reservation:
        pass


def test_what_is_never_settled_is_forgotten_with_its_reservation(here: Async) -> None:
    async def main() -> None:
        kept = await here.limiter.reserve("key", LIMIT)
        await here.limiter.reserve("key", LIMIT)
        assert len(here.limiter._bookings) == 1
        await kept.settle(0)
        assert len(here.limiter._bookings) == 0

    here.world.run(main())


class Threads:
    """A sync limiter whose threads really sleep, on a store of real time."""

    def __init__(self, store: Any) -> None:
        self.limiter = Limiter(store, timeout=5, key_prefix=uuid4().hex)
        self.came: list[str] = []
        self.threads: list[threading.Thread] = []

    def take(self, name: str, cost: int, *limits: Any, **options: Any) -> None:
        """Reserve in a thread, once those before it have booked their turns."""

        def work() -> None:
            reservation = self.limiter.reserve("key", *limits, cost=cost, timeout=None, **options)
            self.came.append(name)
            reservation.settle(cost)

        asleep = len(self.limiter._sleepers)
        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()
        until(lambda: len(self.limiter._sleepers) > asleep)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self.threads)


@pytest.mark.parametrize("held", [None, 3600])
@pytest.mark.parametrize("kept", ["memory", "redis"])
def test_threads_that_sleep_move_up(kept: str, held: float | None, redis_server: RedisServer) -> None:
    """Without a poll; without the refund, they would sleep for up to an hour. Those whose turn is now wake in any order."""
    store = MemoryStore() if kept == "memory" else RedisStore(redis_server.url)
    here = Threads(store)
    first = here.limiter.reserve("key", "100/hour", cost=100)
    for name in ("second", "third", "fourth"):
        here.take(name, 30, "100/hour", hold=held)
    assert here.came == []
    first.settle(5)
    here.join()
    assert sorted(here.came) == ["fourth", "second", "third"]
    assert here.limiter.peek("key", "100/hour").windows[0].used == 95
    assert not here.limiter._sleepers
    store.close()


def test_threads_move_up_by_a_part(world: World) -> None:
    """Time goes on only as the sleeper sleeps: it wakes for the refund, and sleeps for the rest."""
    limiter = Limiter(MemoryStore(world))
    first = limiter.reserve("key", LIMIT, cost=100)
    sleep, slept = world.sleep, []

    def sleeping(seconds: float, wake: threading.Event | None = None) -> None:
        slept.append(round(seconds))
        if len(slept) == 1:
            sleep(10)
            first.settle(80)
            assert wake is not None
            assert wake.is_set()
        else:
            sleep(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("limitgate.process.waiting.sleep", sleeping)
        second = limiter.reserve("key", LIMIT, cost=60, timeout=None)
    assert slept == [60, 30]
    assert round(world.now) == 40
    second.settle(0)
    assert limiter.peek("key", LIMIT).windows[0].used == 40


def test_a_thread_that_is_interrupted_lets_the_others_move_up() -> None:
    here = Threads(MemoryStore())
    first = here.limiter.reserve("key", "100/hour", cost=100)
    here.take("second", 100, "100/hour")
    with pytest.MonkeyPatch.context() as patch:
        here.take("third", 20, "100/hour")

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("limitgate.process.waiting.sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            here.limiter.reserve("key", "100/hour", cost=50, timeout=None)
    first.cancel()
    until(lambda: here.came == ["second"])
    assert 119 <= here.limiter.peek("key", "100/hour").windows[0].used <= 121
    assert len(here.limiter._sleepers) == 1


def test_no_thread_passes_too_early_whatever_is_given_back() -> None:
    """Many threads reserve, settle less, and give back; the sum that passed never exceeds the limit."""
    limiter, passed, lock = Limiter(MemoryStore()), [0], threading.Lock()
    began = time.monotonic()

    def work(seed: int) -> None:
        rnd = random.Random(seed)
        for _ in range(10):
            cost = rnd.randint(1, 50)
            reservation = limiter.reserve("key", "1000/second burst 100", cost=cost, timeout=None)
            used = rnd.randint(0, cost)
            reservation.settle(used)
            with lock:
                passed[0] += used

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert passed[0] <= 100 + 1000 * (time.monotonic() - began)
    assert not limiter._sleepers
    assert not len(limiter._bookings)
