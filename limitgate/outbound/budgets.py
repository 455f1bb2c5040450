"""What a throttled client and a budget exchange, see `limitgate.llm`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from limitgate.outbound.response_fields import Field

Flow = Generator[Any, Any, Any]
"""Yields results of a client library or a limiter, or awaitables of them."""


class Target(NamedTuple):
    """What a budget reads of a request."""

    body: bytes | None
    """None if it is not in memory."""
    path: str
    field: Field


class Reading:
    """Reads the body of a response along: ``feed`` takes each chunk, and ``end`` returns the flow to run at its end."""

    def __init__(self, feed: Callable[[bytes], None], end: Callable[[], Flow]) -> None:
        self.feed = feed
        self._end = end
        self._is_over = False

    def over(self) -> Flow:
        """Return the flow to run at the end of the body. Has an effect once."""
        if not self._is_over:
            self._is_over = True
            yield from self._end()
