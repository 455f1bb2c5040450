"""Computes decisions from plans and readings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

from limitgate.algorithms import ban
from limitgate.algorithms.base import State
from limitgate.errors import LimitGateError
from limitgate.limits.limit import Limit
from limitgate.limits.plan import BucketReading, Charge, Plan, Reading, check_cost, read, wait_us, with_bans
from limitgate.messages.text import listed

SECOND = 1_000_000

InForce = tuple[str | None, int, int]
"""Rule (None for an outbound host), limit on requests in flight, and free places."""


class InShadow(tuple[str | None, int, int]):
    """`InForce` of a shadow rule, which is shown only if there are no other limits."""

    __slots__ = ()


class Window(NamedTuple):
    """State of one limit. Immutable."""

    rule: str | None
    """None in a `Limiter`."""
    limit: int
    """The burst: the capacity in requests."""
    period: int
    """Seconds."""
    remaining: int
    """Whole requests that fit."""
    used: int
    """Charged requests, rounded up."""
    reset_after: float
    """Seconds until the bucket is full."""
    retry_after: float
    """Seconds until this request fits; ``inf`` if its cost exceeds the burst."""


class Standing(NamedTuple):
    charge: Charge
    states: Sequence[State]
    fits: bool

    def windows(self) -> list[Window]:
        """Return the windows, except those of bans that have ended."""
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
    def __init__(self, windows: Sequence[Window]) -> None:
        super().__init__()
        self.windows: tuple[Window, ...] = tuple(windows)


class SettlementOwner(Protocol):
    def open_settlement(self) -> FinalCosts:
        """Return the settlement. The first call creates it."""


class FinalCosts:
    """Costs that the application reports while the request runs."""

    costs: Mapping[str | None, int | Sequence[int]] = MappingProxyType({})
    """Costs by rule. The rule None stands for all other rules."""
    usage: tuple[int, int] | None = None
    """Input and output tokens; None until the end."""
    others: tuple[FinalCosts, ...] = ()
    has_news: bool = False
    is_over = False

    def note(self, rule: str | None, cost: int | Sequence[int]) -> None:
        for each in (self, *self.others):
            each.__dict__.setdefault("costs", {})[rule] = cost
            each.has_news = True

    def note_usage(self, usage: tuple[int, int]) -> None:
        self.usage, self.has_news = usage, True


@dataclass(frozen=True, slots=True, repr=False)
class Decision:
    """The decision about a request. Immutable."""

    allowed: bool
    """True if the request may pass."""
    limit: int
    """Burst of the tightest window, which has the least ``remaining``, then the longest ``reset_after``; shadow rules last."""
    remaining: int
    """Requests, or other units of ``cost``, that still fit into the tightest window."""
    retry_after: float
    """Seconds until the request fits all windows; 0 if allowed, ``inf`` if its cost exceeds the burst."""
    reset_after: float
    """Seconds until the tightest window is full."""
    granted: int
    """The charged cost; 0 if refused or only checked."""
    rule: str | None
    """Name of the refusing rule with the longest wait, otherwise of the tightest window's rule. None in a `Limiter`."""
    degraded: bool = False
    """True if ``on_error`` decided, because the store failed."""
    shadow: bool = False
    """True if only shadow rules refused."""
    delay: float = 0.0
    """Upper bound of the seconds that the request waited for a permit and a turn."""
    evidence: Sequence[BucketReading] = field(default=(), compare=False)
    """Readings from which ``standings`` and ``windows`` are computed."""
    is_charged: bool = field(default=False, compare=False)
    """True if charges were made."""
    settlement: FinalCosts | None = field(default=None, compare=False)
    """Receives `Decision.settle`; None in a `Limiter`."""
    in_force: tuple[InForce, ...] = field(default=(), compare=False)
    """Adaptive limits that decided."""

    def __bool__(self) -> bool:
        """Always True. Warns about a `Limiter`'s refusal, because ``if limiter.hit(...)`` would admit it."""
        if not self.allowed and self.rule is None:
            warnings.warn("a Decision is always true, even a refusal; expected decision.allowed", RuntimeWarning, stacklevel=2)
        return True

    @property
    def retry_after_header(self) -> int | None:
        """``Retry-After``: whole seconds, at least 1. None if allowed, or if waiting can't help."""
        return None if self.allowed or math.isinf(self.retry_after) else max(1, math.ceil(self.retry_after))

    @property
    def is_ban(self) -> bool:
        """True if a ban refuses."""
        return any(not each.charge.bucket.algorithm.IS_LIMIT and not each.fits for each in self.standings)

    @property
    def is_permanent_ban(self) -> bool:
        """True if a permanent ban refused."""
        return math.isinf(self.retry_after) and any(
            after is None and charge.bucket.algorithm is ban and max(states) > ban.PERMANENT
            for charge, states, after in self.evidence
        )

    @property
    def standings(self) -> list[Standing]:
        return [Standing(charge, states, after is not None) for charge, states, after in _after_charges(self)]

    @property
    def refusing(self) -> tuple[str | None, ...]:
        return tuple(dict.fromkeys([charge.rule for charge, _, after in self.evidence if after is None and charge.enforced]))

    @property
    def refusing_key(self) -> str:
        """Key of the bucket of ``rule`` that refused, without suffix. Empty if there is none."""
        refused = [charge for charge, _, after in self.evidence if after is None and charge.enforced]
        charge = next((charge for charge in refused if charge.rule == self.rule), None)
        return "" if charge is None else charge.key.removesuffix(charge.bucket.suffix)

    @property
    def windows(self) -> tuple[Window, ...]:
        """State of every limit. Adaptive limits have a period of 0."""
        if isinstance(self.evidence, PickledEvidence):
            return self.evidence.windows
        windows = [window for standing in self.standings for window in standing.windows()]
        refusing = None if self.allowed or self.refusing else self.rule
        for rule, limit, remaining in self.in_force:
            wait = self.retry_after if rule == refusing else 0.0
            windows.append(Window(rule, limit, 0, remaining, limit - remaining, 0.0, wait))
        return tuple(windows)

    def settle(self, cost: int | Sequence[int], rule: str | None = None) -> None:
        """Report the real cost of the request, such as the tokens of a language model or the bytes sent.

        Buckets are corrected at the end of the response: an overcharge is refunded; an undercharge is charged even beyond the
        limit. Without ``rule``, the cost applies to all rules whose ``cost`` isn't 1, or to all rules if there are none. For
        limits with own costs, pass a list. The last call wins. Thread-safe. Raises `TypeError` or `ValueError` for an invalid
        cost, `ValueError` for a rule outside this decision, and `RuntimeError` after the response or from a `Limiter`.
        """
        settlement = self.settlement
        if settlement is None or settlement.is_over:
            raise RuntimeError("settle was called outside of a request, expected the call before its response ends")
        if rule is not None and not self.degraded and rule not in {bucket.charge.rule for bucket in self.evidence}:
            raise ValueError(f"rule {rule!r:.80} is not in this decision, expected one of {self._rules()}")
        settlement.note(rule, tuple(map(check_cost, cost)) if isinstance(cost, list | tuple) else check_cost(cost))

    def _asdict(self) -> dict[str, Any]:
        """Return dictionaries for logs and queues. ``retry_after`` is None if waiting can't help: JSON has no infinity."""
        windows = [window._asdict() | _finite(window.retry_after) for window in self.windows]
        return self._shown() | _finite(self.retry_after) | {"windows": windows}

    def _shown(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the decision without readings and request."""
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
    return kind(**shown, evidence=PickledEvidence(windows))


class _Draft:
    __slots__ = Decision.__slots__


def decision_of(  # noqa: PLR0917 - keywords would be slower
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
    """Create a decision in an eighth of the constructor's time."""
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
    """A decision that is computed on first access, when it becomes a `Decision`."""

    __slots__ = ()

    # The slot has no value yet.
    def __getattr__(self, name: str) -> Any:
        if name not in Decision.__slots__:
            raise AttributeError(f"Decision has no {name!r}")
        return getattr(_worked_out(self), name)

    @property
    def settlement(self) -> FinalCosts | None:
        return _worked_out(self).settlement

    def __eq__(self, other: object) -> bool:
        return _worked_out(self) == other

    __hash__: Callable[..., int] = Decision.__hash__


_SLOTS: Any = vars(Decision)
set_evidence: Callable[[Decision, Sequence[BucketReading]], None] = _SLOTS["evidence"].__set__
set_in_force: Callable[[Decision, tuple[InForce, ...]], None] = _SLOTS["in_force"].__set__
"""Sets the adaptive limits of a deferred decision. Used by `under_places`."""
new_deferred: Callable[[], Decision] = partial(object.__new__, DeferredDecision)
OVER = FinalCosts()
"""Used if a request ended before its decision was read."""
OVER.is_over = True


def _worked_out(decision: Decision) -> Decision:
    evidence: Any = decision.evidence
    owner: SettlementOwner | FinalCosts = evidence.owner
    worked_out = evidence.decision(owner if isinstance(owner, FinalCosts) else owner.open_settlement())
    in_force = _in_force_of(decision)
    if in_force:
        under_places(worked_out, in_force)
    for name in Decision.__slots__:
        _SLOTS[name].__set__(decision, getattr(worked_out, name))
    _set(decision, "__class__", Decision)
    # The decision may outlive the request.
    evidence.owner = worked_out.settlement
    if not isinstance(owner, FinalCosts):
        # The request may have ended meanwhile without this settlement.
        owner.open_settlement()
    return decision


def deferred(evidence: Any, owner: SettlementOwner) -> Decision:
    decision = new_deferred()
    set_evidence(decision, evidence)
    evidence.owner = owner
    return decision


def _in_force_of(deferred: Decision) -> tuple[InForce, ...]:
    try:
        in_force: tuple[InForce, ...] = _SLOTS["in_force"].__get__(deferred)
    except AttributeError:
        return ()
    return in_force


class RateLimited(LimitGateError):  # noqa: N818 - the name is public
    """A call was refused. ``decision`` holds the reason and the wait.

    ``response`` is a remote service's refusal. ``refusal_id`` is a gate's id for ``limitgate explain --id``.
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
        """``Retry-After``: whole seconds, at least 1. None if waiting can't help."""
        return self.decision.retry_after_header

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error without the response."""
        return RateLimited, (self.decision,), {"args": self.args}


def decide(plan: Plan, reading: Reading, settlement: FinalCosts | None = None) -> Decision:
    """Return the decision, with the state after the plan."""
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


def under_bans(refusal: Decision, bans: Mapping[str, int], settlement: FinalCosts) -> Decision:
    """Return a refusal with new bans. ``bans`` has µs by bucket key."""
    charges = [charge for charge, _, _ in refusal.evidence]
    places = {place: bans[charge.key] for place, charge in enumerate(charges) if charge.key in bans}
    states = with_bans(charges, [before for _, before, _ in refusal.evidence], places)
    decision = decide(Plan.spend(charges), read(states[0], 0, states[1]), settlement)
    return replace(decision, in_force=refusal.in_force)


def joined(first: Decision, second: Decision) -> Decision:
    """Join two decisions about a request that the first one admitted. The waits are added."""
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
    # Made by adaptive limits only.
    if not (first.evidence or first.degraded):
        found = second
    elif not (second.evidence or second.degraded):
        found = first if second.allowed else second
    else:
        found = joined(first, second)
    return under_places(replace(found, settlement=second.settlement), in_force)


def admitted_in_flight(in_force: tuple[InForce, ...], settlement: FinalCosts) -> Decision:
    rule, limit, remaining = in_force[0] if len(in_force) == 1 else min(_enforced(in_force) or in_force, key=itemgetter(2))
    decision = decision_of(True, limit, remaining, 0.0, 0.0, 1, rule, False, 0.0, (), False, settlement)
    _set(decision, "in_force", in_force)
    return decision


def refused_in_flight(in_force: tuple[InForce, ...], retry_after: float) -> Decision:
    rule, limit, remaining = in_force[-1]
    return Decision(False, limit, remaining, retry_after, 0.0, 0, rule, in_force=in_force)


def under_places(decision: Decision, in_force: tuple[InForce, ...]) -> Decision:
    """Add adaptive limits to a decision. The limit with the least remaining becomes the tightest window."""
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
    """Return the adaptive limit with the fewest free places; None if all have at least ``remaining``. Ignores shadow rules."""
    fewest: InForce | None = in_force[0]
    if len(in_force) > 1:
        fewest = min(_enforced(in_force), key=itemgetter(2), default=None)
    return fewest if fewest is not None and fewest[2] < remaining and type(fewest) is tuple else None


def _enforced(in_force: tuple[InForce, ...]) -> list[InForce]:
    return [each for each in in_force if type(each) is tuple]


_set = object.__setattr__


def _after_charges(decision: Decision) -> Sequence[BucketReading]:
    if not decision.is_charged:
        return decision.evidence
    return [bucket if bucket.after is None else bucket._replace(before=bucket.after) for bucket in decision.evidence]


def _both(first: Sequence[BucketReading], second: Sequence[BucketReading]) -> list[BucketReading]:
    joined = {bucket.charge.key: bucket for bucket in first}
    for bucket in second:
        known = joined.get(bucket.charge.key)
        if known is None or bucket.after is None or _least(bucket) <= _least(known):
            joined[bucket.charge.key] = bucket
    return list(joined.values())


def _least(bucket: BucketReading) -> int:
    limits, remaining = bucket.charge.bucket.limits, bucket.charge.bucket.algorithm.remaining
    return min([remaining(state, limit) for limit, state in zip(limits, bucket.before)])


def _again(admitted: Decision) -> float:
    charged = [(charge, states) for charge, states, _ in _after_charges(admitted) if charge.enforced]
    return max([_wait(charge, states) for charge, states in charged if not charge.bucket.has_slots], default=0.0)


def _tightest(buckets: Sequence[BucketReading], *, is_charged: bool) -> tuple[Charge, Limit, int, int]:
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
    longest, refusing = -1.0, buckets[0].charge
    for charge, states, after in buckets:
        if after is None and charge.enforced:
            wait = _wait(charge, states)
            if wait > longest:
                longest, refusing = wait, charge
    return longest, refusing


def _delay(buckets: Sequence[BucketReading]) -> float:
    longest = 0.0
    for charge, states, _ in buckets:
        if charge.max_wait_us and charge.enforced:
            longest = max(longest, _wait(charge._replace(max_wait_us=0), states))
    return longest


def is_booked(charge: Charge, states: Sequence[State]) -> bool:
    return bool(charge.turn_us or (charge.max_wait_us and charge.enforced and wait_us(charge, states)))


def _wait(charge: Charge, states: Sequence[State]) -> float:
    wait = wait_us(charge, states)
    return math.inf if wait is None else max(0, wait - charge.max_wait_us) / SECOND


def undecided(*, allowed: bool) -> Decision:
    return Decision(allowed, 0, 0, 0.0, 0.0, 0, None, degraded=True)


def denied(rule: str | None) -> Decision:
    return Decision(False, 0, 0, math.inf, 0.0, 0, rule)
