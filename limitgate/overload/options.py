"""`Adaptive`: the bounds of a limit that adapts to load, as users set them; and with what else belongs to it, `Terms`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import NamedTuple, TypeGuard

from limitgate.errors import ConfigError
from limitgate.limits.duration import seconds_of
from limitgate.messages.suggestions import expected_of

HIGHEST = 100_000
"""The largest limit; more requests than that are held in memory by no process."""
LARGEST_TOLERANCE = 10.0
LONGEST_DELAY_S = 10.0
START = 20
"""The limit to begin with, within ``min`` and ``max``; it doubles within a window where that is too low."""


@dataclass(frozen=True, slots=True, init=False)
class Adaptive:
    """Bounds of a limit on the requests in flight in a process, which is found from their latency.

    Raises `ConfigError` that names each field which is wrong and what was expected of it. ``delay`` may be text, such as
    ``20ms``.
    """

    min: int
    """Requests in flight that are always allowed: 1 or more, 4 if not given."""
    max: int
    """Requests in flight that are never exceeded: up to 100,000, 200 if not given. The process has to have room for them."""
    tolerance: float
    """How many times what it takes on an idle server a request may take: above 1 and up to 10, 2.0 if not given."""
    delay: float
    """Seconds in a queue that are allowed to requests however fast they are: above 0 and up to 10, 0.02 if not given."""

    def __init__(
        self,
        min: int = 4,  # noqa: A002 - the contract names it so
        max: int = 200,  # noqa: A002 - the contract names it so
        tolerance: float = 2.0,
        delay: float | str = 0.02,
    ) -> None:
        mistakes = [ConfigError.at((field,), said, "adaptive") for field, said in _mistakes(min, max, tolerance, delay)]
        if mistakes:
            raise ConfigError.first_of(mistakes)
        for name, value in {"min": min, "max": max, "tolerance": float(tolerance), "delay": seconds_of(delay)}.items():
            object.__setattr__(self, name, value)

    @property
    def start(self) -> int:
        """The limit of a process that knows nothing yet."""
        return sorted((self.min, START, self.max))[1]

    def allowed_queue_s(self, base_s: float) -> float:
        """Seconds in a queue that are allowed to a request which takes ``base_s`` on an idle server."""
        return max((self.tolerance - 1) * base_s, self.delay)


class Terms(NamedTuple):
    """What somebody wants of an adaptive limit."""

    adaptive: Adaptive
    max_delay: float = 0.0
    """Seconds that somebody may wait for a place."""
    reserve: Fraction | None = None
    """Share of the limit that is kept for higher priorities."""


def as_adaptive(value: object) -> Adaptive | None:
    """The options as they may be given: `Adaptive`, a mapping of its fields, or true for its defaults; None for false and null.

    Raises `ConfigError` for anything else.
    """
    if value is None or value is False:
        return None
    if value is True:
        return Adaptive()
    if isinstance(value, Adaptive):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{value!r:.80} is no adaptive limit, expected true or a mapping such as {{min: 4, max: 200}}")
    known = [field.name for field in fields(Adaptive)]
    unknown = [name for name in value if name not in known]
    mistakes = [ConfigError.at((str(name),), f"unknown field, {expected_of(name, known)}", "adaptive") for name in unknown]
    try:
        given = Adaptive(**{name: each for name, each in value.items() if name in known})
    except ConfigError as error:
        mistakes += error.every
    if mistakes:
        raise ConfigError.first_of(mistakes)
    return given


def _mistakes(least: object, most: object, tolerance: object, delay: object) -> Iterator[tuple[str, str]]:
    """Fields with a mistake and what was expected of them."""
    if not _is_count(least):
        yield "min", f"expected a whole number of requests from 1 to {HIGHEST:,}, not {least!r:.80}"
    if not _is_count(most):
        yield "max", f"expected a whole number of requests from 1 to {HIGHEST:,}, not {most!r:.80}"
    elif _is_count(least) and most < least:
        yield "max", f"expected at least {least}, which is min, not {most}"
    if not _is_number(tolerance) or not 1 < tolerance <= LARGEST_TOLERANCE:
        yield "tolerance", f"expected a number above 1 and up to {LARGEST_TOLERANCE:g}, such as 2.0, not {tolerance!r:.80}"
    try:
        is_delay = 0 < seconds_of(delay) <= LONGEST_DELAY_S
    except ConfigError:
        is_delay = False
    if not is_delay:
        yield "delay", f"expected a duration above 0 and up to {LONGEST_DELAY_S:g} s, such as 20ms or 0.02, not {delay!r:.80}"


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= HIGHEST


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
