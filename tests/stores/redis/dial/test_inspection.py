"""What a new connection leads to: rights that are missing, eviction, other servers. No connection fails for it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio.connection import ConnectionPool as AsyncPool
from redis.connection import ConnectionPool
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from limitgate import StoreError
from limitgate.algorithms import script
from limitgate.stores.redis.aio.listening import ListeningClock
from limitgate.stores.redis.dialer import Dialer
from limitgate.stores.redis.inspection import INSPECT, Data, Inspection, Report, read_report
from limitgate.stores.redis.wire import CONFIG, pack_command
from tests.stores.test_stores import PATIENT, REDIS, Door, a_plan
from tests.support.impostor import HANG_UP, Impostor
from tests.support.redis_server import UNNAMED, RedisServer
from tests.support.server_features import CHECKS, READERS, needs

ROOT = Path(__file__).parents[4]
ACL = re.search(r"^ACL SETUSER .*$", (ROOT / "docs/deployment.md").read_text(), re.MULTILINE)[0].split()
RIGHTS = [word for word in ACL if word.startswith("+") and word != "+info"]
NOBODY = "0" * 40


# --- what a reply says ------------------------------------------------------------------------------------------------

NONSENSE: list[object] = [
    None,
    1,
    b"OK",
    "OK",
    [],
    [b"", b""],
    [[]],
    [[], 1],
    [[], None],
    [[1], b""],
    [[b"+get"], b"", b""],
    {},
    ResponseError("no"),
    ValueError("no"),
]


@pytest.mark.parametrize("reply", NONSENSE, ids=repr)
def test_nonsense_says_nothing(reply: object) -> None:
    """What is no reply of the script teaches nothing."""
    assert read_report(reply) is None


@pytest.mark.parametrize("info", [b"", b"\r\n", b"maxmemory", b"\xff:\xff\r\n:\r\n::", b"maxmemory:lots\r\nrole:master\r\n"])
def test_what_info_does_not_say(info: bytes) -> None:
    """Fields that are missing, or hold something else, teach nothing."""
    assert read_report([[], info]) == Report([], "", None)


@pytest.mark.parametrize(
    ("maxmemory", "policy", "evicts"),
    [
        ("0", "allkeys-lru", ""),
        ("1048576", "allkeys-lru", "allkeys-lru"),
        ("1048576", "volatile-random", "volatile-random"),
        ("1048576", "volatile-ttl", ""),
        ("1048576", "noeviction", ""),
    ],
)
def test_which_policies_forget(maxmemory: str, policy: str, evicts: str) -> None:
    """A full server forgets clients that were refused, but for one that forgets nobody, or first who is least in debt."""
    found = read_report([[], f"# Memory\r\nmaxmemory:{maxmemory}\r\nmaxmemory_policy:{policy}\r\n".encode()])
    assert found is not None
    assert found.evicts == evicts


def test_a_replica_has_no_data_of_its_own() -> None:
    """Whose data a server has is told by a master only."""
    info = b"run_id:r\r\nrole:%b\r\nmaster_replid:h\r\nmaster_replid2:p\r\n"
    assert read_report([[], info % b"slave"]) == Report([], "", None)
    assert read_report([[b"+get"], info % b"master"]) == Report(["+get"], "", Data("r", "h", "p"))


def test_eval_that_is_not_permitted() -> None:
    """Who may not even ask lacks that right."""
    assert read_report(NoPermissionError("no")) == Report(["+eval"], "", None)


@pytest.mark.parametrize(
    ("now", "continues"),
    [
        (Data("run", "history", NOBODY), True),
        (Data("run", "other", NOBODY), True),  # nobody has replicated it for an hour
        (Data("run", "other", "theirs"), False),  # it has followed another one meanwhile
        (Data("run2", "other", NOBODY), False),  # restarted
        (Data("run2", "other", "history"), False),  # promoted, or restarted from what was saved
        (Data("run2", "history", NOBODY), True),
    ],
)
def test_what_continues(now: Data, continues: Any) -> None:
    """Data goes on where its history does, or where the process does and has followed nobody."""
    assert now.continues(Data("run", "history", NOBODY)) is continues


def info_of(data: Data) -> list[object]:
    run, history, parent = data
    return [[], f"run_id:{run}\r\nrole:master\r\nmaster_replid:{history}\r\nmaster_replid2:{parent}\r\n".encode()]


def test_a_node_in_the_place_of_another(caplog: pytest.LogCaptureFixture) -> None:
    """On a cluster a node is compared with itself, or with the one whose history it has followed; that is then forgotten."""
    inspection = Inspection()
    for server in ("a", "b"):
        inspection.heard(server, info_of(Data(server, server, NOBODY)), 0.0)
    assert inspection.replacements == 0
    inspection.heard("c", info_of(Data("c", "c", "a")), 0.0)
    assert inspection.replacements == 1
    inspection.heard("d", info_of(Data("d", "d", "a")), 0.0)
    inspection.heard("c", info_of(Data("c", "c", "a")), 0.0)
    assert inspection.replacements == 1
    assert [message.partition(":")[0] for message in caplog.messages] == ["LG019 c was restarted or replaced"]


def test_a_connection_proves_nothing_about_later_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Several threads connect. One that logged in before the password changed ends no error that another one met since."""
    inspection, wrong = Inspection(), AuthenticationError("invalid username-password pair or user is disabled.")
    began = time.monotonic()
    inspection.failed("redis:6379", wrong)
    inspection.heard("redis:6379", [], began)
    inspection.failed("redis:6379", wrong)
    assert len(caplog.messages) == 1
    inspection.heard("redis:6379", [], time.monotonic())
    inspection.failed("redis:6379", wrong)
    assert [message[:5] for message in caplog.messages] == ["LG022", "LG022"]


