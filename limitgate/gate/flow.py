"""What is done by asking a store, written once for code that awaits and code that does not.

Steps are a generator: it yields what it wants to know from the store, is sent the readings, or thrown the store's errors, and
returns what came of it. `take` and `arun` walk through them; they differ in one thing, whether asking is awaited.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from typing import TypeVar

from limitgate.errors import StoreError
from limitgate.limits.plan import Plan, Reading
from limitgate.stores import AsyncStore, SyncStore

T = TypeVar("T")
Flow = Generator[tuple[Plan, float], Reading, T]
"""Yields plans and how long to wait for the store, in seconds."""


def measures_silence(store: object) -> bool:
    """True if readings and errors of a store say for how long it was silent: its class does where it says how to ask it."""
    for kind in type(store).__mro__:
        if "spend" in vars(kind) or "aspend" in vars(kind):
            return bool(vars(kind).get("measures_silence", False))
    return False


class Budget:
    """Seconds for which a store may still be waited for. Where that is not ``measured``, all time that passes counts."""

    __slots__ = ("_is_measured", "left")

    def __init__(self, left: float, *, measured: bool) -> None:
        self.left = left
        self._is_measured = measured

    def within(self, timeout: float) -> float:
        """As much of a timeout in seconds as is left. Raises `StoreError` if nothing is."""
        if self.left <= 0:
            raise StoreError("no time was left to ask the store again", "timeout")
        return min(timeout, self.left)

    def spend(self, outcome: Reading | StoreError, began: float) -> None:
        """Take off for how long the store was waited for since a time by `time.monotonic`."""
        self.left -= outcome.waited if self._is_measured else time.monotonic() - began


def run(store: SyncStore, steps: Flow[T], budget: Budget | None = None) -> T:
    """What comes of some steps, by a `SyncStore`, within a budget. Where it is interrupted they are closed."""
    budget = budget or Budget(math.inf, measured=True)
    try:
        asked = next(steps)
        while True:
            began = time.monotonic()
            try:
                reading = store.spend(asked[0], budget.within(asked[1]))
            except StoreError as error:
                budget.spend(error, began)
                asked = steps.throw(error)
            else:
                budget.spend(reading, began)
                asked = steps.send(reading)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


async def arun(store: AsyncStore, steps: Flow[T], budget: Budget | None = None) -> T:
    """What comes of some steps, by an `AsyncStore`, within a budget. Where it is cancelled they are closed."""
    budget = budget or Budget(math.inf, measured=True)
    try:
        asked = next(steps)
        while True:
            began = time.monotonic()
            try:
                reading = await store.aspend(asked[0], budget.within(asked[1]))
            except StoreError as error:
                budget.spend(error, began)
                asked = steps.throw(error)
            else:
                budget.spend(reading, began)
                asked = steps.send(reading)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()
