"""Slots as context managers, for `AsyncLimiter.slot` and `Limiter.slot`."""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NoReturn, TypeVar

from limitgate.errors import ConfigError, StoreError
from limitgate.gate.flow import Flow, arun, run
from limitgate.gate.slot_keeper import SlotKeeper
from limitgate.limits.decision import Decision, RateLimited, decide
from limitgate.limits.limit import Limit, as_limit
from limitgate.limits.plan import Plan, Reading, full_refund
from limitgate.observing.counts import LimiterCounts
from limitgate.process import switch
from limitgate.process.clock import asyncio_loop
from limitgate.process.forking import unpicklable


def at_once(limit: Limit | str | int) -> Limit:
    """Return a concurrency limit from a limit or a count. Raises `ConfigError`."""
    found = Limit(f"{limit} at once") if type(limit) is int else as_limit(limit)
    if found.algorithm != "concurrency":
        raise ConfigError(f"{found!r} is not a limit on concurrency, expected for example 20 or '20 at once'")
    return found


C = TypeVar("C")


def one_process(block: C) -> C:
    """Return the block, which then can't be pickled."""

    def refuse(_: object) -> NoReturn:
        raise unpicklable("limiter.slot(...)")

    # Pickle looks here first; another class would lose the decorator that `contextmanager` gives.
    setattr(block, "__reduce_ex__", refuse)  # noqa: B010 - no attribute that its type knows
    return block


class Entry:
    """Owner of a slot. Warns when deleted if the block was never entered."""

    __slots__ = ("__weakref__", "_way", "is_entered")

    def __init__(self, way: str) -> None:
        self.is_entered: bool = False
        self._way = way

    def __del__(self) -> None:
        if not self.is_entered and not sys.is_finalizing():
            message = f"a slot was never entered, so nothing was held; expected {self._way} limiter.slot(...):"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


@asynccontextmanager
async def aslot(slot_keeper: SlotKeeper, plan: Plan, figures: LimiterCounts | None, entry: Entry) -> AsyncIterator[Decision]:
    entry.is_entered = True
    asyncio_loop("slot")
    if switch.null_store is not None:
        yield run(switch.null_store, _taking(slot_keeper, plan, figures)).decision
        return
    taken = await arun(slot_keeper.store, _taking(slot_keeper, plan, figures))
    slot_keeper.hold(taken.plan.charges, entry)
    try:
        yield taken.decision
    finally:
        await asyncio.shield(arun(slot_keeper.store, taken.giving_back(slot_keeper)))


@contextmanager
def slot(slot_keeper: SlotKeeper, plan: Plan, figures: LimiterCounts | None, entry: Entry) -> Iterator[Decision]:
    entry.is_entered = True
    if switch.null_store is not None:
        yield run(switch.null_store, _taking(slot_keeper, plan, figures)).decision
        return
    taken = run(slot_keeper.store, _taking(slot_keeper, plan, figures))
    slot_keeper.hold(taken.plan.charges, entry)
    try:
        yield taken.decision
    # The garbage collector may raise GeneratorExit anywhere, so don't take a lock, call the store or wait.
    except GeneratorExit:
        del entry
        slot_keeper.abandon(taken.plan.charges)
        raise
    except BaseException:
        run(slot_keeper.store, taken.giving_back(slot_keeper))
        raise
    run(slot_keeper.store, taken.giving_back(slot_keeper))


class _Charged:
    def __init__(self, plan: Plan, reading: Reading) -> None:
        self.plan = plan
        self.decision = decide(plan, reading)
        self._undoing = full_refund(plan, reading)
        self._pid = os.getpid()

    def giving_back(self, slot_keeper: SlotKeeper) -> Flow[None]:
        if os.getpid() != self._pid:
            # The parent of this process still holds them.
            return
        slot_keeper.release(self.plan.charges)
        if self._undoing.charges:
            try:
                yield self._undoing, slot_keeper.timeout
            except StoreError:
                slot_keeper.release_later(self.plan.charges)
            except BaseException:
                slot_keeper.release_later(self.plan.charges)
                raise


def _taking(slot_keeper: SlotKeeper, plan: Plan, figures: LimiterCounts | None) -> Flow[_Charged]:
    plan = plan._replace(verb="spend").named()
    try:
        reading = yield plan, slot_keeper.timeout
    except BaseException as error:
        slot_keeper.release_later(plan.charges)
        if figures is not None and isinstance(error, StoreError):
            figures.failed()
        raise
    taken = _Charged(plan, reading)
    if figures is not None:
        figures.decided(taken.decision, reading.source)
    if not taken.decision.allowed:
        raise RateLimited(taken.decision)
    return taken
