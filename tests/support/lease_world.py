"""Processes with leases, a network and a server clock, all of the test's own; the script runs on a real Redis.

The truth is kept beside it: every admission is charged to an exact bucket at the server time at which it was made. No
interval admitted more than ``burst + t * count / period`` if, and only if, none of these buckets ever owes more than it holds.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from uuid import uuid4

import redis

from limitgate import Limit
from limitgate.algorithms import gcra
from limitgate.limits.bucket import Bucket
from limitgate.limits.decision import decide
from limitgate.limits.plan import Charge, Plan, Reading
from limitgate.stores.redis import replies, wire
from limitgate.stores.redis.replies import ServerClock
from tests.support.scripted import CLOCK

START = 1_790_000_000_000_000
PPM = 500
"""How far a machine's clock may run from the server's, in millionths."""


class OverdrawnError(AssertionError):
    """More was admitted than the limit allows."""


class Truth:
    """What a bucket would owe, had every request been charged when it was admitted."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.debts = [0] * len(bucket.ids)
        self.written = START

    def at(self, now: int) -> list[int]:
        elapsed = now - self.written
        return [max(0, debt - elapsed * count) for debt, count in zip(self.debts, self.bucket.counts, strict=True)]

    def admit(self, cost: int, now: int) -> None:
        self.debts = [debt + cost * weight for debt, weight in zip(self.at(now), self.bucket.weights, strict=True)]
        self.written = now
        for debt, capacity, limit in zip(self.debts, self.bucket.capacities, self.bucket.limits, strict=True):
            if debt > capacity:
                raise OverdrawnError(f"{limit} owes {(debt - capacity) / limit.period_us:.6f} requests too many")


class World:
    """A server, its clock, and whatever is on its way to or from it."""

    def __init__(self, client: redis.Redis, rnd: random.Random, buckets: Sequence[Bucket], transit_us: int = 0) -> None:
        self.client = client
        self.sha = client.script_load(CLOCK.replace("ON_SET", "") + wire.SPEND.text)
        self.rnd = rnd
        self.now = START
        name = uuid4().hex
        self.buckets = {f"{name}:{place}": each for place, each in enumerate(buckets)}
        self.truths = {key: Truth(each) for key, each in self.buckets.items()}
        self.transit_us = transit_us
        self.calls = self.local = 0
        self._to_come: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def plan(self, cost: int = 1, *, keys: Sequence[str] = ()) -> Plan:
        """A plan over some buckets, over all if none are named."""
        return Plan(tuple(Charge(key, self.buckets[key], cost, True, None) for key in keys or self.buckets))

    def call(self, plans: Sequence[Plan]) -> list[object]:
        """What the script says now; what it admits is admitted now."""
        self.calls += 1
        reply = self.client.execute_command("EVALSHA", self.sha, *wire.arguments(plans), self.now)
        for plan, reading in zip(plans, wire.answers(plans, reply).readings, strict=True):
            self._admit(plan, reading)
        return reply

    def spend(self, plan: Plan) -> Reading:
        """A client without leases."""
        return wire.answers([plan], self.call([plan])).readings[0]

    def owed(self, key: str) -> list[int]:
        """What a bucket owes in Redis."""
        return list(self.spend(self.plan(keys=[key])._replace(verb="peek")).buckets[0].before)

    def admitted_locally(self, plan: Plan, reading: Reading) -> None:
        self.local += 1
        self._admit(plan, reading)

    def later(self, delay: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._to_come, (self.now + delay, next(self._order), action))

    def advance(self, us: int) -> None:
        """Let time pass, and everything arrive that is due."""
        end = self.now + us
        while self._to_come and self._to_come[0][0] <= end:
            self.now, _, action = heapq.heappop(self._to_come)
            action()
        self.now = end

    def transit(self) -> int:
        """Microseconds that a message takes; now and then much longer than usual."""
        if not self.transit_us:
            return 0
        return round(self.rnd.choice((0, 0.1, 1, 1, 3)) * self.rnd.random() * self.transit_us)

    def forget(self) -> None:
        self.client.unlink(*self.buckets)

    def _admit(self, plan: Plan, reading: Reading) -> None:
        if not reading.admitted or plan.verb != "spend":
            return
        for charge, _, after in reading.buckets:
            if after is not None and charge.cost:
                self.truths[charge.key].admit(charge.cost, self.now)
        self._check_headers(plan, reading)

    def _check_headers(self, plan: Plan, reading: Reading) -> None:
        """No answer promises more than there is."""
        for standing in decide(plan, reading).standings:
            owed = self.truths[standing.charge.key].at(self.now)
            for window, debt, limit in zip(standing.windows(), owed, standing.charge.bucket.limits, strict=True):
                assert window.remaining <= gcra.remaining(debt, limit)
                assert round(window.reset_after * 1_000_000) >= gcra.refill_us(debt, limit)


