"""Connections of threads: what a call costs on one that is open, when somebody looks at it, and who gets it next."""

from __future__ import annotations

import contextlib
import gc
import math
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from limitgate import RedisStore, StoreError
from limitgate.limits.bucket import bucket_of
from limitgate.limits.plan import Charge
from limitgate.limits.template import PlanTemplate
from limitgate.stores.redis.threads import connection as connections, pool as pools
from limitgate.stores.redis.threads.connection import SLICE, STARVED_TURNS, ListenDeadline, SyncConnection, WaitForThread
from limitgate.stores.redis.threads.pool import LOOK_EVERY, ConnectionPool
from limitgate.stores.redis.wire import Call
from tests.support.crowds import a_plan, giving_back
from tests.support.redis_server import RedisServer

PATIENT = 20.0
TEMPLATE = PlanTemplate([Charge("", bucket_of("900/day"), 1, enforced=True, rule=None)])


class OlderSocket:
    """Closes its socket when it is freed, but in a garbage cycle after it: the collector takes the older first."""

    def __init__(self, pair: tuple[socket.socket, socket.socket]) -> None:
        self._sock, self._other = pair

    def disconnect(self) -> None:
        self._sock.close()
        self._other.close()

    __del__ = disconnect


def test_a_connection_in_a_garbage_cycle_closes_its_socket() -> None:
    """Before the collector frees the socket, which would warn."""
    driven: Any = SyncConnection(OlderSocket(socket.socketpair()))
    driven.others = driven
    del driven
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert [str(each.message) for each in caught] == []


def test_a_server_that_reads_a_little_at_a_time_takes_no_longer_than_the_deadline() -> None:
    """Whoever sends makes progress all the time, and the deadline holds all the same."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ends = threading.Event()

    def read() -> None:
        while not ends.wait(SLICE / 4):
            theirs.recv(4096)

    reader = threading.Thread(target=read)
    reader.start()
    connection = SyncConnection(OlderSocket((ours, theirs)))
    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            connection.send(b"x" * 50_000_000, ListenDeadline(0.1))
        assert time.monotonic() - began < PATIENT / 4
    finally:
        ends.set()
        reader.join()
        connection.close()


class Counted:
    """In place of an object: counts the calls of its methods."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._real, name)


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[Any]:
    with contextlib.closing(RedisStore(redis_server.url)) as store:
        store.spend(a_plan(), PATIENT)
        store.spend(TEMPLATE.asked([uuid4().hex]), PATIENT)  # so that Redis knows both scripts
        yield store


def counted(store: Any) -> tuple[Counter[str], Counter[str]]:
    """Calls from now on of a store's one idle connection: of its socket, and of what redis-py has made."""
    (connection,) = store._servers._connections._idle
    connection._socket = Counted(connection._socket)
    connection._connection = Counted(connection._connection)
    return connection._socket.calls, connection._connection.calls


@pytest.mark.parametrize("plain", [True, False])
def test_a_call_sends_and_receives_and_nothing_else(store: Any, monkeypatch: pytest.MonkeyPatch, *, plain: bool) -> None:
    """No timeout is set for a call that has time enough, and nobody looks whether the connection has ended."""
    monkeypatch.setattr(connections, "SLICE", PATIENT / 2)  # on a busy machine a short one ends before the answer is there
    monkeypatch.setattr(pools, "LOOK_EVERY", math.inf)
    store.spend(a_plan(), PATIENT)
    of_socket, of_connection = counted(store)
    for _ in range(50):
        if plain:
            assert store.spend(TEMPLATE.asked([uuid4().hex]), PATIENT).admitted
        else:
            assert store.spend(a_plan(), PATIENT).admitted
    assert of_socket == {"send": 50, "recv": 50}
    assert of_connection == {}


def test_the_last_slice_of_a_call_is_shorter(store: Any) -> None:
    """A timeout below a slice is set, and the slice again for the next call that has time enough."""
    of_socket, _ = counted(store)
    for timeout in (SLICE / 2, PATIENT, PATIENT):
        assert store.spend(a_plan(), timeout).admitted
    assert of_socket["settimeout"] in range(2, 5), "what is left of half a slice is a little less before each wait"


