"""What became of an attack, and what must hold of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.faults.overload.apps import BURST, PER_SECOND

IN_A_ROW = 10
"""Honest requests that have to get their answers, one after the other, for a service to count as recovered."""
AT_ONCE = 1.0
"""Seconds that such an answer may take."""
BACK_WITHIN = 2.25
"""Seconds until a service is as it was."""
LINES = 15
"""Lines that a situation may bring into the log, whatever the number of requests."""
ANSWERED = 0.5
"""Share of the honest requests that get an answer at all, at least."""


class Honest(NamedTuple):
    """One request of somebody who keeps to the limits. Times are monotonic, in seconds."""

    sent: float
    heard: float
    status: int
    """0 where no answer came."""
    degraded: bool

    @property
    def seconds(self) -> float:
        return self.heard - self.sent

    @property
    def is_fine(self) -> bool:
        """Whether it got at once what it asked for, by the store."""
        return self.status == 200 and not self.degraded and self.seconds < AT_ONCE


@dataclass(frozen=True)
class Demand:
    """What may become of a situation."""

    bursts: int = 1
    """How many bursts of the limit of logins may pass: 2 where this process has to limit by itself for a while."""
    degrades: bool = False
    """Whether the store cannot be asked, so that others than the store decide."""
    unbounded: bool = False
    """Whether everybody may pass, as the store is away and ``on_error`` is ``open``."""
    refuses: bool = False
    """Whether the honest may get a 503, as the store is away and ``on_error`` is ``closed``."""


@dataclass
class Outcome:
    """What was seen."""

    situation: str
    server: str
    door: str
    policy: str = "open"
    store: str = "single"
    demand: Demand = field(default_factory=Demand)
    logins: Mapping[int, int] = field(default_factory=dict)
    """How many guesses got each status."""
    honest: list[Honest] = field(default_factory=list)
    degraded: int = 0
    """Answers that say that the store had failed."""
    outages: int = 0
    """How often the store was taken for broken."""
    began: float = 0.0
    over: float = 0.0
    """When the attack, and whatever was wrong, was over."""
    lines: int = 0
    further: list[str] = field(default_factory=list)
    """What else was not as it has to be."""

    @property
    def passed(self) -> int:
        """Guesses that were answered."""
        return sum(count for status, count in self.logins.items() if status not in (0, 429, 503))

    @property
    def bound(self) -> int:
        """Guesses that may be answered."""
        return math.floor(self.demand.bursts * (BURST + (self.over - self.began) * PER_SECOND))

    def refused(self, status: int) -> int:
        """Honest requests that got a status."""
        return sum(each.status == status for each in self.honest)

    def percentile(self, percent: int) -> float:
        """Seconds that so many of the honest requests took at most that were sent during the attack."""
        times = sorted(each.seconds for each in self.honest if self.began <= each.sent <= self.over)
        return times[min(len(times) - 1, len(times) * percent // 100)] if times else math.nan

    @property
    def recovery(self) -> float:
        """Seconds from the end of the attack until honest requests were fine again; ``inf`` if never, nan if there are none."""
        after = sorted(each for each in self.honest if each.sent >= self.over)
        if not after:
            return math.nan
        for place in range(len(after) - IN_A_ROW + 1):
            if all(each.is_fine for each in after[place : place + IN_A_ROW]):
                return after[place].heard - self.over
        return math.inf

    def complaints(self) -> list[str]:
        """What was not as it has to be."""
        return [*self._of_guesses(), *self._of_honest(), *self._of_store(), *self.further]

    def _of_guesses(self) -> list[str]:
        found = []
        if self.passed > self.bound and not self.demand.unbounded:
            found.append(f"{self.passed} logins answered, bound {self.bound}")
        if (failed := self.logins.get(503, 0)) and not self.demand.refuses:
            found.append(f"{failed} logins got 503, though the store was there")
        if not self.passed + self.logins.get(429, 0) + self.logins.get(503, 0):
            found.append("no login was tried, so this is no attack")
        return found

    def _of_honest(self) -> list[str]:
        found = []
        if refused := self.refused(429):
            found.append(f"{refused} of {len(self.honest)} honest requests refused")
        if (failed := self.refused(503)) and not self.demand.refuses:
            found.append(f"{failed} of {len(self.honest)} honest requests got 503")
        if self.refused(0) > (1 - ANSWERED) * len(self.honest):
            found.append(f"{self.refused(0)} of {len(self.honest)} honest requests got no answer")
        if self.recovery > BACK_WITHIN:
            found.append(f"recovered after {self.recovery:.1f} s")
        return found

    def _of_store(self) -> list[str]:
        found = []
        if self.degraded and not self.demand.degrades:
            found.append(f"{self.degraded} decisions without the store, which was there")
        if self.outages and not self.demand.degrades:
            found.append(f"the store was taken for broken {self.outages} times")
        if self.lines > LINES:
            found.append(f"{self.lines} lines in the log")
        return found

    def row(self) -> str:
        """The line of a table."""
        cells = [self.situation, self.server, self.door, self.policy, self.store]
        cells += [
            f"{self.passed} of {self.bound}",
            str(self.logins.get(429, 0)),
            str(self.refused(429)),
            str(self.refused(503)),
        ]
        cells += [f"{1000 * self.percentile(50):.0f}", f"{1000 * self.percentile(99):.0f}", str(self.degraded)]
        cells += [f"{self.recovery:.2f}", str(self.lines), "; ".join(self.complaints())]
        return f"| {' | '.join(cells)} |"


COLUMNS = (
    "situation",
    "server",
    "door",
    "policy",
    "store",
    "logins answered",
    "login 429s",
    "honest 429",
    "honest 503",
    "p50 ms",
    "p99 ms",
    "degraded",
    "back after s",
    "lines",
    "not as it has to be",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
