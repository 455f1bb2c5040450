"""The same engine without HTTP: ask about any key, from async or sync code."""

from __future__ import annotations

from functools import lru_cache
from types import TracebackType
from typing import Self

from limitgate.decision import Decision, decide
from limitgate.keys import Key
from limitgate.limits import Limit, Windows, as_limit, buckets_of
from limitgate.plan import Charge, Plan, Verb, check_cost
from limitgate.stores import AsyncStore, SyncStore, open_store, open_sync_store, opened


@lru_cache(maxsize=4096)
def _buckets(*limits: Limit | str) -> tuple[Windows, ...]:
    """The buckets of these limits, given as limits or text; kept, since callers repeat the same few."""
    return buckets_of(tuple(as_limit(limit) for limit in limits))


class _Keyring:
    """Turns a limiter's arguments into plans."""

    def __init__(self, timeout: float, key_prefix: str) -> None:
        if not 0 < timeout <= 60:
            raise ValueError(f"timeout is {timeout}, expected seconds above 0, at most 60")
        self._timeout = timeout
        self._prefix = f"{key_prefix}:"
        self._key = Key((), "limiter")

    def _plan(self, verb: Verb, key: str, limits: tuple[Limit | str, ...], cost: int) -> Plan:
        if not limits:
            raise TypeError("no limits given, expected at least one, for example '10/second'")
        if not isinstance(key, str):
            raise TypeError(f"key is {key!r:.80}, expected text")
        try:
            buckets = _buckets(*limits)
        except TypeError:  # unhashable, so no limit either
            buckets = buckets_of(tuple(as_limit(limit) for limit in limits))
        bucket, cost = self._prefix + self._key.digest_of(key), check_cost(cost)
        return Plan(
            tuple([Charge(bucket + windows.suffix, windows, cost, binding=True, rule=None) for windows in buckets]), verb
        )


class AsyncLimiter(_Keyring):
    """A limiter for async code: ``async with AsyncLimiter("redis://localhost:6379/0") as limiter``.

    ``store`` is a URL or an async store; a store that it opened itself is closed with it. ``timeout`` is in seconds. Where the
    store fails, every method raises `StoreError`. Keys reach the store as digests only.
    """

    def __init__(self, store: str | AsyncStore, *, timeout: float = 0.1, key_prefix: str = "limitgate") -> None:
        super().__init__(timeout, key_prefix)
        self._owns_store = isinstance(store, str)
        self._store: AsyncStore = opened(store, open_store)

    async def hit(self, key: str, *limits: Limit | str, cost: int = 1) -> Decision:
        """Take ``cost`` from every limit of ``key``, or from none."""
        return await self._decide("spend", key, limits, cost)

    async def peek(self, key: str, *limits: Limit | str, cost: int = 1) -> Decision:
        """What `hit` would answer, with the bucket as it stands. Charges nothing."""
        return await self._decide("peek", key, limits, cost)

    async def reset(self, key: str, *limits: Limit | str) -> Decision:
        """Forget what was taken from these limits of ``key``; the decision shows them full."""
        return await self._decide("reset", key, limits, 1)

    async def aclose(self) -> None:
        """Close the store if it was opened here."""
        if self._owns_store:
            await self._store.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _decide(self, verb: Verb, key: str, limits: tuple[Limit | str, ...], cost: int) -> Decision:
        plan = self._plan(verb, key, limits, cost)
        return decide(plan, await self._store.aspend(plan, self._timeout))


class Limiter(_Keyring):
    """A limiter for sync code, safe under threads: ``with Limiter("redis://localhost:6379/0") as limiter``.

    ``store`` is a URL or a sync store; a store that it opened itself is closed with it. ``timeout`` is in seconds. Where the
    store fails, every method raises `StoreError`. Keys reach the store as digests only.
    """

    def __init__(self, store: str | SyncStore, *, timeout: float = 0.1, key_prefix: str = "limitgate") -> None:
        super().__init__(timeout, key_prefix)
        self._owns_store = isinstance(store, str)
        self._store: SyncStore = opened(store, open_sync_store)

    def hit(self, key: str, *limits: Limit | str, cost: int = 1) -> Decision:
        """Take ``cost`` from every limit of ``key``, or from none."""
        return self._decide("spend", key, limits, cost)

    def peek(self, key: str, *limits: Limit | str, cost: int = 1) -> Decision:
        """What `hit` would answer, with the bucket as it stands. Charges nothing."""
        return self._decide("peek", key, limits, cost)

    def reset(self, key: str, *limits: Limit | str) -> Decision:
        """Forget what was taken from these limits of ``key``; the decision shows them full."""
        return self._decide("reset", key, limits, 1)

    def close(self) -> None:
        """Close the store if it was opened here."""
        if self._owns_store:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _decide(self, verb: Verb, key: str, limits: tuple[Limit | str, ...], cost: int) -> Decision:
        plan = self._plan(verb, key, limits, cost)
        return decide(plan, self._store.spend(plan, self._timeout))
