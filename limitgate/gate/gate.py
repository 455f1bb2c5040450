"""The gate: decides about a request when it comes, while it is under way, and when it is over. Pure but for asking the store.

All doors go through here. They differ in whether asking is awaited, so most of what has to be done is written as steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import Any, NamedTuple

from limitgate.diagnostics import Diagnosis
from limitgate.errors import StoreError
from limitgate.gate.admission import Taken, Turn, Visit, Wrong
from limitgate.gate.fallback import Fallback
from limitgate.gate.flow import Budget, Steps, T, atake, measures_silence, take
from limitgate.gate.planner import Asked, Considered, Planner
from limitgate.gate.slot_keeper import Holding
from limitgate.gate.wait_queue import Lines, booked, sleep_until
from limitgate.http.request import Request
from limitgate.http.response import Refusal, rate_fields, refusal, unavailable
from limitgate.limits.decision import Decision, decide, joined, undecided
from limitgate.limits.plan import Charge, Plan, Reading
from limitgate.limits.refund import correction
from limitgate.rules.callers import Caller
from limitgate.rules.decorators import EVERYTHING
from limitgate.rules.rule import OnError
from limitgate.stores import AsyncRedisStore

log = logging.getLogger("limitgate")

CALM = 0.5
"""Seconds without a failure after which the store is said to answer again: one that is full answers every other request."""
AGAIN = 60.0
"""Seconds after which it is said again that this process is overloaded."""

Identify = Callable[[Request], Caller | Awaitable[Caller | None] | None]


class Ruling(NamedTuple):
    """What was decided about some rules."""

    decision: Decision
    now: int | None
    """The clock that it goes by, Unix µs; None if nobody was asked."""
    taken: tuple[Taken, ...]

    @property
    def refusal(self) -> Refusal | None:
        """The response to send instead of the application's; None if the request may pass."""
        if self.decision.allowed:
            return None
        return unavailable() if self.now is None else refusal(self.decision)


