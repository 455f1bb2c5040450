"""Plain plans on Redis: a script in a straight line says and keeps what the one for all plans does, and crowds share calls."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
import redis
from hypothesis import given, strategies as st

from limitgate import AsyncRedisStore, Limit, MemoryStore, RedisStore, StoreError
from limitgate.limits.bucket import Bucket, bucket_of
from limitgate.limits.decision import decide
from limitgate.limits.plan import Charge, Plan, Reading, wait_us
from limitgate.limits.template import MAX_WINDOWS, OF_ANY, PlainRefund, PlainSpend, PlanTemplate, RefundTemplate, whole_reading
from limitgate.stores.base import MAX_LOAD
from limitgate.stores.redis import plain, wire
from limitgate.stores.redis.aio.batch import RequestQueue
from limitgate.stores.redis.aio.batcher import MAX_BATCH
from limitgate.stores.redis.breaker import FAILURES
from limitgate.stores.redis.threads.connection import ListenDeadline
from limitgate.stores.redis.wire import UNSENDABLE, Reader, pack_command
from tests.limits.test_template import BAN, STRAIGHT, plain_charges
from tests.support.clock import Clock
from tests.support.clusters import key_on
from tests.support.proxy import Proxy, calls_to, in_a_loop
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer
from tests.support.scripted import CLOCK, TTL_SUFFIX, Scripted

NAMES = count()
STEPS = (0, 0, 1, 999, 10**5, 10**6, 10**7, 86_400 * 10**6, -1)
PATIENT = 20.0
README = bucket_of("5/second", "100/minute", "2000/day")


def template(*limits: str, cost: int = 1, enforced: bool = True) -> PlanTemplate:
    """One charge of these limits, of README's own where there are none."""
    return PlanTemplate([Charge("", bucket_of(*limits) if limits else README, cost, enforced, "api")])


def fresh(size: int = 1) -> list[str]:
    """Keys that nobody has used."""
    return [f"plain:{next(NAMES)}" for _ in range(size)]


class Twins:
    """Both scripts on a real Redis under one clock, each with keys of its own, which must come to hold the same."""

    def __init__(self, client: redis.Redis, charges: Sequence[Charge]) -> None:
        self.client = client
        self.clock = Clock()
        self.template = PlanTemplate(charges)
        on_set = f"server.call('SET', key .. '{TTL_SUFFIX}', ttl)"
        self.general = Scripted(client, self.clock, on_set)
        self.sha = client.script_load(CLOCK.replace("ON_SET", on_set) + plain.script_of(self.template.shape).text)

    def plain(self, plans: Sequence[Sequence[str]], *templates: PlanTemplate) -> Sequence[int]:
        """Carry out plans of our template, or each of one of others of its shape, and return the verdicts."""
        self.readings = [of.asked(keys) for of, keys in zip(templates or [self.template] * len(plans), plans, strict=True)]
        reader = Reader(notEnoughData=None, replyError=ValueError)
        reader.feed(plain.packed(("EVALSHA", self.sha), self.readings))
        reply = self.client.execute_command(*reader.gets(), self.clock())
        verdicts = plain.answers(self.template.shape, self.readings, reply)[2]
        return [plain.ADMITTED] * len(plans) if verdicts is None else verdicts

    def refund(self, refunds: Sequence[PlainRefund]) -> Sequence[int]:
        """Carry out refunds of one shape, and return the verdicts."""
        shape = refunds[0].template.shape
        on_set = f"server.call('SET', key .. '{TTL_SUFFIX}', ttl)"
        sha = self.client.script_load(CLOCK.replace("ON_SET", on_set) + plain.script_of(shape).text)
        reader = Reader(notEnoughData=None, replyError=ValueError)
        reader.feed(plain.packed_refunds(("EVALSHA", sha), shape, refunds))
        reply = self.client.execute_command(*reader.gets(), self.clock())
        verdicts = plain.answers(shape, refunds, reply)[2]
        return [plain.ADMITTED] * len(refunds) if verdicts is None else verdicts

    def kept(self, keys: Sequence[str]) -> list[tuple[Any, Any]]:
        return [(self.client.get(key), self.client.get(key + TTL_SUFFIX)) for key in keys]


def test_what_is_sent_keeps_no_template() -> None:
    """Each reload replaces all templates."""
    made = template("7/second")
    back = RefundTemplate(made, [0])
    before = sys.getrefcount(made), sys.getrefcount(back)
    for keys in (fresh(), fresh()):
        spent = made.reading(keys, 0, (0,), admitted=True)
        for plans in ([spent], [spent, spent], [spent, template("8/second").asked(keys)]):
            plain.packed(plain.words_of(made.shape, in_full=False), plans)
        plain.packed_refunds(plain.words_of(back.shape, in_full=False), back.shape, [back.of(spent)])
        assert wire._packed_plain(made) is wire._packed_plain(made)
        assert wire._packed_refunds(back) is wire._packed_refunds(back)
    del spent, plans
    assert (sys.getrefcount(made), sys.getrefcount(back)) == before


VISITS = st.tuples(st.integers(0, 2), st.sampled_from(STEPS))


@given(plain_charges((*STRAIGHT, "concurrency")), st.lists(VISITS, min_size=1, max_size=10))
def test_both_scripts_say_and_keep_the_same(client: redis.Redis, charges: list[Charge], visits: list[Any]) -> None:
    """Property: verdicts, debts, bytes in Redis and how long they stay are the same, unless it is left to the other one."""
    twins = Twins(client, charges)
    name = fresh()[0]
    for visitor, step in visits:
        twins.clock.advance(us=step)
        keys = [[f"{name}:{kind}:{visitor}:{number}" for number in range(len(charges))] for kind in "gp"]
        verdicts = twins.plain([keys[1]])
        (found,) = twins.readings
        expected = twins.general.spend(twins.template.plan(keys[0], found.slot), 1.0)
        if verdicts == [plain.NOT_CARRIED_OUT]:
            assert twins.general.spend(found.whole_plan, 1.0).admitted == expected.admitted
        else:
            assert found.admitted == expected.admitted
            assert (verdicts == [plain.ADMITTED]) == all(bucket.after is not None for bucket in expected.buckets)
            assert [each[1:] for each in found.buckets] == [(list(before), after) for _, before, after in expected.buckets]
        assert twins.kept(keys[0]) == twins.kept(keys[1])


