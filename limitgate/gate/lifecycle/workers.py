"""Workers of the same server, counted: processes of one parent that listen on the same socket as this one.

That is so whatever has started them, flags, a file or a variable; and not so for a reloader, a shell, or tests that run side by
side. On Linux alone; elsewhere nobody is counted.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from limitgate.messages.diagnostics import Diagnosis
from limitgate.rules.settings import seems_to_have_workers

TOGETHER = 2.0
"""Seconds between two workers of a server that begin together: those of before may be about to be replaced by these."""

_PROC = Path("/proc")


def told_of_workers(*, is_memory: bool, is_local: bool) -> Callable[[], None]:
    """Make a function that counts the workers and logs what several of them do not go with (LG001, LG028).

    ``is_memory`` says that the store is in memory, ``is_local`` that a rule is limited by each process while the store fails,
    and that nobody has said how many there are.
    """

    def tell() -> None:
        workers = max(count_workers(), seems_to_have_workers()) if is_memory or is_local else 1
        if workers > 1:
            (Diagnosis.MEMORY_PER_WORKER if is_memory else Diagnosis.LOCAL_PER_WORKER).log(workers)

    return tell


def count_workers() -> int:
    """Number of this process and of those that share its parent and its listening socket, and that began together with it."""
    try:
        sockets, began = _listening_sockets(), _began(os.getpid())
        siblings = [pid for pid in _children(os.getppid()) if pid != os.getpid()] if sockets else []
    except (OSError, ValueError):  # no Linux, or no /proc
        return 1
    others = []
    for pid in siblings:
        with suppress(OSError, ValueError):  # it has ended meanwhile
            if not sockets.isdisjoint(_sockets(pid)):
                others.append(_began(pid))
    return (
        1
        + _in_a_row(began, sorted(each for each in others if each >= began))
        + _in_a_row(began, sorted((each for each in others if each < began), reverse=True))
    )


def _in_a_row(began: float, others: list[float]) -> int:
    """Number of those that began together with the one before each, the first one with this process."""
    for place, other in enumerate(others):
        if abs(other - began) > TOGETHER:
            return place
        began = other
    return len(others)


def _listening_sockets() -> frozenset[str]:
    """The sockets that this process listens on, as ``/proc`` names them."""
    listening = set()
    for number, name in _open_sockets(os.getpid()):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as opened:
            if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(name)
    return frozenset(listening)


def _sockets(pid: int) -> Iterator[str]:
    return (name for _, name in _open_sockets(pid))


def _open_sockets(pid: int) -> Iterator[tuple[int, str]]:
    """The file descriptors of a process that are sockets, with the names of these."""
    for entry in (_PROC / str(pid) / "fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            name = str(entry.readlink())
            if name.startswith("socket:"):
                yield int(entry.name), name


def _children(pid: int) -> list[int]:
    """The processes that any thread of a process has started."""
    lists = [(task / "children").read_text() for task in (_PROC / str(pid) / "task").iterdir()]
    return [int(child) for listed in lists for child in listed.split()]


def _began(pid: int) -> float:
    """Seconds from the machine's start until a process began (proc(5), field 22 of ``stat``)."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
