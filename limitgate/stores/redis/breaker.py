"""Circuit breaker (Nygard, Release It!): requests fail at once while Redis does not answer.

It opens after `FAILURES` failed calls in a row; then one probe at a time is sent, with growing, randomized pauses. If the
process stands still when a probe is due (serverless functions), the state is outdated and requests are sent. No I/O.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from threading import RLock
from typing import Literal

from limitgate.errors import StoreError, StoreFault
from limitgate.internal_errors import logged_errors
from limitgate.limits.bucket import bucket_of
from limitgate.limits.plan import Charge, Plan
from limitgate.limits.template import AnyPlan
from limitgate.stores.base import ConfigRequest, FleetRequest

log: logging.Logger = logging.getLogger("limitgate.store")

FAILURES = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.8
"""Seconds; each pause is twice the previous one."""
CHANCE = random.SystemRandom()
"""Random numbers that differ in forks. The application's seeded generator isn't used."""
PROBE_TIMEOUT = 0.5
"""Seconds."""
LATE = 0.1
"""If a probe is late by this many seconds, the process stood still."""


State = Literal["closed", "open", "half-open"]


class Tally:
    def __init__(self) -> None:
        self.failures = 0
        self.outages = 0
        self.lock: RLock = RLock()


class Breaker:
    """Circuit breaker of one server. Its owner reports calls and sends probes. Times are monotonic seconds.

    closed      calls are sent
    open        calls fail at once, until a probe is answered
    half-open   the same, while a probe is in flight
    outdated    open or half-open with late probes: calls are sent until one fails
    """

    def __init__(self, server: str = "Redis", tally: Tally | None = None) -> None:
        self.state: State = "closed"
        self.in_trouble: bool = False
        self._server = server
        self._tally = tally or Tally()
        self._in_a_row = 0
        self._pause = FIRST_PAUSE
        self._probe: Plan | None = None
        self._probe_began: float | None = None
        self._is_retired = False
        self._holds_until = math.inf
        """Time until which calls fail at once."""
        self._began_late = self._told_nothing = False
        """True if the process stood still when the probe was due, or while it was in flight."""
        self._failure: tuple[str, StoreFault] = "", "connection"

    @property
    def is_closed(self) -> bool:
        return self.state == "closed"

    def sending(self, sent: AnyPlan | ConfigRequest | FleetRequest) -> None:
        """Note a sent plan. The next probe uses its key, because the key selects the node of a cluster."""
        if sent is not self._probe and (self._probe is None or self.in_trouble):
            self._probe = _probe_beside(first_key(sent))

    def check(self, clock: Callable[[], float]) -> None:
        if self.state != "closed" and clock() <= self._holds_until:
            message, fault = self._failure
            raise StoreError(f"no calls are sent to {self._server} until it answers a probe: {message}", fault)

    def succeeded(self) -> None:
        if self.in_trouble:
            with self._tally.lock:
                self.in_trouble, self._in_a_row, recovered = False, 0, not self.is_closed
                self.state, self._pause = "closed", FIRST_PAUSE
            if recovered:
                # A log handler may raise.
                with logged_errors():
                    log.warning("%s answers again", self._server)

    def failed(self, error: StoreError, now: float) -> bool:
        """Note a failed call. Return True if the breaker opens, so that the owner must probe."""
        # An error in a log record would keep its traceback alive.
        message = str(error)
        with self._tally.lock:
            self._tally.failures += 1
            self.in_trouble = True
            self._in_a_row += 1
            self._failure = message, error.fault
            if not self.is_closed:
                if self.state == "half-open":
                    self.is_probing(now)
                    self._began_late = False
                if not self._told_nothing:
                    self._holds_until = max(self._holds_until, now + self._pause)
                return False
            if self._in_a_row < FAILURES:
                return False
            self.state, self._holds_until = "open", now + FIRST_PAUSE + LATE
            self._began_late = self._told_nothing = False
            self._tally.outages += 1
        with logged_errors():
            log.warning("%s does not answer, requests no longer wait for it: %s", self._server, message)
        return True

    def retire(self) -> None:
        """Stop, because another breaker takes over."""
        self._is_retired = True

    def pause_before_probe(self, now: float) -> float | None:
        """Return the seconds from the start of the last probe to the next one; None if no probe is needed.

        Randomized, so that processes do not probe at the same time.
        """
        with self._tally.lock:
            if self.is_closed or self._is_retired:
                return None
            self.state = "open"
            began, self._probe_began = now if self._probe_began is None else self._probe_began, None
            pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
            due_at = max(now, began + pause * CHANCE.uniform(0.5, 1.0))
            stood_still = self._told_nothing or (now > self._holds_until and not self._began_late)
            self._holds_until = -math.inf if stood_still else due_at + LATE
            self._told_nothing = False
        return due_at - now

    def begin_probe(self, now: float) -> Plan | None:
        with self._tally.lock:
            if self.is_closed or self._is_retired:
                return None
            self.state, self._probe_began = "half-open", now
            self._began_late, self._told_nothing = now > self._holds_until, False
            self.is_probing(now)
        return self._probe

    def is_probing(self, now: float) -> None:
        if now > self._holds_until:
            self._told_nothing = not self._began_late
        elif self._holds_until < now + LATE:
            self._holds_until = now + LATE


def first_key(sent: AnyPlan | ConfigRequest | FleetRequest) -> str:
    return sent.key if isinstance(sent, ConfigRequest | FleetRequest) else sent.charges[0].key


def _probe_beside(key: str) -> Plan:
    """Return a probe: the reset of an unused bucket, which detects servers that refuse writes.

    The bucket shares the slot of ``key``, because a cluster node answers for other slots even if it has failed.
    """
    return Plan.reset([Charge(f"{key}:probe:{{{key}}}", bucket_of("1/second"), 1, enforced=False, rule=None)])
