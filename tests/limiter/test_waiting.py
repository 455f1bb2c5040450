"""What `wait` waits for besides its turn: the end of a ban, and turns further ahead than a limit books any."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from limitgate import AsyncLimiter, Decision, Limit, Limiter, MemoryStore, RateLimited
from limitgate.limiter.plans import ahead
from limitgate.stores.redis.cluster import hash_slot
from tests.support.virtual import World

LOG = Limit("2/minute", algorithm="sliding_log")


class Waiting(NamedTuple):
    """A limiter of either kind, in a time that goes on by itself; another process may use its store."""

    world: World
    limiter: Any
    other: Limiter
    run: Callable[[Any], Any]

    def wait(self, *limits: Limit | str, **options: Any) -> Decision:
        decision: Decision = self.run(self.limiter.wait("key", *limits, **options))
        return decision


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture(params=["sync", "async"])
def waiting(request: pytest.FixtureRequest, world: World) -> Waiting:
    store = MemoryStore(world)
    if request.param == "sync":
        return Waiting(world, Limiter(store), Limiter(store), lambda decision: decision)
    return Waiting(world, AsyncLimiter(store), Limiter(store), world.run)


@pytest.mark.parametrize("timeout", [None, 30, 31.5])
def test_the_end_of_a_ban_is_waited_for(waiting: Waiting, timeout: float | None) -> None:
    """If it lies within the timeout; then the turn is taken, and nothing was taken before."""
    waiting.other.ban("key", 30)
    assert waiting.wait("10/minute", timeout=timeout).remaining == 9
    assert waiting.world.now == pytest.approx(30, abs=0.01)


@pytest.mark.parametrize("timeout", [0, 1, 29.9])
def test_a_ban_that_lasts_longer_is_refused_at_once(waiting: Waiting, timeout: float) -> None:
    """Nothing is taken, and nobody waits for nothing."""
    waiting.other.ban("key", 30)
    refused = waiting.wait("10/minute", timeout=timeout)
    assert (refused.allowed, refused.retry_after, waiting.world.now) == (False, 30, 0)
    waiting.other.pardon("key")
    assert waiting.other.peek("key", "10/minute").remaining == 10


@pytest.mark.parametrize("timeout", [None, 10**12, 60])
def test_a_permanent_ban_is_refused_at_once(waiting: Waiting, timeout: float | None) -> None:
    """With any timeout, or none: it has no end to wait for."""
    waiting.other.ban("key")
    refused = waiting.wait("10/minute", timeout=timeout)
    assert (refused.allowed, refused.retry_after, waiting.world.now) == (False, math.inf, 0)


@pytest.mark.parametrize(("limit", "cost"), [("10/minute", 11), ("0/day", 1), (LOG, 3), (Limit("0/day"), 2)])
def test_a_cost_that_never_fits_is_refused_at_once(waiting: Waiting, limit: Limit | str, cost: int) -> None:
    """A ban that ends does not make a difference."""
    for _ in range(2):
        refused = waiting.wait(limit, cost=cost)
        assert (refused.allowed, refused.retry_after, waiting.world.now) == (False, math.inf, 0)
        waiting.other.ban("key", 10)


def test_permanently_banned_calls_and_items_raise_at_once(world: World) -> None:
    """`limited` and `pace` without a timeout raise; they have nothing to wait for."""
    limiter, other = Limiter(MemoryStore(world)), AsyncLimiter(MemoryStore(world))
    limiter.ban("key")

    async def main() -> None:
        await other.ban("key")
        with pytest.raises(RateLimited, match="banned permanently"):
            await anext(other.pace(range(2), "10/second", key="key"))
        with pytest.raises(RateLimited, match="banned permanently"):
            await other.limited("10/minute", key="key", timeout=None)(main)()

    world.run(main())
    with pytest.raises(RateLimited, match="banned permanently"):
        next(limiter.pace(range(2), "10/second", key="key"))
    with pytest.raises(RateLimited, match="banned permanently"):
        limiter.limited("10/minute", key="key", timeout=None)(print)()
    assert world.now == 0


def test_a_turn_behind_a_ban_that_comes_too_late(waiting: Waiting) -> None:
    """What the limits make wait for longer than the timeout is not waited for because of a ban."""
    waiting.other.hit("key", "1/minute")
    waiting.other.ban("key", 5)
    refused = waiting.wait("1/minute", timeout=30)
    assert (refused.allowed, refused.retry_after, waiting.world.now) == (False, 30, 0)
    waiting.other.ban("key", 40)
    assert waiting.wait("1/minute", timeout=90).allowed
    assert waiting.world.now == pytest.approx(60, abs=0.01)


def test_a_ban_that_is_made_longer_meanwhile(waiting: Waiting) -> None:
    """It is refused as soon as that is known: the end lies beyond the timeout now."""
    waiting.other.ban("key", 5)
    _at(waiting, 3, lambda: waiting.other.ban("key", 60))
    refused = waiting.wait("10/minute", timeout=20)
    assert not refused.allowed
    assert waiting.world.now == pytest.approx(3, abs=0.01)
    assert refused.retry_after == pytest.approx(60, abs=0.01)


def test_a_pardon_is_noticed_within_a_second(waiting: Waiting) -> None:
    """Whoever waits looks again about once a second."""
    waiting.other.ban("key")
    _at(waiting, 7, lambda: waiting.other.pardon("key"))
    assert not waiting.wait("10/minute", timeout=10**9).allowed
    waiting.other.ban("key", 10**6)
    waiting.other.pardon("key")
    waiting.other.ban("key", 3000)
    assert waiting.wait("10/minute").allowed
    assert waiting.world.now == pytest.approx(7, abs=0.01)


def test_a_function_that_is_limited_waits_for_the_end_of_a_ban(world: World) -> None:
    """As `wait` itself does, where it has a timeout."""
    limiter = Limiter(MemoryStore(world))
    limiter.ban("f", 4)
    assert limiter.limited("10/minute", key="f", timeout=5)(lambda: world.now)() == pytest.approx(4, abs=0.01)


def test_who_is_cancelled_while_banned_has_taken_nothing(world: World) -> None:
    """A cancelled wait leaves the buckets as they are."""
    limiter = AsyncLimiter(MemoryStore(world))

    async def main() -> Decision:
        await limiter.ban("key", 30)
        task = asyncio.create_task(limiter.wait("key", "10/minute", LOG))
        await asyncio.sleep(2.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await limiter.pardon("key")
        return await limiter.peek("key", "10/minute", LOG)

    assert [window.used for window in world.run(main()).windows] == [0, 0]


def test_a_log_is_waited_for(waiting: Waiting) -> None:
    """Two at once in each minute, with a timeout or without."""
    for at in (0, 0, 60, 60, 120):
        assert waiting.wait(LOG).allowed
        assert waiting.world.now == pytest.approx(at, abs=0.01)
    assert waiting.wait(LOG, timeout=59).allowed
    refused = waiting.wait(LOG, timeout=20)
    assert (refused.allowed, round(refused.retry_after)) == (False, 40)


def test_a_turn_further_ahead_than_any_is_booked(waiting: Waiting) -> None:
    """It is asked for again when it can be booked, if it is within the timeout; if not it is refused at once."""
    limit = Limit("10000/second", algorithm="sliding_log")
    prefilled = ahead(waiting.other._plans.plan("spend", "key", (limit,), 10_000), None)
    for _ in range(2):
        waiting.other._store.spend(prefilled)
    refused = waiting.wait(limit, cost=10_000, timeout=1.9)
    assert (refused.allowed, waiting.world.now) == (False, 0)
    assert refused.retry_after == 1
    assert waiting.wait(limit, cost=10_000, timeout=2.1).allowed
    assert waiting.world.now == pytest.approx(2, abs=0.01)


def test_all_buckets_of_a_call_are_in_one_hash_slot() -> None:
    """On a cluster, too, the turn by all limits is booked in one call."""
    plan = Limiter(MemoryStore())._plans.plan("spend", "key", (LOG, "5/second", Limit("9/day", algorithm="sliding_log")), 1)
    assert len({hash_slot(charge.key) for charge in plan.charges}) == 1
    assert len({charge.key for charge in plan.charges}) == 4


def _at(waiting: Waiting, seconds: float, act: Callable[[], object]) -> None:
    """Have another process act at a time, between two looks at the store."""
    spend, done = waiting.other._store.spend, []

    def spending(*args: Any) -> Any:
        if waiting.world.now >= seconds and not done:
            done.append(True)
            act()
        return spend(*args)

    async def aspending(*args: Any) -> Any:
        return spending(*args)

    store: Any = waiting.limiter._store
    store.spend, store.aspend = spending, aspending
