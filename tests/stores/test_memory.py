"""The memory store: how it stays bounded, whom it drops, and what a stepping clock and threads do to it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from limitgate import Decision, Limit, Limiter, LimitGateWSGI, MemoryStore, Rule, StoreError
from limitgate.limits.bucket import bucket_of
from limitgate.limits.decision import decide
from limitgate.limits.plan import Adjustment, Charge, Plan, Reading, Verb, refund
from limitgate.stores import memory
from tests.support.clock import Clock
from tests.support.doors import wsgi_reply
from tests.support.stored import buckets


class Subject:
    """A small memory store and its clock; ``hit`` admits or not."""

    def __init__(self, max_buckets: int) -> None:
        self.clock = Clock()
        self.store = MemoryStore(self.clock, max_buckets=max_buckets)

    def ask(self, key: str, limit: str = "2/day", cost: int = 1, verb: Verb = "spend") -> Decision:
        return self.plan(key, limit=limit, cost=cost, verb=verb)

    def plan(self, *keys: str, limit: str = "2/day", cost: int = 1, verb: Verb = "spend") -> Decision:
        """Carry out one plan over several buckets."""
        plan = Plan(tuple(Charge(key, bucket_of(limit), cost, enforced=True, rule=None) for key in keys), verb)
        return decide(plan, self.store.spend(plan))

    def hit(self, key: str, limit: str = "2/day", cost: int = 1) -> bool:
        return self.ask(key, limit, cost).allowed

    def used(self, key: str, limit: str = "2/day") -> int:
        return self.ask(key, limit, verb="peek").windows[0].used

    def kept(self) -> set[str]:
        return set(buckets(self.store))


def flood(subject: Subject, size: int, limit: str = "2/day", cost: int = 1) -> list[bool]:
    """New keys, one hit each."""
    return [subject.hit(f"new {number}", limit, cost) for number in range(size)]


@pytest.mark.parametrize("most", [1, 2, 7, 100])
def test_never_more_buckets_than_allowed(most: int) -> None:
    """However many keys come, no more buckets are kept than allowed."""
    subject = Subject(most)
    for number in range(10 * most):
        subject.hit(f"key {number}")
        assert len(subject.store) == min(number + 1, most)


def test_the_bound_is_checked() -> None:
    """A store for no buckets makes no sense; a million is the default."""
    with pytest.raises(ValueError, match="expected at least 1"):
        MemoryStore(max_buckets=0)
    assert repr(MemoryStore()) == "MemoryStore(max_buckets=1000000)"
    for wrong in (1.5, "many", None, True):
        with pytest.raises(TypeError, match=r"max_buckets is .*, expected a whole number"):
            MemoryStore(max_buckets=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("clock", [time.time, time.time_ns, time.monotonic, time.perf_counter, 17])
def test_a_clock_of_another_unit_is_told(clock: Any) -> None:
    """Seconds and nanoseconds are what Python's own clocks give; limits would last a million times as long, or a thousandth."""
    with pytest.raises(TypeError, match=r"expected a callable that returns Unix time in whole microseconds"):
        MemoryStore(clock)


def test_a_clock_that_gives_no_whole_number_is_told() -> None:
    """It is found at the first charge, through every way that leads there."""
    store = MemoryStore(lambda: 1_700_000_000.5)
    told = re.escape("clock returned 1700000000.5, expected a callable that returns Unix time in whole microseconds")
    for limits in (["5/second"], ["5/second", Limit("9/minute", algorithm="sliding_log")]):
        with Limiter(store) as limiter, pytest.raises(TypeError, match=told):
            limiter.hit("user", *limits)
    with pytest.raises(TypeError, match=told):
        wsgi_reply(LimitGateWSGI(lambda _, __: [], rules=[Rule("api", "5/second")], store=store))


def test_asking_takes_no_room() -> None:
    """Only what is owed is kept: a peek, a refusal and a cost of nothing leave no bucket."""
    subject = Subject(5)
    subject.ask("peek", verb="peek")
    subject.hit("too much", cost=3)
    subject.hit("nothing", cost=0)
    assert len(subject.store) == 0


