"""From a request to a plan: which rules apply, which buckets they mean, what each would be charged. Pure, compiled at start."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from limitgate.callers import DEFAULT_TIER, Caller, Callers
from limitgate.client import Proxies
from limitgate.decorators import EVERYTHING, Mark, seen_by_gate
from limitgate.keys import Key, Subject
from limitgate.paths import PathIndex, segments
from limitgate.plan import Charge, Plan
from limitgate.request import Request
from limitgate.routes import Routes
from limitgate.rules import Rule, RuleSet

log = logging.getLogger("limitgate")


class Bound:
    """A rule made ready: its key compiled, its windows at hand."""

    __slots__ = ("_cost", "_prefix", "binding", "key", "methods", "rule", "windows")

    def __init__(self, rule: Rule, kind: str, *, key_prefix: str, secret: bytes, shadow: bool) -> None:
        self.rule = rule
        self.methods = rule.methods
        self.windows = rule.windows
        self.key = Key(rule.key, f"{kind} {rule.name}", rule.path, secret)
        self.binding = not (shadow or rule.shadow)
        self._prefix = f"{key_prefix}:{rule.name}:"
        self._cost = None if callable(rule.cost) else rule.cost

    def charge(self, subject: Subject) -> Charge:
        """What this rule takes for a request of this subject."""
        key = self._prefix + self.key.digest(subject)
        cost = self.rule.cost_of(subject.request) if self._cost is None else self._cost
        return Charge(key, self.windows, cost, self.binding, self.rule.name)


class Considered(NamedTuple):
    """What the planner made of a request."""

    plan: Plan | None
    """None where no rule applies."""
    bounds: Sequence[Bound]
    """The rules behind the plan's charges, in their order."""
    seen: Container[Mark]
    """The decorators that were taken into account."""


UNLIMITED = Considered(None, (), EVERYTHING)
"""No rule applies, and none of the decorators either."""


class Planner:
    """Makes plans for the requests that come through one gate."""

    def __init__(
        self,
        rules: RuleSet,
        routes: Routes,
        proxies: Proxies,
        *,
        identifies: bool,
        api_key_header: str,
        ipv6_prefix: int,
        key_prefix: str,
        secret: bytes,
        shadow: bool,
    ) -> None:
        self._routes = routes
        self._proxies = proxies
        self._callers: Callers = rules.callers
        self._identifies = identifies
        self._api_key_header = api_key_header.lower()
        self._ipv6_prefix = ipv6_prefix
        self._bind = partial(Bound, key_prefix=key_prefix, secret=secret, shadow=shadow)
        self._decorated: dict[int, Bound] = {}
        self._tiers = {tier: self._index(of_tier) for tier, of_tier in rules.tiers.items()}
        every = [rule for of_tier in rules.tiers.values() for rule in of_tier]
        parts = [label for rule in every for part in rule.key for label in part.split("|")]
        self._asks_route = "path" in parts
        self._exempts = any(rule.exempt for rule in every)
        asks_api_key = "api_key" in parts
        self._reads_keys = asks_api_key or self._callers.list_keys
        if asks_api_key and not self._callers.list_keys and not identifies:
            log.warning(
                "no API keys are listed and there is no identify: every key that a client invents is a bucket of its own"
            )

    def plan(self, request: Request, identified: Caller | None) -> Considered:
        """The plan for a request from the caller that ``identify`` found, if any."""
        if request.method == "OPTIONS" and request.is_preflight:
            return UNLIMITED
        subject = self._subject(request, identified)
        bounds = self._matching(subject.tier, request)
        marks: tuple[Mark, ...] = ()
        if self._routes.decorated() or (self._asks_route and bounds):
            route = self._routes.find(request)
            if route is not None:
                subject.route, marks = route.template, route.marks
                bounds += self._bound_marks(marks, request.method)
        if "exempt" in marks or (self._exempts and any(bound.rule.exempt for bound in bounds)):
            return UNLIMITED
        if not bounds:
            return Considered(None, (), marks)
        return Considered(Plan(tuple([bound.charge(subject) for bound in bounds])), bounds, marks)

    def _index(self, rules: Sequence[Rule]) -> PathIndex[tuple[int, Bound]]:
        index: PathIndex[tuple[int, Bound]] = PathIndex()
        for place, rule in enumerate(rules):
            index.add(segments(rule.path), (place, self._bind(rule, "rule")))
        return index

    def _matching(self, tier: str, request: Request) -> list[Bound]:
        """The rules of a tier that apply to a request, in the order they were written."""
        index, method = self._tiers[tier], request.method
        found = index.find(request.paths[0])
        for other in request.paths[1:]:
            found += [entry for entry in index.find(other) if entry not in found]
        if len(found) > 1:
            found.sort(key=itemgetter(0))
        return [bound for _, bound in found if bound.methods is None or method in bound.methods]

    def _bound_marks(self, marks: Sequence[Mark], method: str) -> list[Bound]:
        bounds = []
        seen = seen_by_gate.get() or ()  # by a gate around this one
        for rule in marks:
            if isinstance(rule, Rule) and rule.applies_to(method) and rule not in seen:
                bound = self._decorated.get(id(rule))
                if bound is None:
                    bound = self._decorated[id(rule)] = self._bind(rule, "limit")
                bounds.append(bound)
        return bounds

    def _subject(self, request: Request, identified: Caller | None) -> Subject:
        """Who asks. Listed API keys prove a caller; without a list, one that ``identify`` vouches for goes by its id."""
        if identified is None and not self._callers and not self._reads_keys:
            return Subject(request, None, DEFAULT_TIER, None, self._ipv6_prefix)
        presented = self._presented_key(request) if self._reads_keys else None
        listed = self._callers.with_key(presented) if presented and self._callers.list_keys else None
        caller = identified or listed or self._callers.with_headers(request, self._proxies)
        if self._callers.list_keys:
            presented = presented if listed else None
        elif self._identifies:
            presented = identified.id if identified and presented else None
        tier = caller.tier if caller is not None and caller.tier in self._tiers else DEFAULT_TIER
        return Subject(request, caller, tier, presented, self._ipv6_prefix)

    def _presented_key(self, request: Request) -> str | None:
        value = request.headers.get(self._api_key_header, "").strip()
        if self._api_key_header == "authorization":
            scheme, _, value = value.partition(" ")
            value = value.strip() if scheme.lower() == "bearer" else ""
        return value or None