# --- rights -----------------------------------------------------------------------------------------------------------


def test_every_command_of_the_scripts_is_checked() -> None:
    """The commands that the scripts call, those that are checked and those that the documentation grants are the same."""
    called = {command.lower() for command in re.findall(r"redis\.p?call\('(\w+)'", script() + CONFIG.text)}
    checked = set(re.findall(r"\{'(\w+)'", INSPECT))
    assert len(called) > 5
    assert checked == called | {"evalsha"}
    assert {f"+{command}" for command in checked | {"eval"}} == set(RIGHTS)


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    """A Redis whose user ``limitgate`` each test makes anew."""
    server = RedisServer()
    yield server
    server.stop()


def user(server: RedisServer, *words: str) -> str:
    """The URL for a user with the rights of the documentation, changed by more words."""
    with server.client() as client:
        client.execute_command("ACL", "DELUSER", "limitgate")
        client.execute_command(*ACL, *words)
    return f"{server.url}?username=limitgate&password=PASSWORD"


def lacking(url: str, *, prefix: str = "limitgate", before_7: bool = False) -> list[str]:
    """The rights that the script finds missing; as on a Redis that cannot check them, ``before_7``."""
    older = "local redis = {pcall = redis.pcall}\n" if before_7 else ""
    with redis.Redis.from_url(url, **UNNAMED) as client:
        found = read_report(client.eval(older + INSPECT, 0, prefix))
    assert found is not None
    return list(found.rights)


@pytest.mark.parametrize("before_7", [False, True], ids=["checked", "tried"])
@pytest.mark.parametrize("right", [right for right in RIGHTS if right not in ("+eval", "+evalsha")])
def test_the_missing_right_is_named(guarded: RedisServer, right: str, before_7: Any) -> None:
    """Each right that is missing is named, and no other, with or without INFO."""
    for info in ("+info", "-info"):
        assert lacking(user(guarded, f"-{right[1:]}", info), before_7=before_7) == [right]


@pytest.mark.parametrize("before_7", [False, True], ids=["checked", "tried"])
def test_what_is_found_missing(guarded: RedisServer, before_7: Any) -> None:
    """Several rights are named together, those to keys as a pattern; whoever has all lacks none, and nothing is left behind."""
    assert lacking(user(guarded), before_7=before_7) == []
    assert lacking(user(guarded, "+@all", "~*"), before_7=before_7) == []
    assert lacking(user(guarded, "-get", "-set"), before_7=before_7) == ["+get", "+set"]
    assert lacking(user(guarded), prefix="mine", before_7=before_7) == ["~mine:*"]
    assert lacking(user(guarded, "-get"), prefix="mine", before_7=before_7) == ["+get", "~mine:*"]
    with guarded.client() as client:
        assert client.dbsize() == 0


