"""What counts as a store's silence: only time in which this process was there to listen."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from limitgate import AsyncRedisStore, Limiter, LimitGate, RedisStore, Rule, StoreError
from limitgate.gate.flow import Budget, Flow, measures_silence, run
from limitgate.limits.plan import Plan, Reading
from limitgate.stores.redis.aio.listening import GRAIN, LONGEST, ListeningClock
from limitgate.stores.redis.dialer import SPARE, Resolver, Spare
from limitgate.stores.redis.errors import store_error
from limitgate.stores.redis.threads import connection as line
from limitgate.stores.redis.threads.connection import GRACE, SHORTEST, SLICE, ListenDeadline
from tests.support.crowds import a_plan, ask, begin, ends, store_at
from tests.support.doors import ASGISite, Reply, WSGISite
from tests.support.proxy import PATIENT, Proxy, in_a_loop, until
from tests.support.redis_server import RedisServer, free_port
from tests.support.virtual import World

SLACK = 3.0
"""Seconds that a busy machine may add to a deadline."""
HOST = "name.example"


# --- the clock of an event loop ---------------------------------------------------------------------------------------


block = time.sleep
"""What a handler does that does not await."""


def leap(seconds: float) -> None:
    """A handler that does not await for so long, as far as the running event loop can tell."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


class PermitWaiter:
    """Waits on a clock for so many seconds."""

    def __init__(self, clock: ListeningClock, seconds: float) -> None:
        self.clock, self.until = clock, clock.now() + seconds
        self.is_over = asyncio.get_running_loop().create_future()

    def listened(self) -> float | None:
        left = self.until - self.clock.seconds
        if left <= 0 and not self.is_over.done():
            self.is_over.set_result(None)
        return left if left > 0 else None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_it_goes_on_while_somebody_waits(world: World) -> None:
    """A loop that has nothing else to do listens all the time, and the clock stands still when nobody waits."""

    async def wait() -> None:
        clock = ListeningClock()
        await asyncio.sleep(5)
        assert clock.now() == 0
        waiter = PermitWaiter(clock, 0.1)
        clock.watch(waiter)
        began = world.now
        await waiter.is_over
        assert 0.099 <= world.now - began <= 0.12
        stood = clock.now()
        await asyncio.sleep(5)
        assert clock.now() == stood

    world.run(wait())


@pytest.mark.parametrize("away", [0.15, 3.0, 40.0])
def test_a_loop_that_was_away_has_not_listened(world: World, away: float) -> None:
    """However long the loop is blocked, hardly any of that counts; afterwards the rest of the time is waited for."""

    async def wait() -> None:
        clock = ListeningClock()
        waiter = PermitWaiter(clock, 0.1)
        clock.watch(waiter)
        await asyncio.sleep(0.03)
        world.advance(away)  # what a callback does that blocks
        assert not waiter.is_over.done()
        came_back = world.now
        await waiter.is_over
        assert 0.1 - 0.03 - LONGEST - GRAIN <= world.now - came_back <= 0.1

    world.run(wait())


def test_a_loop_that_is_never_on_time_still_listens(world: World) -> None:
    """Where every turn of the loop takes long, silence is found after as many turns as the time has parts."""

    async def wait() -> None:
        clock = ListeningClock()
        waiter = PermitWaiter(clock, 0.1)
        clock.watch(waiter)
        turns = 0
        while not waiter.is_over.done():
            world.advance(0.2)
            await asyncio.sleep(0)
            turns += 1
        assert 2 <= 0.1 / LONGEST <= turns <= 20

    world.run(wait())


def test_within_goes_by_it(world: World) -> None:
    """What takes long only because the loop was away is in time; what really takes long is not."""

    async def wait() -> None:
        clock = ListeningClock()
        async with clock.within(0.5):
            await asyncio.sleep(0.01)
            world.advance(30)
            await asyncio.sleep(0.01)
        began = world.now
        with pytest.raises(TimeoutError):
            async with clock.within(0.5):
                await asyncio.sleep(30)
        assert 0.5 <= world.now - began < 0.55

    world.run(wait())


