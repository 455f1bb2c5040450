"""Work under an adaptive limit: who gets in, who waits, what is learned, on event loops, under threads and over a fork."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from limitgate import AsyncLimiter, ConfigError, Decision, Limiter, MemoryStore, RateLimited, Window, testing
from limitgate.limiter.adaptive import AdaptiveWork, AsyncAdaptiveWork, Work, adaptive_work, terms_of
from limitgate.overload.adaptive_limit import AdaptiveLimit
from tests.support.doors import PATIENCE
from tests.support.virtual import World

NOWHERE = "redis://127.0.0.1:1"
"""A store that fails whoever asks it."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def until(condition: Any) -> None:
    """Wait for what another thread brings about."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def sync_work(**options: Any) -> AdaptiveWork:
    return Limiter(NOWHERE).adaptive("db", **options)


def work_of(world: World, **options: Any) -> AsyncAdaptiveWork:
    """Work by the clock of a world."""
    return AsyncAdaptiveWork(Work("db", terms_of(options), world.monotonic))


def test_whoever_finds_no_room_is_refused_with_the_limit_in_force() -> None:
    """The store is never asked, and a crowd comes back at different times."""
    work = sync_work(min=2, max=2)
    with work as first, work as second:
        assert (first.allowed, first.limit, first.remaining, first.granted, first.delay) == (True, 2, 1, 1, 0.0)
        assert second.windows == (Window(None, 2, 0, 0, 2, 0.0, 0.0),)
        waits = set()
        for _ in range(200):
            with pytest.raises(RateLimited) as refused, work:
                pass
            decision = refused.value.decision
            assert decision.windows == (Window(None, 2, 0, 0, 2, 0.0, decision.retry_after),)
            waits.add(decision.retry_after)
        assert not decision.allowed
        assert len(waits) > 3
        assert waits <= set(range(1, 12))
        assert pickle.loads(pickle.dumps(refused.value)).decision == decision
        assert work.in_flight == 2
    assert work.in_flight == 0


def test_whoever_finds_no_room_is_refused_on_asyncio() -> None:

    async def main() -> None:
        work = AsyncLimiter(NOWHERE).adaptive("db", min=1, max=1)
        async with work as first:
            assert first.windows == (Window(None, 1, 0, 0, 1, 0.0, 0.0),)
            with pytest.raises(RateLimited) as refused:
                async with work:
                    pass
            assert refused.value.decision.windows[0][:5] == (None, 1, 0, 0, 1)
            assert 1 <= refused.value.decision.retry_after <= 11
        async with work:
            assert (work.name, work.limit, work.in_flight, work.waiting) == ("db", 1, 1, 0)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [AsyncLimiter, Limiter])
def test_one_name_is_one_object(kind: Any) -> None:
    limiter = kind(NOWHERE)
    work = limiter.adaptive("db", min=2, tolerance=2)
    assert limiter.adaptive("db", min=2) is work
    assert limiter.adaptive("db") is work
    assert limiter.adaptive("mail") is not work
    assert kind(NOWHERE).adaptive("db") is not work
    with pytest.raises(ConfigError, match=r"'db' already exists with other options, expected the same options, no"):
        limiter.adaptive("db", min=3)


def test_threads_that_make_it_at_once_have_the_same() -> None:
    """Another thread makes it just when this one has found that there is none."""
    known: dict[str, AdaptiveWork] = {}
    theirs = AdaptiveWork(Work("db", terms_of({})))

    def make_later(work: Work) -> AdaptiveWork:
        known["db"] = theirs
        return AdaptiveWork(work)

    assert adaptive_work(known, make_later, "db", {}) is known["db"] is theirs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"minimum": 3}, "adaptive: minimum: unknown option, expected one of min, max,"),
        ({"min": 0}, "adaptive: min: expected a whole number of requests from 1"),
        ({"min": 9, "max": 3}, "adaptive: max: expected at least 9"),
        ({"tolerance": 1}, "adaptive: tolerance: expected a number above 1"),
        ({"delay": "soon"}, "adaptive: delay: expected a duration above 0"),
        ({"max_delay": -1}, "adaptive: max_delay: expected a duration of at most 60 s, such as 50ms or 0.05, not -1"),
        ({"max_delay": "2m"}, "adaptive: max_delay: expected a duration of at most 60 s, such as 50ms or 0.05, not '2m'"),
        ({"max_delay": True}, "adaptive: max_delay: expected a duration"),
        ({"reserve": 0.5}, "adaptive: reserve: 0.5 is not a reserve, expected a share above 0 and up to 49 %"),
    ],
)
def test_mistakes_say_what_was_expected(options: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Limiter(NOWHERE).adaptive("db", **options)
    assert str(error.value).startswith(said)


def test_all_mistakes_are_told() -> None:
    with pytest.raises(ConfigError) as error:
        Limiter(NOWHERE).adaptive("db", min=0, max_delay=-1, reserve=1.5, others=1)  # type: ignore[call-arg]
    assert [each.field for each in error.value.every] == [("others",), ("min",), ("max_delay",), ("reserve",)]


@pytest.mark.parametrize("name", ["", None, 7])
def test_a_name_is_text(name: Any) -> None:
    with pytest.raises(ConfigError, match="is not a name, expected text that is not empty"):
        Limiter(NOWHERE).adaptive(name)


@pytest.mark.parametrize("priority", ["urgent", None, ["high"]])
@pytest.mark.parametrize("kind", [AsyncLimiter, Limiter])
def test_a_priority_is_one_of_three(kind: Any, priority: Any) -> None:
    with pytest.raises(ConfigError, match="is not a priority, expected one of 'high', 'normal', 'low'"):
        kind(NOWHERE).adaptive("db").with_priority(priority)


def test_a_reserve_is_kept_for_higher_priorities() -> None:
    work = sync_work(min=4, max=4, reserve="25%")
    low, high = work.with_priority("low"), work.with_priority("high")
    with low, low:
        with pytest.raises(RateLimited), low:
            pass
        with work:
            with pytest.raises(RateLimited), work:
                pass
            with high, pytest.raises(RateLimited), high:
                pass
    assert work.in_flight == high.in_flight == 0


def test_functions_are_blocks() -> None:
    """Each call counts, the calls of a function within itself, too."""
    work = sync_work(min=2, max=2)

    @work
    def nested(depth: int) -> int:
        """Call itself."""
        return depth + nested(depth - 1) if depth else work.in_flight

    assert nested(1) == 3  # 1 + 2 in flight
    with pytest.raises(RateLimited):
        nested(2)
    assert (work.in_flight, nested.__doc__, nested.__name__) == (0, "Call itself.", "nested")


def test_async_functions_are_blocks() -> None:

    async def main() -> None:
        work = AsyncLimiter(NOWHERE).adaptive("db", min=2, max=2)

        @work.with_priority("low")
        async def read(fails: bool = False) -> int:  # noqa: FBT001, FBT002
            await asyncio.sleep(0)
            if fails:
                raise KeyError
            return work.in_flight

        answers = await asyncio.gather(read(), read(), read(), return_exceptions=True)
        assert [type(each) for each in answers] == [int, int, RateLimited]
        with pytest.raises(KeyError):
            await read(fails=True)
        assert work.in_flight == 0

    asyncio.run(main())


def test_functions_of_the_other_kind_are_mistakes() -> None:
    async def aread() -> None: ...

    def stream() -> Iterator[int]:
        yield 1

    async def astream() -> AsyncIterator[int]:
        yield 1

    plain, on_asyncio = sync_work(), AsyncLimiter(NOWHERE).adaptive("db")
    with pytest.raises(TypeError, match="is async, expected a plain function, or an AsyncLimiter"):
        plain(aread)
    for generator in (stream, astream):
        with pytest.raises(TypeError, match="is a generator, expected a function whose work is done when it returns"):
            plain(generator)
        expected = "is a generator" if generator is astream else "is not an async function, expected one, or a Limiter"
        with pytest.raises(TypeError, match=expected):
            on_asyncio(generator)  # type: ignore[arg-type]


def test_what_is_no_function_is_told_at_the_decorator() -> None:
    """Else a class is one no more, a class method fails when it is called, and async work ends before it has begun."""

    class Query:
        async def __call__(self, number: int) -> int:
            return number

    plain, on_asyncio = sync_work(), AsyncLimiter(NOWHERE).adaptive("db", min=1, max=1)
    with pytest.raises(TypeError, match="is a class, expected a function, such as one of its methods"):
        plain(Query)
    with pytest.raises(TypeError, match="cannot be called, expected a function, or @classmethod above this decorator"):
        plain(classmethod(lambda cls: cls))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"5 cannot be called, expected a function$"):
        plain(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is async, expected a plain function, or an AsyncLimiter"):
        plain(Query())
    with pytest.raises(TypeError, match="is not an async function"):
        on_asyncio(Query)  # type: ignore[arg-type]

    async def main() -> None:
        query = on_asyncio(Query())
        assert await query(1) == 1
        async with on_asyncio:
            with pytest.raises(RateLimited):
                await query(2)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (TimeoutError(), "failed"),
        (ConnectionResetError(), "failed"),
        (asyncio.CancelledError(), "failed"),
        (KeyError(), "untaught"),
        (GeneratorExit(), "untaught"),
        (KeyboardInterrupt(), "untaught"),
    ],
)
def test_what_a_block_teaches(error: BaseException | None, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that fails takes no time that one could learn from; only what looks like an overload is a failure."""

    async def main() -> None:
        heard = []
        done = AdaptiveLimit.done
        monkeypatch.setattr(
            AdaptiveLimit, "done", lambda self, permit, now, said: heard.append(said) or done(self, permit, now, said)
        )
        work, awork = sync_work(), AsyncLimiter(NOWHERE).adaptive("db")
        with contextlib.suppress(BaseException), work:
            if error is not None:
                raise error
        with contextlib.suppress(BaseException):
            async with awork:
                if error is not None:
                    raise error
        assert heard == [outcome, outcome]
        assert work.in_flight == awork.in_flight == 0

    asyncio.run(main())


