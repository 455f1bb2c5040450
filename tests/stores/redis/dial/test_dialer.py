"""Store URLs with several servers, what Sentinels say about the master, and what nodes say about slots."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from redis.asyncio.connection import ConnectionPool as AsyncPool
from redis.connection import ConnectionPool
from redis.exceptions import RedisError

from limitgate import AsyncLimiter, ConfigError, Limiter, StoreError, open_store, open_sync_store
from limitgate.stores.redis import dialer as dialing
from limitgate.stores.redis.aio.listening import ListeningClock
from limitgate.stores.redis.cluster import SlotMap
from limitgate.stores.redis.dialer import ASK_TIMEOUT, Dialer
from limitgate.stores.redis.inspection import Inspection
from tests.support.doors import PATIENCE
from tests.support.impostor import Impostor

OPENERS = [open_store, open_sync_store]
POOLS = {"threads": ConnectionPool, "asyncio": AsyncPool}


@pytest.fixture
def answer_within(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds that a Sentinel or a node may take to answer."""

    def answer(seconds: float) -> None:
        monkeypatch.setattr(dialing, "ASK_TIMEOUT", seconds)
        for option in dialing._BRIEF:
            monkeypatch.setitem(dialing._BRIEF, option, seconds)

    return answer


@pytest.fixture(autouse=True)
def _unhurried(answer_within: Callable[[float], None]) -> None:
    """Those that answer do, however busy the machine is."""
    answer_within(PATIENCE)


# --- URLs -------------------------------------------------------------------------------------------------------------


def where(url: str) -> Any:
    return Dialer(url, ConnectionPool, Inspection(), socket_timeout=None)._where


def options(url: str, pool: Any = ConnectionPool) -> dict[str, Any]:
    """What connections to a server are made with."""
    return Dialer(url, pool, Inspection(), socket_timeout=None)._options


@pytest.mark.parametrize(
    ("url", "nodes"),
    [
        ("redis+cluster://h1", [("h1", 6379)]),
        ("redis+cluster://h1:7000/", [("h1", 7000)]),
        ("redis+cluster://h1:7000,h2,10.0.0.3:65535/0", [("h1", 7000), ("h2", 6379), ("10.0.0.3", 65535)]),
        ("redis+cluster://[::1],[fe80::1:2]:7001", [("::1", 6379), ("fe80::1:2", 7001)]),
        ("rediss+cluster://h1:7000,[::1]:7001?ssl_cert_reqs=none", [("h1", 7000), ("::1", 7001)]),
        ("redis+cluster://user:p,w@h1:1,h2:2", [("h1", 1), ("h2", 2)]),
    ],
)
def test_nodes_of_a_cluster(url: str, nodes: list[Any]) -> None:
    """A cluster's URL lists hosts with ports or with the usual one, names or addresses of either kind."""
    assert list(where(url).nodes) == nodes
    assert all(opener(url) for opener in OPENERS)


