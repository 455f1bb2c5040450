"""Places for requests in flight: what a limit of them is, and the script and the memory store held against an oracle."""

from __future__ import annotations

import logging
import math
import random
import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from hypothesis import given, strategies as st

from limitgate import ConfigError, Limit, Limiter, MemoryStore, RedisStore, Rule, limit, load_rules
from limitgate.algorithms.concurrency import HELD_US, State
from limitgate.limits.bucket import bucket_of
from limitgate.limits.decision import decide
from limitgate.limits.plan import Adjustment, Charge, Plan, Reading, full_refund, read, refund
from limitgate.limits.template import PlanTemplate, whole_reading
from limitgate.rules.lint import overshooting
from limitgate.stores.redis import wire
from tests.support.clock import Clock
from tests.support.effort import HISTORIES
from tests.support.redis_server import RedisServer
from tests.support.scripted import Scripted

COUNTS = (1, 2, 3, 5)
STEPS = (0, 0, 0, 1, 1000, 10**6, 10**7, HELD_US - 1, HELD_US, HELD_US + 1, 10**9, -1, -(10**6), -(10**10))


@dataclass
class ConcurrencyLimiter:
    """A bucket: when it was last written, and whose places end when, counted from a beginning of its own."""

    written: int
    clock: int = 0
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)

    def at(self, now: int) -> ConcurrencyLimiter:
        clock = self.clock + max(0, now - self.written)
        return ConcurrencyLimiter(now, clock, {name: slot for name, slot in self.slots.items() if slot[1] > clock})

    @property
    def taken(self) -> int:
        return sum(places for places, _ in self.slots.values())

    @property
    def left(self) -> int:
        return max((end - self.clock for _, end in self.slots.values()), default=0)

    def take(self, name: int, places: int) -> None:
        places, _ = self.slots.pop(name, (places, 0))
        self.slots[name] = places, self.clock + HELD_US


class Oracle:
    """Who holds what, said as plainly as can be."""

    def __init__(self) -> None:
        self.buckets: dict[str, ConcurrencyLimiter] = {}

    def ask(self, plan: Plan, now: int) -> tuple[bool, list[tuple[int, int, int]]]:
        """Whether a plan passes, and of each bucket how many places are taken, for how long, and how many are one's own."""
        found, changed = [], set()
        for charge in plan.charges:
            before = self.buckets.get(charge.key, ConcurrencyLimiter(now))
            bucket = ConcurrencyLimiter(now) if plan.verb == "reset" else before.at(now)
            if plan.verb == "reset" or before.written > now or charge.adjustment:
                changed.add(charge.key)
            if charge.adjustment:
                self._apply_adjustment(bucket, charge)
            found.append(bucket)
        told = [(each.taken, each.left, each.slots.get(charge.slot, (0, 0))[0]) for charge, each in zip(plan.charges, found)]
        fits = [
            not charge.cost or own or taken + charge.cost <= charge.bucket.limits[0].count
            for charge, (taken, _, own) in zip(plan.charges, told)
        ]
        passes = all(fit or not charge.enforced for charge, fit in zip(plan.charges, fits))
        for charge, bucket, fit in zip(plan.charges, found, fits):
            if plan.verb == "spend" and passes and fit and charge.cost:
                bucket.take(charge.slot, charge.cost)
                changed.add(charge.key)
            if charge.key in changed:
                self.buckets[charge.key] = bucket
        return passes, told

    @staticmethod
    def _apply_adjustment(bucket: ConcurrencyLimiter, charge: Charge) -> None:
        (back,), (name,) = charge.adjustment.back, charge.adjustment.grace
        if back > 0:
            bucket.slots.pop(name, None)
        elif back and (name in bucket.slots or bucket.taken - back <= charge.bucket.limits[0].count):
            bucket.take(name, -back)


