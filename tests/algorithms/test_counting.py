"""The counting algorithms, by the script on a real Redis and in the memory store, held against oracles in plain integers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from datetime import datetime
from types import SimpleNamespace
from typing import NamedTuple
from uuid import uuid4

import pytest
import redis
from hypothesis import given, strategies as st

from limitgate import ConfigError, Limit, Limiter, MemoryStore
from limitgate.algorithms import fixed_window
from limitgate.algorithms.fixed_window import longest_days
from limitgate.limits.bucket import Bucket, bucket_of
from limitgate.limits.decision import Decision, decide
from limitgate.limits.plan import Adjustment, Charge, Plan, Reading, Verb, refund
from limitgate.rules.lint import most_within
from limitgate.stores.redis import wire
from tests.support.clock import Clock
from tests.support.effort import HISTORIES
from tests.support.oracles import (
    DAY,
    US,
    Answer,
    Counter,
    FixedWindow,
    SlidingLog,
    SlidingWindow,
    days_of,
    months_of,
    multiples_of,
)
from tests.support.scripted import Scripted
from tests.support.stored import buckets

AT_ONCE = 100
"""Histories that are sent to Redis in one go."""
COUNTS = (1, 2, 3, 5, 10)
LARGE = (333, 99_991, 1_000_003, 10**14)
"""Counts of windows besides; the largest is cut to what is allowed."""
PERIODS = (1, 7, 60, 3600, DAY, 7 * DAY, 366 * DAY)
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
    months = 0
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
        elif style == 2:
            (zone, around), months = rnd.choice(list(ZONES.values())), rnd.choice((1, 1, 3))
            zone, how = rnd.choice(((zone, {**how, "align": zone}), ("UTC", {**how, "align": "utc"}), ("UTC", how)))
            period = longest_days(months) * DAY
            start, end = around * US + rnd.randrange(-period * US, DAY * US), months_of(zone, months, around)
        oracle = FixedWindow(count, period * US, end=end)
    counts = [count, count, rnd.choice(COUNTS)]
    if algorithm != "sliding_log" and rnd.random() < 0.3:
        counts = [min(rnd.choice(LARGE), 1_000_000 * period) for _ in range(3)]
    length = f"{months} months" if months else f"{period} seconds"
    return Kind([Limit(f"{each} per {length}", **how) for each in counts], oracle, start)


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
    several = [Bucket((limit,)) for limit in limits]
    key, skew, clock = f"{algorithm}:{seed}", rnd.choice((0, 0, -DAY * US // 3, DAY * US // 3)), Clock(now)
    store, back, may_step = MemoryStore(clock), [], rnd.random() < 0.3
    if may_step:  # an expired bucket that is gone cannot be found in the future when the clock steps back
        store._reclaim = lambda _now: True
    events: list[Event] = []
    for _ in range(rnd.choice((3, 5, 7))):
        now += a_step(rnd, oracle.period, events[-1].answer if events else None, back=may_step)
        clock.now, its = now, rnd.choice(several)
        oracle.count = count = its.limits[0].count
        cost, what = rnd.choice((0, 1, 1, 1, 2, 3, count, count - count // 3, count + 1)), rnd.random()
        charge = Charge(key, its, cost, enforced=True, rule="r")
        if what < 0.1:
            owed = rnd.choice((1, 2, 20, count))
            lease = Adjustment(0, now, [-owed], [0])
            plan = Plan((charge._replace(cost=0, enforced=False, adjustment=lease),), "adjust")
            answer = oracle.ask(now, 0, "peek", owed)
        elif what < 0.3 and back and not may_step:
            (was, reading), admission = back.pop(rnd.randrange(len(back)))
            less = rnd.randrange(was.charges[0].cost)
            plan = refund(was, reading, [less])
            oracle.count = plan.charges[0].bucket.limits[0].count
            answer = oracle.ask(now, 0, "peek", was.charges[0].cost - less, admission)
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


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window", "sliding_log"])
def test_histories_property(scripted: Scripted, algorithm: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Script and memory store agree with the oracle on every answer, over hundreds of histories."""
    here = SimpleNamespace(now=0, time_ns=lambda: here.now * 1000)
    monkeypatch.setattr(fixed_window, "time", here)
    for first in range(block * AT_ONCE, HISTORIES, 4 * AT_ONCE):
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


