"""Refusals by buckets, and the key of their ids: derived from ``secret``, or kept in the store for all processes.

No request waits for the store's key. Until it is known, ids are written by a random key of this process. Refusals look at it
again from time to time: a store that was emptied gets it back.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context
from logging import INFO
from secrets import token_bytes
from typing import Any

from limitgate.gate.admission import Admission
from limitgate.gate.flow import ConfigFlow, arun, run
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.refusal_log import RefusalLog
from limitgate.http.response import Refusal, quota_exceeded
from limitgate.internal_errors import logged_errors
from limitgate.limits.decision import Decision
from limitgate.limits.refusal_id import RefusalKey
from limitgate.observing.episodes import log
from limitgate.process.clock import monotonic
from limitgate.process.forking import get_ready_for_forks
from limitgate.stores import MemoryStore
from limitgate.stores.base import AsyncConfigStore, ConfigRequest, StoredConfig, SyncConfigStore

_TIMEOUT = 1.0
"""Seconds that the store may take to answer."""
_AGAIN = 60.0
"""Seconds between two looks by refusals."""
_TRIES = 8
"""Times to add a key while other processes add theirs."""
_MOST = 64
"""Keys that a store keeps: the first is in force, the others wrote ids before their processes knew it."""


def place_of_keys(key_prefix: str) -> str:
    """Where a store keeps the keys of ids."""
    return f"{key_prefix}:refusal-ids"


def kept_keys(text: str | None) -> list[bytes]:
    """The keys in a text of a store's; none where it is of something else."""
    words = (text or "").split()
    return [bytes.fromhex(word) for word in words] if all(re.fullmatch("[0-9a-f]{64}", word) for word in words) else []


def _text(keys: Sequence[bytes]) -> str:
    return " ".join([key.hex() for key in keys])


class Refusals:
    """Makes the refusals of a gate, and has them logged. Without a ``secret``, the store keeps the key of their ids.

    The first process that refuses a request writes its own key there.
    """

    def __init__(self, store: Any, key_prefix: str, secret: bytes = b"", refusal_log: RefusalLog | None = None) -> None:
        self.log = refusal_log
        """Logs who is refused; None where that is not wanted."""
        is_shared = isinstance(store, SyncConfigStore | AsyncConfigStore) and not isinstance(store, MemoryStore)
        self.is_agreed = bool(secret) or not is_shared
        """True once the ids can be read by others, or if the store keeps no key at all."""
        self._key = RefusalKey.derived(secret) if secret else RefusalKey(token_bytes(32))
        self._store = None if self.is_agreed else store
        self._place = place_of_keys(key_prefix)
        self._has_written = False
        self._next_look = math.inf if self._store is None else 0.0
        self._under_way: threading.Thread | asyncio.Future[None] | None = None
        get_ready_for_forks(self)

    def refuse(  # noqa: PLR0917 - keywords would take longer
        self,
        admission: Admission,
        decision: Decision,
        rules: tuple[str | None, ...],
        key: str,
        now: int,
        compiled_rules: Sequence[CompiledRule],
    ) -> Refusal:
        """The answer to a request that ``rules`` refuse, one of them by the bucket of a key, at ``now``, Unix µs.

        ``compiled_rules`` are those of its plan.
        """
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

    def agree_at_first(self) -> None:
        """`agree_soon`, unless that is done."""
        if not self.is_agreed:
            self.agree_soon()

    def agree_soon(self) -> None:
        """Agree on the key with the other processes, in the background: in a task, or in a thread where no event loop runs.

        If the store is closed meanwhile, nothing more is asked, and no connection is left.
        """
        if self._store is None:
            return
        self._next_look, closings = monotonic() + _AGAIN, self._closings
        if isinstance(self._store, AsyncConfigStore):
            with suppress(RuntimeError):
                loop = asyncio.get_running_loop()
                self._under_way = loop.create_task(arun(self._store, self._agree(closings)), context=Context())
                return
        if isinstance(self._store, SyncConfigStore):
            thread = threading.Thread(
                target=Context().run, args=[self._agree_here, self._store, closings], name="limitgate-refusals", daemon=True
            )
            with suppress(RuntimeError):  # no thread can be started now
                thread.start()
                self._under_way = thread

    def before_fork(self) -> None:
        """Wait for a moment until the thread has ended: locks that it holds would stay locked in the child."""
        thread = self._under_way
        if isinstance(thread, threading.Thread) and thread is not threading.current_thread():
            thread.join(_TIMEOUT)

    @property
    def _closings(self) -> int:
        """Times that the store was closed, if it counts them."""
        closings: int = getattr(self._store, "closings", 0)
        return closings

    def _agree_here(self, store: SyncConfigStore, closings: int) -> None:
        run(store, self._agree(closings))
        if self._closings != closings:
            store.close()  # what has been opened since

    def _agree(self, closings: int) -> ConfigFlow[None]:
        try:
            with logged_errors():  # a `StoreError`, too: the next recovery of the store or a later refusal tries again
                yield from self._exchange(closings)
        except BaseException:  # the event loop has ended
            self._next_look = 0.0
            raise

    def _exchange(self, closings: int) -> ConfigFlow[None]:
        """Take the key in force. If ids were written by another one, or if there is none yet, the store keeps that one, too."""
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
                return  # something else is there
            self.is_agreed = bool(keys)
            if own in keys or not self._has_written:
                break
            text = _text([*keys[:1], *keys[1:][2 - _MOST :], own])
            request = ConfigRequest(self._place, text, stored.version)
        if not keys:
            self._next_look = 0.0  # the first refusal writes it
