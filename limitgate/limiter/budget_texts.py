"""Texts about budgets, which processes share in the store.

The text of a key has limits, the provider's last answer, and a row for each process that has waiting requests or reservations.
An index lists the keys. Texts and index are deleted after `LASTS` seconds without a change.
"""

# ruff: noqa: SLF001 - a part of the limiter

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from limitgate.gate.flow import ConfigFlow
from limitgate.limiter.holding import Hold, state_of as hold_state_of, without_hold
from limitgate.limiter.lining import waiting_in_line
from limitgate.limiter.operations import Operations
from limitgate.limiter.plans import Configuration
from limitgate.limits.decision import SECOND, Decision, decide
from limitgate.limits.limit import Limit, as_limit
from limitgate.limits.plan import Reading
from limitgate.stores.base import ConfigRequest, StoredConfig

LASTS = 86_400.0
MOST_KEYS = 1_000
"""Maximum of keys in the index. The least recently used key is dropped."""
MOST_ROWS = 500
"""Maximum of processes per key. The process that wrote least recently is dropped."""
PER_SECOND = 20
"""Maximum of writes per key and second, by all processes."""
LEAST_S = 1.0
"""Seconds between texts of a process about a key."""
_LONGEST = 600
_TRIES = 3
_BEATS = 4
"""A process counts as ended after this many missed texts."""
_INDEX_LASTS = 30 * LASTS


class Said(NamedTuple):
    kind: str
    period: int | None
    """Seconds."""
    limit: int | None
    remaining: int | None
    reset_after: float | None
    """Seconds after the report."""


class Row(NamedTuple):
    """A process' requests for a key. Times are by the store's clock."""

    at: int = 0
    """Unix µs."""
    lasts: float = 0.0
    """Seconds until the next text. If it is missing, the process counts as ended."""
    waiting: int = 0
    held: int = 0
    reserved: Sequence[int] = ()
    """Reservations for each limit."""
    tenants: Mapping[str, int] = {}
    """Number of waiting requests by masked tenant."""


class Report(NamedTuple):
    name: str
    """The key, shortened if it may be secret."""
    is_full: bool
    limits: Sequence[tuple[str, Limit]]
    """Units and limits."""
    row: Row
    said: Sequence[Said] = ()
    """The provider's latest limits."""


class Budget(NamedTuple):
    limits: Sequence[tuple[str, Limit]]
    said: Sequence[Said]
    said_at: int
    """Unix µs of the store."""
    rows: Mapping[str, Row]
    decision: Decision
    held: int
    """Reservations that the store holds, including those of ended processes."""
    in_line: int
    """Requests in the shared line, which has only the first request of each process and tenant."""
    now: int
    """Unix µs of the store."""

    @property
    def live(self) -> list[Row]:
        return [row for row in self.rows.values() if -row.lasts * SECOND < self.now - row.at < row.lasts * SECOND]

    @property
    def reserved_ago(self) -> float | None:
        """Seconds since the oldest reservation was reported; None without reservations."""
        reported = [row.at for row in self.live if any(row.reserved)]
        return max(0.0, (self.now - min(reported)) / SECOND) if reported else None

    @property
    def waiting(self) -> int:
        """Number of waiting requests.

        The shared line is exact. The rows also count other requests, but are up to a second old.
        """
        return max(self.in_line, sum([row.waiting for row in self.live])) if self.in_line else 0


def stated_limits(limiter: Operations, key: str) -> ConfigFlow[Configuration | None]:
    return limiter._reading(f"{key} told")


def stating_limits(limiter: Operations, key: str, limits: Sequence[Limit], kinds: Sequence[str]) -> ConfigFlow[Any]:
    return limiter._configuring(f"{key} told", limits, per_process=False, replace=True, kinds=kinds)


