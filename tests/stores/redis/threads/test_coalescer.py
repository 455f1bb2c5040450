"""Threads that share calls: who goes, and that nobody is left waiting for a thread that was interrupted."""

from __future__ import annotations

import itertools
import linecache
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from limitgate import StoreError
from limitgate.limits.bucket import bucket_of
from limitgate.limits.plan import Charge, Plan, Reading
from limitgate.stores.redis.threads import coalescer
from limitgate.stores.redis.threads.coalescer import _LEADER, CallCoalescer, _Request
from limitgate.stores.redis.threads.connection import ListenDeadline

PATIENT = 20.0
"""Seconds, where a test is not about time."""


class Interrupted(BaseException):
    """What a signal's handler raises, as Celery's time limits and gevent's timeouts do."""


class Line:
    """Shared calls to nobody, of which the first does not return before so many others wait and ``then`` was called."""

    def __init__(self, waiting: int, then: Callable[[], object] = lambda: None) -> None:
        self.calls = CallCoalescer(self.exchange, 64)
        self.sent: list[tuple[Sequence[Plan], ListenDeadline]] = []
        self._expected = waiting
        self._then = then

    def exchange(self, plans: Sequence[Plan], listen_deadline: ListenDeadline) -> list[Reading | StoreError]:
        self.sent.append((plans, listen_deadline))
        if len(self.sent) == 1:
            self.wait_for(self._expected)
            self._then()
        return [Reading(0, [], admitted=True)] * len(plans)

    def wait_for(self, waiting: int) -> None:
        deadline = time.monotonic() + PATIENT
        while len(self.calls._waiting) < waiting:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def interrupt_us() -> Iterator[Callable[[], None]]:
    """Interrupts the main thread, from another one, and returns when it has been."""
    done = threading.Event()

    def handler(*_: object) -> None:
        if not done.is_set():
            done.set()
            raise Interrupted

    def interrupt() -> None:
        deadline = time.monotonic() + PATIENT
        while not done.is_set():
            assert time.monotonic() < deadline
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            done.wait(0.1)  # without the GIL, a signal may come just before a thread waits, which then notices none

    before = signal.signal(signal.SIGUSR1, handler)
    yield interrupt
    signal.signal(signal.SIGUSR1, before)


def test_a_thread_that_is_interrupted_while_it_waits_stops_nobody(interrupt_us: Callable[[], None]) -> None:
    """What a signal's handler raises in a waiting thread reaches its caller, and the next ones go as before."""
    line = Line(1, interrupt_us)
    plan = Plan(())
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(line.calls.spend, plan, PATIENT)
        while not line.sent:
            time.sleep(0.001)
        with pytest.raises(Interrupted):
            line.calls.spend(plan, PATIENT)
        assert leading.result().admitted
    assert line.calls.spend(plan, PATIENT).admitted
    assert len(line.sent) == 2, "what nobody waits for is not sent"


@pytest.mark.parametrize("failure", [Interrupted(), StoreError("none", "connection"), ValueError()])
def test_a_thread_that_fails_as_it_goes_passes_the_turn_on(failure: BaseException) -> None:
    """Whatever a call fails with, those who share it are told of a store error, and the next ones go as before."""

    def fail() -> None:
        raise failure

    line = Line(1, fail)
    plan = Plan(())
    with ThreadPoolExecutor(2) as pool:
        leading = pool.submit(line.calls.spend, plan, PATIENT)
        waiting = pool.submit(line.calls.spend, plan, PATIENT)
        ended = [leading.exception(), waiting.exception()]
    assert [error for error in ended if error is not None] == [failure]
    assert line.calls.spend(plan, PATIENT).admitted


