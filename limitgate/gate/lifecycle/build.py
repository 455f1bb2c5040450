"""Builds a gate from options."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar, Unpack
from weakref import ref

from limitgate.errors import ConfigError
from limitgate.gate.bans import Bans
from limitgate.gate.charging import Charging
from limitgate.gate.gate import Gate
from limitgate.gate.lifecycle.reload import poller_of
from limitgate.gate.lifecycle.start import (
    announce,
    ask_in_background,
    begin_to_publish,
    counts_of,
    is_going_to_fork,
    require,
    warn_about_headers,
    warn_about_workers,
    watch,
)
from limitgate.gate.planning.active_rules import compiler
from limitgate.gate.planning.identity import AnyIdentify, SyncIdentify
from limitgate.gate.refusals import RefusalLog, refusals_for
from limitgate.http.client_ip import TrustedProxies
from limitgate.messages.text import Names
from limitgate.observing.counts import observe
from limitgate.observing.exporter import Observer, observers_of, store_counts
from limitgate.process import switch
from limitgate.routes import Routes
from limitgate.rules.files import rules_of
from limitgate.rules.options import OnError
from limitgate.rules.rule import Rule, RuleSet
from limitgate.rules.settings import (
    GateSettings,
    naming_variable,
    trusted_by_server,
    warn_about_environment,
)
from limitgate.stores import AsyncStore, Opener, SyncStore, is_async_redis, is_redis, opened

Store = TypeVar("Store")
Identify = TypeVar("Identify")
Refuser = TypeVar("Refuser")


class GateOptions(TypedDict, Generic[Store, Identify, Refuser], total=False):
    """Options of middleware, see `Settings`. Unset ones come from ``LIMITGATE_*``."""

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
    body_limit: int
    key_prefix: str
    require_store: bool
    reload: float
    names: Names
    refusal_logs: int
    observers: Sequence[str | Observer]
    fleet: bool
    secret: str | None


ASGIApp = Callable[[Any, Any, Any], Awaitable[Any]]
WSGIApp = Callable[[dict[str, Any], Any], Iterable[bytes]]
ASGIOptions = GateOptions[AsyncStore, AnyIdentify, ASGIApp]
WSGIOptions = GateOptions[SyncStore, SyncIdentify, WSGIApp]


class Built(NamedTuple):
    """A gate, and values for its middleware."""

    gate: Gate | None
    """The gate; None if disabled."""
    on_denied: Callable[..., Any] | None
    owns_store: bool
    required_prefix: str | None = None

    def ask_store(self) -> None:
        """Connect in the background, or if required now. Raises `StoreError`."""
        if self.gate is None or switch.null_store is not None:
            return
        if self.required_prefix is not None:
            require(self.gate.store, self.required_prefix)
        else:
            ask_in_background(self.gate.store)
            # After a fork, each child does this at its first answer.
            in_children = is_going_to_fork()
            if not in_children:
                self.gate.refusals.agree_soon()
            if is_redis(self.gate.store):
                begin_to_publish(self.gate, in_children=in_children)


def build_gate(routes: Routes, open_store: Opener[Any], **options: Unpack[GateOptions[Any, Any, Any]]) -> Built:
    """Build a gate. Raises `ConfigError`, and `TypeError` for an unknown option."""
    settings = GateSettings(**options)
    if not settings.enabled:
        announce(settings, None)
        return Built(None, None, owns_store=False)
    warn_about_environment()
    owns_store = isinstance(settings.store, str)
    proxies = TrustedProxies(settings.trusted_proxies, settings.forwarded_header)
    proxies.judges_server = not trusted_by_server()
    try:
        observers = observers_of(settings.observers)
    except ConfigError as error:
        raise naming_variable(error, "observers", options) from None
    counts = counts_of(settings, is_observed=bool(observers))
    rules = rules_of(settings.rules)
    try:
        store = opened(settings.store, open_store, settings.key_prefix)
    except ConfigError as error:
        raise naming_variable(error, "store", options) from None
    warn_about_workers(settings, rules, store)
    warn_about_headers(settings, rules, proxies)
    ready = compiler(settings, routes, proxies, counts, store)
    log = RefusalLog(settings.refusal_logs, settings.names) if settings.refusal_logs else None
    in_force = ready(rules)
    charging = Charging(
        store,
        in_force.timeout,
        refusals_for(settings.header_styles, store, settings.key_prefix, settings.secret_bytes, log),
        Bans(store, settings.key_prefix, settings.names, settings.timeout, log),
        on_error=settings.on_error,
        processes=settings.processes,
    )
    gate = Gate(in_force, store, proxies.client, charging, identify=settings.identify)
    if is_redis(store) or is_async_redis(store):
        gate.at_other_rules.append(store.give_back_leases)
    if settings.reload:
        gate.poller = poller_of(settings, gate, rules, ready, lambda: GateSettings(**options))
        gate.poller.start(in_children=is_going_to_fork())
        # Start in the process that gets requests, because uWSGI may fork without notice.
        gate.outages.at_first_answer.append(gate.poller.start)
    if counts is not None:
        counts.look_at_rules(gate.loads, _rules_of(ref(gate)))
        if observers:
            observe(observers, (counts, gate), (store_counts(store), store))
        watch(gate, counts, settings)
    announce(settings, rules)
    return Built(gate, settings.on_denied, owns_store, settings.key_prefix if settings.require_store else None)


def _rules_of(gate: ref[Gate]) -> Callable[[], RuleSet | None]:
    """Return a function that doesn't keep the gate alive."""

    def rules() -> RuleSet | None:
        living = gate()
        return None if living is None else living.rules.rule_set

    return rules
