"""Adaptive limits around blocks or functions: `AsyncLimiter.adaptive` and `Limiter.adaptive`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from inspect import isasyncgenfunction, isclass, isgeneratorfunction
from threading import get_ident
from types import TracebackType
from typing import Any, ParamSpec, TypedDict, TypeVar

from limitgate.errors import ConfigError
from limitgate.limits.bucket import NORMAL, RESERVES, Priority, is_priority, share_of
from limitgate.limits.decision import Decision, RateLimited, Window
from limitgate.limits.limit import Duration, seconds_of
from limitgate.messages.text import expected_of
from limitgate.overload.adaptive_limit import Outcome, Permit
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter, WaitingTask, WaitingThread
from limitgate.overload.lag import Heartbeats, LagGuard
from limitgate.overload.options import Adaptive, Terms, as_adaptive
from limitgate.process import switch
from limitgate.process.callables import is_async
from limitgate.process.clock import asyncio_loop, monotonic
from limitgate.process.forking import Unpicklable
from limitgate.rules.rule import MAX_DELAY

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W", WaitingTask, WaitingThread)


class AdaptiveOptions(TypedDict, total=False):
    """Options of an adaptive limit around work."""

    min: int
    """Lower bound, in blocks in flight: 1 or more. Default: 4."""
    max: int
    """Upper bound, in blocks in flight: up to 100,000. Default: 200."""
    tolerance: float
    """Acceptable multiple of a block's time without queueing: above 1, up to 10. Default: 2.0."""
    delay: Duration
    """Acceptable queueing time, seconds or ``20ms``: above 0, up to 10. Default: 0.02."""
    max_delay: Duration
    """Longest wait for a permit, seconds or ``50ms``: up to 60. Default: 0, refuse at once."""
    reserve: float | str | None
    """Share reserved for high priority: ``20%`` or 0.2, up to 49 %. For low priority, twice that. Default: none."""


def terms_of(given: Mapping[str, Any]) -> Terms:
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
    return Terms(adaptive, max_delay, reserve)


_BOUNDS = frozenset(each.name for each in fields(Adaptive))


@dataclass(frozen=True, slots=True, repr=False)
class WorkDecision(Decision):
    """Decision about a block of work."""

    @property
    def windows(self) -> tuple[Window, ...]:
        """The limit on blocks in flight, whose period is 0."""
        used = self.limit - self.remaining
        return (Window(None, self.limit, 0, self.remaining, used, self.reset_after, self.retry_after),)


