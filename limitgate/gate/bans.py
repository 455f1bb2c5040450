"""Bans clients that rules refuse too often, see `limitgate.rules.options`.

The store counts refusals and sets bans atomically. A bucket has one call at a time, with all refusals since the previous one.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

from limitgate.algorithms import ban as ban_algorithm
from limitgate.errors import StoreError
from limitgate.gate.admission import Admission
from limitgate.gate.flow import ConfigFlow, Flow, arun, run
from limitgate.gate.journal import MOST_BANS, Ban, JournalFlows
from limitgate.gate.planning.compiled_rule import CompiledRule, counting
from limitgate.gate.refusals import RefusalLog
from limitgate.internal_errors import logged_errors
from limitgate.limits.decision import Decision
from limitgate.limits.plan import Charge, Plan, Reading
from limitgate.messages.text import Names
from limitgate.process.background import daemon
from limitgate.process.clock import begin
from limitgate.process.forking import reset_in_children
from limitgate.rules.options import Ban as BanTerms
from limitgate.stores.base import AsyncConfigStore, SyncConfigStore, calls_of

MOST = 1_000
"""Maximum of buckets whose refusals are being counted."""
ROUNDS = 8
"""Maximum of calls per refused request."""


class _Refusing(NamedTuple):
    charge: Charge
    """The rule's first; its bucket has the ban."""
    compiled_rule: CompiledRule
    terms: BanTerms


class Bans:
    """Counts refusals for rules with a ``ban``, and journals new bans."""

    def __init__(self, store: Any, key_prefix: str, names: Names, timeout: float, refusal_log: RefusalLog | None) -> None:
        self._names: Names = names
        self._timeout = timeout
        self._refusal_log = refusal_log
        self.notes: BanNotes = BanNotes(store, key_prefix, timeout)
        reset_in_children(self)
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        # Reentrant, because a garbage-collected flow may end while another one holds the lock.
        self._lock = threading.RLock()
        self._under_way: dict[str, int] = {}

    def counting(
        self, admission: Admission, decision: Decision, compiled_rules: Sequence[CompiledRule]
    ) -> Flow[dict[str, int]]:
        """Count a refusal for each refusing rule. Return the bans in force by key, in µs.

        Refusals by a ban, without the store, or with an infinite ``retry_after`` don't count.
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
    # If waiting can't help, a ban must not promise an end in its Retry-After.
    if decision.degraded or math.isinf(decision.retry_after):
        return []
    rules = [(first[number], each, each.rule.ban) for number, each in refusing.items()]
    return [_Refusing(charge, each, terms) for charge, each, terms in rules if terms is not None]


PAUSE = 1.0
"""Seconds between attempts."""
LAST = 2.0

_Noted = tuple[Ban, Charge]


class BanNotes:
    """Writes bans in a task or a thread, with retries. ``timeout`` is in seconds per call."""

    def __init__(self, store: Any, key_prefix: str, timeout: float) -> None:
        self._store = store
        self._timeout = timeout
        self._journal = JournalFlows(key_prefix, timeout)
        self._is_kept = isinstance(store, SyncConfigStore | AsyncConfigStore)
        self.reset_after_fork()
        reset_in_children(self)
        _all.add(self)

    def reset_after_fork(self) -> None:
        # Reentrant, as in `Bans`.
        self._lock = threading.RLock()
        self._waiting: dict[str, _Noted] = {}
        self._job: asyncio.Task[None] | threading.Thread | None = None
        self._is_ending = threading.Event()

    def add(self, ban: Ban, charge: Charge) -> None:
        if not self._is_kept:
            return
        with self._lock:
            self._wait(self._waiting | {charge.key: (ban, charge)})
            if not self._runs():
                self._start()

    async def asettled(self) -> None:
        job = self._job
        if isinstance(job, asyncio.Task) and not job.done() and job.get_loop() is asyncio.get_running_loop():
            # A cancelled task writes them first.
            job.cancel()
            await asyncio.wait([job])

    def end(self) -> None:
        self._is_ending.set()
        if isinstance(self._job, threading.Thread):
            self._job.join(LAST)

    def _wait(self, noted: dict[str, _Noted]) -> None:
        """Keep the last ones."""
        while len(noted) > MOST_BANS:
            del noted[next(iter(noted))]
        self._waiting = noted

    def _runs(self) -> bool:
        if isinstance(self._job, threading.Thread):
            return self._job.is_alive()
        return self._job is not None and not self._job.done() and self._job.get_loop().is_running()

    def _start(self) -> None:
        if isinstance(self._store, AsyncConfigStore):
            with suppress(RuntimeError):
                asyncio.get_running_loop()
                self._job = begin(self._awriting())
                return
        if isinstance(self._store, SyncConfigStore):
            # The next ban tries again.
            with suppress(RuntimeError):
                self._job = daemon("bans", self._writing)

    def _writing(self) -> None:
        while self._has_more():
            with logged_errors():
                run(self._store, self._batch())
            if self._is_ending.wait(PAUSE):
                with logged_errors():
                    run(self._store, self._batch())
                return

    async def _awriting(self) -> None:
        try:
            while self._has_more():
                with logged_errors():
                    await arun(self._store, self._batch())
                await asyncio.sleep(PAUSE)
        except asyncio.CancelledError:
            with logged_errors(), suppress(TimeoutError):
                await asyncio.wait_for(arun(self._store, self._batch()), LAST)
            raise

    def _has_more(self) -> bool:
        """Return False to end the job, because the next ban starts another one."""
        with self._lock:
            if not self._waiting:
                self._job = None
            return bool(self._waiting)

    def _batch(self) -> ConfigFlow[None]:
        with self._lock:
            noted, self._waiting = self._waiting, {}
        if not noted:
            return
        try:
            lifted = yield from self._lifted(noted)
            bans = {key: each for key, each in noted.items() if key not in lifted}
            if not bans:
                return
            yield from self._journal.noting_bans([ban for ban, _ in bans.values()])
            # A pardon lifts a ban before it changes the journal, so this finds any that came in between.
            if lifted := (yield from self._lifted(bans)):
                yield from self._journal.removing(list(lifted))
        except BaseException as error:
            with self._lock:
                self._wait(noted | self._waiting)
            if not isinstance(error, StoreError):
                raise

    def _lifted(self, noted: Mapping[str, _Noted]) -> ConfigFlow[set[str]]:
        lifted: set[str] = set()
        for together in calls_of([Plan.look([charge]) for _, charge in noted.values()]):
            reading = yield Plan.look([plan.charges[0] for plan in together]), self._timeout
            lifted |= {charge.key for charge, *_ in reading.buckets if charge.bucket.algorithm is not ban_algorithm}
        return lifted


_all: WeakSet[BanNotes] = WeakSet()


@atexit.register
def _end() -> None:
    for notes in list(_all):
        notes.end()
