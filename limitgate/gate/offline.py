"""A gate without a server: decides about requests that are described in a file, on a clock that goes by them."""

from __future__ import annotations

from limitgate.gate.admission import Admission
from limitgate.gate.gate import Gate
from limitgate.gate.plain_admission import AnyAdmission, whole_admission
from limitgate.gate.planning.identity import Identities
from limitgate.gate.planning.planner import Planner
from limitgate.gate.planning.rules_in_force import RulesInForce
from limitgate.gate.refusals import Refusals
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.request import Request
from limitgate.http.response import Refusal, forbidden
from limitgate.routes import NoRoutes
from limitgate.rules.rule import RuleSet
from limitgate.rules.settings import Settings
from limitgate.stores import MemoryStore

_PATHS = 16_384
"""Paths whose rules are remembered: a log may be of many, and nobody else needs the memory."""


def offline_gate(rules: RuleSet, store: MemoryStore, settings: Settings | None = None) -> Gate:
    """Make a gate of a rule set that knows no routes. ``settings`` say who clients and callers are, the defaults if None."""
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
    planner = Planner(rules, NoRoutes(), identities, key_prefix="limitgate", secret=b"", shadow=False, paths=_PATHS)
    in_force = RulesInForce(planner, (), timeout=1.0, is_measured=True)
    return Gate(in_force, store, proxies.client, on_error="open", processes=1, refusals=_Unsent(store, "limitgate"))


class _Unsent(Refusals):
    """Refusals that are sent to nobody, whatever stands in them."""

    def quota_exceeded(self, *_: object) -> Refusal:
        """Any refusal."""
        return forbidden()


def decide_at_once(gate: Gate, request: Request) -> Admission:
    """Decide about a request by a gate whose store is in memory; where it would wait for its turn, it does not."""
    return whole_admission(ask_at_once(gate, request))


def ask_at_once(gate: Gate, request: Request) -> AnyAdmission:
    """`decide_at_once`, without more of an admission than is asked for."""
    asked = gate.ask(request)
    if isinstance(asked, AnyAdmission):
        return asked
    steps = asked.__await__()
    try:
        next(steps)
    except StopIteration as ended:
        admission: AnyAdmission = ended.value
        return admission
    raise TypeError("something in these rules has to be awaited, expected rules as files have them")
