"""Limits that a provider states, kept in the store for every process: ``Budget(limits="told")``."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from limitgate.limits.limit import Limit, as_limit
from limitgate.llm.provider_fields import Kind, Told, ToldLimit, Window, limit_of
from limitgate.llm.windows import KINDS, Windows
from limitgate.outbound.budgets import Flow
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children

FRESH_S = 1.0
"""Seconds after which the store is asked again."""
MOST_KEYS = 1_000
"""Keys whose limits are remembered. The least recently used one is dropped."""


class _Known(NamedTuple):
    windows: Windows
    stated: Windows
    read_at: float


class ToldLimits:
    """The limits in force by key: those given, replaced by what the provider has stated for the same kind and period."""

    def __init__(self, given: Windows) -> None:
        self._given = given
        self._known: WeakKeyDictionary[Any, OrderedDict[str, _Known]] = WeakKeyDictionary()
        """By limiter and key."""
        self._told: dict[tuple[str, Kind, int], ToldLimit] = {}
        self._new: dict[tuple[str, Kind], Limit] = {}
        """Stated limits with a new period, until a second response repeats them."""
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Replace a lock that another thread of the parent may hold."""
        self._lock = Lock()

    def read(self, limiter: Any, key: str) -> Flow:
        """Return the windows of a key, read from the store at most every `FRESH_S` seconds. Raises `StoreError`."""
        known = self._of(limiter, key)
        if known is not None and monotonic() - known.read_at < FRESH_S:
            return known.windows
        found = []
        for kind in KINDS:
            stated = yield limiter.configuration(_name(key, kind))
            found.append(stated or ())
        return self._note(limiter, key, Windows(*found))

    def hear(self, limiter: Any, key: str, said: Told) -> Flow:
        """Keep the limits in a response in the store. Raises `StoreError`."""
        known = self._of(limiter, key)
        windows, stated = (self._given, Windows()) if known is None else (known.windows, known.stated)
        for kind in KINDS:
            said_of_kind = [window for window in said.windows if window.kind == kind]
            accepted = [self._accepted(key, kind, window, windows.of(kind)) for window in said_of_kind]
            new = {limit.period: limit for limit in accepted if limit is not None}
            if new:
                limits = tuple({**{limit.period: limit for limit in stated.of(kind)}, **new}.values())
                yield limiter.configure(_name(key, kind), *limits)
                stated = stated._replace(**{kind: limits})
                self._note(limiter, key, stated)

    def _accepted(self, key: str, kind: Kind, window: Window, limits: tuple[Limit, ...]) -> Limit | None:
        text = limit_of(window)
        if text is None:
            return None
        limit = as_limit(text)
        current = next((str(each) for each in limits if each.period == limit.period), None)
        with self._lock:
            if current is None and limits and self._new.get((key, kind)) != limit:
                # Its period was computed, so it needs a second answer.
                _remember(self._new, (key, kind), limit)
                return None
            told = self._told.get((key, kind, limit.period))
            if told is None or told.current != current:
                told = ToldLimit(current)
                _remember(self._told, (key, kind, limit.period), told)
            return limit if told.hear(text) else None

    def _of(self, limiter: Any, key: str) -> _Known | None:
        with self._lock:
            of_limiter = self._known.get(limiter)
            return None if of_limiter is None else of_limiter.get(key)

    def _note(self, limiter: Any, key: str, stated: Windows) -> Windows:
        windows = Windows(*[_merged(self._given.of(kind), stated.of(kind)) for kind in KINDS])
        with self._lock:
            known = self._known.setdefault(limiter, OrderedDict())
            known[key] = _Known(windows, stated, monotonic())
            known.move_to_end(key)
            if len(known) > MOST_KEYS:
                known.popitem(last=False)
        return windows


def _remember(known: dict[Any, Any], key: object, value: object) -> None:
    known[key] = value
    while len(known) > 4 * MOST_KEYS:
        del known[next(iter(known))]


def _name(key: str, kind: Kind) -> str:
    return f"{key} {kind}"


def _merged(given: tuple[Limit, ...], stated: tuple[Limit, ...]) -> tuple[Limit, ...]:
    """Replace limits by stated ones of the same period, and append the others."""
    by_period = {limit.period: limit for limit in stated}
    kept = [_counting(limit, by_period.pop(limit.period, limit)) for limit in given]
    return (*kept, *by_period.values())


def _counting(given: Limit, stated: Limit) -> Limit:
    """Return the given limit with the stated count. Its algorithm stays, and so does a burst of its own."""
    if stated is given:
        return given
    options = {name: value for name, value in given.given.items() if name != "limit"}
    if given.burst != given.count and not given.warm_up:
        options["burst"] = given.burst
    return Limit(str(stated), **options)
