"""Divides a log among processes by client, if that gives exact results."""

from __future__ import annotations

from binascii import crc32
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

from limitgate.http.client_ip import grouped
from limitgate.replay.access_log import Entry, Format, Log, TimeOrder, parser_of
from limitgate.replay.engine import Engine
from limitgate.replay.figures import Figures
from limitgate.rules.files import load_rules
from limitgate.rules.rule import RuleSet
from limitgate.rules.settings import Settings

Progress = Callable[[int], None]
"""Receives the number of bytes read so far."""


class Comparison(NamedTuple):
    """Figures under the current rules, and under alternative ones."""

    figures: Figures
    tried: Figures | None = None
    newly_refused: int = 0
    newly_admitted: int = 0

    def added(self, other: Comparison) -> Comparison:
        """Return the sum of these figures and those of other clients."""
        self.figures.add(other.figures)
        if self.tried is not None and other.tried is not None:
            self.tried.add(other.tried)
        return self._replace(
            newly_refused=self.newly_refused + other.newly_refused,
            newly_admitted=self.newly_admitted + other.newly_admitted,
        )


class Share(NamedTuple):
    """The clients of one process."""

    place: int
    among: int
    ipv6_prefix: int = 64

    def has(self, client: bytes) -> bool:
        """True if a client belongs to this share. An IPv6 network belongs to one share."""
        if b":" in client:
            client = grouped(client.decode("latin-1"), self.ipv6_prefix).encode("latin-1")
        return crc32(client) % self.among == self.place


def counts_by_client(rules: RuleSet) -> bool:
    """True if every rule counts by address, so that no two clients share a bucket."""
    every = [rule for of_tier in rules.tiers.values() for rule in of_tier if not (rule.exempt or rule.deny)]
    return all("ip" in rule.key for rule in every)


def replay(
    log: Log, engine: Engine, tried: Engine | None = None, share: Share | None = None, progress: Progress | None = None
) -> Comparison:
    """Send a log, or a share of it, through one or two engines. Empty lines don't count."""
    parse, order, lane = parser_of(log.format), TimeOrder(), _Lane(engine, tried, share)
    for lines, read in log.blocks():
        for line in lines:
            entry = parse(line)
            if entry is not None:
                for each in order.push(entry):
                    lane.decide(each)
            elif line.strip():
                lane.skip(line)
        if progress is not None:
            progress(read)
    for each in order.rest():
        lane.decide(each)
    if share is None or share.place == 0:
        engine.figures.untimed = getattr(parse, "untimed", 0)
    return lane.finish()


class _Lane:
    """Sends a share of the requests to one or two engines. Other requests advance the clocks, so that all shares agree."""

    def __init__(self, engine: Engine, tried: Engine | None, share: Share | None) -> None:
        self._engine = engine
        self._tried = tried
        self._share = share
        self._newly_refused = self._newly_admitted = 0

    def decide(self, entry: Entry) -> None:
        if self._share is not None and not self._share.has(entry.client):
            self._engine.advance(entry.at)
            if self._tried is not None:
                self._tried.advance(entry.at)
            return
        is_admitted = self._engine.decide(entry)
        if self._tried is not None and self._tried.decide(entry) is not is_admitted:
            self._newly_refused += is_admitted
            self._newly_admitted += not is_admitted

    def skip(self, line: bytes) -> None:
        """Count a line without a request, in the first share only."""
        if self._share is None or self._share.place == 0:
            self._engine.skip(line)
            if self._tried is not None:
                self._tried.skip(line)

    def finish(self) -> Comparison:
        tried = None if self._tried is None else self._tried.finish()
        return Comparison(self._engine.finish(), tried, self._newly_refused, self._newly_admitted)


def replay_shared(log: Log, rules: str, against: str | None, processes: int, settings: Settings | None = None) -> Comparison:
    """Send a file through one or two rule sets, given by path, in several processes."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        ipv6_prefix = 64 if settings is None else settings.ipv6_prefix
        shares = [Share(place, processes, ipv6_prefix) for place in range(processes)]
        first, *others = [pool.submit(_replay_share, log.name, log.format, rules, against, share, settings) for share in shares]
        whole = first.result()
        for other in others:
            whole = whole.added(other.result())
        return whole


def _replay_share(  # noqa: PLR0917 - a pool passes them by position
    name: str, form: Format, rules: str, against: str | None, share: Share, settings: Settings | None
) -> Comparison:
    tried = Engine(load_rules(against), settings) if against is not None else None
    return replay(Log(name, form), Engine(load_rules(rules), settings), tried, share)
