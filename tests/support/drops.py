"""A NAT in front of a Redis that forgets connections without a word, as load balancers do with those that lie idle."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress
from typing import Self

from tests.support.redis_server import RedisServer


class ForgetfulNat:
    """Passes bytes on in a thread, in the order in which they arrive on all connections; ``with ForgetfulNat(server) as nat``.

    After `forget` nothing passes on the connections that there are, and none of them is closed. New ones work. While
    `is_shut`, connections come about, but nothing passes on them.
    """

    def __init__(self, server: RedisServer, port: int = 0) -> None:
        self._server = server
        self._listening = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listening.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.is_shut = False
        self.made = 0
        """Connections so far."""
        self._epoch = 0
        self._sockets: list[socket.socket] = []
        self._ready = selectors.DefaultSelector()
        self._passing = threading.Thread(target=self._pass, daemon=True)

    def __enter__(self) -> Self:
        self._ready.register(self._listening, selectors.EVENT_READ)
        self._passing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._passing.join()  # first, since it may be about to keep sockets
        self._ready.close()
        for each in (self._listening, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def forget(self) -> None:
        """Forget all connections that there are."""
        self._epoch += 1

    def _pass(self) -> None:
        with suppress(OSError):
            while True:
                for ready, _ in self._ready.select():
                    if ready.data is None:
                        self._accept()
                    else:
                        self._pass_on(ready.fileobj, *ready.data)  # type: ignore[arg-type]

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.made += 1
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(str(self._server.socket))
        except OSError:  # Redis is away
            client.close()
            return
        self._sockets += [client, server]
        for source, target in ((client, server), (server, client)):
            self._ready.register(source, selectors.EVENT_READ, (target, self._epoch))

    def _pass_on(self, source: socket.socket, target: socket.socket, epoch: int) -> None:
        data = b""
        with suppress(OSError):
            data = source.recv(65536)
            if data and epoch == self._epoch and not self.is_shut:
                target.sendall(data)
        if not data:
            self._ready.unregister(source)
            with suppress(OSError):
                if epoch == self._epoch:
                    target.shutdown(socket.SHUT_RDWR)