@given(
    plain_charges(("sliding_log", "sliding_log", "concurrency", "gcra", "fixed_window")),
    st.lists(VISITS, min_size=1, max_size=10),
)
def test_the_script_for_all_plans_carries_out_plain_ones(client: redis.Redis, charges: list[Charge], visits: list[Any]) -> None:
    """Property: plain plans beside others in a call are read like these, and what they keep is the same."""
    template, clock = PlanTemplate(charges), Clock()
    script, name = Scripted(client, clock), fresh()[0]
    for visitor, step in visits:
        clock.advance(us=step)
        keys = [[f"{name}:{kind}:{visitor}:{number}" for number in range(len(charges))] for kind in "gp"]
        asked = template.asked(keys[1])
        plans = [template.plan(keys[0], asked.slot), asked]
        command = script.command_of(plans, clock())
        expected, found = wire.answers(plans, client.execute_command(*command)).readings
        waits = [wait_us(charge, states) for charge, states, _ in expected.buckets]
        assert isinstance(found, PlainSpend) or (template.may_wait and any(waits))
        assert [each[1:] for each in found.buckets] == [each[1:] for each in expected.buckets]
        assert (found.now, found.admitted) == (expected.now, expected.admitted)
        assert [client.get(key) for key in keys[0]] == [client.get(key) for key in keys[1]]


def owing(value: bytes | None) -> list[bytes]:
    """The windows of a bucket that owe something: the script for all plans writes no others, those of new debts last."""
    windows = [] if value is None else [value[at : at + 25] for at in range(8, len(value), 25)]
    return sorted([window for window in windows if any(window[12:])])


def kept_alike(first: tuple[Any, Any], second: tuple[Any, Any], bucket: Bucket) -> bool:
    """True if buckets owe the same, for as long, but for windows of GCRA that owe nothing."""
    if bucket.has_slots or first[0] is None:
        return first[0] == second[0]
    return owing(first[0]) == owing(second[0]) and (first[1] == second[1] or not owing(first[0]))


REFUNDS = st.tuples(st.integers(0, 2), st.sampled_from(STEPS), st.integers(0, 7))


@given(plain_charges(("gcra", "gcra", "concurrency")), st.lists(REFUNDS, min_size=1, max_size=10))
def test_both_scripts_give_back_the_same(client: redis.Redis, charges: list[Charge], visits: list[Any]) -> None:
    """Property: what buckets owe once something is given back, and how long they stay, is the same by either script."""
    twins = Twins(client, charges)
    name, under_way = fresh()[0], list[tuple[PlainRefund, PlainRefund]]()
    for visitor, step, given_back in visits:
        twins.clock.advance(us=step)
        keys = [[f"{name}:{kind}:{visitor}:{number}" for number in range(len(charges))] for kind in "gp"]
        is_declined = twins.plain([keys[1]]) == [plain.NOT_CARRIED_OUT]
        (asked,) = twins.readings
        expected = twins.general.spend(twins.template.plan(keys[0], asked.slot), 1.0)
        if is_declined:
            twins.general.spend(asked.whole_plan, 1.0)
        for general, straight in under_way:
            twins.general.spend(general.whole_plan, 1.0)
            if twins.refund([straight]) == [plain.NOT_CARRIED_OUT]:
                twins.general.spend(straight.whole_plan, 1.0)
        under_way = []
        back = [given_back >> number & 1 and charge is not BAN for number, charge in enumerate(charges)]
        if any(back) and all(bucket.after is not None for bucket in expected.buckets):
            refund = RefundTemplate(twins.template, [0 if is_back else each.cost for is_back, each in zip(back, charges)])
            states = [state for _, before, _ in expected.buckets[: len(twins.template.buckets)] for state in before]
            spent = [twins.template.reading(each, expected.now, states, True) for each in keys]
            for each in spent:
                each._slot = asked.slot
            under_way = [(refund.of(spent[0]), refund.of(spent[1]))]
        for charge, *of_both in zip(charges, *keys):
            assert kept_alike(*twins.kept(of_both), charge.bucket)


def test_refunds_of_several_rules_share_a_call(client: redis.Redis) -> None:
    """Each gives back what it was charged, in whatever order they come; nothing is left of a bucket that owes nothing then."""
    twins = Twins(client, [Charge("", bucket_of("9/day"), 1, enforced=True, rule=None)])
    others = [template("9/day", cost=2), template("5/day", cost=5)]
    keys = fresh(3)
    templates = [twins.template, *others, others[0]]
    assert twins.plain([[keys[0]], [keys[1]], [keys[2]], [keys[1]]], *templates) == [1, 1, 1, 1]
    refunds = [RefundTemplate(of, [0]).of(each) for of, each in zip(templates, twins.readings)]
    assert len({refund.template.shape for refund in refunds}) == 1
    assert twins.refund(refunds[:3]) == [1, 1, 1]
    assert client.exists(*keys) == 1
    assert twins.refund(refunds[3:]) == [1]
    assert client.exists(*keys) == 0


def some_slots(written: int, *until: int) -> bytes:
    """A bucket of slots as the script for all plans writes it, named 1 and so on."""
    numbers = [written, 0, *[number for name, end in enumerate(until, 1) for number in (name, end)]]
    return b"\x01" + b"".join([number.to_bytes(7, "little") for number in numbers])


NOW = 10**15
ODD_SLOTS = {
    "nothing in it": b"",
    "another version": b"\x03" + some_slots(NOW, 1)[1:],
    "banned": b"\x02" + some_slots(NOW, 1)[1:],
    "too short": some_slots(NOW, 1)[:-1],
    "none taken": some_slots(NOW),
    "of the future": some_slots(2**53, 1),
    "in the wrong order": some_slots(NOW, 2, 1),
    "that lasts too long": some_slots(NOW, 60_000_001),
    "long": some_slots(NOW, *[2**24] * 147),
    "a list": None,
}


