"""Flows: logic that wants I/O done and does none itself, written once for code that awaits and for code that does not.

A flow is a generator, as `auth_flow` of httpx's ``Auth`` is: it yields a wish, is sent the result or thrown the error, and
returns the outcome. `drive` and `adrive` fulfil the wishes of any flow, `run` and `arun` those of one that asks a store, or has
something `Awaited`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from typing import Any, NamedTuple, TypeVar

from limitgate.errors import ConfigError, StoreError
from limitgate.limits.plan import Reading
from limitgate.limits.template import AnyPlan
from limitgate.process.clock import monotonic
from limitgate.stores import AsyncStore, SyncStore
from limitgate.stores.base import AsyncConfigStore, ConfigRequest, StoredConfig, SyncConfigStore

Wish = TypeVar("Wish")
Result = TypeVar("Result")
T = TypeVar("T")


class Awaited(NamedTuple):
    """A wish for the result of an awaitable."""

    awaitable: Awaitable[Any]
    otherwise: str
    """Text of the `TypeError` for code that cannot await."""

    def refused(self) -> TypeError:
        """Close the awaitable and return the error for code that cannot await. Unclosed, a coroutine would warn."""
        getattr(self.awaitable, "close", bool)()
        return TypeError(self.otherwise)


def limits_awaited(limits: Awaitable[Any]) -> Awaited:
    """A wish for limits that async callables have yet to give."""
    return Awaited(limits, "the callable that gives a rule's limits is async, expected a plain function under WSGI")


Flow = Generator[tuple[AnyPlan, float] | Awaited, Any, T]
"""A flow that asks a store: yields plans, each with the seconds to wait for the `Reading`, and what has to be awaited."""
ConfigFlow = Generator[tuple[AnyPlan | ConfigRequest, float] | Awaited, Any, T]
"""A flow that asks a store for configuration, too, and is sent a `StoredConfig` for each such request."""


def measures_silence(store: object) -> bool:
    """True if a store's readings and errors say for how long it was silent: the class that defines ``spend`` tells."""
    return bool(_beside_spend(store).get("measures_silence", False))


def takes_plain(store: object) -> bool:
    """True if a store takes a `PlainSpend` as it is: an attribute beside ``spend`` says so, as above.

    Such a store measures its silence.
    """
    return measures_silence(store) and bool(_beside_spend(store).get("takes_plain", False))


def answers_at_once(store: object) -> bool:
    """True if nobody waits for a store, so that ``spend`` serves an event loop, too: told beside it, as above."""
    return bool(_beside_spend(store).get("answers_at_once", False))


def _beside_spend(store: object) -> Mapping[str, Any]:
    """All that the class defines which defines how to ask the store."""
    for kind in type(store).__mro__:
        if "spend" in vars(kind) or "aspend" in vars(kind):
            return vars(kind)
    return {}


class Budget:
    """Seconds left to wait for a store. Unless its silence is ``measured``, all time that passes counts."""

    __slots__ = ("_is_measured", "left")

    def __init__(self, left: float, *, measured: bool) -> None:
        self.left = left
        self._is_measured = measured

    def within(self, timeout: float) -> float:
        """Cut a timeout in seconds to the time that is left. Raises `StoreError` if there is none."""
        if self.left <= 0:
            raise StoreError("no time was left to ask the store again", "timeout")
        return min(timeout, self.left)

    def deduct(self, outcome: Reading | StoredConfig | StoreError, began: float) -> None:
        """Deduct the wait for the store that began at a time of `time.monotonic`."""
        self.left -= outcome.waited if self._is_measured else monotonic() - began


def drive(flow: Generator[Wish, Result, T], fulfil: Callable[[Wish], Result]) -> T:
    """Run a flow and return its outcome. Whatever ``fulfil`` raises is thrown into the flow, an interruption too."""
    try:
        wish = next(flow)
        while True:
            try:
                result = fulfil(wish)
            except BaseException as error:  # noqa: BLE001 - the flow knows what to do about it
                wish = flow.throw(error)
            else:
                wish = flow.send(result)
    except StopIteration as end:
        outcome: T = end.value
        return outcome


async def adrive(flow: Generator[Wish, Result, T], fulfil: Callable[[Wish], Awaitable[Result]]) -> T:
    """`drive`, awaiting each result. A cancellation is thrown into the flow, too."""
    try:
        wish = next(flow)
        while True:
            try:
                result = await fulfil(wish)
            except BaseException as error:  # noqa: BLE001 - the flow knows what to do about it
                wish = flow.throw(error)
            else:
                wish = flow.send(result)
    except StopIteration as end:
        outcome: T = end.value
        return outcome


def run(store: SyncStore, flow: ConfigFlow[T], budget: Budget | None = None) -> T:
    """Run a flow on a `SyncStore` and return its outcome. Without a budget only the flow's own timeouts count."""
    budget = budget or Budget(math.inf, measured=True)

    def fulfil(wish: tuple[AnyPlan | ConfigRequest, float] | Awaited) -> Any:
        if isinstance(wish, Awaited):
            raise wish.refused()
        request, began = wish[0], monotonic()
        answer: Any
        try:
            if not isinstance(request, ConfigRequest):
                answer = store.spend(request, budget.within(wish[1]))  # type: ignore[arg-type]  # to one that takes it
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
    """`run`, on an `AsyncStore`."""
    budget = budget or Budget(math.inf, measured=True)

    async def fulfil(wish: tuple[AnyPlan | ConfigRequest, float] | Awaited) -> Any:
        if isinstance(wish, Awaited):
            return await wish.awaitable
        request, began = wish[0], monotonic()
        answer: Any
        try:
            if not isinstance(request, ConfigRequest):
                answer = await store.aspend(request, budget.within(wish[1]))  # type: ignore[arg-type]  # to one that takes it
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
    return ConfigError(f"{type(store).__name__} keeps no limits under a name, expected a store with the method {method}")
