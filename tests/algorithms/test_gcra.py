"""The arithmetic, seen through a limiter on a clock that goes on only when told."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import assume, given, strategies as st

from limitgate import Decision, Limit, Limiter, MemoryStore
from limitgate.algorithms import gcra
from tests.support.clock import Clock

SECOND = 1_000_000
UNITS = {"second": 1, "minute": 60, "day": 86400}
COUNTS = (3, 7, 9, 333, 99_991, 1_000_003)
ODD = [f"{count}/{unit}" for count in COUNTS for unit, period in UNITS.items() if count <= 1_000_000 * period]
EXTREME = [
    "1000000/second",
    "1 per 366 days",
    "31622400000000 per 366 days",
    "31622399999999 per 366 days",
    "1/second burst 316224000",
    "999983 per 366 days burst 7",
]


class Subject:
    """One key of one limiter, and its clock."""

    def __init__(self, *limits: str | Limit) -> None:
        self.clock = Clock()
        self.limits = limits
        self.limiter = Limiter(MemoryStore(clock=self.clock))

    def hit(self, cost: int = 1) -> Decision:
        return self.limiter.hit("key", *self.limits, cost=cost)

    def peek(self, cost: int = 1) -> Decision:
        return self.limiter.peek("key", *self.limits, cost=cost)

    def empty(self) -> None:
        """Take whatever fits, at once."""
        self.hit(self.peek().remaining)

    def used(self) -> list[int]:
        return [window.used for window in self.peek().windows]


@st.composite
def limits(draw: st.DrawFn) -> Limit:
    """Limits small enough for a history to run into them."""
    period = draw(st.sampled_from((1, 60, 3600, 86400, 31_622_400)) | st.integers(1, 1000))
    count = draw(st.integers(1, 20) | st.integers(1, 1_000_000))
    return Limit(f"{count} per {period} seconds", burst=draw(st.none() | st.integers(1, 10)))


def histories() -> st.SearchStrategy[list[tuple[Fraction, int]]]:
    """Waits, as a share of the time that one request takes to be earned back, and costs."""
    return st.lists(st.tuples(st.integers(0, 300).map(lambda part: Fraction(part, 60)), st.integers(0, 6)), max_size=20)


def us(seconds: float) -> int:
    return round(seconds * SECOND)


def play(subject: Subject, history: list[tuple[Fraction, int]]) -> list[tuple[int, int]]:
    """Time and cost of what was admitted."""
    limit, admitted = Limit(str(subject.limits[0])), []
    for wait, cost in history:
        subject.clock.advance(us=math.floor(wait * limit.period * SECOND / limit.count))
        if subject.hit(cost).allowed:
            admitted.append((subject.clock.now, cost))
    return admitted


def exactly_at(subject: Subject, wait: float, cost: int = 1) -> None:
    """The cost is refused until the last microsecond of the wait and admitted after it."""
    assert 0 < wait < math.inf
    subject.clock.advance(us=us(wait) - 1)
    assert not subject.peek(cost).allowed
    assert us(subject.peek(cost).retry_after) == 1
    subject.clock.advance(us=1)
    assert subject.peek(cost).allowed


@given(limit=limits(), history=histories(), cost=st.integers(1, 10))
def test_the_promised_wait_is_exact_property(limit: Limit, history: list[tuple[Fraction, int]], cost: int) -> None:
    """After any history, a refused request is refused 1 µs before the promised moment and admitted at it."""
    assume(cost <= limit.burst)
    subject = Subject(limit)
    play(subject, history)
    subject.empty()
    refused = subject.hit(cost)
    assert not refused.allowed
    exactly_at(subject, refused.retry_after, cost)
    assert subject.hit(cost).allowed


@pytest.mark.usefixtures("_unwatched")
@given(limit=limits(), history=histories(), shares=st.lists(st.fractions(0, 1), min_size=1, max_size=5))
def test_every_moment_before_the_promised_one_is_too_early_property(
    limit: Limit, history: list[tuple[Fraction, int]], shares: list[Fraction]
) -> None:
    """A request is refused at every fraction of the promised wait, and asking in between changes nothing."""
    subject = Subject(limit)
    play(subject, history)
    subject.empty()
    start, wait = subject.clock.now, us(subject.hit().retry_after)
    for share in sorted(shares):
        subject.clock.now = start + min(wait - 1, math.floor(share * wait))
        assert us(subject.hit().retry_after) == start + wait - subject.clock.now
    subject.clock.now = start + wait
    assert subject.hit().allowed


@given(limit=limits(), history=histories())
def test_never_more_than_the_limit_in_any_interval_property(limit: Limit, history: list[tuple[Fraction, int]]) -> None:
    """Between any two moments, at most burst plus elapsed time times the rate is admitted."""
    admitted = play(Subject(limit), history)
    for first, last in itertools.combinations_with_replacement(range(len(admitted)), 2):
        elapsed = admitted[last][0] - admitted[first][0]
        passed = sum(cost for _, cost in admitted[first : last + 1])
        assert passed <= limit.burst + Fraction(elapsed * limit.count, limit.period * SECOND)


@given(limit=limits(), history=histories())
def test_the_bucket_is_full_at_its_reset_property(limit: Limit, history: list[tuple[Fraction, int]]) -> None:
    """A whole burst fits at the promised moment of the reset, and not 1 µs earlier."""
    subject = Subject(limit)
    subject.hit()
    play(subject, history)
    subject.empty()
    reset_after = subject.peek().reset_after
    exactly_at(subject, reset_after, limit.burst)
    assert subject.peek().reset_after == 0


@given(limit=limits(), history=histories())
def test_remaining_is_what_fits_property(limit: Limit, history: list[tuple[Fraction, int]]) -> None:
    """As many requests fit at once as remain, and not one more."""
    subject = Subject(limit)
    play(subject, history)
    left = subject.peek().remaining
    assert subject.peek(left).allowed
    assert not subject.peek(left + 1).allowed


@pytest.mark.parametrize("text", [*ODD, *EXTREME])
def test_each_further_request_comes_at_its_microsecond(text: str) -> None:
    """With the burst spent, the n-th further request is admitted just when n are earned back, for hundreds of them."""
    subject, limit = Subject(text), Limit(text)
    start, weight = subject.clock.now, limit.period * SECOND
    assert subject.hit(limit.burst).allowed
    for number in range(1, 301):
        due = start - (-number * weight // limit.count)
        if due > subject.clock.now:
            subject.clock.now = max(subject.clock.now, due - 1)
            assert us(subject.hit().retry_after) == due - subject.clock.now
        subject.clock.now = due
        assert subject.hit().allowed


@pytest.mark.parametrize("text", [*ODD, *EXTREME])
def test_long_histories_are_exact_to_the_request(text: str) -> None:
    """Over dozens of bursts, exactly the burst and what was earned since have been admitted at any time."""
    subject, limit, rnd = Subject(text), Limit(text), random.Random(text)
    start, weight, total = subject.clock.now, limit.period * SECOND, 0
    longest = max(1, limit.burst * weight // limit.count // 3)
    for _ in range(300):
        left = subject.peek().remaining
        total += subject.hit(left).granted
        assert total == limit.burst + (subject.clock.now - start) * limit.count // weight
        due = start - (-(total + 1 - limit.burst) * weight // limit.count)
        assert us(subject.peek().retry_after) == due - subject.clock.now
        full = start + total * weight // limit.count  # later, the bucket would be full and earn nothing
        subject.clock.now = min(full, rnd.choice((subject.clock.now + rnd.randint(0, longest), due)))


@pytest.mark.parametrize("text", [*ODD, *EXTREME])
def test_an_idle_bucket_earns_nothing_beyond_its_burst(text: str) -> None:
    """After a thousand years without a request, just one burst fits."""
    subject, limit = Subject(text), Limit(text)
    subject.hit(limit.burst)
    subject.clock.advance(us=1000 * 366 * 86400 * SECOND)
    assert not subject.hit(limit.burst + 1).allowed
    assert subject.hit(limit.burst).allowed
    assert not subject.hit().allowed


@pytest.mark.parametrize("burst", [1, 2, 7])
def test_the_burst_is_exact(burst: int) -> None:
    """From a full bucket exactly the burst comes at once, whatever the count."""
    for count in (1, 2, 100):
        subject = Subject(f"{count}/minute burst {burst}")
        assert [subject.hit().allowed for _ in range(burst + 2)] == [True] * burst + [False] * 2


@pytest.mark.parametrize("cost", [6, 7, 1000, 2**53, 2**64, 10**40])
@pytest.mark.parametrize("spent", [0, 1, 5])
def test_a_cost_above_the_burst_can_never_pass(spent: int, cost: int) -> None:
    """Waiting cannot help a cost above the burst, and nothing is charged for it."""
    subject = Subject("10/minute burst 5")
    subject.hit(spent)
    for _ in range(3):
        decision = subject.hit(cost)
        assert (decision.allowed, decision.retry_after, decision.granted) == (False, math.inf, 0)
        assert subject.used() == [spent]
    subject.clock.advance(3600)
    assert subject.hit(cost).retry_after == math.inf
    assert subject.used() == [0]


def test_a_cost_of_nothing_always_passes() -> None:
    """Cost 0 is admitted even by an exhausted bucket, and charges nothing."""
    subject = Subject("2/minute", "9/hour")
    for spent in range(3):
        decision = subject.hit(0)
        assert (decision.allowed, decision.granted, decision.retry_after) == (True, 0, 0)
        assert subject.used() == [spent, spent]
        subject.hit()


def test_all_windows_or_none() -> None:
    """A request that one window refuses is charged to none, and waits for the slowest of those that refused."""
    subject = Subject("5/second", "7/minute", "100/day")
    assert subject.hit(5).allowed
    subject.clock.advance(1)
    refused = subject.hit(3)
    assert (refused.allowed, us(refused.retry_after)) == (False, math.ceil(Fraction(60, 7) * SECOND) - SECOND)
    assert subject.used() == [0, 5, 5]
    assert subject.hit(2).allowed
    assert subject.used() == [2, 7, 7]
    assert [window.retry_after > 0 for window in subject.peek(4).windows] == [True, True, False]


@given(
    several=st.lists(limits(), min_size=1, max_size=4),
    costs=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 6)), max_size=30),
)
def test_several_windows_pass_what_each_would_pass_property(several: list[Limit], costs: list[tuple[int, int]]) -> None:
    """A request passes exactly if each window alone, charged with the same past, would let it pass."""
    together, alone = Subject(*several), [Subject(limit) for limit in several]
    for wait, cost in costs:
        for subject in (together, *alone):
            subject.clock.advance(us=wait)
        asked = [subject.peek(cost) for subject in alone]
        decision = together.hit(cost)
        assert decision.allowed == all(each.allowed for each in asked)
        assert decision.retry_after == max(each.retry_after for each in asked)
        if decision.allowed:
            for subject in alone:
                subject.hit(cost)


DEBTS = [
    # limit, ticks owed, cost: (wait, refill, remaining, used)
    ("1/second", 0, 1, (0, 0, 1, 0)),
    ("1/second", 1, 1, (1, 1, 0, 1)),
    ("1/second", SECOND, 1, (SECOND, SECOND, 0, 1)),
    ("3/second", SECOND, 3, (333_334, 333_334, 2, 1)),
    ("3/second", 3 * SECOND, 1, (333_334, SECOND, 0, 3)),
    ("3/second", 3 * SECOND - 1, 1, (333_333, SECOND, 0, 3)),
    ("3/second", 2 * SECOND + 1, 1, (1, 666_667, 0, 3)),
    ("3/second", 2 * SECOND, 1, (0, 666_667, 1, 2)),
    ("3/second", 0, 4, (None, 0, 3, 0)),
    ("3/second", 9 * SECOND, 0, (0, 3 * SECOND, 0, 9)),
    ("3/second", 9 * SECOND, 1, (2_333_334, 3 * SECOND, 0, 9)),
    ("5/minute burst 2", 60 * SECOND, 2, (12 * SECOND, 12 * SECOND, 1, 1)),
]


@pytest.mark.parametrize(("text", "debt", "cost", "meaning"), DEBTS)
def test_what_a_debt_means(text: str, debt: int, cost: int, meaning: tuple[int | None, ...]) -> None:
    """Times are rounded up, what remains is rounded down, and a bucket that owes more than its burst has nothing left."""
    limit = Limit(text)
    found = gcra.wait_us(debt, cost, limit), gcra.refill_us(debt, limit), gcra.remaining(debt, limit), gcra.used(debt, limit)
    assert found == meaning
