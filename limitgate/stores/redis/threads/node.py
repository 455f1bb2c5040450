"""One Redis server as threads see it: its connections, whether it is worth waiting for, and calls of the script.

To send and to hear are two steps, so that several nodes of a cluster can be asked side by side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn
from weakref import ref

from redis.exceptions import NoScriptError, ResponseError

from limitgate.errors import StoreError
from limitgate.limits.plan import Plan
from limitgate.own_errors import OwnError, own_error, survived
from limitgate.stores.redis import background
from limitgate.stores.redis.breaker import PROBE_TIMEOUT, Breaker
from limitgate.stores.redis.dialer import CONNECT_TIMEOUT, Dial
from limitgate.stores.redis.errors import Redirection, no_error, store_error, unsendable
from limitgate.stores.redis.replies import Outcome, RedisReplies
from limitgate.stores.redis.server_clock import ServerClock
from limitgate.stores.redis.threads.connection import Connection
from limitgate.stores.redis.threads.patience import Patience
from limitgate.stores.redis.threads.pool import ConnectionPool
from limitgate.stores.redis.wire import UNSENDABLE, Call

Heard = list[Outcome] | StoreError | Redirection
"""What became of a call."""


def _nothing() -> None:
    """Nobody wants to know."""


class Node:
    """Carries out calls on one server, which log lines call ``server``.

    ``dial`` connects; ``failed`` is told of every failure that is the server's.
    """

    def __init__(
        self, dial: Dial, script: RedisReplies, *, server: str = "Redis", failed: Callable[[], None] = _nothing
    ) -> None:
        self.breaker = script.breaker(server)
        self._server = server
        self._server_clock = ServerClock(server)
        self._connections = ConnectionPool(dial)
        self._script = script
        self._failed = failed
        self._probe_due: float | None = None
        """When a thread that asks has to probe, as none could be started for it; monotonic, in seconds."""
        self._probing = threading.Lock()

    def check(self, _: Plan) -> None:
        """Raise a `StoreError` if nobody is to wait for this server."""
        self.look()
        self.breaker.check()

    def look(self) -> None:
        """Probe in this thread if it is time to, as no other could be started for it; others do not wait meanwhile."""
        due = self._probe_due
        if due is None or self.breaker.healthy or time.monotonic() < due or not self._probing.acquire(blocking=False):
            return
        try:
            if not self._look_for_server() and self.probe(self.breaker, Patience(self._script.patience)):
                self._probe_due = time.monotonic() + self.breaker.pause()
        finally:
            self._probing.release()

    def exchange(self, plans: Sequence[Plan], patience: Patience) -> list[Outcome]:
        """What becomes of plans that share a call. Raises `StoreError` once ``patience`` is over."""
        self.breaker.check()
        heard = self._carry_out(plans, patience)
        if isinstance(heard, ResponseError):
            raise store_error(heard) from heard
        if isinstance(heard, StoreError):
            raise heard
        return heard

    def send(self, calls: Sequence[Call], patience: Patience) -> Connection:
        """Send calls together; gives the line to `hear` from. Raises `StoreError` once patience is over."""
        self.breaker.asked(calls[0].plans[0])
        line = None
        try:
            line = self._connections.take(patience)
            line.send(calls, patience)
        except BaseException as error:  # noqa: BLE001 - raised again, but nobody would read what is on its way
            self._give_up(error, calls, line)
        return line

    def hear(self, line: Connection, calls: Sequence[Call], patience: Patience, *, again: bool = False) -> list[Heard]:
        """What became of calls that were sent on a line. Raises `StoreError` once patience is over.

        Where the line may have been dead before, they are sent once more on another one, unless they have been sent ``again``.
        """
        try:
            replies = _replies(line, calls, patience)
        except BaseException as error:  # noqa: BLE001 - raised again, but nobody would read what is on its way
            if not again and line.may_have_been_dead(error):
                return self._send_again(error, calls, line, patience)
            self._give_up(error, calls, line)
        heard = [self._understood(call, reply) for call, reply in zip(calls, replies)]
        failures = [failure for failure in heard if isinstance(failure, StoreError) and not _is_harmless(failure)]
        if failures:
            line.close()
            self._note(failures[0])
        else:
            self.breaker.succeeded()
            self._connections.give(line)
        return heard

    def _send_again(self, error: BaseException, calls: Sequence[Call], line: Connection, patience: Patience) -> list[Heard]:
        """What becomes of calls on another line, but for what gives back: that fails by the loss of the first."""
        self._discard(calls, line)
        self._connections.close_idle()
        repeated = [call.repeated() for call in calls]
        sent = [call for call in repeated if call.plans]
        for call in sent:
            self._script.outgoing(call)
        told = iter(self.hear(self.send(sent, patience), sent, patience, again=True) if sent else ())
        return [_joined(call, next(told) if again.plans else [], error) for call, again in zip(calls, repeated)]

    def _discard(self, calls: Sequence[Call], line: Connection | None) -> None:
        """Nobody will hear of calls on a line."""
        if line is not None:
            line.close()
        for call in calls:
            with survived():
                self._script.unanswered(call)

    def close(self) -> None:
        """Close the connections that no thread is using, and stop looking for the server."""
        self._connections.close_idle()
        self.breaker = self._script.breaker(self._server, instead_of=self.breaker)

    def retire(self) -> None:
        """Close for good, whatever is in use as soon as it no longer is."""
        self._connections.close()
        self.close()

    def probe(self, breaker: Breaker, connecting: Patience) -> bool:
        """Ask whether the server is back. False where nobody needs to ask any more."""
        if breaker is not self.breaker or breaker.probe is None:
            return False
        try:
            self._connections.give(self._connections.take(connecting))
        except StoreError as error:
            self._note(error)
            return True
        with suppress(StoreError):
            self._carry_out([breaker.probe], Patience(min(PROBE_TIMEOUT, self._script.patience)))
        return not breaker.healthy

    def _carry_out(self, plans: Sequence[Plan], patience: Patience) -> Heard:
        call = Call(plans)
        self._script.outgoing(call)
        return self.hear(self.send([call], patience), [call], patience)[0]

    def _understood(self, call: Call, reply: object) -> Heard:
        if isinstance(reply, Redirection):
            return reply
        try:
            return self._script.understood(call, no_error(reply), self._server_clock)
        except Exception as error:  # noqa: BLE001 - the reply is read, and other calls have theirs
            with survived():
                self._script.unanswered(call)
            return own_error(error)

    def _give_up(self, error: BaseException, calls: Sequence[Call], line: Connection | None) -> NoReturn:
        """Calls could not be sent or heard of. Raises `StoreError`, or what interrupted this thread."""
        self._discard(calls, line)
        if not isinstance(error, Exception):
            raise error
        failure = self._explained(error)
        self._note(failure)
        raise failure from error

    def _explained(self, error: Exception) -> StoreError:
        if isinstance(error, StoreError):
            return error
        if isinstance(error, UNSENDABLE):
            return unsendable(error)
        self._connections.close_idle()  # what broke one connection may have broken those that lie idle
        return store_error(error)

    def _note(self, failure: StoreError) -> None:
        """Tell the breaker of a failure, unless it is our own."""
        if failure.fault == "overload":
            return
        if self.breaker.failed(failure) and not self._look_for_server():
            self._probe_due = time.monotonic() + self.breaker.pause()
        self._failed()

    def _look_for_server(self) -> bool:
        """Start the thread that probes until the server is back; it keeps no store alive. False if none can be started now."""
        try:
            background.start("probe", _probe, ref(self), self.breaker)
        except RuntimeError:
            return False
        self._probe_due = None
        return True


def _replies(line: Connection, calls: Sequence[Call], patience: Patience) -> list[object]:
    """Redis' replies to calls that were sent on a line. Those whose script it did not know are sent once more, with it."""
    replies = [line.reply(call, patience) for call in calls]
    for place, call in enumerate(calls):
        if isinstance(replies[place], NoScriptError) and not call.in_full:
            call.in_full = True
            line.send([call], patience)
            replies[place] = line.reply(call, patience)
    return replies


def _joined(call: Call, heard: Heard, error: BaseException) -> Heard:
    """What became of a call, given what became of that part of it that was sent again; the others failed by an error."""
    if isinstance(heard, StoreError) or not any(plan.has_adjustments for plan in call.asked):
        return heard
    lost = store_error(ConnectionResetError(f"the connection was lost: {error}"))
    if not isinstance(heard, list):
        return lost
    told = iter(heard)
    return [lost if plan.has_adjustments else next(told) for plan in call.asked]


def _is_harmless(failure: StoreError) -> bool:
    """True if a connection on which a call failed can be used on: the server is only out of memory, or the mistake is ours."""
    return failure.fault == "oom" or isinstance(failure, OwnError)


def _probe(node: ref[Node], breaker: Breaker) -> None:
    goes_on, began = True, time.monotonic()
    while goes_on:
        time.sleep(max(0.0, began + breaker.pause() - time.monotonic()))  # a probe that hung was pause enough
        began = time.monotonic()
        asking = node()
        goes_on = asking is not None
        if asking is not None:
            with survived():
                goes_on = asking.probe(breaker, Patience(2 * CONNECT_TIMEOUT))  # no request waits for it
        del asking
