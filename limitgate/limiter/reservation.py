"""Reservations: estimated charges that are corrected later."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from limitgate.errors import StoreError, wrong_way
from limitgate.gate.admission import Receipt, Turn
from limitgate.gate.flow import Flow, arun, run
from limitgate.gate.planning.prepared import NO_CHARGES
from limitgate.gate.turns import TurnWaiter, book, lowered
from limitgate.limiter.bookings import Bookings, Sleeper
from limitgate.limiter.holding import Hold, NotHeldError, is_full, state_of
from limitgate.limits.decision import SECOND, Decision, is_booked
from limitgate.limits.plan import Plan, Reading, Returned, check_cost, full_refund, owed, refund, returned
from limitgate.process import waiting
from limitgate.stores import AsyncStore, SyncStore


class ChargedOperation:
    """A charge that can be corrected once."""

    def __init__(
        self,
        decision: Decision,
        plan: Plan,
        reading: Reading,
        *,
        timeout: float,
        costed: Sequence[int],
        bookings: Bookings,
        hold: Hold | None = None,
    ) -> None:
        self.decision = decision
        self.source = reading.source
        self.keys: frozenset[str] = frozenset([charge.key for charge in plan.charges])
        self._plan = plan
        self._costed = costed
        """Places of charges with their own costs."""
        self._taken: tuple[Receipt, ...] = (Receipt(NO_CHARGES, plan, reading),)
        self._places: Sequence[Sequence[int]] = (range(len(plan.charges)),)
        """The places of each receipt's charges in the plan."""
        self._timeout = timeout
        self._bookings = bookings
        self._waiter: TurnWaiter | Sleeper | None = None
        self._missed: list[Returned] = []
        """Refunds noted after the turn came."""
        self._hold = hold
        self._read_us, self._read_at = reading.now, waiting.monotonic()
        self._counts = decision.allowed
        self._pid = os.getpid()

    @property
    def is_held(self) -> bool:
        return self._hold is not None and self._counts

    @property
    def is_open(self) -> bool:
        """True if this process may still cancel it. A fork inherits the block, but not the charge."""
        return self._counts and os.getpid() == self._pid

    def settling(self, cost: int | Sequence[int]) -> Flow[None]:
        """Correct the charge; ``cost`` may be a list for limits with own costs.

        Raises `RuntimeError` if refused or corrected.
        """
        yield from self._correcting("settled", self._final_costs(cost))

    def cancelling(self) -> Flow[None]:
        """Refund the charge. Raises `RuntimeError` like `settling`."""
        yield from self._correcting("cancelled", [0] * len(self._plan.charges))

    def _final_costs(self, cost: int | Sequence[int]) -> list[int]:
        costs = [charge.cost for charge in self._plan.charges]
        if not self._costed:
            if isinstance(cost, Sequence):
                raise TypeError(f"cost is {cost!r:.80}, expected one integer, because no limit has its own cost")
            return [check_cost(cost)] * len(costs)
        own = list(cost) if isinstance(cost, Sequence) else [check_cost(cost)]
        if len(own) != len(self._costed):
            raise ValueError(
                f"cost is {cost!r:.80}, expected a list of {len(self._costed)}, one for each limit with its own cost"
            )
        for place, final in zip(self._costed, own):
            costs[place] = check_cost(final)
        return costs

    def _correcting(self, done: str, costs: Sequence[int]) -> Flow[None]:
        self._check_is_open(done)
        self._counts = False
        self._bookings.remove(self)
        plan = self._correction(costs)
        if self._hold is not None:
            yield from self._releasing(self._hold, plan, costs)
        elif plan.charges:
            self._note(plan, (yield plan, self._timeout), self._taken)

    def _check_is_open(self, done: str) -> None:
        if not self._counts:
            why = "it was settled or cancelled already" if self.decision.allowed else "it was refused, so nothing was charged"
            raise RuntimeError(f"this reservation cannot be {done}: {why}, expected an allowed one that is still open")

    def _releasing(self, hold: Hold, correction: Plan, costs: Sequence[int]) -> Flow[None]:
        plan = hold.releasing(correction)
        reading: Reading = yield plan, self._timeout
        hold.is_over()
        if state_of(reading).found:
            self._note(plan, reading, self._taken)
            return
        # All of it has been given back, so the real cost is owed.
        receipts = zip(self._taken, self._places)
        plans = [owed(each.reading, [costs[place] for place in places]) for each, places in receipts]
        plan = Plan.adjust([charge for each in plans for charge in each.charges])
        if plan.charges:
            yield plan, self._timeout

    def registering(self) -> Flow[None]:
        """Begin the hold. After a `StoreError`, call `undoing`."""
        if self._hold is None:
            return
        made = [(each.plan, each.reading) for each in self._taken]
        now = self._read_us + round((waiting.monotonic() - self._read_at) * SECOND)
        reading: Reading = yield self._hold.registering(made, now), self._timeout
        self._hold.kept_at = state_of(reading).kept_at
        if not state_of(reading).found:
            self._hold = None
            why = "its registration took too long"
            if is_full(state_of(reading), self._plan.charges):
                why = f"{state_of(reading).held:,} reservations of these limits are held already"
            raise NotHeldError(f"this reservation cannot be held, because {why}", "overload")
        self._hold.begins()

    def undoing(self) -> Flow[None]:
        """Refund a charge whose hold may not have begun."""
        self._counts = False
        self._bookings.remove(self)
        correction = self._correction([0] * len(self._plan.charges))
        plan = correction if self._hold is None else self._hold.undoing(correction)
        try:
            reading = yield plan, self._timeout
        except StoreError:
            # The hold ends if it has begun. Otherwise the charge drains over time.
            return
        if self._hold is not None:
            self._hold.is_over()
        if self._hold is None or state_of(reading).found:
            self._note(plan, reading, self._taken)

    def renewing(self) -> Flow[bool]:
        """Begin the hold again. Return False if it has ended. Raises `RuntimeError` without a hold."""
        if self._hold is None:
            raise RuntimeError("this reservation cannot be renewed: it has no hold, expected reserve(..., hold='2m')")
        self._check_is_open("renewed")
        reading: Reading = yield self._hold.renewing(), self._timeout
        if state_of(reading).found:
            self._hold.begins()
        else:
            self._hold.is_over()
        return state_of(reading).found

    def _correction(self, costs: Sequence[int]) -> Plan:
        receipts = zip(self._taken, self._places)
        plans = [refund(each.plan, each.reading, [costs[place] for place in places]) for each, places in receipts]
        return Plan.adjust([charge for plan in plans for charge in plan.charges])

    def _note(self, correction: Plan, reading: Reading, receipts: Iterable[Receipt]) -> None:
        charges = [(each.reading.now, bucket) for each in receipts for bucket in each.reading.buckets]
        self._bookings.note(returned(correction, reading, charges), reading.now)

    def turn(self) -> tuple[tuple[Receipt, ...], Turn | None]:
        """Return the charges, and the booked turn, if any."""
        if not self.decision.delay:
            return self._taken, None
        return book(self._taken, self._taken[0].reading.now, self.decision.delay)

    def waits(self, waiter: TurnWaiter | Sleeper) -> None:
        """Note the waiter, until `turn_came`."""
        self._waiter = waiter

    def turn_came(self, charged: tuple[Receipt, ...], turn: Turn) -> None:
        """Note that the turn has come, which may have moved up."""
        (receipt,) = self._taken
        places: tuple[list[int], list[int]] = ([], [])
        for place, bucket in enumerate(receipt.reading.buckets):
            places[is_booked(bucket.charge, bucket.before)].append(place)
        self._places = [each for each in places if each]
        self._taken = (*charged, *turn.charged)
        self._waiter = None
        if self._missed:
            self.lower(self._missed)

    def lower(self, returned: Sequence[Returned]) -> None:
        if self._waiter is None:
            self._taken = tuple([lowered(each, returned) for each in self._taken])
        elif self._waiter.done():
            self._missed += returned

    def watch(self) -> None:
        if self._counts:
            if self._waiter is None:
                self._taken = self._bookings.caught_up(self._taken)
            self._bookings.add(self)

    def giving_back(self, taken: Sequence[Receipt], given_up: Turn | None = None, as_booked: Turn | None = None) -> Flow[None]:
        """Refund everything. A turn is refunded as if it were the last one; ``as_booked`` is the turn as booked."""
        self._counts = False
        self._bookings.remove(self)
        undone = [full_refund(each.plan, each.reading) for each in (*taken, *(given_up.charged if given_up else ()))]
        plan = Plan.adjust([charge for plan in undone for charge in plan.charges])
        try:
            reading = yield plan, self._timeout
        except StoreError:
            # Without a refund the charge drains over time.
            return
        self._note(plan, reading, (*taken, *(as_booked.charged if as_booked else ())))