@pytest.mark.parametrize("verb", ["peek", "look"])
def test_asking_a_full_store_drops_no_bucket(verb: Verb) -> None:
    """Whatever is asked about, and what it says is what a hit would give."""
    subject = Subject(3)
    for owed in (1, 2, 3):
        subject.hit(f"owes {owed}", "3/day", owed)
    for _ in range(2):
        assert [subject.ask(f"new {number}", "3/day", verb=verb).remaining for number in range(9)] == [3] * 9
    assert [subject.used(f"owes {owed}", "3/day") for owed in (1, 2, 3)] == [1, 2, 3]
    for key in ("owes 1", "owes 2"):
        subject.hit(key, "3/day", 4 - int(key[-1]) - 1)
        subject.hit(key, "3/day")
        assert not subject.hit(key, "3/day")
    assert subject.hit("first newcomer", "3/day", 2)
    asked = [subject.ask("second newcomer", "3/day", cost, verb).allowed for cost in (2, 1)]
    assert asked == [subject.hit("second newcomer", "3/day", cost) for cost in (2, 1)] == [False, True]


def test_expired_buckets_go_first() -> None:
    """A bucket that is full again makes room before one that owes anything."""
    subject = Subject(3)
    subject.hit("long", "10/day", cost=5)
    subject.hit("short", "10/second")
    subject.hit("least", "10/day")
    subject.clock.advance(1)
    subject.hit("new", "10/day")
    assert (subject.used("long", "10/day"), subject.used("least", "10/day")) == (5, 1)


def test_expired_buckets_are_let_go() -> None:
    """A store that was large once gets small again as newcomers arrive, a bounded number at a time."""
    subject = Subject(10_000)
    flood(subject, 5000, "10/second")
    subject.clock.advance(1)
    for number in range(400):
        subject.hit(f"newer {number}", "10/day")
    assert 400 <= len(subject.store) <= 600


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_the_one_that_owes_least_goes_next(order: tuple[int, ...]) -> None:
    """Where nothing has expired, the bucket that is soonest full again makes room."""
    subject = Subject(3)
    for owed in order:
        subject.hit(f"owes {owed}", "10/day", owed)
    subject.hit("new", "10/day", 5)
    assert [subject.used(f"owes {owed}", "10/day") for owed in (3, 2, 1)] == [3, 2, 0]


def test_what_was_spent_later_counts() -> None:
    """Who goes is decided by what is owed now, not by what was owed when the bucket came."""
    subject = Subject(2)
    subject.hit("first", "10/day", 1)
    subject.hit("second", "10/day", 2)
    subject.hit("first", "10/day", 4)
    subject.hit("new", "10/day", 9)
    assert subject.used("first", "10/day") == 5


def test_a_reset_bucket_makes_room_first() -> None:
    """After a reset a bucket owes nothing, so it goes before those that owe something."""
    subject = Subject(2)
    subject.hit("much", "10/day", 9)
    subject.hit("little", "10/day", 1)
    subject.ask("much", "10/day", verb="reset")
    subject.hit("new", "10/day")
    assert subject.used("little", "10/day") == 1


def test_a_reset_bucket_no_longer_refuses() -> None:
    """A bucket that refused and was reset makes room for newcomers, who then share nothing."""
    subject = Subject(1)
    subject.hit("exhausted", cost=2)
    assert subject.hit("in overflow", cost=2)
    subject.ask("exhausted", verb="reset")
    assert subject.hit("new", cost=2)


def test_a_flood_of_new_keys_drops_no_exhausted_bucket() -> None:
    """Whoever is refused stays refused, however many new keys come."""
    subject = Subject(100)
    exhausted = [f"exhausted {number}" for number in range(60)]
    for key in exhausted:
        subject.hit(key, cost=2)
    flood(subject, 5000)
    assert not any(subject.hit(key) for key in exhausted)
    assert len(subject.store) <= 100


def test_a_lowered_limit_that_refuses_is_not_dropped() -> None:
    """A bucket that refuses under a lowered limit is as safe from a flood as any other that refuses."""
    subject = Subject(10)
    subject.hit("lowered", "10/day", 5)
    assert not subject.hit("lowered", "5/day")
    flood(subject, 1000, "10/day", 6)
    assert not subject.hit("lowered", "5/day")


def test_one_refusing_window_is_enough_to_stay() -> None:
    """A bucket of several limits stays while any one of them refuses."""
    subject = Subject(10)
    limiter = Limiter(subject.store)
    limits = "3/day", "1000/hour", "1000000/day"
    limiter.hit("exhausted", *limits, cost=3)
    flood(subject, 1000, "1000/day")
    assert not limiter.hit("exhausted", *limits).allowed


