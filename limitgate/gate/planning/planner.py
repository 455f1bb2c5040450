"""From a request to a plan: the rules that apply, their buckets, and the charge for each. Pure, compiled at start."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

from limitgate.errors import ConfigError
from limitgate.gate.planning.adaptive_limits import AdaptiveLimits
from limitgate.gate.planning.cardinality import CardinalityGuard
from limitgate.gate.planning.compiled_rule import ChargeSpec, CompiledRule
from limitgate.gate.planning.given_limits import ConditionalPlans, GivenLimits, GivenPlans, PendingPlan, is_short
from limitgate.gate.planning.identity import Identities, Subject
from limitgate.gate.planning.request_plan import UNLIMITED, AdaptiveMatch, PreparedPlan, RequestPlan, keep
from limitgate.gate.planning.rule_match import EXEMPT, CompiledRules, RuleMatch
from limitgate.http.client_ip import Hop
from limitgate.http.paths import PathIndex, Reach, beyond, segments, with_empty_segments
from limitgate.http.request import Request
from limitgate.keys import Value, keys_of_client
from limitgate.limits.plan import Charge, Plan
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.messages.text import listed
from limitgate.observing.counts import Counts
from limitgate.routes import NoRoutes, Routes, fills_with_nothing, mounts_of
from limitgate.rules.callers import DEFAULT_TIER, Caller
from limitgate.rules.decorators import EVERYTHING, Mark, decided_marks
from limitgate.rules.review import lint
from limitgate.rules.rule import Rule, RuleSet

_PATHS, _SHORT = 512, 200
"""Paths whose rules a planner remembers, and the characters that one may have: clients choose both."""

ExtraRule = tuple[Rule, Sequence[Value]]
"""A rule that an application asks for while a request is under way, and the further parts of its key."""


AnyPlans = PreparedPlan | GivenPlans | ConditionalPlans
"""The prepared plan of requests, or what finds it by what callables say of a request."""
_UNKNOWN: tuple[object, AnyPlans | None] = object(), None
_UNLIMITED = PreparedPlan((), (), (), EVERYTHING)


def _charge(compiled_rules: Sequence[CompiledRule], specs: Iterable[ChargeSpec]) -> RequestPlan:
    """Make the plan that charges each rule by its spec."""
    charges: list[Charge] = []
    behind: list[CompiledRule] = []
    by_outcome = has_slots = False
    for compiled_rule, spec in zip(compiled_rules, specs):
        of_rule = compiled_rule.charges(*spec)
        charges += of_rule
        behind += [compiled_rule] * len(of_rule)
        by_outcome |= compiled_rule.is_by_outcome
        has_slots |= compiled_rule.has_slots
    plan = Plan.spend(charges)
    return RequestPlan(plan.named() if has_slots else plan, tuple(behind), (), by_outcome, has_slots=has_slots)


def _by_what_is_charged(compiled_rules: CompiledRules) -> tuple[CompiledRules, CompiledRules]:
    """Rules to charge for the request, and those to charge for each message."""
    of_messages = tuple([each for each in compiled_rules if each.rule.per == "message"])
    return tuple([each for each in compiled_rules if each.rule.per == "request"]), of_messages


def _patterns(rules: Iterable[Rule]) -> Iterator[tuple[str, ...]]:
    """The patterns of all rules, those of what they exclude, too."""
    for rule in rules:
        yield from map(segments, (*rule.paths, *rule.exclude))


def _index(compiled_rules: Sequence[CompiledRule], *, exempt: bool) -> PathIndex[tuple[int, CompiledRule]]:
    """The rules of a tier that are exempt, or those that are not, by path and with their places in the tier."""
    index: PathIndex[tuple[int, CompiledRule]] = PathIndex()
    for place, compiled_rule in enumerate(compiled_rules):
        if compiled_rule.rule.exempt is exempt:
            for pattern in compiled_rule.rule.paths:
                index.add(segments(pattern), (place, compiled_rule))
    return index


def _in_order(placed: Iterable[tuple[int, CompiledRule]]) -> list[CompiledRule]:
    """Rules in the order of their places in the tier."""
    return [compiled_rule for _, compiled_rule in sorted(placed, key=itemgetter(0))]


class Applying(NamedTuple):
    """Rules and decorators that apply to a request."""

    subject: Subject
    match: RuleMatch
    marks: tuple[Mark, ...]
    """All decorators that were taken into account."""

    @property
    def adaptive(self) -> AdaptiveMatch | None:
        """The adaptive limits among them; None for none."""
        denying, rules = self.match.denying, self.match.adaptive_rules
        if not rules or (denying is not None and denying.enforced):
            return None
        return AdaptiveMatch(rules, (self.subject.request.method_class, self.subject.route))


Begin = Callable[[Request, AdaptiveMatch, Caller | None], bool]
"""Takes places under adaptive limits for a request of a caller. False if it has to wait for them, or is refused."""


class Planner:
    """Makes plans for the requests that come through one gate."""

    def __init__(
        self,
        rules: RuleSet,
        routes: Routes,
        identities: Identities,
        *,
        key_prefix: str,
        secret: bytes,
        shadow: bool,
        strict: bool = False,
        cardinality: CardinalityGuard | None = None,
        counts: Counts | None = None,
        adaptive_limits: AdaptiveLimits | None = None,
        paths: int = _PATHS,
    ) -> None:
        self.rule_set = rules
        self._most_paths = paths
        self.cardinality = cardinality
        """Counts the buckets that each source opens; None where sources may open any number."""
        self._adaptive_limits = adaptive_limits
        self._routes = routes
        self._identities = identities
        self._has_callers = identities.list_callers
        self._compile = partial(
            CompiledRule,
            key_prefix=key_prefix,
            secret=secret,
            shadow=shadow,
            cardinality=cardinality,
            inventable=identities.may_be_invented,
            counts=counts,
            adaptive_limits=adaptive_limits,
        )
        self._matches: dict[tuple[str, str, str, str], RuleMatch] = {}
        """By tier, method, path and root path."""
        self._match_of = lru_cache(maxsize=_PATHS)(RuleMatch)
        """Shared by all paths at which the same rules apply: clients choose paths."""
        self._ways: dict[tuple[str, str, str, str], tuple[object, AnyPlans | None]] = {}
        """By tier, method, path and root path the version of the routes, and the prepared plan; None where there is none."""
        self._templates: dict[tuple[str, str, str, str], tuple[object, str | None, tuple[Mark, ...]]] = {}
        """By the same, where there is no prepared plan, the version of the routes, and template and decorators of the route."""
        self._prepared: dict[Any, AnyPlans] = {}
        """By tier, method, template of the route, rules and decorators."""
        self._decorated: dict[int, CompiledRule] = {}
        compiled = {tier: [self._compile(rule, "rule") for rule in of_tier] for tier, of_tier in rules.tiers.items()}
        self._tiers = {tier: _index(of_tier, exempt=False) for tier, of_tier in compiled.items()}
        self._exempt = {tier: _index(of_tier, exempt=True) for tier, of_tier in compiled.items()}
        self._every = {tier: [each for each in of_tier if not each.rule.exempt] for tier, of_tier in compiled.items()}
        every = list({id(rule): rule for of_tier in rules.tiers.values() for rule in of_tier}.values())
        self.names = frozenset([rule.name for rule in every])
        """The names of all rules, of whatever tier."""
        self.asks_user = any(rule.key_asks("user") for rule in every)
        """True if any of them counts by user."""
        self.adapts = adaptive_limits is not None and any(rule.adaptive is not None for rule in every)
        """True if any of them has an adaptive limit, or a decorator that was met so far."""
        self.trusts_proxies = identities.proxies.trust_anybody
        """True if headers of any peer are believed."""
        self._has_exempt = any(rule.exempt for rule in every)
        self._reach = Reach.of(_patterns(every))
        self._given = GivenLimits()
        self._strict = strict
        self._unlisted = Once(Diagnosis.UNLISTED_KEYS)
        for rule in every:
            self._review(rule)

    def plan(self, request: Request, identified: Caller | None) -> RequestPlan | PendingPlan:
        """Plan the charges of a request. ``identified`` is the caller that ``identify`` found, if any.

        Calls the callables that give limits, and raises what they raise; pending while one of them has yet to be awaited.
        """
        applying = self.applying(request, identified)
        return UNLIMITED if applying is None else self.plan_of(applying)

    def applying(self, request: Request, identified: Caller | None) -> Applying | None:
        """Find the rules and decorators that apply to a request; None if it is exempt."""
        if request.method == "OPTIONS" and request.is_preflight:
            return None
        subject = self.subject(request, identified)
        match, marks = self._applying(request, subject)
        return None if match is EXEMPT else Applying(subject, match, marks)

    def plan_of(self, applying: Applying) -> RequestPlan | PendingPlan:
        """`plan` the charges of the rules that apply to a request."""
        subject, match, marks = applying
        if match.denying is not None and match.denying.enforced:
            return RequestPlan(None, (), marks, denying=match.denying)
        if match.callables or (subject.caller is not None and subject.caller.limits):
            return self._plan_given(match, marks, subject)
        return self._plan_of(match.request_rules, match.message_rules, match.denying, marks, subject)

    def _plan_given(self, match: RuleMatch, marks: tuple[Mark, ...], subject: Subject) -> RequestPlan | PendingPlan:
        """Plan the charges of rules by limits that are given at run time."""
        own = subject.own_limits
        known = given = None
        if not own:
            given = match.limits_given(subject.request)
            try:
                known = match.rules_given.values.get(given)
            except TypeError:  # there are lists in it
                given = None
        if known is None:
            limited, pending = self._given.applied(match.limited_rules, subject.request, own)
            if pending:
                return PendingPlan(subject.request, pending, partial(self._plan_given, match, marks, subject))
            counted = tuple([each for each in limited if each.rule.has_counts])
            known = _by_what_is_charged(counted) if match.message_rules else (counted, ())
            if given is not None and is_short(given):
                match.rules_given.add(given, known)
        return self._plan_of(*known, match.denying, marks, subject)

    def _plan_of(
        self,
        request_rules: CompiledRules,
        message_rules: CompiledRules,
        denying: CompiledRule | None,
        marks: tuple[Mark, ...],
        subject: Subject,
    ) -> RequestPlan:
        """Plan the charges of rules that apply to a request."""
        request_plan = self._charged(request_rules, subject) if request_rules else RequestPlan(None, (), marks)
        if denying is not None:
            request_plan = request_plan._replace(denying=denying)
        if message_rules and subject.request.is_websocket:
            return request_plan._replace(marks=marks, messages=self._charged(message_rules, subject))
        return request_plan._replace(marks=marks) if marks else request_plan

    def prepared(  # noqa: C901, PLR0912 - each call more costs all requests
        self, request: Request, identified: Caller | None, begin: Begin | None = None
    ) -> tuple[PreparedPlan, Sequence[str]] | None:
        """Plan an HTTP request that comes by no other gate: a prepared plan, and its keys.

        ``identified`` is the caller that ``identify`` found, if any. If there are adaptive limits, ``begin`` is called with
        them before any key is made. None if that refuses or makes wait, and if limits have to be awaited.
        """
        identities, caller, tier, own = self._identities, identified, DEFAULT_TIER, None
        if caller is not None:
            caller = identities.caller(request, caller)
        elif self._has_callers:
            caller = identities.listed(request)
        if caller is not None:
            request.caller = caller
            own = caller.limits
            tier = identities.tier_of(caller)
        version = self._routes.version(request)
        known, prepared = self._ways.get((tier, request.sent_method, request.sent, request.root), _UNKNOWN)
        if known is not version:
            prepared = self._prepare(tier, request, version)
        if type(prepared) is not PreparedPlan:  # as of almost no request
            if type(prepared) is ConditionalPlans:
                prepared = prepared.plan_of(request)
            if prepared is None:
                return None
        if prepared.adaptive is not None and (begin is None or not begin(request, prepared.adaptive, caller)):
            return None  # without ``begin`` it is the first decorator with an adaptive limit that was met
        if own or not prepared.is_ready:
            if own or type(prepared) is GivenPlans:
                prepared = prepared.with_limits(request, own)
            if prepared is None:
                return None
            if not prepared.is_ready:
                prepared = prepared.with_costs(request)
        plan: PreparedPlan = prepared  # type: ignore[assignment]  # a `GivenPlans` is never ready
        if plan.is_by_address:
            proxies = identities.proxies
            if proxies.take_peers and proxies.until_sample > 0:
                proxies.until_sample -= 1
                client = request.peer
            else:
                client = request.resolved_client()
            keys: Sequence[str] = keys_of_client(plan.keys, client, identities.ipv6_prefix)
        else:
            keys = plan.keys_of(Subject(request, caller, tier, identities)) if plan.keys else ()
        return plan, keys if plan.suffixes is None else plan.spread(keys)

    def may_apply(self, request: Request) -> tuple[Sequence[CompiledRule], Container[Mark]]:
        """The rules that may apply to a request whose headers are unknown: those of every tier, whatever their conditions.

        With the decorators among them, which are taken into account; everything is if the request is exempt.
        """
        found: dict[CompiledRule, None] = {}
        taken: Container[Mark] = EVERYTHING
        for tier in self._tiers:
            match = self._match(tier, request.method, request.sent, request.root)
            marks: tuple[Mark, ...] = ()
            if match is not EXEMPT and (match.asks_route or self._routes.decorated()):
                _, marks = self._template(tier, request)
            if match is not EXEMPT and "exempt" not in marks:
                found |= dict.fromkeys(match.compiled_rules + self._compiled_marks(marks, request))
                taken = marks
        return tuple(found), taken

    def compiled(self, request: Request, extra_rules: Sequence[ExtraRule]) -> Sequence[CompiledRule]:
        """Rules that an application asks for, compiled, but for those of other methods."""
        return [self._compiled(rule) for rule, _ in extra_rules if rule.applies_to(request.method)]

    def address(self, request: Request) -> str | None:
        """Address or network that a request's client is counted by; None without a peer address."""
        return self._identities.address(request)

    def believes(self, request: Request, header: str) -> bool:
        """True if a request has a header that a trusted proxy has written."""
        proxies = self._identities.proxies
        return header in request.headers and proxies.trust(request.peer)

    def hops(self, request: Request) -> list[Hop]:
        """The way of a request through proxies, from its peer to its client."""
        return self._identities.proxies.hops(request)

    def further(
        self, request: Request, identified: Caller | None, extra_rules: Sequence[ExtraRule]
    ) -> RequestPlan | PendingPlan:
        """Plan the charges of rules that an application asks for while a request is under way, as `plan` does."""
        subject = self.subject(request, identified)
        applying = [(rule, values) for rule, values in extra_rules if rule.applies_to(request.method) and rule.admits(request)]
        if any(rule.key_asks("path") for rule, _ in applying):
            route = self._routes.find(request)
            subject.route = route.template if route else None
        extra = [(self._compiled(rule), values) for rule, values in applying]
        return self._plan_extra(extra, subject)

    def named(
        self,
        request: Request,
        identified: Caller | None,
        names: Sequence[str],
        path: str | None,
        charges: Sequence[Charge],
    ) -> RequestPlan | PendingPlan:
        """Plan what a request would be charged by rules of these names, whatever their ``path``; it was charged ``charges``.

        Raises `ConfigError` for a name that no rule has, and for a rule that counts by a route which is not known.
        """
        subject = self.subject(request, identified)
        own = {charge.rule for charge in charges} if path is None else set()
        of_tier = {each.rule.name: each for each in self._every[subject.tier] if each.rule.has_limits}
        others = [self._named(name, of_tier, own, path) for name in dict.fromkeys(names) if name not in own]
        subject.route = None if isinstance(self._routes, NoRoutes) else path
        return self._plan_named(names, others, subject, charges if own else ())

    def _named(
        self, name: str, of_tier: Mapping[str, CompiledRule], own: AbstractSet[str | None], path: str | None
    ) -> CompiledRule:
        """The rule of a name, for a request that was charged by ``own`` rules."""
        compiled_rule = of_tier.get(name)
        if compiled_rule is None:
            known = listed(sorted({*of_tier, *[each for each in own if each is not None]}))
            raise ConfigError(f"there is no rule {name!r:.80} for this caller, expected some of {known or 'none'}")
        if path is None and compiled_rule.rule.key_asks("path") and not isinstance(self._routes, NoRoutes):
            raise ConfigError(f"rule {name!r} counts by path, expected path= as a route's template, such as '/items/{{id}}'")
        return compiled_rule

    def _plan_named(
        self, names: Sequence[str], others: Sequence[CompiledRule], subject: Subject, charges: Sequence[Charge]
    ) -> RequestPlan | PendingPlan:
        """Plan the charges of rules in the order of these names; those of rules that apply to the request are known."""
        limited, pending = self._given.applied(others, subject.request, subject.own_limits)
        if pending:
            again = partial(self._plan_named, names, others, subject, charges)
            return PendingPlan(subject.request, pending, again)
        found = [*charges, *[charge for each in limited for charge in each.charges_of(subject)]]
        ordered = [charge for name in dict.fromkeys(names) for charge in found if charge.rule == name]
        return RequestPlan(Plan.peek(ordered) if ordered else None, (), ())

    def _plan_extra(self, extra: Sequence[tuple[CompiledRule, Sequence[Value]]], subject: Subject) -> RequestPlan | PendingPlan:
        """Plan the charges of rules with further parts of their keys."""
        given: list[tuple[CompiledRule, Sequence[Value]]] = []
        pending: list[int] = []
        for compiled_rule, values in extra:
            limited, keys = self._given.applied([compiled_rule], subject.request, subject.own_limits)
            pending += keys
            given += [(each, values) for each in limited]
        if pending:
            return PendingPlan(subject.request, pending, partial(self._plan_extra, extra, subject))
        if not given:
            return RequestPlan(None, (), ())
        specs = [compiled_rule.spec(subject, values) for compiled_rule, values in given]
        return _charge(tuple([compiled_rule for compiled_rule, _ in given]), specs)

    def keep_adaptive_limits(self) -> None:
        """Have adaptive limits go on under the terms of these rules, which have come into force."""
        if self._adaptive_limits is not None:
            self._adaptive_limits.keep([rule for of_tier in self.rule_set.tiers.values() for rule in of_tier])

    def subject(self, request: Request, identified: Caller | None) -> Subject:
        """The subject of a request, whose caller its rules' callables find at the request."""
        subject = self._identities.subject(request, identified)
        request.caller = subject.caller
        return subject

    def _applying(self, request: Request, subject: Subject) -> tuple[RuleMatch, tuple[Mark, ...]]:
        """The rules and decorators that apply to a request, and all decorators that were taken into account."""
        match = self._match(subject.tier, request.method, request.sent, request.root)
        marks: tuple[Mark, ...] = ()
        if match is not EXEMPT and (match.asks_route or self._routes.decorated()):
            subject.route, marks = self._template(subject.tier, request)
            if "exempt" in marks:
                return EXEMPT, marks
            if marks:
                match = self._match_of(match.compiled_rules + self._compiled_marks(marks, request), match.exempting)
        if match.is_conditional:
            match = EXEMPT if match.exempts(request) else self._match_of(match.narrowed(request), ())
        return match, marks

    def _template(self, tier: str, request: Request) -> tuple[str | None, tuple[Mark, ...]]:
        """Template and decorators of the route of a request; none where it is not known."""
        if self._templates and request.comes_straight:  # then `prepared` was asked before
            known = self._templates.get((tier, request.sent_method, request.sent, request.root))
            if known is not None and known[0] is self._routes.version(request):
                return known[1:]
        route = self._routes.find(request)
        return (None, ()) if route is None else (route.template, route.marks)

    def _prepare(self, tier: str, request: Request, version: object) -> AnyPlans | None:
        """Find what the requests of a tier, method, path and root path have in common, and remember it unless they are long.

        Clients choose paths, so most of what is kept is shared by all paths of the same rules and route.
        """
        way = tier, request.sent_method, request.sent, request.root
        match = self._match(tier, request.method, request.sent, request.root)
        template: str | None = None
        marks: tuple[Mark, ...] = ()
        asks_route = version is not None and (match.asks_route or self._routes.decorated())
        if asks_route:
            route = self._routes.find(request)
            if route is not None:
                template, marks = route.template, route.marks
        prepared = self._preparable(tier, request, version, match, template, marks)
        if sum(map(len, way)) <= _SHORT:
            keep(self._ways, way, (version, prepared), most=self._most_paths)
            if asks_route and type(prepared) is not PreparedPlan:
                keep(self._templates, way, (version, template, marks), most=self._most_paths)
        return prepared

    def _preparable(  # noqa: PLR0917 - all that tells one plan from another
        self, tier: str, request: Request, version: object, match: RuleMatch, template: str | None, marks: tuple[Mark, ...]
    ) -> AnyPlans | None:
        if version is None or request.method_class in ("OPTIONS", "other"):  # a preflight's headers matter; invented are many
            return None
        if match is EXEMPT or "exempt" in marks:
            return _UNLIMITED
        if marks:
            match = self._match_of(match.compiled_rules + self._compiled_marks(marks, request), match.exempting)
        alike = tier, request.method, template, match.compiled_rules, match.exempting, tuple(map(id, marks))
        prepared = self._prepared.get(alike)
        if prepared is None:
            if match.is_conditional:
                prepared = ConditionalPlans(match, partial(self._prepared_for, tier, template, marks), _UNLIMITED)
            else:
                prepared = self._prepared_for(tier, template, marks, request, match.compiled_rules)
            keep(self._prepared, alike, prepared, most=_PATHS)
        return prepared

    def _prepared_for(
        self, tier: str, template: str | None, marks: tuple[Mark, ...], request: Request, applying: CompiledRules
    ) -> PreparedPlan | GivenPlans:
        """What the requests of a tier, method and route have in common to which these rules apply."""
        match = self._match_of(applying, ())
        denying = match.denying
        if denying is not None and denying.enforced:
            return PreparedPlan((), (), (), marks, denying=denying)
        adaptive = None
        if match.adaptive_rules:
            adaptive = AdaptiveMatch(match.adaptive_rules, (request.method_class, template))
        subject = Subject(request, None, tier, self._identities)
        subject.route = template
        limited = tuple([each for each in match.limited_rules if each.rule.per == "request"])
        keys = [each.prepared_key(subject) for each in limited]
        return GivenPlans(self._given, limited, keys, marks, adaptive, denying=denying).as_written

    def _charged(self, compiled_rules: tuple[CompiledRule, ...], subject: Subject) -> RequestPlan:
        return _charge(compiled_rules, [compiled_rule.spec(subject) for compiled_rule in compiled_rules])

    def _match(self, tier: str, method: str, sent: str, root: str) -> RuleMatch:
        """The match of a tier, method, path as sent and root path; remembered unless they are long."""
        way = tier, method, sent, root
        match = self._matches.get(way)
        if match is None:
            match = self._find_match(tier, method, sent, root)
            if len(method) + len(sent) + len(root) <= _SHORT:
                keep(self._matches, way, match, most=self._most_paths)
        return match

    def _find_match(self, tier: str, method: str, sent: str, root: str) -> RuleMatch:
        paths = self.interpretations(sent, root)
        if paths is None:
            return self._match_of(self._for_any_path(tier, method), ())
        exempting = [self._at(self._exempt[tier], method, (path,)) for path in paths] if self._has_exempt else []
        if not all(exempting):  # a path that may be read otherwise is not let off
            exempting = []
        elif exempting and all(any(not each.rule.is_conditional for each in one) for one in exempting):
            return EXEMPT
        return self._match_of(self._at(self._tiers[tier], method, paths), tuple(exempting))

    def interpretations(self, sent: str, root: str) -> Sequence[str] | None:
        """Paths that a path as sent may be read as, all of which rules are looked for at; None if it may be any."""
        paths = self._reach.interpretations(sent, root)
        if paths is None:
            return None
        if mounts := mounts_of(self._routes):
            return (*paths, *beyond(mounts, paths))
        if fills_with_nothing(self._routes):
            return (*paths, *with_empty_segments(sent, root))
        return paths

    def _for_any_path(self, tier: str, method: str) -> CompiledRules:
        """All rules of a tier that are for a method, but for exempt ones: those of a path that may be any."""
        return tuple([compiled_rule for compiled_rule in self._every[tier] if compiled_rule.rule.applies_to(method)])

    def _at(self, index: PathIndex[tuple[int, CompiledRule]], method: str, paths: Iterable[str]) -> CompiledRules:
        """The rules of an index that are for a method and any of some paths, in the order they were written."""
        placed = {
            entry
            for path in paths
            for entry in index.find(path)
            if entry[1].rule.applies_to(method) and not entry[1].rule.excludes(path)
        }
        return tuple(_in_order(placed))

    def _compiled_marks(self, marks: Sequence[Mark], request: Request) -> CompiledRules:
        """The decorators that apply to a request, but for those that a gate around this one has decided about."""
        compiled_rules: list[CompiledRule] = []
        by_outer = decided_marks.get() if request.passed_a_gate else None
        decided = by_outer if isinstance(by_outer, tuple) else ()
        for rule in marks:
            if isinstance(rule, Rule) and rule.applies_to(request.method) and rule not in decided:
                if rule.per == "message" and not request.is_websocket:
                    raise ConfigError(f"limit {rule.name!r} is per message, expected it on a WebSocket endpoint only")
                if any(compiled_rule.rule.name == rule.name for compiled_rule in compiled_rules):
                    raise ConfigError(f"limit {rule.name!r} applies twice to one request, expected different names")
                compiled_rules.append(self._compiled(rule))
        return tuple(compiled_rules)

    def _compiled(self, rule: Rule) -> CompiledRule:
        """A rule that is not from the rule set, compiled when it is first met."""
        compiled_rule = self._decorated.get(id(rule))
        if compiled_rule is None:
            compiled_rule = self._decorated[id(rule)] = self._compile(rule, "limit")
            self.adapts |= compiled_rule.places is not None
            self._review(rule)
        return compiled_rule

    def _review(self, rule: Rule) -> None:
        """Log what is odd about a rule by itself."""
        if rule.key_asks("api_key") and not self._identities.vouch_for_keys:
            self._unlisted.log(rule.name)
        for limit, most, burst in lint.overshooting(rule) if self._strict else ():
            Diagnosis.OVERSHOOTS.log(rule.name, limit, most, burst, limit.count)
