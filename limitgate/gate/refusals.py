"""Makes and logs refusals, with ids whose key is derived from ``secret`` or kept in the store.

Requests never wait for the key, because a process starts with a random one. Later refusals poll the store, which gets the key
again if it lost it.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from logging import INFO
from secrets import token_bytes
from typing import Any

from limitgate.gate.admission import Admission
from limitgate.gate.flow import ConfigFlow, arun, run
from limitgate.gate.permits import Permits
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.http.rate_fields import Style
from limitgate.http.response import Refusal, RefusalKey, as_provider, provider_styles, quota_exceeded
from limitgate.internal_errors import logged_errors
from limitgate.limits.decision import Decision
from limitgate.messages.text import Names
from limitgate.observing.logs import Episodes, log
from limitgate.process import switch
from limitgate.process.background import daemon
from limitgate.process.clock import monotonic
from limitgate.process.forking import get_ready_for_forks
from limitgate.stores import MemoryStore
from limitgate.stores.base import AsyncConfigStore, ConfigRequest, StoredConfig, SyncConfigStore

_TIMEOUT = 1.0
"""Seconds."""
_AGAIN = 60.0
"""Seconds between polls."""
_TRIES = 8
_MOST = 64
"""Maximum of keys. The first one is in force. Processes used the others before they read it."""


def place_of_keys(key_prefix: str) -> str:
    return f"{key_prefix}:refusal-ids"


def kept_keys(text: str | None) -> list[bytes]:
    words = (text or "").split()
    return [bytes.fromhex(word) for word in words] if all(re.fullmatch("[0-9a-f]{64}", word) for word in words) else []


def _text(keys: Sequence[bytes]) -> str:
    return " ".join([key.hex() for key in keys])


class Refusals:
    """Without a ``secret``, the first refusal writes the key of ids to the store."""

    def __init__(self, store: Any, key_prefix: str, secret: bytes = b"", refusal_log: RefusalLog | None = None) -> None:
        self.log = refusal_log
        is_shared = isinstance(store, SyncConfigStore | AsyncConfigStore) and not isinstance(store, MemoryStore)
        self.is_agreed: bool = bool(secret) or not is_shared
        """True once other processes can read the ids."""
        self._key = RefusalKey.derived(secret) if secret else RefusalKey(token_bytes(32))
        self._store = None if self.is_agreed else store
        self._place = place_of_keys(key_prefix)
        self._has_written = False
        self._next_look = math.inf if self._store is None else 0.0
        self._under_way: threading.Thread | asyncio.Future[None] | None = None
        get_ready_for_forks(self)

    @property
    def key(self) -> RefusalKey:
        return self._key

    def refuse(  # noqa: PLR0917 - keywords would be slower
        self,
        admission: Admission,
        decision: Decision,
        rules: tuple[str | None, ...],
        key: str,
        now: int,
        compiled_rules: Sequence[CompiledRule],
    ) -> Refusal:
        """Make a refusal by ``rules`` for the bucket ``key``. ``now`` is Unix µs."""
        self._has_written = True
        rule = decision.rule
        for each in compiled_rules:
            if each.name == rule:
                rule = each.id_name
                break
        wait, written = decision.retry_after, self._key.write(now, rule, key)
        refusal = quota_exceeded(rules, wait, written, is_permanent_ban=wait == math.inf and decision.is_permanent_ban)
        if monotonic() > self._next_look:
            self.agree_soon()
        if self.log is not None and not self.log.episodes.count(key, now) and log.isEnabledFor(INFO):
            self.log.begin(admission, decision, key, now, refusal.id, compiled_rules)
        return refusal

    def banned(self, decision: Decision, refusal_id: str) -> Refusal:
        return quota_exceeded(decision.refusing, decision.retry_after, refusal_id.encode())

    def agree_at_first(self) -> None:
        if not self.is_agreed:
            self.agree_soon()

    def agree_soon(self) -> None:
        """Agree on the key in a task or thread that leaves no connection open."""
        if self._store is None or switch.stand_in is not None:
            return
        self._next_look, closings = monotonic() + _AGAIN, self._closings
        if isinstance(self._store, AsyncConfigStore):
            with suppress(RuntimeError):
                loop = asyncio.get_running_loop()
                self._under_way = loop.create_task(arun(self._store, self._agree(closings)), context=Context())
                return
        if isinstance(self._store, SyncConfigStore):
            with suppress(RuntimeError):
                self._under_way = daemon("refusals", self._agree_here, self._store, closings)

    def before_fork(self) -> None:
        """Wait for the thread, because the child must not inherit locked locks."""
        thread = self._under_way
        if isinstance(thread, threading.Thread) and thread is not threading.current_thread():
            thread.join(_TIMEOUT)

    @property
    def _closings(self) -> int:
        closings: int = getattr(self._store, "closings", 0)
        return closings

    def _agree_here(self, store: SyncConfigStore, closings: int) -> None:
        run(store, self._agree(closings))
        if self._closings != closings:
            # They were opened after the store was closed.
            store.close()

    def _agree(self, closings: int) -> ConfigFlow[None]:
        try:
            # The next recovery or refusal tries again.
            with logged_errors():
                yield from self._exchange(closings)
        except BaseException:
            self._next_look = 0.0
            raise

    def _exchange(self, closings: int) -> ConfigFlow[None]:
        """Adopt the key in force. Store this process' key if its ids are in use."""
        own = self._key.key
        keys: list[bytes] = []
        request = ConfigRequest(self._place)
        for _ in range(1 + _TRIES):
            if self._closings != closings:
                break
            stored: StoredConfig = yield request, _TIMEOUT
            keys = kept_keys(stored.text)
            if keys:
                self._key = self._key if keys[0] == self._key.key else RefusalKey(keys[0])
            elif stored.text is not None:
                # Something else has this name.
                return
            self.is_agreed = bool(keys)
            if own in keys or not self._has_written:
                break
            text = _text([*keys[:1], *keys[1:][2 - _MOST :], own])
            request = ConfigRequest(self._place, text, stored.version)
        if not keys:
            # The first refusal writes the key.
            self._next_look = 0.0


