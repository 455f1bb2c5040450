"""Virtual time for several processes in one thread. Each has an event loop and a clock.

Events are entries of a heap, ordered by time, and at equal times by chance. A process iterates like asyncio: it appends
received data and due timers to the ready callbacks, and runs them. A seed determines everything.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

SECOND = 1_000_000
BEGAN = 1_790_000_000 * SECOND


class World:
    """Time, chance, and what is going to happen."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.us = 0
        """True microseconds since the start."""
        self.steps = 0
        """Callbacks of event loops that have run."""
        self.running: Process | None = None
        self.processes: list[Process] = []
        self.findings: list[str] = []
        self.history: list[str] | None = None
        self.is_over = False
        self._heap: list[tuple[int, float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, us: int, action: Callable[[], None]) -> None:
        heappush(self._heap, (us, self.rng.random(), next(self._numbers), action))

    def after(self, us: int, action: Callable[[], None]) -> None:
        self.at(self.us + us, action)

    def run(self, until: Callable[[], bool] = lambda: False, *, within: float = math.inf) -> None:
        """Run events until a condition holds, or for some seconds."""
        end = self.us + within * SECOND
        heap = self._heap
        while heap and heap[0][0] <= end and not until():
            self.us, _, _, action = heappop(heap)
            action()
        if end < math.inf and not until():
            self.us = max(self.us, int(end))

    def monotonic(self) -> float:
        """The clock of the running process."""
        return self.us / SECOND if self.running is None else self.running.time()

    def found(self, what: str) -> None:
        if self.is_over:
            return
        self.findings.append(f"{self.us / SECOND:.6f}: {what}")
        self.note(f"FOUND {what}")

    def number(self) -> int:
        """Return the next number, which orders simultaneous events."""
        return next(self._numbers)

    def note(self, what: str) -> None:
        if self.history is not None:
            self.history.append(f"{self.us / SECOND:12.6f}  {what}")


class Handle:
    """A callback of a process's event loop."""

    __slots__ = ("_args", "_callback", "_context", "_when", "is_cancelled")

    def __init__(self, callback, args, context, when=0.0) -> None:
        self._callback, self._args, self._context, self._when = callback, args, context, when
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self._callback = self._args = None

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self._when

    def run(self) -> None:
        if self._context is None:
            self._callback(*self._args)
        else:
            self._context.run(self._callback, *self._args)


class Loop(asyncio.AbstractEventLoop):
    """The event loop of a process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.time = process.time
        self.ready: deque[Handle] = deque()
        self.timers: list[tuple[float, int, Handle]] = []
        self._numbers = itertools.count()

    def call_soon(self, callback, *args, context=None) -> Handle:
        handle = Handle(callback, args, context)
        self.ready.append(handle)
        if self._process.world.running is not self._process:
            self._process.wake(0)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay, callback, *args, context=None) -> Handle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when, callback, *args, context=None) -> Handle:
        handle = Handle(callback, args, context, when)
        heappush(self.timers, (when, next(self._numbers), handle))
        if self._process.world.running is not self._process:
            self._process.wake(self._process.us_until(when))
        return handle

    def create_future(self) -> asyncio.Future:
        return asyncio.Future(loop=self)

    def create_task(self, work, *, name=None, context=None) -> asyncio.Task:
        return asyncio.Task(work, loop=self, name=name, context=context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._process.world.running is self._process

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context) -> None:
        if self._process.alive:
            self._process.world.found(f"{self._process}: {context.get('message')}: {context.get('exception')!r}")


class Process:
    """A process: an event loop and a clock with an offset and a rate."""

    def __init__(self, world: World, *, ppm: int = 0) -> None:
        self.world = world
        self.name = f"p{len(world.processes) + 1}"
        self.alive = True
        self.stalled_us = 0
        """Total time in which it stood still."""
        self.stalls: Callable[[], int] = lambda: 0
        """For how long it stops after an iteration."""
        self.reads_late = 0.0
        self._offset = world.rng.uniform(1000, 100_000)
        self._rate = (1 + ppm / 1_000_000) / SECOND
        self._free_at = 0
        self._due: int | None = None
        self._arrived: deque[Callable[[], None]] = deque()
        self.loop = Loop(self)
        world.processes.append(self)

    def __str__(self) -> str:
        return self.name

    def time(self) -> float:
        return self._offset + self.world.us * self._rate

    def us_until(self, when: float) -> int:
        return max(0, math.ceil((when - self.time()) / self._rate))

    def arrived(self, action: Callable[[], None]) -> None:
        """Something for the event loop to read."""
        if self.alive:
            self._arrived.append(action)
            self.wake(0)

    def stall(self, us: int) -> None:
        """Stop, as on SIGSTOP or in a handler that blocks."""
        self.stalled_us += us
        self._free_at = max(self._free_at, self.world.us) + us

    def kill(self) -> None:
        """End at once: nothing of it runs any more."""
        self.alive = False

    def wake(self, us: int) -> None:
        due = max(self.world.us + us, self._free_at)
        if self._due is None or due < self._due:
            self._due = due
            self.world.at(due, self._iterate)

    def _iterate(self) -> None:  # noqa: C901 - as in asyncio, in one piece, since it is most of the time
        world, loop = self.world, self.loop
        if not self.alive or self._due != world.us:
            return
        self._due = None
        if world.us < self._free_at:
            self.wake(0)
            return
        ready, timers, rng = loop.ready, loop.timers, world.rng
        while self._arrived:
            ready.append(Handle(self._arrived.popleft(), (), None))
        now = self.time() + 1e-9
        while timers and timers[0][0] <= now:
            ready.append(heappop(timers)[2])
        world.running = self
        asyncio._set_running_loop(loop)
        count = len(ready)
        try:
            for _ in range(count):
                handle = ready.popleft()
                if not handle.is_cancelled:
                    world.steps += 1
                    handle.run()
        finally:
            asyncio._set_running_loop(None)
            world.running = None
        self._free_at = world.us + int(rng.random() * 20 * (1 + count))
        if stall := self.stalls():
            self.stall(stall)
        if ready or self._arrived:
            self.wake(0)
        else:
            while timers and timers[0][2].is_cancelled:
                heappop(timers)
            if timers:
                self.wake(self.us_until(timers[0][0]))

    def start(self, work) -> asyncio.Task:
        return self.loop.create_task(work)
