"""Stand-ins for Celery, arq and RQ, as docs/recipes.md uses them: tasks run in this process, in the order of their times.

None of these packages is among what the tests need. The recipes were tried with workers of all three, see the page.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from itertools import count
from types import ModuleType
from typing import Any, NamedTuple

from limitgate.testing import FrozenClock


class Put(NamedTuple):
    """A task in a queue."""

    due_at: float
    """Seconds of the queue's clock."""
    place: int
    work: Callable[[], object]


class TaskQueue:
    """What is to be done, and a worker that does it. Time passes by the clock if there is one, else tasks are run at once."""

    def __init__(self, clock: FrozenClock | None = None) -> None:
        self._clock = clock
        self._waiting: list[Put] = []
        self._places = count()
        self.countdowns: list[float] = []
        """Seconds for which tasks have asked to be put back."""

    def put(self, work: Callable[[], object], countdown: float = 0) -> None:
        """Put a task into the queue, to be run after some seconds."""
        now = self._clock.now if self._clock else 0
        heapq.heappush(self._waiting, Put(now + countdown, next(self._places), work))

    def put_back(self, work: Callable[[], object], countdown: float) -> None:
        """Put a task back that has asked for it."""
        self.countdowns.append(countdown)
        self.put(work, countdown)

    def run_one(self) -> None:
        """Run the task whose time comes first."""
        put = heapq.heappop(self._waiting)
        if self._clock:
            self._clock.advance(max(0, put.due_at - self._clock.now))
        put.work()

    def run(self) -> None:
        """Run tasks until there are none."""
        while self._waiting:
            self.run_one()


class _Retry(Exception):  # noqa: N818 - as Celery calls it
    """Celery's: the task is back in the queue."""


class _Task:
    """Celery's task, bound to itself."""

    def __init__(self, app: Celery, function: Callable[..., object], autoretry_for: tuple[type[Exception], ...]) -> None:
        self._app = app
        self._function = function
        self._autoretry_for = autoretry_for
        self._arguments: tuple[Any, ...] = ()

    def delay(self, *arguments: Any) -> None:
        self._app.queue.put(lambda: self._run(arguments))

    def retry(self, countdown: float) -> _Retry:
        arguments = self._arguments
        self._app.queue.put_back(lambda: self._run(arguments), countdown)
        return _Retry()

    def _run(self, arguments: tuple[Any, ...]) -> None:
        self._arguments = arguments
        try:
            self._function(self, *arguments)
        except _Retry:
            pass
        except self._autoretry_for:
            self.retry(countdown=1)


class Celery:
    """Celery's application. ``queue`` has to be set before tasks are run."""

    queue: TaskQueue

    def __init__(self, name: str, broker: str) -> None:
        self.name = name
        self.broker = broker

    def task(
        self, *, bind: bool, max_retries: int | None, autoretry_for: tuple[type[Exception], ...], retry_backoff: bool
    ) -> Callable[[Callable[..., object]], _Task]:
        """Make a task of a function. Only what the recipe says is known."""
        assert bind
        assert max_retries is None
        assert retry_backoff
        return lambda function: _Task(self, function, autoretry_for)


class Retry:
    """RQ's, as a job may return it."""

    def __init__(self, max: int, interval: int) -> None:  # noqa: A002 - as RQ calls it
        assert max >= 1
        assert isinstance(interval, int)
        assert interval >= 0
        self.interval = interval


def rq_job(queue: TaskQueue, function: Callable[..., object], *arguments: object, results: list[object]) -> None:
    """Enqueue a function as RQ does: it is put back for as long as it returns a `Retry`, else its result is kept."""

    def work() -> None:
        result = function(*arguments)
        if isinstance(result, Retry):
            queue.put_back(work, result.interval)
        else:
            results.append(result)

    queue.put(work)


class Deferred(RuntimeError):  # noqa: N818 - it stands for arq's Retry
    """arq's ``Retry``: the job is back in the queue."""

    def __init__(self, defer: float) -> None:
        super().__init__(defer)
        self.defer = defer


class RedisSettings:
    """arq's, as far as the recipe makes them."""

    from_dsn = staticmethod(str)


def arq_job(queue: TaskQueue, runner: asyncio.Runner, job: Callable[[], Coroutine[Any, Any, str]], results: list[str]) -> None:
    """Enqueue a coroutine function as arq does: it is put back for as long as it raises a `Deferred`."""

    def work() -> None:
        try:
            results.append(runner.run(job()))
        except Deferred as deferred:
            queue.put_back(work, deferred.defer)

    queue.put(work)


def modules() -> dict[str, ModuleType]:
    """The modules to import them from, by name."""
    celery, rq, arq, connections = map(ModuleType, ("celery", "rq", "arq", "arq.connections"))
    vars(celery)["Celery"], vars(rq)["Retry"] = Celery, Retry
    vars(arq)["Retry"], vars(connections)["RedisSettings"] = Deferred, RedisSettings
    return {"celery": celery, "rq": rq, "arq": arq, "arq.connections": connections}
