"""Busy is not broken: no load, no stall and no want on this machine lets more pass than the limits, while Redis is well.

These are the short ones; ``python -m tests.faults.overload`` tries all servers, doors, policies and stores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.overload import attack, rushes, waits
from tests.faults.overload.attack import THREADS, UVICORN, Setting
from tests.faults.overload.outcome import Demand, Honest, Outcome
from tests.support.attempts import at_best
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer, free_port

SECONDS = 1.5
"""How long an attack lasts."""
ONCE, TWICE = 0.2, 0.3
"""Timeouts: seconds that may be waited for a store that stands still, and for one whose replies are late."""
SLACK = 0.15
"""Seconds that a busy machine may make of that, less than to wait once more."""
H11, HTTPTOOLS = "uvicorn asyncio h11", "uvicorn asyncio httptools"


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A Redis to freeze, on a port."""
    server = RedisServer(port=str(free_port()))
    yield server
    server.stop()


@pytest.fixture
def url(redis: RedisServer) -> str:
    """Where it is; it knows nobody."""
    with redis.client() as client:
        client.flushall()
    return f"redis://127.0.0.1:{redis.port}/0"


# --- served -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("server", "door"), [(H11, "gate"), (HTTPTOOLS, "dependency"), ("gunicorn gthread", "decorator")])
def test_long_paths(server: str, door: str, url: str) -> None:
    """Paths that take long to read switch nothing off: guesses stay within their limit, and nobody else is refused."""
    assert at_best(lambda: attack.long_paths(Setting(server, door, seconds=SECONDS), url).complaints()) == []


def test_long_paths_under_uvloop(url: str) -> None:
    """It is the same where the loop looks at its timers before it reads."""
    assert at_best(lambda: attack.long_paths(Setting(UVICORN, seconds=2 * SECONDS), url).complaints()) == []


@pytest.mark.parametrize("policy", ["open", "closed"])
def test_a_handler_that_blocks(policy: str, url: str) -> None:
    """A handler that keeps the loop for longer than the timeout, again and again, is no failure of the store."""
    assert at_best(lambda: attack.blocked(Setting(HTTPTOOLS, policy=policy, seconds=SECONDS), url).complaints()) == []


def test_small_stalls(url: str) -> None:
    """Stalls of 20 ms, ten a second, leave every decision to the store."""
    assert at_best(lambda: attack.stalls(Setting(HTTPTOOLS, seconds=SECONDS), url).complaints()) == []


@pytest.mark.alone
def test_starved_threads(url: str) -> None:
    """Threads that wait for the interpreter do not wait for the store."""
    assert at_best(lambda: attack.starved(Setting(THREADS, seconds=SECONDS), url, 8).complaints()) == []


@pytest.mark.parametrize("policy", ["open", "closed"])
def test_no_file_descriptor(policy: str, url: str) -> None:
    """A process that cannot open a connection limits by itself, whatever ``on_error`` says."""
    assert at_best(lambda: attack.no_files(Setting(UVICORN, policy=policy, seconds=SECONDS), url).complaints()) == []


def test_no_thread(url: str) -> None:
    """So does one that cannot start a thread, and it says so in few lines."""
    assert at_best(lambda: attack.no_threads(Setting(THREADS, seconds=SECONDS), url).complaints()) == []


def test_slow_clients(url: str) -> None:
    """Clients that send a byte at a time are no load."""
    assert at_best(lambda: attack.slow_clients(Setting(HTTPTOOLS, seconds=SECONDS), url).complaints()) == []


def test_a_frozen_redis_while_the_loop_stalls(url: str, redis: RedisServer) -> None:
    """A store that really is away is noticed by a process that is hardly there itself, which limits alone until it is back."""
    setting = Setting(HTTPTOOLS, policy="local", seconds=4.0)
    assert at_best(lambda: attack.frozen_while_stalling(setting, url, redis).complaints()) == []


# --- in one turn ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "warm"), [(1_000, True), (5_000, False)], ids=["1,000, warm", "5,000, cold"])
def test_a_crowd_in_one_turn(size: int, warm: bool, url: str) -> None:  # noqa: FBT001
    """Of thousands of guesses in one turn of the loop no more pass than may, by Redis and by this process."""
    assert at_best(lambda: asyncio.run(rushes.one_turn(url, size, warm=warm)).complaints()) == []


