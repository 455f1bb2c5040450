"""Metrics in plain integers, counted on a request's way. They only grow; `exporter` knows which observer has got how much.

Any thread may count. A count is an element of a list, and to add to that is one step for all other threads: CPython with its
GIL goes to another thread at calls and at jumps back, and there is neither.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, Final, Protocol, get_args
from weakref import ref

from limitgate.algorithms import gcra
from limitgate.limits.decision import Decision
from limitgate.limits.plan import BucketReading, Charge, Source
from limitgate.messages.diagnostics import Diagnosis, times_logged
from limitgate.observing import instruments
from limitgate.observing.exporter import Gauge, Metrics, Series, exporter
from limitgate.observing.instruments import Outcome
from limitgate.observing.observer import Observer
from limitgate.observing.series import takes_slots, windows_of, written
from limitgate.observing.shed import ShedSeries
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter
from limitgate.overload.heartbeat import heartbeats
from limitgate.rules.callers import DEFAULT_TIER
from limitgate.rules.digest import revision
from limitgate.rules.rule import Rule, RuleSet

_OUTCOMES: Final = get_args(Outcome)
_WEIGHT: Final = {outcome: weight for weight, outcome in enumerate(_OUTCOMES)}
_REQUESTS: Final = tuple(product(_OUTCOMES, get_args(Source)))
_PLACES: Final = {outcome: {source: _REQUESTS.index((outcome, source)) for source in get_args(Source)} for outcome in _OUTCOMES}
_USUAL: Final = frozenset(
    {
        ("unlimited", "nobody"),
        ("failed_open", "nobody"),
        ("failed_closed", "nobody"),
        *product(("admitted", "refused", "delayed", "shadow_refused"), ("store", "local")),
        ("admitted", "lease"),
        ("admitted", "nobody"),
        ("refused", "cache"),
        ("refused", "nobody"),
        ("shadow_refused", "nobody"),
        ("delayed", "nobody"),
    }
)
_RARE: Final = frozenset(_REQUESTS) - _USUAL
"""Pairs of labels that do not happen, so they do not exist from the start with 0."""

BOUNDS: Final = instruments.RULE_UTILIZATION.bounds
_BUCKETS: Final = len(BOUNDS) + 1
ADMITTED, REFUSED, SHADOW_REFUSED, COUNTS = 0, 1, 2, 3
"""Places of a rule's values: those of its outcomes, and the first of its histogram's counts."""
SUMS = COUNTS + _BUCKETS
"""Place of the first of its histogram's sums."""
TINY: Final = 1e-9
"""What a share is made less by, so that no rounding lifts one above a bound that it is equal to."""
_RULE_OUTCOMES: Final = get_args(instruments.RuleOutcome)

LIMITER = "(limiter)"
"""Stands for a rule in the metrics of a limiter, which has none: no rule can have this name."""


def outweighs(outcome: Outcome, other: Outcome) -> bool:
    """True if an outcome makes up for another one where both were decided about a request."""
    return _WEIGHT[outcome] >= _WEIGHT[other]


class RuleSeries(Series):
    """Metrics of one rule."""

    __slots__ = ("_has_slots", "_has_turns", "_windows", "bans", "labels", "shed", "waiting")

    def __init__(self, name: str, tier: str = DEFAULT_TIER) -> None:
        decisions = [(instruments.RULE_DECISIONS, (name, tier, outcome)) for outcome in _RULE_OUTCOMES]
        super().__init__([0] * SUMS + [0.0] * _BUCKETS, decisions, [(instruments.RULE_UTILIZATION, (name, tier))])
        self.labels = name, tier
        self.waiting = [0]
        """Requests that wait for their turn."""
        self._windows: dict[str, int] = {}
        self._has_slots = self._has_turns = False
        self.bans: Series | None = None
        """Its bans, None while it has no ``ban``."""
        self.shed: ShedSeries | None = None
        """Metrics of its adaptive limit, None where it has none."""

    def take(self, rule: Rule) -> None:
        """Take over what a rule says of itself."""
        self._windows = windows_of(rule.every_limit)
        self._has_slots = takes_slots(rule)
        self._has_turns = bool(rule.max_delay)
        if rule.ban is not None and self.bans is None:
            self.bans = Series([0], [(instruments.RULE_BANS, self.labels)])

    def retire(self, windows: Iterable[str]) -> None:
        """Set limits that are not in force any more to 0: a series cannot be taken back."""
        self._windows = {**self._windows, **dict.fromkeys(windows, 0)}

    def adapt(self, places: ConcurrencyLimiter | None) -> None:
        """Export the places under the rule's adaptive limit, None where it has none any more."""
        if places is None:
            self.shed = None
        elif self.shed is None or self.shed.places is not places:
            self.shed = ShedSeries(self.labels, places)

    def count(self, outcome: int, share: float) -> None:
        """Count a decision, by the place of its outcome, after which so large a share of the fullest window is used."""
        values, bucket = self.values, bisect_left(BOUNDS, share)
        values[outcome] += 1
        values[COUNTS + bucket] += 1
        values[SUMS + bucket] += share

    def count_ban(self) -> None:
        """Count a ban."""
        if self.bans is not None:
            self.bans.values[0] += 1

    def gauges(self, held: int) -> Iterable[Gauge]:
        """Its limits, and what is in flight and waits, where that can be."""
        for window, count in self._windows.items():
            yield instruments.RULE_LIMIT, (*self.labels, window), count
        limit = None if self.shed is None else self.shed.places.limit
        if self.shed is not None:
            yield from self.shed.gauges()
        if self._has_slots:
            yield instruments.RULE_IN_FLIGHT, self.labels, held
        elif limit is not None:
            yield instruments.RULE_IN_FLIGHT, self.labels, limit.in_flight
        if self._has_turns:
            yield instruments.RULE_WAITING, self.labels, self.waiting[0] + (0 if limit is None else limit.waiting)


