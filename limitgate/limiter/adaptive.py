"""Work in flight, held to what it can be done at: `AsyncLimiter.adaptive` and `Limiter.adaptive`.

Whom to let in is decided in `limitgate.overload`; here are the clock, the lock, those who wait, and the heartbeats of loops.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import partial, wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from threading import Event, Lock, get_ident
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar
from weakref import WeakKeyDictionary

from limitgate.errors import ConfigError
from limitgate.forking import begin_anew_in_children
from limitgate.limits.decision import Decision, RateLimited, Window
from limitgate.limits.duration import seconds_of
from limitgate.limits.priority import NORMAL, RESERVES, Priority, share_of
from limitgate.overload.adaptive_limit import AdaptiveLimit, Outcome, Ticket
from limitgate.overload.lag_guard import LagGuard
from limitgate.overload.options import Adaptive, as_adaptive
from limitgate.rules.rule import MAX_DELAY
from limitgate.suggestions import expected_of
from limitgate.waiting import SHORTEST

P = ParamSpec("P")
T = TypeVar("T")


class AdaptiveOptions(TypedDict, total=False):
    """Options of an adaptive limit around work."""

    min: int
    """Blocks in flight that are always allowed: 1 or more. Default: 4."""
    max: int
    """Blocks in flight that are never exceeded: up to 100,000. Default: 200."""
    tolerance: float
    """How many times what it takes when nothing queues a block may take: above 1 and up to 10. Default: 2.0."""
    delay: float | str
    """Seconds in a queue that are allowed to blocks however short they are, or text such as ``20ms``: above 0 and up to 10.
    Default: 0.02."""
    max_delay: float | str
    """Seconds that a block may wait for its place, or text such as ``50ms``: up to 60. Default: 0, refused at once."""
    reserve: float | str | None
    """Share of the limit that is kept for high priority, and twice of it for high and normal: ``20%`` or 0.2, above 0 and up to
    49 %. Default: none."""


class WorkOptions(NamedTuple):
    """`AdaptiveOptions` that were checked."""

    adaptive: Adaptive
    max_delay: float
    reserve: Fraction | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> WorkOptions:
        """Check options. Raises `ConfigError` that tells all mistakes, each with what was expected."""
        bounds = {name: value for name, value in given.items() if name in _BOUNDS}
        known = list(AdaptiveOptions.__annotations__)
        mistakes = [
            ConfigError.at((name,), f"unknown option, {expected_of(name, known)}", "adaptive")
            for name in given
            if name not in known
        ]
        adaptive, max_delay, reserve = Adaptive(), 0.0, None
        try:
            adaptive = as_adaptive(bounds) or adaptive
        except ConfigError as error:
            mistakes += error.every
        try:
            max_delay = seconds_of(given.get("max_delay", 0))
        except ConfigError:
            max_delay = MAX_DELAY + 1
        if max_delay > MAX_DELAY:
            said = f"expected a duration of at most {MAX_DELAY:g} s, such as 50ms or 0.05, not {given['max_delay']!r:.80}"
            mistakes.append(ConfigError.at(("max_delay",), said, "adaptive"))
        try:
            reserve = None if given.get("reserve") is None else share_of(given["reserve"])
        except ConfigError as error:
            mistakes.append(ConfigError.at(("reserve",), error.reason, "adaptive"))
        if mistakes:
            raise ConfigError.first_of(mistakes)
        return cls(adaptive, max_delay, reserve)


_BOUNDS = frozenset(each.name for each in fields(Adaptive))


@dataclass(frozen=True, slots=True, repr=False)
class WorkDecision(Decision):
    """Decision about a block of work. Its only window is the limit in force."""

    @property
    def windows(self) -> tuple[Window, ...]:
        """The limit on blocks in flight, with a period of 0; ``used`` are those in flight, and what is kept for others."""
        used = self.limit - self.remaining
        return (Window(None, self.limit, 0, self.remaining, used, self.reset_after, self.retry_after),)


class _Waiter(Protocol):
    """Whoever waits for a place."""

    def wake(self) -> bool:
        """Have it look what has become of its ticket. False if it cannot. Called from any thread."""


class _Thread:
    """A thread that waits."""

    def __init__(self) -> None:
        self._woken = Event()

    def wake(self) -> bool:
        self._woken.set()
        return True

    def wait(self, seconds: float) -> None:
        """Wait until somebody wakes it, but no longer than so many seconds."""
        self._woken.wait(seconds)


class _Task:
    """A task that waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.woken: asyncio.Future[None] = loop.create_future()

    def wake(self) -> bool:
        try:
            self.loop.call_soon_threadsafe(self._set)
        except RuntimeError:  # its event loop is closed
            return False
        return True

    def _set(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class _OnLoop:
    """State of some work on one event loop; used in its thread only."""

    def __init__(self) -> None:
        self.guard = LagGuard()
        self.has_timer = False
        """True while a timer is set for those who wait on this loop."""


class Work:
    """Some work under an adaptive limit: everything that threads and tasks do to the same `AdaptiveLimit`.

    ``clock`` gives seconds and never steps. It is not that of `limitgate.waiting`, as a test that stops that one does not make
    the work any faster.
    """

    def __init__(self, name: str, options: WorkOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.options = options
        self._clock = clock
        self.begin_anew()
        begin_anew_in_children(self)

    def begin_anew(self) -> None:
        """Forget everything. Blocks that have begun in the parent of a fork end without effect."""
        self._lock = Lock()
        adaptive, max_delay, reserve = self.options
        self.limit = AdaptiveLimit(adaptive, wall_offset=self._wall_offset, reserve=reserve, max_delay=max_delay)
        self._waiters: dict[Ticket, _Waiter] = {}
        self._on_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _OnLoop] = WeakKeyDictionary()
        self._abandoned: deque[Callable[[], None]] = deque()
        """What is to be done with the lock as soon as somebody has it."""
        begun: dict[Hashable, list[Ticket | None]] = getattr(self, "_blocks", {})
        self._blocks: dict[Hashable, list[Ticket | None]] = {owner: [None] * len(block) for owner, block in begun.items()}
        """Blocks by the thread or task that has begun them, the innermost last; None for one that is not limited."""

    def enter(self, priority: Priority) -> Decision:
        """Begin a block in this thread, which waits for its place. Raises `RateLimited`."""
        thread = _Thread()
        ticket = self._begin(priority, None, thread)
        came = self._clock() if ticket.waits else None
        try:
            while pause_s := self._look(ticket):
                thread.wait(pause_s)
        except BaseException as error:
            self._finish(error, partial(self._leave, ticket))
            raise
        return self._entered(get_ident(), ticket, came)

    async def aenter(self, priority: Priority) -> Decision:
        """Begin a block in this task, which waits for its place. Raises `RateLimited`."""
        loop = asyncio.get_running_loop()
        on_loop = self._on_loops.get(loop)
        if on_loop is None:
            on_loop = self._on_loops[loop] = _OnLoop()
        guard = on_loop.guard
        if guard.due_at == math.inf:
            now = self._clock()
            self._set_heartbeat(loop, guard, guard.start(now) - now)
        task = _Task(loop)
        ticket = self._begin(priority, guard, task)
        came = self._clock() if ticket.waits else None
        try:
            if self._look(ticket):
                if not on_loop.has_timer:
                    self._keep_time(loop, on_loop)
                await task.woken
                self._look(ticket)
        except BaseException as error:
            self._finish(error, partial(self._leave, ticket))
            raise
        return self._entered(asyncio.current_task(), ticket, came)

    def enter_unlimited(self, owner: Hashable) -> Decision:
        """Begin a block that does not count."""
        with self._lock:
            self._blocks.setdefault(owner, []).append(None)
        return self._decision(NORMAL)

    def exit(self, owner: Hashable, error: BaseException | None) -> None:
        """End the innermost block of a thread or task, which has raised an error or not."""
        self._finish(error, partial(self._pop, owner, _outcome(error)))

    def _finish(self, error: BaseException | None, action: Callable[[], None]) -> None:
        """Do what an error or the end of a block calls for, with the lock.

        A `GeneratorExit` may be of the garbage collector, in the midst of anything, so that nobody may wait for the lock then.
        """
        if not isinstance(error, GeneratorExit):
            with self._lock:
                action()
            return
        self._abandoned.append(action)
        if self._lock.acquire(blocking=False):
            try:
                self._end_abandoned()
            finally:
                self._lock.release()

    def _begin(self, priority: Priority, guard: LagGuard | None, waiter: _Waiter) -> Ticket:
        with self._lock:
            self._end_abandoned()
            now = self._clock()
            ticket = self.limit.begin(now, self.name, priority, guard)
            if not isinstance(ticket, Ticket):
                raise RateLimited(self._refusal(priority))
            if ticket.waits:
                self._waiters[ticket] = waiter
            return ticket

    def _look(self, ticket: Ticket) -> float:
        """Seconds after which to look again for whoever waits, 0 if it has begun. Raises `RateLimited` if it gives way."""
        if not ticket.waits:
            return 0
        with self._lock:
            self._end_abandoned()
            now = self._clock()
            self._serve(now)
            if ticket.began is not None:
                return 0
            if ticket not in self._waiters:
                raise RateLimited(self._refusal(ticket.priority))
            return max(self.limit.due_at(now) - now, SHORTEST)

    def _serve(self, now: float) -> None:
        """Wake those whose waiting is over. A place for which nobody is left goes to the next one."""
        is_over = not self._waiters
        while not is_over:
            is_over = True
            for ticket in [each for served in self.limit.serve(now) for each in served]:
                waiter = self._waiters.pop(ticket, None)
                if waiter is None or not waiter.wake():
                    self.limit.done(ticket, now, "untaught")
                    is_over = False

    def _entered(self, owner: Hashable, ticket: Ticket, came: float | None) -> Decision:
        with self._lock:
            self._blocks.setdefault(owner, []).append(ticket)
        delay = 0.0 if came is None or ticket.began is None else max(0.0, ticket.began - came)
        return self._decision(ticket.priority, delay)

    def _leave(self, ticket: Ticket) -> None:
        """Give back a place, or wait for it no more."""
        self._waiters.pop(ticket, None)
        self._done(ticket, "untaught")

    def _done(self, ticket: Ticket, outcome: Outcome) -> None:
        now = self._clock()
        self.limit.done(ticket, now, outcome)
        self._serve(now)

    def _pop(self, owner: Hashable, outcome: Outcome) -> None:
        """End the innermost block of an owner.

        A block may end elsewhere than it has begun: a generator in another thread. Then any other stands for it, which leaves
        the number in flight and the sum of the times as they are.
        """
        if owner not in self._blocks:
            owner = next((each for each, blocks in self._blocks.items() if blocks[-1] is not None), None)
        blocks = self._blocks.get(owner)
        if blocks is None:
            return
        ticket = blocks.pop()
        if not blocks:
            del self._blocks[owner]
        if ticket is not None:
            self._done(ticket, outcome)

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self._abandoned.popleft()()

    def _keep_time(self, loop: asyncio.AbstractEventLoop, on_loop: _OnLoop) -> None:
        """Have those on an event loop give way in time. One timer does for all of them."""
        with self._lock:
            now = self._clock()
            self._serve(now)
            on_loop.has_timer = any(isinstance(each, _Task) and each.loop is loop for each in self._waiters.values())
            pause_s = max(self.limit.due_at(now) - now, SHORTEST)
        if on_loop.has_timer:
            loop.call_later(pause_s, self._keep_time, loop, on_loop)

    def _set_heartbeat(self, loop: asyncio.AbstractEventLoop, guard: LagGuard, pause_s: float) -> None:
        loop.call_later(max(pause_s, 0), self._beat, loop, guard)

    def _beat(self, loop: asyncio.AbstractEventLoop, guard: LagGuard) -> None:
        now = self._clock()
        due_at = guard.beat(now)
        if due_at is not None:
            self._set_heartbeat(loop, guard, due_at - now)

    def _decision(self, priority: Priority, delay: float = 0.0) -> Decision:
        return WorkDecision(True, self.limit.limit, self._remaining(priority), 0.0, 0.0, 1, None, delay=delay)

    def _refusal(self, priority: Priority) -> Decision:
        after_s = self.limit.retry_after_s(random.random)
        return WorkDecision(False, self.limit.limit, self._remaining(priority), float(after_s), 0.0, 0, None)

    def _remaining(self, priority: Priority) -> int:
        return max(0, self.limit.levels[priority].room - self.limit.in_flight)

    def _wall_offset(self) -> float:
        return time.time() - self._clock()


def _outcome(error: BaseException | None) -> Outcome:
    """Tell an overload from other errors, after which the time that the block took is not that of its work."""
    if error is None:
        return "ok"
    return "failed" if isinstance(error, TimeoutError | ConnectionError | asyncio.CancelledError) else "untaught"


class _Around:
    """Work at one of its priorities."""

    def __init__(self, work: Work, priority: Priority = NORMAL) -> None:
        self._work = work
        self._priority: Priority = priority

    @property
    def name(self) -> str:
        """Name of the work."""
        return self._work.name

    @property
    def limit(self) -> int:
        """The limit in force on blocks in flight, in this process."""
        return self._work.limit.limit

    @property
    def in_flight(self) -> int:
        """Blocks that have begun and not ended, in this process."""
        return self._work.limit.in_flight

    @property
    def waiting(self) -> int:
        """Blocks that wait for a place, in this process."""
        return self._work.limit.waiting

    def check_options(self, given: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless options are those that it has; without any it is right."""
        if given and WorkOptions.of(given) != self._work.options:
            raise ConfigError(
                f"adaptive: {self.name!r:.80} is there with other options, expected the same ones, none, or another name"
            )


class AsyncAdaptiveWork(_Around):
    """Work on asyncio under an adaptive limit, see `AsyncLimiter.adaptive`; for any number of tasks and event loops."""

    def with_priority(self, priority: Priority) -> AsyncAdaptiveWork:
        """Return the same work for blocks of this priority: ``high``, ``normal`` or ``low``."""
        return AsyncAdaptiveWork(self._work, _checked(priority))

    async def __aenter__(self) -> Decision:
        return await self._work.aenter(self._priority)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        owner = asyncio.current_task() if asyncio._get_running_loop() else None  # noqa: SLF001 - closed where no loop runs
        self._work.exit(owner, error)

    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        """Have each call of an async function be such a block."""
        if not iscoroutinefunction(function):
            raise TypeError(f"{function!r:.80} is no async function, expected one, or a Limiter instead of an AsyncLimiter")

        @wraps(function)
        async def adaptive(*args: P.args, **kwargs: P.kwargs) -> T:
            async with self:
                return await function(*args, **kwargs)

        return adaptive


class AdaptiveWork(_Around):
    """Work in threads under an adaptive limit, see `Limiter.adaptive`; for any number of threads."""

    def with_priority(self, priority: Priority) -> AdaptiveWork:
        """Return the same work for blocks of this priority: ``high``, ``normal`` or ``low``."""
        return AdaptiveWork(self._work, _checked(priority))

    def __enter__(self) -> Decision:
        return self._work.enter(self._priority)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._work.exit(get_ident(), error)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Have each call of a function be such a block."""
        if iscoroutinefunction(function):
            raise TypeError(f"{function!r:.80} is async, expected a plain function, or an AsyncLimiter instead of a Limiter")
        if isgeneratorfunction(function) or isasyncgenfunction(function):
            raise TypeError(f"{function!r:.80} is a generator, expected a function whose work is done when it returns")

        @wraps(function)
        def adaptive(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return function(*args, **kwargs)

        return adaptive


A = TypeVar("A", bound=_Around)


def adaptive_work(known: dict[str, A], kind: Callable[[Work], A], name: str, given: Mapping[str, Any]) -> A:
    """The work of a name among those that a limiter knows, made if there is none. Raises `ConfigError`."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"adaptive: {name!r:.80} is no name, expected text that is not empty, such as 'db'")
    found = known.get(name)
    if found is None:
        found = known.setdefault(name, kind(Work(name, WorkOptions.of(given))))  # another thread may have made it meanwhile
    found.check_options(given)
    return found


def _checked(priority: object) -> Any:
    if priority not in RESERVES:
        raise ConfigError(f"{priority!r:.80} is no priority, expected one of {', '.join(map(repr, RESERVES))}")
    return priority
