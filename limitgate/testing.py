"""For tests of limited applications: `off`, `frozen` and `reset`, for all gates, limiters and memory stores of this process.

Nothing asks on a request's way whether a test is under way. While a context manager here is open, it replaces attributes of the
classes and modules that decide and wait, so it reaches whatever was made before, too, in all threads and event loops.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from threading import RLock, get_ident
from types import TracebackType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from limitgate import middleware
from limitgate.errors import called_as
from limitgate.gate import nesting
from limitgate.gate.admission import Admission, admission_of
from limitgate.gate.flow import ConfigFlow, Flow, arun, run
from limitgate.gate.gate import Gate
from limitgate.gate.lifecycle.build import Built
from limitgate.gate.planning.cardinality import CardinalityGuard
from limitgate.gate.planning.planner import ExtraRule
from limitgate.gate.slot_keeper import RENEW, SlotKeeper
from limitgate.http.request import Request
from limitgate.limiter.adaptive import Work
from limitgate.limiter.limiter import AsyncLimiter, Limiter
from limitgate.limiter.operations import Operations
from limitgate.limiter.reservation import AsyncReservation, Reservation
from limitgate.limiter.rule_bucket import RuleBucketOperations
from limitgate.limiter.slot import at_once
from limitgate.limiter.stored_limits import Configuration
from limitgate.limits.decision import Decision, Window, decide
from limitgate.limits.limit import Limit
from limitgate.limits.plan import BucketReading, Plan, Reading
from limitgate.limits.priority import Priority
from limitgate.messages.suggestions import lacking
from limitgate.overload.places import Places
from limitgate.process import waiting
from limitgate.process.forking import living
from limitgate.rules import decorators
from limitgate.rules.decorators import EVERYTHING
from limitgate.stores import MemoryStore
from limitgate.stores.base import ConfigRequest, StoredConfig
from limitgate.stores.memory import system_clock

__all__ = ["FrozenClock", "frozen", "off", "reset"]

T = TypeVar("T")
Place = tuple[Any, str]
"""A module or class, and the name of one of its attributes."""
Replacements = Mapping[Place, Any]

_SECOND = 1_000_000
_LATEST = 2**33
"""Unix time in seconds before which a clock starts, in the year 2242: further on dates are not what algorithms expect."""
_MISSING = object()


@called_as("a with block, with off():, or the fixture limitgate_off of pytest")
def off() -> AbstractContextManager[None]:
    """Limit nothing for the length of a ``with`` block. Stores are not asked, and need not be there.

    Requests pass as if they were exempt: their decision is None, no rate field is sent, and limited functions need no gate.
    Limiters admit everything, each time as if nobody had used the key before; ``ban``, ``configure`` and the like have no
    effect. Outbound clients send at once and return whatever the service answers. Requests that are under way already keep
    their decision, and go on waiting where they wait. May be nested.
    """
    return _Replacing(_OFF, _nothing_limited)


def frozen(at: float | datetime | None = None) -> AbstractContextManager[FrozenClock]:
    """Stop the clock of all memory stores for a ``with`` block, which gets a `FrozenClock` to move it on.

    ``at`` is Unix time in seconds, or a datetime, in UTC unless it has a zone; None for now. Waiting takes no time: whatever
    sleeps for its turn, `Limiter.wait`, ``max_delay``, ``pace`` or an outbound client, moves the clock on to that moment
    instead and goes on at once. Stores on Redis keep their own clock. Nested, the inner clock counts.
    """
    return _Replacing(_FROZEN, lambda: _frozen_by(FrozenClock(at)))


def reset() -> None:
    """Forget every bucket, and every ban, in all memory stores. What is configured under a name stays.

    Outbound clients forget for how long services asked to be left alone, and how loaded they are; adaptive limits, everything
    that they have learned and what is in flight. What is on Redis stays there.
    """
    for store in living(MemoryStore):
        store.forget()
    for guard in living(CardinalityGuard):
        guard.forget()
    for places in living(Places):
        places.forget()
    outbound = sys.modules.get("limitgate.outbound.throttle")  # else there is no client either
    for throttle in list(outbound.throttles) if outbound else ():
        throttle.forget()


@lacking("the clock", dict.fromkeys(("move_to", "shift", "tick"), "clock.advance(seconds)"))
class FrozenClock:
    """A clock that goes on only when told. Called, it gives Unix time in integer microseconds, as `MemoryStore` takes it."""

    def __init__(self, at: float | datetime | None = None) -> None:
        self._now = self._began = _unix_us(at)
        self._monotonic = self._reached = waiting.monotonic()
        self._lock = RLock()

    def __call__(self) -> int:
        """Unix time in microseconds."""
        return self._now

    def __repr__(self) -> str:
        return f"FrozenClock({self.now!r})"

    @property
    def now(self) -> float:
        """Unix time in seconds."""
        return self._now / _SECOND

    def advance(self, seconds: float) -> None:
        """Go on by some seconds, rounded up to a microsecond. Slots in flight are renewed on the way.

        Raises `ValueError` for less than 0, as time does not run backwards.
        """
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ValueError(f"seconds is {seconds!r:.40}, expected a number of at least 0")
        with self._lock:
            self._go_on_to(self._now + _rounded_up(seconds))

    def monotonic(self) -> float:
        """Time of `time.monotonic`, if it went on with this clock alone."""
        return max(self._reached, self._monotonic + (self._now - self._began) / _SECOND)

    def sleep(self, seconds: float) -> None:
        """Go on by some seconds, in place of `time.sleep`."""
        self.sleep_until(self.monotonic() + seconds)

    async def asleep(self, seconds: float) -> None:
        """Let others have their turn and go on by some seconds, in place of `asyncio.sleep`."""
        due_at = self.monotonic() + seconds
        await asyncio.sleep(0)
        self.sleep_until(due_at)

    def sleep_until(self, due_at: float) -> None:
        """Go on to a time of `monotonic`, unless it is over."""
        with self._lock:
            self._go_on_to(self._began + _rounded_up(due_at - self._monotonic))
            self._reached = max(self._reached, due_at)  # whatever became of its last digits

    def call_at(self, loop: asyncio.AbstractEventLoop, due_at: float, callback: Callable[[], None]) -> asyncio.Handle:
        """Let others have their turn on an event loop, go on to a time of `monotonic` and call back."""

        def call() -> None:
            self.sleep_until(due_at)
            callback()

        return loop.call_soon(call)

    def _go_on_to(self, due: int) -> None:
        while self._now < due:
            kept = [(keeper.store, keeper.held) for keeper in living(SlotKeeper) if isinstance(keeper.store, MemoryStore)]
            held = [(store, charges) for store, charges in kept if charges]
            self._now = min(due, self._now + round(RENEW * _SECOND)) if held else due
            for store, charges in held:
                store.spend(Plan.adjust([charge.renewed() for charge in charges]))


def _rounded_up(seconds: float) -> int:
    """Whole microseconds. What is that but for the last digits of a float is not rounded up to the next."""
    return math.ceil(seconds * _SECOND - 0.01)


def _unix_us(at: float | datetime | None) -> int:
    if at is None:
        return (_FROZEN.latest or system_clock)()
    if isinstance(at, datetime):
        at = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < _LATEST:
        raise ValueError(f"at is {at!r:.80}, expected Unix time in seconds, a datetime or None")
    return round(at * _SECOND)


# --- what is replaced -------------------------------------------------------------------------------------------------


class _Wanted(NamedTuple, Generic[T]):
    """A replacement that somebody wants, and its value for them."""

    value: T
    replacements: Replacements


class _Switch(Generic[T]):
    """Attributes that others stand in for while anybody wants it. Of several who do, the latest decides."""

    def __init__(self) -> None:
        self._wanted: list[_Wanted[T]] = []
        self._own: dict[Place, Any] = {}
        """The values to be put back."""

    @property
    def latest(self) -> T | None:
        """Value of the latest who wants it; None if nobody does."""
        return self._wanted[-1].value if self._wanted else None

    @property
    def is_wanted(self) -> bool:
        """True if anybody wants it."""
        return bool(self._wanted)

    def begin(self, wanted: _Wanted[T]) -> None:
        """Replace what somebody wants to be replaced."""
        with _lock:
            for owner, name in wanted.replacements:
                self._own.setdefault((owner, name), vars(owner).get(name, _MISSING))
            self._wanted.append(wanted)
            _set(wanted.replacements)

    def end(self, unwanted: _Wanted[T]) -> None:
        """Put back what is wanted no more."""
        with _lock:
            self._wanted = [each for each in self._wanted if each is not unwanted]
            _set(self._own)
            if self._wanted:
                _set(self._wanted[-1].replacements)
            else:
                self._own = {}


class _Replacing(AbstractContextManager[T]):
    """Wants a switch to replace something for the length of a ``with`` block."""

    def __init__(self, switch: _Switch[T], want: Callable[[], _Wanted[T]]) -> None:
        self._switch = switch
        self._want = want
        self._entered: list[_Wanted[T]] = []

    def __enter__(self) -> T:
        wanted = self._want()
        self._entered.append(wanted)
        self._switch.begin(wanted)
        return wanted.value

    def __call__(self, *_: object) -> NoReturn:
        """Say that it is no decorator: around an async function it would be over before that runs."""
        raise TypeError("off() and frozen() are no decorators, expected a with block, or the fixtures of pytest")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._switch.end(self._entered.pop())


_lock = RLock()
_OFF: _Switch[None] = _Switch()
_FROZEN: _Switch[FrozenClock] = _Switch()


def _set(values: Replacements) -> None:
    for (owner, name), value in values.items():
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


class _SameForAll:
    """Attribute of a class that goes before that of each instance, and comes to light again when this is taken out."""

    def __init__(self, name: str, value: object) -> None:
        self._name = name
        self._value = value

    def __get__(self, instance: object, owner: type | None = None) -> object:
        return self._value

    def __set__(self, instance: object, value: object) -> None:
        vars(instance)[self._name] = value


def _frozen_by(clock: FrozenClock) -> _Wanted[FrozenClock]:
    replacements: Replacements = {
        (MemoryStore, "_clock"): _SameForAll("_clock", clock),
        (waiting, "monotonic"): clock.monotonic,
        (waiting, "sleep"): clock.sleep,
        (waiting, "asleep"): clock.asleep,
        (waiting, "sleep_until"): clock.sleep_until,
        (waiting, "call_at"): clock.call_at,
    }
    return _Wanted(clock, replacements)


def _nothing_limited() -> _Wanted[None]:
    replacements: dict[Place, Any] = {
        (Gate, "begin"): _begin,
        (Gate, "further"): _further,
        (Gate, "usage"): _usage,
        (Gate, "message"): _message,
        (Gate, "aconnect"): _not_asked,
        (Built, "ask_store"): lambda _built: None,
        (middleware, "arequire"): _not_asked,
        (decorators, "_enabled"): lambda: False,
        (Operations, "_prepared"): lambda *_: None,
        (Operations, "_lookup"): _lookup,
        (Limiter, "_run"): _run,
        (AsyncLimiter, "_arun"): _arun,
        (RuleBucketOperations, "_carried_out"): _carried_out,
        (Limiter, "reserve"): _reserve,
        (AsyncLimiter, "reserve"): _areserve,
        (Limiter, "slot"): _slot,
        (AsyncLimiter, "slot"): _aslot,
        (Work, "enter"): _enter,
        (Work, "aenter"): _aenter,
    }
    with suppress(ImportError):  # without its extra there is no outbound client
        from limitgate.outbound.throttle import ClientThrottle  # noqa: PLC0415 - needs the extra

        replacements[ClientThrottle, "exchange"] = _exchange
    return _Wanted(None, replacements)


def _begin(gate: Gate, request: Request, outer: Admission | None = None) -> Admission:
    """`Gate.begin`, as if the request were exempt."""
    admission = admission_of(request, gate.rules)
    admission.marks = EVERYTHING
    if outer is not None:
        nesting.enter(admission, outer)
    return admission


def _further(_gate: Gate, _admission: Admission, _rules: Sequence[ExtraRule]) -> Flow[None]:
    """`Gate.further`, where nothing is limited."""
    yield from ()


def _usage(_gate: Gate, _admission: Admission, _names: Sequence[str], _path: str | None) -> Flow[tuple[Window, ...]]:
    """`Gate.usage`, where nothing is limited."""
    yield from ()
    return ()


def _message(*_: object) -> asyncio.Future[None]:
    passes: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    passes.set_result(None)
    return passes


async def _not_asked(*_: object) -> None:
    """The store need not be there at start."""


def _exchange(throttle: Any, transport: Any, request: Any) -> Any:  # noqa: ARG001 - in the place of a method
    """`ClientThrottle.exchange`, as for a request that has no key."""
    return (yield transport.send(request))[0]


class _Unused:
    """A store in which nobody has used anything, everything fits, and nothing stays."""

    measures_silence = True

    def spend(self, plan: Plan, timeout: float = 0) -> Reading:
        """Admit a plan whose buckets are all full."""
        now = time.time_ns() // 1000
        states = [charge.bucket.algorithm.initial(now, charge.bucket) for charge in plan.charges]
        buckets = [BucketReading(charge._replace(max_wait_us=0), each, each) for charge, each in zip(plan.charges, states)]
        return Reading(now, buckets, admitted=True)

    async def aspend(self, plan: Plan, timeout: float = 0) -> Reading:
        """`spend`, for async callers."""
        return self.spend(plan)

    def config(self, request: ConfigRequest, timeout: float = 0) -> StoredConfig:
        """Answer that a text was kept, or that there is none."""
        return StoredConfig(0 if request.text is None else 1, request.text)

    async def aconfig(self, request: ConfigRequest, timeout: float = 0) -> StoredConfig:
        """`config`, for async callers."""
        return self.config(request)

    def close(self) -> None:
        """Nothing to let go of."""

    async def aclose(self) -> None:
        """Nothing to let go of."""


_UNUSED = _Unused()


def _lookup(operations: Operations, name: str) -> ConfigFlow[Configuration]:
    """`Operations._lookup`, which finds some limits if none are known."""
    yield from ()  # nothing is asked
    known = operations._known.stale(operations._config_key(name))  # noqa: SLF001 - in the place of a method
    return known or Configuration((Limit("1/second"),))


def _run(limiter: Limiter, flow: ConfigFlow[T]) -> T:
    if not _OFF.is_wanted:  # somebody has kept this method
        return limiter._run(flow)  # noqa: SLF001 - in the place of a method
    return run(_UNUSED, flow)


def _arun(limiter: AsyncLimiter, flow: ConfigFlow[T]) -> Coroutine[Any, Any, T]:
    if not _OFF.is_wanted:  # somebody has kept this method
        return limiter._arun(flow)  # noqa: SLF001 - in the place of a method
    return arun(_UNUSED, flow)


_ON_RULE_BUCKET = RuleBucketOperations._carried_out  # noqa: SLF001 - what is replaced


def _carried_out(operations: RuleBucketOperations, plan: Plan) -> Flow[Decision]:
    """`RuleBucketOperations._carried_out`, in buckets that nobody has used."""
    yield from ()
    return run(_UNUSED, _ON_RULE_BUCKET(operations, plan))


def _reserve(limiter: Limiter, key: str, *limits: Any, cost: int = 1) -> Reservation:
    return Reservation(run(_UNUSED, limiter._reserving(key, limits, cost)), _UNUSED)  # noqa: SLF001 - in the place of a method


async def _areserve(limiter: AsyncLimiter, key: str, *limits: Any, cost: int = 1) -> AsyncReservation:
    return AsyncReservation(await arun(_UNUSED, limiter._reserving(key, limits, cost)), _UNUSED)  # noqa: SLF001 - as above


def _slot_decision(limiter: Operations, key: str, limit: Limit | str | int, cost: int) -> Decision:
    plan = limiter._plan("peek", key, (at_once(limit),), cost)._replace(verb="spend")  # noqa: SLF001 - in the place of a method
    return decide(plan, _UNUSED.spend(plan))


@contextmanager
def _slot(limiter: Limiter, key: str, limit: Limit | str | int, *, cost: int = 1) -> Iterator[Decision]:
    yield _slot_decision(limiter, key, limit, cost)


@asynccontextmanager
async def _aslot(limiter: AsyncLimiter, key: str, limit: Limit | str | int, *, cost: int = 1) -> AsyncIterator[Decision]:
    yield _slot_decision(limiter, key, limit, cost)


def _enter(work: Work, priority: Priority) -> Decision:  # noqa: ARG001 - in the place of a method
    return work.enter_unlimited(get_ident())


async def _aenter(work: Work, priority: Priority) -> Decision:  # noqa: ARG001 - in the place of a method
    return work.enter_unlimited(asyncio.current_task())