class Unwoken:
    """The lock of a waiting thread; who is about to wake it is interrupted."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.acquire = lock.acquire

    def release(self) -> None:
        raise Interrupted


def test_a_thread_that_is_interrupted_while_it_wakes_others_leaves_none_waiting() -> None:
    """Whoever has an answer finds it, woken or not, and the turn is passed on."""
    unwoken: list[Unwoken] = []

    def keep_from_waking() -> None:
        hasty = min(line.calls._waiting, key=lambda request: request.due)
        unwoken.append(Unwoken(hasty.wake))
        hasty.wake = unwoken[0]  # type: ignore[assignment]

    line, plan = Line(2, keep_from_waking), Plan(())
    with ThreadPoolExecutor(3) as pool:
        leading = pool.submit(line.calls.spend, plan, PATIENT)
        while not line.sent:
            time.sleep(0.001)
        patient, hasty = (pool.submit(line.calls.spend, plan, timeout) for timeout in (PATIENT, 0.05))
        assert leading.result(PATIENT).admitted
        with pytest.raises(Interrupted):
            patient.result(PATIENT)
        try:
            assert hasty.result(PATIENT).admitted
        finally:
            unwoken[0].lock.release()
        assert line.calls.spend(plan, PATIENT).admitted


class Unmoved(deque[_Request]):
    """Requests that wait; who is about to take the first one out is interrupted."""

    def remove(self, value: _Request) -> None:
        self.remove = super().remove  # type: ignore[method-assign]
        raise Interrupted


class Hasty:
    """The lock of a waiting thread, which is done as soon as it is woken."""

    def __init__(self, request: _Request, asking: Future[Any]) -> None:
        self._lock, self._asking = request.wake, asking
        self.acquire = self._lock.acquire
        request.wake = self  # type: ignore[assignment]

    def release(self) -> None:
        self._lock.release()
        wait([self._asking], PATIENT)


def test_a_thread_that_is_interrupted_while_it_takes_others_along_gives_none_a_turn_that_is_gone() -> None:
    """Whoever is told that the call was interrupted stands in the queue no more."""

    def keep_from_moving() -> None:
        line.calls._waiting = Unmoved(line.calls._waiting)
        Hasty(line.calls._waiting[0], asking[1])

    line, plan, asking = Line(2, keep_from_moving), Plan(()), list[Future[Any]]()
    with ThreadPoolExecutor(3) as pool:
        for timeout, waiting in ((PATIENT, 0), (PATIENT / 2, 1), (PATIENT, 0)):
            asking.append(pool.submit(line.calls.spend, plan, timeout))
            while not line.sent:
                time.sleep(0.001)
            line.wait_for(waiting)
        assert asking[0].result(PATIENT).admitted
        with pytest.raises(StoreError, match="was interrupted"):
            asking[1].result(PATIENT)
        with pytest.raises(Interrupted):
            asking[2].result(PATIENT)
        assert not line.calls._waiting
        assert not line.calls._turn


class Steps:
    """Interrupts a thread in the coalescer before one of its lines: most of them begin where a call has just ended."""

    def __init__(self, left: int) -> None:
        self._left = left
        self.was_interrupted = False

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, _: str, __: object) -> Any:
        return self._stepped if frame.f_code.co_filename == coalescer.__file__ else None

    def _stepped(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and not _line(frame).startswith(("try:", "with ")):  # no signal comes where a block begins or ends
            self._left -= 1
            if self._left < 0 and not self.was_interrupted:
                self.was_interrupted = True
                raise Interrupted
        return self._stepped


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


class Crowd:
    """Threads that wait for others, briefly; their calls reach nobody, and that of this thread fails if it is to."""

    def __init__(self, size: int, failure: StoreError | None, *, joins: bool) -> None:
        self.calls = CallCoalescer(self._exchange, 64)
        self._size = size
        self._failure = failure
        self._ours = threading.get_ident()
        self._joins = joins
        self._has_come = threading.Event()
        self._threads: list[threading.Thread] = []
        if joins:
            self.calls._turn[_LEADER] = self
            self._gather()
            self._start(self._give_turn)

    def _exchange(self, plans: Sequence[Any], _: ListenDeadline) -> list[Any]:
        if threading.get_ident() == self._ours:
            if not self._joins:
                self._gather()
            if self._failure is not None:
                raise self._failure
        return [Reading(0, [], admitted=True)] * len(plans)

    def _start(self, target: Callable[[], object]) -> None:
        self._threads.append(threading.Thread(target=target, daemon=True))
        self._threads[-1].start()

    def _gather(self) -> None:
        for _ in range(self._size):
            self._start(self._ask)
        self._wait_for(self._size)

    def _give_turn(self) -> None:
        self._wait_for(self._size + 1)
        self.calls._step_down(self)

    def _wait_for(self, waiting: int) -> None:
        deadline = time.monotonic() + PATIENT
        while len(self.calls._waiting) < waiting and not self._has_come.is_set():
            assert time.monotonic() < deadline
            time.sleep(0)

    def _ask(self) -> None:
        with suppress(StoreError):
            self.calls.spend(Plan(()), 0.01)

    def end(self) -> None:
        """Wait until all have what they waited for. Fails if one waits for ever."""
        self._has_come.set()
        for thread in self._threads:
            thread.join(PATIENT)
            assert not thread.is_alive(), "it waits for ever"


@pytest.mark.parametrize("failure", [None, StoreError("none", "connection")], ids=["answered", "failed"])
@pytest.mark.parametrize("joins", [False, True], ids=["alone", "for all"])
@pytest.mark.parametrize("others", [0, 2])
def test_a_thread_that_is_interrupted_anywhere_stops_nobody(
    others: int,
    joins: bool,  # noqa: FBT001 - a parameter of the test
    failure: StoreError | None,
) -> None:
    """Wherever an exception strikes a thread that asks, the others come to an end, and the next ones go as before."""
    for step in itertools.count():
        steps, crowd = Steps(step), Crowd(others, failure, joins=joins)
        with suppress(Interrupted, StoreError), steps:
            crowd.calls.spend(Plan(()), PATIENT)
        crowd.end()
        assert not crowd.calls._turn, f"the turn is lost at step {step}"
        assert not crowd.calls._waiting
        if not steps.was_interrupted:
            break
    assert step > 10, "it was never interrupted"


class GivenUp(deque[_Request]):
    """Requests that wait; by the time that one has joined them, the turn to ask was given up."""

    turn: dict[str, object]

    def append(self, value: _Request) -> None:
        self.turn.clear()
        super().append(value)


def test_who_begins_to_wait_as_the_turn_is_given_up_goes() -> None:
    """A thread that has found another one on its way does not wait for one that is back by then."""
    line = Line(0)
    line.calls._turn[_LEADER] = "another one"
    line.calls._waiting = GivenUp()
    line.calls._waiting.turn = line.calls._turn
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(line.calls.spend, Plan(()), PATIENT)
        try:
            assert asking.result(PATIENT / 2).admitted
        finally:
            line.calls.listening.spent = PATIENT
    assert not line.calls._turn


def test_nobody_goes_before_those_who_wait() -> None:
    """Who comes when it is nobody's turn, but others wait already, takes its place behind them."""
    line, first, second = Line(0), Plan((), "peek"), Plan((), "reset")
    waiting = _Request(first, PATIENT / 2)
    line.calls._waiting.append(waiting)
    assert line.calls.spend(second, PATIENT).admitted
    assert [list(plans) for plans, _ in line.sent] == [[first, second]]
    assert isinstance(waiting.outcome, Reading)


