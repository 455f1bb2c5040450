"""The key of refusals' ids: agreed on through the store, in the background, whatever becomes of the store meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from limitgate import AsyncRedisStore, MemoryStore, RedisStore, Rule, StoreError, testing
from limitgate.gate import refusals
from limitgate.gate.admission import Admission
from limitgate.gate.refusals import Refusals, kept_keys, place_of_keys
from limitgate.http.response import URN, RefusalId, RefusalKey, tag_of
from limitgate.limits.decision import Decision
from limitgate.stores.base import ConfigRequest, StoredConfig
from tests.support.doors import PEER, SITES, Site, WSGISite, until
from tests.support.redis_server import RedisServer

Open = Callable[..., Site]


def refuse_one(it: Refusals) -> None:
    """Have a request refused."""
    it.refuse(Admission(), Decision(False, 1, 0, 1.0, 1.0, 0, "api"), ("api",), "0f" * 16, 1, ())


@pytest.fixture(params=SITES, ids=lambda door: door.door)
def site(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens sites of one door, on one prefix, which nothing but Redis joins: as processes would be."""
    prefix = f"t{uuid.uuid4().hex}"
    with ExitStack() as stack:
        yield lambda url, **options: stack.enter_context(
            request.param(Rule("api", "1/minute"), **{"store": url, "key_prefix": prefix} | options)
        )


def agreed(site: Site) -> Site:
    """The same, once it has refused a request, and has asked the store in the background to the end."""
    refused(site, "10.9.9.9")

    def has_agreed() -> bool:
        site.idle(0.001)
        refusals = site.app.gate.refusals
        asking = refusals._under_way
        is_over = not asking.is_alive() if isinstance(asking, threading.Thread) else asking is None or asking.done()
        return refusals.is_agreed and is_over

    until(has_agreed)
    return site


def refused(site: Site, peer: str = PEER) -> str:
    replies = [site.ask(peer=peer) for _ in range(2)]
    assert replies[1].status == 429
    return str(replies[1].json()["instance"].removeprefix(URN))


def kept(server: RedisServer, site: Site) -> list[RefusalKey]:
    """The keys that anybody finds in Redis who may look there."""
    with server.client() as client:
        value = client.get(place_of_keys(site.app.gate.refusals._place.partition(":")[0]))
    return [*map(RefusalKey, kept_keys(value.decode().partition(" ")[2]))] if value else []


def read(written: str, keys: list[RefusalKey]) -> RefusalId:
    """What an id says by one of these keys."""
    (found,) = [each for each in (key.read(written) for key in keys) if each.tag == tag_of("api")]
    return found


def test_processes_agree(site: Open, redis_server: RedisServer) -> None:
    """All ids are read by the one key in the store, and those of one bucket name the same one."""
    one = agreed(site(redis_server.url))
    other = agreed(site(redis_server.url))
    ids = refused(one), refused(other)
    (key,) = kept(redis_server, one)[:1]
    assert read(ids[0], [key]).digest == read(ids[1], [key]).digest


