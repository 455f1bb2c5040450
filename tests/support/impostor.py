"""A server of the test's own words, on TCP or a unix socket: it takes everybody in, and answers what it is told to."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from typing import Any, Self

from limitgate.stores.redis.wire import ProtocolError, Reader

HELLO = b"%1\r\n+proto\r\n:3\r\n"
NULL = re.compile(rb"[$*]-1\r\n")
HANG_UP = b""
"""In place of a reply: the connection ends."""


class Impostor:
    """Answers a command by its first word in ``words``: bytes, or None to stay silent. ``heard`` are the commands.

    What is needed to connect is answered unless ``words`` says otherwise; anything else is an error. ``words`` have the nulls
    of RESP2, and a client that wants RESP3 gets those of RESP3. With a ``path`` it listens on a unix socket there.
    """

    def __init__(self, *, path: str | None = None, **words: bytes | None) -> None:
        self.heard: list[list[str]] = []
        self.words: dict[str, bytes | None] = {
            "HELLO": HELLO,
            "CLIENT": b"+OK\r\n",
            "AUTH": b"+OK\r\n",
            "SELECT": b"+OK\r\n",
            **words,
        }
        if path is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(path)
            self._listener.listen()
        self.address: Any = self._listener.getsockname()
        self.place = f"127.0.0.1:{self.address[1]}" if path is None else path
        self._lines: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()  # first, since it may be about to keep a socket
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._lines):
            end.close()

    def count(self, command: str) -> int:
        """How often a command was heard."""
        return sum(heard[0] == command for heard in list(self.heard))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line = self._listener.accept()[0]
                self._lines.append(line)
                self._threads.append(threading.Thread(target=self._serve, args=[line]))
                self._threads[-1].start()

    def _serve(self, line: socket.socket) -> None:
        commands = Reader(notEnoughData=None, replyError=ValueError)
        is_resp3 = False
        with contextlib.suppress(OSError, ProtocolError):  # somebody may look whether TLS is spoken here
            while data := line.recv(65536):
                commands.feed(data)
                while (command := commands.gets()) is not None:
                    is_resp3 |= command[:2] == [b"HELLO", b"3"]
                    self._answer(line, [word.decode(errors="replace") for word in command], is_resp3=is_resp3)

    def _answer(self, line: socket.socket, command: Any, *, is_resp3: bool) -> None:
        self.heard.append(command)
        reply = self.words.get(command[0], b"-ERR unknown command\r\n")
        if reply == HANG_UP:
            line.shutdown(socket.SHUT_RDWR)
        elif reply is not None:
            line.sendall(NULL.sub(b"_\r\n", reply) if is_resp3 else reply)