class Process:
    """One process of an application, with a clock of its own."""

    def __init__(self, world: World, *, ppm: int = 0, in_order: bool = True, local_refusals: bool = False) -> None:
        self.world = world
        self._rate = (1 + ppm / 1_000_000) / 1_000_000
        self._offset = world.rnd.randrange(10**6)
        self._in_order = in_order
        self._last_sent = self._last_heard = 0
        self.alive = True
        self.store = replies.RedisStoreBase(local_refusals=local_refusals, clock=self.clock)

    def clock(self) -> float:
        return self._offset + (self.world.now - START) * self._rate

    def ask(self, *plans: Plan, lost: float = 0) -> list[Reading]:
        """Requests of one turn: those that cannot be answered here share a call. The readings that are there already."""
        to_send, readings = [], []
        for plan in plans:
            reading = self.store.locally(plan)
            if reading is None:
                to_send.append(plan)
                continue
            readings.append(reading)
            if reading.admitted:
                self.world.admitted_locally(plan, reading)
                windows = [window for standing in decide(plan, reading).standings for window in standing.windows()]
                assert min(window.remaining for window in windows) > 0, "nothing remains only because no more is held"
        return readings + (self.send(to_send, lost=lost) if to_send else [])

    def use_up(self, plan: Plan) -> int:
        """Admit whatever can be admitted without asking."""
        times = 0
        while (reading := self.store.locally(plan)) is not None and reading.admitted:
            self.world.admitted_locally(plan, reading)
            times += 1
        return times

    def send(self, plans: Sequence[Plan], *, lost: float = 0) -> list[Reading]:
        """A call: it is sent now, carried out a while later, and heard of still later or, at times, never."""
        world = self.world
        asked = wire.Call(plans)
        self.store.outgoing(asked)
        for charge in (charge for plan in asked.plans for charge in plan.charges if charge.adjustment):
            assert self.held(charge.key) == 0, "a lease that is given back is not used any more"
        heard: list[Reading] = []
        reaches, answered = (world.rnd.random() >= lost for _ in range(2))

        def hear(reply: object) -> None:
            if self.alive:
                heard.extend(self.store.understood(asked, reply, ServerClock("Redis")))

        def lose() -> None:
            if self.alive:
                self.store.unanswered(asked)

        def carry_out() -> None:
            reply = world.call(asked.plans)
            if answered:
                back = self._not_before("_last_heard", world.transit())
                world.later(back, lambda: hear(reply)) if back else hear(reply)

        there = self._not_before("_last_sent", world.transit())
        if reaches:
            world.later(there, carry_out) if there else carry_out()
        if not (reaches and answered):
            world.later(world.transit(), lose)
        return heard

    def give_back(self, age: float = 1.0) -> None:
        """What the timer does when leases have ended."""
        plans = self.store.leases.ended(self.clock(), age)
        if plans:
            self.send(plans)

    def held(self, key: str) -> int:
        """Whole requests that are held of a bucket, by the window with the fewest."""
        held = self.store.leases._held.get(key)
        if held is None:
            return 0
        rooms = zip(held.ahead, held.debts, held.bucket.weights, strict=True)
        return min((ahead - debt) // weight for ahead, debt, weight in rooms)

    def _not_before(self, which: str, delay: int) -> int:
        """A delay with which a message does not overtake the one before it on the same connection."""
        if self._in_order:
            due = max(self.world.now + delay, getattr(self, which))
            setattr(self, which, due)
            delay = due - self.world.now
        return delay


# --- histories --------------------------------------------------------------------------------------------------------


def a_leased_bucket(rnd: random.Random) -> Bucket:
    """Up to three limits: many that are earned back within the second for which a lease lasts, others in up to a day."""
    limits = []
    for period in rnd.choice(((1,), (1,), (1,), (1,), (1, 60), (1, 60, 86400), (60, 86400))):
        count = rnd.choice((3, 7, 50, 100, 333, 333, 1000, 99_991)) * rnd.choice((1, 1, period))
        burst = max(1, min(rnd.choice((count, count, count // 2, 5, 20, 100, 500)), 3660 * 86400 * count // period))
        limits.append(Limit(f"{count} per {period} seconds", burst=burst, lease=rnd.randint(1, min(burst, 60))))
    return Bucket(tuple(limits))


class History:
    """What several processes do to a bucket or two, at random. Raises `OverdrawnError` when too much is admitted."""

    def __init__(self, client: redis.Redis, seed: int) -> None:
        self.rnd = rnd = random.Random(seed)
        buckets = [a_leased_bucket(rnd) for _ in range(rnd.choice((1, 1, 1, 2)))]
        first = buckets[0]
        request_us = max([weight // count for weight, count in zip(first.weights, first.counts, strict=True)])
        lease_us, refill_us = request_us * first.lease, request_us * first.limits[0].burst
        self.steps_us = [min(us, 1_200_000) for us in (request_us, lease_us, lease_us, refill_us, 1_200_000)]
        transit_us = min(100_000, rnd.choice((0, 0, 50, 2000, request_us, lease_us)))
        self.world = World(client, rnd, buckets, transit_us)
        self.loss, self.refusals = rnd.choice((0, 0, 0.1)), rnd.random() < 0.3
        self.processes = [self.process() for _ in range(rnd.choice((1, 2, 3, 4)))]

    def process(self) -> Process:
        ppm, in_order = self.rnd.randint(-PPM, PPM), self.rnd.random() < 0.7
        return Process(self.world, ppm=ppm, in_order=in_order, local_refusals=self.refusals)

    def run(self, size: int = 40) -> World:
        rnd, world = self.rnd, self.world
        for _ in range(size):
            if rnd.random() < 0.5:
                world.advance(int(rnd.random() * rnd.choice(self.steps_us)))
            for process in self.processes:
                if rnd.random() < 0.8:
                    process.give_back()
            keys = rnd.sample(list(world.buckets), rnd.choice((1, len(world.buckets))))
            self.step(rnd.randrange(len(self.processes)), keys)
            for process in self.processes:
                for key, bucket in world.buckets.items():
                    assert process.held(key) <= bucket.lease, "a process holds more than its lease"
        for key in world.buckets:
            self.squeeze(key)
        world.forget()
        return world

    def step(self, place: int, keys: Sequence[str]) -> None:
        rnd, world, process = self.rnd, self.world, self.processes[place]
        event = rnd.random()
        if event < 0.35:
            costs = rnd.choice(((1,), (1, 2, 3, 5, 0)))
            process.ask(
                *[world.plan(rnd.choice(costs), keys=keys) for _ in range(rnd.choice((1, 1, 2, 5, 30)))], lost=self.loss
            )
        elif event < 0.55:
            for each in self.processes:
                each.ask(world.plan(1, keys=keys), lost=self.loss)
        elif event < 0.65:
            process.ask(world.plan(rnd.randint(1, 60), keys=keys), lost=self.loss)
        elif event < 0.85:
            process.give_back(age=0)
        elif event < 0.9:
            process.alive = False
            self.processes[place] = self.process()
        else:
            self.squeeze(rnd.choice(keys), share=rnd.choice((0.5, 1, 1)))

    def squeeze(self, key: str, share: float = 1) -> None:
        """Somebody takes all there is in Redis, or a share of it, and the processes use up what they hold."""
        world, bucket = self.world, self.world.buckets[key]
        room = min(gcra.remaining(debt, limit) for debt, limit in zip(world.owed(key), bucket.limits, strict=True))
        world.spend(world.plan(int(room * share), keys=[key]))
        for process in self.processes:
            process.use_up(world.plan(keys=[key]))
