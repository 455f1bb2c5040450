"""What `pace` lets through, and when: spacing, costs, sources that fail, waiting that fails, tasks, threads and processes."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest

from limitgate import (
    AsyncLimiter,
    AsyncRedisStore,
    ConfigError,
    Configured,
    Limit,
    Limiter,
    MemoryStore,
    RateLimited,
    RedisStore,
    StoreError,
)
from limitgate.limiter.pace import evenly
from limitgate.process import waiting
from tests.support.attempts import at_best
from tests.support.doors import PATIENCE, PROCESS_PATIENCE
from tests.support.hammering import drain
from tests.support.redis_server import RedisServer
from tests.support.virtual import World


class Failing(MemoryStore):
    """A store that fails as often as it is told to."""

    failures = 0

    def spend(self, plan: Any, timeout: float = 0) -> Any:
        if plan.verb == "spend" and self.failures:
            self.failures -= 1
            raise StoreError("out of order")
        return super().spend(plan)


class Paced:
    """A limiter of either kind in a world of its own; its iterators are asked alike."""

    def __init__(self, kind: str, world: World) -> None:
        self.kind = kind
        self.world = world
        self.store = Failing(world)
        self.limiter: Any = Limiter(self.store) if kind == "sync" else AsyncLimiter(self.store)
        self._runner = asyncio.Runner(loop_factory=world.loop)

    def next(self, paced: Any) -> Any:
        """The next item."""
        if self.kind == "sync":
            return next(paced)
        return self._runner.run(_next(paced))

    def when(self, source: Any, *limits: Any, count: int | None = None, **options: Any) -> list[tuple[Any, float]]:
        """Items and when they came, up to so many."""
        return self.rest(self.limiter.pace(source, *limits, **options), count)

    def rest(self, paced: Any, count: int | None = None) -> list[tuple[Any, float]]:
        came: list[tuple[Any, float]] = []
        ends = StopIteration if self.kind == "sync" else StopAsyncIteration
        with contextlib.suppress(ends):
            while count is None or len(came) < count:
                item = self.next(paced)
                came.append((item, self.world.now))
        return came

    def do(self, verb: str, *args: Any, **options: Any) -> Any:
        """Call another method of the limiter."""
        answer = getattr(self.limiter, verb)(*args, **options)
        return answer if self.kind == "sync" else self._runner.run(answer)

    def close(self) -> None:
        self._runner.close()


async def _next(paced: AsyncIterator[Any]) -> Any:
    return await anext(paced)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture(params=["sync", "async"])
def paced(request: pytest.FixtureRequest, world: World) -> Iterator[Paced]:
    subject = Paced(request.param, world)
    yield subject
    subject.close()


def times(came: list[tuple[Any, float]]) -> list[float]:
    return [at for _, at in came]


# --- spacing ----------------------------------------------------------------------------------------------------------


def test_items_are_evenly_spaced(paced: Paced) -> None:
    """Whatever the burst, an item comes an emission interval after the one before; their order is the source's."""
    assert paced.when("abcd", "10/second") == [("a", 0), ("b", 0.1), ("c", 0.2), ("d", 0.3)]


def test_bursts_are_let_through_where_they_are_wanted(paced: Paced) -> None:
    """Without `even` the limits are as they are given."""
    assert times(paced.when("abcde", "10/second burst 3", even=False)) == [0, 0, 0, 0.1, 0.2]


def test_a_fast_rate_comes_ten_milliseconds_at_a_time(paced: Paced) -> None:
    """No timer is finer than a millisecond, so at a thousand a second ten may come at once: the rate stays exact."""
    came = times(paced.when(range(30), "1000/second"))
    assert came[:10] == [0] * 10
    assert came[-1] == pytest.approx(0.020, abs=0.0001)
    assert all(later - earlier <= 0.0011 for earlier, later in pairwise(came))