def test_histories_meet_every_case() -> None:
    """The generated histories are worth something: each kind of event and of answer is common among them."""
    for algorithm in ("fixed_window", "sliding_window", "sliding_log"):
        seen = dict.fromkeys(("refused", "forever", "exact", "back", "given back", "owed", "reset", "other count", "over"), 0)
        for seed in range(400):
            events = history(seed, algorithm)
            for before, event in itertools.pairwise(events):
                lease, answer = event.plan.charges[0].adjustment, event.answer
                seen["refused"] += bool(answer.retry_after)
                seen["forever"] += answer.retry_after is None
                seen["exact"] += bool(before.answer.retry_after) and event.now - before.now == before.answer.retry_after
                seen["back"] += event.now < before.now
                seen["given back"] += lease is not None and lease.back[0] > 0
                seen["owed"] += lease is not None and lease.back[0] < 0
                seen["reset"] += event.plan.verb == "reset"
                seen["other count"] += event.plan.charges[0].bucket is not before.plan.charges[0].bucket
                seen["over"] += answer.used > event.plan.charges[0].bucket.limits[0].count
        assert min(seen.values()) > 25, (algorithm, seen)


# --- what each algorithm is known for ---------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "script"])
def hit(request: pytest.FixtureRequest, client: redis.Redis) -> Callable[..., Decision]:
    """A limiter's ``hit`` on a new key, on either store, under a ``clock`` that stands at the beginning of a day."""
    clock, key = Clock(START - START % (DAY * US)), uuid4().hex
    limiter = Limiter(MemoryStore(clock) if request.param == "memory" else Scripted(client, clock))

    def hit(limit: Limit, cost: int = 1) -> Decision:
        return limiter.hit(key, limit, cost=cost)

    hit.clock = clock
    return hit


def test_a_period_without_its_beginning_is_counted_whole(hit: Callable[..., Decision]) -> None:
    """Three per minute, taken at 0, 20 and 40 s: at 60 s only what was taken at 0 comes back, not the whole window.

    A sliding window that gives back everything once its first request is a period old admits three more there.
    """
    limit = Limit("3/minute", algorithm="sliding_log")
    for remaining in (2, 1, 0):
        assert hit(limit).remaining == remaining
        hit.clock.advance(20)
    assert hit(limit, 2).retry_after == 20
    assert (hit(limit).allowed, hit(limit).retry_after) == (True, 20)
    hit.clock.advance(20)
    assert (hit(limit).allowed, hit(limit).retry_after) == (True, 20)


def test_requests_of_one_microsecond_all_count(hit: Callable[..., Decision]) -> None:
    """Several requests in the same microsecond are as many as they are."""
    limit = Limit("5/minute", algorithm="sliding_log")
    assert [hit(limit, cost).remaining for cost in (1, 2, 1, 1, 1)] == [4, 2, 1, 0, 0]
    hit.clock.advance(us=60 * US - 1)
    assert hit(limit).retry_after == 0.000_001
    hit.clock.advance(us=1)
    assert hit(limit, 5).allowed


def test_what_was_refused_is_not_remembered(hit: Callable[..., Decision]) -> None:
    """Whoever goes on asking is not refused for longer."""
    limit = Limit("2/minute", algorithm="sliding_log")
    hit(limit, 2)
    for _ in range(59):
        hit.clock.advance(1)
        assert not hit(limit).allowed
    hit.clock.advance(1)
    assert hit(limit, 2).allowed


events = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 800_000)), min_size=1, max_size=60)


def most_in_a_period(limit: Limit, asked: list[tuple[int, int]]) -> int:
    """The most that was admitted in any period of its length, when so much was asked, each time so much later."""
    clock, passed = Clock(), []
    limiter = Limiter(MemoryStore(clock))
    for cost, us in asked:
        clock.advance(us=us)
        passed.append((clock.now, limiter.hit("key", limit, cost=cost).granted))
    return max(sum(cost for at, cost in passed if since <= at < since + limit.period_us) for since, _ in passed)


