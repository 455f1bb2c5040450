"""`Adaptive`, the bounds that users set for an adaptive limit, and `Terms`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import NamedTuple, TypeGuard

from limitgate.errors import ConfigError, called_as
from limitgate.limits.limit import Duration, seconds_of
from limitgate.messages.text import expected_of

HIGHEST = 100_000
LARGEST_TOLERANCE = 10.0
LONGEST_DELAY_S = 10.0
START = 20
"""First limit, if within ``min`` and ``max``. It can double within a window."""


@dataclass(frozen=True, slots=True, init=False)
class Adaptive:
    """Bounds of an adaptive limit on requests in flight, which is learned from their latency.

    Raises `ConfigError` for each invalid field. ``delay`` may be text, such as ``20ms``.
    """

    min: int
    """Lower bound, in requests in flight: 1 or more. Default: 4."""
    max: int
    """Upper bound, in requests in flight: up to 100,000. Default: 200. They need memory."""
    tolerance: float
    """Acceptable multiple of a request's duration on an idle server: above 1, up to 10. Default: 2.0."""
    delay: float
    """Acceptable queueing time in seconds: above 0, up to 10. Default: 0.02."""

    @called_as("Adaptive(min=4, max=200)")
    def __init__(
        self,
        min: int = 4,  # noqa: A002 - a public name
        max: int = 200,  # noqa: A002 - a public name
        tolerance: float = 2.0,
        delay: Duration = 0.02,
    ) -> None:
        mistakes = [ConfigError.at((field,), said, "adaptive") for field, said in _mistakes(min, max, tolerance, delay)]
        if mistakes:
            raise ConfigError.first_of(mistakes)
        for name, value in {"min": min, "max": max, "tolerance": float(tolerance), "delay": seconds_of(delay)}.items():
            object.__setattr__(self, name, value)

    @property
    def start(self) -> int:
        return sorted((self.min, START, self.max))[1]

    def allowed_queue_s(self, base_s: float) -> float:
        """Acceptable queueing for an unloaded duration ``base_s``."""
        return max((self.tolerance - 1) * base_s, self.delay)


class Terms(NamedTuple):
    adaptive: Adaptive
    max_delay: float = 0.0
    reserve: Fraction | None = None


def as_adaptive(value: object) -> Adaptive | None:
    """Return options from `Adaptive`, a mapping, or true; None for false and null. Raises `ConfigError`."""
    if value is None or value is False:
        return None
    if value is True:
        return Adaptive()
    if isinstance(value, Adaptive):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{value!r:.80} is not an adaptive limit, expected true or a mapping such as {{min: 4, max: 200}}")
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
    return isinstance(value, int | float) and not isinstance(value, bool)
