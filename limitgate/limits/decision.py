"""The decision about a request, computed in one place from a plan and its reading, for every store and every caller."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

from limitgate.algorithms.base import State
from limitgate.errors import LimitGateError
from limitgate.limits.limit import Limit
from limitgate.limits.plan import BucketReading, Charge, Plan, Reading, check_cost, wait_us
from limitgate.messages.text import listed

SECOND = 1_000_000

InForce = tuple[str | None, int, int]
"""An adaptive limit as a request has found it: its rule, the limit in force on requests in flight, and the places left. No rule
has that of the host that a client sends to."""


class InShadow(tuple[str | None, int, int]):
    """An `InForce` of a shadow rule, which is ignored if another limit applies."""

    __slots__ = ()


class Window(NamedTuple):
    """State of one limit, in numbers for users. Immutable."""

    rule: str | None
    """The rule that the limit belongs to, None in a Limiter."""
    limit: int
    """The burst: what a full bucket holds."""
    period: int
    """Seconds."""
    remaining: int
    """Whole requests that still fit."""
    used: int
    """Requests not yet earned back, a begun one counted whole."""
    reset_after: float
    """Seconds until the bucket is full again."""
    retry_after: float
    """Seconds until this request would fit here; 0 if it does, ``inf`` if its cost exceeds the burst."""


class Standing(NamedTuple):
    """State of a bucket after a decision."""

    charge: Charge
    states: Sequence[State]
    fits: bool
    """True if the charge fitted into every window."""

    def windows(self) -> list[Window]:
        """Return the window of each limit; none of a ban that is over."""
        rule, cost, algorithm = self.charge.rule, self.charge.cost, self.charge.bucket.algorithm
        found = []
        for limit, state in zip(self.charge.bucket.limits, self.states):
            if not algorithm.IS_LIMIT and not state:
                continue
            wait = 0 if self.fits else algorithm.wait_us(state, cost, limit)
            found.append(
                Window(
                    rule,
                    limit.burst,
                    limit.period,
                    algorithm.remaining(state, limit),
                    algorithm.used(state, limit),
                    algorithm.refill_us(state, limit) / SECOND,
                    math.inf if wait is None else max(0, wait - self.charge.max_wait_us) / SECOND,
                )
            )
        return found


class PickledEvidence(list[BucketReading]):
    """Evidence of a decision that was pickled: of no bucket, as all that is kept are the windows."""

    def __init__(self, windows: Sequence[Window]) -> None:
        super().__init__()
        self.windows = tuple(windows)


class SettlementOwner(Protocol):
    """A request, of which most need no `FinalCosts`."""

    def open_settlement(self) -> FinalCosts:
        """Its settlement, made when it is first asked for, and the same from then on."""


class FinalCosts:
    """Costs known only afterwards, by rule: noted while the request is under way, put into effect when it is over."""

    costs: Mapping[str | None, int] = MappingProxyType({})
    """Cost by rule; under None, that of the rules not named."""
    others: tuple[FinalCosts, ...] = ()
    """Settlements of the gates around this one, which are told everything, too."""
    has_news = False
    """True if something was noted that is not put into effect yet."""
    is_over = False

    def note(self, rule: str | None, cost: int) -> None:
        """Note the cost that a rule is to charge. Safe under threads."""
        for each in (self, *self.others):
            each.__dict__.setdefault("costs", {})[rule] = cost
            each.has_news = True


@dataclass(frozen=True, slots=True, repr=False)
class Decision:
    """The answer to a request. Immutable."""

    allowed: bool
    """True if the request may pass."""
    limit: int
    """The burst of the window with the least remaining, of equals the one with the longest ``reset_after``. Shadow rules are
    ignored unless there are no others."""
    remaining: int
    """Whole requests that still fit into that window."""
    retry_after: float
    """Seconds to wait, 0 when allowed, ``inf`` when the cost exceeds the burst. The longest of the windows that refused."""
    reset_after: float
    """Seconds until that window is full again."""
    granted: int
    """The cost, or 0 when refused or only asked."""
    rule: str | None
    """The rule that decided: the one that refuses longest, or has the least remaining. None in a Limiter."""
    degraded: bool = False
    """The store failed and ``on_error`` decided."""
    shadow: bool = False
    """Only shadow rules refused, so the request passes."""
    delay: float = 0.0
    """Seconds until the turn that was booked, where requests may wait for it, and those that it has waited for its place under
    adaptive limits before; 0 where there was nothing to wait for. The request has waited as long when the application sees it,
    or less if others before it have left."""
    evidence: Sequence[BucketReading] = field(default=(), compare=False)
    """Source of `Decision.standings` and ``windows``."""
    is_charged: bool = field(default=False, compare=False)
    """True if the charges of the evidence that fit were made."""
    settlement: FinalCosts | None = field(default=None, compare=False)
    """Keeps what `Decision.settle` is told; None where there is nothing to settle: in a Limiter."""
    in_force: tuple[InForce, ...] = field(default=(), compare=False)
    """Adaptive limits that the request has a place under, or that had none."""

    def __bool__(self) -> bool:
        """Every decision is true; a Limiter's refusal warns of it, as ``if limiter.hit(...)`` lets it pass."""
        if not self.allowed and self.rule is None:
            warnings.warn("a refusal is true, as every Decision is; expected decision.allowed", RuntimeWarning, stacklevel=2)
        return True

    @property
    def retry_after_header(self) -> int | None:
        """Value for ``Retry-After``: whole seconds, rounded up, at least 1; None if it passes, or if waiting cannot help."""
        return None if self.allowed or math.isinf(self.retry_after) else max(1, math.ceil(self.retry_after))

    @property
    def is_permanent_ban(self) -> bool:
        """True if it refuses by a ban without an end."""
        return math.isinf(self.retry_after) and any(
            after is None and not charge.bucket.algorithm.IS_LIMIT and math.isinf(_wait(charge, states))
            for charge, states, after in self.evidence
        )

    @property
    def standings(self) -> list[Standing]:
        """Every bucket of the plan, worked out on demand: most answers need only the tightest window."""
        return [Standing(charge, states, after is not None) for charge, states, after in _after_charges(self)]

    @property
    def refusing(self) -> tuple[str | None, ...]:
        """The rules that refused."""
        return tuple(dict.fromkeys([charge.rule for charge, _, after in self.evidence if after is None and charge.enforced]))

    @property
    def refusing_key(self) -> str:
        """Key of the bucket of ``rule`` that refused, less its suffix; empty if none did."""
        refused = [charge for charge, _, after in self.evidence if after is None and charge.enforced]
        charge = next((charge for charge in refused if charge.rule == self.rule), None)
        return "" if charge is None else charge.key.removesuffix(charge.bucket.suffix)

    @property
    def windows(self) -> tuple[Window, ...]:
        """Every limit of the plan, and every adaptive limit, with a period of 0."""
        if isinstance(self.evidence, PickledEvidence):
            return self.evidence.windows
        windows = [window for standing in self.standings for window in standing.windows()]
        refusing = None if self.allowed or self.refusing else self.rule
        for rule, limit, remaining in self.in_force:
            wait = self.retry_after if rule == refusing else 0.0
            windows.append(Window(rule, limit, 0, remaining, limit - remaining, 0.0, wait))
        return tuple(windows)

    def settle(self, cost: int, rule: str | None = None) -> None:
        """Say what a request really cost, once that is known: tokens of a language model, bytes sent.

        When the response is over, the buckets are corrected: what was charged too much is given back as if it had not been
        charged, what was charged too little is owed from then on, whether it fits or not. Without ``rule`` it is the cost of
        the rules that have a ``cost`` other than 1, or of all if none has. Said again, the last word counts. May be called
        from any thread.

        Raises `TypeError` or `ValueError` for what is no cost, `ValueError` for a rule that took no part, and `RuntimeError`
        where no request is under way, as its response is over already or the decision comes from a Limiter.
        """
        settlement = self.settlement
        if settlement is None or settlement.is_over:
            raise RuntimeError("settle was called where no request is under way, expected it before the response is over")
        if rule is not None and not self.degraded and rule not in {bucket.charge.rule for bucket in self.evidence}:
            raise ValueError(f"rule {rule!r:.80} took no part in this decision, expected one of {self._rules()}")
        settlement.note(rule, check_cost(cost))

    def _asdict(self) -> dict[str, Any]:
        """Return the fields for users by name, as `Window` has it: for logs and queues. The windows are dictionaries, too.

        ``retry_after`` is None if waiting cannot help, as JSON has no infinity.
        """
        windows = [window._asdict() | _finite(window.retry_after) for window in self.windows]
        return self._shown() | _finite(self.retry_after) | {"windows": windows}

    def _shown(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}

    def __copy__(self) -> Self:
        """Return the decision itself, as it cannot be changed; `replace` makes another."""
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Return the decision itself, as it cannot be changed."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields for users and the windows: what was read of buckets, and the request, stay behind."""
        shown = self._shown()
        return _unpickled, (type(self), shown, self.windows)

    def _rules(self) -> str:
        return listed(dict.fromkeys(repr(bucket.charge.rule) for bucket in self.evidence))

    def __repr__(self) -> str:
        shown = self._shown() | {"windows": self.windows}
        return f"Decision({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def _finite(retry_after: float) -> dict[str, float | None]:
    return {"retry_after": None if math.isinf(retry_after) else retry_after}


