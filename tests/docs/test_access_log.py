"""A real log, with its bursts and its crawlers, against counts and decisions worked out by other means."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections import Counter
from itertools import islice
from typing import Any, NamedTuple

import pytest

from limitgate import Decision, Limiter, LimitGate, MemoryStore, Rule
from tests.access_log import LOG, PER_DAY, Entry, Replay, read_log, replay, table
from tests.support.clock import Clock
from tests.support.doors import Wire, http_scope
from tests.support.redis_server import RedisServer

SECOND = 1_000_000
PERIODS = {"second": 1, "minute": 60, "day": 86_400}
COUNTS = ((2, 30, 300), (1, 7, 50))
"""Requests per second, minute and day: what the log's clients mostly keep to, and what they do not."""
OVER_HTTP = 4_000
"""Requests of the log, the first of it, that are sent over HTTP: those of 806 clients."""


class Expected(NamedTuple):
    """What the oracle says to one request."""

    allowed: bool
    remaining: tuple[int, ...]
    waits_us: tuple[int, ...]
    """Per window, 0 where the request fits."""


class Oracle:
    """GCRA as its definition has it: per client and window a theoretical arrival time, in ticks of 1/count µs since 1970.

    The package keeps debts that drain instead, and knows nothing of arrival times. A request weighs a period of µs.
    """

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.limits = tuple(zip(counts, PERIODS.values(), strict=True))
        self.arrivals: dict[tuple[str, int], int] = {}

    def ask(self, client: str, now_us: int) -> Expected:
        fits, remaining, waits, arrivals = True, [], [], {}
        for count, period in self.limits:
            weight = period * SECOND
            arrival = max(self.arrivals.get((client, period), 0), now_us * count)
            latest = now_us * count + count * weight  # as far ahead of the clock as a full bucket may be taken
            late = arrival + weight - latest
            fits = fits and late <= 0
            waits.append(-(-max(0, late) // count))
            arrivals[client, period] = arrival, weight, latest
        for place, (arrival, weight, latest) in arrivals.items():
            self.arrivals[place] = arrival + weight if fits else arrival
            remaining.append((latest - self.arrivals[place]) // weight)
        return Expected(fits, tuple(remaining), tuple(waits))


@pytest.fixture(scope="module")
def log() -> list[Entry]:
    return read_log()


@pytest.fixture(scope="module")
def by_time(log: list[Entry]) -> list[Entry]:
    """The log in the order of its times, those of one second in the order of the log."""
    return sorted(log, key=lambda entry: entry.at)


def expected(by_time: list[Entry], counts: tuple[int, ...]) -> list[Expected]:
    oracle = Oracle(counts)
    return [oracle.ask(entry.ip, entry.at * SECOND) for entry in by_time]


def seen(decision: Decision) -> Expected:
    """A decision in the oracle's terms, the waits in whole µs as the arithmetic has them."""
    assert decision.retry_after == max(window.retry_after for window in decision.windows)
    return Expected(
        decision.allowed,
        tuple(window.remaining for window in decision.windows),
        tuple(round(window.retry_after * SECOND) for window in decision.windows),
    )


def written(counts: tuple[int, ...]) -> list[str]:
    """The limits as users write them."""
    return [f"{count}/{unit}" for count, unit in zip(counts, PERIODS, strict=True)]


def fields(counts: tuple[int, ...], answer: Expected) -> list[tuple[str, str]]:
    """The header fields that such an answer has to have."""
    found = [] if answer.allowed else [("retry-after", str(max(1, -(-max(answer.waits_us) // SECOND))))]
    for count, left, unit in zip(counts, answer.remaining, PERIODS, strict=True):
        found += [(f"x-ratelimit-limit-{unit}", str(count)), (f"x-ratelimit-remaining-{unit}", str(left))]
    return sorted(found)


def test_the_log_is_read_whole(log: list[Entry]) -> None:
    """All 10,000 lines are requests, each with the address, time and request line that stand in it."""
    with gzip.open(LOG, "rt") as lines:
        split = [line.split(" ") for line in lines]
    assert [(entry.ip, entry.method, entry.target) for entry in log] == [(parts[0], parts[5][1:], parts[6]) for parts in split]
    assert len(log) == 10_000
    assert log[0].at == 1_431_857_103  # 17 May 2015, 10:05:03 UTC
    assert [f"{entry.at % 86_400 // 3600:02}" for entry in log] == [re.split("[:/]", parts[3])[3] for parts in split]


def test_the_log_puts_every_window_to_the_test(by_time: list[Entry]) -> None:
    """Each window refuses requests of this log while others have room, so the comparisons below are about something."""
    oracle = Oracle(COUNTS[1])
    refusals = Counter(tuple(wait > 0 for wait in oracle.ask(entry.ip, entry.at * SECOND).waits_us) for entry in by_time)
    assert all(refusals[alone] >= 10 for alone in ((True, False, False), (False, True, False), (False, False, True)))
    assert refusals[False, False, False] > 5_000


def test_through_uvicorn_and_redis_every_client_gets_its_hundred(log: list[Entry], own_redis: RedisServer) -> None:
    """Over HTTP, many connections at a time, each client is admitted exactly min(n, 100) times and refused the rest."""
    log = log[:OVER_HTTP]
    with gzip.open(LOG, "rt") as lines:
        requests = Counter(line.partition(" ")[0] for line in islice(lines, OVER_HTTP))
    assert sorted(requests.values())[-4:] == [58, 170, 206, 230]
    done = replay(log, own_redis.url)
    assert done.seconds < 86_400 / PER_DAY  # nobody has earned a request back meanwhile
    assert done.answers == Counter(
        {
            (client, status): times
            for client, count in requests.items()
            for status, times in ((200, min(count, 100)), (429, max(0, count - 100)))
            if times
        }
    )
    assert "0 clients with another number than expected, 0 answers other than 200 and 429" in table(log, done)


def test_a_wrong_answer_shows_in_the_table(log: list[Entry]) -> None:
    """The printed table counts the clients that were not treated as they should have been, and foreign answers."""
    answers = Counter((entry.ip, 200) for entry in log[1:])
    answers["192.0.2.1", 500] = 1
    wrong = 6 + 1  # the clients of more than a hundred requests, and the one of the first line
    assert f"{wrong} clients with another number than expected, 1 answers other" in table(log, Replay(answers, 1.0))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.usefixtures("_unwatched")
def test_the_limiter_decides_the_log_as_gcra_defines_it(by_time: list[Entry], counts: tuple[int, ...]) -> None:
    """On the log's own clock every decision of the Limiter is the oracle's: allowed, what remains and every wait."""
    clock, limits = Clock(), written(counts)
    with Limiter(MemoryStore(clock)) as limiter:

        def hit(entry: Entry) -> Expected:
            clock.now = entry.at * SECOND
            return seen(limiter.hit(entry.ip, *limits))

        for number, (entry, answer) in enumerate(zip(by_time, expected(by_time, counts), strict=True)):
            assert hit(entry) == answer, f"request {number}: {entry}"


@pytest.mark.usefixtures("_unwatched")
def test_the_middleware_decides_the_log_as_gcra_defines_it(by_time: list[Entry]) -> None:
    """Through the middleware every decision, every count in a header and every Retry-After is the oracle's."""
    clock, counts = Clock(), COUNTS[1]
    handed: list[Decision] = []

    async def passed(scope: Any, receive: Any, send: Any) -> None:
        handed.append(scope["limitgate"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def denied(scope: Any, receive: Any, send: Any) -> None:
        handed.append(scope["limitgate"])
        await send({"type": "http.response.start", "status": 429, "headers": []})
        await send({"type": "http.response.body"})

    gate = LimitGate(
        passed,
        rules=[Rule("log", *written(counts), key=["ip"])],
        store=MemoryStore(clock),
        trusted_proxies=["127.0.0.1"],
        headers=["x-ratelimit-windows"],
        on_denied=denied,
    )

    async def ask(entry: Entry) -> tuple[int, list[tuple[str, str]]]:
        clock.now = entry.at * SECOND
        scope = http_scope(entry.target, entry.method, {"X-Forwarded-For": entry.ip}, peer="127.0.0.1")
        reply = (await Wire().call(gate, scope)).reply()
        return reply.status, sorted(reply.headers.multi_items())

    async def feed() -> None:
        for number, (entry, answer) in enumerate(zip(by_time, expected(by_time, counts), strict=True)):
            asked = f"request {number}: {entry}"
            assert await ask(entry) == (200 if answer.allowed else 429, fields(counts, answer)), asked
            assert seen(handed[-1]) == answer, asked

    asyncio.run(feed())
    assert len(handed) == len(by_time)