def test_newcomers_share_one_bucket_where_all_refuse() -> None:
    """Where every bucket refuses, newcomers together get what one bucket holds."""
    subject = Subject(3)
    for number in range(3):
        subject.hit(f"exhausted {number}", cost=2)
    assert sum(flood(subject, 50)) == 2
    assert len(subject.store) == 3


def test_newcomers_get_their_own_again_when_there_is_room() -> None:
    """Sharing ends when the first bucket no longer refuses."""
    subject = Subject(3)
    for number in range(6):
        subject.hit(f"exhausted {number % 3}")
    assert sum(flood(subject, 50)) == 2
    subject.clock.advance(43_200)
    assert [subject.hit(f"newer {number}", cost=2) for number in range(3)] == [True] * 3
    assert subject.used("newer 2") == 2


def test_room_is_found_behind_many_that_refuse() -> None:
    """Newcomers find the buckets that may go, even behind many that may not."""
    subject = Subject(1000)
    for number in range(990):
        subject.hit(f"exhausted {number}", "2/hour", cost=2)
    for number in range(10):
        for _ in range(9):
            subject.hit(f"idle {number}", "10/day")
    admitted = [subject.hit(f"new {number}", "2/day", cost=2) for number in range(40)]
    assert sum(admitted[-5:]) == 0
    assert sum(admitted) >= 10
    assert not any(key.startswith("idle") for key in subject.kept())


def test_a_plan_may_need_room_for_several() -> None:
    """Buckets of one plan may go beyond the bound, but never by more than the plan has, and the next one mends it."""
    subject = Subject(3)
    for number in range(50):
        assert subject.plan(f"a {number}", f"b {number}", f"c {number}", f"d {number}", limit="10/day").allowed
        assert len(subject.store) <= 3 + 4
    subject.hit("new", "10/day")
    assert len(subject.store) <= 3


def test_making_room_inside_a_plan_loses_no_bucket() -> None:
    """A plan whose own newcomer needs the room of its other bucket leaves no bucket that can never be dropped."""
    subject = Subject(1)
    subject.hit("known", "10/day")
    subject.plan("known", "new", limit="10/day")
    subject.clock.advance(86_400)
    assert subject.hit("first", "10/day")
    assert subject.hit("second", "10/day", cost=10), "it found no room, though nobody refuses"


class Steps:
    """Counts the steps of the hand that looks for room, and the buckets that are dropped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("_look", "_drop", "_drop_least"):
            monkeypatch.setattr(MemoryStore, name, self._counted(getattr(MemoryStore, name)))

    def _counted(self, function):
        def counted(*arguments):
            self.count += 1
            return function(*arguments)

        return counted

    def of(self, subject: Subject, key: str, limit: str = "2/day") -> int:
        self.count = 0
        subject.hit(key, limit)
        return self.count


@pytest.mark.parametrize("case", ["expired", "refusing", "grown", "no longer refusing", "from the future"])
def test_the_work_of_one_request_is_bounded(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """However many buckets have expired, refuse, have changed or are of the future, one request looks at a few only."""
    subject, steps, size = Subject(3000), Steps(monkeypatch), 3000
    for number in range(size):
        subject.hit(f"key {number}", cost=2 if "refusing" in case else 1)
    if case == "grown":
        for number in range(size):
            subject.hit(f"key {number}", "20/day")
    if case == "no longer refusing":
        flood(subject, 200)
    if case in {"expired", "no longer refusing"}:
        subject.clock.advance(86_400)
    if case == "from the future":
        subject.clock.advance(-86_400)
    counts = [steps.of(subject, f"newer {number}") for number in range(200)]
    assert max(counts) <= 200
    assert max(counts) > 1, "nothing was there to do"


def test_newcomers_that_find_no_room_stop_looking_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the hand has gone round and met nobody that may go, a newcomer has it look at one bucket, not at sixty."""
    subject, steps = Subject(1000), Steps(monkeypatch)
    for number in range(1000):
        subject.hit(f"exhausted {number}", cost=2)
    counts = [steps.of(subject, f"newer {number}") for number in range(100)]
    assert max(counts) <= 66
    assert max(counts[20:]) <= 1
    subject.ask("exhausted 500", verb="reset")
    flood(subject, 1100)
    assert "exhausted 500" not in subject.kept()