class Work(Unpicklable, ConcurrencyLimiter):
    """Blocks of work under an adaptive limit."""

    made_by = "limiter.adaptive(...)"

    def __init__(self, name: str, terms: Terms, clock: Callable[[], float] = monotonic) -> None:
        self.name = name
        self._heartbeats = Heartbeats(clock)
        super().__init__(terms, clock)

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        begun: dict[Hashable, list[Permit | None]] = getattr(self, "_blocks", {})
        self._blocks: dict[Hashable, list[Permit | None]] = {owner: [None] * len(block) for owner, block in begun.items()}
        """Permits by thread or task, innermost last. Unlimited blocks have None."""

    def enter(self, priority: Priority) -> Decision:
        """Begin a block in this thread. Raises `RateLimited`."""
        if switch.null_store is not None:
            return self._enter_unlimited(get_ident())
        permit, thread = self._begun(priority, None, WaitingThread)
        if thread is None:
            return self._entered(get_ident(), permit)
        try:
            has_place = self.wait(permit, thread)
        except BaseException as error:
            self._give_up(permit, error)
            raise
        return self._served(get_ident(), permit, has_place=has_place)

    async def aenter(self, priority: Priority) -> Decision:
        """Begin a block in this task. Raises `RateLimited`."""
        if switch.null_store is not None:
            return self._enter_unlimited(asyncio.current_task())
        permit, task = self._begun(priority, self._heartbeats.guard(), WaitingTask)
        if task is None:
            return self._entered(asyncio.current_task(), permit)
        try:
            if self.has_to_wait(permit, task):
                await task.woken
        except BaseException as error:
            self._give_up(permit, error)
            raise
        return self._served(asyncio.current_task(), permit, has_place=permit.began is not None)

    def _enter_unlimited(self, owner: Hashable) -> Decision:
        with self._lock:
            self._blocks.setdefault(owner, []).append(None)
        return self._decision(NORMAL)

    def exit(self, owner: Hashable, error: BaseException | None) -> None:
        outcome = _outcome(error)
        # A GeneratorExit may come from the garbage collector, where taking the lock can deadlock.
        if isinstance(error, GeneratorExit):
            self._abandon(partial(self._pop, owner, outcome))
        else:
            with self._lock:
                self._pop(owner, outcome)

    def _begun(self, priority: Priority, guard: LagGuard | None, waiter: Callable[[], W]) -> tuple[Permit, W | None]:
        permit = self.begin(self.name, priority, guard, waiter)
        waits = None if permit is None or not permit.waits else self.waiter(permit)
        # A block of higher priority in another thread may already have displaced this one.
        if permit is None or (waits is None and permit.waits):
            raise RateLimited(self._refusal(priority))
        return permit, waits

    def _give_up(self, permit: Permit, error: BaseException) -> None:
        (self.abandon if isinstance(error, GeneratorExit) else self.end)(permit)

    def _served(self, owner: Hashable, permit: Permit, *, has_place: bool) -> Decision:
        if not has_place:
            raise RateLimited(self._refusal(permit.priority))
        return self._entered(owner, permit, permit.waited_s)

    def _entered(self, owner: Hashable, permit: Permit, delay: float = 0.0) -> Decision:
        with self._lock:
            self._blocks.setdefault(owner, []).append(permit)
        return self._decision(permit.priority, delay)

    def _pop(self, owner: Hashable, outcome: Outcome) -> None:
        """End an owner's innermost block. If a generator ends its block in another thread or task, any block ends."""
        if owner not in self._blocks:
            owner = next((each for each, blocks in self._blocks.items() if blocks[-1] is not None), None)
        blocks = self._blocks.get(owner)
        if blocks is None:
            return
        permit = blocks.pop()
        if not blocks:
            del self._blocks[owner]
        if permit is not None:
            self._end(permit, outcome)

    def _decision(self, priority: Priority, delay: float = 0.0) -> Decision:
        return WorkDecision(True, self.limit.limit, self._remaining(priority), 0.0, 0.0, 1, None, delay=delay)

    def _refusal(self, priority: Priority) -> Decision:
        after_s = self.limit.retry_after_s(random.random)
        return WorkDecision(False, self.limit.limit, self._remaining(priority), float(after_s), 0.0, 0, None)

    def _remaining(self, priority: Priority) -> int:
        return max(0, self.limit.levels[priority].room - self.limit.in_flight)


def _outcome(error: BaseException | None) -> Outcome:
    """Only success gives a sample."""
    if error is None:
        return "ok"
    return "failed" if isinstance(error, TimeoutError | ConnectionError | asyncio.CancelledError) else "untaught"


class _Around:
    def __init__(self, work: Work, priority: Priority = NORMAL) -> None:
        self._work = work
        self._priority: Priority = priority

    @property
    def name(self) -> str:
        return self._work.name

    @property
    def limit(self) -> int:
        """Current limit on blocks in flight in this process."""
        return self._work.limit.limit

    @property
    def in_flight(self) -> int:
        """Blocks in flight in this process."""
        return self._work.limit.in_flight

    @property
    def waiting(self) -> int:
        """Blocks in this process that wait for a permit."""
        return self._work.limit.waiting

    def check_options(self, given: Mapping[str, Any]) -> None:
        if given and terms_of(given) != self._work.terms:
            raise ConfigError(
                f"adaptive: {self.name!r:.80} already exists with other options, "
                "expected the same options, no options, or another name"
            )


