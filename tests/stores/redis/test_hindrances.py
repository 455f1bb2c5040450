"""What no waiting cures, on real servers: an error with its code and its cure, once, whichever way the store asks."""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from limitgate import StoreError
from tests.stores.test_stores import REDIS, Door, a_plan, joined
from tests.support.impostor import Impostor
from tests.support.redis_cluster import SLOTS, eventually
from tests.support.redis_server import UNNAMED, RedisServer, free_port
from tests.support.server_features import REPLICAS, TLS, needs

KEY = "limitgate:a"


class Restricted(RedisServer):
    """A Redis with more words on its command line, which its own client gets on with."""

    def __init__(self, *words: str, **options: str) -> None:
        super().__init__(start=False, **options)
        self._command += words
        try:
            self.start()
        except BaseException:
            self.stop()
            raise

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0), protocol=2, **UNNAMED)

    def say(self, *words: str | int) -> object:
        with self.client() as client:
            return client.execute_command(*words)


Start = Callable[..., Restricted]


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as started:

        def restricted(*words: str, **options: str) -> Restricted:
            server = Restricted(*words, **options)
            started.callback(server.stop)
            return server

        yield restricted


@pytest.fixture(params=REDIS.values(), ids=REDIS)
def open_door(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Door]]:
    with contextlib.ExitStack() as opened:

        def door(url: str) -> Door:
            made: Door = opened.enter_context(contextlib.closing(request.param(url)))
            made.store.inspection.expect("limitgate")
            return made

        yield door


def asked(door: Door, times: int = 8, key: str = KEY) -> list[str]:
    """The failures of some calls, enough to open the breaker and to probe."""
    failures = []
    for _ in range(times):
        try:
            door.spend(a_plan(key=key))
        except StoreError as error:
            failures.append(str(error))
        door.idle(0.02)
    return failures


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def told_once(caplog: pytest.LogCaptureFixture, code: str, *cures: str) -> None:
    (line,) = errors(caplog)
    assert line.startswith(f"{code} ")
    for cure in cures:
        assert cure in line


@pytest.mark.parametrize("command", ["EVAL", "EVALSHA", "TIME", "GET", "SET", "DEL"])
def test_a_command_that_was_renamed(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture, command: str) -> None:
    """Each command that the scripts need is named, when the connection is made."""
    door = open_door(start("--rename-command", command, "").url)
    asked(door)
    told_once(caplog, "LG061", f"it does not know {command}:", "rename-command")


@pytest.mark.parametrize("command", ["GETRANGE", "SETRANGE", "STRLEN", "PEXPIRE"])
def test_a_command_that_few_limits_need(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture, command: str) -> None:
    """It is named all the same, and limits that do without go on."""
    door = open_door(start("--rename-command", command, "").url)
    assert asked(door) == []
    told_once(caplog, "LG061", f"it does not know {command}:")


