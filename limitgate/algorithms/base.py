"""Interface of an algorithm. A *state* describes a window at some time, in a few integers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

State = Any
"""State of a window. Only its algorithm knows more about it."""
Amount = Any
"""Amount of an adjustment, as the algorithm counts it: a number, or a few."""

MAX_USED = 2**50
"""Requests at which a counter is cut off that something is owed to on top; keeps Lua's doubles exact."""


class Load(NamedTuple):
    """Microseconds that a window, or a bucket, takes of Redis' one thread at most, as Redis 7.0 takes them on two cores."""

    opening: float
    """To read and to write, once in a call."""
    charge: float
    """For each charge."""
    correction: float
    """For each charge that puts something right, besides."""

    def plus(self, other: Load) -> Load:
        """The load of both."""
        return Load(self.opening + other.opening, self.charge + other.charge, self.correction + other.correction)


class StraightRefund(NamedTuple):
    """The whole of a charge that is given back, in pieces as of `Straight`.

    They know the state that it has found, behind ``was_`` in front of the names, and the microseconds ``since`` then. The Lua
    twin has the same behind ``--PLAIN``, see limitgate/lua/refund.lua.
    """

    grace: str
    """The grace, see `limitgate.limits.plan.Adjustment`."""
    refunded: str
    """Lines that give the charge back, in a state to which time was let go by; they know the ``grace{n}``."""


class Straight(NamedTuple):
    """A charge that fits now or does not, in pieces of Python that are written out for each window; ``{n}`` is its number.

    They know the time ``now``, the microseconds ``elapsed`` since the bucket was written, and the ``cost``. The Lua twin has
    the same behind ``--PLAIN``, see limitgate/lua/plain.lua.
    """

    kept: str
    """Names of the integers that a state consists of, each with a comma behind it."""
    state: str
    """The state, of these."""
    row: str
    """Names of what `row_of` gives, as ``kept``."""
    row_of: Callable[[LimitNumbers, int], tuple[int, ...]]
    """Gives the numbers of a limit and a cost that the lines need."""
    advance: str
    """Lines that let the time go by."""
    fits: str
    """Condition under which the charge fits."""
    charged: str
    """The integers after the charge, as ``kept``."""
    refund: StraightRefund | None
    """The same of giving the charge back; None where stores ask `Algorithm.apply_adjustment`."""
    asked: Callable[[LimitNumbers, int, int], bytes]
    """Packs what the Lua twin is asked of a window, given its number and the cost."""
    reported: str
    """Names of the integers that it reports, as ``kept``."""
    reported_state: str
    """The state, of these and of the limit's ``count{n}``."""
    known: Sequence[tuple[str, Any]] = ()
    """Names that ``reported_state`` knows besides, and what they are."""
    most: float = inf
    """The highest count of a limit that the Lua twin has."""


class LimitNumbers(Protocol):
    """The numbers of a limit that algorithms read; `limitgate.limits.limit.Limit` says what each means."""

    @property
    def count(self) -> int: ...  # noqa: D102
    @property
    def period(self) -> int: ...  # noqa: D102
    @property
    def months(self) -> int: ...  # noqa: D102
    @property
    def period_us(self) -> int: ...  # noqa: D102
    @property
    def burst(self) -> int: ...  # noqa: D102
    @property
    def capacity(self) -> int: ...  # noqa: D102
    @property
    def ceiling(self) -> int: ...  # noqa: D102
    @property
    def full(self) -> int: ...  # noqa: D102
    @property
    def most(self) -> int: ...  # noqa: D102
    @property
    def lease(self) -> int: ...  # noqa: D102
    @property
    def borrow(self) -> bool: ...  # noqa: D102
    @property
    def align(self) -> str | None: ...  # noqa: D102
    @property
    def warm_up(self) -> float | None: ...  # noqa: D102