def a_plan(rnd: random.Random, keys: list[str], names: list[int], counts: tuple[int, ...] = COUNTS) -> Plan:
    """Something is taken, maybe once more, or given back, or renewed; by somebody new, by a holder, or by one long gone."""
    what = rnd.choice(("take",) * 6 + ("release",) * 3 + ("renew",) * 3 + ("peek", "reset"))
    if what == "take" and rnd.random() < 0.8:
        names.append(rnd.randrange(1, 2**52))
    name = names[-1] if what == "take" else rnd.choice(names)
    charges = []
    for key in rnd.sample(keys, rnd.choice((1, len(keys)))):
        bucket, cost = bucket_of(f"{rnd.choice(counts)} at once"), rnd.choice((0, 1, 1, 1, 1, 2, 3, 10**12))
        charge = Charge(key, bucket, cost, rnd.random() < 0.8, rnd.choice(("a", "b")), slot=name)
        if what in ("release", "renew"):
            cost = rnd.choice((1, 1, 2))
            charge = charge._replace(cost=0, adjustment=Adjustment(0, 0, [cost if what == "release" else -cost], [name]))
        charges.append(charge)
    return Plan(tuple(charges), {"take": "spend", "release": "adjust", "renew": "adjust"}.get(what, what))


def history(rnd: random.Random, size: int = 10) -> list[tuple[Plan, int]]:
    """Plans over one or two buckets, each with the time it is carried out at.

    Either the count changes or the clock steps back: the memory store writes a bucket down when it sees another count.
    """
    name = uuid4().hex
    keys, names = [f"{name}:{number}" for number in range(rnd.choice((1, 2)))], [rnd.randrange(1, 2**52)]
    now, events, back = 1_790_000_000_000_000 + rnd.randrange(10**9), [], rnd.random() < 0.5
    counts = (rnd.choice(COUNTS),) if back else COUNTS
    for _ in range(size):
        step = rnd.choice(STEPS)
        now += step if back else abs(step)
        events.append((a_plan(rnd, keys, names, counts), now))
    return events


def told(plan: Plan, reading: Reading) -> tuple[bool, list[tuple[int, int, int]]]:
    """What a reading says, as the oracle would say it."""
    return reading.admitted, [
        (
            bucket.algorithm.used(state, bucket.limits[0]),
            bucket.algorithm.refill_us(state, bucket.limits[0]),
            state.places(charge.slot),
        )
        for charge, bucket, (state,) in ((charge, charge.bucket, states) for charge, states, _ in reading.buckets)
    ]


def check(scripted: Scripted, seeds: range) -> None:
    """Script and memory store say what the oracle says, to every event of some histories."""
    histories = [(seed, history(random.Random(seed))) for seed in seeds]
    with scripted.client.pipeline(transaction=False) as pipe:
        for _, events in histories:
            for plan, now in events:
                pipe.execute_command(*scripted.command(plan, now))
            pipe.unlink(*{charge.key for plan, _ in events for charge in plan.charges})
        replies = iter(pipe.execute())
    for seed, events in histories:
        oracle, clock = Oracle(), Clock()
        memory = MemoryStore(clock)
        memory._reclaim = lambda _now: True
        for step, (plan, clock.now) in enumerate(events):
            expected = oracle.ask(plan, clock.now)
            answers = wire.answers([plan], next(replies))
            assert told(plan, answers.readings[0]) == expected, f"script, seed {seed}, step {step}"
            reading = memory.spend(plan)
            assert told(plan, reading) == expected, f"memory, seed {seed}, step {step}"
            assert decide(plan, answers.readings[0]) == decide(plan, reading), f"seed {seed}, step {step}"
            assert not answers.unreadable
        next(replies)


@pytest.mark.parametrize("block", range(4))
def test_histories_of_places_property(scripted: Scripted, block: int) -> None:
    """Script and memory store agree with the oracle on who holds what, over a thousand histories."""
    for start in range(block * 50, HISTORIES, 4 * 50):
        check(scripted, range(start, start + 50))


