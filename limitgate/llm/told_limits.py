"""Limits that a provider states, kept in the store for every process: ``Budget(limits="told")``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from threading import Lock
from typing import Any, NamedTuple

from limitgate.limits.limit import Limit, as_limit
from limitgate.llm.provider_fields import Kind, Told, ToldLimit, limit_of
from limitgate.llm.windows import KINDS, Windows
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children

FRESH_S = 1.0
"""Seconds after which the store is asked again."""
MOST_KEYS = 1_000
"""Keys whose limits are remembered. The least recently used one is dropped."""

Flow = Generator[Any, Any, Any]


class _Known(NamedTuple):
    windows: Windows
    read_at: float


class ToldLimits:
    """The limits in force by key: those given, replaced by what the provider has stated for the same kind and period."""

    def __init__(self, given: Windows) -> None:
        self._given = given
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._told: dict[tuple[str, Kind, int], ToldLimit] = {}
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Replace a lock that another thread of the parent may hold."""
        self._lock = Lock()

    def read(self, limiter: Any, key: str) -> Flow:
        """Return the windows of a key, read from the store at most every `FRESH_S` seconds. Raises `StoreError`."""
        known = self._known.get(key)
        if known is not None and monotonic() - known.read_at < FRESH_S:
            return known.windows
        stated = {}
        for kind in KINDS:
            stated[kind] = (yield limiter.configuration(_name(key, kind))) or ()
        windows = Windows(*[_merged(self._given.of(kind), stated[kind]) for kind in KINDS])
        self._note(key, windows)
        return windows

    def hear(self, limiter: Any, key: str, said: Told) -> Flow:
        """Keep the limits in a response in the store. Raises `StoreError`."""
        known = self._known.get(key)
        windows = self._given if known is None else known.windows
        for kind in KINDS:
            stated = [
                limit
                for window in said.windows
                if window.kind == kind and (limit := self._accepted(key, kind, window, windows))
            ]
            if stated:
                limits = _merged(windows.of(kind), stated)
                yield limiter.configure(_name(key, kind), *limits)
                windows = windows._replace(**{kind: limits})
                self._note(key, windows)

    def _accepted(self, key: str, kind: Kind, window: Any, windows: Windows) -> Limit | None:
        text = limit_of(window)
        if text is None:
            return None
        limit = as_limit(text)
        current = next((str(each) for each in windows.of(kind) if each.period == limit.period), None)
        with self._lock:
            told = self._told.get((key, kind, limit.period))
            if told is None or told.current != current:
                told = self._told[key, kind, limit.period] = ToldLimit(current)
                while len(self._told) > 4 * MOST_KEYS:
                    del self._told[next(iter(self._told))]
            return limit if told.hear(text) else None

    def _note(self, key: str, windows: Windows) -> None:
        with self._lock:
            self._known[key] = _Known(windows, monotonic())
            self._known.move_to_end(key)
            if len(self._known) > MOST_KEYS:
                self._known.popitem(last=False)


def _name(key: str, kind: Kind) -> str:
    return f"{key} {kind}"


def _merged(limits: tuple[Limit, ...], stated: Any) -> tuple[Limit, ...]:
    """Replace limits by stated ones of the same period, and append the others."""
    by_period = {limit.period: limit for limit in stated}
    kept = [by_period.pop(limit.period, limit) for limit in limits]
    return (*kept, *by_period.values())
