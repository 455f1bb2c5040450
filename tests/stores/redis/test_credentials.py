"""Logins that a callable gives: asked for with each connection, renewed in time, and never to be seen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from limitgate import (
    AsyncLimiter,
    AsyncRedisStore,
    ConfigError,
    Limiter,
    LimitGate,
    LimitGateWSGI,
    RedisStore,
    Rule,
    StoreError,
)
from limitgate.stores.redis.threads.connection import ListenDeadline
from limitgate.testing import frozen
from tests.stores.test_stores import AsyncDoor, Door, a_plan
from tests.support.doors import PATIENCE, wsgi_reply
from tests.support.impostor import Impostor
from tests.support.redis_cluster import RedisCluster, eventually
from tests.support.redis_server import RedisServer, free_port

SECRET = "s3cret"
KINDS: dict[str, Callable[[Any], Door]] = {"threads": Door, "asyncio": AsyncDoor}
STORES: dict[str, Any] = {"threads": RedisStore, "asyncio": AsyncRedisStore}


class Logins:
    """Gives logins for a user of a server, whose password is another one each time that it is rotated."""

    def __init__(self, *servers: RedisServer, valid: float | None = None) -> None:
        self.servers = servers
        self.valid = valid
        self.asked = 0
        self.behaves: Callable[[], Any] = lambda: None
        self.numbers = count(1)
        self.rotate()

    def rotate(self) -> None:
        self.password = f"{SECRET}-{next(self.numbers)}"
        for server in self.servers:
            with server.client() as client:
                client.execute_command("ACL", "SETUSER", "app", "on", "resetpass", f">{self.password}", "~*", "+@all")

    def login(self) -> Any:
        return ("app", self.password) if self.valid is None else ("app", self.password, self.valid)

    def __call__(self) -> Any:
        self.asked += 1
        return self.behaves() or self.login()


def ended(server: RedisServer) -> None:
    """All connections of the user end."""
    with server.client() as client:
        client.execute_command("CLIENT", "KILL", "USER", "app")


def connections(server: RedisServer) -> set[str]:
    """The connections of the user."""
    with server.client() as client:
        return {each["id"] for each in client.client_list() if each["user"] == "app"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def open_door(kind: str) -> Iterator[Callable[..., Door]]:
    with contextlib.ExitStack() as opened:
        yield lambda url, give: opened.enter_context(contextlib.closing(KINDS[kind](STORES[kind](url, credentials=give))))


def told_by(error: BaseException | None) -> str:
    """All that an error tells, and those that led to it, the variables of their frames included but for those of tests."""
    told = []
    while error is not None:
        told += [repr(error), str(error), repr(vars(error)), *traceback.format_exception(error)]
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if not frame.f_globals["__name__"].startswith("tests."):
                told.append(repr(frame.f_locals))
        error = error.__cause__ or error.__context__
    return "\n".join(told)


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.ERROR) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def answers(door: Door) -> bool:
    with contextlib.suppress(StoreError):
        return door.spend(a_plan()).admitted
    return False


def finds(door: Door) -> None:
    """Wait until calls are answered."""
    deadline = time.monotonic() + PATIENCE
    while not answers(door):
        assert time.monotonic() < deadline
        door.idle(0.02)


# --- logins -----------------------------------------------------------------------------------------------------------


def test_each_new_connection_asks(own_redis: RedisServer, open_door: Any) -> None:
    """No connection is made with what was given for another one."""
    logins = Logins(own_redis)
    door = open_door(own_redis.url, logins)
    assert logins.asked == 0
    for number in (1, 2, 3):
        assert door.spend(a_plan()).admitted
        assert door.spend(a_plan()).admitted
        assert logins.asked == number
        logins.rotate()
        ended(own_redis)
        door.idle(0.05)


@pytest.mark.parametrize("user", [None, "default", ""])
def test_the_default_user(own_redis: RedisServer, open_door: Any, user: str | None) -> None:
    """A password alone is that of the default user."""
    with own_redis.client() as client:
        client.config_set("requirepass", SECRET)
        try:
            assert open_door(own_redis.url, lambda: (user, SECRET)).spend(a_plan()).admitted
            assert open_door(f"{own_redis.url}?protocol=2", lambda: [user, SECRET, 900]).spend(a_plan()).admitted
            assert open_door(f"{own_redis.url}?protocol=3", lambda: [user, SECRET, float("inf")]).spend(a_plan()).admitted
        finally:
            client.config_set("requirepass", "")


def test_a_password_with_any_characters(own_redis: RedisServer, open_door: Any) -> None:
    """Nothing has to be encoded."""
    password = "p@/?#% :\N{SNOWMAN}"
    with own_redis.client() as client:
        client.execute_command("ACL", "SETUSER", "app", "on", "resetpass", f">{password}", "~*", "+@all")
    assert open_door(own_redis.url, lambda: ("app", password)).spend(a_plan()).admitted


def test_a_cluster(redis_cluster: RedisCluster, open_door: Any) -> None:
    """Each node is logged in to, and so is the one that is asked who holds which hash slot."""
    logins = Logins(*redis_cluster.nodes)
    door = open_door(redis_cluster.url, logins)
    for _ in range(20):
        assert door.spend(a_plan()).admitted
    assert all(connections(node) for node in redis_cluster.masters)
    assert logins.asked >= 3


def test_sentinels(own_redis: RedisServer, open_door: Any) -> None:
    """The master is logged in to; Sentinels have a login of their own in the URL."""
    own_redis.stop()
    master = RedisServer(port=str(free_port()))
    try:
        logins, port = Logins(master), str(master.port).encode()
        named = b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%b\r\n" % (len(port), port)
        with Impostor(SENTINEL=named) as sentinel:
            url = f"redis+sentinel://{sentinel.place}/m?sentinel_username=watch&sentinel_password=w"
            door = open_door(url, logins)
            assert door.spend(a_plan()).admitted
            said = [word for command in sentinel.heard for word in command]
            assert "watch" in said
            assert not [word for word in said if SECRET in word or word == "app"]
            logins.rotate()
            ended(master)
            finds(door)
    finally:
        master.stop()


def test_an_async_callable(own_redis: RedisServer) -> None:
    """It is awaited on the event loop of the connection."""
    logins, threads = Logins(own_redis), []

    async def give() -> Any:
        await asyncio.sleep(0)
        threads.append(threading.current_thread())
        return logins()

    class Giver:
        async def __call__(self) -> Any:
            return await give()

    for each in (give, Giver(), lambda: give()):  # noqa: PLW0108 - else it is known to be async
        with contextlib.closing(AsyncDoor(AsyncRedisStore(own_redis.url, credentials=each))) as door:
            assert door.spend(a_plan()).admitted
    assert set(threads) == {threading.current_thread()}


# --- renewal ----------------------------------------------------------------------------------------------------------


def test_a_login_is_renewed_before_it_expires(own_redis: RedisServer, open_door: Any, caplog: Any) -> None:
    """No call fails, although each login is refused as soon as it has expired; and old connections are closed."""
    logins = Logins(own_redis, valid=0.8)
    door = open_door(own_redis.url, logins)
    seen = set[str]()
    began = time.monotonic()
    while logins.asked < 4 or len(seen) < 4:
        assert time.monotonic() - began < PATIENCE
        assert door.spend(a_plan(), 5.0).admitted
        seen |= connections(own_redis)
        door.idle(0.02)
    assert time.monotonic() - began >= 1.2
    assert logins.asked - 1 <= len(seen) <= logins.asked
    assert len(connections(own_redis)) <= 2
    assert lines(caplog, logging.WARNING) == lines(caplog) == []


def test_a_later_login_that_expires_sooner(own_redis: RedisServer, open_door: Any) -> None:
    """Each connection has a login of its own, and is replaced before that expires."""
    logins = Logins(own_redis, valid=1000.0)
    door = open_door(own_redis.url, logins)
    assert answers(door)
    door.idle(0.1)
    ended(own_redis)
    logins.valid = 0.4
    assert door.spend(a_plan(), 5.0).admitted
    asked = logins.asked
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert door.spend(a_plan(), 5.0).admitted
        door.idle(0.02)
    assert 2 <= logins.asked - asked <= 4
    assert len(connections(own_redis)) <= 2


def test_connections_of_several_logins(own_redis: RedisServer) -> None:
    """The soonest to expire decides, and a login that does not expire ends that until another one does."""
    logins = Logins(own_redis)
    validity = iter([1000.0, 0.4, None, 0.4])
    logins.behaves = lambda: ("app", logins.password, *([] if (valid := next(validity, 1000.0)) is None else [valid]))
    with contextlib.closing(RedisStore(own_redis.url, credentials=logins)) as store:
        pool = store._servers._connections  # type: ignore[attr-defined]  # a single server's
        both = [pool.take(ListenDeadline(PATIENCE)) for _ in range(2)]
        for each in both:
            pool.give(each)
        eventually(lambda: logins.asked == 3, "the login that does not expire")
        eventually(lambda: len(connections(own_redis)) == 1, "the connections before to end")
        ended(own_redis)
        assert store.spend(a_plan(), PATIENCE).admitted
        eventually(lambda: logins.asked == 5, "the login after one that expires")
        assert store.spend(a_plan(), PATIENCE).admitted


def test_a_crowd_meets_a_renewal(own_redis: RedisServer, open_door: Any) -> None:
    """Calls under way are answered on the connection that they were sent on."""
    logins = Logins(own_redis, valid=0.2)
    door = open_door(own_redis.url, logins)
    until = time.monotonic() + PATIENCE
    while logins.asked < 4:
        assert time.monotonic() < until
        assert all(reading.admitted for reading in door.crowd([a_plan() for _ in range(50)]))


def test_a_renewal_that_fails(own_redis: RedisServer, open_door: Any, caplog: Any) -> None:
    """The connection goes on to serve, and further attempts are made. It is said once."""
    logins = Logins(own_redis, valid=0.4)
    door = open_door(own_redis.url, logins)
    assert answers(door)
    first = connections(own_redis)
    logins.behaves = lambda: 1 / 0
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert door.spend(a_plan(), 5.0).admitted
        door.idle(0.02)
    assert connections(own_redis) == first
    asked = logins.asked
    assert asked > 2
    logins.behaves = lambda: None
    eventually(lambda: answers(door) and connections(own_redis).isdisjoint(first), "a connection with a new login")
    (line,) = lines(caplog)
    assert line.startswith("LG063 ")


def test_a_closed_store_is_not_renewed(own_redis: RedisServer, open_door: Any) -> None:
    """Nothing is asked for it any more, until it is used again."""
    logins = Logins(own_redis, valid=0.2)
    door = open_door(own_redis.url, logins)
    assert answers(door)
    if isinstance(door, AsyncDoor):
        door.runner.run(door.store.aclose())
    else:
        door.store.close()
    eventually(lambda: not connections(own_redis), "the connections to end")
    door.idle(0.3)  # an attempt under way ends
    asked = logins.asked
    door.idle(0.6)
    assert (logins.asked, connections(own_redis)) == (asked, set())
    assert answers(door)
    asked = logins.asked
    eventually(lambda: answers(door) and logins.asked > asked + 1, "renewal to go on")


def test_nothing_is_renewed_while_clocks_are_frozen(own_redis: RedisServer, open_door: Any, caplog: Any) -> None:
    """`frozen` promises that Redis is not used. The connection is renewed afterwards."""
    logins = Logins(own_redis, valid=0.4)
    door = open_door(own_redis.url, logins)
    assert answers(door)
    with frozen():
        door.idle(0.1)
        asked, first = logins.asked, connections(own_redis)
        door.idle(0.6)
        assert (logins.asked, connections(own_redis)) == (asked, first)
    eventually(lambda: answers(door) and connections(own_redis).isdisjoint(first), "a connection with a new login")
    assert lines(caplog) == lines(caplog, logging.WARNING) == []


def test_nothing_is_probed_while_clocks_are_frozen(own_redis: RedisServer, open_door: Any) -> None:
    """A store that looks for its server goes on to look for it afterwards."""
    logins = Logins(own_redis)
    door = open_door(own_redis.url, logins)
    own_redis.kill()
    for _ in range(10):
        assert not answers(door)
    with frozen():
        door.idle(0.1)
        asked = logins.asked
        own_redis.start()
        logins.rotate()
        door.idle(1.0)
        assert (logins.asked, connections(own_redis)) == (asked, set())
    finds(door)


def test_a_store_that_is_dropped(own_redis: RedisServer) -> None:
    """The thread that renews keeps no store alive, and ends."""
    store = RedisStore(own_redis.url, credentials=Logins(own_redis, valid=0.2))
    assert store.spend(a_plan(), PATIENCE).admitted
    renewing = [thread for thread in threading.enumerate() if thread.name == "limitgate-renewal"]
    assert renewing
    store._servers.close()
    del store
    for thread in renewing:
        thread.join(PATIENCE)
        assert not thread.is_alive()


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_wrong_password_heals_by_itself(own_redis: RedisServer, open_door: Any, caplog: Any) -> None:
    """It is said once, without the password; the next connection has the right one."""
    logins = Logins(own_redis)
    logins.behaves = lambda: ("app", f"{SECRET}-wrong")
    door = open_door(own_redis.url, logins)
    for _ in range(3):
        with pytest.raises(StoreError, match="the user or the password is wrong") as caught:
            door.spend(a_plan())
        assert SECRET not in told_by(caught.value)
    (line,) = lines(caplog)
    assert line.startswith("LG022 ")
    assert SECRET not in caplog.text
    logins.behaves = lambda: None
    finds(door)


class TokenError(Exception):
    """Its text has a token in it."""

    def __init__(self) -> None:
        super().__init__(f"no token for {SECRET}")


def raising(error: BaseException) -> Any:
    raise error


def coroutine() -> Any:
    async def give() -> Any:
        return "app", SECRET

    return give()


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (lambda: raising(TokenError()), "raised TokenError at tests.stores.redis.test_credentials:"),
    "raises what ends a thread": (lambda: raising(SystemExit(SECRET)), "raised SystemExit at"),
    "is cancelled": (lambda: raising(asyncio.CancelledError(SECRET)), "raised CancelledError at"),
    "nothing": (lambda: (), "returned 0 values"),
    "text": (lambda: SECRET, "returned an object of str, expected (user, password)"),
    "bytes": (SECRET.encode, "returned an object of bytes"),
    "a mapping": (lambda: {"user": "app", "password": SECRET}, "returned an object of dict"),
    "one": (lambda: (SECRET,), "returned 1 values"),
    "four": (lambda: ("app", SECRET, 1, 2), "returned 4 values"),
    "no password": (lambda: ("app", None), "returned a password of NoneType"),
    "an empty password": (lambda: ("app", ""), "returned an empty password"),
    "a password of bytes": (lambda: ("app", SECRET.encode()), "returned a password of bytes"),
    "a user of bytes": (lambda: (b"app", SECRET), "returned a user of bytes"),
    "no time": (lambda: ("app", SECRET, None), "returned a validity of NoneType"),
    "a time of text": (lambda: ("app", SECRET, "900"), "returned a validity of str"),
    "true": (lambda: ("app", SECRET, True), "returned a validity of bool"),
    "not a number": (lambda: ("app", SECRET, float("nan")), "returned a validity of float"),
    "has expired": (lambda: ("app", SECRET, 0), "an expired login"),
    "has long expired": (lambda: ("app", SECRET, -900.0), "an expired login"),
    "never began": (lambda: ("app", SECRET, float("-inf")), "an expired login"),
}


@pytest.fixture
def shared_redis(redis_server: RedisServer) -> Iterator[RedisServer]:
    """The Redis of all tests. The user is gone afterwards."""
    yield redis_server
    with redis_server.client() as client:
        client.execute_command("ACL", "DELUSER", "app")


@pytest.mark.parametrize(("behaves", "says"), WRONG.values(), ids=WRONG)
def test_what_is_no_login(shared_redis: RedisServer, open_door: Any, caplog: Any, behaves: Any, says: str) -> None:
    """The call fails, the log says why, once and without any of it, and the next connection asks again."""
    caplog.set_level(logging.DEBUG)
    logins = Logins(shared_redis)
    logins.behaves = lambda: behaves() or ()
    if says == "returned 0 values":
        logins.login = tuple  # type: ignore[method-assign]
    door = open_door(shared_redis.url, logins)
    for _ in range(3):
        with pytest.raises(StoreError) as caught:
            door.spend(a_plan())
        assert SECRET not in told_by(caught.value)
        assert says in str(caught.value)
    (line,) = lines(caplog)
    assert line.startswith("LG063 there is no valid login for Redis: credentials ")
    assert says in line
    assert SECRET not in caplog.text
    logins.behaves = lambda: None
    logins.login = lambda: ("app", logins.password)  # type: ignore[method-assign]
    finds(door)


def test_an_awaitable_under_threads(own_redis: RedisServer, caplog: Any) -> None:
    """What turns out to be async is no login there."""
    store = RedisStore(own_redis.url, credentials=lambda: coroutine())  # noqa: PLW0108 - else it is known to be async
    with contextlib.closing(Door(store)) as door, pytest.raises(StoreError, match="returned an object of coroutine"):
        door.spend(a_plan())


def test_a_callable_that_hangs(own_redis: RedisServer, open_door: Any, caplog: Any) -> None:
    """Calls wait no longer than their timeout, the event loop runs, and it is said. A late answer serves the next attempt."""
    logins, hangs = Logins(own_redis), threading.Event()
    logins.behaves = lambda: hangs.wait(PATIENCE) and None
    door = open_door(own_redis.url, logins)
    began = time.monotonic()
    with pytest.raises(StoreError):
        door.spend(a_plan(), 0.2)
    assert time.monotonic() - began < 1.5

    def is_said() -> bool:
        answers_soon(door)
        return bool(lines(caplog))

    eventually(is_said, "what is said")
    assert "LG063 there is no valid login for Redis: credentials returned nothing within 1 s" in lines(caplog)[0]
    assert logins.asked == 1
    hangs.set()
    finds(door)
    assert len(lines(caplog)) == 1


def answers_soon(door: Door) -> None:
    with contextlib.suppress(StoreError):
        door.spend(a_plan(), 0.05)
    door.idle(0.02)


def test_an_async_callable_that_hangs(own_redis: RedisServer, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up after a while, and asked again."""
    monkeypatch.setattr("limitgate.stores.redis.credentials.LONGEST", 1.5)
    logins, asked = Logins(own_redis), []

    async def give() -> Any:
        asked.append(1)
        if len(asked) == 1:
            await asyncio.sleep(3600)
        return logins()

    with contextlib.closing(AsyncDoor(AsyncRedisStore(own_redis.url, credentials=give))) as door:
        with pytest.raises(StoreError):
            door.spend(a_plan(), 0.2)
        finds(door)
    assert len(asked) == 2
    assert len(lines(caplog)) == 1


