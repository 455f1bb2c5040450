"""Building a gate: read the options, load the rules, open the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar, Unpack
from weakref import ref

from limitgate.errors import ConfigError
from limitgate.gate.flow import measures_silence
from limitgate.gate.gate import Gate
from limitgate.gate.lifecycle.reload import OptionsWatch, Reloader
from limitgate.gate.lifecycle.start import announce, ask_in_background, is_going_to_fork, require
from limitgate.gate.lifecycle.workers import told_of_workers
from limitgate.gate.planning.adaptive_limits import AdaptiveLimits
from limitgate.gate.planning.cardinality import CardinalityGuard
from limitgate.gate.planning.identity import Identities, Users
from limitgate.gate.planning.planner import Planner
from limitgate.gate.planning.rules_in_force import RulesInForce
from limitgate.gate.refusal_log import RefusalLog
from limitgate.gate.refusals import Refusals
from limitgate.http.client_ip import TrustedProxies
from limitgate.limits.priority import RESERVES
from limitgate.messages.diagnostics import Diagnosis, clock_comparison
from limitgate.messages.masking import Names
from limitgate.observing.counts import Counts, observe
from limitgate.observing.observer import Observer, observers_of
from limitgate.observing.store_calls import store_counts
from limitgate.own_errors import survived
from limitgate.process.looker import Looker, Watched
from limitgate.routes import Routes
from limitgate.rules.files import rules_of
from limitgate.rules.options import OnError
from limitgate.rules.review import lint
from limitgate.rules.rule import Rule, RuleSet
from limitgate.rules.settings import (
    GateSettings,
    Settings,
    is_told_to_trust_all,
    named_env_file,
    seems_to_have_workers,
    warn_about_environment,
)
from limitgate.rules.watch import WatchedFiles, WatchedRules
from limitgate.stores import MemoryStore, Opener, opened
from limitgate.stores.memory import system_clock
from limitgate.stores.redis.dial.url import shown

Store = TypeVar("Store")
Identify = TypeVar("Identify")
Refuser = TypeVar("Refuser")


class GateOptions(TypedDict, Generic[Store, Identify, Refuser], total=False):
    """Options of middleware; `Settings` says what each means. Options left out come from ``LIMITGATE_*``.

    ASGI, WSGI and Django have their own kinds of store, ``identify`` and ``on_denied``.
    """

    enabled: bool
    """``False`` switches middleware and decorators off. Default: ``True``."""
    rules: str | Path | Iterable[Rule] | RuleSet
    """A rule file, a folder of them, a list of `Rule` or a `RuleSet`; has to be given. Default: ``None``."""
    store: str | Store
    """The URL of a store, or a store. With ``memory://`` each process counts by itself. Default: ``'memory://'``."""
    on_error: OnError
    """The answer to requests while the store fails: they pass, get a 503, or are limited by this process alone. Default:
    ``'open'``.
    """
    processes: int
    """Processes that serve together. While the store fails, each grants its share of the limits under ``local``. Default:
    ``1``.
    """
    timeout: float
    """Seconds that a request may wait for the store, all together. Default: ``0.1``."""
    trusted_proxies: Sequence[str]
    """Addresses and CIDRs of proxies whose forwarding header is believed; ``unix`` for a peer on a unix socket. Default:
    ``()``.
    """
    forwarded_header: str
    """The one header to read behind a trusted proxy; ``forwarded`` for RFC 7239. Default: ``'x-forwarded-for'``."""
    ipv6_prefix: int
    """Bits of the network that IPv6 clients are grouped by. Default: ``64``."""
    api_key_header: str
    """Where the API key stands; ``authorization`` reads a Bearer token (RFC 6750). Default: ``'x-api-key'``."""
    identify: Identify | None
    """Names the caller of a request: ``(request) -> Caller | None``; may be async on ASGI. Default: ``None``."""
    headers: Sequence[str]
    """Styles of rate headers to send. Default: ``('x-ratelimit',)``."""
    shadow: bool
    """Decide and report, never refuse. Default: ``False``."""
    strict: bool
    """Tell at start which limits let more than their count pass within one period. Default: ``False``."""
    on_denied: Refuser | None
    """Makes the refusal: an ASGI application, on WSGI a WSGI application. Default: ``None``."""
    new_buckets: int
    """Buckets that a source may open in a minute by keys of its own choosing, in each process; 0 for any number. Default:
    ``1000``.
    """
    key_prefix: str
    """First part of every key in the store. Default: ``'limitgate'``."""
    require_store: bool
    """Fail at start where the store does not answer within 5 seconds, instead of starting under ``on_error``. Default:
    ``False``.
    """
    reload: float
    """Seconds between two looks at whether the files of the rules have changed; 0 never looks. Default: ``0.0``."""
    names: Names
    """How much of a client's name log lines about refusals show: first and last characters, all (``full``), or nothing.
    Default: ``'masked'``.
    """
    refusal_logs: int
    """Log lines a minute about buckets that begin and cease to refuse, in each process; 0 for none. Default: ``60``."""
    observers: Sequence[str | Observer]
    """Who is handed the figures: ``prometheus``, ``opentelemetry``, or an `Observer`; see docs/observing.md. Default:
    ``()``.
    """
    secret: str | None
    """16 to 64 bytes that key the digests in the store, so that not even guesses can be checked against them. Default:
    ``None``.
    """


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
        if self.gate is not None and self.required_prefix is not None:
            require(self.gate.store, self.required_prefix)
        elif self.gate is not None:
            ask_in_background(self.gate.store)
            if not is_going_to_fork():  # else each child does with its first answer
                self.gate.refusals.agree_soon()


