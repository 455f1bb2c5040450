"""Bans of buckets of every algorithm, by the script on a real Redis and in the memory store: they refuse, and no more."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple
from uuid import uuid4

import pytest
import redis

from limitgate import Limit, MemoryStore
from limitgate.algorithms import ban
from limitgate.limits.bucket import Bucket, bucket_of, buckets_of
from limitgate.limits.decision import Decision, decide
from limitgate.limits.plan import Charge, Plan, Reading, refund
from tests.support.clock import Clock
from tests.support.effort import HISTORIES
from tests.support.scripted import TTL_SUFFIX, Scripted

SECOND = 1_000_000
LIMITS = {
    "gcra": (Limit("5/second"), Limit("20/minute"), Limit("7 per 3 seconds burst 9")),
    "borrow": (Limit("3/second", borrow=True),),
    "fixed_window": (Limit("5 per 10 seconds", algorithm="fixed_window"),),
    "first request": (Limit("5 per 10 seconds", algorithm="fixed_window", align="first-request"),),
    "sliding_window": (Limit("5 per 10 seconds", algorithm="sliding_window"),),
    "sliding_log": (Limit("5 per 10 seconds", algorithm="sliding_log"),),
    "long log": (Limit("400 per 10 seconds", algorithm="sliding_log"),),
    "warm_up": (Limit("5/second", warm_up=3),),
    "concurrency": (Limit("5 at once"),),
    "many at once": (Limit("400 at once"),),
    "two of several": (Limit("5/second"), Limit("3 per 10 seconds", algorithm="sliding_log")),
}
FOR_HOW_LONG = (1, 1000, SECOND, 5 * SECOND, 60 * SECOND, ban.FOR_EVER)
STEPS = (0, 0, 1, 1000, SECOND // 3, SECOND, 5 * SECOND, 11 * SECOND)


class Stand(NamedTuple):
    """What a reading says, in numbers that every store gives alike."""

    admitted: bool
    decision: Decision
    windows: object


def stand(plan: Plan, reading: Reading) -> Stand:
    decision = decide(plan, reading)
    return Stand(reading.admitted, decision, decision.windows)


class Twin:
    """The bucket as it would be without bans: it is told only what a banned bucket does not refuse."""

    def __init__(self, clock: Clock) -> None:
        self.store = MemoryStore(clock)
        self.until = -math.inf

    def is_banned(self, now: int) -> bool:
        return now < self.until


def charges_of(key: str, limits: tuple[Limit, ...], cost: int = 1, slot: int = 0) -> list[Charge]:
    buckets: tuple[Bucket, ...] = buckets_of(limits)
    return [
        Charge(key + each.suffix, each, cost, enforced=True, rule="r", slot=slot if each.has_slots else 0) for each in buckets
    ]


@pytest.mark.usefixtures("_unwatched")
@pytest.mark.parametrize("kind", LIMITS)
def test_histories_property(scripted: Scripted, kind: str) -> None:  # noqa: C901 - one history of everything
    """Script and memory store agree on every field under any history of bans, and so does a bucket that never was banned."""
    seen = {"banned": 0, "passed after": 0, "refunded under": 0, "reset under": 0, "longer than the ban": 0}
    for seed in range(max(40, HISTORIES // 25)):
        rnd = random.Random(f"{kind} {seed}")
        clock = Clock()
        scripted.clock, memory, twin = clock, MemoryStore(clock), Twin(clock)
        key, limits = f"{uuid4().hex}", LIMITS[kind]
        done: list[tuple[Plan, Reading, Reading, Reading]] = []
        most = max(2, limits[0].burst)
        for number in range(25):
            clock.now += rnd.choice(STEPS)
            now, what = clock.now, rnd.random()
            is_banned = twin.is_banned(now)
            cost = rnd.choice((0, 1, 1, 2, most // 2, most))
            charges = charges_of(key, limits, cost, number + 1)
            if what < 0.15:
                us = rnd.choice(FOR_HOW_LONG)
                plan = Plan.ban(charges_of(key, limits), us)
                twin.until = max(twin.until, now + us)
            elif what < 0.25:
                plan = Plan.ban(charges_of(key, limits), 0)
                twin.until = -math.inf
            elif what < 0.3:
                plan = Plan.reset(charges)
                seen["reset under"] += is_banned
            elif what < 0.45 and done:
                before = done.pop(rnd.randrange(len(done)))
                costs = [0] * len(before[0].charges)
                here = [refund(before[0], reading, costs) for reading in before[1:]]
                if here[0].charges:
                    seen["refunded under"] += is_banned
                    scripted.spend(here[0], 1)
                    memory.spend(here[1])
                    twin.store.spend(here[2])
                continue
            else:
                plan = Plan.spend(charges) if what < 0.9 else Plan.peek(charges)
            of_script, of_memory = scripted.spend(plan, 1), memory.spend(plan)
            assert stand(plan, of_script) == stand(plan, of_memory), (seed, number)
            is_banned = twin.is_banned(now) and (cost > 0 or plan.verb == "ban")
            if plan.verb == "ban" or (is_banned and plan.verb != "reset"):
                assert of_script.admitted is not is_banned or plan.verb == "ban"
                if is_banned:
                    seen["banned"] += 1
                    left = (twin.until - now) / SECOND if twin.until - now <= ban.PERMANENT else math.inf
                    beneath = decide(plan, twin.store.spend(Plan.peek(plan.charges))).retry_after
                    assert decide(plan, of_script).retry_after == pytest.approx(max(left, beneath))
                    seen["longer than the ban"] += beneath > left
                continue
            of_twin = twin.store.spend(plan)
            if not is_banned:
                seen["passed after"] += twin.until > 0
                assert stand(plan, of_memory) == stand(plan, of_twin), (seed, number)
                if plan.verb == "spend" and of_twin.admitted and cost:
                    done.append((plan, of_script, of_memory, of_twin))
    assert all(seen.values()), seen


@pytest.fixture(params=["memory", "script"])
def spend(request: pytest.FixtureRequest, client: redis.Redis) -> Callable[[Plan], Reading]:
    """``spend`` of either store; its ``clock`` beside it."""
    clock = Clock()
    store = MemoryStore(clock) if request.param == "memory" else Scripted(client, clock)

    def spend(plan: Plan) -> Reading:
        return store.spend(plan, 1)

    spend.clock = clock
    return spend


@pytest.mark.parametrize("kind", LIMITS)
def test_a_ban_ends_to_the_microsecond_and_leaves_what_was_owed(spend: Callable[[Plan], Reading], kind: str) -> None:
    """It is refused up to the last microsecond; afterwards the bucket owes what it did, less what has drained."""
    key = uuid4().hex
    one = Plan.spend(charges_of(key, LIMITS[kind], 1, 1))
    assert spend(one).admitted
    spend(Plan.ban(one.charges, 2 * SECOND))
    two = Plan.spend(charges_of(key, LIMITS[kind], 1, 2))
    assert decide(two, spend(two)).retry_after == 2
    spend.clock.advance(us=2 * SECOND - 1)
    assert decide(two, spend(two)).retry_after == 0.000001
    spend.clock.advance(us=1)
    peek = Plan.peek(two.charges)
    used = [window.used for window in decide(peek, spend(peek)).windows]
    assert all(number == 1 for number in used) or kind in ("gcra", "borrow", "warm_up", "two of several")
    assert kind != "gcra" or used == [0, 1, 0]
    assert spend(two).admitted


def test_a_ban_lasts_at_least_as_long_as_it_was_said(spend: Callable[[Plan], Reading]) -> None:
    """A shorter one does not shorten it, a longer one counts from when it was said, and none lifts it."""
    charges = charges_of(uuid4().hex, LIMITS["gcra"])
    assert decide(Plan.peek(charges), spend(Plan.ban(charges, 60 * SECOND))).retry_after == 60
    assert decide(Plan.peek(charges), spend(Plan.ban(charges, SECOND))).retry_after == 60
    spend.clock.advance(30)
    assert decide(Plan.peek(charges), spend(Plan.ban(charges, 40 * SECOND))).retry_after == 40
    assert spend(Plan.ban(charges, 0)).admitted
    assert spend(Plan.spend(charges)).admitted


def test_a_reset_lifts_no_ban(spend: Callable[[Plan], Reading]) -> None:
    """What was charged is forgotten, the ban stays."""
    charges = charges_of(uuid4().hex, (Limit("5/minute"),), 5)
    spend(Plan.spend(charges))
    spend(Plan.ban(charges, SECOND))
    spend(Plan.reset(charges))
    assert not spend(Plan.spend(charges)).admitted
    spend.clock.advance(1)
    assert spend(Plan.spend(charges)).admitted


def test_a_step_back_of_the_clock_makes_no_ban_longer(spend: Callable[[Plan], Reading]) -> None:
    """What was left of it is left, from then on."""
    charges = charges_of(uuid4().hex, LIMITS["gcra"])
    spend(Plan.ban(charges, 10 * SECOND))
    spend.clock.advance(-3600)
    assert decide(Plan.peek(charges), spend(Plan.spend(charges))).retry_after == 10
    spend.clock.advance(10)
    assert spend(Plan.spend(charges)).admitted


def test_only_what_is_charged_to_it_is_refused(spend: Callable[[Plan], Reading]) -> None:
    """A cost of nothing passes, and a shadow's ban refuses nothing but is not charged."""
    key = uuid4().hex
    spend(Plan.ban(charges_of(key, LIMITS["gcra"]), 60 * SECOND))
    assert spend(Plan.spend(charges_of(key, LIMITS["gcra"], 0))).admitted
    other = charges_of(uuid4().hex, LIMITS["gcra"])
    plan = Plan.spend([*[each._replace(enforced=False) for each in charges_of(key, LIMITS["gcra"])], *other])
    reading = spend(plan)
    decision = decide(plan, reading)
    assert decision.allowed
    assert decision.shadow
    spend(Plan.ban(charges_of(key, LIMITS["gcra"]), 0))
    peek = Plan.peek(plan.charges)
    used = decide(peek, spend(peek)).windows
    assert [window.used for window in used] == [0, 0, 0, 1, 1, 1]


