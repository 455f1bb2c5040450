"""Decisions as the command shows them."""

from __future__ import annotations

from typing import Any

import click

from limitgate.command.output import print_table
from limitgate.limits.decision import Decision


def decision_fields(decision: Decision) -> dict[str, Any]:
    """The fields of a decision, as ``--json`` has them: seconds, the windows as objects."""
    return {
        "allowed": decision.allowed,
        "limit": decision.limit,
        "remaining": decision.remaining,
        "retry_after": decision.retry_after,
        "reset_after": decision.reset_after,
        "granted": decision.granted,
        "rule": decision.rule,
        "windows": [window._asdict() for window in decision.windows],
        "degraded": decision.degraded,
        "shadow": decision.shadow,
        "delay": decision.delay,
    }


def print_decision(decision: Decision) -> None:
    """Print a decision: a line, and a table of its windows."""
    if decision.allowed:
        click.echo(f"would be admitted, {decision.remaining:,} of {decision.limit:,} left")
    else:
        click.echo(f"would be refused, {_again(decision.retry_after)}")
    heads = "Rule", "Window", "Limit", "Used", "Remaining", "Full again in", "Free in"
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


def _again(retry_after: float) -> str:
    return "for ever" if retry_after == float("inf") else f"again in {seconds(retry_after)}"


def seconds(number: float) -> str:
    """A time as people read it."""
    if number == float("inf"):
        return "never"
    if number < 60:
        return f"{number:.3g} s"
    whole = round(number)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    parts = (("d", days), ("h", hours), ("min", minutes), ("s", whole % 60))
    return " ".join([f"{value} {unit}" for unit, value in parts if value][:2])
