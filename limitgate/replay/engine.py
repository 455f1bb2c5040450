"""Sends a log through a gate, on the log's clock. Several processes divide a log by client."""

from __future__ import annotations

from binascii import crc32
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from functools import partial, reduce
from heapq import nlargest
from multiprocessing import get_context
from typing import Any, NamedTuple

from limitgate.gate.admission import Admission
from limitgate.gate.offline import offline_gate
from limitgate.http.client_ip import TrustedProxies, canonical, grouped
from limitgate.http.request import DescribedRequest, Request
from limitgate.limits.decision import Decision
from limitgate.limits.plan import BucketReading, Charge
from limitgate.limits.template import PlainSpend, PlanTemplate
from limitgate.replay.access_log import Entry, Format, Log, Parse, TimeOrder, parser_of, why_unread
from limitgate.replay.suggestion import Arrivals
from limitgate.routes import Routes
from limitgate.rules.files import load_rules
from limitgate.rules.rule import RuleSet, without_slots
from limitgate.rules.settings import Settings
from limitgate.stores import MemoryStore

Describe = Callable[[str, str, str, Mapping[str, str] | None], Request]
MOST_BUCKETS = 1 << 24
"""Effectively no maximum, as in Redis."""


class Engine:
    """Decides on a log's requests in order, as a gate with these rules.

    If a log has whole seconds, the requests of a second are simultaneous. Logs have no durations, so limits on requests in
    flight don't apply. A delayed request counts as admitted.
    """

    def __init__(
        self,
        rules: RuleSet,
        settings: Settings | None = None,
        routes: Routes | None = None,
        describe: Describe = DescribedRequest,
    ) -> None:
        self.figures: Figures = Figures()
        self.arrivals: Arrivals | None = None
        self._now = 0
        settings = settings or Settings.model_construct()
        store = MemoryStore(lambda: self._now, max_buckets=MOST_BUCKETS)
        self._gate = offline_gate(_without_places(rules), store, settings, routes)
        self._describe = describe
        self._ipv6_prefix = settings.ipv6_prefix
        self._proxies = TrustedProxies(settings.trusted_proxies, settings.forwarded_header)
        self._admitted: Counter[PlanTemplate] = Counter()
        for of_tier in rules.tiers.values():
            for rule in of_tier:
                if not rule.exempt:
                    self.figures.rules.setdefault(rule.name, [0, 0])

    def decide(self, entry: Entry) -> bool:
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
        for peak in figures.peaks.values():
            peak.note(self._now, client)
        reading = admission.reading
        if admission.is_plain and reading is not None:
            self._admitted[reading.template] += 1
            self._note(admission, reading)
            return True
        is_admitted = admission.refusal is None
        if not is_admitted:
            figures.refused_by[client] += 1
        if admission.decision is not None:
            self._count(admission.decision, is_admitted=is_admitted)
            self._note(admission, admission.decision.evidence)
            if status is not None and is_admitted and admission.is_by_outcome:
                admission.begun(status)
                if admission.end():
                    self._gate.refunds.settle(admission)
        return is_admitted

    def _counted_as(self, peer: bytes, request: Request) -> bytes:
        if self._proxies.trust_anybody:
            client = request.client or ""
            self.figures.of_proxies += self._proxies.trust(client)
            peer = client.encode()
        elif peer.replace(b".", b"").isdigit():  # an IPv4 address has a single spelling
            return peer
        text = peer.decode("latin-1")
        return grouped(text, self._ipv6_prefix).encode("latin-1")

    def advance(self, at: int) -> None:
        """Move the clock forward to a Unix time in µs."""
        self._now = max(self._now, at)

    def skip(self, line: bytes = b"") -> None:
        self.figures.lines += 1
        self.figures.skipped += 1
        why = why_unread(line)
        if why is not None:
            number, first = self.figures.unread.get(why, (0, line))
            self.figures.unread[why] = number + 1, first

    def finish(self) -> Figures:
        for template, number in self._admitted.items():
            self.figures.count(_rules_of(template.charges), 0, number)
        self._admitted.clear()
        self.figures.last = self._now
        return self.figures

    def _count(self, decision: Decision, *, is_admitted: bool) -> None:
        evidence = decision.evidence
        if is_admitted:
            shadows = {charge.rule for charge, _, after in evidence if after is None}
            self.figures.count(_rules_of(charge for charge, _, _ in evidence if charge.rule not in shadows), 0)
            self.figures.count(tuple(name for name in shadows if name is not None), 1)
            self.figures.in_shadow += decision.shadow
            self.figures.in_shadow_by.update(shadows)
        else:
            refusing = (
                evidence.template.refusing(decision, evidence)[0] if isinstance(evidence, PlainSpend) else decision.refusing
            )
            self.figures.count(tuple(name for name in refusing or (decision.rule,) if name is not None), 1)

    def _note(self, admission: Admission, evidence: Sequence[BucketReading]) -> None:
        if self.arrivals is not None and admission.prepared is not None:
            self.arrivals.note(self._now, admission.prepared.compiled_rules, evidence)