def test_a_callable_that_hangs_for_ever(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another call may begin after a while, in a bounded number of threads."""
    monkeypatch.setattr("limitgate.stores.redis.credentials.LONGEST", 0.1)
    monkeypatch.setattr("limitgate.stores.redis.dialer.LOGIN_TIMEOUT", 0.05)
    logins, hangs = Logins(own_redis), threading.Event()
    logins.behaves = lambda: hangs.wait(PATIENCE) and None if logins.asked != 3 else None
    with contextlib.closing(Door(RedisStore(own_redis.url, credentials=logins))) as door:
        finds(door)
        assert logins.asked == 3
        logins.behaves = lambda: hangs.wait(PATIENCE) and None
        ended(own_redis)
        until = time.monotonic() + 0.8
        while time.monotonic() < until:
            answers_soon(door)
        assert sum(thread.name == "limitgate-credentials" for thread in threading.enumerate()) <= 4
        hangs.set()
        finds(door)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [RedisStore, AsyncRedisStore])
@pytest.mark.parametrize("give", [("app", SECRET), SECRET, 5, lambda user: user], ids=["tuple", "text", "number", "argument"])
def test_what_is_no_callable(store: Any, give: Any) -> None:
    """It is refused when the store is made, without being repeated."""
    with pytest.raises(ConfigError, match=r"credentials: .*expected a callable|expected one without") as caught:
        store("redis://localhost", credentials=give)
    assert SECRET not in str(caught.value)


def test_an_async_callable_for_threads() -> None:
    async def give() -> Any:
        return "app", SECRET

    with pytest.raises(ConfigError, match="an async callable, expected a plain one, or an AsyncRedisStore"):
        RedisStore("redis://localhost", credentials=give)  # type: ignore[arg-type]


@pytest.mark.parametrize("store", [RedisStore, AsyncRedisStore])
@pytest.mark.parametrize("login", ["user:p@h", ":p@h", "h?password=p", "h?username=u&password=p"])
def test_two_logins(store: Any, login: str) -> None:
    """A URL with a password leaves it open which of the two is meant."""
    with pytest.raises(ConfigError, match="a login in the URL and credentials="):
        store(f"redis://{login}", credentials=lambda: ("u", "p"))


def test_nothing_of_it_is_shown(own_redis: RedisServer, caplog: Any) -> None:
    """Neither by a store, nor by what uses it, nor in the log at any level."""
    caplog.set_level(logging.DEBUG)
    logins = Logins(own_redis, valid=900)
    with contextlib.closing(RedisStore(own_redis.url, credentials=logins)) as store, Limiter(store) as limiter:
        assert limiter.hit("a", "1/day").allowed
        shown = [repr(each) for each in (store, limiter, store._dialer, store._dialer._credentials, store._dialer._login(5))]
    assert SECRET not in "".join(shown) + caplog.text


def test_the_debug_mode_of_asyncio_shows_nothing(own_redis: RedisServer, caplog: Any) -> None:
    """It logs tasks that take long, with their results."""
    caplog.set_level(logging.DEBUG)
    logins = Logins(own_redis)

    async def give() -> Any:
        return logins()

    async def hit() -> None:
        asyncio.get_running_loop().slow_callback_duration = 0.0
        for each in (give, logins):
            store = AsyncRedisStore(own_redis.url, credentials=each)
            assert (await store.aspend(a_plan(), PATIENCE)).admitted
            await store.aclose()

    asyncio.run(hit(), debug=True)
    assert "_Answer()" in caplog.text
    assert SECRET not in caplog.text


def test_no_thread_can_be_started(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is a lack of room here, and no failure of Redis."""
    logins = Logins(own_redis)
    store = AsyncRedisStore(own_redis.url, credentials=logins)

    def start(*_: object) -> Any:
        raise RuntimeError("can't start new thread")

    async def hit() -> None:
        monkeypatch.setattr("limitgate.process.background.start", start)
        with pytest.raises(StoreError, match="no file descriptor, thread or memory") as caught:
            await store.aspend(a_plan(), PATIENCE)
        assert caught.value.fault == "overload"
        monkeypatch.undo()
        await asyncio.sleep(0.1)
        assert (await store.aspend(a_plan(), PATIENCE)).admitted
        await store.aclose()

    asyncio.run(hit())


def test_the_middleware(own_redis: RedisServer) -> None:
    """The store that it is given asks."""
    logins, rules = Logins(own_redis), [Rule("all", "1/day", key=["global"])]

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"hello"]

    async def aapp(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    with contextlib.closing(RedisStore(own_redis.url, credentials=logins)) as store:
        gate = LimitGateWSGI(app, rules=rules, store=store, key_prefix="wsgi")
        assert [wsgi_reply(gate).status for _ in range(2)] == [200, 429]

    async def statuses() -> list[int]:
        store = AsyncRedisStore(own_redis.url, credentials=logins)
        agate, got = LimitGate(aapp, rules=rules, store=store, key_prefix="asgi"), []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                got.append(message["status"])

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b"", "client": ("192.0.2.1", 1)}
        for _ in range(2):
            await agate(dict(scope), None, send)
        await store.aclose()
        return got

    assert asyncio.run(statuses()) == [200, 429]
    eventually(lambda: not connections(own_redis), "all connections to be closed")


def test_several_event_loops(own_redis: RedisServer) -> None:
    """Each asks for its own connection."""
    logins = Logins(own_redis)
    store = AsyncRedisStore(own_redis.url, credentials=logins)

    async def hit() -> bool:
        limiter = AsyncLimiter(store)
        allowed = (await limiter.hit("a", "100/day")).allowed
        await store.aclose()
        return allowed

    assert all(asyncio.run(hit()) for _ in range(3))
    assert logins.asked == 3
