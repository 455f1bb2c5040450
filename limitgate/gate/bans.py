"""Bans of clients that rules refuse too often, see `limitgate.rules.ban`.

The refusals are counted in the store, which begins a ban in the same step as the refusal that leads to it. So processes agree.
The refused request waits for that, unless refusals by the same bucket are being counted already: then its own is counted next,
with all others. So a flood has one call for each bucket under way, and a client that comes back finds the ban.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from limitgate.algorithms import ban as ban_algorithm
from limitgate.errors import StoreError
from limitgate.gate.admission import Admission
from limitgate.gate.flow import Flow
from limitgate.gate.journal import MOST_BANS, Ban, JournalFlows
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.refusal_count import counting
from limitgate.gate.refusal_log import RefusalLog
from limitgate.internal_errors import logged_errors
from limitgate.limits.decision import Decision
from limitgate.limits.plan import Charge, Reading
from limitgate.messages.text import Names
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children
from limitgate.rules.ban import Ban as BanTerms
from limitgate.stores.base import AsyncConfigStore, SyncConfigStore

MOST = 1_000
"""Buckets of which a process counts refusals at the same time. Refusals by others are not counted then."""
ROUNDS = 8
"""Calls that a refused request makes at most, for its own refusal and those that come meanwhile."""
_NOTES = 20.0
"""Notes in the journal at once. A further one is allowed each second."""


class Banned(NamedTuple):
    """A ban that has begun."""

    rule: str
    seconds: float


class _Refusing(NamedTuple):
    """A rule with a ``ban`` that refused a request."""

    charge: Charge
    """The charge to its first bucket, in which its bans are."""
    compiled_rule: CompiledRule
    terms: BanTerms


class Bans:
    """Counts the refusals of a gate's rules with a ``ban``, and reports the bans that these lead to.

    If the ``store`` keeps configuration, bans are noted in its journal.
    """

    def __init__(self, store: Any, key_prefix: str, names: Names, timeout: float, refusal_log: RefusalLog | None) -> None:
        self._names: Names = names
        self._timeout = timeout
        self._refusal_log = refusal_log
        self._notes = _JournalNotes(store, JournalFlows(key_prefix, timeout))
        reset_in_children(self)
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """In the child of a fork: nothing is under way."""
        self._lock = threading.RLock()  # a flow that is collected as garbage ends in the midst of another
        self._under_way: dict[str, int] = {}
        """By the key of a bucket whose refusals are being counted, those that have come since."""

    def counting(self, admission: Admission, decision: Decision, compiled_rules: Sequence[CompiledRule]) -> Flow[Banned | None]:
        """Count a refusal; the rules are those behind the charges of its plan. Returns the ban that it led to.

        It counts for each rule that refused, unless it was a ban that refused, or the store did not decide.
        """
        banned = None
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
            if us and (banned is None or us / 1e6 > banned.seconds):
                banned = Banned(refusing.compiled_rule.name, us / 1e6)
        if self._notes.waiting:
            yield from self._notes.writing()
        return banned

    def _counting(self, refusing: _Refusing, name: Callable[[], str]) -> Flow[int]:
        """Count a refusal by a bucket, and those that come meanwhile. Returns for how many microseconds it is banned then."""
        key = refusing.charge.key
        refusals = 1
        for _ in range(ROUNDS):
            try:
                reading: Reading = yield counting(refusing.charge, refusing.terms, refusals), self._timeout
            except StoreError:  # requests show whether it works
                return 0
            _, count, bucket = reading.buckets
            if count.before[0].began_us:
                with logged_errors():  # callers and users are objects of the application's
                    self._report(refusing, name(), count.before[0].began_us, reading.now)
            if bucket.charge.bucket.algorithm is ban_algorithm:
                return int(bucket.before[0])
            with self._lock:
                refusals, self._under_way[key] = self._under_way[key], 0
            if not refusals:
                break
        return 0

    def _name(self, admission: Admission, compiled_rule: CompiledRule) -> str:
        """Name of the client that a rule refused."""
        return compiled_rule.named(admission.rules.planner.subject(admission.request, admission.identified), self._names)

    def _report(self, refusing: _Refusing, who: str, us: int, now: int) -> None:
        charge, compiled_rule, terms = refusing
        rule = compiled_rule.name
        if compiled_rule.row is not None:
            compiled_rule.row.count_ban()
        if self._refusal_log is not None:
            self._refusal_log.note_ban(rule, who, us / 1e6, terms.after, terms.within)
        reason = f"refused {terms.after} times within {terms.within:g} s"
        self._notes.add(Ban.by_rule(rule, who, charge.key, (now + us) / 1e6, reason))


def _refusing(decision: Decision, compiled_rules: Sequence[CompiledRule]) -> list[_Refusing]:
    """The rules with a ``ban`` that refused; none if the store did not decide, or if it was a ban that refused."""
    first: dict[int, Charge] = {}
    refusing: dict[int, CompiledRule] = {}
    for (charge, _, after), compiled_rule in zip(decision.evidence, compiled_rules):
        first.setdefault(id(compiled_rule), charge)
        if after is None and charge.enforced:
            if charge.bucket.algorithm is ban_algorithm:
                return []
            refusing[id(compiled_rule)] = compiled_rule
    if decision.degraded:
        return []
    rules = [(first[number], each, each.rule.ban) for number, each in refusing.items()]
    return [_Refusing(charge, each, terms) for charge, each, terms in rules if terms is not None]


class _JournalNotes:
    """Bans to be noted in the journal: one by one, but of many in a short time together, at most one note a second."""

    def __init__(self, store: object, journal: JournalFlows) -> None:
        self._is_kept = isinstance(store, SyncConfigStore | AsyncConfigStore)
        self._journal = journal
        reset_in_children(self)
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """In the child of a fork: the parent notes its own bans."""
        self._lock = threading.RLock()
        self.waiting: dict[str, Ban] = {}
        self._allowed, self._allowed_at = _NOTES, monotonic()

    def add(self, *bans: Ban) -> None:
        """Add bans to those that wait; of more than the journal keeps the oldest are dropped."""
        with self._lock:
            self.waiting |= {ban.keys[0]: ban for ban in bans if self._is_kept}
            while len(self.waiting) > MOST_BANS:
                del self.waiting[next(iter(self.waiting))]

    def writing(self) -> Flow[None]:
        """Note the bans that wait, unless there were too many notes just now: then the next refusal tries again."""
        with self._lock:
            now = monotonic()
            self._allowed, self._allowed_at = min(_NOTES, self._allowed + now - self._allowed_at), now
            if self._allowed < 1:
                return
            self._allowed -= 1
            bans, self.waiting = [*self.waiting.values()], {}
        noting: Any = self._journal.noting_bans(bans)  # of a wider kind of flow, which is run alike
        try:
            yield from noting
        except StoreError:
            self.add(*bans)