@pytest.mark.parametrize("odd", ODD_SLOTS)
def test_odd_slots_are_left_to_the_other_script(client: redis.Redis, odd: str) -> None:
    """Nothing is taken or given back where a bucket is not as it is written; others of the same call are."""
    twins, value = Twins(client, [Charge("", bucket_of("20 at once"), 1, enforced=True, rule=None)]), ODD_SLOTS[odd]
    key, other = fresh(2)
    assert twins.plain([[key], [other]]) == [plain.ADMITTED, plain.ADMITTED]
    spent = twins.readings
    client.delete(key)
    client.set(key, value) if value is not None else client.rpush(key, "a")
    assert twins.plain([[key], [other]]) == [plain.NOT_CARRIED_OUT, plain.ADMITTED]
    refund = RefundTemplate(twins.template, [0])
    assert twins.refund([refund.of(each) for each in spent]) == [plain.NOT_CARRIED_OUT, plain.ADMITTED]
    assert twins.refund([refund.of(each) for each in twins.readings]) == [plain.NOT_CARRIED_OUT, plain.ADMITTED]
    assert client.lrange(key, 0, 9) == [b"a"] if value is None else client.get(key) == value
    assert client.exists(other) == 0


def test_a_slot_is_taken_once(client: redis.Redis) -> None:
    """A call that is sent again finds the slot there, and leaves it to the other script, which takes nothing more."""
    twins = Twins(client, [Charge("", bucket_of("20 at once"), 1, enforced=True, rule=None)])
    keys = fresh()
    asked = twins.template.asked(keys)
    asked._slot = 256  # its bytes stand in those of other numbers, too
    command = plain.packed(("EVALSHA", twins.sha), [asked])
    for expected in (plain.ADMITTED, plain.NOT_CARRIED_OUT):
        reader = Reader(notEnoughData=None, replyError=ValueError)
        reader.feed(command)
        reply = client.execute_command(*reader.gets(), twins.clock())
        verdicts = plain.answers(twins.template.shape, [asked], reply)[2]
        assert (verdicts or [plain.ADMITTED]) == [expected]
    assert twins.general.spend(asked.whole_plan, 1.0).buckets[0].before[0].taken == 1


def test_many_slots_are_left_to_the_other_script() -> None:
    """A bucket that may get long is appended to, which is for the script for all plans."""
    shapes = [template(f"{count} at once").shape for count in (145, 146)]
    assert [shape is OF_ANY for shape in shapes] == [False, True]


def test_a_refund_of_twelve_windows(client: redis.Redis) -> None:
    """Lua has room for as many as a plain plan may have, in one bucket or in one each."""
    limits = [f"{9 + n} per {n} hours" for n in range(1, MAX_WINDOWS + 1)]
    for charges in (
        [Charge("", bucket_of(*limits), 1, enforced=True, rule=None)],
        [Charge("", bucket_of(limit), 1, enforced=True, rule=None) for limit in limits],
    ):
        twins, keys = Twins(client, charges), fresh(len(charges))
        assert twins.plain([keys]) == [plain.ADMITTED]
        assert twins.refund([RefundTemplate(twins.template, [0] * len(charges)).of(twins.readings[0])]) == [plain.ADMITTED]
        assert client.exists(*keys) == 0


def test_a_key_that_comes_twice_in_a_call_is_charged_twice(client: redis.Redis) -> None:
    """Plans of a call are carried out one after the other."""
    twins = Twins(client, [Charge("", bucket_of("3/day"), 1, enforced=True, rule=None)])
    assert twins.plain([fresh()] * 5) == [1, 1, 1, 0, 0]


