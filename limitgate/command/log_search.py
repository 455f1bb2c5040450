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
from limitgate.http.request import DescribedRequest
from limitgate.limits.refusal_id import LENGTH, RefusalId, RefusalKey
from limitgate.replay.access_log import Entry, Log, TextParser, parse_json
from limitgate.stores import MemoryStore

_ID = re.compile(rb"(?<![A-Za-z0-9_-])[A-Za-z0-9_-]{%d}(?![A-Za-z0-9_-])" % LENGTH)
_MOST = 10
_REMEMBERED = 100_000
"""Requests of an access log that are known to belong to other buckets."""


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
    """Return the first lines about the bucket of a refusal. ``keys`` decrypt ids. Raises `ConfigError` like `Log`."""
    matcher = _Matcher(keys, refusal, tuple(buckets), asked)
    found: list[Trace] = []
    for name in logs:
        for number, line in enumerate(_lines(name), 1):
            is_of_bucket, client = matcher.match(line)
            if is_of_bucket:
                found.append(Trace(name, number, line.decode("utf-8", "backslashreplace").strip(), client))
                if len(found) == _MOST:
                    return found
    return found


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
        self._others: set[tuple[object, ...]] = set()
        self._clients: set[bytes] = set()
        self._gate: Gate | None = None

    def match(self, line: bytes) -> tuple[bool, str | None]:
        for named in _ID.findall(line):
            read = [key.read(named.decode()) for key in self._keys]
            if any((each.tag, each.digest) == (self._refusal.tag, self._refusal.digest) for each in read):
                return True, None
        entry = parse_json(line) if line.startswith(b"{") else self._parse(line)
        if entry is None or not self._buckets or entry.client in self._clients or not self._is_of_bucket(entry):
            return False, None
        self._clients.add(entry.client)
        return True, entry.client.decode("utf-8", "backslashreplace")

    def _is_of_bucket(self, entry: Entry) -> bool:
        headers = entry.headers or {}
        alike = entry.client, entry.method, entry.path, *headers.items()
        if alike in self._others:
            return False
        if any(key.startswith(self._buckets) for key in self._keys_of(entry)):
            return True
        if len(self._others) < _REMEMBERED:
            self._others.add(alike)
        return False

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