class ProviderRefusals(Refusals):
    styles: frozenset[str]

    def refuse(self, admission: Admission, decision: Decision, *rest: Any) -> Refusal:
        return as_provider(super().refuse(admission, decision, *rest), decision, self.styles)

    def banned(self, decision: Decision, refusal_id: str) -> Refusal:
        return as_provider(super().banned(decision, refusal_id), decision, self.styles)


def refusals_for(
    styles: Iterable[Style], store: Any, key_prefix: str, secret: bytes, refusal_log: RefusalLog | None
) -> Refusals:
    providers = provider_styles(styles)
    if not providers:
        return Refusals(store, key_prefix, secret, refusal_log)
    refusals = ProviderRefusals(store, key_prefix, secret, refusal_log)
    refusals.styles = providers
    return refusals


class RefusalLog:
    """Logs refusing buckets, at most ``per_minute`` lines, with names by ``names``."""

    def __init__(self, per_minute: int, names: Names) -> None:
        self.episodes: Episodes = Episodes(per_minute)
        """Call `begin` if `count` returns False."""
        self._names = names

    def begin(  # noqa: PLR0917 - keywords would be slower
        self,
        admission: Admission,
        decision: Decision,
        key: str,
        now: int,
        refusal_id: str | None,
        compiled_rules: Sequence[CompiledRule],
    ) -> None:
        """Start an episode of bucket ``key``. ``now`` is Unix µs."""
        name = partial(self._name, admission, decision.rule, compiled_rules)
        self.episodes.begin(key, decision.rule, now, refusal_id, name)

    def note_shadows(self, admission: Admission, decision: Decision, now: int, compiled_rules: Sequence[CompiledRule]) -> None:
        full = [charge for charge, _, after in decision.evidence if after is None and not charge.enforced]
        for key, rule in {charge.key.removesuffix(charge.bucket.suffix): charge.rule for charge in full}.items():
            if not self.episodes.count(key, now) and log.isEnabledFor(INFO):
                name = partial(self._name, admission, rule, compiled_rules)
                self.episodes.begin(key, rule, now, None, name, is_shadow=True)

    def note_ban(self, rule: str, who: str, seconds: float, after: int, within: float) -> None:
        """Record a ban for ``seconds``, after ``after`` refusals within ``within`` seconds."""
        facts = {"rule": rule, "who": who, "seconds": seconds, "after": after, "within": within}
        shown = rule, f" {who}" if who else "", seconds, after, within
        self.episodes.tell("rule %s bans%s for %g s: refused %d times within %g s", shown, facts)

    def note_shed(self, permits: Permits) -> None:
        self._note_no_place(permits.in_force[-1][0], is_shadow=False)

    def note_shed_by_shadows(self, permits: Permits) -> None:
        for compiled_rule in permits.would_refuse:
            self._note_no_place(compiled_rule.name, is_shadow=True)

    def _note_no_place(self, rule: str | None, *, is_shadow: bool) -> None:
        key, now = f"adaptive {rule}", time.time_ns() // 1000
        if not self.episodes.count(key, now) and log.isEnabledFor(INFO):
            self.episodes.begin(
                key, rule, now, None, lambda: "requests beyond the capacity of this process", is_shadow=is_shadow
            )

    def _name(self, admission: Admission, rule: str | None, compiled_rules: Sequence[CompiledRule]) -> str:
        refusing = next((each for each in compiled_rules if each.rule.name == rule), None)
        if refusing is None or admission.settlement.is_over:
            return ""
        subject = admission.rules.planner.subject(admission.request, admission.identified)
        return refusing.named(subject, self._names)