def _unpickled(kind: type[Decision], shown: dict[str, Any], windows: Sequence[Window]) -> Decision:
    """Make the decision that `Decision.__reduce__` has taken apart."""
    return kind(**shown, evidence=PickledEvidence(windows))


class _Draft:
    """A `Decision` before it is frozen."""

    __slots__ = Decision.__slots__


def decision_of(  # noqa: PLR0917 - keywords would take longer
    allowed: bool,  # noqa: FBT001
    limit: int,
    remaining: int,
    retry_after: float,
    reset_after: float,
    granted: int,
    rule: str | None,
    shadow: bool,  # noqa: FBT001
    delay: float,
    evidence: Sequence[BucketReading],
    is_charged: bool,  # noqa: FBT001
    settlement: FinalCosts | None,
) -> Decision:
    """Make a `Decision`, in an eighth of the time that the constructor of a frozen dataclass takes."""
    draft: Any = _Draft()
    draft.allowed = allowed
    draft.limit = limit
    draft.remaining = remaining
    draft.retry_after = retry_after
    draft.reset_after = reset_after
    draft.granted = granted
    draft.rule = rule
    draft.degraded = False
    draft.shadow = shadow
    draft.delay = delay
    draft.evidence = evidence
    draft.is_charged = is_charged
    draft.settlement = settlement
    draft.in_force = ()
    draft.__class__ = Decision
    decision: Decision = draft
    return decision


