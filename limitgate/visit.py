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

VISIT = "limitgate.visit"
"""Where the visit is found in a scope or environ; None where the gate is switched off."""


class Taken(NamedTuple):
    """Something that was taken for a request."""

    plan: Plan
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
    _considered: tuple[Considered, ...] = ()
    _taken: tuple[Taken, ...] = ()

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

    def took(self, considered: Considered, taken: tuple[Taken, ...]) -> None:
        """Remember what was taken for rules that were considered."""
        self._considered += (considered,)
        self._taken += taken

    def give_up(self) -> tuple[Taken, ...]:
        """Forget what was taken. Returns it, as it has to be given back."""
        taken, self._taken = self._taken, ()
        return taken

    @property
    def has_taken(self) -> bool:
        """Whether anything was taken, so that there may be something to settle."""
        return bool(self._taken)

    def failed(self) -> None:
        """The application has raised an error: the response is a 500 if there is none yet."""
        if not self.has_begun:
            self.status = 500

    def end(self) -> bool:
        """The request is over. Returns whether something may have been charged that should not have been."""
        self.settlement.is_over = True
        if not self._taken:
            return False
        return bool(self.settlement.costs) or any(considered.is_by_outcome for considered in self._considered)

    def settled(self) -> list[tuple[Taken, list[int]]]:
        """What was taken, and what each of its charges should have been, now that the request is over."""
        rules = {
            charge.key: bound.rule
            for considered in self._considered
            for charge, bound in zip(considered.plan.charges if considered.plan else (), considered.bounds)
        }
        any_has_own_cost = any(rule.has_own_cost for rule in rules.values())

        def cost_of(charge: Charge) -> int:
            rule = rules[charge.key]
            if rule.charge_if and self.status is not None and not rule.charge_if.counts(self.status):
                return 0
            told = self.settlement.costs
            unnamed = told.get(None, charge.cost) if rule.has_own_cost or not any_has_own_cost else charge.cost
            return told.get(rule.name, unnamed)

        return [(taken, [cost_of(charge) for charge in taken.plan.charges]) for taken in self._taken]
