"""Options of throttled clients, and limits for ``strict``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypedDict, TypeGuard, get_args

from limitgate.algorithms.sliding_log import MAX_ENTRIES
from limitgate.errors import ConfigError, check_switches
from limitgate.limits.limit import Duration, Limit, as_limit, as_seconds
from limitgate.messages.text import expected_of
from limitgate.observing.exporter import Observer
from limitgate.overload.options import Adaptive, as_adaptive
from limitgate.rules.lint import most_within
from limitgate.rules.options import OnError


class ClientOptions(TypedDict, total=False):
    """Options of a throttled client, besides limits, limiter, key and wrapped sender."""

    timeout: Duration | None
    """Maximum total wait before the last attempt, seconds or ``2m``; None: unlimited. Default: 120."""
    on_error: OnError
    """If the store fails: ``local`` counts here, ``open`` sends, ``closed`` raises `StoreError`. Default: ``local``."""
    longest_pause: Duration
    """Longest pause of a key that one response can cause, seconds or ``1h``. Default: 3600."""
    strict: bool
    """Never send more than the count in any period, whatever the service's algorithm. Default: False."""
    adaptive: Adaptive | bool
    """An adaptive limit on a key's requests in flight; true for defaults. Refuses excess requests at once. Default: False."""
    throttle: bool
    """Send few requests of a key while most of them fail. Default: False."""
    budget: Any
    """A `limitgate.llm.Budget` in place of limits. Default: none."""
    observers: Iterable[str | Observer]
    """For a limiter that the client creates: ``"prometheus"``, ``"opentelemetry"``, or an `Observer`. Default: none."""


class CheckedOptions(NamedTuple):
    timeout: float
    on_error: OnError
    longest_pause: float
    strict: bool
    adaptive: Adaptive | None
    throttle: bool

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CheckedOptions:
        """Check options. Raises `ConfigError` for an invalid value, `TypeError` for an unknown option."""
        unknown = given.keys() - ClientOptions.__annotations__.keys()
        if "limits" in unknown:
            raise TypeError("unknown option 'limits', expected each limit separately before the options, as '5/second'")
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
            raise ConfigError(f"timeout is {timeout!r:.40}, expected seconds of at least 0, or None for no bound")
        check_switches(**{name: given[name] for name in ("strict", "throttle") if name in given})
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
"""If a count is too high for a sliding log, the burst is the count divided by this."""


def strict(limit: Limit | str) -> Limit:
    """Return a limit that never admits more than the count in any period.

    The result is a ``sliding_log``. If the count N is high or there is a burst B, it is ``gcra`` at a lower rate: N - B + 1 per
    period. Raises `ConfigError` for an impossible burst or algorithm.
    """
    given = as_limit(limit)
    if given.says_algorithm or given.borrow:
        check_is_strict(given)
        return given
    if given.burst > given.count:
        raise ConfigError(
            f"{given!r}: strict allows {given.count} in any period, expected a burst of at most {given.count}, or strict=False"
        )
    if given.burst == given.count and given.count <= MAX_ENTRIES:
        return Limit(f"{given.count} per {given.period} seconds", algorithm="sliding_log")
    burst = given.burst if given.burst < given.count else given.count // SHARE
    return Limit(f"{given.count - burst + 1} per {given.period} seconds", burst=burst, lease=min(given.lease, burst))


def check_is_strict(limit: Limit) -> None:
    """Raise `ConfigError` if more than the count passes in a period."""
    if limit.borrow or (limit.period and most_within(limit.period, [limit]) > limit.count):
        raise ConfigError(
            f"{limit!r} may let more than {limit.count} pass in {limit.period} s, expected a limit without its own "
            "algorithm, a sliding_log, a burst of 1, or strict=False"
        )
