"""Clients that try to have a limit refuse honest requests, on virtual time. The work has room for everybody."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import NamedTuple

import pytest

from limitgate.overload.adaptive_limit import AdaptiveLimit, Outcome, Permit
from limitgate.overload.options import Adaptive

MOST = 0.02
"""Share of honest requests that may be refused."""
HONEST_S = 0.1
"""Seconds that honest requests take."""


class Arrival(NamedTuple):
    """A request that comes."""

    at: float
    client: str | None
    took_s: float
    outcome: Outcome = "ok"
    request_class: str = "/work"


def honest(begin: float, end: float, rate: float = 60, clients: int = 8, request_class: str = "/work") -> Iterator[Arrival]:
    random, now = Random(1), begin
    while (now := now + random.expovariate(rate)) < end:
        took_s = HONEST_S * random.uniform(0.8, 1.2)
        yield Arrival(now, f"honest {random.randrange(clients)}", took_s, request_class=request_class)


def cheap(
    begin: float, end: float, client: str = "attacker", *, rate: float = 600, burst: int = 1, outcome: Outcome = "ok"
) -> Iterator[Arrival]:
    for n in range(int((end - begin) * rate / burst)):
        for _ in range(burst):
            yield Arrival(begin + n * burst / rate, client, 0.001, outcome)


def refused_share(arrivals: list[Arrival], since: float, limit: AdaptiveLimit | None = None) -> float:
    """Share of the honest requests from a time on that were refused."""
    limit = limit or AdaptiveLimit(Adaptive(), wall_offset=float)
    order = count()
    ends: list[tuple[float, int, Permit, Outcome]] = []
    came = refused = 0
    for arrival in sorted(arrivals):
        while ends and ends[0][0] <= arrival.at:
            ended_at, _, permit, outcome = heapq.heappop(ends)
            limit.done(permit, ended_at, outcome)
        begun = limit.begin(arrival.at, arrival.request_class)
        is_counted = arrival.at >= since and (arrival.client or "").startswith("honest")
        came += is_counted
        if isinstance(begun, Permit):
            begun.client = arrival.client
            heapq.heappush(ends, (arrival.at + arrival.took_s, next(order), begun, arrival.outcome))
        else:
            refused += is_counted
    return refused / came


ATTACKS: dict[str, tuple[list[Arrival], float]] = {
    "among honest requests": ([*honest(0, 21), *cheap(3, 6)], 4),
    "for a minute": ([*honest(0, 75), *cheap(3, 63)], 4),
    "while there are none": ([*honest(0, 3), *cheap(3, 6), *honest(6, 18)], 7),
    "before there are any": ([*cheap(0, 3), *honest(3, 15)], 4),
    "many for one honest client": ([*honest(0, 18, clients=1), *cheap(3, 6)], 4),
    "by the address of all": ([*honest(0, 3, clients=1), *cheap(3, 6, "honest 0"), *honest(6, 18, clients=1)], 7),
    "by the address of all, which is not known": (
        [each._replace(client="honest" if each.client else None) for each in [*honest(0, 3), *cheap(3, 6), *honest(6, 18)]],
        7,
    ),
    "many at once": ([*honest(0, 3), *cheap(3, 14, burst=60), *honest(14, 26)], 15),
    "at the load of thousands": ([*honest(0, 12, 600, 100), *cheap(3, 6, rate=6000)], 4),
    "again and again": ([*honest(0, 60), *[each for n in range(3, 60, 6) for each in cheap(n, n + 3)]], 4),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_cheap_requests_of_one_client_do_not_have_others_refused(attack: str) -> None:
    arrivals, since = ATTACKS[attack]
    assert refused_share(arrivals, since) <= MOST


def test_cheap_requests_of_one_client_do_not_have_its_own_dear_ones_crowd_others_out() -> None:
    """Where it goes on with requests of the usual kind, twice as many as all others make."""
    own = [each._replace(client="attacker") for each in honest(6, 18, 120)]
    assert refused_share([*honest(0, 18), *cheap(3, 6), *own], 7) <= MOST


@pytest.mark.parametrize("outcome", ["failed", "untaught"])
@pytest.mark.parametrize("took_s", [0.001, HONEST_S])
def test_requests_of_one_client_that_fail_do_not_have_others_refused(outcome: Outcome, took_s: float) -> None:
    """Be it at once, or after all of the work."""
    failing = [each._replace(took_s=took_s) for each in cheap(3, 21, rate=200, outcome=outcome)]
    assert refused_share([*honest(0, 21), *failing], 4) <= MOST


@pytest.mark.parametrize("routes", [12, 100, 900])
def test_a_slow_route_among_many_that_are_fast(routes: int) -> None:
    """However many were in use before it."""
    before = [Arrival(n * 0.01, f"client {n % 8}", 0.001, request_class=f"/route/{n}") for n in range(routes)]
    beside = [
        each._replace(took_s=0.001, client="other", request_class=f"/route/{n % routes}")
        for n, each in enumerate(honest(10, 30, 100))
    ]
    assert refused_share([*before, *beside, *honest(10, 30, 60)], 11) <= MOST


def test_methods_that_are_not_allowed_leave_room_for_a_slow_route() -> None:
    """Beside one that is fast, and was in use before."""
    before = [Arrival(n * 0.01, "scanner", 0.001, "untaught", f"{n % 9} /route/{n // 9 % 12}") for n in range(1000)]
    beside = [each._replace(took_s=0.001, client="other", request_class="/fast") for each in honest(10, 40, 100)]
    assert refused_share([*before, *beside, *honest(20, 40)], 21) <= MOST


def test_an_overload_is_an_overload_whoever_has_made_cheap_requests_before() -> None:
    """Of ten times the requests that ten connections can serve no more are let in than otherwise."""
    limit = AdaptiveLimit(Adaptive(), wall_offset=float)
    refused_share([*honest(0, 3), *cheap(3, 6), *honest(6, 7)], 6, limit)
    free, now, admitted = [7.0] * 10, 7.0, 0
    running: list[tuple[float, int, Permit]] = []
    for number in range(30_000):
        now += 0.001
        while running and running[0][0] <= now:
            ended_at, _, permit = heapq.heappop(running)
            limit.done(permit, ended_at)
        begun = limit.begin(now, "/work")
        if isinstance(begun, Permit):
            begun.client = f"client {number % 50}"
            ends_at = max(now, heapq.heappop(free)) + HONEST_S
            heapq.heappush(free, ends_at)
            heapq.heappush(running, (ends_at, number, begun))
            admitted += 1
    assert limit.limit <= 25
    assert math.isclose(limit.rate, 100, rel_tol=0.1)
