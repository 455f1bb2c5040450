"""Metrics of budgets for language models."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import product
from typing import Any, Final, get_args
from weakref import WeakKeyDictionary

from limitgate.observing import instruments
from limitgate.observing.counts import observe
from limitgate.observing.exporter import Gauge, Series, exporter
from limitgate.observing.instruments import Direction, Refuser, Settlement

_DIRECTIONS: Final[tuple[Direction, ...]] = get_args(Direction)
_COUNTERS: Final = [
    *[(instruments.BUDGET_TOKENS, labels) for labels in product(_DIRECTIONS, ("reserved", "settled"))],
    *[(instruments.BUDGET_SETTLEMENTS, (usage,)) for usage in get_args(Settlement)],
    *[(instruments.BUDGET_REFUSALS, (refuser,)) for refuser in get_args(Refuser)],
]
_PLACES: Final = {labels: place for place, (_, labels) in enumerate(_COUNTERS)}
_BOUNDS: Final = instruments.BUDGET_USAGE_RATIO.bounds
_BUCKETS: Final = len(_BOUNDS) + 1


class BudgetCounts:
    def __init__(self, budget: str) -> None:
        self._labels = (budget,)
        self._series = Series(
            [0] * len(_COUNTERS) + ([0] * _BUCKETS + [0.0] * _BUCKETS) * len(_DIRECTIONS),
            [(instrument, (budget, *labels)) for instrument, labels in _COUNTERS],
            [(instruments.BUDGET_USAGE_RATIO, (budget, direction)) for direction in _DIRECTIONS],
        )
        self.waiting: int = 0

    def reserved(self, estimate: tuple[int, int]) -> None:
        for direction, tokens in zip(_DIRECTIONS, estimate):
            self._add((direction, "reserved"), tokens)

    def settled(self, how: Settlement, estimate: tuple[int, int], used: tuple[int, int]) -> None:
        self._add((how,))
        if how == "failed":
            return
        for place, (direction, expected, tokens) in enumerate(zip(_DIRECTIONS, estimate, used)):
            self._add((direction, "settled"), tokens)
            if how != "nothing" and expected:
                ratio = tokens / expected
                bucket = len(_COUNTERS) + 2 * place * _BUCKETS + bisect_left(_BOUNDS, ratio)
                self._series.values[bucket] += 1
                self._series.values[bucket + _BUCKETS] += ratio

    def refused(self, refuser: Refuser) -> None:
        self._add((refuser,))

    def wait(self, change: int) -> None:
        self.waiting += change

    def _add(self, labels: tuple[str, ...], amount: int = 1) -> None:
        self._series.values[_PLACES[labels]] += amount
        if exporter.is_idle:
            exporter.wake()

    def series(self) -> Iterable[Series]:
        return (self._series,)

    def gauges(self) -> Iterable[Gauge]:
        yield instruments.BUDGET_WAITING, self._labels, self.waiting


_counts: WeakKeyDictionary[Any, dict[str, BudgetCounts]] = WeakKeyDictionary()


def counts_of(budget: str, limiter: Any) -> BudgetCounts:
    """Return the metrics of a budget. From then on, observers receive them."""
    named = _counts.setdefault(limiter, {})
    counts = named.get(budget)
    if counts is None:
        counts = named.setdefault(budget, BudgetCounts(budget))
        if limiter.observers:
            observe(limiter.observers, (counts, limiter))
    return counts
