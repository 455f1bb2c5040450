"""Servers under load on virtual time: discrete events, Poisson arrivals, and clients that give up after a second.

`pool` is work that waits for one of a few connections, `event_loop` work that keeps a loop busy. Both are offered requests
whether or not they answer (open loop), since clients that wait for their answers would hide a collapse.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from random import Random
from statistics import fmean, pstdev

from limitgate.limits.bucket import Priority
from limitgate.overload.adaptive_limit import AdaptiveLimit, Outcome, Permit
from limitgate.overload.lag import LagGuard
from limitgate.overload.options import Adaptive

GIVE_UP_S = 1.0
LOOK_S = 0.1
"""Seconds between two looks at a limit."""
PARSE_S, REFUSE_S, CPU_S = 40e-6, 10e-6, 2e-3
"""Seconds for which a loop is kept busy by a request that comes, by a refusal, and by a handler."""
LOOP_CAPACITY = 1 / (CPU_S + PARSE_S)
POOL_CAPACITY = 200.0
"""Requests per second of ten connections that take 50 ms each."""

Rate = Callable[[float], float]


def bound(load: float) -> float:
    """The largest share of its capacity that a loop can serve which pays for each refusal, too."""
    refusal = (PARSE_S + REFUSE_S) / (CPU_S + PARSE_S)
    return load if load <= 1 else max(0.0, (1 - load * refusal) / (1 - refusal))


@dataclass(eq=False, slots=True)
class Request:
    """A request on its way."""

    at: float
    priority: Priority = "normal"
    kind: int = 0
    permits: list[Permit] = field(default_factory=list)
    """One of each limit, the outermost first."""
    steps: int = 0
    """Parts of its work that are done."""


class Results:
    """What became of the requests that came after a time of warming up."""

    def __init__(self, warm_s: float, end: float) -> None:
        self.warm_s, self.end = warm_s, end
        self.offered: Counter[Priority] = Counter()
        self.shed: Counter[Priority] = Counter()
        self.good: Counter[Priority] = Counter()
        """Requests that were answered before their clients gave up."""
        self.latencies: list[float] = []
        self.limits: list[float] = []
        self._tenths: Counter[int] = Counter()

    def offer(self, request: Request) -> None:
        self.offered[request.priority] += request.at >= self.warm_s

    def refuse(self, request: Request) -> None:
        self.shed[request.priority] += request.at >= self.warm_s

    def answer(self, request: Request, now: float) -> None:
        latency = now - request.at
        self._tenths[int(now * 10)] += latency <= GIVE_UP_S
        if request.at >= self.warm_s:
            self.latencies.append(latency)
            self.good[request.priority] += latency <= GIVE_UP_S

    def see(self, now: float, limit: float) -> None:
        if now >= self.warm_s:
            self.limits.append(limit)

    @property
    def goodput(self) -> float:
        """Requests per second that were answered in time."""
        return self.good.total() / (self.end - self.warm_s)

    def share(self, capacity: float) -> float:
        """Goodput as a share of what could have been served: the capacity, or what was offered where that is less."""
        return self.good.total() / min(self.offered.total(), capacity * (self.end - self.warm_s))

    def answered(self, priority: Priority) -> float:
        """Share of the requests of a priority that were answered in time."""
        return self.good[priority] / self.offered[priority]

    def rate(self, begin: float, end: float) -> float:
        """Requests per second that were answered in time between two times."""
        return sum(n for tenth, n in self._tenths.items() if begin * 10 <= tenth < end * 10) / (end - begin)

    def quantile(self, share: float) -> float:
        """Latency in seconds that so many of the admitted did not exceed."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def limit(self) -> tuple[float, float]:
        """Mean and standard deviation of the limit."""
        return fmean(self.limits), pstdev(self.limits)


def arrivals(random: Random, rate: Rate, end: float) -> Iterator[float]:
    """Times of Poisson arrivals at a rate that may change."""
    now = 0.0
    while now < end:
        wanted = rate(now)
        now += -math.log(1.0 - random.random()) / wanted if wanted > 0 else 0.01
        if wanted > 0 and now < end:
            yield now


def priority_of(random: Random, shares: Sequence[float]) -> Priority:
    """A priority by the shares of high and normal; all others are low."""
    high, normal = shares
    drawn = random.random()
    if drawn < high:
        return "high"
    return "normal" if drawn < high + normal else "low"


