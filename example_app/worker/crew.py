"""The parent of the processes that work: starts them, replaces those that die, says how it goes, and ends them."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from contextlib import suppress
from time import monotonic
from typing import Any

from example_app.worker.jobs import connect, is_drained
from example_app.worker.process import Options, run

GRACE = 10
"""Seconds that processes have to finish what they are at."""


class Crew:
    """So many processes, and what they have done."""

    def __init__(self, options: Options, processes: int) -> None:
        self._options = options
        self._context = multiprocessing.get_context("spawn")
        self._counts: list[Any] = []
        self._running = [self._start() for _ in range(processes)]

    @property
    def done(self) -> int:
        """Jobs that were done and acknowledged."""
        return sum(count.value for count in self._counts)

    def _start(self) -> Any:
        count = self._context.Value("Q", 0, lock=False)  # one process writes, one reads
        process = self._context.Process(target=run, args=(self._options, count), daemon=True)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is the parent's, who then stops them
        process.start()
        signal.signal(signal.SIGINT, before)
        self._counts.append(count)
        return process

    def replace_dead(self) -> None:
        """Put others in the place of processes that have died. What they had in hand is claimed after the idle time."""
        for place, process in enumerate(self._running):
            if not process.is_alive():
                code = process.exitcode
                why = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
                self._running[place] = self._start()
                print(f"worker {process.pid} {why}, {self._running[place].pid} takes its place", flush=True)

    def stop(self) -> None:
        """Let all finish what they are at, and end them."""
        for process in self._running:
            process.terminate()
        deadline = monotonic() + GRACE
        for process in self._running:
            process.join(max(0, deadline - monotonic()))
            process.kill()
            process.join()


async def lead(options: Options, processes: int, *, seconds: float | None, until_empty: bool) -> None:
    """Have a crew work until it is told to stop by SIGINT or SIGTERM, the time is up, or nothing is left to do."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    crew, began = Crew(options, processes), monotonic()
    tick, done, first = began, 0, None
    async with connect(options.store) as redis:
        while not told.is_set() and (seconds is None or tick < began + seconds):
            tick += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), tick - monotonic())
            before, done, now = done, crew.done, monotonic()
            if first is None and done:
                first = done, now  # the rate is that since the first second in which something was done
            rate = (done - first[0]) / (now - first[1]) if first and now > first[1] else 0
            print(f"{done - before:6} in this second {done:9} in all {rate:10.1f}/s so far", flush=True)
            crew.replace_dead()
            if until_empty and await is_drained(redis, options.stream, options.group):
                break
    crew.stop()
    print(f"{crew.done} done in {monotonic() - began:.1f} s", flush=True)
