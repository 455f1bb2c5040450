"""The gate: decides about a request when it comes, while it is under way, and when it is over. Asks the store, and no one else.

All middleware goes through here. Some awaits the store and some does not, so most of the logic is written as flows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from typing import Any

from limitgate.errors import HeadersTooLargeError, StoreError
from limitgate.gate import nesting
from limitgate.gate.admission import Admission, Booking, Charged, PlaceWait, Refund, Verdict, outcome_of
from limitgate.gate.fallback import Fallback
from limitgate.gate.flow import Budget, Flow, answers_at_once, arun, run, takes_plain
from limitgate.gate.load import InFlight, ProxyGuard, end_undecided
from limitgate.gate.plain_admission import AnyAdmission, PlainAdmission, Shed, Unasked, whole_admission
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.given_limits import PendingPlan
from limitgate.gate.planning.planner import Applying, ExtraRule
from limitgate.gate.planning.request_plan import UNLIMITED, AdaptiveMatch, PreparedPlan, RequestPlan
from limitgate.gate.planning.rules_in_force import Loads, RulesInForce
from limitgate.gate.refunds import Refunds
from limitgate.gate.refusal_log import RefusalLog
from limitgate.gate.refusals import Refusals
from limitgate.gate.store_health import StoreHealth
from limitgate.gate.turns import Stay, Turns
from limitgate.gate.upload_in_flight import watched
from limitgate.gate.wait_queue import book
from limitgate.http.request import Request, UserWanted
from limitgate.http.request_start import HEADER as REQUEST_START
from limitgate.http.response import Refusal, forbidden, headers_too_large, unavailable
from limitgate.limits.decision import (
    Decision,
    Settlement,
    Window,
    admitted_in_flight,
    decide,
    deferred,
    deferred_under_places,
    denied,
    joined,
    under_places,
)
from limitgate.limits.plan import Plan, Reading
from limitgate.limits.template import AnyReading, PlainSpend, whole_reading
from limitgate.observing.counts import REFUSED, SHADOW_REFUSED, count_decision
from limitgate.observing.exporter import exporter
from limitgate.overload.adaptive_limit import Guard
from limitgate.overload.heartbeat import heartbeats
from limitgate.overload.places import WaitingTask, WaitingThread
from limitgate.process.looker import Looker
from limitgate.rules.callers import Caller
from limitgate.rules.decorators import EVERYTHING
from limitgate.rules.options import OnError
from limitgate.stores import is_async_redis, is_redis

Identify = Callable[[Request], Caller | Awaitable[Caller | None] | None]


class Gate:
    """Decides about requests, by the plans of the rules in force and the readings of a store.

    ``client_of`` finds a request's client behind proxies, ``on_error`` is for rules that have none of their own, and
    ``processes`` is how many serve together. ``refusals`` makes the answers to requests that buckets refuse,
    ``at_first_answer`` is told the ``now`` of the first reading, ``refusal_log`` who is refused.
    """

    def __init__(
        self,
        rules: RulesInForce,
        store: Any,
        client_of: Callable[[Request], str | None],
        *,
        on_error: OnError,
        processes: int,
        refusals: Refusals,
        identify: Identify | None = None,
        at_first_answer: Callable[[int], None] | None = None,
        refusal_log: RefusalLog | None = None,
    ) -> None:
        self.store = store
        self.rules = rules
        """The rules that requests begin with. Each takes them once, so that others may come to stand here at any time."""
        self.loads = Loads()
        """Loads of rule sets, counted."""
        self.at_other_rules: list[Callable[[], None]] = []
        """Called, in any thread, after other rules have come into force."""
        self.looker: Looker | None = None
        """Looks for other rules; None where nobody does."""
        self._client_of = client_of
        self._timeout = rules.timeout
        self._is_measured = rules.is_measured
        self._can_prepare = takes_plain(store)
        self._answers_at_once = answers_at_once(store)
        self.identify = identify
        self._refusal_log = refusal_log
        self.refusals = refusals
        self._fallback = Fallback(store, on_error, processes)
        self.store_health = StoreHealth(
            store,
            None if at_first_answer is None else partial(self._note_first_answer, at_first_answer),
            refusals.agree_soon,
        )
        self.refunds = Refunds(store, self._fallback, self.store_health, rules.timeout)
        self.turns = Turns(self.refunds, refusal_log)
        if rules.counts is not None:
            rules.counts.look_at(self.refunds.slot_keeper, self._fallback.slot_keeper)
        self._proxy_guard = ProxyGuard()

    @property
    def failures(self) -> int:
        """Number of times the store did not answer."""
        return self.store_health.failures

    @property
    def overloaded(self) -> int:
        """Number of times this process had no room to ask the store, and limited by itself."""
        return self.store_health.overloaded

    @property
    def uncorrected(self) -> int:
        """Number of times a refund was lost, as the store did not answer."""
        return self.refunds.uncorrected

    @property
    def overflowed(self) -> int:
        """Number of times a request shared its source's overflow bucket, as the source had opened too many others."""
        cardinality = self.rules.planner.cardinality
        return cardinality.overflowed if cardinality else 0

    def enforce(self, rules: RulesInForce) -> None:
        """Have requests that begin from now on go by other rules. What was taken in advance is given back at once."""
        rules.planner.keep_adaptive_limits()  # first, so that nobody waits under a rule that is a shadow from now on
        self.rules = rules
        if is_redis(self.store) or is_async_redis(self.store):
            self.store.give_back_leases()
        for tell in self.at_other_rules:
            tell()

    def address(self, request: Request) -> str | None:
        """Address or network that a request's client is counted by; None without a peer address."""
        request.resolve_client = self._client_of
        return self.rules.planner.address(request)

    def check(self, request: Request, outer: Admission | None = None) -> Admission:
        """Decide about a request by a `SyncStore`, and wait for its turn. ``outer`` is the admission to the gate around."""
        return whole_admission(self.decide(request, outer))

    def decide(  # noqa: PLR0911 - each call more costs all requests
        self, request: Request, outer: Admission | None = None
    ) -> AnyAdmission:
        """`check`, without more of an admission than is asked for."""
        rules, planner = self.rules, self.rules.planner
        request.resolve_client = self._client_of
        try:
            identified = None if self.identify is None else self._identified(request)
            if not (self._can_prepare and request.comes_straight):
                return self._check_planned(request, rules, outer, identified)
            found = planner.prepared(request, identified, self._begin_here if planner.adapts else None)
        except HeadersTooLargeError as error:
            return _without_headers(request, rules, outer, error)
        if found is None:
            if request.in_flight is not None and request.in_flight.refusal is not None:
                return self._shed(request, rules)
            return self._check_planned(request, rules, outer, identified)
        prepared, keys = found
        template = prepared.template
        if template is None:
            return self._decide_bound(request, rules, prepared, keys)
        admitted = PlainAdmission()
        admitted.request = request
        admitted.rules = rules
        admitted.prepared = prepared
        admitted.keys = keys
        try:
            reading: AnyReading = self.store.spend_plain(template, keys, self._timeout)
        except StoreError as error:
            return self._go_on(admitted, error)
        return self.answered(admitted, reading) or self._go_on(admitted, reading)

    def _check_planned(
        self, request: Request, rules: RulesInForce, outer: Admission | None, identified: Caller | None
    ) -> AnyAdmission:
        """`check` a request whose plan may be of any kind."""
        try:
            request.check_lines()
            applying = rules.planner.applying(request, identified)
            if applying is not None and not self._has_places(request, applying, outer):
                return self._shed_within(request, rules, outer)
            request_plan = UNLIMITED if applying is None else _made_at_once(rules.planner.plan_of(applying))
        except HeadersTooLargeError as error:
            return _without_headers(request, rules, outer, error)
        admission = _admission(request, identified, rules, request_plan, outer)
        self._spend(admission, request_plan)
        if request_plan.denying is not None:
            _deny(admission, request_plan.denying)
        if isinstance(admission.booking, Booking):
            self.turns.wait_for(admission, admission.booking)
        return admission

    def _decide_bound(self, request: Request, rules: RulesInForce, prepared: PreparedPlan, keys: Sequence[str]) -> AnyAdmission:
        """`decide` about a request that is charged nothing, or by a plan that is not plain."""
        if not prepared.compiled_rules:
            return _admitted_unasked(request, rules, prepared)
        admission = _admission_prepared(request, rules, prepared)
        self._spend(admission, prepared.bound(keys, request.caller))
        if isinstance(admission.booking, Booking):
            self.turns.wait_for(admission, admission.booking)
        return admission

    async def acheck(self, request: Request, outer: Admission | None = None) -> Admission:
        """Decide about a request by an `AsyncStore`; ``identify`` may be async. Its turn is for `await_booking`."""
        return whole_admission(await self.adecide(request, outer))

    async def adecide(
        self, request: Request, outer: Admission | None = None, known: tuple[RulesInForce, Caller | None] | None = None
    ) -> AnyAdmission:
        """`decide`, by an `AsyncStore`: what `ask` says, once it is known."""
        asked = self.ask(request, outer, known)
        if type(asked) is PlainAdmission and asked.coming is not None:
            try:
                reading = await asked.coming
            except StoreError as error:
                return await self.ago_on(asked, error)
            return self.answered(asked, reading) or await self.ago_on(asked, reading)
        return asked if isinstance(asked, AnyAdmission) else await asked

    def ask(  # noqa: PLR0911 - each call more costs all requests
        self, request: Request, outer: Admission | None = None, known: tuple[RulesInForce, Caller | None] | None = None
    ) -> AnyAdmission | Coroutine[Any, Any, AnyAdmission]:
        """`acheck`, without a coroutine where there is nothing to wait for, or nothing but the store's reading of a plain plan.

        That is ``coming`` then, and the admission goes on as in `adecide`. ``known`` are the rules that the request goes by and
        the caller that ``identify`` found, where it was asked already.

        There is a prepared plan unless there is a gate around, answered or not, and but for WebSockets, for a store that takes
        no plain plans (`limitgate.gate.flow.takes_plain`), and where `Planner.prepared` says so. A plan that is not plain
        is bound to one of any kind. The store may still decline a plain one.
        """
        request.resolve_client = self._client_of
        if known is not None:
            rules, identified = known
        elif self.identify is None:
            rules, identified = self.rules, None
        else:
            return self._ask_identifying(request, outer)
        if not (self._can_prepare and request.comes_straight):
            return self._acheck_planned(request, rules, outer, identified)
        planner = rules.planner
        try:
            found = planner.prepared(request, identified, self._begin if planner.adapts else None)
        except HeadersTooLargeError as error:
            return _without_headers(request, rules, outer, error)
        if found is None:
            if request.in_flight is not None and request.in_flight.refusal is not None:
                return self._shed(request, rules)
            return self._acheck_planned(request, rules, outer, identified)
        prepared, keys = found
        template = prepared.template
        if template is None:
            return self._ask_bound(request, rules, prepared, keys)
        admitted = PlainAdmission()
        admitted.request = request
        admitted.rules = rules
        admitted.prepared = prepared
        admitted.keys = keys
        admitted.coming = None
        if self._answers_at_once:
            reading: AnyReading = self.store.spend_plain(template, keys, self._timeout)
            return self.answered(admitted, reading) or self.ago_on(admitted, reading)
        try:
            admitted.coming = self.store.aspend_plain(template, keys, self._timeout)
        except StoreError as error:
            return self.ago_on(admitted, error)
        return admitted

    def _ask_bound(
        self, request: Request, rules: RulesInForce, prepared: PreparedPlan, keys: Sequence[str]
    ) -> AnyAdmission | Coroutine[Any, Any, AnyAdmission]:
        """`ask` about a request that is charged nothing, or by a plan that is not plain."""
        if not prepared.compiled_rules:
            return _admitted_unasked(request, rules, prepared)
        admission = _admission_prepared(request, rules, prepared)
        return self._aspend_planned(admission, prepared.bound(keys, request.caller))

    def _ask_identifying(self, request: Request, outer: Admission | None) -> AnyAdmission | Coroutine[Any, Any, AnyAdmission]:
        """`ask` about a request whose caller ``identify`` may know."""
        rules = self.rules
        try:
            request.check_lines()
            identified = None if self.identify is None else self.identify(request)
        except HeadersTooLargeError as error:
            return _without_headers(request, rules, outer, error)
        if identified is not None and isawaitable(identified):
            return self._aask(request, outer, rules, identified)
        return self.ask(request, outer, (rules, identified))

    async def _aask(
        self, request: Request, outer: Admission | None, rules: RulesInForce, identified: Awaitable[Caller | None]
    ) -> AnyAdmission:
        """`ask` about a request whose caller is found by then. It goes by the rules of when it came."""
        try:
            caller = await identified
        except HeadersTooLargeError as error:
            return _without_headers(request, rules, outer, error)
        return await self.adecide(request, outer, (rules, caller))

    async def _acheck_planned(
        self, request: Request, rules: RulesInForce, outer: Admission | None, identified: Caller | None
    ) -> AnyAdmission:
        """`acheck` a request whose plan may be of any kind."""
        try:
            request.check_lines()
            applying = rules.planner.applying(request, identified)
            if applying is not None and applying.adaptive is not None:
                if request.in_flight is None:
                    self._begin(request, applying.adaptive, applying.subject.caller, outer)
                if request.in_flight.refusal is not None:
                    return self._shed_within(request, rules, outer)
                if request.in_flight.waits is not None:
                    admission = _admission(request, identified, rules, RequestPlan(None, (), applying.marks), outer)
                    admission.booking = PlaceWait(partial(self._acharge, admission, applying))
                    return admission
            request_plan = UNLIMITED if applying is None else await _aplan_of(rules, applying)
        except HeadersTooLargeError as error:
            return _without_headers(request, rules, outer, error)
        admission = _admission(request, identified, rules, request_plan, outer)
        return await self._aspend_planned(admission, request_plan)

    async def _acharge(self, admission: Admission, applying: Applying) -> None:
        """Charge a request that has waited for its places in flight."""
        try:
            try:
                request_plan = await _aplan_of(admission.rules, applying)
            except UserWanted:
                await admission.request.find_user()
                request_plan = await _aplan_of(admission.rules, applying)
        except HeadersTooLargeError as error:
            _refuse_unread(admission, admission.rules.planner.may_apply(admission.request)[0], error)
            return
        if request_plan.messages is not None:
            admission.messages = request_plan.messages
        await self._aspend_planned(admission, request_plan)

    async def _aspend_planned(self, admission: Admission, request_plan: RequestPlan) -> Admission:
        """Charge a request by a plan of any kind. Returns the admission."""
        await self._aspend(admission, request_plan)
        if request_plan.denying is not None:
            _deny(admission, request_plan.denying)
        return admission

    def _begin(self, request: Request, adaptive: AdaptiveMatch, caller: Caller | None, outer: Admission | None = None) -> bool:
        """Take places in flight for a request on the running event loop. False if it has to wait or did, or is refused."""
        in_flight: InFlight | None = request.in_flight
        if in_flight is not None:  # it was here before, see `limitgate.django.middleware`
            return in_flight.had_room
        guard: Guard | None = None
        if outer is None or outer.in_flight is None:  # else it has been asked about this request
            guard = heartbeats.guard()
            planner = self.rules.planner
            if planner.trusts_proxies and planner.believes(request, REQUEST_START):
                guard = self._proxy_guard.of(request, guard)
        request.in_flight = in_flight = InFlight()  # first, so that its places are given back if anything raises
        return in_flight.begin(request, adaptive, caller, guard, WaitingTask)

    def _shed(self, request: Request, rules: RulesInForce) -> Shed:
        """Refuse a request for which there is no place in flight."""
        in_flight: InFlight = request.in_flight
        if self._refusal_log is not None:
            self._refusal_log.note_shed(in_flight)
        return Shed(request, rules, in_flight.refusal or unavailable())

    def _shed_within(self, request: Request, rules: RulesInForce, outer: Admission | None) -> AnyAdmission:
        """`_shed` a request that may have come by other gates."""
        shed = self._shed(request, rules)
        return shed if request.comes_straight else _nested_in(shed.whole(), outer)

    def _has_places(self, request: Request, applying: Applying, outer: Admission | None) -> bool:
        """Take places in flight for a request in this thread unless it has some. False if it is refused."""
        if applying.adaptive is None:
            return True
        if request.in_flight is None:
            self._begin_here(request, applying.adaptive, applying.subject.caller, outer)
        return request.in_flight.refusal is None

    def _begin_here(
        self, request: Request, adaptive: AdaptiveMatch, caller: Caller | None, outer: Admission | None = None
    ) -> bool:
        """Take places in flight for a request in this thread, and wait for them. False if it has waited, or is refused."""
        guard = None
        is_first, planner = outer is None or outer.in_flight is None, self.rules.planner
        if is_first and planner.trusts_proxies and planner.believes(request, REQUEST_START):
            guard = self._proxy_guard.of(request, None)
        request.in_flight = in_flight = InFlight()
        in_flight.begin(request, adaptive, caller, guard, WaitingThread)
        if in_flight.waits is not None:
            in_flight.wait()
        environ = request.environ
        if environ is not None and "wsgi.input" in environ:
            environ["wsgi.input"] = watched(environ["wsgi.input"], in_flight, environ)
        return in_flight.had_room

    def _go_on(self, asked: PlainAdmission, answer: AnyReading | StoreError) -> Admission:
        """Go on with a request whose prepared plan a `SyncStore` has declined, or failed to carry out."""
        admission, request_plan = _planned(asked, answer.waited)
        if isinstance(answer, StoreError):
            self._go_without_store(admission, request_plan, answer)
        else:
            self._spend(admission, request_plan)
        return admission

    async def ago_on(self, asked: PlainAdmission, answer: AnyReading | StoreError) -> Admission:
        """`_go_on`, by an `AsyncStore`."""
        asked.coming = None  # whose error leads to the request by its traceback: else both wait for the garbage collector
        admission, request_plan = _planned(asked, answer.waited)
        if isinstance(answer, StoreError):
            await self._ago_without_store(admission, request_plan, answer)
        else:
            await self._aspend(admission, request_plan)
        return admission

    def _spend(self, admission: Admission, request_plan: RequestPlan) -> None:
        """Charge a request by a `SyncStore`."""
        plan = request_plan.plan
        if plan is None:
            return
        began = time.monotonic()
        try:
            reading: Reading = self.store.spend(plan, admission.budget.within(self._timeout))
        except StoreError as error:
            admission.budget.deduct(error, began)
            self._go_without_store(admission, request_plan, error)
        except BaseException:
            self.refunds.release_later(plan)
            raise
        else:
            admission.budget.deduct(reading, began)
            self._admit(admission, request_plan, plan, reading)

    async def _aspend(self, admission: Admission, request_plan: RequestPlan) -> None:
        """`_spend`, by an `AsyncStore`."""
        plan = request_plan.plan
        if plan is None:
            return
        began = time.monotonic()
        try:
            reading: Reading = await self.store.aspend(plan, admission.budget.within(self._timeout))
        except StoreError as error:
            admission.budget.deduct(error, began)
            await self._ago_without_store(admission, request_plan, error)
        except BaseException:
            self.refunds.release_later(plan)
            raise
        else:
            admission.budget.deduct(reading, began)
            self._admit(admission, request_plan, plan, reading)

    def _go_without_store(self, admission: Admission, request_plan: RequestPlan, error: StoreError) -> None:
        """Decide about a request for which the store has failed."""
        admission.booking = self._apply(
            admission, request_plan, run(self.store, self._without_store(request_plan, error), admission.budget)
        )
        self.refunds.settle_refused(admission)

    async def _ago_without_store(self, admission: Admission, request_plan: RequestPlan, error: StoreError) -> None:
        """`_go_without_store`, by an `AsyncStore`."""
        verdict = await arun(self.store, self._without_store(request_plan, error), admission.budget)
        admission.booking = self._apply(admission, request_plan, verdict)
        await self.refunds.asettle_refused(admission)

    def further(self, admission: Admission, extra_rules: Sequence[ExtraRule]) -> Decision | None:
        """Decide about further rules while a request is under way; if one refuses, all charges of the request are refunded.

        Returns the decision about the request as a whole, once its turn has come; None if no rule applies.
        """
        booking = None
        try:
            request_plan = self._plan_further(admission, extra_rules)
            if request_plan is not None:
                request_plan = _made_at_once(request_plan)
        except HeadersTooLargeError as error:
            request_plan = None
            _refuse_unread(admission, admission.rules.planner.compiled(admission.request, extra_rules), error)
        if request_plan is not None:
            booking = run(self.store, self._decide_further(admission, request_plan), admission.budget)
        if booking is not None:
            self.turns.wait_for_further(admission, booking)
        self.refunds.settle_refused(admission)
        return nesting.overall_decision(admission)

    async def afurther(self, admission: Admission, extra_rules: Sequence[ExtraRule], stay: Stay) -> Decision | None:
        """`further`, by an `AsyncStore`."""
        try:
            request_plan = self._plan_further(admission, extra_rules)
            if isinstance(request_plan, PendingPlan):
                request_plan = await request_plan.complete()
        except HeadersTooLargeError as error:
            request_plan = None
            _refuse_unread(admission, admission.rules.planner.compiled(admission.request, extra_rules), error)
        budget = Budget(admission.budget.left, measured=self._is_measured)
        booking = None
        if request_plan is not None:
            booking = await arun(self.store, self._decide_further(admission, request_plan), budget)
        admission.budget.left = min(admission.budget.left, budget.left)  # others may have been asked at the same time
        if booking is not None:
            await self.turns.await_further(admission, booking, stay)
        await self.refunds.asettle_refused(admission)
        return nesting.overall_decision(admission)

    def usage(self, admission: Admission, names: Sequence[str], path: str | None) -> tuple[Window, ...]:
        """Look at rules for the caller of an admission by a `SyncStore`, see `limitgate.usage`. Charges nothing."""
        if names and admission.rules.planner.asks_user:
            admission.request.find_user_here()
        request_plan = _made_at_once(self._plan_usage(admission, names, path))
        return run(self.store, self._look_at(request_plan), admission.budget) + _adaptive_windows(admission, names)

    async def ausage(self, admission: Admission, names: Sequence[str], path: str | None) -> tuple[Window, ...]:
        """`usage`, by an `AsyncStore`."""
        if names and admission.rules.planner.asks_user:
            await admission.request.find_user()
        request_plan = self._plan_usage(admission, names, path)
        if isinstance(request_plan, PendingPlan):
            request_plan = await request_plan.complete()
        budget = Budget(admission.budget.left, measured=self._is_measured)
        windows = await arun(self.store, self._look_at(request_plan), budget)
        admission.budget.left = min(admission.budget.left, budget.left)
        return windows + _adaptive_windows(admission, names)

    def message(self, admission: Admission, messages: RequestPlan) -> asyncio.Future[Refusal | None]:
        """Charge a message over a WebSocket, by an `AsyncStore`, even if nobody waits for it; a refusal if it must not pass."""
        return self.refunds.soon(self._decide_message(admission, messages), Budget(self._timeout, measured=self._is_measured))

    async def abegin(self) -> None:
        """Begin to serve on the running event loop: look for other rules, if that is wanted, and connect."""
        if self.looker is not None:
            self.looker.start()
        await self.aconnect()

    def _note_first_answer(self, at_first_answer: Callable[[int], None], now: int) -> None:
        """Tell of the first reading, and look for other rules: who is asked serves. uWSGI forks, or does not, unsaid."""
        at_first_answer(now)
        if not self.refusals.is_agreed:
            self.refusals.agree_soon()
        if self.looker is not None:
            self.looker.start()

    async def aconnect(self) -> None:
        """Have the store connect in the background, if it is one that does."""
        if is_async_redis(self.store):
            await self.store.connect()
            self.refusals.agree_soon()

    async def aend(self) -> None:
        """Serve no more: look for no other rules, wait for what is under way, and hand over what was counted."""
        if self.looker is not None:
            self.looker.stop()
        await self.refunds.asettled()
        if self.rules.counts is not None:
            exporter.export()

    def _identified(self, request: Request) -> Caller | None:
        """The caller that ``identify`` finds in this thread, if any. Raises `TypeError` where it is async."""
        request.check_lines()
        identified = None if self.identify is None else self.identify(request)
        if identified is not None and isawaitable(identified):
            getattr(identified, "close", bool)()  # else the coroutine would warn, too, that nobody awaited it
            raise TypeError("identify is async, expected a plain function under WSGI")
        return identified

    def answered(self, asked: PlainAdmission, reading: AnyReading) -> AnyAdmission | None:
        """`_admit` by a prepared plan: the short way, which almost all requests go. None if the store has declined it."""
        request, prepared = asked.request, asked.prepared
        in_flight: InFlight | None = None if prepared.adaptive is None else request.in_flight
        if (
            type(reading) is PlainSpend
            and reading.admitted
            and reading.template.is_enforced
            and (in_flight is None or not in_flight.would_refuse)
        ):
            if not self.store_health.is_known:
                self.store_health.answered(reading.now)
            if prepared.counter is not None:
                prepared.counter.charged(reading.debts)
            asked.reading = reading
            if in_flight is None:
                asked.decision = deferred(reading, request)
            else:
                asked.decision = deferred_under_places(reading, request, in_flight.in_force)
                if asked.rules.counts is not None:
                    in_flight.count()
            return asked
        return self._answered_worked_out(asked, reading)

    def _answered_worked_out(self, asked: PlainAdmission, reading: AnyReading) -> AnyAdmission | None:
        """`answered` where the decision is needed: of refusals and of plans with shadows."""
        request, rules, prepared = asked.request, asked.rules, asked.prepared
        settlement = request.open_settlement()
        decision = asked.template.decide(reading, settlement)
        if decision is None or not isinstance(reading, PlainSpend):
            if not reading.buckets:
                return None
            admission = _admission_prepared(request, rules, prepared, reading.waited)
            plan = Plan.spend([bucket.charge for bucket in reading.buckets])
            self._admit(admission, prepared.request_plan(plan), plan, whole_reading(reading))
            return admission
        if not self.store_health.is_known:
            self.store_health.answered(reading.now)
        counter = prepared.counter
        if not decision.allowed:
            if counter is not None:
                counter.refused(reading.debts)
            return self._refuse_prepared(request, rules, prepared, reading, decision)
        if counter is not None:
            counter.charged(reading.debts)
        if prepared.adaptive is not None:
            in_flight: InFlight = request.in_flight
            if in_flight.would_refuse:
                admission = _admission_prepared(request, rules, prepared, reading.waited, settlement)
                admission.admit(prepared, reading, decision)
                return admission
            under_places(decision, in_flight.in_force)
            if rules.counts is not None:
                in_flight.count()
        asked.reading = reading
        asked.decision = decision
        return asked

    def _refuse_prepared(
        self, request: Request, rules: RulesInForce, prepared: PreparedPlan, reading: PlainSpend, decision: Decision
    ) -> Admission:
        """Refuse a request by its prepared plan."""
        template = reading.template
        admission = _admission_prepared(request, rules, prepared, reading.waited, decision.settlement)
        key = template.refusing_key(decision, reading)
        refusal = self.refusals.quota_exceeded(
            template.refusing(decision), decision.retry_after, reading.now, decision.rule, key
        )
        admission.refuse(reading.now, decision, refusal)
        if self._refusal_log is not None:
            self._refusal_log.note(admission, decision, key, reading.now, refusal.id, prepared.compiled_rules)
        if prepared.counter is not None:
            admission.decided_by = reading.source
        return admission

    def _admit(self, admission: Admission, request_plan: RequestPlan, plan: Plan, reading: Reading) -> None:
        """Let the store's reading of a plan of any kind have its effect on a request that comes."""
        self.store_health.answered(reading.now)
        admission.decision = decision = decide(plan, reading, admission.settlement)
        admission.decide(outcome_of(decision), reading.source)
        if admission.rules.counts is not None:
            count_decision(decision, request_plan.row)
        admission.now, admission.fields = reading.now, admission.rules.fields(decision, reading.now)
        if decision.allowed:
            admission.charged = (Charged(request_plan, plan, reading),)
            admission.is_by_outcome = request_plan.is_by_outcome
            if request_plan.has_slots:
                self.refunds.hold(admission, admission.charged)
            if decision.delay:
                admission.charged, admission.booking = book(admission.charged, reading.now, decision.delay)
        else:
            admission.refusal = self._refusal(nesting.joined_with_outer(admission, decision), reading.now)
            self._note_refusal(admission, decision, reading.now, admission.refusal, request_plan)

    def _plan_usage(self, admission: Admission, names: Sequence[str], path: str | None) -> RequestPlan | PendingPlan:
        """Plan the charges of rules of these names, or of all that apply: those that the request was charged for, if it was."""
        plans = [charged.request_plan.plan for charged in admission.charged]
        charges = [charge for plan in plans if plan is not None for charge in plan.charges]
        if names:
            return admission.rules.planner.named(admission.request, admission.identified, names, path, charges)
        if charges or admission.marks is EVERYTHING:
            return RequestPlan(Plan.peek(charges) if charges else None, (), ())
        return admission.rules.planner.plan(admission.request, admission.identified)

    def _look_at(self, request_plan: RequestPlan) -> Flow[tuple[Window, ...]]:
        if request_plan.plan is None:
            return ()
        plan = Plan.peek(request_plan.plan.charges)
        return decide(plan, (yield plan, self._timeout)).windows

    def _plan_further(self, admission: Admission, extra_rules: Sequence[ExtraRule]) -> RequestPlan | PendingPlan | None:
        """The plan of further rules; None where none applies."""
        if admission.marks is EVERYTHING or admission.refusal is not None:
            return None  # this request is exempt, or somebody has refused it already
        if admission.settlement.is_over:
            raise RuntimeError("further limits were asked for when the request was over, expected it before")
        return admission.rules.planner.further(admission.request, admission.identified, extra_rules)

    def _decide_further(self, admission: Admission, request_plan: RequestPlan) -> Flow[Booking | None]:
        if request_plan.plan is not None and admission.refusal is None:
            return self._apply(admission, request_plan, (yield from self._decide(request_plan, request_plan.plan)))
        return None

    def _decide_message(self, admission: Admission, messages: RequestPlan) -> Flow[Refusal | None]:
        if messages.plan is None:
            return None
        verdict = yield from self._decide(messages, messages.plan)
        if verdict.decision.allowed:
            return None
        refusal = self._refusal(verdict.decision, verdict.now)
        self._note_refusal(admission, verdict.decision, verdict.now, refusal, messages)
        yield from self.refunds.apply([Refund(each, [0] * len(each.plan.charges)) for each in verdict.charged])
        return refusal

    def _decide(self, request_plan: RequestPlan, plan: Plan) -> Flow[Verdict]:
        """Ask the store, and if it fails decide without it."""
        try:
            reading = yield plan, self._timeout
        except StoreError as error:
            return (yield from self._without_store(request_plan, error))
        except BaseException:  # the request was cancelled
            self.refunds.release_later(plan)
            raise
        self.store_health.answered(reading.now)
        charged = (Charged(request_plan, plan, reading),) if reading.admitted else ()
        return _counted(request_plan, Verdict(decide(plan, reading), reading.now, charged, reading.source))

    def _without_store(self, request_plan: RequestPlan, error: StoreError) -> Flow[Verdict]:
        """Decide without the store, or without a part of it."""
        self.store_health.failed(error)
        self.refunds.release_later(request_plan.plan, error.keys)
        outcome = self._fallback.without_store(request_plan, error)
        if isinstance(outcome, Verdict):
            return _counted(request_plan, outcome)
        try:
            reading = yield outcome.rest, self._timeout
        except StoreError as further:
            self.refunds.release_later(outcome.rest, further.keys)
            return _counted(request_plan, self._fallback.wholly_without_store(request_plan, further))
        except BaseException:  # the request was cancelled
            self.refunds.release_later(request_plan.plan)
            raise
        return _counted(request_plan, self._fallback.with_rest(request_plan, outcome, reading))

    def _apply(self, admission: Admission, request_plan: RequestPlan, verdict: Verdict) -> Booking | None:
        """Apply a verdict to an admission, and return the turn that the request has to wait for then.

        A refusal stands: what is charged after it is refunded.
        """
        decision, charged, booking = verdict.decision, verdict.charged, None
        if any(each.request_plan.has_slots for each in charged):
            self.refunds.hold(admission, charged)
        if decision.delay and verdict.now is not None and admission.refusal is None:
            charged, booking = book(charged, verdict.now, decision.delay)
        admission.charged += charged
        admission.is_by_outcome |= any(each.request_plan.is_by_outcome for each in verdict.charged)
        if admission.refusal is not None:  # by a limit that was asked at the same time
            return None
        admission.decide(verdict.outcome, verdict.source)
        if not decision.allowed:
            admission.refusal = self._refusal(nesting.joined_with_outer(admission, decision), verdict.now)
            self._note_refusal(admission, decision, verdict.now, admission.refusal, request_plan)
        elif admission.decision is not None:
            decision = joined(admission.decision, decision)
        admission.decision = replace(decision, settlement=admission.settlement)
        if verdict.now is not None:
            admission.now, admission.fields = verdict.now, admission.rules.fields(decision, verdict.now)
        elif not decision.allowed:
            admission.fields = []
        return booking

    def _refusal(self, decision: Decision, now: int | None) -> Refusal:
        """The answer to a refused request; ``now`` is the store's clock in Unix µs, None if no bucket was looked at."""
        if now is None:
            return unavailable()
        key = decision.refusing_key
        return self.refusals.quota_exceeded(decision.refusing, decision.retry_after, now, decision.rule, key)

    def _note_refusal(
        self, admission: Admission, decision: Decision, now: int | None, refusal: Refusal | None, request_plan: RequestPlan
    ) -> None:
        """Have a refusal logged, if a bucket has refused."""
        if self._refusal_log is not None and now is not None and refusal is not None:
            compiled_rules = request_plan.compiled_rules
            self._refusal_log.note(admission, decision, decision.refusing_key, now, refusal.id, compiled_rules)