class AsyncReservation:
    """Charge of `AsyncLimiter.reserve`. It stays unless you settle or cancel it, or its ``hold`` ends.

    ``async with await limiter.reserve(...) as reservation:`` cancels it if the block raises before `settle`. Otherwise the end
    of the block changes nothing.
    """

    def __init__(self, booked: ChargedOperation, store: AsyncStore) -> None:
        self._booked = booked
        self._store = store

    @property
    def decision(self) -> Decision:
        """Decision, as of `AsyncLimiter.hit`. A refusal charges nothing."""
        return self._booked.decision

    async def settle(self, cost: int | Sequence[int]) -> None:
        """Replace the estimate by the real cost: refund an excess, or charge a shortfall now.

        If limits have their own cost, ``cost`` is a list of these. If its hold has ended, a second store call charges the real
        cost, even if it doesn't fit. Raises `RuntimeError` if nothing was charged, or the charge was already corrected. After a
        `StoreError`, the estimate stays, at most until its hold ends.
        """
        await arun(self._store, self._booked.settling(cost))

    async def cancel(self) -> None:
        """Refund everything. Raises the errors of `settle`."""
        await arun(self._store, self._booked.cancelling())

    async def renew(self) -> bool:
        """See `Reservation.renew`."""
        return await arun(self._store, self._booked.renewing())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A closed coroutine or generator cannot wait for the store.
        if error is None or isinstance(error, GeneratorExit) or not self._booked.is_open:
            return
        try:
            asyncio.get_running_loop()
        # Under trio there is only a memory store, which never waits.
        except RuntimeError:
            await self._undo()
        else:
            await asyncio.shield(self._undo())

    async def _undo(self) -> None:
        with suppress(StoreError):
            await self.cancel()

    if not TYPE_CHECKING:  # Type checkers reject the wrong context manager anyway.
        __enter__ = __exit__ = wrong_way("an AsyncReservation was used in a with block, expected async with")


