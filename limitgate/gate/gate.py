"""The gate: decides about a request when it comes, and about whatever is asked of it while it is under way.

All middleware goes through here. `Gate.begin` finds the plan of a request and `Gate.conclude` decides by the store's answer;
neither asks the store. Everything else is a flow, see `limitgate.gate.flow`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from typing import Any

from limitgate.errors import HeadersTooLargeError, StoreError
from limitgate.gate import nesting
from limitgate.gate.admission import Admission, PermitWait, Receipt, Refund, Turn, Verdict, outcome_of
from limitgate.gate.bans import Bans
from limitgate.gate.fallback import Fallback
from limitgate.gate.flow import Awaited, Budget, Flow, answers_at_once, arun, run, takes_plain
from limitgate.gate.load import Permits, ProxyGuard, end_undecided
from limitgate.gate.planning.active_rules import ActiveRules, ReloadStats
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.given_limits import GivenPlans, PendingLimits
from limitgate.gate.planning.planner import LateLimit
from limitgate.gate.planning.request_plan import NO_CHARGES, PreparedPlan, RequestPlan
from limitgate.gate.refunds import Refunds
from limitgate.gate.refusal_log import RefusalLog
from limitgate.gate.refusals import Refusals
from limitgate.gate.store_health import StoreHealth
from limitgate.gate.turns import Turns
from limitgate.gate.upload_in_flight import watched
from limitgate.gate.wait_queue import book
from limitgate.http.request import Request, UserWanted
from limitgate.http.request_start import HEADER as REQUEST_START
from limitgate.http.response import Refusal, forbidden, headers_too_large, quota_exceeded, unavailable
from limitgate.internal_errors import place_of, raise_interruption
from limitgate.limits.decision import (
    Decision,
    Window,
    admitted_in_flight,
    decide,
    deferred,
    deferred_under_places,
    denied,
    joined,
)
from limitgate.limits.plan import Plan, Reading
from limitgate.limits.template import AnyReading, PlainSpend, whole_reading
from limitgate.messages.diagnostics import Diagnosis, OncePerValue
from limitgate.observing.counts import REFUSED, SHADOW_REFUSED, count_decision
from limitgate.observing.exporter import exporter
from limitgate.overload.adaptive_limit import Guard
from limitgate.overload.concurrency_limiter import WaitingTask, WaitingThread
from limitgate.overload.heartbeat import heartbeats
from limitgate.process import switch
from limitgate.process.poller import Poller
from limitgate.rules.callers import Caller
from limitgate.rules.decorators import EVERYTHING, Mark
from limitgate.rules.options import OnError
from limitgate.stores import is_async_redis, is_redis

Identify = Callable[[Request], Caller | Awaitable[Caller | None] | None]


class NotACallerError(TypeError):
    """``identify`` gave something else than a `Caller` or None."""

    def __init__(self, identified: object) -> None:
        self.what = f"it gave a {type(identified).__name__}"
        super().__init__(f"identify gave a {type(identified).__name__}, expected a Caller or None")


class Gate:
    """Decides about requests, by the plans of the rules in force and the readings of a store.

    ``client_of`` finds a request's client behind proxies, ``on_error`` is for rules that have none of their own, and
    ``processes`` is how many serve together. ``refusals`` makes the answers to requests that buckets refuse, ``refusal_log`` is
    told who is refused, and ``bans`` what rules with a ``ban`` refuse.
    """

    def __init__(
        self,
        rules: ActiveRules,
        store: Any,
        client_of: Callable[[Request], str | None],
        *,
        on_error: OnError,
        processes: int,
        refusals: Refusals,
        bans: Bans,
        identify: Identify | None = None,
        refusal_log: RefusalLog | None = None,
    ) -> None:
        self.store = store
        self.rules = rules
        """The rules that requests begin with. Each takes them once, so that others may come to stand here at any time."""
        self.loads = ReloadStats()
        """Loads of rule sets, counted."""
        self.at_other_rules: list[Callable[[], None]] = []
        """Called, in any thread, after other rules have come into force."""
        self.poller: Poller | None = None
        """Looks for other rules; None where nobody does."""
        self._client_of = client_of
        self.timeout = rules.timeout
        """Seconds that the store is given to answer."""
        self._takes_plain = takes_plain(store)
        self.answers_at_once = answers_at_once(store)
        """True if the store answers at once, so that an event loop may ask it without `await`."""
        self.identify = identify
        self._unidentified = OncePerValue(Diagnosis.IDENTIFY_FAILED)
        self._refusal_log = refusal_log
        self.bans = bans
        self.refusals = refusals
        self._fallback = Fallback(store, on_error, processes)
        self.store_health = StoreHealth(store, self._note_first_answer, refusals.agree_soon)
        self.refunds = Refunds(store, self._fallback, self.store_health, rules.timeout)
        self.turns = Turns(store, self.refunds, refusal_log)
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

    def enforce(self, rules: ActiveRules) -> None:
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

    def check(self, request: Request, outer: Admission | None = None, *, waits: bool = True) -> Admission:
        """Decide about a request by a `SyncStore`, and unless told otherwise wait for its turn.

        ``outer`` is the admission to the gate around.
        """
        admission = self.begin(request, outer)
        rest, plan = admission.rest, admission.plan
        if plan is not None:
            try:
                reading: AnyReading = self.store.spend(plan, self.timeout)
            except BaseException as error:
                rest = self.unanswered(admission, error)
                if rest is None:
                    raise
            else:
                rest = self.conclude(admission, reading)
        if rest is not None:
            run(self.store, rest, admission.budget)
            self.refunds.settle_refused(admission)
        if not admission.is_plain and waits and isinstance(admission.turn, Turn):
            self.turns.wait_for(admission, admission.turn)
        return admission

    async def acheck(self, request: Request, outer: Admission | None = None) -> Admission:
        """Decide about a request by an `AsyncStore`; ``identify`` may be async. Its turn is for `Turns.await_turn`."""
        admission = self.begin(request, outer)
        rest, plan = admission.rest, admission.plan
        if plan is not None:
            try:
                if self.answers_at_once:
                    reading: AnyReading = self.store.spend(plan, self.timeout)
                else:
                    reading = await self.store.aspend(plan, self.timeout)
            except BaseException as error:
                rest = self.unanswered(admission, error)
                if rest is None:
                    raise
            else:
                rest = self.conclude(admission, reading)
        if rest is not None:
            await self.afinish(admission, rest)
        return admission

    async def afinish(self, admission: Admission, rest: Flow[None]) -> None:
        """Run the rest of the decision about a request, by an `AsyncStore`."""
        await arun(self.store, rest, admission.budget)
        await self.refunds.asettle_refused(admission)

    def begin(
        self, request: Request, outer: Admission | None = None, known: tuple[Admission, Caller | None] | None = None
    ) -> Admission:
        """Begin to decide about a request: find who asks, the rules for it, and the keys of their buckets. Asks no store.

        If the admission has a ``plan``, the caller has the store carry it out and passes the reading to `conclude`. If it has
        a ``rest``, the caller runs it. Otherwise the request is decided. ``known`` is an earlier admission of the request with
        the caller that ``identify`` has found since.

        WebSockets, and requests to which there is a gate around, answered or not, have no plain plan.
        """
        identified: Any = None
        if known is None:
            request.resolve_client = self._client_of
            admission = Admission()
            admission.request = request
            admission.rules = self.rules
            admission.marks = ()
            admission.prepared = admission.plan = admission.rest = admission.decision = admission.reading = None
            admission.in_flight = admission.sent_status = None
            admission.is_plain = admission.has_begun = admission.is_counted = False
        else:
            admission, identified = known
        if switch.null_store is not None:
            _enter(admission, outer, EVERYTHING)
            return admission
        planner = admission.rules.planner
        try:
            if self.identify is not None and known is None:
                request.check_lines()
                try:
                    identified = self.identify(request)
                except Exception as error:
                    self._note_unidentified(error)
                    raise
                if identified is not None and not isinstance(identified, Caller):
                    admission.rest = self._begin_identified(admission, outer, identified)
                    return admission
            begin = partial(self._take_places, admission, outer) if planner.adapts else None
            found = planner.prepared(request, identified, begin)
            if found is None:
                self._put_off(admission, outer, identified)
                return admission
            prepared, keys = found
            admission.prepared = prepared
            admission.marks = prepared.marks
            template = prepared.template
            if template is None or not (self._takes_plain and request.is_outermost):
                self._bind(admission, outer, prepared, keys)
                return admission
            admission.plan = plan = PlainSpend()  # `PlanTemplate.asked`, a call more
            plan.template = template
            plan.keys = keys
            plan.waited = 0.0
            plan.source = "store"
        except HeadersTooLargeError as error:
            _refuse_without_headers(admission, outer, error)
        return admission

    def _bind(self, admission: Admission, outer: Admission | None, prepared: PreparedPlan, keys: Sequence[str]) -> None:
        """Bind a prepared plan that is not plain to its request; where nothing is charged it is decided already."""
        request = admission.request
        if prepared.messages is not None:
            admission.messages = admission.rules.planner.messages(prepared.messages, request)
        if outer is not None:
            _nest(admission, outer)
        if prepared.compiled_rules:
            admission.rest = self._charge(admission, prepared, prepared.bound(keys, request.caller))
        elif prepared.denying is not None:
            _deny(admission, prepared.denying)
        elif admission.in_flight is not None and request.is_outermost and not admission.in_flight.is_to_be_told:
            if admission.rules.counts is not None:
                admission.in_flight.count()
            in_force = admission.in_flight.in_force
            admission.admit_in_flight(admitted_in_flight(in_force, admission.settlement), admission.rules.clock())
            admission.is_plain = True

    def _begin_identified(self, admission: Admission, outer: Admission | None, identified: object) -> Flow[None]:
        """`begin` with a request once its caller is found, and charge it. Raises `TypeError` if ``identify`` gave none."""
        try:
            if isawaitable(identified):
                identified = yield Awaited(identified, "identify is async, expected a plain function under WSGI")
        except HeadersTooLargeError as error:
            _refuse_without_headers(admission, outer, error)
            return
        except Exception as error:
            self._note_unidentified(error)
            raise
        if identified is not None and not isinstance(identified, Caller):
            wrong = NotACallerError(identified)
            self._note_unidentified(wrong)
            raise wrong
        yield from self._begin_again(admission, outer, identified)

    def _note_unidentified(self, error: Exception) -> None:
        """Log that ``identify`` has failed, once for each place (LG071). The text of an error may contain data of a client."""
        if not isinstance(error, HeadersTooLargeError):
            raise_interruption(error)
            what = error.what if isinstance(error, NotACallerError) else f"{type(error).__name__} at {place_of(error)}"
            self._unidentified.log(what, what)

    def _begin_again(self, admission: Admission, outer: Admission | None, identified: Caller | None) -> Flow[None]:
        """`begin` with a request that has waited for something, and charge it."""
        admission.rest = None
        self.begin(admission.request, outer, (admission, identified))
        rest, plan = admission.rest, admission.plan
        if plan is not None:
            try:
                reading = yield plan, self.timeout
            except BaseException as error:
                rest = self.unanswered(admission, error)
                if rest is None:
                    raise
            else:
                rest = self.conclude(admission, reading)
        if rest is not None:
            yield from rest

    def _put_off(self, admission: Admission, outer: Admission | None, identified: Caller | None) -> None:
        """Have a request wait for a place in flight or for its limits, or refuse it if there is no place."""
        in_flight = admission.in_flight
        if in_flight is not None and in_flight.refusal is not None:
            self._shed(admission, outer)
        elif in_flight is not None and in_flight.waits is not None:  # as on an event loop
            _nest(admission, outer)
            admission.turn = PermitWait(self._begin_with_places(admission, outer, identified))
        else:
            admission.rest = self._begin_with_limits(admission, outer, identified)

    def _begin_with_places(self, admission: Admission, outer: Admission | None, identified: Caller | None) -> Flow[None]:
        """`begin` with a request once it has its places in flight, and charge it."""
        try:
            yield from self._begin_again(admission, outer, identified)
        except UserWanted:
            yield Awaited(admission.request.find_user(), "the user has to be awaited, expected one that is known")
            yield from self._begin_again(admission, outer, identified)

    def _begin_with_limits(self, admission: Admission, outer: Admission | None, identified: Caller | None) -> Flow[None]:
        """`begin` with a request once its limits are there, and charge it."""
        if pending := PendingLimits(admission.request):  # else it met the first decorator with an adaptive limit
            yield _awaited(pending)
        yield from self._begin_again(admission, outer, identified)

    def _charge(self, admission: Admission, prepared: PreparedPlan, request_plan: RequestPlan) -> Flow[None]:
        """Charge a request by a plan of any kind."""
        plan = request_plan.plan
        if plan is not None:
            try:
                reading = yield plan, self.timeout
            except StoreError as error:
                yield from self._charge_without_store(admission, request_plan, error)
            except BaseException:  # the request was cancelled
                self.refunds.release_later(plan)
                raise
            else:
                rest = self._admit(admission, request_plan, plan, reading)
                if rest is not None:
                    yield from rest
        if prepared.denying is not None:
            _deny(admission, prepared.denying)

    def _charge_without_store(self, admission: Admission, request_plan: RequestPlan, error: StoreError) -> Flow[None]:
        """Charge a request for which the store has failed."""
        admission.turn = self._apply(admission, request_plan, (yield from self._without_store(request_plan, error)))

    def _take_places(
        self, admission: Admission, outer: Admission | None, plan: PreparedPlan | GivenPlans, caller: Caller | None
    ) -> bool:
        """Take places in flight for a request, and in a thread wait for them. False if it has to wait, or is refused."""
        request, planner = admission.request, admission.rules.planner
        admission.marks = plan.marks
        known: Permits | None = request.in_flight
        if known is not None:  # it was here before: it has waited, or see `limitgate.django.middleware`
            admission.in_flight = known
            return self._goes_on(known) if known.would_refuse else known.goes_on
        adaptive: Any = plan.adaptive
        guard: Guard | None = None
        if outer is None or outer.in_flight is None:  # else it has been asked about this request
            guard = heartbeats.guard() if request.awaits else None
            if planner.trusts_proxies and planner.believes(request, REQUEST_START):
                guard = self._proxy_guard.of(request, guard)
        request.in_flight = in_flight = Permits()  # first, so that its places are given back if anything raises
        admission.in_flight = in_flight
        if request.awaits:
            goes_on = in_flight.begin(request, adaptive, caller, guard, WaitingTask)
            return self._goes_on(in_flight) if in_flight.would_refuse else goes_on
        in_flight.begin(request, adaptive, caller, guard, WaitingThread)
        if in_flight.waits is not None:
            in_flight.wait()
        environ = request.environ
        if environ is not None and "wsgi.input" in environ:
            environ["wsgi.input"] = watched(environ["wsgi.input"], in_flight, environ)
        return self._goes_on(in_flight) if in_flight.would_refuse else in_flight.goes_on

    def _goes_on(self, in_flight: Permits) -> bool:
        """True if a request has its places. Has it logged that a shadow had none."""
        if self._refusal_log is not None and in_flight.goes_on:
            self._refusal_log.note_shed_by_shadows(in_flight)
        return in_flight.goes_on

    def _shed(self, admission: Admission, outer: Admission | None) -> None:
        """Refuse a request for which there is no place in flight."""
        in_flight: Any = admission.in_flight
        if self._refusal_log is not None:
            self._refusal_log.note_shed(in_flight)
        admission.refusal = in_flight.refusal or unavailable()
        admission.is_shed = True
        if not admission.request.is_outermost:
            admission.shed()
            _nest(admission, outer)

    def unanswered(self, admission: Admission, error: BaseException) -> Flow[None] | None:
        """Decide about a request whose plain plan the store has not carried out. Returns what has to be run then.

        None for an error that is not the store's: the caller raises it. Slots that may be taken are released later.
        """
        plan, prepared = admission.plan, admission.prepared
        if not isinstance(error, StoreError) or plan is None or prepared is None:
            self.refunds.release_later(plan)
            return None
        admission.waited = error.waited
        return self._charge_without_store(admission, prepared.request_plan(plan.whole_plan), error)

    def conclude(self, admission: Admission, answer: AnyReading) -> Flow[None] | None:
        """Decide by the store's reading of a plain plan. Returns what has to be run then, if anything."""
        in_flight = admission.in_flight
        prepared: Any = admission.prepared
        if (
            type(answer) is PlainSpend
            and answer.admitted
            and prepared.is_simple
            and (in_flight is None or not (in_flight.would_refuse or in_flight.waited_s))
        ):
            if not self.store_health.is_known:
                self.store_health.answered()
            if prepared.counter is not None:
                prepared.counter.charged(answer.states)
            admission.reading = answer
            admission.is_plain = True
            if in_flight is None:
                admission.decision = deferred(answer, admission.request)
            else:
                admission.decision = deferred_under_places(answer, admission.request, in_flight.in_force)
                if admission.rules.counts is not None:
                    in_flight.count()
            return None
        return self._conclude_worked_out(admission, answer)

    def _conclude_worked_out(self, admission: Admission, answer: AnyReading) -> Flow[None] | None:
        """`conclude` where the decision is needed: for refusals, shadows and turns to wait for."""
        prepared: Any = admission.prepared
        asked: Any = admission.plan
        template = asked.template
        admission.waited = answer.waited
        decision: Decision | None
        is_admitted = False
        if template.is_enforced and answer.admitted and isinstance(answer, PlainSpend):
            is_admitted, decision = True, deferred(answer, admission.request)
        else:
            decision = template.decide(answer, admission.request.open_settlement())
        if decision is None or not isinstance(answer, PlainSpend):
            plan = asked.whole_plan
            return self._admit(admission, prepared.request_plan(plan), plan, whole_reading(answer))
        if not self.store_health.is_known:
            self.store_health.answered()
        if not (is_admitted or decision.allowed):
            if prepared.counter is not None:
                prepared.counter.refused(answer.states)
            self._refuse_prepared(admission, prepared, answer, decision)
            return self._count_refusal(admission, decision, prepared.charged_rules) if prepared.bans else None
        if prepared.counter is not None:
            prepared.counter.charged(answer.states)
        admission.admit(answer, decision)
        admission.is_by_outcome = prepared.is_by_outcome
        if prepared.has_slots:
            self.refunds.hold(admission, answer)
        elif not prepared.is_by_outcome and (admission.in_flight is None or not admission.in_flight.is_to_be_told):
            admission.is_plain = True
            admission.show_in_flight()
        return None

    def _refuse_prepared(self, admission: Admission, prepared: PreparedPlan, reading: PlainSpend, decision: Decision) -> None:
        """Refuse a request by its prepared plan."""
        template = reading.template
        key = template.refusing_key(decision, reading)
        refusal = self.refusals.quota_exceeded(
            template.refusing(decision), decision.retry_after, reading.now, decision.rule, key, prepared.compiled_rules
        )
        admission.refuse(reading, decision, refusal)
        if self._refusal_log is not None:
            self._refusal_log.note(admission, decision, key, reading.now, refusal.id, prepared.compiled_rules)

    def further(self, admission: Admission, extra_rules: Sequence[LateLimit]) -> Flow[Turn | None]:
        """Decide about further rules while a request is under way. Returns the turn that the request has to wait for then.

        If one of them refuses, the caller refunds all charges of the request after the wait.
        """
        if admission.marks is EVERYTHING or admission.refusal is not None or switch.null_store is not None:
            return None  # this request is exempt, or refused already
        if admission.settlement.is_over:
            raise RuntimeError("further limits were asked for when the request was over, expected it before")
        planner, request, identified = admission.rules.planner, admission.request, admission.identified
        try:
            applying = [each for each in extra_rules if each[0].applies_to(request.method) and each[0].admits(request)]
            request_plan = yield from _completed(lambda: planner.further(request, identified, applying))
        except HeadersTooLargeError as error:
            _refuse_unread(admission, planner.compiled(request, extra_rules), error)
            return None
        if request_plan.plan is None or admission.refusal is not None:
            return None
        verdict = yield from self._decide(request_plan, request_plan.plan)
        turn = self._apply(admission, request_plan, verdict)
        if not verdict.decision.allowed and request_plan.bans:
            yield from self._count_refusal(admission, verdict.decision, request_plan.compiled_rules)
        return turn

    def usage(self, admission: Admission, names: Sequence[str], path: str | None) -> Flow[tuple[Window, ...]]:
        """Look at rules for the caller of an admission, see `limitgate.usage`. Charges nothing."""
        request, identified = admission.request, admission.identified
        try:
            request_plan = yield from _completed(lambda: self._plan_usage(admission, request, identified, names, path))
        except HeadersTooLargeError:
            return _adaptive_windows(admission, names)
        if request_plan.plan is None:
            return _adaptive_windows(admission, names)
        plan = Plan.peek(request_plan.plan.charges)
        return decide(plan, (yield plan, self.timeout)).windows + _adaptive_windows(admission, names)

    def message(self, admission: Admission, messages: RequestPlan) -> asyncio.Future[Refusal | None]:
        """Charge a message over a WebSocket, by an `AsyncStore`, even if nobody waits for it; a refusal if it must not pass."""
        budget = Budget(self.timeout, measured=admission.rules.is_measured)
        return self.refunds.soon(self._decide_message(admission, messages), budget)

    async def astartup(self) -> None:
        """Begin to serve on the running event loop: connect, and look for other rules, if that is wanted.

        Raises `ConfigError` for an event loop that the store cannot run on.
        """
        await self.aconnect()
        if self.poller is not None:
            self.poller.start()

    def _note_first_answer(self) -> None:
        """Look for other rules: who is asked serves. uWSGI forks, or does not, unsaid."""
        if not self.refusals.is_agreed:
            self.refusals.agree_soon()
        if self.poller is not None:
            self.poller.start()

    async def aconnect(self) -> None:
        """Have the store connect in the background, if it is one that does."""
        if is_async_redis(self.store) and switch.null_store is None:
            await self.store.connect()
            self.refusals.agree_soon()

    async def ashutdown(self) -> None:
        """Serve no more: look for no other rules, wait for what is under way, and hand over what was counted."""
        if self.poller is not None:
            self.poller.stop()
        await self.refunds.asettled()
        if self.rules.counts is not None:
            exporter.export()

    def _admit(self, admission: Admission, request_plan: RequestPlan, plan: Plan, reading: Reading) -> Flow[None] | None:
        """Let the store's reading of a plan of any kind have its effect on a request that comes.

        Returns what has to be run then.
        """
        self.store_health.answered()
        admission.decision = decision = decide(plan, reading, admission.settlement)
        admission.decide(outcome_of(decision), reading.source)
        if admission.rules.counts is not None:
            count_decision(decision, request_plan.row)
        admission.now = reading.now
        if decision.allowed:
            admission.charged = (Receipt(request_plan, plan, reading),)
            admission.is_by_outcome = request_plan.is_by_outcome
            if request_plan.has_slots:
                self.refunds.hold(admission, admission.charged[0].taken)
            if decision.delay:
                admission.charged, admission.turn = book(admission.charged, reading.now, decision.delay)
            if decision.shadow:
                self._note_refusal(admission, decision, reading.now, None, request_plan)
        else:
            admission.refusal = self._refusal(nesting.joined_with_outer(admission, decision), reading.now, request_plan)
            self._note_refusal(admission, decision, reading.now, admission.refusal, request_plan)
            if request_plan.bans:
                return self._count_refusal(admission, decision, request_plan.compiled_rules)
        return None

    @staticmethod
    def _plan_usage(
        admission: Admission, request: Request, identified: Caller | None, names: Sequence[str], path: str | None
    ) -> RequestPlan | PendingLimits:
        """Plan the charges of rules of these names, or of all that apply: those that the request was charged for, if it was."""
        request.check_lines()
        plans = [charged.request_plan.plan for charged in admission.charged]
        charges = [charge for plan in plans if plan is not None for charge in plan.charges]
        if names:
            return admission.rules.planner.named(request, identified, names, path, charges)
        if charges or admission.marks is EVERYTHING:
            return RequestPlan(Plan.peek(charges), ()) if charges else NO_CHARGES
        return admission.rules.planner.plan(request, identified) or PendingLimits(request)

    def _decide_message(self, admission: Admission, messages: RequestPlan) -> Flow[Refusal | None]:
        if messages.plan is None or switch.null_store is not None:
            return None
        verdict = yield from self._decide(messages, messages.plan)
        if verdict.decision.allowed:
            if verdict.decision.shadow:
                self._note_refusal(admission, verdict.decision, verdict.now, None, messages)
            return None
        refusal = self._refusal(verdict.decision, verdict.now, messages)
        self._note_refusal(admission, verdict.decision, verdict.now, refusal, messages)
        if messages.bans:
            yield from self.bans.counting(admission, verdict.decision, messages.compiled_rules)
        yield from self.refunds.apply([Refund(each, [0] * len(each.plan.charges)) for each in verdict.charged])
        return refusal

    def _decide(self, request_plan: RequestPlan, plan: Plan) -> Flow[Verdict]:
        """Ask the store, and if it fails decide without it."""
        try:
            reading = yield plan, self.timeout
        except StoreError as error:
            return (yield from self._without_store(request_plan, error))
        except BaseException:  # the request was cancelled
            self.refunds.release_later(plan)
            raise
        self.store_health.answered()
        charged = (Receipt(request_plan, plan, reading),) if reading.admitted else ()
        return _counted(request_plan, Verdict(decide(plan, reading), reading.now, charged, reading.source))

    def _without_store(self, request_plan: RequestPlan, error: StoreError) -> Flow[Verdict]:
        """Decide without the store, or without a part of it."""
        self.store_health.failed(error)
        self.refunds.release_later(request_plan.plan, error.keys)
        outcome = self._fallback.without_store(request_plan, error)
        if isinstance(outcome, Verdict):
            return _counted(request_plan, outcome)
        try:
            reading = yield outcome.rest, self.timeout
        except StoreError as further:
            self.refunds.release_later(outcome.rest, further.keys)
            return _counted(request_plan, self._fallback.wholly_without_store(request_plan, further))
        except BaseException:  # the request was cancelled
            self.refunds.release_later(request_plan.plan)
            raise
        return _counted(request_plan, self._fallback.with_rest(request_plan, outcome, reading))

    def _apply(self, admission: Admission, request_plan: RequestPlan, verdict: Verdict) -> Turn | None:
        """Apply a verdict to an admission, and return the turn that the request has to wait for then.

        A refusal stands: what is charged after it is refunded.
        """
        first, decision, charged, turn = admission.decision, verdict.decision, verdict.charged, None
        for each in charged:
            if each.request_plan.has_slots:
                self.refunds.hold(admission, each.taken, is_local=each.is_local)
        if decision.delay and verdict.now is not None and admission.refusal is None:
            charged, turn = book(charged, verdict.now, decision.delay)
        admission.charged += charged
        admission.is_by_outcome |= any(each.request_plan.is_by_outcome for each in verdict.charged)
        if admission.refusal is not None:  # by a limit that was asked at the same time
            return None
        admission.decide(verdict.outcome, verdict.source)
        if not decision.allowed:
            admission.refusal = self._refusal(nesting.joined_with_outer(admission, decision), verdict.now, request_plan)
            self._note_refusal(admission, decision, verdict.now, admission.refusal, request_plan)
        else:
            if decision.shadow:
                self._note_refusal(admission, decision, verdict.now, None, request_plan)
            if first is not None:
                decision = joined(first, decision)
        admission.decision = replace(decision, settlement=admission.settlement)
        if verdict.now is not None:
            admission.now = verdict.now
        elif first is None or not decision.allowed:
            admission.fields = []
        return turn

    def _refusal(self, decision: Decision, now: int | None, request_plan: RequestPlan) -> Refusal:
        """The answer to a refused request; ``now`` is the store's clock in Unix µs, None if no bucket was looked at."""
        if now is None:
            return unavailable()
        key = decision.refusing_key
        return self.refusals.quota_exceeded(
            decision.refusing,
            decision.retry_after,
            now,
            decision.rule,
            key,
            request_plan.compiled_rules,
            is_permanent_ban=decision.is_permanent_ban,
        )

    def _count_refusal(self, admission: Admission, decision: Decision, compiled_rules: Sequence[CompiledRule]) -> Flow[None]:
        """Count a refusal for its rules with a ``ban``. If it leads to a ban, its answer says how long that lasts."""
        banned = yield from self.bans.counting(admission, decision, compiled_rules)
        refusal = admission.refusal
        if banned is None or refusal is None or banned.seconds <= decision.retry_after:
            return
        decision = replace(decision, rule=banned.rule, retry_after=banned.seconds, settlement=admission.settlement)
        admission.decision = decision
        if refusal.id is not None:
            told = nesting.joined_with_outer(admission, decision)
            admission.refusal = quota_exceeded(told.refusing, told.retry_after, refusal.id.encode())

    def _note_refusal(
        self, admission: Admission, decision: Decision, now: int | None, refusal: Refusal | None, request_plan: RequestPlan
    ) -> None:
        """Have it logged that buckets have refused; without a refusal, that those in shadow would have."""
        if self._refusal_log is None or now is None:
            return
        compiled_rules = request_plan.compiled_rules
        if refusal is None:
            self._refusal_log.note_shadows(admission, decision, now, compiled_rules)
        else:
            self._refusal_log.note(admission, decision, decision.refusing_key, now, refusal.id, compiled_rules)