def test_a_crowd_in_one_turn_is_answered(url: str) -> None:
    """A crowd is no failure of the store, so nobody gets a 503."""
    assert at_best(lambda: asyncio.run(rushes.one_turn(url, 5_000, warm=True, policy="closed")).complaints()) == []


@pytest.mark.alone
def test_crowds_on_two_nodes(redis_cluster: RedisCluster) -> None:
    """What one address is refused does not stay charged to everybody, and nobody else is refused."""
    assert at_best(lambda: asyncio.run(rushes.on_two_nodes(redis_cluster, 2_000, seconds=SECONDS)).complaints()) == []


# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 8])
def test_threads_and_a_frozen_redis(at_once: int, url: str, redis: RedisServer) -> None:
    """Threads wait for a Redis that stands still for as long as they may, and soon not at all."""
    assert at_best(lambda: waits.frozen(url, redis, "wsgi gate", ONCE, at_once=at_once).complaints(SLACK)) == []


@pytest.mark.parametrize("at_once", [1, 8])
def test_tasks_and_a_frozen_redis(at_once: int, url: str, redis: RedisServer) -> None:
    """Tasks do, too."""
    assert at_best(lambda: asyncio.run(waits.afrozen(url, redis, "asgi gate", ONCE, at_once=at_once)).complaints(SLACK)) == []


@pytest.mark.parametrize("name", ["wsgi gate, by outcome", "REST throttle", "Limiter.hit(Configured)"])
def test_threads_and_late_replies(name: str, redis: RedisServer) -> None:
    """All questions of a request together wait for no longer than the timeout."""
    assert at_best(lambda: waits.late(redis, name, TWICE).complaints(SLACK)) == []


@pytest.mark.parametrize("name", ["asgi gate, by outcome", "FastAPI dependencies", "AsyncLimiter.hit(Configured)"])
def test_tasks_and_late_replies(name: str, redis: RedisServer) -> None:
    """All questions of a request together wait for no longer than the timeout."""
    assert at_best(lambda: asyncio.run(waits.alate(redis, name, TWICE)).complaints(SLACK)) == []


def test_slow_names() -> None:
    """The store looks up names in threads of its own: those of the application stay free."""
    assert at_best(lambda: asyncio.run(waits.slow_names(1.5, 0.0, workers=1)).complaints(SLACK)) == []


# --- the instrument ---------------------------------------------------------------------------------------------------


def outcome(**more: Any) -> Outcome:
    """An attack of which nothing is to be said: guesses within their limit, honest requests answered."""
    honest = [Honest(at / 10, at / 10 + 0.01, 200, degraded=False) for at in range(100)]
    return Outcome("", "", "", **{"logins": {200: 5, 429: 9}, "honest": honest, "began": 1.0, "over": 5.0, **more})


def late(status: int = 200, *, degraded: bool = False) -> list[Honest]:
    """Honest requests of which those after the attack end otherwise."""
    return [each if each.sent < 5 else each._replace(status=status, degraded=degraded) for each in outcome().honest]


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (outcome(), None),
        (outcome(logins={200: 6}), "6 logins answered, bound 5"),
        (outcome(logins={200: 10}, demand=Demand(bursts=2)), None),
        (outcome(logins={200: 11}, demand=Demand(bursts=2)), "11 logins answered, bound 10"),
        (outcome(logins={200: 11}, demand=Demand(unbounded=True)), None),
        (outcome(logins={200: 6}, began=0.0, over=721.0, honest=[]), None),
        (outcome(logins={503: 1}), "1 logins got 503"),
        (outcome(logins={0: 9}), "no login was tried"),
        (outcome(degraded=1), "1 decisions without the store"),
        (outcome(degraded=1, demand=Demand(degrades=True)), None),
        (outcome(outages=1), "taken for broken 1 times"),
        (outcome(lines=16), "16 lines"),
        (outcome(honest=late(429)), "50 of 100 honest requests refused"),
        (outcome(honest=late(503)), "50 of 100 honest requests got 503"),
        (outcome(honest=late(degraded=True)), "recovered after inf s"),
        (outcome(further=["something"]), "something"),
    ],
)
def test_what_is_complained_about(found: Outcome, complaint: str | None) -> None:
    """An attack is judged by what passed, who was refused, and whether the store was taken for broken."""
    if complaint is None:
        assert found.complaints() == []
    else:
        assert any(complaint in each for each in found.complaints())
