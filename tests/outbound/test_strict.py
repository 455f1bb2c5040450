"""With ``strict`` the limit of the other side holds in any period, whatever it counts by."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

import limitgate.httpx
import limitgate.requests
import limitgate.urllib3
from limitgate import AsyncLimiter, ConfigError, Configured, Limit, Limiter, MemoryStore
from limitgate.outbound.options import strict
from limitgate.outbound.throttle import ClientThrottle, arun, run
from limitgate.rules.lint import most_within
from tests.outbound.test_throttle import KINDS, AsyncSide, Caller, Kind, Request, Side, caring
from tests.support.virtual import World

JITTER = 10
"""Microseconds by which a timer of `World` may be late."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def most(moments: list[float], seconds: float) -> int:
    """The most that was sent in any time of this length."""
    return max(sum(since <= at < since + seconds - JITTER / 1e6 for at in moments) for since in moments)


COUNTED = [
    ("100/minute", Limit("100/minute", algorithm="sliding_log")),
    ("10000/hour", Limit("10000/hour", algorithm="sliding_log")),
    (Limit("5 per 15 minutes"), Limit("5 per 15 minutes", algorithm="sliding_log")),
    ("20/second burst 5", Limit("16/second burst 5")),
    ("20/second burst 1", Limit("20/second burst 1")),
    ("100000/day", Limit("90001/day burst 10000")),
    ("100000/day burst 100", Limit("99901/day burst 100")),
    (Limit("2/day", algorithm="sliding_log"), Limit("2/day", algorithm="sliding_log")),
    (Limit("3/second burst 1", algorithm="gcra"), Limit("3/second burst 1", algorithm="gcra")),
    (Limit("10/second", warm_up=3), Limit("10/second", warm_up=3)),
]


@pytest.mark.parametrize(("given", "counted"), COUNTED, ids=str)
def test_how_limits_are_counted(given: Any, counted: Limit) -> None:
    """By a log, or by a rate so much lower that no period has more; a limit that holds by itself stays."""
    assert strict(given) == counted
    assert most_within(counted.period, [counted]) <= (Limit(given) if isinstance(given, str) else given).count


MISTAKES = [
    ("10/second burst 11", "expected a burst of at most 10, or strict=False"),
    (Limit("10/second", algorithm="gcra"), "may let more than 10 pass in 1 s, expected a limit without its own algorithm"),
    (Limit("10/second", algorithm="token_bucket"), "may let more than 10"),
    (Limit("10/second burst 1", borrow=True), "may let more than 10"),
    (Limit("10/day", algorithm="fixed_window"), "may let more than 10"),
]


@pytest.mark.parametrize(("limit", "why"), MISTAKES, ids=str)
def test_what_cannot_hold_is_told(limit: Any, why: str) -> None:
    """When the client is made, with what was expected."""
    with pytest.raises(ConfigError, match=why):
        limitgate.httpx.RateLimitTransport(limit, strict=True)


@pytest.mark.parametrize("value", ["yes", None, 2])
def test_strict_is_true_or_false(value: Any) -> None:
    """Nothing else is taken for either."""
    with pytest.raises(ConfigError, match=r"strict is .*, expected True or False"):
        limitgate.httpx.AsyncRateLimitTransport("1/second", strict=value)


def test_every_client_knows_the_word() -> None:
    """All clients have it, and without it they count as any limiter does."""
    clients: list[Any] = [
        limitgate.httpx.AsyncRateLimitTransport,
        limitgate.httpx.RateLimitTransport,
        limitgate.requests.RateLimitAdapter,
        limitgate.urllib3.RateLimitPoolManager,
    ]
    for client in clients:
        assert client("100/minute", strict=True)._throttle._limits == (Limit("100/minute", algorithm="sliding_log"),)
        assert client("100/minute")._throttle._limits == ("100/minute",)


@pytest.mark.parametrize("limit", ["20/minute", "20/minute burst 5", "11000/hour"])
def test_no_minute_has_more_property(kind: Kind, world: World, limit: str) -> None:
    """However requests come, never more than the count are sent in any period; without strict nearly twice as many are."""
    rnd, count, period = random.Random(limit), Limit(limit).count, Limit(limit).period
    caller, side = Caller(kind, world, limit, strict=True, timeout=None), kind.side(world)
    for _ in range(min(70, count)):
        world.advance(rnd.choice((0, 0, 0, 0.1, 3, period / 3)))
        caller.ask(side)
    assert most([at for at, _ in side.asked], period) <= count


def test_a_crowd_is_sent_by_the_count(world: World) -> None:
    """A hundred at once, the next hundred a minute later, and no minute in between has more; without strict it has 199."""
    moments = {}
    for is_strict in (True, False):
        side = AsyncSide(world)
        throttle = caring("100/minute", limiter=AsyncLimiter(MemoryStore(world)), timeout=None, strict=is_strict)

        async def main(throttle: ClientThrottle[Request] = throttle, side: AsyncSide = side) -> None:
            await asyncio.gather(*[arun(throttle.exchange(side, Request())) for _ in range(250)])

        world.run(main())
        moments[is_strict] = [at for at, _ in side.asked]
    assert most(moments[True], 60) == 100
    assert most(moments[False], 60) == 199


def test_several_limits_hold_together(world: World) -> None:
    """In each period of each of them."""
    side, throttle = Side(world), caring("5/second", "12 per 10 seconds", limiter=Limiter(MemoryStore(world)), strict=True)
    for _ in range(40):
        run(throttle.exchange(side, Request()))
    moments = [at for at, _ in side.asked]
    assert most(moments, 1) <= 5
    assert most(moments, 10) <= 12


def test_configured_limits_have_to_hold_by_themselves(kind: Kind, world: World) -> None:
    """Others count by them, too, so they are not counted in another way; what does not hold is told."""
    store = MemoryStore(world)
    Limiter(store).configure("good", Limit("2/second", algorithm="sliding_log"), "100/day burst 1")
    Limiter(store).configure("bad", "2/second")
    side = kind.side(world)
    Caller(kind, world, Configured("good"), store=store, strict=True).ask(side)
    with pytest.raises(ConfigError, match=r"Limit\('2/second'\) may let more than 2 pass in 1 s"):
        Caller(kind, world, Configured("bad"), store=store, strict=True).ask(side)
    assert len(side.asked) == 1