@given(events, st.integers(1, 9))
def test_a_log_never_admits_more_than_its_count_property(asked: list[tuple[int, int]], count: int) -> None:
    """In no period, wherever it begins, does more pass than the count."""
    assert most_in_a_period(Limit(f"{count}/second", algorithm="sliding_log"), asked) <= count


@given(events, st.integers(1, 9))
def test_a_sliding_window_errs_by_less_than_its_count_property(asked: list[tuple[int, int]], count: int) -> None:
    """In no period does as much as twice the count pass."""
    assert most_in_a_period(Limit(f"{count}/second", algorithm="sliding_window"), asked) < 2 * count


@pytest.mark.parametrize(("algorithm", "most"), [("fixed_window", 200), ("sliding_window", 199), ("sliding_log", 100)])
def test_the_worst_case(hit: Callable[..., Decision], algorithm: str, most: int) -> None:
    """A burst at the very end of a window, and in the next one as much as is let through within a period of that."""
    limit = Limit("100/minute", algorithm=algorithm)
    hit.clock.advance(us=60 * US - 1)
    passed = hit(limit, 100).granted
    hit.clock.advance(us=60 * US - 1)
    while hit(limit).allowed:
        passed += 1
    assert passed == most
    assert most <= most_within(limit.period, [limit]) <= most + 1


def test_a_sliding_window_forgets_evenly(hit: Callable[..., Decision]) -> None:
    """Of the window before there counts the share that a period up to now overlaps, rounded up."""
    limit = Limit("10/minute", algorithm="sliding_window")
    hit(limit, 10)
    for into, used in ((0, 10), (1, 10), (6, 9), (30, 5), (59, 1), (60, 0)):
        hit.clock.now = START - START % (DAY * US) + (60 + into) * US
        assert hit(limit, 0).windows[0].used == used


def test_a_log_has_no_more_entries_than_its_limit_has_requests(client: redis.Redis) -> None:
    """What is owed on top again and again joins the newest entry, so that no flood of corrections makes a log grow."""
    clock = Clock()
    for store in (MemoryStore(clock), Scripted(client, clock)):
        charge = Charge(uuid4().hex, bucket_of(Limit("5/minute", algorithm="sliding_log")), 0, enforced=True, rule="r")
        for _ in range(40):
            plan = Plan((charge,))
            store.spend(refund(plan, store.spend(plan, 5), [1]), 5)
            clock.advance(1)
        peeked = decide(plan, store.spend(Plan((charge,), "peek"), 5))
        assert peeked.windows[0].used == 40
        if isinstance(store, MemoryStore):
            ((_, _, _, (log,)),) = buckets(store).values()
            assert len(log.times) == len(log.totals) == 5
        else:
            assert client.strlen(charge.key) == 8 + 13 + 5 * 13


def test_a_charge_gives_back_no_more_than_itself(client: redis.Redis) -> None:
    """Whatever is given back of a moment comes out of what that moment was charged."""
    clock, bucket = Clock(), bucket_of(Limit("9/minute", algorithm="sliding_log"))
    for store in (MemoryStore(clock), Scripted(client, clock)):
        plan = Plan((Charge(uuid4().hex, bucket, 3, enforced=True, rule="r"),))
        readings = []
        for _ in range(3):
            clock.advance(1)
            readings.append(store.spend(plan, 5))
        for used in (7, 6, 6):
            store.spend(refund(plan, readings[1], [1]), 5)
            assert store.spend(plan._replace(verb="peek"), 5).buckets[0].before[0].used == used


def test_what_has_joined_a_later_entry_is_not_given_back(client: redis.Redis) -> None:
    """A charge whose entry counts on with what is owed cannot be told from that any more, and no older one pays for it."""
    clock, bucket = Clock(), bucket_of(Limit("3/minute", algorithm="sliding_log"))
    for store in (MemoryStore(clock), Scripted(client, clock)):
        plan, last = Plan((Charge(uuid4().hex, bucket, 1, enforced=True, rule="r"),)), None
        for _ in range(3):
            clock.advance(1)
            last = store.spend(plan, 5)
        clock.advance(1)
        nothing = Plan((plan.charges[0]._replace(cost=0),))
        store.spend(refund(nothing, store.spend(nothing, 5), [4]), 5)
        store.spend(refund(plan, last, [0]), 5)
        told = decide(nothing, store.spend(nothing, 5))
        assert (told.windows[0].used, told.reset_after) == (7, 60)


