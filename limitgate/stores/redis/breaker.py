"""Keeps requests from waiting for a Redis that does not answer (the circuit breaker of Nygard's Release It!).

After `FAILURES` calls in a row have failed, requests fail at once. Meanwhile the store looks by itself whether Redis is back,
one probe at a time, with pauses that grow and differ from process to process. No request waits for a probe.
"""

from __future__ import annotations

import logging
import random
from threading import RLock

from limitgate.errors import StoreError, StoreFault
from limitgate.limits.bucket import bucket_of
from limitgate.limits.plan import Charge, Plan
from limitgate.own_errors import survived

log = logging.getLogger("limitgate.store")

FAILURES = 5
"""Calls in a row that fail before requests no longer wait."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.8
"""Seconds between two probes, each pause twice the one before. With `PROBE_TIMEOUT` it bounds how late recovery is seen."""
CHANCE = random.SystemRandom()
"""Chance that is nobody else's: an application that has seeded its own finds that undisturbed, and forks differ."""
PROBE_TIMEOUT = 0.5
"""Seconds that a probe waits for its answer, at most: no longer than a request would, whose timeout may be less."""


class Tally:
    """What the breakers of a store have counted together."""

    def __init__(self) -> None:
        self.failures = 0
        """Calls that failed."""
        self.outages = 0
        """How often requests stopped waiting for a server."""
        self.lock = RLock()


class Breaker:
    """True if a server answers. Its owner says what became of each call, and sends the probes."""

    def __init__(self, server: str = "Redis", tally: Tally | None = None) -> None:
        self.healthy = True
        self.probe: Plan | None = None
        """What to ask to see whether the server works."""
        self._server = server
        self._tally = tally or Tally()
        self._in_a_row = 0
        self._pause = FIRST_PAUSE
        self._failure: tuple[str, StoreFault] = "", "connection"

    @property
    def in_trouble(self) -> bool:
        """True if the last call failed."""
        return self._in_a_row > 0

    def asked(self, plan: Plan) -> None:
        """A plan is sent. While there is trouble the latest says where to look: on a cluster, its node holds it."""
        if plan is not self.probe and (self.probe is None or self.in_trouble):
            self.probe = _probe_beside(plan)

    def check(self) -> None:
        """Raise a `StoreError` if requests are not to wait."""
        if not self.healthy:
            message, fault = self._failure
            raise StoreError(f"{self._server} is not asked until it answers again: {message}", fault)

    def succeeded(self) -> None:
        """A call was answered."""
        if self._in_a_row:
            with self._tally.lock:
                self._in_a_row, recovered = 0, not self.healthy
                self.healthy, self._pause = True, FIRST_PAUSE
            if recovered:
                with survived():  # a handler may raise; probes have to go on
                    log.warning("%s answers again", self._server)

    def failed(self, error: StoreError) -> bool:
        """A call failed. True if that is when requests stop waiting: the first probe is due after a `pause`."""
        message = str(error)  # the error itself knows everything that led to it, and log records may be kept
        with self._tally.lock:
            self._tally.failures += 1
            self._in_a_row += 1
            self._failure = message, error.fault
            if not self.healthy or self._in_a_row < FAILURES:
                return False
            self.healthy = False
            self._tally.outages += 1
        with survived():
            log.warning("%s does not answer, requests no longer wait for it: %s", self._server, message)
        return True

    def pause(self) -> float:
        """Seconds until the next probe: somewhere between half of this pause and the whole. The next one is longer."""
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return pause * CHANCE.uniform(0.5, 1.0)  # so that not all processes come back at once


def _probe_beside(plan: Plan) -> Plan:
    """What asks whether Redis works: clears a bucket that nobody uses, so that a server that cannot write is not believed.

    It is in the slot of the plan's first bucket: a node of a cluster says of others where they are, whether or not it works.
    """
    key = plan.charges[0].key
    return Plan((Charge(f"{key}:probe:{{{key}}}", bucket_of("1/second"), 1, enforced=False, rule=None),), "reset")