@pytest.mark.parametrize("sent", [False, True], ids=["before it was sent", "while it was on its way"])
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@in_a_loop
async def test_a_stall_is_no_failure_of_redis(redis_server: RedisServer, *, sent: bool, cold: bool) -> None:
    """A loop that is blocked for longer than the timeout, at whatever moment, believes the reply that comes then."""
    async with store_at(redis_server.url) as store:
        if not cold:
            await ask(store, a_plan())
        for turns in range(6):
            requests = begin(store, *[a_plan() for _ in range(100)], timeout=1.5)
            for _ in range(2 + turns if sent else 0):
                await asyncio.sleep(0)
            leap(2)
            assert await ends(requests) == [True] * 100
        assert (store.failures, store.outages, store.healthy) == (0, 0, True)


@in_a_loop
async def test_what_comes_late_is_believed_but_no_later(redis_server: RedisServer) -> None:
    """A server that is silent for the timeout while the loop listens has failed, and only then does a stall not help it."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await ask(store, a_plan())
        proxy.hold()
        requests = begin(store, a_plan(), timeout=0.4)
        await asyncio.sleep(0.04)
        leap(0.6)
        assert not requests[0].done()
        began = time.monotonic()
        assert await ends(requests) == ["timeout"]
        assert 0.1 < time.monotonic() - began < 0.4 + SLACK
        assert store.failures == 1
        proxy.release()


@in_a_loop
async def test_a_queue_waits_for_us_and_not_for_redis(redis_server: RedisServer) -> None:
    """A crowd larger than what goes out at once is decided to the last, however long that takes us."""
    async with store_at(redis_server.url) as store:
        plan = a_plan("900/day")
        requests = begin(store, *[plan] * 6000, timeout=0.5)
        while not all(request.done() for request in requests):
            block(0.03)
            await asyncio.sleep(0)
        found = await ends(requests)
        assert (found.count(True), found.count(False)) == (900, 5100)
        assert store.failures == 0


@in_a_loop
async def test_who_fails_while_the_clock_goes_stops_nobody() -> None:
    """An error in one listener keeps no other from being told, and time goes on."""

    class Broken:
        told = 0

        def listened(self) -> float | None:
            self.told += 1
            raise ValueError

    clock, broken = ListeningClock(), Broken()
    clock.watch(broken)
    waiter = PermitWaiter(clock, 2 * LONGEST)  # of which one look counts half at most
    clock.watch(waiter)
    await asyncio.wait_for(waiter.is_over, PATIENT)
    clock.forget(broken)
    assert broken.told > 1


# --- the patience of threads ------------------------------------------------------------------------------------------


def test_patience_counts_what_was_waited_in_vain() -> None:
    """Slices add up to the time; a slice that brought something counts towards its end, but not as silence."""
    listen_deadline = ListenDeadline(0.03)
    assert listen_deadline.slice() == SLICE
    listen_deadline.waited_in_vain(SLICE)
    listen_deadline.waited_since(time.monotonic() - 0.01, SLICE)
    assert listen_deadline.spent == SLICE
    assert 0 < listen_deadline.left < 0.03 - SLICE - 0.009
    listen_deadline.waited_since(time.monotonic() - 5, SLICE)
    assert listen_deadline.left > 0, "this thread was away, and nobody knows for how much of the time Redis was silent"
    listen_deadline.waited_in_vain(listen_deadline.left)
    assert (listen_deadline.slice(), listen_deadline.is_over) == (SHORTEST, False)
    listen_deadline.waited_in_vain(SHORTEST)
    assert listen_deadline.is_over
    assert not listen_deadline.is_exhausted
    listen_deadline.waited_in_vain(GRACE)
    assert listen_deadline.is_exhausted


class Starved:
    """A socket whose thread gets the interpreter back late, when Redis has answered long ago."""

    def __init__(self, real: Any, late: float) -> None:
        self._real, self.late = real, late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def recv(self, most: int) -> bytes:
        select.select([self._real], [], [], 1.0)
        time.sleep(self.late)
        received: bytes = self._real.recv(most)
        return received


@pytest.mark.parametrize("late", [0.2, 0.5])
def test_a_thread_that_was_away_believes_what_has_come(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    """A thread that waits for the interpreter longer than for Redis gets its answers, in each of many calls."""
    made, sockets = line.SyncConnection.__init__, []

    def starved(self: Any, connection: Any) -> None:
        made(self, connection)
        self._socket = Starved(self._socket, 0.2)
        sockets.append(self._socket)

    monkeypatch.setattr(line.SyncConnection, "__init__", starved)
    with contextlib.closing(RedisStore(redis_server.url)) as store:
        store.spend(a_plan(), PATIENT)  # which takes several replies
        for socket_ in sockets:
            socket_.late = late
        for _ in range(3):
            reading = store.spend(a_plan(), 0.1)
            assert (reading.admitted, reading.waited) == (True, 0)
        assert store.failures == 0


@pytest.mark.alone
def test_a_frozen_redis_costs_a_thread_its_timeout(own_redis: RedisServer) -> None:
    """Slices make nobody wait longer, and say how long that was."""
    with contextlib.closing(RedisStore(own_redis.url)) as store:
        store.spend(a_plan(), PATIENT)
        with own_redis.frozen():
            began = time.monotonic()
            with pytest.raises(StoreError) as caught:
                store.spend(a_plan(), 0.2)
            assert 0.19 < time.monotonic() - began < 0.2 + SLACK
        assert caught.value.waited == pytest.approx(0.2, abs=0.01)


# --- budgets ----------------------------------------------------------------------------------------------------------


class Slow:
    """A store that says for how long it was waited for, and notes what it was given."""

    measures_silence = True

    def __init__(self, *waits: float) -> None:
        self.waits, self.given = list(waits), list[float]()

    def spend(self, plan: Plan, timeout: float) -> Reading:
        self.given.append(timeout)
        return Reading(0, [], admitted=True, waited=self.waits.pop(0))

    def close(self) -> None:
        pass


def test_several_questions_share_a_budget() -> None:
    """Each question may take what those before have left; where nothing is left nobody is asked."""

    def asking() -> Flow[int]:
        for number in range(9):
            try:
                yield a_plan(), 0.1
            except StoreError as error:
                return number if error.fault == "timeout" else -1
        return -1

    store = Slow(0.04, 0.0, 0.05, 0.02)
    assert run(store, asking(), Budget(0.1, measured=measures_silence(store))) == 4
    assert store.given == pytest.approx([0.1, 0.06, 0.06, 0.01])


@pytest.fixture(params=[ASGISite, WSGISite], ids=["asgi", "wsgi"])
def site(request: pytest.FixtureRequest) -> Any:
    return request.param


# --- overload of our own ----------------------------------------------------------------------------------------------


class Full:
    """A store that there is no room to ask."""

    asked = 0

    def spend(self, plan: Plan, timeout: float) -> Reading:
        self.asked += 1
        raise StoreError("this process has no file descriptor, thread or memory left for a connection to Redis", "overload")

    async def aspend(self, plan: Plan, timeout: float) -> Reading:
        return self.spend(plan, timeout)

    def close(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize("own", [None, "open", "closed", "local"])
@pytest.mark.parametrize("policy", ["open", "closed", "local"])
def test_without_room_to_ask_this_process_limits(site: Any, policy: Any, own: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever on_error says, requests are limited here, with our headers, and told as what it is, once."""
    with contextlib.closing(site(Rule("login", "5/hour", on_error=own), store=Full(), on_error=policy)) as it:
        replies: list[Reply] = [it.ask("/") for _ in range(8)]
    assert [reply.status for reply in replies] == [200] * 5 + [429] * 3
    assert replies[-1].rate["x-ratelimit-remaining"] == "0"
    gate = it.app.gate
    assert (gate.failures, gate.overloaded) == (0, 8)
    assert [message.split()[0] for message in caplog.messages] == ["LG015"]


