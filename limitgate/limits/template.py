"""Plain plans: charges that either fit now or don't, compiled once for requests that differ only in keys.

Other plans, such as those with a wait or a ban, are general. GCRA decisions are computed here without an object per charge. The
results equal those of `limitgate.limits.plan.read` and `limitgate.limits.decision.decide`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from limitgate.algorithms import ban, gcra
from limitgate.algorithms.base import Algorithm, Amount, LeftAfter, State, Straight, compiled, each_window
from limitgate.limits.bucket import Bucket
from limitgate.limits.decision import SECOND, Decision, FinalCosts, SettlementOwner, decide, decision_of
from limitgate.limits.limit import Limit
from limitgate.limits.plan import Adjustment, BucketReading, Charge, Plan, Reading, Source, Verb, is_joined, new_slot, read

MAX_WINDOWS = 12
"""A window takes a dozen variables; Lua allows 200."""
_MAX_DEBT = 2**63 - 1
"""Ticks, in 64 bits."""

Row = tuple[int, ...]
"""Numbers for the source in `Straight`. GCRA: ticks drained per µs, charged ticks, capacity."""


def is_plain(charge: Charge) -> bool:
    """True if a charge has no lease, borrowing, adjustment or date."""
    bucket = charge.bucket
    return (
        bucket.algorithm.left_after is not None
        and not (bucket.lease or bucket.borrow or bucket.is_dated or charge.adjustment)
        and 0 < charge.cost <= min([limit.most for limit in bucket.limits])
        and max(bucket.capacities) <= _MAX_DEBT
    )


class ScriptVariant:
    """Parameters of the script. Plans with the same variant may share a call."""

    __slots__ = ("buckets", "gives_back", "may_wait")

    def __init__(self, buckets: tuple[BucketShape, ...], *, may_wait: bool, gives_back: bool) -> None:
        self.buckets: tuple[BucketShape, ...] = buckets
        self.may_wait: bool = may_wait
        """True if the script leaves plans undone that don't fit."""
        self.gives_back: bool = gives_back
        """True if there are refunds, which must not be sent twice."""


class BucketShape(NamedTuple):
    algorithm: Algorithm
    windows: int
    enforced: bool


@cache
def _shape(*buckets: BucketShape, may_wait: bool = False, gives_back: bool = False) -> ScriptVariant:
    return ScriptVariant(buckets, may_wait=may_wait, gives_back=gives_back)


OF_ANY = ScriptVariant((), may_wait=True, gives_back=True)


def straight_of(algorithm: Algorithm) -> Straight:
    """Return an algorithm's `Straight` lines. Raises `TypeError` if it has none."""
    if algorithm.STRAIGHT is None:
        raise TypeError(f"{algorithm!r} has no STRAIGHT, expected an algorithm that defines it")
    return algorithm.STRAIGHT