class Events:
    """What happens at a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = count()

    def at(self, when: float, call: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._heap, (when, next(self._order), call, args))

    def run(self, until: float) -> None:
        """Have everything happen until a time, and then be at it."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, call, args = heapq.heappop(heap)
            call(*args)
        self.now = until


class Connections:
    """Connections to one backend, which all processes share; requests wait for one in order."""

    def __init__(self, events: Events, size: Callable[[float], int], service_s: Callable[[Request, float], float]) -> None:
        self._events, self._size, self._service_s = events, size, service_s
        self._waiting: deque[tuple[Request, Callable[[Request], None]]] = deque()
        self._busy = 0

    def use(self, request: Request, done: Callable[[Request], None]) -> None:
        self._waiting.append((request, done))
        self._feed()

    def _feed(self) -> None:
        now = self._events.now
        while self._waiting and self._busy < self._size(now):
            request, done = self._waiting.popleft()
            self._busy += 1
            self._events.at(now + self._service_s(request, now), self._release, request, done)

    def _release(self, request: Request, done: Callable[[Request], None]) -> None:
        self._busy -= 1
        done(request)
        self._feed()


class Process:
    """A process with limits around the same work, the outermost first."""

    def __init__(
        self,
        events: Events,
        results: Results,
        backend: Connections,
        limits: Sequence[AdaptiveLimit],
        outcome: Callable[[Request, float], Outcome],
    ) -> None:
        self.results, self.limits = results, limits
        self._events, self._backend, self._outcome = events, backend, outcome
        self._waiting: dict[Permit, Request] = {}
        self._due = math.inf

    def come(self, request: Request) -> None:
        now = self._events.now
        self.results.offer(request)
        for limit in self.limits:
            permit = limit.begin(now, request.kind, request.priority)
            if not isinstance(permit, Permit):
                self._end(request, "untaught")
                self.results.refuse(request)
                return
            request.permits.append(permit)
        if request.permits and request.permits[0].waits:
            self._waiting[request.permits[0]] = request
            self.serve()
        else:
            self._backend.use(request, self._answer)

    def serve(self) -> None:
        """Call those who wait for the only limit, and be back when somebody will have waited for too long."""
        (limit,), now = self.limits, self._events.now
        served = limit.serve(now)
        for permit in served.called:
            self._backend.use(self._waiting.pop(permit), self._answer)
        for permit in served.gave_way:
            self.results.refuse(self._waiting.pop(permit))
        due = limit.due_at(now)
        if due < self._due:
            self._due = due
            self._events.at(due, self._serve_due)

    def _serve_due(self) -> None:
        self._due = math.inf
        self.serve()

    def _answer(self, request: Request) -> None:
        now = self._events.now
        self.results.answer(request, now)
        self._end(request, self._outcome(request, now))
        if self._waiting:
            self.serve()

    def _end(self, request: Request, outcome: Outcome) -> None:
        for limit, permit in zip(self.limits, request.permits):
            limit.done(permit, self._events.now, outcome)


def failed_if_late(request: Request, now: float) -> Outcome:
    """The outcome for a client that may have given up."""
    return "ok" if now - request.at <= GIVE_UP_S else "failed"


def pool(
    rate: Rate,
    *,
    seed: int,
    end: float = 60.0,
    warm_s: float = 10.0,
    size: Callable[[float], int] = lambda _: 10,
    service_s: Callable[[Random, Request, float], float] = lambda random, *_: 0.05 * random.uniform(0.8, 1.2),
    starts: Sequence[float] = (0.0,),
    rules: int = 1,
    kinds: Sequence[float] = (),
    priorities: Sequence[float] = (),
    outcome: Callable[[Request, float], Outcome] = failed_if_late,
    make: Callable[[], AdaptiveLimit] = lambda: AdaptiveLimit(Adaptive(), wall_offset=float),
) -> list[Results]:
    """Processes that share a pool of connections, one for each time at which one starts; ``rate`` is offered to all together.

    ``kinds`` and ``priorities`` are the shares of all but the last of them.
    """
    random, work, events = Random(seed), Random(seed + 1000), Events()
    backend = Connections(events, size, lambda request, now: service_s(work, request, now))
    processes = [Process(events, Results(warm_s, end), backend, [make() for _ in range(rules)], outcome) for _ in starts]
    next_look = 0.0
    for now in arrivals(random, rate, end):
        place = random.randrange(len(starts))
        if now < starts[place]:
            continue
        events.run(now)
        request = Request(now)
        if priorities:
            request.priority = priority_of(random, priorities)
        if kinds:
            drawn = random.random()
            request.kind = sum([drawn >= share for share in kinds])
        processes[place].come(request)
        if now >= next_look:
            next_look = now + LOOK_S
            for process in processes:
                process.results.see(now, min([limit.limit for limit in process.limits]))
    events.run(math.inf)
    return [process.results for process in processes]