def test_who_may_wait_longest_goes_for_all() -> None:
    """A short timeout is nobody else's: of those that share a call the one with the latest deadline makes it, in order."""
    line = Line(5)
    plans = [Plan((), verb) for verb in ("spend", "peek", "reset", "peek")]
    with ThreadPoolExecutor(6) as pool:
        requests = [pool.submit(line.calls.spend, Plan(()), PATIENT)]
        while not line.sent:
            time.sleep(0.001)
        for waiting, (plan, timeout) in enumerate(zip(plans, (5.0, 3 * PATIENT, PATIENT, 5.0), strict=True)):
            requests.append(pool.submit(line.calls.spend, plan, timeout))
            line.wait_for(waiting + 1)
        requests.append(pool.submit(line.calls.spend, Plan(()), 5.0))
        assert all(request.result().admitted for request in requests)
    together, listen_deadline = line.sent[1]
    assert list(together) == [*plans, Plan(())]
    assert listen_deadline.left > 2 * PATIENT


def test_nobody_fails_for_the_haste_of_others() -> None:
    """Who came while another was about to go, and may wait longer than that one, shares the next call."""
    line = Line(1, lambda: None)
    calls, hasty, patient = line.calls, Plan((), "peek"), Plan((), "reset")
    chosen = calls._step_down

    def late(mine: Any) -> None:
        chosen(mine)
        if len(line.sent) == 1:  # the hasty one has been chosen, and does not have the interpreter yet
            request = _Request(patient, calls.listening.spent + 3 * PATIENT)
            calls._waiting.append(request)

    calls._step_down = late  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        leading = pool.submit(calls.spend, Plan(()), PATIENT)
        while not line.sent:
            time.sleep(0.001)
        assert pool.submit(calls.spend, hasty, 1.0).result().admitted
        assert leading.result().admitted
    assert [list(plans) for plans, _ in line.sent] == [[Plan(())], [hasty]]
    assert [request.plan for request in calls._waiting] == [patient]


