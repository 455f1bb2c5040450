"""A Redis Cluster on one event loop: a batcher per node, and plans over several nodes.

    spend ──> parts, one per slot ──> batchers of their nodes ──> readings ──> one reading
                                                                          └──> refunds

At most `ABREAST` plans for the same buckets are in flight: after a refusal, most others are refused without charging another
node. Redirected calls (MOVED, ASK) are forwarded, and the slot map is read again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from weakref import WeakSet

from limitgate.errors import StoreError
from limitgate.internal_errors import internal_error, logged_errors
from limitgate.limits.plan import Plan, Reading, full_refund
from limitgate.limits.template import AnyPlan, whole, whole_reading
from limitgate.process.clock import begin, loop_time, monotonic
from limitgate.stores.base import MAX_BATCH
from limitgate.stores.redis.aio.batch import Batch, Request
from limitgate.stores.redis.aio.batcher import MAX_QUEUED, Batcher
from limitgate.stores.redis.aio.listening import ListeningClock, Silence
from limitgate.stores.redis.cluster import (
    GIVE_BACK_TIMEOUT,
    MAP_PAUSE,
    PAUSE,
    Conclusion,
    Part,
    SlotMap,
    concluded,
    hash_slot,
    hash_slot_of,
    parts_of,
    unreachable,
)
from limitgate.stores.redis.dialer import Dialer
from limitgate.stores.redis.errors import Redirection, store_error
from limitgate.stores.redis.replies import Outcome, RedisStoreBase
from limitgate.stores.redis.url import Address
from limitgate.stores.redis.wire import Kept, KeptRequest

ABREAST = MAX_BATCH


class AsyncCluster:
    def __init__(self, dialer: Dialer, replies: RedisStoreBase, clock: ListeningClock) -> None:
        self._dialer = dialer
        self._replies = replies
        self._clock = clock
        self._time = partial(loop_time, asyncio.get_running_loop())
        self._map: SlotMap[Batcher] = SlotMap(dialer.nodes, self._open_node)
        self._looking: asyncio.Task[None] | None = None
        self._giving_back: set[asyncio.Future[Reading]] = set()
        self._crowds: dict[tuple[str, ...], _Crowd] = {}
        self._failed_parts: WeakSet[asyncio.Future[Reading]] = WeakSet()
        """Failed parts. Their late charges are refunded."""
        self._closed = False

    def spend(self, plan: AnyPlan, timeout: float) -> asyncio.Future[Reading]:
        parts = parts_of(plan)
        if len(parts) == 1:
            return self._node(parts[0]).spend(plan, timeout)
        plan = whole(plan)
        error = unreachable(self._map, parts, self._time)
        if error:
            raise error
        keys = tuple([charge.key for charge in plan.charges])
        crowd = self._crowds.get(keys)
        if crowd is None:
            crowd = self._crowds[keys] = _Crowd(self._clock, partial(self._crowds.pop, keys))
        return crowd.join(_Together(self, plan, parts, timeout))

    def config(self, request: KeptRequest, timeout: float) -> asyncio.Future[Kept]:
        return self._map.node(self._map.holder(hash_slot(request.key))).config(request, timeout)

    def connect(self) -> None:
        self._map.node(self._map.holder(0)).connect()
        self.troubled()

    def ask(self, part: Part, timeout: float) -> asyncio.Future[Reading]:
        """Send a part, even if the node's breaker is open."""
        return self._node(part).spend(part.plan, timeout, checks=False)

    def told_already(self, plan: Plan, parts: Sequence[Part]) -> Outcome | None:
        return unreachable(self._map, parts, self._time) or self._replies.refused(plan)

    def failed(self, part: asyncio.Future[Reading]) -> None:
        self._failed_parts.add(part)

    def heard_late(self, plan: Plan, waiting: asyncio.Future[Reading], reading: Reading) -> None:
        """Refund a late charge of a failed plan."""
        if waiting in self._failed_parts and plan.verb == "spend" and reading.admitted:
            self._give_back(full_refund(plan, reading))

    def clear_up(self, conclusion: Conclusion, since: float) -> list[asyncio.Future[Reading]]:
        """Refund parts of a plan that was sent at ``since`` and refused elsewhere. Return refunds in flight."""
        with logged_errors():
            self._replies.refused_elsewhere(conclusion.untouched, since)
        given_back = [self._give_back(plan) for plan in conclusion.refunds]
        return [refund for refund in given_back if refund is not None]

    def _give_back(self, plan: Plan) -> asyncio.Future[Reading] | None:
        refund = None
        if plan.charges and not self._closed:
            try:
                refund = self._node(parts_of(plan)[0]).ask_first(plan, GIVE_BACK_TIMEOUT)
            except Exception as error:  # noqa: BLE001 - counted below
                internal_error(error)
        if refund is not None:
            self._giving_back.add(refund)
            refund.add_done_callback(self._given_back)
        elif plan.charges:
            self._replies.not_given_back += 1
        return refund

    def _given_back(self, refund: asyncio.Future[Reading]) -> None:
        self._giving_back.discard(refund)
        if refund.cancelled() or refund.exception():
            self._replies.not_given_back += 1

    async def close(self) -> None:
        for crowd in list(self._crowds.values()):
            crowd.disperse(store_error(ConnectionResetError("the store was closed")))
        if self._giving_back:
            await asyncio.wait(self._giving_back)
        self._closed = True
        for batcher in list(self._map.nodes.values()):
            await batcher.close()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    def abandon(self) -> None:
        for batcher in self._map.nodes.values():
            batcher.abandon()

    def apart(self, batch: Batch) -> Iterable[Batch]:
        slots: dict[int, list[Request]] = {}
        for request in batch.requests:
            slots.setdefault(hash_slot_of(request[0]), []).append(request)
        return [Batch(requests, batch.shape) for requests in slots.values()]

    def redirected(self, batch: Batch, redirection: Redirection, origin: Address) -> None:
        route = self._map.route(batch, redirection, origin)
        node = self._map.node(route.address)
        if route.how == "send":
            node.adopt(batch)
        else:
            for each in batch.each() if route.how == "split" else [batch]:
                node.park(each, PAUSE)
        if self._map.is_outdated:
            self.troubled()

    def troubled(self) -> None:
        self._map.is_outdated = True
        if self._looking is None and not self._closed:
            self._looking = begin(self._look())

    async def _look(self) -> None:
        try:
            while self._map.is_outdated or self._map.unused():
                with logged_errors():
                    await self._look_once()
                await asyncio.sleep(MAP_PAUSE)
        finally:
            if self._looking is asyncio.current_task():
                self._looking = None

    async def _look_once(self) -> None:
        if self._map.is_outdated:
            self._map.is_outdated = False
            await self._learn()
        for address in self._map.unused():
            if self._map.nodes[address].is_idle:
                await self._map.nodes.pop(address).close()

    async def _learn(self) -> None:
        for address in self._map.known():
            with suppress(Exception):
                if self._map.learn(await self._dialer.aslots(self._clock, address), address):
                    return

    def _node(self, part: Part) -> Batcher:
        return self._map.node(self._map.holder(part.hash_slot))

    def _open_node(self, address: Address) -> Batcher:
        dial = partial(self._dialer.adial, self._clock, address)
        return Batcher(dial, self._replies, self._clock, address=address, cluster=self)


