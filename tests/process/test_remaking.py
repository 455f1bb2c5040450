"""Stores, limiters and what client libraries take are pickled and copied by what they were made of, or say why not."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import aiohttp
import httpx
import httpx2
import pytest
import requests
from requests.adapters import HTTPAdapter
from urllib3 import PoolManager

from limitgate import AsyncLimiter, AsyncRedisStore, Limiter, MemoryStore, RedisStore
from limitgate.aiohttp import RateLimitMiddleware
from limitgate.httpx import AsyncRateLimitTransport, RateLimitTransport
from limitgate.httpx2 import (
    AsyncRateLimitTransport as AsyncRateLimitTransport2,
    RateLimitTransport as RateLimitTransport2,
)
from limitgate.requests import RateLimitAdapter
from limitgate.urllib3 import RateLimitPoolManager
from tests.stores.test_stores import a_plan
from tests.support.redis_server import RedisServer

URL = "redis://:p@127.0.0.1:1/3?client_name=me"
KINDS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
    "oldest pickle": lambda made: pickle.loads(pickle.dumps(made, 0)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
CLIENTS: dict[str, Any] = {
    "requests": RateLimitAdapter,
    "urllib3": RateLimitPoolManager,
    "aiohttp": RateLimitMiddleware,
    "httpx": RateLimitTransport,
    "httpx, async": AsyncRateLimitTransport,
    "httpx2": RateLimitTransport2,
    "httpx2, async": AsyncRateLimitTransport2,
}


def credentials() -> tuple[str, str]:
    return "user", "password"


def one_key(_: object) -> str:
    return "all"


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def remade(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_a_store(remade: Any, kind: Any) -> None:
    """Another one, by URL and options."""
    before = kind(URL, local_refusals=False)
    after = remade(before)
    assert type(after) is kind
    assert after is not before
    assert after._dialer._options["password"] == "p"
    assert after.deny_cache is None
    cloud = remade(kind("redis://127.0.0.1:1", credentials=credentials))
    assert cloud._dialer._credentials._give is credentials


class Special(RedisStore):
    """A subclass with arguments of its own."""

    def __init__(self, host: str) -> None:
        super().__init__(f"redis://{host}")
        self.host = host


def test_a_subclass(remade: Any) -> None:
    assert remade(Special("h1")).host == "h1"


def test_a_store_that_works(remade: Any, redis_server: RedisServer) -> None:
    """It may be in use; another one counts in the same buckets, on connections of its own."""
    before, plan = RedisStore(redis_server.url), a_plan("1/day")
    assert before.spend(plan, 20).admitted
    after = remade(before)
    before.close()
    assert not after.spend(plan, 20).admitted
    after.close()


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_a_limiter(remade: Any, kind: Any) -> None:
    """All its options are kept."""
    options = {"timeout": 0.5, "key_prefix": "mine", "secret": "s" * 16, "ipv6_prefix": 56, "observers": ["prometheus"]}
    after = remade(kind(URL, **options))
    assert (after._timeout, after._plans.key_prefix, after._ipv6_prefix) == (0.5, "mine", 56)
    assert after._plans.secret == kind(URL, **options)._plans.secret
    assert len(after._observers) == 1
    assert after._owns_store


@pytest.mark.parametrize(("kind", "store"), [(Limiter, RedisStore), (AsyncLimiter, AsyncRedisStore)])
def test_a_limiter_on_a_store(remade: Any, kind: Any, store: Any) -> None:
    """A store that was given is pickled with it, once for all that share it; a copy shares it."""
    given = store(URL)
    limiters = [kind(given), kind(store=given, timeout=0.5)]
    after = remade(limiters)
    assert len({id(each._store) for each in after}) == 1
    assert not after[0]._owns_store
    assert after[1]._timeout == 0.5
    assert copy.deepcopy(limiters[0])._store is given


def hit_elsewhere(limiter: Limiter) -> bool:
    with limiter:
        return limiter.hit("k", "1/day").allowed


def test_another_process(redis_server: RedisServer) -> None:
    """A process that is spawned is given a limiter."""
    limiter = Limiter(redis_server.url, key_prefix="spawned", timeout=20)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(hit_elsewhere, [limiter])
    assert not limiter.hit("k", "1/day").allowed
    limiter.close()


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_a_client(remade: Any, client: Any) -> None:
    """Limits, limiter, key and options."""
    after = remade(client("5/second", limiter=URL, key=one_key, timeout=7, on_error="closed"))
    throttle = after._throttle
    assert type(after) is client
    assert (throttle._key, throttle._options.timeout, throttle._options.on_error) == (one_key, 7.0, "closed")
    assert [str(limit) for limit in throttle._limits] == ["5/second"]
    assert throttle.owned is not None


def test_a_session_of_requests(remade: Any) -> None:
    """With what sends inside it."""
    session = requests.Session()
    session.mount("https://", RateLimitAdapter("5/second", limiter=URL, adapter=HTTPAdapter(max_retries=3)))
    session.headers["X-Mine"] = "yes"
    after = remade(session)
    adapter = after.get_adapter("https://a.example/")
    assert after.headers["X-Mine"] == "yes"
    assert isinstance(adapter, RateLimitAdapter)
    assert adapter._adapter.max_retries.total == 3


IN_MEMORY: dict[str, Callable[[], Any]] = {
    "a store": MemoryStore,
    "a limiter": lambda: Limiter("memory://"),
    "an async limiter": lambda: AsyncLimiter("memory://"),
    **{name: lambda client=client: client("5/second") for name, client in CLIENTS.items()},
}


@pytest.mark.parametrize("make", IN_MEMORY.values(), ids=IN_MEMORY)
def test_what_is_in_memory(remade: Any, make: Any) -> None:
    """It would count anew elsewhere, so it says what is expected."""
    made = make()
    done = "pickled|copied"
    kind = type(made).__qualname__
    with pytest.raises(
        TypeError, match=rf"a {kind} cannot be ({done}): .*expected (limiter= with )?the URL of a store on Redis"
    ):
        remade(made)


@pytest.mark.parametrize("kind", [copy.copy, copy.deepcopy])
def test_a_copy_shares_a_store_in_memory(kind: Any) -> None:
    """A store that was given goes on to count for both."""
    store = MemoryStore()
    limiter = Limiter(store)
    assert limiter.hit("k", "1/day").allowed
    assert not kind(limiter).hit("k", "1/day").allowed
    client = kind(RateLimitAdapter("5/second", limiter=limiter))
    assert client._throttle._limiter is limiter


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Limiter(MemoryStore()), "a MemoryStore cannot be pickled: its counts"),
        (lambda: RateLimitAdapter("5/s", limiter=Limiter("memory://")), "a Limiter cannot be pickled: its counts"),
        (
            lambda: RedisStore("redis://h", credentials=lambda: ("u", "p")),
            "its credentials cannot: .*a module-level func",
        ),
        (lambda: RateLimitAdapter("5/s", limiter=URL, key=lambda _: "a"), "its key cannot: .*lambda.*a module-level function"),
        (lambda: RateLimitPoolManager("5/s", limiter=URL, repeatable=lambda _: True), "its repeatable cannot"),
        (
            lambda: RateLimitTransport(limiter=URL, transport=httpx.HTTPTransport()),
            "its transport cannot: an object of",
        ),
        (lambda: RateLimitTransport2("5/s", limiter=URL, transport=httpx2.HTTPTransport()), "its transport cannot"),
        (lambda: Limiter(URL, observers=(each for each in ["prometheus"])), "its observers cannot: .*genexpr"),
    ],
)
def test_what_cannot_be_pickled(make: Any, says: str) -> None:
    """The argument is named, and what may stand there."""
    with pytest.raises(TypeError, match=says):
        pickle.dumps(make())


def test_a_copy_shares_what_cannot_be_pickled() -> None:
    """Nothing is asked of it."""

    def key(_: object) -> str:
        return "a"

    manager = PoolManager()
    for kind in (copy.copy, copy.deepcopy):
        assert kind(RateLimitAdapter(limiter=URL, key=key))._throttle._key is key
        assert kind(RateLimitPoolManager(limiter=URL, manager=manager))._manager is manager


def test_a_session_of_aiohttp_goes_on() -> None:
    """A middleware that is a base of ours is still one of aiohttp."""

    async def use() -> None:
        async with aiohttp.ClientSession(middlewares=[RateLimitMiddleware("5/second")]):
            pass

    asyncio.run(use())