@pytest.mark.parametrize(
    ("limit", "cost", "burst"),
    [
        ("99/second", 1, 1),
        ("100/second", 1, 1),
        ("199/second", 1, 1),
        ("200/second", 1, 2),
        ("1000/second", 1, 10),
        ("60000/minute", 1, 10),
        ("1000000/second", 1, 10_000),
        ("1/day", 1, 1),
        ("1 per 366 days", 1, 1),
        ("1000/second burst 4", 1, 4),
        ("100/second", 0, 1),
        ("100/second", 30, 30),
        ("100/second", 300, 100),
        ("1000/second", 30, 30),
    ],
)
def test_the_burst_of_an_evenly_spaced_limit(limit: str, cost: int, burst: int) -> None:
    """What comes in ten milliseconds, at least one item, or what the item costs, but never more than the limit has."""
    given = Limit(limit)
    even = evenly(given, cost)
    assert (even.burst, even.count, even.period) == (burst, given.count, given.period)


def test_what_else_a_limit_says_stays(paced: Paced) -> None:
    """An evenly spaced limit counts in the same bucket, under the same name, and may still borrow."""
    even = evenly(Limit("10/second burst 5", algorithm="token_bucket", borrow=True), 1)
    assert (even.algorithm, even.borrow, even.burst) == ("token_bucket", True, 1)
    assert times(paced.when([7, 1], Limit("10/second burst 5", borrow=True), cost=lambda item: item)) == [0, 0.7]


def test_a_lease_is_no_matter(paced: Paced) -> None:
    """Turns are booked one by one, whatever could be taken in advance."""
    assert times(paced.when("abc", Limit("10/second", lease=10))) == [0, 0.1, 0.2]
    assert times(paced.when("ab", Limit("10/second", lease=10), even=False, key="other")) == [0.2, 0.2]


def test_the_slowest_of_several_limits_spaces(paced: Paced) -> None:
    """All limits apply together."""
    assert times(paced.when("abc", "10/second", "60/minute")) == [0, 1, 2]
    assert times(paced.when("abcd", "10/second burst 1", "60/minute burst 2", even=False, key="other")) == [2, 2.1, 3, 4]


def test_once_a_day(paced: Paced) -> None:
    """However slow, everything comes in its time."""
    assert times(paced.when("abc", "1/day")) == [0, 86400, 172_800]


def test_a_limit_that_warms_up(paced: Paced) -> None:
    """It spaces by itself, so it is used as it is given."""
    came = times(paced.when("abc", Limit("10/second", warm_up=1), even=False))
    assert came[0] == 0
    assert came[1] > 0.2


def test_a_slow_consumer_is_not_held_up(paced: Paced) -> None:
    """Who takes longer than the rate asks waits for nothing, and what he missed does not come in a burst."""
    it = paced.limiter.pace(range(10), "10/second")
    for number in range(3):
        assert (paced.next(it), paced.world.now) == (number, pytest.approx(number * 0.35, abs=0.001))
        paced.world.advance(0.35)
    paced.world.advance(5)
    assert [round(at - 6.05, 3) for at in times(paced.rest(it, 3))] == [0, 0.1, 0.2]


def test_one_key_is_one_rate(paced: Paced) -> None:
    """Iterators take turns under the same key, and count apart under another; it is the key of the other verbs, too."""
    first, second = (paced.limiter.pace(iter(name * 3), "10/second") for name in "ab")
    came = [(paced.next(each), paced.world.now) for _ in range(2) for each in (first, second)]
    assert came == [("a", 0), ("b", 0.1), ("a", 0.2), ("b", 0.3)]
    assert times(paced.when("cd", "10/second", key="else")) == [0.3, 0.4]
    assert paced.do("peek", "pace", "10/second").windows[0].used == 0  # one of the two has just been earned back


# --- costs ------------------------------------------------------------------------------------------------------------


def test_a_cost_is_paid_before_the_next_item(paced: Paced) -> None:
    """A dear item passes as soon as all before it is paid for, and the one after it waits for that."""
    assert times(paced.when([1, 5, 1, 0, 2], "10/second", cost=lambda item: item)) == [0, 0.1, 0.6, 0.6, 0.7]
    assert times(paced.when("ab", "10/second", cost=3, key="other")) == [0.7, 1.0]


def test_a_cost_that_never_fits(paced: Paced) -> None:
    """It is above the burst that the limit was given; the item is kept, and let through if it turns out to cost less."""
    costs = [11, 11, 10]
    it = paced.limiter.pace("ab", "10/second", cost=lambda _: costs.pop(0) if costs else 1)
    for _ in range(2):
        with pytest.raises(RateLimited, match="never fits"):
            paced.next(it)
    assert paced.rest(it) == [("a", 0), ("b", 1)]


