"""One event loop's requests to Redis: those that arrive in the same turn of the loop share one call of the script.

    spend ──> queue ──(the turn ends)──> batch ──> Pipeline ──> reply ──> each its own reading

Batches follow each other without waiting for replies, up to `MAX_FLYING`; then requests wait in the queue. They go out in
the order in which they arrived, so they are decided in that order. A request that is answered too late or goes away is only
marked so: nobody else notices.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from redis.exceptions import NoScriptError

from limitgate.errors import StoreError
from limitgate.plan import Plan, Reading
from limitgate.stores import wire
from limitgate.stores.batch import Batch, Request
from limitgate.stores.breaker import PROBE_TIMEOUT
from limitgate.stores.dialer import CONNECT_TIMEOUT
from limitgate.stores.faults import Redirection, store_error, unsendable
from limitgate.stores.pipeline import Pipeline
from limitgate.stores.scripted import MAX_BATCH, Outcome, Room, Scripted

MAX_FLYING = 16
"""Calls that may be on their way at a time."""
MAX_QUEUED = 10_000
"""Requests that may wait until they are sent."""
GRAIN = 0.005
"""Seconds between two looks for overdue requests, at least: under a stall each look goes through all that wait."""
SILENCE = 1.0
"""Seconds without any reply after which a connection with a request overdue is given up."""


class Elsewhere(Protocol):
    """The cluster that a batcher's server is a node of."""

    def apart(self, requests: list[Request]) -> Iterable[Batch]:
        """Requests as calls with one slot each."""

    def redirected(self, batcher: Batcher, batch: Batch, reply: Redirection) -> None:
        """A node says that it cannot deal with a batch."""

    def troubled(self) -> None:
        """A node has failed."""


