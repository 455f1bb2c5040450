"""Verdicts while the store fails: the policies of ``on_error``, rule by rule.

Of several rules closed beats local beats open; a rule that cannot refuse has no say. Where a store fails for some buckets
only, as a cluster does without one of its nodes, that is about the rules of these buckets, and the others go on limiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from limitgate.errors import StoreError
from limitgate.gate.admission import Receipt, Verdict
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.request_plan import RequestPlan
from limitgate.gate.slot_keeper import SlotKeeper
from limitgate.limits.decision import decide, undecided
from limitgate.limits.plan import Charge, Plan, Reading, read, with_bans
from limitgate.rules.options import OnError
from limitgate.stores.memory import MemoryStore


class Split(NamedTuple):
    """The charges of a plan where a part of the store failed. They are made all or none."""

    rest: Plan
    """Charges that the store can still decide about."""
    local: Plan | None
    """Charges that this process makes once the store has admitted the rest."""


class Fallback:
    """Decides in the store's place. ``on_error`` is for rules that have none of their own.

    Each of so many ``processes`` grants its share of the limits, see `Limit.share`. Bans hold that the ``store`` has seen.
    """

    def __init__(self, store: object, on_error: OnError, processes: int) -> None:
        self._on_error: OnError = on_error
        self._processes = processes
        self._ban_left_us: Callable[[str], int] = getattr(store, "ban_left_us", _no_ban)
        self._store = MemoryStore()
        self.slot_keeper = SlotKeeper(self._store, timeout=1.0)

    def without_store(self, request_plan: RequestPlan, error: StoreError) -> Verdict | Split:
        """Decide without the store; a split where it failed for some buckets only, and has to be asked about the others."""
        charges = request_plan.plan.charges if request_plan.plan else ()
        rest = [charge for charge in charges if charge.key not in error.keys] if error.keys else []
        local = self._local(request_plan, rest, error)
        if local is None:
            return Verdict(undecided(allowed=False))
        if not rest:
            return self._by_this_process(request_plan, local)
        if local:
            plan, reading = self._asked(Plan.peek(local))
            if not reading.admitted:
                return _verdict(plan, reading)
        return Split(Plan.spend(rest), Plan.spend(local) if local else None)

    def wholly_without_store(self, request_plan: RequestPlan, error: StoreError) -> Verdict:
        """Decide without the store, which failed for the rest of a split, too."""
        local = self._local(request_plan, (), error)
        return Verdict(undecided(allowed=False)) if local is None else self._by_this_process(request_plan, local)

    def with_rest(self, request_plan: RequestPlan, split: Split, reading: Reading) -> Verdict:
        """Decide by the store's reading of the rest of a split."""
        rest, local = split
        if local is None or not reading.admitted:
            return _verdict(rest, reading, Receipt(request_plan, rest, reading))._replace(source=reading.source)
        here = self._store.spend(local)
        both = Plan.spend([*rest.charges, *local.charges])
        charged = [Receipt(request_plan, rest, reading), Receipt(request_plan, local, here, is_local=True)]
        return _verdict(both, Reading(reading.now, [*reading.buckets, *here.buckets], here.admitted), *charged)

    def apply_refund(self, plan: Plan) -> None:
        """Give back to buckets of this process."""
        self._store.spend(plan)

    def _local(self, request_plan: RequestPlan, rest: Sequence[Charge], error: StoreError) -> list[Charge] | None:
        """This process' share of the charges that are not in ``rest``; None where a rule wants the request refused."""
        local: list[Charge] = []
        for charge, compiled_rule in zip(request_plan.plan.charges if request_plan.plan else (), request_plan.compiled_rules):
            if charge in rest or not compiled_rule.enforced:
                continue
            policy = self._policy(compiled_rule, error)
            if policy == "closed":
                return None
            if policy == "local" or charge.bucket.refuses_all:
                local.append(charge.share(self._processes))
        return local

    def _by_this_process(self, request_plan: RequestPlan, charges: Sequence[Charge]) -> Verdict:
        if not charges:
            return Verdict(undecided(allowed=True))
        plan, reading = self._asked(Plan.spend(charges))
        return _verdict(plan, reading, Receipt(request_plan, plan, reading, is_local=True))

    def _asked(self, plan: Plan) -> tuple[Plan, Reading]:
        """Have this process carry out a plan, unless one of its buckets is banned: then it is read only."""
        lefts = [self._ban_left_us(charge.key) if charge.cost else 0 for charge in plan.charges]
        bans = {place: left for place, left in enumerate(lefts) if left}
        if not bans:
            return plan, self._store.spend(plan)
        reading = self._store.spend(Plan.peek(plan.charges))
        charges, states = with_bans(plan.charges, [bucket.before for bucket in reading.buckets], bans)
        return Plan.peek(charges), read(charges, reading.now, states)

    def _policy(self, compiled_rule: CompiledRule, error: StoreError) -> OnError:
        """Policy of a rule. Out of memory, only its own word for ``open`` lets everything through.

        Where this process had no room to ask, no policy for failures of the store applies.
        """
        if error.fault == "overload":
            return "local"
        if compiled_rule.rule.on_error:
            return compiled_rule.rule.on_error
        return "local" if error.fault == "oom" and self._on_error == "open" else self._on_error


def _no_ban(_: str) -> int:
    """Microseconds of any ban in a store that does not fail."""
    return 0


def _verdict(plan: Plan, reading: Reading, *charged: Receipt) -> Verdict:
    admitted = tuple([each for each in charged if each.reading.admitted])
    return Verdict(replace(decide(plan, reading), degraded=True), reading.now, admitted, "local")
