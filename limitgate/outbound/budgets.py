"""What a throttled client and a budget know of each other, see `limitgate.llm`."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, Protocol

from limitgate.outbound.response_fields import Answer, Field

Flow = Generator[Any, Any, Any]
"""Yields results of a client library or a limiter, or awaitables of them."""


class Target(NamedTuple):
    """What a budget reads of a request."""

    body: bytes | None
    """None if it is not in memory."""
    path: str
    field: Field


class Reading(Protocol):
    """Reads the body of a response along."""

    def feed(self, chunk: bytes) -> Flow | None:
        """Read a chunk; return a flow to run, if any."""

    def over(self) -> Flow:
        """Return the flow to run at the end of the body. Called again, it does nothing."""


class Spends(Protocol):
    """Charges one request in place of limits, see `limitgate.llm.spending`."""

    is_sent: bool

    @property
    def may_retry(self) -> bool:
        """False if the service forbids another attempt."""

    def taking(self, limiter: Any, timeout: float) -> Flow:
        """Charge the request, as `Limiter.wait` does; return the decision."""

    def hear(self, status: int, field: Field) -> Answer:
        """Read the limits in a response."""

    def learning(self) -> Flow:
        """Keep what a response has said."""

    def settling_nothing(self) -> Flow:
        """Correct the charge of a request that had no effect."""


class Budgets(Protocol):
    """A budget, see `limitgate.llm.Budget`."""

    def exchange(self, throttle: Any, transport: Any, request: Any, key: str) -> Flow:
        """Send a request under the budget by `ClientThrottle.attempts`; return its response."""
