"""One Redis server for both drivers: circuit breaker, clock, and interpretation of answers."""

from __future__ import annotations

from typing import Any

from limitgate.errors import StoreError
from limitgate.internal_errors import OwnError, internal_error, logged_errors
from limitgate.limits.template import OF_ANY
from limitgate.observing.instruments import Result
from limitgate.stores.base import StoredConfig
from limitgate.stores.redis.breaker import PROBE_TIMEOUT
from limitgate.stores.redis.dial.url import Address, server_name
from limitgate.stores.redis.errors import Redirection, store_error
from limitgate.stores.redis.protocol.session import Answered, Redirected, Session
from limitgate.stores.redis.protocol.wire import stored_config
from limitgate.stores.redis.replies import Outcome, RedisStoreBase
from limitgate.stores.redis.server_clock import ServerClock

Answer = list[Outcome] | StoredConfig | StoreError | Redirection


def blames_server(failure: StoreError) -> bool:
    """True if the failure is the server's, other than a lack of memory."""
    return failure.fault not in ("oom", "overload") and not isinstance(failure, OwnError)


def _result(answer: Answer) -> Result:
    return "oom" if isinstance(answer, list) and any(isinstance(each, StoreError) for each in answer) else "ok"


def configuration(answer: Answer) -> StoredConfig:
    """Return the configuration in an answer. Raises `StoreError`."""
    if isinstance(answer, StoredConfig):
        return answer
    raise failure_by(answer)


def failure_by(answer: Answer) -> StoreError:
    """Return the failure for an unexpected answer."""
    return store_error(
        answer if isinstance(answer, Exception) else StoreError("the answer belongs to another kind of call", "reply")
    )


class Server:
    """One server, or the cluster node at ``address``."""

    def __init__(self, replies: RedisStoreBase, address: Address | None) -> None:
        self.address = address
        self.name = server_name(address)
        """Name for log lines."""
        self.breaker = replies.breaker(self.name)
        self._replies = replies
        self._clock = ServerClock(self.name)

    def reset_after_fork(self) -> None:
        """Replace the breaker after the connections were closed."""
        self.breaker = self._replies.breaker(self.name, instead_of=self.breaker)

    @property
    def probe_timeout(self) -> float:
        """Seconds, at most the timeout of requests."""
        return min(PROBE_TIMEOUT, self._replies.listen_deadline)

    def judge(self, session: Session[Any], event: Answered[Any] | Redirected[Any]) -> Answer:
        """Interpret an answer. After a server failure the next call uses another connection.

        An answer too late for all callers does not close the breaker.
        """
        (call, reply), breaker, replies = event, self.breaker, self._replies
        try:
            if type(reply) is not bytes and isinstance(reply, Exception):
                if self.address is None or not isinstance(event, Redirected):
                    raise store_error(reply) from reply  # noqa: TRY301 - handled with decoding errors
                answer: Answer = event.reply
            elif call.shape is not None and call.shape is not OF_ANY:
                answer = replies.understood_plain(call, call.shape, reply, self._clock)
            elif call.config is not None:
                answer = stored_config(reply)
            else:
                answer = replies.understood(call, reply, self._clock)
            if breaker.in_trouble and call.is_wanted:
                breaker.succeeded()
            if replies.calls is not None and not isinstance(event, Redirected):
                replies.note_call(call, _result(answer))
        except Exception as error:  # noqa: BLE001 - the answer is consumed, and other calls have theirs
            failure = internal_error(error)
            replies.note_call(call, failure.fault)
            with logged_errors():
                replies.unanswered(call)
                replies.inspection.refused(self.name, error.__cause__ or error)
            if blames_server(failure):
                session.retire()
            elif call.is_wanted:
                with logged_errors():
                    breaker.succeeded()
            return failure
        return answer