def _admitted_unasked(request: Request, rules: RulesInForce, prepared: PreparedPlan) -> AnyAdmission:
    """The admission of a request that is charged nothing: it has its places in flight, if there is a rule for it at all."""
    if prepared.adaptive is None or request.in_flight.would_refuse:
        return _admission_prepared(request, rules, prepared)
    in_flight: InFlight = request.in_flight
    if rules.counts is not None:
        in_flight.count()
    admitted = PlainAdmission()
    admitted.request = request
    admitted.rules = rules
    admitted.prepared = prepared
    admitted.coming = None
    admitted.reading = Unasked(rules.clock())
    admitted.decision = admitted_in_flight(in_flight.in_force, request.open_settlement())
    return admitted


async def _aplan_of(rules: RulesInForce, applying: Applying) -> RequestPlan:
    """The plan of a request, once its limits are given."""
    request_plan = rules.planner.plan_of(applying)
    return await request_plan.complete() if isinstance(request_plan, PendingPlan) else request_plan


def _made_at_once(request_plan: RequestPlan | PendingPlan) -> RequestPlan:
    """A plan for which nothing has to be awaited. Raises `TypeError` where something has."""
    if isinstance(request_plan, PendingPlan):
        request_plan.close()
        raise TypeError("the callable that gives a rule's limits is async, expected a plain function under WSGI")
    return request_plan


