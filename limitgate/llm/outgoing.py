"""Sends a request of a throttled client under a budget, and reads its response along. Flows."""

from __future__ import annotations

from typing import Any

from limitgate.limits.decision import RateLimited
from limitgate.llm.spending import Spending
from limitgate.llm.usage import Reader, reader_for
from limitgate.outbound.budgets import Flow
from limitgate.outbound.throttle import ClientThrottle, Transport
from limitgate.process.clock import monotonic


def exchange(throttle: ClientThrottle[Any, Any], transport: Transport, request: Any, spending: Spending) -> Flow:
    """Send a request in its turn, and settle it when its response is over.

    A refusal that the request could not wait for is a response with the status 429, if the library has one.
    """
    try:
        response = yield from throttle.attempts(transport, request, spending.key, spending)
    except RateLimited as error:
        # It may have had its turn before it met a pause.
        yield transport.finish(spending.giving_back())
        return transport.refused(request, error) if error.response is None else error.response
    except GeneratorExit:
        raise
    except BaseException as error:
        if not spending.is_sent or transport.is_unsent(error):
            rest = spending.giving_back()
        else:
            rest = spending.settling_nothing() if transport.is_unanswered(error) else spending.settling_unknown()
        yield transport.finish(rest)
        raise
    if not spending.is_answered:
        yield transport.finish(spending.settling_nothing())
        return response
    field, content = transport.field(response), transport.content(response)
    encoding = field("content-encoding") or "" if content is None else ""
    along = Along(spending, reader_for(field("content-type") or "", encoding))
    if content is None:
        return transport.along(response, along)
    along.feed(content)
    yield transport.finish(along.over())
    return response


class Along:
    """Reads the body of a response along, and settles the request at its end."""

    def __init__(self, spending: Spending, reader: Reader) -> None:
        self._spending = spending
        self._reader = reader
        self._renew_at = monotonic() + spending.renew_after
        self._is_over = False

    def feed(self, chunk: bytes) -> Flow | None:
        """Read a chunk; return a flow if the reservation has to be renewed."""
        self._reader.feed(chunk)
        now = monotonic()
        if now < self._renew_at:
            return None
        self._renew_at = now + self._spending.renew_after
        return self._spending.renewing()

    def over(self) -> Flow:
        """Settle the request. Has an effect once."""
        if not self._is_over:
            self._is_over = True
            yield from self._spending.settling_read(self._reader)
