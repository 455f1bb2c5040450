"""Finds one client's buckets of a rule by key parts, without a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from typing import Any, TypedDict

from limitgate.algorithms import ban
from limitgate.errors import ConfigError
from limitgate.gate.flow import ConfigFlow, Flow
from limitgate.gate.journal import JournalFlows
from limitgate.gate.planning.compiled_rule import CompiledRule, forgetting
from limitgate.gate.planning.identity import Identities, Subject
from limitgate.http.client_ip import TrustedProxies, canonical
from limitgate.http.request import DescribedRequest
from limitgate.keys import Value, part_of, text_of, value_of
from limitgate.limits.decision import Decision, decide
from limitgate.limits.limit import Duration, as_seconds
from limitgate.limits.plan import Charge, Plan, Reading
from limitgate.observing.logs import audited
from limitgate.rules.callers import DEFAULT_TIER, Caller
from limitgate.rules.decorators import limits_on
from limitgate.rules.options import Given, check_names, check_part, read_limits
from limitgate.rules.rule import Rule, RuleSet

_PLACEHOLDERS = frozenset("{<*^")
"""Characters that mark a route template in any framework."""
_API_KEY = ":api-key"
"""A label that no key part can have."""


class BucketParts(TypedDict, total=False):
    """Key parts that identify a bucket. Parts that the key lacks are ignored."""

    ip: str | IPv4Address | IPv6Address | None
    """The client's address."""
    api_key: str | None
    """The API key as sent. Default: that in ``headers``."""
    caller: str | Caller | None
    """A `Caller`, or its id."""
    user: object
    """The authenticated user, or its id."""
    headers: Mapping[str, str]
    """Headers by name. ``x-api-key`` is the API key; for another ``api_key_header`` of the gate, pass ``api_key``."""
    json: object
    """The JSON body, or the members in the key: ``{"user": 7}``."""
    method: str | None
    """The method, such as ``GET``."""
    host: str | None
    """The host without port."""
    path: str | None
    """The path, or the framework's route template, such as ``/items/{id}``. If the gate doesn't know the routes, the rule's
    pattern or a path.
    """
    tier: str | None
    """Default: that of the `Caller`, of the rule, or ``default``."""
    limits: Given
    """Limits that a callable returned, or of a caller given by id."""
    given: Mapping[str, object]
    """Values of dependencies in the key of a `limitgate.fastapi.RateLimit`: ``{"current_user": user}``."""


class RuleBucketOperations:
    def __init__(self, alike: Sequence[Sequence[Charge]], timeout: float, journal: JournalFlows | None = None) -> None:
        self._alike = alike
        """Charges for each key that the gate may use."""
        self._timeout = timeout
        self._journal = journal

    @property
    def keys(self) -> list[str]:
        return [charge.key for charge in self._charges]

    def name(self) -> str:
        return self._charges[0].key

    def peeking(self) -> Flow[Decision]:
        return self._carried_out(Plan.peek(self._charges))

    def resetting(self) -> Flow[Decision]:
        return self._carried_out(Plan.reset(self._charges))

    def banning(self, seconds: Duration | None) -> Flow[Decision]:
        return self._carried_out(Plan.ban(self._charges, ban.microseconds(as_seconds(seconds, "seconds"))))

    def pardoning(self) -> ConfigFlow[Decision]:
        if self._journal is not None:
            yield forgetting([charges[0] for charges in self._alike]), self._timeout
        decision = yield from self._carried_out(Plan.ban(self._charges, 0))
        if self._journal is not None:
            # Last, because processes record a ban only while it is in force. The store may have no journal.
            with suppress(ConfigError):
                yield from self._journal.removing(self.keys)
        return decision

    @property
    def _charges(self) -> list[Charge]:
        return [charge for charges in self._alike for charge in charges]

    def _carried_out(self, plan: Plan) -> Flow[Decision]:
        reading = yield plan, self._timeout
        at, decisions = 0, []
        for charges in self._alike:
            buckets = reading.buckets[at : at + len(charges)]
            at += len(charges)
            admitted = all(after is not None or not charge.enforced for charge, _, after in buckets)
            decisions.append(decide(Plan.peek(charges), Reading(reading.now, buckets, admitted, reading.waited)))
        return min(decisions, key=_room)


