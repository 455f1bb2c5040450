"""One process that works."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import pkgutil
import signal
from contextlib import suppress
from typing import Any, NamedTuple

from example_app.worker.jobs import RETRY, Jobs, connect
from limitgate import AsyncLimiter, Limit, StoreError

log = logging.getLogger(__name__)


class Options(NamedTuple):
    """What every process has to know."""

    store: str  # the URL of a Redis, for the stream and for the rate
    stream: str
    group: str
    rate: Limit  # of all processes together
    idle: float  # seconds after which a job of a dead worker is claimed by another one
    handler: str  # what does a job, as "package.module:function": an async function of its fields


async def nothing(fields: dict[str, str]) -> None:
    """The work, where no other is given."""


def run(options: Options, done: Any) -> None:
    """Work until told to stop by SIGTERM, or until the parent is gone. Counts in ``done.value`` what was acknowledged."""
    asyncio.run(Worker(options, done).run())


class Worker:
    """Takes jobs one by one, each in its turn."""

    def __init__(self, options: Options, done: Any) -> None:
        self._options = options
        self._done = done
        self._handle = pkgutil.resolve_name(options.handler)
        self._is_working = self._is_stopping = False

    async def run(self) -> None:
        """Work until told to stop."""
        loop, parent = asyncio.get_running_loop(), multiprocessing.parent_process()
        working = asyncio.create_task(self._work())

        def stop() -> None:
            """Let a job that is being worked on be finished; one that waits for its turn is given back."""
            self._is_stopping = True
            if not self._is_working:
                working.cancel()
            loop.call_later(RETRY, stop)  # before Python 3.12 redis-py may swallow a cancellation, by asyncio.wait_for

        def orphaned(parent: int) -> None:
            loop.remove_reader(parent)
            stop()

        loop.add_signal_handler(signal.SIGTERM, stop)
        if parent is not None:
            loop.add_reader(parent.sentinel, orphaned, parent.sentinel)
        with suppress(asyncio.CancelledError):
            await working

    async def _work(self) -> None:
        store, stream, group, rate, idle, _ = self._options
        async with connect(store) as redis, AsyncLimiter(store, timeout=1) as limiter:
            jobs = Jobs(redis, stream, group, idle)
            paced = limiter.pace(jobs, rate, key=f"worker:{stream}")
            alive = asyncio.create_task(jobs.keep_alive())
            try:
                while not self._is_stopping:
                    try:
                        job, fields = await anext(paced)
                    except StoreError as error:
                        log.warning("no turn for the job in hand, which is kept: %s", error)
                        await asyncio.sleep(RETRY)
                    else:
                        await self._do(job, fields, jobs)
            finally:
                alive.cancel()
                await jobs.give_back()

    async def _do(self, job: str, fields: dict[str, str], jobs: Jobs) -> None:
        self._is_working = True
        try:
            await self._handle(fields)
        except Exception:
            log.exception("job %s failed, it is tried again in %g s", job, self._options.idle)
            jobs.leave()
        else:
            await jobs.done()
            self._done.value += 1
        self._is_working = False