def test_a_limiter_without_room_raises() -> None:
    """A limiter has no policy of its own: the error says that it is our overload."""
    with pytest.raises(StoreError) as caught:
        Limiter(Full()).hit("key", "1/day")
    assert caught.value.fault == "overload"


@contextlib.contextmanager
def without_descriptors() -> Iterator[list[int]]:
    """This process may open no more files; gives those that keep others from being opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 5  # noqa: PTH208 - names are enough
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


@in_a_loop
async def test_one_connection_is_made_without_descriptors(redis_server: RedisServer) -> None:
    """A descriptor is kept for Redis. Where that is gone, too, it is our overload, and no failure of Redis."""
    store, other = AsyncRedisStore(redis_server.url), AsyncRedisStore(redis_server.url)
    with without_descriptors():
        first = await ask(store, a_plan())
        second = await ask(other, a_plan(), a_plan()) + await ask(other, a_plan())
    assert first == [True]
    assert second == ["overload"] * 3
    assert (other.healthy, other.failures) == (True, 0)
    await asyncio.sleep(0.06)
    assert await ask(other, a_plan()) == [True]
    await store.aclose()
    await other.aclose()


def test_one_connection_of_threads_is_made_without_descriptors(redis_server: RedisServer) -> None:
    """The same under threads."""
    with contextlib.closing(RedisStore(redis_server.url)) as store, contextlib.closing(RedisStore(redis_server.url)) as other:
        with without_descriptors():
            admitted = store.spend(a_plan(), PATIENT).admitted
            with pytest.raises(StoreError) as caught:
                other.spend(a_plan(), PATIENT)
        assert admitted
        assert caught.value.fault == "overload"
        assert (other.healthy, other.failures) == (True, 0)
        assert other.spend(a_plan(), PATIENT).admitted


def test_closed_stores_leave_no_descriptor() -> None:
    """The descriptor in reserve is one for the process, however many stores there are or were."""
    RedisStore("redis://127.0.0.1:1").close()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are enough
    for _ in range(20):
        RedisStore("redis://127.0.0.1:1").close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "asyncio"])
def test_sentinels_that_cannot_be_asked_for_want_of_a_descriptor(threads: bool) -> None:  # noqa: FBT001
    """That is our overload, and no failure of a Sentinel, too."""
    url = "redis+sentinel://127.0.0.1:1,127.0.0.1:2/mymaster"

    store, other = RedisStore(url), AsyncRedisStore(url)
    SPARE.release()
    failure: StoreError | None = None
    with asyncio.Runner() as runner:
        runner.get_loop()
        with without_descriptors():
            try:
                store.spend(a_plan(), PATIENT) if threads else runner.run(other.aspend(a_plan(), PATIENT))
            except StoreError as error:
                failure = error
    assert failure is not None
    assert failure.fault == "overload"


def test_an_address_that_is_not_to_be_had_is_no_overload() -> None:
    """Where IPv6 is switched off, connecting to ::1 says so: Redis is out of reach, and its breaker has to know."""
    error = store_error(RedisConnectionError("Error 99 connecting"))
    cause = store_error(OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"))
    assert (error.fault, cause.fault) == ("connection", "connection")
    assert store_error(OSError(errno.EMFILE, "Too many open files")).fault == "overload"


def test_a_spare_is_given_up_once() -> None:
    """It is there again after it was filled."""
    spare = Spare()
    spare.fill()
    assert [spare.release(), spare.release()] == [True, False]
    spare.fill()
    spare.fill()
    assert [spare.release(), spare.release()] == [True, False]


def test_a_thread_connects_by_itself_where_no_other_can_be_started(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without threads to connect in, those that ask do, and everything is decided by Redis."""
    monkeypatch.setattr(threading.Thread, "start", refused)
    with contextlib.closing(RedisStore(redis_server.url, local_refusals=False)) as store:
        plan = a_plan("3/day")
        assert [store.spend(plan, PATIENT).admitted for _ in range(5)] == [True] * 3 + [False] * 2
        assert store.failures == 0
    with contextlib.closing(RedisStore("redis://127.0.0.1:1")) as nowhere:
        with pytest.raises(StoreError) as caught:
            nowhere.spend(plan, PATIENT)
        assert caught.value.fault == "connection"