@pytest.mark.parametrize(("cost", "error"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError), (None, TypeError)])
def test_a_cost_that_makes_no_sense(paced: Paced, cost: Any, error: type[Exception]) -> None:
    """One that is given shows at once, one that is worked out at its item, which takes nothing and is kept."""
    with pytest.raises(error, match="cost"):
        paced.limiter.pace("ab", "10/second", cost=cost)
    costs = {"a": [1], "b": [cost, 1]}
    it = paced.limiter.pace("ab", "10/second", cost=lambda item: costs[item].pop(0))
    assert paced.next(it) == "a"
    with pytest.raises(error, match="cost"):
        paced.next(it)
    assert paced.rest(it) == [("b", 0.1)]


def test_a_cost_that_raises(paced: Paced) -> None:
    """Its error is passed on and the item kept; what would end the loop in silence is an error."""
    failures: list[BaseException] = [KeyError("weight"), StopIteration(), StopAsyncIteration()]

    def cost(_: str) -> int:
        if failures:
            raise failures.pop(0)
        return 1

    it = paced.limiter.pace("ab", "10/second", cost=cost)
    with pytest.raises(KeyError, match="weight"):
        paced.next(it)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cost of an item"):
            paced.next(it)
    assert [item for item, _ in paced.rest(it)] == ["a", "b"]


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "even", "why"),
    [
        (Limit("10/day", algorithm="fixed_window"), True, "can't book turns"),
        (Limit("10/day", algorithm="sliding_window"), False, "can't book turns"),
        ("20 at once", True, "can't book turns"),
        ("20 at once", False, "can't book turns"),
        (Limit("10/second", warm_up=1), True, "even=False"),
        (Configured("orders"), True, "even=False"),
        ("ten a day", True, "is not a limit"),
    ],
    ids=repr,
)
def test_limits_that_cannot_pace(paced: Paced, limit: Any, even: bool, why: str) -> None:  # noqa: FBT001 - a case of the table
    """That is said when they are given, before anything is read."""
    with pytest.raises(ConfigError, match=why):
        paced.limiter.pace(_never(), limit, even=even)


def _never() -> Iterator[None]:
    pytest.fail("this was not to be read")
    yield


def test_what_else_is_said_at_once(paced: Paced) -> None:
    """A source that is none, a key that is no text, and no limits at all."""
    for source, limits, key in ((42, ["1/day"], "pace"), ("ab", ["1/day"], 42), ("ab", [], "pace")):
        with pytest.raises(TypeError):
            paced.limiter.pace(source, *limits, key=key)


def test_limits_that_are_kept_in_the_store(paced: Paced) -> None:
    """They pace as they are, bursts included, and another rate holds as soon as it is known."""
    paced.do("configure", "orders", "10/second burst 1")
    it = paced.limiter.pace(iter(int, 1), Configured("orders"), even=False)
    assert times(paced.rest(it, 3)) == [0, 0.1, 0.2]
    paced.do("configure", "orders", "5/second burst 1")
    assert [round(at, 3) for at in times(paced.rest(it, 3))] == [0.4, 0.6, 0.8]


# --- sources ----------------------------------------------------------------------------------------------------------


def test_the_source_is_asked_when_somebody_asks(paced: Paced) -> None:
    """Nothing is read ahead, not even while nothing is asked for."""
    read = []

    def source() -> Iterator[int]:
        for number in range(5):
            read.append(number)
            yield number

    it = paced.limiter.pace(source(), "10/second")
    assert read == []
    for number in range(3):
        assert paced.next(it) == number
        assert read == list(range(number + 1))


def test_a_slow_source_costs_no_turns(paced: Paced) -> None:
    """A turn is booked once there is an item for it."""

    def source() -> Iterator[int]:
        for number in range(3):
            paced.world.advance(0.25)
            yield number

    assert times(paced.when(source(), "10/second")) == [0.25, 0.5, 0.75]


