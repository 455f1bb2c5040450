"""A Redis Cluster on one event loop: a batcher for each node, and requests whose buckets are on several.

    spend ──> parts, one per slot ──> the batchers of their nodes ──> readings ──> one reading
                                                                          └──> what has to be given back

A node is asked for a slot until it says that another one holds it (MOVED) or will hold it soon (ASK); the calls that it could
not deal with are sent on as they are. After that, and after any failure, some node is asked who holds which slot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from redis.exceptions import AskError, MovedError

from limitgate.errors import StoreError
from limitgate.plan import Plan, Reading
from limitgate.stores.batch import Batch, Request
from limitgate.stores.batcher import Batcher
from limitgate.stores.dialer import Address, Dialer
from limitgate.stores.faults import Redirection
from limitgate.stores.listening import ListeningClock
from limitgate.stores.scripted import Outcome, Scripted
from limitgate.stores.slots import (
    GIVE_BACK_TIMEOUT,
    MAP_PAUSE,
    MAX_HOPS,
    RETRY_PAUSE,
    Conclusion,
    Part,
    SlotMap,
    concluded,
    named,
    parts_of,
    redirected,
    slot_of,
    unreachable,
)


class Cluster:
    """Carries out plans on the nodes of a cluster that a `Dialer` connects to."""

    def __init__(self, dialer: Dialer, script: Scripted, clock: ListeningClock) -> None:
        self._dialer = dialer
        self._script = script
        self._clock = clock
        self._map: SlotMap[Batcher] = SlotMap(dialer.nodes, self._open_node)
        self._looking: asyncio.Task[None] | None = None
        self._map_is_old = False
        self._giving_back: set[asyncio.Future[Reading]] = set()
        self._closed = False

    def spend(self, plan: Plan, timeout: float) -> asyncio.Future[Reading]:
        """The reading of a plan, or a `StoreError` within ``timeout`` seconds."""
        parts = parts_of(plan)
        if len(parts) == 1:
            return self._node(parts[0]).spend(plan, timeout)
        error = unreachable(self._map, parts)
        if error:
            raise error
        return _Together(self, plan, parts, timeout).answer

    def ask(self, part: Part, timeout: float) -> asyncio.Future[Reading]:
        """The reading of a part of a plan, even from a node that has stopped answering."""
        return self._node(part).ask(part.plan, timeout)

    def clear_up(self, conclusion: Conclusion, since: float) -> None:
        """Give back what a request took after a time that is refused elsewhere. Nobody waits for it."""
        self._script.refused_elsewhere(conclusion.seen, since)
        for plan in conclusion.back:
            told = None
            if not self._closed:
                with suppress(StoreError):
                    told = self.ask(parts_of(plan)[0], GIVE_BACK_TIMEOUT)
            if told is None:
                self._script.not_given_back += 1
            else:
                self._giving_back.add(told)
                told.add_done_callback(self._given_back)

    def _given_back(self, told: asyncio.Future[Reading]) -> None:
        self._giving_back.discard(told)
        if told.cancelled() or told.exception():
            self._script.not_given_back += 1

    async def close(self) -> None:
        """Close the connections, once everything is given back; requests still waiting fail."""
        if self._giving_back:
            await asyncio.wait(self._giving_back)
        self._closed = True
        for batcher in list(self._map.nodes.values()):
            await batcher.close()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    def abandon(self) -> None:
        """The event loop was closed before anything here was: no call on its way will be answered."""
        for batcher in self._map.nodes.values():
            batcher.abandon()

    def apart(self, requests: list[Request]) -> Iterable[Batch]:
        """Requests as calls with one slot each."""
        slots: dict[int, list[Request]] = {}
        for request in requests:
            slots.setdefault(slot_of(request[0]), []).append(request)
        return map(Batch, slots.values())

    def redirected(self, batcher: Batcher, batch: Batch, reply: Redirection) -> None:
        """Send a batch on that a node could not deal with."""
        if not isinstance(reply, AskError):  # while a slot moves, several buckets can only be had where all of them are
            holder = self._map.node(self._map.holder(slot_of(batch.plans[0])))
            for alone in batch.each():
                holder.park(alone, RETRY_PAUSE)
            return
        asked = next((address for address, node in self._map.nodes.items() if node is batcher), self._dialer.nodes[0])
        address = redirected(reply, asked)
        batch.asking = not isinstance(reply, MovedError)
        if not batch.asking:
            self._map.moved(slot_of(batch.plans[0]), address)
            self.troubled()
        batch.hops += 1
        if batch.hops > MAX_HOPS:
            self._map.node(address).park(batch, RETRY_PAUSE)
        else:
            self._map.node(address).adopt(batch)

    def troubled(self) -> None:
        """Find out who holds which slot."""
        self._map_is_old = True
        if self._looking is None and not self._closed:
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        try:
            while self._map_is_old or self._map.unused():
                if self._map_is_old:
                    self._map_is_old = False
                    await self._learn()
                for address in self._map.unused():
                    if self._map.nodes[address].is_idle:
                        await self._map.nodes.pop(address).close()
                await asyncio.sleep(MAP_PAUSE)
        finally:
            if self._looking is asyncio.current_task():
                self._looking = None

    async def _learn(self) -> None:
        for address in self._map.known():
            with suppress(Exception):  # whatever one of them says or does not say, the next is asked
                if self._map.learn(await self._dialer.aslots(self._clock, address), address):
                    return

    def _node(self, part: Part) -> Batcher:
        return self._map.node(self._map.holder(part.slot))

    def _open_node(self, address: Address) -> Batcher:
        dial = partial(self._dialer.adial, self._clock, address)
        return Batcher(dial, self._script, self._clock, server=named(address), cluster=self)


class _Together:
    """A plan on its way in several parts. ``answer`` is its reading, or a `StoreError`."""

    def __init__(self, cluster: Cluster, plan: Plan, parts: Sequence[Part], timeout: float) -> None:
        self.answer: asyncio.Future[Reading] = asyncio.get_running_loop().create_future()
        self._cluster = cluster
        self._plan = plan
        self._parts = parts
        self._left = len(parts)
        self._began = time.monotonic()
        self._outcomes: list[Outcome] = [StoreError("no answer")] * len(parts)
        for place, part in enumerate(parts):
            try:
                asked = cluster.ask(part, timeout)
            except StoreError as error:
                self._note(place, error)
            else:
                asked.add_done_callback(partial(self._heard, place))

    def _heard(self, place: int, asked: asyncio.Future[Reading]) -> None:
        error = asked.exception()
        if error is not None and not isinstance(error, StoreError):
            error = StoreError(str(error))
        self._note(place, error or asked.result())

    def _note(self, place: int, outcome: Outcome) -> None:
        self._outcomes[place] = outcome
        self._left -= 1
        if self._left:
            return
        conclusion = concluded(self._plan, self._parts, self._outcomes)
        self._cluster.clear_up(conclusion, self._began)
        if self.answer.done():  # nobody waits for it any more
            return
        if isinstance(conclusion.outcome, StoreError):
            self.answer.set_exception(conclusion.outcome)
        else:
            self.answer.set_result(conclusion.outcome)