def _nested_in(admission: Admission, outer: Admission | None) -> Admission:
    """An admission to a gate inside of another one, if there is one around."""
    if outer is not None:
        nesting.enter(admission, outer)
    return admission


def _admission(
    request: Request, identified: Caller | None, rules: RulesInForce, request_plan: RequestPlan, outer: Admission | None
) -> Admission:
    """The admission of a request, before it is charged."""
    admission = Admission(request, identified, request_plan.marks, rules)
    admission.in_flight = request.in_flight
    _nested_in(admission, outer)
    if request_plan.messages is not None:
        admission.messages = request_plan.messages
    return admission


def _admission_prepared(
    request: Request, rules: RulesInForce, prepared: PreparedPlan, waited: float = 0.0, settlement: Settlement | None = None
) -> Admission:
    """The admission of a request that has a prepared plan, after so many seconds in which the store was silent."""
    admission = Admission(request, request.caller, prepared.marks, rules, settlement)
    if prepared.adaptive is not None:
        admission.in_flight = request.in_flight
    if waited:
        admission.budget.left -= waited
    return admission


def _planned(asked: PlainAdmission, waited: float) -> tuple[Admission, RequestPlan]:
    """The admission of a request that a prepared plan does not decide about, and its plan as one of any kind."""
    admission = _admission_prepared(asked.request, asked.rules, asked.prepared, waited)
    return admission, asked.prepared.request_plan(asked.template.plan(asked.keys))