@pytest.mark.parametrize("before_7", [False, True], ids=["checked", "tried"])
def test_keys_that_may_only_be_read(guarded: RedisServer, before_7: Any) -> None:
    """They are missing like those that may not be touched."""
    needs(READERS)
    assert lacking(user(guarded, "resetkeys", "%R~limitgate:*"), before_7=before_7) == ["~limitgate:*"]


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("The user executing the script can't run this command or subcommand", "+get"),
        ("ERR ACL failure in script: User limitgate has no permissions to run the 'get' command", "+get"),
        ("The user executing the script can't access at least one of the keys mentioned", "~limitgate:*"),
        ("ERR ACL failure in script: No permissions to access a key", "~limitgate:*"),
        ("@user_script: 1: Unknown Redis command called from Lua script", "get"),
        ("ERR Unknown Redis command called from script", "get"),
        ("ERR Unknown command called from script", "get"),
    ],
)
def test_the_words_of_each_server(guarded: RedisServer, said: str, found: str) -> None:
    """Versions of Redis and Valkey refuse a script's command in words of their own."""
    refusing = f"local redis = {{pcall = function() return {{err = [[{said}]]}} end}}\n"
    with guarded.client() as client:
        report = read_report(client.eval(refusing + INSPECT, 0, "limitgate"))
    assert report is not None
    assert found in (*report.rights, *report.unknown)
    assert ("get" in report.unknown) is (found == "get")


def test_a_right_to_evalsha(guarded: RedisServer) -> None:
    """The script may not call it, but knows whether the user may."""
    needs(CHECKS)
    assert lacking(user(guarded, "-evalsha")) == ["+evalsha"]


def test_a_user_who_lacks_nothing_leaves_no_trace(guarded: RedisServer) -> None:
    """Nothing that is refused is tried, so Redis' log of such attempts stays empty, also without INFO."""
    needs(CHECKS)
    url = user(guarded, "-info")
    with guarded.client() as client:
        client.acl_log_reset()
        lacking(url)
        assert client.acl_log() == []


@pytest.fixture(params=REDIS.values(), ids=REDIS)
def open_door(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Door]]:
    with contextlib.ExitStack() as opened:
        yield lambda url: opened.enter_context(contextlib.closing(request.param(url)))


