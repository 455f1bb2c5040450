"""The counting algorithms, by the script on a real Redis and in the memory store, held against oracles in plain integers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import redis

from limitgate import Limit, MemoryStore
from limitgate.algorithms import fixed_window
from limitgate.decision import decide
from limitgate.limits import Windows
from limitgate.plan import Charge, Lease, Plan, Reading
from limitgate.stores import wire
from limitgate.stores.corrections import correction
from tests.clock import Clock
from tests.oracles import DAY, US, Answer, Counter, FixedWindow, SlidingLog, SlidingWindow, days_of, multiples_of
from tests.redis_server import RedisServer
from tests.test_differential import Scripted

HISTORIES = 10_000
AT_ONCE = 100
"""Histories that are sent to Redis in one go."""
COUNTS = (1, 2, 3, 5, 10)
PERIODS = (1, 7, 60, 3600, DAY, 7 * DAY)
START = Clock().now

ZONES = {
    "Europe/Berlin, 23 h": ("Europe/Berlin", 1_774_746_000),
    "Europe/Berlin, 25 h": ("Europe/Berlin", 1_792_890_000),
    "America/Sao_Paulo, no midnight": ("America/Sao_Paulo", 1_541_300_400),
    "America/Sao_Paulo, 25 h": ("America/Sao_Paulo", 1_550_368_800),
    "Asia/Beirut, no midnight": ("Asia/Beirut", 1_711_836_000),
    "Pacific/Apia, no day": ("Pacific/Apia", 1_325_239_200),
    "America/St_Johns, two midnights": ("America/St_Johns", 1_289_097_060),
    "Asia/Kolkata": ("Asia/Kolkata", 1_790_000_000),
}
"""Time zones, each around a Unix time in seconds at which something happens to its clocks."""


class Kind(NamedTuple):
    """A limit, in some counts, and its oracle."""

    limits: list[Limit]
    oracle: Counter
    start: int


class Event(NamedTuple):
    plan: Plan
    now: int
    here: int
    """What this process's clock says then: it may differ from the store's."""
    answer: Answer


def a_kind(rnd: random.Random, algorithm: str) -> Kind:
    """Any limit of an algorithm; every third fixed window is aligned in another way than usual."""
    how, count, period, start = {"algorithm": algorithm}, rnd.choice(COUNTS), rnd.choice(PERIODS), START + rnd.randrange(US)
    oracle: Counter
    if algorithm == "sliding_log":
        oracle = SlidingLog(count, period * US)
    elif algorithm == "sliding_window":
        oracle = SlidingWindow(count, period * US)
    else:
        end: Callable[[int], int] | None = multiples_of(period * US)
        style = rnd.randrange(6)
        if style == 0:
            how, end = {**how, "align": "first-request"}, None
        elif style == 1:
            zone, around = rnd.choice(list(ZONES.values()))
            days = rnd.choice((1, 1, 2, 7))
            start, period = around * US + rnd.randrange(-days * DAY * US, DAY * US), days * DAY
            how, end = {**how, "align": zone}, days_of(zone, days, around)
        oracle = FixedWindow(count, period * US, end=end)
    counts = [count, count, rnd.choice(COUNTS)]
    return Kind([Limit(f"{each} per {period} seconds", **how) for each in counts], oracle, start)


def a_step(rnd: random.Random, period: int, last: Answer | None, *, back: bool) -> int:
    """Microseconds to the next event: often what was promised last, or one off it."""
    choice = rnd.random()
    if last is not None and choice < 0.5:
        waits = [wait for wait in (last.retry_after, last.reset_after) if wait]
        if waits:
            return max(0, rnd.choice(waits) + rnd.choice((-1, 0, 0, 1)))
    if back and choice < 0.6:
        return -rnd.choice((1, period // 7, period, 3 * period))
    return rnd.choice((0, 0, 1, period // 10, period // 3, period - 1, period, period + period // 2))


def history(seed: int, algorithm: str) -> list[Event]:
    """What happens to one bucket, each event with what the oracle says to it."""
    rnd = random.Random(f"{algorithm} {seed}")
    limits, oracle, now = a_kind(rnd, algorithm)
    windows = [Windows((limit,)) for limit in limits]
    key, skew, clock = f"{algorithm}:{seed}", rnd.choice((0, 0, -DAY * US // 3, DAY * US // 3)), Clock(now)
    store, back, may_step = MemoryStore(clock), [], rnd.random() < 0.3
    if may_step:  # an expired bucket that is gone cannot be found in the future when the clock steps back
        store._reclaim = lambda _now: True
    events: list[Event] = []
    for _ in range(rnd.choice((3, 5, 7))):
        now += a_step(rnd, oracle.period, events[-1].answer if events else None, back=may_step)
        clock.now, its = now, rnd.choice(windows)
        oracle.count = its.limits[0].count
        charge, what = (
            Charge(key, its, rnd.choice((0, 1, 1, 1, 2, 3, its.limits[0].count, 11)), binding=True, rule="r"),
            rnd.random(),
        )
        if what < 0.1:
            owed = rnd.choice((1, 2, 20))
            lease = Lease(0, now, [-owed], [0])
            plan = Plan((charge._replace(cost=0, binding=False, lease=lease),), "peek")
            answer = oracle.ask(now, 0, "peek", owed)
        elif what < 0.3 and back and not may_step:
            (was, reading), admission = back.pop(rnd.randrange(len(back)))
            cost = rnd.randrange(was.charges[0].cost)
            plan = correction(was, reading, [cost])
            oracle.count = plan.charges[0].windows.limits[0].count
            answer = oracle.ask(now, 0, "peek", was.charges[0].cost - cost, admission)
        else:
            plan = Plan((charge,), rnd.choice(("spend",) * 8 + ("peek", "reset")))
            answer = oracle.ask(now, charge.cost, plan.verb)
            if plan.verb == "reset" and algorithm != "sliding_log":  # a counter cannot tell those that came since
                back.clear()
        reading = store.spend(plan)
        if plan.verb == "spend" and reading.admitted and charge.cost:
            back.append(((plan, reading), oracle.admitted[-1]))
        event = Event(plan, now, now + skew, answer)
        same(event, reading)
        events.append(event)
    return events


def same(event: Event, reading: Reading) -> None:
    """A store has said what the oracle says."""
    decision = decide(event.plan, reading)
    (window,) = decision.windows
    waits = [math.inf if wait is None else wait / US for wait in (event.answer.retry_after, event.answer.reset_after)]
    told = (decision.allowed, decision.remaining, window.used, decision.retry_after, decision.reset_after)
    assert reading.now == event.now
    assert told == (*event.answer[:3], *waits), event.plan.charges[0].key


@pytest.fixture(scope="module")
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis_server.client() as client:
        yield client


@pytest.fixture(scope="module")
def scripted(client: redis.Redis) -> Scripted:
    return Scripted(client)


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window", "sliding_log"])
def test_ten_thousand_histories(scripted: Scripted, algorithm: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Script and memory store agree with the oracle on every answer, over thousands of histories."""
    here = SimpleNamespace(now=0, time_ns=lambda: here.now * 1000)
    monkeypatch.setattr(fixed_window, "time", here)
    for first in range(block * HISTORIES // 4, (block + 1) * HISTORIES // 4, AT_ONCE):
        events = [event for seed in range(first, first + AT_ONCE) for event in history(seed, algorithm)]
        with scripted.client.pipeline(transaction=False) as pipe:
            for event in events:
                here.now = event.here
                pipe.execute_command(*scripted.command(event.plan, event.now))
            pipe.unlink(*{event.plan.charges[0].key for event in events})
            replies = pipe.execute()[:-1]
        for event, reply in zip(events, replies, strict=True):
            (reading,), unreadable, _, _ = wire.answers([event.plan], reply)
            same(event, reading)
            assert not unreadable
