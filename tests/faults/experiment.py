"""One experiment for all faults: steady traffic, something happens to Redis, it is over, everything has to be as before.

    traffic ──────────────────────────────────────────────────────────────┐
           lead      │ fault ·····opened·····│ over ···· recovered │ tail │ exact │ state

The traffic notes what each request got and when; what is demanded of that stands in `Outcome.complaints`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import quantiles

from redis import RedisError

from limitgate.stores.redis.breaker import FAILURES
from tests.faults.app import BURST, EXACTLY, PER_SECOND
from tests.faults.causes import Cause, Over
from tests.faults.places import is_hit
from tests.faults.stages import TOO_MANY, Stage, Way
from tests.faults.traffic import BOTH, FLOOD, LIMITED, Sample, Traffic
from tests.support.doors import MOMENT, PATIENCE

TIMEOUT = 0.1
"""Seconds that a request may wait for Redis: the default, with which the applications run."""
SLACK = 0.3
"""Seconds that requests may take beyond that on a busy machine, in their 99th percentile."""
BACK_WITHIN = 2.0
"""Seconds after which every process limits again by a store that answers again."""
LATE = 0.25
"""Seconds that we may be late in noticing, on a busy machine."""
OPENING = FAILURES * TIMEOUT + LATE
"""Seconds after which requests no longer wait for a Redis that does not answer, where one call fails after the other."""
NOISE, STUMBLES = 0.1, 0.15
"""Shares of the requests that a busy machine alone may make slow, and late enough for ``on_error``."""
CLOCKS = 0.1
"""Requests by which a rate may differ between our clock and the one that decides."""
IN_A_ROW = 10
"""Requests that Redis has to decide one after the other to count as back."""
LEAD, TAIL = 0.5, 0.2
"""Seconds of traffic before the fault, and after recovery."""
REFILLED, SHORT_LEAD = 1.0, 0.2
"""A fault of at least ``REFILLED`` seconds refills the buckets that the lead has drained, so a short lead is enough."""
LINES = 15
"""Lines about failures that one fault may bring into the log, whatever the number of requests."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, and what that may cost."""

    name: str
    cause: Cause
    way: Way = "direct"
    lasts: float = 1.1
    """Seconds; 0 where it is over as soon as it has happened, or where it ends by itself."""
    degrades: float = 0.9
    """Share of the requests, at least, that Redis does not decide while the fault lasts; 0 where nobody should notice."""
    forgets: int = 0
    """Requests on the same key that Redis forgets, at most: all that a bucket holds where it loses everything."""
    waits: bool = False
    """Whether requests go on waiting for Redis, as it is slow but answers in time."""
    local: bool = False
    """Whether rules that say nothing of their own fall to ``local`` instead of ``open``."""
    lead: float | None = None
    """Seconds of traffic before the fault. None: by its length, see `traffic_before`."""
    partly: bool = False
    """Whether it concerns only those whose buckets lie on one node of a cluster, and nobody else should notice."""

    @property
    def traffic_before(self) -> float:
        if self.lead is not None:
            return self.lead
        return SHORT_LEAD if self.degrades and self.lasts >= REFILLED else LEAD


