"""Decides whether a request may pass. The only caller of the store.

`Gate.begin` builds a plan, the store carries it out, `Gate.conclude` decides. If more I/O is needed, both return a flow, see
`limitgate.gate.flow`. `limitgate.gate.late` handles running requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from limitgate.errors import BodyError, HeadersTooLargeError, StoreError
from limitgate.gate import nesting, outage, refunds, refusals
from limitgate.gate.admission import Admission, PermitWait, Turn
from limitgate.gate.charging import Charging, deny, leave_out_shadows, refuse_without_body, refuse_without_headers
from limitgate.gate.flow import Awaited, Flow, PendingLimits, answers_at_once, arun, body_read, limits_awaited, run, takes_plain
from limitgate.gate.load import Load, end_undecided, show
from limitgate.gate.planning.active_rules import ActiveRules
from limitgate.gate.planning.identity import UNASKED, AnyIdentify, Identify
from limitgate.gate.planning.prepared import PreparedPlan
from limitgate.gate.turns import Turns
from limitgate.http.request import BodyWanted, Request, Wanted
from limitgate.limits.decision import Decision, deferred, new_deferred, set_evidence, set_in_force
from limitgate.limits.template import AnyReading, PlainSpend, whole_reading
from limitgate.observing.counts import ReloadStats
from limitgate.process import switch
from limitgate.process.background import Poller
from limitgate.rules.callers import Caller


class Gate:
    """Decides by the rules in force. ``client_of`` returns the address behind proxies."""

    def __init__(
        self,
        rules: ActiveRules,
        store: Any,
        client_of: Callable[[Request], str | None],
        charging: Charging,
        *,
        identify: AnyIdentify | None = None,
    ) -> None:
        self.store = store
        self.rules: ActiveRules = rules
        """A reload replaces the rules, so a request reads this attribute once."""
        self.has_begun: bool = False
        """True after a decision without the store, see `Outages.has_answered`."""
        self.loads: ReloadStats = ReloadStats()
        self.at_other_rules: list[Callable[[], None]] = []
        """Called after a reload, in any thread."""
        self.poller: Poller | None = None
        self._client_of = client_of
        self.timeout: float = rules.timeout
        self._takes_plain = takes_plain(store)
        self.answers_at_once: bool = answers_at_once(store)
        """True if the store needs no `await`."""
        self.identify = identify
        self._identify = None if identify is None else Identify(identify)
        self.charging = charging
        self.refusals: refusals.Refusals = charging.refusals
        self.outages: outage.Outages = charging.outages
        self.refunds: refunds.Refunds = charging.refunds
        self.load: Load = Load(self.refusals.log)
        self.turns: Turns = Turns(store, self.refunds, self.load)
        if rules.counts is not None:
            rules.counts.look_at(self.outages.store_slots, self.outages.local_slots)

    @property
    def failures(self) -> int:
        return self.outages.failures

    @property
    def overloaded(self) -> int:
        """Number of decisions without the store because this process was too busy."""
        return self.outages.overloaded

    @property
    def uncorrected(self) -> int:
        """Refunds lost because the store didn't answer."""
        return self.refunds.uncorrected

    @property
    def overflowed(self) -> int:
        """Number of requests in overflow buckets, see `limitgate.gate.planning.cardinality`."""
        cardinality = self.rules.planner.cardinality
        return cardinality.overflowed if cardinality else 0

    def enforce(self, rules: ActiveRules) -> None:
        # Release waiting requests before their rule may become a shadow rule.
        rules.planner.keep_adaptive_limits()
        self.rules = rules
        for tell in self.at_other_rules:
            tell()

    def check(self, request: Request, outer: Admission | None = None, *, waits: bool = True) -> Admission:
        """Decide on a request. If ``waits``, block until its turn. ``outer`` is the admission of the next outer gate."""
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
            try:
                run(self.store, rest, admission.budget)
            except BaseException:
                end_undecided(admission)
                raise
            self.refunds.settle_refused(admission)
        if not admission.is_plain and waits and isinstance(admission.turn, Turn):
            self.turns.wait_for(admission, admission.turn)
        return admission

    async def acheck(self, request: Request, outer: Admission | None = None) -> Admission:
        """`check` on an event loop, without the wait: call `Turns.await_turn`."""
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
        try:
            await arun(self.store, rest, admission.budget)
        except BaseException:
            end_undecided(admission)
            raise
        await self.refunds.asettle_refused(admission)

    def begin(self, request: Request, outer: Admission | None = None, known: tuple[Admission, Any] | None = None) -> Admission:
        """Find the caller, the rules and the keys for a request, without a store call.

        If the result has a ``plan``, have the store carry it out and pass the reading to `conclude`. If it has a ``rest``, run
        that flow. If it has neither, the request is decided. To continue a request, pass its admission, and its caller as
        ``known``. WebSockets and requests with an outer gate never have a plain plan.
        """
        identified: Any = None
        if known is None:
            request.resolve_client = self._client_of
            admission = Admission()
            admission.request = request
            admission.rules = self.rules
            # `opened_settlement` has a default, which would be slower to read.
            admission.plan = admission.rest = admission.permits = admission.opened_settlement = None
            admission.is_plain = admission.has_begun = False
        else:
            admission, identified = known
        if switch.null_store is not None:
            self.has_begun = True
            nesting.pass_by(admission, outer)
            return admission
        planner = admission.rules.planner
        try:
            if self.identify is not None and known is None:
                request.check_lines()
                # Stays UNASKED if `identify` raises, for example because it needs the user.
                identified = UNASKED
                identified = self.identify(request)
                if identified is not None and not isinstance(identified, Caller):
                    admission.rest = self._begin_again(admission, outer, identified)
                    return admission
            found = planner.prepared(request, identified, (self.load.enter, admission, outer) if planner.adapts else None)
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
            admission.plan = plan = PlainSpend()
            plan.template = template
            plan.keys = keys
            plan.waited = 0.0
            plan.source = "store"
        except BaseException as error:
            if not self._begin_otherwise(admission, outer, identified, error, is_again=known is not None):
                raise
        return admission

    def _begin_otherwise(
        self, admission: Admission, outer: Admission | None, identified: Any, error: BaseException, *, is_again: bool
    ) -> bool:
        self.has_begun = True
        if identified is UNASKED and self._identify is not None and isinstance(error, Exception):
            self._identify.note(error)
        if isinstance(error, HeadersTooLargeError):
            if identified is not UNASKED and leave_out_shadows(admission, error):
                admission.rest = self._begin_again(admission, outer, identified)
            else:
                refuse_without_headers(admission, outer, error)
        elif not isinstance(error, Wanted):
            end_undecided(admission)
            return False
        elif is_again:
            return False
        else:
            admission.rest = self._begin_again(admission, outer, identified, error)
        return True

    def _bind(self, admission: Admission, outer: Admission | None, prepared: PreparedPlan, keys: Sequence[str]) -> None:
        self.has_begun = True
        request, permits = admission.request, admission.permits
        if prepared.messages is not None:
            admission.messages = admission.rules.planner.messages(prepared.messages, request)
        nesting.enter(admission, outer)
        if prepared.compiled_rules:
            admission.rest = self._charge(admission, prepared, keys)
        elif prepared.denying is not None:
            deny(admission, prepared.denying)
        elif permits is not None and request.is_outermost and not permits.is_to_be_told:
            show(admission)
            admission.is_plain = True

    def _put_off(self, admission: Admission, outer: Admission | None, identified: Any) -> None:
        self.has_begun = True
        permits = admission.permits
        if permits is not None and permits.refusal is not None:
            self.load.shed(admission, outer)
            return
        rest = self._begin_again(admission, outer, identified)
        if permits is not None and permits.waits is not None:
            nesting.enter(admission, outer)
            admission.turn = PermitWait(rest)
        else:
            admission.rest = rest

    def _begin_again(
        self, admission: Admission, outer: Admission | None, identified: Any, wanted: Wanted | None = None
    ) -> Flow[None]:
        self.has_begun = True
        request = admission.request
        found: set[type[Wanted]] = set()
        while True:
            try:
                if wanted is not None:
                    found.add(type(wanted))
                    yield from self._find(admission, outer, wanted)
                    wanted = None
                    if admission.refusal is not None:
                        return
                if self._identify is not None and not (identified is None or isinstance(identified, Caller)):
                    given, identified = identified, UNASKED
                    identified = yield from self._identify.finding(request, given)
                # Empty if the request first met a decorator with an adaptive limit.
                if pending := PendingLimits(request):
                    yield limits_awaited(pending)
                admission.rest = None
                self.begin(request, outer, (admission, identified))
                break
            except HeadersTooLargeError as error:
                if identified is UNASKED or not leave_out_shadows(admission, error):
                    refuse_without_headers(admission, outer, error)
                    return
            except Wanted as error:
                if type(error) in found:
                    raise
                wanted = error
        yield from self._ask(admission)

    def _find(self, admission: Admission, outer: Admission | None, wanted: Wanted) -> Flow[None]:
        if not isinstance(wanted, BodyWanted):
            yield Awaited(admission.request.find_user(), "the user has to be awaited, expected one that is known")
            return
        try:
            yield from body_read(admission.request, admission.rules.body_limit)
        except BodyError as error:
            refuse_without_body(admission, outer, wanted.compiled_rules, error)

    def _ask(self, admission: Admission) -> Flow[None]:
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

    def _charge(self, admission: Admission, prepared: PreparedPlan, keys: Sequence[str]) -> Flow[None]:
        request_plan = prepared.bound(keys, admission.request.caller)
        if request_plan.plan is not None:
            admission.turn = yield from self.charging.charge(admission, request_plan, request_plan.plan, admission.settlement)
        if prepared.denying is not None:
            deny(admission, prepared.denying)
        admission.is_plain = admission.needs_only_fields

    def unanswered(self, admission: Admission, error: BaseException) -> Flow[None] | None:
        """Return the flow that continues after a failed plain plan. It is None for errors other than `StoreError`: raise these.

        Releases slots later, because the store may have taken them.
        """
        self.has_begun = True
        plan, prepared = admission.plan, admission.prepared
        if not isinstance(error, StoreError) or plan is None or prepared is None:
            self.outages.release_later(plan)
            end_undecided(admission)
            return None
        admission.waited = error.waited
        return self.charging.charge_without_store(admission, prepared.request_plan(plan.whole_plan), error)

    def conclude(self, admission: Admission, answer: AnyReading) -> Flow[None] | None:
        """Decide from a plain plan's reading. Return the next flow, if any."""
        permits = admission.permits
        prepared: Any = admission.prepared
        if (
            type(answer) is PlainSpend
            and answer.admitted
            and prepared.is_simple
            and (permits is None or not permits.is_to_be_told)
        ):
            if not self.outages.is_known:
                self.outages.answered()
            if prepared.counter is not None:
                prepared.counter.charged(answer.states)
            admission.reading = answer
            admission.is_plain = True
            # As `deferred`, without a call.
            admission.decision = decision = new_deferred()
            set_evidence(decision, answer)
            answer.owner = admission.request
            if permits is not None:
                set_in_force(decision, permits.in_force)
                if permits.adaptive.counts:
                    permits.count()
            return None
        return self._conclude_worked_out(admission, answer)

    def _conclude_worked_out(self, admission: Admission, answer: AnyReading) -> Flow[None] | None:
        prepared: Any = admission.prepared
        asked: Any = admission.plan
        permits = admission.permits
        template = asked.template
        admission.waited = answer.waited
        decision: Decision | None
        is_admitted = False
        if (
            isinstance(answer, PlainSpend)
            and answer.admitted
            and (template.is_enforced or (template.is_of_shadows and template.has_room(answer.states)))
        ):
            is_admitted, decision = True, deferred(answer, admission.request)
        else:
            admission.opened_settlement = settlement = admission.request.open_settlement()
            is_refused = isinstance(answer, PlainSpend) and not answer.admitted
            decision = template.refused(answer, settlement) if is_refused else template.decide(answer, settlement)
        if decision is None or not isinstance(answer, PlainSpend):
            plan = asked.whole_plan
            return self.charging.charge_by_reading(admission, prepared.request_plan(plan), plan, whole_reading(answer))
        if not self.outages.is_known:
            self.outages.answered()
        if not (is_admitted or decision.allowed):
            if prepared.counter is not None:
                prepared.counter.refused(answer.states)
            rules, key = template.refusing(decision, answer)
            refusal = self.refusals.refuse(admission, decision, rules, key, answer.now, prepared.compiled_rules)
            admission.refuse(answer, decision, refusal, rules)
            return self.charging.count_refusal(admission, decision, prepared.charged_rules) if prepared.bans else None
        if prepared.counter is not None:
            prepared.counter.charged(answer.states)
        admission.reading = answer
        admission.decision = decision
        admission.is_by_outcome = prepared.is_by_outcome
        if prepared.has_slots:
            self.refunds.hold(admission, answer)
        elif not prepared.is_by_outcome and (permits is None or not permits.is_to_be_told):
            admission.is_plain = True
            if permits is not None:
                show(admission)
        return None