def test_a_connection_is_looked_at_now_and_then(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody has within a second, be it busy or idle: what has ended since is not asked."""
    of_socket, _ = counted(store)
    began = time.monotonic()
    for elapsed in (0.0, LOOK_EVERY / 2, LOOK_EVERY, 1.5 * LOOK_EVERY, 2 * LOOK_EVERY):
        for module in (pools, connections):
            monkeypatch.setattr(module, "monotonic", lambda elapsed=elapsed: began + elapsed)
        assert store.spend(a_plan(), PATIENT).admitted
    assert (of_socket["send"], of_socket["settimeout"]) == (5, 2 * 2), "a look sets two timeouts: none, and that of before"


def test_a_connection_is_looked_at_before_anything_is_given_back(store: Any) -> None:
    """Even if that is sent behind a plain plan, as on a node of a cluster."""
    of_socket, _ = counted(store)

    def looks(*calls: Call) -> float:
        before = of_socket["settimeout"]
        listen_deadline = ListenDeadline(PATIENT)
        assert all(
            isinstance(answer, list)
            for answer in store._servers.hear(store._servers.send(calls, listen_deadline), listen_deadline)
        )
        return (of_socket["settimeout"] - before) / 2

    def plain() -> Call:
        return Call([TEMPLATE.asked([uuid4().hex])], TEMPLATE.shape)

    def refund() -> Call:
        return Call([giving_back(uuid4().hex)])

    assert [looks(plain()), looks(plain(), refund()), looks(refund(), plain()), looks(plain(), plain())] == [0, 1, 1, 0]


class Opened:
    """In place of a connection that redis-py has opened."""

    def __init__(self) -> None:
        self._sock, self.peer = socket.socketpair()

    def disconnect(self) -> None:
        self._sock.close()
        self.peer.close()


def test_who_waits_for_a_connection_gets_the_next_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread waits while others connect, and goes on as soon as one of those in use is free, not when its slice is over."""
    monkeypatch.setattr(connections, "SLICE", PATIENT)
    may_connect = threading.Event()

    def dial(**_: Any) -> Opened:
        may_connect.wait(PATIENT)
        return Opened()

    pool, connection = ConnectionPool(dial), SyncConnection(Opened())  # type: ignore[arg-type]
    try:
        with ThreadPoolExecutor(1) as threads:
            for _ in range(20):
                waiting = threads.submit(pool.take, ListenDeadline(PATIENT))
                while not pool._wanted:
                    time.sleep(0.0001)
                pool.give(connection)
                assert waiting.result(PATIENT / 2) is connection
    finally:
        may_connect.set()
        connection.close()
        pool.close()


@pytest.mark.parametrize("late_s", [0.005, 0.03, 0.16])
def test_a_wait_for_a_starved_thread_that_connects(late_s: float) -> None:
    """While a thread waits for the GIL each time, so does the one that connects: its turns use up no patience."""
    patient = ListenDeadline(0.003)
    waiting = WaitForThread(patient)
    waited_s = 0.0
    while not patient.is_over:  # but it ends
        slice_ = patient.slice()
        waiting.waited_in_vain(slice_, slice_ + late_s)
        waited_s += slice_ + late_s
    assert waited_s >= STARVED_TURNS * late_s


def test_a_wait_for_a_thread_that_connects_in_time() -> None:
    """A thread that is woken in time has waited for the server."""
    patient = ListenDeadline(0.1)
    waiting = WaitForThread(patient)
    for _ in range(8):
        waiting.waited_in_vain(SLICE, SLICE + 0.001)
    assert patient.left == pytest.approx(0.0)


@pytest.mark.parametrize("close", [ConnectionPool.close, ConnectionPool.retire])
@pytest.mark.parametrize("is_needed", [False, True])
def test_a_connection_that_comes_after_closing(close: Any, *, is_needed: bool) -> None:
    """It is closed at once if nobody waits for it any more; a thread that waits gets it."""
    may_connect, opened = threading.Event(), Opened()

    def dial(**_: Any) -> Opened:
        may_connect.wait(PATIENT)
        return opened

    pool = ConnectionPool(dial)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="no connection to Redis within the timeout"):
        pool.take(ListenDeadline(0.001))
    close(pool)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.take, ListenDeadline(PATIENT)) if is_needed else None
        while pool._wanted < is_needed:
            time.sleep(0.0001)
        may_connect.set()
        if waiting is not None:
            waiting.result().close()
    deadline = time.monotonic() + PATIENT
    while opened.peer.fileno() != -1:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not pool._idle


@pytest.mark.parametrize("close", [ConnectionPool.close, ConnectionPool.retire])
def test_a_connection_that_was_in_use_when_it_was_closed(close: Any) -> None:
    """It is closed as soon as its call has ended, and the next call has one that is kept."""
    opened = [Opened(), Opened()]
    coming = iter(opened)
    pool = ConnectionPool(lambda **_: next(coming))
    in_use = pool.take(ListenDeadline(PATIENT))
    close(pool)
    pool.give(in_use)
    assert opened[0].peer.fileno() == -1
    again = pool.take(ListenDeadline(PATIENT))
    pool.give(again)
    assert (opened[1].peer.fileno() == -1) == (close is ConnectionPool.retire)
    pool.close()


def test_a_call_that_began_before_closing_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes, or closes, the connection for which the call waits, and so another one is made after closing."""
    may_connect, opened = threading.Event(), [Opened(), Opened()]
    coming, taken = iter(opened), list[SyncConnection]()

    def dial(**_: Any) -> Opened:
        may_connect.wait(PATIENT)
        return next(coming)

    pool = ConnectionPool(dial)  # type: ignore[arg-type]
    pop = pool._pop

    def pop_after_another() -> SyncConnection | None:
        connection = pop()
        if connection is None or taken:
            return connection
        taken.append(connection)
        return None

    monkeypatch.setattr(pool, "_pop", pop_after_another)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.take, ListenDeadline(PATIENT))
        while not pool._connecting:
            time.sleep(0.0001)
        pool.close()
        may_connect.set()
        pool.give(waiting.result())
    taken[0].close()
    assert opened[1].peer.fileno() == -1


def test_a_pool_that_was_closed_keeps_connections_again() -> None:
    """One that a call begins after closing serves the next, even if the call itself has given up."""
    may_connect, opened = threading.Event(), Opened()

    def dial(**_: Any) -> Opened:
        may_connect.wait(PATIENT)
        return opened

    pool = ConnectionPool(dial)  # type: ignore[arg-type]
    pool.close()
    with pytest.raises(StoreError, match="no connection to Redis within the timeout"):
        pool.take(ListenDeadline(0.001))
    may_connect.set()
    pool.take(ListenDeadline(PATIENT)).close()
    assert not pool._connecting
