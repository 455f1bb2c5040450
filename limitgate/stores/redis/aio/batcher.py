"""One event loop's requests to Redis. Requests of the same iteration share a script call.

    spend ──> queue ──(end of iteration)──> batch ──> connection ──> reply ──> one reading per request

Up to `MAX_FLYING` batches are in flight; others wait. Redis decides in arrival order.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import ref

from limitgate.errors import StoreError
from limitgate.internal_errors import internal_error, logged_errors
from limitgate.limits.plan import Plan, Reading
from limitgate.limits.template import AnyPlan, whole
from limitgate.process import switch
from limitgate.process.clock import Timer, begin, call_later, loop_time, monotonic
from limitgate.stores.base import MAX_BATCH, Room
from limitgate.stores.redis import wire
from limitgate.stores.redis.aio.batch import Batch, Request, RequestQueue
from limitgate.stores.redis.aio.connection import AsyncConnection, renew_in_time
from limitgate.stores.redis.aio.listening import ListeningClock, Silence
from limitgate.stores.redis.breaker import Breaker
from limitgate.stores.redis.dialer import CONNECT_TIMEOUT
from limitgate.stores.redis.errors import Redirection, no_room, store_error, unsendable
from limitgate.stores.redis.redis_py import close, renewable_login
from limitgate.stores.redis.replies import DECLINED, Outcome, RedisStoreBase, Server, blames_server
from limitgate.stores.redis.session import CallEvent, Doubts, Resend
from limitgate.stores.redis.url import Address

MAX_FLYING = 16
MAX_QUEUED = 50_000
SILENCE = 1.0
"""Seconds until a connection with overdue calls is closed."""
NO_ROOM_PAUSE = 0.05
"""Seconds to wait if descriptors or memory were used up."""


class ClusterOfNode(Protocol):
    def apart(self, batch: Batch) -> Iterable[Batch]: ...

    def heard_late(self, plan: Plan, waiting: asyncio.Future[Reading], reading: Reading) -> None:
        """Handle a reading that came too late for its caller."""

    def redirected(self, batch: Batch, redirection: Redirection, origin: Address) -> None:
        """Forward a batch that the node at ``origin`` has redirected."""

    def troubled(self) -> None: ...


class Batcher:
    """Sends one event loop's plans to one server.

    ``dial`` opens a redis-py connection. A node of a ``cluster`` has an ``address``. A connection attempt may last longer
    than its request. Tasks and timers refer to the batcher weakly, so an unused one is freed.
    """

    def __init__(
        self,
        dial: Callable[[], Awaitable[Any]],
        replies: RedisStoreBase,
        clock: ListeningClock,
        *,
        address: Address | None = None,
        cluster: ClusterOfNode | None = None,
    ) -> None:
        self._server = Server(replies, address)
        self._dial = dial
        self._replies = replies
        self._clock = clock
        self._cluster = cluster
        self._send_new = self._send_first if cluster is None else partial(self._send_apart, cluster)
        # Before Python 3.12 get_running_loop() makes a system call.
        self._loop = asyncio.get_running_loop()
        self._time = partial(loop_time, self._loop)
        self._queue = RequestQueue(MAX_BATCH)
        self._queue_is_due = math.inf
        """Lower bound of deadlines, in seconds of silence."""
        self._resends: deque[Batch] = deque()
        self._parked: list[Batch] = []
        self._is_gathering = False
        self._connection: AsyncConnection | None = None
        self._connections: dict[AsyncConnection, None] = {}
        self._connecting: asyncio.Task[None] | None = None
        self._connecting_since = 0.0, 0
        """Start of the attempt, and `ListeningClock.sleeps` at that time."""
        self._no_room_until = 0.0
        self._doubted: tuple[AsyncConnection, float] | None = None
        """A connection, and the start of its silence."""
        self._doubts = Doubts()
        self._renewed: AsyncConnection | None = None
        self._silence = Silence(clock)
        self._probe_timer: Timer | None = None

    @property
    def breaker(self) -> Breaker:
        return self._server.breaker

    def spend(
        self,
        plan: AnyPlan,
        timeout: float,
        checks: bool = True,  # noqa: FBT001, FBT002 - a keyword is slower
    ) -> asyncio.Future[Reading]:
        """Send a plan.

        Raises `StoreError` for a full queue or, with ``checks``, for an open breaker. After ``timeout``, the future raises it.
        """
        queue = self._queue
        if not self._is_gathering and checks and self._server.breaker.state != "closed":
            self._server.breaker.check(self._time)
            self._give_up_what_owes_since_before()
        if queue.size >= MAX_QUEUED:
            raise StoreError(f"{MAX_QUEUED} requests already wait for {self._server.name}", "overload")
        if not self._is_gathering:
            self._gather(plan)
        due = self._silence.seconds + timeout
        if due < self._queue_is_due:  # noqa: PLR1730 - min() is slower
            self._queue_is_due = due
        waiting = self._loop.create_future()
        queue.append((plan, due, waiting, timeout))
        if queue.size == MAX_BATCH:
            self._flush()
        return waiting

    def ask_first(self, plan: Plan, timeout: float) -> asyncio.Future[Reading]:
        """Send a plan without checks, at the head of the queue."""
        self._gather(plan)
        waiting = self._loop.create_future()
        self._queue_first([(plan, self._silence.seconds + timeout, waiting, timeout)])
        return waiting

    def _gather(self, plan: AnyPlan) -> None:
        """Flush at the end of this iteration. Raises `StoreError` without room for a connection."""
        if self._connection is None and self._time() < self._no_room_until:
            raise no_room()
        breaker = self._server.breaker
        breaker.sending(plan)
        self._silence.watch(self)
        self._loop.call_soon(self._flush)
        # With an open breaker each request is checked.
        self._is_gathering = breaker.state == "closed"

    def config(self, request: wire.KeptRequest, timeout: float) -> asyncio.Future[wire.Kept]:
        """Send a request before queued plans. The future raises `StoreError` after ``timeout``."""
        stored: asyncio.Future[wire.Kept] = self._loop.create_future()
        batch = Batch([(wire.NO_PLAN, self._silence.seconds + timeout, stored, timeout)], config=request)
        batch.silence, batch.since = self._silence.seconds, self._clock.now()
        self._replies.outgoing(batch)
        self.adopt(batch)
        return stored

    def connect(self) -> None:
        if not self._is_connected:
            self._begin_to_connect()

    @property
    def is_idle(self) -> bool:
        return all(waiting.done() for _, _, waiting, _ in self._requests())

    async def close(self) -> None:
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._clock.forget(self)
        self._silence.stop()
        self._probe_timer = self._connection = None
        self._server.reset_after_fork()
        for connection in list(self._connections):
            with logged_errors():
                connection.give_up()
        self._fail_unsent(ConnectionResetError("the store was closed"))
        # The transport reports its end later.
        await asyncio.sleep(0)

    def abandon(self) -> None:
        """Fail the calls of an event loop that has closed."""
        for connection in self._connections:
            for batch in connection.session.flying:
                self._replies.unanswered(batch)

    def adopt(self, batch: Batch) -> None:
        """Take over another node's batch, at the head of the queue."""
        try:
            self._server.breaker.check(self._time)
        except StoreError as error:
            self._fail(batch, error)
            return
        self._server.breaker.sending(batch.first)
        self._resends.append(batch)
        self._silence.watch(self)
        self._flush()

    def park(self, batch: Batch, pause: float) -> None:
        self._parked.append(batch)
        self._silence.watch(self)
        call_later(asyncio.get_running_loop(), pause, partial(self._unpark, batch))

    def _unpark(self, batch: Batch) -> None:
        if batch in self._parked:
            self._parked.remove(batch)
            self.adopt(batch)

    def _flush(self) -> None:
        self._is_gathering = False
        connection, queue, resends = self._connection, self._queue, self._resends
        if connection is None or connection.is_closing():
            if queue.size or resends:
                self._begin_to_connect()
            return
        session, flying, send_new = connection.session, connection.session.flying, self._send_new
        while (queue.size or resends) and len(flying) < MAX_FLYING and not session.is_settling:
            if resends:
                self._send(resends.popleft(), connection)
            elif (plain := queue.pop_plain()) is not None:
                send_new(plain, connection)
            elif requests := self._next_requests():
                send_new(Batch(requests), connection)
        connection.flush()

    def _send_apart(self, cluster: ClusterOfNode, batch: Batch, connection: AsyncConnection) -> None:
        try:
            batches = cluster.apart(batch)
        except Exception as error:  # noqa: BLE001 - the queue no longer has them
            _fail(batch.requests, internal_error(error), self._silence.seconds)
            return
        for each in batches:
            self._send_first(each, connection)

    def _send_first(self, batch: Batch, connection: AsyncConnection) -> None:
        batch.silence = self._silence.seconds
        batch.since = self._clock.now()
        try:
            self._replies.outgoing(batch)
        except Exception as error:  # noqa: BLE001 - the queue no longer has its requests
            self._fail(batch, internal_error(error))
        else:
            self._send(batch, connection)

    def _next_requests(self) -> list[Request]:
        requests: list[Request] = []
        room = Room()
        while (first := self._queue.first()) is not None:
            plan, _, waiting, _ = first
            try:
                if waiting.done():
                    self._queue.popleft()
                # Others may have been refused meanwhile.
                elif (reading := self._replies.refused(plan)) is not None:
                    self._queue.popleft()
                    waiting.set_result(reading)
                elif room.takes(plan):
                    requests.append(self._queue.popleft())
                else:
                    break
            except Exception as error:  # noqa: BLE001 - earlier requests must not be lost, later ones must not be blocked
                _fail([self._queue.popleft()], internal_error(error), self._silence.seconds)
        return requests

    def _send(self, batch: Batch, connection: AsyncConnection) -> None:
        try:
            if not batch.requests[0][2].done() or batch.is_wanted:
                only_charges = batch.shape is not None and not batch.shape.gives_back
                if only_charges or not (batch.gives_back and self._has_to_wait(batch, connection)):
                    connection.send(batch)
            else:
                self._replies.unanswered(batch)
        except wire.UNSENDABLE as error:
            self._fail(batch, unsendable(error))
        except Exception as error:  # noqa: BLE001 - the queue no longer has it
            self._fail(batch, internal_error(error))

    def _has_to_wait(self, batch: Batch, connection: AsyncConnection) -> bool:
        """True if refunds must wait until an idle connection has answered."""
        session = connection.session
        if session.lies_idle(monotonic()):
            _, due, _, timeout = batch.requests[0]
            asking = Batch([(wire.NO_PLAN, due, self._loop.create_future(), timeout)])
            asking.follow(batch)
            connection.send(asking)
        # Most refunds find the connection without calls, and take no further call of ours.
        elif not (session.is_settling or (session.flying and session.is_doubtful)):
            return False
        session.is_settling = True
        self._resends.append(batch)
        return True

    def heard(self, connection: AsyncConnection, event: CallEvent[Batch]) -> None:
        """Handle an answer. After a server error, later batches use another connection."""
        self._silence.break_()
        batch = event.call
        if isinstance(event, Resend):
            batch.heard(self._clock.seconds, self._clock.now())
            self._send(batch, connection)
            connection.flush()
            return
        answer = self._server.judge(connection.session, event)
        try:
            if isinstance(answer, list):
                self._hand_out(batch, answer, batch.silence_at(self._clock.seconds))
            elif isinstance(answer, StoreError):
                self._fail_answered(connection, batch, answer)
            elif isinstance(answer, wire.Kept):
                self._hand_out(batch, [answer], batch.silence_at(self._clock.seconds))
            elif self._cluster is not None and self._server.address is not None:
                self._cluster.redirected(batch, answer, self._server.address)
        except Exception as error:  # noqa: BLE001 - it is no longer in flight
            self._fail(batch, internal_error(error))
        if self._queue.size or self._resends:
            self._flush()

    def _fail_answered(self, connection: AsyncConnection, batch: Batch, failure: StoreError) -> None:
        _fail(batch.requests, failure, batch.silence_at(self._clock.seconds))
        if blames_server(failure):
            self._no_longer_use(connection)
            self._failed(failure)

    def _hand_out(self, batch: Batch, outcomes: Sequence[Outcome | wire.Kept], silence: float) -> None:
        if outcomes is batch.plans:
            for plan, due, waiting, timeout in batch.requests:
                if not waiting.done():
                    waited = silence - due + timeout
                    waiting.set_result(plan.having_waited(waited) if waited > 0 else plan)  # type: ignore[union-attr]
            return
        declined: list[Request] = []
        for request, outcome in zip(batch.requests, outcomes):
            plan, due, waiting, timeout = request
            if isinstance(outcome, StoreError):
                _fail([request], outcome, silence)
            elif outcome is DECLINED:
                declined.append((whole(plan), self._silence.seconds + due - silence, waiting, timeout))
            elif not waiting.done():
                waited = silence - due + timeout
                waiting.set_result(outcome.having_waited(waited) if waited > 0 else outcome)
            elif self._cluster is not None and isinstance(outcome, Reading):
                with logged_errors():
                    self._cluster.heard_late(whole(plan), waiting, outcome)
        if declined:
            self._queue_first(declined)

    def _queue_first(self, requests: Sequence[Request]) -> None:
        for request in reversed(requests):
            self._queue.appendleft(request)
            self._queue_is_due = min(self._queue_is_due, request[1])
        self._silence.watch(self)

    def _no_longer_use(self, connection: AsyncConnection) -> None:
        if connection is self._connection:
            self._connection = None

    def lost(self, connection: AsyncConnection) -> None:
        """Resend or fail batches, see `session`."""
        self._connections.pop(connection, None)
        self._no_longer_use(connection)
        lost = store_error(ConnectionResetError("the connection was lost"))
        failed = False
        for batch in connection.session.flying:
            if connection.session.may_repeat(batch):
                try:
                    self._send_again(batch, lost)
                except Exception as error:  # noqa: BLE001 - the remaining batches still need an outcome
                    self._fail(batch, internal_error(error))
            else:
                failed = True
                self._fail(batch, lost)
        if failed:
            self._failed(lost)
        if connection.given_up and connection.silence() > SILENCE:
            self._dial_at_once()
        self._flush()

    def _send_again(self, batch: Batch, lost: StoreError) -> None:
        self._replies.unanswered(batch)
        given_back = [request for request in batch.requests if request[0].has_adjustments]
        _fail(given_back, lost, batch.silence_at(self._clock.seconds))
        again = batch.repeated()
        if again.requests:
            self._replies.outgoing(again)
            self._resends.append(again)

    def _begin_to_connect(self) -> None:
        if self._connecting is None:
            self._connecting = begin(_connect(ref(self), self._dial, self._clock))
            self._connecting_since = self._time(), self._clock.sleeps

    def is_through(self) -> None:
        if self._connecting is asyncio.current_task():
            self._connecting = None

    def opened(self, opened: Any, seconds: float) -> None:
        """Use a new connection, or handle the error. The attempt took ``seconds``."""
        self.is_through()
        connection = opened if isinstance(opened, Exception) else _driven(opened, self, self._clock)
        if isinstance(connection, Exception):
            # Metrics show why calls are missing.
            if self._replies.calls is not None:
                self._replies.calls.note(store_error(connection).fault, seconds)
            self._not_connected(connection)
            return
        if connection.is_closing():
            self._not_connected(ConnectionResetError("Redis closed the new connection at once"))
            return
        silent = self._connection if self._is_connected else None
        is_dropped = silent is not None and self._doubted == (silent, silent.silent_since) and not silent.has_news()
        if silent is not None and silent is not self._renewed and not is_dropped:
            connection.give_up()
            return
        self._silence.break_()
        self._connection = connection
        self._connections[connection] = None
        if silent is not None and is_dropped:
            self._doubts.confirmed()
            silent.replace()
        elif silent is not None:
            silent.retire()
        if login := renewable_login(opened):
            renew_in_time(self, connection, login)
        if self._probe_timer is not None:
            self._probe_timer.cancel()
            self.send_probe()
        self._flush()

    def renew(self, connection: AsyncConnection) -> bool:
        """False if the connection is no longer in use."""
        if connection is not self._connection or connection.is_closing():
            return False
        self._renewed = connection
        self._begin_to_connect()
        return True

    def _not_connected(self, error: Exception) -> None:
        if self._is_connected:
            return
        # The process slept, so the error may be old.
        if self._connecting_since[1] < self._clock.sleeps:
            self._connecting = None
            self._begin_to_connect()
            return
        failure = store_error(error)
        self._fail_unsent(error)
        if failure.fault == "overload":
            self._no_room_until = self._time() + NO_ROOM_PAUSE
            return
        self._failed(failure)
        if failure.fault == "timeout":
            self._dial_at_once()

    def _dial_at_once(self) -> None:
        if (
            not self._server.breaker.is_closed
            and self._connection is None
            and self._connecting in (None, asyncio.current_task())
        ):
            self._connecting = None
            self._begin_to_connect()

    def listened(self) -> float | None:
        """Count silence. Return the seconds until the next deadline; None if no caller waits."""
        now = self._clock.seconds
        if self._connecting is None and not self._is_owed_an_answer:
            self._silence.break_()
        elif not self._server.breaker.is_closed:
            self._server.breaker.is_probing(self._time())
        self._silence.go_on(connecting=math.inf if self._connecting is None else self._replies.listen_deadline)
        self._connect_anew_after_a_sleep()
        self._doubt()
        if not self._queue.size:
            self._queue_is_due = math.inf
        left = min([self._queue_is_due - self._silence.seconds, *[batch.due - now for batch in self._batches()]])
        if left <= 0:
            self._expire(now)
        elif left == math.inf:
            self._give_up_the_silent()
            # A connection attempt has its own deadline.
            if not self._is_owed_an_answer:
                self._silence.stop()
                return None
        return left

    def _connect_anew_after_a_sleep(self) -> None:
        began, sleeps = self._connecting_since
        connecting = self._connecting
        if connecting is not None and sleeps < self._clock.sleeps and self._time() - began > CONNECT_TIMEOUT:
            connecting.cancel()
            self._connecting = None
            self._begin_to_connect()

    def _doubt(self) -> None:
        connection = self._connection
        if (
            connection is not None
            and self._connecting is None
            and connection.silence() >= self._doubts.silence_allowed(self._replies.listen_deadline)
            # With an open breaker only a probe waits.
            and (connection.session.is_doubtful or not self._server.breaker.is_closed)
            and self._doubted != (connection, connection.silent_since)
        ):
            self._doubted = connection, connection.silent_since
            self._doubts.begun()
            self._begin_to_connect()

    @property
    def _is_connected(self) -> bool:
        return self._connection is not None and not self._connection.is_closing()

    @property
    def _is_owed_an_answer(self) -> bool:
        return any(connection.session.flying for connection in self._connections)

    def _expire(self, now: float) -> None:
        overdue = [request for request in self._queue if request[1] <= self._silence.seconds and not request[2].done()]
        for batch in self._batches():
            overdue += batch.overdue(now)
        _fail(overdue, TimeoutError(), math.inf)
        self._queue.keep([request for request in self._queue if not request[2].done()])
        self._queue_is_due = min([due for _, due, _, _ in self._queue], default=math.inf)
        if overdue:
            self._give_up_the_silent()
            self._failed(store_error(TimeoutError()))

    def _give_up_the_silent(self) -> None:
        for connection in list(self._connections):
            if connection.silence() > SILENCE:
                connection.give_up()

    def _give_up_what_owes_since_before(self) -> None:
        for connection in list(self._connections):
            flying = connection.session.flying
            if flying and monotonic() - flying[0].sent > SILENCE:
                connection.give_up()

    def _batches(self) -> Iterable[Batch]:
        yield from self._resends
        yield from self._parked
        for connection in self._connections:
            yield from connection.session.flying

    def _requests(self) -> Iterable[Request]:
        yield from self._queue
        for batch in self._batches():
            yield from batch.requests

    def _fail_unsent(self, error: Exception) -> None:
        self._is_gathering = False
        for batch in (*self._resends, *self._parked):
            self._fail(batch, error)
        self._resends.clear()
        self._parked.clear()
        _fail(self._queue, error, self._silence.seconds)
        self._queue.clear()
        self._queue_is_due = math.inf

    def _fail(self, batch: Batch, error: Exception) -> None:
        self._replies.note_call(batch, store_error(error).fault)
        _fail(batch.requests, error, batch.silence_at(self._clock.seconds))
        with logged_errors():
            self._replies.unanswered(batch)

    def _failed(self, error: StoreError) -> None:
        """Note an error. If the breaker opens, fail waiting requests and probe."""
        if self._server.breaker.failed(error, self._time()):
            self._fail_unsent(error)
            self._probe_later()
        if self._cluster is not None:
            self._cluster.troubled()

    def _probe_later(self) -> None:
        loop = asyncio.get_running_loop()
        # A request has ended that outage.
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        pause = self._server.breaker.pause_before_probe(self._time())
        self._probe_timer = None if pause is None else call_later(loop, pause, partial(_send_probe, ref(self)))

    def send_probe(self) -> None:
        self._probe_timer = None
        if switch.stand_in is not None:
            self._probe_later()
            return
        probe = self._server.breaker.begin_probe(self._time())
        if probe is None:
            return
        try:
            self.spend(probe, self._server.probe_timeout, checks=False).add_done_callback(lambda _: self._probe_later())
        except Exception as error:  # noqa: BLE001 - the next probe must follow; usually there is no room here
            internal_error(error)
            self._probe_later()


