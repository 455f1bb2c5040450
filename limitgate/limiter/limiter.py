"""Limiters for any key, in async or sync code, without HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack

from limitgate.errors import StoreError, called_as, wrong_way
from limitgate.limiter.adaptive import (
    AdaptiveOptions,
    AdaptiveWork,
    AsyncAdaptiveWork,
    KeyOf,
    adaptive_work,
    check_async,
    check_key_of,
    check_named,
    check_plain,
    key_of,
)
from limitgate.limiter.calls import AsyncCalls, Calls
from limitgate.limiter.holding import hold_us
from limitgate.limiter.pace import AsyncPace, Pace, Spacing
from limitgate.limiter.plans import AnyLimit, Configured
from limitgate.limiter.reservation import AsyncReservation, Reservation
from limitgate.limiter.rule_bucket import AsyncRuleBucket, BucketParts, RuleBucket
from limitgate.limiter.slot import Entry, aslot, at_once, one_process, slot
from limitgate.limits.decision import Decision, RateLimited, decide
from limitgate.limits.limit import Duration, Limit, as_seconds
from limitgate.limits.template import AnyReading, whole_reading
from limitgate.messages.text import masked
from limitgate.observing.exporter import Observer
from limitgate.observing.logs import audited
from limitgate.process import switch
from limitgate.process.clock import asyncio_loop
from limitgate.rules.rule import Rule
from limitgate.stores import AsyncStore, SyncStore, is_async_redis, open_store, open_sync_store, opened

P = ParamSpec("P")
T = TypeVar("T")


class AsyncLimiter(AsyncCalls):
    """A limiter for async code: ``async with AsyncLimiter("redis://localhost:6379/0") as limiter``.

    ``store`` is a URL or an async store; the limiter closes a store that it opened. ``timeout`` is the longest wait for the
    store in seconds, by default 0.1; if the store fails, methods raise `StoreError`. Keys in the store begin with
    ``key_prefix``, by default ``limitgate``, and contain only digests, which ``secret`` (16 to 64 bytes) protects from guesses.
    `bucket` groups IPv6 clients by ``ipv6_prefix`` bits, by default 64. ``observers`` receive metrics: ``"prometheus"``,
    ``"opentelemetry"``, or an `Observer`.

    Methods take a ``key``, any text that identifies the client, and ``limits``, which must all have room: text such as
    ``10/second``, a `Limit`, or `Configured`. ``cost`` is an integer of at least 0, by default 1. A limit may have its own
    cost: ``hit("model", "500/minute", ("200000/minute", 900))``.
    """

    @called_as(
        "AsyncLimiter('redis://localhost:6379/0'), whose methods take key and limits; for routes use rules and @limit",
        credentials="AsyncLimiter(AsyncRedisStore(url, credentials=...))",
    )
    def __init__(
        self,
        store: str | AsyncStore,
        *,
        timeout: Duration = 0.1,
        key_prefix: str = "limitgate",
        secret: str | None = None,
        ipv6_prefix: int = 64,
        observers: Iterable[str | Observer] = (),
    ) -> None:
        super().__init__(timeout, key_prefix, secret, ipv6_prefix, observers)
        self._owns_store = isinstance(store, str)
        self._use(opened(store, open_store, key_prefix))
        self._adaptive: dict[str, AsyncAdaptiveWork] = {}

    async def hit(self, key: str, *limits: AnyLimit, cost: int = 1) -> Decision:
        """Charge ``cost`` to every limit of ``key``, or to none if one lacks room."""
        plan = self._plans.prepared(key, limits, cost) if self._takes_plain else None
        if plan is None or key in self._holds.of_key:
            return await self._arun(self._deciding("spend", key, limits, cost))
        try:
            reading: AnyReading = await self._store.aspend(plan, self._timeout)  # type: ignore[arg-type]  # this store accepts such plans
        except StoreError:
            self._count_failure()
            raise
        decision = plan.template.decide(reading, None)
        if decision is None:
            decision = decide(plan.whole_plan, whole_reading(reading))
        if self._figures is not None:
            self._figures.decided(decision, reading.source)
        return decision

    async def peek(self, key: str, *limits: AnyLimit, cost: int = 1) -> Decision:
        """Return the decision that `hit` would make, without a charge."""
        return await self._arun(self._deciding("peek", key, limits, cost))

    async def reset(self, key: str, *limits: AnyLimit, reason: str | None = None) -> Decision:
        """Reset these limits of ``key`` and return their state. ``reason`` is for the audit log."""
        return await self._arun(audited(self._deciding("reset", key, limits, 1), "reset", partial(masked, key), reason))

    async def refund(self, key: str, *limits: AnyLimit, cost: int = 1) -> Decision:
        """Refund ``cost`` to these limits of ``key``, up to a full bucket, and return their state."""
        return await self._arun(self._refunding(key, limits, cost))

    async def hit_up_to(self, key: str, *limits: AnyLimit, cost: int) -> Decision:
        """Charge as much of ``cost`` as fits, see ``decision.granted``. If that is 0, ``retry_after`` is for a cost of 1."""
        return await self._arun(self._hitting_up_to(key, limits, cost))

    async def wait(self, key: str, *limits: AnyLimit, cost: int = 1, timeout: Duration | None = None) -> Decision:
        """Book the next free turn for ``cost``, sleep until then, and return. First come, first served.

        Refuses without a charge if the turn is more than ``timeout`` seconds away, if the cost never fits, or if the key is
        banned permanently. Other bans only delay the turn. A timeout of 0 doesn't wait; None waits for any time. Cancellation
        refunds the last turn, and later waiters move up. Raises `ConfigError` if an algorithm can't book turns.
        """
        timeout = as_seconds(timeout, "timeout")
        if timeout == 0:
            return await self.hit(key, *limits, cost=cost)
        return (await self._await_chance(key, limits, cost, timeout)).decision

    async def reserve(
        self, key: str, *limits: AnyLimit, cost: int = 1, timeout: Duration | None = 0, hold: Duration | None = None
    ) -> AsyncReservation:
        """Charge an estimated cost; `AsyncReservation.settle` corrects it, `AsyncReservation.cancel` refunds it.

        With a ``timeout`` other than 0, waits for a turn like `wait`. In GCRA limits, refunds move waiters of this limiter up.

        With ``hold``, seconds or text such as ``2m``, the reservation is refunded unless it is settled, cancelled or renewed in
        time, even if the process dies. This takes a second store call, uses no leases, and raises `StoreError` if 5,000
        reservations of these limits are held.
        """
        store = switch.null_store or self._store
        timeout, held_us = as_seconds(timeout, "timeout"), hold_us(hold)
        if timeout == 0 and not held_us:
            operation = await self._reserve_now(key, limits, cost)
            operation.watch()
        elif timeout == 0:
            operation = await self._await_turn(key, limits, cost, 0, held_us, settles=True)
            self._count(operation.decision, operation.source)
        else:
            operation = await self._await_chance(key, limits, cost, timeout, held_us, settles=True)
        if operation.is_held:
            await self._begin_hold(operation)
        return AsyncReservation(operation, store)

    def slot(self, key: str, limit: Limit | str | int, *, cost: int = 1) -> AbstractAsyncContextManager[Decision]:
        """Hold a slot while a block runs: ``async with limiter.slot("user:42", 20) as decision:``.

        ``limit`` is the number of slots or a `Limit`. The block holds ``cost`` slots. Slots of a crashed process expire after
        30 seconds. Raises `RateLimited` if no slot is free; ``retry_after`` is then only a hint.
        """
        plan = self._plans.plan("peek", key, (at_once(limit),), cost)
        return one_process(aslot(self._slot_keeper, plan, self._figures, Entry("async with")))

    async def penalize(self, key: str, seconds: Duration) -> Decision:
        """Refuse ``key`` for ``seconds``, even if its limits have room. Lengthens an existing ban by ``seconds``."""
        return await self._arun(self._banning(key, seconds, longer=True))

    async def ban(self, key: str, seconds: Duration | None = None, *, reason: str | None = None) -> Decision:
        """Refuse ``key`` for at least ``seconds``, or permanently. Leases stay usable. ``reason`` is for the audit log."""
        return await self._arun(
            audited(self._banning(key, seconds), "ban", partial(masked, key), reason, seconds=as_seconds(seconds, "seconds"))
        )

    async def banned(self, key: str) -> Decision:
        """Return a refusal with the remaining time in ``retry_after`` if ``key`` is banned, otherwise an allowed decision."""
        return await self._arun(self._banned(key))

    @called_as("limiter.bucket(rule, ip='203.0.113.7'): the parts of the rule's key by their names")
    def bucket(
        self, rule: Rule | Callable[..., Any], *, name: str | None = None, **parts: Unpack[BucketParts]
    ) -> AsyncRuleBucket:
        """Return one client's bucket of a rule: ``limiter.bucket(rule, ip="203.0.113.7").ban(3600)``.

        ``rule`` is a `Rule`, an endpoint with ``@limit``, a `limitgate.fastapi.RateLimit` or a
        `limitgate.django.rest.Throttle`; ``name`` selects one of an endpoint's limits. ``parts`` are in `BucketParts`. The gate
        needs the same ``key_prefix``, ``secret`` and ``ipv6_prefix``. Raises `ConfigError` for a missing part without an
        ``ip``.
        """
        return AsyncRuleBucket(self._rule_bucket(rule, name, parts), self._arun)

    async def configure(
        self, name: str, *limits: Limit | str, per_process: bool = False, replace: bool = True
    ) -> tuple[Limit, ...]:
        """Store limits under a name, for `Configured` in every process that shares the store. Return the current limits.

        Changes apply within a second. With ``per_process``, each process counts separately. ``replace=False`` keeps existing
        limits.
        """
        return (await self._arun(self._configuring(name, limits, per_process=per_process, replace=replace))).limits

    async def configuration(self, name: str) -> tuple[Limit, ...] | None:
        """Return the limits stored under a name, or None."""
        kept = await self._arun(self._reading(name))
        return None if kept is None else kept.limits

    async def pardon(self, key: str, *, reason: str | None = None) -> None:
        """Lift the ban of ``key``, if any. ``reason`` is for the audit log."""
        await self._arun(audited(self._pardoning(key), "pardon", partial(masked, key), reason))

    def limited(
        self, *limits: AnyLimit, key: KeyOf = None, cost: int = 1, timeout: Duration | None = 0
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]]:
        """Limit an async function; a refused call raises `RateLimited`.

        ``key`` is text, or a callable that returns text for the arguments; by default all calls share one key. With a
        ``timeout`` other than 0, a call waits like `wait`.
        """

        def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
            check_async(function)
            check_named(function, key)

            @wraps(function)
            async def limited(*args: P.args, **kwargs: P.kwargs) -> T:
                decision = await self.wait(key_of(key, function, args, kwargs), *limits, cost=cost, timeout=timeout)
                if not decision.allowed:
                    raise RateLimited(decision)
                return await function(*args, **kwargs)

            return limited

        check_key_of(key)
        self.validate("", *limits, cost=cost, timeout=timeout)
        return decorate

    def pace(
        self,
        source: Iterable[T] | AsyncIterable[T],
        *limits: Limit | str | Configured,
        key: str = "pace",
        cost: int | Callable[[T], int] = 1,
        even: bool = True,
    ) -> AsyncIterator[T]:
        """Iterate over a source at the rate of the limits: ``async for page in limiter.pace(pages, "10/second"):``.

        Waits for a turn before each item, like `wait`. Processes with the same ``key`` share the rate. ``even`` reduces the
        burst to 10 ms of items. ``cost`` may be a callable that returns an item's cost. A plain iterable must not block.

        A ban delays items; a permanent one raises `RateLimited`. After a failed wait, the iterator returns the same item next.
        Tasks of an event loop can share it. Raises `ConfigError` for limits that can't book turns, and with ``even`` for
        `Configured` and limits without a burst.
        """
        spacing = Spacing(limits, cost, even=even)
        self.validate(key, *limits, timeout=None)
        return AsyncPace(source, partial(self.wait, key), spacing)

    def adaptive(self, name: str, **options: Unpack[AdaptiveOptions]) -> AsyncAdaptiveWork:
        """Limit concurrent work in this process to what it can sustain: ``async with limiter.adaptive("db"):``.

        ``@limiter.adaptive("db")`` runs calls of a function as blocks. The limit adapts to the duration of blocks and to event
        loop lag, without store calls. A block without a permit waits for ``max_delay`` seconds, by default 0, and then raises
        `RateLimited`. ``with_priority("low")`` returns the same work for low priority. Timeouts, lost connections and
        cancellations are failures, which lower the limit.

        ``name`` identifies the limit. ``options`` are `AdaptiveOptions`. The same name returns the same object; different
        options raise `ConfigError`.
        """
        return adaptive_work(self._adaptive, AsyncAdaptiveWork, name, options)

    async def aclose(self) -> None:
        """Close the store if this limiter opened it."""
        if self._owns_store:
            await self._store.aclose()

    async def __aenter__(self) -> Self:
        if is_async_redis(self._store):
            asyncio_loop("an AsyncLimiter on Redis")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    if not TYPE_CHECKING:  # Type checkers reject the wrong context manager anyway.
        __enter__ = __exit__ = wrong_way("an AsyncLimiter was used in a with block, expected async with, or a Limiter")


class Limiter(Calls):
    """A limiter for sync code, thread-safe: ``with Limiter("redis://localhost:6379/0") as limiter``.

    ``store`` is a URL or a sync store. ``timeout``, ``key_prefix``, ``secret``, ``ipv6_prefix`` and ``observers`` are those of
    `AsyncLimiter`, as are ``key``, ``limits`` and ``cost`` of the methods. If the store fails, methods raise `StoreError`.
    """

    @called_as(
        "Limiter('redis://localhost:6379/0'), whose methods take key and limits; for routes use rules and @limit",
        credentials="Limiter(RedisStore(url, credentials=...))",
    )
    def __init__(
        self,
        store: str | SyncStore,
        *,
        timeout: Duration = 0.1,
        key_prefix: str = "limitgate",
        secret: str | None = None,
        ipv6_prefix: int = 64,
        observers: Iterable[str | Observer] = (),
    ) -> None:
        super().__init__(timeout, key_prefix, secret, ipv6_prefix, observers)
        self._owns_store = isinstance(store, str)
        self._use(opened(store, open_sync_store, key_prefix))
        self._adaptive: dict[str, AdaptiveWork] = {}

    def hit(self, key: str, *limits: AnyLimit, cost: int = 1) -> Decision:
        """Charge ``cost`` to every limit of ``key``, or to none if one lacks room."""
        plan = self._plans.prepared(key, limits, cost) if self._takes_plain else None
        if plan is None or key in self._holds.of_key:
            return self._run(self._deciding("spend", key, limits, cost))
        try:
            reading: AnyReading = self._store.spend(plan, self._timeout)  # type: ignore[arg-type]  # this store accepts such plans
        except StoreError:
            self._count_failure()
            raise
        decision = plan.template.decide(reading, None)
        if decision is None:
            decision = decide(plan.whole_plan, whole_reading(reading))
        if self._figures is not None:
            self._figures.decided(decision, reading.source)
        return decision

    def peek(self, key: str, *limits: AnyLimit, cost: int = 1) -> Decision:
        """Return the decision that `hit` would make, without a charge."""
        return self._run(self._deciding("peek", key, limits, cost))

    def reset(self, key: str, *limits: AnyLimit, reason: str | None = None) -> Decision:
        """Reset these limits of ``key`` and return their state. ``reason`` is for the audit log."""
        return self._run(audited(self._deciding("reset", key, limits, 1), "reset", partial(masked, key), reason))

    def refund(self, key: str, *limits: AnyLimit, cost: int = 1) -> Decision:
        """Refund ``cost`` to these limits of ``key``, up to a full bucket, and return their state."""
        return self._run(self._refunding(key, limits, cost))

    def hit_up_to(self, key: str, *limits: AnyLimit, cost: int) -> Decision:
        """Charge as much of ``cost`` as fits, see ``decision.granted``. If that is 0, ``retry_after`` is for a cost of 1."""
        return self._run(self._hitting_up_to(key, limits, cost))

    def wait(self, key: str, *limits: AnyLimit, cost: int = 1, timeout: Duration | None = None) -> Decision:
        """Book the next free turn for ``cost``, sleep until then, and return. First come, first served.

        ``timeout``, in seconds, and errors are those of `AsyncLimiter.wait`. An interruption refunds the turn.
        """
        timeout = as_seconds(timeout, "timeout")
        if timeout == 0:
            return self.hit(key, *limits, cost=cost)
        return self._wait_for_chance(key, limits, cost, timeout).decision

    def reserve(
        self, key: str, *limits: AnyLimit, cost: int = 1, timeout: Duration | None = 0, hold: Duration | None = None
    ) -> Reservation:
        """Charge an estimated cost; `Reservation.settle` corrects it, `Reservation.cancel` refunds it.

        ``timeout``, ``hold`` and errors are those of `AsyncLimiter.reserve`.
        """
        store = switch.null_store or self._store
        timeout, held_us = as_seconds(timeout, "timeout"), hold_us(hold)
        if timeout == 0:
            operation = self._run(self._reserving(key, limits, cost, held_us))
            operation.watch()
        else:
            operation = self._wait_for_chance(key, limits, cost, timeout, held_us, settles=True)
        if operation.is_held:
            try:
                self._run(operation.registering())
            except BaseException:
                self._run(operation.undoing())
                raise
        return Reservation(operation, store)

    def slot(self, key: str, limit: Limit | str | int, *, cost: int = 1) -> AbstractContextManager[Decision]:
        """Hold a slot while a block runs: ``with limiter.slot("user:42", 20) as decision:``.

        ``limit``, ``cost`` and the errors are those of `AsyncLimiter.slot`.
        """
        plan = self._plans.plan("peek", key, (at_once(limit),), cost)
        return one_process(slot(self._slot_keeper, plan, self._figures, Entry("with")))

    def penalize(self, key: str, seconds: Duration) -> Decision:
        """Refuse ``key`` for ``seconds``, even if its limits have room. Lengthens an existing ban by ``seconds``."""
        return self._run(self._banning(key, seconds, longer=True))

    def ban(self, key: str, seconds: Duration | None = None, *, reason: str | None = None) -> Decision:
        """Refuse ``key`` for at least ``seconds``, or permanently. Leases stay usable. ``reason`` is for the audit log."""
        return self._run(
            audited(self._banning(key, seconds), "ban", partial(masked, key), reason, seconds=as_seconds(seconds, "seconds"))
        )

    def banned(self, key: str) -> Decision:
        """Return a refusal with the remaining time in ``retry_after`` if ``key`` is banned, otherwise an allowed decision."""
        return self._run(self._banned(key))

    @called_as("limiter.bucket(rule, ip='203.0.113.7'): the parts of the rule's key by their names")
    def bucket(self, rule: Rule | Callable[..., Any], *, name: str | None = None, **parts: Unpack[BucketParts]) -> RuleBucket:
        """Return one client's bucket of a rule: ``limiter.bucket(rule, ip="203.0.113.7").ban(3600)``.

        ``rule``, ``name``, ``parts`` and errors are those of `AsyncLimiter.bucket`.
        """
        return RuleBucket(self._rule_bucket(rule, name, parts), self._run)

    def configure(self, name: str, *limits: Limit | str, per_process: bool = False, replace: bool = True) -> tuple[Limit, ...]:
        """Store limits under a name, for `Configured` in every process that shares the store.

        ``per_process``, ``replace`` and the result are those of `AsyncLimiter.configure`.
        """
        return (self._run(self._configuring(name, limits, per_process=per_process, replace=replace))).limits

    def configuration(self, name: str) -> tuple[Limit, ...] | None:
        """Return the limits stored under a name, or None."""
        kept = self._run(self._reading(name))
        return None if kept is None else kept.limits

    def pardon(self, key: str, *, reason: str | None = None) -> None:
        """Lift the ban of ``key``, if any. ``reason`` is for the audit log."""
        self._run(audited(self._pardoning(key), "pardon", partial(masked, key), reason))

    def limited(
        self, *limits: AnyLimit, key: KeyOf = None, cost: int = 1, timeout: Duration | None = 0
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Limit a function; a refused call raises `RateLimited`.

        ``key`` and ``timeout`` are those of `AsyncLimiter.limited`.
        """

        def decorate(function: Callable[P, T]) -> Callable[P, T]:
            check_plain(function)
            check_named(function, key)

            @wraps(function)
            def limited(*args: P.args, **kwargs: P.kwargs) -> T:
                decision = self.wait(key_of(key, function, args, kwargs), *limits, cost=cost, timeout=timeout)
                if not decision.allowed:
                    raise RateLimited(decision)
                return function(*args, **kwargs)

            return limited

        check_key_of(key)
        self.validate("", *limits, cost=cost, timeout=timeout)
        return decorate

    def pace(
        self,
        source: Iterable[T],
        *limits: Limit | str | Configured,
        key: str = "pace",
        cost: int | Callable[[T], int] = 1,
        even: bool = True,
    ) -> Iterator[T]:
        """Iterate over a source at the rate of the limits: ``for page in limiter.pace(pages, "10/second"):``.

        ``key``, ``cost``, ``even`` and errors are as in `AsyncLimiter.pace`. Threads can share the iterator.
        """
        spacing = Spacing(limits, cost, even=even)
        self.validate(key, *limits, timeout=None)
        return Pace(source, partial(self.wait, key), spacing)

    def adaptive(self, name: str, **options: Unpack[AdaptiveOptions]) -> AdaptiveWork:
        """Limit concurrent work in this process to what it can sustain: ``with limiter.adaptive("db"):``.

        ``name``, ``options``, the decorator and ``with_priority`` are as in `AsyncLimiter.adaptive`.
        """
        return adaptive_work(self._adaptive, AdaptiveWork, name, options)

    def close(self) -> None:
        """Close the store if this limiter opened it."""
        if self._owns_store:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    if not TYPE_CHECKING:  # Type checkers reject the wrong context manager anyway.
        __aenter__ = __aexit__ = wrong_way("a Limiter was used in an async with block, expected with, or an AsyncLimiter")