def test_histories_of_places_meet_every_case() -> None:
    """The generated histories are worth something: each kind of event and of answer is common among them."""
    seen = dict.fromkeys(("refused", "taken twice", "released", "renewed", "taken again", "not again", "back", "ended"), 0)
    for seed in range(300):
        oracle, before = Oracle(), 0
        for plan, now in history(random.Random(seed)):
            held = {key: {**bucket.slots} for key, bucket in oracle.buckets.items()}
            passes, answers = oracle.ask(plan, now)
            seen["refused"] += not passes
            seen["back"] += now < before
            before = now
            for charge, (_, _, own) in zip(plan.charges, answers):
                had = charge.slot in held.get(charge.key, {})
                if charge.adjustment is None:
                    seen["taken twice"] += had and own > 0 and plan.verb == "spend"
                    seen["ended"] += had and not own and plan.verb != "reset"
                elif charge.adjustment.back[0] > 0:
                    seen["released"] += had
                else:
                    seen["renewed"] += had and own > 0
                    seen["taken again"] += not had and own > 0
                    seen["not again"] += not own
    assert min(seen.values()) > 30, seen


@given(seed=st.integers(0))
def test_never_more_than_the_count_property(seed: int) -> None:
    """Whatever is taken, given back and renewed, no more places are ever taken than the count says."""
    rnd = random.Random(seed)
    store, names = MemoryStore(clock := Clock()), [1]
    for _ in range(12):
        clock.advance(us=rnd.choice(STEPS))
        plan = a_plan(rnd, ["key"], names)
        plan = plan._replace(charges=tuple([charge._replace(bucket=bucket_of("3 at once")) for charge in plan.charges]))
        store.spend(plan)
        (state,) = store.spend(Plan((Charge("key", bucket_of("3 at once"), 0, True, None),), "peek")).buckets[0].before
        assert 0 <= state.taken <= 3
        assert state.taken == sum(places for _, places, _ in state.slots)


# --- single cases, on either store ------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "script"])
def ask(request: pytest.FixtureRequest, client: redis.Redis) -> Callable[..., Reading]:
    """Takes places of one key under a name, on either store; its ``clock`` and ``back`` beside it."""
    clock, key = Clock(), uuid4().hex
    store = MemoryStore(clock) if request.param == "memory" else Scripted(client, clock)

    def plan(text: str, name: int, cost: int) -> Plan:
        return Plan((Charge(key, bucket_of(text), cost, enforced=True, rule=None, slot=name),))

    def ask(text: str, name: int = 1, cost: int = 1, verb: Any = "spend") -> Reading:
        return store.spend(plan(text, name, cost)._replace(verb=verb), 5)

    def back(text: str, name: int = 1, cost: int = 1) -> Reading:
        taken = plan(text, name, cost)
        return store.spend(full_refund(taken, read(taken.charges, 0, [[State()]])), 5)

    ask.clock, ask.back = clock, back
    return ask


def used(reading: Reading) -> int:
    return reading.buckets[0].before[0].taken


def test_so_many_at_once_and_no_more(ask: Callable[..., Reading]) -> None:
    """The places are there until they are taken, and again when one is given back."""
    assert [ask("3 at once", name).admitted for name in (1, 2, 3, 4)] == [True, True, True, False]
    ask.back("3 at once", 2)
    assert [ask("3 at once", name).admitted for name in (4, 5)] == [True, False]


def test_a_call_that_is_repeated_takes_nothing_twice(ask: Callable[..., Reading]) -> None:
    """The same name has its place already, even where no other is free, and giving it back twice gives back one."""
    ask("2 at once", 1)
    ask("2 at once", 2)
    assert ask("2 at once", 2).admitted
    assert used(ask("2 at once", verb="peek")) == 2
    ask.back("2 at once", 2)
    ask.back("2 at once", 2)
    assert used(ask("2 at once", verb="peek")) == 1


