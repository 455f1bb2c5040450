"""Metrics of gates, limiters and rules, as integers that only increase.

Counting needs no lock, because CPython with a GIL switches threads only at calls and backward jumps.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, Final, Protocol, get_args
from weakref import ref

from limitgate.algorithms import gcra
from limitgate.fleet.tally import Clients, Tally
from limitgate.limits.bucket import RESERVES
from limitgate.limits.decision import Decision
from limitgate.limits.plan import BucketReading, Charge, Source
from limitgate.messages.diagnostics import Diagnosis, times_logged
from limitgate.observing import instruments
from limitgate.observing.exporter import Gauge, Metrics, Observer, Series, exporter
from limitgate.observing.instruments import Outcome
from limitgate.observing.series import takes_slots, windows_of, written
from limitgate.overload.adaptive_limit import AdaptiveLimit
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter
from limitgate.overload.lag import heartbeats
from limitgate.overload.shedding import Refusal
from limitgate.rules.callers import DEFAULT_TIER
from limitgate.rules.revision import revision
from limitgate.rules.rule import Rule, RuleSet

_REFUSALS: Final = tuple(product(RESERVES, get_args(Refusal)))


class ShedSeries(Series):
    """Refusals that the adaptive limit itself counts."""

    __slots__ = ("_before", "_labels", "_limit", "places")

    def __init__(self, labels: tuple[str, str], places: ConcurrencyLimiter) -> None:
        super().__init__([0] * len(_REFUSALS), [(instruments.RULE_SHED, (*labels, *kind)) for kind in _REFUSALS])
        self._labels = labels
        self.places: ConcurrencyLimiter = places
        self._limit = places.limit
        self._before = _refused(self._limit)

    def look(self) -> None:
        limit = self.places.limit
        if limit is not self._limit:  # A fork created a new limit.
            self._limit, self._before = limit, [0] * len(_REFUSALS)
        now = _refused(limit)
        self.values[:] = [value + new - was for value, new, was in zip(self.values, now, self._before)]
        self._before = now

    def gauges(self) -> Iterable[Gauge]:
        yield instruments.RULE_ADAPTIVE_LIMIT, self._labels, self.places.limit.limit
        yield instruments.RULE_ADAPTIVE_BASE, self._labels, self.places.limit.base_s


def _refused(limit: AdaptiveLimit) -> list[int]:
    return [getattr(limit.levels[priority], reason) for priority, reason in _REFUSALS]


_OUTCOMES: Final = get_args(Outcome)
_WEIGHT: Final = {outcome: weight for weight, outcome in enumerate(_OUTCOMES)}
_REQUESTS: Final = tuple(product(_OUTCOMES, get_args(Source)))
_PLACES: Final = {outcome: {source: _REQUESTS.index((outcome, source)) for source in get_args(Source)} for outcome in _OUTCOMES}
USUAL: Final = frozenset(
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
_RARE: Final = frozenset(_REQUESTS) - USUAL
"""Labels whose series start with their first request."""

BOUNDS: Final = instruments.RULE_UTILIZATION.bounds
_BUCKETS: Final = len(BOUNDS) + 1
ADMITTED, REFUSED, SHADOW_REFUSED, COUNTS = 0, 1, 2, 3
"""Positions in a rule's values; the histogram starts at `COUNTS`."""
SUMS = COUNTS + _BUCKETS
TINY: Final = 1e-9
"""Subtracted from a share, so that rounding errors don't raise it above a bound."""
_RULE_OUTCOMES: Final = get_args(instruments.RuleOutcome)

LIMITER = "(limiter)"


def outweighs(outcome: Outcome, other: Outcome) -> bool:
    """True if an outcome replaces another outcome of the same request."""
    return _WEIGHT[outcome] >= _WEIGHT[other]


