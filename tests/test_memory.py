"""The memory store: how it stays bounded, whom it drops, and what a stepping clock and threads do to it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, strategies as st

from limitgate import Decision, Limit, Limiter, MemoryStore
from limitgate.decision import decide
from limitgate.plan import Charge, Plan, Verb
from limitgate.stores import memory
from limitgate.windows import windows_of
from tests.clock import Clock


class Subject:
    """A small memory store and its clock; ``hit`` admits or not."""

    def __init__(self, max_buckets: int) -> None:
        self.clock = Clock()
        self.store = MemoryStore(self.clock, max_buckets=max_buckets)

    def ask(self, key: str, limit: str = "2/day", cost: int = 1, verb: Verb = "spend") -> Decision:
        return self.plan(key, limit=limit, cost=cost, verb=verb)

    def plan(self, *keys: str, limit: str = "2/day", cost: int = 1, verb: Verb = "spend") -> Decision:
        """Carry out one plan over several buckets."""
        plan = Plan(tuple(Charge(key, windows_of(limit), cost, binding=True, rule=None) for key in keys), verb)
        return decide(plan, self.store.spend(plan))

    def hit(self, key: str, limit: str = "2/day", cost: int = 1) -> bool:
        return self.ask(key, limit, cost).allowed

    def used(self, key: str, limit: str = "2/day") -> int:
        return self.ask(key, limit, verb="peek").windows[0].used

    def queued(self) -> list[str]:
        """What is kept of the order in which buckets are dropped."""
        return [key for _, key in self.store._queue + self.store._refusing]


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


def test_asking_takes_no_room() -> None:
    """Only what is owed is kept: a peek, a refusal and a cost of nothing leave no bucket."""
    subject = Subject(5)
    subject.ask("peek", verb="peek")
    subject.hit("too much", cost=3)
    subject.hit("nothing", cost=0)
    assert len(subject.store) == 0


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
    for number in range(100):
        subject.hit(f"newer {number}", "10/day")
    assert len(subject.store) == 100


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
    for number in range(3):
        subject.hit(f"exhausted {number}", cost=2)
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
        subject.hit(f"idle {number}", "10/day", cost=9)
    admitted = [subject.hit(f"new {number}", "2/day", cost=2) for number in range(40)]
    assert sum(admitted[-5:]) == 0
    assert sum(admitted) >= 10
    assert not any(key.startswith("idle") for key in subject.store._buckets)


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
    """Counts what is done to the heaps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("heappop", "heappush"):
            monkeypatch.setattr(memory, name, self._counted(getattr(memory, name)))

    def _counted(self, function):
        def counted(*arguments):
            self.count += 1
            return function(*arguments)

        return counted

    def of(self, subject: Subject, key: str, limit: str = "2/day") -> int:
        self.count = 0
        subject.hit(key, limit)
        return self.count


@pytest.mark.parametrize("case", ["expired", "refusing", "grown", "no longer refusing"])
def test_the_work_of_one_request_is_bounded(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """However many buckets have expired, refuse or have changed, one request looks at a few only."""
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
    counts = [steps.of(subject, f"newer {number}") for number in range(200)]
    assert max(counts) <= 300
    assert max(counts) > 1, "nothing was there to do"
    assert steps.of(subject, "newer 199") <= 1


def test_a_known_key_costs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of a known key does nothing to the heap at all."""
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
    assert len(subject.store) <= 10
    assert len(subject.queued()) <= 100


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
    assert sorted(subject.store._buckets) == [f"new {number}" for number in range(8 - most, 8)]


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
            if key in subject.store._buckets:
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
    plan = Plan((Charge("key", windows_of("1/second"), 1, binding=True, rule=None),))
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
        return sum(subject.hit("shared", "6000/day") for _ in range(500))

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(visit, range(16))) == 6000


@pytest.mark.usefixtures("_hasty_threads")
def test_threads_share_a_store() -> None:
    """Under many threads exactly the limit is admitted, the bound holds, and nothing is lost."""
    subject = Subject(20)

    def visit(thread: int) -> int:
        admitted = 0
        for number in range(300):
            admitted += subject.hit("shared", "100/day")
            subject.hit(f"own {thread} {number}", "10/day")
            if not number % 50:
                subject.ask(f"own {thread} {number}", "10/day", verb="reset")
        return admitted

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(visit, range(16))) == 100
    assert len(subject.store) == 20
    assert subject.store._buckets.keys() <= set(subject.queued())


def test_a_bucket_moved_while_its_plan_is_carried_out_still_expires() -> None:
    """Where a known bucket and new ones are charged together, each expires in its time."""
    clock = Clock()
    store = MemoryStore(clock)
    windows = windows_of("60/minute")
    for number in range(400):
        known = Charge(f"client {number % 40}", windows, 1, binding=True, rule=None)
        fresh = Charge(f"client {number % 40} path {number}", windows, 1, binding=True, rule=None)
        store.spend(Plan((known, fresh)))
        clock.advance(0.4)
    clock.advance(3600)
    for number in range(100):
        store.spend(Plan((Charge(f"late {number}", windows, 1, binding=True, rule=None),)))
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
