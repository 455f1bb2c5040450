"""Finds the owner of a bucket by its key: a listed caller with its limits, and clients in logs.

A service's log has ids. An access log has clients and paths, from which keys are computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple
from urllib.parse import quote

from limitgate.command.service import Service
from limitgate.errors import ConfigError
from limitgate.gate.offline import offline_gate
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.gate.planning.identity import Identities, Subject
from limitgate.gate.planning.planner import Planner
from limitgate.http.client_ip import TrustedProxies, canonical
from limitgate.http.request import DescribedRequest, Request
from limitgate.http.response import LENGTH, RefusalId, RefusalKey
from limitgate.limits.bucket import Bucket
from limitgate.replay.access_log import Entry, Log, TextParser, parse_json
from limitgate.routes.overview import METHODS
from limitgate.rules.callers import DEFAULT_TIER, Caller, KnownCaller
from limitgate.rules.options import check_part
from limitgate.rules.rule import Rule
from limitgate.stores import MemoryStore

_FIXED = frozenset({"path", "method", "tier", "global"})


def limits_of(rule: Rule, tiers: Sequence[str], key: str, asked: Service) -> tuple[Sequence[Bucket], str | None, bool]:
    """Return the buckets, the caller's id, and False if the client may have other limits."""
    listed = [each for each in asked.rules.listed_callers if _tier(each, asked) in tiers]
    identifying = [each for each in listed if _identifies(rule, each)]
    for entry in identifying:
        if key in _keys(rule, entry, asked):
            own = entry.limits.get(rule.name)
            if own is None:
                return rule.buckets, entry.id, bool(rule.buckets)
            with suppress(ConfigError):
                return rule.having_limits(own).buckets, entry.id, True
    others = [each for each in listed if each not in identifying and rule.name in each.limits]
    return rule.buckets, None, bool(rule.buckets) and asked.settings.identify is None and not others


def _tier(entry: KnownCaller, asked: Service) -> str:
    return entry.tier if entry.tier in asked.rules.tiers else DEFAULT_TIER


def _identifies(rule: Rule, entry: KnownCaller) -> bool:
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
    __slots__ = ("listed_key",)

    listed_key: str | None

    def api_key(self) -> str | None:
        return self.listed_key


_ID = re.compile(rb"(?<![A-Za-z0-9_-])[A-Za-z0-9_-]{%d}(?![A-Za-z0-9_-])" % LENGTH)
_MOST = 10
_TOO_MANY = 429


class Trace(NamedTuple):
    file: str
    line: int
    text: str
    client: str | None
    """Client of the request; None in service logs, which may mask clients."""


def search(
    logs: Sequence[str], keys: Sequence[RefusalKey], refusal: RefusalId, buckets: Sequence[str], asked: Service
) -> list[Trace]:
    """Return the first lines in service logs, and in access logs each client's refusal nearest to the id's time."""
    match = _matcher(keys, refusal, tuple(buckets), asked)
    found: list[Trace] = []
    nearest: dict[str, tuple[tuple[bool, float], Trace]] = {}
    for name in logs:
        for number, line in enumerate(_lines(name), 1):
            is_of_bucket, entry = match(line)
            if not is_of_bucket:
                continue
            text = line.decode("utf-8", "backslashreplace").strip()
            if entry is None:
                if len(found) < _MOST:
                    found.append(Trace(name, number, text, None))
                continue
            client = entry.client.decode("utf-8", "backslashreplace")
            rank = entry.status != _TOO_MANY, abs(entry.at / 1e6 - refusal.at)
            known = nearest.get(one := _address(entry))
            if (known is None and len(nearest) < _MOST) or (known is not None and rank < known[0]):
                nearest[one] = rank, Trace(name, number, text, client)
    return found + [trace for _, trace in nearest.values()]


def _address(entry: Entry) -> str:
    text = entry.client.decode("utf-8", "replace")
    address = canonical(text)
    return text if address is None else str(address)


def _lines(name: str) -> Iterator[bytes]:
    for lines, _ in Log(name, "combined").blocks():
        yield from lines


def _matcher(
    keys: Sequence[RefusalKey], refusal: RefusalId, buckets: tuple[str, ...], asked: Service
) -> Callable[[bytes], tuple[bool, Entry | None]]:
    parse = TextParser()

    @cache
    def planner() -> Planner:
        return offline_gate(asked.rules, MemoryStore(), asked.settings, asked.routes).rules.planner

    @lru_cache(maxsize=100_000)
    def is_of_bucket(client: str, method: str, path: str, *headers: tuple[str, str]) -> bool:
        request: Request = DescribedRequest(method, path, client, dict(headers))
        if asked.knows_routes:
            request = asked.request(method, quote(path), client, headers)
        planner().address(request)
        planned = planner().plan(request, None)
        return (
            planned is not None
            and planned.plan is not None
            and any(charge.key.startswith(buckets) for charge in planned.plan.charges)
        )

    def match(line: bytes) -> tuple[bool, Entry | None]:
        for named in _ID.findall(line):
            read = [key.read(named.decode()) for key in keys]
            if any((each.tag, each.digest) == (refusal.tag, refusal.digest) for each in read):
                return True, None
        entry = parse_json(line) if line.startswith(b"{") else parse(line)
        if entry is None or not buckets:
            return False, None
        is_found = is_of_bucket(_address(entry), entry.method, entry.path, *(entry.headers or {}).items())
        return is_found, entry if is_found else None

    return match
