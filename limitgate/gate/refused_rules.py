"""Finds the rules that a refusal's id may stand for, with the bucket's limits and its listed caller."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import NamedTuple

from limitgate.errors import ConfigError
from limitgate.gate.planning.compiled_rule import CompiledRule, id_name
from limitgate.gate.planning.identity import Identities, Subject
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.request import DescribedRequest
from limitgate.http.response import RefusalId, RefusalKey, tag_of
from limitgate.limits.bucket import Bucket
from limitgate.limits.decision import Decision
from limitgate.limits.plan import Charge, Plan
from limitgate.messages.text import listed
from limitgate.routes.overview import METHODS
from limitgate.rules.callers import DEFAULT_TIER, Caller, KnownCaller
from limitgate.rules.options import check_part
from limitgate.rules.rule import Rule, RuleSet
from limitgate.rules.settings import Settings


class RefusedRule(NamedTuple):
    rule: Rule
    tiers: Sequence[str]
    key: str
    buckets: Sequence[Bucket]
    """Empty for limits from a callable."""
    caller: str | None
    """Id of the listed caller that has this bucket."""
    is_certain: bool
    """False if the client may have other limits."""

    @property
    def limits(self) -> str:
        return listed([str(limit) for bucket in self.buckets for limit in bucket.limits]) or "limits from a callable"

    def is_certain_of(self, decision: Decision | None) -> bool:
        """Return True if other limits can't change this decision. A ban refuses under any limits."""
        return self.is_certain or (decision is not None and decision.is_ban)

    def plan(self, settings: Settings) -> Plan:
        """Return the plan that reads the bucket."""
        enforced = not (self.rule.shadow or settings.shadow)
        return Plan.look([Charge(self.key + bucket.suffix, bucket, 1, enforced, self.rule.name) for bucket in self.buckets])


class Refusers(NamedTuple):
    """The rules that may have refused a request."""

    rules: RuleSet
    in_code: Sequence[Rule]
    """Rules of decorators and dependencies."""
    settings: Settings
    templates: Callable[[Rule], Sequence[str]] | None = None
    """Returns the templates of the routes that a rule applies to; None if the routes are unknown."""
    most_keys: float = math.inf
    """Maximum of keys to compare for a rule. With more, the caller and its own limits stay unknown."""

    def read(self, text: str, keys: Iterable[RefusalKey]) -> tuple[RefusalId, list[RefusedRule]]:
        """Decrypt an id by the key that makes it the id of a rule, or by the first key.

        Raises `ValueError`.
        """
        read = [(refusal, self._refused(refusal)) for refusal in [key.read(text) for key in keys]]
        return next((each for each in read if each[1]), read[0])

    def _refused(self, refusal: RefusalId) -> list[RefusedRule]:
        tiers = self.rules.tiers
        of_tiers = [(tier, rule) for tier, rules in tiers.items() for rule in rules if tag_of(id_name(rule)) == refusal.tag]
        places: list[Rule] = []
        for rule in self.in_code:
            if tag_of(id_name(rule)) == refusal.tag and rule not in places:  # places with the same name share their limits
                places.append(rule)
                of_tiers += [(tier, rule) for tier in ([rule.tier] if rule.tier else tiers)]
        found = []
        for rule in {id(rule): rule for _, rule in of_tiers}.values():
            of_rule = [tier for tier, each in of_tiers if each is rule]
            key = f"{self.settings.key_prefix}:{rule.name}:{refusal.digest}"
            found.append(RefusedRule(rule, of_rule, key, *self._limits(rule, of_rule, key)))
        return found

    def _limits(self, rule: Rule, tiers: Sequence[str], key: str) -> tuple[Sequence[Bucket], str | None, bool]:
        of_tiers = [each for each in self.rules.listed_callers if self._tier(each) in tiers]
        keys = self._keys(rule)
        are_few = len(of_tiers) * keys.each <= self.most_keys
        others = False
        for entry in of_tiers:
            is_compared = are_few and _identifies(rule, entry)
            if is_compared and key in keys.of(entry, self._tier(entry)):
                own = entry.limits.get(rule.name)
                if own is None:
                    return rule.buckets, entry.id, bool(rule.buckets)
                with suppress(ConfigError):
                    return rule.having_limits(own).buckets, entry.id, True
            others = others or (rule.name in entry.limits and not (is_compared and keys.are_all))
        return rule.buckets, None, bool(rule.buckets) and self.settings.identify is None and not others

    def _tier(self, entry: KnownCaller) -> str:
        return entry.tier if entry.tier in self.rules.tiers else DEFAULT_TIER

    def _keys(self, rule: Rule) -> _Keys:
        settings, rules = self.settings, self.rules
        compiled = CompiledRule(
            rule,
            rule.kind,
            key_prefix=settings.key_prefix,
            secret=settings.secret_bytes,
            shadow=False,
            cardinality=None,
            inventable=lambda _: False,
        )
        proxies = TrustedProxies((), "x-forwarded-for")
        identities = Identities(
            rules.callers, proxies, rules.tiers, identifies=False, api_key_header="", ipv6_prefix=settings.ipv6_prefix
        )
        by_route = rule.key_asks("path")
        routes = [*self.templates(rule), None] if self.templates is not None and by_route else [None]
        methods = METHODS if rule.key_asks("method") else ("GET",)
        return _Keys(compiled, identities, routes, methods, are_all=self.templates is not None or not by_route)


class _Keys(NamedTuple):
    """The keys of one rule that a listed caller may have."""

    compiled: CompiledRule
    identities: Identities
    routes: Sequence[str | None]
    methods: Sequence[str]
    are_all: bool
    """False if the routes are unknown."""

    @property
    def each(self) -> int:
        """Number of keys of one caller."""
        return len(self.routes) * len(self.methods)

    def of(self, entry: KnownCaller, tier: str) -> Iterator[str]:
        caller = Caller(entry.id, tier, entry.limits)
        for route, method in product(self.routes, self.methods):
            subject = _ListedSubject(DescribedRequest.of_client(None, method, {}, None), caller, tier, self.identities)
            subject.listed_key = None if entry.api_key is None else entry.api_key.removeprefix("sha256:").lower()
            subject.route = route
            yield self.compiled.key_of(subject)


_FIXED = frozenset({"path", "method", "tier", "global"})


def _identifies(rule: Rule, entry: KnownCaller) -> bool:
    own = {"caller"} if entry.api_key is None else {"caller", "api_key"}
    first = [check_part(part)[0] for part in rule.key]
    return not rule.given_parts and not own.isdisjoint(first) and all(label in _FIXED or label in own for label in first)


class _ListedSubject(Subject):
    __slots__ = ("listed_key",)

    listed_key: str | None

    def api_key(self) -> str | None:
        return self.listed_key
