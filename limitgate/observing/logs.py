"""Logs of refusals, without floods, and of changed limits and bans.

An episode of a bucket logs the first refusal, and a summary after a quiet period. The audit log has fields for JSON, at level
INFO.
"""

from __future__ import annotations

import getpass
import logging
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar

from limitgate.internal_errors import logged_errors
from limitgate.messages.text import printable
from limitgate.process.background import daemon
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children

T = TypeVar("T")

log: logging.Logger = logging.getLogger("limitgate.refusals")
audit_log: logging.Logger = logging.getLogger("limitgate.audit")

QUIET = 10.0
"""Seconds."""
MOST = 4096
"""Open episodes; the oldest ends early."""
MINUTE = 60.0
_PERIOD = 1.0
_SHADOW = " (shadow: these requests pass)"

_Line = tuple[str, tuple[object, ...], dict[str, Any]]


class _Episode:
    __slots__ = ("began", "count", "grown_at", "is_shadow", "is_told", "last", "looked_at", "rule", "who")

    def __init__(self, rule: str | None, now: int, at: float, *, is_shadow: bool) -> None:
        self.rule = rule
        self.is_shadow = is_shadow
        self.began = self.last = now
        self.count = 1
        self.looked_at = 0
        self.grown_at = at
        self.is_told = False
        """True if the beginning was logged."""
        self.who = ""


class Episodes:
    """Episodes of one gate: at most ``per_minute`` lines, then the number of suppressed ones.

    Refusals have the store's time in Unix µs; ``clock`` is monotonic, in seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        reset_in_children(self)
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        self._open: OrderedDict[str, _Episode] = OrderedDict()
        self._told: deque[float] = deque(maxlen=self._per_minute)
        self._left_out, self._left_out_since = 0, 0.0
        self._lock = threading.Lock()
        self._is_watched = False

    def count(self, key: str, now: int) -> bool:
        """Count a refusal. Return False if it begins an episode, see `begin`."""
        episode = self._open.get(key)
        if episode is None or now - episode.last > QUIET * 1e6:
            return False
        episode.count += 1
        episode.last = now
        return True

    def begin(
        self, key: str, rule: str | None, now: int, refusal_id: str | None, name: Callable[[], str], *, is_shadow: bool = False
    ) -> None:
        """Begin an episode. With ``is_shadow``, the request passes."""
        lines: list[_Line] = []
        with self._lock:
            if self.count(key, now):  # Another thread was faster.
                return
            at = self._clock()
            before = self._open.pop(key, None)
            if before is not None:
                self._end(before, at, lines)
            while len(self._open) >= MOST:
                self._end(self._open.popitem(last=False)[1], at, lines)
            self._open[key] = episode = _Episode(rule, now, at, is_shadow=is_shadow)
            is_told = self._may_log(at)
            self._watch()
        if is_told:
            with logged_errors():  # Users and callers are objects of the application.
                who = name()
                episode.who = f" {who}" if who else ""
            facts = {"rule": rule, "who": episode.who.strip(), "refusal_id": refusal_id, "shadow": is_shadow}
            text, shown = f"rule %s begins to refuse%s{_SHADOW if is_shadow else ''}", [rule, episode.who]
            if refusal_id:
                text, shown = f"{text} (refusal %s)", [*shown, refusal_id]
            lines.append((text, tuple(shown), facts))
            episode.is_told = True
        _log(lines)

    def tell(self, text: str, values: tuple[object, ...], facts: dict[str, Any]) -> None:
        with self._lock:
            is_told = self._may_log(self._clock())
            self._watch()
        if is_told and log.isEnabledFor(logging.INFO):
            _log([(text, values, facts)])

    def look(self) -> bool:
        """Log ended episodes. False if none are left."""
        lines: list[_Line] = []
        with self._lock:
            at = self._clock()
            for key, episode in list(self._open.items()):
                if episode.count != episode.looked_at:
                    episode.looked_at, episode.grown_at = episode.count, at
                elif at - episode.grown_at >= QUIET:
                    del self._open[key]
                    self._end(episode, at, lines)
            if self._left_out and at - self._left_out_since >= MINUTE:
                text = "%s more lines about refusals were left out, because refusal_logs allows %d a minute"
                lines.append((text, (f"{self._left_out:,}", self._per_minute), {"left_out": self._left_out}))
                self._left_out = 0
            self._is_watched = bool(self._open or self._left_out)
            is_watched = self._is_watched
        _log(lines)
        return is_watched

    def _end(self, episode: _Episode, at: float, lines: list[_Line]) -> None:
        if episode.is_told and self._may_log(at):
            seconds = round(max(0, episode.last - episode.began) / 1e6)
            facts = {"rule": episode.rule, "who": episode.who.strip(), "refused": episode.count, "seconds": seconds}
            facts["shadow"] = episode.is_shadow
            shown = episode.rule, episode.who, f"{episode.count:,}", seconds
            mark = _SHADOW if episode.is_shadow else ""
            lines.append((f"rule %s has ceased to refuse%s: refused %s in %d s{mark}", shown, facts))

    def _may_log(self, at: float) -> bool:
        told = self._told
        if len(told) < self._per_minute or at - told[0] >= MINUTE:
            told.append(at)
            return True
        if not self._left_out:
            self._left_out_since = at
        self._left_out += 1
        return False

    def _watch(self) -> None:
        if not self._is_watched:
            with suppress(RuntimeError):  # If no thread can start now, the next episode tries again.
                daemon("refusals", self._keep_looking)
                self._is_watched = True

    def _keep_looking(self) -> None:
        is_watched = True
        while is_watched:
            time.sleep(_PERIOD)
            with logged_errors():
                is_watched = self.look()


def _log(lines: list[_Line]) -> None:
    for text, values, facts in lines:
        with logged_errors():  # The application's log handler may raise.
            log.info(text, *values, extra=facts)


def audited(
    flow: Generator[Any, Any, T], action: str, name: Callable[[], str], reason: str | None, **facts: object
) -> Generator[Any, Any, T]:
    """Run a flow, then log its ``action`` on ``name``."""
    result = yield from flow
    if audit_log.isEnabledFor(logging.INFO):
        target, by = name(), somebody()
        why = f": {printable(reason)}" if reason else ""
        audit_log.info("%s %s by %s%s", action, target, by, why, extra=_fields(action, target, by, reason, facts))
    return result


def rules_changed(source: str, changes: str) -> None:
    fields = _fields("rules", source, None, None, {"changes": changes})
    audit_log.info("rules read again from %s: %s", source, changes, extra=fields)


def somebody() -> str:
    user = "unknown"
    with suppress(OSError, KeyError):
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


def _fields(action: str, target: str, by: str | None, reason: str | None, facts: dict[str, object]) -> dict[str, object]:
    return {"action": action, "target": target, "by": by, "reason": reason, **facts}
