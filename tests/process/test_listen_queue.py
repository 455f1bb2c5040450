"""The length of listen queues, as the kernel tells it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from limitgate.overload import lag
from limitgate.overload.lag import ListenQueue, LoopGuard

FOLDER = Path("/proc/self/fd")
pytestmark = pytest.mark.skipif(not lag._INFO, reason="this system does not tell")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _many_descriptors(monkeypatch) -> None:
    """Other tests of this process may have left some open."""
    monkeypatch.setattr(lag, "DESCRIPTORS", 4096)


def listening(stack: ExitStack, host: str = "127.0.0.1") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return stack.enter_context(socket.create_server((host, 0), family=family))


def connect(stack: ExitStack, server: socket.socket, times: int) -> None:
    for _ in range(times):
        stack.enter_context(socket.create_connection(server.getsockname()[:2]))


def test_connections_of_all_sockets_count_until_they_are_accepted(stack) -> None:
    queue, one, other = ListenQueue(), listening(stack), listening(stack)
    before = queue()
    connect(stack, one, 3)
    connect(stack, other, 2)
    assert queue() == before + 5
    stack.enter_context(one.accept()[0])
    assert queue() == before + 4


def test_ipv6(stack) -> None:
    try:
        server = listening(stack, "::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    queue = ListenQueue()
    before = queue()
    connect(stack, server, 2)
    assert queue() == before + 2


def test_a_socket_that_was_closed_listens_no_more(stack) -> None:
    queue, server = ListenQueue(), listening(stack)
    queue()
    address, descriptor = server.getsockname(), server.fileno()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    queue()
    assert descriptor not in queue._sockets


def test_a_descriptor_that_is_of_something_else_now_is_not_believed(stack) -> None:
    """Of a connection the same field of `tcp_info` tells what is under way."""
    queue, server, other = ListenQueue(), listening(stack), listening(stack)
    queue()
    descriptor = server.fileno()
    connection = stack.enter_context(socket.create_connection(other.getsockname()))
    os.dup2(connection.fileno(), descriptor)
    queue()
    assert descriptor not in queue._sockets
    assert other.fileno() in queue._sockets


def test_no_descriptor_stays_open(stack) -> None:
    queue, server = ListenQueue(), listening(stack)
    connect(stack, server, 1)
    before = sorted(FOLDER.iterdir())
    for _ in range(10):
        queue()
    assert sorted(FOLDER.iterdir()) == before


def test_sockets_are_looked_for_once_a_minute(monkeypatch) -> None:
    looked, now = [], [0.0]
    monkeypatch.setattr(lag, "_length", looked.append)
    queue = ListenQueue(lambda: now[0])
    for seconds in (0, 1, 59.9, 60, 61):
        now[0] = seconds
        assert queue() == 0
    assert looked == [*range(lag.DESCRIPTORS)] * 2


def test_a_system_that_does_not_tell(monkeypatch, stack) -> None:
    monkeypatch.setattr(lag, "_INFO", 0)
    server = listening(stack)
    connect(stack, server, 2)
    assert ListenQueue()() == 0


def test_a_socket_that_listens_later_is_found_within_a_minute(stack) -> None:
    now = [0.0]
    queue, _ = ListenQueue(lambda: now[0]), listening(stack)
    queue()
    later = listening(stack)
    now[0] = lag.SCAN_EVERY_S
    queue()
    assert later.fileno() in queue._sockets


def test_the_guard_of_an_event_loop_is_told(stack, monkeypatch) -> None:
    monkeypatch.setattr(lag, "_unaccepted", ListenQueue())
    guard, server = LoopGuard(), listening(stack)
    before = guard._unaccepted()
    connect(stack, server, 3)
    assert guard._unaccepted() >= before + 3
