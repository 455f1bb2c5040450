"""Interface of throttled clients and budgets, see `limitgate.llm`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from limitgate.outbound.response_fields import Field

Flow = Generator[Any, Any, Any]
"""Yields results of a library or of a limiter, or awaitables."""


class Target(NamedTuple):
    body: bytes | None
    """None if the body isn't in memory."""
    path: str
    field: Field


class Reading:
    """Calls ``feed`` with each chunk. ``end`` returns a flow to run at the end."""

    def __init__(self, feed: Callable[[bytes], None], end: Callable[[], Flow]) -> None:
        self.feed = feed
        self._end = end
        self._is_over = False

    def over(self) -> Flow:
        """Run the flow for the end, once."""
        if not self._is_over:
            self._is_over = True
            yield from self._end()
