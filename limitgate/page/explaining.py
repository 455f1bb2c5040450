"""Explains a request or a refusal's id. Charges nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from limitgate.errors import ConfigError, LimitGateError, StoreError
from limitgate.gate.explain import Explanation, LookingStore, doubts_about_buckets, explained
from limitgate.gate.flow import Awaited, ConfigFlow
from limitgate.gate.gate import Gate
from limitgate.gate.journal import JournalFlows
from limitgate.gate.offline import offline_gate
from limitgate.gate.refusals import kept_keys, place_of_keys
from limitgate.gate.refused_rules import Refusers
from limitgate.http.client_ip import canonical
from limitgate.http.request import ASGIRequest, Query, Request, WSGIRequest
from limitgate.http.response import RefusalKey, time_of
from limitgate.http.written import asgi_scope, wsgi_environ
from limitgate.limits.decision import Decision, Window, decide
from limitgate.limits.plan import Plan
from limitgate.messages.text import listed, printable
from limitgate.routes import NoRoutes, Routes
from limitgate.rules.rule import RuleSet, placed_rules
from limitgate.rules.settings import Settings
from limitgate.stores.base import ConfigRequest, StoredConfig

Headers = Sequence[tuple[str, str]]
_NO_RULES = (
    "the page knows no rules, expected rules= of the page (limitgate page --rules PATH or --app MODULE:APP), LIMITGATE_RULES, "
    "or a LimitGate around the page"
)
_ROUTES = "limitgate page --app MODULE:APP, which knows the routes, or the page in the application"
_LONGEST = 4096
_MOST_KEYS = 2_000
"""The page compares keys on the application's event loop, 2,000 in about 20 ms."""


class Described(NamedTuple):
    """A service elsewhere, as `Page` takes it for its ``rules``."""

    rules: RuleSet
    settings: Settings
    routes: Routes
    request: Callable[[str, str, str, Headers], Request]
    """Takes method, raw path, address and headers."""
    refusers: Refusers


class Known(NamedTuple):
    rules: RuleSet | None
    settings: Settings
    store: Any
    timeout: float
    gate: Gate | None = None
    described: Described | None = None
    is_wsgi: bool = False

    def rule_set(self) -> RuleSet:
        if self.rules is None:
            raise ConfigError(_NO_RULES)
        return self.rules

    @property
    def routes(self) -> Routes:
        if self.gate is not None:
            return self.gate.rules.planner.routes
        return NoRoutes() if self.described is None else self.described.routes

    @property
    def refusers(self) -> Refusers:
        if self.described is not None:
            return self.described.refusers
        return Refusers(self.rule_set(), placed_rules(), self.settings, most_keys=_MOST_KEYS)

    def request(self, method: str, path: str, address: str, headers: Headers) -> Request:
        if self.described is not None:
            return self.described.request(method, path, address, headers)
        if self.is_wsgi:
            return WSGIRequest(wsgi_environ(method, path, address, headers))
        return ASGIRequest(asgi_scope(method, path, address, headers))

    def doubts(self, found: Explanation) -> dict[str, str]:
        if self.gate is not None or not isinstance(self.routes, NoRoutes):
            return {}
        return doubts_about_buckets(found, self.rule_set())


def explaining(known: Known, query: Query) -> ConfigFlow[dict[str, Any]]:
    """Raises `ConfigError`, `StoreError`, or `ValueError` for an empty query."""
    if len(query) > _LONGEST:
        raise ConfigError(f"the question has more than {_LONGEST} characters, expected fewer")
    text = query.get("id", "").strip()
    if text:
        return (yield from _explaining_id(known, text))
    return (yield from _explaining_request(known, query))


def _explaining_request(known: Known, query: Query) -> ConfigFlow[dict[str, Any]]:
    method, path = query.get("method", "GET").strip().upper() or "GET", query.get("path", "").strip()
    address = canonical(query.get("ip", "").strip() or "203.0.113.1")
    if not path.startswith("/"):
        raise ConfigError(f"{path!r:.80} is not a path, expected one such as /api/hello, or the id of a refusal")
    if address is None:
        raise ConfigError(f"{query.get('ip', '')!r:.80} is not an address, expected one such as 203.0.113.7")
    headers = []
    if api_key := query.get("api_key", "").strip():
        name = known.settings.api_key_header
        headers.append((name, f"Bearer {api_key}" if name.lower() == "authorization" else api_key))
    request = known.request(method, path, str(address), headers)
    request.document = None
    gate = offline_gate(known.rule_set(), LookingStore(known.store), known.settings, known.routes)
    try:
        admission = gate.begin(request)
        if admission.rest is not None:
            yield from _looking(admission.rest, known.timeout)
        found = explained(gate, request, admission)
    except LimitGateError:
        raise
    except Exception as error:  # conditions, costs and limits may be code of the application
        message = f"code of the rules raised {type(error).__name__}: {error}, expected code that needs no real request"
        raise ConfigError(message) from error
    return _request_in_words(found, method, path, known.doubts(found))