class AsyncAdaptiveWork(_Around):
    """Work on asyncio, from `AsyncLimiter.adaptive`. Tasks and event loops can share it."""

    def with_priority(self, priority: Priority) -> AsyncAdaptiveWork:
        """Return the same work for ``high``, ``normal`` or ``low`` priority."""
        return AsyncAdaptiveWork(self._work, _checked(priority))

    async def __aenter__(self) -> Decision:
        asyncio_loop("adaptive")
        return await self._work.aenter(self._priority)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        owner = asyncio.current_task() if asyncio._get_running_loop() else None  # noqa: SLF001 - without a loop when a generator is closed
        self._work.exit(owner, error)

    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        """Run each call of an async function as a block."""
        check_async(function)

        @wraps(function)
        async def adaptive(*args: P.args, **kwargs: P.kwargs) -> T:
            async with self:
                return await function(*args, **kwargs)

        return adaptive


class AdaptiveWork(_Around):
    """Work in threads, from `Limiter.adaptive`. Threads can share it."""

    def with_priority(self, priority: Priority) -> AdaptiveWork:
        """Return the same work for ``high``, ``normal`` or ``low`` priority."""
        return AdaptiveWork(self._work, _checked(priority))

    def __enter__(self) -> Decision:
        return self._work.enter(self._priority)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._work.exit(get_ident(), error)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Run each call of a function as a block."""
        check_plain(function)
        if isgeneratorfunction(function):
            raise TypeError(f"{function!r:.80} {_GENERATOR}")

        @wraps(function)
        def adaptive(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return function(*args, **kwargs)

        return adaptive


A = TypeVar("A", bound=_Around)


def adaptive_work(known: dict[str, A], kind: Callable[[Work], A], name: str, given: Mapping[str, Any]) -> A:
    """Create the work with this name if needed. Raises `ConfigError`."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"adaptive: {name!r:.80} is not a name, expected text that is not empty, such as 'db'")
    found = known.get(name)
    if found is None:
        found = known.setdefault(name, kind(Work(name, terms_of(given))))  # Threads may race here.
    found.check_options(given)
    return found


def _checked(priority: object) -> Any:
    if not is_priority(priority):
        raise ConfigError(f"{priority!r:.80} is not a priority, expected one of {', '.join(map(repr, RESERVES))}")
    return priority


KeyOf = str | Callable[..., str] | None
"""Text, or a callable with the call's arguments."""


_GENERATOR = "is a generator, expected a function whose work is done when it returns"


def check_plain(function: object) -> None:
    if isasyncgenfunction(function):
        raise TypeError(f"{function!r:.80} {_GENERATOR}")
    if is_async(function):
        raise TypeError(f"{function!r:.80} is async, expected a plain function, or an AsyncLimiter instead of a Limiter")
    if isclass(function):
        raise TypeError(f"{function!r:.80} is a class, expected a function, such as one of its methods")
    if not callable(function):
        below = ", or @classmethod above this decorator" if isinstance(function, classmethod) else ""
        raise TypeError(f"{function!r:.80} cannot be called, expected a function{below}")


def check_async(function: object) -> None:
    if isasyncgenfunction(function):
        raise TypeError(f"{function!r:.80} {_GENERATOR}")
    if not is_async(function):
        raise TypeError(f"{function!r:.80} is not an async function, expected one, or a Limiter instead of an AsyncLimiter")


def check_key_of(key: object) -> None:
    if not (key is None or isinstance(key, str) or callable(key)):
        raise TypeError(f"key is {key!r:.80}, expected text, or a function of the call's arguments that returns it")


def check_named(function: object, key: KeyOf) -> None:
    if key is None and not hasattr(function, "__qualname__"):
        raise TypeError(f"{function!r:.80} has no name to count by, expected key='...'")


def key_of(key: KeyOf, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Raises `TypeError` if the key isn't text."""
    if key is None:
        return f"{function.__module__}.{function.__qualname__}"
    return key(*args, **kwargs) if callable(key) else key
