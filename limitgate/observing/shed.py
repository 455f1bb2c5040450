"""Metrics of the adaptive limit of a rule: the limit, its inputs, and its refusals."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Final, get_args

from limitgate.limits.bucket import RESERVES
from limitgate.observing import instruments
from limitgate.observing.exporter import Gauge, Series
from limitgate.overload.adaptive_limit import AdaptiveLimit
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter
from limitgate.overload.shedding import Refusal

_KINDS: Final = tuple(product(RESERVES, get_args(Refusal)))


class ShedSeries(Series):
    """Refusals of an adaptive limit, which counts them itself and resets in the child of a fork."""

    __slots__ = ("_before", "_labels", "_limit", "places")

    def __init__(self, labels: tuple[str, str], places: ConcurrencyLimiter) -> None:
        super().__init__([0] * len(_KINDS), [(instruments.RULE_SHED, (*labels, *kind)) for kind in _KINDS])
        self._labels = labels
        self.places = places
        self._limit = places.limit
        self._before = _refused(self._limit)

    def look(self) -> None:
        """Update the counts."""
        limit = self.places.limit
        if limit is not self._limit:  # A fork created a new limit.
            self._limit, self._before = limit, [0] * len(_KINDS)
        now = _refused(limit)
        self.values[:] = [value + new - was for value, new, was in zip(self.values, now, self._before)]
        self._before = now

    def gauges(self) -> Iterable[Gauge]:
        """The current limit, and the unloaded duration of its requests."""
        yield instruments.RULE_ADAPTIVE_LIMIT, self._labels, self.places.limit.limit
        yield instruments.RULE_ADAPTIVE_BASE, self._labels, self.places.limit.base_s


def _refused(limit: AdaptiveLimit) -> list[int]:
    return [getattr(limit.levels[priority], reason) for priority, reason in _KINDS]