def refused(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_server_that_starts_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an ASGI server sends lifespan events, the connection is there before the first request, and not waited for."""
    store = AsyncRedisStore("redis://127.0.0.1:1")
    connected: list[int] = []

    async def connect() -> None:
        connected.append(1)

    monkeypatch.setattr(store, "connect", connect)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert connected == [1]

    async def silent(*_: Any) -> Any:
        return {"type": "lifespan.startup"}

    asyncio.run(LimitGate(app, rules=[Rule("all", "1/day")], store=store)({"type": "lifespan"}, silent, silent))
    assert connected == [1]


@in_a_loop
async def test_connecting_ahead(redis_server: RedisServer) -> None:
    """Nobody waits for it, one connection is made, and it serves."""
    async with Proxy(redis_server) as proxy, store_at(proxy.url) as store:
        await store.connect()
        await store.connect()
        await until(lambda: proxy.lines)
        assert await ask(store, a_plan()) == [True]
        await store.connect()
        assert len(proxy.lines) == 1
    async with store_at("redis://127.0.0.1:1") as nowhere:
        await nowhere.connect()
        await asyncio.sleep(0.05)
        assert await ask(nowhere, a_plan()) == ["connection"]


# --- names of servers -------------------------------------------------------------------------------------------------


class Names:
    """A name server, which may be slow or know nothing."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = 0
        self.error: OSError | None = None
        self.addresses = ["127.0.0.1"] * 2

    def getaddrinfo(self, host: str, *_: Any, **__: Any) -> list[Any]:
        self.asked += 1
        assert self.may_answer.wait(PATIENT)
        if self.error:
            raise self.error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in self.addresses]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr("limitgate.stores.redis.dialer.socket.getaddrinfo", names.getaddrinfo)
    return names