class DeferredDecision(Decision):
    """A decision that admits a request, worked out when somebody first looks at it: of almost all nobody does.

    From then on it is a `Decision`.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:  # what is not there yet
        if name not in Decision.__slots__:
            raise AttributeError(f"Decision has no {name!r}")
        return getattr(_worked_out(self), name)

    @property
    def settlement(self) -> FinalCosts | None:
        """Keeps what `Decision.settle` is told."""
        return _worked_out(self).settlement

    def __eq__(self, other: object) -> bool:
        return _worked_out(self) == other

    __hash__ = Decision.__hash__


_SLOTS: Any = vars(Decision)
"""The descriptors of a decision's slots."""
set_settlement: Callable[[Decision, FinalCosts | SettlementOwner], None] = _SLOTS["settlement"].__set__
"""Has a deferred decision lead to a settlement, in the place of the request that would open one."""
_set_evidence: Callable[[Decision, Sequence[BucketReading]], None] = _SLOTS["evidence"].__set__
_set_in_force: Callable[[Decision, tuple[InForce, ...]], None] = _SLOTS["in_force"].__set__
_new = object.__new__
OVER = FinalCosts()
"""The settlement of decisions that nobody has looked at until their requests were over."""
OVER.is_over = True


def _worked_out(decision: Decision) -> Decision:
    """A deferred decision with all of its values. Threads that ask at the same time find the same ones.

    No method, as another thread may have made it a `Decision` by now.
    """
    evidence: Any = decision.evidence
    owner: SettlementOwner | FinalCosts = _SLOTS["settlement"].__get__(decision)
    worked_out = evidence.decision(owner if isinstance(owner, FinalCosts) else owner.open_settlement())
    in_force = _in_force_of(decision)
    if in_force:
        under_places(worked_out, in_force)
    for name in Decision.__slots__:
        _SLOTS[name].__set__(decision, getattr(worked_out, name))
    _set(decision, "__class__", Decision)
    if not isinstance(owner, FinalCosts):
        owner.open_settlement()  # again: if the request has ended meanwhile, it did not know of it
    return decision


