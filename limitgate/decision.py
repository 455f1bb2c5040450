"""What was decided: computed in one place, from a plan and a store's reading of it, for every store and every caller."""

from __future__ import annotations

import math
from typing import NamedTuple

from limitgate import gcra
from limitgate.plan import Plan, Reading, admitted, fitting

SECOND = 1_000_000


class Window(NamedTuple):
    """How one limit stands. Immutable."""

    rule: str | None
    """The rule that the limit belongs to, None in a Limiter."""
    limit: int
    """The burst: what a full bucket holds."""
    period: int
    """Seconds."""
    remaining: int
    """Whole requests that still fit."""
    used: int
    """Requests not yet earned back, a begun one counted whole."""
    reset_after: float
    """Seconds until the bucket is full again."""
    retry_after: float
    """Seconds until this request would fit here; 0 if it does, ``inf`` if its cost exceeds the burst."""


class Decision(NamedTuple):
    """The answer to a request. Immutable."""

    allowed: bool
    limit: int
    """The burst of the window with the least remaining, of equals the one with the longest ``reset_after``."""
    remaining: int
    """Whole requests that still fit into that window."""
    retry_after: float
    """Seconds to wait, 0 when allowed, ``inf`` when the cost exceeds the burst. The longest of the windows that refused."""
    reset_after: float
    """Seconds until that window is full again."""
    granted: int
    """The cost, or 0 when refused or only asked."""
    rule: str | None
    """The rule that decided: the one that refuses longest, or has the least remaining. None in a Limiter."""
    windows: tuple[Window, ...]
    """Every limit that was looked at."""
    degraded: bool = False
    """The store failed and ``on_error`` decided."""
    shadow: bool = False
    """Only shadow rules refused, so the request passes."""


def decide(plan: Plan, reading: Reading) -> Decision:
    """The decision that follows from what the store read, as it stands after the plan was carried out."""
    charges, debts = plan.charges, reading.debts
    fit = fitting(charges, debts)
    allowed = admitted(charges, fit)
    takes = allowed and plan.verb == "spend"
    windows: list[Window] = []
    tightest = refusing = granted = 0
    least, latest, longest = -1, -1, -1.0
    for charge, owed, fits in zip(charges, debts, fit, strict=True):
        cost = charge.cost
        for limit, debt in zip(charge.windows.limits, owed, strict=True):
            wait = 0.0
            if not fits:
                wait = _seconds(gcra.wait_us(debt, cost, limit))
                if charge.binding and wait > longest:
                    longest, refusing = wait, len(windows)
            elif takes:
                debt += cost * limit.period_us  # noqa: PLW2901 - from here on, the debt as it now stands
            left, refill = gcra.remaining(debt, limit), gcra.refill_us(debt, limit)
            if least < 0 or left < least or (left == least and refill > latest):
                least, latest, tightest, granted = left, refill, len(windows), cost if takes else 0
            windows.append(Window(charge.rule, limit.burst, limit.period, left, gcra.used(debt, limit), refill / SECOND, wait))
    tight = windows[tightest]
    return Decision(
        allowed,
        tight.limit,
        tight.remaining,
        0.0 if allowed else longest,
        tight.reset_after,
        granted,
        tight.rule if allowed else windows[refusing].rule,
        tuple(windows),
        False,
        allowed and not all(fit),
    )


def undecided(*, allowed: bool) -> Decision:
    """The decision of ``on_error``, when the store failed and nothing is known about any bucket."""
    return Decision(allowed, 0, 0, 0.0, 0.0, 0, None, (), degraded=True)


def _seconds(wait_us: int | None) -> float:
    return math.inf if wait_us is None else wait_us / SECOND
