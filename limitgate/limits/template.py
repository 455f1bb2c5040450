"""Plain plans: charges of GCRA buckets that fit now or do not, prepared once for all plans that differ in keys alone.

Behind these a plan may look for bans, of which there must be none, or stores decline it.
Almost every request makes one. What follows from the debts that were read is worked out here without an object for each charge.
It is the same as what `limitgate.limits.plan.read` and `limitgate.limits.decision.decide` say, which know every kind of plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from limitgate.algorithms import ban, gcra
from limitgate.limits.decision import SECOND, Decision, Settlement, decision_of
from limitgate.limits.plan import BucketReading, CachedReading, Charge, Plan, Reading, Source, Verb, read
from limitgate.limits.written_out import compiled, each_window

MAX_WINDOWS = 12
"""Windows of a plain plan at most: the script has a dozen variables for each, of 200 that Lua allows."""
_MAX_DEBT = 2**63 - 1
"""Ticks that a window of a plain plan may owe at most, so that 64 bits hold them."""

DECLINED = Reading(0, (), admitted=False)
"""Reading of no buckets, for a plain plan that a store has not carried out: it has to be asked for as a plan of any kind."""

Row = tuple[int, int, int]
"""Of a window the ticks that a microsecond pays back, that the charge takes, and that fit."""


def is_plain(charge: Charge) -> bool:
    """True if a charge is one of GCRA that fits now or does not: nothing is leased, booked, borrowed or adjusted."""
    bucket = charge.bucket
    return (
        bucket.algorithm is gcra
        and not (bucket.lease or bucket.borrow or charge.adjustment or charge.max_wait_us)
        and 0 < charge.cost <= min([limit.most for limit in bucket.limits])
        and max(bucket.capacities) <= _MAX_DEBT
    )


class PlainShape:
    """Numbers of buckets and windows, by which a store may carry out plain plans in one call. Each is one object.

    A bucket without windows is that of a ban, which must not be there.
    """

    __slots__ = ("buckets",)

    def __init__(self, buckets: tuple[tuple[int, bool], ...]) -> None:
        self.buckets = buckets
        """Per bucket the number of its windows, and true if it may refuse."""


@cache
def _shape(*buckets: tuple[int, bool]) -> PlainShape:
    return PlainShape(buckets)


class PlanTemplate:
    """Plain charges less their keys, and the numbers of their windows. Raises `ValueError` for charges that are not plain."""

    __slots__ = (
        "_only_rule",
        "_windows",
        "bans",
        "buckets",
        "charges",
        "counts",
        "is_enforced",
        "load",
        "only",
        "shape",
        "tightest",
    )

    def __init__(self, charges: Sequence[Charge]) -> None:
        self.bans = len([charge for charge in charges if charge.bucket.algorithm is ban])
        """Number of bans that are looked for, by the last keys."""
        counted = charges[: len(charges) - self.bans]
        count = sum([len(charge.bucket.limits) for charge in counted])
        if not (all(map(is_plain, counted)) and 0 < count <= MAX_WINDOWS):
            raise ValueError(f"{charges!r} are not plain, expected GCRA without lease, delay, borrowing and adjustment")
        self.charges = tuple(charges)
        self.buckets = tuple([(charge.bucket, charge.cost, charge.enforced, _rows(charge)) for charge in counted])
        """Per charge but those of bans its bucket, its cost, true if it may refuse, and its rows."""
        self.only = self.buckets[0] if len(counted) == 1 else None
        """The first of ``buckets`` if there are no others."""
        windows = [
            (charge, limit, *row)
            for charge, (bucket, _, _, rows) in zip(counted, self.buckets)
            for limit, row in zip(bucket.limits, rows)
        ]
        self.counts = tuple([count for _, _, count, _, _ in windows])
        """Per window the ticks that a microsecond pays back."""
        least_burst = min([limit.burst for _, limit, _, _, _ in windows])
        self._windows: tuple[_Window, ...] = tuple(
            [
                (
                    capacity - increment - least_burst * limit.period_us,
                    capacity - increment,
                    limit.period_us,
                    count,
                    increment,
                    limit.burst,
                    charge,
                )
                for charge, limit, count, increment, capacity in windows
            ]
        )
        self.tightest = _straight_tightest(self._windows)
        """Function that gives the tightest window once the charges are made, by the debts before.

        It raises `ValueError` if a charge does not fit.
        """
        self.is_enforced = all(charge.enforced for charge in counted)
        """True if no rule is a shadow, so that a plan is admitted where every charge fits."""
        self._only_rule = (counted[0].rule,) if len(counted) == 1 else None
        """The rule of the only charge, where there is one: nobody else can have refused."""
        self.shape = _shape(*[(len(charge.bucket.limits), charge.enforced) for charge in counted], *[(0, True)] * self.bans)
        """Same object for all templates of as many buckets and windows."""
        self.load = sum([charge.bucket.load.opening + charge.bucket.load.charge for charge in charges])
        """Microseconds that a plan takes of Redis at most, by the script for all plans."""

    def plan(self, keys: Sequence[str]) -> Plan:
        """Plan with these keys, one for each charge."""
        return Plan.spend([charge._replace(key=key) for charge, key in zip(self.charges, keys)])

    def asked(self, keys: Sequence[str]) -> PlainSpend:
        """Plain plan with these keys, that has yet to be carried out."""
        plan = PlainSpend()
        plan.template = self
        plan.keys = keys
        plan.waited = 0.0
        return plan

    def reading(self, keys: Sequence[str], now: int, debts: Sequence[int], admitted: bool) -> PlainSpend:  # noqa: FBT001
        """Reading of the plan with these keys, by the ticks that each window owed at ``now``, Unix µs."""
        reading = PlainSpend()
        reading.template = self
        reading.keys = keys
        reading.now = now
        reading.debts = debts
        reading.admitted = admitted
        reading.waited = 0.0
        return reading

    def decide(self, reading: AnyReading, settlement: Settlement | None) -> Decision | None:
        """Decision that follows from a `reading` of this template; None if it was declined, or a shadow would have refused."""
        if not isinstance(reading, PlainSpend):
            return None
        if not reading.admitted:
            return self._refused(reading, settlement)
        tightest = self.tightest(reading.debts) if self.is_enforced else _tightest_of_all(self._windows, reading.debts)
        if tightest is None:
            return None
        burst, left, refill, charge = tightest
        return decision_of(
            True, burst, left, 0.0, refill / SECOND, charge.cost, charge.rule, False, 0.0, reading, True, settlement
        )

    def windows(self, debts: Sequence[int]) -> list[tuple[int, int]]:
        """Per window the whole requests that fit once the charges are made, and the seconds until it is full, rounded up."""
        return [
            ((room - debt) // ticks, -(-(debt + increment) // (count * SECOND)))
            for debt, (_, room, ticks, count, increment, _, _) in zip(debts, self._windows)
        ]

    def _refused(self, reading: PlainSpend, settlement: Settlement | None) -> Decision | None:
        """Decision of a refusal: of the windows as they stand the tightest one, and the longest wait of those that refused."""
        least, latest, limit = -1, -1, 0
        longest, refusing = 0, None
        for debt, (_, room, ticks, count, increment, burst, charge) in zip(reading.debts, self._windows):
            over = debt - room
            left = max(0, increment - over) // ticks
            if left <= least or least < 0:
                refill = -(-debt // count)
                if left != least or refill > latest:
                    least, latest, limit = left, refill, burst
            if over > 0 and charge.enforced:
                wait = -(-over // count)
                if wait > longest:
                    longest, refusing = wait, charge
        if refusing is None:
            return None
        wait_s, reset = longest / SECOND, latest / SECOND
        return decision_of(False, limit, least, wait_s, reset, 0, refusing.rule, False, 0.0, reading, False, settlement)

    def refusing(self, refusal: Decision) -> tuple[str | None, ...]:
        """The `Decision.refusing` of a refusal that was decided here; of a single rule it is known, and no object is made."""
        return refusal.refusing if self._only_rule is None else self._only_rule

    def refusing_key(self, refusal: Decision, reading: AnyReading) -> str:
        """The `Decision.refusing_key` of a refusal that was decided here by this reading."""
        if self._only_rule is None or not isinstance(reading, PlainSpend):
            return refusal.refusing_key
        return reading.keys[0]


Tightest = tuple[int, int, int, Charge]
"""Of the tightest window the burst, the whole requests that still fit, the µs until it is full again, and the charge."""
_Window = tuple[int, int, int, int, int, int, Charge]
"""Of a window the ticks up to which it may owe and have more requests left than some other window holds, those up to which the
charge fits, those of one request, those that a microsecond pays back, those that are charged, the burst, and the charge."""


def _tightest_of_all(windows: Sequence[_Window], debts: Sequence[int]) -> Tightest | None:
    """`PlanTemplate.tightest` among all windows; None where a charge does not fit: of a rule that may not refuse."""
    tightest, least, refill = None, 0, 0
    for debt, window in zip(debts, windows):
        slack, room, ticks, count, increment, _, _ = window
        if debt <= slack:
            continue
        if debt > room:
            return None
        left = (room - debt) // ticks
        if tightest is None or left <= least:
            refill_us = -(-(debt + increment) // count)
            if tightest is None or left < least or refill_us > refill:
                tightest, least, refill = window, left, refill_us
    return None if tightest is None else (tightest[5], least, refill, tightest[6])


def _tightest_of_admitted(windows: Sequence[_Window], debts: Sequence[int]) -> Tightest:
    """`PlanTemplate.tightest`, of any debts that leave room."""
    tightest = _tightest_of_all(windows, debts)
    if tightest is None:
        raise ValueError(f"of the debts {debts!r} some leave no room, expected a plan that was admitted")
    return tightest


_TightestOf = Callable[[Sequence[int]], Tightest]
_STRAIGHT = """
def tightest(debts, {slacks} room, ticks, count, increment, burst, charge, windows):
    {debts} = debts
    if {within}:
        return burst, (room - debt{place}) // ticks, -(-(debt{place} + increment) // count), charge
    return of_any(windows, debts)