def test_a_plain_plan_that_is_repeated_takes_nothing_twice(redis_server: RedisServer) -> None:
    """As after a lost connection: it has its place already, though there is no other."""
    charge = Charge("", bucket_of("1 at once"), 1, enforced=True, rule="places")
    plan = PlanTemplate([charge]).asked([uuid4().hex])
    with closing(RedisStore(redis_server.url)) as store:
        first, again = [whole_reading(store.spend(plan, 5)) for _ in range(2)]
        assert first.admitted
        assert again.admitted
        assert store.spend(Plan.peek(plan.charges), 5).buckets[0].before[0].taken == 1


def test_a_place_ends_that_nobody_renews(ask: Callable[..., Reading]) -> None:
    """It is free again just when its lease is over, not a microsecond before; the others stay."""
    ask("2 at once", 1)
    ask.clock.advance(10)
    ask("2 at once", 2)
    ask.clock.advance(us=HELD_US - 10_000_000 - 1)
    assert not ask("2 at once", 3).admitted
    ask.clock.advance(us=1)
    assert ask("2 at once", 3).admitted
    assert not ask("2 at once", 4).admitted


def test_a_clock_that_steps_back_gives_nothing_away(ask: Callable[..., Reading]) -> None:
    """After a step back every place lasts just as long as it would have, and none for ever."""
    ask("1 at once", 1)
    ask.clock.advance(-86_400)
    assert not ask("1 at once", 2).admitted
    ask.clock.advance(us=HELD_US - 1)
    assert not ask("1 at once", 2).admitted
    ask.clock.advance(us=1)
    assert ask("1 at once", 2).admitted


def test_a_lowered_count_takes_nobodys_place(ask: Callable[..., Reading]) -> None:
    """Who is in flight stays so, and nobody else comes in until there is room under the new count."""
    for name in range(1, 6):
        ask("5 at once", name)
    assert not ask("2 at once", 9).admitted
    for name in range(1, 4):
        ask.back("5 at once", name)
    assert not ask("2 at once", 9).admitted
    ask.back("5 at once", 4)
    assert ask("2 at once", 9).admitted


def test_a_slot_of_several_places(ask: Callable[..., Reading]) -> None:
    """It comes with all of its places or with none, and all of them go back."""
    assert ask("5 at once", 1, 3).admitted
    assert not ask("5 at once", 2, 3).admitted
    assert ask("5 at once", 3, 2).admitted
    assert used(ask("5 at once", verb="peek")) == 5
    ask.back("5 at once", 1, 3)
    assert used(ask("5 at once", verb="peek")) == 2


def test_ten_thousand_places(ask: Callable[..., Reading]) -> None:
    """As many as a limit may have can be taken, found, and given back."""
    assert ask("10000 at once", 1, 9_999).admitted
    assert ask("10000 at once", 2, 1).admitted
    assert not ask("10000 at once", 3, 1).admitted
    ask.back("10000 at once", 1, 9_999)
    assert used(ask("10000 at once", verb="peek")) == 1


def test_a_reset_frees_all_places(ask: Callable[..., Reading]) -> None:
    """After it nobody holds any, and what is given back then is not taken from anybody else."""
    for name in (1, 2):
        ask("2 at once", name)
    ask("2 at once", verb="reset")
    assert [ask("2 at once", name).admitted for name in (3, 4)] == [True, True]
    ask.back("2 at once", 1)
    assert not ask("2 at once", 5).admitted


def test_names_that_overlap_are_told_apart(ask: Callable[..., Reading]) -> None:
    """Names whose bytes occur across the borders of others are not taken for these."""
    ask("9 at once", 0x01_01_01_01_01_01)
    ask("9 at once", 0x01_01_01_01_01_01_01)
    assert used(ask("9 at once", verb="peek")) == 2
    for name in (0x01_01, 0x01_01_01_01, 0x01 << 40):
        ask.back("9 at once", name)
    assert used(ask("9 at once", verb="peek")) == 2


