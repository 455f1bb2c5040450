"""Formats decisions for the command."""

from __future__ import annotations

import math
from typing import Any

from limitgate.algorithms import ban
from limitgate.command.output import print_table, say
from limitgate.limits.decision import Decision, Window

_AGES = ban.FOR_EVER / 2e6
"""Seconds of remaining time beyond which a ban is permanent."""


def decision_fields(decision: Decision) -> dict[str, Any]:
    """Return the fields of a decision for ``--json``. Times are seconds, windows are objects."""
    return {
        "allowed": decision.allowed,
        "limit": decision.limit,
        "remaining": decision.remaining,
        "retry_after": _endless(decision.retry_after),
        "reset_after": _endless(decision.reset_after),
        "granted": decision.granted,
        "rule": decision.rule,
        "windows": [window_fields(window) for window in decision.windows],
        "degraded": decision.degraded,
        "shadow": decision.shadow,
        "delay": decision.delay,
    }


def window_fields(window: Window) -> dict[str, Any]:
    """Return the fields of a window for ``--json``."""
    times = {"reset_after": _endless(window.reset_after), "retry_after": _endless(window.retry_after)}
    return window._asdict() | times


def _endless(number: float) -> float:
    """Seconds, or ``inf`` for a permanent ban."""
    return math.inf if number > _AGES else number


def print_decision(decision: Decision) -> None:
    """Print a decision: a line about enforced rules, one for each rule in shadow, and a table of windows."""
    shadows = shadows_of(decision)
    enforced = [window for each in decision.standings if each.charge.enforced for window in each.windows()]
    if not decision.allowed:
        say(f"a request would be refused: {_why(decision)}")
    elif not shadows:
        say(f"a request would be admitted, {decision.remaining:,} of {decision.limit:,} remaining")
    elif enforced:
        least = min(enforced, key=lambda window: window.remaining)
        say(f"a request would be admitted, {least.remaining:,} of {least.limit:,} remaining")
    else:
        say("a request would be admitted")
    for name, fits in shadows.items():
        say(f"rule {name} is in shadow: refuses nothing{'' if fits else ', but would refuse this request'}")
    heads = "Rule", "Window", "Limit", "Used", "Remaining", "Full in", "Free in"
    rows = [
        (
            window.rule or "-",
            f"{window.period:,} s" if window.period else "at once",
            f"{window.limit:,}",
            f"{window.used:,}",
            f"{window.remaining:,}",
            seconds(window.reset_after),
            seconds(window.retry_after),
        )
        for window in decision.windows
    ]
    if rows:
        print_table(heads, rows)


def shadows_of(decision: Decision) -> dict[str, bool]:
    """Return the rules in shadow, and whether a request fits into their buckets."""
    found: dict[str, bool] = {}
    for each in decision.standings:
        if not each.charge.enforced and each.charge.rule is not None:
            found[each.charge.rule] = found.get(each.charge.rule, True) and each.fits
    return found


def is_banned(decision: Decision) -> bool:
    """True if a ban refuses, because the used amounts don't show it."""
    return any(not each.charge.bucket.algorithm.IS_LIMIT and not each.fits for each in decision.standings)


def ban_in_force(decision: Decision) -> float:
    """Seconds of a ban, ``inf`` if it is permanent."""
    bans = [each for each in decision.standings if not each.charge.bucket.algorithm.IS_LIMIT]
    return _endless(max([int(state) for each in bans for state in each.states], default=0) / 1e6)


def _why(decision: Decision) -> str:
    if decision.is_permanent_ban:
        return "banned permanently"
    if _endless(decision.retry_after) == math.inf:
        return "retrying does not help"
    return f"{'banned, ' if is_banned(decision) else ''}retry in {seconds(decision.retry_after)}"


def banned(by: str, retry_after: float) -> str:
    """Describe a ban: its author, and the remaining time in seconds."""
    is_endless = _endless(retry_after) == math.inf
    return f"banned permanently by {by}" if is_endless else f"banned by {by} for {seconds(retry_after)} more"


def seconds(number: float) -> str:
    """Format a duration in seconds for people."""
    if _endless(number) == math.inf:
        return "never"
    if number < 60:
        return f"{number:.3g} s"
    whole = round(number)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    parts = (("d", days), ("h", hours), ("min", minutes), ("s", whole % 60))
    return " ".join([f"{value} {unit}" for unit, value in parts if value][:2])