class EventLoop:
    """An event loop: each iteration polls, runs what was ready, reads what has come, and then has its heartbeat.

    What is read is begun an iteration later, as asyncio starts tasks. A handler keeps the loop for the first of ``cpu_s``,
    awaits, keeps it for the second, and so on. Where each request comes on a connection of its own, ``accepts`` is how many an
    iteration accepts.
    """

    def __init__(
        self, results: Results, cpu_s: Sequence[float], await_s: float, reserve: Fraction | None, accepts: int = 10**6
    ) -> None:
        self.results, self.now = results, 0.0
        self._cpu_s, self._await_s, self._accepts = cpu_s, await_s, accepts
        self._guard = LagGuard(lambda: len(self._unaccepted(self.now)))
        self._limit = AdaptiveLimit(Adaptive(), wall_offset=float, reserve=reserve)
        self._beat_at = self._guard.start(0.0)
        self._ready: list[Request] = []
        self._awaiting: deque[tuple[float, Request]] = deque()
        self._queue: deque[Request] = deque()
        self._next_look = 0.0

    def run(self, requests: Iterator[Request]) -> None:
        """Have all requests come at their times, and what they begin be done."""
        self._requests, self._coming = requests, next(requests, None)
        while self._coming or self._queue or self._ready or self._awaiting:
            if not self._ready and not self._unaccepted(self.now):
                ends = [
                    self._beat_at,
                    *[until for until, _ in self._awaiting][:1],
                    *([self._coming.at] if self._coming else []),
                ]
                self.now = max(self.now, min(ends))
            polled, ready, self._ready = self.now, self._ready, []
            while self._awaiting and self._awaiting[0][0] <= polled:
                ready.append(self._awaiting.popleft()[1])
            for request in ready:
                self._step(request)
            queue = self._unaccepted(polled)
            for _ in range(min(self._accepts, len(queue))):
                request = queue.popleft()
                self.results.offer(request)
                self._ready.append(request)
                self.now += PARSE_S
            if self._beat_at <= polled:
                self._beat_at = self._guard.beat(self.now) or self._guard.start(self.now)

    def _unaccepted(self, now: float) -> deque[Request]:
        """Requests that have come by then and were not read yet."""
        while self._coming and self._coming.at <= now:
            self._queue.append(self._coming)
            self._coming = next(self._requests, None)
        return self._queue

    def _step(self, request: Request) -> None:
        """Do a part of the work of a request, if it is let in."""
        if not request.steps:
            permit = self._limit.begin(self.now, request.kind, request.priority, self._guard)
            if not isinstance(permit, Permit):
                self.now += REFUSE_S
                self.results.refuse(request)
                return
            request.permits.append(permit)
            self._look()
        self.now += self._cpu_s[request.steps]
        request.steps += 1
        if request.steps < len(self._cpu_s):
            self._awaiting.append((self.now + self._await_s, request))
        else:
            self.results.answer(request, self.now)
            self._limit.done(request.permits[0], self.now, failed_if_late(request, self.now))

    def _look(self) -> None:
        if self.now >= self._next_look:
            self._next_look = self.now + LOOK_S
            self.results.see(self.now, self._limit.limit)


def event_loop(
    rate: Rate,
    *,
    seed: int,
    end: float = 40.0,
    warm_s: float = 10.0,
    cpu_s: Sequence[float] = (CPU_S,),
    await_s: float = 0.005,
    priorities: Sequence[float] = (),
    reserve: Fraction | None = None,
    accepts: int = 10**6,
) -> Results:
    """Handlers on an event loop; ``priorities`` are the shares of high and normal."""
    random, loop = Random(seed), EventLoop(Results(warm_s, end), cpu_s, await_s, reserve, accepts)
    loop.run(Request(at, priority_of(random, priorities) if priorities else "normal") for at in arrivals(random, rate, end))
    return loop.results
