"""Compiles rule sets at start and reload. A request keeps its set."""

from __future__ import annotations

from collections.abc import Callable

from limitgate.gate.flow import measures_silence
from limitgate.gate.planning.cardinality import CardinalityGuard
from limitgate.gate.planning.compiled_rule import AdaptiveLimits
from limitgate.gate.planning.identity import Identities
from limitgate.gate.planning.planner import Planner
from limitgate.http.body import BODY_LIMIT
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.rate_fields import Fields, Style, names_of, rate_fields
from limitgate.limits.decision import Decision
from limitgate.messages.diagnostics import Diagnosis, Once, OncePerValue
from limitgate.observing.counts import Counts
from limitgate.process.clock import monotonic
from limitgate.routes import Routes
from limitgate.rules.rule import RuleSet
from limitgate.rules.settings import Settings
from limitgate.stores import MemoryStore
from limitgate.stores.memory import system_clock


class ActiveRules:
    """Everything compiled from one rule set. Replaced atomically on reload.

    ``timeout`` is in seconds per request. With ``is_measured``, only the store's silence counts. ``clock`` returns Unix µs.
    """

    def __init__(
        self,
        planner: Planner,
        header_styles: tuple[Style, ...],
        *,
        timeout: float,
        is_measured: bool,
        body_limit: int = BODY_LIMIT,
        counts: Counts | None = None,
        clock: Callable[[], int] = system_clock,
        settings: Settings | None = None,
    ) -> None:
        self.planner = planner
        self.settings = settings
        self.rule_set: RuleSet = planner.rule_set
        self.rule_names: frozenset[str] = planner.names
        self.header_styles = header_styles
        self.has_commonest_style: bool = header_styles == ("x-ratelimit",)
        initials = [name[0] for name in names_of(header_styles)]
        self.initials: frozenset[str] = frozenset([*map(str.lower, initials), *map(str.upper, initials)])
        """First letters of rate fields, to find those of the application quickly."""
        self.raw_initials: frozenset[int] = frozenset(map(ord, self.initials))
        self.timeout = timeout
        self.is_measured = is_measured
        self.body_limit = body_limit
        """Bytes."""
        self.counts = counts
        self.clock = clock

    def fields(self, decision: Decision, now: int) -> Fields:
        """``now`` is Unix µs."""
        return rate_fields(self.header_styles, decision, now, self.rule_names)


def compiler(
    settings: Settings, routes: Routes, proxies: TrustedProxies, counts: Counts | None, store: object
) -> Callable[[RuleSet], ActiveRules]:
    cardinality = CardinalityGuard(settings.new_buckets, monotonic) if settings.new_buckets else None
    no_id, no_tier = Once(Diagnosis.USER_WITHOUT_ID), OncePerValue(Diagnosis.UNKNOWN_TIER)
    adaptive_limits = AdaptiveLimits(shadow=settings.shadow)

    def compiled(rules: RuleSet) -> ActiveRules:
        routes.check(rules)
        identities = Identities(
            rules.callers,
            proxies,
            rules.tiers,
            identifies=settings.identify is not None,
            api_key_header=settings.api_key_header,
            ipv6_prefix=settings.ipv6_prefix,
            no_id=no_id,
            no_tier=no_tier,
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
            body_limit=settings.body_limit,
            counts=counts,
            clock=store.now if isinstance(store, MemoryStore) else system_clock,
            settings=settings,
        )

    return compiled
