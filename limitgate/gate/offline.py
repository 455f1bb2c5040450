"""A gate without a server: decides about requests that are described in a file, on a clock that goes by them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from limitgate.gate.admission import Admission
from limitgate.gate.gate import Gate
from limitgate.gate.identity import Identities
from limitgate.gate.planner import Planner
from limitgate.gate.rules_in_force import RulesInForce
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.request import Query, Request
from limitgate.routes import NoRoutes
from limitgate.rules.rule import RuleSet
from limitgate.rules.settings import Settings
from limitgate.stores import MemoryStore


class DescribedRequest(Request):
    """A request that is known by its parts: the path decoded, ``headers`` by lower-case name, ``peer`` who sent it."""

    def __init__(self, method: str, path: str, peer: str | None, headers: Mapping[str, str] | None = None) -> None:
        self.sent_method = method
        self.method = "GET" if method == "HEAD" else method
        self.sent = path
        self.peer = peer
        self._described = headers

    @cached_property
    def query(self) -> Query:
        """Nothing: rules in files do not look at the query."""
        return Query("")

    @property
    def user(self) -> None:
        """Nobody."""
        return

    def _read_headers(self) -> dict[str, str]:
        return dict(self._described or ())


def offline_gate(rules: RuleSet, store: MemoryStore, settings: Settings | None = None) -> Gate:
    """Make a gate of a rule set that knows no routes. ``settings`` say who clients and callers are, the defaults if None."""
    settings = settings or Settings.model_construct()
    proxies = TrustedProxies(settings.trusted_proxies, settings.forwarded_header)
    planner = Planner(
        rules, NoRoutes(), identities_of(rules, settings, proxies), key_prefix="limitgate", secret=b"", shadow=False
    )
    in_force = RulesInForce(planner, (), timeout=1.0, is_measured=True)
    return Gate(in_force, store, proxies.client, on_error="open", processes=1)


def identities_of(rules: RuleSet, settings: Settings, proxies: TrustedProxies) -> Identities:
    """Find callers as the gate of an application does that names none itself."""
    return Identities(
        rules.callers,
        proxies,
        rules.tiers,
        identifies=False,
        api_key_header=settings.api_key_header,
        ipv6_prefix=settings.ipv6_prefix,
    )


def decide_at_once(gate: Gate, request: Request) -> Admission:
    """Decide about a request by a gate whose store is in memory; where it would wait for its turn, it does not."""
    asked = gate.ask(request)
    if isinstance(asked, Admission):
        return asked
    steps = asked.__await__()
    try:
        next(steps)
    except StopIteration as ended:
        admission: Admission = ended.value
        return admission
    raise TypeError("something in these rules has to be awaited, expected rules as files have them")
