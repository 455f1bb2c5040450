"""Sends a throttled client's request under a budget, as flows."""

from __future__ import annotations

from functools import partial
from typing import Any

from limitgate.limits.decision import RateLimited
from limitgate.llm.spending import Spending
from limitgate.llm.usage import reader_for
from limitgate.outbound.budgets import Flow, Reading
from limitgate.outbound.throttle import ClientThrottle, Transport


def exchange(throttle: ClientThrottle[Any, Any], transport: Transport, request: Any, spending: Spending) -> Flow:
    """Send a request in its turn, and settle it at the end of its response. A refusal is a 429 if the library has one."""
    spending.renews = True
    try:
        response = yield from throttle.attempts(transport, request, spending.key, spending)
    except RateLimited as error:
        # The request may have had its turn before a pause.
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
    field = transport.field(response)
    reader = reader_for(field("content-type") or "", field("content-encoding") or "")
    return (yield transport.along(response, Reading(reader.feed, partial(spending.settling_read, reader))))
