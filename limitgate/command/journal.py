"""The journal: who banned, pardoned and reset whom, when and why. A text in the store, next to the state that it is about.

It names clients by masked names and by keys of the store, so that nothing in Redis tells who a client is.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from limitgate.errors import StoreError
from limitgate.observing.audit import somebody
from limitgate.stores.base import ConfigRequest, SyncConfigStore

MOST_BANS, MOST_EVENTS = 2_000, 1_000
"""Bans and events that are kept; of bans those that end first go, of events the oldest."""
T = TypeVar("T")
_TRIES = 20
"""Times that a change is tried again where somebody else was faster."""
_LONGEST = 500
"""Characters of a name or a reason."""


class Ban(NamedTuple):
    """A ban that somebody set by the command."""

    key: str
    """Name for people, with who is banned masked in it."""
    keys: Sequence[str]
    """Keys in the store."""
    until: float
    """Unix time in seconds, infinite for one without an end."""
    reason: str | None
    by: str

    def retry_after(self, now: float) -> float:
        """Seconds that it has left."""
        return max(0.0, self.until - now)


class Event(NamedTuple):
    """Something that was changed by the command."""

    at: float
    """Unix time in seconds."""
    by: str
    action: str
    key: str
    reason: str | None


class Journal:
    """Bans in force and events of one key prefix. Methods raise `StoreError` where the store does not answer in time."""

    def __init__(self, store: SyncConfigStore, key_prefix: str, timeout: float, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._key = f"{key_prefix}:journal"
        self._timeout = timeout
        self._clock = clock

    def bans(self) -> list[Ban]:
        """Bans that have not ended; the next one to end first."""
        return sorted(self._read()[1].values(), key=lambda ban: ban.until)

    def events(self) -> list[Event]:
        """The latest changes, newest first."""
        return [*reversed(self._read()[2])]

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
        """Note a change that was made; one that ``bans`` is for so many seconds, or for ever. A pardon takes the ban out.

        Raises `StoreError` where it cannot be noted, which says that the change was made all the same.
        """
        try:
            self._note(action, key, keys, reason, seconds, bans=bans)
        except StoreError as error:
            message = f"the {action} of {key} is in effect, but the journal does not tell of it: {error}"
            raise StoreError(message, error.fault) from error

    def _note(
        self, action: str, key: str, keys: Sequence[str], reason: str | None, seconds: float | None, *, bans: bool
    ) -> None:
        now, by = self._clock(), somebody()
        reason = reason[:_LONGEST] if reason else None
        for _ in range(_TRIES):
            version, listed, events = self._read()
            if bans:
                until = math.inf if seconds is None else now + seconds
                known = listed.get(keys[0])
                listed[keys[0]] = Ban(key[:_LONGEST], keys, max(until, known.until) if known else until, reason, by)
            elif action == "pardon":
                for each in keys:
                    listed.pop(each, None)
            events.append(Event(now, by, action, key[:_LONGEST], reason))
            if self._write(version, listed, events):
                return
        raise StoreError("the journal is being changed by others all the time, expected to be able to write to it", "reply")

    def _read(self) -> tuple[int, dict[str, Ban], list[Event]]:
        stored = self._store.config(ConfigRequest(self._key), self._timeout)
        kept: Any = None
        with suppress(ValueError, RecursionError):
            kept = json.loads(stored.text or "{}")
        now = self._clock()
        listed = {ban.keys[0]: ban for ban in _entries(kept, "bans", _ban) if ban.until > now}
        return stored.version, listed, _entries(kept, "events", _event)

    def _write(self, version: int, listed: dict[str, Ban], events: list[Event]) -> bool:
        bans = sorted(listed.values(), key=lambda ban: -ban.until)[:MOST_BANS]
        kept = {
            "bans": [ban._replace(until=None) if ban.until == math.inf else ban for ban in bans],  # type: ignore[arg-type]
            "events": events[-MOST_EVENTS:],
        }
        text = json.dumps(kept, ensure_ascii=False)
        stored = self._store.config(ConfigRequest(self._key, text, version), self._timeout)
        return stored.text == text


def _entries(kept: Any, name: str, entry: Callable[[Any], T]) -> list[T]:
    """Entries under a name of what is kept, less those that are none: nobody repairs them at night, and bans have to work."""
    found: list[T] = []
    listed = kept.get(name) if isinstance(kept, dict) else None
    for each in listed if isinstance(listed, list) else ():
        with suppress(TypeError, ValueError, OverflowError, OSError):
            found.append(entry(each))
    return found


def _ban(kept: Any) -> Ban:
    """A ban as it is kept; a later version may have added to it."""
    key, (first, *more), until, reason, by = kept[:5]
    keys = [*map(_text, (first, *more))]
    return Ban(_text(key), keys, _number(math.inf if until is None else until), reason and _text(reason), _text(by))


def _event(kept: Any) -> Event:
    at, by, action, key, reason = kept[:5]
    datetime.fromtimestamp(_number(at), UTC)  # a time that can be shown
    return Event(_number(at), _text(by), _text(action), _text(key), reason and _text(reason))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is no text")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r:.80} is no number")
    return value