def _looking(flow: Any, timeout: float) -> ConfigFlow[None]:
    try:
        wish = next(flow)
        while True:
            if isinstance(wish, Awaited):
                raise wish.refused()
            try:
                reading = yield Plan.look(wish[0].charges), timeout
            except StoreError:
                flow.close()
                raise
            wish = flow.send(reading)
    except StopIteration:
        return


def _request_in_words(found: Explanation, method: str, path: str, doubts: Mapping[str, str]) -> dict[str, Any]:
    decision = found.decision
    unused = found.unused & doubts.keys()
    who = f"caller {found.caller.id}" if found.caller else found.counted_as or "a client without an address"
    words = [f"{method} {printable(path)} counts as {printable(who)} of tier {found.tier}."]
    if decision is None:
        words.append("No rule limits it." if found.status is None else f"It is denied with {found.status}.")
    else:
        words.append("Whether it would be admitted is not known." if unused else _decided(decision))
    words += [f"{printable(doubt[0].upper() + doubt[1:])}; expected {_ROUTES}." for doubt in doubts.values()]
    return {
        "words": words,
        "rules": [{**rule._asdict(), "why": printable(rule.why)} for rule in found.rules],
        "windows": [] if decision is None else _windows([each for each in decision.windows if each.rule not in unused]),
        "allowed": None if unused else found.status is None,
    }


def _decided(decision: Decision) -> str:
    if decision.allowed:
        left = f"{decision.remaining:,} of {decision.limit:,} left"
        return f"It would be admitted; the tightest limit is of rule {decision.rule}: {left}."
    if decision.is_permanent_ban:
        return f"It would be refused: the client is banned from rule {decision.rule} permanently."
    if decision.retry_after == float("inf"):
        return f"It would be refused by rule {decision.rule}, and waiting does not help."
    return f"It would be refused by rule {decision.rule}. It would be admitted in {_duration(decision.retry_after)}."


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _windows(windows: Sequence[Window]) -> list[dict[str, Any]]:
    return [{name: None if value == float("inf") else value for name, value in window._asdict().items()} for window in windows]


def _explaining_id(known: Known, text: str) -> ConfigFlow[dict[str, Any]]:
    at = time_of(text)  # raises `ValueError`
    _, candidates = known.refusers.read(text, (yield from _keys(known)))
    elapsed = time.time() - at
    ago = f"{_duration(elapsed)} ago" if elapsed >= 1 else "just now"
    words = [f"Refused at {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC, {ago}."]
    if not candidates:
        words.append(
            "None of these rules refused the request, or the id belongs to another store, or is older than a flush of this one."
        )
        return {"words": words, "rules": [], "windows": [], "allowed": None}
    bans = yield from JournalFlows(known.settings.key_prefix, known.timeout).listing()
    windows: list[dict[str, Any]] = []
    allowed = True
    for by in candidates:
        of_caller = "" if by.caller is None else f" of caller {printable(by.caller)}"
        tiers, counted_by = listed(by.tiers, " and "), ", ".join(by.rule.counted_by)
        words.append(f"By rule {by.rule.name} of tier {tiers}: {by.limits}{of_caller}, counted by {counted_by}.")
        plan = by.plan(known.settings)
        if not plan.charges:
            continue
        decision = decide(plan, (yield plan, known.timeout))
        is_certain = by.is_certain_of(decision)
        if not is_certain:
            words.append("The limits of this client are not known, because its caller may have limits of its own.")
        windows += _windows(decision.windows)
        allowed = allowed and decision.allowed
        when = "Now" if is_certain else "Under the limits of the rule"
        words.append(f"{when}: {_decided(decision)[0].lower()}{_decided(decision)[1:]}")
        keys = {charge.key for charge in plan.charges}
        for ban in bans:
            if keys & set(ban.keys):
                why = f": {printable(ban.reason)}" if ban.reason else ""
                words.append(f"Banned by {printable(ban.by)}{why}.")
    return {"words": words, "rules": [], "windows": windows, "allowed": allowed}


def _keys(known: Known) -> ConfigFlow[list[RefusalKey]]:
    if known.settings.secret_bytes:
        return [RefusalKey.derived(known.settings.secret_bytes)]
    keys = [] if known.gate is None else [known.gate.refusals.key]
    with suppress(ConfigError):  # a store may keep no configuration
        stored: StoredConfig = yield ConfigRequest(place_of_keys(known.settings.key_prefix)), known.timeout
        keys = [*map(RefusalKey, kept_keys(stored.text)), *keys]
    if not keys:
        raise ConfigError("the store has no key of ids under this prefix, expected the store and prefix of the service")
    return keys
