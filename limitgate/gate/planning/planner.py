"""From a request to a plan: the rules that apply, their buckets, and the charge for each. Pure, compiled at start."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

from limitgate.errors import ConfigError
from limitgate.gate.planning.adaptive_limits import AdaptiveLimits
from limitgate.gate.planning.cardinality import CardinalityGuard
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.given_limits import ConditionalPlans, GivenLimits, GivenPlans, PendingLimits
from limitgate.gate.planning.identity import Identities, Subject
from limitgate.gate.planning.request_plan import NO_CHARGES, AdaptiveMatch, PreparedPlan, RequestPlan, keep
from limitgate.gate.planning.rule_match import EXEMPT, CompiledRules, RuleMatch
from limitgate.http.client_ip import Hop
from limitgate.http.paths import PathIndex, Reach, beyond, segments, with_empty_segments
from limitgate.http.request import Request
from limitgate.keys import Value, keys_of_client
from limitgate.limits.plan import Charge, Plan
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.messages.text import Names, listed
from limitgate.observing.counts import Counts
from limitgate.routes import NoRoutes, Routes, fills_with_nothing, mounts_of
from limitgate.rules.callers import DEFAULT_TIER, Caller
from limitgate.rules.decorators import EVERYTHING, Mark, decided_marks
from limitgate.rules.review import lint
from limitgate.rules.rule import Rule, RuleSet

_PATHS, _SHORT = 512, 200
"""Paths whose rules a planner remembers, and the characters that one may have: clients choose both."""

LateLimit = tuple[Rule, Sequence[Value]]
"""A rule that an application asks for while a request is under way, and the further parts of its key."""


AnyPlans = PreparedPlan | GivenPlans | ConditionalPlans
"""The prepared plan of requests, or what finds it by what callables say of a request."""
_UNLIMITED = PreparedPlan((), (), (), EVERYTHING)
_UNKNOWN: tuple[object, AnyPlans] = object(), _UNLIMITED
"""Stands for what is not remembered: of no version that routes have."""


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


Begin = Callable[[PreparedPlan | GivenPlans, Caller | None], bool]
"""Takes places under the adaptive limits of requests that go by a plan, for one of a caller. False if that refuses it, or if it
has to wait."""


def no_places(_: PreparedPlan | GivenPlans, __: Caller | None) -> bool:
    """`Begin` for who only wants to know what would be charged."""
    return True


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
        names: Names = "masked",
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
        self._ways: dict[tuple[str, str, str, str], tuple[object, AnyPlans]] = {}
        """By tier, method, path and root path the version of the routes, and the prepared plan."""
        self._prepared: dict[Any, AnyPlans] = {}
        """By tier, kind of method, template of the route, rules and decorators, and whether it is a WebSocket."""
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
        self._given = GivenLimits(names)
        self._strict = strict
        self._unlisted = Once(Diagnosis.UNLISTED_KEYS)
        for rule in every:
            self._review(rule)

    def plan(self, request: Request, identified: Caller | None) -> RequestPlan | None:
        """Plan the charges of a request, without taking places for it. ``identified`` is the caller that ``identify`` found.

        Calls the callables that give limits, and raises what they raise; None where limits have yet to be awaited.
        """
        found = self.prepared(request, identified, no_places)
        return None if found is None else found[0].bound(found[1], request.caller)

    def prepared(  # noqa: C901, PLR0912 - each call more costs all requests
        self, request: Request, identified: Caller | None, begin: Begin | None = None
    ) -> tuple[PreparedPlan, Sequence[str]] | None:
        """Plan a request: a prepared plan, and its keys.

        ``identified`` is the caller that ``identify`` found, if any. If there are adaptive limits, ``begin`` is called before
        any key is made. None if that refuses or makes wait, and if limits have to be awaited.
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
        if request.is_outermost:
            version = self._routes.version(request)
            known, prepared = self._ways.get((tier, request.sent_method, request.sent, request.root), _UNKNOWN)
            if known is not version:
                prepared = self._prepare(tier, request, version)
        else:
            request.check_lines()
            prepared = self._prepare(tier, request, None)
        if type(prepared) is ConditionalPlans:
            prepared = prepared.plan_of(request)
        if prepared.adaptive is not None and (begin is None or not begin(prepared, caller)):
            return None  # without ``begin`` it is the first decorator with an adaptive limit that was met
        if own or not prepared.is_ready:
            limited = prepared.with_limits(request, own) if own or type(prepared) is GivenPlans else prepared
            if limited is None:
                return None
            prepared = limited if limited.is_ready else limited.with_costs(request)
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

    def messages(self, prepared: PreparedPlan, request: Request) -> RequestPlan:
        """Bind the prepared plan of each message over a WebSocket."""
        caller: Caller | None = request.caller
        subject = Subject(request, caller, self._identities.tier_of(caller), self._identities)
        if not prepared.is_ready:
            prepared = prepared.with_costs(request)
        keys = prepared.keys_of(subject)
        return prepared.bound(keys if prepared.suffixes is None else prepared.spread(keys), caller)

    def may_apply(self, request: Request) -> tuple[Sequence[CompiledRule], Container[Mark]]:
        """The rules that may apply to a request whose headers are unknown: those of every tier, whatever their conditions.

        With the decorators among them, which are taken into account; everything is if the request is exempt.
        """
        found: dict[CompiledRule, None] = {}
        taken: Container[Mark] = EVERYTHING
        _, marks = self._route(request) if self._routes.decorated() else (None, ())
        for tier in self._tiers:
            match = self._match(tier, request.method, request.sent, request.root)
            if match is not EXEMPT and "exempt" not in marks:
                found |= dict.fromkeys(match.compiled_rules + self._compiled_marks(marks, request))
                taken = marks
        return tuple(found), taken

    def compiled(self, request: Request, extra_rules: Sequence[LateLimit]) -> Sequence[CompiledRule]:
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
        self, request: Request, identified: Caller | None, applying: Sequence[LateLimit]
    ) -> RequestPlan | PendingLimits:
        """Plan the charges of rules that an application asks for while a request is under way, and that apply to it.

        Calls the callables that give limits, and raises what they raise; pending while one of them has yet to be awaited.
        """
        subject = self.subject(request, identified)
        if any(rule.key_asks("path") for rule, _ in applying):
            subject.route, _ = self._route(request)
        given: list[tuple[CompiledRule, Sequence[Value]]] = []
        pending: list[int] = []
        for rule, values in applying:
            limited, keys = self._given.applied([self._compiled(rule)], request, subject.own_limits)
            pending += keys
            given += [(each, values) for each in limited]
        if pending:
            return PendingLimits(request, pending)
        made = [(charge, each) for each, values in given for charge in each.admitted_charges(subject, values)]
        if not made:
            return NO_CHARGES
        plan, behind = Plan.spend([charge for charge, _ in made]), [each for _, each in made]
        by_outcome, has_slots = any(each.is_by_outcome for each in behind), any(each.has_slots for each in behind)
        return RequestPlan(plan.named() if has_slots else plan, behind, by_outcome, has_slots)

    def named(
        self,
        request: Request,
        identified: Caller | None,
        names: Sequence[str],
        path: str | None,
        charges: Sequence[Charge],
    ) -> RequestPlan | PendingLimits:
        """Plan what a request would be charged by rules of these names, whatever their ``path``; it was charged ``charges``.

        Raises `ConfigError` for a name that no rule has, and for a rule that counts by a route which is not known.
        """
        subject = self.subject(request, identified)
        own = {charge.rule for charge in charges} if path is None else set()
        of_tier = {each.rule.name: each for each in self._every[subject.tier] if each.rule.has_limits}
        others = [self._named(name, of_tier, own, path) for name in dict.fromkeys(names) if name not in own]
        subject.route = None if isinstance(self._routes, NoRoutes) else path
        limited, pending = self._given.applied(others, request, subject.own_limits)
        if pending:
            return PendingLimits(request, pending)
        found = [*(charges if own else ()), *[charge for each in limited for charge in each.charges_of(subject)]]
        ordered = [charge for name in dict.fromkeys(names) for charge in found if charge.rule == name]
        return RequestPlan(Plan.peek(ordered), ()) if ordered else NO_CHARGES

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

    def keep_adaptive_limits(self) -> None:
        """Have adaptive limits go on under the terms of these rules, which have come into force."""
        if self._adaptive_limits is not None:
            self._adaptive_limits.keep([rule for of_tier in self.rule_set.tiers.values() for rule in of_tier])

    def subject(self, request: Request, identified: Caller | None) -> Subject:
        """The subject of a request, whose caller its rules' callables find at the request."""
        subject = self._identities.subject(request, identified)
        request.caller = subject.caller
        return subject

    def _route(self, request: Request) -> tuple[str | None, tuple[Mark, ...]]:
        """Template and decorators of the route of a request; none where it is not known."""
        route = self._routes.find(request)
        return (None, ()) if route is None else (route.template, route.marks)

    def _prepare(self, tier: str, request: Request, version: object) -> AnyPlans:
        """Find what the requests of a tier, method, path and root path have in common.

        It is remembered for these, but not if they are long, if the method was invented, or if more of a request matters: then
        ``version`` is None. Clients choose paths, so most of what is kept is shared by all paths of the same rules and route.
        """
        kind = request.method_class
        if kind == "OPTIONS" and request.is_preflight:
            return _UNLIMITED
        match = self._match(tier, request.method, request.sent, request.root)
        asks_route = match is not EXEMPT and (match.asks_route or self._routes.decorated())
        template, marks = self._route(request) if asks_route else (None, ())
        prepared = self._prepared_with(tier, request, match, template, marks)
        way = tier, request.sent_method, request.sent, request.root
        if version is not None and kind not in ("OPTIONS", "other") and sum(map(len, way)) <= _SHORT:
            keep(self._ways, way, (version, prepared), most=self._most_paths)
        return prepared

    def _prepared_with(
        self, tier: str, request: Request, match: RuleMatch, template: str | None, marks: tuple[Mark, ...]
    ) -> AnyPlans:
        """What the requests have in common that have the same rules, and a route with this template and these decorators."""
        if match is EXEMPT or "exempt" in marks:
            return _UNLIMITED
        if marks:
            match = self._match_of(match.compiled_rules + self._compiled_marks(marks, request), match.exempting)
        of_marks = tuple(map(id, marks))
        alike = tier, request.method_class, template, match.compiled_rules, match.exempting, of_marks, request.is_websocket
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
        limited = tuple([each for each in match.limited_rules if each.rule.per == "request" or request.is_websocket])
        keys = [each.prepared_key(subject) for each in limited]
        return GivenPlans(self._given, limited, keys, marks, adaptive, denying=denying).as_written

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