class _Crowd:
    def __init__(self, clock: ListeningClock, dissolve: Callable[[], object]) -> None:
        self.under_way = 0
        self._dissolve = dissolve
        self._waiting: deque[_Together] = deque()
        self._silence = Silence(clock)

    def join(self, plan: _Together) -> asyncio.Future[Reading]:
        if self.under_way < ABREAST:
            self._begin(plan)
        elif len(self._waiting) < MAX_QUEUED:
            plan.due = self._silence.seconds + plan.timeout
            self._waiting.append(plan)
            self._silence.watch(self)
        else:
            raise StoreError(f"{MAX_QUEUED} requests already wait for the same buckets", "overload")
        return plan.answer

    def listened(self) -> float | None:
        if self._silence.go_on():
            silence = self._silence.seconds
            for plan in self._waiting:
                if silence >= plan.due:
                    plan.give_up()
            self._waiting = deque([plan for plan in self._waiting if not plan.answer.done()])
        if not self._waiting:
            self._silence.stop()
            return None
        return min([plan.due for plan in self._waiting]) - self._silence.seconds

    def disperse(self, error: StoreError) -> None:
        while self._waiting:
            self._waiting.popleft().tell(error)

    def _begin(self, plan: _Together) -> None:
        self.under_way += 1
        plan.begin(self._over)

    def _over(self) -> None:
        """Start the next plans whose outcome is unknown."""
        self.under_way -= 1
        self._silence.break_()
        while self._waiting and self.under_way < ABREAST:
            following = self._waiting.popleft()
            following.waited(following.due - self._silence.seconds)
            if not following.is_told():
                self._begin(following)
        if not self.under_way:
            self._dissolve()