class RuleSeries(Series):
    __slots__ = ("_has_slots", "_has_turns", "_windows", "bans", "clients", "is_shadow", "labels", "limits", "shed", "waiting")

    def __init__(self, name: str, tier: str = DEFAULT_TIER, clients: Clients | None = None) -> None:
        decisions = [(instruments.RULE_DECISIONS, (name, tier, outcome)) for outcome in _RULE_OUTCOMES]
        super().__init__([0] * SUMS + [0.0] * _BUCKETS, decisions, [(instruments.RULE_UTILIZATION, (name, tier))])
        self.labels: tuple[str, str] = name, tier
        self.clients: Clients | None = clients
        """Clients that used the rule; None outside a fleet."""
        self.limits: list[Mapping[str, str]] = []
        self.is_shadow: bool = False
        self.waiting: list[int] = [0]
        self._windows: dict[str, int] = {}
        self._has_slots = self._has_turns = False
        self.bans: Series | None = None
        self.shed: ShedSeries | None = None

    def take(self, rule: Rule) -> None:
        self._windows = windows_of(rule.every_limit)
        self.limits = [limit.given for limit in rule.every_limit]
        self._has_slots = takes_slots(rule)
        self._has_turns = bool(rule.max_delay)
        if rule.ban is not None and self.bans is None:
            self.bans = Series([0], [(instruments.RULE_BANS, self.labels)])

    def retire(self, windows: Iterable[str]) -> None:
        """Set the limits of windows to 0, because a series can't be removed."""
        self._windows = {**self._windows, **dict.fromkeys(windows, 0)}

    def adapt(self, places: ConcurrencyLimiter | None) -> None:
        if places is None:
            self.shed = None
        elif self.shed is None or self.shed.places is not places:
            self.shed = ShedSeries(self.labels, places)

    def count(self, outcome: int, share: float) -> None:
        """Count a decision. ``share`` is the utilization of the fullest window."""
        values, bucket = self.values, bisect_left(BOUNDS, share)
        values[outcome] += 1
        values[COUNTS + bucket] += 1
        values[SUMS + bucket] += share

    def count_ban(self) -> None:
        if self.bans is not None:
            self.bans.values[0] += 1

    def gauges(self, held: int) -> Iterable[Gauge]:
        """Limits, and requests in flight and waiting."""
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
    @property
    def held(self) -> Sequence[Charge]: ...


class Counts:
    """Counts of a gate. ``tally`` collects clients for the fleet, and without observers also counts requests."""

    def __init__(self, tally: Tally | None = None, *, defers: bool = False) -> None:
        self.tally = tally
        self.defers = defers
        self.publisher: Any = None
        counters = [(instruments.REQUESTS, labels) for labels in _REQUESTS]
        self.request_series: Series = Series([0] * len(_REQUESTS), counters, rare=_RARE)
        self._values = self.request_series.values
        self._rules: dict[tuple[str, str], RuleSeries] = {}
        self._keepers: list[ref[Held]] = []
        self._config: ConfigSeries | None = None

    def look_at(self, *keepers: Held) -> None:
        self._keepers = [ref(keeper) for keeper in keepers]

    def look_at_rules(self, loads: ReloadStats, rules: Callable[[], RuleSet | None]) -> None:
        self._config = ConfigSeries(loads, rules)

    def count(self, outcome: Outcome, source: Source) -> None:
        self._values[_PLACES[outcome][source]] += 1
        if exporter.is_idle:
            exporter.wake()

    def count_many(self, outcome: Outcome, sources: Mapping[Source, int]) -> None:
        for source, count in sources.items():
            self._values[_PLACES[outcome][source]] += count

    @property
    def requests(self) -> dict[tuple[str, str], int]:
        return dict(zip(_REQUESTS, self._values))

    def rules(self) -> list[RuleSeries]:
        return list(self._rules.values())

    def rule(self, rule: Rule) -> RuleSeries:
        """Return the metrics of a rule. A redefined rule keeps its metrics."""
        series = self.named(rule.name, rule.tier or DEFAULT_TIER)
        series.take(rule)
        return series

    def retire(self, before: RuleSet, after: RuleSet) -> None:
        present = written(after)
        for labels, rule in written(before).items():
            kept = windows_of(present[labels].every_limit) if labels in present else {}
            self.named(*labels).retire([window for window in windows_of(rule.every_limit) if window not in kept])

    def named(self, name: str, tier: str = DEFAULT_TIER) -> RuleSeries:
        labels = name, tier
        series = self._rules.get(labels)
        if series is None:
            clients = None if self.tally is None else self.tally.of_rule()
            series = self._rules.setdefault(labels, RuleSeries(name, tier, clients))
        return series

    def series(self) -> Iterable[Series]:
        yield self.request_series
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
    def __init__(self) -> None:
        super().__init__()
        self._rule = self.named(LIMITER)

    def decided(self, decision: Decision, source: Source) -> None:
        if not decision.allowed:
            outcome: Outcome = "refused"
            self._rule.count(REFUSED, 1.0)
        else:
            outcome = "delayed" if decision.delay else "admitted"
            self._rule.count(ADMITTED, (decision.limit - decision.remaining) / decision.limit)
        self.count(outcome, source)

    def failed(self) -> None:
        self.count("failed_closed", "nobody")