def test_a_call_carries_no_more_than_its_share() -> None:
    """Of many that wait, as many as may share a call go with the next one, the others with the one after it."""
    line = Line(100)
    with ThreadPoolExecutor(101) as pool:
        assert all(pool.map(lambda _: line.calls.spend(Plan(()), PATIENT).admitted, range(101)))
    assert [len(plans) for plans, _ in line.sent] == [1, 64, 36]


def test_plans_of_many_buckets_share_a_call_with_fewer() -> None:
    """Nobody joins a call that would cost Redis more than 2 ms, and whoever goes is among those it goes for."""
    bucket, keys = bucket_of("1/day"), itertools.count()
    every = [Charge(f"{next(keys)}", bucket, 1, enforced=True, rule=None) for _ in range(60 * 6)]
    plans = [Plan(tuple(every[at : at + 60])) for at in range(0, len(every), 60)]
    line = Line(5)
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(lambda plan: line.calls.spend(plan, PATIENT).admitted, plans))
    assert [len(sent) for sent, _ in line.sent] == [1, 3, 2]


@pytest.mark.parametrize("goes_for_all", [False, True], ids=["alone", "for all"])
def test_nobody_waits_for_a_thread_that_hangs(*, goes_for_all: bool) -> None:
    """Who waits for a thread that neither listens to Redis nor comes back has an error soon, and others go once it is back."""
    hung, released = threading.Event(), threading.Event()

    def hang() -> None:
        hung.set()
        assert released.wait(2 * PATIENT)

    line = Line(1 if goes_for_all else 0, lambda: None if goes_for_all else hang())
    with ThreadPoolExecutor(4) as pool:
        leading = [pool.submit(line.calls.spend, Plan(()), PATIENT)]
        if goes_for_all:
            exchange = line.calls._exchange
            while not line.sent:
                time.sleep(0.001)

            def hanging(plans: Sequence[Any], listen_deadline: ListenDeadline) -> Any:
                hang()
                return exchange(plans, listen_deadline)

            line.calls._exchange = hanging  # type: ignore[assignment]
            leading.append(pool.submit(line.calls.spend, Plan(()), PATIENT))
        assert hung.wait(PATIENT)
        waiting = [pool.submit(line.calls.spend, Plan((), "reset"), timeout) for timeout in (0.01, 0.1)]
        try:
            for each in waiting:
                with pytest.raises(StoreError, match="timeout") as caught:
                    each.result(PATIENT)
                assert caught.value.waited == 0, "Redis was not silent"
        finally:
            released.set()
        assert all(each.result(PATIENT).admitted for each in leading)
    assert line.calls.spend(Plan(()), PATIENT).admitted
    assert all(plan.verb == "spend" for plans, _ in line.sent for plan in plans), "what nobody waits for is not sent"


def test_what_nobody_waits_for_any_more_is_not_sent() -> None:
    """A request that waits for its turn while Redis is silent for too long is a store error, and never sent."""
    released = threading.Event()
    line = Line(0, lambda: released.wait(PATIENT))
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(line.calls.spend, Plan(()), PATIENT)
        while not line.sent:
            time.sleep(0.001)
        threading.Timer(0.02, line.sent[0][1].waited_in_vain, [0.01]).start()
        with pytest.raises(StoreError, match="timeout"):
            line.calls.spend(Plan((), "reset"), 0.01)
        released.set()
        assert leading.result().admitted
    assert line.calls.spend(Plan(()), PATIENT).admitted
    assert [list(plans) for plans, _ in line.sent] == [[Plan(())]] * 2
