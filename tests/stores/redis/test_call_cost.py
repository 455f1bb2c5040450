"""What a call costs Redis: no more for long logs and many slots than for short ones, and no more than is to be paid at once."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import redis

from limitgate import ConfigError, Limit, Limiter, MemoryStore, RedisStore, Rule, StoreError
from limitgate.limits.bucket import bucket_of, buckets_of
from limitgate.limits.decision import decide
from limitgate.limits.plan import Adjustment, Charge, Plan, Reading, refund
from limitgate.stores.base import MAX_BATCH, calls_of
from limitgate.stores.redis import wire
from tests.support.clock import Clock
from tests.support.redis_server import RedisServer
from tests.support.scripted import Scripted

HEAD, ENTRY, PLACE = 21, 13, 14
"""Bytes of a log before its entries, of each of these, of a place among requests in flight."""
PAGE = 128
"""Entries that are read together."""
DAY = 86_400_000_000


def a_log(entries: int, clock: int, *, apart: int, counting: int | None = None) -> bytes:
    """A log of single requests that are so many µs apart, the last one right before a time by its own clock."""
    every = [(clock - (entries - n) * apart, n + 1) for n in range(entries)]
    text = b"".join([made.to_bytes(7, "little") + total.to_bytes(6, "little") for made, total in every])
    before = 0 if counting is None else entries - counting
    return b"\x01" + clock.to_bytes(7, "little") * 2 + before.to_bytes(6, "little") + text


def some_places(places: int, written: int) -> bytes:
    """So many slots of a place each, by names from 1 on, which end one after the other."""
    until = [10_000_000 + n for n in range(places)]
    text = b"".join([name.to_bytes(7, "little") + end.to_bytes(7, "little") for name, end in enumerate(until, 1)])
    return b"\x01" + written.to_bytes(7, "little") + bytes(7) + text


def spending(key: str, limit: str, cost: int = 1, slot: int = 0, **options: str) -> Charge:
    return Charge(key, bucket_of(Limit(limit, **options)), cost, enforced=True, rule="r", slot=slot)


def in_log(key: str, count: int, cost: int = 1) -> Charge:
    return spending(key, f"{count}/day", cost, algorithm="sliding_log")


def putting_right(charge: Charge, back: int, grace: int) -> Charge:
    return charge._replace(cost=0, enforced=False, adjustment=Adjustment(0, 0, [back], [grace]))


class Weighed:
    """The script under a clock of the test's own, with a count of the bytes that it reads and writes."""

    TALLY = """
    local server, size = redis, 0
    local function counted(command, ...)
      local said = server.pcall(command, ...)
      for _, text in ipairs({said, select(2, ...)}) do
        if type(text) == 'string' then size = size + #text end
      end
      server.call('SET', '{tally}', size)
      return said
    end
    local redis = {call = counted, pcall = counted}
    """

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.sha = client.script_load(self.TALLY + wire.SPEND.text)

    def bytes_of(self, *plans: Plan) -> int:
        """Carry plans out in one call, and tell how many bytes went between script and server."""
        reply = self.client.execute_command("EVALSHA", self.sha, *wire.arguments(plans))
        assert not wire.answers(plans, reply).unreadable
        return int(self.client.get("{tally}"))

    def now(self) -> int:
        seconds, us = self.client.time()
        return int(seconds) * 1_000_000 + int(us)


@pytest.fixture
def weighed(own_redis: RedisServer) -> Iterator[Weighed]:
    with own_redis.client() as client:
        yield Weighed(client)


# --- work does not grow with what is kept -----------------------------------------------------------------------------