def build_gate(routes: Routes, open_store: Opener[Any], **options: Unpack[GateOptions[Any, Any, Any]]) -> Built:
    """Build the gate of middleware. Raises `ConfigError` for any mistake, `TypeError` for an unknown option."""
    settings = GateSettings(**options)
    if not settings.enabled:
        announce(settings, None)
        return Built(None, None, owns_store=False)
    warn_about_environment(settings.store)
    owns_store = isinstance(settings.store, str)
    proxies = TrustedProxies(settings.trusted_proxies, settings.forwarded_header)
    proxies.judges_server = not is_told_to_trust_all()
    for internet in proxies.trust_everybody:
        Diagnosis.TRUSTS_ALL.log(internet)
    observers = observers_of(settings.observers)
    counts = Counts() if observers else None
    rules = rules_of(settings.rules)
    store = opened(settings.store, open_store, settings.key_prefix)
    at_local = _at_local(settings, rules, store)
    ready = _compiler(settings, routes, proxies, counts, at_local, store=store)
    gate = Gate(
        ready(rules),
        store,
        proxies.client,
        on_error=settings.on_error,
        processes=settings.processes,
        refusals=Refusals(store, settings.key_prefix, settings.secret_bytes),
        identify=settings.identify,
        at_first_answer=_at_first_answer(settings, rules, store),
        refusal_log=RefusalLog(settings.refusal_logs, settings.names) if settings.refusal_logs else None,
    )
    if settings.reload:
        gate.looker = _looker(settings, gate, rules, ready, lambda: GateSettings(**options))
        gate.looker.start(in_children=is_going_to_fork())
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


def _compiler(
    settings: Settings,
    routes: Routes,
    proxies: TrustedProxies,
    counts: Counts | None,
    at_local: Callable[[], None] | None,
    *,
    store: object,
) -> Callable[[RuleSet], RulesInForce]:
    """Make the function that reviews a rule set and makes it ready for a gate with these settings."""
    cardinality = CardinalityGuard(settings.new_buckets, time.monotonic) if settings.new_buckets else None
    identifies = settings.identify is not None
    users, adaptive_limits = Users(), AdaptiveLimits(shadow=settings.shadow)
    kept_in = store if isinstance(store, MemoryStore) or not isinstance(settings.store, str) else shown(settings.store)

    def compiled(rules: RuleSet) -> RulesInForce:
        _review(rules, proxies, identifies=identifies)
        identities = Identities(
            rules.callers,
            proxies,
            rules.tiers,
            identifies=identifies,
            api_key_header=settings.api_key_header,
            ipv6_prefix=settings.ipv6_prefix,
            users=users,
        )
        planner = Planner(
            rules,
            routes,
            identities,
            key_prefix=settings.key_prefix,
            secret=settings.secret_bytes,
            shadow=settings.shadow,
            strict=settings.strict,
            cardinality=cardinality,
            counts=counts,
            at_local=at_local,
            adaptive_limits=adaptive_limits,
        )
        return RulesInForce(
            planner,
            settings.headers,
            timeout=settings.timeout,
            is_measured=measures_silence(store),
            counts=counts,
            kept_in=kept_in,
            clock=store.now if isinstance(store, MemoryStore) else system_clock,
        )

    return compiled


