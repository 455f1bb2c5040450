"""The gate: a request goes in, an answer comes out. Pure but for asking the store.

Both doors go through here. They differ in one thing, whether asking is awaited: `Gate.check` and `Gate.acheck`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Container
from inspect import isawaitable
from typing import Any, NamedTuple

from limitgate.callers import Caller
from limitgate.decision import Decision, decide, undecided
from limitgate.decorators import EVERYTHING, Mark
from limitgate.errors import StoreError
from limitgate.fallback import Fallback, Resort
from limitgate.headers import Fields, Refusal, rate_fields, refusal, unavailable
from limitgate.plan import Plan, Reading
from limitgate.planner import Considered, Planner
from limitgate.request import Request
from limitgate.rules import OnError

log = logging.getLogger("limitgate")

CALM = 0.5
"""Seconds without a failure after which the store is said to answer again: one that is full answers every other request."""

Identify = Callable[[Request], Caller | Awaitable[Caller | None] | None]


class Answer(NamedTuple):
    """What a door does with a request."""

    decision: Decision | None
    """None where no rule applies."""
    fields: Fields
    """Rate fields for whatever response is sent."""
    refusal: Refusal | None
    """The response to send instead of the application's; None to let the request pass."""
    seen: Container[Mark]
    """The decorators that were taken into account."""


OFF = Answer(None, [], None, EVERYTHING)
"""The answer of a gate that is switched off."""


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
        self._planner = planner
        self._client_of = client_of
        self._timeout = timeout
        self._styles = styles
        self._identify = identify
        self._compare_clocks = compare_clocks
        self._fallback = Fallback(on_error, processes)
        self._failing, self._failed = False, 0.0

    @property
    def overflowed(self) -> int:
        """How many times a request shared its source's overflow bucket, as the source had opened too many others."""
        return self._planner.newcomers.overflowed if self._planner.newcomers else 0

    def check(self, request: Request) -> Answer:
        """The answer to a request, by a `SyncStore`."""
        identified = self._identified(request)
        if identified is not None and isawaitable(identified):
            getattr(identified, "close", bool)()  # else the coroutine would warn, too, that nobody awaited it
            raise TypeError("identify is async, expected a plain function under WSGI")
        considered = self._planner.plan(request, identified)
        if considered.plan is None:
            return Answer(None, [], None, considered.seen)
        began = time.monotonic()
        try:
            reading: Reading = self.store.spend(considered.plan, self._timeout)
        except StoreError as error:
            resort = self._without_store(considered, error)
        else:
            return self._decided(considered, considered.plan, reading)
        if resort.rest is not None:
            try:
                resort = self._fallback.with_rest(resort, self.store.spend(resort.rest, self._left_since(began)))
            except StoreError as error:
                resort = self._fallback.without(considered, error, wholly=True)
        return self._degraded(considered, resort)

    async def acheck(self, request: Request) -> Answer:
        """The answer to a request, by an `AsyncStore`; ``identify`` may be async."""
        identified = self._identified(request)
        if identified is not None and isawaitable(identified):
            identified = await identified
        considered = self._planner.plan(request, identified)
        if considered.plan is None:
            return Answer(None, [], None, considered.seen)
        began = time.monotonic()
        try:
            reading: Reading = await self.store.aspend(considered.plan, self._timeout)
        except StoreError as error:
            resort = self._without_store(considered, error)
        else:
            return self._decided(considered, considered.plan, reading)
        if resort.rest is not None:
            try:
                resort = self._fallback.with_rest(resort, await self.store.aspend(resort.rest, self._left_since(began)))
            except StoreError as error:
                resort = self._fallback.without(considered, error, wholly=True)
        return self._degraded(considered, resort)

    def _identified(self, request: Request) -> Caller | Awaitable[Caller | None] | None:
        request.resolve_client_with(self._client_of)
        return self._identify(request) if self._identify else None

    def _decided(self, considered: Considered, plan: Plan, reading: Reading) -> Answer:
        if self._failing and getattr(self.store, "healthy", True) and time.monotonic() - self._failed > CALM:
            self._failing = False
            log.warning("the store answers again")
        compare = self._compare_clocks
        if compare is not None:
            self._compare_clocks = None
            compare(reading.now)
        return self._answer(considered, decide(plan, reading), reading.now)

    def _answer(self, considered: Considered, decision: Decision, now: int) -> Answer:
        fields = rate_fields(self._styles, decision, now)
        return Answer(decision, fields, None if decision.allowed else refusal(decision), considered.seen)

    def _without_store(self, considered: Considered, error: StoreError) -> Resort:
        self.failures += 1
        self._failed = time.monotonic()
        if not self._failing:
            self._failing = True
            log.warning("the store failed, on_error decides until it answers again: %s", error)
        return self._fallback.without(considered, error)

    def _left_since(self, began: float) -> float:
        """Seconds that a request may still wait which asked first at a time. Raises `StoreError` if there are none."""
        left = self._timeout - (time.monotonic() - began)
        if left <= 0:
            raise StoreError("no time was left to ask about the others", "timeout")
        return left

    def _degraded(self, considered: Considered, resort: Resort) -> Answer:
        decision = resort.decision or undecided(allowed=False)
        if resort.now is not None:
            return self._answer(considered, decision, resort.now)
        return Answer(decision, [], None if decision.allowed else unavailable(), considered.seen)
