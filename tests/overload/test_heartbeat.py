"""Heartbeats of real event loops: what is lag, what is none, and that a loop without requests is left in peace."""

from __future__ import annotations

import asyncio
import sys
import time
import weakref
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import uvloop

from limitgate.overload.lag import INTERVAL_S, RESTS_AFTER, Heartbeats, LoopGuard
from tests.support.doors import PATIENCE

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
LONG = 2 * INTERVAL_S


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    return request.param  # type: ignore[no-any-return]


def guard_of(heartbeats: Heartbeats) -> LoopGuard:
    guard = heartbeats.guard()
    assert guard is not None
    return guard


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.001)


async def beats(heartbeats: Heartbeats) -> None:
    """Let a heartbeat come."""
    guard = guard_of(heartbeats)
    due_at = guard.due_at
    await until(lambda: guard.due_at != due_at)


def test_a_loop_that_is_held_up_refuses_until_a_heartbeat_is_in_time(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Of a crowd behind a stall the last ones are refused: asyncio beats after what was ready, uvloop before it."""
    heartbeats = Heartbeats()

    async def handled() -> bool:
        if guard_of(heartbeats).refuses(time.monotonic()):
            return False
        time.sleep(0.005)  # noqa: ASYNC251 - as a handler that does not await
        return True

    async def main() -> None:
        guard = guard_of(heartbeats)
        await beats(heartbeats)
        time.sleep(LONG)  # noqa: ASYNC251
        crowd = await asyncio.gather(*[asyncio.create_task(handled()) for _ in range(40)])
        assert not crowd[-1]
        assert crowd == sorted(crowd, reverse=True)
        await until(lambda: not guard.is_hot)
        assert heartbeats.guard() is guard

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_time_in_which_nobody_runs_a_loop_is_no_lag(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    heartbeats = Heartbeats()

    async def ask() -> bool:
        return guard_of(heartbeats).refuses(time.monotonic())

    async def ask_later() -> bool:
        await beats(heartbeats)
        return await ask()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert not runner.run(ask())
        time.sleep(LONG)
        assert not runner.run(ask())
        time.sleep(LONG)
        assert not runner.run(ask_later())


def test_a_heart_without_requests_rests(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        heartbeats = Heartbeats()
        guard = guard_of(heartbeats)
        assert len(heartbeats.lags_s()) == 1
        for _ in range(RESTS_AFTER + 2):  # as if they had come
            guard.beat(guard.due_at)
        await until(lambda: not heartbeats.lags_s())
        assert heartbeats.guard() is guard
        assert len(heartbeats.lags_s()) == 1

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_each_loop_has_a_guard_of_its_own() -> None:
    heartbeats = Heartbeats()

    async def guard() -> object:
        return heartbeats.guard()

    with asyncio.Runner() as one, asyncio.Runner() as other:
        first, second = one.run(guard()), other.run(guard())
        assert first is not second
        assert one.run(guard()) is first
        assert other.run(guard()) is second


def test_without_a_loop_there_is_no_guard() -> None:
    assert Heartbeats().guard() is None


def test_requests_of_one_task_wait_for_nobody(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """As a test makes them that calls the application in process, which may never let the loop go on meanwhile."""
    heartbeats = Heartbeats()

    async def main() -> None:
        for _ in range(20):
            assert not guard_of(heartbeats).refuses(time.monotonic())
            time.sleep(INTERVAL_S / 5)  # noqa: ASYNC251

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_the_first_request_after_a_stall_is_let_in(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """What held up the loop was no request."""
    heartbeats = Heartbeats()

    async def ask() -> bool:
        return guard_of(heartbeats).refuses(time.monotonic())

    async def main() -> None:
        guard_of(heartbeats)
        await beats(heartbeats)
        time.sleep(LONG)  # noqa: ASYNC251
        assert not await asyncio.create_task(ask())

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


class Late:
    """Something that is late, of which nothing is heard."""

    lag_s = None


def test_lags_are_read_while_other_threads_meet_event_loops() -> None:
    """At whatever line of it. Whoever reads them hands all figures over."""
    heartbeats, met = Heartbeats(), list[Any]()

    async def meet() -> None:
        guard_of(heartbeats)

    def meet_another() -> None:
        met.extend([asyncio.new_event_loop(), Late()])
        met[-2].run_until_complete(meet())
        heartbeats.note(met[-1])

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in {sys.modules[Heartbeats.__module__].__file__, *of_weakref}:
            return None
        if event == "line":
            thread = Thread(target=meet_another)
            thread.start()
            thread.join()
        return trace

    of_weakref = {each.__init__.__code__.co_filename for each in (weakref.WeakKeyDictionary, weakref.WeakSet)}
    meet_another()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        lags_s = heartbeats.lags_s()
    finally:
        sys.settrace(before)
    assert len(lags_s) > 1
    assert len(heartbeats.lags_s()) == len(met) / 2
    for loop in met[::2]:
        loop.close()
