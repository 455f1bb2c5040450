"""Keeps requests from waiting for a Redis that does not answer (the circuit breaker of Nygard's Release It!).

After `FAILURES` calls in a row have failed, requests fail at once. Meanwhile the store probes, one probe at a time, with pauses
that grow and differ from process to process. No request waits for a probe. Knows no clock, timer or connection.

That a server does not answer is known only for as long as somebody probes. Where the process stood still when a probe was due,
or while it was under way (serverless functions, event loops that run for a request only), nobody knows, and requests are sent.
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
from limitgate.stores.base import ConfigRequest

log = logging.getLogger("limitgate.store")

FAILURES = 5
"""Calls in a row that fail before requests no longer wait."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.8
"""Seconds between two probes, each pause twice the one before. With `PROBE_TIMEOUT` it bounds how late recovery is seen."""
CHANCE = random.SystemRandom()
"""Chance that is nobody else's: an application that has seeded its own finds that undisturbed, and forks differ."""
PROBE_TIMEOUT = 0.5
"""Seconds that a probe waits for its answer, at most: no longer than a request would, whose timeout may be less."""
LATE = 0.1
"""Seconds by which a probe, or a look for its answer, comes late if the process stood still."""


State = Literal["closed", "open", "half-open"]


class Tally:
    """Counts that the breakers of a store share."""

    def __init__(self) -> None:
        self.failures = 0
        """Calls that failed."""
        self.outages = 0
        """Times that a breaker has opened."""
        self.lock = RLock()


class Breaker:
    """Circuit breaker of one server. Its owner reports how each call ended, and sends the probes.

    closed      calls are sent
    open        calls fail at once, until a probe is answered
    half-open   the same, while a probe is on its way
    (outdated   open or half-open, but nobody is probing as it should be: calls are sent until one fails)

    Times are seconds on one monotonic clock of the owner's.
    """

    def __init__(self, server: str = "Redis", tally: Tally | None = None) -> None:
        self.state: State = "closed"
        self.in_trouble = False
        """True if the last call failed."""
        self._server = server
        self._tally = tally or Tally()
        self._in_a_row = 0
        self._pause = FIRST_PAUSE
        self._probe: Plan | None = None
        self._probe_began: float | None = None
        self._is_retired = False
        self._holds_until = math.inf
        """Time until which it is known that calls would fail."""
        self._began_late = self._told_nothing = False
        """True if the process stood still when the latest probe was due, or while it was under way."""
        self._failure: tuple[str, StoreFault] = "", "connection"

    @property
    def is_closed(self) -> bool:
        """True if calls are sent."""
        return self.state == "closed"

    def sending(self, sent: AnyPlan | ConfigRequest) -> None:
        """Note what is sent. While there is trouble the latest says where to probe: on a cluster, its node holds it."""
        if sent is not self._probe and (self._probe is None or self.in_trouble):
            self._probe = _probe_beside(first_key(sent))

    def check(self, clock: Callable[[], float] = lambda: -math.inf) -> None:
        """Raise a `StoreError` unless closed, or outdated by the owner's clock."""
        if self.state != "closed" and clock() <= self._holds_until:
            message, fault = self._failure
            raise StoreError(f"{self._server} is not asked until it answers again: {message}", fault)

    def succeeded(self) -> None:
        """Close: a call was answered."""
        if self.in_trouble:
            with self._tally.lock:
                self.in_trouble, self._in_a_row, recovered = False, 0, not self.is_closed
                self.state, self._pause = "closed", FIRST_PAUSE
            if recovered:
                with logged_errors():  # a handler may raise; probes have to go on
                    log.warning("%s answers again", self._server)

    def failed(self, error: StoreError, now: float = -math.inf) -> bool:
        """Count a failed call. True if that opens the breaker: the owner has to probe after `pause_before_probe`."""
        message = str(error)  # the error itself knows everything that led to it, and log records may be kept
        with self._tally.lock:
            self._tally.failures += 1
            self.in_trouble = True
            self._in_a_row += 1
            self._failure = message, error.fault
            if not self.is_closed:
                if not self._told_nothing:
                    self._holds_until = max(self._holds_until, now + self._pause)
                return False
            if self._in_a_row < FAILURES:
                return False
            self.state, self._holds_until = "open", math.inf
            self._tally.outages += 1
        with logged_errors():
            log.warning("%s does not answer, requests no longer wait for it: %s", self._server, message)
        return True

    def retire(self) -> None:
        """Probe no more: another breaker takes this one's place."""
        self._is_retired = True

    def pause_before_probe(self, now: float) -> float | None:
        """Seconds until the next probe is due, None if there is nothing to probe for any more.

        Between half of a pause and the whole, the next one longer, so that not all processes come back at once. It counts from
        when the last probe began: one that hung was pause enough.
        """
        with self._tally.lock:
            if self.is_closed or self._is_retired:
                return None
            self.state = "open"
            began, self._probe_began = now if self._probe_began is None else self._probe_began, None
            pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
            due_at = max(now, began + pause * CHANCE.uniform(0.5, 1.0))
            self._holds_until = -math.inf if self._told_nothing else due_at + LATE
            self._told_nothing = False
        return due_at - now

    def begin_probe(self, now: float) -> Plan | None:
        """Return the plan to send as a probe, None if there is nothing to probe for any more."""
        with self._tally.lock:
            if self.is_closed or self._is_retired:
                return None
            self.state, self._probe_began = "half-open", now
            self._began_late, self._told_nothing = now > self._holds_until, False
            self.is_probing(now)
        return self._probe

    def is_probing(self, now: float) -> None:
        """Note that somebody listens for the answer to a probe. To be told again within `LATE` seconds."""
        if now > self._holds_until:
            self._told_nothing = not self._began_late
        elif self._holds_until < now + LATE:
            self._holds_until = now + LATE


def first_key(sent: AnyPlan | ConfigRequest) -> str:
    """The key of a request, or of a plan's first bucket."""
    return sent.key if isinstance(sent, ConfigRequest) else sent.charges[0].key


def _probe_beside(key: str) -> Plan:
    """A probe: it clears a bucket that nobody uses, so that a server that cannot write is not believed.

    The bucket is in the hash slot of the key: a node of a cluster says of others where they are, working or not.
    """
    return Plan.reset([Charge(f"{key}:probe:{{{key}}}", bucket_of("1/second"), 1, enforced=False, rule=None)])