def test_a_refusal_promises_nothing_and_hints_at_a_second(ask: Callable[..., Reading]) -> None:
    """``retry_after`` is a second where there may be room any time, and infinite for more places than there are."""
    ask("2 at once", 1, 2)
    plan = Plan((Charge("key", bucket_of("2 at once"), 1, enforced=True, rule=None, slot=2),))
    assert decide(plan, ask("2 at once", 2)).retry_after == 1.0
    more = Plan((plan.charges[0]._replace(cost=3),))
    assert decide(more, ask("2 at once", 2, 3)).retry_after == math.inf


def test_newcomers_push_nobody_out_who_is_in_flight() -> None:
    """A bucket whose places are all taken stays for as long as they are, however many others come; then it makes room."""
    store = MemoryStore(clock := Clock(), max_buckets=2)

    def ask(key: str, limits: str, verb: Any = "spend") -> Reading:
        return store.spend(Plan((Charge(key, bucket_of(limits), 1, enforced=True, rule=None, slot=7),), verb))

    for key in ("one", "two"):
        ask(key, "1 at once")
    for second in range(29):
        clock.advance(1)
        ask(f"newcomer {second}", "9/day")
    assert [ask(key, "1 at once", "peek").buckets[0].before[0].taken for key in ("one", "two")] == [1, 1]
    clock.advance(1)
    ask("newcomer", "9/day")
    assert ask("newcomer", "9/day", "peek").buckets[0].before[0] > 0
    assert len(store) <= 2


@pytest.mark.parametrize("cost", [0, 1, 7])
def test_a_correction_of_the_cost_keeps_the_place(cost: int) -> None:
    """Whatever a request turns out to have cost, it keeps its slot; only costing nothing gives it back."""
    plan = Plan((Charge("key", bucket_of("9 at once"), 3, enforced=True, rule=None, slot=1),))
    store = MemoryStore(Clock())
    reading = store.spend(plan)
    wrong = refund(plan, reading, [cost])
    assert bool(wrong.charges) is (cost == 0)
    if wrong.charges:
        assert store.spend(wrong).buckets[0].before[0].taken == 0


def test_a_key_lives_as_long_as_its_last_place(client: redis.Redis, redis_server: RedisServer) -> None:
    """In Redis a bucket is gone when the last place is over, and at once when the last one is given back."""
    store, key = RedisStore(redis_server.url), uuid4().hex
    plan = Plan((Charge(key, bucket_of("2 at once"), 1, enforced=True, rule=None, slot=1),))
    reading = store.spend(plan, 5)
    assert HELD_US / 1000 - 1000 < client.pttl(key) <= HELD_US / 1000 + 2
    store.spend(full_refund(plan, reading), 5)
    assert not client.exists(key)
    store.close()


HEADER = struct.pack("<BQ", 1, 1_790_000_000_000_000)[:8]


def _place(name: int, until: int) -> bytes:
    return name.to_bytes(7, "little") + until.to_bytes(7, "little")


FOREIGN = {
    "empty": b"",
    "text": b"garbage",
    "no place": HEADER + bytes(7),
    "a byte too many": HEADER + bytes(7) + _place(5, 10) + b"x",
    "all ones": HEADER + b"\xff" * 21,
    "a timeline without end": HEADER + b"\xff" * 7 + _place(5, 10),
    "a place without end": HEADER + bytes(7) + _place(5, 2**54),
    "out of order": HEADER + bytes(7) + _place(5, 2**54) + _place(6, 10),
    "random": HEADER + random.Random(1).randbytes(7 + 14 * 5),
    "list": ["RPUSH", "x"],
}


