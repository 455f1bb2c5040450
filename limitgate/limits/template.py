"""Plain plans: charges that fit now or do not, prepared once for all plans that differ in keys alone.

Almost every request makes one. A store may find that there is more to it: a request has to wait, somebody is banned, a bucket
is kept in another way than the plan asks for it. Then it carries the plan out as one of any kind.

What follows from debts of GCRA, which most plans read, is worked out here without an object for each charge. It is the same as
what `limitgate.limits.plan.read` and `limitgate.limits.decision.decide` say, which know every kind of plan and of state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from limitgate.algorithms import ban, gcra
from limitgate.algorithms.base import Algorithm, Amount, LeftAfter, State, Straight
from limitgate.limits.decision import SECOND, Decision, FinalCosts, decide, decision_of
from limitgate.limits.limit import Limit
from limitgate.limits.plan import Adjustment, BucketReading, Charge, Plan, Reading, Source, Verb, new_slot, read
from limitgate.limits.written_out import compiled, each_window

MAX_WINDOWS = 12
"""Windows of a plain plan at most: the script has a dozen variables for each, of 200 that Lua allows."""
_MAX_DEBT = 2**63 - 1
"""Ticks that a window of a plain plan may owe at most, so that 64 bits hold them."""

Row = tuple[int, ...]
"""The numbers of a window and a cost that the `Straight` lines of its algorithm need. Of GCRA the ticks that a microsecond pays
back, that the charge takes, and that fit."""


def is_plain(charge: Charge) -> bool:
    """True if a charge mostly fits now or does not: nothing is leased, borrowed or adjusted, and no date matters."""
    bucket = charge.bucket
    return (
        bucket.algorithm.left_after is not None
        and not (bucket.lease or bucket.borrow or bucket.is_dated or charge.adjustment)
        and 0 < charge.cost <= min([limit.most for limit in bucket.limits])
        and max(bucket.capacities) <= _MAX_DEBT
    )


class ScriptVariant:
    """What a script depends on that carries out plain plans, by which they may share a call. Each is one object."""

    __slots__ = ("buckets", "gives_back", "may_wait")

    def __init__(self, buckets: tuple[BucketShape, ...], *, may_wait: bool, gives_back: bool) -> None:
        self.buckets = buckets
        self.may_wait = may_wait
        """True if a plan is declined that does not fit now, as the request may wait."""
        self.gives_back = gives_back
        """True if there may be refunds among the plans, which must not be sent twice."""


class BucketShape(NamedTuple):
    """What a script depends on of a bucket."""

    algorithm: Algorithm
    windows: int
    """Number of windows; 0 for a ban, which must not be there."""
    enforced: bool
    """True if it may refuse."""


@cache
def _shape(*buckets: BucketShape, may_wait: bool = False, gives_back: bool = False) -> ScriptVariant:
    return ScriptVariant(buckets, may_wait=may_wait, gives_back=gives_back)


OF_ANY = ScriptVariant((), may_wait=True, gives_back=True)
"""Shape of the plans that the script for plans of any kind carries out: those with an algorithm that is not `Straight`."""


def straight_of(algorithm: Algorithm) -> Straight:
    """The straight lines of an algorithm that has some."""
    if algorithm.STRAIGHT is None:
        raise TypeError(f"{algorithm!r} has no straight lines, expected an algorithm that has some")
    return algorithm.STRAIGHT


class PlanTemplate:
    """Plain charges less their keys, and the numbers of their windows. Raises `ValueError` for charges that are not plain.

    Behind them a plan may look for bans.
    """

    __slots__ = (
        "_only_rule",
        "_states",
        "_windows",
        "bans",
        "buckets",
        "charges",
        "counts",
        "facts",
        "has_slots",
        "is_enforced",
        "is_of_debts",
        "load",
        "may_wait",
        "only",
        "shape",
        "tightest",
    )

    def __init__(self, charges: Sequence[Charge]) -> None:
        self.bans = len([charge for charge in charges if charge.bucket.algorithm is ban])
        """Number of bans that are looked for, by the last keys."""
        counted = charges[: len(charges) - self.bans]
        windows = sum([len(charge.bucket.limits) for charge in counted])
        if not (all(map(is_plain, counted)) and 0 < windows <= MAX_WINDOWS):
            raise ValueError(f"{charges!r} are not plain, expected no lease, borrowing, adjustment and dates")
        self.charges = tuple(charges)
        self.buckets = tuple([(charge.bucket, charge.cost, charge.enforced, _rows(charge)) for charge in counted])
        """Per charge but those of bans its bucket, its cost, true if it may refuse, and its rows."""
        self.has_slots = any(charge.bucket.has_slots for charge in counted)
        """True if slots are taken for requests in flight."""
        self.only = self.buckets[0] if len(counted) == 1 and not self.has_slots else None
        """The first of ``buckets`` if there are no others, and no slots."""
        self.may_wait = max([charge.max_wait_us for charge in counted]) > 0
        """True if a plan that does not fit now may have to wait: it is not plain then."""
        self.is_enforced = False not in [charge.enforced for charge in counted]
        """True if no rule is a shadow, so that a plan is admitted where every charge fits."""
        self._only_rule = (counted[0].rule,) if len(counted) == 1 else None
        """The rule of the only charge, where there is one: nobody else can have refused."""
        self.load = sum([charge.bucket.load.opening + charge.bucket.load.charge for charge in charges])
        """Microseconds that a plan takes of Redis at most, by the script for all plans."""
        self.facts = sum([charge.bucket.facts for charge in charges])
        """Numbers that the script for all plans reports."""
        self.counts = tuple([count for charge in counted for count in charge.bucket.counts])
        """Per window the count of its limit."""
        straight = {charge.bucket.algorithm.STRAIGHT for charge in counted}
        self.is_of_debts = straight == {gcra.STRAIGHT}
        """True if all windows are of GCRA."""
        self._windows: tuple[_Window, ...] | None = None
        """The windows, where all are of GCRA."""
        self.tightest: _TightestOf
        """Function that gives the tightest window once the charges are made, by the states before.

        It raises `ValueError` if a charge does not fit.
        """
        self._states = () if self.is_of_debts else _states_of(counted)
        """The windows, where any is of another algorithm."""
        self.shape = OF_ANY
        """Same object for all templates whose plans may share a call."""
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
        """Return the template itself, as nobody changes it."""
        return self

    def plan(self, keys: Sequence[str], slot: int = 0) -> Plan:
        """Plan with these keys, one for each charge, and with a name for slots; 0 for none."""
        each = zip(self.charges, keys)
        return Plan.spend([Charge(key, *charge[1:7], slot if charge.bucket.has_slots else 0) for charge, key in each])

    def asked(self, keys: Sequence[str]) -> PlainSpend:
        """Plain plan with these keys, that has yet to be carried out."""
        plan = PlainSpend()
        plan.template = self
        plan.keys = keys
        plan.waited = 0.0
        plan.source = "store"
        return plan

    def reading(self, keys: Sequence[str], now: int, states: Sequence[State], admitted: bool) -> PlainSpend:  # noqa: FBT001
        """Reading of the plan with these keys, by the state of each window at ``now``, Unix µs."""
        reading = PlainSpend()
        reading.template = self
        reading.keys = keys
        reading.now = now
        reading.states = states
        reading.admitted = admitted
        reading.waited = 0.0
        reading.source = "store"
        return reading

    def decide(self, reading: AnyReading, settlement: FinalCosts | None) -> Decision | None:
        """Decision that follows from a `reading` of this template; None for another kind, or if a shadow would have refused."""
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
        elif self.fits(reading.states)[1]:
            tightest = self.tightest(reading.states)
        else:
            return None
        burst, left, refill, charge = tightest
        return decision_of(
            True, burst, left, 0.0, refill / SECOND, charge.cost, charge.rule, False, 0.0, reading, True, settlement
        )

    def windows(self, states: Sequence[State]) -> Sequence[tuple[int, int]] | Sequence[tuple[int, int | None]]:
        """Per window the whole requests that fit once the charges are made, and the seconds until it is full, rounded up.

        None in their place where there is no period: slots are given back at any time.
        """
        if self._windows is None:
            left = [
                (*left_after(state, charge.cost, limit), limit)
                for state, (left_after, limit, charge) in zip(states, self._states)
            ]
            return [(requests, -(-refill_us // SECOND) if limit.period else None) for requests, refill_us, limit in left]
        return [
            ((room - debt) // ticks, -(-(debt + increment) // (count * SECOND)))
            for debt, (_, room, ticks, count, increment, _, _) in zip(states, self._windows)
        ]

    def charged(self, states: Sequence[State]) -> list[BucketReading]:
        """The buckets but those of bans, charged if that fits now, by the state of each window before."""
        each, read_buckets = iter(states), []
        for charge, (bucket, cost, _, _) in zip(self.charges, self.buckets):
            before = list(islice(each, len(bucket.limits)))
            read_buckets.append(BucketReading(charge, before, bucket.algorithm.try_charge(before, bucket, cost)))
        return read_buckets

    def fits(self, states: Sequence[State]) -> tuple[bool, bool]:
        """Whether no charge refuses by these states, and whether every charge fits now."""
        if self._windows is None:
            each = zip(states, self._states)
            full = [charge for state, (left_after, limit, charge) in each if left_after(state, charge.cost, limit)[0] < 0]
        else:
            full = [charge for debt, (_, room, *_, charge) in zip(states, self._windows) if debt > room]
        return not any(charge.enforced for charge in full), not full

    def refused(self, reading: PlainSpend, settlement: FinalCosts | None) -> Decision | None:
        """`decide` by a reading that was not admitted.

        Of the windows as they stand it names the tightest one, and the longest wait of those that refused.
        """
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
                of_enforced, least, latest = True, -1, -1  # ignore the shadow rules before
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
        """The ``refusing`` and ``refusing_key`` of a refusal that was decided here by this reading.

        Of a single rule they are known, and no object is made.
        """
        if self._only_rule is None:
            return refusal.refusing, refusal.refusing_key
        return self._only_rule, reading.keys[0].removesuffix(self.buckets[0][0].suffix)


Tightest = tuple[int, int, int, Charge]
"""Of the tightest window the burst, the whole requests that still fit, the µs until it is full again, and the charge."""
_Window = tuple[int, int, int, int, int, int, Charge]
"""Of a window the ticks up to which it may owe and have more requests left than some other window holds, those up to which the
charge fits, those of one request, those that a microsecond pays back, those that are charged, the burst, and the charge."""


def _tightest_of_all(windows: Sequence[_Window], debts: Sequence[int]) -> Tightest | None:
    """`PlanTemplate.tightest` among all windows; None where a charge does not fit: of a rule that may not refuse.

    Shadow rules are ignored unless there are no others.
    """
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
    """`PlanTemplate.tightest`, of any debts that leave room."""
    tightest = _tightest_of_all(windows, debts)
    if tightest is None:
        raise ValueError(f"of the debts {debts!r} some leave no room, expected a plan that was admitted")
    return tightest


_State = tuple[LeftAfter, Limit, Charge]
"""Of a window of any algorithm what gives the requests that are left, the limit, and the charge."""


def _states_of(charges: Sequence[Charge]) -> tuple[_State, ...]:
    """The windows of plain charges."""
    found = []
    for charge in charges:
        left_after = charge.bucket.algorithm.left_after
        if left_after is not None:
            found += [(left_after, limit, charge) for limit in charge.bucket.limits]
    return tuple(found)


def _tightest_of_states(windows: Sequence[_State], states: Sequence[State]) -> Tightest:
    """`PlanTemplate.tightest`, of any algorithms."""
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
    """Make `PlanTemplate.tightest`: written out for what almost every request asks, without a loop.

    What it knows of the windows are defaults of its parameters. A closure would have an object for each of them, which makes
    full garbage collections longer where there are many templates.
    """
    place = min(range(len(windows)), key=lambda each: windows[each][5])  # the window of the least burst
    slacks = [window[1] if each == place else window[0] for each, window in enumerate(windows)]
    alike = [each for each, window in enumerate(windows) if each != place and window[1:6] == windows[place][1:6]]
    return FunctionType(*_straight(len(windows), place, *alike), (*slacks, *windows[place][1:], windows))


@cache
def _straight(windows: int, place: int, *alike: int) -> tuple[CodeType, dict[str, Any], str]:
    """Code, globals and name of `PlanTemplate.tightest` where that window of so many has the least burst.

    Others that are ``alike``, of the same limit at the same cost, may owe as much as that one.
    """
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
    _Buckets = object  # with an abstract base each ``isinstance`` that does not hold exactly takes ten times as long


class PlainSpend(_Buckets):
    """Plain plan of one request, a template and its keys; and once it is carried out its reading, and the buckets of that.

    Of almost every request nothing else goes to a store and comes back. A `Plan` or a `Reading` to whoever asks.
    """

    # without an `__init__`, which takes as long as all the rest
    __slots__ = ("_made", "_plan", "_slot", "admitted", "keys", "now", "source", "states", "template", "waited")
    verb: Verb = "spend"
    ban_us = 0
    gives_back = has_adjustments = False
    source: Source
    """Where the reading comes from."""
    template: PlanTemplate
    keys: Sequence[str]
    """Key of each charge."""
    now: int
    """The store's clock, Unix µs."""
    states: Sequence[State]
    """State of each window before the plan was carried out: of GCRA the ticks that it owed."""
    admitted: bool
    """True if the request passes, as of a `Reading`."""
    waited: float
    """Seconds of silence before, as of a `Reading`."""
    _made: Sequence[BucketReading]
    _plan: Plan
    _slot: int

    @property
    def charges(self) -> tuple[Charge, ...]:
        """The charges."""
        return self.whole_plan.charges

    @property
    def whole_plan(self) -> Plan:
        """The plan with an object for each charge, made once."""
        try:
            return self._plan
        except AttributeError:
            self._plan = self.template.plan(self.keys, self.slot)
            return self._plan

    @property
    def slot(self) -> int:
        """Name of the slots that it takes, made once; 0 for none."""
        if not self.template.has_slots:
            return 0
        try:
            return self._slot
        except AttributeError:
            self._slot = new_slot()
            return self._slot

    @property
    def buckets(self) -> Sequence[BucketReading]:
        """One for each charge, as of a `Reading`."""
        return self

    @property
    def whole(self) -> Reading:
        """The reading as one of any kind of plan."""
        return Reading(self.now, self, self.admitted, self.waited, self.source)

    def decision(self, settlement: FinalCosts) -> Decision:
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
            each, template = iter(self.states), self.template
            states: list[Sequence[State]] = [list(islice(each, len(bucket.limits))) for bucket, *_ in template.buckets]
            if template.bans:
                states += [ban.initial(0, charge.bucket) for charge in template.charges[len(states) :]]
            self._made = read(self.whole_plan.charges, 0, states).buckets
            return self._made

    __hash__ = None  # type: ignore[assignment]


