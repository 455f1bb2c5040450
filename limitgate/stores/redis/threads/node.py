"""One Redis server as threads see it: its connections, whether it is worth waiting for, and calls of the script.

To send and to hear are two steps, so that several nodes of a cluster can be asked side by side. A call that goes alone, as
almost all do, takes both at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from weakref import ref

from redis.exceptions import RedisError

from limitgate.errors import StoreError
from limitgate.internal_errors import internal_error, logged_errors, raise_interruption
from limitgate.limits.template import AnyPlan, common_shape
from limitgate.process.clock import monotonic
from limitgate.stores.base import ConfigRequest, StoredConfig
from limitgate.stores.redis import background
from limitgate.stores.redis.breaker import Breaker
from limitgate.stores.redis.dial.dialer import CONNECT_TIMEOUT, Dial
from limitgate.stores.redis.dial.url import Address
from limitgate.stores.redis.errors import store_error, unsendable
from limitgate.stores.redis.protocol.session import Answered, Event, FellSilentError, MustClose, Redirected, Session
from limitgate.stores.redis.protocol.wire import NO_PLAN, UNSENDABLE, Call
from limitgate.stores.redis.replies import Outcome, RedisStoreBase
from limitgate.stores.redis.server import Answer, Server, blames_server, configuration, failure_by
from limitgate.stores.redis.threads.connection import SyncConnection
from limitgate.stores.redis.threads.listen_deadline import ListenDeadline
from limitgate.stores.redis.threads.pool import ConnectionPool


def _nothing() -> None:
    """Nobody wants to know."""


class _ProbePatience(ListenDeadline):
    """Patience of a thread that probes: while it listens, a breaker knows that the server does not answer."""

    __slots__ = ("_breaker",)

    def __init__(self, seconds: float, breaker: Breaker) -> None:
        super().__init__(seconds)
        self._breaker = breaker

    def waited_in_vain(self, seconds: float) -> None:
        super().waited_in_vain(seconds)
        self._breaker.is_probing(monotonic())


class Sent:
    """Calls that were sent together on one connection, None if there was none for them, and the answers so far."""

    __slots__ = ("answers", "calls", "connection")

    def __init__(self, calls: Sequence[Call], connection: SyncConnection | None = None) -> None:
        self.calls = calls
        self.connection = connection
        self.answers: dict[Call, Answer] = {}


class Node:
    """Carries out calls on one server, or on the node of a cluster at an ``address``.

    ``dial`` connects; ``failed`` is called at every failure that is the server's.
    """

    def __init__(
        self,
        dial: Dial,
        replies: RedisStoreBase,
        *,
        address: Address | None = None,
        failed: Callable[[], None] = _nothing,
    ) -> None:
        self._server = Server(replies, address)
        self._connections = ConnectionPool(dial)
        self._replies = replies
        self._failed = failed
        self._probe_due: float | None = None
        """Time at which a thread that asks has to probe, as none could be started for it; monotonic, in seconds."""
        self._probing = threading.Lock()

    @property
    def breaker(self) -> Breaker:
        """The breaker of this server."""
        return self._server.breaker

    def check(self, _: AnyPlan) -> None:
        """Raise a `StoreError` if nobody is to wait for this server."""
        if self._probe_due is not None:
            self.look()
        if self._server.breaker.state != "closed":
            self._server.breaker.check(monotonic)

    def look(self) -> None:
        """Probe in this thread if it is time to, as no other could be started for it; others do not wait meanwhile."""
        due = self._probe_due
        if due is None or self._server.breaker.is_closed or monotonic() < due or not self._probing.acquire(blocking=False):
            return
        try:
            if not self._start_probing():
                self.probe(self._server.breaker, ListenDeadline(self._replies.listen_deadline))
                self._probe_here_later()
        finally:
            self._probing.release()

    def exchange(self, plans: Sequence[AnyPlan], listen_deadline: ListenDeadline) -> list[Outcome]:
        """Carry out plans that share a call. Raises `StoreError` once ``listen_deadline`` is over."""
        if self._server.breaker.state != "closed":
            self._server.breaker.check(monotonic)
        call = Call(plans, common_shape(plans))
        self._replies.outgoing(call)
        answer = self._ask(call, listen_deadline)
        if isinstance(answer, list):
            return answer
        raise answer if isinstance(answer, StoreError) else failure_by(answer)

    def config(self, request: ConfigRequest, listen_deadline: ListenDeadline) -> StoredConfig:
        """Carry out a request for configuration. Raises `StoreError`, once ``listen_deadline`` is over at the latest."""
        self.look()
        self._server.breaker.check(monotonic)
        call = Call([NO_PLAN], config=request)
        self._replies.outgoing(call)
        return configuration(self._ask(call, listen_deadline))

    def send(self, calls: Sequence[Call], listen_deadline: ListenDeadline) -> Sent:
        """Send calls together, to be followed by `hear`."""
        sent, data = Sent(calls), b""
        try:
            sent.connection = connection = self._taken(listen_deadline, gives_back=any(call.gives_back for call in calls))
            for call in calls:
                try:
                    data += connection.session.send(call)
                except UNSENDABLE as error:
                    sent.answers[call] = unsendable(error)
                    self._unanswered([call])
            connection.send(data, listen_deadline)
        except BaseException as error:  # noqa: BLE001 - what interrupts this thread is raised again
            self._fail(sent, error)
        return sent

    def hear(self, sent: Sent, listen_deadline: ListenDeadline, first: Event[Call] | None = None) -> list[Answer]:
        """Wait for the answers to calls. Those on a connection that was lost may be sent once more, see `session`.

        ``first`` is the first event, if it has been waited for.
        """
        calls, answers, connection = sent.calls, sent.answers, sent.connection
        if connection is not None:
            session = connection.session
            try:
                while len(answers) < len(calls):
                    event, first = first or connection.next_event(listen_deadline), None
                    if isinstance(event, (Answered, Redirected)):
                        answer = answers[event.call] = self._server.judge(session, event)
                        self._note_failure(answer, event.call)
                    elif isinstance(event, MustClose):
                        self._lose(sent, session, event.error, listen_deadline)
                    else:
                        connection.send(session.send(event.call), listen_deadline)
            except BaseException as error:  # noqa: BLE001 - what interrupts this thread is raised again
                self._fail(sent, error)
            self._connections.give(connection)
        return list(map(answers.__getitem__, calls))

    def abandon(self, sent: Sent) -> None:
        """Hear no more of calls that were sent."""
        if sent.connection is not None:
            sent.connection.session.give_up()
            sent.connection.close()
        self._unanswered([call for call in sent.calls if call not in sent.answers])

    def close(self) -> None:
        """Close the connections, those in use when their calls end, and stop looking for the server."""
        self._server.reset_after_fork()  # first: a probe that connects after the next line finds that it is nobody's any more
        self._connections.close()

    def connect(self) -> None:
        """Connect, if there is no connection. Raises `StoreError`."""
        self._connections.give(self._connections.take(ListenDeadline(CONNECT_TIMEOUT)))

    def retire(self) -> None:
        """Close for good, whatever is in use as soon as it no longer is."""
        self._connections.retire()
        self.close()

    def probe(self, breaker: Breaker, connecting: ListenDeadline) -> None:
        """Ask whether the server is back, if anybody still needs to know. Leaves no connection if the node was closed."""
        probe = breaker.begin_probe(monotonic())
        if probe is None:
            return
        try:
            self._connections.give(self._connections.take(connecting, by_looking=True))
        except StoreError as error:
            breaker.is_probing(monotonic())
            self._note(error)
        else:
            if breaker is self._server.breaker:
                call = Call([probe])
                self._replies.outgoing(call)
                self._ask(call, _ProbePatience(self._server.probe_timeout, breaker))
        if breaker is not self._server.breaker:
            self._connections.close_idle()

    def _ask(self, call: Call, listen_deadline: ListenDeadline) -> Answer:
        """`send` and `hear` for a call that goes alone, as almost all do: straight on, unless the first event is no answer."""
        connection, event = None, None
        answer: Answer | None = None
        try:
            gives_back = (call.shape is None or call.shape.gives_back) and call.gives_back
            connection = (
                self._taken(listen_deadline, gives_back=True) if gives_back else self._connections.take(listen_deadline)
            )
            session = connection.session
            try:
                data = session.send(call)
            except UNSENDABLE as error:
                answer = unsendable(error)
                self._unanswered([call])
            else:
                connection.send(data, listen_deadline)
                event = connection.next_event(listen_deadline)
                if isinstance(event, Answered):
                    answer = self._server.judge(session, event)
                    if not isinstance(answer, list):
                        self._note_failure(answer, call)
        except BaseException as error:  # noqa: BLE001 - what interrupts this thread is raised again
            sent = Sent([call], connection)
            self._fail(sent, error)
            return sent.answers[call]
        if answer is None:
            return self.hear(Sent([call], connection), listen_deadline, event)[0]
        self._connections.give(connection)
        return answer

    def _taken(self, listen_deadline: ListenDeadline, *, gives_back: bool) -> SyncConnection:
        """A connection for a call; for one that ``gives_back``, a connection that answers if it lay idle, see `session`."""
        while True:
            connection = self._connections.take(listen_deadline, by_looking=gives_back)
            if not (gives_back and connection.session.lies_idle(monotonic())) or self._answers(connection, listen_deadline):
                return connection

    def _answers(self, connection: SyncConnection, listen_deadline: ListenDeadline) -> bool:
        """Ask for nothing. False if the connection was dropped, and is closed."""
        asking = Call([NO_PLAN])
        self._replies.outgoing(asking)
        is_open = False
        try:
            connection.send(connection.session.send(asking), listen_deadline)
            is_open = not isinstance(connection.next_event(listen_deadline), MustClose)
        finally:
            if not is_open:
                connection.close()
        return is_open

    def _note_failure(self, answer: Answer, call: Call) -> None:
        """`_note` an answer that is a failure of the server's."""
        if isinstance(answer, StoreError) and blames_server(answer):
            self._note(answer, call)

    def _lose(self, sent: Sent, session: Session[Call], error: Exception, listen_deadline: ListenDeadline) -> None:
        """Send the calls of a lost connection on another one, or fail them."""
        if not isinstance(error, FellSilentError):  # else only the one that takes over lies idle
            self._connections.close_idle()  # what broke one connection may have broken those that lie idle
        again = {call: call.repeated() for call in session.flying if session.may_repeat(call)}
        self._unanswered(again)
        answers = self._sent_again([call for call in again.values() if call.plans], listen_deadline)
        for call, repeated in again.items():
            sent.answers[call] = _joined(call, answers.get(repeated, []), error)
        if len(sent.answers) < len(sent.calls):
            raise error

    def _sent_again(self, calls: Sequence[Call], listen_deadline: ListenDeadline) -> dict[Call, Answer]:
        for call in calls:
            self._replies.outgoing(call)
        return dict(zip(calls, self.hear(self.send(calls, listen_deadline), listen_deadline))) if calls else {}

    def _fail(self, sent: Sent, error: BaseException) -> None:
        """Fail the calls that are not answered yet. Raises what interrupted this thread."""
        self.abandon(sent)
        if not isinstance(error, Exception):
            raise error
        raise_interruption(error)
        failure = self._explained(error)
        for call in sent.calls:
            if call not in sent.answers:
                self._replies.note_call(call, failure.fault)
                sent.answers[call] = failure
        self._note_failure(failure, sent.calls[0])

    def _explained(self, error: Exception) -> StoreError:
        if not isinstance(error, OSError | RedisError):
            return internal_error(error)
        self._connections.close_idle()
        failure = store_error(error)
        failure.__cause__ = error
        return failure

    def _unanswered(self, calls: Iterable[Call]) -> None:
        for call in calls:
            with logged_errors():
                self._replies.unanswered(call)

    def _note(self, failure: StoreError, call: Call | None = None) -> None:
        """Tell the breaker of a failure, unless it is our own, and of the call that failed if there was any."""
        if failure.fault == "overload":
            return
        if call is not None:
            self._server.breaker.sending(call.first)
        if self._server.breaker.failed(failure, monotonic()) and not self._start_probing():
            self._probe_here_later()
        self._failed()

    def _start_probing(self) -> bool:
        """Start the thread that probes until the server is back; it keeps no store alive. False if none can be started now."""
        try:
            background.start("probe", _keep_probing, ref(self), self._server.breaker)
        except RuntimeError:
            return False
        self._probe_due = None
        return True

    def _probe_here_later(self) -> None:
        now = monotonic()
        pause = self._server.breaker.pause_before_probe(now)
        self._probe_due = None if pause is None else now + pause


def _joined(call: Call, answer: Answer, error: Exception) -> Answer:
    """The answer to a call, of which all was sent again but what gives back: that fails by an error."""
    if isinstance(answer, StoreError) or not any(plan.has_adjustments for plan in call.requested):
        return answer
    lost = store_error(error)
    if not isinstance(answer, list):
        return lost
    outcomes = iter(answer)
    return [lost if plan.has_adjustments else next(outcomes) for plan in call.requested]


def _keep_probing(node: ref[Node], breaker: Breaker) -> None:
    while (pause := breaker.pause_before_probe(monotonic())) is not None:
        time.sleep(pause)
        probing = node()
        if probing is None:
            return
        with logged_errors():
            probing.probe(breaker, _ProbePatience(2 * CONNECT_TIMEOUT, breaker))  # no request waits for it
        del probing
