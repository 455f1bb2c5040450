"""Decides what a request costs by the outcome of its response: nothing, as charged, or as the application reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.limits.plan import Charge


def costs_by_outcome(
    charges: Sequence[Charge],
    compiled_rules: Sequence[CompiledRule],
    status: int | None,
    *,
    is_sent: bool,
    told: Mapping[str | None, int | Sequence[int]] = MappingProxyType({}),
    usage: tuple[int, int] | None = None,
    any_has_own_cost: bool = False,
) -> list[int]:
    """Return the final costs, by the outcome and by ``told``, the costs from `Decision.settle`.

    A slot costs nothing once the response is sent. A reported cost without a rule applies to rules with their own cost, or
    to all rules unless ``any_has_own_cost``. It overrides the tokens in ``usage``. ``status`` may be unknown.
    """
    costs = []
    for charge, compiled_rule in zip(charges, compiled_rules):
        rule, cost = compiled_rule.rule, charge.cost
        if charge.bucket.has_slots:
            cost = 0 if is_sent else cost
        elif rule.charge_if and status is not None and not rule.charge_if.counts(status):
            cost = 0
        elif told or rule.token_kinds:
            final = told.get(rule.name)
            if final is None and (rule.has_own_cost or not any_has_own_cost):
                final = told.get(None)
            if final is not None:
                cost = rule.final_cost(charge.bucket, cost, final)
            elif rule.token_kinds:
                cost = rule.cost_in_tokens(charge.bucket, cost, status, usage)
        costs.append(cost)
    return costs
