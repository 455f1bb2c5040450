"""Bans clients that rules refuse too often, see `limitgate.rules.ban`.

The store counts refusals and starts a ban atomically. Each process makes one call per bucket at a time, and batches the
refusals that arrive meanwhile.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from limitgate.algorithms import ban as ban_algorithm
from limitgate.errors import StoreError
from limitgate.gate.admission import Admission
from limitgate.gate.ban_notes import BanNotes
from limitgate.gate.flow import Flow
from limitgate.gate.journal import Ban
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.refusal_count import counting
from limitgate.gate.refusal_log import RefusalLog
from limitgate.internal_errors import logged_errors
from limitgate.limits.decision import Decision
from limitgate.limits.plan import Charge, Reading
from limitgate.messages.text import Names
from limitgate.process.forking import reset_in_children
from limitgate.rules.ban import Ban as BanTerms

MOST = 1_000
"""Buckets whose refusals are counted at the same time."""
ROUNDS = 8
"""Maximum number of calls of one refused request."""


class _Refusing(NamedTuple):
    charge: Charge
    """The rule's first bucket holds the ban."""
    compiled_rule: CompiledRule
    terms: BanTerms


class Bans:
    """Counts refusals for rules with a ``ban``, and reports new bans.

    If ``store`` keeps configuration, its journal records them.
    """

    def __init__(self, store: Any, key_prefix: str, names: Names, timeout: float, refusal_log: RefusalLog | None) -> None:
        self._names: Names = names
        self._timeout = timeout
        self._refusal_log = refusal_log
        self.notes = BanNotes(store, key_prefix, timeout)
        reset_in_children(self)
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Reset in the child of a fork."""
        # Reentrant, because a garbage-collected flow may end while another one holds the lock.
        self._lock = threading.RLock()
        self._under_way: dict[str, int] = {}

    def counting(
        self, admission: Admission, decision: Decision, compiled_rules: Sequence[CompiledRule]
    ) -> Flow[dict[str, int]]:
        """Count a refusal for each refusing rule. Return the bans in force by key, in µs.

        ``compiled_rules`` belong to the charges of the plan. Refusals by a ban, without the store, or
        with an infinite ``retry_after`` don't count.
        """
        banned: dict[str, int] = {}
        for refusing in _refusing(decision, compiled_rules):
            charge = refusing.charge
            with self._lock:
                if charge.key in self._under_way:
                    self._under_way[charge.key] += 1
                    continue
                if len(self._under_way) >= MOST:
                    continue
                self._under_way[charge.key] = 0
            try:
                us = yield from self._counting(refusing, partial(self._name, admission, refusing.compiled_rule))
            finally:
                with self._lock:
                    self._under_way.pop(charge.key, None)
            if us:
                banned[charge.key] = us
        return banned

    def _counting(self, refusing: _Refusing, name: Callable[[], str]) -> Flow[int]:
        key = refusing.charge.key
        refusals = 1
        for _ in range(ROUNDS):
            try:
                reading: Reading = yield counting(refusing.charge, refusing.terms, refusals), self._timeout
            except StoreError:
                return 0
            _, count, bucket = reading.buckets
            if count.before[0].began_us:
                # Naming the client calls code of the application.
                with logged_errors():
                    self._report(refusing, name(), count.before[0].began_us, reading.now)
            if bucket.charge.bucket.algorithm is ban_algorithm:
                return int(bucket.before[0])
            with self._lock:
                refusals, self._under_way[key] = self._under_way[key], 0
            if not refusals:
                break
        return 0

    def _name(self, admission: Admission, compiled_rule: CompiledRule) -> str:
        return compiled_rule.named(admission.rules.planner.subject(admission.request, admission.identified), self._names)

    def _report(self, refusing: _Refusing, who: str, us: int, now: int) -> None:
        charge, compiled_rule, terms = refusing
        rule = compiled_rule.name
        if compiled_rule.row is not None:
            compiled_rule.row.count_ban()
        if self._refusal_log is not None:
            self._refusal_log.note_ban(rule, who, us / 1e6, terms.after, terms.within)
        reason = f"refused {terms.after} times within {terms.within:g} s"
        ban = Ban.by_rule(rule, who, charge.key, (now + us) / 1e6, reason)
        self.notes.add(ban, charge._replace(max_wait_us=0, slot=0, adjustment=None))


def _refusing(decision: Decision, compiled_rules: Sequence[CompiledRule]) -> list[_Refusing]:
    first: dict[int, Charge] = {}
    refusing: dict[int, CompiledRule] = {}
    for (charge, _, after), compiled_rule in zip(decision.evidence, compiled_rules):
        first.setdefault(id(compiled_rule), charge)
        if after is None and charge.enforced:
            if charge.bucket.algorithm is ban_algorithm:
                return []
            refusing[id(compiled_rule)] = compiled_rule
    # A ban of a client that no wait helps would promise one in its Retry-After.
    if decision.degraded or math.isinf(decision.retry_after):
        return []
    rules = [(first[number], each, each.rule.ban) for number, each in refusing.items()]
    return [_Refusing(charge, each, terms) for charge, each, terms in rules if terms is not None]
