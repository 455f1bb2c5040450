"""Connections between processes and servers: bytes arrive late, in order on one connection, and some never."""

from __future__ import annotations

import asyncio
from collections import deque

from limitgate.stores.redis.session import Session
from tests.simulation.server import Asked, Server
from tests.simulation.world import Process, World


class Network:
    """Delays and losses. Times are microseconds."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.delay_us = 100
        self.tail = 0.0
        """Share of the messages that take ten times as long."""
        self.cuts = 0.0
        """Chance that a connection breaks when it is written to."""
        self.drops = 0.0
        """Chance that the network silently drops a connection."""
        self.idle_drop_us = 0
        """Connections that were idle for so long are forgotten."""
        self.pieces = 0.0
        """Chance that a reply arrives in two pieces."""
        self.away: set[tuple[str, str]] = set()
        """Processes and servers that do not reach each other."""
        self.hurt = 0
        """How many connections have been harmed."""

    def transit(self) -> int:
        rng = self.world.rng
        us = self.delay_us * (0.5 + rng.random())
        return int(us * 10 if self.tail and rng.random() < self.tail else us) + 1

    def split(self, process: Process, server: Server, seconds: float) -> None:
        """A process does not reach a server for a while. Connections that exist go on later."""
        pair = process.name, server.name
        self.away.add(pair)
        self.hurt += 1
        self.world.note(f"{process} does not reach {server.name} for {seconds:.3f} s")
        self.world.after(int(seconds * 1e6), lambda: self._heal(pair))

    def _heal(self, pair: tuple[str, str]) -> None:
        self.away.discard(pair)
        for server, link in [(each, link) for each in self.servers for link in list(each.links)]:
            if (link.process.name, server.name) == pair:
                link.resume()

    servers: list[Server]


class SimSession(Session):
    """Also keeps what was sent in a form that the twin of the scripts can read."""

    __slots__ = ("process_name", "unsent")

    def send(self, call) -> bytes:
        packed = super().send(call)
        self.unsent.append((len(packed), Asked.of(call, self.process_name)))
        return packed


class Socket:
    def __init__(self, link: Link) -> None:
        self.link = link

    def has_data(self) -> bool:
        return self.link.unread > 0


class Link:
    """A connection, and the transport at its end in a process."""

    def __init__(self, network: Network, process: Process, server: Server) -> None:
        self.network, self.process, self.server = network, process, server
        self.world = network.world
        self.unread = 0
        self.is_open = True
        """False once the process has closed it or has heard of its end."""
        self.is_dead = False
        """The network silently dropped it."""
        self.protocol = None
        self._there = self._back = self._last_used = self.world.us
        self._waiting: list = []
        self._pending: deque = deque()
        self._ended = self._is_torn = False
        server.links[self] = None

    # --- the transport ---

    def set_protocol(self, protocol) -> None:
        self.protocol = protocol
        session = SimSession()
        session.process_name, session.unsent = self.process.name, self._pending
        session.asked_at = protocol.session.asked_at
        protocol.session = session

    def is_closing(self) -> bool:
        return not self.is_open

    def get_extra_info(self, _: str) -> Socket:
        return Socket(self)

    def write(self, data: bytes) -> None:
        network, world, rng = self.network, self.world, self.world.rng
        calls, left = [], len(data)
        while left > 0:
            size, asked = self._pending.popleft()
            calls.append(asked)
            left -= size
        if left:
            raise AssertionError("bytes were written that no session had packed")
        if not self.is_open:
            return
        if network.idle_drop_us and world.us - self._last_used > network.idle_drop_us:
            self._die()
        self._last_used = world.us
        if network.drops and rng.random() < network.drops:
            self._die()
        if network.cuts and not self._is_torn and rng.random() < network.cuts:
            keeps = rng.randrange(len(calls) + 1)
            calls = calls[:keeps]
            network.hurt += 1
            self._is_torn = True
            world.after(int(rng.random() * 4 * network.delay_us), self.cut)
            sends = calls
        else:
            sends = [] if self._is_torn else calls
        for asked in sends:
            self._send(asked)

    def abort(self) -> None:
        if self.is_open:
            self.is_open = False
            # Bytes in flight may still arrive.
            if self.world.rng.random() < 0.5:
                self.is_dead = True
            self.server.links.pop(self, None)
            self.process.loop.call_soon(self._lost)

    close = abort

    def _lost(self) -> None:
        if self.protocol is not None and not self._ended:
            self._ended = True
            self.protocol.connection_lost(None)

    # --- the way ---

    def _die(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            self.network.hurt += 1

    @property
    def _is_away(self) -> bool:
        return (self.process.name, self.server.name) in self.network.away

    def _send(self, asked: Asked) -> None:
        if self.is_dead or self._ended:
            return
        if self._is_away:
            self._waiting.append((True, asked))
            return
        self._there = max(self._there + 1, self.world.us + self.network.transit())
        self.world.at(self._there, lambda: self._arrive(asked))

    def _arrive(self, asked: Asked) -> None:
        if not self.is_dead and self.server.is_up:
            self.server.receive(self, asked)

    def reply(self, data: bytes) -> None:
        """The server answers."""
        if self.is_dead or self._ended:
            return
        if self._is_away:
            self._waiting.append((False, data))
            return
        rng = self.world.rng
        if self.network.pieces and rng.random() < self.network.pieces:
            place = rng.randrange(len(data))
            self._carry(data[:place])
            data = data[place:]
        self._carry(data)

    def _carry(self, data: bytes) -> None:
        if not data:
            return
        self._back = max(self._back + 1, self.world.us + self.network.transit())
        self.world.at(self._back, lambda: self._arrived(data))

    def _arrived(self, data: bytes) -> None:
        if not self.is_dead and self.is_open:
            self.unread += 1
            self.process.arrived(lambda: self._read(data))

    def _read(self, data: bytes) -> None:
        self.unread -= 1
        if self.is_open and self.protocol is not None:
            self.protocol.data_received(data)

    def resume(self) -> None:
        waiting, self._waiting = self._waiting, []
        for is_call, what in waiting:
            self._send(what) if is_call else self.reply(what)

    def cut(self) -> None:
        """Close the server's end. The process receives the end unless the network dropped the connection."""
        self.server.links.pop(self, None)
        self.network.hurt += 1
        if self.is_dead:
            return
        self.is_dead = True
        if not self._is_away:
            self.world.after(self.network.transit(), lambda: self.process.arrived(self._hear_of_the_end))

    def _hear_of_the_end(self) -> None:
        if self.is_open:
            self.is_open = False
            self._lost()


class Writer:
    def __init__(self, link: Link) -> None:
        self.transport = link

    def close(self) -> None:
        self.transport.close()


class Dialed:
    """What redis-py calls a connection."""

    def __init__(self, link: Link) -> None:
        self._reader = None
        self._writer = Writer(link)


class SimDialer:
    """Opens connections of one process."""

    nodes = ()

    def __init__(self, network: Network, process: Process, server: Server) -> None:
        self._network, self._process, self._server = network, process, server

    async def adial(self, clock, address=None) -> Dialed:
        network, process, server = self._network, self._process, self._server
        loop = asyncio.get_running_loop()
        opened = loop.create_future()

        def tell() -> None:
            if not opened.done():
                opened.set_result(server.is_up)

        def arrive() -> None:
            if (process.name, server.name) not in network.away and network.world.us >= server.frozen_until:
                network.world.after(2 * network.transit(), lambda: process.arrived(tell))
            # Someone tries again, as TCP does.
            elif process.alive and not opened.done():
                network.world.after(100_000, arrive)

        network.world.after(network.transit(), arrive)
        if not await opened:
            raise ConnectionRefusedError(111, "Connection refused")
        return Dialed(Link(network, process, server))
