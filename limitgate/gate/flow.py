"""Flows: sans-I/O generators for sync and async code, like `auth_flow` of httpx's ``Auth``."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from inspect import isawaitable
from typing import Any, NamedTuple, TypeVar

from limitgate.errors import ConfigError, StoreError
from limitgate.http.request import Request
from limitgate.limits.plan import Reading
from limitgate.limits.template import AnyPlan
from limitgate.process.clock import monotonic
from limitgate.stores import AsyncStore, SyncStore
from limitgate.stores.base import AsyncConfigStore, ConfigRequest, FleetRequest, StoredConfig, StoredFleet, SyncConfigStore

Wish = TypeVar("Wish")
Result = TypeVar("Result")
T = TypeVar("T")


class Awaited(NamedTuple):
    awaitable: Awaitable[Any]
    otherwise: str
    """Error for sync code, which can't await."""

    def refused(self) -> TypeError:
        """Return the error for sync code. Close the awaitable, which would warn otherwise."""
        getattr(self.awaitable, "close", bool)()
        return TypeError(self.otherwise)


class PendingLimits:
    """Limits from async callables. Await this object, then plan again. ``keys`` are ids of rules; None for all."""

    __slots__ = ("_given", "_keys")

    def __init__(self, request: Request, keys: Sequence[int] | None = None) -> None:
        self._given = given = {} if request.given_limits is None else request.given_limits
        self._keys = [key for key, limits in given.items() if isawaitable(limits)] if keys is None else keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __await__(self) -> Generator[Any, Any, None]:
        return self._complete().__await__()

    async def _complete(self) -> None:
        try:
            for key in self._keys:
                if isawaitable(limits := self._given[key]):
                    self._given[key] = await limits
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the remaining coroutines, which would otherwise warn."""
        for key in self._keys:
            if isawaitable(self._given[key]):
                getattr(self._given[key], "close", bool)()


def limits_awaited(limits: PendingLimits) -> Awaited:
    return Awaited(limits, "the callable that returns a rule's limits is async, expected a plain function under WSGI")


Flow = Generator[tuple[AnyPlan, float] | Awaited, Any, T]
"""Yields a plan and a timeout in seconds, or an `Awaited`."""
AnyRequest = AnyPlan | ConfigRequest | FleetRequest
ConfigFlow = Generator[tuple[AnyRequest, float] | Awaited, Any, T]
"""A flow that may also yield a `ConfigRequest`, or a `FleetRequest` to a store that keeps snapshots."""


def body_read(request: Request, most: int) -> Flow[None]:
    if request.reads_here:
        request.read_body_here(most)
    else:
        yield Awaited(request.read_body(most), "the body has to be awaited, expected an event loop")


def measures_silence(store: object) -> bool:
    """True if the class that defines ``spend`` reports the store's silence."""
    return bool(_beside_spend(store).get("measures_silence", False))


def takes_plain(store: object) -> bool:
    """True if the store accepts a `PlainSpend` and has `measures_silence`."""
    return measures_silence(store) and bool(_beside_spend(store).get("takes_plain", False))


def answers_at_once(store: object) -> bool:
    """True if ``spend`` never blocks."""
    return bool(_beside_spend(store).get("answers_at_once", False))


def _beside_spend(store: object) -> Mapping[str, Any]:
    """Return the attributes of the class that defines ``spend``, because a subclass may change its behaviour."""
    for kind in type(store).__mro__:
        if "spend" in vars(kind) or "aspend" in vars(kind):
            return vars(kind)
    return {}


class Budget:
    """Seconds left for store calls. If ``measured``, only the store's silence counts."""

    __slots__ = ("_is_measured", "left")

    def __init__(self, left: float, *, measured: bool) -> None:
        self.left: float = left
        self._is_measured = measured

    def within(self, timeout: float) -> float:
        """Limit a timeout. Raises `StoreError` if no time is left."""
        if self.left <= 0:
            raise StoreError("no time was left to ask the store again", "timeout")
        return min(timeout, self.left)

    def deduct(self, outcome: Reading | StoredConfig | StoredFleet | StoreError, began: float) -> None:
        self.left -= outcome.waited if self._is_measured else monotonic() - began


def drive(flow: Generator[Wish, Result, T], fulfil: Callable[[Wish], Result]) -> T:
    """Run a flow. Errors and interruptions of ``fulfil`` are raised inside it."""
    try:
        wish = next(flow)
        while True:
            try:
                result = fulfil(wish)
            except BaseException as error:  # noqa: BLE001 - the flow handles it
                wish = flow.throw(error)
            else:
                wish = flow.send(result)
    except StopIteration as end:
        outcome: T = end.value
        return outcome


async def adrive(flow: Generator[Wish, Result, T], fulfil: Callable[[Wish], Awaitable[Result]]) -> T:
    """`drive` for async code; also throws cancellations."""
    try:
        wish = next(flow)
        while True:
            try:
                result = await fulfil(wish)
            except BaseException as error:  # noqa: BLE001 - the flow handles it
                wish = flow.throw(error)
            else:
                wish = flow.send(result)
    except StopIteration as end:
        outcome: T = end.value
        return outcome


def run(store: SyncStore, flow: ConfigFlow[T], budget: Budget | None = None) -> T:
    """Run a flow, within a budget if given."""
    budget = budget or Budget(math.inf, measured=True)

    def fulfil(wish: tuple[AnyRequest, float] | Awaited) -> Any:
        if isinstance(wish, Awaited):
            raise wish.refused()
        request, began = wish[0], monotonic()
        answer: Any
        try:
            if isinstance(request, FleetRequest):
                answer = store.fleet(request, budget.within(wish[1]))  # type: ignore[attr-defined]  # See `ConfigFlow`.
            elif not isinstance(request, ConfigRequest):
                answer = store.spend(request, budget.within(wish[1]))  # type: ignore[arg-type]  # The store takes plain plans.
            elif isinstance(store, SyncConfigStore):
                answer = store.config(request, budget.within(wish[1]))
            else:
                raise _keeps_no_config(store, "config")
        except StoreError as error:
            budget.deduct(error, began)
            raise
        budget.deduct(answer, began)
        return answer

    return drive(flow, fulfil)


def arun(store: AsyncStore, flow: ConfigFlow[T], budget: Budget | None = None) -> Coroutine[Any, Any, T]:
    budget = budget or Budget(math.inf, measured=True)

    async def fulfil(wish: tuple[AnyRequest, float] | Awaited) -> Any:
        if isinstance(wish, Awaited):
            return await wish.awaitable
        request, began = wish[0], monotonic()
        answer: Any
        try:
            if isinstance(request, FleetRequest):
                answer = await store.afleet(request, budget.within(wish[1]))  # type: ignore[attr-defined]  # See `ConfigFlow`.
            elif not isinstance(request, ConfigRequest):
                answer = await store.aspend(request, budget.within(wish[1]))  # type: ignore[arg-type]  # The store takes plain plans.
            elif isinstance(store, AsyncConfigStore):
                answer = await store.aconfig(request, budget.within(wish[1]))
            else:
                raise _keeps_no_config(store, "aconfig")
        except StoreError as error:
            budget.deduct(error, began)
            raise
        budget.deduct(answer, began)
        return answer

    return adrive(flow, fulfil)


def _keeps_no_config(store: object, method: str) -> ConfigError:
    return ConfigError(f"{type(store).__name__} cannot keep limits under a name, expected a store with the method {method}")
