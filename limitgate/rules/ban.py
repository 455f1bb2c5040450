"""`Ban`: the ban options of a rule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from limitgate.errors import ConfigError
from limitgate.limits.limit import Duration, seconds_of
from limitgate.messages.text import expected_of

MOST_REFUSALS = 10_000
HIGHEST_GROWTH = 100.0
LONGEST_S = 366 * 86_400.0
_DAY_S = 86_400.0
_MISSING = object()
_EXAMPLE = "{after: 20, within: 10m, for: 1h, growing: 2, most: 24h}"


@dataclass(frozen=True, slots=True, init=False)
class Ban:
    """A ban of clients that a rule refuses too often.

    Durations are seconds, or text such as ``10m`` and ``1h``. Raises `ConfigError`, which names each invalid field.
    """

    after: int
    """Refusals that lead to a ban: 1 to 10,000."""
    within: float
    """Seconds within which the refusals happen: more than 0, at most a year."""
    duration: float
    """Seconds of the first ban, ``for`` in rule files: more than 0, at most a year."""
    growing: float
    """Each further ban lasts this many times longer: 1 to 100; 1 if omitted."""
    most: float
    """Seconds of the longest ban: from ``duration`` to a year; if omitted, the longer of ``duration`` and a day.

    A client that stays unbanned for this time starts at the first ban again.
    """

    def __init__(
        self,
        after: int = _MISSING,  # type: ignore[assignment]  # one error reports every missing field
        within: Duration = _MISSING,  # type: ignore[assignment]
        duration: Duration = _MISSING,  # type: ignore[assignment]
        growing: float = 1.0,
        most: Duration | None = None,
    ) -> None:
        mistakes = [ConfigError.at((field,), said, "ban") for field, said in _mistakes(after, within, duration, growing, most)]
        if mistakes:
            raise ConfigError.first_of(mistakes)
        lasts = seconds_of(duration)
        longest = max(lasts, _DAY_S) if most is None else seconds_of(most)
        values = {"after": after, "within": seconds_of(within), "duration": lasts, "growing": float(growing), "most": longest}
        for name, value in values.items():
            object.__setattr__(self, name, value)


def as_ban(value: object) -> Ban | None:
    """Parse the option: a `Ban`, a mapping of its fields, or None. Raises `ConfigError`."""
    if value is None or isinstance(value, Ban):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{value!r:.80} is not a ban, expected a mapping such as {_EXAMPLE}, or in Python Ban(...)")
    known = ["for" if field.name == "duration" else field.name for field in fields(Ban)]
    given = {"duration" if name == "for" else str(name): each for name, each in value.items()}
    unknown = [str(name) for name in value if name not in (*known, "duration")]
    mistakes = [ConfigError.at((name,), f"unknown field, {expected_of(name, known)}", "ban") for name in unknown]
    if "for" in value and "duration" in value:
        mistakes.append(ConfigError.at(("duration",), "duplicates for, expected one of the two", "ban"))
    try:
        ban = Ban(**{name: each for name, each in given.items() if name not in unknown})
    except ConfigError as error:
        for each in error.every:
            is_for = each.field == ("duration",) and "duration" not in value
            mistakes.append(ConfigError.at(("for",) if is_for else each.field, each.reason, "ban"))
    if mistakes:
        raise ConfigError.first_of(mistakes)
    return ban


def _mistakes(after: object, within: object, duration: object, growing: object, most: object) -> Iterator[tuple[str, str]]:
    if type(after) is not int or not 1 <= after <= MOST_REFUSALS:
        yield "after", f"expected a whole number of refusals from 1 to {MOST_REFUSALS:,}, {_not(after)}"
    for name, value, example in (("within", within, "10m or 600"), ("duration", duration, "1h or 3600")):
        if _seconds(value) is None:
            yield name, f"expected a duration above 0 and up to a year, such as {example}, {_not(value)}"
    is_number = isinstance(growing, int | float) and not isinstance(growing, bool)
    if not is_number or not 1 <= growing <= HIGHEST_GROWTH:  # type: ignore[operator]
        yield "growing", f"expected a factor from 1 to {HIGHEST_GROWTH:g}, such as 2, {_not(growing)}"
    if most is None:
        return
    lasts, longest = _seconds(duration), _seconds(most)
    if longest is None:
        yield "most", f"expected a duration above 0 and up to a year, such as 24h, {_not(most)}"
    elif lasts is not None and longest < lasts:
        yield "most", f"expected at least as long as the first ban, which lasts {lasts:g} s, {_not(most)}"


def _not(value: object) -> str:
    return "which is missing" if value is _MISSING else f"not {value!r:.80}"


def _seconds(value: object) -> float | None:
    try:
        seconds = seconds_of(value)
    except ConfigError:
        return None
    return seconds if 0 < seconds <= LONGEST_S and math.ceil(seconds * 1e6) else None
