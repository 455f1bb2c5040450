"""Refusals that hold are repeated without asking: never one too many, with the same words, and never for long."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from hypothesis import assume, given, strategies as st

from limitgate import AsyncRedisStore, Limit, MemoryStore, RedisStore, Rule, StoreError
from limitgate.limits.bucket import Bucket, bucket_of
from limitgate.limits.decision import Decision, decide
from limitgate.limits.plan import Charge, Plan, Reading, read
from limitgate.limits.template import PlanTemplate, whole_reading
from limitgate.stores.redis import deny_cache, wire
from limitgate.stores.redis.deny_cache import LONGEST, DenyCache
from limitgate.stores.redis.replies import RedisStoreBase, ServerClock
from tests.stores.test_stores import AsyncDoor, Door
from tests.support.clock import Clock
from tests.support.doors import SITES, ASGISite, Site
from tests.support.effort import EXAMPLES
from tests.support.proxy import PATIENT, calls_to
from tests.support.redis_server import RedisServer
from tests.support.scripted import Scripted as ScriptedServer

SEEDS = EXAMPLES
US = 1_000_000
MINUTE = bucket_of("1/minute")
TEN = bucket_of("10/minute")


def a_plan(bucket: Bucket = MINUTE, key: str = "key", cost: int = 1, verb: Any = "spend") -> Plan:
    return Plan((Charge(key, bucket, cost, enforced=True, rule=None),), verb)


def joined(*plans: Plan) -> Plan:
    return Plan(tuple(charge for plan in plans for charge in plan.charges), plans[0].verb)


def owing(plan: Plan, *requests: float, now: int = Clock().now) -> Reading:
    """What a server says whose buckets owe so many requests, in all their windows."""
    owed = [
        [int(many * weight) for weight in charge.bucket.weights] for charge, many in zip(plan.charges, requests, strict=True)
    ]
    return read(plan.charges, now, owed)


# --- what is remembered, at explicit times ----------------------------------------------------------------------------


def test_a_refusal_is_repeated_until_it_may_end() -> None:
    """A refusal that was heard is repeated for as long as the bucket surely refuses, and for a second at most."""
    known, plan = DenyCache(), a_plan()
    assert known.answer(plan, 5.0) is None
    known.learn(plan, owing(plan, 1), 5.0, 5.0)
    for passed in (0.0, 0.25, 0.999):
        decision = decide(plan, known.answer(plan, 5 + passed))
        assert not decision.allowed
        assert decision.retry_after == pytest.approx(60 - passed, abs=2e-6)
    assert known.answer(plan, 6.0) is None
    known.learn(plan, owing(plan, 1), 7.0, 7.5)
    assert known.answer(plan, 7.9) is not None
    assert known.answer(plan, 8.1) is None


def test_time_counts_from_sending_for_us_and_from_hearing_for_them() -> None:
    """Whether to refuse goes by the time since the call was sent, what is promised by the time since its reply came."""
    known, plan = DenyCache(), a_plan(bucket_of("10/second burst 1"))
    known.learn(plan, owing(plan, 1), 5.0, 5.06)
    assert decide(plan, known.answer(plan, 5.07)).retry_after == pytest.approx(0.09, abs=2e-6)
    assert known.answer(plan, 5.0998) is not None
    assert known.answer(plan, 5.1) is None
    assert known.answer(plan, 5.12) is None


def test_a_clock_that_runs_differently_refuses_nobody_wrongly() -> None:
    """As a server's clock may be faster than ours, it is asked a little before the moment it named."""
    known, plan = DenyCache(), a_plan(bucket_of("2/second burst 1"))
    known.learn(plan, owing(plan, 1), 5.0, 5.0)
    assert known.answer(plan, 5.4990) is not None
    assert known.answer(plan, 5.4996) is None


def test_a_begun_microsecond_counts_whole() -> None:
    """A server that counts in microseconds may be one further than the time that has passed."""
    known, plan = DenyCache(), a_plan(bucket_of("500000/second burst 1"))
    known.learn(plan, owing(plan, 1), 5.0, 5.0)
    assert known.answer(plan, 5.0) is not None
    assert known.answer(plan, 5.000_001_5) is None