@dataclass
class Outcome:
    """What was seen. Times are monotonic, in seconds."""

    fault: Fault
    samples: list[Sample] = field(default_factory=list)
    free: list[Sample] = field(default_factory=list)
    """The requests that no limit applies to."""
    begins: float = 0.0
    begun: float = 0.0
    """When the fault was surely there."""
    ending: float = 0.0
    """When it was still there."""
    ended: float = 0.0
    """When it was over."""
    exact: Counter[tuple[int, bool]] = field(default_factory=Counter)
    lines: int = 0
    left: list[str] = field(default_factory=list)
    """What the application's process holds beyond what it held before."""

    @property
    def recovery(self) -> float:
        """Seconds from the end of the fault until Redis decided again, request after request; ``inf`` if it did not."""
        after = [sample for sample in by_sending(self.samples) if sample.sent >= self.ended and sample.hit]
        for place in range(len(after) - IN_A_ROW + 1):
            if not any(sample.degraded for sample in after[place : place + IN_A_ROW]):
                return after[place].heard - self.ended
        return math.inf

    @property
    def during(self) -> list[Sample]:
        """The requests from when the fault began until Redis was back."""
        return self._during(self.samples)

    def _during(self, samples: Sequence[Sample]) -> list[Sample]:
        until = max(self.begun + LEAD, self.ended + min(self.recovery, BACK_WITHIN + LATE))
        return [sample for sample in samples if self.begins <= sample.sent <= until]

    @property
    def opened(self) -> list[Sample]:
        """The requests at a time at which nobody needs to wait any more."""
        return self._opened(self.samples)

    def _opened(self, samples: Sequence[Sample]) -> list[Sample]:
        return [sample for sample in samples if self.begun + OPENING <= sample.sent <= self.ending]

    @property
    def spared(self) -> list[Sample]:
        """The requests meanwhile that should not notice anything."""
        return [sample for sample in self.during if not (self.fault.degrades and sample.hit)]

    @property
    def relapsed(self) -> float:
        """The share of requests that ``on_error`` decided after Redis was back, 0 where the machine is too slow to tell."""
        back = self.ended + self.recovery
        after, free = ([each for each in told if each.sent > back] for told in (self.samples, self.free))
        return 0.0 if slow_share(free) else degraded_share(after)

    @property
    def statuses(self) -> Counter[int]:
        """How often each status was seen from when the fault began until Redis was back."""
        return Counter(sample.status for sample in self.during)

    def percentile(self, percent: int) -> float:
        """Seconds that so many of the requests took at most, from when the fault began until Redis was back."""
        return quantiles([sample.seconds for sample in self.during], n=100)[percent - 1]

    def burst(self, *, degraded: bool) -> float:
        """The largest burst that any limited stream got beyond its rate, from Redis or where the store had failed."""
        limits = ("local", *(["default"] if self.fault.local else [])) if degraded else LIMITED
        return max(burst(of_stream(self.samples, stream, degraded)) for stream in limits)

    def burst_of_spared(self) -> float:
        """The largest burst that Redis let a stream have that has a bucket where no fault came."""
        by_two = [sample for sample in self.opened if sample.stream == BOTH and sample.status == 200]
        whole = [sample for sample in self.samples if not sample.hit]
        streams = [of_stream(whole, stream, degraded=False) for stream in LIMITED]
        return max(map(burst, [*streams, of_stream(self.samples, BOTH, degraded=False), by_two]))

    @property
    def bound(self) -> int:
        """The largest burst that Redis may have let pass."""
        return BURST + self.fault.forgets

    def complaints(self) -> list[str]:
        """What was not as it has to be."""
        found = [*self._of_answers(), *self._of_waiting(), *self._of_limits(), *self.left]
        if self.lines > LINES:
            found.append(f"{self.lines} lines in the log")
        return found

    def _of_answers(self) -> list[str]:
        """Nobody gets anything but the answers that the application and the policies give."""
        wrong = [sample for sample in self.samples if not self._may_be(sample)]
        wrong += [sample for sample in self.free if sample.status != 200]
        found = [f"{len(wrong)} wrong answers, the first {wrong[0]}"] if wrong else []
        # The application repeats known refusals without Redis. On a slow machine there may be hardly any other answers.
        hit = [sample for sample in self.opened if sample.hit and (sample.degraded or sample.status != 429)]
        share = degraded_share(hit)
        if hit and not share >= self.fault.degrades:
            found.append(f"only {share:.0%} were decided by on_error, so the fault is none")
        if (share := degraded_share(self.spared)) > STUMBLES:
            found.append(f"{share:.0%} were decided by on_error, though Redis was there")
        if self.fault.degrades and self.fault.lasts and not any(sample.degraded for sample in self.during):
            found.append("none was decided by on_error, so the fault is none")
        return found

    def _may_be(self, sample: Sample) -> bool:
        """Whether this is what the policy of its rule gives."""
        if not sample.degraded:
            return sample.status in ((200,) if sample.stream == FLOOD else (200, 429))
        if sample.stream in ("local", BOTH) or (sample.stream == "default" and self.fault.local):
            return sample.status in (200, 429)
        return sample.status == (503 if sample.stream == "closed" else 200)

    def _of_waiting(self) -> list[str]:
        """Nobody waits for longer than the timeout, nearly nobody at all once the breaker is open, and recovery is soon.

        Where requests that no limit applies to have to wait as well, it is the machine that is slow.
        """
        found = []
        machine = max((sample.seconds for sample in self._during(self.free)), default=0.0)
        if self.percentile(99) > TIMEOUT + SLACK + machine:
            found.append(f"p99 {self.percentile(99):.3f} s")
        slow, machine = slow_share(self.opened), slow_share(self._opened(self.free))
        if slow > NOISE + 2 * machine and not self.fault.waits:
            found.append(f"{slow:.0%} waited though the breaker had time to open")
        if self.recovery > BACK_WITHIN + LATE:
            found.append(f"Redis decided again after {self.recovery:.1f} s")
        if self.relapsed > STUMBLES:
            found.append(f"{self.relapsed:.0%} were decided by on_error after Redis was back")
        return found

    def _of_limits(self) -> list[str]:
        """No more pass than the limits and the fault allow, no fewer than the limit once Redis is back."""
        found = []
        if (by_redis := self.burst(degraded=False)) > self.bound + CLOCKS:
            found.append(f"Redis let a burst of {by_redis:.1f} pass, bound {self.bound}")
        if self.fault.partly and (spared := self.burst_of_spared()) > BURST + CLOCKS:
            found.append(f"Redis let a burst of {spared:.1f} pass where no fault was, bound {BURST}")
        if (here := self.burst(degraded=True)) > BURST + CLOCKS:
            found.append(f"a burst of {here:.1f} passed locally, bound {BURST}")
        if self.exact != {(200, False): EXACTLY, (429, False): TOO_MANY}:
            found.append(f"of {EXACTLY + TOO_MANY} requests to a limit of {EXACTLY}: {dict(self.exact)}")
        if not self.fault.degrades and (passed := self._fewest()) < PER_SECOND * self.fault.lasts / 4:
            found.append(f"only {passed} passed in {self.fault.lasts} s though Redis was there")
        return found

    def _fewest(self) -> int:
        """How many passed of the limited stream of which the fewest did."""
        return min(sum(sample.stream == stream and sample.status == 200 for sample in self.during) for stream in LIMITED)