Sequence.register(PlainSpend)


class RefundTemplate:
    """The charges of a template that are given back in whole because of what they cost in the end, less their keys."""

    __slots__ = ("charges", "costs", "counts", "facts", "is_of_all", "load", "parts", "shape", "states")

    def __init__(self, template: PlanTemplate, costs: Sequence[int]) -> None:
        self.costs = costs
        """Cost of each charge of the template: its own, or nothing if it is given back."""
        self.charges: list[int] = []
        """The places of the charges that are given back."""
        self.states: list[int] = []
        """The places of their states."""
        parts, place = [], 0
        for number, (cost, charge, (*_, rows)) in enumerate(zip(costs, template.charges, template.buckets)):
            windows = len(charge.bucket.limits)
            if cost != charge.cost:
                parts.append((charge, slice(len(self.states), len(self.states) + windows), rows))
                self.charges.append(number)
                self.states += range(place, place + windows)
            place += windows
        self.parts = tuple(parts)
        """Per charge that is given back the charge, the places of its states among theirs, and its rows."""
        self.is_of_all = len(parts) == len(template.charges)
        """True if all charges are given back."""
        buckets = [charge.bucket for charge, *_ in parts]
        self.counts = tuple([count for bucket in buckets for count in bucket.counts])
        """Per window the count of its limit."""
        self.load = sum([bucket.load.opening + bucket.load.charge + bucket.load.correction for bucket in buckets])
        """Microseconds that it takes of Redis at most, by the script for all plans."""
        self.facts = sum([bucket.facts for bucket in buckets])
        """Numbers that the script for all plans reports."""
        self.shape = OF_ANY
        if parts and all(_is_straight(charge) and straight_of(charge.bucket.algorithm).refund for charge, *_ in parts):
            self.shape = _shape(*[_bucket_shape(charge._replace(enforced=False)) for charge, *_ in parts], gives_back=True)

    def of(self, spent: PlainSpend) -> PlainRefund:
        """The refund of a plan that was carried out."""
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
    """Plan that gives back charges of a `PlainSpend`, and once it is carried out its reading: a time, and nothing else."""

    __slots__ = ("_plan", "keys", "now", "spent", "states", "template", "waited")
    verb: Verb = "adjust"
    ban_us = 0
    gives_back = has_adjustments = admitted = True
    source: Source = "store"
    buckets = ()
    template: RefundTemplate
    spent: PlainSpend
    keys: Sequence[str]
    """Key of each charge that is given back."""
    states: Sequence[State]
    """State of each of their windows before they were made."""
    now: int
    waited: float
    _plan: Plan

    @property
    def charges(self) -> tuple[Charge, ...]:
        """The charges of nothing that make the adjustments."""
        return self.whole_plan.charges

    @property
    def whole_plan(self) -> Plan:
        """The plan with an object for each charge, made once."""
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
        """Per charge what is given back, and its grace, as an `Adjustment` has it."""
        states, slot = self.states, self.spent.slot
        return [
            charge.bucket.algorithm.refund_amount(states[places], charge.bucket, charge.cost, 0, slot)
            for charge, places, _ in self.template.parts
        ]

    @property
    def whole(self) -> Reading:
        """The reading as one of any kind of plan, which says nothing of the buckets."""
        return Reading(self.now, (), self.admitted, self.waited, self.source)

    def having_waited(self, waited: float) -> PlainRefund:
        """The same after so many seconds of silence."""
        self.waited = waited
        return self


