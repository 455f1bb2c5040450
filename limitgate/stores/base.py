"""Interface of a store, the only place that does I/O or reads a wall clock.

What a store can do besides is told by attributes beside its ``spend`` or ``aspend``, see `limitgate.gate.flow`: one of
``takes_plain`` is given each `PlainSpend` and `PlainRefund` as it is, any other only a `Plan`.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import NamedTuple, Protocol, runtime_checkable

from limitgate.limits.plan import Plan, Reading


class ConfigRequest(NamedTuple):
    """A request to read the text under a key, or to replace it where ``text`` is given."""

    key: str
    text: str | None = None
    version: int | None = None
    """Version that may be replaced, 0 for no text at all; None for any."""


class StoredConfig(NamedTuple):
    """Text under a key, once a request was carried out. It lives for as long as nobody replaces it."""

    version: int
    """Number of times that it was replaced; 0 without a text, and for a value that no store wrote."""
    text: str | None
    """None if there is none, empty for a value that no store wrote."""
    waited: float = 0.0
    """Seconds for which the store was silent before, as of a `Reading`."""

    def having_waited(self, waited: float) -> StoredConfig:
        """The same after so many seconds of silence."""
        return self._replace(waited=waited)


@runtime_checkable
class SyncStore(Protocol):
    """A store for WSGI and `Limiter`; safe under threads."""

    def spend(self, plan: Plan, timeout: float) -> Reading:
        """Carry out ``plan`` atomically in one round trip and report the state before it.

        Raises `StoreError` when no answer came within ``timeout`` seconds, or an answer of any other shape.
        """

    def close(self) -> None:
        """Let go of connections. The store may be used again afterwards."""


@runtime_checkable
class AsyncStore(Protocol):
    """A store for ASGI and `AsyncLimiter`; usable from several event loops in one process."""

    def aspend(self, plan: Plan, timeout: float) -> Awaitable[Reading]:
        """Carry out ``plan`` atomically in one round trip and report the state before it.

        Raises `StoreError` when no answer came within ``timeout`` seconds, or an answer of any other shape.
        """

    async def aclose(self) -> None:
        """Let go of this event loop's connections. The store may be used again afterwards."""


@runtime_checkable
class SyncConfigStore(SyncStore, Protocol):
    """A `SyncStore` that keeps configuration, too."""

    def config(self, request: ConfigRequest, timeout: float) -> StoredConfig:
        """Carry out ``request`` atomically and report the text in force afterwards. Raises `StoreError` as `spend` does."""


@runtime_checkable
class AsyncConfigStore(AsyncStore, Protocol):
    """An `AsyncStore` that keeps configuration, too."""

    async def aconfig(self, request: ConfigRequest, timeout: float) -> StoredConfig:
        """Carry out ``request`` atomically and report the text in force afterwards. Raises `StoreError` as `aspend` does."""
