"""A simulated Redis server: the Python twin of the scripts, a clock, a replica and faults."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from limitgate import MemoryStore
from limitgate.algorithms import ban, concurrency, gcra, holds
from limitgate.limits.bucket import Bucket
from limitgate.limits.plan import Charge, Plan, Reading, read
from limitgate.limits.template import OF_ANY, PlainRefund, PlainSpend, whole
from limitgate.stores.redis import plain
from tests.simulation.world import BEGAN, World

MAX_BUCKETS = 4095
"""So few that the store has one dictionary. With several, the hash seed would decide which of them has a key."""

DECLINES = 0.01
"""Share of plain plans that a script declines without need, as if another version had written the bucket."""


class Asked(NamedTuple):
    """A call as it was sent: what happens to its plans later, in the process, does not change it."""

    tokens: tuple[Any, ...]
    """The plans as the caller made them, to tell them apart."""
    plans: tuple[Any, ...]
    shape: Any
    in_full: bool
    config: Any
    process: str

    @classmethod
    def of(cls, call, process: str) -> Asked:
        if call.shape is None or call.shape is OF_ANY:
            plans = [whole(plan) for plan in call.plans]
        else:
            plans = [plan.whole_plan if isinstance(plan, PlainRefund) else _twin(plan) for plan in call.plans]
        return cls(tuple(call.requested), tuple(plans), call.shape, call.in_full, call.config, process)


def _twin(plan: PlainSpend) -> PlainSpend:
    twin = plan.template.asked(plan.keys)
    if plan.template.has_slots:
        twin._slot = plan.slot
    return twin


class Executed:
    """How often a plan was executed, and what the server said."""

    __slots__ = ("admitted", "answers", "times", "token")

    def __init__(self, token: Any) -> None:
        self.token = token
        self.times = self.admitted = 0
        self.answers: list[tuple[int, bool, int, int]] = []
        """The clock, admitted or not, time of the world, and a number for the order."""


class Server:
    """A Redis server. Records each loss of debt: by resets, refunds, restarts and failovers."""

    def __init__(self, world: World, name: str = "Redis") -> None:
        self.world = world
        self.name = name
        self.offset_us = world.rng.randrange(10**9)
        self.store = MemoryStore(self.clock, max_buckets=MAX_BUCKETS)
        self.executed: dict[int, Executed] = {}
        self.is_up, self.is_full = True, False
        self.generation = 0
        self.frozen_until = 0.0
        self.slowness_us = 0
        self.steps: list[tuple[int, int, int]] = []
        """When its clock was stepped, a number for the order, and by how much."""
        self.links: dict[Any, None] = {}
        self.relieved: dict[str, tuple[int, str]] = {}
        """Time of the last loss of debt, and its process, by key."""
        self.vanished: list[tuple[int, int, str, Any, str, tuple[int, ...]]] = []
        """Losses of debt: time, order, reason, plan, key and ticks."""
        self.calls = 0
        self.lag_us = 0
        """How far a replica is behind; 0 without one."""
        self._log: list[tuple[int, int, Any]] = []
        self._known: dict[str, Bucket] = {}
        self._scripts: set[Any] = set()
        self._queue: deque[tuple[Any, Asked]] = deque()
        self._replica_now = 0
        self._replica = MemoryStore(lambda: self._replica_now, max_buckets=MAX_BUCKETS)

    def clock(self) -> int:
        return BEGAN + self.offset_us + self.world.us

    # --- faults ---

    def step_clock(self, us: int) -> None:
        self.offset_us += us
        self.steps.append((self.world.us, self.world.number(), us))
        self.world.note(f"{self.name}'s clock steps by {us / 1e6:+.3f} s")
        for key in self._known:
            self.relieved[key] = self.world.us, self.name

    def freeze(self, seconds: float) -> None:
        self.world.note(f"{self.name} freezes for {seconds:.3f} s")
        self.frozen_until = max(self.frozen_until, self.world.us + seconds * 1e6)

    def crash(self, *, keeps_data: bool, down_s: float) -> None:
        self.world.note(f"{self.name} ends for {down_s:.3f} s and {'keeps its data' if keeps_data else 'comes back empty'}")
        self.is_up = False
        self._end()
        if not keeps_data:
            self.empty("restart")
        self.world.after(int(down_s * 1e6), self._start)

    def _start(self) -> None:
        self.is_up = True

    def _end(self) -> None:
        self.generation += 1
        self._scripts.clear()
        self._queue.clear()
        self.frozen_until = 0.0
        for link in list(self.links):
            link.cut()

    def empty(self, why: str) -> None:
        """FLUSHALL, or a restart without the data."""
        before = self.debts()
        self.store.forget()
        self._gone(why, before)
        self._replica.forget()
        self._log.clear()

    def fail_over(self, down_s: float) -> None:
        """The replica takes over, without the last writes."""
        self._replicate(self.world.us - self.lag_us)
        lost, self._log = len(self._log), []
        self.world.note(f"{self.name} fails over for {down_s:.3f} s and loses {lost} calls")
        self.is_up = False
        self._end()
        before = self.debts()
        self.store, self.lag_us = self._replica, 0
        self.store._clock = self.clock
        self._gone("failover", before)
        self.world.after(int(down_s * 1e6), self._start)

    def _replicate(self, until: int) -> None:
        while self._log and self._log[0][0] <= until:
            _, self._replica_now, execute = self._log.pop(0)
            execute(self._replica)

    # --- what it keeps ---

    def debts(self) -> dict[str, tuple[int, ...]]:
        return {key: self.debt(key) for key in self._known}

    def debt(self, key: str) -> tuple[int, ...]:
        """Ticks that a bucket owes now."""
        return self._debt_in(self.store, key)

    def _debt_in(self, store: MemoryStore, key: str) -> tuple[int, ...]:
        store._now = self.clock()
        return tuple(store._view(Charge(key, self._known[key], 0, False, None)))

    def vanished_since(self, us: int) -> bool:
        """True if it was emptied or lost writes."""
        return any(at >= us and why not in ("adjust", "reset") for at, _, why, *_ in self.vanished)

    def would_admit(self, charges) -> bool:
        """Whether these charges would fit now."""
        self.store._now = now = self.clock()
        if any(self.store._ban_left(charge.key, now) for charge in charges if charge.cost):
            return False
        return read(charges, now, [self.store._view(charge) for charge in charges]).admitted

    def slots(self, key: str, bucket: Bucket) -> int:
        self.store._now = self.clock()
        (state,) = self.store._view(Charge(key, bucket, 0, False, None))
        return state.taken

    def _gone(self, why: str, before: dict[str, tuple[int, ...]]) -> None:
        for key, ticks in before.items():
            self._lower(why, None, key, ticks, self.debt(key), self.name)
        self.vanished.append((self.world.us, self.world.number(), why, None, "", ()))

    def _lower(  # noqa: PLR0917 - the parts of an event
        self, why: str, token: Any, key: str, before: tuple[int, ...], after: tuple[int, ...], by: str
    ) -> None:
        self.relieved[key] = self.world.us, by
        gone = tuple(max(0, was - now) for was, now in zip(before, after))
        if any(gone):
            self.vanished.append((self.world.us, self.world.number(), why, token, key, gone))

    # --- calls ---

    def receive(self, link, asked: Asked) -> None:
        """A call has arrived: it is executed in turn."""
        self._queue.append((link, asked))
        if len(self._queue) == 1:
            self._serve_later()

    def _serve_later(self) -> None:
        takes = 20 + int(self.world.rng.random() * (30 + self.slowness_us))
        generation = self.generation
        self.world.at(max(self.world.us, int(self.frozen_until)) + takes, lambda: self._serve(generation))

    def _serve(self, generation: int) -> None:
        if self.generation != generation:
            return
        # It was frozen after the call had arrived.
        if self.world.us < self.frozen_until:
            self._serve_later()
            return
        link, asked = self._queue.popleft()
        link.reply(self._execute(asked))
        if self._queue:
            self._serve_later()

    def _execute(self, asked: Asked) -> bytes:
        self.calls += 1
        script = asked.shape if asked.shape is not None else "spend"
        if script not in self._scripts:
            if not asked.in_full:
                return b"-NOSCRIPT No matching script.\r\n"
            self._scripts.add(script)
        now = self.clock()
        if not asked.plans or not asked.plans[0].charges:
            return _array([now, 0, 0, 0])
        self._remember(asked)
        if asked.shape is not None and asked.shape is not OF_ANY:
            return self._execute_plain(asked, now)
        return self._execute_any(asked, now)

    def _remember(self, asked: Asked) -> None:
        for plan in asked.plans:
            for charge in plan.charges if isinstance(plan, Plan) else zip_charges(plan):
                key, bucket = charge[0], charge[1]
                if bucket.algorithm is gcra and ":probe:" not in key:
                    self._known[key] = bucket

    def _write(self, execute) -> Any:
        """Execute here, and later on the replica."""
        if self.lag_us:
            self._log.append((self.world.us, self.clock(), execute))
            self._replicate(self.world.us - self.lag_us)
        return execute(self.store)

    def _note(self, token: Any, now: int, *, admitted: bool) -> None:
        executed = self.executed.get(id(token))
        if executed is None:
            executed = self.executed[id(token)] = Executed(token)
        executed.times += 1
        executed.admitted += admitted
        executed.answers.append((now, admitted, self.world.us, self.world.number()))

    def _execute_plain(self, asked: Asked, now: int) -> bytes:
        layout = plain._layout(asked.shape)[0]
        reply, unwritten = [], 0
        for token, plan in zip(asked.tokens, asked.plans):
            if isinstance(plan, Plan):
                if self.is_full:
                    unwritten = 1
                else:
                    self._adjust(token, plan, asked.process)
                self._note(token, now, admitted=True)
                reply.append(layout.pack(1))
                continue
            numbers = len(layout.unpack(bytes(layout.size))) - 1
            if self.is_full:
                states = self._views(plan)
                is_known = not self._is_banned(plan)
                plan.now, plan.states = now, states
                plan.admitted = is_known and plan.template.fits(states)[0]
                unwritten = 1 if plan.admitted else unwritten
            else:
                is_known = not self._is_banned(plan) and self.world.rng.random() > DECLINES
                if is_known:
                    self._write(lambda store, plan=plan, now=now: _spend_plain(store, plan, now))
            if not is_known:
                reply.append(layout.pack(-1, *[0] * numbers))
                continue
            self._note(token, now, admitted=plan.admitted and not self.is_full)
            verdict = 0 if not plan.admitted else 1 if plan.template.fits(plan.states)[1] else 2
            reply.append(layout.pack(verdict, *_reported(plan)))
        head = plain._HEAD.pack(now, unwritten)
        text = head + b"".join(reply)
        return b"$%d\r\n%b\r\n" % (len(text), text)

    def _is_banned(self, plan: PlainSpend) -> bool:
        return any(self.store._ban_left(key, self.clock()) or self._has_ban(key) for key in plan.keys)

    def _has_ban(self, key: str) -> bool:
        return ":ban:" in key and key in self.store._shards[0]

    def _views(self, plan: PlainSpend):
        self.store._now = self.clock()
        states = []
        for key, (bucket, *_) in zip(plan.keys, plan.template.buckets):
            states += self.store._view(Charge(key, bucket, 0, False, None))
        return states

    def _execute_any(self, asked: Asked, now: int) -> bytes:
        facts: list[int] = []
        bans: list[int] = []
        steps, place, unwritten = self.store.clock_steps, 0, 0
        for token, plan in zip(asked.tokens, asked.plans):
            if self.is_full and plan.verb not in ("peek", "look"):
                self.store._now = now
                reading = read(plan.charges, now, [self.store._view(charge) for charge in plan.charges])
                admitted = False
                unwritten = 1
            elif plan.verb == "spend":
                reading = self._spend(plan, now)
                admitted = reading.admitted
            else:
                reading = self._adjust(token, plan, asked.process)
                admitted = True
            if not (plan.verb == "reset" and ":probe:" in plan.charges[0].key):
                self._note(token, now, admitted=admitted)
            for original, (charge, before, _) in zip(plan.charges, reading.buckets):
                place += 1
                is_banned = charge.bucket is not original.bucket
                if is_banned:
                    bans += [place, int(before[0])]
                facts += _facts(original, self.store._view(original) if is_banned else before)
        return _array([now, 0, self.store.clock_steps - steps, unwritten, *facts, *bans])

    def _spend(self, plan: Plan, now: int) -> Reading:
        exchanged = [charge for charge in plan.charges if charge.adjustment is not None and charge.bucket.algorithm is gcra]

        def execute(store: MemoryStore) -> Reading:
            reading = store.spend(plan)
            if reading.admitted:
                leases = [_lease(charge, after) for charge, _, after in reading.buckets if after is not None]
                if taken := [charge for charge in leases if charge is not None]:
                    store.spend(Plan.adjust(taken))
            return reading

        reading: Reading = self._write(execute)
        for charge in exchanged:
            if any(charge.adjustment.back):
                self.relieved[charge.key] = self.world.us, ""
        return reading

    def _adjust(self, token: Any, plan: Plan, process: str) -> Reading:
        """Refunds, resets, bans and looks: note what vanishes."""
        keys = [charge.key for charge in plan.charges if charge.key in self._known]
        before = [self.debt(key) for key in keys]
        reading: Reading = self._write(lambda store: store.spend(plan))
        if plan.verb in ("adjust", "reset", "ban"):
            for charge in plan.charges:
                if charge.bucket.algorithm in (ban, concurrency) or plan.verb == "ban":
                    self.relieved[charge.key] = self.world.us, process
            for key, was in zip(keys, before):
                self._lower(plan.verb, token, key, was, self.debt(key), process)
        return reading


def zip_charges(plan: PlainSpend):
    return zip(plan.keys, [bucket for bucket, *_ in plan.template.buckets])


def _spend_plain(store: MemoryStore, plan: PlainSpend, now: int) -> None:
    store._now = now
    # The store's own short way declines more than the script does.
    if not store._carry_out_plain(plan, now):
        reading = store.spend(plan.whole_plan)
        counted = reading.buckets[: len(plan.template.buckets)]
        plan.now, plan.admitted = now, reading.admitted
        plan.states = [state for _, before, _ in counted for state in before]


def _lease(charge: Charge, after) -> Charge | None:
    """What a lease takes beyond the request itself, as many whole requests as fit."""
    adjustment, bucket = charge.adjustment, charge.bucket
    if adjustment is None or not adjustment.most or bucket.algorithm is not gcra:
        return None
    rooms = zip(bucket.capacities, after, bucket.weights)
    extra = min([adjustment.most, *[(full - debt) // weight for full, debt, weight in rooms]])
    if extra <= 0:
        return None
    return charge._replace(slot=0).adjusted([-extra * weight for weight in bucket.weights], [0] * len(bucket.ids), 2**60)


def _reported(plan: PlainSpend) -> list[int]:
    states, numbers = iter(plan.states), []
    for bucket, *_ in plan.template.buckets:
        for limit in bucket.limits:
            state = next(states)
            if bucket.algorithm is gcra:
                numbers += divmod(state, limit.count)
            elif bucket.algorithm is concurrency:
                numbers += [state.taken, concurrency.refill_us(state, limit), 0, 0]
            else:
                numbers += state
    return numbers


def _facts(charge: Charge, states) -> list[int]:
    """The numbers that a script reports of a bucket."""
    algorithm, bucket = charge.bucket.algorithm, charge.bucket
    if algorithm is gcra:
        return [number for debt, count in zip(states, bucket.counts) for number in divmod(debt, count)]
    if algorithm is concurrency:
        (state,), (limit,) = states, bucket.limits
        own = state.places(charge.slot)
        return [state.taken, concurrency.refill_us(state, limit), charge.slot if own else 0, own]
    if algorithm is holds:
        return [states[0].held, int(states[0].found), 0]
    if algorithm is ban:
        return [min(int(state), 2**53) for state in states]
    return [number for state in states for number in (state if isinstance(state, tuple) else (state,))]


def _array(numbers: list[int]) -> bytes:
    return b"*%d\r\n%b" % (len(numbers), b"".join([b":%d\r\n" % number for number in numbers]))
