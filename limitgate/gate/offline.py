"""A gate without a server, for requests from a file and their timestamps."""

from __future__ import annotations

from limitgate.gate.bans import Bans
from limitgate.gate.charging import Charging
from limitgate.gate.gate import Gate
from limitgate.gate.planning.active_rules import ActiveRules
from limitgate.gate.planning.identity import Identities
from limitgate.gate.planning.planner import Planner
from limitgate.gate.refusals import Refusals
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.response import Refusal, forbidden
from limitgate.routes import NoRoutes, Routes
from limitgate.rules.rule import RuleSet
from limitgate.rules.settings import Settings
from limitgate.stores import SyncStore

_PATHS = 16_384


def offline_gate(rules: RuleSet, store: SyncStore, settings: Settings | None = None, routes: Routes | None = None) -> Gate:
    """``settings`` define clients, callers and keys."""
    settings = settings or Settings.model_construct()
    proxies = TrustedProxies(settings.trusted_proxies, settings.forwarded_header)
    identities = Identities(
        rules.callers,
        proxies,
        rules.tiers,
        identifies=False,
        api_key_header=settings.api_key_header,
        ipv6_prefix=settings.ipv6_prefix,
    )
    planner = Planner(
        rules,
        routes or NoRoutes(),
        identities,
        key_prefix=settings.key_prefix,
        secret=settings.secret_bytes,
        shadow=False,
        paths=_PATHS,
    )
    in_force = ActiveRules(planner, (), timeout=1.0, is_measured=True)
    refusals, bans = _Unsent(store, settings.key_prefix), Bans(None, settings.key_prefix, "off", 1.0, None)
    charging = Charging(store, in_force.timeout, refusals, bans, on_error="open", processes=1)
    return Gate(in_force, store, proxies.client, charging)


class _Unsent(Refusals):
    def refuse(self, *_: object) -> Refusal:
        return forbidden()
