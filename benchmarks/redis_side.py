"""What a Redis server does for the requests: its CPU, the commands it is sent, the memory that buckets take.

All of it is asked of Redis itself, so it needs to know nothing of how a limiter speaks to it.
"""

from __future__ import annotations

import ast
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.support.redis_server import RedisServer

Command = tuple[bytes, ...]
"""A command and its arguments."""

_LINE = re.compile(rb'^\+[\d.]+ \[\d+ (\S+?)\] (".*")$')
_ARGUMENT = re.compile(rb'"(?:[^"\\]|\\.)*"')
_SENTINEL = b"benchmark is over"
_IN_BACKGROUND = (b"limitgate:fleet", b"limitgate:refusal-ids")
"""Keys of snapshots and of what processes agree upon at the start: calls at times of their own."""


class Spent(NamedTuple):
    """What a server has spent since it started, in µs."""

    cpu: float
    """CPU of its process."""
    inside: float
    """Time inside of commands, scripts included."""


def spent(server: Any, commands: Iterable[bytes]) -> Spent:
    """What the server behind this client has spent, inside of the given commands in particular."""
    cpu = server.info("cpu")
    stats = server.info("commandstats")
    inside = sum(stats.get(f"cmdstat_{name.decode().lower()}", {}).get("usec", 0) for name in commands)
    return Spent((cpu["used_cpu_user"] + cpu["used_cpu_sys"]) * 1e6, inside)


def overheard(server: RedisServer, send: Callable[[], object]) -> list[Command]:
    """The commands that clients sent for requests while ``send`` ran; what scripts called is not among them."""
    with socket.socket(socket.AF_UNIX) as monitor:
        monitor.connect(str(server.socket))
        monitor.sendall(b"MONITOR\r\n")
        lines = iter(monitor.makefile("rb").readline, b"")
        if next(lines) != b"+OK\r\n":
            raise RuntimeError("Redis does not answer MONITOR")
        send()
        with server.client() as client:
            client.echo(_SENTINEL)
        return list(_until_sentinel(lines))


def _until_sentinel(lines: Iterable[bytes]) -> Iterator[Command]:
    for line in lines:
        command = parsed(line)
        if command and command[-1] == _SENTINEL:
            return
        if command and command[0] not in (b"HELLO", b"CLIENT") and not any(each.startswith(_IN_BACKGROUND) for each in command):
            yield command
    raise RuntimeError("Redis stopped answering MONITOR")


def parsed(line: bytes) -> Command | None:
    r"""A line of MONITOR as a command; None if a script called it. Arguments are quoted there as in C, bytes as \xhh."""
    match = _LINE.match(line.rstrip(b"\r\n"))
    if match is None:
        raise RuntimeError(f"{line!r} is no line of MONITOR")
    if match[1] == b"lua":
        return None
    return tuple(ast.literal_eval(f"b{argument.decode('ascii')}") for argument in _ARGUMENT.findall(match[2]))


def bytes_in_use(server: RedisServer) -> int:
    """What all keys take together, as MEMORY USAGE counts it."""
    with server.client() as client, client.pipeline(transaction=False) as pipeline:
        for key in client.scan_iter(count=1000):
            pipeline.memory_usage(key, samples=0)
        sizes: Sequence[int | None] = pipeline.execute()
    return sum(size or 0 for size in sizes)


@contextmanager
def own_server() -> Iterator[RedisServer]:
    """A Redis of our own, stopped at the end."""
    server = RedisServer()
    try:
        yield server
    finally:
        server.stop()
