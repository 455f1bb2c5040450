"""What is done by asking a store, written once for code that awaits and code that does not.

Steps are a generator: it yields what it wants to know from the store, is sent the readings, or thrown the store's errors, and
returns what came of it. `take` and `atake` walk through them; they differ in one thing, whether asking is awaited.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from limitgate.errors import StoreError
from limitgate.plan import Plan, Reading
from limitgate.stores import AsyncStore, SyncStore

T = TypeVar("T")
Steps = Generator[tuple[Plan, float], Reading, T]
"""Yields plans and how long to wait for the store, in seconds."""


def take(store: SyncStore, steps: Steps[T]) -> T:
    """What comes of some steps, by a `SyncStore`. Where it is interrupted they are closed."""
    try:
        asked = next(steps)
        while True:
            try:
                reading = store.spend(*asked)
            except StoreError as error:
                asked = steps.throw(error)
            else:
                asked = steps.send(reading)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


async def atake(store: AsyncStore, steps: Steps[T]) -> T:
    """What comes of some steps, by an `AsyncStore`. Where it is cancelled they are closed."""
    try:
        asked = next(steps)
        while True:
            try:
                reading = await store.aspend(*asked)
            except StoreError as error:
                asked = steps.throw(error)
            else:
                asked = steps.send(reading)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()
