"""Interface of an algorithm, and its tools. A *state* is a few integers that describe a window at one time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from math import inf
from typing import Any, NamedTuple, Protocol

State = Any
Amount = Any
MAX_USED = 2**50
"""Maximum of a counter, including shortfalls; keeps Lua's doubles exact."""


class Load(NamedTuple):
    """Maximum Redis CPU time in µs, measured with Redis 7.0 on two cores."""

    opening: float
    charge: float
    correction: float
    """Additional time for each adjustment."""

    def plus(self, other: Load) -> Load:
        return Load(self.opening + other.opening, self.charge + other.charge, self.correction + other.correction)


class StraightRefund(NamedTuple):
    """A full refund as pieces of Python source. The Lua twin is limitgate/lua/refund.lua.

    In the source, ``was_`` is the prefix of the state before the charge, and ``since`` is the time since the charge in µs.
    """

    grace: str
    """Expression, see `limitgate.limits.plan.Adjustment`."""
    refunded: str
    """Lines that refund the charge in an advanced state. They use ``grace{n}``."""


class Straight(NamedTuple):
    """An immediate charge as pieces of Python source. In them, ``{n}`` is the number of the window.

    The source uses ``now``, ``elapsed`` (µs since the last write) and ``cost``. The Lua twin is limitgate/lua/plain.lua.
    """

    kept: str
    """Names of a state's integers, each with a comma."""
    state: str
    row: str
    """Names of the results of `row_of`, like ``kept``."""
    row_of: Callable[[LimitNumbers, int], tuple[int, ...]]
    """Computes the numbers in ``row`` from a limit and a cost."""
    advance: str
    fits: str
    charged: str
    """Expressions for the integers after the charge, like ``kept``."""
    refund: StraightRefund | None
    """Code of a full refund; None if stores call `Algorithm.apply_adjustment`."""
    asked: Callable[[LimitNumbers, int, int], bytes]
    """Packs the arguments of the Lua twin."""
    reported: str
    reported_state: str
    """Expression for the reported state. It may use the limit's ``count{n}``."""
    known: Sequence[tuple[str, Any]] = ()
    """Other names that ``reported_state`` uses."""
    most: float = inf
    """Maximum count of a limit in the Lua twin."""