class _Together:
    def __init__(self, cluster: AsyncCluster, plan: Plan, parts: Sequence[Part], timeout: float) -> None:
        self.answer: asyncio.Future[Reading] = asyncio.get_running_loop().create_future()
        self._cluster = cluster
        self._plan = plan
        self._parts = parts
        self.timeout = timeout
        self.due = timeout
        self._waited = 0.0
        self._left = len(parts)
        self._began = 0.0
        self._outcomes: list[Outcome] = [StoreError("no answer")] * len(parts)

    def waited(self, left: float) -> None:
        self._waited, self.timeout = self.timeout - left, left

    def give_up(self) -> None:
        self.waited(0.0)
        self.tell(store_error(TimeoutError()))

    def is_told(self) -> bool:
        outcome: Outcome | None = None
        try:
            if not self.answer.done():
                outcome = self._cluster.told_already(self._plan, self._parts)
        except Exception as error:  # noqa: BLE001 - it waits nowhere now
            outcome = internal_error(error)
        if outcome is not None:
            self.tell(outcome)
        return self.answer.done()

    def begin(self, over: Callable[[], None]) -> None:
        self._over = over
        self._began = monotonic()
        for place, part in enumerate(self._parts):
            try:
                reading = self._cluster.ask(part, self.timeout)
            except Exception as error:  # noqa: BLE001 - the other parts continue
                self._note(place, internal_error(error))
            else:
                reading.add_done_callback(partial(self._heard, place))

    def _heard(self, place: int, reading: asyncio.Future[Reading]) -> None:
        error = reading.exception()
        if error is not None:
            self._cluster.failed(reading)
        if error is not None and not isinstance(error, StoreError):
            error = StoreError(str(error))
        self._note(place, error or reading.result())

    def _note(self, place: int, outcome: Outcome) -> None:
        self._outcomes[place] = outcome
        self._left -= 1
        if not self._left:
            try:
                conclusion = concluded(self._plan, self._parts, self._outcomes)
            except Exception as error:  # noqa: BLE001 - unrefunded charges drain
                conclusion = Conclusion(internal_error(error))
            given_back = self._cluster.clear_up(conclusion, self._began)
            self.tell(conclusion.outcome)
            self._finish(given_back)

    def tell(self, outcome: Outcome) -> None:
        if self.answer.done():
            return
        if isinstance(outcome, StoreError):
            outcome.waited += self._waited
            self.answer.set_exception(outcome)
            # Marks the exception as retrieved.
            self.answer.exception()
        else:
            waited = outcome.having_waited(outcome.waited + self._waited) if self._waited else outcome
            self.answer.set_result(whole_reading(waited))

    def _finish(self, given_back: Sequence[asyncio.Future[Reading]]) -> None:
        left = [refund for refund in given_back if not refund.done()]
        if left:
            left[0].add_done_callback(lambda _: self._finish(left[1:]))
        else:
            loop = asyncio.get_running_loop()
            # call_soon prevents recursion; the next plans need an empty context.
            loop.call_soon(self._over, context=Context())