def test_several_commands(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """They are named together; rights stay in a line of their own."""
    server = start("--rename-command", "TIME", "", "--rename-command", "GET", "GET2")
    server.say("ACL", "SETUSER", "default", "-setrange")
    asked(open_door(server.url))
    of_commands, of_rights = sorted(errors(caplog), reverse=True)
    assert "LG061" in of_commands
    assert "it does not know TIME, GET:" in of_commands
    assert "LG021" in of_rights
    assert "ACL SETUSER <user> +setrange (" in of_rights


def test_without_info(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """INFO is for what is odd about a server, and its absence is not."""
    server = start("--rename-command", "SELECT", "")
    server.say("ACL", "SETUSER", "default", "-info")
    assert asked(open_door(server.url)) == []
    assert errors(caplog) == []


def test_hello_that_was_renamed(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The cure is the older protocol, and it cures."""
    server = start("--rename-command", "HELLO", "")
    failures = asked(open_door(f"{server.url}?protocol=3"))
    told_once(caplog, "LG061", "it does not know HELLO: add ?protocol=2 to the URL")
    assert all("?protocol=2" in failure for failure in failures)
    assert asked(open_door(f"{server.url}?protocol=2")) == []


def test_hello_that_is_forbidden(open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Either the right or the older protocol cures it. Redis itself permits it to everybody."""
    said = b"-NOPERM this user has no permissions to run the 'hello' command\r\n"
    with Impostor(HELLO=said) as server:
        asked(open_door(f"redis://{server.place}?protocol=3"), times=2)
    told_once(caplog, "LG021", "+hello, or add ?protocol=2 to the URL")


@pytest.mark.parametrize(
    "said",
    [
        b"-NOPROTO unsupported protocol version\r\n",
        b"-NOPROTO sorry, this protocol version is not supported.\r\n",
        b"-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n",
        b"-ERR unknown command 'hello'\r\n",
        b"-ERR unsupported command 'hello'\r\n",
    ],
)
def test_a_server_without_resp3(open_door: Any, caplog: pytest.LogCaptureFixture, said: bytes) -> None:
    """Older servers and proxies, in words of their own."""
    with Impostor(HELLO=said) as server:
        asked(open_door(f"redis://{server.place}?protocol=3"), times=2)
    told_once(caplog, "LG061", "?protocol=2")


@pytest.mark.parametrize(
    "said",
    [
        b"-ERR EVAL and EVALSHA are disabled\r\n",
        b"-ERR command 'eval' is not supported\r\n",
        b"-ERR Scripting is disabled on this server\r\n",
    ],
)
def test_a_server_that_runs_no_scripts(open_door: Any, caplog: pytest.LogCaptureFixture, said: bytes) -> None:
    """Hosted servers say so in words of their own."""
    with Impostor(EVAL=said, EVALSHA=said) as server:
        asked(open_door(f"redis://{server.place}"), times=2)
    told_once(caplog, "LG061", "it runs no scripts: allow EVAL and EVALSHA")


def test_a_right_that_is_taken_away_meanwhile(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The next connection finds it missing."""
    server = start()
    door = open_door(server.url)
    assert asked(door, times=1) == []
    server.say("ACL", "SETUSER", "default", "-evalsha")
    asked(door)
    told_once(caplog, "LG021", "+evalsha")


def test_a_replica(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The URL leads to a replica. Said once, also if it takes writes for a moment."""
    server = start(replicaof="127.0.0.1 1")
    door = open_door(server.url)
    failures = asked(door)
    told_once(caplog, "LG062", "it is a replica: name its master", "redis+sentinel://")
    assert all("it is a replica" in failure for failure in failures)
    server.say("REPLICAOF", "NO", "ONE")
    eventually(lambda: not asked(door, times=1), "the store to find the master")
    server.say("REPLICAOF", "127.0.0.1", 1)
    asked(door, times=12)
    assert len(errors(caplog)) == 1


def test_a_replica_that_serves_nothing(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One that has lost its master may refuse everything."""
    asked(open_door(start(replicaof="127.0.0.1 1", replica_serve_stale_data="no").url))
    told_once(caplog, "LG062", "it is a replica")


def test_a_master_that_is_demoted(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A call that a failover has met is no sign of a wrong URL, as the next connection leads to the new master."""
    server = start()
    door = open_door(server.url)
    assert asked(door, times=1) == []
    server.say("REPLICAOF", "127.0.0.1", 1)
    assert asked(door, times=1) != []
    server.say("REPLICAOF", "NO", "ONE")
    eventually(lambda: not asked(door, times=1), "the store to find the master")
    assert errors(caplog) == []


def test_a_node_of_a_cluster(redis_cluster: Any, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A URL without +cluster leads to one node, which has a part of the keys."""
    door = open_door(redis_cluster.masters[0].url)
    for number in range(8):
        asked(door, times=1, key=f"limitgate:{number}")
    told_once(caplog, "LG025", "redis+cluster:// instead of redis://")


def test_keys_in_several_slots(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A node that holds all slots refuses a call for several of them."""
    server = start(cluster_enabled="yes", port=str(free_port()))
    server.say("CLUSTER", "ADDSLOTS", *range(SLOTS))
    eventually(lambda: "ok" in str(server.say("CLUSTER", "INFO")), "the slots")
    door = open_door(server.url)
    for _ in range(3):
        with pytest.raises(StoreError, match="it is a cluster node"):
            door.spend(joined(a_plan(key="limitgate:a"), a_plan(key="limitgate:b")))
    told_once(caplog, "LG025", "redis+cluster:// instead of redis://")


def test_a_database_that_is_not_there(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The number is too high."""
    asked(open_door(f"{start(databases='2').url}?db=2"))
    told_once(caplog, "LG023", "CONFIG GET databases")


def test_a_full_server(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing can be evicted."""
    failures = asked(open_door(start(maxmemory="1").url))
    assert failures == ["Redis is out of memory"] * len(failures) != []
    told_once(caplog, "LG062", "raise maxmemory", "volatile-ttl")


def test_a_disk_that_takes_nothing(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A server that cannot save its data takes no writes."""
    server = start(dbfilename="dump.rdb")
    (server.folder / "dump.rdb").mkdir()
    server.say("CONFIG", "SET", "save", "1 1")
    server.say("SET", "something", "1")
    with contextlib.suppress(redis.RedisError):
        server.say("BGSAVE")
    eventually(lambda: "'rdb_last_bgsave_status': 'err'" in str(server.say("INFO", "persistence")), "the failure")
    failures = asked(open_door(server.url))
    told_once(caplog, "LG062", "stop-writes-on-bgsave-error")
    assert all("it cannot save its data" in failure for failure in failures)


def test_too_few_replicas(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A master that wants replicas takes no writes without."""
    needs(REPLICAS)
    asked(open_door(start(min_replicas_to_write="1").url))
    told_once(caplog, "LG062", "min-replicas-to-write")


def test_a_password_that_is_wanted_later(start: Start, open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A server that wants a password from now on says so when the next connection is made."""
    server = start()
    server.say("CONFIG", "SET", "requirepass", "p")
    failures = asked(open_door(server.url))
    told_once(caplog, "LG022", "redis://user:password@host", "credentials=")
    assert all("it requires a password" in failure for failure in failures)


@pytest.mark.parametrize(
    "said",
    [
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.\r\n",
        b"-CLUSTERDOWN The cluster is down\r\n",
        b"-ERR max number of clients reached\r\n",
    ],
)
def test_what_waiting_cures(open_door: Any, caplog: pytest.LogCaptureFixture, said: bytes) -> None:
    """A server that loads, is busy or full of clients is an outage, and no error of ours."""
    with Impostor(EVAL=said, EVALSHA=said) as server:
        asked(open_door(f"redis://{server.place}"), times=2)
    assert errors(caplog) == []


def test_protected_mode(open_door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The server has turned away everybody but its own machine before anything is asked."""
    said = b"-DENIED Redis is running in protected mode because protected mode is enabled and no password is set.\r\n"
    with Impostor(HELLO=said, EVAL=said, EVALSHA=said) as server:
        asked(open_door(f"redis://{server.place}?protocol=3"), times=2)
    told_once(caplog, "LG022", "protected mode", "set a password there")


# --- TLS --------------------------------------------------------------------------------------------------------------


def certificate(folder: Path, name: str, *words: str) -> None:
    """A certificate that nobody has signed but itself, for a subject of this name."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    make += ["-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=here", "-addext", f"subjectAltName={name}", *words]
    subprocess.run(make, cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("name", "words", "auth", "query", "cure"),
    [
        ("IP:127.0.0.1", (), "no", "", "set its authority with ?ssl_ca_certs=, or add ?ssl_cert_reqs=none"),
        ("DNS:elsewhere", (), "no", "ssl_ca_certs={}/cert.pem", "?ssl_check_hostname=false, or add ?ssl_cert_reqs=none"),
        ("IP:127.0.0.1", (), "yes", "ssl_ca_certs={}/cert.pem", "?ssl_certfile= and &ssl_keyfile="),
    ],
    ids=["unknown authority", "other host", "certificate of the client"],
)
def test_a_certificate(  # noqa: PLR0917 - what differs
    request: pytest.FixtureRequest,
    start: Start,
    open_door: Any,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    name: str,
    words: tuple[str, ...],
    auth: str,
    query: str,
    cure: str,
) -> None:
    """What is wrong with it, and each cure that is named cures."""
    needs(TLS)
    if auth == "yes" and "async" in request.node.callspec.id:
        pytest.skip("asyncio leaves a socket open that is reset in the midst of TLS' handshake")
    certificate(tmp_path, name, *words)
    port, cert, key = str(free_port()), str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    start(tls_port=port, tls_auth_clients=auth, tls_cert_file=cert, tls_key_file=key, tls_ca_cert_file=cert)
    url = f"rediss://127.0.0.1:{port}"
    asked(open_door(f"{url}?{query.format(tmp_path)}"))
    eventually(lambda: errors(caplog), "what is said after a look of its own")
    told_once(caplog, "LG024", cure)
    caplog.clear()
    client = f"&ssl_certfile={cert}&ssl_keyfile={key}" if auth == "yes" else ""
    cures = ["ssl_cert_reqs=none", *([f"ssl_ca_certs={cert}&ssl_check_hostname=false"] if query else [])]
    for each in cures:
        assert asked(open_door(f"{url}?{each}{client}"), times=2) == []
    assert errors(caplog) == []