class BucketNumbers(Protocol):
    """The numbers of a bucket that algorithms read; `limitgate.limits.bucket.Bucket` says what each means."""

    @property
    def limits(self) -> Sequence[LimitNumbers]: ...  # noqa: D102
    @property
    def ids(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def counts(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def weights(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def capacities(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def borrow(self) -> bool: ...  # noqa: D102


def always(states: Sequence[State], bucket: BucketNumbers, cost: int) -> bool:  # noqa: ARG001 - as every algorithm's
    """`Algorithm.refusal_is_stable` where a state tells everything, whatever the cost."""
    return True


def never(states: Sequence[State], bucket: BucketNumbers, cost: int) -> bool:  # noqa: ARG001 - as every algorithm's
    """`Algorithm.refusal_is_stable` where others may change a state at any moment."""
    return False


LeftAfter = Callable[[State, int, LimitNumbers], tuple[int, int]]
"""Gives the whole requests that fit besides some, negative if these do not fit now, and then the µs until nothing counts any
more; from a state, how many requests, and the limit."""


class Algorithm(Protocol):
    """An algorithm, as stores and decisions use it: where there are states, for all windows of a bucket at once."""

    REPLY_FIELDS: int
    """Numbers that the script reports of a window."""
    CAN_WAIT: bool
    """True if turns can be booked ahead, so that a request may wait for its own."""
    MAX_TURNS: int
    """Turns that can be booked ahead at most, each remembered by its moment; 0 where none is, and any number can be booked."""
    STRAIGHT: Straight | None
    """Its charge in straight lines; None where stores ask the functions below."""
    IS_LIMIT: bool
    """False for a state that is no limit (a ban): hidden from `Decision.windows` while it is empty."""
    RESCALES: bool
    """True if states are in ticks of 1/count µs, so that one left by another count has to be written anew."""

    @property
    def left_after(self) -> LeftAfter | None:
        """What is left after a charge; None where none is plain, see `limitgate.limits.template`."""

    def check(self, limit: LimitNumbers) -> str | None:
        """Return the expectation that a limit breaks, None if the limit can be had with this algorithm."""

    def load(self, limit: LimitNumbers) -> Load:
        """Return the most that a window costs Redis, besides the bucket itself."""

    def initial(self, now: int, bucket: BucketNumbers) -> Sequence[State]:
        """Windows that nobody has used, at a time in Unix µs."""

    def advance(
        self, states: Sequence[State], elapsed_us: int, bucket: BucketNumbers, now: int | None = None
    ) -> Sequence[State]:
        """The states some time later, at ``now`` in Unix µs, None if only the elapsed time is known.

        Time that went backwards is no time.
        """

    def rescaled(self, state: State, limit: LimitNumbers) -> State:
        """A state left by another count."""

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
        """The states after ``cost`` requests, the same object if they change none; None if they do not fit into every window.

        A request that may wait fits if it will within ``max_wait_us``. ``slot`` names it where requests in flight are counted.
        Other limits may have it wait for longer than this one: it does not pass before ``turn_us``, and counts from then on.
        """

    def apply_adjustment(
        self, states: Sequence[State], back: Sequence[Amount], elapsed_us: int, grace_us: Sequence[int], bucket: BucketNumbers
    ) -> Sequence[State]:
        """The states after something is put back that was taken some time ago, or, where negative, taken on top."""

    def refund_amount(
        self, states: Sequence[State], bucket: BucketNumbers, cost: int, due: int, slot: int = 0, *, turn_us: int = 0
    ) -> tuple[Sequence[Amount], Sequence[int]]:
        """Amount and grace per window of the adjustment after which a charge of ``cost`` is one of ``due``.

        The states are those that the charge found, and ``turn_us`` is as for `try_charge`.
        """

    def remaining(self, state: State, limit: LimitNumbers) -> int:
        """Whole requests that still fit; never negative."""

    def used(self, state: State, limit: LimitNumbers) -> int:
        """Requests that count, a begun one whole; more than the burst after a limit was lowered."""

    def refusal_is_stable(self, states: Sequence[State], bucket: BucketNumbers, cost: int) -> bool:
        """True if states that the script reported, advanced since, surely are those that it would report for this cost now.

        A refund in between may change them: until it is seen, requests are refused exactly until the moment that was promised.
        """

    def wait_us(self, state: State, cost: int, limit: LimitNumbers) -> int | None:
        """Microseconds until ``cost`` requests fit, if nobody else asks; 0 if they fit now, None if they never do."""

    def refill_us(self, state: State, limit: LimitNumbers) -> int:
        """Microseconds until nothing counts any more."""

    def ttl_us(self, state: State, limit: LimitNumbers) -> int:
        """Microseconds until a window is like one that nobody has used: mostly `refill_us`, and never less."""

    def date(self, limit: LimitNumbers) -> int:
        """Return the present date by this machine's clock, as `encode_charge` takes it; 0 where it does not matter."""

    def encode_charge(self, limit: LimitNumbers, window: int, cost: int, ahead_us: int, date: int) -> Sequence[int]:
        """Encode a charge of the window with this number for the script; it may be booked so far ahead."""

    def encode_adjustment(self, limit: LimitNumbers, back: Amount, grace_us: int) -> Sequence[float]:
        """Encode the adjustment of a window for the script."""

    def decode_state(self, facts: Sequence[int], bucket: BucketNumbers) -> Sequence[State]:
        """Decode the states that the script has reported."""