def test_it_goes_by_cost() -> None:
    """What is too little for five may do for one, and what refused one refuses five."""
    known, five, one = DenyCache(), a_plan(TEN, cost=5), a_plan(TEN)
    known.learn(five, owing(five, 7), 5.0, 5.0)
    assert known.answer(one, 5.1) is None
    assert known.answer(a_plan(TEN, cost=3), 5.1) is None
    assert known.answer(a_plan(TEN, cost=0), 5.1) is None
    assert not known.answer(a_plan(TEN, cost=4), 5.1).admitted
    known.learn(one, owing(one, 10), 5.2, 5.2)
    assert decide(five, known.answer(five, 5.3)).retry_after == pytest.approx(29.9, abs=2e-6)
    forever = a_plan(TEN, cost=11)
    assert decide(forever, known.answer(forever, 5.3)).retry_after == float("inf")


def test_all_buckets_have_to_be_known() -> None:
    """A plan with a bucket that nobody has looked at is not answered, whatever the others say."""
    known, first, second = DenyCache(), a_plan(key="first"), a_plan(key="second")
    known.learn(first, owing(first, 1), 5.0, 5.0)
    assert known.answer(joined(first, second), 5.1) is None
    both = joined(first, second)
    known.learn(both, owing(both, 1, 0), 5.1, 5.1)
    assert not known.answer(both, 5.2).admitted
    assert known.answer(second, 5.2) is None
    assert known.answer(joined(second, a_plan(key="third")), 5.2) is None


def test_the_latest_that_was_heard_of_the_servers_clock_counts() -> None:
    """Of buckets that were seen at different times, the answer's time is the one whose reply was on its way the shortest."""
    known, first, second, now = DenyCache(), a_plan(key="first"), a_plan(key="second"), Clock().now
    known.learn(first, owing(first, 1, now=now), 5.0, 5.5)
    known.learn(second, owing(second, 1, now=now + 400_000), 5.25, 5.5)
    for plan in (joined(first, second), joined(second, first)):
        assert known.answer(plan, 5.75).now == now + 650_000


def test_a_shadow_refuses_nobody() -> None:
    """A bucket that may not refuse is no reason to refuse without asking, however full it is."""
    known = DenyCache()
    shadow = Plan((a_plan(key="shadow").charges[0]._replace(enforced=False),))
    plan = joined(a_plan(key="real"), shadow)
    known.learn(plan, owing(plan, 1, 1), 5.0, 5.0)
    assert known.answer(shadow, 5.1) is None
    found = decide(plan, known.answer(plan, 5.1))
    assert (found.allowed, found.shadow, len(found.windows)) == (False, False, 2)


def test_another_limit_is_another_question() -> None:
    """When a rule's limits are changed, what was refused under the old ones counts no more."""
    known, plan = DenyCache(), a_plan()
    known.learn(plan, owing(plan, 1), 5.0, 5.0)
    assert known.answer(a_plan(bucket_of("2/minute")), 5.1) is None
    assert known.answer(a_plan(Bucket(MINUTE.limits)), 5.1) is None
    assert known.answer(plan, 5.1) is not None


@pytest.mark.parametrize("verb", ["peek", "reset"])
def test_only_spending_is_answered(verb: str) -> None:
    """Who looks or resets reaches the server, and what was seen then is not taken for a refusal."""
    known, plan = DenyCache(), a_plan()
    known.learn(plan, owing(plan, 1), 5.0, 5.0)
    assert known.answer(plan._replace(verb=verb), 5.1) is None
    known.learn(plan._replace(verb=verb), owing(plan, 1), 5.1, 5.1)
    assert known.answer(plan, 5.2) is None


def test_a_reset_outlives_replies_to_older_calls() -> None:
    """After a reset was answered, replies to calls sent before are not believed, those to later calls are."""
    known, plan = DenyCache(), a_plan()
    known.learn(plan, owing(plan, 1), 5.0, 5.1)
    known.learn(plan._replace(verb="reset"), owing(plan, 0), 5.2, 5.4)
    assert known.answer(plan, 5.4) is None
    for sent in (5.15, 5.3, 5.399):
        known.learn(plan, owing(plan, 1), sent, 5.5)
        assert known.answer(plan, 5.5) is None
    known.learn(plan, owing(plan, 1), 5.45, 5.6)
    assert known.answer(plan, 5.6) is not None