def _room(decision: Decision) -> tuple[float, int, float, list[int]]:
    # The short windows of a used bucket may be full again.
    return -decision.retry_after, decision.remaining, -decision.reset_after, [window.remaining for window in decision.windows]


class AsyncRuleBucket:
    """One client's bucket of a rule, from `AsyncLimiter.bucket`. Methods raise `StoreError`."""

    def __init__(
        self, operations: RuleBucketOperations, run: Callable[[Flow[Decision]], Coroutine[Any, Any, Decision]]
    ) -> None:
        self._operations = operations
        self._run = run

    @property
    def keys(self) -> list[str]:
        """Keys in the store, for each algorithm and possible path."""
        return self._operations.keys

    async def peek(self) -> Decision:
        """Return the decision about a request, without a charge; a ban is in ``retry_after``."""
        return await self._run(self._operations.peeking())

    async def reset(self, *, reason: str | None = None) -> Decision:
        """See `RuleBucket.reset`."""
        return await self._run(audited(self._operations.resetting(), "reset", self._operations.name, reason))

    async def ban(self, seconds: Duration | None = None, *, reason: str | None = None) -> Decision:
        """See `RuleBucket.ban`."""
        flow = self._operations.banning(seconds)
        return await self._run(audited(flow, "ban", self._operations.name, reason, seconds=as_seconds(seconds, "seconds")))

    async def pardon(self, *, reason: str | None = None) -> Decision:
        """See `RuleBucket.pardon`."""
        return await self._run(audited(self._operations.pardoning(), "pardon", self._operations.name, reason))


class RuleBucket:
    """One client's bucket of a rule, from `Limiter.bucket`. Methods raise `StoreError`."""

    def __init__(self, operations: RuleBucketOperations, run: Callable[[Flow[Decision]], Decision]) -> None:
        self._operations = operations
        self._run = run

    @property
    def keys(self) -> list[str]:
        """Keys in the store, for each algorithm and possible path."""
        return self._operations.keys

    def peek(self) -> Decision:
        """Return the decision about a request, without a charge; a ban is in ``retry_after``."""
        return self._run(self._operations.peeking())

    def reset(self, *, reason: str | None = None) -> Decision:
        """Remove all charges and return the state; a ban remains. ``reason`` is for the audit log."""
        return self._run(audited(self._operations.resetting(), "reset", self._operations.name, reason))

    def ban(self, seconds: Duration | None = None, *, reason: str | None = None) -> Decision:
        """Refuse all requests for at least ``seconds``, or permanently; usage stays. ``reason`` is for the audit log.

        Leases stay usable for up to a second.
        """
        flow = self._operations.banning(seconds)
        return self._run(audited(flow, "ban", self._operations.name, reason, seconds=as_seconds(seconds, "seconds")))

    def pardon(self, *, reason: str | None = None) -> Decision:
        """Lift the ban, and reset the refusals and bans that count for the rule's ``ban``. ``reason`` is for the audit log.

        Processes may refuse for one more second.
        """
        return self._run(audited(self._operations.pardoning(), "pardon", self._operations.name, reason))


