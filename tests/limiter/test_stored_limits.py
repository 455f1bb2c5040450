"""Limits that are kept in the store: changed once, obeyed by everybody who shares it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, strategies as st

from limitgate import (
    AsyncLimiter,
    ConfigError,
    Configured,
    Limit,
    Limiter,
    MemoryStore,
    RateLimited,
    RedisStore,
    StoreError,
)
from limitgate.limiter.plans import FRESH, decode, encode
from limitgate.stores.base import AsyncStore, ConfigRequest, SyncStore
from tests.support.clock import Clock
from tests.support.doors import MOMENT, PATIENCE, PROCESS_PATIENCE
from tests.support.redis_server import RedisServer

ORDERS = Configured("orders")
SEVERAL = (
    Limit("10/second burst 3"),
    Limit("5/day", algorithm="fixed_window", align="Europe/Berlin"),
    Limit("9/day", lease=0),
)


@pytest.fixture(params=["memory", "redis"])
def limiter(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Limiter]:
    """A limiter on either store."""
    store = MemoryStore(Clock()) if request.param == "memory" else RedisStore(redis_server.url)
    with contextlib.closing(store):
        yield Limiter(store, timeout=5, key_prefix=uuid4().hex)


def another(limiter: Limiter) -> Limiter:
    """A limiter that knows nothing yet, on the same store."""
    return Limiter(limiter._store, timeout=5, key_prefix=limiter._plans.key_prefix)


def test_what_is_configured_is_found_by_others(limiter: Limiter) -> None:
    """Limits of any algorithm come back as they were given."""
    assert limiter.configuration("orders") is None
    assert limiter.configure("orders", *SEVERAL) == SEVERAL
    assert another(limiter).configuration("orders") == SEVERAL
    assert another(limiter).configuration("others") is None


def test_a_name_stands_for_its_limits(limiter: Limiter) -> None:
    """Whoever asks by the name is limited by what is kept under it, key by key; the buckets are those of the limits."""
    limiter.configure("orders", "2/day")
    assert [another(limiter).hit("a", ORDERS).allowed for _ in range(3)] == [True, True, False]
    assert limiter.hit("b", ORDERS).remaining == 1
    assert limiter.peek("b", "2/day").remaining == 1


def test_a_change_is_obeyed_within_a_second(limiter: Limiter) -> None:
    """A limiter that knows the old limits takes on the new ones, and keeps to what was used."""
    other = another(limiter)
    limiter.configure("orders", "5/day")
    assert other.hit("key", ORDERS).remaining == 4
    limiter.configure("orders", "50/day")
    assert limiter.peek("key", ORDERS).remaining == 49
    changed = time.monotonic()
    while other.peek("key", ORDERS).remaining != 49:
        assert time.monotonic() < changed + PATIENCE
        time.sleep(MOMENT)
    assert FRESH < 1


def test_what_is_there_may_stay(limiter: Limiter) -> None:
    """Without replace the first one wins, and is told to the others."""
    assert limiter.configure("orders", "5/day", replace=False) == (Limit("5/day"),)
    assert another(limiter).configure("orders", "7/day", replace=False) == (Limit("5/day"),)
    assert another(limiter).configure("orders", "7/day") == (Limit("7/day"),)


def test_each_process_may_count_by_itself(limiter: Limiter) -> None:
    """Per process, what one takes is not missed by another; a limiter stands for its process."""
    limiter.configure("orders", "1/day", per_process=True)
    assert [each.hit("key", ORDERS).allowed for each in (limiter, another(limiter), limiter)] == [True, True, False]


def test_a_banned_key_is_banned_in_every_process(limiter: Limiter) -> None:
    """A ban holds where each process counts by itself, too, and ends everywhere."""
    limiter.configure("orders", "5/day", per_process=True)
    limiter.ban("key", 60)
    assert [each.hit("key", ORDERS).allowed for each in (limiter, another(limiter))] == [False, False]
    assert limiter.hit("other", ORDERS).allowed
    limiter.pardon("key")
    assert limiter.hit("key", ORDERS).remaining == 4


PROGRAM = """
import sys
from limitgate import Configured, Limiter

url, prefix = sys.argv[1:]
with Limiter(url, timeout=20, key_prefix=prefix) as limiter:
    print(*[limiter.hit("key", Configured(name)).allowed for name in ("together", "alone")])
