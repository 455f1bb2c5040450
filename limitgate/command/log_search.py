"""Finds the log lines about the bucket of a refusal, and so the client.

A service's log contains the id of the first refusal of an episode. An access log contains clients and paths, which lead to
bucket keys. Both need the key of ids, so outsiders cannot identify clients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import quote

from limitgate.command.service import Service
from limitgate.gate.gate import Gate
from limitgate.gate.offline import offline_gate
from limitgate.http.client_ip import canonical
from limitgate.http.request import DescribedRequest
from limitgate.http.response import LENGTH, RefusalId, RefusalKey
from limitgate.replay.access_log import Entry, Log, TextParser, parse_json
from limitgate.stores import MemoryStore

_ID = re.compile(rb"(?<![A-Za-z0-9_-])[A-Za-z0-9_-]{%d}(?![A-Za-z0-9_-])" % LENGTH)
_MOST = 10
"""Lines of service logs, and clients of access logs."""
_TOO_MANY = 429
_REMEMBERED = 100_000
"""Requests of an access log whose buckets are remembered."""


class Trace(NamedTuple):
    """A log line about a bucket."""

    file: str
    line: int
    text: str
    client: str | None
    """The client, for an access log; None in other logs, whose text shows it as ``names`` allows."""


def search(
    logs: Sequence[str], keys: Sequence[RefusalKey], refusal: RefusalId, buckets: Sequence[str], asked: Service
) -> list[Trace]:
    """Return lines about the bucket of a refusal. ``keys`` decrypt ids. Raises `ConfigError` like `Log`.

    They are the first lines of service logs, and for each client in access logs the refusal nearest to the id's time.
    """
    matcher = _Matcher(keys, refusal, tuple(buckets), asked)
    found: list[Trace] = []
    nearest: dict[str, tuple[tuple[bool, float], Trace]] = {}
    for name in logs:
        for number, line in enumerate(_lines(name), 1):
            is_of_bucket, entry = matcher.match(line)
            if not is_of_bucket:
                continue
            text = line.decode("utf-8", "backslashreplace").strip()
            if entry is None:
                if len(found) < _MOST:
                    found.append(Trace(name, number, text, None))
                continue
            client = entry.client.decode("utf-8", "backslashreplace")
            rank = entry.status != _TOO_MANY, abs(entry.at / 1e6 - refusal.at)
            known = nearest.get(one := _address(entry))
            if (known is None and len(nearest) < _MOST) or (known is not None and rank < known[0]):
                nearest[one] = rank, Trace(name, number, text, client)
    return found + [trace for _, trace in nearest.values()]


def _address(entry: Entry) -> str:
    """The client without its port."""
    text = entry.client.decode("utf-8", "replace")
    address = canonical(text)
    return text if address is None else str(address)


def _lines(name: str) -> Iterator[bytes]:
    for lines, _ in Log(name, "combined").blocks():
        yield from lines


class _Matcher:
    def __init__(self, keys: Sequence[RefusalKey], refusal: RefusalId, buckets: tuple[str, ...], asked: Service) -> None:
        self._keys = keys
        self._refusal = refusal
        self._buckets = buckets
        self._service = asked
        self._parse = TextParser()
        self._known: dict[tuple[object, ...], bool] = {}
        self._gate: Gate | None = None

    def match(self, line: bytes) -> tuple[bool, Entry | None]:
        """Return whether a line is about the bucket, and its request if it is of an access log."""
        for named in _ID.findall(line):
            read = [key.read(named.decode()) for key in self._keys]
            if any((each.tag, each.digest) == (self._refusal.tag, self._refusal.digest) for each in read):
                return True, None
        entry = parse_json(line) if line.startswith(b"{") else self._parse(line)
        if entry is None or not self._buckets or not self._is_of_bucket(entry):
            return False, None
        return True, entry

    def _is_of_bucket(self, entry: Entry) -> bool:
        headers = entry.headers or {}
        alike = _address(entry), entry.method, entry.path, *headers.items()
        known = self._known.get(alike)
        if known is None:
            known = any(key.startswith(self._buckets) for key in self._keys_of(entry))
            if len(self._known) < _REMEMBERED:
                self._known[alike] = known
        return known

    def _keys_of(self, entry: Entry) -> list[str]:
        asked, client = self._service, entry.client.decode("utf-8", "replace")
        if self._gate is None:
            self._gate = offline_gate(asked.rules, MemoryStore(), asked.settings, asked.routes)
        request = (
            asked.request(entry.method, quote(entry.path), client, (entry.headers or {}).items())
            if asked.knows_routes
            else DescribedRequest(entry.method, entry.path, client, entry.headers)
        )
        self._gate.rules.planner.address(request)
        planned = self._gate.rules.planner.plan(request, None)
        return [] if planned is None or planned.plan is None else [charge.key for charge in planned.plan.charges]
