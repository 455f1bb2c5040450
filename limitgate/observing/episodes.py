"""Logs of refusals that do not flood: a line when a bucket begins to refuse, and one when it has refused nothing for a while.

They are of level INFO: to refuse is what a limit is for. Between the two, refusals are counted: no clock is asked and no lock
taken for them, and nothing at all is done for what is admitted. So a thread looks once a second which episodes are over. It
lives only as long as there are any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from typing import Any

from limitgate.internal_errors import logged_errors
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children

log = logging.getLogger("limitgate.refusals")

QUIET = 10.0
"""Seconds without a refusal after which an episode is over, whether the bucket has admitted meanwhile or was left alone."""
MOST = 4096
"""Episodes that are known at a time; then the one that began first ends."""
MINUTE = 60.0
_PERIOD = 1.0
"""Seconds between two looks."""
_SHADOW = " (shadow: these requests pass)"
"""Mark of the refusals of a rule in shadow."""

_Line = tuple[str, tuple[object, ...], dict[str, Any]]
"""Text of a log line, its arguments, and its fields for programs."""


class _Episode:
    """Refusals by one bucket in a row."""

    __slots__ = ("began", "count", "grown_at", "is_shadow", "is_told", "last", "looked_at", "rule", "who")

    def __init__(self, rule: str | None, now: int, at: float, *, is_shadow: bool) -> None:
        self.rule = rule
        self.is_shadow = is_shadow
        """True if the requests pass all the same."""
        self.began = self.last = now
        self.count = 1
        self.looked_at = 0
        """The count when somebody looked last."""
        self.grown_at = at
        """When it was found to have grown, by the monotonic clock."""
        self.is_told = False
        """True if its beginning is logged, and so its end will be."""
        self.who = ""
        """Name of who is refused, with a blank before it; empty for none."""


class Episodes:
    """Episodes of one gate. Logs at most so many lines ``per_minute``, and then how many were left out.

    Times of refusals are Unix µs by the store's clock, ``clock`` is a monotonic one in seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        reset_in_children(self)
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """In the child of a fork: the episodes so far, and the thread, are the parent's."""
        self._open: OrderedDict[str, _Episode] = OrderedDict()
        self._told: deque[float] = deque(maxlen=self._per_minute)
        self._left_out, self._left_out_since = 0, 0.0
        self._lock = threading.Lock()
        self._is_watched = False

    def count(self, key: str, now: int) -> bool:
        """Count a refusal by the bucket of this key. False if an episode begins by it, see `begin`."""
        episode = self._open.get(key)
        if episode is None or now - episode.last > QUIET * 1e6:
            return False
        episode.count += 1
        episode.last = now
        return True

    def begin(
        self,
        key: str,
        rule: str | None,
        now: int,
        refusal_id: str | None,
        name: Callable[[], str],
        *,
        is_shadow: bool = False,
    ) -> None:
        """Begin an episode by its first refusal, which may have no id.

        ``name`` is asked for the name of who is refused, if that is logged. ``is_shadow`` is true if the request passes.
        """
        lines: list[_Line] = []
        with self._lock:
            if self.count(key, now):  # another thread was faster
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
            with logged_errors():  # users and callers are objects of the application's
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
        """Log a line of another kind, if one more may be logged."""
        with self._lock:
            is_told = self._may_log(self._clock())
            self._watch()
        if is_told and log.isEnabledFor(logging.INFO):
            _log([(text, values, facts)])

    def look(self) -> bool:
        """Log what has ended. False if there is nothing left that will."""
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
                text = "%s more lines about refusals were left out, as refusal_logs allows %d a minute"
                lines.append((text, (f"{self._left_out:,}", self._per_minute), {"left_out": self._left_out}))
                self._left_out = 0
            self._is_watched = bool(self._open or self._left_out)
            is_watched = self._is_watched
        _log(lines)
        return is_watched

    def _end(self, episode: _Episode, at: float, lines: list[_Line]) -> None:
        """Add the line about the end of an episode, if there is to be one."""
        if episode.is_told and self._may_log(at):
            seconds = round(max(0, episode.last - episode.began) / 1e6)
            facts = {"rule": episode.rule, "who": episode.who.strip(), "refused": episode.count, "seconds": seconds}
            facts["shadow"] = episode.is_shadow
            shown = episode.rule, episode.who, f"{episode.count:,}", seconds
            mark = _SHADOW if episode.is_shadow else ""
            lines.append((f"rule %s has ceased to refuse%s: refused %s in %d s{mark}", shown, facts))

    def _may_log(self, at: float) -> bool:
        """True if one more line may be logged; else it is counted as left out."""
        told = self._told
        if len(told) < self._per_minute or at - told[0] >= MINUTE:
            told.append(at)
            return True
        if not self._left_out:
            self._left_out_since = at
        self._left_out += 1
        return False

    def _watch(self) -> None:
        """Have a thread look until all episodes are over."""
        if not self._is_watched:
            with suppress(RuntimeError):  # no thread can be started now: the next episode tries again
                threading.Thread(
                    target=Context().run, args=[self._keep_looking], name="limitgate-refusals", daemon=True
                ).start()
                self._is_watched = True

    def _keep_looking(self) -> None:
        is_watched = True
        while is_watched:
            time.sleep(_PERIOD)
            with logged_errors():
                is_watched = self.look()


def _log(lines: list[_Line]) -> None:
    for text, values, facts in lines:
        with logged_errors():  # a handler of the application's may raise
            log.info(text, *values, extra=facts)
