"""Buckets in this process: exact, thread-safe, bounded. Twin of limitgate/lua/spend.lua.

Each new bucket advances a CLOCK hand (Corbató 1968), which evicts expired buckets, so the cost of a call doesn't depend on
their number. A full store evicts the bucket with the least debt in a sample, as Redis does, but never one that would refuse
another call with the last cost. If none can be evicted, new keys share an overflow bucket, so a flood of keys can't evict an
exhausted bucket.
"""

from __future__ import annotations

import math
import struct
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from threading import RLock
from typing import Any, overload

from limitgate.algorithms import ALGORITHMS, ban, holds, refusals
from limitgate.algorithms.base import State
from limitgate.errors import StoreError, called_as
from limitgate.limits.bucket import Bucket
from limitgate.limits.limit import Limit
from limitgate.limits.plan import BucketReading, Charge, Plan, Reading, read, with_bans
from limitgate.limits.template import AnyAnswer, AnyPlan, AnyReading, PlainRefund, PlainSpend, whole
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.process.forking import IN_MEMORY, Remade, reset_in_children
from limitgate.stores.base import ConfigRequest, FleetRequest, StoredConfig, StoredFleet
from limitgate.stores.packed import HEAD, Entry, Layout, Layouts, head, with_cost, written_at

_FEW = 2048
_MORE = 2
"""Hand steps per expired bucket. At most a third of all buckets are expired."""
_SAMPLE = 8
"""Eviction candidates."""
_HOPS = 4
_STEPS = 64
"""Number of hand steps per new bucket."""
_POOL = 16
_SHARD = 4096
"""Buckets per dictionary: resizing takes 0.1 ms, with a million 30 ms."""
_SHARDS = 4096
_BANNED = 4
"""At most one in this many buckets can be banned by rules, because bans are never evicted."""
_MOST_TURNS = 1_000
"""A thread yields this often before it blocks."""
_STEP = 1_000_000
"""µs; smaller backward steps aren't logged."""

_LOG = ALGORITHMS["sliding_log"]

_OTHER_CLOCKS = (time.time, time.time_ns, time.monotonic, time.monotonic_ns, time.perf_counter, time.perf_counter_ns)
"""Clocks that are often passed by mistake."""
_EXPECTED_CLOCK = "expected a callable that returns Unix time in whole microseconds, such as lambda: time.time_ns() // 1000"

_Home = tuple[dict[Any, bytes], Any, bytes | None, Entry | None, Layout | None]
"""Dictionary, key, value and entry (None if new) of a bucket; its layout for plain numbers."""


_NO_CONFIG = StoredConfig(0, None), math.inf
_FEW_CONFIGS = 100