class PlanTemplate:
    """Plain charges without keys, perhaps with checks of bans. Raises `ValueError` for other charges."""

    __slots__ = (
        "_only_rule",
        "_states",
        "_windows",
        "bans",
        "buckets",
        "charges",
        "counts",
        "encodings",
        "facts",
        "has_slots",
        "is_enforced",
        "is_of_debts",
        "is_of_shadows",
        "load",
        "may_wait",
        "only",
        "shape",
        "tightest",
    )

    def __init__(self, charges: Sequence[Charge]) -> None:
        self.bans: int = len([charge for charge in charges if charge.bucket.algorithm is ban])
        """Number of bans to check. The keys of bans come last."""
        counted = charges[: len(charges) - self.bans]
        self.counts: tuple[int, ...] = tuple([count for charge in counted for count in charge.bucket.counts])
        is_split = any(map(is_joined, counted, counted[1:]))
        if is_split or not (all(map(is_plain, counted)) and 0 < len(self.counts) <= MAX_WINDOWS):
            raise ValueError(
                f"{charges!r} are not plain, expected charges without lease, borrowing, adjustment or date, and one for each "
                "shadow rule"
            )
        self.charges: tuple[Charge, ...] = tuple(charges)
        self.encodings: dict[object, Any] = {}
        """Cached encodings of stores, by function. They live as long as the template."""
        self.buckets: tuple[tuple[Bucket, int, bool, tuple[Row, ...]], ...] = tuple(
            [(charge.bucket, charge.cost, charge.enforced, _rows(charge)) for charge in counted]
        )
        """Bucket, cost, enforced and rows, without bans."""
        self.has_slots: bool = True in [charge.bucket.has_slots for charge in counted]
        self.only: tuple[Bucket, int, bool, tuple[Row, ...]] | None = (
            self.buckets[0] if len(counted) == 1 and not self.has_slots else None
        )
        self.may_wait: bool = max([charge.max_wait_us for charge in counted]) > 0
        enforced = [charge.enforced for charge in counted]
        self.is_enforced: bool = False not in enforced
        """True without shadow rules."""
        self.is_of_shadows: bool = True not in enforced
        self._only_rule = (counted[0].rule,) if len(counted) == 1 else None
        self.load = sum([charge.bucket.load.opening + charge.bucket.load.charge for charge in charges])
        """Time in Redis in µs."""
        self.facts: int = sum([charge.bucket.facts for charge in charges])
        straight = {charge.bucket.algorithm.STRAIGHT for charge in counted}
        self.is_of_debts: bool = straight == {gcra.STRAIGHT}
        self._windows: tuple[_Window, ...] | None = None
        self.tightest: _TightestOf
        """Returns the tightest window for the previous states. Raises `ValueError` if a charge doesn't fit."""
        self._states = () if self.is_of_debts else _states_of(counted)
        self.shape: ScriptVariant = OF_ANY
        """Plans of equal templates may share a call."""
        if None not in straight and (not self.has_slots or all(map(_is_straight, counted))):
            self.shape = _shape(*map(_bucket_shape, charges), may_wait=self.may_wait)
        if self.is_of_debts:
            shown = [charge for charge in counted if charge.enforced] or counted
            least_burst = min([limit.burst for charge in shown for limit in charge.bucket.limits])
            self._windows = tuple(
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
                    for charge, (_, _, _, rows) in zip(counted, self.buckets)
                    for limit, (count, increment, capacity) in zip(charge.bucket.limits, rows)
                ]
            )
            self.tightest = _straight_tightest(self._windows)
        else:
            self.tightest = partial(_tightest_of_states, self._states)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def plan(self, keys: Sequence[str], slot: int = 0) -> Plan:
        each = zip(self.charges, keys)
        return Plan.spend([Charge(key, *charge[1:7], slot if charge.bucket.has_slots else 0) for charge, key in each])

    def asked(self, keys: Sequence[str]) -> PlainSpend:
        plan = PlainSpend()
        plan.template = self
        plan.keys = keys
        plan.waited = 0.0
        plan.source = "store"
        return plan

    def reading(self, keys: Sequence[str], now: int, states: Sequence[State], admitted: bool) -> PlainSpend:  # noqa: FBT001
        reading = self.asked(keys)
        reading.now, reading.states, reading.admitted = now, states, admitted
        return reading

    def decide(self, reading: AnyReading, settlement: FinalCosts | None) -> Decision | None:
        """Return None for other templates, or if a shadow rule refused."""
        if not isinstance(reading, PlainSpend):
            return None
        if not reading.admitted:
            return self.refused(reading, settlement)
        if self.is_enforced:
            tightest = self.tightest(reading.states)
        elif self._windows is not None:
            found = _tightest_of_all(self._windows, reading.states)
            if found is None:
                return None
            tightest = found
        elif self.has_room(reading.states):
            tightest = self.tightest(reading.states)
        else:
            return None
        burst, left, refill, charge = tightest
        return decision_of(
            True, burst, left, 0.0, refill / SECOND, charge.cost, charge.rule, False, 0.0, reading, True, settlement
        )

    def windows(self, states: Sequence[State]) -> Sequence[tuple[int, int]] | Sequence[tuple[int, int | None]]:
        """Return for each window the remaining requests and the µs until full. None without a period."""
        if self._windows is None:
            left = [
                (*left_after(state, charge.cost, limit), limit)
                for state, (left_after, limit, charge) in zip(states, self._states)
            ]
            return [(requests, refill_us if limit.period else None) for requests, refill_us, limit in left]
        return [
            ((room - debt) // ticks, -(-(debt + increment) // count))
            for debt, (_, room, ticks, count, increment, _, _) in zip(states, self._windows)
        ]

    def charged(self, states: Sequence[State]) -> list[BucketReading]:
        each, read_buckets = iter(states), []
        for charge, (bucket, cost, _, _) in zip(self.charges, self.buckets):
            before = list(islice(each, len(bucket.limits)))
            read_buckets.append(BucketReading(charge, before, bucket.algorithm.try_charge(before, bucket, cost)))
        return read_buckets

    def has_room(self, states: Sequence[State]) -> bool:
        if self._windows is None:
            return self.fits(states)[1]
        # A generator for `all` would take twice as long.
        for debt, window in zip(states, self._windows):  # noqa: SIM110
            if debt > window[1]:
                return False
        return True

    def fits(self, states: Sequence[State]) -> tuple[bool, bool]:
        """Return two booleans: no charge refuses; all charges fit."""
        if self._windows is None:
            each = zip(states, self._states)
            full = [charge for state, (left_after, limit, charge) in each if left_after(state, charge.cost, limit)[0] < 0]
        else:
            full = [charge for debt, (_, room, *_, charge) in zip(states, self._windows) if debt > room]
        return not any(charge.enforced for charge in full), not full

    def refused(self, reading: PlainSpend, settlement: FinalCosts | None) -> Decision | None:
        """Return the refusal. It shows the tightest window before the charges, and the longest wait."""
        windows = self._windows
        if windows is None:
            return decide(reading.whole_plan, reading.whole, settlement)
        least, latest, limit, of_enforced = -1, -1, 0, False
        longest, refusing = 0, None
        for debt, (_, room, ticks, count, increment, burst, charge) in zip(reading.states, windows):
            over = debt - room
            left = max(0, increment - over) // ticks
            if charge.enforced is not of_enforced:
                if of_enforced:
                    continue
                # Ignore earlier shadow rules.
                of_enforced, least, latest = True, -1, -1
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

    def refusing(self, refusal: Decision, reading: PlainSpend) -> tuple[tuple[str | None, ...], str]:
        if self._only_rule is None:
            return refusal.refusing, refusal.refusing_key
        return self._only_rule, reading.keys[0].removesuffix(self.buckets[0][0].suffix)


Tightest = tuple[int, int, int, Charge]
"""`(burst, remaining, refill_us, charge)`."""
_Window = tuple[int, int, int, int, int, int, Charge]
"""`(slack, room, ticks, count, increment, burst, charge)`; with a debt above ``slack``, the window is the tightest."""


def _tightest_of_all(windows: Sequence[_Window], debts: Sequence[int]) -> Tightest | None:
    """Return None if a shadow rule's charge doesn't fit. Shadow rules count only alone."""
    tightest, least, refill, of_enforced = None, 0, 0, False
    for debt, window in zip(debts, windows):
        slack, room, ticks, count, increment, _, charge = window
        if debt <= slack:
            continue
        if debt > room:
            return None
        if charge.enforced is not of_enforced:
            if of_enforced:
                continue
            of_enforced, tightest = True, None
        left = (room - debt) // ticks
        if tightest is None or left <= least:
            refill_us = -(-(debt + increment) // count)
            if tightest is None or left < least or refill_us > refill:
                tightest, least, refill = window, left, refill_us
    return None if tightest is None else (tightest[5], least, refill, tightest[6])


def _tightest_of_admitted(windows: Sequence[_Window], debts: Sequence[int]) -> Tightest:
    tightest = _tightest_of_all(windows, debts)
    if tightest is None:
        raise ValueError(f"of the debts {debts!r} some leave no room, expected a plan that was admitted")
    return tightest


_State = tuple[LeftAfter, Limit, Charge]
"""`(left_after, limit, charge)`."""


def _states_of(charges: Sequence[Charge]) -> tuple[_State, ...]:
    found = []
    for charge in charges:
        left_after = charge.bucket.algorithm.left_after
        if left_after is not None:
            found += [(left_after, limit, charge) for limit in charge.bucket.limits]
    return tuple(found)


def _tightest_of_states(windows: Sequence[_State], states: Sequence[State]) -> Tightest:
    tightest, least, latest, of_enforced = windows[0], -1, -1, False
    for state, window in zip(states, windows):
        left_after, limit, charge = window
        left, refill_us = left_after(state, charge.cost, limit)
        if left < 0:
            raise ValueError(f"of the states {states!r} some leave no room, expected a plan that was admitted")
        if charge.enforced is not of_enforced:
            if of_enforced:
                continue
            of_enforced, least, latest = True, -1, -1
        if left < least or least < 0 or (left == least and refill_us > latest):
            tightest, least, latest = window, left, refill_us
    _, limit, charge = tightest
    return limit.burst, least, latest, charge


_TightestOf = Callable[[Sequence[State]], Tightest]
_STRAIGHT = """
def tightest(debts, {slacks} room, ticks, count, increment, burst, charge, windows):
    {debts} = debts
    if {within}:
        return burst, (room - debt{place}) // ticks, -(-(debt{place} + increment) // count), charge
    return of_any(windows, debts)
"""


def _straight_tightest(windows: Sequence[_Window]) -> _TightestOf:
    """Make a function. Constants are defaults of parameters, because a closure would create objects."""
    bursts = [window[5] for window in windows]
    place = bursts.index(min(bursts))
    slacks = [window[1] if each == place else window[0] for each, window in enumerate(windows)]
    alike = [each for each, window in enumerate(windows) if each != place and window[1:6] == windows[place][1:6]]
    return FunctionType(*_straight(len(windows), place, *alike), (*slacks, *windows[place][1:], windows))


@cache
def _straight(windows: int, place: int, *alike: int) -> tuple[CodeType, dict[str, Any], str]:
    each = partial(each_window, windows)
    within = each("debt{n} <= slack{n}", " and ")
    for other in alike:
        within = within.replace(f"debt{other} <= slack{other}", f"debt{other} <= debt{place}")
    source = _STRAIGHT.format(slacks=each("slack{n},"), debts=each("debt{n},"), within=within, place=place)
    function = compiled(source, "tightest", of_any=_tightest_of_admitted)
    return function.__code__, function.__globals__, "tightest"


if TYPE_CHECKING:
    _Buckets = Sequence[BucketReading]
else:
    # An abstract base class would make negative `isinstance` checks ten times as slow.
    _Buckets = object


class PlainSpend(_Buckets):
    """A plain plan, and later its reading. Used like a `Plan` and a `Reading`."""

    # No `__init__`, which would double the cost.
    __slots__ = ("_made", "_plan", "_slot", "admitted", "keys", "now", "owner", "source", "states", "template", "waited")
    verb: Verb = "spend"
    ban_us = 0
    gives_back = has_adjustments = False
    source: Source
    template: PlanTemplate
    keys: Sequence[str]
    now: int
    """Store clock, Unix µs."""
    states: Sequence[State]
    """States before the plan. For GCRA, debt in ticks."""
    admitted: bool
    owner: SettlementOwner | FinalCosts
    """The request, or its final settlement."""
    waited: float
    _made: Sequence[BucketReading]
    _plan: Plan
    _slot: int

    @property
    def charges(self) -> tuple[Charge, ...]:
        return self.whole_plan.charges

    @property
    def whole_plan(self) -> Plan:
        try:
            return self._plan
        except AttributeError:
            self._plan = self.template.plan(self.keys, self.slot)
            return self._plan

    @property
    def slot(self) -> int:
        if not self.template.has_slots:
            return 0
        try:
            return self._slot
        except AttributeError:
            self._slot = new_slot()
            return self._slot

    @property
    def buckets(self) -> Sequence[BucketReading]:
        return self

    @property
    def whole(self) -> Reading:
        return Reading(self.now, self, self.admitted, self.waited, self.source)

    def decision(self, settlement: FinalCosts) -> Decision:
        decision = self.template.decide(self, settlement)
        if decision is None:
            raise ValueError(f"{self!r} has a shadow rule, expected rules that can refuse")
        return decision

    def having_waited(self, waited: float) -> PlainSpend:
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
        try:
            return self._made
        except AttributeError:
            each, template = iter(self.states), self.template
            states: list[Sequence[State]] = [list(islice(each, len(bucket.limits))) for bucket, *_ in template.buckets]
            if template.bans:
                states += [ban.initial(0, charge.bucket) for charge in template.charges[len(states) :]]
            self._made = read(self.whole_plan.charges, 0, states).buckets
            return self._made

    __hash__: ClassVar[None] = None  # type: ignore[assignment]


Sequence.register(PlainSpend)


class RefundTemplate:
    __slots__ = ("charges", "costs", "counts", "encodings", "facts", "is_of_all", "load", "parts", "shape", "states")

    def __init__(self, template: PlanTemplate, costs: Sequence[int]) -> None:
        self.encodings: dict[object, Any] = {}
        self.costs: Sequence[int] = costs
        self.charges: list[int] = []
        self.states: list[int] = []
        parts, place = [], 0
        for number, (cost, charge, (*_, rows)) in enumerate(zip(costs, template.charges, template.buckets)):
            windows = len(charge.bucket.limits)
            if cost != charge.cost:
                parts.append((charge, slice(len(self.states), len(self.states) + windows), rows))
                self.charges.append(number)
                self.states += range(place, place + windows)
            place += windows
        self.parts: tuple[tuple[Charge, slice, tuple[Row, ...]], ...] = tuple(parts)
        """Refunded charges, each with its slice and rows."""
        self.is_of_all: bool = len(parts) == len(template.charges)
        buckets = [charge.bucket for charge, *_ in parts]
        self.counts: tuple[int, ...] = tuple([count for bucket in buckets for count in bucket.counts])
        self.load: float = sum([bucket.load.opening + bucket.load.charge + bucket.load.correction for bucket in buckets])
        self.facts: int = sum([bucket.facts for bucket in buckets])
        self.shape: ScriptVariant = OF_ANY
        if parts and all(_is_straight(charge) and straight_of(charge.bucket.algorithm).refund for charge, *_ in parts):
            self.shape = _shape(*[_bucket_shape(charge._replace(enforced=False)) for charge, *_ in parts], gives_back=True)

    def of(self, spent: PlainSpend) -> PlainRefund:
        refund = PlainRefund()
        refund.template = self
        refund.spent = spent
        refund.waited = 0.0
        refund.keys, refund.states = spent.keys, spent.states
        if not self.is_of_all:
            refund.keys = [refund.keys[place] for place in self.charges]
            refund.states = [refund.states[place] for place in self.states]
        return refund


class PlainRefund:
    """Refund of a `PlainSpend`. The reading has only the time."""

    __slots__ = ("_plan", "keys", "now", "spent", "states", "template", "waited")
    verb: Verb = "adjust"
    ban_us = 0
    gives_back = has_adjustments = admitted = True
    source: Source = "store"
    buckets: tuple[()] = ()
    template: RefundTemplate
    spent: PlainSpend
    keys: Sequence[str]
    states: Sequence[State]
    now: int
    waited: float
    _plan: Plan

    @property
    def charges(self) -> tuple[Charge, ...]:
        return self.whole_plan.charges

    @property
    def whole_plan(self) -> Plan:
        try:
            return self._plan
        except AttributeError:
            each = zip(self.keys, self.template.parts, self.amounts())
            self._plan = Plan.adjust(
                [
                    Charge(key, charge.bucket, 0, False, charge.rule, Adjustment(0, self.spent.now, *amounts))
                    for key, (charge, *_), amounts in each
                ]
            )
            return self._plan

    def amounts(self) -> list[tuple[Sequence[Amount], Sequence[int]]]:
        """Return the ``back`` and ``grace`` of each charge, see `Adjustment`."""
        states, slot = self.states, self.spent.slot
        return [
            charge.bucket.algorithm.refund_amount(states[places], charge.bucket, charge.cost, 0, slot)
            for charge, places, _ in self.template.parts
        ]

    @property
    def whole(self) -> Reading:
        return Reading(self.now, (), self.admitted, self.waited, self.source)

    def having_waited(self, waited: float) -> PlainRefund:
        self.waited = waited
        return self


AnyReading = Reading | PlainSpend
AnyPlan = Plan | PlainSpend | PlainRefund
AnyAnswer = AnyReading | PlainRefund


def whole_reading(reading: AnyAnswer) -> Reading:
    return reading if isinstance(reading, Reading) else reading.whole


def common_shape(plans: Sequence[AnyPlan]) -> ScriptVariant | None:
    """Return None if plans differ or aren't plain."""
    first = plans[0]
    if isinstance(first, Plan):
        return None
    common = first.template.shape
    if len(plans) > 1:
        for plan in plans:
            if isinstance(plan, Plan) or plan.template.shape is not common:
                return None
    return common


def whole(plan: AnyPlan) -> Plan:
    return plan if isinstance(plan, Plan) else plan.whole_plan


def _is_straight(charge: Charge) -> bool:
    straight = charge.bucket.algorithm.STRAIGHT
    return straight is not None and max([limit.burst for limit in charge.bucket.limits]) <= straight.most


def _bucket_shape(charge: Charge) -> BucketShape:
    bucket = charge.bucket
    return BucketShape(bucket.algorithm, len(bucket.limits) if bucket.algorithm.IS_LIMIT else 0, charge.enforced)


def _rows(charge: Charge) -> tuple[Row, ...]:
    straight = charge.bucket.algorithm.STRAIGHT
    return () if straight is None else tuple([straight.row_of(limit, charge.cost) for limit in charge.bucket.limits])