def test_a_known_key_costs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of a known key looks at no other bucket at all."""
    subject, steps = Subject(1000), Steps(monkeypatch)
    flood(subject, 1000, "10/day")
    assert [steps.of(subject, f"new {number}", "10/day") for number in range(1000)] == [0] * 1000


@pytest.mark.parametrize("keys", [1, 5, 20])
def test_resets_and_hits_leave_nothing_behind(keys: int) -> None:
    """However often buckets are emptied and filled, what is kept beside them does not grow."""
    subject = Subject(10)
    for cycle in range(3000):
        key = f"key {cycle % keys}"
        subject.hit(key, cost=1 + cycle % 2)
        subject.ask(key, verb="reset")
        if not cycle % 7:
            subject.clock.advance(86_400)
    assert len(subject.store) == len(subject.kept()) <= 10
    assert len(subject.store._layouts.known) <= 2
    assert len(subject.store._pool) <= 16
    assert not subject.store._beside


OPERATIONS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 11), min_size=1, max_size=3, unique=True),
        st.sampled_from(("2/minute", "2/minute", "4/minute", "1/second", "3/minute burst 1")),
        st.sampled_from(("spend", "spend", "spend", "peek", "reset")),
        st.integers(0, 3),
        st.sampled_from((0, 0, 1, 29, 30, 60, 3600, -1, -60, -3600)),
    ),
    max_size=60,
)


@given(most=st.integers(1, 6), operations=OPERATIONS)
@example(most=1, operations=[([0], "2/minute", "spend", 1, 0), ([0, 1], "2/minute", "spend", 1, 0)])
@example(most=2, operations=[([0], "2/minute", "spend", 1, 0), ([0, 2], "2/minute", "spend", 1, -60)])
def test_every_bucket_can_be_dropped_some_day_property(most: int, operations: list) -> None:
    """Through any history the bound holds but for one plan's charges, and when all has expired all makes room."""
    subject = Subject(most)
    for keys, limit, verb, cost, wait in operations:
        subject.clock.advance(wait)
        subject.plan(*[f"key {number}" for number in keys], limit=limit, cost=cost, verb=verb)
        assert len(subject.store) <= most + 2
    subject.clock.advance(86_400)
    for number in range(8):
        subject.hit(f"new {number}", "10/day")
    assert subject.kept() < {f"new {number}" for number in range(9)}
    assert len(subject.store) == most


@given(most=st.integers(1, 6), operations=OPERATIONS)
def test_whoever_is_refused_stays_refused_property(most: int, operations: list) -> None:
    """While the clock goes forward, a bucket of one's own that refuses does so until the promised moment."""
    subject, promised = Subject(most), {}
    for keys, _, _, cost, wait in operations:
        subject.clock.advance(abs(wait))
        for key in map(str, keys):
            decision = subject.ask(key, "2/minute", cost=min(cost, 2))
            if subject.clock.now < promised.get(key, 0) and cost:
                assert not decision.allowed
            if key in subject.kept():
                refused = subject.ask(key, "2/minute", verb="peek")
                promised[key] = subject.clock.now + round(refused.retry_after * 1_000_000)


@pytest.mark.parametrize("back", [1, 59, 60, 3600, 86_400 * 365])
def test_a_clock_that_steps_back_locks_nobody_out(back: int) -> None:
    """After a step back, an exhausted key waits as long as it would have, and no longer."""
    subject = Subject(10)
    subject.hit("key", "2/minute", 2)
    subject.clock.advance(-back)
    assert subject.ask("key", "2/minute").retry_after == 30
    assert subject.store.clock_steps == 1
    subject.clock.advance(29.999_999)
    assert not subject.hit("key", "2/minute")
    subject.clock.advance(us=1)
    assert subject.hit("key", "2/minute")
    assert subject.store.clock_steps == 1


def test_a_swinging_clock_earns_nothing() -> None:
    """A clock that swings back and forth pays back no second more than once."""
    subject = Subject(10)
    subject.hit("key", "2/minute", 2)
    for _ in range(50):
        subject.clock.advance(-10)
        assert subject.ask("key", "2/minute").retry_after == 30
        subject.clock.advance(10)
        assert subject.ask("key", "2/minute").retry_after == 20
    subject.clock.advance(20)
    assert subject.hit("key", "2/minute")