def test_what_was_given_back_outlives_replies_to_older_calls() -> None:
    """A bucket that something is given back to is forgotten, and a refusal that was read before is not believed any more."""
    cache, now = DenyCache(), Clock().now
    refused = owing(a_plan(), 10)
    cache.learn(a_plan(), refused, 0.0, 0.1)
    cache.forget(["key", "other"], now + 1, 0.2, 0.3)
    assert len(cache) == 0
    cache.learn(a_plan(), refused, 0.1, 0.4)
    assert len(cache) == 0
    cache.learn(a_plan(), owing(a_plan(), 10, now=now + 2), 0.1, 0.4)
    assert len(cache) == 1


def test_resets_that_are_heard_out_of_order() -> None:
    """Of two resets the later counts, whichever thread tells of its own first."""
    known, plan = DenyCache(), a_plan()
    for heard in (5.6, 5.5):
        known.learn(plan._replace(verb="reset"), owing(plan, 0), 5.4, heard)
    known.learn(plan, owing(plan, 1), 5.55, 5.7)
    assert known.answer(plan, 5.7) is None


def test_a_reset_between_two_steps_of_another_thread() -> None:
    """A refusal that is about to be noted when a reset comes in is not noted."""
    known, plan = DenyCache(), a_plan()

    class Interrupted(contextlib.AbstractContextManager[None]):
        times = 0

        def __exit__(self, *_: object) -> None:
            """Nothing was locked."""

        def __enter__(self) -> None:
            self.times += 1
            if self.times == 1:
                known.learn(plan._replace(verb="reset"), owing(plan, 0), 5.1, 5.2)

    known._lock = Interrupted()
    known.learn(plan, owing(plan, 1), 5.0, 5.3)
    assert known.answer(plan, 5.3) is None


def test_a_flood_of_keys_is_bounded_and_costs_each_the_same() -> None:
    """However many keys are refused, the newest are remembered, and the last costs no more than the first."""
    known, many = DenyCache(), 4 * deny_cache.MAX_BUCKETS
    plans = [a_plan(key=f"key {number}") for number in range(many)]
    took = []
    for start in range(0, many, deny_cache.MAX_BUCKETS):
        begun = time.process_time()
        for plan in plans[start : start + deny_cache.MAX_BUCKETS]:
            known.learn(plan, owing(plan, 1), 5.0, 5.0)
        took.append(time.process_time() - begun)
        assert len(known) == deny_cache.MAX_BUCKETS
    assert took[-1] < 8 * took[0] + 0.2
    assert known.answer(plans[-deny_cache.MAX_BUCKETS - 1], 5.1) is None
    assert known.answer(plans[-deny_cache.MAX_BUCKETS], 5.1) is not None


def test_who_is_refused_again_is_remembered_as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that keeps coming is not the first to be forgotten when others fill the memory."""
    monkeypatch.setattr(deny_cache, "MAX_BUCKETS", 2)
    known, plans = DenyCache(), [a_plan(key=key) for key in ("hammering", "other", "newcomer")]
    for plan, at in ((plans[0], 5.0), (plans[1], 5.1), (plans[0], 5.2), (plans[2], 5.3)):
        known.learn(plan, owing(plan, 1), at, at)
    assert [known.answer(plan, 5.4) is not None for plan in plans] == [True, False, True]


def test_threads_may_learn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that note refusals while others are admitted do not get in each other's way, however little room there is."""
    monkeypatch.setattr(deny_cache, "MAX_BUCKETS", 4)
    known, plans = DenyCache(), [a_plan(key=f"key {number}") for number in range(40)]
    ends = time.monotonic() + 0.3

    def keep_learning(reading: Reading) -> None:
        while time.monotonic() < ends:
            for plan in plans:
                known.learn(plan, reading, 5.0, 5.0)
                known.answer(plan, 5.1)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(keep_learning, owing(plans[0], owed)) for owed in (0, 1) * 4]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    assert len(known) <= 4


# --- against a server, on any history ---------------------------------------------------------------------------------


