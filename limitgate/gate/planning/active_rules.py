"""Rules in force: all that belongs to one rule set. A request takes them once, and ends under them whatever comes meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

from limitgate.gate.planning.planner import Planner
from limitgate.http.rate_fields import Fields, Style, names_of, rate_fields
from limitgate.limits.decision import Decision
from limitgate.observing.counts import Counts
from limitgate.observing.exporter import exporter
from limitgate.stores.memory import system_clock


class ReloadStats:
    """Number of times that rule sets were loaded, and how that ended the last time; the load at start is the first."""

    def __init__(self) -> None:
        self.ok = 1
        """Loads of rules that then were in force."""
        self.rejected = 0
        """Loads of rules that could not be used, so that those in force stayed."""
        self.was_ok = True
        """True if the last load was of rules that then were in force."""
        self.at = time.time()
        """Unix time of the last load, in seconds."""

    def note(self, *, is_ok: bool) -> None:
        """Count a load."""
        self.ok += is_ok
        self.rejected += not is_ok
        self.was_ok, self.at = is_ok, time.time()
        exporter.wake()


class ActiveRules:
    """What all requests under one rule set of one gate have in common. Another rule set has another object, whole at once.

    ``timeout`` is the seconds that a request may wait for the store, and ``is_measured`` is true if the store says for how long
    it was silent. ``counts`` are the figures of its gate, None without observers. ``clock`` gives Unix µs where no store is
    asked.
    """

    def __init__(
        self,
        planner: Planner,
        header_styles: tuple[Style, ...],
        *,
        timeout: float,
        is_measured: bool,
        counts: Counts | None = None,
        clock: Callable[[], int] = system_clock,
    ) -> None:
        self.planner = planner
        self.rule_set = planner.rule_set
        self.rule_names = planner.names
        """Names of all rules, of whatever tier."""
        self.header_styles = header_styles
        self.has_commonest_style = header_styles == ("x-ratelimit",)
        """True if ASGI's form of the fields can be made at once."""
        initials = [name[0] for name in names_of(header_styles)]
        self.initials = frozenset([*map(str.lower, initials), *map(str.upper, initials)])
        """How the names of rate fields begin, by which it is seen that an application may have set one itself."""
        self.raw_initials = frozenset(map(str.encode, self.initials))
        self.timeout = timeout
        self.is_measured = is_measured
        self.counts = counts
        self.clock = clock

    def fields(self, decision: Decision, now: int) -> Fields:
        """Rate fields of a decision at ``now`` by the store's clock, Unix µs."""
        return rate_fields(self.header_styles, decision, now, self.rule_names)