def rule_bucket(
    rule: object,
    name: str | None,
    parts: BucketParts,
    *,
    timeout: float,
    key_prefix: str,
    secret: bytes,
    ipv6_prefix: int,
    templates: Sequence[str | None] | None = None,
    rules: RuleSet | None = None,
    shadow: bool = False,
    api_key_header: str = _API_KEY,
) -> RuleBucketOperations:
    """Return a rule's bucket; ``name`` selects an endpoint's limit.

    ``templates`` replace the path of known routes. ``rules`` are the gate's, by default those around the rule. Headers have an
    API key only in ``api_key_header``. Raises `ConfigError` for a missing or invalid part, and `TypeError` for an unknown part.
    """
    chosen = _rule_of(rule, name)
    check_names("bucket", parts, BucketParts)
    if not chosen.has_limits:
        raise ConfigError(f"rule {chosen.name!r} has no limits, expected a rule with limits")
    if not chosen.has_counts and parts.get("limits") is None:
        raise ConfigError(
            f"rule {chosen.name!r} is adaptive: it counts requests in flight in each process, not clients; expected a "
            "rule that counts clients"
        )
    compiled_rule = CompiledRule(
        chosen, chosen.kind, key_prefix=key_prefix, secret=secret, shadow=shadow, cardinality=None, inventable=lambda _: False
    )
    values = _values(chosen, parts)
    paths = _paths(chosen, parts.get("path")) if templates is None else templates
    subjects = [_subject(chosen, rules or chosen.rule_set, parts, ipv6_prefix, path, api_key_header) for path in paths]
    for subject in subjects:
        _check_parts(chosen, subject, values, parts)
    limited = _limited(compiled_rule, subjects[0], parts.get("limits"))
    journal = None if chosen.ban is None else JournalFlows(key_prefix, timeout)
    return RuleBucketOperations([limited.charges_of(subject, values) for subject in subjects], timeout, journal)


def _limited(compiled_rule: CompiledRule, subject: Subject, limits: Given) -> CompiledRule:
    rule = compiled_rule.rule
    own = subject.caller.limits.get(rule.name) if subject.caller else None
    if limits is None and own is None:
        if not rule.buckets:
            raise ConfigError(f"rule {rule.name!r} has its limits from a callable, expected limits= with those of this client")
        return compiled_rule
    return compiled_rule.having_limits(read_limits(own if limits is None else limits))


def _rule_of(rule: object, name: str | None) -> Rule:
    found = [rule] if isinstance(rule, Rule) else [getattr(rule, "rule", None)]
    rules = [each for each in found if isinstance(each, Rule)] or limits_on(rule)
    chosen = [each for each in rules if name in (None, each.name)]
    if not rules:
        raise ConfigError(f"{rule!r:.80} is not a rule, expected a Rule, or an endpoint with @limit, a RateLimit or a Throttle")
    if len(chosen) != 1:
        raise ConfigError(
            f"{rule!r:.80} has the limits {', '.join(each.name for each in rules)}, expected name= with one of them"
        )
    return chosen[0]


def _paths(rule: Rule, path: object) -> list[str | None]:
    """Return possible paths of the key.

    None is the rule's pattern, for unknown routes. A path without placeholders may be either.
    """
    if path is not None and not (isinstance(path, str) and path):
        raise ConfigError(f"path is {path!r:.80}, expected text: a route's template such as '/items/{{id}}'")
    may_be_sent = path is not None and not _PLACEHOLDERS & set(path)
    return [path, None] if path in rule.paths or (may_be_sent and rule.key_asks("path")) else [path]


class _Missing(Exception):  # noqa: N818
    ...


class _DescribedSubject(Subject):
    __slots__ = ()

    def address(self) -> str:
        address = super().address()
        if address is None:
            raise _Missing
        return address


def _subject(  # noqa: PLR0917 - called above only
    rule: Rule, rules: RuleSet, parts: BucketParts, ipv6_prefix: int, path: str | None, api_key_header: str
) -> _DescribedSubject:
    named, api_key, request = parts.get("caller"), parts.get("api_key"), _request(parts)
    callers, tiers = rules.callers, rules.tiers

    def reading(header: str) -> Identities:
        proxies = TrustedProxies((), "x-forwarded-for")
        identifies = named is not None
        return Identities(callers, proxies, tiers, identifies=identifies, api_key_header=header, ipv6_prefix=ipv6_prefix)

    identities = reading(api_key_header)
    if api_key is not None:
        if identities.presented_key(request) not in (None, api_key):
            raise ConfigError(f"api_key= and headers={{{api_key_header!r}: ...}} differ, expected one of them")
        identities = reading(_API_KEY)
    tier = parts.get("tier")
    if isinstance(named, str):
        named = callers.named(named) or Caller(named, tier or rule.tier or DEFAULT_TIER)
    found = identities.subject(request, named)
    tier = tier or (found.tier if found.caller else rule.tier or DEFAULT_TIER)
    subject = _DescribedSubject(found.request, found.caller, tier, identities)
    subject.route = path
    return subject


