"""What was decided: computed in one place, from a plan and a store's reading of it, for every store and every caller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from limitgate.algorithms.base import State
from limitgate.errors import LimitGateError
from limitgate.limits.limit import Limit
from limitgate.limits.plan import Charge, Plan, Reading, check_cost

SECOND = 1_000_000

Evidence = tuple[Sequence[Charge], Sequence[Sequence[State]], Sequence[Sequence[State] | None]]
"""The charges, how their windows stand after the decision, and `Reading.after`."""


class Window(NamedTuple):
    """How one limit stands. Immutable."""

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
    """How a bucket stands after a decision."""

    charge: Charge
    states: Sequence[State]
    fits: bool
    """True if the charge fitted into every window."""

    def windows(self) -> list[Window]:
        """How each of its limits stands."""
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


class Settlement:
    """What a request turns out to have cost. Noted while it is under way, put into effect when it is over."""

    costs: Mapping[str | None, int] = MappingProxyType({})
    """By rule; under None, that of the rules which nobody named."""
    others: tuple[Settlement, ...] = ()
    """Those of gates around this one, which hear of everything, too."""
    has_news = False
    """True if something was noted that is not put into effect yet."""
    is_over = False

    def __eq__(self, other: object) -> bool:
        """True if this is one, too: what a request turns out to cost is nothing that was decided."""
        return isinstance(other, Settlement)

    def __hash__(self) -> int:
        return hash(Settlement)

    def note(self, rule: str | None, cost: int) -> None:
        """What a rule is to be charged. Safe for threads: they may do so at the same time."""
        for each in (self, *self.others):
            each.__dict__.setdefault("costs", {})[rule] = cost
            each.has_news = True


class _Fields(NamedTuple):
    allowed: bool
    limit: int
    """The burst of the window with the least remaining, of equals the one with the longest ``reset_after``."""
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
    evidence: Evidence = ((), (), ())
    """What `Decision.standings` and ``windows`` are worked out from."""
    degraded: bool = False
    """The store failed and ``on_error`` decided."""
    shadow: bool = False
    """Only shadow rules refused, so the request passes."""
    delay: float = 0.0
    """Seconds until the turn that was booked, where requests may wait for it; 0 where it is now. The request has waited as long
    when the application sees it, or less if others before it have left."""
    settlement: Settlement | None = None
    """What `Decision.settle` notes, None where there is nothing to settle: in a Limiter."""


class Decision(_Fields):
    """The answer to a request. Immutable."""

    __slots__ = ()

    @property
    def standings(self) -> list[Standing]:
        """Every bucket that was looked at, worked out when asked: most answers need only the tightest window."""
        return [Standing(charge, states, then is not None) for charge, states, then in zip(*self.evidence)]

    @property
    def refusing(self) -> tuple[str | None, ...]:
        """The rules that refused."""
        charges, _, after = self.evidence
        return tuple(dict.fromkeys([charge.rule for charge, then in zip(charges, after) if then is None and charge.enforced]))

    @property
    def windows(self) -> tuple[Window, ...]:
        """Every limit that was looked at."""
        return tuple(window for standing in self.standings for window in standing.windows())

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
        if rule is not None and not self.degraded and rule not in {charge.rule for charge in self.evidence[0]}:
            raise ValueError(f"rule {rule!r:.80} took no part in this decision, expected one of {self._rules()}")
        settlement.note(rule, check_cost(cost))

    def _rules(self) -> str:
        return ", ".join(dict.fromkeys(repr(charge.rule) for charge in self.evidence[0]))

    def __repr__(self) -> str:
        shown = {**self._asdict(), "windows": self.windows}
        del shown["evidence"], shown["settlement"]
        return f"Decision({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class RateLimited(LimitGateError):  # noqa: N818 - the name is part of the public contract
    """A call was refused. ``decision`` says by what and for how long.

    ``response`` is that of another service where this one refused, of the client library that was used; None elsewhere.
    """

    def __init__(self, decision: Decision, response: Any = None) -> None:
        wait = decision.retry_after
        super().__init__(f"rate limited, {'the cost never fits' if wait == math.inf else f'retry in {wait:g} s'}")
        self.decision = decision
        self.response = response

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process goes what was decided, without what it was worked out from, and without a response."""
        return RateLimited, (self.decision._replace(evidence=((), (), ()), settlement=None),)


def decide(plan: Plan, reading: Reading, settlement: Settlement | None = None) -> Decision:
    """The decision that follows from what the store read, as it stands after the plan was carried out."""
    charges, states, after, allowed = plan.charges, reading.states, reading.after, reading.admitted
    takes = allowed and plan.verb == "spend"
    if takes:
        states = [before if then is None else then for before, then in zip(states, after)]
    tightest, limit, left, refill = _tightest(charges, states)
    wait, deciding = (0.0, tightest) if allowed else _longest_wait(charges, states, after)
    delay = 0.0
    for charge in charges:
        if charge.max_wait_us and takes:
            delay = _delay(charges, reading.states)
            break
    return Decision(
        allowed,
        limit.burst,
        left,
        wait,
        refill / SECOND,
        tightest.cost if takes else 0,
        deciding.rule,
        (charges, states, after),
        False,
        allowed and None in after,
        delay,
        settlement,
    )