def deferred(evidence: Sequence[BucketReading], owner: SettlementOwner) -> Decision:
    """Make a `DeferredDecision`, of evidence whose method ``decision`` gives the decision for a settlement."""
    decision = _new(DeferredDecision)
    _set_evidence(decision, evidence)
    set_settlement(decision, owner)
    return decision


def deferred_under_places(evidence: Sequence[BucketReading], owner: SettlementOwner, in_force: tuple[InForce, ...]) -> Decision:
    """Make a `deferred` decision about a request that has places under adaptive limits, see `under_places`."""
    decision = deferred(evidence, owner)
    _set_in_force(decision, in_force)
    return decision


def _in_force_of(deferred: Decision) -> tuple[InForce, ...]:
    """Adaptive limits of a deferred decision."""
    try:
        in_force: tuple[InForce, ...] = _SLOTS["in_force"].__get__(deferred)
    except AttributeError:  # as of most
        return ()
    return in_force


class RateLimited(LimitGateError):  # noqa: N818 - the name is part of the public contract
    """A call was refused. ``decision`` says by what and for how long.

    ``response`` is that of another service where this one refused, of the client library that was used; None elsewhere.
    ``refusal_id`` is the id that ``limitgate explain --id`` takes, where a gate refused a request; None elsewhere.
    """

    refusal_id: str | None = None

    def __init__(self, decision: Decision, response: Any = None) -> None:
        wait = f"retry in {decision.retry_after:g} s"
        if math.isinf(decision.retry_after):
            wait = "banned permanently" if decision.is_permanent_ban else "the cost never fits"
        super().__init__(f"rate limited, {wait}")
        self.decision = decision
        self.response = response

    @property
    def retry_after_header(self) -> int | None:
        """Value for ``Retry-After``: whole seconds, rounded up, at least 1; None if waiting cannot help."""
        return self.decision.retry_after_header

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the decision and the message, without a response."""
        return RateLimited, (self.decision,), {"args": self.args}


def decide(plan: Plan, reading: Reading, settlement: FinalCosts | None = None) -> Decision:
    """Decide by the store's reading; numbers are those after the plan was carried out."""
    buckets, allowed = reading.buckets, reading.admitted
    is_charged = allowed and plan.verb == "spend"
    tightest, limit, left, refill = _tightest(buckets, is_charged=is_charged)
    wait, deciding = (0.0, tightest) if allowed else _longest_wait(buckets)
    if wait == math.inf and deciding.bucket.refuses_all:
        limit, left, refill = deciding.bucket.limits[0], 0, 0
    is_shadow = may_wait = False
    for charge, _, after in buckets:
        if after is None:
            is_shadow = allowed
        if charge.max_wait_us:
            may_wait = is_charged
    return decision_of(
        allowed,
        limit.burst,
        left,
        wait,
        refill / SECOND,
        tightest.cost if is_charged else 0,
        deciding.rule,
        is_shadow,
        _delay(buckets) if may_wait else 0.0,
        buckets,
        is_charged,
        settlement,
    )


