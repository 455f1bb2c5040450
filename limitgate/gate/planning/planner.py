"""Turns a request into a plan, by code compiled at start."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

from limitgate.errors import ConfigError
from limitgate.gate.flow import PendingLimits
from limitgate.gate.planning.cardinality import CardinalityGuard
from limitgate.gate.planning.compiled_rule import AdaptiveLimits, CompiledRule
from limitgate.gate.planning.given_limits import GivenLimits
from limitgate.gate.planning.identity import Identities, Subject
from limitgate.gate.planning.prepared import (
    EXEMPT,
    NO_CHARGES,
    AdaptiveMatch,
    CompiledRules,
    ConditionalPlans,
    GivenPlans,
    PreparedPlan,
    RequestPlan,
    RuleMatch,
    keep,
)
from limitgate.http.client_ip import Hop, TrustedProxies
from limitgate.http.paths import PathIndex, Reach, beyond, segments, with_empty_segments
from limitgate.http.request import Request
from limitgate.keys import Value, keys_of_client
from limitgate.limits.plan import Charge, Plan
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.messages.text import Names, expected_of, listed
from limitgate.observing.counts import Counts
from limitgate.routes import NoRoutes, Routes
from limitgate.rules import lint
from limitgate.rules.callers import DEFAULT_TIER, Caller
from limitgate.rules.decorators import EVERYTHING, Mark, decided_marks
from limitgate.rules.rule import EVERY, Rule, RuleSet, placed_rules

_PATHS, _SHORT = 512, 200
"""Maximum of cached paths, and of characters in a path, because clients choose paths."""

LateLimit = tuple[Rule, Sequence[Value]]


AnyPlans = PreparedPlan | GivenPlans | ConditionalPlans
_UNLIMITED = PreparedPlan((), (), (), EVERYTHING)
_UNKNOWN: tuple[object, AnyPlans] = object(), _UNLIMITED


def _patterns(rules: Iterable[Rule]) -> Iterator[tuple[str, ...]]:
    for rule in rules:
        yield from map(segments, (*rule.paths, *rule.exclude))


def _index(compiled_rules: Sequence[CompiledRule], *, exempt: bool) -> PathIndex[tuple[int, CompiledRule]]:
    index: PathIndex[tuple[int, CompiledRule]] = PathIndex()
    for place, compiled_rule in enumerate(compiled_rules):
        if compiled_rule.rule.exempt is exempt:
            for pattern in compiled_rule.rule.paths:
                index.add(segments(pattern), (place, compiled_rule))
    return index


Entering = tuple[Callable[[Any, Any, PreparedPlan | GivenPlans, Caller | None], bool], Any, Any]
"""A function that takes permits (False if refused or waiting), the admission, and the next outer admission."""


def _enter(*_: object) -> bool:
    return True


NO_PLACES: Entering = _enter, None, None


class Planner:
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
        self._match_of = lru_cache(maxsize=_PATHS)(RuleMatch)
        self._ways: dict[tuple[str, str, str, str], tuple[object, AnyPlans]] = {}
        self._prepared: dict[Any, AnyPlans] = {}
        """Prepared plans by tier, method, route template, rules, decorators and protocol."""
        self._decorated: dict[int, CompiledRule] = {}
        compiled = {tier: [self._compile(rule, "rule") for rule in of_tier] for tier, of_tier in rules.tiers.items()}
        self._tiers = {tier: _index(of_tier, exempt=False) for tier, of_tier in compiled.items()}
        self._exempt = {tier: _index(of_tier, exempt=True) for tier, of_tier in compiled.items()}
        self._every = {tier: [each for each in of_tier if not each.rule.exempt] for tier, of_tier in compiled.items()}
        every = list({id(rule): rule for of_tier in rules.tiers.values() for rule in of_tier}.values())
        self.names: frozenset[str] = frozenset([rule.name for rule in every])
        self.asks_user: bool = any(rule.key_asks("user") for rule in every)
        self.adapts: bool = adaptive_limits is not None and any(rule.adaptive is not None for rule in every)
        self.proxies: TrustedProxies = identities.proxies
        self._has_exempt = any(rule.exempt for rule in every)
        self._reach = Reach.of(_patterns(every))
        self._given = GivenLimits(names)
        self.names_shown = names
        self._strict = strict
        self._unlisted = Once(Diagnosis.UNLISTED_KEYS)
        for rule in every:
            self._review(rule)

    @property
    def routes(self) -> Routes:
        return self._routes

    def plan(self, request: Request, identified: Caller | None) -> RequestPlan | None:
        """Return a plan; None if limits must be awaited. Errors of callables propagate."""
        found = self.prepared(request, identified, NO_PLACES)
        return None if found is None else found[0].bound(found[1], request.caller)

    def prepared(  # noqa: C901, PLR0912 - each extra call slows down all requests
        self, request: Request, caller: Caller | None, entering: Entering | None = None
    ) -> tuple[PreparedPlan, Sequence[str]] | None:
        """Return a request's prepared plan, and its keys.

        ``entering`` takes permits before any key is computed. The result is None without permits, or if limits must be awaited.
        """
        identities, tier, own = self._identities, DEFAULT_TIER, None
        if caller is not None or self._has_callers:
            caller = caller or identities.listed(request)
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
        if own or not prepared.is_direct:
            if type(prepared) is ConditionalPlans:
                prepared = prepared.plan_of(request)
            if prepared.adaptive is not None:
                # This is the first decorator with an adaptive limit.
                if entering is None:
                    return None
                enter, admission, outer = entering
                if not enter(admission, outer, prepared, caller):
                    return None
            if own or not prepared.is_ready:
                limited = prepared.with_limits(request, own) if own or type(prepared) is GivenPlans else prepared
                if limited is None:
                    return None
                prepared = limited if limited.is_ready else limited.with_costs(request)
        plan: PreparedPlan = prepared  # type: ignore[assignment]  # No other is direct or ready.
        if request.cost is not None:
            plan = plan.costing(request.cost)
        if plan.is_by_address:
            proxies = identities.proxies
            is_sampled = not (proxies.take_peers and next(proxies.unsampled, False))
            client = request.resolved_client() if is_sampled else request.peer
            keys: Sequence[str] = keys_of_client(plan.keys, client, identities.ipv6_prefix)
        else:
            keys = plan.keys_of(Subject(request, caller, tier, identities)) if plan.keys else ()
        return plan, keys if plan.suffixes is None else plan.spread(keys)

    def messages(self, prepared: PreparedPlan, request: Request) -> RequestPlan:
        caller: Caller | None = request.caller
        subject = Subject(request, caller, self._identities.tier_of(caller), self._identities)
        if not prepared.is_ready:
            prepared = prepared.with_costs(request)
        keys = prepared.keys_of(subject)
        return prepared.bound(keys if prepared.suffixes is None else prepared.spread(keys), caller)

    def may_apply(self, request: Request) -> tuple[Sequence[CompiledRule], Container[Mark]]:
        """Return the rules of all tiers that may apply if headers are unreadable, and the decorators (all if exempt)."""
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
        return [self._compiled(rule) for rule, _ in extra_rules if rule.applies_to(request.method)]

    def address(self, request: Request) -> str | None:
        request.resolve_client = self._identities.proxies.client
        return self._identities.address(request)

    def believes(self, request: Request, header: str) -> bool:
        """True if a trusted proxy sent this header."""
        proxies = self._identities.proxies
        return header in request.headers and proxies.trust(request.peer)

    def hops(self, request: Request) -> list[Hop]:
        return self._identities.proxies.hops(request)

    def further(
        self, request: Request, identified: Caller | None, applying: Sequence[LateLimit]
    ) -> RequestPlan | PendingLimits:
        """Return `PendingLimits` for limits to await. Errors of callables propagate."""
        subject = self.subject(request, identified)
        if any(rule.key_asks("path") for rule, _ in applying):
            subject.route, _ = self._route(request)
        given: list[tuple[CompiledRule, Sequence[Value]]] = []
        pending: list[int] = []
        for rule, values in applying:
            if values:
                request.given_values = {**(request.given_values or {}), rule.name: values}
            applied = self._given.applied([self._compiled(rule)], request, subject.own_limits)
            pending += applied.pending
            given += [(each, values) for each in applied.compiled_rules]
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
        """Plan the charges of named rules, even if their ``path`` doesn't match. ``charges`` were already made.

        Raises `ConfigError` for an unknown name or route.
        """
        subject = self.subject(request, identified)
        own = {charge.rule for charge in charges} if path is None else set()
        of_tier = {each.rule.name: each for each in self._every[subject.tier] if each.rule.has_limits}
        others = [self._named(name, of_tier, own, path) for name in dict.fromkeys(names) if name not in own]
        subject.route = None if isinstance(self._routes, NoRoutes) else path
        applied = self._given.applied(others, request, subject.own_limits)
        if applied.pending:
            return PendingLimits(request, applied.pending)
        found = [*(charges if own else ()), *[charge for each in applied.compiled_rules for charge in each.charges_of(subject)]]
        ordered = [charge for name in dict.fromkeys(names) for charge in found if charge.rule == name]
        return RequestPlan(Plan.peek(ordered), ()) if ordered else NO_CHARGES

    def _named(
        self, name: str, of_tier: Mapping[str, CompiledRule], own: AbstractSet[str | None], path: str | None
    ) -> CompiledRule:
        compiled_rule = of_tier.get(name)
        if compiled_rule is None:
            known = listed(sorted({*of_tier, *[each for each in own if each is not None]}))
            raise ConfigError(f"there is no rule {name!r:.80} for this caller, expected one of {known or 'none'}")
        if path is None and compiled_rule.rule.key_asks("path") and not isinstance(self._routes, NoRoutes):
            raise ConfigError(f"rule {name!r} counts by path, expected path= with a route's template, such as '/items/{{id}}'")
        return compiled_rule

    def keep_adaptive_limits(self) -> None:
        if self._adaptive_limits is not None:
            self._adaptive_limits.keep([rule for of_tier in self.rule_set.tiers.values() for rule in of_tier])

    def subject(self, request: Request, identified: Caller | None) -> Subject:
        """Return the subject of a request. Sets ``request.caller`` for callables."""
        subject = self._identities.subject(request, identified)
        request.caller = subject.caller
        return subject

    def _route(self, request: Request) -> tuple[str | None, tuple[Mark, ...]]:
        route = self._routes.find(request)
        return (None, ()) if route is None else (route.template, route.marks)

    def _prepare(self, tier: str, request: Request, version: object) -> AnyPlans:
        """Prepare plans. Not cached by path: long paths, OPTIONS, unknown methods, plans without ``version``."""
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
        if match is EXEMPT or "exempt" in marks:
            return _UNLIMITED
        if marks:
            match = self._match_of(match.compiled_rules + self._compiled_marks(marks, request), match.exempting)
        if request.leaves_out_shadows:
            match = self._match_of(tuple([each for each in match.compiled_rules if each.enforced]), match.exempting)
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
        match = self._match_of(applying, ())
        denying = match.denying
        if denying is not None and denying.enforced:
            return PreparedPlan((), (), (), marks, denying=denying)
        adaptive = None
        if match.adaptive_rules:
            counts = any(each.row is not None and not each.rule.has_counts for each in match.adaptive_rules)
            adaptive = AdaptiveMatch(match.adaptive_rules, (request.method_class, template), counts)
        subject = Subject(request, None, tier, self._identities)
        subject.route = template
        limited = tuple([each for each in match.limited_rules if each.rule.per == "request" or request.is_websocket])
        keys = [each.prepared_key(subject) for each in limited]
        return GivenPlans(self._given, limited, keys, marks, adaptive, denying=denying).as_written

    def _match(self, tier: str, method: str, sent: str, root: str) -> RuleMatch:
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
        # Every interpretation of the path must be exempt.
        if not all(exempting):
            exempting = []
        elif exempting and all(any(not each.rule.is_conditional for each in one) for one in exempting):
            return EXEMPT
        return self._match_of(self._at(self._tiers[tier], method, paths), tuple(exempting))

    def interpretations(self, sent: str, root: str) -> Sequence[str] | None:
        """Return the paths that a sent path may mean; None if it could be any path."""
        paths = self._reach.interpretations(sent, root)
        if paths is None:
            return None
        if mounts := self._routes.mounts():
            return (*paths, *beyond(mounts, paths))
        if self._routes.fills_with_nothing:
            return (*paths, *with_empty_segments(sent, root))
        return paths

    def _for_any_path(self, tier: str, method: str) -> CompiledRules:
        return tuple([compiled_rule for compiled_rule in self._every[tier] if compiled_rule.rule.applies_to(method)])

    def _at(self, index: PathIndex[tuple[int, CompiledRule]], method: str, paths: Iterable[str]) -> CompiledRules:
        placed = {
            entry
            for path in paths
            for entry in index.find(path)
            if entry[1].rule.applies_to(method) and not entry[1].rule.excludes(path)
        }
        return tuple([compiled_rule for _, compiled_rule in sorted(placed, key=itemgetter(0))])

    def _compiled_marks(self, marks: Sequence[Mark], request: Request) -> CompiledRules:
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
        compiled_rule = self._decorated.get(id(rule))
        if compiled_rule is None:
            self._check_replaced(rule)
            compiled_rule = self._decorated[id(rule)] = self._compile(rule, "limit")
            self.adapts |= compiled_rule.places is not None
            self._review(rule)
        return compiled_rule

    def check_limits_of(self, before: Planner) -> None:
        """Raise `ConfigError` if limits in code replace rules that are missing here."""
        for compiled_rule in tuple(before._decorated.values()):
            self._check_replaced(compiled_rule.rule)

    def _check_replaced(self, rule: Rule) -> None:
        if not rule.replaces:
            return
        known = {EVERY, *self.names, *[placed.name for placed in placed_rules()]} - {rule.name}
        for name in rule.replaces:
            if name not in known:
                expected = expected_of(name, sorted(known))
                raise ConfigError(f"limit {rule.name!r}: replaces: there is no rule {name!r}, {expected}")

    def _review(self, rule: Rule) -> None:
        if rule.key_asks("api_key") and not self._identities.vouch_for_keys:
            self._unlisted.log(rule.name)
        for limit, most, burst in lint.overshooting(rule) if self._strict else ():
            Diagnosis.OVERSHOOTS.log(rule.name, limit, most, burst, limit.count)