@pytest.mark.parametrize(
    ("url", "sentinels", "master"),
    [
        ("redis+sentinel://h1/mymaster", [("h1", 26379)], "mymaster"),
        ("redis+sentinel://h1:1,[::1]:2,h3/my%20master/", [("h1", 1), ("::1", 2), ("h3", 26379)], "my master"),
        ("rediss+sentinel://u:p@h1/m/3?protocol=3", [("h1", 26379)], "m"),
    ],
)
def test_sentinels_and_the_masters_name(url: str, sentinels: list[Any], master: str) -> None:
    """A Sentinel URL lists Sentinels as a cluster's lists nodes, then names the master and maybe a database."""
    found = where(url)
    assert (list(found.sentinels), found.master, found.nodes) == (sentinels, master, ())
    assert all(opener(url) for opener in OPENERS)


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("servers", ["+cluster://{}h1,h2/0", "+sentinel://{}h1,h2/m/0"])
def test_user_and_password_are_decoded(servers: str, pool: Any) -> None:
    """What a password must not contain in a URL is percent-encoded there, and the password has it as it is."""
    found = options("redis" + servers.format("me%40x:p%40%2F%3F%23%25%2C%3A@"), pool)
    assert (found["username"], found["password"]) == ("me@x", "p@/?#%,:")


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_options_reach_every_connection(pool: Any) -> None:
    """Options of redis-py hold for all servers of a URL; a database for the master that Sentinels name."""
    assert options("redis+cluster://h1:7000,h2/?client_name=me&protocol=3", pool)["client_name"] == "me"
    assert options("redis+sentinel://h1/m/4?client_name=me", pool)["db"] == 4


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("url", ["rediss+cluster://h1:1,h2:2", "rediss+sentinel://h1/m"])
def test_tls(url: str, pool: Any) -> None:
    """With rediss every server is spoken to with TLS, and its own name is looked for in its certificate."""
    dialer = Dialer(url, pool, Inspection(), socket_timeout=None)
    for connection in (dialer._connection(("h2", 2)), dialer._sentinel(("h2", 2))):
        assert "SSL" in type(connection).__name__
        assert connection.host == "h2"


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_no_file_is_read_for_a_connection(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What redis-py tells servers about itself it looks up once and not for each connection, while an event loop waits."""
    dialer = Dialer("redis://h1?client_name=me", pool, Inspection(), socket_timeout=None)
    version = metadata.version("redis")
    monkeypatch.setattr(metadata, "version", None)
    connection = dialer._connection(None)
    said = getattr(connection, "driver_info", connection)  # since redis-py 7.2
    assert (getattr(said, "formatted_name", "redis-py"), said.lib_version) == ("redis-py", version)


BAD_URLS = [
    "redis+cluster://",
    "redis+cluster:///0",
    "redis+cluster://,",
    "redis+cluster://h1:7000,",
    "redis+cluster://h1:7000, h2:7001",
    "redis+cluster://h1:port",
    "redis+cluster://h1:0",
    "redis+cluster://h1:65536",
    "redis+cluster://h1:",
    "redis+cluster://:7000",
    "redis+cluster://::1:7000",
    "redis+cluster://[::1",
    "redis+cluster://[h1]:7000",
    "redis+cluster://h1:7000/1",
    "redis+cluster://h1:7000/?db=1",
    "redis+cluster://h1:7000/name",
    "redis+cluster://h1:7000?socket_timeout=soon",
    "redis+cluster://h1:7000?no_such_option=1",
    "redis+cluster://h1:7000?maint_notifications_config=x",
    "redis+sentinel://h1:26379",
    "redis+sentinel://h1:26379/",
    "redis+sentinel://h1:26379//0",
    "redis+sentinel:///mymaster",
    "redis+sentinel://h1:26379/mymaster/nine",
    "redis+sentinel://h1:26379/mymaster?no_such_option=1",
    "redis+other://h1",
    "redis+cluster://h1:7000#fragment",
    "redis+sentinel://h1:26379/mymaster/1#/2",
    "redis://h1#/5",
    "redis://h1/0?db=0#",
    "unix:///run/redis#1.sock",
    "redis+cluster:/h1",
    "redis+cluster",
]


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("url", BAD_URLS)
def test_a_mistake_in_a_url_is_a_config_error(opener: Callable[[str], Any], url: str) -> None:
    """A URL that says nothing sensible about several servers is refused when the store is opened."""
    with pytest.raises(ConfigError, match="store: "):
        opener(url)


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize(
    "url",
    [
        "redis+cluster://user:s3cret@",
        "redis+cluster://user:s3cret@h1:port",
        "redis+cluster://user:s3cret@h1,user:s3cret@h2",
        "redis+cluster://user:s3cret/x@h1",
        "redis+cluster://user:x?s3cret@h1",
        "redis+cluster://user:x#s3cret@h1",
        "redis+cluster://user:s3cret@h\u2100",
        "redis+cluster://:s3cret",
        "redis+cluster://user:s3cret@h1/1",
        "redis+cluster:/user:s3cret@h1",
        "redis+sentinel://user:s3cret@h1",
        "redis+sentinel://user:s3cret/x@h1/m",
        "redis+sentinel://h1/m?sentinel_password=s3cret&no_such_option=1",
        "redis://user:s3cret/x@localhost",
        "redis:/user:s3cret@localhost",
    ],
)
def test_a_config_error_tells_no_password(opener: Callable[[str], Any], url: str) -> None:
    """A mistake in a URL is reported without its password, even where what is wrong is how the password is written."""
    with pytest.raises(ConfigError) as caught:
        opener(url)
    assert "s3cret" not in told_by(caught.value)


# --- Sentinels --------------------------------------------------------------------------------------------------------

MASTER = b"*2\r\n$9\r\n127.0.0.1\r\n$4\r\n7777\r\n"


async def _on_clock(ask: Callable[..., Any], *given: Any) -> Any:
    """What a dialer says on the running event loop."""
    return await ask(ListeningClock(), *given)


class Asker:
    """Asks the Sentinels of a URL where the master is, under threads or on asyncio."""

    def __init__(self, pool: Any, *places: str, login: str = "", query: str = "") -> None:
        url = f"redis+sentinel://{login}{','.join(places)}/mymaster/3{query}"
        self.dialer = Dialer(url, pool, Inspection(), socket_timeout=PATIENCE)
        self._is_async = pool is AsyncPool

    def master(self) -> Any:
        return asyncio.run(_on_clock(self.dialer._amaster)) if self._is_async else self.dialer._master()

    def insist(self) -> Any:
        """Ask again while no Sentinel answers in time: on a busy machine, none may."""
        for _ in range(20):
            with suppress(RedisError):
                return self.master()
        return self.master()

    def slots(self) -> Any:
        node = self.dialer._sentinels[0]
        return asyncio.run(_on_clock(self.dialer.aslots, node)) if self._is_async else self.dialer.slots(node)


@pytest.fixture(params=POOLS.values(), ids=POOLS)
def pool(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def impostor() -> Iterator[Callable[..., Impostor]]:
    """Starts servers of the test's own words."""
    with ExitStack() as started:
        yield lambda **words: started.enter_context(Impostor(**words))


def nobody() -> str:
    """A place at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return f"127.0.0.1:{bound.getsockname()[1]}"


UNHELPFUL: dict[str, dict[str, Any]] = {
    "silent": {"HELLO": None},
    "silent when asked": {"SENTINEL": None},
    "knows no master": {"SENTINEL": b"*-1\r\n"},
    "no Sentinel": {"SENTINEL": b"-ERR unknown command 'SENTINEL'\r\n"},
    "a number": {"SENTINEL": b":1\r\n"},
    "text": {"SENTINEL": b"+ab\r\n"},
    "one thing": {"SENTINEL": b"*1\r\n$1\r\na\r\n"},
    "no port": {"SENTINEL": b"*2\r\n$1\r\na\r\n$1\r\nb\r\n"},
    "a host in no encoding": {"SENTINEL": b"*2\r\n$1\r\n\xff\r\n$1\r\n1\r\n"},
    "nothing inside": {"SENTINEL": b"*2\r\n$-1\r\n$-1\r\n"},
    "no Redis": {"HELLO": b"HTTP/1.1 400 Bad Request\r\n\r\n", "SENTINEL": b"HTTP/1.1 400 Bad Request\r\n\r\n"},
    "an error that says too little": {"SENTINEL": b"-MOVED nowhere\r\n"},
    "it requires a password": {"HELLO": b"-NOAUTH HELLO must be called with the client already authenticated\r\n"},
}


@pytest.mark.parametrize("words", UNHELPFUL.values(), ids=UNHELPFUL)
def test_the_next_sentinel_is_asked(
    impostor: Callable[..., Impostor], pool: Any, answer_within: Callable[[float], None], words: dict[str, Any]
) -> None:
    """A Sentinel that does not say where the master is costs a moment, and from then on it is asked last."""
    unhelpful, good = impostor(**words), impostor(SENTINEL=MASTER)
    asker = Asker(pool, unhelpful.place, good.place)
    if None in words.values():
        answer_within(ASK_TIMEOUT)
    start = time.monotonic()
    assert asker.insist() == ("127.0.0.1", 7777)
    assert time.monotonic() - start < PATIENCE
    answer_within(PATIENCE)
    known, asked = len(unhelpful.heard), good.count("SENTINEL")
    assert [asker.master() for _ in range(3)] == [("127.0.0.1", 7777)] * 3
    assert len(unhelpful.heard) == known
    assert good.count("SENTINEL") == asked + 3


def test_a_dead_sentinel_is_passed_over(impostor: Callable[..., Impostor], pool: Any) -> None:
    """A Sentinel that cannot be reached is passed over."""
    assert Asker(pool, nobody(), impostor(SENTINEL=MASTER).place).master() == ("127.0.0.1", 7777)


def test_sentinels_that_hang_do_not_use_up_all_time(
    impostor: Callable[..., Impostor], answer_within: Callable[[float], None]
) -> None:
    """However many of them hang, and however little time there is, one that answers has its turn after a few attempts."""
    answer_within(ASK_TIMEOUT)
    silent = [impostor(HELLO=None).place for _ in range(4)]
    asker = Asker(POOLS["asyncio"], *silent, impostor(SENTINEL=MASTER).place)

    async def attempt() -> Any:
        with suppress(TimeoutError):
            async with asyncio.timeout(2.5 * ASK_TIMEOUT):
                return await _on_clock(asker.dialer._amaster)
        return None

    assert any(asyncio.run(attempt()) == ("127.0.0.1", 7777) for _ in range(12))


def test_nobody_knows_the_master(impostor: Callable[..., Impostor], pool: Any) -> None:
    """If no Sentinel knows, the error says so of each."""
    stranger = impostor(SENTINEL=b"*-1\r\n")
    with pytest.raises(RedisError, match=r"no Sentinel knows where the master is: .*; .*knows no master"):
        Asker(pool, nobody(), stranger.place).master()


def test_sentinels_have_logins_of_their_own(impostor: Callable[..., Impostor], pool: Any) -> None:
    """Sentinels get the user and password meant for them, never those of the master, and no database is selected."""
    sentinel = impostor(SENTINEL=MASTER)
    Asker(pool, sentinel.place, login="me:mine@", query="?sentinel_username=you&sentinel_password=yo%2Furs").master()
    assert sentinel.heard[0][-3:] == ["AUTH", "you", "yo/urs"]
    assert sentinel.heard[-1] == ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"]
    sentinel.heard.clear()
    Asker(pool, sentinel.place, login="me:mine@").master()
    said = [word for command in sentinel.heard for word in command]
    assert not {"AUTH", "SELECT", "mine"} & set(said)


REPEATS = {
    "Redis": "unknown command 'HELLO', with args beginning with: {} ",
    "Redis 5": "unknown command `HELLO`, with args beginning with: {}, ",
    "a proxy": "HELLO 3 AUTH {} is not supported",
    "a proxy that puts it first": "{}: no such command",
    "a proxy that says no more": "{}",
}
"""What servers say about a command that they do not know. They repeat the user and the password."""


def told_by(error: BaseException | None) -> str:
    """All that an error tells, and those that led to it: as texts, and in the variables of frames that are not ours."""
    told, seen = [], list[BaseException]()
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is None or any(each is other for other in seen):
            continue
        seen.append(each)
        told += [str(each), repr(each), repr(each.args), repr(vars(each)), repr(getattr(each, "object", ""))]
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if frame.f_globals["__name__"].startswith("redis."):
                told.append(repr(frame.f_locals))
        waiting += [each.__cause__, each.__context__]
    return "\n".join([*told, *traceback.format_exception(error)])


async def _ahit(url: str) -> None:
    limiter = AsyncLimiter(url)
    try:
        await limiter.hit("k", "1/s")
    finally:
        await limiter.aclose()


def _hit(url: str) -> None:
    with Limiter(url) as limiter:
        limiter.hit("k", "1/s")


@pytest.mark.parametrize("repeats", REPEATS.values(), ids=REPEATS)
@pytest.mark.parametrize("query", ["", "&protocol=2"], ids=["HELLO", "AUTH"])
@pytest.mark.parametrize("kind", ["redis", "unix", "redis+sentinel", "redis+cluster"])
@pytest.mark.parametrize("login", [":s3cret%2F%40word@", "mallory:s3cret%2F%40word@"])
def test_a_server_that_repeats_the_password(  # noqa: PLR0917 - kinds of servers
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pool: Any, login: str, kind: str, query: str, repeats: str
) -> None:
    """A server repeats what follows a command that it does not know. No error, nor what led to it, nor the log tells that."""
    caplog.set_level(logging.DEBUG)
    user, password = login.strip("@").split(":")
    said = f"-ERR {repeats.format(f'{user} {unquote(password)}')}\r\n".encode()
    path = str(tmp_path / "server") if kind == "unix" else None
    with Impostor(path=path, HELLO=said, AUTH=said, CLIENT=said) as server:
        logins = f"&sentinel_username={user}&sentinel_password={password}" if kind == "redis+sentinel" else ""
        database = {"unix": "", "redis": "/3", "redis+sentinel": "/m/3", "redis+cluster": ""}[kind]
        url = f"{kind}://{login if not logins else ''}{server.place}{database}?{query}{logins}"
        with pytest.raises(StoreError) as caught:
            _hit(url) if pool is ConnectionPool else asyncio.run(_ahit(url))
        assert unquote(password) in [command[-1] for command in server.heard]
    told = told_by(caught.value) + caplog.text
    for secret in (password, unquote(password), "mallory"):
        assert secret not in told


@pytest.mark.parametrize("said", [b"$8\r\n\xff s3cret\r\n", b"-ERR \xff s3cret\r\n", b"+s3cret\r\n", b"?s3cret\r\n"])
@pytest.mark.parametrize("query", ["", "?protocol=2"], ids=["HELLO", "AUTH"])
def test_a_server_that_repeats_the_password_in_no_reply_of_redis(
    impostor: Callable[..., Impostor], pool: Any, query: str, said: bytes
) -> None:
    """What cannot be read as a reply is not told, either."""
    url = f"redis://:s3cret@{impostor(HELLO=said, AUTH=said).place}{query}"
    with pytest.raises(StoreError) as caught:
        _hit(url) if pool is ConnectionPool else asyncio.run(_ahit(url))
    assert "s3cret" not in told_by(caught.value)


@pytest.mark.parametrize("password", ["password", "user", "configured"])
def test_a_password_that_is_a_word_of_redis(impostor: Callable[..., Impostor], pool: Any, password: str) -> None:
    """What is wrong with a login is told all the same."""
    said = f"-ERR AUTH <password> called without any password configured for the default user. {password}\r\n".encode()
    url = f"redis://:{password}@{impostor(HELLO=said, AUTH=said).place}"
    with pytest.raises(StoreError, match="it has no password but the URL has one"):
        _hit(url) if pool is ConnectionPool else asyncio.run(_ahit(url))


def test_threads_may_ask_sentinels_side_by_side(impostor: Callable[..., Impostor]) -> None:
    """Several threads that look for the master at once all find it, and lose no Sentinel."""
    places = [impostor(SENTINEL=b"*-1\r\n").place, impostor(SENTINEL=MASTER).place]
    asker, barrier = Asker(ConnectionPool, *places), threading.Barrier(8)

    def ask(_: int) -> Any:
        barrier.wait(PATIENCE)
        return asker.master()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {("127.0.0.1", 7777)}
    assert len(asker.dialer._sentinels) == 2


# --- who holds which slot ---------------------------------------------------------------------------------------------


class _Node:
    """What a slot map keeps for a node here: nothing."""

    def __init__(self, address: Any) -> None:
        self.address = address


def learnt(impostor: Callable[..., Impostor], pool: Any, reply: bytes) -> SlotMap[Any] | None:
    """What is made of a node's words about slots; None for nothing."""
    node = impostor(CLUSTER=reply)
    found: SlotMap[Any] = SlotMap([node.address], _Node)
    return found if found.learn(Asker(pool, node.place).slots(), node.address) else None


def told(first: int, last: int, host: bytes, port: int = 7001) -> bytes:
    """An entry of CLUSTER SLOTS."""
    spelled = b"$-1\r\n" if host == b"null" else b"$%d\r\n%b\r\n" % (len(host), host)
    return b"*3\r\n:%d\r\n:%d\r\n*3\r\n%b:%d\r\n$2\r\nid\r\n" % (first, last, spelled, port)


@pytest.mark.parametrize("host", [b"null", b"", b"?"])
def test_a_node_without_a_name_is_the_one_that_was_asked(impostor: Callable[..., Impostor], pool: Any, host: bytes) -> None:
    """A node that does not know its own address, or is told not to say it, is where we asked, at the port it says."""
    found = learnt(impostor, pool, b"*1\r\n" + told(0, 16383, host))
    assert found is not None
    assert {found.holder(slot) for slot in (0, 8000, 16383)} == {("127.0.0.1", 7001)}
    assert found.known()[0] == ("127.0.0.1", 7001)


def test_slots_that_nobody_holds_are_asked_of_a_seed(impostor: Callable[..., Impostor], pool: Any) -> None:
    """What a node says holds for the slots that it speaks of; for others a node of the URL is asked."""
    found = learnt(impostor, pool, b"*2\r\n" + told(0, 9, b"h1") + told(20, 16383, b"::1"))
    assert found is not None
    assert (found.holder(9), found.holder(20)) == (("h1", 7001), ("::1", 7001))
    assert found.holder(10) == found._seeds[0]
    assert found.unused() == []


NONSENSE = {
    "nothing": b"*0\r\n",
    "a number": b":1\r\n",
    "text": b"+OK\r\n",
    "numbers": b"*2\r\n:1\r\n:2\r\n",
    "empty entries": b"*1\r\n*0\r\n",
    "no node": b"*1\r\n*2\r\n:0\r\n:16383\r\n",
    "a node of nothing": b"*1\r\n*3\r\n:0\r\n:16383\r\n*0\r\n",
    "slots out of range": b"*1\r\n" + told(0, 16384, b"h1"),
    "slots backwards": b"*1\r\n" + told(9, 8, b"h1"),
    "a host in no encoding": b"*1\r\n" + told(0, 16383, b"\xff"),
    "no port": b"*1\r\n" + told(0, 16383, b"h1").replace(b":7001\r\n", b"$-1\r\n"),
    "a port out of range": b"*1\r\n" + told(0, 16383, b"h1", 70000),
    "a host that is a number": b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n:5\r\n:7001\r\n",
    "slots that are texts": b"*1\r\n*3\r\n+a\r\n+b\r\n*2\r\n+h1\r\n:7001\r\n",
}


@pytest.mark.parametrize("reply", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_about_slots_is_not_believed(impostor: Callable[..., Impostor], pool: Any, reply: bytes) -> None:
    """What is no list of slots and their nodes teaches nothing."""
    assert learnt(impostor, pool, reply) is None