def joined(first: Decision, second: Decision) -> Decision:
    """Join two decisions about a request that the first one admitted.

    Where the second one refused, the wait is long enough for the first one, too, to admit such a request again.
    """
    in_force = (*first.in_force, *second.in_force)
    if in_force:
        return _joined_in_force(replace(first, in_force=()), replace(second, in_force=()), in_force)
    evidence = _both(_after_charges(first), _after_charges(second))
    if not evidence:
        return second
    tightest, limit, left, refill = _tightest(evidence, is_charged=False)
    both = replace(
        second,
        limit=limit.burst,
        remaining=left,
        reset_after=refill / SECOND,
        evidence=evidence,
        is_charged=False,
        degraded=first.degraded or second.degraded,
        delay=first.delay + second.delay,
    )
    if second.allowed:
        return replace(both, granted=tightest.cost, rule=tightest.rule, shadow=first.shadow or second.shadow)
    return replace(both, retry_after=max(second.retry_after, _again(first))) if second.refusing else both


def _joined_in_force(first: Decision, second: Decision, in_force: tuple[InForce, ...]) -> Decision:
    """Join two decisions that adaptive limits took part in."""
    if not (first.evidence or first.degraded):  # made by adaptive limits alone
        found = second
    elif not (second.evidence or second.degraded):
        found = first if second.allowed else second
    else:
        found = joined(first, second)
    return under_places(replace(found, settlement=second.settlement), in_force)


def admitted_in_flight(in_force: tuple[InForce, ...], settlement: FinalCosts) -> Decision:
    """Make the decision of adaptive limits alone, under which a request has its places."""
    rule, limit, remaining = in_force[0] if len(in_force) == 1 else min(_enforced(in_force) or in_force, key=itemgetter(2))
    decision = decision_of(True, limit, remaining, 0.0, 0.0, 1, rule, False, 0.0, (), False, settlement)
    _set(decision, "in_force", in_force)
    return decision


def refused_in_flight(in_force: tuple[InForce, ...], retry_after: float) -> Decision:
    """Make the decision of the last of some adaptive limits, under which there is no place for a request."""
    rule, limit, remaining = in_force[-1]
    return Decision(False, limit, remaining, retry_after, 0.0, 0, rule, in_force=in_force)


def under_places(decision: Decision, in_force: tuple[InForce, ...]) -> Decision:
    """Add adaptive limits to a decision that nobody else has yet. Returns it.

    Where one of them has the least remaining, it is the decision's tightest window.
    """
    _set(decision, "__class__", _Draft)
    draft: Any = decision
    draft.in_force = in_force
    fewest = fewest_places(in_force, draft.remaining) if draft.allowed and not draft.degraded else None
    if fewest is not None:
        draft.rule, draft.limit, draft.remaining = fewest
        draft.reset_after = 0.0
    draft.__class__ = Decision
    return decision


def fewest_places(in_force: tuple[InForce, ...], remaining: int) -> InForce | None:
    """Return the adaptive limit with the fewest free places, or None if all have at least ``remaining``.

    Shadow rules are ignored.
    """
    fewest: InForce | None = in_force[0]
    if len(in_force) > 1:
        fewest = min(_enforced(in_force), key=itemgetter(2), default=None)
    return fewest if fewest is not None and fewest[2] < remaining and type(fewest) is tuple else None


def _enforced(in_force: tuple[InForce, ...]) -> list[InForce]:
    return [each for each in in_force if type(each) is tuple]


_set = object.__setattr__
"""Sets an attribute of a frozen object, as `dataclasses` does."""


def _after_charges(decision: Decision) -> Sequence[BucketReading]:
    """The evidence of a decision, with the states after its charges in the place of those before."""
    if not decision.is_charged:
        return decision.evidence
    return [bucket if bucket.after is None else bucket._replace(before=bucket.after) for bucket in decision.evidence]


