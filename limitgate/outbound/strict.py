"""Limits of another service, counted so that they hold in any period, whatever the service counts by."""

from __future__ import annotations

from limitgate.algorithms.sliding_log import MAX_ENTRIES
from limitgate.errors import ConfigError
from limitgate.limits.limit import Limit, as_limit
from limitgate.rules.review.lint import most_within

SHARE = 10
"""Divisor of a count that is too high for a log: so many of it may come at once."""


def strict(limit: Limit | str) -> Limit:
    """Return a limit of which never more than the count passes in any period, its last moment left out.

    Without a burst of its own every request is remembered, by a ``sliding_log``. With one, and for a count that is too high for
    a log, the rate of ``gcra`` is so much lower that burst and rate together make the count: of N a burst of B, and N - B + 1
    a period. Raises `ConfigError` for a burst that leaves nothing, and for limits that name an algorithm which lets more pass.
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
    """Raise `ConfigError` for a limit of which more than the count may pass in a period."""
    if limit.borrow or (limit.period and most_within(limit.period, [limit]) > limit.count):
        raise ConfigError(
            f"{limit!r} may let more than {limit.count} pass in {limit.period} s, expected a limit without an algorithm of its "
            "own, a sliding_log, a burst of 1, or strict=False"
        )