class LimitNumbers(Protocol):
    @property
    def count(self) -> int: ...
    @property
    def period(self) -> int: ...
    @property
    def months(self) -> int: ...
    @property
    def period_us(self) -> int: ...
    @property
    def burst(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def ceiling(self) -> int: ...
    @property
    def full(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def lease(self) -> int: ...
    @property
    def borrow(self) -> bool: ...
    @property
    def align(self) -> str | None: ...
    @property
    def warm_up(self) -> float | None: ...


class BucketNumbers(Protocol):
    @property
    def limits(self) -> Sequence[LimitNumbers]: ...
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def counts(self) -> Sequence[int]: ...
    @property
    def weights(self) -> Sequence[int]: ...
    @property
    def capacities(self) -> Sequence[int]: ...
    @property
    def borrow(self) -> bool: ...


def always(states: Sequence[State], bucket: BucketNumbers, cost: int) -> bool:
    """`Algorithm.refusal_is_stable` if a reported state is complete."""
    return True


def never(states: Sequence[State], bucket: BucketNumbers, cost: int) -> bool:
    """`Algorithm.refusal_is_stable` if other requests can change a state at any time."""
    return False


LeftAfter = Callable[[State, int, LimitNumbers], tuple[int, int]]
"""Returns how many more requests fit (negative if the cost doesn't fit now), and the µs until empty."""


class Algorithm(Protocol):
    """An algorithm. A sequence of states has one state for each window of a bucket."""

    REPLY_FIELDS: int
    CAN_WAIT: bool
    """True if turns can be booked."""
    MAX_TURNS: int
    """Maximum of booked turns; 0 if unlimited."""
    STRAIGHT: Straight | None
    """Code of an immediate charge; None if stores call the functions below."""
    IS_LIMIT: bool
    """False for a ban, which is hidden from `Decision.windows` while it is empty."""
    RESCALES: bool
    """True if a state is in ticks of 1/count µs."""

    @property
    def left_after(self) -> LeftAfter | None:
        """Return None if plans can't be plain, see `limitgate.limits.template`."""

    def check(self, limit: LimitNumbers) -> str | None:
        """Return what was expected if the limit is unsupported."""

    def load(self, limit: LimitNumbers) -> Load:
        """Return the load of a window, without that of the bucket."""

    def initial(self, now: int, bucket: BucketNumbers) -> Sequence[State]:
        """Return the states of unused windows at ``now``, in Unix µs."""

    def advance(
        self, states: Sequence[State], elapsed_us: int, bucket: BucketNumbers, now: int | None = None
    ) -> Sequence[State]:
        """Return the states after ``elapsed_us`` (at least 0), at ``now`` in Unix µs."""

    def rescaled(self, state: State, limit: LimitNumbers) -> State:
        """Convert a state that was stored under another count."""

    def try_charge(
        self,
        states: Sequence[State],
        bucket: BucketNumbers,
        cost: int,
        max_wait_us: int = 0,
        slot: int = 0,
        *,
        turn_us: int = 0,
    ) -> Sequence[State] | None:
        """Return the states after ``cost`` requests, the same object if unchanged; None if they don't fit into every window.

        A request may also fit within ``max_wait_us``. ``slot`` names it for concurrency limits. If another limit delays the
        request until ``turn_us``, it counts from then on.
        """

    def apply_adjustment(
        self, states: Sequence[State], back: Sequence[Amount], elapsed_us: int, grace_us: Sequence[int], bucket: BucketNumbers
    ) -> Sequence[State]:
        """Refund charges made ``elapsed_us`` ago. A negative amount is charged."""

    def refund_amount(
        self, states: Sequence[State], bucket: BucketNumbers, cost: int, due: int, slot: int = 0, *, turn_us: int = 0
    ) -> tuple[Sequence[Amount], Sequence[int]]:
        """Return the amount and grace per window that correct a cost to ``due``. ``states`` are those before the charge."""

    def remaining(self, state: State, limit: LimitNumbers) -> int:
        """Return how many whole requests fit, at least 0."""

    def used(self, state: State, limit: LimitNumbers) -> int:
        """Return how many requests are in use, rounded up. Exceeds the burst after a limit was lowered."""

    def refusal_is_stable(self, states: Sequence[State], bucket: BucketNumbers, cost: int) -> bool:
        """True if a repeated call would report the same states for this cost. Refunds don't matter."""

    def wait_us(self, state: State, cost: int, limit: LimitNumbers) -> int | None:
        """Return the µs until ``cost`` requests fit; None if never."""

    def refill_us(self, state: State, limit: LimitNumbers) -> int:
        """Return the µs until the window is empty."""

    def ttl_us(self, state: State, limit: LimitNumbers) -> int:
        """Return the µs until a window equals an unused one."""

    def date(self, limit: LimitNumbers) -> int:
        """Return a date of the local clock for `encode_charge`; 0 if none is needed."""

    def encode_charge(self, limit: LimitNumbers, window: int, cost: int, ahead_us: int, date: int) -> Sequence[int]:
        """Encode a charge for the script. Its turn may be ``ahead_us`` in the future."""

    def encode_adjustment(self, limit: LimitNumbers, back: Amount, grace_us: int) -> Sequence[float]:
        """Encode the adjustment of a window for the script."""

    def decode_state(self, facts: Sequence[int], bucket: BucketNumbers) -> Sequence[State]:
        """Decode the states in the script's reply."""


def each_window(windows: int, text: str, between: str = " ") -> str:
    """Repeat the text for each window, replacing ``{n}`` by the window's number."""
    return between.join(map(text.replace, repeat("{n}"), map(str, range(windows))))


def compiled(source: str, name: str, **known: Any) -> Any:
    """Compile source with unrolled loops, two to three times as fast. Return the object ``name``."""
    made: dict[str, Any] = {}
    exec(source, known, made)  # noqa: S102 - internal templates only
    return made[name]


class ForOne(Protocol):
    """An algorithm for a single window."""

    REPLY_FIELDS: int
    CAN_WAIT: bool
    MAX_TURNS: int
    STRAIGHT: Straight | None

    def check(self, limit: LimitNumbers) -> str | None: ...
    def load(self, limit: LimitNumbers) -> Load: ...
    def initial(self, now: int, limit: LimitNumbers) -> State: ...
    def advance(self, state: State, elapsed_us: int, limit: LimitNumbers, now: int | None = None) -> State: ...

    def charged(self, state: State, cost: int, limit: LimitNumbers, turn_us: int) -> State:
        """Charge ``cost`` requests, even if they don't fit. The turn comes in ``turn_us``."""

    def apply_adjustment(self, state: State, back: int, elapsed_us: int, grace_us: int, limit: LimitNumbers) -> State: ...

    def grace_us(self, state: State, limit: LimitNumbers) -> int:
        """Return a value for `apply_adjustment`, usually the µs for which a charge is refundable."""

    def refusal_is_stable(self, states: Sequence[State], bucket: BucketNumbers, cost: int) -> bool: ...
    def remaining(self, state: State, limit: LimitNumbers) -> int: ...
    def left_after(self, state: State, cost: int, limit: LimitNumbers) -> tuple[int, int]: ...
    def used(self, state: State, limit: LimitNumbers) -> int: ...
    def wait_us(self, state: State, cost: int, limit: LimitNumbers) -> int | None: ...
    def refill_us(self, state: State, limit: LimitNumbers) -> int: ...
    def date(self, limit: LimitNumbers) -> int: ...
    def encode_charge(self, limit: LimitNumbers, cost: int, date: int) -> Sequence[int]: ...

    def decode_state(self, facts: Sequence[int]) -> State: ...


class Each:
    IS_LIMIT = True
    RESCALES = False

    def __init__(self, one: ForOne) -> None:
        self._one = one
        self.REPLY_FIELDS = one.REPLY_FIELDS
        self.CAN_WAIT = one.CAN_WAIT
        self.MAX_TURNS = one.MAX_TURNS
        self.STRAIGHT = one.STRAIGHT
        self.refusal_is_stable: Callable[[Sequence[State], BucketNumbers, int], bool] = one.refusal_is_stable
        self.check: Callable[[LimitNumbers], str | None] = one.check
        self.load: Callable[[LimitNumbers], Load] = one.load
        self.remaining: Callable[[State, LimitNumbers], int] = one.remaining
        self.left_after: Callable[[State, int, LimitNumbers], tuple[int, int]] = one.left_after
        self.used: Callable[[State, LimitNumbers], int] = one.used
        self.wait_us: Callable[[State, int, LimitNumbers], int | None] = one.wait_us
        self.refill_us: Callable[[State, LimitNumbers], int] = one.refill_us
        self.ttl_us: Callable[[State, LimitNumbers], int] = one.refill_us
        self.date: Callable[[LimitNumbers], int] = one.date

    def initial(self, now: int, bucket: BucketNumbers) -> Sequence[State]:
        return [self._one.initial(now, limit) for limit in bucket.limits]

    def advance(
        self, states: Sequence[State], elapsed_us: int, bucket: BucketNumbers, now: int | None = None
    ) -> Sequence[State]:
        elapsed_us = max(0, elapsed_us)
        return [self._one.advance(state, elapsed_us, limit, now) for state, limit in zip(states, bucket.limits)]

    def rescaled(self, state: State, limit: LimitNumbers) -> State:
        return state

    def try_charge(
        self,
        states: Sequence[State],
        bucket: BucketNumbers,
        cost: int,
        max_wait_us: int = 0,
        slot: int = 0,
        *,
        turn_us: int = 0,
    ) -> Sequence[State] | None:
        if not cost:
            return states
        after = []
        for state, limit in zip(states, bucket.limits):
            wait = self._one.wait_us(state, cost, limit)
            if wait is None or wait > max_wait_us:
                return None
            after.append(self._one.charged(state, cost, limit, max(wait, turn_us)))
        return after

    def apply_adjustment(
        self, states: Sequence[State], back: Sequence[int], elapsed_us: int, grace_us: Sequence[int], bucket: BucketNumbers
    ) -> Sequence[State]:
        windowed = zip(states, back, grace_us, bucket.limits)
        return [
            self._one.apply_adjustment(state, most, max(0, elapsed_us), grace, limit) for state, most, grace, limit in windowed
        ]

    def refund_amount(
        self, states: Sequence[State], bucket: BucketNumbers, cost: int, due: int, slot: int = 0, *, turn_us: int = 0
    ) -> tuple[Sequence[int], Sequence[int]]:
        graces = [turn_us + self._one.grace_us(state, limit) for state, limit in zip(states, bucket.limits)]
        return [max(-MAX_USED, min(cost - due, MAX_USED))] * len(graces), graces

    def encode_charge(self, limit: LimitNumbers, window: int, cost: int, max_wait_us: int, date: int) -> Sequence[int]:
        return self._one.encode_charge(limit, cost, date)

    def encode_adjustment(self, limit: LimitNumbers, back: int, grace_us: int) -> Sequence[int]:
        return back, grace_us

    def decode_state(self, facts: Sequence[int], bucket: BucketNumbers) -> Sequence[Any]:
        return [
            self._one.decode_state(facts[at : at + self.REPLY_FIELDS])
            for at in range(0, self.REPLY_FIELDS * len(bucket.ids), self.REPLY_FIELDS)
        ]