"""


def _straight_tightest(windows: Sequence[_Window]) -> _TightestOf:
    """Make `PlanTemplate.tightest`: written out for what almost every request asks, without a loop.

    What it knows of the windows are defaults of its parameters. A closure would have an object for each of them, which makes
    full garbage collections longer where there are many templates.
    """
    place = min(range(len(windows)), key=lambda each: windows[each][5])  # the window of the least burst
    slacks = [window[1] if each == place else window[0] for each, window in enumerate(windows)]
    return FunctionType(*_straight(len(windows), place), (*slacks, *windows[place][1:], windows))


@cache
def _straight(windows: int, place: int) -> tuple[CodeType, dict[str, Any], str]:
    """Code, globals and name of `PlanTemplate.tightest` where that window of so many has the least burst."""
    each = partial(each_window, windows)
    source = _STRAIGHT.format(
        slacks=each("slack{n},"), debts=each("debt{n},"), within=each("debt{n} <= slack{n}", " and "), place=place
    )
    function = compiled(source, "tightest", of_any=_tightest_of_admitted)
    return function.__code__, function.__globals__, "tightest"


if TYPE_CHECKING:
    _Buckets = Sequence[BucketReading]
else:
    _Buckets = object  # with an abstract base each ``isinstance`` that does not hold exactly takes ten times as long


class PlainSpend(_Buckets):
    """Plain plan of one request, a template and its keys; and once it is carried out its reading, and the buckets of that.

    Of almost every request nothing else goes to a store and comes back. A `Plan` or a `Reading` to whoever asks.
    """

    # without an `__init__`, which takes as long as all the rest
    __slots__ = ("_made", "admitted", "debts", "keys", "now", "template", "waited")
    verb: Verb = "spend"
    ban_us = 0
    gives_back = has_adjustments = False
    source: Source = "store"
    """Where the reading comes from."""
    template: PlanTemplate
    keys: Sequence[str]
    """Key of each charge."""
    now: int
    """The store's clock, Unix µs."""
    debts: Sequence[int]
    """Ticks that each window owed before the plan was carried out."""
    admitted: bool
    """True if the request passes, as of a `Reading`."""
    waited: float
    """Seconds of silence before, as of a `Reading`."""
    _made: Sequence[BucketReading]

    @property
    def charges(self) -> tuple[Charge, ...]:
        """The charges."""
        return self.whole_plan.charges

    @property
    def whole_plan(self) -> Plan:
        """The plan with an object for each charge."""
        return self.template.plan(self.keys)

    @property
    def buckets(self) -> Sequence[BucketReading]:
        """One for each charge, as of a `Reading`."""
        return self

    @property
    def whole(self) -> Reading:
        """The reading as one of any kind of plan."""
        return Reading(self.now, self, self.admitted, self.waited)

    def decision(self, settlement: Settlement) -> Decision:
        """The decision that it admits, where no rule is a shadow."""
        decision = self.template.decide(self, settlement)
        if decision is None:
            raise ValueError(f"{self!r} has a shadow, expected rules that may all refuse")
        return decision

    def having_waited(self, waited: float) -> PlainSpend:
        """The same after so many seconds of silence."""
        self.waited = waited
        return self

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, place: Any) -> Any:
        return self.made[place]

    def __iter__(self) -> Iterator[BucketReading]:
        return iter(self.made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    @property
    def made(self) -> Sequence[BucketReading]:
        """The objects, made once."""
        try:
            return self._made
        except AttributeError:
            each, template = iter(self.debts), self.template
            states: list[Sequence[int]] = [list(islice(each, len(bucket.limits))) for bucket, *_ in template.buckets]
            if template.bans:
                states += [ban.initial(0, charge.bucket) for charge in template.charges[len(states) :]]
            self._made = read(template.plan(self.keys).charges, 0, states).buckets
            return self._made

    __hash__ = None  # type: ignore[assignment]


Sequence.register(PlainSpend)


class CachedPlainSpend(PlainSpend):
    """Reading that follows from an earlier one: a refusal that holds."""

    __slots__ = ()
    source = "cache"

    @property
    def whole(self) -> Reading:
        """The reading as one of any kind of plan."""
        return CachedReading(self.now, self, self.admitted, self.waited)


AnyReading = Reading | PlainSpend


def whole_reading(reading: AnyReading) -> Reading:
    """A reading as one of any kind of plan."""
    return reading.whole if isinstance(reading, PlainSpend) else reading


AnyPlan = Plan | PlainSpend


def common_shape(plans: Sequence[AnyPlan]) -> PlainShape | None:
    """The shape of plans that are plain and all of one, None if they are not. There is at least one."""
    first = plans[0]
    if not isinstance(first, PlainSpend):
        return None
    common = first.template.shape
    if len(plans) > 1:
        for plan in plans:
            if not isinstance(plan, PlainSpend) or plan.template.shape is not common:
                return None
    return common


def whole(plan: AnyPlan) -> Plan:
    """A plan with an object for each charge."""
    return plan.whole_plan if isinstance(plan, PlainSpend) else plan


def _rows(charge: Charge) -> tuple[Row, ...]:
    return tuple([(limit.count, charge.cost * limit.period_us, limit.capacity) for limit in charge.bucket.limits])