@pytest.mark.parametrize("right", ["eval", "evalsha", "get"])
def test_a_store_names_the_right(
    guarded: RedisServer, open_door: Callable[[str], Door], right: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At its first connection a store says once what its user lacks, as words for ACL SETUSER; and the call fails."""
    door = open_door(user(guarded, f"-{right}"))
    door.store.inspection.expect("limitgate")
    for _ in range(3):
        with contextlib.suppress(StoreError):
            door.spend(a_plan(key="limitgate:a"))
    (line,) = [message for message in caplog.messages if message.startswith("LG021")]
    assert f"; run ACL SETUSER <user> +{right} (" in line


def test_a_store_that_knows_no_prefix(guarded: RedisServer, open_door: Callable[[str], Door], caplog: Any) -> None:
    """Where it is not known which keys will be used, nothing is said about them."""
    door = open_door(user(guarded, "resetkeys", "~others:*"))
    assert door.spend(a_plan(key="others:a")).admitted
    assert caplog.messages == []


# --- connections ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[ConnectionPool, AsyncPool], ids=["threads", "asyncio"])
def pool(request: pytest.FixtureRequest) -> Any:
    return request.param


def said(pool: Any, url: str, within: float = PATIENT) -> bytes:
    """What is answered to a command on a new connection, as a store reads it: without redis-py."""
    if pool is ConnectionPool:
        connection = Dialer(url, pool, Inspection(), socket_timeout=within).dial()
        with contextlib.closing(contextlib.ExitStack()) as closing:
            closing.callback(connection.disconnect)
            connection._sock.sendall(pack_command(("PING",)))
            return connection._sock.recv(100)

    async def dialled() -> Any:
        clock = ListeningClock()
        async with clock.within(within):
            connection = await Dialer(url, pool, Inspection(), socket_timeout=None).adial(clock)
        try:
            connection._writer.write(pack_command(("PING",)))
            return await connection._reader.read(100)
        finally:
            await connection.disconnect()

    return asyncio.run(dialled())


ODD = {
    "unknown": b"-ERR unknown command 'EVAL'\r\n",
    "not permitted": b"-NOPERM no\r\n",
    "loading": b"-LOADING no\r\n",
    "no password": b"-NOAUTH no\r\n",
    "busy": b"-BUSY no\r\n",
    "read only": b"-READONLY no\r\n",
    "full": b"-OOM no\r\n",
    "no master": b"-MASTERDOWN no\r\n",
    "elsewhere": b"-MOVED 1 127.0.0.1:1\r\n",
    "an error that says too little": b"-MOVED nowhere\r\n",
    "nothing": b"$-1\r\n",
    "text": b"$2\r\nOK\r\n",
    "no encoding": b"*2\r\n*1\r\n$1\r\n\xff\r\n$1\r\n\xff\r\n",
    "a number": b":1\r\n",
    "numbers": b"*2\r\n:1\r\n:2\r\n",
    "an error inside": b"*2\r\n-ERR no\r\n$0\r\n\r\n",
}
if find_spec("hiredis"):  # redis-py reads no further than here without it
    ODD["an error of the connection inside"] = b"*2\r\n-LOADING no\r\n$0\r\n\r\n"
    ODD["a map"] = b"%1\r\n$1\r\na\r\n:1\r\n"


@pytest.mark.parametrize("query", ["", "?protocol=2", "?client_name=me"])
@pytest.mark.parametrize("reply", ODD.values(), ids=ODD)
def test_whatever_is_answered_the_connection_is_made(pool: Any, reply: bytes, query: str) -> None:
    """A server that does not know the script, refuses it or talks nonsense is asked once, and connected to."""
    with Impostor(EVAL=reply, PING=b"+PONG\r\n") as server:
        assert said(pool, f"redis://{server.place}/0{query}") == b"+PONG\r\n"
        assert server.count("EVAL") == 1


@pytest.mark.parametrize("reply", [HANG_UP, None, b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["lost", "silent", "no Redis"])
def test_a_connection_that_is_lost_meanwhile(pool: Any, reply: bytes | None) -> None:
    """A connection that ends, or on which nothing is answered in time, is none; and what there was of it is closed."""
    with Impostor(EVAL=reply) as server:
        start = time.monotonic()
        with pytest.raises((RedisError, TimeoutError)):
            said(pool, f"redis://{server.place}/0", within=1.5 if reply is None else PATIENT)
        assert time.monotonic() - start < PATIENT / 2
        assert server.count("EVAL") == 1
        _, line = server._threads
        line.join(PATIENT)
        assert not line.is_alive()


def test_only_servers_with_buckets_are_inspected(pool: Any) -> None:
    """Sentinels are asked for the master, and it is inspected, once."""
    with Impostor(PING=b"+PONG\r\n") as master:
        port = str(master.address[1]).encode()
        named = b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%b\r\n" % (len(port), port)
        with Impostor(SENTINEL=named) as sentinel:
            assert said(pool, f"redis+sentinel://{sentinel.place}/mymaster") == b"+PONG\r\n"
            assert (sentinel.count("EVAL"), master.count("EVAL")) == (0, 1)


def test_a_node_that_is_asked_for_slots_is_not_inspected(redis_cluster: Any) -> None:
    """Who holds which slot is asked on connections that are for nothing else."""
    inspection = Inspection()
    dialer = Dialer(redis_cluster.url, ConnectionPool, inspection, socket_timeout=5)
    assert dialer.slots(dialer.nodes[0])
    assert inspection._data == {}
    dialer.dial(dialer.nodes[0]).disconnect()
    assert list(inspection._data) == [f"the Redis node 127.0.0.1:{dialer.nodes[0][1]}"]


def test_a_log_handler_that_raises(guarded: RedisServer, open_door: Callable[[str], Door], monkeypatch: Any) -> None:
    """Whatever becomes of what is said, requests are answered."""
    door = open_door(user(guarded, "-strlen"))
    door.store.inspection.expect("limitgate")
    monkeypatch.setattr("limitgate.stores.redis.inspection.read_report", lambda _: 1 / 0)
    assert door.spend(a_plan(key="limitgate:b")).admitted