class Batcher:
    """Sends the plans of one event loop to Redis, on a connection of its own.

    ``dial`` gives a redis-py connection, ``script`` knows what to send and what a reply means, ``server`` is what log
    lines call it. Connecting goes on in a task of its own past the deadline of the request that began it. Where the server is
    a node of a cluster, ``cluster`` knows the others.
    """

    def __init__(
        self,
        dial: Callable[[], Awaitable[Any]],
        script: Scripted,
        *,
        server: str = "Redis",
        cluster: Elsewhere | None = None,
    ) -> None:
        self.breaker = script.breaker(server)
        self._server = server
        self._dial = dial
        self._script = script
        self._cluster = cluster
        self._queue: deque[Request] = deque()
        self._again: deque[Batch] = deque()
        self._parked: list[Batch] = []
        self._turn_will_end = False
        self._pipeline: Pipeline[Batch] | None = None
        self._pipelines: set[Pipeline[Batch]] = set()
        """The one in use, and those that only wait for their last replies."""
        self._script_is_unknown = False
        self._connecting: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    def spend(self, plan: Plan, timeout: float) -> asyncio.Future[Reading]:
        """The reading of a plan, or a `StoreError` within ``timeout`` seconds.

        Raises one at once where Redis has stopped answering, or too many are waiting already.
        """
        self.breaker.check()
        return self.ask(plan, timeout)

    def ask(self, plan: Plan, timeout: float) -> asyncio.Future[Reading]:
        """`spend`, but whether or not Redis has stopped answering."""
        if len(self._queue) >= MAX_QUEUED:
            raise StoreError(f"{MAX_QUEUED} requests wait for Redis already", "timeout")
        self.breaker.asked(plan)
        loop = asyncio.get_running_loop()
        reading = loop.create_future()
        deadline = loop.time() + timeout
        self._queue.append((plan, deadline, reading))
        self._set_alarm(deadline)
        if len(self._queue) == MAX_BATCH:
            self._flush()  # Redis can begin while the rest of a large crowd is still arriving
        elif not self._turn_will_end:
            self._turn_will_end = True
            loop.call_soon(self._end_turn)
        return reading

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything here."""
        return all(waiting.done() for _, _, waiting in self._requests())

    async def close(self) -> None:
        """Close the connection; requests still waiting fail."""
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        for timer in (self._alarm, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self._alarm = self._probe_timer = self._pipeline = None
        self.breaker = self._script.breaker(self._server, instead_of=self.breaker)
        for pipeline in list(self._pipelines):
            pipeline.give_up()
        self._fail_unsent(ConnectionResetError("the store was closed"))
        await asyncio.sleep(0)  # the transport tells of its end in the next turn

    def abandon(self) -> None:
        """The event loop was closed before anything here was: no call on its way will be answered."""
        for pipeline in self._pipelines:
            for batch in pipeline.flying:
                self._script.unanswered(batch)

    def adopt(self, batch: Batch) -> None:
        """Send a batch, just as it is, before everything that waits: it was sent elsewhere, and is to be dealt with here."""
        try:
            self.breaker.check()
        except StoreError as error:
            self._fail(batch, error)
            return
        self._again.append(batch)
        self._set_alarm(batch.deadline)
        self._flush()

    def park(self, batch: Batch, pause: float) -> None:
        """Send a batch once more, just as it is, after a pause in seconds."""
        self._parked.append(batch)
        asyncio.get_running_loop().call_later(pause, self._unpark, batch)

    def _unpark(self, batch: Batch) -> None:
        if batch in self._parked:
            self._parked.remove(batch)
            self.adopt(batch)

    def _end_turn(self) -> None:
        self._turn_will_end = False
        self._flush()

    def _flush(self) -> None:
        """Send what waits, as far as there is a connection and not too much is on its way."""
        pipeline = self._pipeline
        if not pipeline:
            if (self._queue or self._again) and self._connecting is None:
                self._connecting = asyncio.create_task(self._connect())
            return
        if self._script_is_unknown and pipeline.flying:
            return  # batches that are sent once more keep their place before those to come
        self._script_is_unknown = False
        while (self._again or self._queue) and len(pipeline.flying) < MAX_FLYING:
            if self._again:
                self._send(self._again.popleft(), pipeline)
            elif requests := self._next_requests():
                for batch in (Batch(requests),) if self._cluster is None else self._cluster.apart(requests):
                    self._script.outgoing(batch)
                    self._send(batch, pipeline)
        pipeline.flush()

    def _next_requests(self) -> list[Request]:
        """The requests to send next, without those that nobody waits for any more."""
        requests: list[Request] = []
        room = Room()
        while self._queue and (self._queue[0][2].done() or room.takes(self._queue[0][0])):
            request = self._queue.popleft()
            if not request[2].done():
                requests.append(request)
        return requests

    def _send(self, batch: Batch, pipeline: Pipeline[Batch]) -> None:
        """Send a batch that somebody waits for."""
        if not batch.is_wanted:
            self._script.unanswered(batch)
            return
        try:
            pipeline.send(batch)
        except wire.UNSENDABLE as error:
            self._fail(batch, unsendable(error))

    def _answered(self, pipeline: Pipeline[Batch], batch: Batch, reply: object) -> None:
        """Hand out a reply. An error that is Redis' own answer fails its batch, and later ones get another connection.

        One that nobody waits for any more is no sign that Redis answers.
        """
        if isinstance(reply, NoScriptError) and not batch.in_full:
            batch.in_full = self._script_is_unknown = True
            self._send(batch, pipeline)
            pipeline.flush()
            return
        try:
            if self._cluster is not None and isinstance(reply, Redirection):
                self._in_time(batch)
                self._cluster.redirected(self, batch, reply)
                return
            if isinstance(reply, Exception):
                raise store_error(reply) from reply
            outcomes = self._script.understood(batch, reply)
        except StoreError as error:
            self._fail(batch, error)
            if error.fault != "oom":
                self._no_longer_use(pipeline)
                self._failed(error)
        else:
            self._in_time(batch)
            self._hand_out(batch, outcomes)
        finally:
            if pipeline is not self._pipeline and not pipeline.flying:
                pipeline.give_up()
            if self._queue or self._again:
                self._flush()

    def _in_time(self, batch: Batch) -> None:
        if batch.is_wanted:
            self.breaker.succeeded()

    def _hand_out(self, batch: Batch, outcomes: list[Outcome]) -> None:
        for request, outcome in zip(batch.requests, outcomes):
            if isinstance(outcome, StoreError):
                _fail([request], outcome)
            elif not request[2].done():
                request[2].set_result(outcome)

    def _no_longer_use(self, pipeline: Pipeline[Batch]) -> None:
        """Later requests get another connection."""
        if pipeline is self._pipeline:
            self._pipeline = None

    def _lost(self, pipeline: Pipeline[Batch]) -> None:
        """A connection has ended. Batches on one that may have been dead before they were sent are sent once more."""
        self._pipelines.discard(pipeline)
        self._no_longer_use(pipeline)
        lost = store_error(ConnectionResetError("the connection was lost"))
        failed = False
        for batch in pipeline.flying:
            if pipeline.unheard and not pipeline.given_up and not batch.again:
                self._script.unanswered(batch)
                given_back = [request for request in batch.requests if any(charge.lease for charge in request[0].charges)]
                _fail(given_back, lost)  # a charge may be made twice, this may not
                if requests := [request for request in batch.requests if not request[2].done()]:
                    again = Batch(requests)
                    again.again, again.asking, again.in_full = True, batch.asking, batch.in_full
                    self._script.outgoing(again)
                    self._again.append(again)
            else:
                failed = True
                self._fail(batch, lost)
        if failed:
            self._failed(lost)
        if pipeline.given_up and pipeline.silence() > SILENCE:
            self._dial_at_once()
        self._flush()

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                connection = await self._dial()
        except Exception as error:  # noqa: BLE001 - whatever kept us from connecting is told to those who wait
            self._not_connected(error)
            return
        finally:
            if self._connecting is asyncio.current_task():
                self._connecting = None
        pipeline = Pipeline(connection, self._answered, self._lost)
        if not pipeline:  # its end was told before there was a pipeline to tell
            self._not_connected(ConnectionResetError("Redis closed the connection as soon as it was made"))
            return
        self._pipeline = pipeline
        self._pipelines.add(pipeline)
        if self._probe_timer is not None:  # there is something new to look at
            self._probe_timer.cancel()
            self._send_probe()
        self._flush()

    def _not_connected(self, error: Exception) -> None:
        self._fail_unsent(error)
        failure = store_error(error)
        self._failed(failure)
        if failure.fault == "timeout":
            self._dial_at_once()

    def _dial_at_once(self) -> None:
        """Where Redis has been silent for so long that its connection is given up, no pause is due before the next."""
        if not self.breaker.healthy and self._pipeline is None and self._connecting in (None, asyncio.current_task()):
            self._connecting = asyncio.create_task(self._connect())

    def _set_alarm(self, deadline: float) -> None:
        """Look for overdue requests at the first deadline; one alarm does for all that come before it rings."""
        if self._alarm is not None:
            if self._alarm.when() <= deadline:
                return
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(deadline, self._expire)

    def _expire(self) -> None:
        """Fail the requests that are overdue, and give up connections on which nothing has been heard for long."""
        self._alarm = None
        now = asyncio.get_running_loop().time()
        waiting = [request for request in self._requests() if not request[2].done()]
        overdue = [request for request in waiting if request[1] <= now]
        _fail(overdue, TimeoutError())
        self._queue = deque(request for request in self._queue if not request[2].done())
        for pipeline in list(self._pipelines):
            if overdue and pipeline.silence() > SILENCE:
                pipeline.give_up()
        if overdue:
            self._failed(store_error(TimeoutError()))
        if len(waiting) > len(overdue):
            self._set_alarm(max(now + GRAIN, min(deadline for _, deadline, _ in waiting if deadline > now)))

    def _requests(self) -> Iterable[Request]:
        yield from self._queue
        for batch in (*self._again, *self._parked):
            yield from batch.requests
        for pipeline in self._pipelines:
            for batch in pipeline.flying:
                yield from batch.requests

    def _fail_unsent(self, error: Exception) -> None:
        for batch in (*self._again, *self._parked):
            self._fail(batch, error)
        self._again.clear()
        self._parked.clear()
        _fail(self._queue, error)
        self._queue.clear()

    def _fail(self, batch: Batch, error: Exception) -> None:
        self._script.unanswered(batch)
        _fail(batch.requests, error)

    def _failed(self, error: StoreError) -> None:
        """A call failed. When too many have, nobody waits any more, and probes look for Redis."""
        if self.breaker.failed(error):
            self._fail_unsent(error)
            self._probe_later()
        if self._cluster is not None:
            self._cluster.troubled()

    def _probe_later(self) -> None:
        self._probe_timer = asyncio.get_running_loop().call_later(self.breaker.pause(), self._send_probe)

    def _send_probe(self) -> None:
        self._probe_timer = None
        probe = self.breaker.probe
        if probe is not None and not self.breaker.healthy:
            self.ask(probe, min(PROBE_TIMEOUT, self._script.patience)).add_done_callback(self._probed)

    def _probed(self, answer: asyncio.Future[Reading]) -> None:
        if answer.exception() and not self.breaker.healthy:
            self._probe_later()


def _fail(requests: Iterable[Request], error: Exception) -> None:
    """Tell everybody who still waits, each with an error of their own."""
    for _, _, waiting in requests:
        if not waiting.done():
            failure = error if isinstance(error, StoreError) else store_error(error)
            own = StoreError(str(failure), failure.fault)
            own.__cause__ = failure.__cause__ or error
            waiting.set_exception(own)
            waiting.exception()  # it may have nobody left to look at it
