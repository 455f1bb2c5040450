"""Explains decisions, by a real gate with a read-only store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from limitgate.errors import HeadersTooLargeError, StoreError
from limitgate.gate import late, load
from limitgate.gate.admission import Admission
from limitgate.gate.flow import arun, run
from limitgate.gate.gate import Gate
from limitgate.gate.nesting import response_fields
from limitgate.gate.planning.planner import NO_PLACES, LateLimit, Planner
from limitgate.gate.planning.prepared import PreparedPlan
from limitgate.http.client_ip import Hop, Networks
from limitgate.http.paths import PathIndex, segments
from limitgate.http.rate_fields import Fields
from limitgate.http.request import Request
from limitgate.limits.decision import Decision
from limitgate.limits.plan import Plan, Reading
from limitgate.messages.text import listed
from limitgate.rules.callers import DEFAULT_TIER, Caller
from limitgate.rules.decorators import EVERYTHING
from limitgate.rules.rule import Rule, RuleSet
from limitgate.stores import SyncStore


class RuleReason(NamedTuple):
    name: str
    tier: str | None
    applies: bool
    why: str


class Explanation(NamedTuple):
    hops: Sequence[Hop]
    client: str | None
    counted_as: str | None
    caller: Caller | None
    tier: str
    path: str
    rules: Sequence[RuleReason]
    decision: Decision | None
    """None if no limit applies."""
    status: int | None
    """None if the application answers."""
    fields: Fields
    """Fields of the refusal, or added to the response."""
    unevaluated: Sequence[Rule] = ()
    """Limits behind the gate that depend on values of the application."""

    @property
    def unused(self) -> set[str | None]:
        """Rules that admit, without usage besides this request."""
        if self.decision is None or not self.decision.allowed:
            return set()
        buckets = self.decision.standings
        used = {each.charge.rule for each in buckets for window in each.windows() if window.used > each.charge.cost}
        return {each.charge.rule for each in buckets} - used


def doubt_about_bucket(rule: Rule) -> str | None:
    """Return what to say about a rule's bucket if the routes of the service aren't known; None if it's certain."""
    if not rule.key_asks("path") or not set("*{") & set(rule.paths[0]):
        return None
    return (
        f"rule {rule.name} has a bucket for each route: this is that of {rule.paths[0]}, which a service uses only if its "
        "routes are unknown"
    )


def doubts_about_buckets(found: Explanation, rules: RuleSet) -> dict[str, str]:
    """Return `doubt_about_bucket` by the name of each rule that applies and has one."""
    applied = {rule.name for rule in found.rules if rule.applies}
    doubts = {rule.name: doubt_about_bucket(rule) for rule in rules.tiers[found.tier] if rule.name in applied}
    return {name: doubt for name, doubt in doubts.items() if doubt is not None}


class LookingStore:
    """Reads the buckets of another store and never writes."""

    measures_silence = True

    def __init__(self, store: SyncStore) -> None:
        self._store = store
        self.failure: StoreError | None = None

    def spend(self, plan: Plan, timeout: float) -> Reading:
        try:
            return self._store.spend(Plan.look(plan.charges), timeout)
        except StoreError as error:
            self.failure = error
            raise

    async def aspend(self, plan: Plan, timeout: float) -> Reading:
        """`spend` for async callers. It blocks the event loop."""
        return self.spend(plan, timeout)

    def close(self) -> None:
        """Do nothing: the owner of the other store closes it."""


def explain(gate: Gate, request: Request, late_limits: Sequence[Rule] = ()) -> Explanation:
    """Explain the decision on a request. ``late_limits`` come from dependencies or throttles. Raises `StoreError`."""
    admission = gate.check(request, waits=False)
    run(gate.store, late.further(gate, admission, _known(late_limits)), admission.budget)
    return explained(gate, request, admission, late_limits)


async def aexplain(gate: Gate, request: Request, late_limits: Sequence[Rule] = ()) -> Explanation:
    """`explain` for a gate with an async ``identify`` or async limits."""
    admission = await gate.acheck(request)
    await arun(gate.store, late.further(gate, admission, _known(late_limits)), admission.budget)
    return explained(gate, request, admission, late_limits)


def _known(late_limits: Sequence[Rule]) -> list[LateLimit]:
    return [(rule, ()) for rule in late_limits if not rule.given_parts]


def explained(gate: Gate, request: Request, admission: Admission, late_limits: Sequence[Rule] = ()) -> Explanation:
    """Explain a decision. Raises `StoreError`."""
    planner = gate.rules.planner
    if gate.store.failure is not None:
        raise gate.store.failure
    load.show(admission)
    decision, refusal = admission.decision, admission.refusal
    fields = [*(refusal.fields if refusal is not None else ()), *response_fields(admission)]
    _end(gate, admission)
    status, hops = None if refusal is None else refusal.status, planner.hops(request)
    try:
        subject = planner.subject(request, request.caller)
        who = request.client, subject.address(), subject.caller, subject.tier
        reasons = _reasons(planner, request, subject.caller, subject.tier)
    except HeadersTooLargeError as error:
        who = None, None, None, DEFAULT_TIER
        may_apply = [each.rule for each in planner.may_apply(request)[0]]
        reasons = [RuleReason(rule.name, rule.tier or DEFAULT_TIER, True, str(error)) for rule in may_apply]
    applying = (
        []
        if admission.marks is EVERYTHING
        else [rule for rule in late_limits if rule.applies_to(request.method) and rule.admits(request)]
    )
    reasons += [RuleReason(rule.name, None, True, "limits the route behind the gate") for rule in applying]
    unevaluated = [rule for rule in applying if rule.given_parts]
    return Explanation(hops, *who, request.path, reasons, decision, status, fields, unevaluated)


