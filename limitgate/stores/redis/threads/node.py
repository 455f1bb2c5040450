"""One Redis server for threads. `send` and `hear` are separate, to ask cluster nodes in parallel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

from redis.exceptions import RedisError

from limitgate.errors import StoreError
from limitgate.internal_errors import internal_error, logged_errors, raise_interruption
from limitgate.limits.template import AnyPlan, common_shape
from limitgate.process import background, switch
from limitgate.process.clock import monotonic
from limitgate.stores.redis.breaker import Breaker
from limitgate.stores.redis.dialer import CONNECT_TIMEOUT
from limitgate.stores.redis.errors import store_error, unsendable
from limitgate.stores.redis.replies import Answer, Outcome, RedisStoreBase, Server, blames_server, configuration, failure_by
from limitgate.stores.redis.session import Answered, Event, FellSilentError, MustClose, Redirected, Session
from limitgate.stores.redis.threads.connection import ListenDeadline, SyncConnection
from limitgate.stores.redis.threads.pool import ConnectionPool
from limitgate.stores.redis.url import Address
from limitgate.stores.redis.wire import NO_PLAN, UNSENDABLE, Call, Kept, KeptRequest


class _ProbePatience(ListenDeadline):
    __slots__ = ("_breaker",)

    def __init__(self, seconds: float, breaker: Breaker) -> None:
        super().__init__(seconds)
        self._breaker = breaker

    def waited_in_vain(self, seconds: float) -> None:
        super().waited_in_vain(seconds)
        self._breaker.is_probing(monotonic())


class Sent:
    __slots__ = ("answers", "calls", "connection")

    def __init__(self, calls: Sequence[Call], connection: SyncConnection | None = None) -> None:
        self.calls: Sequence[Call] = calls
        self.connection: SyncConnection | None = connection
        self.answers: dict[Call, Answer] = {}


class Node:
    """Calls on one server, or on the cluster node at ``address``. ``failed`` is called after each server failure."""

    def __init__(
        self,
        dial: Callable[..., Any],
        replies: RedisStoreBase,
        *,
        address: Address | None = None,
        failed: Callable[[], object] = bool,
    ) -> None:
        self._server = Server(replies, address)
        self._connections = ConnectionPool(dial)
        self._replies = replies
        self._failed = failed
        self._probe_due: float | None = None
        """Time of a probe by a request's thread, if no background thread could start."""
        self._probing = threading.Lock()

    @property
    def breaker(self) -> Breaker:
        return self._server.breaker

    def check(self, _: AnyPlan) -> None:
        if self._probe_due is not None:
            self.look()
        if self._server.breaker.state != "closed":
            self._server.breaker.check(monotonic)

    def look(self) -> None:
        """Probe in this thread if no background thread could start."""
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
        if self._server.breaker.state != "closed":
            self._server.breaker.check(monotonic)
        call = Call(plans, common_shape(plans))
        self._replies.outgoing(call)
        answer = self._ask(call, listen_deadline)
        if isinstance(answer, list):
            return answer
        raise answer if isinstance(answer, StoreError) else failure_by(answer)

    def config(self, request: KeptRequest, listen_deadline: ListenDeadline) -> Kept:
        self._server.breaker.check(monotonic)
        call = Call([NO_PLAN], config=request)
        self._replies.outgoing(call)
        return configuration(self._ask(call, listen_deadline))

    def send(self, calls: Sequence[Call], listen_deadline: ListenDeadline) -> Sent:
        """Send calls. `hear` receives the answers."""
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
        except BaseException as error:  # noqa: BLE001 - `_fail` raises interruptions again
            self._fail(sent, error)
        return sent

    def hear(self, sent: Sent, listen_deadline: ListenDeadline, first: Event[Call] | None = None) -> list[Answer]:
        """Wait for answers, and resend calls of a lost connection, see `session`. ``first`` is an event already received."""
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
            except BaseException as error:  # noqa: BLE001 - `_fail` raises interruptions again
                self._fail(sent, error)
            self._connections.give(connection)
        return list(map(answers.__getitem__, calls))

    def abandon(self, sent: Sent) -> None:
        if sent.connection is not None:
            sent.connection.session.give_up()
            sent.connection.close()
        self._unanswered([call for call in sent.calls if call not in sent.answers])

    def close(self) -> None:
        """Close. Connections in use close after their calls."""
        # First, so that a late probe sees the new breaker.
        self._server.reset_after_fork()
        self._connections.close()

    def connect(self) -> None:
        self._connections.give(self._connections.take(ListenDeadline(CONNECT_TIMEOUT)))

    def retire(self) -> None:
        """Close. Connections in use close after their calls."""
        self._connections.retire()
        self.close()

    def probe(self, breaker: Breaker, connecting: ListenDeadline) -> None:
        probe = breaker.begin_probe(monotonic()) if switch.stand_in is None else None
        if probe is None:
            return
        try:
            self._connections.give(self._connections.take(connecting, by_looking=True))
        except StoreError as error:
            self._note(error)
        else:
            if breaker is self._server.breaker:
                call = Call([probe])
                self._replies.outgoing(call)
                self._ask(call, _ProbePatience(self._server.probe_timeout, breaker))
        if breaker is not self._server.breaker:
            self._connections.close_idle()

    def _ask(self, call: Call, listen_deadline: ListenDeadline) -> Answer:
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
        except BaseException as error:  # noqa: BLE001 - `_fail` raises interruptions again
            sent = Sent([call], connection)
            self._fail(sent, error)
            return sent.answers[call]
        if answer is None:
            return self.hear(Sent([call], connection), listen_deadline, event)[0]
        self._connections.give(connection)
        return answer

    def _taken(self, listen_deadline: ListenDeadline, *, gives_back: bool) -> SyncConnection:
        while True:
            connection = self._connections.take(listen_deadline, by_looking=gives_back)
            if not (gives_back and connection.session.lies_idle(monotonic())) or self._answers(connection, listen_deadline):
                return connection

    def _answers(self, connection: SyncConnection, listen_deadline: ListenDeadline) -> bool:
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
        if isinstance(answer, StoreError) and blames_server(answer):
            self._note(answer, call)

    def _lose(self, sent: Sent, session: Session[Call], error: Exception, listen_deadline: ListenDeadline) -> None:
        # Otherwise only the replacement is idle.
        if not isinstance(error, FellSilentError):
            # They may have the same problem.
            self._connections.close_idle()
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
        if failure.fault == "overload":
            return
        if call is not None:
            self._server.breaker.sending(call.first)
        if self._server.breaker.failed(failure, monotonic()) and not self._start_probing():
            self._probe_here_later()
        self._failed()

    def _start_probing(self) -> bool:
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
            # No request waits for it.
            probing.probe(breaker, _ProbePatience(2 * CONNECT_TIMEOUT, breaker))
        del probing