class Caller:
    """A store as `RedisStoreBase` makes it, over a server that is a memory store. Its clock is ours, in µs."""

    def __init__(self, server: MemoryStore, *, local: bool = True) -> None:
        self.server = server
        self.at = 0.0
        self.script = RedisStoreBase(local_refusals=local, clock=lambda: self.at / US)

    def locally(self, plan: Plan, at: float) -> Reading | None:
        self.at = at
        return self.script.locally(plan)

    def understood(self, plan: Plan, reading: Reading, sent: float, heard: float) -> Reading:
        self.at = heard
        counts = [count for charge in plan.charges for count in charge.bucket.counts]
        debts = [debt for bucket in reading.buckets for debt in bucket.before]
        head = [reading.now] + [0] * (wire._HEAD - 1)
        reply = [*head, *[part for debt, count in zip(debts, counts, strict=True) for part in divmod(debt, count)]]
        call = wire.Call([plan])
        call.sent = sent / US
        return self.script.understood(call, reply, ServerClock("Redis"))[0]

    def spend(self, plan: Plan, at: int) -> Reading:
        """A call that takes no time, at a whole microsecond, as servers count. We look at our clock a moment later."""
        reading = self.locally(plan, at + 0.3)
        return reading or self.understood(plan, self.server.spend(plan), at, at)


LIMITS = (
    "1/second",
    "2/second burst 1",
    "3/second burst 5",
    "20/second burst 2",
    "7/minute burst 3",
    "2/day",
    "999/second burst 4",
)


def a_world(rnd: random.Random) -> Callable[[], Plan]:
    """Makes requests of a few callers, under rules of several windows, some of them in shadow."""
    callers = ["a", "b", "everybody"]
    rules = [
        (Bucket(bucket_of(*rnd.sample(LIMITS, rnd.choice((1, 1, 2, 3)))).limits), rnd.random() < 0.75)
        for _ in range(rnd.choice((1, 2, 3)))
    ]
    shared = [rnd.random() < 0.3 for _ in rules]

    def request() -> Plan:
        caller, cost = rnd.choice(callers[:2]), rnd.choice((0, 1, 1, 1, 1, 2, 3, 5))
        charges = [
            Charge(f"{number} {callers[2] if shared[number] else caller}", bucket, cost, binding, f"rule{number}")
            for number, (bucket, binding) in enumerate(rules)
        ]
        asked = charges if rnd.random() < 0.7 else rnd.sample(charges, rnd.randint(1, len(charges)))
        return Plan(tuple(asked), rnd.choice(("spend",) * 20 + ("peek", "reset")))

    return request


def said(plan: Plan, reading: Reading) -> tuple[Decision, Any, int]:
    """All that a caller may see of an answer."""
    decision = decide(plan, reading)
    return decision, decision.windows, reading.now


@pytest.mark.usefixtures("_unwatched")
def test_with_and_without_the_answers_are_the_same_property() -> None:
    """Over any history, every field of every decision is the same with local refusals and without."""
    refused = local = 0
    for seed in range(SEEDS):
        rnd, clock = random.Random(seed), Clock()
        request, now = a_world(rnd), 0
        with_them, without = Caller(MemoryStore(clock)), Caller(MemoryStore(clock), local=False)
        server = with_them.server.spend
        calls: list[Plan] = []
        with_them.server.spend = lambda plan, server=server, calls=calls: calls.append(plan) or server(plan)
        wait = 0
        for _ in range(60):
            step = rnd.choice(
                (0, 0, 1, 2, rnd.randrange(2000), rnd.randrange(200_000), rnd.randrange(US), wait - 1, wait, wait + 1)
            )
            now += max(0, step)
            clock.now += max(0, step)
            plan = request()
            expected = without.spend(plan, now)
            assert said(plan, with_them.spend(plan, now)) == said(plan, expected), f"seed {seed}"
            decision = decide(plan, expected)
            wait = 0 if decision.retry_after == float("inf") else round(decision.retry_after * US)
            refused += not decision.allowed
        local += 60 - len(calls)
    assert local > refused / 4, (local, refused)


class Call(NamedTuple):
    """A request and how long it travels, in µs of our clock."""

    plan: Plan
    there: int
    back: int
    outside: bool
    """Made by somebody else, behind the store's back."""


def travelling(rnd: random.Random, request: Callable[[], Plan], *, outside: bool) -> list[tuple[int, Call]]:
    """Requests and when each is made."""
    now, calls = 0, []
    for _ in range(60):
        now += rnd.choice((0, 1, 3, rnd.randrange(3000), rnd.randrange(60_000), rnd.randrange(400_000)))
        delays = [rnd.choice((1, rnd.randrange(1, 2000), rnd.randrange(1, 80_000))) for _ in range(2)]
        calls.append((now, Call(request(), *delays, outside and rnd.random() < 0.2)))
    return calls


