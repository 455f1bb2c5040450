"""One event loop's requests to Redis: those that arrive in the same turn of the loop share one call of the script.

    spend ──> queue ──(the turn ends)──> batch ──> Pipeline ──> reply ──> each its own reading

Batches follow each other without waiting for replies, up to `MAX_FLYING`; then requests wait in the queue. They go out in
the order in which they arrived, so they are decided in that order. A request that is answered too late or goes away is only
marked so: nobody else notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from redis.exceptions import NoScriptError

from limitgate.errors import StoreError
from limitgate.plan import Plan, Reading
from limitgate.stores import wire
from limitgate.stores.breaker import PROBE_TIMEOUT
from limitgate.stores.leases import LONGEST
from limitgate.stores.pipeline import Pipeline
from limitgate.stores.redis import CONNECT_TIMEOUT, store_error, unsendable
from limitgate.stores.scripted import MAX_BATCH, MAX_CHARGES, Outcome, Scripted

MAX_FLYING = 16
"""Calls that may be on their way at a time."""
MAX_QUEUED = 10_000
"""Requests that may wait until they are sent."""
GRAIN = 0.005
"""Seconds between two looks for overdue requests, at least: under a stall each look goes through all that wait."""
SILENCE = 1.0
"""Seconds without any reply after which a connection with a request overdue is given up."""

Request = tuple[Plan, float, "asyncio.Future[Reading]"]
"""What is asked, by when on the loop's clock, and whom to tell."""


class Batch:
    """Requests that share a call."""

    __slots__ = ("again", "in_full", "plans", "requests", "sent")

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.plans: list[Plan] = []
        """What was sent, and when, by `Scripted`."""
        self.sent = 0.0
        self.in_full = False
        """Whether to send the script's text, since Redis did not know its hash."""
        self.again = False
        """Whether it was sent before, on a connection that turned out to be dead."""