def _end(gate: Gate, admission: Admission) -> None:
    if admission.permits is not None:
        admission.permits.end("untaught")
    if admission.has_slots:
        admission.begun(200)
        admission.end()
        gate.refunds.settle(admission)


def _reasons(planner: Planner, request: Request, caller: Caller | None, tier: str) -> list[RuleReason]:
    found = planner.prepared(request, caller, NO_PLACES)
    if found is None:
        raise TypeError("a callable that gives limits is async, expected a gate that awaits it")
    prepared, _ = found
    denying = () if prepared.denying is None else (prepared.denying,)
    adaptive = () if prepared.adaptive is None else prepared.adaptive.compiled_rules
    of_messages = () if prepared.messages is None else prepared.messages.compiled_rules
    applying = {id(each.written) for each in (*prepared.compiled_rules, *of_messages, *denying, *adaptive)}
    known = planner.rule_set.tiers
    paths = planner.interpretations(request.sent, request.root)
    of_tier = known[tier]
    exempting = next((rule for rule in of_tier if rule.exempt and _first_reason(rule, request, paths) is None), None)
    if applying or request.is_preflight:
        exempting = None
    written = {id(rule): rule for rules in known.values() for rule in rules}
    reasons = []
    for rule in written.values():
        of = rule.tier or DEFAULT_TIER
        if id(rule) in applying or rule is exempting:
            reasons.append(RuleReason(rule.name, of, True, _matched(rule, request)))
        else:
            why = _other_tier(rule, of_tier, tier) or _first_reason(rule, request, paths)
            why = why or _superseded(rule, exempting, prepared, request)
            reasons.append(RuleReason(rule.name, of, False, why))
    decorators = [each for each in (*prepared.compiled_rules, *adaptive) if each.is_decorator]
    names = dict.fromkeys(each.rule.name for each in decorators)
    return reasons + [RuleReason(name, None, True, "decorates the route's endpoint") for name in names]


def _matched(rule: Rule, request: Request) -> str:
    what = "exempts" if rule.exempt else "denies" if rule.deny else "limits"
    conditions = [f"{request.method} {request.path}"]
    if rule.clients:
        conditions.append(f"client {request.client}")
    adaptive, adapts = rule.adaptive, ""
    if adaptive is not None:
        adapts = f"; adaptive: {adaptive.start} in flight in a new process, later {adaptive.min} to {adaptive.max}"
    methods = f", for {listed(sorted(rule.methods))}" if rule.methods else ""
    return f"{what} {' of '.join(conditions)}: path {listed(rule.paths)}{methods}{adapts}"


def _other_tier(rule: Rule, of_tier: Sequence[Rule], tier: str) -> str | None:
    if any(rule is each for each in of_tier):
        return None
    if (rule.tier or DEFAULT_TIER) == DEFAULT_TIER:
        return f"tier {tier} replaces it with its own rule of this name"
    return f"is for tier {rule.tier}, the caller is of {tier}"


def _first_reason(rule: Rule, request: Request, paths: Sequence[str] | None) -> str | None:
    if not rule.applies_to(request.method):
        return f"is for {listed(sorted(rule.methods or ()))}, not {request.method}"
    why = path_reason(rule, paths)
    if why is None and not rule.admits(request):
        return _client_reason(rule, request)
    return why


def path_reason(rule: Rule, paths: Sequence[str] | None) -> str | None:
    """Return why a rule doesn't match a path; None if it matches."""
    if paths is None:
        return None
    index: PathIndex[Any] = PathIndex()
    for pattern in rule.paths:
        index.add(segments(pattern), rule)
    matching = [path for path in paths if index.find(path)]
    if not matching:
        return f"path {paths[0]} does not match {listed(rule.paths)}"
    if all(rule.excludes(path) for path in matching):
        return f"path {matching[0]} is excluded by {listed(rule.exclude)}"
    if rule.exempt and len(matching) < len(paths):
        other = next(path for path in paths if path not in matching)
        return f"the path could also be read as {other}, which the rule does not exempt"
    return None


def _client_reason(rule: Rule, request: Request) -> str:
    if rule.clients and not Networks(rule.clients).hold(request.client):
        return f"client {request.client or 'without an address'} is none of {listed(rule.clients)}"
    return "its condition (when) is not met"


def _superseded(rule: Rule, exempting: Rule | None, prepared: PreparedPlan, request: Request) -> str:
    if request.is_preflight:
        return "CORS preflights are never counted"
    if request.leaves_out_shadows and rule.shadow:
        return "shadow rules are left out, because a header is too long to be read"
    if exempting is not None:
        return f"rule {exempting.name} exempts this request"
    if prepared.denying is not None and prepared.denying.enforced:
        return f"rule {prepared.denying.rule.name} denies this request"
    if prepared.marks is EVERYTHING:
        return "the route's endpoint is exempt"
    others = [each.rule.name for each in prepared.compiled_rules if each.rule.supersedes(rule, is_decorator=False)]
    return f"rule {others[0]} replaces it" if others else "gives this request no limits"