def test_plans_of_several_rules_share_a_call(client: redis.Redis) -> None:
    """Each plan of a call is held to its own limits, in whatever order they come."""
    twins = Twins(client, [Charge("", bucket_of("2/day"), 1, enforced=True, rule=None)])
    two, four = template("2/day"), template("4/day")
    few, many = fresh(), fresh()
    plans = [(few, two), (many, four), (many, four), (few, two), (few, two), (many, four), (many, four), (many, four)]
    assert twins.plain([keys for keys, _ in plans], *[of for _, of in plans]) == [1, 1, 1, 1, 0, 1, 1, 0]
    assert [each.buckets[0].before[0] // (86_400 * 10**6) for each in twins.readings] == [0, 0, 1, 1, 2, 2, 3, 4]


def packed(bucket: Bucket, written: int, *owed: tuple[int, int]) -> bytes:
    """A bucket as the script for all plans writes it."""
    head = b"\x01" + written.to_bytes(7, "little")
    rows = zip(bucket.ids, bucket.counts, owed, strict=True)
    sizes = (6, 6, 7, 6)
    return head + b"".join(
        number.to_bytes(size, "little") for id_, count_, debt in rows for number, size in zip((id_, count_, *debt), sizes)
    )


ODD = {
    "nothing in it": b"",
    "another version": b"\x02" + packed(README, 0, (0, 0), (0, 0), (0, 0))[1:],
    "too short": packed(README, 0, (0, 0), (0, 0), (0, 0))[:-1],
    "too long": packed(README, 0, (0, 0), (0, 0), (0, 0)) + b"\0",
    "of the future": packed(README, 2**53, (0, 0), (0, 0), (0, 0)),
    "another count": packed(bucket_of("6/second", "100/minute", "2000/day"), 0, (0, 0), (0, 0), (0, 0)),
    "another window": packed(bucket_of("5/second", "100/minute", "2000/hour"), 0, (0, 0), (0, 0), (0, 0)),
    "a window less": packed(bucket_of("5/second", "100/minute"), 0, (0, 0), (0, 0)),
    "a rest above the count": packed(README, 0, (1, 5), (0, 0), (0, 0)),
    "a debt beyond all": packed(README, 0, (2**52 + 1, 0), (0, 0), (0, 0)),
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_an_odd_bucket_is_given_back_to_by_the_other_script(client: redis.Redis, value: bytes) -> None:
    """As below, for a refund."""
    twins = Twins(client, [Charge("", README, 1, enforced=True, rule=None)] * 2)
    first, odd, other, another = fresh(4)
    assert twins.plain([[first, odd], [other, another]]) == [plain.ADMITTED, plain.ADMITTED]
    client.set(odd, value)
    kept = client.get(first)
    verdicts = twins.refund([RefundTemplate(twins.template, [0, 0]).of(each) for each in twins.readings])
    assert verdicts == [plain.NOT_CARRIED_OUT, plain.ADMITTED]
    assert client.mget(first, odd, other, another) == [kept, value, None, None]


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_an_odd_bucket_is_left_to_the_other_script(client: redis.Redis, value: bytes) -> None:
    """Nothing of a plan is carried out where a bucket is not as it is written; others of the same call are."""
    twins = Twins(client, [Charge("", README, 1, enforced=True, rule=None)] * 2)
    first, odd, other, another = fresh(4)
    client.set(odd, value)
    assert twins.plain([[first, odd], [other, another]]) == [plain.NOT_CARRIED_OUT, plain.ADMITTED]
    assert client.mget(first, odd) == [None, value]
    assert client.exists(other, another) == 2


def in_sevens(*numbers: int) -> bytes:
    """A bucket of an algorithm that keeps numbers of seven bytes."""
    return b"\x01" + b"".join([number.to_bytes(7, "little") for number in numbers])


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window"])
@pytest.mark.parametrize(
    "odd", ["nothing in it", "banned", "too long", "of the future", "used beyond all", "a window that lasts too long"]
)
def test_an_odd_window_is_left_to_the_other_script(client: redis.Redis, algorithm: str, odd: str) -> None:
    """As above; the one for all plans finds the same in it as it ever did."""
    before = [0] * (algorithm == "sliding_window")
    value = {
        "nothing in it": b"",
        "banned": b"\x02" + in_sevens(5 * 10**15, 1, 1, *before, 1)[1:],
        "too long": in_sevens(5, 1, *before, 1) + b"\0",
        "of the future": in_sevens(2**53, 1, *before, 1),
        "used beyond all": in_sevens(10**15, 2**50 + 1, *before, 1),
        "a window that lasts too long": in_sevens(10**15, 1, *before, 2 * 86_400 * 10**6 + 1),
    }[odd]
    twins = Twins(client, [Charge("", bucket_of(Limit("9/day", algorithm=algorithm)), 1, enforced=True, rule=None)])
    key, other = fresh(2)
    client.set(key, value)
    assert twins.plain([[key], [other]]) == [plain.NOT_CARRIED_OUT, plain.ADMITTED]
    assert client.get(key) == value


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_products_beyond_doubles_are_left_to_the_other_script(client: redis.Redis, over: int) -> None:
    """Of a window with billions of requests, whether the last one fits is decided exactly or not here."""
    limit = Limit("3000000000 per 3000 seconds", algorithm="sliding_window")
    twins = Twins(client, [Charge("", bucket_of(limit), 1, enforced=True, rule=None)])
    now, left, used = twins.clock(), limit.period_us - twins.clock() % limit.period_us, limit.count // 3
    counting = used * left // limit.period_us
    client.set("edge", in_sevens(now, limit.count - 1 - counting + over, used, left))
    (verdict,) = twins.plain([["edge"]])
    if verdict == plain.NOT_CARRIED_OUT:
        assert twins.general.spend(twins.template.plan(["edge"]), 1.0).admitted == (over < 0)
    else:
        assert verdict == (over < 0)


def test_a_ban_is_left_to_the_other_script(client: redis.Redis) -> None:
    """Nothing of a plan is carried out where one of the keys that it looks at is banned; others of the same call are."""
    twins = Twins(client, [Charge("", README, 1, enforced=True, rule=None), BAN])
    banned, other = fresh(2), fresh(2)
    client.set(banned[1], "any")
    assert twins.plain([banned, other]) == [plain.NOT_CARRIED_OUT, plain.ADMITTED]
    assert client.mget(*banned) == [None, b"any"]
    assert [client.exists(key) for key in other] == [1, 0]


def test_a_key_of_another_type_is_left_to_the_other_script(redis_server: RedisServer, client: redis.Redis) -> None:
    """A list under a bucket's key is replaced by the script for all plans, and counted."""

    async def run() -> tuple[list[Any], int]:
        store = AsyncRedisStore(redis_server.url)
        key = fresh()
        client.rpush(key[0], "x")
        try:
            return [await store.aspend(template().asked(key), PATIENT) for _ in range(2)], store.unreadable
        finally:
            await store.aclose()

    readings, unreadable = asyncio.run(run())
    assert [type(reading) is PlainSpend for reading in readings] == [False, True]
    assert [reading.buckets[0].before[0] for reading in readings] == [0, pytest.approx(10**6, abs=10**6)]
    assert unreadable == 1


@pytest.mark.parametrize(
    "reply", [None, 1, [1, 0, 1], b"", b"x", struct.pack("<3q", 1, 0, 1), struct.pack("<10q", *range(10)), "text"]
)
def test_a_reply_of_another_shape_is_an_error(reply: object) -> None:
    """Whatever is not as many numbers as were asked for is told, and nothing is made of it."""
    with pytest.raises(StoreError, match="unexpected reply"):
        plain.answers(template().shape, [template().asked(["a"])], reply)


KEYS = st.sampled_from(["a", "b", "limitgate:0", "limitgate:1", "über", "\N{SNOWMAN}", "", "\r\n$1\r\n"])


@given(st.lists(st.tuples(st.booleans(), KEYS, KEYS), min_size=1, max_size=5))
def test_calls_are_packed_as_redis_expects(plans: list[tuple[bool, str, str]]) -> None:
    """Property: bytes are those of any command of the same words, whatever the keys, by one template or by several."""
    one, other = (PlanTemplate([Charge("", bucket_of(limit), 1, enforced=True, rule=None)] * 2) for limit in ("1/day", "2/day"))
    asked = [(other if by_other else one).asked(keys) for by_other, *keys in plans]
    reader = Reader(notEnoughData=None, replyError=ValueError)
    reader.feed(plain.packed(("EVALSHA", "sha"), asked))
    words = reader.gets()
    assert pack_command(tuple(words)) == plain.packed(("EVALSHA", "sha"), asked)
    keys = [key.encode() for plan in asked for key in plan.keys]
    assert words[: 3 + len(keys)] == [b"EVALSHA", b"sha", b"%d" % len(keys), *keys]
    numbers, *texts = words[3 + len(keys) :]
    places = struct.unpack(f"<{len(plans)}H", numbers) if numbers else [1] * len(plans)
    alone = {of: plain.packed(("EVALSHA", "sha"), [of.asked(["a", "b"])]) for of in (one, other)}
    assert all(texts[place - 1] in alone[plan.template] for place, plan in zip(places, asked))
    assert len(texts) == len({plan.template for plan in asked})


@pytest.mark.parametrize("key", ["", "k", "k" * 300, "\u0436:\r\n"])
def test_a_call_for_one_key_is_packed_as_all_are(key: str) -> None:
    """A lone plan of one bucket, as most are where requests are few: its words are those of two, less the other's key."""
    words, of = ("EVALSHA", "sha"), template()
    reader = Reader(notEnoughData=None, replyError=ValueError)
    reader.feed(plain.packed(words, [of.asked([key])]) + plain.packed(words, [of.asked([key])] * 2))
    alone, both = reader.gets(), reader.gets()
    assert alone[2:4] == [b"1", key.encode()]
    assert both[2:5] == [b"2", key.encode(), key.encode()]
    assert alone[:2] + alone[4:] == both[:2] + both[5:]
    assert plain.packed(words, [of.asked([key])]) == pack_command(tuple(alone))


def test_a_key_that_is_no_unicode_cannot_be_sent() -> None:
    """It is told before anything is on its way."""
    with pytest.raises(UNSENDABLE):
        plain.packed(("EVALSHA", "sha"), [template().asked(["\ud800"])])


def test_scripts_are_few(client: redis.Redis) -> None:
    """Redis keeps every script: plans of the same number of windows have one, whatever their limits, costs and rules."""
    scripts = {plain.script_of(template(f"{n}/second", f"{n}/day", cost=1 + n % 2).shape).sha for n in range(2, 50)}
    assert len(scripts) == 1
    most = PlanTemplate(
        [Charge("", bucket_of("5/second", "5/minute", "5/hour"), 1, enforced=bool(m % 2), rule=str(m)) for m in range(4)]
    )
    assert Twins(client, most.charges).plain([fresh(4)]) == [1]


# --- the store --------------------------------------------------------------------------------------------------------


async def spend(store: AsyncRedisStore, plans: Sequence[tuple[PlanTemplate, Sequence[str]]]) -> list[Any]:
    """What becomes of plain plans that come in one turn: true or false, or the class of an error."""

    async def one(of: PlanTemplate, keys: Sequence[str]) -> Any:
        try:
            reading = await store.aspend(of.asked(keys), 5.0)
        except StoreError as error:
            return error.fault
        return reading.admitted

    return await asyncio.gather(*[one(*each) for each in plans])


@in_a_loop
async def test_plain_plans_of_a_turn_share_calls(redis_server: RedisServer) -> None:
    """Plans of one shape go together, whatever their limits; those of another in a call of their own, as do other kinds."""
    store, one, other = AsyncRedisStore(redis_server.url), template(), template("9/hour")
    alike = template("6/second", "7/minute", "8/day", cost=2)
    await spend(store, [(one, fresh()), (other, fresh())])
    await store.aspend(Plan.spend(one.plan(fresh()).charges), 5.0)
    before = calls_to(redis_server)
    mixed = [(each, fresh()) for _ in range(9) for each in (one, other, alike)]
    general = [store.aspend(one.plan(fresh()), 5.0) for _ in range(3)]
    admitted, *_ = await asyncio.gather(spend(store, mixed), *general)
    assert admitted == [True] * 27
    assert calls_to(redis_server) - before == 3
    await store.aclose()


@in_a_loop
async def test_a_crowd_is_served_in_the_order_in_which_it_came(redis_server: RedisServer) -> None:
    """Of many plain plans at once for one bucket exactly those are admitted that came first, in as few calls as they fill."""
    store, of, key = AsyncRedisStore(redis_server.url, local_refusals=False), template("100/day"), fresh()
    await spend(store, [(of, fresh())])
    before = calls_to(redis_server)
    assert await spend(store, [(of, key)] * 200) == [True] * 100 + [False] * 100
    assert calls_to(redis_server) - before == -(-200 // MAX_BATCH)
    await store.aclose()


@in_a_loop
async def test_a_script_that_redis_has_forgotten_is_sent_again(own_redis: RedisServer) -> None:
    """NOSCRIPT costs a round trip and nobody a decision."""
    store, of, key = AsyncRedisStore(own_redis.url), template("3/day"), fresh()
    assert await spend(store, [(of, key)]) == [True]
    with own_redis.client() as client:
        client.script_flush()
    assert await spend(store, [(of, key)] * 3) == [True, True, False]
    assert store.failures == 0
    await store.aclose()


@in_a_loop
@pytest.mark.parametrize("limit", ["9/day", "9 at once"])
async def test_refunds_of_a_turn_share_a_call(redis_server: RedisServer, limit: str) -> None:
    """They are given back together, apart from charges of the same turn."""
    store, of, keys = AsyncRedisStore(redis_server.url), template(limit), fresh(20)
    spent = await asyncio.gather(*[store.aspend(of.asked([key]), 5.0) for key in keys])
    back = RefundTemplate(of, [0])
    await store.aspend(back.of(spent.pop()), 5.0)
    before = calls_to(redis_server)
    made = await asyncio.gather(*[store.aspend(back.of(each), 5.0) for each in spent], spend(store, [(of, fresh())]))
    assert [type(each) for each in made[:-1]] == [PlainRefund] * 19
    assert calls_to(redis_server) - before == 2
    with redis_server.client() as client:
        assert client.exists(*keys) == 0
    await store.aclose()


@pytest.mark.parametrize("limit", ["1/day", "1 at once"])
def test_refunds_share_a_call_with_plans_of_other_shapes(redis_server: RedisServer, limit: str) -> None:
    """What the refunds free is free for the next request, also where this process knows the bucket to be full."""
    of, other = template(limit), template("3/day")
    first, second, others = fresh(), fresh(), fresh()
    with contextlib.closing(RedisStore(redis_server.url)) as store:
        spent: list[Any] = [store.spend(of.asked([*key]), 5.0) for key in (first, second)]
        assert not any(store.spend(of.asked([*key]), 5.0).admitted for key in (first, second))
        back = RefundTemplate(of, [0])
        plans = [back.of(spent[0]), other.asked([*others]), Plan.peek(other.plan([*others]).charges), back.of(spent[1])]
        outcomes: list[Any] = store._servers.exchange(plans, ListenDeadline(5.0))
        assert [type(outcome) for outcome in outcomes] == [PlainRefund, PlainSpend, Reading, PlainRefund]
        assert outcomes[0].now == outcomes[3].now > 0
        with redis_server.client() as client:
            assert client.exists(*first, *second, *others) == 1
        assert all(store.spend(of.asked([*key]), 5.0).admitted for key in (first, second))


def test_a_refund_that_is_declined_is_made_by_the_other_script(redis_server: RedisServer) -> None:
    """Redis is asked once more, on either side, and finds the bucket as other limits have left it."""
    of, other = template("3/day"), template("9/day")

    async def main() -> None:
        (key,) = fresh()
        spent = await there.aspend(of.asked([key]), 5.0)
        await there.aspend(other.plan([key]), 5.0)
        assert isinstance(await there.aspend(RefundTemplate(of, [0]).of(spent), 5.0), Reading)
        ((debt,),) = [each.before for each in (await there.aspend(other.plan([key]), 5.0)).buckets]
        assert round(debt / other.charges[0].bucket.weights[0]) == 1
        await there.aclose()

    there, here = AsyncRedisStore(redis_server.url), RedisStore(redis_server.url)
    asyncio.run(main())
    with contextlib.closing(here):
        (key,) = fresh()
        spent = here.spend(of.asked([key]), 5.0)
        assert isinstance(spent, PlainSpend)
        here.spend(other.plan([key]), 5.0)
        assert isinstance(here.spend(RefundTemplate(of, [0]).of(spent), 5.0), Reading)


@in_a_loop
async def test_a_refusal_that_holds_asks_nobody(redis_server: RedisServer) -> None:
    """Once refused, the next plans are refused without a call, until the moment that was promised."""
    store, of, key = AsyncRedisStore(redis_server.url), template("1/day"), fresh()
    assert await spend(store, [(of, key)] * 2) == [True, False]
    before = calls_to(redis_server)
    assert await spend(store, [(of, key)] * 5) == [False] * 5
    assert not (await store.aspend(of.plan(key), 5.0)).admitted
    assert calls_to(redis_server) == before
    await store.aclose()


@in_a_loop
async def test_who_goes_away_hurts_nobody(redis_server: RedisServer) -> None:
    """Requests that are cancelled while they wait, or while they are on their way, leave the others what they have."""
    store, of, key = AsyncRedisStore(redis_server.url), template("50/day"), fresh()
    await spend(store, [(of, fresh())])
    tasks = [asyncio.ensure_future(store.aspend(of.asked(key), 5.0)) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(each, asyncio.CancelledError) for each in done] == [True, False] * 10
    assert all(each.admitted for each in done[1::2])  # type: ignore[union-attr]
    await store.aclose()


@in_a_loop
async def test_who_comes_after_the_breaker_opened_does_not_wait(redis_server: RedisServer) -> None:
    """Requests of a turn are sent together; if Redis is given up in its midst, those waiting and those to come fail at once."""
    store, of = AsyncRedisStore(redis_server.url), template()
    await spend(store, [(of, fresh())])
    waiting = asyncio.ensure_future(store.aspend(of.asked(fresh()), 5.0))
    here: Any = store._loops[asyncio.get_running_loop()].servers
    for _ in range(FAILURES):
        here._failed(StoreError("it is gone", "connection"))
    for _ in range(2):
        with pytest.raises(StoreError, match="no calls are sent to Redis until it answers a probe"):
            await store.aspend(of.asked(fresh()), 5.0)
    with pytest.raises(StoreError, match="it is gone"):
        await waiting
    async with asyncio.timeout(PATIENT):
        while not store.healthy:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    assert await spend(store, [(of, fresh())]) == [True]
    await store.aclose()


@in_a_loop
async def test_no_memory_is_told(own_redis: RedisServer) -> None:
    """Without memory a plan that would be charged fails, and nothing is kept of it."""
    store, of, keys = AsyncRedisStore(own_redis.url), template(), fresh()
    assert await spend(store, [(of, fresh())]) == [True]
    with own_redis.client() as client:
        client.config_set("maxmemory", 1)
        assert await spend(store, [(of, keys)] * 2) == ["oom"] * 2
        client.config_set("maxmemory", 0)
        assert client.get(keys[0]) is None
    assert await spend(store, [(of, keys)]) == [True]
    await store.aclose()


@in_a_loop
async def test_a_silent_server_is_a_timeout(redis_server: RedisServer) -> None:
    """A server that does not answer in time fails the requests that wait, each with an error of its own."""
    async with Proxy(redis_server) as proxy:
        store, of = AsyncRedisStore(proxy.url), template()
        await spend(store, [(of, fresh())])
        proxy.hold()
        errors = await asyncio.gather(*[store.aspend(of.asked(fresh()), 0.05) for _ in range(3)], return_exceptions=True)
        assert [getattr(error, "fault", error) for error in errors] == ["timeout"] * 3
        assert len(set(map(id, errors))) == 3
        await store.aclose()


@in_a_loop
async def test_what_is_for_the_other_script_is_told_after_a_wait_too(redis_server: RedisServer, client: redis.Redis) -> None:
    """However long Redis was silent before, a plan that was not carried out is no refusal."""
    async with Proxy(redis_server) as proxy:
        store, of, odd = AsyncRedisStore(proxy.url), template(), fresh()
        await spend(store, [(of, fresh())])
        client.set(odd[0], "odd")
        proxy.hold()
        asked = asyncio.ensure_future(store.aspend(of.asked(odd), 20.0))
        await asyncio.sleep(0.1)
        proxy.release()
        reading = await asked
        assert not isinstance(reading, PlainSpend)
        assert reading.admitted
        assert reading.waited > 0.05
        await store.aclose()


@in_a_loop
async def test_what_is_for_the_other_script_is_asked_within_the_timeout(own_redis: RedisServer) -> None:
    """A server that falls silent between the two scripts is a timeout of the whole."""
    async with Proxy(own_redis) as proxy:
        store, of, odd = AsyncRedisStore(proxy.url), template(), fresh()
        await spend(store, [(of, fresh())])
        with own_redis.client() as client:
            client.set(odd[0], "odd")
        understood = store.understood_plain

        def then_silence(*given: Any) -> Any:
            proxy.hold()
            return understood(*given)

        store.understood_plain = then_silence  # type: ignore[method-assign]
        with pytest.raises(StoreError) as error:
            await store.aspend(of.asked(odd), 0.2)
        assert error.value.fault == "timeout"
        assert error.value.waited == pytest.approx(0.2, abs=0.05)
        proxy.release()
        await store.aclose()


WAITING = PlanTemplate([Charge("", bucket_of("5/minute"), 1, enforced=True, rule=None, max_wait_us=60 * 10**6)])
"""A limit whose turns are 12 seconds apart, so that a pause of the machine between two calls does not show."""


def delays(readings: Sequence[Any], key: Sequence[str]) -> list[float | None]:
    """Turns for which requests have to wait, None for those that are refused."""
    decisions = [decide(WAITING.plan(key), whole_reading(reading)) for reading in readings]
    return [round(decision.delay / 12, 1) if decision.allowed else None for decision in decisions]


@in_a_loop
async def test_who_has_to_wait_is_charged_once_and_in_order(redis_server: RedisServer) -> None:
    """A crowd that may wait is admitted by one script as far as it fits, and booked by the other, behind each other."""
    store, key = AsyncRedisStore(redis_server.url, local_refusals=False), fresh()
    await spend(store, [(WAITING, fresh())])
    before = calls_to(redis_server)
    readings = await asyncio.gather(*[store.aspend(WAITING.asked(key), 5.0) for _ in range(11)])
    assert delays(readings, key) == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5, None]
    assert [type(reading) is PlainSpend for reading in readings] == [True] * 5 + [False] * 6
    assert calls_to(redis_server) - before == 2
    await store.aclose()


@in_a_loop
async def test_plans_that_wait_are_kept_in_order() -> None:
    """A queue gives requests back in the order in which they came, plain plans with those of their template."""
    queue = RequestQueue(2)
    one, other = template(), template("9/hour")
    loop = asyncio.get_running_loop()

    def request(of: PlanTemplate | None) -> Any:
        made = template().plan(fresh()) if of is None else of.asked(fresh())
        return made, 0.0, loop.create_future(), 1.0

    requests = [request(of) for of in (one, None, one, other, one, None)]
    for each in requests:
        queue.append(each)
    first = request(None)
    queue.appendleft(first)
    assert queue.size == 7
    assert queue.pop_plain() is None
    assert queue.popleft() is first
    batch = queue.pop_plain()
    assert batch is not None
    assert (batch.requests, batch.shape) == ([requests[0], requests[2]], one.shape)
    queue.keep([each for each in queue if each is not requests[3]])
    assert list(queue) == [requests[1], requests[4], requests[5]]
    assert queue.first() is requests[1]
    queue.popleft()
    assert queue.first() is None
    assert queue.pop_plain().requests == [requests[4]]  # type: ignore[union-attr]
    assert queue.popleft() is requests[5]
    assert (queue.size, queue.first(), queue.pop_plain()) == (0, None, None)


@in_a_loop
async def test_costly_plans_do_not_hold_redis_up_together() -> None:
    """Logs cost more than other limits: as many share a call as it may take, and all of them come."""
    queue, loop = RequestQueue(MAX_BATCH), asyncio.get_running_loop()
    of = PlanTemplate([Charge("", bucket_of(Limit("5/second", algorithm="sliding_log")), 1, enforced=True, rule=None)])
    for key in range(100):
        queue.append((of.asked([str(key)]), 0.0, loop.create_future(), 1.0))
    batches = list(iter(queue.pop_plain, None))
    assert [plan.keys for batch in batches for plan in batch.plans] == [[str(key)] for key in range(100)]
    assert max(len(batch.plans) for batch in batches) * of.load <= MAX_LOAD
    assert len(batches) == -(-100 // (MAX_LOAD // of.load))


def test_a_memory_store_and_redis_decide_alike(client: redis.Redis) -> None:
    """A plain plan's decision does not depend on where its buckets are."""
    twins = Twins(client, [Charge("", README, 2, enforced=True, rule="api")])
    memory = MemoryStore(twins.clock)
    key = fresh()
    for step in (0, 0, 10**5, 10**6, 0, 0):
        twins.clock.advance(us=step)
        twins.plain([key])
        assert list(twins.readings[0].buckets) == list(memory.spend(twins.template.plan(key)).buckets)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_share_calls_whatever_they_ask(redis_server: RedisServer) -> None:
    """Plain plans of several shapes, and plans of other kinds, are decided alike if they happen to share a call."""
    store = RedisStore(redis_server.url, local_refusals=False)
    templates = [template("40/day"), template("40/day", "90/hour"), template("40/day", "90/hour", cost=2)]
    keys = [fresh() for _ in templates]

    def one(number: int) -> tuple[int, bool | None]:
        of = number % 3
        if number % 4 == 3:
            return of, store.spend(templates[of].plan(keys[of]), 5.0).admitted
        reading = store.spend(templates[of].asked(keys[of]), 5.0)
        return of, reading.admitted

    with ThreadPoolExecutor(16) as pool:
        answers = Counter(pool.map(one, range(300)))
    assert answers == {(0, True): 40, (0, False): 60, (1, True): 40, (1, False): 60, (2, True): 20, (2, False): 80}
    store.close()


def test_a_thread_is_told_what_is_for_the_other_script(client: redis.Redis, redis_server: RedisServer) -> None:
    """An odd bucket is left to the way of all plans; one that is known to refuse is answered without a call."""
    store, of, key, odd = RedisStore(redis_server.url), template("1/day"), fresh(), fresh()
    client.set(odd[0], "odd")
    assert not isinstance(store.spend(of.asked(odd), 5.0), PlainSpend)
    assert not store.spend(of.asked(odd), 5.0).admitted
    assert [store.spend(of.asked(key), 5.0).admitted for _ in range(2)] == [True, False]
    before = calls_to(redis_server)
    assert not store.spend(of.asked(key), 5.0).admitted
    assert calls_to(redis_server) == before
    assert not store.spend(of.plan(key), 5.0).admitted
    store.close()


def test_a_thread_waits_for_both_scripts_within_its_timeout(redis_server: RedisServer) -> None:
    """A server that is silent to the second one is a timeout of the whole."""
    with contextlib.closing(RedisStore(redis_server.url, local_refusals=False)) as store:
        key, ask, timeouts = fresh(), store._calls.spend, list[float]()

        def slowly(plan: Any, timeout: float) -> Any:
            timeouts.append(timeout)
            if len(timeouts) == 2:
                error = StoreError("no answer", "timeout")
                error.waited = timeout
                raise error
            return ask(plan, timeout).having_waited(0.3)

        with redis_server.client() as client:
            client.set(key[0], "odd")
        store._calls.spend = slowly  # type: ignore[method-assign]
        with pytest.raises(StoreError) as error:
            store.spend(template().asked(key), 1.0)
        assert timeouts == [1.0, pytest.approx(0.7)]
        assert error.value.waited == pytest.approx(1.0)


def test_threads_that_have_to_wait_are_charged_once(redis_server: RedisServer) -> None:
    """A thread that may wait asks the other script where the first one does not admit it."""
    with contextlib.closing(RedisStore(redis_server.url, local_refusals=False)) as store:
        key = fresh()
        with ThreadPoolExecutor(11) as pool:
            readings = list(pool.map(lambda _: store.spend(WAITING.asked(key), 5.0), range(11)))
        found = delays(readings, key)
        assert sorted([delay for delay in found if delay is not None]) == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5]


# --- clusters ---------------------------------------------------------------------------------------------------------


def spenders(url: str, stack: contextlib.ExitStack) -> Iterator[Any]:
    """Functions that send plain plans together, by threads and by tasks of an event loop, and return their readings."""
    store = stack.enter_context(contextlib.closing(RedisStore(url)))
    pool = stack.enter_context(ThreadPoolExecutor(32))
    yield lambda plans: list(pool.map(lambda each: store.spend(each[0].asked(each[1]), 5.0), plans))
    runner = stack.enter_context(asyncio.Runner())
    aio = AsyncRedisStore(url)
    stack.callback(lambda: runner.run(aio.aclose()))

    async def together(plans: Sequence[Any]) -> list[Reading]:
        return await asyncio.gather(*[aio.aspend(each[0].asked(each[1]), 5.0) for each in plans])

    yield lambda plans: runner.run(together(plans))


def test_on_a_cluster_plans_of_one_hash_slot_are_plain(redis_cluster: RedisCluster) -> None:
    """They go to their nodes as they are; one whose buckets are on several nodes is carried out like any other there."""
    alone, two = template("5/day"), PlanTemplate([*template("5/day").charges, *template("7/day").charges])
    with contextlib.ExitStack() as stack:
        for spend_together in spenders(redis_cluster.url, stack):
            name = fresh()[0]
            one_slot = [f"{{{name}}}:{place}" for place in "ab"]
            several = [key_on(place) for place in (0, 1)]
            single = [[key_on(place)] for place in (0, 1, 2)]
            for number in range(3):
                asked = [(two, one_slot), (two, several), *[(alone, keys) for keys in single]]
                readings = spend_together(asked)
                assert [reading.admitted for reading in readings] == [True] * 5
                assert [isinstance(reading, PlainSpend) for reading in readings] == [True, False, True, True, True]
                for reading in readings:
                    charged = [bucket.after[0] - bucket.before[0] for bucket in reading.buckets]
                    assert charged == [bucket.charge.bucket.weights[0] for bucket in reading.buckets]
                    assert all(bucket.before[0] // bucket.charge.bucket.weights[0] <= number for bucket in reading.buckets)


def test_on_a_cluster_a_crowd_of_one_bucket_shares_calls(redis_cluster: RedisCluster) -> None:
    """Requests of a turn for one hash slot share a call, and exactly as many as fit are admitted, the first ones."""
    of, key, other = template("40/day"), [key_on(1)], [key_on(1)]

    async def run() -> None:
        store = AsyncRedisStore(redis_cluster.url, local_refusals=False)
        for each in (key, other):  # so that the store knows who holds their slots
            await store.aspend(of.asked(each), PATIENT)
        before = calls_to(redis_cluster.masters[1])
        readings = await asyncio.gather(*[store.aspend(of.asked(key if n % 2 else other), PATIENT) for n in range(120)])
        assert calls_to(redis_cluster.masters[1]) - before == 4
        for of_one_bucket in (readings[::2], readings[1::2]):
            assert [reading.admitted for reading in of_one_bucket] == [True] * 39 + [False] * 21
        await store.aclose()

    asyncio.run(run())


def test_on_a_cluster_what_is_for_the_other_script_is_told(redis_cluster: RedisCluster) -> None:
    """An odd bucket is left to the way of all plans, and its neighbours in the call are not."""
    of, name = template("5/day"), fresh()[0]
    odd, well = ([f"{{{name}}}:{each}"] for each in ("odd", "well"))
    with contextlib.ExitStack() as stack:
        redis_cluster.say(redis_cluster.master_of(odd[0]), "SET", odd[0], "odd")
        for spend_together in spenders(redis_cluster.url, stack):
            readings = spend_together([(of, odd), (of, well)] * 2)
            assert [reading.admitted for reading in readings] == [True] * 4
            assert [isinstance(reading, PlainSpend) for reading in readings].count(False) in (1, 2)
            redis_cluster.say(redis_cluster.master_of(odd[0]), "SET", odd[0], "odd")