def _rules_of(charges: Iterable[Charge]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([charge.rule for charge in charges if charge.rule is not None]))


def _without_places(rules: RuleSet) -> RuleSet:
    timed = copy(rules)
    timed.tiers = {tier: tuple(filter(None, map(without_slots, of_tier))) for tier, of_tier in rules.tiers.items()}
    return timed


def _is_counted_by_address(client: bytes) -> bool:
    return client.replace(b".", b"").isdigit() or canonical(client.decode("latin-1").partition("/")[0]) is not None


def name_of(client: bytes) -> str:
    return client.decode("utf-8", "backslashreplace")


class _Peak:
    """The most requests of a client within a period of the clock, in µs."""

    def __init__(self, period: int) -> None:
        self.highest = (0, b"")
        self._period = period
        self._counts: dict[bytes, int] = {}
        self._ends = 0

    def note(self, now: int, client: bytes) -> None:
        if now >= self._ends:
            self._ends = (now // self._period + 1) * self._period
            self._counts.clear()
        number = self._counts[client] = self._counts.get(client, 0) + 1
        if number > self.highest[0]:
            self.highest = number, client


class Figures:
    """Counts of a log. Requests without a rule count as admitted."""

    def __init__(self) -> None:
        self.lines: int = 0
        self.skipped: int = 0
        """Lines that could not be parsed."""
        self.unread: dict[str, tuple[int, bytes]] = {}
        """For each reason, the number of lines and the first line."""
        self.untimed: int = 0
        self.of_proxies: int = 0
        """Number of requests whose client is a trusted proxy."""
        self.refused_by: Counter[bytes] = Counter()
        self.requests_by: dict[bytes, int] = {}
        self.rules: dict[str, list[int]] = {}
        self.in_shadow: int = 0
        """Admitted requests that shadow rules would have refused."""
        self.in_shadow_by: Counter[str | None] = Counter()
        """By rule."""
        self.first: int | None = None
        self.last: int = 0
        self.peaks: dict[str, _Peak] = {"second": _Peak(1_000_000), "minute": _Peak(60_000_000)}

    @property
    def requests(self) -> int:
        return self.lines - self.skipped

    @property
    def refused(self) -> int:
        return self.refused_by.total()

    @property
    def admitted(self) -> int:
        return self.requests - self.refused

    @property
    def unaddressed(self) -> list[bytes]:
        return [client for client in self.requests_by if not _is_counted_by_address(client)]

    def count(self, rules: Iterable[str], place: int, number: int = 1) -> None:
        """Count admitted requests at place 0, refused ones at place 1."""
        for name in rules:
            self.rules.setdefault(name, [0, 0])[place] += number

    def clients(self, most: int) -> list[bytes]:
        """Return the clients with most refusals, then most requests."""
        requests, refused = self.requests_by, self.refused_by
        return nlargest(most, requests, key=lambda client: (refused[client], requests[client], client))

    def add(self, other: Figures) -> None:
        self.refused_by.update(other.refused_by)
        for client, number in other.requests_by.items():
            self.requests_by[client] = self.requests_by.get(client, 0) + number
        for name, numbers in other.rules.items():
            for place, number in enumerate(numbers):
                self.count((name,), place, number)
        self.in_shadow += other.in_shadow
        self.in_shadow_by.update(other.in_shadow_by)
        for unit, peak in self.peaks.items():
            peak.highest = max(peak.highest, other.peaks[unit].highest)
        times = [each.first for each in (self, other) if each.first is not None]
        self.first, self.last = min(times, default=None), max(self.last, other.last)
        self.lines, self.skipped = self.lines + other.lines, self.skipped + other.skipped
        self.unread |= other.unread
        self.untimed += other.untimed
        self.of_proxies += other.of_proxies

    def highest(self) -> dict[str, dict[str, Any]]:
        peaks = {unit: peak.highest for unit, peak in self.peaks.items()}
        return {
            unit: {"client": name_of(client) if count else None, "requests": count} for unit, (count, client) in peaks.items()
        }

    def as_json(self, most: int) -> dict[str, Any]:
        return {
            "lines": self.lines,
            "skipped": self.skipped,
            "requests": self.requests,
            "admitted": self.admitted,
            "refused": self.refused,
            "rules": {name: {"admitted": admitted, "refused": refused} for name, (admitted, refused) in self.rules.items()},
            "clients": [
                {"client": name_of(each), "requests": self.requests_by[each], "refused": self.refused_by[each]}
                for each in self.clients(most)
            ],
            "highest": self.highest(),
        }


Progress = Callable[[int], None]


class Comparison(NamedTuple):
    figures: Figures
    tried: Figures | None = None
    newly_refused: int = 0
    newly_admitted: int = 0

    def added(self, other: Comparison) -> Comparison:
        self.figures.add(other.figures)
        if self.tried is not None and other.tried is not None:
            self.tried.add(other.tried)
        newly_refused, newly_admitted = self.newly_refused + other.newly_refused, self.newly_admitted + other.newly_admitted
        return self._replace(newly_refused=newly_refused, newly_admitted=newly_admitted)


class Share(NamedTuple):
    place: int
    among: int
    ipv6_prefix: int = 64

    def has(self, client: bytes) -> bool:
        """True if the client belongs to this share. An IPv6 network belongs to one share."""
        if b":" in client:
            client = grouped(client.decode("latin-1"), self.ipv6_prefix).encode("latin-1")
        return crc32(client) % self.among == self.place


def counts_by_client(rules: RuleSet) -> bool:
    """True if no clients share a bucket."""
    every = [rule for of_tier in rules.tiers.values() for rule in of_tier if not (rule.exempt or rule.deny)]
    return all("ip" in rule.key for rule in every)


def replay(
    log: Log, engine: Engine, tried: Engine | None = None, share: Share | None = None, progress: Progress | None = None
) -> Comparison:
    engines = [engine] if tried is None else [engine, tried]
    is_first = share is None or share.place == 0
    differing = [0, 0]

    def skip(line: bytes) -> None:
        for each in engines if is_first else ():
            each.skip(line)

    parse = parser_of(log.format)
    for entry in _ordered(log, parse, skip, progress):
        if share is not None and not share.has(entry.client):  # advances the clocks, so that all shares agree
            for each in engines:
                each.advance(entry.at)
            continue
        is_admitted, *others = [each.decide(entry) for each in engines]
        if others and others[0] is not is_admitted:
            differing[is_admitted] += 1
    if is_first:
        engine.figures.untimed = getattr(parse, "untimed", 0)
    newly_admitted, newly_refused = differing
    return Comparison(engine.finish(), None if tried is None else tried.finish(), newly_refused, newly_admitted)


def _ordered(log: Log, parse: Parse, skip: Callable[[bytes], None], progress: Progress | None) -> Iterator[Entry]:
    order = TimeOrder()
    for lines, read in log.blocks():
        for line in lines:
            entry = parse(line)
            if entry is not None:
                yield from order.push(entry)
            elif line.strip():
                skip(line)
        if progress is not None:
            progress(read)
    yield from order.rest()


def replay_shared(log: Log, rules: str, against: str | None, processes: int, settings: Settings) -> Comparison:
    """Send a log through one or two rule sets by path, in several processes."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        shares = [Share(place, processes, settings.ipv6_prefix) for place in range(processes)]
        replay_share = partial(_replay_share, log.name, log.format, rules, against, settings)
        return reduce(Comparison.added, pool.map(replay_share, shares))


def _replay_share(  # noqa: PLR0917 - a pool passes them by position
    name: str, form: Format, rules: str, against: str | None, settings: Settings, share: Share
) -> Comparison:
    tried = Engine(load_rules(against), settings) if against is not None else None
    return replay(Log(name, form), Engine(load_rules(rules), settings), tried, share)
