"""A request on its way through a gate: what has been decided about it so far, and what was taken for it."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

from limitgate.callers import Caller
from limitgate.decision import Decision, Settlement
from limitgate.decorators import Mark
from limitgate.headers import Fields, Refusal
from limitgate.plan import Charge, Plan, Reading
from limitgate.planner import Considered
from limitgate.request import Request
from limitgate.rules import Rule

VISIT = "limitgate.visit"
"""Where the visit is found in a scope or environ; None where the gate is switched off."""


class Taken(NamedTuple):
    """Something that was taken for a request."""

    considered: Considered
    plan: Plan
    """What was taken; a part of what was considered where the store failed for the rest."""
    reading: Reading
    here: bool = False
    """Whether this process decided, as the store had failed."""


class Visit:
    """A request on its way: what the door does with it, and what the gate remembers of it until it is over."""

    decision: Decision | None = None
    """None where no rule applies."""
    refusal: Refusal | None = None
    """The response to send instead of the application's; None to let the request pass."""
    messages: Considered | None = None
    """What each message over a WebSocket is to be charged, None for nothing."""
    has_begun = False
    """Whether a response has begun, so that it is too late to refuse."""
    status: int | None = None
    """That of the response, None as long as there is none."""
    taken: tuple[Taken, ...] = ()
    """What was taken for it so far."""

    def __init__(self, gate: Any, request: Request, identified: Caller | None, seen: Container[Mark]) -> None:
        self.gate = gate
        """The `Gate` that it is a visit to."""
        self.request = request
        self.identified = identified
        self.seen = seen
        """The decorators that were taken into account."""
        self.fields: Fields = []
        """Rate fields for whatever response is sent."""
        self.settlement = Settlement()

    def failed(self) -> None:
        """The application has raised an error: the response is a 500 if there is none yet."""
        if not self.has_begun:
            self.status = 500

    def end(self) -> bool:
        """The request is over. Returns whether something may have been charged that should not have been."""
        self.settlement.is_over = True
        return bool(self.taken) and (bool(self.settlement.costs) or any(taken.considered.is_by_outcome for taken in self.taken))

    def settled(self) -> list[tuple[Taken, list[int]]]:
        """What was taken, and what each of its charges should have been, now that the request is over."""
        rules: dict[str, Rule] = {}
        for considered, *_ in self.taken:
            charges = considered.plan.charges if considered.plan else ()
            rules |= {charge.key: bound.rule for charge, bound in zip(charges, considered.bounds)}
        any_has_own_cost = any(rule.has_own_cost for rule in rules.values())

        def cost_of(charge: Charge) -> int:
            rule = rules[charge.key]
            if rule.charge_if and self.status is not None and not rule.charge_if.counts(self.status):
                return 0
            told = self.settlement.costs
            unnamed = told.get(None, charge.cost) if rule.has_own_cost or not any_has_own_cost else charge.cost
            return told.get(rule.name, unnamed)

        return [(taken, [cost_of(charge) for charge in taken.plan.charges]) for taken in self.taken]