@pytest.mark.parametrize("outside", [False, True], ids=["alone", "with others"])
def test_nobody_is_refused_wrongly_property(outside: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """However long calls take, who is refused without asking would be refused by the server at that moment.

    The exception is a reset: one of this store until its answer has come, one by somebody else for less than a second.
    """
    local = excused = 0
    for seed in range(SEEDS):
        rnd, clock = random.Random(seed), Clock()
        begun, rate = clock.now, rnd.choice((0.9995, 1.0, 1.0, 1.0005))
        caller = Caller(MemoryStore(clock))
        # each event is (when, order, step, its arguments)
        events = [(at, n, "send", (call,)) for n, (at, call) in enumerate(travelling(rnd, a_world(rnd), outside=outside))]
        resets: dict[str, list[tuple[int, float]]] = {}
        while events:
            events.sort(key=lambda event: event[:2])
            at, order, step, (call, *more) = events.pop(0)
            clock.now = begun + int(at * rate)
            if step == "send":
                reading = None if call.outside else caller.locally(call.plan, at)
                if reading is None:
                    events.append((at + call.there, order, "serve", (call, at)))
                elif caller.server.spend(call.plan._replace(verb="peek")).admitted:
                    recent = [span for charge in call.plan.charges for span in resets.get(charge.key, [])]
                    assert any(first <= at < last for first, last in recent), f"seed {seed}"
                    excused += 1
                local += reading is not None
            elif step == "serve":
                found = caller.server.spend(call.plan)
                heard = at + call.back
                if call.plan.verb == "reset":
                    for charge in call.plan.charges:
                        resets.setdefault(charge.key, []).append((at, at + US * LONGEST if call.outside else heard))
                if not call.outside:
                    events.append((heard, order, "hear", (call, found, more[0])))
            else:
                found, sent = more
                caller.understood(call.plan, found, sent, at)
    assert local > SEEDS
    assert excused or not outside


def test_the_promised_wait_is_enough_property() -> None:
    """Who is refused without asking, waits as told and then comes again is admitted, if nobody else came."""
    local = 0
    for seed in range(SEEDS):
        rnd, clock = random.Random(seed), Clock()
        begun, caller, now = clock.now, Caller(MemoryStore(clock)), 0
        plan = a_plan(bucket_of(*rnd.sample(LIMITS, rnd.choice((1, 2)))), cost=rnd.choice((1, 1, 2)))
        for _ in range(12):
            sent, there, back = now, rnd.randrange(1, 50_000), rnd.randrange(1, 50_000)
            clock.now = begun + sent + there
            heard = sent + there + back
            decision = decide(plan, caller.understood(plan, caller.server.spend(plan), sent, heard))
            now = heard + rnd.choice((0, 1, rnd.randrange(100_000), rnd.randrange(US)))
            if decision.allowed or decision.retry_after == float("inf"):
                continue
            reading = caller.locally(plan, now)
            if reading is not None:
                local += 1
                now += round(decide(plan, reading).retry_after * US)
                clock.now = begun + now
                assert caller.locally(plan, now) is None, f"seed {seed}"
                assert caller.server.spend(plan._replace(verb="peek")).admitted, f"seed {seed}"
    assert local > SEEDS


def test_a_late_reply_after_a_reset() -> None:
    """A reset through a store shows at once, even if the reply to a call from before it comes in afterwards."""
    caller, plan = Caller(MemoryStore(Clock())), a_plan()
    caller.spend(plan, 0)
    late = caller.server.spend(plan)
    reset = plan._replace(verb="reset")
    caller.understood(reset, caller.server.spend(reset), 2000, 4000)
    caller.understood(plan, late, 1000, 5000)
    assert caller.spend(plan, 6000).admitted


@given(
    limits=st.permutations(["2/second", "3/minute", "1/second burst 2", "5/hour"]).map(lambda every: every[:3]),
    parted=st.integers(1, 3),
    enforced=st.tuples(st.booleans(), st.booleans()),
    cost=st.integers(1, 2),
    charged=st.integers(0, 8),
    later=st.floats(0, 2),
)
def test_a_plain_plan_is_answered_as_the_same_plan_is_property(
    *, limits: list[str], parted: int, enforced: tuple[bool, bool], cost: int, charged: int, later: float
) -> None:
    """Whatever is remembered of its buckets, at any time: by the same reading, or Redis has to be asked for both."""
    kinds = [bucket_of(*part) for part in (limits[:parted], limits[parted:]) if part]
    each = zip(kinds, enforced, "ab")
    charges = [Charge("", kind, cost, enforced=binds, rule=rule) for kind, binds, rule in each]
    assume(all(cost <= limit.burst for kind in kinds for limit in kind.limits))
    template, keys = PlanTemplate(charges), [f"key {place}" for place in range(len(charges))]
    plan, store, cache = template.plan(keys), MemoryStore(Clock()), DenyCache()
    for _ in range(charged):
        cache.learn(plan, store.spend(plan), 10.0, 10.2)
    found = cache.answer_plain(template.asked(keys), 10.2 + later)
    expected = cache.answer(plan, 10.2 + later)
    assert (found and whole_reading(found)) == expected
    if found is not None and expected is not None:
        assert found.source == whole_reading(found).source == expected.source == "cache"
        assert template.decide(found, None) == decide(plan, expected)
    assert cache.answer_plain(PlanTemplate(charges).asked(["another", *keys[1:]]), 10.3) is None


ALGORITHMS = ("sliding_log", "sliding_log", "fixed_window", "sliding_window", "gcra", "warm_up")


def a_mixed_world(rnd: random.Random) -> Callable[[], Plan]:
    """Makes requests of two callers, of different costs, under rules of several algorithms, whose keys nobody has used.

    Some of them wait for their turn, where that can be.
    """
    rules = [
        (
            bucket_of(
                Limit(f"{rnd.choice((1, 2, 3, 5, 9))}/second", algorithm=name, warm_up="2s" if name == "warm_up" else None)
            ),
            rnd.random() < 0.8,
        )
        for name in rnd.sample(ALGORITHMS, rnd.choice((1, 1, 2)))
    ]
    world, costs = uuid4().hex, rnd.choice(((1,), (1, 2, 2, 3), (0, 1, 4, 9)))

    def request() -> Plan:
        caller, cost, wait = rnd.choice("aab"), rnd.choice(costs), rnd.choice((0, 0, 0, 0, US // 5, 2 * US))
        charges = [
            Charge(
                f"{world}:{caller}:{number}",
                bucket,
                cost,
                binding,
                f"rule{number}",
                max_wait_us=wait if binding and bucket.algorithm.CAN_WAIT else 0,
            )
            for number, (bucket, binding) in enumerate(rules)
        ]
        return Plan(tuple(charges), rnd.choice(("spend",) * 30 + ("peek", "reset")))

    return request


class Scripting:
    """A store as `RedisStoreBase` makes it, over the script on a real Redis. Calls take no time."""

    def __init__(self, server: ScriptedServer, prefix: str, *, local: bool) -> None:
        self.server, self.prefix, self.calls = server, prefix, 0
        self.at = 0.0
        self.script = RedisStoreBase(local_refusals=local, clock=lambda: self.at / US)

    def spend(self, plan: Plan, now: int) -> Reading:
        own = plan._replace(charges=tuple([charge._replace(key=self.prefix + charge.key) for charge in plan.charges]))
        self.at = now + 0.3
        return self.script.locally(own) or self.asked(own, now)

    def asked(self, plan: Plan, now: int) -> Reading:
        self.at, self.calls = now, self.calls + 1
        call = wire.Call([plan])
        self.script.outgoing(call)
        reply = self.server.client.execute_command(*self.server.command(plan, Clock().now + now))
        return self.script.understood(call, reply, ServerClock("Redis"))[0]


def test_every_algorithm_is_the_same_with_and_without_property(scripted: ScriptedServer) -> None:
    """Over any history on a real Redis, under any algorithm, what is told is the same with local refusals and without."""
    refused = asked = 0
    for seed in range(EXAMPLES // 2):
        rnd = random.Random(seed)
        request, now, wait = a_mixed_world(rnd), 0, 0
        with_them, without = (Scripting(scripted, f"{local}:", local=local) for local in (True, False))
        for _ in range(60):
            now += max(0, rnd.choice((0, 0, 1, 2, rnd.randrange(2000), rnd.randrange(300_000), wait - 1, wait, wait + 1)))
            plan, before = request(), with_them.calls
            expected = without.spend(plan, now)
            assert said(plan, with_them.spend(plan, now)) == said(plan, expected), f"seed {seed}"
            decision = decide(plan, expected)
            wait = 0 if decision.retry_after == float("inf") else round(decision.retry_after * US)
            refused += not decision.allowed
            asked += not decision.allowed and with_them.calls > before
    assert asked < 0.75 * refused, (asked, refused)


# --- on Redis ---------------------------------------------------------------------------------------------------------


class Seconds:
    """A monotonic clock that goes on only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


KINDS: dict[str, Callable[..., Door]] = {
    "threads": lambda url, **options: Door(RedisStore(url, **options)),
    "asyncio": lambda url, **options: AsyncDoor(AsyncRedisStore(url, **options)),
}
Open = Callable[..., Door]


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def open_door(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens stores of either kind, under a clock of the test's own unless ``timed`` is False."""
    with contextlib.ExitStack() as opened:

        def open_one(server: RedisServer, *, timed: bool = True, **options: Any) -> Door:
            door = opened.enter_context(contextlib.closing(request.param(server.url, **options)))
            if timed:
                door.clock = door.store._clock = Seconds()
            return door

        yield open_one


def exhausted(door: Door, *limits: str, cost: int = 1) -> Plan:
    """A plan that was refused just now."""
    plan = a_plan(bucket_of(*limits or ("1/day",)), uuid4().hex, cost)
    while door.spend(plan).admitted:
        pass
    return plan


def test_an_attack_costs_few_calls(open_door: Open, redis_server: RedisServer) -> None:
    """Thirty-two callers at a time who are refused again and again cost less than a call per twenty refusals."""
    door, each = open_door(redis_server, timed=False), 200
    plan = exhausted(door)
    before = calls_to(redis_server)

    async def insist() -> list[bool]:
        return [(await door.store.aspend(plan, PATIENT)).admitted for _ in range(each)]

    async def crowd() -> list[list[bool]]:
        return await asyncio.gather(*[insist() for _ in range(32)])

    if isinstance(door, AsyncDoor):
        admitted = door.run(crowd())
    else:
        with ThreadPoolExecutor(32) as pool:
            admitted = list(pool.map(lambda _: [door.spend(plan).admitted for _ in range(each)], range(32)))
    assert admitted == [[False] * each] * 32
    assert calls_to(redis_server) - before < 0.05 * 32 * each


def test_redis_is_asked_again_every_second(open_door: Open, redis_server: RedisServer) -> None:
    """However often somebody is refused, Redis is asked once in a second of our clock, no more and no less."""
    door = open_door(redis_server)
    plan, start = exhausted(door), door.clock.now
    before = calls_to(redis_server)
    for step in range(1, 1050):
        door.clock.now = start + step / 100
        assert not door.spend(plan).admitted
    assert calls_to(redis_server) - before == 10


def test_every_refusal_is_asked_for_where_that_is_wanted(open_door: Open, redis_server: RedisServer) -> None:
    """A store without local refusals asks Redis for each."""
    door = open_door(redis_server, local_refusals=False)
    plan = exhausted(door)
    before = calls_to(redis_server)
    assert not any(door.spend(plan).admitted for _ in range(20))
    assert calls_to(redis_server) - before == 20


def test_a_reset_shows_at_once(open_door: Open, redis_server: RedisServer) -> None:
    """After a reset through the same store the caller is admitted again, and refused again when it has spent that."""
    door = open_door(redis_server)
    plan = exhausted(door, "2/day")
    for _ in range(3):
        assert not door.spend(plan).admitted
        door.spend(plan._replace(verb="reset"))
        assert [door.spend(plan).admitted for _ in range(4)] == [True, True, False, False]


def test_a_reset_by_somebody_else_shows_within_a_second(open_door: Open, redis_server: RedisServer) -> None:
    """A reset through another store is not seen at once, but after a second."""
    door, elsewhere = open_door(redis_server), open_door(redis_server)
    plan = exhausted(door)
    elsewhere.spend(plan._replace(verb="reset"))
    door.clock.now += 0.99
    assert not door.spend(plan).admitted
    door.clock.now += 0.01
    assert door.spend(plan).admitted


def test_a_smaller_request_is_asked_for(open_door: Open, redis_server: RedisServer) -> None:
    """Who was refused for five is asked for again with one, and admitted where one fits."""
    door = open_door(redis_server)
    key = exhausted(door, "12/day", cost=5).charges[0].key
    one, five = (a_plan(bucket_of("12/day"), key, cost) for cost in (1, 5))
    assert [door.spend(plan).admitted for plan in (five, one, five, one, five, one)] == [False, True, False, True, False, False]


def test_refusals_hold_while_redis_is_gone(open_door: Open, own_redis: RedisServer) -> None:
    """While Redis is stopped, who was refused is refused until the promised moment, for a second at most; others fail."""
    door = open_door(own_redis)
    for_long, start = exhausted(door), door.clock.now
    briefly = exhausted(door, "1/second")
    promised = decide(briefly, door.spend(briefly)).retry_after
    own_redis.kill()
    for passed, plan in ((0.0, briefly), (promised / 2, briefly), (0.5, for_long), (0.999, for_long)):
        door.clock.now = start + passed
        assert not door.spend(plan).admitted
    for passed, plan in ((promised + 0.001, briefly), (0.5, a_plan()), (1.0, for_long)):
        door.clock.now = start + passed
        with pytest.raises(StoreError):
            door.spend(plan)


def a_full_log(door: Door, cost: int = 1) -> Plan:
    """A plan that was refused just now by a log of which each entry is of the cost."""
    plan = a_plan(bucket_of(Limit("10/minute", algorithm="sliding_log")), uuid4().hex, cost)
    while door.spend(plan).admitted:
        pass
    return plan


@pytest.mark.parametrize("cost", [1, 3])
def test_a_full_log_is_not_asked_again(open_door: Open, redis_server: RedisServer, cost: int) -> None:
    """Who is refused by a log comes back in vain a thousand times in a second, and Redis is asked once."""
    door = open_door(redis_server)
    plan, start = a_full_log(door, cost), door.clock.now
    before = calls_to(redis_server)
    for step in range(1, 1000):
        door.clock.now = start + step / 1000
        assert not door.spend(plan).admitted
    assert calls_to(redis_server) == before
    door.clock.now = start + 1
    assert not door.spend(plan).admitted
    assert calls_to(redis_server) == before + 1


def test_a_greater_cost_is_told_its_own_wait(open_door: Open, redis_server: RedisServer) -> None:
    """What a log refused to one it refuses to five as well, but for longer: how long is asked once, and then known."""
    door = open_door(redis_server)
    one = a_full_log(door)
    five = a_plan(one.charges[0].bucket, one.charges[0].key, 5)
    first = decide(five, door.spend(five))
    before = calls_to(redis_server)
    assert decide(five, door.spend(five)).retry_after == first.retry_after > 0
    never = a_plan(one.charges[0].bucket, one.charges[0].key, 11)
    assert decide(never, door.spend(never)).retry_after == float("inf")
    assert calls_to(redis_server) == before


@pytest.mark.parametrize("style", ["x-ratelimit", "x-ratelimit-windows", "draft-11"])
@pytest.mark.parametrize("kind", SITES, ids=attrgetter("door"))
def test_a_client_cannot_tell_the_difference(redis_server: RedisServer, kind: type[Site], style: str) -> None:
    """A refusal that is repeated is the same response and the same decision, but for the time that has passed."""
    store = AsyncRedisStore(redis_server.url) if kind is ASGISite else RedisStore(redis_server.url)
    clock = store._clock = Seconds()
    seen: list[Decision] = []
    rules = [Rule("api", "2/day", "9/hour", path="/"), Rule("shady", "1/minute", shadow=True, path="/**")]
    options = {"store": store, "headers": [style], "key_prefix": uuid4().hex, "timeout": PATIENT}
    denied = kind.answering(429, [("Content-Type", "text/plain")], b"no", seen)
    with kind(*rules, **options) as it, kind(*rules, **options, on_denied=denied) as told:
        assert it.statuses(2) == [200, 200]
        asked = it.ask()
        before = calls_to(redis_server)
        assert asked == it.ask()
        assert (asked.status, asked.json()["violated-policies"]) == (429, ["api"])
        clock.now += 1
        told.ask()
        for passed in (0.25, 0.5, 0.9):
            told.ask()
            clock.now = 101 + passed
            assert asked.wait - 2 <= it.ask().wait <= asked.wait
        assert calls_to(redis_server) - before == 1
        first, second, *later = seen
        assert first == second
        for decision in later:
            waited = first.retry_after - decision.retry_after
            assert 0 < waited <= 0.9
            assert decision.reset_after == pytest.approx(first.reset_after - waited, abs=1e-5)
            timeless = {"retry_after": 0, "reset_after": 0}
            assert replace(decision, **timeless) == replace(first, **timeless)
