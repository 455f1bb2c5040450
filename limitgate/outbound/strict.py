"""Converts limits of a service into limits that hold in any period, whatever the algorithm of the service."""

from __future__ import annotations

from limitgate.algorithms.sliding_log import MAX_ENTRIES
from limitgate.errors import ConfigError
from limitgate.limits.limit import Limit, as_limit
from limitgate.rules.lint import most_within

SHARE = 10
"""A count that is too high for a log gets a burst of this fraction."""


def strict(limit: Limit | str) -> Limit:
    """Return a limit that never lets more than the count pass in any period.

    Uses a ``sliding_log``. With a burst, or a count too high for a log, uses ``gcra`` at a lower rate: for a count N and a
    burst B, N - B + 1 per period. Raises `ConfigError` for a burst that leaves no rate, and for an explicit algorithm that lets
    more pass.
    """
    given = as_limit(limit)
    if given.says_algorithm or given.borrow:
        check_is_strict(given)
        return given
    if given.burst > given.count:
        raise ConfigError(
            f"{given!r}: in no period are more than {given.count} to pass, expected a burst of at most that, or strict=False"
        )
    if given.burst == given.count and given.count <= MAX_ENTRIES:
        return Limit(f"{given.count} per {given.period} seconds", algorithm="sliding_log")
    burst = given.burst if given.burst < given.count else given.count // SHARE
    return Limit(f"{given.count - burst + 1} per {given.period} seconds", burst=burst, lease=min(given.lease, burst))


def check_is_strict(limit: Limit) -> None:
    """Raise `ConfigError` for a limit that can let more than the count pass in a period."""
    if limit.borrow or (limit.period and most_within(limit.period, [limit]) > limit.count):
        raise ConfigError(
            f"{limit!r} may let more than {limit.count} pass in {limit.period} s, expected a limit without an algorithm of its "
            "own, a sliding_log, a burst of 1, or strict=False"
        )