def test_a_thread_waits_for_its_place() -> None:
    work = sync_work(min=1, max=1, max_delay=60)
    came: list[Decision] = []

    def come() -> None:
        with work as decision:
            came.append(decision)

    thread = threading.Thread(target=come)
    with work:
        thread.start()
        until(lambda: work.waiting)
        assert not came
    thread.join(PATIENCE)
    assert came[0].allowed
    assert came[0].delay > 0
    assert (work.in_flight, work.waiting) == (0, 0)


def test_a_thread_gives_way_in_time() -> None:
    work = sync_work(min=1, max=1, max_delay="10ms")
    with work, pytest.raises(RateLimited), work:
        pass
    assert (work.in_flight, work.waiting) == (0, 0)


def test_never_more_threads_than_the_limit() -> None:
    work, inside, most = sync_work(min=3, max=3, max_delay=60), [0], [0]
    lock = threading.Lock()

    def come(_: int) -> None:
        for _ in range(100):
            with contextlib.suppress(RateLimited), work:
                with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                time.sleep(0)
                with lock:
                    inside[0] -= 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(come, range(8)))
    assert 1 <= most[0] <= 3
    assert (work.in_flight, work.waiting) == (0, 0)


def test_tasks_wait_in_order_and_give_way_in_time(world: World) -> None:
    work, log = work_of(world, min=1, max=1, max_delay="50ms"), []

    async def come(name: str, holds_s: float) -> None:
        try:
            async with work as decision:
                log.append((name, world.now, round(decision.delay, 3)))
                await asyncio.sleep(holds_s)
        except RateLimited:
            log.append((name, world.now, None))

    async def main() -> None:
        await asyncio.gather(come("a", 0.03), come("b", 0.04), come("c", 0.01))

    world.run(main())
    assert [(name, round(at, 3), delay) for name, at, delay in log] == [("a", 0, 0), ("b", 0.03, 0.03), ("c", 0.05, None)]
    assert (work.in_flight, work.waiting) == (0, 0)