def _looker(
    settings: Settings,
    gate: Gate,
    rules: RuleSet,
    ready: Callable[[RuleSet], RulesInForce],
    read_settings: Callable[[], Settings],
) -> Looker:
    """Make what looks for changes of the rules' files, and of the file of variables. Raises `ConfigError` without files."""
    if not rules.source:
        raise ConfigError("reload: the rules are given in Python, expected the path of a file or folder, or no reload")
    watched: list[Watched] = [Reloader(gate, WatchedRules(Path(rules.source), rules.files_digest), ready)]
    variables = named_env_file()
    if variables is not None:
        file = Path(variables).absolute()
        watched.append(OptionsWatch(settings, WatchedFiles(lambda: [file]), read_settings))
    return Looker(settings.reload, watched)


def _review(rules: RuleSet, proxies: TrustedProxies, *, identifies: bool) -> None:
    """Log what is odd about the rules as a whole."""
    known = rules.tiers.keys() if identifies else rules.callers.tiers(by_header=proxies.trust_anybody)
    for tier in lint.tiers_of_nobody(rules, known):
        Diagnosis.TIER_OF_NOBODY.log(tier)
    for rule, exempt in lint.shadowed(rules, known):
        Diagnosis.SHADOWED.log(rule.name, exempt.name)
    priorities = RESERVES.keys() if identifies else rules.callers.priorities(by_header=proxies.trust_anybody)
    for name in lint.reserves_of_nobody(rules, priorities):
        Diagnosis.RESERVE_OF_NOBODY.log(name)


def _at_first_answer(settings: Settings, rules: RuleSet, store: object) -> Callable[[int], None]:
    """Make the function that is told the ``now`` of the first answer: what cannot be known before is looked at then.

    By then the server has started its other workers.
    """
    is_memory = isinstance(store, MemoryStore)
    is_local = settings.processes == 1 and _has_local_rules(settings, rules)
    workers = seems_to_have_workers()
    if workers > 1 and is_local and not is_memory:
        Diagnosis.LOCAL_PER_WORKER.log(workers)
    tell_of_workers = told_of_workers(is_memory=is_memory, is_local=is_local) if workers == 1 else None
    compare_clocks = clock_comparison(time.time, settings.timeout) if _has_own_clock(store) else None

    def first_answer(now: int) -> None:
        if compare_clocks is not None:
            compare_clocks(now)
        if tell_of_workers is not None:
            with survived():
                tell_of_workers()

    return first_answer


def _at_local(settings: Settings, rules: RuleSet, store: object) -> Callable[[], None] | None:
    """Make the function that is called for each limit in code with ``on_error: local``; None where that is nothing new."""
    if settings.processes > 1 or isinstance(store, MemoryStore) or _has_local_rules(settings, rules):
        return None
    told = False

    def tell() -> None:
        nonlocal told
        if not told:
            told = True
            with survived():
                told_of_workers(is_memory=False, is_local=True)()

    return tell


def _has_local_rules(settings: Settings, rules: RuleSet) -> bool:
    every = [rule for of_tier in rules.tiers.values() for rule in of_tier]
    return "local" in (settings.on_error, *(rule.on_error for rule in every))


def _has_own_clock(store: object) -> bool:
    """True if a store goes by a clock that may be another machine's: it counts how often that stepped back."""
    return hasattr(store, "clock_steps") and not isinstance(store, MemoryStore)