class Batcher:
    """Sends the plans of one event loop to Redis, on a connection of its own.

    ``make_connection`` gives a redis-py connection that is yet to connect, ``script`` knows what to send and what a reply
    means, ``probe`` asks whether Redis is back. Connecting goes on in a task of its own past the deadline of the request
    that began it.
    """

    def __init__(self, make_connection: Callable[[], Any], script: Scripted, probe: Plan) -> None:
        self._make_connection = make_connection
        self._script = script
        self._probe = probe
        self._breaker = script.breaker()
        self._queue: deque[Request] = deque()
        self._again: deque[Batch] = deque()
        self._turn_will_end = False
        self._pipeline: Pipeline[Batch] | None = None
        self._pipelines: set[Pipeline[Batch]] = set()
        """The one in use, and those that only wait for their last replies."""
        self._script_is_unknown = False
        self._connecting: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._lease_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._ending: AsyncGenerator[None, None] | None = None

    async def begin(self) -> None:
        """Watch for the end of the event loop."""
        self._ending = self._until_the_loop_ends()
        await anext(self._ending)

    def spend(self, plan: Plan, timeout: float) -> asyncio.Future[Reading]:
        """The reading of a plan, or a `StoreError` within ``timeout`` seconds.

        Raises one at once where Redis has stopped answering, or too many are waiting already.
        """
        self._breaker.check()
        return self._ask(plan, timeout)

    def _ask(self, plan: Plan, timeout: float) -> asyncio.Future[Reading]:
        if len(self._queue) >= MAX_QUEUED:
            raise StoreError(f"{MAX_QUEUED} requests wait for Redis already", "timeout")
        loop = asyncio.get_running_loop()
        reading = loop.create_future()
        deadline = loop.time() + timeout
        self._queue.append((plan, deadline, reading))
        if self._alarm is None or deadline < self._alarm.when():
            self._set_alarm(deadline)
        if len(self._queue) == MAX_BATCH:
            self._flush()  # Redis can begin while the rest of a large crowd is still arriving
        elif not self._turn_will_end:
            self._turn_will_end = True
            loop.call_soon(self._end_turn)
        return reading

    async def close(self) -> None:
        """Close the connection; requests still waiting fail."""
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        for timer in (self._alarm, self._lease_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self._alarm = self._lease_timer = self._probe_timer = self._pipeline = None
        self._breaker = self._script.breaker(instead_of=self._breaker)
        for pipeline in list(self._pipelines):
            pipeline.give_up()
        self._fail_unsent(ConnectionResetError("the store was closed"))
        await asyncio.sleep(0)  # the transport tells of its end in the next turn

    async def end(self) -> None:
        """Give back what was taken in advance, and close for good."""
        if given_back := self.give_back(CONNECT_TIMEOUT, age=0):
            await asyncio.wait(given_back)
        await self.close()
        if self._ending is not None:
            await self._ending.aclose()

    def abandon(self) -> None:
        """The event loop was closed before anything here was: no call on its way will be answered."""
        for pipeline in self._pipelines:
            for batch in pipeline.flying:
                self._script.unanswered(batch.plans)

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        """Waits for the end of the event loop, which closes every asynchronous generator (PEP 525), and closes."""
        try:
            yield
        finally:
            self._ending = None  # it knows the loop, so the loop would be kept for as long as the store
            await self.close()

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
            batch = self._next_batch()
            if batch.requests:
                batch.plans, batch.sent = self._script.outgoing([plan for plan, _, _ in batch.requests])
                try:
                    self._send(batch, pipeline)
                except wire.UNSENDABLE as error:
                    self._fail(batch, unsendable(error))

    def _next_batch(self) -> Batch:
        """The requests to send next, without those that nobody waits for any more."""
        if self._again:
            batch = self._again.popleft()
            batch.requests = [request for request in batch.requests if not request[2].done()]
            return batch
        requests: list[Request] = []
        charges = 0
        while self._queue and len(requests) < MAX_BATCH and charges < MAX_CHARGES:
            request = self._queue.popleft()
            if not request[2].done():
                requests.append(request)
                charges += len(request[0].charges)
        return Batch(requests)

    def _send(self, batch: Batch, pipeline: Pipeline[Batch]) -> None:
        script = ("EVAL", wire.SPEND) if batch.in_full else ("EVALSHA", wire.SHA)
        pipeline.send(batch, *script, *wire.arguments(batch.plans))

    def _answered(self, pipeline: Pipeline[Batch], batch: Batch, reply: object) -> None:
        """Hand out a reply. An error that is Redis' own answer fails its batch, and later ones get another connection."""
        if isinstance(reply, NoScriptError) and not batch.in_full:
            batch.in_full = self._script_is_unknown = True
            self._send(batch, pipeline)
            return
        try:
            if isinstance(reply, Exception):
                raise store_error(reply) from reply
            outcomes = self._script.understood(batch.plans, reply, batch.sent)
        except StoreError as error:
            self._fail(batch, error)
            if error.fault != "oom":
                self._no_longer_use(pipeline)
                self._failed(error)
        else:
            self._breaker.succeeded()
            self._hand_out(batch, outcomes)
        if pipeline is not self._pipeline and not pipeline.flying:
            pipeline.give_up()
        if self._queue or self._again:
            self._flush()

    def _hand_out(self, batch: Batch, outcomes: list[Outcome]) -> None:
        for request, outcome in zip(batch.requests, outcomes):
            if isinstance(outcome, StoreError):
                _fail([request], outcome)
            elif not request[2].done():
                request[2].set_result(outcome)
        if self._script.leases and self._lease_timer is None:
            self._end_leases_in_time()

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
                self._script.unanswered(batch.plans)
                given_back = [request for request in batch.requests if any(charge.lease for charge in request[0].charges)]
                _fail(given_back, lost)  # a charge may be made twice, this may not
                batch.again = True
                self._again.append(batch)
            else:
                failed = True
                self._fail(batch, lost)
        if failed:
            self._failed(lost)
        self._flush()

    async def _connect(self) -> None:
        connection = self._make_connection()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await connection.connect()
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if not isinstance(error, Exception):
                raise
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
        self._flush()

    def _not_connected(self, error: Exception) -> None:
        self._fail_unsent(error)
        self._failed(store_error(error))

    def _set_alarm(self, deadline: float) -> None:
        """Look for overdue requests at the first deadline; one alarm does for all that come before it rings."""
        if self._alarm is not None:
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
        for batch in self._again:
            yield from batch.requests
        for pipeline in self._pipelines:
            for batch in pipeline.flying:
                yield from batch.requests

    def _fail_unsent(self, error: Exception) -> None:
        for batch in self._again:
            _fail(batch.requests, error)
        self._again.clear()
        _fail(self._queue, error)
        self._queue.clear()

    def _fail(self, batch: Batch, error: Exception) -> None:
        self._script.unanswered(batch.plans)
        _fail(batch.requests, error)

    def _failed(self, error: StoreError) -> None:
        """A call failed. When too many have, nobody waits any more, and probes look for Redis."""
        if self._breaker.failed(error):
            self._fail_unsent(error)
            self._probe_later()

    def _probe_later(self) -> None:
        self._probe_timer = asyncio.get_running_loop().call_later(self._breaker.pause(), self._send_probe)

    def _send_probe(self) -> None:
        self._probe_timer = None
        if not self._breaker.healthy:
            self._ask(self._probe, PROBE_TIMEOUT).add_done_callback(self._probed)

    def _probed(self, answer: asyncio.Future[Reading]) -> None:
        if answer.exception() and not self._breaker.healthy:
            self._probe_later()

    def give_back(self, timeout: float, age: float = LONGEST) -> list[asyncio.Future[Reading]]:
        """Give back leases of an age, in seconds, or above. Those that Redis does not hear of drain there."""
        sent: list[asyncio.Future[Reading]] = []
        with contextlib.suppress(StoreError):
            sent.extend(self.spend(plan, timeout) for plan in self._script.leases.ended(time.monotonic(), age))
        return sent

    def _end_leases_in_time(self) -> None:
        """Ring when the oldest lease ends."""
        ends = self._script.leases.ends()
        if ends is not None:
            delay = max(0.0, ends - time.monotonic())
            self._lease_timer = asyncio.get_running_loop().call_later(delay, self._end_leases)

    def _end_leases(self) -> None:
        self._lease_timer = None
        self.give_back(CONNECT_TIMEOUT)
        self._end_leases_in_time()


def _fail(requests: Iterable[Request], error: Exception) -> None:
    """Tell everybody who still waits, each with an error of their own."""
    for _, _, waiting in requests:
        if not waiting.done():
            failure = error if isinstance(error, StoreError) else store_error(error)
            own = StoreError(str(failure), failure.fault)
            own.__cause__ = failure.__cause__ or error
            waiting.set_exception(own)
            waiting.exception()  # it may have nobody left to look at it