def test_a_task_that_is_cancelled_leaves_at_once(world: World) -> None:
    """While it waits, and just when it was called: its place goes to the next one."""
    work = work_of(world, min=1, max=1, max_delay=10)

    async def come() -> float:
        async with work:
            return world.now

    async def main() -> None:
        async with work:
            first, second, third = [asyncio.create_task(come()) for _ in range(3)]
            await asyncio.sleep(0.01)
            assert work.waiting == 3
            first.cancel()
            await asyncio.wait([first])
            assert work.waiting == 2
        assert (work.in_flight, work.waiting) == (1, 1)  # the place is that of the second, which does not know it yet
        second.cancel()
        assert round(await third, 3) == 0.01
        assert second.cancelled()

    world.run(main())
    assert (work.in_flight, work.waiting) == (0, 0)


def test_tasks_of_several_event_loops_and_threads_share_a_limit() -> None:
    work, inside = AsyncLimiter(MemoryStore()).adaptive("db", min=1, max=1, max_delay=60), []

    async def come() -> int:
        passed = 0
        for _ in range(50):
            with contextlib.suppress(RateLimited):
                async with work:
                    inside.append(1)
                    assert len(inside) == 1
                    await asyncio.sleep(0)
                    inside.pop()
                    passed += 1
        return passed

    async def main() -> int:
        return sum(await asyncio.gather(come(), come(), come()))

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(lambda _: asyncio.run(main()), range(3)))
    assert (work.in_flight, work.waiting) == (0, 0)


def test_a_place_is_not_given_to_a_loop_that_has_ended() -> None:
    """A task waits on a loop that is closed; whoever waits behind it gets the place."""
    work = AsyncLimiter(MemoryStore()).adaptive("db", min=1, max=1, max_delay=60)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(work.__aenter__())
    lost = work.__aenter__()

    async def begin_waiting() -> None:
        lost.send(None)  # type: ignore[attr-defined]

    loop.run_until_complete(begin_waiting())
    assert work.waiting == 1
    loop.close()

    async def come() -> Decision:
        task = asyncio.create_task(work.__aenter__())
        await asyncio.sleep(0)
        assert work.waiting == 2
        await work.__aexit__(None, None, None)
        return await task

    assert asyncio.run(come()).allowed
    assert (work.in_flight, work.waiting) == (1, 0)
    lost.close()  # type: ignore[attr-defined]
    assert work.in_flight == 1