@pytest.mark.parametrize("used", ["full", "nearly full"])
def test_a_request_costs_the_same_in_a_log_of_any_length(weighed: Weighed, used: str) -> None:
    """Refused or admitted, of a log of ten thousand entries a few pages are looked at, and one entry is written."""
    sizes = {}
    for count in (1_000, 10_000):
        entries = count if used == "full" else count - 1
        weighed.client.set("log", a_log(entries, weighed.now(), apart=DAY // 2 // count))
        sizes[count] = weighed.bytes_of(Plan((in_log("log", count),)))
        assert weighed.client.strlen("log") == HEAD + ENTRY * count
    assert sizes[10_000] < 6 * PAGE * ENTRY
    assert sizes[10_000] < sizes[1_000] + 4 * PAGE * ENTRY


def test_expired_entries_are_found_without_reading_them(weighed: Weighed) -> None:
    """A thousand entries that do not count any more are passed over, and cost a few pages."""
    weighed.client.set("log", a_log(10_000, weighed.now(), apart=DAY // 9_000))
    assert weighed.bytes_of(Plan((in_log("log", 10_000),))) < 20 * PAGE * ENTRY
    assert weighed.client.strlen("log") == HEAD + ENTRY * 10_001


def test_a_slot_is_appended_to_many(weighed: Weighed) -> None:
    """Whoever takes one of many places has the others read, but none of them written."""
    weighed.client.set("slots", some_places(5_000, weighed.now()))
    size = weighed.bytes_of(Plan((spending("slots", "10000 at once", slot=7_777),)))
    assert size < PLACE * 5_000 + 200
    assert weighed.client.strlen("slots") == 15 + PLACE * 5_001


def test_many_renewals_cost_one_copy(weighed: Weighed) -> None:
    """A hundred slots of ten thousand are renewed, or given back, with one reading and one writing of all."""
    for back in (-1, 1):
        weighed.client.set("slots", some_places(10_000, weighed.now()))
        charge = spending("slots", "10000 at once")
        names = random.Random(back).sample(range(1, 10_001), 100)
        plan = Plan(tuple([putting_right(charge._replace(slot=name), back, name) for name in names]), "adjust")
        assert weighed.bytes_of(plan) < 2 * PLACE * 10_000 + 1_000
        assert weighed.client.strlen("slots") == 15 + PLACE * (10_000 if back < 0 else 9_900)


# --- a log in pieces --------------------------------------------------------------------------------------------------


def used_of_whole(value: bytes, now: int, period_us: int) -> tuple[int, int]:
    """How many requests count in a stored log, and how many entries do, found by looking at all of it."""
    written, clock, before = (int.from_bytes(value[at : at + size], "little") for at, size in ((1, 7), (8, 7), (15, 6)))
    pieces = [value[at : at + ENTRY] for at in range(HEAD, len(value), ENTRY)]
    entries = [(int.from_bytes(piece[:7], "little"), int.from_bytes(piece[7:], "little")) for piece in pieces]
    assert entries == sorted(entries)
    long_ago = clock + max(0, now - written) - period_us
    over = [total for made, total in entries if made <= long_ago]
    return entries[-1][1] - (over[-1] if over else before), len(entries) - len(over)


class Twins:
    """The script and the memory store under one clock, which get the same plans for a log of one key."""

    def __init__(self, client: redis.Redis, period: int) -> None:
        self.clock = Clock()
        self.memory = MemoryStore(self.clock)
        self.memory._reclaim = lambda _now: True  # an expired bucket that is gone cannot be found in the future
        self.script, self.pipe = Scripted(client, self.clock), client.pipeline(transaction=False)
        self.key = uuid4().hex
        self.said: list[tuple[Plan, Reading]] = []
        self.bucket = functools.cache(lambda count: bucket_of(Limit(f"{count} per {period} seconds", algorithm="sliding_log")))

    def charge(self, count: int, cost: int, wait: int = 0) -> Charge:
        return Charge(self.key, self.bucket(count), cost, enforced=True, rule="r", max_wait_us=wait * 1_000_000)

    def spend(self, plan: Plan) -> Reading:
        """What the memory store says; `agree` asks the script, for many plans at once."""
        here = self.memory.spend(plan)
        self.said.append((plan, here))
        self.pipe.execute_command(*self.script.command(plan, self.clock.now))
        return here

    def agree(self) -> None:
        """The script says the same as the memory store did, since the last time."""
        for (plan, here), reply in zip(self.said, self.pipe.execute(), strict=True):
            assert told(plan, here) == told(plan, wire.answers([plan], reply).readings[0])
        self.said.clear()


def told(plan: Plan, reading: Reading) -> tuple[float, ...]:
    """What a decision about one log says."""
    decision = decide(plan, reading)
    return decision.allowed, decision.remaining, decision.windows[0].used, decision.retry_after, decision.reset_after


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("wait", [0, 150], ids=["hits", "turns"])
@pytest.mark.parametrize("seed", range(4))
def test_long_histories_of_long_logs(client: redis.Redis, seed: int, wait: int) -> None:
    """Over thousands of requests, refunds and debts, logs of several pages are as the memory store has them.

    And they are stored so that who reads the whole of one finds the same in it. So are turns that are booked ahead.
    """
    rnd, steps = random.Random(seed), seed % 3 == 0  # an emptied log begins another clock, under which charges are not known
    count, period = rnd.choice((400, 700, 1_000)), 60
    twins, admitted, longest = Twins(client, period), [], 0
    for number in range(1_500):
        twins.clock.advance(us=rnd.choice((0, 1, 1_000, 3 * period * 1_000_000 // count)))
        if rnd.random() < 0.003:
            twins.clock.advance(rnd.choice((period // 2, period, -5 if steps else 1)))
        cost = rnd.choice((0, *[1] * 12, 2, 5, count + 1))
        if admitted and not steps and rnd.random() < 0.1:
            plan, reading = admitted.pop(rnd.choice((-1, -1, rnd.randrange(len(admitted)))))
            twins.spend(refund(plan, reading, [rnd.choice((0, 0, plan.charges[0].cost + 1))]))
        waits = wait if rnd.random() < 0.5 else 0
        plan = Plan((twins.charge(count, cost, waits),), rnd.choice(("spend",) * 30 + ("peek",) * 2))
        reading = twins.spend(plan)
        if cost and reading.admitted and plan.verb == "spend":
            admitted.append((plan, reading))
        if number % 50:
            continue
        twins.agree()
        if client.exists(twins.key):
            used, counting = used_of_whole(client.get(twins.key), twins.clock.now, period * 1_000_000)
            peeked = Plan((twins.charge(count, 0),), "peek")
            assert told(peeked, twins.spend(peeked))[2] == used
            longest = max(longest, counting)
    twins.agree()
    assert longest > PAGE


def test_an_old_charge_is_given_back_from_either_end(client: redis.Redis) -> None:
    """Whatever charge of a long log is given back, or a part of it, all waits after it are exact."""
    count = 1_000
    for place, (moment, cost) in enumerate(itertools.product((0, 1, 150, 350, 498, 499), (0, 1))):
        expired = 30 * ((place + place // 2) % 2)
        twins, charged = Twins(client, 60), []
        for _ in range(expired):
            twins.spend(Plan((twins.charge(count, 1),)))
            twins.clock.advance(us=3)
        twins.clock.advance(30)
        for _ in range(count // 2 - expired):
            twins.clock.advance(us=7)
            plan = Plan((twins.charge(count, 2),))
            charged.append((plan, twins.spend(plan)))
        twins.clock.advance(30)
        twins.spend(refund(*charged[min(moment, len(charged) - 1)], [cost]))
        for asked in (1, 2, 3, 300, 301, 999, 1_000):
            twins.spend(Plan((twins.charge(count, asked),), "peek"))
        twins.spend(Plan((twins.charge(count, 1),)))
        twins.agree()


def test_a_turn_costs_the_same_behind_any_number(weighed: Weighed) -> None:
    """It is found by a bisection that looks at a few pages, and one entry is written."""
    sizes = {}
    for count in (1_000, 10_000):
        plan, now = Plan((in_log("log", count)._replace(max_wait_us=DAY),)), weighed.now()
        weighed.client.set("log", a_log(2 * count - 1, now + DAY // 2, apart=DAY // count // 2))
        weighed.client.setrange("log", 1, now.to_bytes(7, "little") * 2)
        sizes[count] = weighed.bytes_of(plan)
        assert weighed.client.strlen("log") == HEAD + ENTRY * 2 * count
    assert sizes[10_000] < 10 * PAGE * ENTRY
    assert sizes[10_000] < sizes[1_000] + 5 * PAGE * ENTRY


def test_a_log_keeps_few_entries_that_have_expired(client: redis.Redis) -> None:
    """Where for each new entry an old one ends, a log is not copied for each, and never much longer than what counts."""
    clock, count, key = Clock(), 1_000, uuid4().hex
    script, sizes, copies = Scripted(client, clock), [], 0
    client.set(key, a_log(count, clock.now, apart=60_000))
    plan = Plan((spending(key, f"{count}/minute", algorithm="sliding_log"),))
    for _ in range(1_000):
        clock.advance(us=60_000)
        assert decide(plan, script.spend(plan, 5)).allowed
        sizes.append((client.strlen(key) - HEAD) // ENTRY)
        copies += len(sizes) > 1 and sizes[-1] < sizes[-2]
    assert max(sizes) <= 8 / 7 * count + 2
    assert 1 <= copies <= 10
    assert client.memory_usage(key) < 3 * ENTRY * count


def test_logs_that_are_to_be_copied_take_turns(weighed: Weighed) -> None:
    """Of many long logs, all half expired, a call copies one or two; the next calls copy the others, and all count right."""
    count, keys = 4_000, [f"log:{n}" for n in range(20)]
    for key in keys:
        weighed.client.set(key, a_log(2 * count, weighed.now(), apart=DAY // count, counting=count))
    plans = [Plan((in_log(key, 2 * count),)) for key in keys]
    whole = HEAD + ENTRY * count
    for _ in range(10):
        assert weighed.bytes_of(*plans) < 20 * 24 * PAGE * ENTRY + 2 * (2**17 + whole)
    assert max(map(weighed.client.strlen, keys)) < whole + 100 * ENTRY
    peeked = [plan._replace(verb="peek") for plan in plans]
    reply = weighed.client.execute_command("EVALSHA", weighed.sha, *wire.arguments(peeked))
    assert {reading.buckets[0].before[0].used for reading in wire.answers(peeked, reply).readings} <= {count + 9, count + 10}


def test_a_log_without_memory_stays_as_it_is(own_redis: RedisServer) -> None:
    """Where Redis has no memory for an entry nothing of the log is written, and who is refused is still told."""
    store = RedisStore(own_redis.url, local_refusals=False)
    with own_redis.client() as client:
        now = Weighed(client).now()
        value = a_log(999, now, apart=1_000)
        client.set("log", value)
        client.config_set("maxmemory", "1")
        with pytest.raises(StoreError, match="out of memory"):
            store.spend(Plan((in_log("log", 1_000),)), 5)
        assert (client.get("log"), client.pttl("log")) == (value, -1)
        assert not store.spend(Plan((in_log("log", 999),)), 5).admitted
        client.config_set("maxmemory", "0")
        assert store.spend(Plan((in_log("log", 1_000),)), 5).admitted
        assert 0 < client.pttl("log") <= DAY // 1_000 + 2
    store.close()


def test_a_long_value_that_makes_no_sense_is_replaced(client: redis.Redis) -> None:
    """What begins like a long log, but is not of whole entries or has not counted upwards, is begun anew and counted."""
    clock = Clock()
    script, good = Scripted(client, clock), a_log(500, clock.now, apart=1_000)
    broken = {"half an entry": good[:-5], "from the future": good[:-13] + b"\xff" * 13, "ones": good[:8] + b"\xff" * 6_000}
    for name, value in broken.items():
        key, plan = uuid4().hex, None
        client.set(key, value)
        plan = Plan((in_log(key, 500, 499),))
        answers = wire.answers([plan], client.execute_command(*script.command(plan, clock.now)))
        assert (answers.unreadable, answers.readings[0].admitted) == (1, True), name
        assert client.strlen(key) == HEAD + ENTRY


# --- what a call may cost ---------------------------------------------------------------------------------------------


def plans_of(number: int, charge: Callable[[str], Charge]) -> list[Plan]:
    return [Plan((charge(f"key:{n}"),)) for n in range(number)]


def test_plans_share_a_call_by_what_they_cost() -> None:
    """Many small plans share a call, few large ones do, one that is too large goes alone, and a bucket is opened once."""

    def sizes(plans: list[Plan]) -> list[int]:
        together = list(calls_of(plans))
        assert [plan for call in together for plan in call] == plans
        return [len(call) for call in together]

    assert sizes([]) == []
    assert sizes(plans_of(150, lambda key: spending(key, "5/day"))) == [MAX_BATCH, MAX_BATCH, 22]
    assert 20 < sizes(plans_of(64, lambda key: in_log(key, 10_000)))[0] < MAX_BATCH
    assert sizes(plans_of(3, lambda key: putting_right(in_log(key, 10_000), 1, 0))) == [1, 1, 1]
    assert sizes(plans_of(3, lambda key: spending(key, "10000 at once"))) == [1, 1, 1]
    assert sizes(plans_of(64, lambda _: spending("one", "10000 at once")))[0] > 10
    large = Plan(tuple([spending(f"large:{n}", "10000 at once") for n in range(4)]))
    small = plans_of(2, lambda key: spending(key, "5/day"))
    assert sizes([small[0], large, large, *small]) == [1, 1, 1, 2]


def test_limits_that_hold_redis_up_are_a_mistake() -> None:
    """Limits that are checked together and cost too much together are told, with what they cost."""
    logs = [Limit(f"10000 per {n} hours", algorithm="sliding_log") for n in range(1, 4)]
    assert len(buckets_of((*logs[:2], Limit("5/second")))) == 3
    for limits in (logs, [Limit("10000 at once")] * 5, [Limit("1000 at once")] * 60):
        with pytest.raises(ConfigError, match=r"may occupy Redis for [0-9,]+ µs, expected at most 5,000"):
            buckets_of(tuple(limits))
    for windows in (64, 1):
        assert len(buckets_of(tuple([Limit("1000000/second", lease=1_000_000)] * windows))) == 1
    with pytest.raises(ConfigError, match="may occupy Redis for"):
        Rule("logs", *logs)
    with Limiter(MemoryStore()) as limiter, pytest.raises(ConfigError, match="may occupy Redis for"):
        limiter.hit("key", *logs)


HEAVY: dict[str, Callable[[str], Charge]] = {
    "logs": lambda key: in_log(key, 10_000),
    "turns": lambda key: in_log(key, 9_999)._replace(max_wait_us=DAY),
    "old charges of logs": lambda key: putting_right(in_log(key, 10_000), 1, int(key.rpartition(":")[2]) - DAY // 4),
    "places": lambda key: spending(key, "10000 at once", slot=20_000),
    "renewals": lambda key: putting_right(spending("slots", "10000 at once"), -1, 9_000 - int(key.rpartition(":")[2])),
    "many windows": lambda key: Charge(
        key, bucket_of(*[Limit(f"1000 per {n} hours") for n in range(1, 65)]), 1, enforced=True, rule="r"
    ),
}


@pytest.mark.alone
@pytest.mark.parametrize("kind", HEAVY)
def test_no_call_takes_long(weighed: Weighed, kind: str) -> None:
    """However much is asked of Redis at once, no call takes it longer than twice what the bar is on a quiet machine."""
    plans = plans_of(64, HEAVY[kind])
    sha, best = weighed.client.script_load(wire.SPEND.text), float("inf")
    for _ in range(3):
        now, longest = weighed.now(), 0
        has_slots = plans[0].charges[0].bucket.has_slots
        value = some_places(9_999, now) if has_slots else a_log(9_999, now, apart=DAY // 2 // 10_000)
        for plan in plans:
            charge = plan.charges[0]
            if charge.bucket.limits[0].algorithm != "gcra":
                weighed.client.set(charge.key, value)
            if kind == "old charges of logs":
                charge.adjustment.grace[0] += now if charge.adjustment.grace[0] < 0 else 0
        for call in calls_of(plans):
            weighed.client.config_resetstat()
            weighed.client.execute_command("EVALSHA", sha, *wire.arguments(call))
            longest = max(longest, weighed.client.info("commandstats")["cmdstat_evalsha"]["usec"])
        best = min(best, longest)
    assert best < 10_000


# --- errors of commands -----------------------------------------------------------------------------------------------

KINDS = {
    "gcra": ("2/hour", {}),
    "fixed_window": ("2/day", {"algorithm": "fixed_window"}),
    "sliding_log": ("2/hour", {"algorithm": "sliding_log"}),
    "concurrency": ("2 at once", {}),
}


@pytest.mark.parametrize("rights", ["~* -get -getrange", "%W~*"], ids=["no reading", "keys to write only"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_that_may_not_be_read_is_not_begun_anew(own_redis: RedisServer, kind: str, rights: str) -> None:
    """A user who may not read gets the error of the store: nobody is admitted, and what is used stays used."""
    (limit, options), keys, *less = KINDS[kind], *rights.split(" ")
    with own_redis.client() as client:
        try:
            client.execute_command("ACL", "SETUSER", "limitgate", "on", ">secret", keys, "+@all", *less)
        except redis.ResponseError as error:
            pytest.skip(f"this Redis has no such rights: {error}")
        admin = RedisStore(own_redis.url, local_refusals=False)
        store = RedisStore(f"{own_redis.url}?username=limitgate&password=secret", local_refusals=False)
        for slot in (1, 2):
            assert admin.spend(Plan((spending("key", limit, slot=slot, **options),)), 5).admitted
        before = client.get("key")
        for slot in range(3, 9):
            with pytest.raises(StoreError) as failed:
                store.spend(Plan((spending("key", limit, slot=slot, **options),)), 5)
            assert failed.value.fault in {"reply", "connection"}
            assert failed.value.fault == "reply" or slot > 3  # the breaker speaks for those that come later
        assert client.get("key") == before
        assert not admin.spend(Plan((spending("key", limit, slot=9, **options),)), 5).admitted
        admin.close()
        store.close()


@pytest.mark.parametrize("right", ["strlen", "setrange", "pexpire", "getrange"])
def test_a_long_log_that_may_not_be_dealt_with_is_an_error(own_redis: RedisServer, right: str) -> None:
    """A user who lacks a right that long logs need gets the error of the store, and what counted still does."""
    with own_redis.client() as client:
        client.execute_command("ACL", "SETUSER", "limitgate", "on", ">secret", "~*", "+@all", f"-{right}")
        client.set("log", a_log(500, Weighed(client).now(), apart=1_000))
        store = RedisStore(f"{own_redis.url}?username=limitgate&password=secret", local_refusals=False)
        with pytest.raises(StoreError) as failed:
            store.spend(Plan((in_log("log", 501),)), 5)
        assert failed.value.fault == "reply"
        store.close()
        admin = RedisStore(own_redis.url, local_refusals=False)
        assert not admin.spend(Plan((in_log("log", 500),)), 5).admitted
        admin.close()


def test_the_rights_in_the_documentation_suffice(own_redis: RedisServer) -> None:
    """A user made as docs/deployment.md says can have all algorithms, in long logs and among many slots, too."""
    text = (Path(__file__).parents[3] / "docs" / "deployment.md").read_text("utf-8")
    words = re.search(r"^(ACL SETUSER limitgate .*)$", text, re.MULTILINE).group(1).replace("PASSWORD", "secret").split()
    with own_redis.client() as client:
        client.execute_command(*words)
        now = Weighed(client).now()
        client.set("limitgate:log", a_log(500, now, apart=1_000))
        client.set("limitgate:slots", some_places(500, now))
    store = RedisStore(f"{own_redis.url}?username=limitgate&password=secret", local_refusals=False)
    long = (in_log("limitgate:log", 600), spending("limitgate:slots", "600 at once", slot=9_999))
    short = [spending(f"limitgate:{kind}", limit, slot=5, **options) for kind, (limit, options) in KINDS.items()]
    for verb in ("spend", "peek", "reset"):
        assert store.spend(Plan((*long, *short), verb), 5).admitted
    store.close()


def test_a_value_of_another_type_is_begun_anew(client: redis.Redis, redis_server: RedisServer) -> None:
    """What is no text is none of ours: a question deletes it, a request writes over it, and each is counted once."""
    store = RedisStore(redis_server.url, local_refusals=False)
    for kind, (limit, options) in KINDS.items():
        for verb in ("peek", "spend"):
            key = uuid4().hex
            client.rpush(key, "x")
            assert store.spend(Plan((spending(key, limit, slot=5, **options),), verb), 5).admitted, kind
            assert client.type(key) == (b"none" if verb == "peek" else b"string")
    assert store.unreadable == 2 * len(KINDS)
    store.close()
