"""A provider's limits in the store: ``Budget(limits="told")``."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from limitgate.limiter.budget_texts import stated_limits, stating_limits
from limitgate.limiter.calls import carry_out
from limitgate.limiter.plans import Configuration
from limitgate.limits.limit import Limit
from limitgate.llm.provider_fields import Kind, Told, ToldLimit, Window, limit_of
from limitgate.llm.windows import KINDS, Windows
from limitgate.outbound.throttle import Flow
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children

FRESH_S = 1.0
"""Seconds."""
MOST_KEYS = 1_000
"""The least recently used one is dropped."""


class _Known(NamedTuple):
    windows: Windows
    stated: Windows
    read_at: float


class ToldLimits:
    """Limits in force by key. A reported limit replaces the one of the same kind and period."""

    def __init__(self, given: Windows) -> None:
        self._given = given
        self._known: WeakKeyDictionary[Any, OrderedDict[str, _Known]] = WeakKeyDictionary()
        """Limits by limiter and key."""
        self._told: dict[tuple[str, Kind, int], ToldLimit] = {}
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self._lock = Lock()

    def read(self, limiter: Any, key: str) -> Flow:
        """Return the windows of a key, read every `FRESH_S` seconds. Raises `StoreError`."""
        known = self._of(limiter, key)
        if known is not None and monotonic() - known.read_at < FRESH_S:
            return known.windows
        found: Configuration | None = yield carry_out(limiter, stated_limits(limiter, key))
        listed = [] if found is None else list(zip(found.kinds, found.limits))
        return self._note(limiter, key, Windows(*[tuple([limit for of, limit in listed if of == kind]) for kind in KINDS]))

    def hear(self, limiter: Any, key: str, said: Told) -> Flow:
        """Keep a response's limits. Raises `StoreError`."""
        known = self._of(limiter, key)
        windows, stated = (self._given, Windows()) if known is None else (known.windows, known.stated)
        accepted = [
            {limit.period: limit for window in said.windows if (limit := self._accepted(key, kind, window, limits)) is not None}
            for kind, limits in windows.by_kind()
        ]
        if any(accepted):
            before = [{limit.period: limit for limit in limits} for limits in stated]
            stated = Windows(*[tuple({**old, **new}.values()) for old, new in zip(before, accepted)])
            yield carry_out(limiter, stating_limits(limiter, key, stated.every(), stated.kinds()))
            self._note(limiter, key, stated)

    def _accepted(self, key: str, kind: Kind, window: Window, limits: tuple[Limit, ...]) -> Limit | None:
        limit = limit_of(window) if window.kind == kind else None
        if limit is None:
            return None
        current = next((each for each in limits if each.period == limit.period), None)
        with self._lock:
            told = self._told.get((key, kind, limit.period))
            if told is None or told.current != current:
                told = self._told[key, kind, limit.period] = ToldLimit(current)
                if len(self._told) > 4 * MOST_KEYS:
                    del self._told[next(iter(self._told))]
            # If no limit has this period, it was computed.
            return limit if told.hear(limit, twice=current is None and bool(limits)) else None

    def _of(self, limiter: Any, key: str) -> _Known | None:
        with self._lock:
            of_limiter = self._known.get(limiter)
            return None if of_limiter is None else of_limiter.get(key)

    def _note(self, limiter: Any, key: str, stated: Windows) -> Windows:
        windows = Windows(*[_merged(given, new) for given, new in zip(self._given, stated)]).apart()
        with self._lock:
            known = self._known.setdefault(limiter, OrderedDict())
            known[key] = _Known(windows, stated, monotonic())
            known.move_to_end(key)
            if len(known) > MOST_KEYS:
                known.popitem(last=False)
        return windows


def _merged(given: tuple[Limit, ...], stated: tuple[Limit, ...]) -> tuple[Limit, ...]:
    by_period = {limit.period: limit for limit in stated}
    kept = [_counting(limit, by_period.pop(limit.period, limit)) for limit in given]
    return (*kept, *by_period.values())


def _counting(given: Limit, stated: Limit) -> Limit:
    if stated is given:
        return given
    options = {name: value for name, value in given.given.items() if name != "limit"}
    if given.burst != given.count and not given.warm_up:
        options["burst"] = given.burst
    return Limit(str(stated), **options)