def test_newcomers_find_room_after_a_step_back() -> None:
    """After a step back, too, buckets that refuse nobody make room: newcomers get their own and are not locked out."""
    subject = Subject(3)
    flood(subject, 3, "10/minute")
    subject.clock.advance(-3600)
    assert [subject.hit(f"newer {number}", "10/minute", 10) for number in range(3)] == [True] * 3


def test_exhausted_buckets_make_room_again_after_a_step_back() -> None:
    """After a step back, newcomers wait no longer than one full-bucket time for those that refused."""
    subject = Subject(3)
    for number in range(3):
        subject.hit(f"exhausted {number}", "2/minute", 2)
    assert sum(flood(subject, 10, "2/minute")) == 2
    subject.clock.advance(-86_400)
    flood(subject, 10, "2/minute")
    subject.clock.advance(60)
    assert [subject.hit(f"newer {number}", "2/minute", 2) for number in range(3)] == [True] * 3


def test_the_shared_bucket_survives_a_step_back() -> None:
    """Newcomers that share a bucket are not locked out by a step back either."""
    subject = Subject(1)
    subject.hit("exhausted", "1/day")
    assert subject.hit("new", "2/minute", 2)
    subject.clock.advance(-3600)
    assert subject.ask("new", "2/minute").retry_after == 30
    subject.clock.advance(30)
    assert subject.hit("newer", "2/minute")


def test_the_default_clock_is_the_systems() -> None:
    """Without a clock of its own a store reads the system's, in Unix microseconds."""
    plan = Plan((Charge("key", bucket_of("1/second"), 1, enforced=True, rule=None),))
    before, reading, after = time.time_ns(), MemoryStore().spend(plan), time.time_ns()
    assert before // 1000 <= reading.now <= after // 1000


@pytest.fixture
def _hasty_threads() -> Iterator[None]:
    """Threads change as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_hasty_threads")
def test_threads_share_a_bucket() -> None:
    """Under many threads exactly the limit is admitted."""
    subject = Subject(10)

    def visit(_: int) -> int:
        return sum(subject.hit("shared", "2400/day") for _ in range(200))

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(visit, range(16))) == 2400


@pytest.mark.usefixtures("_hasty_threads")
def test_threads_share_a_store() -> None:
    """Under many threads exactly the limit is admitted, the bound holds, and nothing is lost."""
    subject = Subject(20)

    def visit(thread: int) -> int:
        admitted = 0
        for number in range(120):
            admitted += subject.hit("shared", "100/day")
            subject.hit(f"own {thread} {number}", "10/day")
            if not number % 50:
                subject.ask(f"own {thread} {number}", "10/day", verb="reset")
        return admitted

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(visit, range(16))) == 100
    assert len(subject.store) == 20
    assert len(subject.kept()) == 20


@pytest.mark.parametrize("turns", [3, 1_000])
def test_a_thread_lets_others_run_while_one_of_them_is_in_the_midst_of_a_call(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the lock: it would be given it in its sleep, for others to run into. In the end it does."""
    inside, go_on, slept = Event(), Event(), list[float]()

    def clock() -> int:
        inside.set()
        return 10**15 if go_on.wait(60) else 0

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == turns:
            go_on.set()
            if turns == 3:
                other.join()

    store = MemoryStore(clock)
    other = Thread(target=store.spend, args=[a_plan("key", "1/day")])
    other.start()
    assert inside.wait(60)
    monkeypatch.setattr(memory, "time", SimpleNamespace(sleep=sleep))
    assert not store.spend(a_plan("key", "1/day")).admitted
    assert slept == [0] * turns
    other.join()


def test_a_bucket_moved_while_its_plan_is_carried_out_still_expires() -> None:
    """Where a known bucket and new ones are charged together, each expires in its time."""
    clock = Clock()
    store = MemoryStore(clock, max_buckets=4000)
    bucket = bucket_of("60/minute")
    for number in range(400):
        known = Charge(f"client {number % 40}", bucket, 1, enforced=True, rule=None)
        fresh = Charge(f"client {number % 40} path {number}", bucket, 1, enforced=True, rule=None)
        store.spend(Plan((known, fresh)))
        clock.advance(0.4)
    clock.advance(3600)
    for number in range(100):
        store.spend(Plan((Charge(f"late {number}", bucket, 1, enforced=True, rule=None),)))
    assert len(store) == 100


