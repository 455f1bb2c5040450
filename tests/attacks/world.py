"""What attacks are made of: sites with one small limit, who asks them, and what came of it.

An attack is a function that tries something many times, through both doors, and counts how often it got more than its
limit and how many others were refused because of it. Both have to be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from limitgate import LimitGateWSGI, MemoryStore, Rule
from tests.support.doors import PEER, ASGISite, Lines, Reply, Site, WSGISite, wsgi_environ

ATTACKER = "203.0.113.9"
VICTIM = "198.51.100.7"
PROXY = "10.0.0.1"
INNER = "10.0.0.2"
TRUSTED = ("10.0.0.0/8", "fd00::/8")

LIMIT = "1/day"


class AnyWSGISite(WSGISite):
    """A WSGI site that takes requests which no good server passes on; the standard library's validator would stop them."""

    def ask(self, path: str = "/", method: str = "GET", headers: Lines = (), peer: str | None = PEER, **more: Any) -> Reply:
        started: list[Any] = []

        def start_response(status: str, fields: list[tuple[str, str]], exc_info: Any = None) -> Any:
            started[:] = status, fields

        chunks = self.app(wsgi_environ(path, method, headers, peer, **more), start_response)
        body = b"".join(chunks)
        return Reply(int(started[0][:3]), httpx.Headers(started[1]), body)

    def _gated(self, app: Any, options: dict[str, Any]) -> Any:
        return LimitGateWSGI(app, **options)


DOORS = (ASGISite, AnyWSGISite)


class Ask(NamedTuple):
    """One request: its header lines and the address at the other end of its connection."""

    headers: Lines = ()
    peer: str | None = ATTACKER
    path: str = "/"
    method: str = "GET"

    def to(self, site: Site) -> bool:
        """Whether the application answered."""
        return site.ask(self.path, self.method, self.headers, self.peer).status == 200


@dataclass(frozen=True)
class Outcome:
    """What came of an attack."""

    tries: int = 0
    through: int = 0
    """Requests that were admitted above their limit."""
    harmed: int = 0
    """Others who were refused, or who got into somebody else's bucket."""

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.tries + other.tries, self.through + other.through, self.harmed + other.harmed)


NOTHING = Outcome()
ATTACKS: dict[str, Callable[[], Outcome]] = {}


def attack(name: str) -> Callable[[Callable[[], Outcome]], Callable[[], Outcome]]:
    """Enter an attack into the table."""

    def entered(run: Callable[[], Outcome]) -> Callable[[], Outcome]:
        assert name not in ATTACKS
        ATTACKS[name] = run
        return run

    return entered


def one_bucket(honest: Ask, others: Iterable[Ask], victims: Iterable[Ask] = (), **options: Any) -> Outcome:
    """The same client asks in other words, each time with all buckets full: that has to use up its one request.

    Afterwards it asks honestly, which has to be refused, and each victim asks, which has to be admitted.
    """
    outcome = NOTHING
    rules = options.pop("rules", [Rule("all", LIMIT)])
    others, victims = list(others), list(victims)
    for door in DOORS:
        with door(rules=rules, **options) as site:
            for other in others:
                site.app.gate.store = MemoryStore()
                first = other.to(site)
                through = honest.to(site)
                harmed = (not first) + sum(not victim.to(site) for victim in victims)
                outcome += Outcome(1, int(through), harmed)
    return outcome


def own_buckets(asks: Iterable[Ask], rule: Rule, **options: Any) -> Outcome:
    """Different clients ask in turn, then once more: each has to be admitted once and refused once."""
    outcome = NOTHING
    asks = list(asks)
    for door in DOORS:
        with door(rule, **options) as site:
            harmed = sum(not ask.to(site) for ask in asks)
            through = sum(ask.to(site) for ask in asks)
            outcome += Outcome(len(asks), through, harmed)
    return outcome


def all_refused(asks: Iterable[Ask], *, before: Iterable[Ask], after: Iterable[Ask], **options: Any) -> Outcome:
    """Once the limit is used up by ``before``, every ask is refused; those in ``after`` are admitted all the same."""
    outcome = NOTHING
    asks, before, after = list(asks), list(before), list(after)
    for door in DOORS:
        with door(**options) as site:
            harmed = sum(not ask.to(site) for ask in before)
            through = sum(ask.to(site) for ask in asks)
            harmed += sum(not ask.to(site) for ask in after)
            outcome += Outcome(len(asks), through, harmed)
    return outcome
