"""Interfaces of a store. `Room` limits the size of a call to Redis.

Attributes declare features, see `limitgate.gate.flow`: ``takes_plain`` accepts `PlainSpend` and `PlainRefund`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from limitgate.limits.plan import Plan, Reading
from limitgate.limits.template import AnyPlan


class ConfigRequest(NamedTuple):
    """Reads the text under a key, or replaces it by ``text``."""

    key: str
    text: str | None = None
    version: int | None = None
    """Expected version: 0 for no text yet, None for any."""
    lasts: float | None = None
    """Seconds until the replacement is deleted; None for never."""


class StoredConfig(NamedTuple):
    """Answer to a `ConfigRequest`: the text under its key."""

    version: int
    """Number of replacements; 0 without a text."""
    text: str | None
    """The text; empty if LimitGate didn't write it."""
    waited: float = 0.0
    """See `Reading.waited`."""

    def having_waited(self, waited: float) -> StoredConfig:
        return self._replace(waited=waited)


class FleetRequest(NamedTuple):
    """Writes a process' snapshot, or reads all if ``member`` is None."""

    key: str
    """Key of the index. Keys of snapshots begin with it and share its hash slot."""
    member: str | None = None
    """16 characters per process."""
    snapshot: bytes = b""
    """Bytes to write; empty to remove the snapshot."""
    seconds: float = 10.0
    """Time to live."""
    renews: bool = False
    """Renew the index, which expires after `INDEX_SECONDS`."""


INDEX_SECONDS = 86_400


class StoredFleet(NamedTuple):
    """Answer to a `FleetRequest`: the snapshots under its key."""

    now: int
    """Store clock, Unix µs."""
    processes: int
    snapshots: Sequence[bytes] = ()
    """Snapshots; one that is too long is empty."""
    waited: float = 0.0
    """See `Reading.waited`."""

    def having_waited(self, waited: float) -> StoredFleet:
        return self._replace(waited=waited)


def fleet_key(key_prefix: str) -> str:
    """Return the key of the index of snapshots. Its hash tag keeps them in one hash slot of a Redis Cluster."""
    return f"{key_prefix}:fleet" if "{" in key_prefix else f"{key_prefix}:fleet:{{{key_prefix}:fleet}}"


LONGEST_SNAPSHOT = 65_536
"""Bytes; longer values are not read."""


@runtime_checkable
class SyncStore(Protocol):
    """A thread-safe store for WSGI and `Limiter`."""

    def spend(self, plan: Plan, timeout: float) -> Reading:
        """Carry out ``plan`` atomically in one round trip and return the state before it.

        Raises `StoreError` if no valid answer arrives within ``timeout`` seconds.
        """

    def close(self) -> None:
        """Close the connections. You can use the store again."""


@runtime_checkable
class AsyncStore(Protocol):
    """A store for ASGI and `AsyncLimiter`; works in several event loops of one process."""

    def aspend(self, plan: Plan, timeout: float) -> Awaitable[Reading]:
        """See `SyncStore.spend`."""

    async def aclose(self) -> None:
        """Close this event loop's connections. You can use the store again."""


@runtime_checkable
class SyncConfigStore(SyncStore, Protocol):
    """A `SyncStore` that also keeps configuration."""

    def config(self, request: ConfigRequest, timeout: float) -> StoredConfig:
        """Carry out ``request`` atomically and return the resulting text. Raises `StoreError`."""


@runtime_checkable
class SyncFleetStore(SyncStore, Protocol):
    """A `SyncStore` that also keeps the snapshots of processes."""

    def fleet(self, request: FleetRequest, timeout: float) -> StoredFleet:
        """Carry out ``request`` atomically. Raises `StoreError`."""


@runtime_checkable
class AsyncFleetStore(AsyncStore, Protocol):
    """An `AsyncStore` that also keeps the snapshots of processes."""

    async def afleet(self, request: FleetRequest, timeout: float) -> StoredFleet:
        """Carry out ``request`` atomically. Raises `StoreError`."""


@runtime_checkable
class AsyncConfigStore(AsyncStore, Protocol):
    """An `AsyncStore` that also keeps configuration."""

    async def aconfig(self, request: ConfigRequest, timeout: float) -> StoredConfig:
        """Carry out ``request`` atomically and return the resulting text. Raises `StoreError`."""


MAX_BATCH = 64
"""Maximum of plans per call, which take well under a millisecond."""
MAX_LOAD = 2_000
"""Maximum time of a call in µs, by `Bucket.load`. A single plan may take longer."""


class Room:
    """Room that remains in a call. The first plan always fits."""

    __slots__ = ("_keys", "_left", "_plans")

    def __init__(self) -> None:
        self._plans = MAX_BATCH
        self._left: float = MAX_LOAD
        self._keys: set[str] = set()

    def takes(self, plan: AnyPlan) -> bool:
        """Add a plan if there is room. Don't call this after False."""
        keys, left = self._keys, self._left
        if not isinstance(plan, Plan):
            left -= plan.template.load  # Plain plans rarely share buckets.
        else:
            for charge in plan.charges:
                opening, each, correction = charge.bucket.load
                left -= each if charge.adjustment is None else each + correction
                if charge.key not in keys:
                    keys.add(charge.key)
                    left -= opening
        if self._plans < MAX_BATCH and (left < 0 or not self._plans):
            return False
        self._left = left
        self._plans -= 1
        return True


def calls_of(plans: Iterable[Plan]) -> Iterator[list[Plan]]:
    """Group plans into calls, in order."""
    room, together = Room(), list[Plan]()
    for plan in plans:
        if not room.takes(plan):
            yield together
            room, together = Room(), []
            room.takes(plan)
        together.append(plan)
    if together:
        yield together