def _completed(planned: Callable[[], RequestPlan | PendingLimits]) -> Flow[RequestPlan]:
    """A plan whose limits are all given, which is ``planned`` again once they are."""
    while isinstance(request_plan := planned(), PendingLimits):
        yield _awaited(request_plan)
    return request_plan


def _awaited(pending: PendingLimits) -> Awaited:
    return Awaited(pending, "the callable that gives a rule's limits is async, expected a plain function under WSGI")


def _nest(admission: Admission, outer: Admission | None) -> None:
    """Note which gate is around, if there is one that is not noted yet."""
    if outer is not None and admission.outer_ref is None:
        nesting.enter(admission, outer)


def _enter(admission: Admission, outer: Admission | None, marks: Container[Mark]) -> None:
    """Note the decorators, the places and the gate around of a request without a prepared plan."""
    admission.marks = marks
    admission.in_flight = admission.request.in_flight
    _nest(admission, outer)


def _deny(admission: Admission, denying: CompiledRule) -> None:
    """Refuse a request that a rule denies; where that is a shadow, note only that it would."""
    if denying.row is not None:
        denying.row.count(REFUSED if denying.enforced else SHADOW_REFUSED, 1.0)
    _refuse_unasked(admission, forbidden(), denying.rule.name, enforced=denying.enforced)


def _refuse_without_headers(admission: Admission, outer: Admission | None, error: HeadersTooLargeError) -> None:
    """Decide about a request whose headers are too large: it passes only if no enforced rule may apply to it."""
    request = admission.request
    end_undecided(request)
    request.in_flight = None
    compiled_rules, marks = admission.rules.planner.may_apply(request)
    _enter(admission, outer, marks)
    _refuse_unread(admission, compiled_rules, error)


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
        admission.decision, admission.fields = replace(decision, allowed=True, retry_after=0.0, shadow=True), []
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
