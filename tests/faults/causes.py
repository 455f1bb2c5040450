"""What can go wrong with a Redis, one function each: it happens when the ``with`` block begins, and is over when it ends."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import redis

from tests.faults.link import Faithful, Swallowing
from tests.faults.stages import Stage
from tests.support.doors import MOMENT, PATIENCE
from tests.support.redis_server import RedisServer, free_port

Over = Callable[[], bool]
"""Tells whether something is over that ends by itself."""
Cause = Callable[[Stage], AbstractContextManager[Over | None]]


def until(true: Callable[[], object]) -> None:
    """Wait for what a server will bring about."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(MOMENT / 4)


# --- the server's process ---------------------------------------------------------------------------------------------


@contextmanager
def killed(stage: Stage) -> Iterator[None]:
    """The server crashes, and is started again, empty."""
    stage.server.kill()
    try:
        yield
    finally:
        stage.server.start()


@contextmanager
def frozen(stage: Stage) -> Iterator[None]:
    """The server's process stands still."""
    with stage.server.frozen():
        yield


@contextmanager
def absent(stage: Stage) -> Iterator[None]:
    """The server has not been started yet."""
    try:
        yield
    finally:
        stage.server.start()


@contextmanager
def loading(stage: Stage) -> Iterator[None]:
    """The server was restarted, and reads what it had saved for a while."""
    with stage.server.client() as client:
        client.mset({f"filler:{number}": os.urandom(100) for number in range(600)})
        client.shutdown(save=True)
    stage.server.process.wait()
    stage.server.start(key_load_delay="3000", loading_process_events_interval_bytes="1024")
    with stage.server.client() as client:
        assert client.info("persistence")["loading"]
        try:
            yield
        finally:
            until(lambda: not client.info("persistence")["loading"])
            client.delete(*client.keys("filler:*"))
            (stage.server.folder / "dump.rdb").unlink()


@contextmanager
def out_of_files(stage: Stage) -> Iterator[None]:
    """The server has lost its clients, and may open no files or connections any more."""
    pid = stage.server.process.pid
    with stage.server.client() as client:
        client.ping()
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, hard))
        try:
            client.client_kill_filter(_type="normal", skipme=True)
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


# --- what it is told --------------------------------------------------------------------------------------------------


def told(*commands: str) -> Cause:
    """The server is told something, and goes on."""

    @contextmanager
    def cause(stage: Stage) -> Iterator[None]:
        with stage.server.client() as client:
            for command in commands:
                client.execute_command(*command.split())
            yield

    return cause


def paused(seconds: float) -> Cause:
    """The server lets all its clients wait for some seconds."""

    @contextmanager
    def cause(stage: Stage) -> Iterator[None]:
        with stage.server.client() as client:
            client.client_pause(round(seconds * 1000))
            try:
                yield
            finally:
                client.ping()

    return cause


@contextmanager
def busy(stage: Stage) -> Iterator[None]:
    """Somebody's script runs on and on, and everybody is told so."""
    with stage.server.client() as client, stage.server.client() as endless:
        client.config_set("lua-time-limit", 20)

        def run_on() -> None:
            with contextlib.suppress(redis.RedisError):
                endless.eval("while true do end", 0)

        thread = threading.Thread(target=run_on)
        thread.start()
        try:
            until(lambda: _refused(client.ping))
            yield
        finally:
            client.execute_command("SCRIPT", "KILL")
            thread.join(PATIENCE)


@contextmanager
def full(stage: Stage) -> Iterator[None]:
    """The server has more than it may have, and evicts nothing."""
    with stage.server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        try:
            yield
        finally:
            client.config_set("maxmemory", 0)


def replica(*, stale: bool) -> Cause:
    """The server has become the replica of one that is not there; ``stale`` says whether it serves what it has."""

    @contextmanager
    def cause(stage: Stage) -> Iterator[None]:
        with stage.server.client() as client:
            client.config_set("replica-serve-stale-data", "yes" if stale else "no")
            client.replicaof("127.0.0.1", "1")
            try:
                yield
            finally:
                client.replicaof("NO", "ONE")

    return cause


@contextmanager
def locked(stage: Stage) -> Iterator[None]:
    """The server wants a password from now on."""
    with stage.server.client() as client:
        client.config_set("requirepass", "other")
        client.client_kill_filter(_type="normal", skipme=True)
        try:
            yield
        finally:
            client.config_set("requirepass", "")


@contextmanager
def crowded(stage: Stage) -> Iterator[None]:
    """The server has as many clients as it may have, and the application is not among them."""
    with stage.server.client() as client:
        most = client.config_get("maxclients")["maxclients"]
        client.config_set("maxclients", 1)
        client.client_kill_filter(_type="normal", skipme=True)
        try:
            yield
        finally:
            client.config_set("maxclients", most)


def _refused(ask: Callable[[], object]) -> bool:
    """Whether the server answers with an error."""
    try:
        ask()
    except redis.ResponseError:
        return True
    return False


# --- another server ---------------------------------------------------------------------------------------------------


@contextmanager
def failed_over(stage: Stage) -> Iterator[None]:
    """The server crashes, and after a while its replica is promoted and has its address."""
    old, new = stage.server, _replica_of(stage.server)
    old.kill()
    try:
        yield
    finally:
        with new.client() as client:
            client.replicaof("NO", "ONE")
        stage.server, stage.link.target = new, new.port
        old.stop()


@contextmanager
def switched_over(stage: Stage) -> Iterator[None]:
    """The server changes places with its replica, which gets its address; connections to the old one stay, read-only."""
    old, new = stage.server, _replica_of(stage.server)
    with old.client() as there, new.client() as here:
        here.replicaof("NO", "ONE")
        there.replicaof("127.0.0.1", str(new.port))
    stage.server, stage.link.target = new, new.port
    try:
        yield
    finally:
        until(lambda: all(cable.target == new.port for cable in stage.link.cables))
        old.stop()


def _replica_of(master: RedisServer) -> RedisServer:
    """A new server that has all that another one has."""
    server = RedisServer(port=str(free_port()))
    with ExitStack() as failing, master.client() as there, server.client() as here:
        failing.callback(server.stop)
        there.config_set("repl-diskless-sync-delay", 0)
        here.replicaof("127.0.0.1", str(master.port))
        until(lambda: here.info("replication")["master_link_status"] == "up")
        failing.pop_all()
    return server


# --- the line between -------------------------------------------------------------------------------------------------


def carried(manner: Faithful) -> Cause:
    """The line to the server carries bytes in some manner."""

    @contextmanager
    def cause(stage: Stage) -> Iterator[None]:
        stage.link.manner = manner
        try:
            yield
        finally:
            stage.link.manner = Faithful()

    return cause


@contextmanager
def half_open(stage: Stage) -> Iterator[None]:
    """Something on the way has forgotten the connections that there are; new ones are fine."""
    for cable in list(stage.link.cables):
        cable.deaf = True
    yield


@contextmanager
def swallowed_to_the_last(stage: Stage) -> Iterator[None]:
    """Everything is swallowed, and a handshake has just been when that is over."""
    with carried(Swallowing())(stage):
        yield
        made = stage.link.made
        until(lambda: stage.link.made > made)
        time.sleep(MOMENT)


def clock_stepped(seconds: int) -> Cause:
    """The server's clock steps, and back again at the end."""

    @contextmanager
    def cause(stage: Stage) -> Iterator[None]:
        stage.clock.step(seconds)
        try:
            yield
        finally:
            stage.clock.step(0)

    return cause