def run(fault: Fault, stage: Stage) -> Outcome:
    """Let a fault happen on a stage."""
    seen, lines = Outcome(fault), stage.complaints()
    traffic = Traffic(stage.url, stage.keys, is_hit) if fault.partly else Traffic(stage.url, stage.keys)
    with traffic:
        seen.samples, seen.free = traffic.samples, traffic.free
        time.sleep(fault.traffic_before)
        seen.begins = time.monotonic()
        with fault.cause(stage) as over:
            seen.begun = time.monotonic()
            seen.ending = _wait(fault, over)
            over_by_itself = time.monotonic()
        seen.ended = over_by_itself if over else time.monotonic()
        while seen.recovery == math.inf and time.monotonic() < seen.ended + 2 * BACK_WITHIN:
            time.sleep(MOMENT)
        time.sleep(TAIL)
    seen.exact = stage.exact()
    seen.left = stage.settled().beyond(stage.before)
    seen.lines = stage.complaints() - lines
    return seen


def _wait(fault: Fault, over: Over | None) -> float:
    """Let a fault last. The last moment at which it was still there."""
    time.sleep(fault.lasts)
    moment, deadline = time.monotonic(), time.monotonic() + PATIENCE
    while over is not None and not _is_true(over):
        assert moment < deadline
        time.sleep(MOMENT)
        moment = time.monotonic()
    return moment


def _is_true(over: Over) -> bool:
    """Whether something is over, as far as servers tell: who is promoted ends connections."""
    with suppress(RedisError):
        return over()
    return False


def of_stream(samples: Sequence[Sample], stream: str, degraded: bool) -> list[Sample]:  # noqa: FBT001
    """The requests of a stream that were let through, by Redis or where the store had failed."""
    return [sample for sample in samples if (sample.stream, sample.status, sample.degraded) == (stream, 200, degraded)]


def by_sending(samples: Sequence[Sample]) -> list[Sample]:
    """Requests in the order in which they were sent."""
    return sorted(samples, key=lambda sample: sample.sent)


def degraded_share(samples: Sequence[Sample]) -> float:
    """The share of requests that ``on_error`` decided."""
    return sum(sample.degraded for sample in samples) / max(1, len(samples))


def slow_share(samples: Sequence[Sample]) -> float:
    """The share of requests that had to wait."""
    return sum(sample.seconds > TIMEOUT / 2 for sample in samples) / max(1, len(samples))


def burst(admitted: Sequence[Sample]) -> float:
    """How many passed in any interval, at most, beyond what the rate gives in it: exact if no more than the burst.

    Requests count for an interval if they were sent and answered in it, so they were surely decided in it.
    """
    most = 0.0
    for first in admitted:
        heard = sorted(sample.heard for sample in admitted if sample.sent >= first.sent)
        most = max([most, *(count - PER_SECOND * (end - first.sent) for count, end in enumerate(heard, 1))])
    return most