class Held(Protocol):
    """Knows the slots that are held at the moment."""

    @property
    def held(self) -> Sequence[Charge]:
        """Charges of the slots that are held."""


class Counts:
    """Metrics of one gate or limiter."""

    def __init__(self) -> None:
        counters = [(instruments.REQUESTS, labels) for labels in _REQUESTS]
        self._requests = Series([0] * len(_REQUESTS), counters, rare=_RARE)
        self._values = self._requests.values
        self._rules: dict[tuple[str, str], RuleSeries] = {}
        self._keepers: list[ref[Held]] = []
        self._config: ConfigSeries | None = None

    def look_at(self, *keepers: Held) -> None:
        """Have slots in flight counted that are held there."""
        self._keepers = [ref(keeper) for keeper in keepers]

    def look_at_rules(self, loads: ReloadStats, rules: Callable[[], RuleSet | None]) -> None:
        """Have loads of rules counted, and the revision of those in force exported."""
        self._config = ConfigSeries(loads, rules)

    def count(self, outcome: Outcome, source: Source) -> None:
        """Count a request."""
        self._values[_PLACES[outcome][source]] += 1
        if exporter.is_idle:
            exporter.wake()

    def rule(self, rule: Rule) -> RuleSeries:
        """The metrics of a rule, which begin with 0. One that is written anew goes on with those that it had."""
        series = self.named(rule.name, rule.tier or DEFAULT_TIER)
        series.take(rule)
        return series

    def retire(self, before: RuleSet, after: RuleSet) -> None:
        """Set the limits in the set before that are not in the one after to 0."""
        present = written(after)
        for labels, rule in written(before).items():
            kept = windows_of(present[labels].every_limit) if labels in present else {}
            self.named(*labels).retire([window for window in windows_of(rule.every_limit) if window not in kept])

    def named(self, name: str, tier: str = DEFAULT_TIER) -> RuleSeries:
        """The metrics under a name and a tier."""
        labels = name, tier
        series = self._rules.get(labels)
        if series is None:
            series = self._rules.setdefault(labels, RuleSeries(name, tier))
        return series

    def series(self) -> Iterable[Series]:
        """All that only grows."""
        yield self._requests
        for series in list(self._rules.values()):
            yield series
            if series.bans is not None:
                yield series.bans
            if series.shed is not None:
                series.shed.look()
                yield series.shed
        if self._config is not None:
            self._config.look()
            yield self._config

    def gauges(self) -> Iterable[Gauge]:
        """All other values, as they are now."""
        held: dict[str | None, int] = {}
        for kept in self._keepers:
            keeper = kept()
            for charge in keeper.held if keeper is not None else ():
                held[charge.rule] = held.get(charge.rule, 0) + 1
        for series in list(self._rules.values()):
            yield from series.gauges(held.get(series.labels[0], 0))
        if self._config is not None:
            yield from self._config.gauges()


class LimiterCounts(Counts):
    """Metrics of a limiter. It knows no rules, and its keys and limits are the caller's, so all count as one."""

    def __init__(self) -> None:
        super().__init__()
        self._rule = self.named(LIMITER)

    def decided(self, decision: Decision, source: Source) -> None:
        """Count a decision of the limiter."""
        if not decision.allowed:
            outcome: Outcome = "refused"
            self._rule.count(REFUSED, 1.0)
        else:
            outcome = "delayed" if decision.delay else "admitted"
            self._rule.count(ADMITTED, (decision.limit - decision.remaining) / decision.limit)
        self.count(outcome, source)

    def failed(self) -> None:
        """Count a call that the store has failed for."""
        self.count("failed_closed", "nobody")