"""


def test_several_processes(redis_server: RedisServer) -> None:
    """Processes share what is configured, and the bucket unless each counts by itself."""
    prefix = uuid4().hex
    with Limiter(redis_server.url, timeout=PATIENCE, key_prefix=prefix) as limiter:
        limiter.configure("together", "1/day")
        limiter.configure("alone", "1/day", per_process=True)
    command = [sys.executable, "-c", PROGRAM, redis_server.url, prefix]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=PROCESS_PATIENCE)[0].split() for process in running]
    assert sorted(said) == [["False", "True"], ["True", "True"]]


def test_every_verb_takes_a_name(limiter: Limiter) -> None:
    """Wherever limits are asked for, a name may stand for them."""
    limiter.configure("orders", "10/day")
    assert limiter.hit_up_to("key", ORDERS, cost=4).granted == 4
    assert limiter.refund("key", ORDERS, cost=2).remaining == 8
    assert limiter.wait("key", ORDERS, timeout=1).allowed
    limiter.reserve("key", ORDERS, cost=5).cancel()
    assert limiter.peek("key", ORDERS).remaining == 7
    assert limiter.reset("key", ORDERS).remaining == 10
    limited = limiter.limited(ORDERS, key="key", cost=10)(lambda: 5)
    assert limited() == 5
    with pytest.raises(RateLimited):
        limited()


def test_async_code_too() -> None:
    """The same from coroutines."""

    async def story() -> None:
        limiter = AsyncLimiter(MemoryStore(Clock()))
        assert await limiter.configuration("orders") is None
        assert await limiter.configure("orders", "1/day") == (Limit("1/day"),)
        assert [(await limiter.hit("key", ORDERS)).allowed for _ in range(2)] == [True, False]

    asyncio.run(story())


def test_a_name_without_limits(limiter: Limiter) -> None:
    """What nobody has configured is a ConfigError that says what to do; nobody passes in silence."""
    with pytest.raises(ConfigError, match=r"no limits are configured under 'orders'.*configure"):
        limiter.hit("key", ORDERS)
    limiter.configure("orders", "1/day")
    assert limiter.hit("key", ORDERS).allowed


def test_a_name_stands_alone(limiter: Limiter) -> None:
    """Beside other limits it would not be clear whose process they count in."""
    limiter.configure("orders", "1/day")
    with pytest.raises(ConfigError, match="alone"):
        limiter.hit("key", ORDERS, "5/day")


@pytest.mark.parametrize("limits", [[], ["often"], [5], ["2 at once"], ["1/second"] * 65])
def test_limits_that_cannot_be_kept(limiter: Limiter, limits: list[Any]) -> None:
    """What is no limit, or too many of them, is refused and changes nothing."""
    with pytest.raises((TypeError, ConfigError)):
        limiter.configure("orders", *limits)
    assert limiter.configuration("orders") is None


@pytest.mark.parametrize("name", [5, None, b"orders"])
def test_a_name_is_text(limiter: Limiter, name: Any) -> None:
    """Anything else is a TypeError."""
    with pytest.raises(TypeError, match="name"):
        limiter.configure(name, "1/day")
    with pytest.raises(TypeError, match="name"):
        limiter.hit("key", Configured(name))


def test_without_the_store_what_was_known_last_holds(own_redis: RedisServer) -> None:
    """While Redis is gone the limits that were known still are; whoever knows none hears that the store fails."""
    with contextlib.closing(RedisStore(own_redis.url)) as store:
        limiter, stranger = Limiter(store, timeout=PATIENCE), Limiter(store, timeout=PATIENCE)
        limiter.configure("orders", "5/day")
        own_redis.stop()
        time.sleep(FRESH)
        lookup = limiter._lookup("orders")
        next(lookup)
        with pytest.raises(StopIteration) as known:
            lookup.throw(StoreError("gone"))
        assert known.value.value.limits == (Limit("5/day"),)
        with pytest.raises(StoreError):
            stranger.hit("key", ORDERS)


UNREADABLE = (
    "",
    "{}",
    "[]",
    "5",
    "[" * 100_000,
    '{"limits":["often"],"per_process":false}',
    '{"limits":[],"per_process":false}',
    '{"limits":5,"per_process":false}',
    '{"limits":["1/day"]}',
    json.dumps({"limits": ["1/day"] * 65, "per_process": False}),
)


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_text_that_is_no_configuration(limiter: Limiter, text: str) -> None:
    """It is an error that says so, for who knows no limits yet; others go by those they know. Configuring anew mends it."""
    other = another(limiter)
    limiter.configure("orders", "5/day")
    limiter._store.config(ConfigRequest(limiter._plans.config_key("orders"), text), 5)
    assert limiter.hit("key", ORDERS).remaining == 4
    for call in (
        lambda: other.hit("key", ORDERS),
        lambda: other.configuration("orders"),
        lambda: other.configure("orders", "7/day", replace=False),
    ):
        with pytest.raises(StoreError, match="under 'orders' are unreadable, expected"):
            call()
    assert other.configure("orders", "7/day") == (Limit("7/day"),)
    assert other.hit("key", ORDERS).remaining == 5


def test_limits_of_any_number_are_kept(limiter: Limiter) -> None:
    """As many as may be checked together can be configured together."""
    many = [f"{count}/day" for count in range(1, 65)]
    assert len(limiter.configure("orders", *many)) == 64
    assert another(limiter).configuration("orders") == tuple(map(Limit, many))


class Plain(SyncStore, AsyncStore):
    """A store of somebody who keeps no configuration."""

    def spend(self, plan: Any, timeout: float) -> Any:
        return MemoryStore().spend(plan, timeout)

    async def aspend(self, plan: Any, timeout: float) -> Any:
        return self.spend(plan, timeout)

    def close(self) -> None: ...

    async def aclose(self) -> None: ...


def test_a_store_that_keeps_no_configuration() -> None:
    """It serves for limits, and says what is missing where limits are looked up under a name."""
    limiter = Limiter(Plain())
    assert limiter.hit("key", "1/day").allowed
    for call in (lambda: limiter.hit("key", ORDERS), lambda: limiter.configure("orders", "1/day")):
        with pytest.raises(ConfigError, match="Plain cannot keep limits under a name, expected a store with the method config"):
            call()
    with pytest.raises(ConfigError, match="the method aconfig"):
        asyncio.run(AsyncLimiter(Plain()).hit("key", ORDERS))


@given(
    st.lists(
        st.builds("{}/{}".format, st.integers(1, 10**6), st.sampled_from(["second", "minute", "day"])), min_size=1, max_size=9
    ),
    st.booleans(),
)
def test_a_configuration_as_text_property(limits: list[str], per_process: bool) -> None:  # noqa: FBT001
    """Whatever is kept is found again."""
    found = decode(encode(limits, per_process=per_process))
    assert found is not None
    assert found[:2] == (tuple(map(Limit, limits)), per_process)
