"""What is measured, and what is worked out from it. Pure: no clock, no connection.

The machine's speed drifts by half within minutes, so contenders take turns in many short rounds. A figure in µs is the median
over the rounds. A ratio is worked out within each round, where both sides met the same machine, and is the median of those.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

Candidate = TypeVar("Candidate")


class Turn(NamedTuple):
    """What a request cost on average in one turn, in µs."""

    client: float
    """CPU of the process that handles requests."""
    server: float = 0.0
    """CPU of Redis."""
    inside: float = 0.0
    """Time that Redis was inside of commands."""


@dataclass(frozen=True)
class Taken:
    """The turns of one contender, one for each round."""

    turns: Sequence[Turn]
    commands: float = 0.0
    """Redis commands per request."""


@dataclass(frozen=True)
class Failed:
    """A contender that did not answer as it should."""

    error: str
    """The error's name, or the status it answered with."""


Outcome = Taken | Failed
Outcomes = Mapping[str, Outcome]
"""By contender; all of the same rounds."""


def over(outcomes: Outcomes, name: str, bare: str | None) -> list[float] | None:
    """What ``name`` cost over ``bare`` (over nothing if None), round by round, in µs of CPU. None if one of them failed."""
    taken = outcomes.get(name)
    floor = outcomes.get(bare) if bare else Taken([Turn(0.0)] * (len(taken.turns) if isinstance(taken, Taken) else 0))
    if not isinstance(taken, Taken) or not isinstance(floor, Taken):
        return None
    return [turn.client - base.client for turn, base in zip(taken.turns, floor.turns)]


def server(outcomes: Outcomes, name: str) -> list[float] | None:
    """What ``name`` cost in Redis, round by round, in µs of CPU. None if it failed."""
    taken = outcomes.get(name)
    return [turn.server for turn in taken.turns] if isinstance(taken, Taken) else None


def ratio(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> float | None:
    """The median of the ratios within each round. None if there is nothing to compare."""
    return statistics.median(one / other for one, other in zip(ours, theirs)) if ours and theirs else None


def best(candidates: Mapping[Candidate, Sequence[float] | None]) -> Candidate | None:
    """The candidate with the lowest median. None if all failed."""
    medians = {name: statistics.median(figures) for name, figures in candidates.items() if figures}
    return min(medians, key=medians.__getitem__, default=None)


@dataclass(frozen=True)
class Bar:
    """A mark that was set beforehand: what has to be reached, and what is aimed at."""

    what: str
    must: float
    aim: float
    measured: float | None
    """None if it was not measured."""
    note: str = ""
    higher_is_better: bool = False

    @property
    def verdict(self) -> str:
        """Whether it was reached."""
        if self.measured is None:
            return "not measured"
        if self._reaches(self.aim):
            return "aim reached"
        return "reached" if self._reaches(self.must) else "missed"

    def _reaches(self, mark: float) -> bool:
        measured = self.measured or 0.0
        return measured >= mark if self.higher_is_better else measured <= mark