class Gate:
    """Decides about requests, by the plans of a planner and what a store says to them.

    ``client_of`` finds a request's client behind proxies, ``styles`` are the header styles, ``on_error`` is for rules that
    have none of their own, ``processes`` is how many serve together, and ``timeout`` is in seconds.
    ``compare_clocks`` is told the ``now`` of the first reading.
    """

    def __init__(
        self,
        planner: Planner,
        store: Any,
        client_of: Callable[[Request], str | None],
        *,
        timeout: float,
        on_error: OnError,
        processes: int,
        styles: tuple[str, ...],
        identify: Identify | None = None,
        compare_clocks: Callable[[int], None] | None = None,
    ) -> None:
        self.store = store
        self.failures = 0
        """How often the store did not answer."""
        self.overloaded = 0
        """How often this process had no room to ask the store, and limited by itself."""
        self.uncorrected = 0
        """How often a charge that should have been corrected stayed as it was, as the store did not answer."""
        self._planner = planner
        self._client_of = client_of
        self._timeout = timeout
        self._is_measured = measures_silence(store)
        self._styles = styles
        self._identify = identify
        self._compare_clocks = compare_clocks
        self._fallback = Fallback(on_error, processes)
        self._holding = Holding(store, timeout)
        self._failing, self._failed = False, 0.0
        self._said_overloaded = -AGAIN
        self._under_way: set[asyncio.Future[Any]] = set()
        self._lines = Lines()

    @property
    def overflowed(self) -> int:
        """How many times a request shared its source's overflow bucket, as the source had opened too many others."""
        return self._planner.newcomers.overflowed if self._planner.newcomers else 0

    def check(self, request: Request) -> Visit:
        """What becomes of a request, by a `SyncStore`, once its turn has come."""
        identified = self._identified(request)
        if identified is not None and isawaitable(identified):
            getattr(identified, "close", bool)()  # else the coroutine would warn, too, that nobody awaited it
            raise TypeError("identify is async, expected a plain function under WSGI")
        visit, considered = self._visit(request, identified)
        if considered.plan is not None:
            began = time.monotonic()
            try:
                reading: Reading = self.store.spend(considered.plan, self._timeout)
            except StoreError as error:
                visit.budget.spend(error, began)
                visit.turn = self._follow(visit, take(self.store, self._without_store(considered, error), visit.budget))
                self._give_back_if_refused(visit)
            except BaseException:
                self._doubt(considered.plan)
                raise
            else:
                visit.budget.spend(reading, began)
                self._admit(visit, considered, considered.plan, reading)
            if visit.turn is not None:
                self._turn(visit, visit.turn)
        return visit

    async def acheck(self, request: Request) -> Visit:
        """What becomes of a request, by an `AsyncStore`; ``identify`` may be async. Its turn is for `aturn`."""
        identified = self._identified(request)
        if identified is not None and isawaitable(identified):
            identified = await identified
        visit, considered = self._visit(request, identified)
        if considered.plan is not None:
            began = time.monotonic()
            try:
                reading: Reading = await self.store.aspend(considered.plan, self._timeout)
            except StoreError as error:
                visit.budget.spend(error, began)
                steps = self._without_store(considered, error)
                visit.turn = self._follow(visit, await atake(self.store, steps, visit.budget))
                await self._agive_back_if_refused(visit)
            except BaseException:
                self._doubt(considered.plan)
                raise
            else:
                visit.budget.spend(reading, began)
                self._admit(visit, considered, considered.plan, reading)
        return visit

    async def aturn(self, visit: Visit) -> bool:
        """Wait until the turn of a request comes. False if the client left before: then it is refused, and gives all back."""
        return visit.turn is None or await self._aturn(visit, visit.turn)

    def further(self, visit: Visit, asked: Sequence[Asked]) -> Decision | None:
        """Weigh further rules while a request is under way; if one refuses, all that was taken for it is given back.

        The decision about the request as a whole, once its turn has come; None if no rule applies.
        """
        turn = take(self.store, self._going_further(visit, asked), visit.budget)
        if turn is not None:
            self._turn(visit, turn)
        self._give_back_if_refused(visit)
        return visit.decision

    async def afurther(self, visit: Visit, asked: Sequence[Asked]) -> Decision | None:
        """`further`, by an `AsyncStore`."""
        budget = Budget(visit.budget.left, measured=self._is_measured)
        turn = await atake(self.store, self._going_further(visit, asked), budget)
        visit.budget.left = min(visit.budget.left, budget.left)  # others may have been asked at the same time
        if turn is not None:
            await self._aturn(visit, turn)
        await self._agive_back_if_refused(visit)
        return visit.decision

    def message(self, messages: Considered) -> asyncio.Future[Refusal | None]:
        """Charge a message over a WebSocket, by an `AsyncStore`, even if nobody waits for it; a refusal if it must not pass."""
        return self._soon(self._hearing(messages), Budget(self._timeout, measured=self._is_measured))

    def settle(self, visit: Visit) -> None:
        """Correct what was charged for a request by its outcome and by what it turned out to cost, as far as that is known."""
        take(self.store, self._correcting(visit.wrong()), visit.budget)

    async def asettle(self, visit: Visit) -> None:
        """`settle`, by an `AsyncStore`; to the end, even if the request is cancelled meanwhile or cannot wait any longer."""
        wrong = visit.wrong()
        if wrong:
            await asyncio.wait([self._soon(self._correcting(wrong))], timeout=max(0.0, visit.budget.left))

    def settle_soon(self, visit: Visit) -> asyncio.Future[None]:
        """`settle`, by an `AsyncStore`, on the running event loop; done when the result is."""
        return self._soon(self._correcting(visit.wrong()))

    async def aconnect(self) -> None:
        """Have the store connect in the background, if it is one that does."""
        if isinstance(self.store, AsyncRedisStore):
            await self.store.connect()

    async def asettled(self) -> None:
        """Wait until everything in this event loop has been settled that nobody waits for any more."""
        here = asyncio.get_running_loop()
        if under_way := [each for each in list(self._under_way) if each.get_loop() is here]:
            await asyncio.wait(under_way)

    def _turn(self, visit: Visit, turn: Turn) -> None:
        """Wait for a turn in this thread. It is given back if the thread is interrupted, by a signal's handler or by gevent."""
        visit.turn = None
        try:
            sleep_until(turn)
        except BaseException:
            visit.had_turn(turn, stays=False)
            self.settle(visit)
            raise
        visit.had_turn(turn, stays=True)

    async def _aturn(self, visit: Visit, turn: Turn) -> bool:
        """Wait for a turn, on the event loop; whether it has come. If not the request is undone, also where it is cancelled."""
        visit.turn = None
        place = self._lines.join(turn)
        try:
            stays: bool = await visit.listener.stays_until(place) if visit.listener else bool(await place)
        except BaseException as error:
            visit.had_turn(self._lines.leave(turn, place), stays=False)
            if isinstance(error, GeneratorExit):  # the event loop is gone, and nothing can be awaited any more
                visit.abandon()
            else:
                await self.asettle(visit)
            raise
        visit.had_turn(self._lines.leave(turn, place), stays=stays)
        return stays

    def _soon(self, steps: Steps[T], budget: Budget | None = None) -> asyncio.Future[T]:
        """What comes of some steps, on the running event loop; taken to their end, whoever waits for them."""
        taking = asyncio.ensure_future(atake(self.store, steps, budget))
        self._under_way.add(taking)
        taking.add_done_callback(self._under_way.discard)
        return taking

    def _identified(self, request: Request) -> Caller | Awaitable[Caller | None] | None:
        request.resolve_client_with(self._client_of)
        return self._identify(request) if self._identify else None

    def _visit(self, request: Request, identified: Caller | None) -> tuple[Visit, Considered]:
        considered = self._planner.plan(request, identified)
        visit = Visit(self, request, identified, considered.seen, Budget(self._timeout, measured=self._is_measured))
        if considered.messages is not None:
            visit.messages = considered.messages
        return visit, considered

    def _admit(self, visit: Visit, considered: Considered, plan: Plan, reading: Reading) -> None:
        """What becomes of a request that comes, by what the store said: the short way, which almost all of them go."""
        self._note_answer(reading)
        visit.decision = decision = decide(plan, reading, visit.settlement)
        visit.fields = rate_fields(self._styles, decision, reading.now)
        if decision.allowed:
            visit.taken = (Taken(considered, plan, reading),)
            visit.is_by_outcome = considered.is_by_outcome
            if considered.has_slots:
                self._hold(visit, visit.taken)
            if decision.delay:
                visit.taken, visit.turn = booked(visit.taken, reading.now, decision.delay)
        else:
            visit.refusal = refusal(decision)

    def _going_further(self, visit: Visit, asked: Sequence[Asked]) -> Steps[Turn | None]:
        if visit.seen is EVERYTHING or visit.refusal is not None:
            return None  # this request is exempt, or somebody has refused it already
        if visit.settlement.is_over:
            raise RuntimeError("further limits were asked for when the request was over, expected it before")
        considered = self._planner.further(visit.request, visit.identified, asked)
        if considered.plan is not None:
            return self._follow(visit, (yield from self._weighing(considered, considered.plan)))
        return None

    def _hearing(self, messages: Considered) -> Steps[Refusal | None]:
        if messages.plan is None:
            return None
        ruling = yield from self._weighing(messages, messages.plan)
        if ruling.refusal is not None:
            yield from self._correcting([Wrong(taken, [0] * len(taken.plan.charges)) for taken in ruling.taken])
        return ruling.refusal

    def _weighing(self, considered: Considered, plan: Plan) -> Steps[Ruling]:
        """Ask the store, and if it fails decide without it."""
        try:
            reading = yield plan, self._timeout
        except StoreError as error:
            return (yield from self._without_store(considered, error))
        except GeneratorExit:  # the request was cancelled
            self._doubt(plan)
            raise
        self._note_answer(reading)
        return Ruling(decide(plan, reading), reading.now, (Taken(considered, plan, reading),) if reading.admitted else ())

    def _without_store(self, considered: Considered, error: StoreError) -> Steps[Ruling]:
        """Decide without the store, or without a part of it."""
        self._note_failure(error)
        self._doubt(considered.plan, error.keys)
        resort = self._fallback.without(considered, error)
        if resort.rest is not None:
            try:
                reading = yield resort.rest, self._timeout
                resort = self._fallback.with_rest(considered, resort, reading)
            except GeneratorExit:  # the request was cancelled
                self._doubt(considered.plan)
                raise
            except StoreError as further:
                self._doubt(resort.rest, further.keys)
                resort = self._fallback.without(considered, further, wholly=True)
        return Ruling(resort.decision or undecided(allowed=False), resort.now, resort.taken)

    def _follow(self, visit: Visit, ruling: Ruling) -> Turn | None:
        """Let a ruling have its effect on a visit, and what it has to wait for then.

        A refusal stands: what is taken for the request then goes back.
        """
        decision, taken, turn = ruling.decision, ruling.taken, None
        if any(each.considered.has_slots for each in taken):
            self._hold(visit, taken)
        if decision.delay and ruling.now is not None and visit.refusal is None:
            taken, turn = booked(taken, ruling.now, decision.delay)
        visit.taken += taken
        visit.is_by_outcome |= any(taken.considered.is_by_outcome for taken in ruling.taken)
        if visit.refusal is not None:  # by a limit that was asked at the same time
            return None
        if not decision.allowed:
            visit.refusal = ruling.refusal
        elif visit.decision is not None:
            decision = joined(visit.decision, decision)
        visit.decision = decision._replace(settlement=visit.settlement)
        if ruling.now is not None:
            visit.fields = rate_fields(self._styles, decision, ruling.now)
        elif not decision.allowed:
            visit.fields = []
        return turn

    def _give_back_if_refused(self, visit: Visit) -> None:
        if visit.has_to_give_back:
            self.settle(visit)

    async def _agive_back_if_refused(self, visit: Visit) -> None:
        if visit.has_to_give_back:
            await self.asettle(visit)

    def _correcting(self, wrong: Sequence[Wrong]) -> Steps[None]:
        """See to it that everything was charged as it should have been. Where the store fails, it stays as it is."""
        charges: list[Charge] = []
        slots: list[Charge] = []
        for taken, costs in wrong:
            plan = correction(taken.plan, taken.reading, costs)
            if taken.considered.has_slots:
                over = [charge for charge, cost in zip(taken.plan.charges, costs) if not cost]
                self._holding_of(taken).let_go(over)
                slots += [] if taken.here else over
            if taken.here:
                self._fallback.correct(plan)
            else:
                charges += plan.charges
        if charges:
            try:
                yield Plan(tuple(charges), "peek"), self._timeout
            except StoreError as error:
                self.uncorrected += 1
                self._note_failure(error)
                self._holding.doubt(slots)
            except GeneratorExit:  # whoever gave back was interrupted
                self._holding.doubt(slots)
                raise

    def _hold(self, visit: Visit, taken: Sequence[Taken]) -> None:
        """Keep the slots that were taken for a request, until they are given back."""
        visit.has_slots = True
        for each in taken:
            read = zip(each.plan.charges, each.reading.after)
            self._holding_of(each).hold([charge for charge, then in read if then is not None], visit)

    def _holding_of(self, taken: Taken) -> Holding:
        return self._fallback.holding if taken.here else self._holding

    def _doubt(self, plan: Plan | None, keys: frozenset[str] = frozenset()) -> None:
        """What nobody has heard of may have been done all the same; in these buckets, or in all."""
        charges = plan.charges if plan else ()
        self._holding.doubt([charge for charge in charges if not keys or charge.key in keys])

    def _note_answer(self, reading: Reading) -> None:
        if self._failing and getattr(self.store, "healthy", True) and time.monotonic() - self._failed > CALM:
            self._failing = False
            log.warning("the store answers again")
        compare = self._compare_clocks
        if compare is not None:
            self._compare_clocks = None
            compare(reading.now)

    def _note_failure(self, error: StoreError) -> None:
        if error.fault == "overload":
            self._note_overload(error)
            return
        self.failures += 1
        self._failed = time.monotonic()
        if not self._failing:
            self._failing = True
            log.warning("the store failed, on_error decides until it answers again: %s", error)

    def _note_overload(self, error: StoreError) -> None:
        self.overloaded += 1
        if time.monotonic() - self._said_overloaded > AGAIN:
            self._said_overloaded = time.monotonic()
            Diagnosis.OVERLOADED.log(error)