def resolving() -> int:
    return sum(thread.name == "limitgate-resolver" for thread in threading.enumerate())


@in_a_loop
async def test_many_attempts_share_a_look_up(names: Names) -> None:
    """While a name server is slow, one thread of ours waits for it, and none of those that are the application's."""
    resolver = Resolver()
    names.may_answer.clear()
    waiting = [asyncio.create_task(resolver.addresses(HOST)) for _ in range(5)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    assert resolving() == 1
    assert await asyncio.to_thread(lambda: "at once") == "at once"
    names.may_answer.set()
    assert await asyncio.gather(*waiting[1:]) == [("127.0.0.1",)] * 4
    assert names.asked == 1
    assert await resolver.addresses(HOST) == ("127.0.0.1",)
    assert names.asked == 2


@in_a_loop
async def test_addresses_need_no_look_up(names: Names) -> None:
    """What is an address already is that."""
    assert [await Resolver().addresses(host) for host in ("127.0.0.1", "::1")] == [("127.0.0.1",), ("::1",)]
    assert names.asked == 0


@pytest.mark.parametrize("trouble", ["name server", "no thread"])
@in_a_loop
async def test_what_was_found_last_serves(names: Names, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    """Where a name cannot be looked up now, its last address is tried; without one it is an error."""
    resolver = Resolver()
    await resolver.addresses(HOST)
    if trouble == "no thread":
        monkeypatch.setattr(threading.Thread, "start", refused)
    else:
        names.error = socket.gaierror(-2, "Name or service not known")
    assert await resolver.addresses(HOST) == ("127.0.0.1",)
    with pytest.raises(OSError, match="no thread" if trouble == "no thread" else "not known"):
        await resolver.addresses("other.example")


@in_a_loop
async def test_a_name_that_is_none(names: Names) -> None:
    """Whatever is wrong with a name, all who wait for it are told, also those who ask again."""
    names.error = UnicodeError("label empty or too long")  # type: ignore[assignment]
    resolver = Resolver()
    for _ in range(2):
        with pytest.raises(UnicodeError, match="label empty"):
            await asyncio.wait_for(resolver.addresses("redis..local"), PATIENT)


@in_a_loop
async def test_the_child_of_a_fork_looks_up_by_itself(names: Names) -> None:
    """A look-up of the parent's, whose thread the child does not have, keeps nobody there waiting."""
    resolver = Resolver()
    names.may_answer.clear()
    waiting = asyncio.create_task(resolver.addresses(HOST))
    await asyncio.sleep(0.01)
    resolver.reset_after_fork()  # as a child does
    names.may_answer.set()
    assert await asyncio.wait_for(resolver.addresses(HOST), PATIENT) == ("127.0.0.1",)
    waiting.cancel()


@in_a_loop
async def test_a_name_server_that_needs_a_descriptor(names: Names) -> None:
    """Where a name cannot be looked up for want of a descriptor, that is what the error says."""
    names.error = socket.gaierror(-11, "System error")
    resolver = Resolver()
    failure: OSError | None = None
    with without_descriptors():
        try:
            await resolver.addresses(HOST)
        except OSError as error:
            failure = error
    assert failure is not None
    assert not isinstance(failure, socket.gaierror)


@in_a_loop
async def test_addresses_that_were_of_no_help_come_last(names: Names) -> None:
    """The latest is the very last, whatever else is found, and those that are not found any more are forgotten."""
    names.addresses = ["::1", "::2", "::3"]
    resolver = Resolver()
    resolver.pass_over("127.0.0.1", "127.0.0.1")
    assert await resolver.addresses(HOST) == ("::1", "::2", "::3")
    for address in ("::1", "::2", "::1"):
        resolver.pass_over(HOST, address)
    assert await resolver.addresses(HOST) == ("::3", "::2", "::1")
    names.addresses = ["::1", "::4"]
    assert await resolver.addresses(HOST) == ("::4", "::1")
    resolver.pass_over(HOST, "::4")
    assert await resolver.addresses(HOST) == ("::1", "::4")
    assert resolver._passed_over == {HOST: ["::1", "::4"]}


@in_a_loop
async def test_a_silent_address_does_not_keep_the_others_out(
    names: Names, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name has two addresses, and the first never says a word: the second serves once the first has had its time."""
    monkeypatch.setattr("limitgate.stores.redis.aio.batcher.CONNECT_TIMEOUT", 0.2)
    names.addresses = ["127.0.0.2", "127.0.0.1"]
    port = free_port()
    async with Proxy(redis_server, port) as proxy:
        with socket.create_server(("127.0.0.2", port)):  # takes connections, and that is all
            async with store_at(f"redis://{HOST}:{port}/0") as store, asyncio.timeout(PATIENT):
                while await ask(store, a_plan()) != [True]:  # noqa: ASYNC110 - nobody is there to set an event
                    await asyncio.sleep(0.01)
        assert proxy.lines


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_the_host_that_certificates_are_for_is_the_one_of_the_url(scheme: str) -> None:
    """An address is connected to, and the certificate has to be for the name."""
    connection = AsyncRedisStore(f"{scheme}://{HOST}:7777/0")._dialer._connection(None)
    from limitgate.stores.redis.redis_py import _at

    arguments = _at(connection._connection_arguments(), HOST, "127.0.0.1")
    assert (arguments["host"], arguments["port"]) == ("127.0.0.1", 7777)
    assert arguments.get("server_hostname") == (HOST if scheme == "rediss" else None)