def test_windows_that_were_not_asked_stay(spend: Callable[[Plan], Reading]) -> None:
    """A ban by some limits of a bucket is one of the whole bucket, and the others owe what they did."""
    key, both = uuid4().hex, bucket_of("5/minute", "50/day")
    spend(Plan.spend([Charge(key, both, 3, True, None)]))
    part = [Charge(key, Bucket(both.limits[:1], both.ids[:1]), 1, True, None)]
    spend(Plan.ban(part, SECOND))
    assert not spend(Plan.spend([Charge(key, both, 1, True, None)])).admitted
    spend(Plan.ban(part, 0))
    peek = Plan.peek([Charge(key, both, 1, True, None)])
    assert [window.used for window in decide(peek, spend(peek)).windows] == [3, 3]


@pytest.mark.parametrize("kind", LIMITS)
def test_redis_keeps_a_ban_for_as_long_as_it_lasts(client: redis.Redis, kind: str) -> None:
    """Not a bucket that would be gone sooner takes it along; and what would stay longer stays."""
    scripted = Scripted(client, Clock(), f"server.call('SET', key .. '{TTL_SUFFIX}', ttl)")
    key = uuid4().hex
    charges = charges_of(key, LIMITS[kind], 1, 1)
    scripted.spend(Plan.ban(charges, 3600 * SECOND), 1)
    for charge in charges:
        assert int(client.get(charge.key + TTL_SUFFIX)) == 3_600_002
    scripted.spend(Plan.ban(charges, 0), 1)
    assert not any(client.exists(charge.key) for charge in charges)
    scripted.spend(Plan.spend(charges), 1)
    before = [int(client.get(charge.key + TTL_SUFFIX)) for charge in charges]
    values = [client.get(charge.key) for charge in charges]
    scripted.spend(Plan.ban(charges, 1000), 1)
    assert [int(client.get(charge.key + TTL_SUFFIX)) for charge in charges] == before
    scripted.spend(Plan.ban(charges, 0), 1)
    assert [client.get(charge.key) for charge in charges] == values


