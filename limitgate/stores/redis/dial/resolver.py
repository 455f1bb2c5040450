"""Resolves host names on asyncio without the event loop's default executor.

A slow name server would block executor threads that the application needs. Here one daemon thread serves all attempts for a
name. A failed address is tried last next time.
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

from limitgate.process import background
from limitgate.process.forking import reset_in_children

Addresses = Sequence[str]


class Resolver:
    """Resolves names for all event loops. If a lookup fails, the last result is used."""

    def __init__(self) -> None:
        self._known: dict[str, Addresses] = {}
        self._passed_over: dict[str, Addresses] = {}
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Drop the parent's locks and lookups in a forked child."""
        self._lock = threading.Lock()
        self._waiting: dict[str, list[asyncio.Future[Addresses]]] = {}

    async def addresses(self, host: str) -> Addresses:
        """Return at least one address of a host, in the order to try. Raises `OSError`."""
        try:
            ip_address(host)
        except ValueError:
            found, last = await self._look_up(host), self._passed_over.get(host, ())
            return tuple(sorted(found, key=lambda address: last.index(address) if address in last else -1))
        return (host,)

    def pass_over(self, host: str, address: str) -> None:
        """Try this address of a host last next time."""
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
                    return self._instead(host, OSError(errno.ENOMEM, f"no thread can be started to resolve a host: {error}"))
                self._waiting[host] = [answer]
        return await answer

    def _run(self, host: str) -> None:
        result: Addresses | Exception
        try:
            result = _resolve(host)
        except Exception as error:  # noqa: BLE001 - UnicodeError for an invalid host name
            result = error
        with self._lock:
            waiting = self._waiting.pop(host, [])
            if not isinstance(result, Exception):
                self._known[host] = result
        for answer in waiting:
            with suppress(RuntimeError):  # the event loop has ended
                answer.get_loop().call_soon_threadsafe(self._tell, answer, host, result)

    def _tell(self, answer: asyncio.Future[Addresses], host: str, result: Addresses | Exception) -> None:
        if answer.done():
            return
        try:
            answer.set_result(self._instead(host, result) if isinstance(result, Exception) else result)
        except Exception as error:  # noqa: BLE001 - reported to the connection attempt
            answer.set_exception(error)

    def _instead(self, host: str, error: Exception) -> Addresses:
        """Return the last known addresses, or raise ``error``."""
        if host not in self._known:
            raise error
        return self._known[host]


def _resolve(host: str) -> Addresses:
    try:
        listed = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        # Raises if file descriptors are exhausted: the name server is not at fault.
        os.close(os.open(os.devnull, os.O_RDONLY))
        raise
    return tuple(dict.fromkeys(str(address[0]) for *_, address in listed))