def joined(first: Decision, second: Decision) -> Decision:
    """Two decisions as one, about a request that the first one admitted.

    Where the second one refused, the wait is long enough for the first one, too, to admit such a request again.
    """
    charges, states, _ = evidence = _both(first.evidence, second.evidence)
    if not charges:
        return second
    tightest, limit, left, refill = _tightest(charges, states)
    both = second._replace(
        limit=limit.burst,
        remaining=left,
        reset_after=refill / SECOND,
        evidence=evidence,
        degraded=first.degraded or second.degraded,
        delay=first.delay + second.delay,
    )
    if second.allowed:
        return both._replace(granted=tightest.cost, rule=tightest.rule, shadow=first.shadow or second.shadow)
    return both._replace(retry_after=max(second.retry_after, _again(first))) if second.refusing else both


def _both(first: Evidence, second: Evidence) -> Evidence:
    """What two decisions were worked out from. Of a bucket that both asked about, what leaves less, or refuses."""
    found = {each[0].key: each for each in zip(*first)}
    for each in zip(*second):
        known = found.get(each[0].key)
        if known is None or each[2] is None or _least(*each[:2]) <= _least(*known[:2]):
            found[each[0].key] = each
    charges, states, after = zip(*found.values()) if found else ((), (), ())
    return charges, states, after


def _least(charge: Charge, states: Sequence[State]) -> int:
    """What the tightest window of a bucket has left."""
    return min([charge.bucket.algorithm.remaining(state, limit) for limit, state in zip(charge.bucket.limits, states)])


def _again(admitted: Decision) -> float:
    """Seconds until a request like one that was admitted would be, once more. Places in flight are free again by then."""
    charged = [(charge, states) for charge, states, _ in zip(*admitted.evidence) if charge.enforced]
    return max([_wait(charge, states) for charge, states in charged if not charge.bucket.has_slots], default=0.0)


def _tightest(charges: Sequence[Charge], states: Sequence[Sequence[State]]) -> tuple[Charge, Limit, int, int]:
    """The window with the least remaining, of equals the one that takes longest to refill: both, with its charge and limit."""
    tightest, tight, least, latest = charges[0], charges[0].bucket.limits[0], -1, -1
    for charge, found in zip(charges, states):
        algorithm = charge.bucket.algorithm
        for limit, state in zip(charge.bucket.limits, found):
            left = algorithm.remaining(state, limit)
            if left <= least or least < 0:
                refill = algorithm.refill_us(state, limit)
                if left != least or refill > latest:
                    least, latest, tightest, tight = left, refill, charge, limit
    return tightest, tight, least, latest


def _longest_wait(
    charges: Sequence[Charge], states: Sequence[Sequence[State]], after: Sequence[Sequence[State] | None]
) -> tuple[float, Charge]:
    """The longest that a charge which refused makes wait, in seconds, and this charge."""
    longest, refusing = -1.0, charges[0]
    for charge, found, then in zip(charges, states, after):
        if then is None and charge.enforced:
            wait = _wait(charge, found)
            if wait > longest:
                longest, refusing = wait, charge
    return longest, refusing


def _delay(charges: Sequence[Charge], states: Sequence[Sequence[State]]) -> float:
    """Seconds until charges that were booked ahead would have fitted into every window."""
    longest = 0.0
    for charge, found in zip(charges, states):
        if charge.max_wait_us and charge.enforced:
            longest = max(longest, _wait(charge._replace(max_wait_us=0), found))
    return longest


def is_booked(charge: Charge, states: Sequence[State]) -> bool:
    """True if a request has to wait for its turn in a bucket that was found in these states."""
    return bool(charge.max_wait_us and charge.enforced and _wait(charge._replace(max_wait_us=0), states))


def _wait(charge: Charge, states: Sequence[State]) -> float:
    """Seconds until a charge fits into every window, ``inf`` if it never does."""
    longest = 0
    for limit, state in zip(charge.bucket.limits, states):
        wait = charge.bucket.algorithm.wait_us(state, charge.cost, limit)
        if wait is None:
            return math.inf
        longest = max(longest, wait - charge.max_wait_us)
    return longest / SECOND


def undecided(*, allowed: bool) -> Decision:
    """The decision of ``on_error``, when the store failed and nothing is known about any bucket."""
    return Decision(allowed, 0, 0, 0.0, 0.0, 0, None, degraded=True)
