"""A clock for tests: starts at a moment in 2026 and goes on only when told."""

from __future__ import annotations


class Clock:
    """Integer Unix microseconds, as `MemoryStore(clock=...)` takes them."""

    def __init__(self, now: int = 1_790_000_000_000_000) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float = 0, us: int = 0) -> None:
        """Go on by seconds and microseconds; a negative amount steps back."""
        self.now += round(seconds * 1_000_000) + us
