"""Decides by ``on_error`` during outages of the store.

``closed`` takes precedence over ``local``, and ``local`` over ``open``; shadow rules don't count. If the store fails for some
buckets, other rules keep limiting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from limitgate.errors import StoreError
from limitgate.gate.admission import Receipt, Verdict
from limitgate.gate.flow import Flow
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.prepared import RequestPlan
from limitgate.gate.slot_keeper import SlotKeeper
from limitgate.limits.decision import decide, undecided
from limitgate.limits.plan import Charge, Plan, Reading, read, with_bans
from limitgate.limits.template import AnyPlan
from limitgate.messages.diagnostics import Diagnosis
from limitgate.process.clock import monotonic
from limitgate.rules.options import OnError
from limitgate.stores.memory import MemoryStore

log: logging.Logger = logging.getLogger("limitgate")

CALM = 0.5
"""Seconds before a recovery is logged, because a full store still answers some requests."""
AGAIN = 60.0
"""Seconds between log lines."""


_EFFECTS: dict[OnError, str] = {
    "open": "open: requests pass without limits, unless a rule has its own on_error",
    "closed": "closed: requests get 503, unless a rule has its own on_error",
    "local": "local: this process alone limits requests, unless a rule has its own on_error",
}

Split = tuple[Plan, Plan | None]
"""Charges for the working part of the store, and charges that this process makes afterwards."""


class Outages:
    """Decides without the store. Each of the ``processes`` grants its share.

    Known bans stay in force. Store calls have ``timeout`` seconds. Calls ``at_recovery`` when the store answers again.
    """

    def __init__(
        self, store: Any, on_error: OnError, processes: int, *, timeout: float, at_recovery: Callable[[], object]
    ) -> None:
        self.failures: int = 0
        self.overloaded: int = 0
        self.last_error: tuple[str, float] | None = None
        """Text, and time in Unix seconds."""
        self.is_known: bool = False
        """True if further answers change nothing."""
        self.has_answered: bool = False
        self.at_first_answer: list[Callable[[], object]] = []
        """Called in any thread."""
        self._store = store
        self.store_slots: SlotKeeper = SlotKeeper(store, timeout)
        self._on_error: OnError = on_error
        self._processes = processes
        self._timeout = timeout
        self.at_recovery: list[Callable[[], object]] = [at_recovery]
        """Called in any thread."""
        self._is_failing, self._failed_at = False, 0.0
        self._said_overloaded = -AGAIN
        self._ban_left_us: Callable[[str], int] = getattr(store, "ban_left_us", lambda _: 0)
        self._local_store = MemoryStore()
        self.local_slots: SlotKeeper = SlotKeeper(self._local_store, timeout=1.0)

    def answered(self) -> None:
        if self.is_known:
            return
        # Set first, because another thread may note a failure.
        self.is_known = True
        if self._is_failing:
            if getattr(self._store, "healthy", True) and monotonic() - self._failed_at > CALM:
                self._is_failing = False
                log.warning("the store answers again")
                for tell in self.at_recovery:
                    tell()
            else:
                self.is_known = False
        if not self.has_answered:
            self.has_answered = True
            for tell in self.at_first_answer:
                tell()

    def failed(self, error: StoreError) -> None:
        if error.fault == "overload":
            self._note_overload(error)
            return
        self.failures += 1
        self._failed_at = monotonic()
        self.last_error = str(error), time.time()
        if not self._is_failing:
            self._is_failing, self.is_known = True, False
            effect = _EFFECTS[self._default_policy(error)]
            log.warning("the store failed, on_error decides until it answers again (%s): %s", effect, error)

    def _note_overload(self, error: StoreError) -> None:
        self.overloaded += 1
        if monotonic() - self._said_overloaded > AGAIN:
            self._said_overloaded = monotonic()
            Diagnosis.OVERLOADED.log(error)

    def decide(self, request_plan: RequestPlan, error: StoreError) -> Flow[Verdict]:
        self.failed(error)
        self.release_later(request_plan.plan, error.keys)
        outcome = self.without_store(request_plan, error)
        if isinstance(outcome, Verdict):
            return outcome
        try:
            reading = yield outcome[0], self._timeout
        except StoreError as further:
            self.release_later(outcome[0], further.keys)
            local = self._local(request_plan, (), further)
            return Verdict(undecided(allowed=False)) if local is None else self._by_this_process(request_plan, local)
        except BaseException:
            self.release_later(request_plan.plan)
            raise
        return self._with_rest(request_plan, outcome, reading)

    def without_store(self, request_plan: RequestPlan, error: StoreError) -> Verdict | Split:
        """Decide without the store. Return a split if part of the store works."""
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
        return Plan.spend(rest), Plan.spend(local) if local else None

    def release_later(self, plan: AnyPlan | None, keys: frozenset[str] = frozenset()) -> None:
        """Release slots that the store may have taken. Without ``keys``, release all."""
        charges = plan.charges if plan else ()
        self.store_slots.release_later([charge for charge in charges if not keys or charge.key in keys])

    def apply_refund(self, plan: Plan) -> None:
        self._local_store.spend(plan)

    def _with_rest(self, request_plan: RequestPlan, split: Split, reading: Reading) -> Verdict:
        rest, local = split
        if local is None or not reading.admitted:
            return _verdict(rest, reading, Receipt(request_plan, rest, reading))._replace(source=reading.source)
        here = self._local_store.spend(local)
        both = Plan.spend([*rest.charges, *local.charges])
        charged = [Receipt(request_plan, rest, reading), Receipt(request_plan, local, here, is_local=True)]
        return _verdict(both, Reading(reading.now, [*reading.buckets, *here.buckets], here.admitted), *charged)

    def _local(self, request_plan: RequestPlan, rest: Sequence[Charge], error: StoreError) -> list[Charge] | None:
        """Return this process' share of the charges outside ``rest``; None if a rule is ``closed`` and the request costs."""
        local: list[Charge] = []
        for charge, compiled_rule in zip(request_plan.plan.charges if request_plan.plan else (), request_plan.compiled_rules):
            if charge in rest or not compiled_rule.enforced:
                continue
            policy = self._policy(compiled_rule, error)
            if policy == "closed" and charge.cost:
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
        """Carry out a plan in this process. If a bucket is banned, only read it."""
        lefts = [self._ban_left_us(charge.key) if charge.cost else 0 for charge in plan.charges]
        bans = {place: left for place, left in enumerate(lefts) if left}
        if not bans:
            return plan, self._local_store.spend(plan)
        reading = self._local_store.spend(Plan.peek(plan.charges))
        charges, states = with_bans(plan.charges, [bucket.before for bucket in reading.buckets], bans)
        return Plan.peek(charges), read(charges, reading.now, states)

    def _policy(self, compiled_rule: CompiledRule, error: StoreError) -> OnError:
        if error.fault == "overload":
            return "local"
        return compiled_rule.rule.on_error or self._default_policy(error)

    def _default_policy(self, error: StoreError) -> OnError:
        """If Redis is out of memory, ``open`` applies only to rules that set it themselves."""
        return "local" if error.fault == "oom" and self._on_error == "open" else self._on_error


def _verdict(plan: Plan, reading: Reading, *charged: Receipt) -> Verdict:
    admitted = tuple([each for each in charged if each.reading.admitted])
    return Verdict(replace(decide(plan, reading), degraded=True), reading.now, admitted, "local")