def test_the_limit_is_found(world: World) -> None:
    """Nobody says that there are ten connections: much more than that only waits for them."""
    work, passed, late = work_of(world), [0], []

    async def query(connections: asyncio.Semaphore) -> None:
        async with connections:
            await asyncio.sleep(0.05)

    async def client(connections: asyncio.Semaphore) -> None:
        while world.now < 20:
            try:
                async with work:
                    began = world.now
                    await query(connections)
            except RateLimited:
                await asyncio.sleep(0.05)
            else:
                passed[0] += 1
                if began > 10:
                    late.append(world.now - began)

    async def main() -> None:
        connections = asyncio.Semaphore(10)
        await asyncio.gather(*[client(connections) for _ in range(100)])

    world.run(main())
    assert 10 <= work.limit <= 30
    assert passed[0] >= 0.95 * 20 * 10 / 0.05
    assert sorted(late)[len(late) // 2] <= 0.15


def test_an_event_loop_that_is_late_refuses(world: World) -> None:
    """Only one block is ever in flight, as none awaits anything. When it is quiet there are no heartbeats."""
    work, refused = work_of(world), [0]

    async def blocking() -> None:
        try:
            async with work:
                world.advance(0.02)
        except RateLimited:
            refused[0] += 1

    async def main() -> None:
        for _ in range(30):
            await asyncio.gather(*[blocking() for _ in range(10)])
            await asyncio.sleep(0)
        assert refused[0] > 100
        await asyncio.sleep(3)
        waits = world.waits
        await asyncio.sleep(3)
        assert world.waits <= waits + 1
        async with work as decision:
            assert decision.allowed

    world.run(main())


def test_a_generator_that_is_thrown_away_gives_its_place_back() -> None:
    """Even by the garbage collector while somebody has the lock, whom it must not wait for."""
    work = sync_work(min=1, max=1)

    def stream() -> Iterator[int]:
        with work:
            yield 1

    generator = stream()
    next(generator)
    assert work.in_flight == 1
    with work._work._lock:
        del generator
    with work as decision:
        assert decision.allowed
        assert work.in_flight == 1
    assert work.in_flight == 0


def test_a_task_that_is_thrown_away_waits_no_more() -> None:
    work = AsyncLimiter(NOWHERE).adaptive("db", min=1, max=1, max_delay=60)

    async def main() -> None:
        async with work:
            waits = work.__aenter__()
            waits.send(None)  # type: ignore[attr-defined]
            assert work.waiting == 1
            with work._work._lock:
                waits.close()  # type: ignore[attr-defined]
        async with work:
            assert (work.in_flight, work.waiting) == (1, 0)

    asyncio.run(main())
    assert work.in_flight == 0


def test_a_block_may_end_in_another_thread() -> None:
    """A dependency that yields begins and ends wherever there is a thread."""
    work = sync_work(min=2, max=2)

    def stream() -> Iterator[int]:
        with work:
            yield 1

    generator = stream()
    next(generator)
    with work, ThreadPoolExecutor(1) as thread:
        assert thread.submit(next, generator, None).result(PATIENCE) is None
        assert work.in_flight == 1
    assert work.in_flight == 0


def test_a_forked_child_begins_anew() -> None:
    """It has no part in what is in flight in its parent, and a block that it is in ends without effect."""
    program = """
import os
import threading
from limitgate import Limiter, RateLimited

work = Limiter("memory://").adaptive("db", min=2, max=2)
with work:
    work._work._lock.acquire()
    child = os.fork()
    if child:
        work._work._lock.release()
    elif work.in_flight:
        os._exit(1)
    else:
        with work, work:
            try:
                work.__enter__()
            except RateLimited:
                pass
        began, ends = threading.Event(), threading.Event()
        def hold():
            with work:
                began.set()
                ends.wait()
        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        began.wait()
if not child:
    assert work.in_flight == 1  # that of the thread
    ends.set()
    thread.join()
else:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert work.in_flight == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE * 3)


def test_nothing_is_limited_in_tests_that_say_so() -> None:
    """Blocks that began before, or end after, count as what they are."""

    async def main() -> None:
        work, awork = sync_work(min=1, max=1), AsyncLimiter(NOWHERE).adaptive("db", min=1, max=1)
        with work:
            async with awork:
                with testing.off(), work, work as decision:
                    async with awork as adecision:
                        assert decision.allowed
                        assert adecision.allowed
                assert work.in_flight == awork.in_flight == 1
                with pytest.raises(RateLimited), work:
                    pass
        assert work.in_flight == awork.in_flight == 0

    asyncio.run(main())