def test_the_end_is_the_end(paced: Paced) -> None:
    """Once a source has ended it is not asked again, even one that would begin anew."""

    class Again:
        asked = 0

        def __iter__(self) -> Again:
            return self

        def __next__(self) -> int:
            self.asked += 1
            if self.asked % 2:
                return self.asked
            raise StopIteration

    source, ends = Again(), StopIteration if paced.kind == "sync" else StopAsyncIteration
    it = paced.limiter.pace(source, "10/second")
    assert paced.next(it) == 1
    for _ in range(3):
        with pytest.raises(ends):
            paced.next(it)
    assert source.asked == 2
    assert paced.when([], "10/second") == []


def test_an_error_of_the_source_is_passed_on(paced: Paced) -> None:
    """Asked again, a source that can go on does so, and a generator has ended."""

    class Stumbling:
        def __init__(self) -> None:
            self.left: list[Any] = [1, OSError("gone"), 2]

        def __iter__(self) -> Stumbling:
            return self

        def __next__(self) -> Any:
            if not self.left:
                raise StopIteration
            item = self.left.pop(0)
            if isinstance(item, OSError):
                raise item
            return item

    it = paced.limiter.pace(Stumbling(), "10/second")
    assert paced.next(it) == 1
    with pytest.raises(OSError, match="gone") as raised:
        paced.next(it)
    assert raised.value.__context__ is None
    assert paced.rest(it) == [(2, 0.1)]

    generator = paced.limiter.pace((1 // number for number in (1, 0, 1)), "10/second")
    assert paced.next(generator) == 1
    with pytest.raises(ZeroDivisionError):
        paced.next(generator)
    assert paced.rest(generator) == []


def test_items_may_be_anything(paced: Paced) -> None:
    """None, exceptions and empty things are items like others."""
    items = [None, 0, "", StopIteration(), [], ...]
    assert [item for item, _ in paced.when(items, "10/second")] == items


def test_a_loop_that_is_left_leaves_the_rest(paced: Paced) -> None:
    """What was not asked for stays in the source."""
    source = iter(range(10))
    paced.when(source, "10/second", count=3)
    assert next(source) == 3


def test_an_async_source(world: World) -> None:
    """An async iterable is awaited: while it is slow others go on."""

    async def source() -> AsyncIterator[int]:
        for number in range(3):
            await asyncio.sleep(0.25)
            yield number

    async def main() -> list[tuple[int, float]]:
        limiter = AsyncLimiter(MemoryStore(world))
        return [(item, world.now) async for item in limiter.pace(source(), "10/second")]

    assert world.run(main()) == [(0, 0.25), (1, 0.5), (2, 0.75)]


def test_an_async_iterator_that_is_no_iterable(world: World) -> None:
    """What `async for` loops over can be paced, also where an iterator has nothing but the next item."""

    class Numbers:
        def __init__(self) -> None:
            self.left = [1, 2]

        async def __anext__(self) -> int:
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop(0)

    class Source:
        def __aiter__(self) -> Numbers:
            return Numbers()

    async def main() -> list[int]:
        return [item async for item in AsyncLimiter(MemoryStore(world)).pace(Source(), "10/second")]

    assert world.run(main()) == [1, 2]


def test_a_source_that_asks_its_own_pace(world: World) -> None:
    """That is an error and nobody hangs, with tasks as with threads."""

    def source() -> Iterator[int]:
        yield next(blocking)

    async def asource() -> AsyncIterator[int]:
        yield await anext(paced)

    blocking = Limiter(MemoryStore(world)).pace(source(), "10/second")
    with pytest.raises(ValueError, match="already executing"):
        next(blocking)
    paced = AsyncLimiter(MemoryStore(world)).pace(asource(), "10/second")
    with pytest.raises(RuntimeError, match="reads from the iterator"):
        world.run(_next(paced))


# --- waiting that fails -----------------------------------------------------------------------------------------------


def test_what_the_store_failed_for_comes_next(paced: Paced) -> None:
    """The error is the consumer's, who may go on with the same iterator: nothing is lost and nothing comes twice."""
    it = paced.limiter.pace("abc", "10/second")
    assert paced.next(it) == "a"
    paced.store.failures = 3
    for _ in range(3):
        with pytest.raises(StoreError):
            paced.next(it)
    assert paced.rest(it) == [("b", 0.1), ("c", 0.2)]


def test_what_was_interrupted_comes_next(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler may raise while a thread sleeps; the turn is given back and the item kept."""
    it = Limiter(MemoryStore(world)).pace("abc", "1/minute")
    assert next(it) == "a"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(waiting, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(it)
    assert [(item, world.now) for item in it] == [("b", 60), ("c", 120)]


def test_what_was_cancelled_comes_next(world: World) -> None:
    """Whoever is cancelled in the middle of a turn gives it back, and the item is the next one."""

    async def main() -> list[tuple[str, float]]:
        paced = AsyncLimiter(MemoryStore(world)).pace("abc", "1/minute")
        assert await anext(paced) == "a"
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(paced), 7)
        return [(item, world.now) async for item in paced]

    assert world.run(main()) == [("b", 60), ("c", 120)]


@pytest.mark.parametrize("passes", range(6))
def test_cancelled_at_whatever_step_nothing_is_lost(redis_server: RedisServer, passes: int) -> None:
    """Over a real Redis, whether it is reading, booking or waiting when it is cancelled."""

    async def source() -> AsyncIterator[int]:
        for number in range(4):
            yield number

    async def main() -> list[int]:
        async with AsyncLimiter(redis_server.url, timeout=5, key_prefix=uuid4().hex) as limiter:
            paced = limiter.pace(source(), "100/second")
            came = [await anext(paced)]
            asking = asyncio.create_task(_next(paced))
            for _ in range(passes):
                await asyncio.sleep(0)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            return came + [item async for item in paced]

    assert asyncio.run(main()) == [0, 1, 2, 3]


def test_whoever_cancels_a_reading_cancels_the_source(world: World) -> None:
    """As in any loop over it: a generator ends by that, an iterator of its own can go on."""

    class Source:
        def __init__(self) -> None:
            self.number = 0

        def __aiter__(self) -> Source:
            return self

        async def __anext__(self) -> int:
            await asyncio.sleep(1)
            self.number += 1
            return self.number

    async def generator() -> AsyncIterator[int]:
        async for number in Source():
            yield number

    async def main() -> None:
        limiter = AsyncLimiter(MemoryStore(world))
        ended, going_on = limiter.pace(generator(), "10/second"), limiter.pace(Source(), "10/second")
        for paced in (ended, going_on):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(paced), 0.5)
        assert [item async for item in ended] == []
        assert await anext(going_on) == 1

    world.run(main())


# --- bans -------------------------------------------------------------------------------------------------------------


def test_a_ban_makes_everybody_pause(paced: Paced) -> None:
    """Nothing is let through until it is over, and then at the rate as before."""
    it = paced.limiter.pace("abc", "10/second")
    paced.do("ban", "pace", 2.5)
    paced.do("ban", "else")
    assert paced.rest(it) == [("a", 2.5), ("b", 2.6), ("c", 2.7)]


def test_a_pardon_is_noticed_within_a_second(paced: Paced, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the end of a ban looks again every second."""
    paced.do("ban", "pace", 1000)
    looked, ask = [], paced.store.spend

    def watched(plan: Any, timeout: float = 0) -> Any:
        looked.append(paced.world.now)
        if len(looked) == 4:
            Limiter(paced.store).pardon("pace")
        return ask(plan, timeout)

    it = paced.limiter.pace("a", "10/second")
    monkeypatch.setattr(paced.store, "spend", watched)
    assert paced.rest(it) == [("a", 3)]
    assert [at for at in looked if at] == [1, 2, 3, 3]  # the last one twice, as the pardon asks, too


def test_a_pardon_by_another_process_is_noticed(redis_server: RedisServer) -> None:
    """A refusal that is remembered here does not hide it."""
    prefix = uuid4().hex

    async def main() -> float:
        async with (
            AsyncLimiter(redis_server.url, timeout=5, key_prefix=prefix) as limiter,
            AsyncLimiter(redis_server.url, timeout=5, key_prefix=prefix) as other,
        ):
            await other.ban("pace", 1000)
            asking = asyncio.create_task(_next(limiter.pace("a", "10/second")))
            await asyncio.sleep(0.5)
            assert not asking.done()
            await other.pardon("pace")
            began = time.monotonic()
            await asking
            return time.monotonic() - began

    assert asyncio.run(main()) < 2.2


# --- several who ask --------------------------------------------------------------------------------------------------


def test_several_tasks_ask_one_iterator(world: World) -> None:
    """Each item goes to one of them, at the rate, and an async generator is never entered twice."""

    async def source() -> AsyncIterator[int]:
        for number in range(12):
            await asyncio.sleep(0.01)
            yield number

    async def main() -> list[tuple[int, float]]:
        paced = AsyncLimiter(MemoryStore(world)).pace(source(), "10/second")
        came: list[tuple[int, float]] = []

        async def worker() -> None:
            async for item in paced:
                came.append((item, round(world.now, 2)))  # noqa: PERF401 - in the order in which they come

        await asyncio.gather(*[worker() for _ in range(4)])
        return came

    assert world.run(main()) == [(number, round(0.01 + number * 0.1, 2)) for number in range(12)]


def test_of_several_tasks_one_is_cancelled(world: World) -> None:
    """Its item goes to another one, and its turn too."""

    async def main() -> list[int]:
        paced = AsyncLimiter(MemoryStore(world)).pace(range(6), "10/second")
        came = []

        async def worker() -> None:
            async for item in paced:
                came.append(item)  # noqa: PERF401 - each at once, as one of them is cancelled

        workers = [asyncio.create_task(worker()) for _ in range(3)]
        await asyncio.sleep(0.05)
        workers[1].cancel()
        await asyncio.wait(workers)
        assert world.now == pytest.approx(0.5, abs=0.01)
        return came

    assert sorted(world.run(main())) == list(range(6))


def test_one_has_at_most_one_item_in_hand(world: World) -> None:
    """Of a source, no more is read than there are tasks that ask."""

    async def main() -> None:
        source = iter(range(10))
        paced = AsyncLimiter(MemoryStore(world)).pace(source, "1/minute")
        asking = [asyncio.create_task(_next(paced)) for _ in range(3)]
        await asyncio.sleep(1)
        assert next(source) == 3
        for task in asking[1:]:
            task.cancel()
        await asyncio.wait(asking)
        assert [await anext(paced) for _ in range(3)] == [1, 2, 4]

    world.run(main())


def test_several_threads_ask_one_iterator() -> None:
    """Each item goes to one of them, and a plain generator is never entered twice."""
    entered = []

    def source() -> Iterator[int]:
        for number in range(60):
            entered.append(threading.get_ident())
            time.sleep(0.001)
            yield number

    def used(_: object) -> list[int]:
        items = []
        for item in paced:
            items.append(item)
            time.sleep(0.001)
        return items

    paced = Limiter(MemoryStore()).pace(source(), "1000000/second")
    with ThreadPoolExecutor(6) as pool:
        came = [item for items in pool.map(used, range(6)) for item in items]
    assert sorted(came) == list(range(60))
    assert len(set(entered)) > 1


def test_an_item_that_one_gave_up_goes_to_one_who_waits_for_the_source(world: World) -> None:
    """Also where the source has come to its end meanwhile."""

    async def source() -> AsyncIterator[str]:
        yield "a"
        yield "b"
        await asyncio.sleep(10)

    async def main() -> None:
        paced = AsyncLimiter(MemoryStore(world)).pace(source(), "1/minute")
        assert await anext(paced) == "a"
        gives_up, reads, waits = [asyncio.create_task(_next(paced)) for _ in range(3)]
        await asyncio.sleep(1)
        gives_up.cancel()
        assert (await reads, world.now) == ("b", 60)
        with pytest.raises(StopAsyncIteration):
            await waits

    world.run(main())


def test_an_item_that_one_thread_gave_up_goes_to_one_who_waits_for_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads do so as well."""
    goes_on, fails, store = threading.Event(), threading.Event(), MemoryStore()

    def source() -> Iterator[str]:
        yield "a"
        goes_on.wait(PATIENCE)

    def failing(plan: Any, timeout: float = 0) -> Any:
        fails.wait(PATIENCE)
        raise StoreError("out of order")

    paced = Limiter(store).pace(source(), "1/minute")
    with ThreadPoolExecutor(3) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(store, "spend", failing)
            asking = []
            for _ in range(3):
                asking.append(pool.submit(next, paced, "the end"))
                time.sleep(0.05)
            fails.set()
            with pytest.raises(StoreError):
                asking[0].result(PATIENCE)
        goes_on.set()
        assert sorted([each.result(PATIENCE) for each in asking[1:]]) == ["a", "the end"]


def test_threads_whose_store_fails_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept of one is taken by another, once."""
    store = MemoryStore()
    spend, numbers, guard = store.spend, iter(range(10**9)), threading.Lock()

    def stumbling(plan: Any, timeout: float = 0) -> Any:
        with guard:
            number = next(numbers)
        if number % 3 == 0:
            raise StoreError("out of order")
        return spend(plan, timeout)

    paced = Limiter(store).pace(range(600), "1000000/second")
    monkeypatch.setattr(store, "spend", stumbling)

    def worker(_: int) -> list[int]:
        came = []
        while True:
            try:
                came.append(next(paced))
            except StoreError:
                continue
            except StopIteration:
                return came

    with ThreadPoolExecutor(8) as pool:
        came = [item for items in pool.map(worker, range(8)) for item in items]
    assert sorted(came) == list(range(600))


# --- the true time ----------------------------------------------------------------------------------------------------


def test_processes_share_one_rate(redis_server: RedisServer) -> None:
    """Together they let through what the limit says: no more at any time, and more than if all counted for each of them."""
    each, processes, rate = 100, 3, 200

    def complaints() -> list[str]:
        took = _times_of_items(redis_server, f"{rate}/second", each, processes)
        assert len(took) == each * processes
        assert [place for place, seconds in enumerate(took) if seconds < place / rate - 0.01] == []
        slow = took[-1] > 0.8 * processes * len(took) / rate
        return [f"{len(took)} items took {took[-1]} seconds"] if slow else []

    assert at_best(complaints) == []


def _times_of_items(redis_server: RedisServer, limit: str, each: int, processes: int) -> list[float]:
    """Seconds at which the items of so many processes came, since the first of these began."""
    context, prefix = multiprocessing.get_context("spawn"), uuid4().hex
    start, came = context.Barrier(processes), context.Queue()
    arguments = ((redis_server.url, prefix), limit, each, start, came)
    running = [context.Process(target=drain, args=arguments) for _ in range(processes)]
    for process in running:
        process.start()
    began, seen = [], []
    for _ in running:
        ready, *items = came.get(timeout=PROCESS_PATIENCE)
        began.append(ready)
        seen += items
    for process in running:
        process.join(PROCESS_PATIENCE)
    return [at - min(began) for at in sorted(seen)]


def test_a_redis_that_goes_away_and_comes_back(own_redis: RedisServer) -> None:
    """Whoever goes on with the same iterator gets every item once and in order."""

    async def main() -> list[int]:
        async with AsyncLimiter(own_redis.url, timeout=0.2) as limiter:
            paced, came, failed = limiter.pace(range(40), "100/second"), [], 0
            while True:
                try:
                    async for item in paced:
                        came.append(item)
                        if len(came) == 20 and not failed:
                            own_redis.kill()
                except StoreError:
                    failed += 1
                    if failed == 3:
                        await asyncio.to_thread(own_redis.start)
                    await asyncio.sleep(0.05)
                else:
                    assert failed >= 3
                    return came

    assert asyncio.run(main()) == list(range(40))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_on_redis(redis_server: RedisServer, kind: str) -> None:
    """The same over a real Redis, costs that differ included."""
    prefix, limit, weigh = uuid4().hex, "100/second", int
    if kind == "sync":
        with contextlib.closing(RedisStore(redis_server.url)) as store:
            came = list(Limiter(store, timeout=5, key_prefix=prefix).pace("1315", limit, cost=weigh))
    else:

        async def main() -> list[str]:
            store = AsyncRedisStore(redis_server.url)
            paced = AsyncLimiter(store, timeout=5, key_prefix=prefix).pace("1315", limit, cost=weigh)
            found = [item async for item in paced]
            await store.aclose()
            return found

        came = asyncio.run(main())
    assert came == list("1315")