def _request(parts: BucketParts) -> DescribedRequest:
    named = {**parts.get("headers", {}), "host": parts.get("host"), _API_KEY: parts.get("api_key")}
    headers = {name.lower(): value for name, value in named.items() if value is not None}
    method = (parts.get("method") or "GET").upper()
    text_of(parts.get("user"), "user")  # Raise errors here, because no request waits for a response.
    request = DescribedRequest.of_client(_address(parts.get("ip")), method, headers, parts.get("user"))
    request.document = _document(parts.get("json"))
    return request


def _document(body: object) -> object:
    try:
        return json.loads(json.dumps(body))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"json is {body!r:.80}, which is not JSON: {error}, expected for example {{'user': 7}}") from error


def _address(ip: str | IPv4Address | IPv6Address | None) -> str | None:
    client = None if ip is None else canonical(str(ip))
    if ip is not None and client is None:
        raise ConfigError(f"ip is {str(ip)!r:.80}, expected an address such as '203.0.113.7' or '2001:db8::1'")
    return None if client is None else str(client)


def _values(rule: Rule, parts: BucketParts) -> list[Value]:
    given = dict(parts.get("given", {}))
    if "user" in rule.given_parts and "user" in parts:
        given["user"] = parts["user"]
    short = {name.rpartition(".")[2]: name for name in rule.given_parts}
    named = {short.get(name, name): value for name, value in given.items()}
    for name in named.keys() - set(rule.given_parts):
        raise ConfigError(
            f"rule {rule.name!r} has no key part {name!r} for given, expected one of {', '.join(short) or 'none'}"
        )
    return [value_of(named.get(name), name) for name in rule.given_parts]


def _check_parts(rule: Rule, subject: _DescribedSubject, values: Sequence[Value], parts: BucketParts) -> None:
    for part in rule.key:
        labels = check_part(part)
        needed = [label for label in labels if label in ("path", "method") and parts.get(label) is None]
        others = [label for label in labels if label not in needed and (label == "path" or _has(subject, label))]
        if (needed or subject.request.client is None) and not others:
            raise ConfigError(f"rule {rule.name!r} counts by {part}, expected {_expected(needed or labels, rule)}")
    for value in values:
        if value.text is None and subject.request.client is None:
            name = value.name.rpartition(".")[2]
            raise ConfigError(f"rule {rule.name!r} counts by {name}, expected given={{{name!r}: ...}}{_OR_ADDRESS}")


def _has(subject: _DescribedSubject, label: str) -> bool:
    try:
        return bool(part_of(subject, label))
    except _Missing:
        return False


def _way(label: str) -> str:
    kind, _, name = label.partition(":")
    if kind == "header":
        return f"headers={{{name!r}: ...}}"
    return f"json= with {name}" if kind == "json" else f"{label}="


_OR_ADDRESS = ", or ip= for a client without it"


def _expected(labels: Sequence[str], rule: Rule) -> str:
    if "path" in labels:
        own = " or ".join(map(repr, rule.paths))
        return f"path= with the route's template, such as '/items/{{id}}', or if no routes are known, the rule's {own}"
    if "method" in labels or list(labels) == ["ip"]:
        return f"{labels[0]}="
    names = [label for label in labels if label != "ip"]
    ways = map(_way, names)
    listed = " that is listed" if "api_key" in names and rule.rule_set.callers.list_keys else ""
    return f"{' or '.join(ways)}{listed}{_OR_ADDRESS}"
