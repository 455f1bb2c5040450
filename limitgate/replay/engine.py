"""Sends the entries of a log through a gate, on the log's clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import copy

from limitgate.gate.admission import Admission
from limitgate.gate.offline import offline_gate
from limitgate.http.client_ip import TrustedProxies, grouped
from limitgate.http.request import DescribedRequest, Request
from limitgate.limits.plan import Charge
from limitgate.limits.template import PlainSpend, PlanTemplate
from limitgate.replay.access_log import Entry, why_unread
from limitgate.replay.figures import Figures
from limitgate.replay.suggestion import Arrivals
from limitgate.routes import NoRoutes, Routes
from limitgate.rules.rule import Rule, RuleSet
from limitgate.rules.settings import Settings
from limitgate.stores import MemoryStore

Describe = Callable[[str, str, str, Mapping[str, str] | None], Request]
"""Makes a request from method, path, peer and headers."""
MOST_BUCKETS = 1 << 24
"""Effectively unbounded, so that no bucket is evicted that Redis would keep."""


class Engine:
    """Decides on the requests of a log under a rule set, as a gate with these rules would have.

    Requests must be in order. If the log has whole seconds, the requests of a second are simultaneous. Each request ends
    immediately, because logs have no durations: limits on requests in flight don't apply. A delayed request counts as
    admitted.

    ``settings`` identify clients and callers. ``routes`` are those of the application, for requests that ``describe`` makes.
    """

    def __init__(
        self,
        rules: RuleSet,
        settings: Settings | None = None,
        routes: Routes | None = None,
        describe: Describe = DescribedRequest,
    ) -> None:
        self.figures = Figures()
        self.arrivals: Arrivals | None = None
        """Records the times of each bucket's requests; None to record nothing."""
        self._now = 0
        settings = settings or Settings.model_construct()
        store = MemoryStore(lambda: self._now, max_buckets=MOST_BUCKETS)
        self._gate = offline_gate(_without_places(rules), store, settings, routes or NoRoutes())
        self._describe = describe
        self._ipv6_prefix = settings.ipv6_prefix
        self._proxies = TrustedProxies(settings.trusted_proxies, settings.forwarded_header)
        self._admitted: Counter[PlanTemplate] = Counter()
        for of_tier in rules.tiers.values():
            for rule in of_tier:
                if not rule.exempt:
                    self.figures.rules.setdefault(rule.name, [0, 0])

    def decide(self, entry: Entry) -> bool:
        """Decide on a request. True if it is admitted."""
        at, peer, method, path, status, headers = entry
        figures = self.figures
        self._now = max(self._now, at)
        if figures.first is None:
            figures.first = at
        figures.lines += 1
        request = self._describe(method, path, peer.decode("utf-8", "replace"), headers)
        admission = self._gate.check(request, waits=False)
        client = self._counted_as(peer, request)
        figures.requests_by[client] = figures.requests_by.get(client, 0) + 1
        figures.peaks.note(self._now, client)
        reading = admission.reading
        if admission.is_plain and reading is not None:
            self._count_plain(reading)
            return True
        is_admitted = admission.refusal is None
        if not is_admitted:
            figures.refused_by[client] += 1
        if admission.decision is not None:
            self._count(admission, is_admitted=is_admitted)
            if status is not None and is_admitted and admission.is_by_outcome:
                admission.begun(status)
                if admission.end():
                    self._gate.refunds.settle(admission)
        return is_admitted

    def _counted_as(self, peer: bytes, request: Request) -> bytes:
        """The client as the gate counts it: normalized, without a port, and grouped by IPv6 network."""
        if self._proxies.trust_anybody:
            client = request.client or ""
            self.figures.of_proxies += self._proxies.trust(client)
            peer = client.encode()
        elif peer.replace(b".", b"").isdigit():  # an IPv4 address has a single spelling
            return peer
        text = peer.decode("latin-1")
        return grouped(text, self._ipv6_prefix).encode("latin-1")

    def advance(self, at: int) -> None:
        """Move the clock to Unix time in microseconds, unless it is later already."""
        self._now = max(self._now, at)

    def skip(self, line: bytes = b"") -> None:
        """Count a line without a request."""
        self.figures.lines += 1
        self.figures.skipped += 1
        why = why_unread(line)
        if why is not None:
            number, first = self.figures.unread.get(why, (0, line))
            self.figures.unread[why] = number + 1, first

    def finish(self) -> Figures:
        """Return the figures of all requests so far."""
        for template, number in self._admitted.items():
            self.figures.count(_rules_of(template.charges), 0, number)
        self._admitted.clear()
        self.figures.last = self._now
        return self.figures

    def _count_plain(self, reading: PlainSpend) -> None:
        self._admitted[reading.template] += 1
        if self.arrivals is not None:
            self.arrivals.note(self._now, reading)

    def _count(self, admission: Admission, *, is_admitted: bool) -> None:
        decision = admission.decision
        if decision is None:
            return
        evidence = decision.evidence
        if is_admitted:
            shadows = {charge.rule for charge, _, after in evidence if after is None}
            self.figures.count(_rules_of(charge for charge, _, _ in evidence if charge.rule not in shadows), 0)
            self.figures.count(tuple(name for name in shadows if name is not None), 1)
        else:
            refusing = (
                evidence.template.refusing(decision, evidence)[0] if isinstance(evidence, PlainSpend) else decision.refusing
            )
            self.figures.count(tuple(name for name in refusing or (decision.rule,) if name is not None), 1)
        if self.arrivals is not None:
            self.arrivals.note(self._now, evidence)


def _rules_of(charges: Iterable[Charge]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([charge.rule for charge in charges if charge.rule is not None]))


def _without_places(rules: RuleSet) -> RuleSet:
    """Remove limits on requests in flight."""
    timed = copy(rules)
    timed.tiers = {tier: tuple(filter(None, map(_timed, of_tier))) for tier, of_tier in rules.tiers.items()}
    return timed


def _timed(rule: Rule) -> Rule | None:
    limits = [limit for limit in rule.every_limit if limit.period or not limit.count]
    if len(limits) == len(rule.every_limit):
        return rule
    return rule.having_limits(limits) if limits else None