def test_the_longest_log(client: redis.Redis) -> None:
    """A log of ten thousand entries is exact, and every wait in it, too."""
    clock, bucket = Clock(), bucket_of(Limit("10000/minute", algorithm="sliding_log"))
    scripted, memory, key = Scripted(client, clock), MemoryStore(clock), uuid4().hex

    def plan(cost: int, verb: Verb = "peek") -> Plan:
        return Plan((Charge(key, bucket, cost, enforced=True, rule="r"),), verb)

    entries = b""
    for total in range(1, 10_000):
        clock.now += 1000
        memory.spend(plan(1, "spend"))
        entries += clock.now.to_bytes(7, "little") + total.to_bytes(6, "little")
    now = clock.now.to_bytes(7, "little")
    client.set(key, b"\x01" + now + now + bytes(6) + entries)  # as it would be after as many calls
    clock.now += 1000
    for store in (memory, scripted):
        assert decide(plan(1, "spend"), store.spend(plan(1, "spend"), 5)).allowed
    for cost in (1, 2, 7, 5_000, 9_999, 10_000):
        for store in (memory, scripted):
            assert decide(plan(cost), store.spend(plan(cost), 5)).retry_after == (60_001 - 10_000 + cost - 1) / 1000
    assert client.strlen(key) == 8 + 13 + 10_000 * 13


def test_a_log_is_bounded() -> None:
    """A limit whose log would be too long is a mistake that says why."""
    with pytest.raises(ConfigError, match=r"expected a count of at most 10,000, because every request is stored"):
        Limit("10001/day", algorithm="sliding_log")


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window", "sliding_log"])
def test_counters_have_no_burst(algorithm: str) -> None:
    """A burst makes no sense where all requests of a window may come at once, nor does a lease."""
    for options in ({"burst": 3}, {"burst": 9}, {"lease": 2}):
        with pytest.raises(ConfigError, match="expected no"):
            Limit("5/minute", algorithm=algorithm, **options)


# --- calendars --------------------------------------------------------------------------------------------------------