def _both(first: Sequence[BucketReading], second: Sequence[BucketReading]) -> list[BucketReading]:
    """Evidence of two decisions. Of a bucket in both, the reading that leaves less, or refuses."""
    joined = {bucket.charge.key: bucket for bucket in first}
    for bucket in second:
        known = joined.get(bucket.charge.key)
        if known is None or bucket.after is None or _least(bucket) <= _least(known):
            joined[bucket.charge.key] = bucket
    return list(joined.values())


def _least(bucket: BucketReading) -> int:
    """Whole requests that the tightest window of a bucket has left."""
    limits, remaining = bucket.charge.bucket.limits, bucket.charge.bucket.algorithm.remaining
    return min([remaining(state, limit) for limit, state in zip(limits, bucket.before)])


def _again(admitted: Decision) -> float:
    """Seconds until a request like one that was admitted would be admitted again. Slots in flight are free by then."""
    charged = [(charge, states) for charge, states, _ in _after_charges(admitted) if charge.enforced]
    return max([_wait(charge, states) for charge, states in charged if not charge.bucket.has_slots], default=0.0)


def _tightest(buckets: Sequence[BucketReading], *, is_charged: bool) -> tuple[Charge, Limit, int, int]:
    """The window with the least remaining, of equals the one that takes longest to refill: both, with its charge and limit.

    Shadow rules are ignored unless there are no others.
    """
    tightest, least, latest, of_enforced = buckets[0].charge, -1, -1, False
    tight = tightest.bucket.limits[0]
    for charge, before, after in buckets:
        algorithm = charge.bucket.algorithm
        if (charge.enforced and (algorithm.IS_LIMIT or after is None)) is not of_enforced:
            if of_enforced:
                continue
            of_enforced, least, latest = True, -1, -1
        for limit, state in zip(charge.bucket.limits, after if is_charged and after is not None else before):
            left = algorithm.remaining(state, limit)
            if left <= least or least < 0:
                refill = algorithm.refill_us(state, limit)
                if left != least or refill > latest:
                    least, latest, tightest, tight = left, refill, charge, limit
    return tightest, tight, least, latest


def _longest_wait(buckets: Sequence[BucketReading]) -> tuple[float, Charge]:
    """The longest that a charge which refused makes wait, in seconds, and this charge."""
    longest, refusing = -1.0, buckets[0].charge
    for charge, states, after in buckets:
        if after is None and charge.enforced:
            wait = _wait(charge, states)
            if wait > longest:
                longest, refusing = wait, charge
    return longest, refusing


def _delay(buckets: Sequence[BucketReading]) -> float:
    """Seconds until charges that were booked ahead would have fitted into every window."""
    longest = 0.0
    for charge, states, _ in buckets:
        if charge.max_wait_us and charge.enforced:
            longest = max(longest, _wait(charge._replace(max_wait_us=0), states))
    return longest


def is_booked(charge: Charge, states: Sequence[State]) -> bool:
    """True if a request has to wait for its turn in a bucket of these states."""
    return bool(charge.turn_us or (charge.max_wait_us and charge.enforced and wait_us(charge, states)))


def _wait(charge: Charge, states: Sequence[State]) -> float:
    """Seconds until a charge fits into every window, ``inf`` if it never does."""
    wait = wait_us(charge, states)
    return math.inf if wait is None else max(0, wait - charge.max_wait_us) / SECOND


def undecided(*, allowed: bool) -> Decision:
    """Make the decision of ``on_error``: the store failed, and nothing is known about any bucket."""
    return Decision(allowed, 0, 0, 0.0, 0.0, 0, None, degraded=True)


def denied(rule: str | None) -> Decision:
    """Make the decision of a rule that denies, None for no rule: no bucket was looked at, and waiting does not help."""
    return Decision(False, 0, 0, math.inf, 0.0, 0, rule)