def _deny(admission: Admission, denying: CompiledRule) -> None:
    """Refuse a request that a rule denies; where that is a shadow, note only that it would."""
    if denying.row is not None:
        denying.row.count(REFUSED if denying.enforced else SHADOW_REFUSED, 1.0)
    _refuse_unasked(admission, forbidden(), denying.rule.name, enforced=denying.enforced)


def _without_headers(request: Request, rules: RulesInForce, outer: Admission | None, error: HeadersTooLargeError) -> Admission:
    """Decide about a request whose headers are too large: it passes only if no enforced rule may apply to it."""
    end_undecided(request)
    request.in_flight = None
    compiled_rules, marks = rules.planner.may_apply(request)
    admission = _admission(request, None, rules, RequestPlan(None, (), marks), outer)
    _refuse_unread(admission, compiled_rules, error)
    return admission


def _refuse_unread(admission: Admission, compiled_rules: Sequence[CompiledRule], error: HeadersTooLargeError) -> None:
    """Refuse a request whose headers are too large for rules that may apply to it; if these are shadows, note that only."""
    if compiled_rules:
        is_enforced = any(each.enforced for each in compiled_rules)
        _refuse_unasked(admission, headers_too_large(str(error)), None, enforced=is_enforced)


def _refuse_unasked(admission: Admission, refusal: Refusal, rule: str | None, *, enforced: bool) -> None:
    """Refuse a request about which no bucket is asked; if that is not enforced, note only that it would be refused."""
    decision = denied(rule)
    admission.decide("refused" if enforced else "shadow_refused", "nobody")
    if enforced:
        admission.decision, admission.refusal, admission.fields = decision, refusal, []
    elif admission.decision is None:
        admission.decision = replace(decision, allowed=True, retry_after=0.0, shadow=True)
    elif admission.decision.allowed:
        admission.decision = replace(admission.decision, shadow=True)


def _adaptive_windows(admission: Admission, names: Sequence[str]) -> tuple[Window, ...]:
    """Windows of the adaptive limits of a request, of the rules of these names if there are any."""
    decision, in_flight = admission.decision, admission.in_flight
    if decision is None or in_flight is None:
        return ()
    return tuple([window for window in in_flight.windows() if not names or window.rule in names])


def _counted(request_plan: RequestPlan, verdict: Verdict) -> Verdict:
    """A verdict about these rules, counted if they are."""
    if request_plan.compiled_rules and request_plan.compiled_rules[0].row is not None:
        count_decision(verdict.decision, request_plan.row)
    return verdict