def test_the_child_of_a_fork_is_not_locked_out() -> None:
    """A fork while another thread is in the store leaves the child a store that works."""
    store = MemoryStore()
    with store._lock:
        child = os.fork()
        if not child:
            os._exit(0 if store._lock.acquire(timeout=5) else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def crowded() -> Limiter:
    """A limiter on a store that is full of exhausted buckets, of which none may go."""
    limiter = Limiter(MemoryStore(Clock(), max_buckets=5))
    for number in range(10):
        limiter.hit(f"client {number}", "1/day")
    return limiter


def test_where_there_is_no_room_a_ban_is_for_its_key_alone() -> None:
    """Newcomers share what they use, but not that one of them is banned."""
    limiter = crowded()
    limiter.ban("mallory", 60)
    assert not limiter.hit("mallory", "5/hour").allowed
    assert limiter.hit("alice", "5/hour").allowed
    limiter.pardon("mallory")
    assert limiter.hit("mallory", "5/hour").allowed


def test_where_there_is_no_room_each_name_has_its_own_limits() -> None:
    """What is configured under one name is not found under another."""
    limiter = crowded()
    limiter.configure("one", "1/minute")
    limiter.configure("two", "2/minute")
    assert [limiter.configuration(name) for name in ("one", "two", "three")] == [
        (Limit("1/minute"),),
        (Limit("2/minute"),),
        None,
    ]


def test_no_flood_drops_what_is_configured() -> None:
    """Exhausted buckets are not kept at the price of the limits themselves."""
    limiter = Limiter(MemoryStore(Clock(), max_buckets=5))
    limiter.configure("one", "1/minute")
    for number in range(20):
        limiter.hit(f"client {number}", "1/day")
    assert limiter.configuration("one") == (Limit("1/minute"),)


# --- buckets that refuse what was last asked of them ------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["10/minute", "10 per 9 minutes burst 10"])
def test_a_bucket_that_refuses_a_cost_above_one_is_not_dropped(limit: str) -> None:
    """Whoever pays ten at a time gets ten in a full store, too: a flood does not drop a bucket that refuses ten."""
    subject, passed = Subject(1000), 0
    for second in range(59):
        passed += 10 * subject.hit("payer", limit, 10)
        for number in range(50):
            subject.hit(f"new {second} {number}", "100/hour")
        subject.clock.advance(1)
    assert passed == 10


def test_a_bucket_that_refused_more_than_it_was_charged_is_not_dropped() -> None:
    """A refusal counts as asked: who was told to wait for ten has to wait, though one would fit."""
    subject = Subject(10)
    assert subject.hit("payer", "10/hour", 3)
    assert not subject.hit("payer", "10/hour", 10)
    flood(subject, 500, "10/hour")
    assert not subject.hit("payer", "10/hour", 10)


def test_a_lesser_cost_does_not_hide_that_a_greater_one_is_refused() -> None:
    """Whoever is refused ten and then asks for one is refused ten still, however many others come."""
    subject = Subject(10)
    assert subject.hit("payer", "20/hour", 10)
    assert subject.hit("payer", "20/hour", 5)
    assert not subject.hit("payer", "20/hour", 10)
    assert subject.hit("payer", "20/hour", 1)
    flood(subject, 500, "20/hour")
    assert not subject.hit("payer", "20/hour", 10)


def test_a_cost_that_never_fits_keeps_no_bucket() -> None:
    """Asking for more than the burst does not make a bucket stay."""
    subject = Subject(10)
    subject.hit("key", "10/hour")
    assert not subject.hit("key", "10/hour", 11)
    flood(subject, 500, "10/hour", 2)
    assert "key" not in subject.kept()


def test_a_bucket_may_go_when_what_was_refused_fits_again() -> None:
    """A bucket makes room as soon as the cost fits that it refused, though it still owes something."""
    subject = Subject(1)
    for _ in range(9):
        subject.hit("payer", "10/hour")
    assert not subject.hit("payer", "10/hour", 3)
    subject.clock.advance(719)
    assert subject.ask("new", "10/hour").limit == 10
    assert "payer" in subject.kept()
    subject.clock.advance(1)
    subject.hit("new", "10/hour")
    assert subject.kept() == {"new"}


# --- what a million buckets cost --------------------------------------------------------------------------------------


def a_plan(key: str, *limits: Limit | str, cost: int = 1) -> Plan:
    return Plan((Charge(key, bucket_of(*limits), cost, enforced=True, rule=None),))


ALL = [
    ("5/second", "100/minute", "2000/day"),
    (Limit("9/day", algorithm="fixed_window"),),
    (Limit("9/day", algorithm="sliding_window"),),
    (Limit("9/day", algorithm="sliding_log"),),
    (Limit("1/minute", warm_up=60),),
]


def test_the_garbage_collector_has_no_buckets_to_look_at() -> None:
    """However many buckets there are, the collector tracks no more objects than with few."""
    gc.collect()
    # Objects of other tests may be freed meanwhile.
    before = set(map(id, gc.get_objects()))

    def tracked(size: int) -> int:
        stores = [MemoryStore(Clock()) for _ in ALL]
        for store, limits in zip(stores, ALL):
            for number in range(size):
                store.spend(a_plan(f"key {number}", *limits))
        gc.collect()
        assert [len(store) for store in stores] == [size] * len(ALL)
        # Since Python 3.14 the collector tracks every dict, but still none of these keys and values.
        assert sys.version_info >= (3, 14) or not any(gc.is_tracked(shard) for store in stores for shard in store._shards)
        return sum(id(each) not in before for each in gc.get_objects())

    assert tracked(1000) <= tracked(200) + 200


def test_no_step_of_the_clock_touches_many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step back one call looks at a few buckets, however many there are, and in time all have been looked at."""
    subject, size = Subject(5000), 3000
    for number in range(size):
        subject.hit(f"key {number}", "2/minute")
    subject.clock.advance(-86_400)
    steps, most = Steps(monkeypatch), 0
    for number in range(4 * size):
        most = max(most, steps.of(subject, f"newer {number}", "2/minute"))
        subject.clock.advance(us=20_000)
    assert most <= 200
    assert not any(key.startswith("key") for key in subject.kept())
    assert subject.store.clock_steps == size


def test_no_dictionary_of_buckets_gets_large() -> None:
    """However many buckets are allowed, Python never has to make a large dictionary larger at once."""
    for most in (1, 4096, 1_000_000, 10_000_000):
        assert most / len(MemoryStore(max_buckets=most)._shards) <= 4096
    assert len(MemoryStore(max_buckets=10**15)._shards) == 4096


def test_expired_buckets_make_up_a_part_at_most() -> None:
    """With newcomers only, of whom nobody comes back, what is kept is at most half as much again as what lives."""
    subject = Subject(1_000_000)
    for number in range(20_000):
        subject.hit(f"key {number}", "1000/second")
        subject.clock.advance(us=1)
    assert len(subject.store) <= 3000


def test_limits_that_no_bucket_has_any_more_are_forgotten() -> None:
    """A store keeps no limits that were asked once, with which nothing is counted any more."""
    store = MemoryStore(clock := Clock(), max_buckets=100)
    for count in range(1, 2000):
        store.spend(a_plan(f"key {count}", f"{count}/second"))
        store.spend(a_plan(f"key {count}", f"{count}/second", f"{count}/minute"))
        clock.advance(0.01)
    assert len(store._layouts.known) <= len(store) + 1
    assert len(store._layouts.numbered) <= 102
    uses = Counter(bucket[2] for bucket in buckets(store).values())
    assert {bucket: layout.uses for bucket, layout in store._layouts.known.items()} == uses


def test_buckets_asked_in_part_share_what_they_have_in_common() -> None:
    """Asking for some of a bucket's limits only makes no limits of its own for each bucket."""
    store = MemoryStore(Clock())
    for number in range(50):
        store.spend(a_plan(f"key {number}", "9/minute", "99/day"))
        store.spend(a_plan(f"key {number}", "9/minute"))
    assert len(store._layouts.known) <= 2


@pytest.mark.parametrize("limit", ["1000000/second", "999999/day burst 9999999"])
def test_a_debt_of_more_than_64_bits_is_kept(limit: str) -> None:
    """What is owed is exact, however many ticks that are, and goes when it has expired."""
    subject = Subject(10)
    plan, store, ticks = a_plan("key", limit), subject.store, 2**64
    lease = Adjustment(0, subject.clock.now, [-ticks], [0])
    store.spend(Plan((plan.charges[0]._replace(cost=0, adjustment=lease),), "adjust"))
    assert store.spend(plan._replace(verb="peek")).buckets[0].before[0] == ticks
    assert store._beside
    store.spend(plan._replace(verb="reset"))
    assert not store._beside
    store.spend(Plan((plan.charges[0]._replace(cost=0, adjustment=lease),), "adjust"))
    subject.clock.advance(us=2**52)
    flood(subject, 30, "10/day")
    assert "key" not in subject.kept()
    assert not store._beside


# --- calls in the midst of others -------------------------------------------------------------------------------------


def test_nothing_is_logged_under_the_lock(caplog: pytest.LogCaptureFixture) -> None:
    """A handler of log lines may ask the store: that the clock stepped back is told when the call is over."""
    subject, seen = Subject(10), []

    class Asking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(subject.hit("by the handler"))

    subject.hit("key")
    subject.clock.advance(-3600)
    handler = Asking()
    logging.getLogger("limitgate").addHandler(handler)
    try:
        subject.hit("key")
    finally:
        logging.getLogger("limitgate").removeHandler(handler)
    assert seen == [True]


def used_of(store: MemoryStore, plan: Plan) -> int:
    peek = plan._replace(verb="peek")
    return decide(peek, store.spend(peek)).windows[0].used


class Interrupted:
    """A store whose clock calls it back once, as a signal handler or a finalizer might, under a limit of ten a day."""

    def __init__(self) -> None:
        self.store = MemoryStore(self.clock)
        self.calls: list[Plan] = []
        self.got: list[Reading | StoreError] = []
        self.plan = a_plan("key", "10/day", cost=4)

    def clock(self) -> int:
        while self.calls:
            try:
                self.got.append(self.store.spend(self.calls.pop()))
            except StoreError as error:
                self.got.append(error)
        return Clock().now

    def used(self) -> int:
        return used_of(self.store, self.plan)


def test_a_call_that_interrupts_another_does_not_wait_for_ever() -> None:
    """A signal handler that asks a store in the midst of a call gets an error, and the call goes on undisturbed."""
    it = Interrupted()
    it.calls.append(it.plan)
    assert it.store.spend(it.plan).admitted
    (error,) = it.got
    assert isinstance(error, StoreError)
    assert "handler or finalizer" in str(error)
    assert it.used() == 4
    assert it.store.spend(it.plan).admitted, "the store is free again"


def test_what_a_finalizer_gives_back_is_given_back() -> None:
    """A finalizer that gives something back in the midst of a call is heard when that call ends."""
    it = Interrupted()
    first = it.store.spend(it.plan)
    it.calls.append(refund(it.plan, first, [1]))
    assert it.store.spend(it.plan).admitted
    (reading,) = it.got
    assert isinstance(reading, Reading)
    assert it.used() == 1 + 4


def test_a_signal_handler_may_ask_while_the_store_is_busy() -> None:
    """Signals that come at any moment of many calls neither hang the process nor change what is counted by the calls."""
    store, told = MemoryStore(lambda: 1_790_000_000_000_000), []
    plan, other = a_plan("key", "100000/day"), a_plan("other", "100000/day")

    def handler(*_: object) -> None:
        with contextlib.suppress(StoreError):
            told.append(store.spend(other).admitted)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(20_000):
            assert store.spend(plan).admitted
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert used_of(store, plan) == 20_000
    assert used_of(store, other) == len(told) > 0


def test_the_child_of_a_fork_in_the_midst_of_a_call_can_ask() -> None:
    """A fork while another thread carries a plan out leaves the child a store that is not taken for interrupted."""
    store = MemoryStore()
    store._busy = True
    child = os.fork()
    if not child:
        os._exit(0 if store.spend(a_plan("key", "1/day")).admitted else 1)
    _, status = os.waitpid(child, 0)
    store._busy = False
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("cost", [2**63 - 1, 2**63, 10**30])
def test_a_cost_beyond_all_bounds_is_refused(cost: int) -> None:
    """Whatever a caller asks of a banned key, or of any, is refused; nothing breaks by it."""
    limiter = Limiter(MemoryStore())
    limiter.hit("key", "5/day")
    limiter.ban("key", 60)
    for _ in range(2):
        assert not limiter.hit("key", "5/day", cost=cost).allowed
        assert not limiter.hit("other", "5/day", cost=cost).allowed
