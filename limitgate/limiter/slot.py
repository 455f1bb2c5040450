"""A place for something that is under way, as a context manager: what `AsyncLimiter.slot` and `Limiter.slot` give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from limitgate.errors import ConfigError, StoreError
from limitgate.gate.flow import Steps, atake, take
from limitgate.gate.slot_keeper import Holding
from limitgate.limits.decision import Decision, RateLimited, decide
from limitgate.limits.limit import Limit, as_limit
from limitgate.limits.plan import Plan, Reading
from limitgate.limits.refund import undoing


def at_once(limit: Limit | str | int) -> Limit:
    """A limit of what is under way at once, given as such or as its count. Raises `ConfigError` for anything else."""
    found = Limit(f"{limit} at once") if type(limit) is int else as_limit(limit)
    if found.algorithm != "concurrency":
        raise ConfigError(f"{found!r} has no places that can be held, expected for example 20 or '20 at once'")
    return found


@asynccontextmanager
async def aslot(holding: Holding, plan: Plan) -> AsyncIterator[Decision]:
    """Hold what a plan takes from an `AsyncStore`."""
    taken = await atake(holding.store, _taking(holding, plan))
    holder = _Holder()
    holding.hold(taken.plan.charges, holder)
    try:
        yield taken.decision
    finally:
        await asyncio.shield(atake(holding.store, taken.giving_back(holding)))


@contextmanager
def slot(holding: Holding, plan: Plan) -> Iterator[Decision]:
    """Hold what a plan takes from a `SyncStore`."""
    taken = take(holding.store, _taking(holding, plan))
    holder: _Holder | None = _Holder()
    holding.hold(taken.plan.charges, holder)
    try:
        yield taken.decision
    except GeneratorExit:  # maybe by the garbage collector, in the midst of anything: no lock, no store and no wait there
        holder = None
        holding.abandon(taken.plan.charges)
        raise
    except BaseException:
        take(holding.store, taken.giving_back(holding))
        raise
    take(holding.store, taken.giving_back(holding))


class _Holder:
    """Who holds a slot, for as long as this is there."""


class _Taken:
    """What was taken."""

    def __init__(self, plan: Plan, reading: Reading) -> None:
        self.plan = plan
        self.decision = decide(plan, reading)
        self._undoing = undoing(plan, reading)

    def giving_back(self, holding: Holding) -> Steps[None]:
        """Give it back, now or, where the store fails, later."""
        holding.let_go(self.plan.charges)
        if self._undoing.charges:
            try:
                yield self._undoing, holding.timeout
            except StoreError:
                holding.doubt(self.plan.charges)
            except GeneratorExit:
                holding.doubt(self.plan.charges)
                raise


def _taking(holding: Holding, plan: Plan) -> Steps[_Taken]:
    """Take what is to be held. Raises `RateLimited` where there is no room."""
    plan = plan._replace(verb="spend").named()
    try:
        reading = yield plan, holding.timeout
    except (StoreError, GeneratorExit):
        holding.doubt(plan.charges)
        raise
    taken = _Taken(plan, reading)
    if not taken.decision.allowed:
        raise RateLimited(taken.decision)
    return taken
