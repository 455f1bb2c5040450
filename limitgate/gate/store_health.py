"""The health of a store as its gate sees it: failures are counted, and the log says when the store fails and answers again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from limitgate.errors import StoreError
from limitgate.messages.diagnostics import Diagnosis
from limitgate.process.clock import monotonic

log = logging.getLogger("limitgate")

CALM = 0.5
"""Seconds without a failure until it is logged that the store answers again: a full one answers every other request."""
AGAIN = 60.0
"""Seconds between two logs that this process is overloaded."""


class StoreHealth:
    """Failures of a store. ``at_first_answer`` is called with its first reading, ``at_recovery`` when it answers again."""

    def __init__(
        self,
        store: Any,
        at_first_answer: Callable[[], None],
        at_recovery: Callable[[], object],
    ) -> None:
        self.failures = 0
        """Number of times the store did not answer."""
        self.overloaded = 0
        """Number of times this process had no room to ask the store, and limited by itself."""
        self.is_known = False
        """True while an answer is no news: it is neither the first one nor the first after a failure."""
        self._store = store
        self._at_first_answer: Callable[[], None] | None = at_first_answer
        self._at_recovery = at_recovery
        self._is_failing, self._failed_at = False, 0.0
        self._said_overloaded = -AGAIN

    @property
    def has_answered(self) -> bool:
        """True if the store has decided about a request."""
        return self._at_first_answer is None

    def answered(self) -> None:
        """Note an answer of the store."""
        if self.is_known:
            return
        self.is_known = True  # first, as another thread may note a failure meanwhile
        if self._is_failing:
            if getattr(self._store, "healthy", True) and monotonic() - self._failed_at > CALM:
                self._is_failing = False
                log.warning("the store answers again")
                self._at_recovery()
            else:
                self.is_known = False
        tell = self._at_first_answer
        if tell is not None:
            self._at_first_answer = None
            tell()

    def failed(self, error: StoreError) -> None:
        """Note a failure of the store, or that this process had no room to ask it."""
        if error.fault == "overload":
            self._note_overload(error)
            return
        self.failures += 1
        self._failed_at = monotonic()
        if not self._is_failing:
            self._is_failing, self.is_known = True, False
            log.warning("the store failed, on_error decides until it answers again: %s", error)

    def _note_overload(self, error: StoreError) -> None:
        self.overloaded += 1
        if monotonic() - self._said_overloaded > AGAIN:
            self._said_overloaded = monotonic()
            Diagnosis.OVERLOADED.log(error)