async def _connect(batcher: ref[Batcher], dial: Callable[[], Awaitable[Any]], clock: ListeningClock) -> None:
    loop = asyncio.get_running_loop()
    began = loop_time(loop)
    opened: Any
    try:
        async with clock.within(CONNECT_TIMEOUT):
            opened = await dial()
    except Exception as error:  # noqa: BLE001 - reported to the waiting requests
        opened = error
    except BaseException:
        cancelled = batcher()
        if cancelled is not None:
            cancelled.is_through()
        raise
    waiting = batcher()
    if waiting is not None:
        waiting.opened(opened, loop_time(loop) - began)
    elif not isinstance(opened, Exception):
        close(opened)


def _driven(connection: Any, owner: Batcher, clock: ListeningClock) -> AsyncConnection | StoreError:
    try:
        return AsyncConnection(connection, owner, clock)
    except Exception as error:  # noqa: BLE001 - reported to the waiting requests
        close(connection)
        return internal_error(error)


def _send_probe(batcher: ref[Batcher]) -> None:
    probing = batcher()
    if probing is not None:
        probing.send_probe()


def _fail(requests: Iterable[Request], error: Exception, silence: float) -> None:
    for _, due, waiting, timeout in requests:
        if not waiting.done():
            failure = error if isinstance(error, StoreError) else store_error(error)
            own = failure.anew()
            own.__cause__ = failure.__cause__ or error
            own.waited = min(timeout, max(0.0, silence - due + timeout))
            waiting.set_exception(own)
            # Marks the exception as retrieved.
            waiting.exception()
