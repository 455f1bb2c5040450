"""Limits of the client behind a bucket's key: those of the rule, or its caller's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import NamedTuple

from limitgate.command.service import Service
from limitgate.errors import ConfigError
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.identity import Identities, Subject
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.request import DescribedRequest
from limitgate.limits.bucket import Bucket
from limitgate.routes.overview import METHODS
from limitgate.rules.callers import DEFAULT_TIER, Caller, KnownCaller
from limitgate.rules.options import check_part, read_limits
from limitgate.rules.rule import Rule

_FIXED = frozenset({"path", "method", "tier", "global"})
"""Key parts without a client, whose values are few."""


class LimitsFound(NamedTuple):
    """Limits that a bucket probably has."""

    buckets: Sequence[Bucket]
    caller: Caller | None
    """The listed caller of the bucket, if its key shows it."""
    are_certain: bool
    """False if the client may have other limits: its own, or from a callable."""


def limits_of(rule: Rule, tiers: Sequence[str], key: str, asked: Service) -> LimitsFound:
    """Return the limits of the bucket with this key, without suffix. Listed callers are tried."""
    listed = [each for each in asked.rules.listed_callers if _tier(each, asked) in tiers]
    identifying = [each for each in listed if _identifies(rule, each)]
    for entry in identifying:
        if key in _keys(rule, entry, asked):
            caller = Caller(entry.id, _tier(entry, asked), entry.limits, entry.priority)
            own = entry.limits.get(rule.name)
            if own is None:
                return LimitsFound(rule.buckets, caller, bool(rule.buckets))
            with suppress(ConfigError):
                return LimitsFound(rule.having_limits(read_limits(own)).buckets, caller, are_certain=True)
    others = [each for each in listed if each not in identifying and rule.name in each.limits]
    return LimitsFound(rule.buckets, None, bool(rule.buckets) and asked.settings.identify is None and not others)


def _tier(entry: KnownCaller, asked: Service) -> str:
    return entry.tier if entry.tier in asked.rules.tiers else DEFAULT_TIER


def _identifies(rule: Rule, entry: KnownCaller) -> bool:
    """True if the rule's key of this caller is known, and that of no other client."""
    own = {"caller"} if entry.api_key is None else {"caller", "api_key"}
    first = [check_part(part)[0] for part in rule.key]
    return not rule.given_parts and not own.isdisjoint(first) and all(label in _FIXED or label in own for label in first)


def _keys(rule: Rule, entry: KnownCaller, asked: Service) -> Iterator[str]:
    settings, rules = asked.settings, asked.rules
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
    templates = [*asked.templates_for(rule), None] if rule.key_asks("path") and asked.knows_routes else [None]
    methods = METHODS if rule.key_asks("method") else ("GET",)
    caller = Caller(entry.id, _tier(entry, asked), entry.limits)
    for template, method in product(templates, methods):
        subject = _ListedSubject(DescribedRequest.of_client(None, method, {}, None), caller, caller.tier, identities)
        subject.listed_key = None if entry.api_key is None else entry.api_key.removeprefix("sha256:").lower()
        subject.route = template
        yield compiled.key_of(subject)


class _ListedSubject(Subject):
    """A request of a listed caller, of whose API key only the digest is known."""

    __slots__ = ("listed_key",)

    listed_key: str | None

    def api_key(self) -> str | None:
        return self.listed_key
