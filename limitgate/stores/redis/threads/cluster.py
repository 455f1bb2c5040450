"""A Redis Cluster as threads see it: every exchange asks the nodes it needs side by side, with a call for each slot."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from limitgate.errors import StoreError
from limitgate.internal_errors import logged_errors
from limitgate.limits.template import AnyPlan, common_shape
from limitgate.process.clock import monotonic
from limitgate.stores.base import ConfigRequest, StoredConfig
from limitgate.stores.redis import background
from limitgate.stores.redis.cluster.router import PAUSE, Router, Send, Split
from limitgate.stores.redis.cluster.slot_map import (
    GIVE_BACK_TIMEOUT,
    MAP_PAUSE,
    Part,
    SlotMap,
    concluded,
    hash_slot,
    parts_of,
    unreachable,
)
from limitgate.stores.redis.dial.dialer import Dialer
from limitgate.stores.redis.dial.url import Address
from limitgate.stores.redis.errors import Redirection
from limitgate.stores.redis.protocol.wire import NO_PLAN, Call
from limitgate.stores.redis.replies import Outcome, RedisStoreBase
from limitgate.stores.redis.server import Answer, configuration, failure_by
from limitgate.stores.redis.threads.listen_deadline import ListenDeadline
from limitgate.stores.redis.threads.node import Node, Sent


class _Errand(Call):
    """A call on its way to a node of the cluster at an ``address``."""

    __slots__ = ("address", "is_parked", "places")

    def __init__(
        self, plans: Sequence[AnyPlan], places: Sequence[int], address: Address, config: ConfigRequest | None = None
    ) -> None:
        super().__init__(plans, common_shape(plans), config)
        self.places = places
        """Indices of the outcomes that it brings back."""
        self.address = address
        self.is_parked = False
        """True if there is a pause before it is sent."""

    def each(self) -> Sequence[_Errand]:
        """The plans as errands of their own, just as they are sent here."""
        alone = []
        for place, plan, requested in zip(self.places, self.plans, self.requested):
            errand = _Errand([plan], [place], self.address)
            errand.requested = [requested]
            errand.follow(self)
            alone.append(errand)
        return alone


class SyncCluster:
    """Carries out plans on the nodes of a cluster that a `Dialer` connects to."""

    def __init__(self, dialer: Dialer, replies: RedisStoreBase) -> None:
        self._dialer = dialer
        self._replies = replies
        self._map: SlotMap[Node] = SlotMap(dialer.nodes, self._open_node)
        self._router = Router(self._map)
        self._looks = False
        self._giving_back: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def check(self, plan: AnyPlan) -> None:
        """Raise a `StoreError` if nobody is to wait for a node that a plan needs."""
        parts = parts_of(plan)
        for part in parts:
            self._map.node(self._map.holder(part.hash_slot)).look()
        error = unreachable(self._map, parts, monotonic)
        if error:
            raise error

    def exchange(self, plans: Sequence[AnyPlan], listen_deadline: ListenDeadline) -> list[Outcome]:
        """Carry out plans, each with an outcome of its own."""
        parted, began, enough = [parts_of(plan) for plan in plans], monotonic(), listen_deadline.left / 2
        heard = iter(self._carry_out([part for parts in parted for part in parts], listen_deadline))
        conclusions = [concluded(plan, parts, [next(heard) for _ in parts]) for plan, parts in zip(plans, parted)]
        for conclusion in conclusions:
            with logged_errors():
                self._replies.refused_elsewhere(conclusion.untouched, began)
        back = [parts_of(plan)[0] for conclusion in conclusions for plan in conclusion.refunds]
        may_wait = listen_deadline.left > enough  # another call may take as long as the first
        if back and (may_wait or not self._give_back_unwatched(back)):
            self._give_back(back, listen_deadline)
        return [conclusion.outcome for conclusion in conclusions]

    def config(self, request: ConfigRequest, listen_deadline: ListenDeadline) -> StoredConfig:
        """Carry out a request for configuration. Raises `StoreError`, once ``listen_deadline`` is over at the latest."""
        address = self._map.holder(hash_slot(request.key))
        self._map.node(address).look()
        errand = _Errand([NO_PLAN], [0], address, request)
        self._replies.outgoing(errand)
        return configuration(self._answers([errand], listen_deadline).get(errand) or _no_answer())

    def connect(self) -> None:
        """Connect to a node, if there is no connection, and find out who holds which slot. Raises `StoreError`."""
        self._look()
        self._map.node(self._map.holder(0)).connect()

    def close(self) -> None:
        """Close the connections once everything is given back, those in use when their calls end; stop looking for nodes."""
        self._map.is_outdated = False  # without the lock, see `ConnectionPool.close`
        for giving_back in list(self._giving_back):
            giving_back.join()
        for node in list(self._map.nodes.values()):
            node.close()

    def _open_node(self, address: Address) -> Node:
        return Node(partial(self._dialer.dial, address), self._replies, address=address, failed=self._look)

    def _give_back(self, parts: Sequence[Part], listen_deadline: ListenDeadline) -> None:
        lost = len(parts)
        with logged_errors():
            lost = sum(isinstance(outcome, StoreError) for outcome in self._carry_out(parts, listen_deadline))
        with self._lock:
            self._replies.not_given_back += lost
            self._giving_back.discard(threading.current_thread())

    def _give_back_unwatched(self, parts: Sequence[Part]) -> bool:
        """Give back in a thread of its own, which nobody waits for. False if none can be started now."""
        listen_deadline = ListenDeadline(GIVE_BACK_TIMEOUT)
        with self._lock, suppress(RuntimeError):
            self._giving_back.add(background.start("give-back", self._give_back, parts, listen_deadline))
            return True
        return False

    def _carry_out(self, parts: Sequence[Part], listen_deadline: ListenDeadline) -> list[Outcome]:
        """Carry out plans whose buckets are in one hash slot each."""
        outcomes: list[Outcome] = [_no_answer()] * len(parts)
        for errand, answer in self._answers(self._errands(parts), listen_deadline).items():
            for n, place in enumerate(errand.places):
                outcomes[place] = answer[n] if isinstance(answer, list) else failure_by(answer)
        return outcomes

    def _answers(self, errands: Sequence[_Errand], listen_deadline: ListenDeadline) -> dict[_Errand, Answer]:
        """Answers of nodes to errands, or to parts of them, redirected as often as needed; none after the deadline."""
        answers: dict[_Errand, Answer] = {}
        while errands and listen_deadline.left > 0:
            round_trip = self._round(errands, listen_deadline)
            errands = []
            for errand, answer in round_trip:
                if isinstance(answer, Redirection):
                    errands += self._sent_on(errand, answer)
                else:
                    answers[errand] = answer
            if any(errand.is_parked for errand in errands):
                time.sleep(PAUSE)
                listen_deadline.waited_in_vain(PAUSE)
        self._unanswered(errands)
        return answers

    def _errands(self, parts: Sequence[Part]) -> list[_Errand]:
        places: dict[int, list[int]] = {}
        for place, part in enumerate(parts):
            places.setdefault(part.hash_slot, []).append(place)
        errands = []
        for slot, own in places.items():
            errand = _Errand([parts[place].plan for place in own], own, self._map.holder(slot))
            self._replies.outgoing(errand)
            errands.append(errand)
        return errands

    def _round(self, errands: Sequence[_Errand], listen_deadline: ListenDeadline) -> list[tuple[_Errand, Answer]]:
        """Send errands to their nodes, then hear from each."""
        by_node: dict[Address, list[_Errand]] = {}
        for errand in errands:
            by_node.setdefault(errand.address, []).append(errand)
        sent: list[tuple[Node, Sent, list[_Errand]]] = []
        heard: list[tuple[_Errand, Answer]] = []
        try:
            nodes = [(self._map.node(address), own) for address, own in by_node.items()]
            for node, own in sorted(nodes, key=_in_trouble):  # last those that may let us wait for a connection
                try:
                    _check(node, listen_deadline)
                    sent.append((node, node.send(own, listen_deadline), own))
                except StoreError as error:
                    heard += [(errand, error) for errand in own]
                    self._unanswered(own)
            while sent:
                node, calls, own = sent.pop()
                heard += zip(own, node.hear(calls, listen_deadline))
        except BaseException:  # a signal's handler may raise anywhere: nobody will read what is still on its way
            for node, calls, _ in sent:
                node.abandon(calls)
            self._unanswered(errands)
            raise
        return heard

    def _unanswered(self, errands: Sequence[_Errand]) -> None:
        for errand in errands:
            self._replies.unanswered(errand)

    def _sent_on(self, errand: _Errand, redirection: Redirection) -> Sequence[_Errand]:
        """An errand that its node has redirected, as what is to be sent on."""
        route = self._router.route(errand, redirection, errand.address)
        if self._map.is_outdated:
            self._look()
        errands = errand.each() if isinstance(route, Split) else [errand]
        for each in errands:
            each.address, each.is_parked = route.address, not isinstance(route, Send)
        return errands

    def _look(self) -> None:
        """Find out who holds which slot, in a thread of its own."""
        with self._lock:
            self._map.is_outdated = True
            if not self._looks:
                try:
                    background.start("slots", self._keep_looking)
                    self._looks = True
                except RuntimeError:  # no thread can be started now: nodes still say where slots have moved
                    pass

    def _keep_looking(self) -> None:
        while True:
            with self._lock:
                self._looks = self._map.is_outdated
                if not self._looks:
                    return
                self._map.is_outdated = False
            with logged_errors():
                self._learn()
                for address in self._map.unused():
                    self._map.nodes.pop(address).retire()
            time.sleep(MAP_PAUSE)

    def _learn(self) -> None:
        for address in self._map.known():
            with suppress(Exception):  # whatever one of them says or does not say, the next is asked
                if self._map.learn(self._dialer.slots(address), address):
                    return


def _no_answer() -> StoreError:
    return StoreError("no answer from Redis within the timeout", "timeout")


def _check(node: Node, listen_deadline: ListenDeadline) -> None:
    """Raise a `StoreError` if a node is not to be asked."""
    if listen_deadline.left <= 0:
        raise StoreError("no time was left to ask", "timeout")
    node.breaker.check(monotonic)


def _in_trouble(errands: tuple[Node, list[_Errand]]) -> bool:
    """True if the last call to a node failed."""
    return errands[0].breaker.in_trouble