AnyReading = Reading | PlainSpend
AnyPlan = Plan | PlainSpend | PlainRefund
AnyAnswer = AnyReading | PlainRefund
"""What a store returns: a `PlainRefund` where it was asked for one."""


def whole_reading(reading: AnyAnswer) -> Reading:
    """A reading as one of any kind of plan."""
    return reading if isinstance(reading, Reading) else reading.whole


def common_shape(plans: Sequence[AnyPlan]) -> ScriptVariant | None:
    """The shape of plans that are plain and all of one, None if they are not. There is at least one."""
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
    """A plan with an object for each charge."""
    return plan if isinstance(plan, Plan) else plan.whole_plan


def _is_straight(charge: Charge) -> bool:
    """True if a script is written out for the charge."""
    straight = charge.bucket.algorithm.STRAIGHT
    return straight is not None and max([limit.burst for limit in charge.bucket.limits]) <= straight.most


def _bucket_shape(charge: Charge) -> BucketShape:
    bucket = charge.bucket
    return BucketShape(bucket.algorithm, len(bucket.limits) if bucket.algorithm.IS_LIMIT else 0, charge.enforced)


def _rows(charge: Charge) -> tuple[Row, ...]:
    straight = charge.bucket.algorithm.STRAIGHT
    return () if straight is None else tuple([straight.row_of(limit, charge.cost) for limit in charge.bucket.limits])