@pytest.mark.parametrize("verb", ["spend", "peek", "reset"])
@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
def test_what_makes_no_sense_is_replaced(
    client: redis.Redis, redis_server: RedisServer, caplog: pytest.LogCaptureFixture, foreign: bytes | list[str], verb: str
) -> None:
    """A value that is none of ours counts as an empty bucket, is replaced and counted."""
    key = uuid4().hex
    command, *rest = ["SET", foreign] if isinstance(foreign, bytes) else foreign
    client.execute_command(command, key, *rest)
    store, clock = Scripted(client, Clock(1_790_000_000_000_000)), bucket_of("1 at once")
    plan = Plan((Charge(key, clock, 1, enforced=True, rule=None, slot=1),), verb)
    with caplog.at_level(logging.WARNING, "limitgate"):
        reply = wire.answers([plan], client.execute_command(*store.command(plan, store.clock())))
    assert reply.unreadable == 1
    assert reply.readings[0].buckets[0].before[0].taken == 0
    again = wire.answers([plan], client.execute_command(*store.command(plan._replace(verb="peek"), store.clock())))
    assert (again.unreadable, again.readings[0].buckets[0].before[0].taken) == (0, verb == "spend")


@given(size=st.integers(1, 6), data=st.randoms(use_true_random=False))
def test_no_value_breaks_the_script_property(client: redis.Redis, size: int, data: random.Random) -> None:
    """Whatever bytes stand in a bucket, the script answers, and a minute later somebody gets a place."""
    store, key = Scripted(client, Clock(1_790_000_000_000_000)), uuid4().hex
    places = b"".join(_place(data.randrange(2**52), data.choice((0, 1, HELD_US, 2**33, 2**55))) for _ in range(size))
    client.set(key, HEADER + data.choice((0, 1, 2**33, 2**55)).to_bytes(7, "little") + places)
    for name in (1, 2):
        plan = Plan((Charge(key, bucket_of("3 at once"), 1, enforced=True, rule=None, slot=name),))
        store.spend(plan, 5)
        store.spend(full_refund(plan, read(plan.charges, 0, [[State()]])), 5)
        store.clock.advance(60)
    assert store.spend(plan, 5).admitted
    client.delete(key)


# --- limits and rules -------------------------------------------------------------------------------------------------


def test_a_limit_of_so_many_at_once() -> None:
    """It is written as it is read, has no period, and is a concurrency; what it is made of makes it again."""
    one = Limit("20 at once")
    assert (one.count, one.burst, one.period, one.algorithm, str(one)) == (20, 20, 0, "concurrency", "20 at once")
    assert one == Limit("20 at once", algorithm="concurrency") == Limit(" 20  AT ONCE ") == one.having() == eval(repr(one))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("-1 at once", {}),
        ("1.5 at once", {}),
        ("at once", {}),
        ("10001 at once", {}),
        ("20 at once burst 30", {}),
        ("20 at once", {"burst": 30}),
        ("20 at once", {"algorithm": "gcra"}),
        ("20 at once", {"algorithm": "fixed_window"}),
        ("20 at once", {"lease": 1}),
        ("20 at once", {"align": "utc"}),
        ("20/second", {"algorithm": "concurrency"}),
        ("20 per 0 seconds", {"algorithm": "concurrency"}),
        ("20 per 0 seconds", {}),
    ],
    ids=str,
)
def test_a_limit_that_makes_no_sense(text: str, options: dict[str, Any]) -> None:
    """What cannot be had at once, or not with that, is a ConfigError that says what was expected."""
    with pytest.raises(ConfigError, match="expected"):
        Limit(text, **options)


def test_a_rule_with_concurrency() -> None:
    """``concurrency: 20`` is the limit "20 at once" beside the others, in a bucket of its own."""
    rule = Rule("api", "5/second", concurrency=20)
    assert rule.every_limit == (Limit("5/second"), Limit("20 at once"))
    assert [bucket.has_slots for bucket in rule.buckets] == [False, True]
    assert Rule("api", concurrency=20).every_limit == Rule("api", "20 at once").every_limit
    assert list(overshooting(Rule("api", "20 at once"))) == []


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": -1},
        {"concurrency": True},
        {"concurrency": "20"},
        {"concurrency": 10_001},
        {"concurrency": 2, "charge_if": {"status": [401]}},
        {"concurrency": 2, "per": "message"},
        {"concurrency": 2, "lease": 1},
        {"concurrency": 2, "qps": 10, "lease": 1},
        {"concurrency": 2, "exempt": True},
    ],
    ids=str,
)
def test_a_rule_that_makes_no_sense(options: dict[str, Any]) -> None:
    """A concurrency that does not go with the rest of a rule is a ConfigError; so it is on a decorator."""
    with pytest.raises(ConfigError, match="expected"):
        Rule("api", **options)
    if "exempt" not in options and "lease" not in options:
        with pytest.raises(ConfigError, match="expected"):
            limit(**options)(lambda: None)


