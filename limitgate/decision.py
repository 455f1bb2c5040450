"""What was decided: computed in one place, from a plan and a store's reading of it, for every store and every caller."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from limitgate import gcra
from limitgate.errors import LimitGateError
from limitgate.plan import Charge, Plan, Reading

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


class Standing(NamedTuple):
    """How a bucket stands after a decision."""

    charge: Charge
    debts: Sequence[int]
    """Ticks, per window."""
    fits: bool
    """Whether the charge fitted into every window."""

    def windows(self) -> list[Window]:
        """How each of its limits stands."""
        rule, cost = self.charge.rule, self.charge.cost
        found = []
        for limit, debt in zip(self.charge.windows.limits, self.debts):
            wait = 0 if self.fits else gcra.wait_us(debt, cost, limit)
            found.append(
                Window(
                    rule,
                    limit.burst,
                    limit.period,
                    gcra.remaining(debt, limit),
                    gcra.used(debt, limit),
                    gcra.refill_us(debt, limit) / SECOND,
                    math.inf if wait is None else wait / SECOND,
                )
            )
        return found


class _Fields(NamedTuple):
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
    standings: tuple[Standing, ...] = ()
    """What `Decision.windows` is worked out from."""
    degraded: bool = False
    """The store failed and ``on_error`` decided."""
    shadow: bool = False
    """Only shadow rules refused, so the request passes."""


class Decision(_Fields):
    """The answer to a request. Immutable."""

    __slots__ = ()

    @property
    def windows(self) -> tuple[Window, ...]:
        """Every limit that was looked at, worked out when asked: most answers need only the tightest."""
        return tuple(window for standing in self.standings for window in standing.windows())

    def __repr__(self) -> str:
        shown = {**self._asdict(), "windows": self.windows}
        del shown["standings"]
        return f"Decision({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class RateLimited(LimitGateError):  # noqa: N818 - the name is part of the public contract
    """A call was refused. ``decision`` says by what and for how long."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(f"rate limited, retry in {decision.retry_after:g} s")
        self.decision = decision


def decide(plan: Plan, reading: Reading) -> Decision:
    """The decision that follows from what the store read, as it stands after the plan was carried out."""
    allowed, charges = reading.admitted, plan.charges
    takes = allowed and plan.verb == "spend"
    standings = []
    shadowed = False
    longest, refusing = -1.0, charges[0]
    tightest, tight, least, latest = charges[0], charges[0].windows.limits[0], -1, -1
    for charge, before, then in zip(charges, reading.debts, reading.after):
        windows, debts = charge.windows, then if takes and then is not None else before
        standing = Standing(charge, debts, then is not None)
        standings.append(standing)
        if then is None:
            shadowed = allowed
            wait = max([window.retry_after for window in standing.windows()])
            if charge.binding and wait > longest:
                longest, refusing = wait, charge
        for limit, debt in zip(windows.limits, debts):
            left = gcra.remaining(debt, limit)
            if left <= least or least < 0:
                refill = gcra.refill_us(debt, limit)
                if left != least or refill > latest:
                    least, latest, tightest, tight = left, refill, charge, limit
    return Decision(
        allowed,
        tight.burst,
        least,
        0.0 if allowed else longest,
        latest / SECOND,
        tightest.cost if takes else 0,
        tightest.rule if allowed else refusing.rule,
        tuple(standings),
        False,
        shadowed,
    )


def undecided(*, allowed: bool) -> Decision:
    """The decision of ``on_error``, when the store failed and nothing is known about any bucket."""
    return Decision(allowed, 0, 0, 0.0, 0.0, 0, None, degraded=True)
