"""One history: what processes, the network and the server do, all of it chosen by a seed."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from limitgate import AsyncLimiter, Limit, RateLimited, StoreError
from limitgate.algorithms import concurrency
from limitgate.limits.bucket import bucket_of
from tests.simulation.installed import SimStore, entered
from tests.simulation.ledger import CALL, Call, Ledger
from tests.simulation.network import Network, SimDialer
from tests.simulation.server import Server
from tests.simulation.world import SECOND, Process, World

LIMITS: tuple[tuple[Any, ...], ...] = (
    ("5/second",),
    ("7/second burst 3",),
    ("20 per 3 seconds burst 4", "5/second"),
    ("10/second burst 20", "100/minute"),
    ("3/second",),
    ("100/second burst 10",),
    ("6/second", Limit("12 per 2 seconds", algorithm="fixed_window")),
    (Limit("50/second", lease=10),),
    (Limit("20/second burst 15", lease=5),),
    (Limit("200/second", lease=20), Limit("3000/minute burst 300", lease=20)),
)
LEASED = 7
"""From here on, limits have leases."""
BACK_S = 2.5
"""Seconds until processes use a recovered server, see G57 in docs/guarantees.md."""
SLOTS_AT = 4
"""Seeds with this last digit take mostly slots, and cancel calls."""


class RecordingStore(SimStore):
    """Tells the ledger what it is asked for, and what it answers."""

    measures_silence = takes_plain = True
    ledger: Ledger

    def aspend(self, plan, timeout):
        answer = super().aspend(plan, timeout)
        call = CALL.get()
        # The first call of a loop asks twice.
        if call is None or (call.plans and call.plans[-1] is plan):
            return answer
        call.plans.append(plan)
        return self.ledger.observed(call, plan, answer)


class Scenario:
    """A world and its ledger."""

    def __init__(self, seed: int, *, steps: int | None = None, keeps_history: bool = False) -> None:
        self.seed = seed
        self.world = world = World(seed)
        if keeps_history:
            world.history = []
        rng = self.rng = world.rng
        self.steps = steps or rng.choice((200, 400, 800, 1600))
        self.network = Network(world)
        self.server = Server(world)
        self.network.servers = [self.server]
        self.timeout = rng.choice((0.05, 0.1, 0.1, 0.3))
        self.network.delay_us = rng.choice((50, 200, 1000, int(self.timeout * 30_000)))
        self.is_over = self.is_healed = False
        self.limiters: list[tuple[Process, AsyncLimiter]] = []
        self.tasks: list[tuple[Process, asyncio.Task]] = []
        self.local_refusals = rng.random() < 0.8
        self.count = rng.choice((1, 1, 2, 2, 3, 4))
        self.ledger = Ledger(world, [self.server], self.count + 6)
        self.ledger.bound_s = 0.25
        self.faults = () if rng.random() < 0.3 else rng.sample(list(FAULTS), rng.choice((1, 1, 2, 3)))
        if self.network.delay_us <= 1000 and self.timeout >= 0.1 and rng.random() < 0.05:
            self.faults = ("idle",)
        self.is_kind = self.faults in ((), ("idle",))
        """True if callers must not see errors."""
        self.ledger.is_calm = not self.faults
        self.keys = [(f"k{n}", rng.randrange(len(LIMITS))) for n in range(rng.choice((1, 2, 4)))]
        self.kinds = ["hit"] * 6 + rng.sample(("peek", "up to", "reserve", "refund", "reset", "ban", "slot", "hit", "crowd"), 4)
        self._focus(rng.choice(("", "", "", "leases", "refunds")))
        self.pause_s = rng.choice((0.0005, 0.005, 0.05, 0.3, 1.5))
        self.cancels = 0.0
        if "lag" not in self.faults and "failover" in self.faults:
            self.server.lag_us = rng.choice((1_000, 20_000, 200_000))
        for _ in range(self.count):
            self.begin_process()

    def _focus(self, on: str) -> None:
        """Concentrate a history on one feature."""
        if on == "leases":
            self.count = max(self.count, 2)
            self.keys = [("k0", self.rng.randrange(LEASED, len(LIMITS)))]
            self.kinds = ["hit"] * 8 + ["peek", "crowd"]
        elif on == "refunds":
            self.kinds = ["reserve"] * 6 + ["refund", "refund", "hit", "up to"]
            if not self.is_kind:
                self.faults = ("cuts", *self.faults)

    # --- processes ---

    def begin_process(self) -> Process:
        ppm = self.rng.choice((0, 0, 200, -200)) if "drift" in self.faults else 0
        process = Process(self.world, ppm=ppm)
        store = RecordingStore(
            SimDialer(self.network, process, self.server), self.world.monotonic, local_refusals=self.local_refusals
        )
        store.ledger = self.ledger
        limiter = AsyncLimiter(store, timeout=self.timeout)
        self.limiters.append((process, limiter))
        if "stalls" in self.faults:
            rng = self.rng
            process.stalls = lambda: int(rng.choice((0.02, 0.3, 1.5)) * SECOND * rng.random()) if rng.random() < 0.002 else 0
        for _ in range(self.rng.choice((1, 2, 4))):
            self.start(process, self.caller(process, limiter))
        if self.rng.random() < 0.5:
            self.start(process, self.alone(process, limiter))
        return process

    def start(self, process: Process, work) -> None:
        self.tasks.append((process, process.start(work)))

    async def caller(self, process: Process, limiter: AsyncLimiter) -> None:
        rng = self.rng
        while not self.is_over:
            await asyncio.sleep(min(rng.expovariate(1 / self.pause_s), 5))
            key, rule = rng.choice(self.keys)
            kind = rng.choice(self.kinds)
            if kind == "crowd":
                crowd = [self.one(process, limiter, "hit", key, rule) for _ in range(rng.choice((3, 20, 70)))]
                await asyncio.gather(*crowd)
                continue
            work = self.one(process, limiter, kind, key, rule)
            if self.cancels and rng.random() < self.cancels:
                task = asyncio.ensure_future(work)
                await asyncio.sleep(rng.random() * 4 * self.network.delay_us / SECOND)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled() and task.exception() is not None:
                    self.world.found(f"{process} raised {task.exception()!r}")
            else:
                await work

    async def alone(self, process: Process, limiter: AsyncLimiter) -> None:
        """Check that a client alone on its key is admitted after ``retry_after``."""
        rng = self.rng
        key = f"alone {process}"
        limits = rng.choice(LIMITS[:LEASED])
        while not self.is_over:
            refused: Call | None = None
            for _ in range(30):
                if self.is_over:
                    return
                cost = rng.choice((1, 1, 2, 3))
                call = await self.asked(process, "alone", key, cost, limiter.hit(key, *limits, cost=cost))
                if refused is not None and self._waits_count(call, refused) and _is_refused(call):
                    waited = refused.decision.retry_after
                    self.world.found(f"{call} was refused again although it was alone and waited for {waited:.6f} s")
                refused = call if _is_refused(call) else None
                if refused is not None:
                    if rng.random() < 0.3:
                        # An early retry gets the rest of the wait.
                        await asyncio.sleep(refused.decision.retry_after * rng.random())
                        continue
                    await asyncio.sleep(refused.decision.retry_after * (1.0005 if "drift" in self.faults else 1) + 1e-6)
            await asyncio.sleep(min(rng.expovariate(1 / self.pause_s), 5))

    def _waits_count(self, call: Call, refused: Call) -> bool:
        if call.cost > refused.cost or call.begun - (refused.ended or 0) < refused.decision.retry_after * SECOND - 2:
            return False
        if self.server.steps:
            return False
        # What it does not know of was charged, too, also by a call that was sent again, see G17.
        mine = [each for each in self.ledger.calls if each.process is call.process and each.kind == "alone"]
        return (
            not any(each.error is not None or self.ledger.was_repeated(each) for each in mine)
            and not self.network.hurt
            and not self.server.vanished_since(refused.begun)
        )

    async def asked(self, process: Process, kind: str, text: str, cost: int, work) -> Call:
        call = Call(process, kind, text, cost)
        ledger = self.ledger
        ledger.calls.append(call)
        token = CALL.set(call)
        try:
            call.decision = await work
        except (StoreError, RateLimited) as error:
            call.error = error
            if isinstance(error, StoreError) and (self.is_kind or self.is_healed):
                self.world.found(f"{call} failed although nothing was wrong: {error!r}")
        except asyncio.CancelledError as error:
            call.error = error
            raise
        except Exception as error:  # noqa: BLE001 - whatever else is raised is a finding
            call.error = error
            self.world.found(f"{call} raised {error!r}")
        finally:
            if not self.world.is_over:
                CALL.reset(token)
                ledger.ended(call)
                if process.alive:
                    ledger.check_duration(call, self.timeout)
        return call

    async def one(self, process: Process, limiter: AsyncLimiter, kind: str, key: str, rule: int) -> None:
        rng, limits = self.rng, LIMITS[rule]
        cost = rng.choice((1, 1, 1, 2, 3, 5, 40))
        if kind == "peek":
            await self.asked(process, kind, key, 1, limiter.peek(key, *limits))
        elif kind == "up to":
            await self.asked(process, kind, key, cost, limiter.hit_up_to(key, *limits, cost=cost))
        elif kind == "reserve" and rule < LEASED - 1:
            await self.reserve(process, limiter, key, limits, cost)
        elif kind == "refund" and rule < LEASED - 1:
            await self.relieving(process, limiter, kind, key, cost, limiter.refund(key, *limits, cost=cost))
        elif kind == "reset" and rule < LEASED - 1:
            await self.relieving(process, limiter, kind, key, 1, limiter.reset(key, *limits))
        elif kind == "ban" and rule < LEASED:
            if rng.random() < 0.4:
                await self.asked(process, kind, key, 1, limiter.ban(key, rng.choice((0.3, 2, 30))))
            else:
                await self.relieving(process, limiter, "pardon", key, 1, limiter.pardon(key))
        elif kind == "slot":
            await self.slot(process, limiter, key)
        else:
            await self.asked(process, "hit", key, cost, limiter.hit(key, *limits, cost=cost))

    async def relieving(  # noqa: PLR0917
        self, process: Process, limiter: AsyncLimiter, kind: str, key: str, cost: int, work
    ) -> None:
        names = [_bucket_of(limiter, key), limiter.ban_key(key)]
        unknown = self.ledger.unknown_reliefs
        for name in names:
            unknown[process.name, name] = unknown.get((process.name, name), 0) + 1
        call = await self.asked(process, kind, key, cost, work)
        if call.error is None:
            for name in names:
                unknown[process.name, name] -= 1
                if not unknown[process.name, name]:
                    del unknown[process.name, name]

    async def reserve(self, process: Process, limiter: AsyncLimiter, key: str, limits, cost: int) -> None:
        rng = self.rng
        made: list[Any] = []

        async def reserving():
            made.append(await limiter.reserve(key, *limits, cost=cost))
            return made[0].decision

        call = await self.asked(process, "reserve", key, cost, reserving())
        if call.decision is None or not call.decision.allowed:
            return
        await asyncio.sleep(min(rng.expovariate(1 / self.pause_s), 5))
        settles = rng.random() < 0.7
        call.final = rng.randrange(cost + 1) if settles else 0
        CALL.set(call)
        name = process.name, _bucket_of(limiter, key)
        unknown = self.ledger.unknown_reliefs
        unknown[name] = unknown.get(name, 0) + 1
        try:
            await (made[0].settle(call.final) if settles else made[0].cancel())
        except StoreError as error:
            if self.ledger.is_calm:
                self.world.found(f"{call} could not be settled although nothing was wrong: {error!r}")
            return
        finally:
            CALL.set(None)
        unknown[name] -= 1
        if not unknown[name]:
            del unknown[name]

    async def slot(self, process: Process, limiter: AsyncLimiter, key: str) -> None:
        rng, most = self.rng, 3
        name = f"slot {key} {most}"
        begun: list[int] = []

        async def held():
            async with limiter.slot(name, most) as decision:
                begun.append(self.world.us)
                try:
                    await asyncio.sleep(min(rng.expovariate(1 / (10 * self.pause_s)), 5))
                finally:
                    if not self.outlived(process, begun[0]):
                        self.ledger.inside[name].append((begun[0], self.world.us, 1))
            return decision

        call = Call(process, "slot", name, 1)
        self.ledger.calls.append(call)
        token = CALL.set(call)
        try:
            await held()
        except (StoreError, RateLimited) as error:
            call.error = error
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever else is raised is a finding
            self.world.found(f"{call} raised {error!r}")
        finally:
            if not self.world.is_over:
                CALL.reset(token)
                self.ledger.ended(call)

    def outlived(self, process: Process, begun: int) -> bool:
        """True if the slot may have expired without a renewal."""
        return self.world.us - begun > 8 * SECOND

    # --- what goes wrong ---

    def trouble(self) -> None:
        if self.is_over:
            return
        fault = self.rng.choice(self.faults)
        FAULTS[fault](self)
        self.world.after(int(self.rng.expovariate(1 / (0.7 * SECOND))), self.trouble)

    def heal(self) -> None:
        network, server = self.network, self.server
        network.cuts = network.drops = network.tail = 0.0
        network.idle_drop_us = 0
        server.slowness_us, server.is_full = 0, False
        for pair in list(network.away):
            network._heal(pair)
        for process in self.world.processes:
            process.stalls = lambda: 0
        self.world.note("everything is well again")

    def alive(self) -> list[tuple[Process, AsyncLimiter]]:
        return [(process, limiter) for process, limiter in self.limiters if process.alive]

    # --- run ---

    def run(self) -> World:
        world = self.world
        with entered(world, self.seed):
            try:
                self._run()
            finally:
                self._drop()
        return world

    def _run(self) -> None:
        world, limit = self.world, self.steps
        if self.faults:
            for fault in self.faults:
                FAULTS[fault](self)
            world.after(int(self.rng.random() * SECOND), self.trouble)
        if self.rng.random() < 0.25 and not self.is_kind:
            self.cancels = 0.2
        if self.seed % 10 == SLOTS_AT and not self.is_kind:
            self.kinds, self.cancels = ["slot"] * 4 + ["hit"], 0.3
        world.run(lambda: world.steps >= limit or bool(world.findings), within=300)
        self.is_over = True
        self.heal()
        # The longest outage and the time to detect its end.
        world.run(lambda: bool(world.findings), within=6 + BACK_S)
        self.is_healed = True
        for number, (process, limiter) in enumerate(self.alive()):
            self.start(process, self.asked(process, "at the end", "", 1, limiter.hit(f"end {number}", "5/second")))
        world.run(lambda: bool(world.findings), within=2)
        self._check_end()
        if not world.findings:
            self.ledger.check()

    def _check_end(self) -> None:
        world = self.world
        for process, task in self.tasks:
            if process.alive and not task.done() and not world.findings:
                world.found(f"{process} still waits for {task.get_coro()!r}")
            if task.done() and not task.cancelled() and task.exception() is not None:
                world.found(f"{process} raised {task.exception()!r}")
        if "slot" in self.kinds and not world.findings:
            # Lost releases are sent again at once, slots of the dead expire: after a step back, they age from the next call.
            if not all(process.alive for process in world.processes):
                for process, limiter in self.alive()[:1]:
                    for key, _ in self.keys:
                        name = f"slot {key} 3"
                        self.start(process, self.asked(process, "peek", name, 1, limiter.peek(name, "3 at once")))
                world.run(lambda: bool(world.findings), within=concurrency.HELD_US / SECOND + 12)
            bucket = bucket_of("3 at once")
            for key in self.server.store._shards[0]:
                if (
                    f"{bucket.suffix}:" in key
                    and ":ban:" not in key
                    and ":probe:" not in key
                    and (taken := self.server.slots(key, bucket))
                ):
                    world.found(f"{taken} slots of {key} are held by nobody")

    def _drop(self) -> None:
        """Nothing of this world runs any more."""
        self.is_over = self.world.is_over = True
        for process in self.world.processes:
            process.kill()
            process.loop.ready.clear()
            process.loop.timers.clear()
        for _, task in self.tasks:
            task._log_destroy_pending = False
        self.tasks.clear()


def _bucket_of(limiter: AsyncLimiter, key: str) -> str:
    return limiter.ban_key(key).partition(":ban:")[0]


def _is_refused(call: Call) -> bool:
    return call.decision is not None and not call.decision.allowed


def _few(scenario: Scenario) -> None:
    """Nothing."""


def _partition(s: Scenario) -> None:
    if s.alive():
        process, _ = s.rng.choice(s.alive())
        s.network.split(process, s.server, s.rng.choice((0.05, 0.5, 3.0)) * s.rng.random())


def _cuts(s: Scenario) -> None:
    s.network.cuts = s.rng.choice((0.0, 0.01, 0.1))


def _drops(s: Scenario) -> None:
    s.network.drops = s.rng.choice((0.0, 0.005, 0.03))
    s.network.idle_drop_us = s.rng.choice((0, 1_200_000))


def _idle(s: Scenario) -> None:
    s.network.idle_drop_us = 1_200_000


def _tail(s: Scenario) -> None:
    s.network.tail = s.rng.choice((0.0, 0.02, 0.2))
    s.network.pieces = s.rng.choice((0.0, 0.3))


def _slow(s: Scenario) -> None:
    s.server.slowness_us = s.rng.choice((0, 2_000, 30_000))


def _freeze(s: Scenario) -> None:
    s.server.freeze(s.rng.choice((0.02, 0.3, 3.0)) * s.rng.random())


def _restart(s: Scenario) -> None:
    s.server.crash(keeps_data=s.rng.random() < 0.4, down_s=s.rng.choice((0.01, 0.5, 3.0)) * s.rng.random())


def _failover(s: Scenario) -> None:
    if s.server.lag_us:
        s.server.fail_over(s.rng.choice((0.01, 1.0)) * s.rng.random())


def _flush(s: Scenario) -> None:
    s.server.empty("flush")


def _step(s: Scenario) -> None:
    s.server.step_clock(int(s.rng.choice((-3600, -1, -0.1, 0.1, 1, 3600)) * SECOND * s.rng.random()))


def _full(s: Scenario) -> None:
    s.server.is_full = s.rng.random() < 0.5


def _kill(s: Scenario) -> None:
    if len(s.alive()) > 1 and len(s.world.processes) < s.count + 5:
        process, _ = s.rng.choice(s.alive())
        s.world.note(f"{process} is killed")
        process.kill()
        for link in list(s.server.links):
            if link.process is process:
                del s.server.links[link]
        s.begin_process()


def _cancel(s: Scenario) -> None:
    s.cancels = 0.3


FAULTS = {
    "cancel": _cancel,
    "cuts": _cuts,
    "drift": _few,
    "drops": _drops,
    "failover": _failover,
    "flush": _flush,
    "freeze": _freeze,
    "full": _full,
    "idle": _idle,
    "kill": _kill,
    "partition": _partition,
    "restart": _restart,
    "slow": _slow,
    "stalls": _few,
    "step": _step,
    "tail": _tail,
}


def simulate(seed: int, *, steps: int | None = None, keeps_history: bool = False) -> World:
    """Run one history inside of `installed.worlds`. Collects garbage never, so that all seeds take as long."""
    gc_was = gc.isenabled()
    gc.disable()
    try:
        return Scenario(seed, steps=steps, keeps_history=keeps_history).run()
    finally:
        if gc_was:
            gc.enable()
