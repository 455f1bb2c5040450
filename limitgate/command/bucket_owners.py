"""Finds the clients of a bucket in logs.

A service's log has ids. Keys are computed from the clients and paths of an access log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple
from urllib.parse import quote

from limitgate.command.service import Service
from limitgate.gate.offline import offline_gate
from limitgate.gate.planning.planner import Planner
from limitgate.http.client_ip import canonical
from limitgate.http.request import DescribedRequest, Request
from limitgate.http.response import LENGTH, RefusalId, RefusalKey
from limitgate.replay.access_log import Entry, Log, TextParser, parse_json
from limitgate.stores import MemoryStore

_ID = re.compile(rb"(?<![A-Za-z0-9_-])[A-Za-z0-9_-]{%d}(?![A-Za-z0-9_-])" % LENGTH)
_MOST = 10
_TOO_MANY = 429


class Trace(NamedTuple):
    file: str
    line: int
    text: str
    client: str | None
    """Client of the request; None in service logs, which may mask clients."""


def search(
    logs: Sequence[str], keys: Sequence[RefusalKey], refusal: RefusalId, buckets: Sequence[str], asked: Service
) -> list[Trace]:
    """Return the first lines in service logs, and in access logs each client's refusal nearest to the id's time."""
    match = _matcher(keys, refusal, tuple(buckets), asked)
    found: list[Trace] = []
    nearest: dict[str, tuple[tuple[bool, float], Trace]] = {}
    for name in logs:
        for number, line in enumerate(_lines(name), 1):
            is_of_bucket, entry = match(line)
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
    text = entry.client.decode("utf-8", "replace")
    address = canonical(text)
    return text if address is None else str(address)


def _lines(name: str) -> Iterator[bytes]:
    for lines, _ in Log(name, "combined").blocks():
        yield from lines


def _matcher(
    keys: Sequence[RefusalKey], refusal: RefusalId, buckets: tuple[str, ...], asked: Service
) -> Callable[[bytes], tuple[bool, Entry | None]]:
    parse = TextParser()

    @cache
    def planner() -> Planner:
        return offline_gate(asked.rules, MemoryStore(), asked.settings, asked.routes).rules.planner

    @lru_cache(maxsize=100_000)
    def is_of_bucket(client: str, method: str, path: str, *headers: tuple[str, str]) -> bool:
        request: Request = DescribedRequest(method, path, client, dict(headers))
        if asked.knows_routes:
            request = asked.request(method, quote(path), client, headers)
        planner().address(request)
        planned = planner().plan(request, None)
        return (
            planned is not None
            and planned.plan is not None
            and any(charge.key.startswith(buckets) for charge in planned.plan.charges)
        )

    def match(line: bytes) -> tuple[bool, Entry | None]:
        for named in _ID.findall(line):
            read = [key.read(named.decode()) for key in keys]
            if any((each.tag, each.digest) == (refusal.tag, refusal.digest) for each in read):
                return True, None
        entry = parse_json(line) if line.startswith(b"{") else parse(line)
        if entry is None or not buckets:
            return False, None
        is_found = is_of_bucket(_address(entry), entry.method, entry.path, *(entry.headers or {}).items())
        return is_found, entry if is_found else None

    return match
