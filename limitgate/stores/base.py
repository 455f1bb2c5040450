"""What a store is, to those who use one. A store is the only place that does I/O or reads a wall clock."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from limitgate.limits.plan import Plan, Reading


@runtime_checkable
class SyncStore(Protocol):
    """A store for WSGI and `Limiter`; safe under threads."""

    def spend(self, plan: Plan, timeout: float) -> Reading:
        """Carry out ``plan`` atomically in one round trip and report the state before it.

        Raises `StoreError` when no answer came within ``timeout`` seconds, or none of ours.
        """

    def close(self) -> None:
        """Let go of connections. The store may be used again afterwards."""


@runtime_checkable
class AsyncStore(Protocol):
    """A store for ASGI and `AsyncLimiter`; usable from several event loops in one process."""

    async def aspend(self, plan: Plan, timeout: float) -> Reading:
        """Carry out ``plan`` atomically in one round trip and report the state before it.

        Raises `StoreError` when no answer came within ``timeout`` seconds, or none of ours.
        """

    async def aclose(self) -> None:
        """Let go of this event loop's connections. The store may be used again afterwards."""
