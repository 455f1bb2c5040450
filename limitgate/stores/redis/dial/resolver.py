"""Names of servers to addresses, on asyncio, without the event loop's default executor.

A name server may take as long as it likes. In the default executor every attempt would hold a thread that the application needs
for its own work. Here one daemon thread looks a name up, and all attempts meanwhile wait for what it finds.

An address that does not answer may use up all the time of an attempt, and is the last to be tried from then on: so another one
has its turn in the next attempt.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 - else imported at the first lookup, when there may be no file descriptor left for it
import errno
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

from limitgate.process.forking import reset_in_children
from limitgate.stores.redis import background

Addresses = Sequence[str]


class Resolver:
    """Looks up names for any number of event loops. What was found last serves where nothing can be found."""

    def __init__(self) -> None:
        self._known: dict[str, Addresses] = {}
        self._passed_over: dict[str, Addresses] = {}
        """Addresses that were of no help, the latest last, by host."""
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """In the child of a fork: no thread is left there that would find anything, or release a lock."""
        self._lock = threading.Lock()
        self._waiting: dict[str, list[asyncio.Future[Addresses]]] = {}

    async def addresses(self, host: str) -> Addresses:
        """The addresses of a host, at least one, in the order in which to try them. Raises `OSError`."""
        try:
            ip_address(host)
        except ValueError:
            found, last = await self._look_up(host), self._passed_over.get(host, ())
            return tuple(sorted(found, key=lambda address: last.index(address) if address in last else -1))
        return (host,)

    def pass_over(self, host: str, address: str) -> None:
        """Have an address of a host tried last the next time."""
        if host in self._known:
            others = [each for each in self._passed_over.get(host, ()) if each in self._known[host] and each != address]
            self._passed_over[host] = [*others, address]

    async def _look_up(self, host: str) -> Addresses:
        answer: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
        with self._lock:
            if host in self._waiting:
                self._waiting[host].append(answer)
            else:
                try:
                    background.start("resolver", self._run, host)
                except RuntimeError as error:  # no thread can be started now
                    return self._instead(host, OSError(errno.ENOMEM, f"no thread to look a host up in: {error}"))
                self._waiting[host] = [answer]
        return await answer

    def _run(self, host: str) -> None:
        result: Addresses | Exception
        try:
            result = _resolve(host)
        except Exception as error:  # noqa: BLE001 - besides OSError, UnicodeError for what cannot be the name of a host
            result = error
        with self._lock:
            waiting = self._waiting.pop(host, [])
            if not isinstance(result, Exception):
                self._known[host] = result
        for answer in waiting:
            with suppress(RuntimeError):  # its event loop has ended
                answer.get_loop().call_soon_threadsafe(self._tell, answer, host, result)

    def _tell(self, answer: asyncio.Future[Addresses], host: str, result: Addresses | Exception) -> None:
        if answer.done():
            return
        try:
            answer.set_result(self._instead(host, result) if isinstance(result, Exception) else result)
        except Exception as error:  # noqa: BLE001 - told to whoever connects
            answer.set_exception(error)

    def _instead(self, host: str, error: Exception) -> Addresses:
        """Return the addresses of the last lookup that succeeded. Raises the error if none did."""
        if host not in self._known:
            raise error
        return self._known[host]


def _resolve(host: str) -> Addresses:
    try:
        listed = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        os.close(os.open(os.devnull, os.O_RDONLY))  # where that fails, it is no name server that failed
        raise
    return tuple(dict.fromkeys(str(address[0]) for *_, address in listed))