def count_decision(decision: Decision, rows: Callable[[Charge], RuleSeries | None]) -> None:
    """Count a decision for each of its rules: for those that were charged, and for those that had no room."""
    counted = [
        (bucket, rows(bucket.charge))
        for bucket in decision.evidence
        if bucket.charge.bucket.algorithm.IS_LIMIT or bucket.after is None
    ]
    count_buckets(counted, is_charged=decision.is_charged, is_allowed=decision.allowed)


def count_buckets(buckets: Iterable[tuple[BucketReading, RuleSeries | None]], *, is_charged: bool, is_allowed: bool) -> None:
    """Count what was decided about buckets for their rules, as `count_decision` does."""
    found: dict[RuleSeries, tuple[int, float]] = {}
    for bucket, row in buckets:
        if row is None:
            continue
        outcome = ADMITTED if bucket.after is not None else REFUSED if bucket.charge.enforced else SHADOW_REFUSED
        share = _used(bucket, is_charged=is_charged)
        worst, most = found.get(row, (ADMITTED, 0.0))
        found[row] = (outcome if worst == ADMITTED else worst), max(share, most)
    for row, (outcome, share) in found.items():
        if outcome != ADMITTED or is_allowed:
            row.count(outcome, share)


def _used(bucket: BucketReading, *, is_charged: bool) -> float:
    """Used share of the fullest window of a bucket after a decision. One that is banned has none left."""
    charge, before, after = bucket
    algorithm = charge.bucket.algorithm
    if not algorithm.IS_LIMIT:
        return 1.0
    states: Sequence[Any] = after if is_charged and after is not None else before
    limits = zip(charge.bucket.limits, states)
    if algorithm is gcra:
        return max([float(debt / limit.capacity) - TINY for limit, debt in limits])
    return max([algorithm.used(state, limit) / limit.burst - TINY if limit.burst else 1.0 for limit, state in limits])


@contextmanager
def counted_waiting(rows: Iterable[RuleSeries]) -> Iterator[None]:
    """Count a request as waiting for its turn under rules."""
    for row in rows:
        row.waiting[0] += 1
    try:
        yield
    finally:
        for row in rows:
            row.waiting[0] -= 1


class ReloadStats(Protocol):
    """Loads of the rules of a gate."""

    ok: int
    rejected: int
    was_ok: bool
    at: float


class ConfigSeries(Series):
    """Loads of the rules of a gate, which counts them itself, and the rules in force, which ``rules`` gives."""

    __slots__ = ("_loads", "_rules")

    def __init__(self, loads: ReloadStats, rules: Callable[[], RuleSet | None]) -> None:
        results = instruments.CONFIG_LOADS.values["result"]
        super().__init__([loads.ok, loads.rejected], [(instruments.CONFIG_LOADS, (result,)) for result in results])
        self._loads = loads
        self._rules = rules

    def look(self) -> None:
        """Look how many there have been."""
        self.values[:] = self._loads.ok, self._loads.rejected

    def gauges(self) -> Iterable[Gauge]:
        """The last load, and the rules in force."""
        yield instruments.CONFIG_SUCCESS, (), int(self._loads.was_ok)
        yield instruments.CONFIG_TIMESTAMP, (), self._loads.at
        rules = self._rules()
        if rules is not None:
            yield instruments.CONFIG_REVISION, (), revision(rules)


class ProcessMetrics:
    """Metrics of this process as a whole."""

    def __init__(self) -> None:
        self._diagnoses = Series(times_logged, [(instruments.DIAGNOSTICS, (diagnosis.code,)) for diagnosis in Diagnosis])

    def series(self) -> Iterable[Series]:
        """Diagnoses."""
        return (self._diagnoses,)

    def gauges(self) -> Iterable[Gauge]:
        """Lag of event loops and proxies, if there was any need to know it."""
        if heartbeats.are_known:
            yield instruments.ADAPTIVE_LAG, (), max(heartbeats.lags_s(), default=0.0)


_process_metrics = ProcessMetrics()


def observe(observers: Iterable[Observer], *metrics: tuple[Metrics, object]) -> None:
    """Export metrics, each for as long as its owner lives, and those of this process as a whole."""
    exporter.attach(observers, *metrics, (_process_metrics, _process_metrics))