class MemoryStore(Remade):
    """Keeps up to ``max_buckets`` buckets in this process; each process enforces its own limits.

    Bans and configuration are never evicted; rules start no ban while a quarter of ``max_buckets`` is banned. ``clock`` returns
    Unix time in integer microseconds. ``clock_steps`` counts buckets whose write time was in the future.

    Calls never block, so timeouts are ignored. If a signal handler, a finalizer or ``clock`` calls the store during a call of
    the same thread, a refund waits for its end; other calls raise `StoreError`, because waiting would deadlock.
    """

    measures_silence = takes_plain = True
    answers_at_once = True
    scheme = "memory"
    healthy = True

    @called_as("MemoryStore(max_buckets=100_000)")
    def __init__(self, clock: Callable[[], int] | None = None, *, max_buckets: int = 1_000_000) -> None:
        if clock is not None and (not callable(clock) or clock in _OTHER_CLOCKS):
            raise TypeError(f"clock is {clock!r:.60}, {_EXPECTED_CLOCK}")
        if not isinstance(max_buckets, int) or isinstance(max_buckets, bool):
            raise TypeError(f"max_buckets is {max_buckets!r:.40}, expected a whole number")
        if max_buckets < 1:
            raise ValueError(f"max_buckets is {max_buckets}, expected at least 1")
        self._clock = clock or system_clock
        self._max_buckets = max_buckets
        self._most_bans = max(1, max_buckets // _BANNED)
        self._few = min(_FEW, max_buckets // 64)
        self._configs: dict[str, tuple[StoredConfig, float]] = {}
        self._most_configs = _FEW_CONFIGS
        self._fleets: dict[str, dict[str, tuple[bytes, int]]] = {}
        self._lock = RLock()
        self._busy = False
        self._now = 0
        self._late: deque[Plan] = deque()
        self.forget()
        reset_in_children(self)
        self.clock_steps: int = 0
        self._furthest_step = 0
        self._stepped = Once(Diagnosis.CLOCK_STEPPED)

    @property
    def state_here(self) -> str:
        return IN_MEMORY

    def forget(self) -> None:
        """Delete every bucket and ban, not configuration."""
        with self._lock:
            shards = min(1 << (self._max_buckets // _SHARD).bit_length(), _SHARDS)
            self._shards: list[dict[Any, bytes]] = [{} for _ in range(shards)]
            self._mask = len(self._shards) - 1
            self._overflow: dict[Any, bytes] = {}
            self._beside: dict[Any, Sequence[State]] = {}
            self._bans: dict[Any, tuple[int, int]] = {}
            """Start and duration (µs) by key. The bucket's value is then only a head, which plain plans decline."""
            self._layouts = Layouts()
            self._count = 0
            self._swept = 0
            self._hand: Iterator[Any] = iter(())
            self._pool: list[tuple[int, Any, bytes]] = []
            """Eviction candidates: time of full recovery (Unix µs), key, value."""
            self._credit = self._max_buckets
            """Remaining hand steps without an eviction."""

    def __len__(self) -> int:
        return self._count

    def now(self) -> int:
        """Unix µs of the store's clock."""
        return self._clock()

    def __repr__(self) -> str:
        return f"MemoryStore(max_buckets={self._max_buckets})"

    @overload
    def spend(self, plan: Plan, timeout: float = 0) -> Reading: ...
    @overload
    def spend(self, plan: PlainSpend, timeout: float = 0) -> AnyReading: ...
    @overload
    def spend(self, plan: AnyPlan, timeout: float = 0) -> AnyAnswer: ...

    def spend(self, plan: AnyPlan, timeout: float = 0) -> AnyAnswer:
        """Carry out ``plan`` under the lock, and return the state before it.

        Raises `StoreError` inside another call of this thread, except for a refund.
        """
        if self._busy:
            self._wait_for_others()
        with self._lock:
            if self._busy:
                return self._interrupting(whole(plan))
            self._busy = True
            try:
                # A local name, because an attribute would bind the callable.
                clock = self._clock
                self._now = now = clock()
                if type(plan) is PlainSpend and self._carry_out_plain(plan, now):
                    reading: AnyAnswer = plan
                elif type(plan) is PlainRefund and self._refund(plan, now):
                    reading = plan
                else:
                    reading = self._carry_out(whole(plan), now)
                while self._late:
                    self._carry_out(self._late.popleft(), now)
            except (struct.error, TypeError) as error:
                self._blame_clock(error)
                raise
            finally:
                self._busy = False
        if self._furthest_step >= _STEP:
            self._stepped.log("this machine")
        return reading

    @overload
    async def aspend(self, plan: Plan, timeout: float = 0) -> Reading: ...
    @overload
    async def aspend(self, plan: PlainSpend, timeout: float = 0) -> AnyReading: ...
    @overload
    async def aspend(self, plan: AnyPlan, timeout: float = 0) -> AnyAnswer: ...

    async def aspend(self, plan: AnyPlan, timeout: float = 0) -> AnyAnswer:
        return self.spend(plan)

    def _wait_for_others(self) -> None:
        """Yield until no other thread is in a call.

        Threads that block on a lock form a convoy: the next owner must first get the GIL.
        """
        for _ in range(_MOST_TURNS):
            if not self._busy or self._lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - as `threading.Condition`
                return
            time.sleep(0)

    def _blame_clock(self, error: Exception) -> None:
        if not isinstance(self._now, int):
            raise TypeError(f"clock returned {self._now!r:.40}, {_EXPECTED_CLOCK}") from error

    def _carry_out_plain(self, plan: PlainSpend, now: int) -> bool:
        template, keys = plan.template, plan.keys
        if template.bans and self._keeps_any(keys[-template.bans :]):
            return False
        only = template.only
        if only is None:
            return self._charge_plain(plan, now)
        bucket, cost, enforced, rows = only
        key = keys[0]
        shard, layout = self._shards[hash(key) & self._mask], self._layouts.known.get(bucket)
        value = shard.get(key)
        if value is None or layout is None:
            return self._charge_plain(plan, now)
        charge = layout.charge
        charged = charge(value, now, layout.number, cost, rows)
        if charged is None:
            return False
        plan.states, after = charged
        if after is not None:
            shard[key] = after
        elif template.may_wait:
            return False
        plan.now = now
        plan.admitted = after is not None or not enforced
        return True

    def _charge_plain(self, plan: PlainSpend, now: int) -> bool:
        shards, mask, template = self._shards, self._mask, plan.template
        known = self._layouts.known
        states: list[State] = []
        writes = []
        is_admitted, has_new = True, False
        slot = plan.slot if template.has_slots else 0
        for key, (bucket, cost, enforced, rows) in zip(plan.keys, template.buckets):
            shard, layout = shards[hash(key) & mask], known.get(bucket)
            value = before = shard.get(key)
            if before is None or layout is None:
                if before is not None or self._count >= self._max_buckets:
                    return False
                has_new = True
                self._reclaim(now)
                layout = layout or Layout(bucket)
                before = layout.opened(now, cost)
            charge = layout.charge
            charged = charge(before, now, layout.number, cost, rows, slot)
            if charged is None:
                return False
            of_bucket, after = charged
            states += of_bucket
            if after is not None:
                writes.append((shard, key, value, layout, after))
            elif template.may_wait:
                return False
            elif enforced:
                is_admitted = False
        for shard, key, value, layout, after in writes if is_admitted else ():
            if value is not None and not (has_new and shard.get(key) is not value):
                shard[key] = after
            # The bucket is new, or another one evicted it and possibly its layout.
            else:
                known_layout = self._layouts.of(layout.bucket, layout)
                self._put(shard, key, known_layout, known_layout.mark + after[len(known_layout.mark) :], ())
        plan.now, plan.states, plan.admitted = now, states, is_admitted
        return True

    def _refund(self, plan: PlainRefund, now: int) -> bool:
        states, slot, as_of = plan.states, plan.spent.slot, plan.spent.now
        writes = []
        for key, (charge, places, rows) in zip(plan.keys, plan.template.parts):
            shard, layout = self._shards[hash(key) & self._mask], self._layouts.known.get(charge.bucket)
            value = shard.get(key)
            if value is None or layout is None:
                return False
            refunded = layout.refund(value, now, states[places], as_of, rows, charge.cost, slot)
            if refunded is None:
                return False
            writes.append((shard, key, refunded))
        for shard, key, refunded in writes:
            shard[key] = refunded
        plan.now = now
        return True

    def config(self, request: ConfigRequest, timeout: float = 0) -> StoredConfig:
        """Carry out ``request`` under the lock and return the resulting text."""
        key, text, expected, lasts = request
        with self._lock:
            kept, until = self._configs.get(key, _NO_CONFIG)
            if until <= (now := self._clock()):
                kept, _ = _NO_CONFIG
                self._configs.pop(key, None)
            if text is not None and expected in (None, kept.version):
                kept = StoredConfig(kept.version + 1, text)
                self._configs[key] = kept, math.inf if lasts is None else now + lasts * 1_000_000
                if len(self._configs) > self._most_configs:
                    self._configs = {key: each for key, each in self._configs.items() if each[1] > now}
                    self._most_configs = 2 * len(self._configs) + _FEW_CONFIGS
            return kept

    async def aconfig(self, request: ConfigRequest, timeout: float = 0) -> StoredConfig:
        return self.config(request)

    def fleet(self, request: FleetRequest, timeout: float = 0) -> StoredFleet:
        """Carry out ``request``. This store has no snapshots of other processes."""
        now = self.now()
        with self._lock:
            known = self._fleets.setdefault(request.key, {})
            for member in [each for each, (_, until) in known.items() if until <= now]:
                del known[member]
            if request.member is not None:
                known.pop(request.member, None)
                if request.snapshot:
                    known[request.member] = request.snapshot, now + round(request.seconds * 1e6)
                return StoredFleet(now, len(known))
            return StoredFleet(now, len(known), [snapshot for snapshot, _ in known.values()])

    async def afleet(self, request: FleetRequest, timeout: float = 0) -> StoredFleet:
        """Run `fleet` for async callers."""
        return self.fleet(request)

    def reset_after_fork(self) -> None:
        self._lock = RLock()
        self._busy = False
        self._fleets = {}

    def close(self) -> None:
        """Do nothing: there are no connections."""

    async def aclose(self) -> None:
        """Do nothing: there are no connections."""

    def _carry_out(self, plan: Plan, now: int) -> Reading:
        if plan.charges and plan.charges[0].bucket.algorithm is holds:
            return self._carry_out_held(plan, now)
        shards, mask, known = self._shards, self._mask, self._layouts.known
        charges: Sequence[Charge] = plan.charges
        homes: list[_Home] = []
        states: list[Sequence[State]] = []
        if plan.verb == "ban":
            self._ban(plan, now)
        for charge in charges:
            key, bucket = charge.key, charge.bucket
            shard = shards[hash(key) & mask]
            value, layout = shard.get(key), known.get(bucket)
            home: _Home
            if value is not None and layout is not None and len(value) == layout.plain_size:
                number, written, cost, *debts = layout.unpack(value)
                if number == layout.number and written <= now:
                    home = shard, key, value, (written, cost, bucket, debts), layout
                    advanced = layout.advance(debts, now - written, bucket, now)
                    homes.append(home)
                    states.append(advanced if charge.adjustment is None else self._adjust(home, charge, advanced, now))
                    continue
            home = self._home(charge, now, peeks=plan.verb in ("peek", "look"))
            homes.append(home)
            states.append(self._read(home, charge, now, looks=plan.verb == "look"))
        if plan.verb == "reset":
            states = self._reset(homes, charges, now)
        if self._bans:
            charges, states = with_bans(charges, states, self._bans_of(charges, now))
        reading = read(charges, now, states)
        if plan.verb == "spend":
            self._make(homes, reading, now)
        return reading

    def _carry_out_held(self, plan: Plan, now: int) -> Reading:
        """Refund expired entries and run the `holds.Action`, then carry out the plan."""
        first, *charges = plan.charges
        bucket, covered = first.bucket, charges[: first.cost]
        home = self._home(first, now)
        state = found = self._read(home, first._replace(adjustment=None), now)[0]
        work = sum([holds.work(each.bucket, is_log=each.bucket.algorithm is _LOG) for each in covered])
        expired = state.expired(holds.most_expired(work))
        for entry in expired:
            for charge, refund in zip(covered, entry.refunds):
                if refund is not None:
                    refunded = charge._replace(adjustment=refund)
                    self._read(self._home(refunded, now), refunded, now)
        if expired:
            state = state.having(state.entries[len(expired) :])
        is_adjusted = True
        if first.adjustment is not None:
            is_full = home[2] is None and self._count >= self._max_buckets
            most = 0 if is_full else holds.most_entries(sum([len(each.bucket.ids) for each in covered]))
            refunds = [each.adjustment for each in covered]
            state, is_adjusted = holds.carried_out(state, first.adjustment.back[0], refunds, now, most)
        if state is not found:
            self._write(home, bucket, now, [state._replace(found=False)])
        if not is_adjusted:
            charges = [each._replace(adjustment=None) for each in charges]
        reading = self._carry_out(plan._replace(charges=tuple(charges)), now)
        return reading._replace(buckets=[BucketReading(first, [state], [state]), *reading.buckets])

    def _make(self, homes: Sequence[_Home], reading: Reading, now: int) -> None:
        admitted = reading.admitted
        for home, (charge, before, after) in zip(homes, reading.buckets):
            if after is None:
                if home[3] is not None and home[3][1] != charge.cost:
                    self._note_refusal(home, charge, before)
            elif admitted and after is not before:
                self._write(home, charge.bucket, now, after, charge.cost)

    def _reset(self, homes: Sequence[_Home], charges: Sequence[Charge], now: int) -> list[Sequence[State]]:
        states = [charge.bucket.algorithm.initial(now, charge.bucket) for charge in charges]
        for home, charge, initial in zip(homes, charges, states):
            self._write(home, charge.bucket, now, initial)
        return states

    def _ban(self, plan: Plan, now: int) -> None:
        for charge in plan.charges:
            if plan.ban_us:
                self._ban_bucket(charge, plan.ban_us, now)
            else:
                # The next write stores a full value.
                self._bans.pop(charge.key, None)

    def _ban_bucket(self, charge: Charge, us: int, now: int) -> None:
        key = charge.key
        shard = self._shard(key)
        if key not in shard:
            self._reclaim(now)
        value = shard.get(key)
        home = shard, key, value, None if value is None else self._bucket(key, value), None
        states = self._read(home, charge, now)
        self._bans[key] = now, max(us, self._ban_left(key, now))
        self._write(home, charge.bucket, now, states)

    def _bans_of(self, charges: Sequence[Charge], now: int) -> dict[int, int]:
        lefts = [self._ban_left(charge.key, now) if charge.cost else 0 for charge in charges]
        return {place: left for place, left in enumerate(lefts) if left}

    def _ban_left(self, key: Any, now: int) -> int:
        if key not in self._bans:
            return 0
        began, us = self._bans[key]
        if now < began:
            began = now
            self._bans[key] = began, us
        left = max(0, began + us - now)
        if not left:
            del self._bans[key]
        return left

    def _interrupting(self, plan: Plan) -> Reading:
        """Defer a refund to the end of the interrupted call. Raise an error for other plans."""
        if plan.verb == "spend" or not plan.gives_back or plan.charges[0].bucket.algorithm is holds:
            raise StoreError(
                "a handler or finalizer called the store during another call of the same thread, expected calls "
                "outside of handlers",
                "timeout",
            )
        self._late.append(plan)
        return read(plan.charges, self._now, [self._view(charge) for charge in plan.charges])

    def _view(self, charge: Charge) -> Sequence[State]:
        key, bucket = charge.key, charge.bucket
        value = self._shard(key).get(key)
        if value is None:
            return bucket.algorithm.initial(self._now, bucket)
        return _standing(self._bucket(key, value), bucket, self._now)

    def _shard(self, key: Any) -> dict[Any, bytes]:
        return self._shards[hash(key) & self._mask]

    def _keeps_any(self, keys: Sequence[str]) -> bool:
        for key in keys:  # noqa: SIM110 - any() would create a generator per call
            if key in self._shards[hash(key) & self._mask]:
                return True
        return False

    def _bucket(self, key: Any, value: bytes) -> Entry:
        return self._layouts.by(value).unpacked(value, self._beside.get(key, ()))

    def _home(self, charge: Charge, now: int, *, peeks: bool = False) -> _Home:
        key, bucket = charge.key, charge.bucket
        shard = self._shards[hash(key) & self._mask]
        value = shard.get(key)
        if value is not None:
            return shard, key, value, self._bucket(key, value), None
        # A shared overflow ban would ban every new key.
        if not bucket.algorithm.IS_LIMIT:
            if charge.adjustment is not None:
                self._reclaim(now)
            return shard, key, None, None, None
        if self._could_reclaim(now) if peeks else self._reclaim(now):
            return shard, key, None, None, None
        shared = bucket.ids
        value = self._overflow.get(shared)
        return self._overflow, shared, value, None if value is None else self._bucket(shared, value), None

    def _read(self, home: _Home, charge: Charge, now: int, *, looks: bool = False) -> Sequence[State]:
        """Return the states after an adjustment. If ``looks``, leave stored counts unchanged."""
        entry, bucket = home[3], charge.bucket
        algorithm = bucket.algorithm
        if entry is None:
            states = algorithm.initial(now, bucket)
        else:
            written, _, stored, _ = entry
            states = _standing(entry, bucket, now)
            if now < written:
                self._step_back(written - now)
                self._write(home, bucket, now, states)
            elif not looks and stored is not bucket and algorithm.RESCALES and _has_other_counts(stored, bucket, states):
                self._write(home, bucket, now, states)
        return states if charge.adjustment is None else self._adjust(home, charge, states, now)

    def _adjust(self, home: _Home, charge: Charge, states: Sequence[State], now: int) -> Sequence[State]:
        bucket, adjustment = charge.bucket, charge.adjustment
        if bucket.algorithm is refusals and not self._counts_refusals(home, charge, now):
            return states
        if adjustment is not None:
            elapsed_us = max(0, now - adjustment.as_of)
            states = bucket.algorithm.apply_adjustment(states, adjustment.back, elapsed_us, adjustment.grace, bucket)
            self._write(home, bucket, now, states)
            if bucket.algorithm is refusals and states[0].began_us:
                self._ban_bucket(adjustment.back[0].refusing, states[0].began_us, now)
        return states

    def _counts_refusals(self, home: _Home, charge: Charge, now: int) -> bool:
        """Return False if the bucket is banned, the store is full, or too many buckets are banned."""
        adjustment = charge.adjustment
        if adjustment is None or self._ban_left(adjustment.back[0].refusing.key, now) or len(self._bans) >= self._most_bans:
            return False
        return home[2] is not None or self._count < self._max_buckets

    def _write(self, home: _Home, bucket: Bucket, now: int, states: Sequence[State], asked: int = 0) -> None:
        """Write the windows of the plan, and keep other windows.

        The stored cost is that of the plan (``asked``), or a higher cost that is still refused.
        """
        buckets, key, value, entry, layout = home
        cost = asked or 1
        # Another charge of the plan may have changed the bucket.
        if (live := buckets.get(key)) is not value and live is not None:
            entry = self._bucket(key, live)
        if entry is not None:
            _, last, stored, _ = entry
            if last != asked and (not asked or (last > asked and _wait_us(bucket, states, last))):
                cost = last
            # Another charge of the plan may have changed or evicted the bucket.
            if layout is not None and buckets.get(key) is value:
                try:
                    buckets[key] = layout.pack(layout.number, now, cost, *states)
                except struct.error:
                    pass
                else:
                    return
            if stored is not bucket:
                bucket, states = _joined(bucket, states, entry, now)
        layout = self._layouts.of(bucket)
        value = head(layout.number, now, cost) if key in self._bans else layout.packed(now, cost, states)
        self._put(buckets, key, layout, value, states)

    def _put(self, buckets: dict[Any, bytes], key: Any, layout: Layout, value: bytes, states: Sequence[State]) -> None:
        live = buckets.get(key)
        layout.uses += 1
        if live is None and buckets is not self._overflow:
            self._count += 1
        beside = len(value) == HEAD.size
        if beside:
            self._beside[key] = states
        buckets[key] = value
        if live is not None:
            self._layouts.release(self._layouts.by(live))
            if not beside:
                self._beside.pop(key, None)

    def _drop(self, buckets: dict[Any, bytes], key: Any) -> None:
        value = buckets.pop(key)
        self._count -= 1
        if len(value) == HEAD.size:
            self._beside.pop(key)
            self._bans.pop(key, None)
        self._layouts.release(self._layouts.by(value))

    def _note_refusal(self, home: _Home, charge: Charge, states: Sequence[State]) -> None:
        """Store the refused cost, so that the bucket isn't evicted while it refuses that cost."""
        buckets, key, _, entry, _ = home
        cost, bucket = charge.cost, charge.bucket
        if entry is None or entry[1] == cost or not _wait_us(bucket, states, cost):
            return
        live = buckets.get(key)
        if live is not None and (entry[1] < cost or not _wait_us(bucket, states, entry[1])):
            buckets[key] = with_cost(live, cost)

    def _reclaim(self, now: int) -> bool:
        """Evict expired buckets, then those with the least debt. Return False if the store is still full."""
        if self._count < self._max_buckets:
            if self._count >= self._few and self._look(now):
                self._sweep(now, _MORE)
            return True
        before = self._count
        steps = self._sweep(now, 0)
        while self._count >= self._max_buckets and self._pool:
            self._drop_least()
        self._credit = max(0, min(self._credit + (before - self._count) * _STEPS - steps, self._max_buckets))
        return self._count < self._max_buckets

    def _could_reclaim(self, now: int) -> bool:
        """True if `_reclaim` would make room."""
        if self._count >= self._max_buckets:
            self._sweep(now, 0)
        candidates = (self._shard(key).get(key) is value for _, key, value in self._pool)
        return self._count < self._max_buckets or any(candidates)

    def _sweep(self, now: int, looks: int) -> int:
        most, step = self._max_buckets, 0
        steps = min(_STEPS if self._credit or self._count < most else 1, self._count + 2)
        while step < steps:
            if self._count < most:
                if step >= looks:
                    break
            elif step and len(self._pool) >= _SAMPLE:
                break
            step += 1
            if self._look(now):
                looks = max(looks, step) + _MORE
        return step

    def _look(self, now: int) -> bool:
        key = next(self._hand, None)
        if key is None:
            return self._turn()
        shard = self._shards[self._swept]
        value = shard.get(key)
        if value is None:
            return False
        number, written, _ = HEAD.unpack_from(value)
        layout = self._layouts.numbered[number]
        if layout.drains and len(value) == layout.size and written <= now and self._count < self._max_buckets:
            elapsed = now - written
            for debt, count in zip(layout.unpack(value)[3:], layout.bucket.counts):
                if debt > elapsed * count:
                    return False
            self._drop(shard, key)
            return True
        return self._look_closely(shard, key, value, now)

    def _turn(self) -> bool:
        for _ in range(_HOPS):
            self._swept = (self._swept + 1) & self._mask
            if self._shards[self._swept]:
                self._hand = iter(list(self._shards[self._swept]))
                break
        return False

    def _look_closely(self, shard: dict[Any, bytes], key: Any, value: bytes, now: int) -> bool:
        entry = self._bucket(key, value)
        if entry[0] > now:
            self._step_back(entry[0] - now)
            shard[key] = value = written_at(value, now)
            entry = (now, *entry[1:])
        due, is_banned = _full_at(entry), self._ban_left(key, now) > 0
        if due <= now and not is_banned:
            self._drop(shard, key)
            return True
        if self._count >= self._max_buckets and _refuses_until(entry) <= now and not is_banned:
            self._remember(due, key, value)
        return False

    def _remember(self, due: int, key: Any, value: bytes) -> None:
        entry, pool = (due, key, value), self._pool
        place = bisect_left(pool, entry)
        if place == len(pool) or pool[place] != entry:
            pool.insert(place, entry)
            del pool[_POOL:]

    def _drop_least(self) -> None:
        _, key, value = self._pool.pop(0)
        shard = self._shard(key)
        if shard.get(key) is value:
            self._drop(shard, key)

    def _step_back(self, by: int) -> None:
        self.clock_steps += 1
        self._furthest_step = max(self._furthest_step, by)


def system_clock() -> int:
    return time.time_ns() // 1000


def _standing(entry: Entry, bucket: Bucket, now: int) -> Sequence[State]:
    written, _, stored, states = entry
    algorithm = bucket.algorithm
    if bucket is stored:
        return algorithm.advance(states, now - written, stored, now)
    states = algorithm.advance(states, now - written, stored)
    known = dict(zip(stored.ids, states))
    fresh = zip(bucket.ids, algorithm.initial(now, bucket))
    found = [known.get(window, new) for window, new in fresh]
    return algorithm.advance(list(map(algorithm.rescaled, found, bucket.limits)), 0, bucket, now)


def _has_other_counts(stored: Bucket, bucket: Bucket, states: Sequence[State]) -> bool:
    counts = dict(zip(stored.ids, stored.counts))
    asked = zip(bucket.ids, bucket.counts, states)
    return any(state and counts.get(window, count) != count for window, count, state in asked)


def _full_at(entry: Entry) -> int:
    written, _, bucket, states = entry
    return written + max(map(bucket.algorithm.ttl_us, states, bucket.limits))


def _refuses_until(entry: Entry) -> int:
    written, cost, bucket, states = entry
    wait = _wait_us(bucket, states, cost)
    # A slot's wait is an estimate.
    is_kept = bucket.algorithm in (ban, holds) or (wait and bucket.has_slots)
    return _full_at(entry) if is_kept else written + wait


def _wait_us(bucket: Bucket, states: Sequence[State], cost: int) -> int:
    """Return the wait of the lowest priority; 0 if that priority can never pass."""
    wait_us, costs = bucket.algorithm.wait_us, repeat(cost)
    waits = list(map(wait_us, states, costs, bucket.strictest.limits))
    # The lowest priority can never spend it.
    if None in waits:
        waits = list(map(wait_us, states, costs, bucket.limits))
    return max([wait or 0 for wait in waits], default=0)


def _joined(bucket: Bucket, states: Sequence[State], entry: Entry, now: int) -> tuple[Bucket, Sequence[State]]:
    limits, ids, joined = list(bucket.limits), list(bucket.ids), list(states)
    written, _, stored, before = entry
    for limit, window, state in zip(stored.limits, stored.ids, bucket.algorithm.advance(before, now - written, stored, now)):
        if window not in bucket.ids and state:
            limits.append(limit)
            ids.append(window)
            joined.append(state)
    return (bucket, states) if len(ids) == len(bucket.ids) else (_windows(tuple(limits), tuple(ids)), joined)


@lru_cache(maxsize=4096)
def _windows(limits: tuple[Limit, ...], ids: tuple[int, ...]) -> Bucket:
    return Bucket(limits, ids)
