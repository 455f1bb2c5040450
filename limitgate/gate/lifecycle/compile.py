"""Compiles rule sets at start and at each reload."""

from __future__ import annotations

from collections.abc import Callable

from limitgate.gate.flow import measures_silence
from limitgate.gate.planning.active_rules import ActiveRules
from limitgate.gate.planning.adaptive_limits import AdaptiveLimits
from limitgate.gate.planning.cardinality import CardinalityGuard
from limitgate.gate.planning.identity import Identities
from limitgate.gate.planning.planner import Planner
from limitgate.http.client_ip import TrustedProxies
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.observing.counts import Counts
from limitgate.process.clock import monotonic
from limitgate.routes import Routes
from limitgate.rules.rule import RuleSet
from limitgate.rules.settings import Settings
from limitgate.stores import MemoryStore
from limitgate.stores.memory import system_clock


def compiler(
    settings: Settings,
    routes: Routes,
    proxies: TrustedProxies,
    counts: Counts | None,
    store: object,
) -> Callable[[RuleSet], ActiveRules]:
    """Return a function that compiles a rule set."""
    cardinality = CardinalityGuard(settings.new_buckets, monotonic) if settings.new_buckets else None
    no_id, adaptive_limits = Once(Diagnosis.USER_WITHOUT_ID), AdaptiveLimits(shadow=settings.shadow)

    def compiled(rules: RuleSet) -> ActiveRules:
        identities = Identities(
            rules.callers,
            proxies,
            rules.tiers,
            identifies=settings.identify is not None,
            api_key_header=settings.api_key_header,
            ipv6_prefix=settings.ipv6_prefix,
            no_id=no_id,
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
            adaptive_limits=adaptive_limits,
            names=settings.names,
        )
        return ActiveRules(
            planner,
            settings.header_styles,
            timeout=settings.timeout,
            is_measured=measures_silence(store),
            counts=counts,
            clock=store.now if isinstance(store, MemoryStore) else system_clock,
        )

    return compiled