def moment(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * US


DAYS = [
    ("Europe/Berlin", "2026-03-29T00:30+01:00", "2026-03-30T00:00+02:00", 23),
    ("Europe/Berlin", "2026-10-25T00:30+02:00", "2026-10-26T00:00+01:00", 25),
    ("America/Sao_Paulo", "2018-11-03T12:00-03:00", "2018-11-04T01:00-02:00", 24),
    ("America/Sao_Paulo", "2018-11-04T12:00-02:00", "2018-11-05T00:00-02:00", 23),
    ("America/Sao_Paulo", "2019-02-16T12:00-02:00", "2019-02-17T00:00-03:00", 25),
    ("Asia/Beirut", "2024-03-30T12:00+02:00", "2024-03-31T01:00+03:00", 24),
    ("Asia/Beirut", "2024-03-31T12:00+03:00", "2024-04-01T00:00+03:00", 23),
    ("Pacific/Apia", "2011-12-29T12:00-10:00", "2011-12-31T00:00+14:00", 24),
    ("Pacific/Apia", "2011-12-31T12:00+14:00", "2012-01-01T00:00+14:00", 24),
    ("America/St_Johns", "2010-11-06T23:30-03:30", "2010-11-08T00:00-03:30", 25),
    ("Asia/Kolkata", "2026-07-01T12:00+05:30", "2026-07-02T00:00+05:30", 24),
]


@pytest.mark.parametrize(("zone", "now", "end", "hours"), DAYS, ids=[f"{zone} {now[:10]}" for zone, now, *_ in DAYS])
def test_a_day_is_as_long_as_it_is_there(
    hit: Callable[..., Decision], monkeypatch: pytest.MonkeyPatch, zone: str, now: str, end: str, *, hours: int
) -> None:
    """A daily quota begins anew at local midnight, or when clocks go on that skip it, however long the day was."""
    monkeypatch.setattr(fixed_window, "time", SimpleNamespace(time_ns=lambda: hit.clock.now * 1000))
    limit = Limit("3/day", algorithm="fixed_window", align=zone)
    hit.clock.now = moment(end) - hours * 3600 * US
    assert hit(limit).reset_after == hours * 3600
    hit.clock.now = moment(now)
    assert hit(limit, 2).reset_after == (moment(end) - moment(now)) / US
    hit.clock.now = moment(end) - 1
    assert hit(limit).retry_after == 0.000_001
    hit.clock.now = moment(end)
    assert hit(limit, 3).allowed


def test_windows_of_several_days(hit: Callable[..., Decision], monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of ten days begin at local midnight, counted from 1970."""
    monkeypatch.setattr(fixed_window, "time", SimpleNamespace(time_ns=lambda: hit.clock.now * 1000))
    limit = Limit("3 per 10 days", algorithm="fixed_window", align="Europe/Berlin")
    hit.clock.now = moment("2026-10-24T00:00+02:00")
    assert hit(limit, 3).reset_after == (10 * 24 + 1) * 3600
    hit.clock.now = moment("2026-11-02T23:59:59+01:00")
    assert hit(limit).retry_after == 1


def assert_window_ends(hit: Callable[..., Decision], monkeypatch: pytest.MonkeyPatch, limit: Limit, now: int, end: int) -> None:
    """The window in which five requests come ``now`` ends at ``end``, to the microsecond."""
    monkeypatch.setattr(fixed_window, "time", SimpleNamespace(time_ns=lambda: hit.clock.now * 1000))
    hit.clock.now = now
    assert hit(limit, 5).reset_after == (end - now) / US
    hit.clock.now = end - 1
    assert hit(limit).retry_after == 0.000_001
    hit.clock.now = end
    assert hit(limit, 5).allowed


WEEKS = [
    ("utc", "5/week", "2026-11-25T10:00+00:00", "2026-11-30T00:00+00:00"),
    ("utc", "5 per 7 days", "2026-11-29T23:59:59+00:00", "2026-11-30T00:00+00:00"),
    ("utc", "5/week", "2026-11-30T00:00+00:00", "2026-12-07T00:00+00:00"),
    ("utc", "5 per 2 weeks", "2026-11-25T10:00+00:00", "2026-12-07T00:00+00:00"),
    ("Europe/Berlin", "5/week", "2026-10-19T00:00+02:00", "2026-10-26T00:00+01:00"),
    ("America/New_York", "5/w", "2026-03-07T12:00-05:00", "2026-03-09T00:00-04:00"),
    ("Pacific/Apia", "5/week", "2011-12-29T12:00-10:00", "2012-01-02T00:00+14:00"),
]


@pytest.mark.parametrize(("align", "text", "now", "end"), WEEKS, ids=[f"{text} {now}" for _, text, now, _ in WEEKS])
def test_aligned_weeks_begin_on_monday(
    hit: Callable[..., Decision], monkeypatch: pytest.MonkeyPatch, align: str, text: str, now: str, *, end: str
) -> None:
    """In UTC and in any time zone, also where clocks change within the week."""
    assert_window_ends(hit, monkeypatch, Limit(text, algorithm="fixed_window", align=align), moment(now), moment(end))


def test_weeks_without_align_begin_as_before(hit: Callable[..., Decision]) -> None:
    """Windows are multiples of the period since 1970, which began on a Thursday, unless align says otherwise."""
    hit.clock.now = moment("2026-11-25T10:00+00:00")
    assert hit(Limit("5/week", algorithm="fixed_window")).reset_after == 14 * 3600


MONTHS = [
    (None, "5/month", "2026-11-25T10:00+00:00", "2026-12-01T00:00+00:00"),
    (None, "5 per month", "2026-12-31T23:59:59+00:00", "2027-01-01T00:00+00:00"),
    ("utc", "5 per 1 months", "2026-12-01T00:00+00:00", "2027-01-01T00:00+00:00"),
    ("utc", "5/month", "2028-02-01T00:00+00:00", "2028-03-01T00:00+00:00"),
    ("utc", "5/month", "2026-02-28T23:00+00:00", "2026-03-01T00:00+00:00"),
    ("utc", "5/month", "2100-02-28T23:00+00:00", "2100-03-01T00:00+00:00"),
    ("utc", "5 per 3 months", "2026-11-25T10:00+00:00", "2027-01-01T00:00+00:00"),
    ("utc", "5 per 12 months", "2028-01-01T00:00+00:00", "2029-01-01T00:00+00:00"),
    ("Europe/Berlin", "5/month", "2026-03-01T00:00+01:00", "2026-04-01T00:00+02:00"),
    ("Europe/Berlin", "5/month", "2026-10-01T00:00+02:00", "2026-11-01T00:00+01:00"),
    ("Asia/Kolkata", "5/month", "2026-10-31T18:29:59+00:00", "2026-11-01T00:00+05:30"),
    ("Pacific/Apia", "5/month", "2011-12-29T12:00-10:00", "2012-01-01T00:00+14:00"),
    ("Africa/Cairo", "5/month", "1995-09-30T12:00+02:00", "1995-10-01T00:00+02:00"),
]


@pytest.mark.parametrize(("align", "text", "now", "end"), MONTHS, ids=[f"{text} {now}" for _, text, now, _ in MONTHS])
def test_a_month_ends_with_its_last_day(
    hit: Callable[..., Decision], monkeypatch: pytest.MonkeyPatch, align: str | None, text: str, now: str, *, end: str
) -> None:
    """However long it is, leap years and changes of clocks included; several months are counted from January."""
    assert_window_ends(hit, monkeypatch, Limit(text, algorithm="fixed_window", align=align), moment(now), moment(end))


def test_a_month_finds_what_was_used_in_days(hit: Callable[..., Decision], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored windows of 31 days, and those of another zone, stay valid: only their ends are those of the month."""
    monkeypatch.setattr(fixed_window, "time", SimpleNamespace(time_ns=lambda: hit.clock.now * 1000))
    hit.clock.now = moment("2026-11-25T10:00+00:00")
    hit(Limit("5 per 31 days", algorithm="fixed_window"), 2)
    assert hit(Limit("5/month", algorithm="fixed_window", align="Asia/Kolkata"), 2).remaining == 1
    told = hit(Limit("5/month", algorithm="fixed_window"))
    assert (told.remaining, told.reset_after) == (0, moment("2026-12-01T00:00+00:00") / US - hit.clock.now / US)


@pytest.mark.parametrize("off", [-400 * DAY, -DAY, -3600, 3600, DAY, 400 * DAY])
def test_a_machine_whose_clock_is_wrong_keeps_nobody_out(
    hit: Callable[..., Decision], monkeypatch: pytest.MonkeyPatch, off: int
) -> None:
    """Redis is told where days end by a machine; if its clock is wrong, a window is still never longer than two days."""
    monkeypatch.setattr(fixed_window, "time", SimpleNamespace(time_ns=lambda: (hit.clock.now + off * US) * 1000))
    limit = Limit("3/day", algorithm="fixed_window", align="Europe/Berlin")
    for _ in range(3):
        hit(limit)
        told = hit(limit, 3)
        assert 0 < told.retry_after <= 2 * DAY
        hit.clock.advance(told.retry_after)
        assert hit(limit, 3).allowed


def test_the_first_request_begins_a_window(hit: Callable[..., Decision]) -> None:
    """With align first-request a window lasts one period from its first request, whenever that is."""
    limit = Limit("3/minute", algorithm="fixed_window", align="first-request")
    hit.clock.advance(17)
    assert hit(limit).reset_after == 60
    hit.clock.advance(40)
    assert (hit(limit, 2).reset_after, hit(limit).retry_after) == (20, 20)
    hit.clock.advance(33)
    assert hit(limit).reset_after == 60


def test_a_changed_alignment_finds_what_was_used(hit: Callable[..., Decision]) -> None:
    """Where a window ends is decided by the limit as it is asked, what was used by the bucket."""
    first, clock = (Limit("3/minute", algorithm="fixed_window", align=align) for align in ("first-request", "utc"))
    hit.clock.advance(50)
    assert hit(first, 2).reset_after == 60
    told = hit(clock, 0)
    assert (told.remaining, told.reset_after) == (1, 10)
