"""Options of all throttled clients, and limits for ``strict``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypedDict, TypeGuard, get_args

from limitgate.algorithms.sliding_log import MAX_ENTRIES
from limitgate.errors import ConfigError
from limitgate.limits.limit import Duration, Limit, as_limit, as_seconds
from limitgate.messages.text import expected_of
from limitgate.observing.exporter import Observer
from limitgate.overload.options import Adaptive, as_adaptive
from limitgate.rules.lint import most_within
from limitgate.rules.options import OnError


class ClientOptions(TypedDict, total=False):
    """Options of a throttled client, in addition to limits, limiter, key and the wrapped sender."""

    timeout: Duration | None
    """Maximum total wait of a request before its last attempt, in seconds or as ``2m``; None: unlimited. Default: 120."""
    on_error: OnError
    """If the store fails: ``local`` counts in this process, ``open`` sends immediately, ``closed`` raises `StoreError`.
    Default: ``local``.
    """
    longest_pause: Duration
    """Longest pause of a key that one response can cause in all processes, in seconds or as ``1h``. Default: 3600."""
    strict: bool
    """True to never send more than the count of a limit in any period, whatever the service's algorithm. Default: False."""
    adaptive: Adaptive | bool
    """Bounds of an adaptive limit on the requests of a key in flight; true for the defaults of `Adaptive`. Excess requests are
    refused immediately. Default: False.
    """
    throttle: bool
    """True to send almost no requests of a key while too few of them succeed. Default: False."""
    budget: Any
    """A `limitgate.llm.Budget` in place of limits. Default: none."""
    observers: Iterable[str | Observer]
    """Observers of a limiter created by the client: ``"prometheus"``, ``"opentelemetry"``, or an `Observer`. Default: none."""


class CheckedOptions(NamedTuple):
    timeout: float
    """Infinite for no maximum."""
    on_error: OnError
    longest_pause: float
    strict: bool
    adaptive: Adaptive | None
    throttle: bool

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CheckedOptions:
        """Validate options. Raises `ConfigError` for an invalid value, `TypeError` for an unknown option."""
        unknown = given.keys() - ClientOptions.__annotations__.keys()
        if unknown:
            known = [*ClientOptions.__annotations__, "limiter", "key", "repeatable"]
            raise TypeError(f"unknown option {min(unknown)!r}, {expected_of(min(unknown), sorted(known))}")
        longest_pause = as_seconds(given.get("longest_pause", 3600.0), "longest_pause")
        on_error, timeout = given.get("on_error", "local"), as_seconds(given.get("timeout", 120.0), "timeout")
        if not _is_seconds(longest_pause) or longest_pause == 0:
            raise ConfigError(f"longest_pause is {longest_pause!r:.40}, expected seconds above 0")
        if on_error not in get_args(OnError):
            raise ConfigError(f"on_error is {on_error!r:.80}, expected one of {', '.join(get_args(OnError))}")
        if timeout is not None and not _is_seconds(timeout):
            raise ConfigError(f"timeout is {timeout!r:.40}, expected seconds of at least 0, or None for as long as it takes")
        for switch in ("strict", "throttle"):
            if not isinstance(given.get(switch, False), bool):
                raise ConfigError(f"{switch} is {given[switch]!r:.40}, expected True or False")
        return cls(
            timeout=math.inf if timeout is None else float(timeout),
            on_error=on_error,
            longest_pause=float(longest_pause),
            strict=bool(given.get("strict")),
            adaptive=as_adaptive(given.get("adaptive")),
            throttle=bool(given.get("throttle")),
        )


def _is_seconds(value: object) -> TypeGuard[float]:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= sys.float_info.max or value == math.inf


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
    """Raise `ConfigError` for a limit that lets more than the count pass in a period."""
    if limit.borrow or (limit.period and most_within(limit.period, [limit]) > limit.count):
        raise ConfigError(
            f"{limit!r} may let more than {limit.count} pass in {limit.period} s, expected a limit without an algorithm of its "
            "own, a sliding_log, a burst of 1, or strict=False"
        )