class Reservation:
    """Charge of `Limiter.reserve`. It stays unless you settle or cancel it, or its ``hold`` ends.

    ``with limiter.reserve(...) as reservation:`` cancels it if the block raises before `settle`. Otherwise the end of the block
    changes nothing.
    """

    def __init__(self, booked: ChargedOperation, store: SyncStore) -> None:
        self._booked = booked
        self._store = store

    @property
    def decision(self) -> Decision:
        """Decision, as of `Limiter.hit`. A refusal charges nothing."""
        return self._booked.decision

    def settle(self, cost: int | Sequence[int]) -> None:
        """Replace the estimate by the real ``cost``, as `AsyncReservation.settle` does, with the same errors."""
        run(self._store, self._booked.settling(cost))

    def cancel(self) -> None:
        """Refund everything. Raises the errors of `settle`."""
        run(self._store, self._booked.cancelling())

    def renew(self) -> bool:
        """Begin the hold again, now.

        Return False if it had ended. Raises `RuntimeError` without a hold, and the errors of `settle`.
        """
        return run(self._store, self._booked.renewing())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The garbage collector may close a generator anywhere, so don't call the store then.
        if error is None or isinstance(error, GeneratorExit) or not self._booked.is_open:
            return
        with suppress(StoreError):
            self.cancel()

    if not TYPE_CHECKING:  # Type checkers reject the wrong context manager anyway.
        __aenter__ = __aexit__ = wrong_way("a Reservation was used in an async with block, expected with")
