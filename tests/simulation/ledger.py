"""Records calls, and checks their outcomes against the bounds of docs/guarantees.md."""

from __future__ import annotations

from collections import defaultdict
from contextvars import ContextVar
from typing import Any

from limitgate import Decision
from limitgate.algorithms import gcra
from limitgate.limits.bucket import Bucket
from limitgate.limits.template import PlainSpend, whole
from limitgate.stores.redis.deny_cache import LONGEST
from tests.simulation.server import Server
from tests.simulation.world import SECOND, Process, World

CALL: ContextVar[Call | None] = ContextVar("CALL", default=None)


class Call:
    """A call of the limiter."""

    __slots__ = (
        "begun",
        "cost",
        "decision",
        "ended",
        "error",
        "final",
        "kind",
        "plans",
        "process",
        "readings",
        "stalled",
        "text",
    )

    def __init__(self, process: Process, kind: str, text: str, cost: int) -> None:
        self.process, self.kind, self.text, self.cost = process, kind, text, cost
        self.begun = process.world.us
        self.stalled = process.stalled_us
        self.ended: int | None = None
        self.decision: Decision | None = None
        self.error: BaseException | None = None
        self.final = 0
        """What a reservation cost in the end."""
        self.plans: list[Any] = []
        self.readings: list[tuple[Any, int, bool, str, int, int]] = []
        """Plan, the server's clock, admitted, source, time of the world, and a number for the order."""

    def __str__(self) -> str:
        return f"{self.process} {self.kind} {self.text} cost {self.cost}"

    def outcome(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        if self.decision is None:
            return "done" if self.ended is not None else "under way"
        if self.decision.allowed:
            return f"allowed, {self.decision.remaining} left"
        return f"refused for {self.decision.retry_after:.6f} s"


class Ledger:
    """The calls of all processes, and what servers know of them."""

    def __init__(self, world: World, servers: list[Server], processes: int) -> None:
        self.world, self.servers = world, servers
        self.calls: list[Call] = []
        self.before: dict[int, Any] = {}
        """What a bucket owed before a reservation, by the reservation's plan."""
        self.bound_s = 0.0
        """Seconds by which a call may exceed its timeout."""
        self.processes = processes
        self.is_calm = True
        """True without faults."""
        self.inside: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        """By key of a slot: begin, end, places."""
        self.unknown_reliefs: dict[tuple[str, str], int] = {}
        """Process and key of resets, refunds and pardons that are under way or whose outcome is unknown."""
        self.steps: list[tuple[int, int, int]] = servers[0].steps

    def server_of(self, key: str) -> Server:
        return self.servers[0]

    async def observed(self, call: Call, plan, answer):
        """The reading of a plan, noted for its call."""
        reading = await answer
        call.readings.append((plan, reading.now, reading.admitted, reading.source, self.world.us, self.world.number()))
        if call.kind == "reserve" and reading.admitted and plan.verb == "spend":
            self.before[id(plan)] = next(before for charge, before, _ in reading.buckets if charge.bucket.algorithm is gcra)
        if reading.source == "cache":
            self._check_cached(call, plan)
        elif reading.source == "store" and not call.process.world.findings:
            self._check_answer(call, plan, reading)
        return reading

    def _check_answer(self, call: Call, plan, reading) -> None:
        """Check that the reading is the server's answer to this plan."""
        executed = [self.executed(each) for each in _tokens(plan)]
        said = [answer for each in executed if each is not None for answer in each.answers]
        if plan.verb == "spend" and (reading.now, reading.admitted) not in [answer[:2] for answer in said]:
            self.world.found(f"{call} was told {'yes' if reading.admitted else 'no'}, but the server said {said}")

    def _executed_at(self, plan, now: int, us: int, number: int) -> tuple[int, int, int]:
        """Return when the reported admission took place, and the id of its token: a call is sent again in another form."""
        for token in _tokens(plan):
            if (executed := self.executed(token)) is not None:
                for clock, admitted, *when in executed.answers:
                    if clock == now and admitted:
                        return when[0], when[1], id(token)
        return us, number, id(plan)

    def was_repeated(self, call: Call) -> bool:
        """True if a server has carried the call out twice."""
        found = [self.executed(token) for plan in call.plans for token in _tokens(plan)]
        return sum(each.times for each in found if each is not None) > 1

    def executed(self, token):
        for server in self.servers:
            if id(token) in server.executed:
                return server.executed[id(token)]
        return None

    def _check_cached(self, call: Call, plan) -> None:
        """A refusal without a call to the server is one that the server would make, too."""
        charges = plan.charges
        server = self.server_of(charges[0].key)
        # A process may stall between its decision and its caller.
        if call.process.stalled_us != call.stalled or not server.would_admit(charges):
            return
        now, process = self.world.us, call.process.name
        for charge in charges:
            at, by = server.relieved.get(charge.key, (-(10**12), ""))
            if now - at <= (LONGEST + 0.002) * SECOND and (by != process or (process, charge.key) in self.unknown_reliefs):
                return
        self.world.found(f"{call} was refused by the cache although there is room")

    def ended(self, call: Call) -> None:
        call.ended = self.world.us
        self.world.note(f"{call}: {call.outcome()}")

    def check_duration(self, call: Call, timeout: float, calls: int = 1) -> None:
        took = (call.ended or self.world.us) - call.begun - (call.process.stalled_us - call.stalled)
        if took > (timeout + self.bound_s) * calls * SECOND:
            self.world.found(f"{call} took {took / SECOND:.3f} s with a timeout of {timeout:.3f} s: {call.outcome()}")

    # --- at the end ---

    def check(self) -> None:
        for server in self.servers:
            self._check_executions(server)
        self._check_admissions()
        self._check_slots()

    def _check_executions(self, server: Server) -> None:
        """A call is sent again once at most; refunds never."""
        for executed in server.executed.values():
            token = executed.token
            repeats = 1 if token.has_adjustments else 2
            if executed.times > repeats:
                self.world.found(f"{token!r:.300} was carried out {executed.times} times")

    def _check_admissions(self) -> None:
        events, told = self._events()
        truths: dict[str, Truth] = {}
        lent: dict[int, list[int]] = {}
        for us, _, kind, what in events:
            if kind == "step":
                for truth in truths.values():
                    truth.advance(us)
                    truth.step(what)
            elif kind == "gone":
                why, call, key, gone = what
                if (known := truths.get(key)) is not None:
                    known.advance(us)
                    known.lower(self._believed(us, why, call, gone, lent))
                    if why != "adjust":
                        known.has_lost_debt()
            else:
                self._admit(truths, us, *what)
        self._check_debts(truths, told)

    def _admit(self, truths: dict[str, Truth], us: int, call: Call, plan) -> None:
        for charge in whole(plan).charges:
            if charge.bucket.algorithm is not gcra or not charge.cost:
                continue
            truth = truths.get(charge.key)
            if truth is None:
                truth = truths[charge.key] = Truth(charge.bucket, us, self.processes)
            truth.advance(us)
            if over := truth.admit(charge.cost):
                self.world.found(f"{call} at {us / SECOND:.6f} was admitted above the limit: {over}")

    def _events(self) -> tuple[list[tuple[int, int, str, Any]], dict[int, int]]:
        """Return what raises and lowers debts, in order, and how often each token was reported as admitted."""
        events: list[tuple[int, int, str, Any]] = []
        told: dict[int, int] = defaultdict(int)
        by_token: dict[int, Call] = {}
        for call in self.calls:
            by_token |= {id(token): call for plan in call.plans for token in _tokens(plan)}
            for plan, now, admitted, source, *when in call.readings:
                if not admitted or plan.verb != "spend":
                    continue
                us, number = when
                if source == "store":
                    us, number, token = self._executed_at(plan, now, us, number)
                    told[token] += 1
                events.append((us, number, "admit", (call, plan)))
        for server in self.servers:
            for us, number, why, token, key, gone in server.vanished:
                events.append((us, number, "gone", (why, by_token.get(id(token)), key, gone)))
            events += [(us, number, "step", step) for us, number, step in server.steps]
        return sorted(events, key=lambda each: each[:2]), told

    def _believed(self, us: int, why: str, call: Call | None, gone, lent: dict[int, list[int]]) -> list[int]:
        """Return the part of a server's loss that is legitimate."""
        if why != "adjust":
            return gone
        if call is None:
            return [0] * len(gone)  # a returned lease
        left = lent.get(id(call))
        if left is None:
            left = lent[id(call)] = self._to_give_back(us, call)
        believed = [min(most, ticks) for most, ticks in zip(left, gone)]
        left[:] = [most - ticks for most, ticks in zip(left, believed)]
        return believed

    def _to_give_back(self, us: int, call: Call) -> list[int]:
        """Return the undrained part of a charge. Earlier debt drains first."""
        bucket = next(each.bucket for plan in call.plans for each in plan.charges if each.bucket.algorithm is gcra)
        if call.kind != "reserve":
            return [call.cost * weight for weight in bucket.weights]
        plan, now, _, _, at, number = call.readings[0]
        began, _, _ = self._executed_at(plan, now, at, number)
        elapsed = us - began + sum(step for when, _, step in self.steps if began <= when <= us and step < 0)
        left = []
        for debt, weight, count in zip(self.before[id(plan)], bucket.weights, bucket.counts):
            grace = (debt + call.final * weight) // count + 1
            left.append(max(0, (call.cost - call.final) * weight - max(0, elapsed - grace) * count))
        return left

    def _check_debts(self, truths: dict[str, Truth], told: dict[int, int]) -> None:
        """Compare the servers' debts with the reported and unreported charges."""
        for server in self.servers:
            unheard = self._unheard(server, told)
            for key, truth in truths.items():
                if truth.bucket.lease or self.steps:
                    continue
                truth.advance(self.world.us)
                self._compare(truth, server.debt(key), key, unheard[key])

    def _compare(self, truth: Truth, kept, key: str, unheard: int) -> None:
        bucket = truth.bucket
        for owed, ticks, weight, limit in zip(truth.ticks, kept, bucket.weights, bucket.limits):
            if ticks > owed + unheard * weight:
                self.world.found(f"{key} owes {(ticks - owed) / weight:.3f} requests of {limit} too many")
            if ticks < owed and not unheard:
                self.world.found(f"{key} owes {(owed - ticks) / weight:.3f} requests of {limit} too few")

    def _unheard(self, server: Server, told: dict[int, int]) -> dict[str, int]:
        """By key, what was charged although the caller was not told that."""
        unheard: dict[str, int] = defaultdict(int)
        for executed in server.executed.values():
            token = executed.token
            missed = executed.admitted - told.get(id(token), 0)
            if token.verb == "spend" and missed > 0:
                if self.is_calm:
                    self.world.found(f"{token!r:.300} was charged {executed.admitted} times, unheard of by its caller")
                for charge in whole(token).charges:
                    unheard[charge.key] += missed * charge.cost
        return unheard

    def _check_slots(self) -> None:
        for key, spans in self.inside.items():
            limit = int(key.rpartition(" ")[2])
            ends = sorted([(begin, 1, n) for begin, _, n in spans] + [(end, 0, -n) for _, end, n in spans])
            taken = 0
            for us, _, places in ends:
                taken += places
                if taken > limit and not self._slots_lost(us):
                    self.world.found(f"{key}: {taken} at once at {us / SECOND:.6f}")
                    return

    def _slots_lost(self, us: int) -> bool:
        """True if a server may have lost slots."""
        return any(
            why in ("restart", "failover", "flush") and at <= us for s in self.servers for at, _, why, *_ in s.vanished
        ) or any(step > 0 and at <= us for at, _, step in self.steps)


def _tokens(plan) -> list[Any]:
    """The plan, and its general form if it was asked in that, too."""
    if isinstance(plan, PlainSpend):
        made = getattr(plan, "_plan", None)
        return [plan] if made is None else [plan, made]
    return [plan]


class Truth:
    """What a bucket would owe, had each request been charged when it was admitted."""

    def __init__(self, bucket: Bucket, us: int, processes: int) -> None:
        self.bucket = bucket
        self.ticks = [0] * len(bucket.ids)
        self._us = us
        self._least = [-processes * bucket.lease * weight for weight in bucket.weights]
        self._drains_on = False
        """True after a step forward: the rest of the server's debt for leases drains, too."""

    def advance(self, us: int) -> None:
        elapsed = max(0, us - self._us)
        self._us = max(us, self._us)
        floors = [0 if owed >= 0 else least if self._drains_on else owed for owed, least in zip(self.ticks, self._least)]
        self.ticks = [max(floor, owed - elapsed * n) for owed, floor, n in zip(self.ticks, floors, self.bucket.counts)]

    def step(self, us: int) -> None:
        """Leases are used in addition to the forgiven debt."""
        if us > 0:
            self._drains_on = True
            self.lower([us * count for count in self.bucket.counts])

    def has_lost_debt(self) -> None:
        self._drains_on = False

    def lower(self, gone) -> None:
        self.ticks = [max(least, owed - ticks) for owed, ticks, least in zip(self.ticks, gone, self._least)]

    def admit(self, cost: int) -> str:
        self.ticks = [owed + cost * weight for owed, weight in zip(self.ticks, self.bucket.weights)]
        for owed, capacity, weight, limit in zip(self.ticks, self.bucket.capacities, self.bucket.weights, self.bucket.limits):
            if owed > capacity:
                return f"{(owed - capacity) / weight:.6f} requests more than {limit}"
        return ""
