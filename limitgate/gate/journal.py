"""The journal of bans, pardons and resets in the store. Clients are masked by ``names``."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from limitgate.errors import StoreError
from limitgate.gate.flow import ConfigFlow, run
from limitgate.observing.logs import somebody
from limitgate.stores.base import ConfigRequest, StoredConfig, SyncConfigStore

MOST_BANS, MOST_EVENTS = 2_000, 1_000
"""Maximums. Bans by rules are dropped first, in order of their end. The oldest events are dropped first."""
_BY_RULE = "rule "
T = TypeVar("T")
_TRIES = 20
_DIGEST = re.compile(r"[0-9a-f]{32}")
_LONGEST = 500
"""Characters."""


class Ban(NamedTuple):
    """A ban set by the command or by a rule with a ``ban``."""

    key: str
    keys: Sequence[str]
    until: float
    """Unix seconds; infinite if permanent."""
    reason: str | None
    by: str

    @classmethod
    def by_rule(cls, rule: str, who: str, key: str, until: float, reason: str) -> Ban:
        return cls(f"{rule} {who}".rstrip()[:_LONGEST], (key,), until, reason, f"{_BY_RULE}{rule}")

    @property
    def digest(self) -> str | None:
        """The digest in the bucket's key, as in ids of refusals."""
        found = _DIGEST.search(self.keys[0])
        return found and found[0]

    @property
    def is_by_rule(self) -> bool:
        return self.by.startswith(_BY_RULE)

    def retry_after(self, now: float) -> float:
        return max(0.0, self.until - now)

    def fields(self, now: float) -> dict[str, Any]:
        """For JSON. ``retry_after`` is None if permanent."""
        left = self.retry_after(now)
        return {"key": self.key, "retry_after": None if math.isinf(left) else left, "reason": self.reason, "by": self.by}


class Event(NamedTuple):
    at: float
    """Unix seconds."""
    by: str
    action: str
    key: str
    reason: str | None


class JournalFlows:
    def __init__(self, key_prefix: str, timeout: float, clock: Callable[[], float] = time.time) -> None:
        self._key = f"{key_prefix}:journal"
        self._timeout = timeout
        self._clock = clock

    def noting(
        self,
        action: str,
        key: str,
        keys: Sequence[str],
        reason: str | None,
        seconds: float | None = None,
        *,
        bans: bool = False,
        by: str | None = None,
    ) -> ConfigFlow[None]:
        now, by = self._clock(), by or somebody()
        reason = reason[:_LONGEST] if reason else None

        def change(listed: dict[str, Ban], events: list[Event]) -> None:
            if bans:
                until = math.inf if seconds is None else now + seconds
                _list(listed, Ban(key[:_LONGEST], keys, until, reason, by))
            elif action == "pardon":
                _take_out(listed, keys)
            events.append(Event(now, by, action, key[:_LONGEST], reason))

        return self._changing(change)

    def noting_bans(self, bans: Sequence[Ban]) -> ConfigFlow[None]:
        def change(listed: dict[str, Ban], _: list[Event]) -> None:
            for ban in bans:
                _list(listed, ban)

        return self._changing(change)

    def listing(self) -> ConfigFlow[list[Ban]]:
        _, listed, _ = yield from self._reading()
        return sorted(listed.values(), key=lambda ban: ban.until)

    def removing(self, keys: Sequence[str]) -> ConfigFlow[None]:
        _, listed, _ = yield from self._reading()
        if not listed.keys().isdisjoint(keys):
            yield from self._changing(lambda listed, _: _take_out(listed, keys))

    def _changing(self, change: Callable[[dict[str, Ban], list[Event]], None]) -> ConfigFlow[None]:
        for _ in range(_TRIES):
            version, listed, events = yield from self._reading()
            change(listed, events)
            if (yield from self._writing(version, listed, events)):
                return
        raise StoreError(f"the journal changed before each of {_TRIES} writes, expected no concurrent change; retry", "reply")

    def _reading(self) -> ConfigFlow[tuple[int, dict[str, Ban], list[Event]]]:
        stored: StoredConfig = yield ConfigRequest(self._key), self._timeout
        kept: Any = None
        with suppress(ValueError, RecursionError):
            kept = json.loads(stored.text or "{}")
        now = self._clock()
        listed = {ban.keys[0]: ban for ban in _entries(kept, "bans", _ban) if ban.until > now}
        return stored.version, listed, _entries(kept, "events", _event)

    def _writing(self, version: int, listed: dict[str, Ban], events: list[Event]) -> ConfigFlow[bool]:
        bans = sorted(listed.values(), key=lambda ban: (ban.is_by_rule, -ban.until))[:MOST_BANS]
        kept = {
            "bans": [ban._replace(until=None) if ban.until == math.inf else ban for ban in bans],  # type: ignore[arg-type]
            "events": events[-MOST_EVENTS:],
        }
        text = json.dumps(kept, ensure_ascii=False)
        stored: StoredConfig = yield ConfigRequest(self._key, text, version), self._timeout
        return stored.text == text


class Journal(JournalFlows):
    """The journal of one key prefix. Methods raise `StoreError` if the store doesn't answer."""

    def __init__(self, store: SyncConfigStore, key_prefix: str, timeout: float, clock: Callable[[], float] = time.time) -> None:
        super().__init__(key_prefix, timeout, clock)
        self._store = store

    def bans(self) -> list[Ban]:
        return run(self._store, self.listing())

    def events(self) -> list[Event]:
        return [*reversed(run(self._store, self._reading())[2])]

    def remove(self, keys: Sequence[str]) -> None:
        run(self._store, self.removing(keys))

    def note(
        self,
        action: str,
        key: str,
        keys: Sequence[str],
        reason: str | None,
        seconds: float | None = None,
        *,
        bans: bool = False,
    ) -> None:
        """Record a change. With ``bans``, it is a ban for ``seconds``, or permanent. A pardon removes the ban.

        The change itself doesn't depend on the journal.
        """
        try:
            run(self._store, self.noting(action, key, keys, reason, seconds, bans=bans))
        except StoreError as error:
            message = f"the {action} of {key} is in effect, but is not in the journal: {error}"
            raise StoreError(message, error.fault) from error


def _list(listed: dict[str, Ban], ban: Ban) -> None:
    known = listed.get(ban.keys[0])
    listed[ban.keys[0]] = ban._replace(until=max(ban.until, known.until)) if known else ban


def _take_out(listed: dict[str, Ban], keys: Sequence[str]) -> None:
    for key in keys:
        listed.pop(key, None)


def _entries(kept: Any, name: str, entry: Callable[[Any], T]) -> list[T]:
    """Read entries. Skip invalid entries, because a damaged journal must not block bans."""
    found: list[T] = []
    listed = kept.get(name) if isinstance(kept, dict) else None
    for each in listed if isinstance(listed, list) else ():
        with suppress(TypeError, ValueError, OverflowError, OSError):
            found.append(entry(each))
    return found


def _ban(kept: Any) -> Ban:
    key, (first, *more), until, reason, by = kept[:5]
    keys = [*map(_text, (first, *more))]
    return Ban(_text(key), keys, _number(math.inf if until is None else until), reason and _text(reason), _text(by))


def _event(kept: Any) -> Event:
    at, by, action, key, reason = kept[:5]
    # Raises an error if the time cannot be displayed.
    datetime.fromtimestamp(_number(at), UTC)
    return Event(_number(at), _text(by), _text(action), _text(key), reason and _text(reason))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not text")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r:.80} is not a number")
    return value