def reporting(limiter: Operations, key: str, process: str, report: Report) -> ConfigFlow[float]:
    """Keep a report; return the seconds until the next report. Raises `StoreError`."""
    # Reads the store's clock, because the clocks of processes differ.
    reading: Reading = yield limiter._plans.plan("peek", key, (report.limits[0][1],), 1), limiter._timeout
    wait, now, place = LEAST_S, reading.now, _place(limiter, key)
    for _ in range(_TRIES):
        stored: StoredConfig = yield ConfigRequest(place), limiter._timeout
        kept = _parsed(stored.text)
        rows = {name: row for name, row in _rows(kept).items() if now - row.at < LASTS * SECOND}
        wait = max(LEAST_S, len(rows) / PER_SECOND)
        rows[process] = report.row._replace(at=now, lasts=_BEATS * wait)
        latest = sorted(rows.items(), key=lambda each: -each[1].at)[:MOST_ROWS]
        text = json.dumps(
            {
                "name": report.name,
                "limits": [[kind, limit.given, limit.series] for kind, limit in report.limits],
                "said": [now, report.said] if report.said else kept.get("said"),
                "rows": dict(latest),
            },
            separators=(",", ":"),
        )
        if (yield ConfigRequest(place, text, stored.version, LASTS), limiter._timeout).text == text:
            break
    return wait


def listing(limiter: Operations, key: str, report: Report) -> ConfigFlow[None]:
    """Add a key to the index. Raises `StoreError`."""
    index, place = _index(limiter), _place(limiter, key)
    for _ in range(_TRIES):
        stored: StoredConfig = yield ConfigRequest(index), limiter._timeout
        keys = _parsed(stored.text)
        if place in [*keys][-MOST_KEYS // 2 :]:
            return
        keys.pop(place, None)
        keys[place] = [report.name[:_LONGEST], report.is_full]
        text = json.dumps(dict([*keys.items()][-MOST_KEYS:]), separators=(",", ":"))
        if (yield ConfigRequest(index, text, stored.version, _INDEX_LASTS), limiter._timeout).text == text:
            return


def names(limiter: Operations) -> ConfigFlow[list[str]]:
    """Return names in the store, unmasked ones first. Raises `StoreError`."""
    stored: StoredConfig = yield ConfigRequest(_index(limiter)), limiter._timeout
    full: list[str] = []
    other: list[str] = []
    for place, entry in _parsed(stored.text).items():
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str):
            text: StoredConfig = yield ConfigRequest(place), limiter._timeout
            if text.text:
                (full if entry[1] is True else other).append(entry[0])
    return [*full, *other]


def matching(wanted: str, listed: Iterable[str]) -> list[str]:
    """Return names that have all words of a text; ``*`` is a wildcard."""
    words = wanted.split()
    return [name for name in listed if all(any(fnmatchcase(part, word) for part in name.split()) for word in words)]


def state_of_budget(limiter: Operations, key: str) -> ConfigFlow[Budget | None]:
    stored: StoredConfig = yield ConfigRequest(_place(limiter, key)), limiter._timeout
    kept = _parsed(stored.text)
    limits = _limits(kept)
    if not limits:
        return None
    # Limits have their own costs, as in reservations, so that the plan finds their holds. Expired ones are refunded first.
    plan = limiter._plans.plan("peek", key, tuple([(limit, 1) for _, limit in limits]), 1)
    reading: Reading = yield Hold(plan.charges, 1).charging(plan), limiter._timeout
    said, said_at = _said(kept)
    decision = decide(plan, without_hold(reading))
    held = hold_state_of(reading).held
    in_line = yield from waiting_in_line(limiter, key)
    return Budget(limits, said, said_at, _rows(kept), decision, held, in_line, reading.now)


def _place(limiter: Operations, key: str) -> str:
    return limiter._plans.budget_key(key)


def _index(limiter: Operations) -> str:
    return limiter._plans.budgets_key


def _parsed(text: str | None) -> dict[str, Any]:
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _limits(kept: Mapping[str, Any]) -> list[tuple[str, Limit]]:
    try:
        return [(str(kind), as_limit(given).in_series(int(series))) for kind, given, series in kept["limits"]]
    except (KeyError, TypeError, ValueError):
        return []


def _rows(kept: Mapping[str, Any]) -> dict[str, Row]:
    rows = kept.get("rows")
    return {name: Row(*row) for name, row in rows.items() if _is_row(row)} if isinstance(rows, dict) else {}


def _is_row(row: Any) -> bool:
    match row:
        case [int(), int() | float(), int(), int(), [*reserved], dict(tenants)]:
            return all(isinstance(each, int) for each in (*reserved, *tenants.values()))
    return False


def _said(kept: Mapping[str, Any]) -> tuple[list[Said], int]:
    match kept.get("said"):
        case [int(at), [*said]]:
            return [Said(*each) for each in said if _is_said(each)], at
    return [], 0


def _is_said(said: Any) -> bool:
    match said:
        case [str(), int() | None, int() | None, int() | None, int() | float() | None]:
            return True
    return False