def count_decision(decision: Decision, rows: Callable[[Charge], RuleSeries | None]) -> None:
    counted = [
        (bucket, rows(bucket.charge))
        for bucket in decision.evidence
        if bucket.charge.bucket.algorithm.IS_LIMIT or bucket.after is None
    ]
    count_buckets(counted, is_charged=decision.is_charged, is_allowed=decision.allowed)


def count_buckets(buckets: Iterable[tuple[BucketReading, RuleSeries | None]], *, is_charged: bool, is_allowed: bool) -> None:
    """Count a decision, both for charged rules and for rules without room."""
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
    for row in rows:
        row.waiting[0] += 1
    try:
        yield
    finally:
        for row in rows:
            row.waiting[0] -= 1


class ReloadStats:
    def __init__(self) -> None:
        self.ok: int = 1
        self.rejected: int = 0
        self.was_ok: bool = True
        self.error: str | None = None
        self.at: float = time.time()
        """Unix seconds."""

    def note(self, *, is_ok: bool, error: str | None = None) -> None:
        self.ok += is_ok
        self.rejected += not is_ok
        self.was_ok, self.error, self.at = is_ok, error, time.time()
        exporter.wake()


class ConfigSeries(Series):
    __slots__ = ("_loads", "_rules")

    def __init__(self, loads: ReloadStats, rules: Callable[[], RuleSet | None]) -> None:
        results = instruments.CONFIG_LOADS.values["result"]
        super().__init__([loads.ok, loads.rejected], [(instruments.CONFIG_LOADS, (result,)) for result in results])
        self._loads = loads
        self._rules = rules

    def look(self) -> None:
        self.values[:] = self._loads.ok, self._loads.rejected

    def gauges(self) -> Iterable[Gauge]:
        yield instruments.CONFIG_SUCCESS, (), int(self._loads.was_ok)
        yield instruments.CONFIG_TIMESTAMP, (), self._loads.at
        rules = self._rules()
        if rules is not None:
            yield instruments.CONFIG_REVISION, (), revision(rules)


class ProcessMetrics:
    def __init__(self) -> None:
        self._diagnoses = Series(times_logged, [(instruments.DIAGNOSTICS, (diagnosis.code,)) for diagnosis in Diagnosis])

    def series(self) -> Iterable[Series]:
        return (self._diagnoses,)

    def gauges(self) -> Iterable[Gauge]:
        if heartbeats.are_known:
            yield instruments.ADAPTIVE_LAG, (), max(heartbeats.lags_s(), default=0.0)


process_metrics: ProcessMetrics = ProcessMetrics()


def observe(observers: Iterable[Observer], *metrics: tuple[Metrics, object]) -> None:
    exporter.attach(observers, *metrics, (process_metrics, process_metrics))
