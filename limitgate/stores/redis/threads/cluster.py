"""A Redis Cluster for threads: nodes are asked in parallel, one call per slot."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from limitgate.errors import StoreError
from limitgate.internal_errors import logged_errors
from limitgate.limits.template import AnyPlan, common_shape
from limitgate.process import background
from limitgate.process.clock import monotonic
from limitgate.stores.redis.cluster import (
    GIVE_BACK_TIMEOUT,
    MAP_PAUSE,
    PAUSE,
    Part,
    SlotMap,
    concluded,
    hash_slot,
    parts_of,
    unreachable,
)
from limitgate.stores.redis.dialer import Dialer
from limitgate.stores.redis.errors import Redirection
from limitgate.stores.redis.replies import Answer, Outcome, RedisStoreBase, configuration, failure_by
from limitgate.stores.redis.threads.connection import ListenDeadline
from limitgate.stores.redis.threads.node import Node, Sent
from limitgate.stores.redis.url import Address
from limitgate.stores.redis.wire import NO_PLAN, Call, Kept, KeptRequest


class _Errand(Call):
    __slots__ = ("address", "is_parked", "places")

    def __init__(
        self, plans: Sequence[AnyPlan], places: Sequence[int], address: Address, config: KeptRequest | None = None
    ) -> None:
        super().__init__(plans, common_shape(plans), config)
        self.places = places
        self.address = address
        self.is_parked = False

    def each(self) -> Sequence[_Errand]:
        alone = []
        for place, plan, requested in zip(self.places, self.plans, self.requested):
            errand = _Errand([plan], [place], self.address)
            errand.requested = [requested]
            errand.follow(self)
            alone.append(errand)
        return alone


class SyncCluster:
    def __init__(self, dialer: Dialer, replies: RedisStoreBase) -> None:
        self._dialer = dialer
        self._replies = replies
        self._map: SlotMap[Node] = SlotMap(dialer.nodes, self._open_node)
        self._looks = False
        self._giving_back: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def check(self, plan: AnyPlan) -> None:
        parts = parts_of(plan)
        for part in parts:
            self._map.node(self._map.holder(part.hash_slot)).look()
        error = unreachable(self._map, parts, monotonic)
        if error:
            raise error

    def exchange(self, plans: Sequence[AnyPlan], listen_deadline: ListenDeadline) -> list[Outcome]:
        parted, began, enough = [parts_of(plan) for plan in plans], monotonic(), listen_deadline.left / 2
        heard = iter(self._carry_out([part for parts in parted for part in parts], listen_deadline))
        conclusions = [concluded(plan, parts, [next(heard) for _ in parts]) for plan, parts in zip(plans, parted)]
        for conclusion in conclusions:
            with logged_errors():
                self._replies.refused_elsewhere(conclusion.untouched, began)
        back = [parts_of(plan)[0] for conclusion in conclusions for plan in conclusion.refunds]
        # Refunds may take as long.
        may_wait = listen_deadline.left > enough
        if back and (may_wait or not self._give_back_unwatched(back)):
            self._give_back(back, listen_deadline)
        return [conclusion.outcome for conclusion in conclusions]

    def config(self, request: KeptRequest, listen_deadline: ListenDeadline) -> Kept:
        errand = _Errand([NO_PLAN], [0], self._map.holder(hash_slot(request.key)), request)
        self._replies.outgoing(errand)
        return configuration(self._answers([errand], listen_deadline).get(errand) or _no_answer())

    def connect(self) -> None:
        self._look()
        self._map.node(self._map.holder(0)).connect()

    def close(self) -> None:
        # No lock, see `ConnectionPool.close`.
        self._map.is_outdated = False
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
        listen_deadline = ListenDeadline(GIVE_BACK_TIMEOUT)
        with self._lock, suppress(RuntimeError):
            self._giving_back.add(background.start("give-back", self._give_back, parts, listen_deadline))
            return True
        return False

    def _carry_out(self, parts: Sequence[Part], listen_deadline: ListenDeadline) -> list[Outcome]:
        outcomes: list[Outcome] = [_no_answer()] * len(parts)
        for errand, answer in self._answers(self._errands(parts), listen_deadline).items():
            for n, place in enumerate(errand.places):
                outcomes[place] = answer[n] if isinstance(answer, list) else failure_by(answer)
        return outcomes

    def _answers(self, errands: Sequence[_Errand], listen_deadline: ListenDeadline) -> dict[_Errand, Answer]:
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
        by_node: dict[Address, list[_Errand]] = {}
        for errand in errands:
            by_node.setdefault(errand.address, []).append(errand)
        sent: list[tuple[Node, Sent, list[_Errand]]] = []
        heard: list[tuple[_Errand, Answer]] = []
        try:
            nodes = [(self._map.node(address), own) for address, own in by_node.items()]
            # These may have to connect first.
            for node, own in sorted(nodes, key=lambda each: each[0].breaker.in_trouble):
                try:
                    _check(node, listen_deadline)
                    sent.append((node, node.send(own, listen_deadline), own))
                except StoreError as error:
                    heard += [(errand, error) for errand in own]
                    self._unanswered(own)
            while sent:
                node, calls, own = sent.pop()
                heard += zip(own, node.hear(calls, listen_deadline))
        # A signal handler may raise anywhere; replies in flight are lost.
        except BaseException:
            for node, calls, _ in sent:
                node.abandon(calls)
            self._unanswered(errands)
            raise
        return heard

    def _unanswered(self, errands: Sequence[_Errand]) -> None:
        for errand in errands:
            self._replies.unanswered(errand)

    def _sent_on(self, errand: _Errand, redirection: Redirection) -> Sequence[_Errand]:
        route = self._map.route(errand, redirection, errand.address)
        if self._map.is_outdated:
            self._look()
        errands = errand.each() if route.how == "split" else [errand]
        for each in errands:
            each.address, each.is_parked = route.address, route.how != "send"
        return errands

    def _look(self) -> None:
        with self._lock:
            self._map.is_outdated = True
            if not self._looks:
                try:
                    background.start("slots", self._keep_looking)
                    self._looks = True
                # Redirections still report moved slots.
                except RuntimeError:
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
            with suppress(Exception):
                if self._map.learn(self._dialer.slots(address), address):
                    return


def _no_answer() -> StoreError:
    return StoreError("no answer from Redis within the timeout", "timeout")


def _check(node: Node, listen_deadline: ListenDeadline) -> None:
    if listen_deadline.left <= 0:
        raise StoreError("the timeout ended before the call could be sent", "timeout")
    node.breaker.check(monotonic)
