"""What a request gets while the store fails: the policies of ``on_error``, rule by rule.

Of several rules closed beats local beats open; a rule that cannot refuse has no say. Where a store fails for some buckets
only, as a cluster does without one of its nodes, that is about the rules of these buckets, and the others go on limiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from limitgate.errors import StoreError
from limitgate.gate.admission import Charged
from limitgate.gate.compiled_rule import CompiledRule
from limitgate.gate.planner import RequestPlan
from limitgate.gate.slot_keeper import SlotKeeper
from limitgate.limits.decision import Decision, decide, undecided
from limitgate.limits.plan import Charge, Plan, Reading
from limitgate.rules.rule import OnError
from limitgate.stores.memory import MemoryStore


class Resort(NamedTuple):
    """What is to be done without the store, or without a part of it."""

    decision: Decision | None
    """What is decided already; None if ``rest`` has to be asked first."""
    now: int | None = None
    """The clock that the decision goes by, Unix µs; None if nobody was asked."""
    rest: Plan | None = None
    """The charges that the store can still decide about."""
    local: Plan | None = None
    """The charges to be made here once the store has admitted the rest."""
    charged: tuple[Charged, ...] = ()
    """What has been taken, by the store or here; has to be given back if the decision is a refusal."""


class Fallback:
    """Decides in the store's place. ``on_error`` is for rules that have none of their own.

    Each of so many ``processes`` grants its share of the limits, see `Limit.share`.
    """

    def __init__(self, on_error: OnError, processes: int) -> None:
        self._on_error: OnError = on_error
        self._processes = processes
        self._store = MemoryStore()
        self.holding = SlotKeeper(self._store, timeout=1.0)
        """What is held of slots here."""

    def without(self, request_plan: RequestPlan, error: StoreError, *, wholly: bool = False) -> Resort:
        """What follows from a failure of the store, or of a part of it unless it failed ``wholly``."""
        charges = request_plan.plan.charges if request_plan.plan else ()
        rest = [] if wholly or not error.keys else [charge for charge in charges if charge.key not in error.keys]
        local: list[Charge] = []
        for charge, compiled_rule in zip(charges, request_plan.compiled_rules):
            policy = self._policy(compiled_rule, error) if charge not in rest and compiled_rule.enforced else "open"
            if policy == "closed":
                return Resort(undecided(allowed=False))
            if policy == "local":
                local.append(charge.share(self._processes))
        return self._by_halves(request_plan, rest, local)

    def _by_halves(self, request_plan: RequestPlan, rest: Sequence[Charge], local: Sequence[Charge]) -> Resort:
        """The store decides about some charges, this process about others; they are all made or none."""
        plan = Plan(tuple(local)) if local else None
        if not rest:
            return Resort(undecided(allowed=True)) if plan is None else self._taken_here(request_plan, plan)
        if plan is not None:
            asked = plan._replace(verb="peek")
            reading = self._store.spend(asked)
            if not reading.admitted:
                return self._decided(asked, reading)
        return Resort(None, rest=Plan(tuple(rest)), local=plan)

    def with_rest(self, request_plan: RequestPlan, resort: Resort, reading: Reading) -> Resort:
        """What follows from what the store said about the ``rest`` of a plan."""
        rest, local = resort.rest, resort.local
        if rest is None:
            raise ValueError("there is no rest, expected one that the store was asked about")
        if local is None or not reading.admitted:
            return self._decided(rest, reading, Charged(request_plan, rest, reading))
        here = self._store.spend(local)
        both = Plan((*rest.charges, *local.charges))
        debts, after = [*reading.states, *here.states], [*reading.after, *here.after]
        taken = [Charged(request_plan, rest, reading), Charged(request_plan, local, here, is_local=True)]
        return self._decided(both, Reading(reading.now, debts, after, here.admitted), *taken)

    def correct(self, plan: Plan) -> None:
        """Put buckets of this process right."""
        self._store.spend(plan)

    def _taken_here(self, request_plan: RequestPlan, plan: Plan) -> Resort:
        reading = self._store.spend(plan)
        return self._decided(plan, reading, Charged(request_plan, plan, reading, is_local=True))

    @staticmethod
    def _decided(plan: Plan, reading: Reading, *taken: Charged) -> Resort:
        done = tuple([each for each in taken if each.reading.admitted])
        return Resort(decide(plan, reading)._replace(degraded=True), reading.now, charged=done)

    def _policy(self, compiled_rule: CompiledRule, error: StoreError) -> OnError:
        """What a rule wants done. Out of memory, only its own word for ``open`` lets everything through.

        Where this process had no room to ask, no policy for failures of the store applies.
        """
        if error.fault == "overload":
            return "local"
        if compiled_rule.rule.on_error:
            return compiled_rule.rule.on_error
        return "local" if error.fault == "oom" and self._on_error == "open" else self._on_error
