"""Building a gate: read the options, load the rules, open the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar, Unpack
from weakref import ref

from limitgate.gate.bans import Bans
from limitgate.gate.gate import Gate
from limitgate.gate.lifecycle.compile import compiler
from limitgate.gate.lifecycle.reload import poller_of
from limitgate.gate.lifecycle.start import announce, ask_in_background, is_going_to_fork, require
from limitgate.gate.planning.identity import AnyIdentify, SyncIdentify
from limitgate.gate.refusal_log import RefusalLog
from limitgate.gate.refusals import Refusals
from limitgate.http.client_ip import TrustedProxies
from limitgate.messages.diagnostics import Diagnosis
from limitgate.messages.text import Names
from limitgate.observing.counts import Counts, observe
from limitgate.observing.observer import Observer, observers_of
from limitgate.observing.store_calls import store_counts
from limitgate.process import switch
from limitgate.routes import Routes
from limitgate.rules.files import rules_of
from limitgate.rules.options import OnError
from limitgate.rules.rule import Rule, RuleSet
from limitgate.rules.settings import (
    GateSettings,
    Settings,
    trusted_by_server,
    warn_about_environment,
    workers_of_server,
)
from limitgate.stores import AsyncStore, MemoryStore, Opener, SyncStore, is_async_redis, is_redis, opened

Store = TypeVar("Store")
Identify = TypeVar("Identify")
Refuser = TypeVar("Refuser")


class GateOptions(TypedDict, Generic[Store, Identify, Refuser], total=False):
    """Options of middleware; `Settings` says what each means. Options left out come from ``LIMITGATE_*``.

    ASGI, WSGI and Django have their own kinds of store, ``identify`` and ``on_denied``.
    """

    enabled: bool
    rules: str | Path | Iterable[Rule] | RuleSet
    store: str | Store
    on_error: OnError
    processes: int
    timeout: float
    trusted_proxies: Sequence[str]
    forwarded_header: str
    ipv6_prefix: int
    api_key_header: str
    identify: Identify | None
    headers: Sequence[str]
    header_names: Mapping[str, str]
    shadow: bool
    strict: bool
    on_denied: Refuser | None
    new_buckets: int
    key_prefix: str
    require_store: bool
    reload: float
    names: Names
    refusal_logs: int
    observers: Sequence[str | Observer]
    secret: str | None


ASGIApp = Callable[[Any, Any, Any], Awaitable[Any]]
"""Application that takes scope, receive and send; Quart, Litestar, Sanic and servers have types of their own for these."""
WSGIApp = Callable[[dict[str, Any], Any], Iterable[bytes]]
ASGIOptions = GateOptions[AsyncStore, AnyIdentify, ASGIApp]
WSGIOptions = GateOptions[SyncStore, SyncIdentify, WSGIApp]


class Built(NamedTuple):
    """A gate, and what the middleware around it needs besides."""

    gate: Gate | None
    """None where LimitGate is switched off."""
    on_denied: Callable[..., Any] | None
    owns_store: bool
    """True if the store was opened here, and so is to be closed here."""
    required_prefix: str | None = None
    """The key prefix to ask the store by, which has to answer at start; None if it need not."""

    def ask_store(self) -> None:
        """Ask the store: in the background, or if it is required now. Raises `StoreError` if then it does not answer."""
        if self.gate is None or switch.null_store is not None:
            return
        if self.required_prefix is not None:
            require(self.gate.store, self.required_prefix)
        else:
            ask_in_background(self.gate.store)
            if not is_going_to_fork():  # else each child does with its first answer
                self.gate.refusals.agree_soon()


def build_gate(routes: Routes, open_store: Opener[Any], **options: Unpack[GateOptions[Any, Any, Any]]) -> Built:
    """Build the gate of middleware. Raises `ConfigError` for any mistake, `TypeError` for an unknown option."""
    settings = GateSettings(**options)
    if not settings.enabled:
        announce(settings, None)
        return Built(None, None, owns_store=False)
    warn_about_environment()
    owns_store = isinstance(settings.store, str)
    proxies = TrustedProxies(settings.trusted_proxies, settings.forwarded_header)
    proxies.judges_server = not trusted_by_server()
    for internet in proxies.trust_everybody:
        Diagnosis.TRUSTS_ALL.log(internet)
    observers = observers_of(settings.observers)
    counts = Counts() if observers else None
    rules = rules_of(settings.rules)
    store = opened(settings.store, open_store, settings.key_prefix)
    _warn_about_workers(settings, rules, store)
    ready = compiler(settings, routes, proxies, counts, store)
    log = RefusalLog(settings.refusal_logs, settings.names) if settings.refusal_logs else None
    gate = Gate(
        ready(rules),
        store,
        proxies.client,
        on_error=settings.on_error,
        processes=settings.processes,
        refusals=Refusals(store, settings.key_prefix, settings.secret_bytes, log),
        identify=settings.identify,
        bans=Bans(store, settings.key_prefix, settings.names, settings.timeout, log),
    )
    if is_redis(store) or is_async_redis(store):
        gate.at_other_rules.append(store.give_back_leases)
    if settings.reload:
        gate.poller = poller_of(settings, gate, rules, ready, lambda: GateSettings(**options))
        gate.poller.start(in_children=is_going_to_fork())
        gate.outages.at_first_answer.append(gate.poller.start)  # who is asked serves. uWSGI forks, or does not, unsaid
    if counts is not None:
        counts.look_at_rules(gate.loads, _rules_of(ref(gate)))
        observe(observers, (counts, gate), (store_counts(store), store))
    announce(settings, rules)
    return Built(gate, settings.on_denied, owns_store, settings.key_prefix if settings.require_store else None)


def _rules_of(gate: ref[Gate]) -> Callable[[], RuleSet | None]:
    """Make the function that gives the rules in force of a gate, as long as it lives."""

    def rules() -> RuleSet | None:
        living = gate()
        return None if living is None else living.rules.rule_set

    return rules


def _warn_about_workers(settings: Settings, rules: RuleSet, store: object) -> None:
    """Log what several workers of a server make of limits that each of them counts by itself (LG001, LG028)."""
    workers = workers_of_server()
    if workers > 1 and isinstance(store, MemoryStore):
        Diagnosis.MEMORY_PER_WORKER.log(workers)
    elif workers > 1 and settings.processes == 1 and _has_local_rules(settings, rules):
        Diagnosis.LOCAL_PER_WORKER.log(workers)


def _has_local_rules(settings: Settings, rules: RuleSet) -> bool:
    every = [rule for of_tier in rules.tiers.values() for rule in of_tier]
    return "local" in (settings.on_error, *(rule.on_error for rule in every))