def test_in_a_rule_file(tmp_path: Path) -> None:
    """In YAML it is a field of a rule, or a limit among others; what makes no sense is told with its line."""
    file = tmp_path / "rules.yaml"
    file.write_text("rules:\n  - {name: a, concurrency: 20, qps: 5}\n  - {name: b, limits: [3 at once, 5/second]}\n")
    one, other = load_rules(file).tiers["default"]
    assert [str(limit) for limit in (*one.every_limit, *other.every_limit)] == [
        "5/second",
        "20 at once",
        "3 at once",
        "5/second",
    ]
    file.write_text("rules:\n  - name: a\n    concurrency: many\n")
    with pytest.raises(ConfigError, match=r"rules.yaml:3: rules\[0\].concurrency: expected"):
        load_rules(file)


def test_a_cost_above_the_places_is_no_mistake() -> None:
    """What a request costs is about the other limits of its rule: in flight it is one."""
    assert Rule("tokens", "10000/minute", concurrency=2, cost=1000).cost == 1000


def test_nobody_hits_a_limit_of_places() -> None:
    """Verbs that take what nobody would give back are a ConfigError; `peek` and `reset` are not."""
    limiter = Limiter(MemoryStore())
    for ask in (limiter.hit, limiter.wait, limiter.reserve, limiter.refund):
        with pytest.raises(ConfigError, match="slot"):
            ask("key", "2 at once")
    with pytest.raises(ConfigError, match="slot"):
        limiter.hit_up_to("key", "2 at once", cost=2)
    with pytest.raises(ConfigError, match="slot"):
        limiter.limited("2 at once")
    assert limiter.peek("key", "2 at once").remaining == limiter.reset("key", "2 at once").remaining == 2


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_a_peek_says_that_there_is_no_room(store: str, redis_server: RedisServer) -> None:
    """Asking without taking sees the places of others as what they are: taken."""
    opened = MemoryStore() if store == "memory" else RedisStore(redis_server.url)
    limiter = Limiter(opened, timeout=5, key_prefix=uuid4().hex)
    with limiter.slot("key", 3, cost=2):
        assert limiter.peek("key", "3 at once").allowed
        refused, impossible = (limiter.peek("key", "3 at once", cost=cost) for cost in (2, 4))
    assert (refused.allowed, refused.retry_after, impossible.retry_after) == (False, 1, math.inf)
    assert limiter.peek("key", "3 at once", cost=3).allowed
    opened.close()


def test_shares_of_places() -> None:
    """Where each of several processes limits alone, each has its share of the places, and at least one."""
    assert [Limit("20 at once").share(processes).burst for processes in (1, 4, 30)] == [20, 5, 1]


def test_a_refusal_is_not_repeated_without_asking(client: redis.Redis, redis_server: RedisServer) -> None:
    """A place may be free any moment, so whoever was refused is not answered by what was heard before."""
    store, other, key = RedisStore(redis_server.url), RedisStore(redis_server.url), uuid4().hex
    plans = [Plan((Charge(key, bucket_of("1 at once"), 1, enforced=True, rule=None, slot=name),)) for name in (1, 2)]
    reading = store.spend(plans[0], 5)
    assert not store.spend(plans[1], 5).admitted
    other.spend(full_refund(plans[0], reading), 5)
    assert store.spend(plans[1], 5).admitted
    store.close()
    other.close()
