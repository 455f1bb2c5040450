"""Results of a replay: requests, rules and clients, which can be added up over processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import nlargest
from typing import Any, NamedTuple

_SECOND, _MINUTE = 1_000_000, 60_000_000


def name_of(client: bytes) -> str:
    """Decode a client."""
    return client.decode("utf-8", "backslashreplace")


class OfClient(NamedTuple):
    """Number of a client's requests and refusals."""

    client: str
    requests: int
    refused: int


class Peaks:
    """The most requests of one client in a second and in a minute of the clock."""

    def __init__(self) -> None:
        self.second = self.minute = (0, b"")
        """Requests, and the client."""
        self._in_second: dict[bytes, int] = {}
        self._in_minute: dict[bytes, int] = {}
        self._second_ends = self._minute_ends = 0

    def note(self, now: int, client: bytes) -> None:
        """Record a request at Unix time ``now`` in microseconds, which never decreases."""
        if now >= self._second_ends:
            self._second_ends = (now // _SECOND + 1) * _SECOND
            self._in_second.clear()
            if now >= self._minute_ends:
                self._minute_ends = (now // _MINUTE + 1) * _MINUTE
                self._in_minute.clear()
        in_second = self._in_second[client] = self._in_second.get(client, 0) + 1
        if in_second > self.second[0]:
            self.second = in_second, client
        in_minute = self._in_minute[client] = self._in_minute.get(client, 0) + 1
        if in_minute > self.minute[0]:
            self.minute = in_minute, client

    def add(self, other: Peaks) -> None:
        """Add the peaks of other clients."""
        self.second, self.minute = max(self.second, other.second), max(self.minute, other.minute)

    def as_json(self) -> dict[str, dict[str, Any]]:
        """Return the peaks by unit."""
        units = {"second": self.second, "minute": self.minute}
        return {
            unit: {"client": name_of(client) if number else None, "requests": number}
            for unit, (number, client) in units.items()
        }


class Figures:
    """Requests of a log under one rule set. Requests without a rule count as admitted."""

    def __init__(self) -> None:
        self.lines = 0
        self.skipped = 0
        """Lines without a request, or that could not be parsed."""
        self.unread: dict[str, tuple[int, bytes]] = {}
        """By reason, the number of unread lines with a request, and the first of them."""
        self.untimed = 0
        """Requests without a time."""
        self.of_proxies = 0
        """Requests logged under the address of a trusted proxy."""
        self.refused_by: Counter[bytes] = Counter()
        self.requests_by: dict[bytes, int] = {}
        self.rules: dict[str, list[int]] = {}
        """Admitted and refused requests by rule."""
        self.first: int | None = None
        """Unix time of the first request in microseconds."""
        self.last = 0
        self.peaks = Peaks()

    @property
    def requests(self) -> int:
        """Number of requests."""
        return self.lines - self.skipped

    @property
    def refused(self) -> int:
        """Number of refused requests."""
        return self.refused_by.total()

    @property
    def admitted(self) -> int:
        """Number of admitted requests."""
        return self.requests - self.refused

    def count(self, rules: Iterable[str], place: int, number: int = 1) -> None:
        """Count requests for each of their rules: at place 0 as admitted, at 1 as refused."""
        for name in rules:
            self.rules.setdefault(name, [0, 0])[place] += number

    def clients(self, most: int) -> list[OfClient]:
        """Return the clients with most refusals, then those with most requests."""
        found = self.first_clients(most)
        return [OfClient(name_of(client), self.requests_by[client], self.refused_by[client]) for client in found]

    def first_clients(self, most: int) -> list[bytes]:
        """Return `clients` as logged."""
        requests, refused = self.requests_by, self.refused_by
        return nlargest(most, requests, key=lambda client: (refused[client], requests[client], client))

    def add(self, other: Figures) -> None:
        """Add the figures of other clients in the same log."""
        self.refused_by.update(other.refused_by)
        for client, number in other.requests_by.items():
            self.requests_by[client] = self.requests_by.get(client, 0) + number
        for name, numbers in other.rules.items():
            for place, number in enumerate(numbers):
                self.count((name,), place, number)
        self.peaks.add(other.peaks)
        times = [each.first for each in (self, other) if each.first is not None]
        self.first, self.last = min(times, default=None), max(self.last, other.last)
        self.lines, self.skipped = self.lines + other.lines, self.skipped + other.skipped
        self.unread |= other.unread
        self.untimed += other.untimed
        self.of_proxies += other.of_proxies

    def as_json(self, most: int) -> dict[str, Any]:
        """Return the figures for ``--json``."""
        return {
            "lines": self.lines,
            "skipped": self.skipped,
            "requests": self.requests,
            "admitted": self.admitted,
            "refused": self.refused,
            "rules": {name: {"admitted": admitted, "refused": refused} for name, (admitted, refused) in self.rules.items()},
            "clients": [each._asdict() for each in self.clients(most)],
            "highest": self.peaks.as_json(),
        }