def test_ids_from_before_are_kept(site: Open, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was refused before the key was known is read by another one in the store."""
    agreed(site(redis_server.url))
    with monkeypatch.context() as patched:
        patched.setattr(Refusals, "agree_soon", lambda _: None)
        late = [site(redis_server.url) for _ in range(2)]
        early = [refused(each, f"10.0.0.{number}") for number, each in enumerate(late)]
    for each in late:
        each.app.gate.refusals._next_look = 0.0
        each.ask(peer="10.0.0.9")
        each.ask(peer="10.0.0.9")
        agreed(each)
    until(lambda: len(kept(redis_server, late[0])) == 3)
    keys = kept(redis_server, late[0])
    assert len({read(written, keys).digest for written in early}) == 2
    assert read(refused(late[1]), keys[:1])


def test_the_store_is_not_asked_while_a_test_replaces_it(site: Open, redis_server: RedisServer) -> None:
    """Under `limitgate.testing.frozen`, nothing is sent to Redis, also in the background."""
    with testing.frozen():
        one = site(redis_server.url)
        assert refused(one)
        assert one.app.gate.refusals._under_way is None
    agreed(one)


@pytest.mark.usefixtures("default_timeout")
def test_an_outage_at_start(site: Open) -> None:
    """Requests are answered all the same; once the store is there, ids from the outage can be read, too."""
    server = RedisServer()
    server.kill()
    try:
        one = site(server.url, on_error="local")
        early = refused(one)
        server.start()

        def is_kept() -> bool:
            one.ask(peer="10.0.0.1")
            one.idle(0.01)
            return bool(kept(server, one))

        until(is_kept)
        assert read(early, kept(server, agreed(one)))
    finally:
        server.stop()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_flush(site: Open, own_redis: RedisServer, *, is_late: bool) -> None:
    """Within a minute a process that refuses writes its key again, even if a new process has made another one meanwhile."""
    one = agreed(site(own_redis.url))
    (first,) = kept(own_redis, one)
    with own_redis.client() as client:
        client.flushall()
    assert read(refused(one), [first])
    assert kept(own_redis, one) == []
    expected = [first.key]
    if is_late:
        (second,) = kept(own_redis, agreed(site(own_redis.url)))
        assert second.key != first.key
        expected = [second.key, first.key]
    one.app.gate.refusals._next_look = 0.0
    refused(one, "10.0.0.1")

    def is_kept() -> bool:
        one.idle(0.001)
        return [key.key for key in kept(own_redis, one)] == expected

    until(is_kept)


@pytest.mark.usefixtures("default_timeout")
def test_a_restart_that_forgets(site: Open, own_redis: RedisServer) -> None:
    """When the store answers again, it gets the key again, for ids that are out already."""
    one = agreed(site(own_redis.url))
    (first,) = kept(own_redis, one)
    own_redis.kill()
    until(lambda: one.ask().status == 200 and one.app.gate.failures > 0)
    own_redis.start()

    def is_kept() -> bool:
        one.ask()
        one.idle(0.01)
        return [key.key for key in kept(own_redis, one)] == [first.key]

    until(is_kept)


@pytest.mark.parametrize("options", [{"secret": "a secret of tests"}, {"store": MemoryStore()}])
def test_nothing_is_asked(site: Open, redis_server: RedisServer, options: Any) -> None:
    """With a secret the key comes from it; a store in memory is of no use to others."""
    one = site(redis_server.url, **options)
    written = refused(one)
    assert kept(redis_server, one) == []
    if "secret" in options:
        assert RefusalKey.derived(b"a secret of tests").read(written).tag == tag_of("api")
    else:
        with site(redis_server.url, store=MemoryStore()) as other:
            assert one.app.gate.refusals._key.read(written) != other.app.gate.refusals._key.read(written)


def test_rights_that_are_missing(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """A user that may not write the key has its requests decided as ever, and asks once a minute at most."""
    rights = "+eval +evalsha +get +set +del +time +getrange +setrange +strlen +pexpire +info"
    with own_redis.client() as client:
        client.execute_command("ACL", "SETUSER", "limited", "on", ">word", "~limited:api:*", "-@all", *rights.split())
    url = own_redis.url.replace("://", "://limited:word@")
    with WSGISite(Rule("api", "1/minute"), store=url, key_prefix="limited", on_error="closed") as one:
        ids = [refused(one, f"10.0.0.{number}") for number in range(5)]
        assert len(set(ids)) == 5
        assert not one.app.gate.refusals.is_agreed
        assert (one.app.gate.failures, one.statuses(2, peer="10.0.0.9")) == (0, [200, 429])
    assert "on_error decides" not in caplog.text


def test_something_else_under_the_key(own_redis: RedisServer) -> None:
    """It is left alone."""
    with own_redis.client() as client:
        client.lpush(place_of_keys("other"), "x")
        with WSGISite(Rule("api", "1/minute"), store=own_redis.url, key_prefix="other") as one:
            refused(one)
            thread = one.app.gate.refusals._under_way
            thread.join()
            assert not one.app.gate.refusals.is_agreed
        assert client.lrange(place_of_keys("other"), 0, -1) == [b"x"]


class Keeping:
    """A store of somebody else's that keeps configuration, once it works."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.asked = 0
        self.fails = True

    def spend(self, plan: Any, timeout: float) -> Any:
        return self.memory.spend(plan, timeout)

    def config(self, request: ConfigRequest, timeout: float) -> StoredConfig:
        self.asked += 1
        if self.fails:
            raise StoreError("gone")
        return self.memory.config(request, timeout)

    def close(self) -> None:
        pass


def test_a_store_is_asked_again_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """By refusals, however many there are; once it answers, it is read and written."""
    now = [1000.0]
    monkeypatch.setattr(refusals, "monotonic", lambda: now[0])
    store = Keeping()
    made = Refusals(store, "p")

    def refuse(asked: int) -> None:
        for _ in range(5):
            refuse_one(made)
        made.before_fork()
        assert store.asked == asked

    refuse(1)
    now[0] += 59
    refuse(1)
    now[0] += 2
    store.fails = False
    refuse(3)
    assert made.is_agreed
    now[0] += 59
    refuse(3)
    now[0] += 2
    refuse(4)


def test_only_so_many_keys_are_kept() -> None:
    """The one in force, and the latest."""
    store = Keeping()
    store.fails = False
    made = [Refusals(store, "p") for _ in range(70)]
    own = [each._key.key for each in made]
    for each in made:
        refuse_one(each)
        each.before_fork()
    keys = kept_keys(store.config(ConfigRequest("p:refusal-ids"), 1).text)
    assert keys == [own[0], *own[7:]]
    assert {each._key.key for each in made} == {own[0]}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_child_asks_for_itself(redis_server: RedisServer) -> None:
    """What the parent had begun is over, and what it knew is known."""
    with WSGISite(Rule("api", "1/minute"), store=redis_server.url, key_prefix=f"t{uuid.uuid4().hex}") as one:
        agreed(one)
        key = one.app.gate.refusals._key.key
        child = os.fork()
        if not child:
            made = one.app.gate.refusals
            os._exit(0 if made._key.key == key and made.is_agreed and one.ask().status == 200 else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_an_event_loop_that_ends() -> None:
    """What it has begun is begun anew by the next refusal."""

    class Slow:
        async def aspend(self, plan: Any, timeout: float) -> Any: ...

        async def aclose(self) -> None: ...

        async def aconfig(self, request: ConfigRequest, timeout: float) -> StoredConfig:
            await asyncio.sleep(60)
            raise AssertionError

    async def begun(made: Refusals) -> None:
        made.agree_soon()
        await asyncio.sleep(0)

    made = Refusals(Slow(), "p")
    asyncio.run(begun(made))
    assert made._next_look == 0.0


def connections(server: RedisServer) -> int:
    """Connections to a server, but for the one that asks."""
    with server.client() as client:
        return len(client.client_list()) - 1


@pytest.mark.parametrize("is_late", [False, True])
def test_a_store_that_is_closed_meanwhile(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, *, is_late: bool) -> None:
    """What connects for the key is closed when it is through, and what has not begun does not begin."""
    store, may_begin = RedisStore(own_redis.url), threading.Event()
    made = Refusals(store, "p")

    class Late(threading.Thread):
        def run(self) -> None:
            may_begin.wait()
            super().run()

    with own_redis.frozen(), monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", Late)
        refuse_one(made)
        patched.undo()
        if not is_late:
            may_begin.set()
            until(lambda: bool(store._servers._connections._wanted))
        store.close()
        may_begin.set()
    made.before_fork()
    until(lambda: connections(own_redis) == 0)
    assert not store._servers._connections._connecting
    refuse_one(made)  # a store that is used again is asked again
    until(lambda: made.is_agreed)
    store.close()


def test_a_store_that_is_closed_while_it_is_asked() -> None:
    """Nothing more is asked, and what the store has opened is closed."""

    class Closing(Keeping):
        closings = closed = 0

        def config(self, request: ConfigRequest, timeout: float) -> StoredConfig:
            self.closings += 1
            return super().config(request, timeout)

        def close(self) -> None:
            self.closed += 1

    store = Closing()
    store.fails = False
    made = Refusals(store, "p")
    refuse_one(made)
    made.before_fork()
    assert (store.asked, store.closed, made.is_agreed) == (1, 1, False)


def test_a_process_ends_while_a_store_is_asked() -> None:
    """However long it takes to answer."""
    asking = list[bool]()

    class Asked(Keeping):
        def config(self, request: ConfigRequest, timeout: float) -> StoredConfig:
            asking.append(threading.current_thread().daemon)
            return super().config(request, timeout)

    store = Asked()
    store.fails = False
    made = Refusals(store, "p")
    refuse_one(made)
    made.before_fork()
    assert made.is_agreed
    assert all(asking)


@pytest.mark.parametrize("turns", range(4))
def test_a_store_that_is_closed_on_an_event_loop(own_redis: RedisServer, turns: int) -> None:
    """However far the work is: it does not connect again."""

    async def main() -> None:
        store = AsyncRedisStore(own_redis.url)
        made = Refusals(store, "p")
        refuse_one(made)
        for _ in range(turns):
            await asyncio.sleep(0)
        await store.aclose()
        assert isinstance(made._under_way, asyncio.Task)
        await made._under_way
        assert not store._loops
        await asyncio.to_thread(until, lambda: connections(own_redis) == 0)

    asyncio.run(main())