@pytest.mark.parametrize("kind", ["long log", "many at once"])
def test_a_long_bucket_is_banned_and_appended_to(client: redis.Redis, kind: str) -> None:
    """What is stored in pages stays whole while a ban is put in front of it and taken away."""
    clock = Clock()
    scripted, memory = Scripted(client, clock), MemoryStore(clock)
    key, rnd = uuid4().hex, random.Random(7)

    def both(plan: Plan) -> None:
        assert stand(plan, scripted.spend(plan, 1)) == stand(plan, memory.spend(plan))

    for number in range(1, 900):
        clock.advance(us=rnd.randrange(20_000))
        charges = charges_of(key, LIMITS[kind], 1, number)
        both(Plan.spend(charges))
        if rnd.random() < 0.05:
            both(Plan.ban(charges, rnd.choice((0, 1, 100_000, SECOND))))
        if rnd.random() < 0.1 and kind == "many at once":
            away = Plan.adjust([charge._replace(slot=rnd.randrange(1, number + 1)).released() for charge in charges])
            scripted.spend(away, 1)
            memory.spend(away)


@pytest.mark.parametrize("value", [b"\x02", b"\x02" + b"\xff" * 14, b"\x02" + bytes(6) + b"\x01" + b"\xff" * 7 + b"x" * 25])
def test_a_ban_that_makes_no_sense_is_none(client: redis.Redis, value: bytes) -> None:
    """What is not ours is replaced and counted, as any other value."""
    key = uuid4().hex
    client.set(key, value)
    plan = Plan.spend([Charge(key, bucket_of("5/minute"), 1, True, None)])
    scripted = Scripted(client, Clock())
    reply = client.execute_command(*scripted.command(plan, Clock().now))
    assert reply[1] == 1
    assert client.get(key)[:1] == b"\x01"
