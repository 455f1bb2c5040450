"""Buckets in this process: exact, thread-safe, bounded. Twin of limitgate/lua/spend.lua.

No call does work in proportion to the number of buckets: no step of the clock, no newcomer, no collection of garbage. Buckets
are bytes, spread over many dictionaries, none of which gets so large that making it larger takes long. A hand goes round them,
as in the clock algorithm of page replacement (Corbató 1968): each newcomer has it look at a few, and at a few more for each
that has expired and goes, as Redis' active expiry does. Where there is no room, that one goes of the buckets met lately which
owes least, as in Redis' eviction pool. A bucket that refuses what was last asked of it never goes: where the hand meets no
other in a few steps, the newcomer shares an overflow bucket with other newcomers of its kind. So a flood of new keys can never
push an exhausted one out.
"""

from __future__ import annotations

import struct
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from threading import RLock
from typing import Any, overload

from limitgate.algorithms import ban, refusals
from limitgate.algorithms.base import State
from limitgate.errors import StoreError
from limitgate.limits.bucket import Bucket
from limitgate.limits.limit import Limit
from limitgate.limits.plan import Charge, Plan, Reading, read, with_bans
from limitgate.limits.template import AnyAnswer, AnyPlan, AnyReading, PlainRefund, PlainSpend, whole
from limitgate.messages.diagnostics import Diagnosis, Once
from limitgate.process.forking import reset_in_children
from limitgate.process.remaking import IN_MEMORY, Remade
from limitgate.stores.base import ConfigRequest, StoredConfig
from limitgate.stores.packed import HEAD, Entry, Layout, Layouts, head, with_cost, written_at

_FEW = 2048
"""Buckets at most up to which none is let go of though it has expired: clients come back, and to make one anew takes longer."""
_MORE = 2
"""Steps of the hand for each expired bucket, besides one for each newcomer: in the long run a third has expired at most."""
_SAMPLE = 8
"""Buckets of which the one that owes least goes where there is no room, at least."""
_HOPS = 4
"""Empty dictionaries that the hand goes over in a step."""
_STEPS = 64
"""Steps of the hand for a newcomer at most; bounds the work of one request."""
_POOL = 16
"""Buckets that may go which are remembered."""
_SHARD = 4096
"""Buckets in a dictionary: Python makes one of so many larger in 0.1 ms, one of a million in 30 ms."""
_SHARDS = 4096
"""Dictionaries at most, however many buckets are allowed."""
_MOST_TURNS = 1_000
"""How often a thread lets others run before it waits for the lock itself."""
_STEP = 1_000_000
"""Microseconds that the clock may step back before it is worth a line in the log."""

_OTHER_CLOCKS = (time.time, time.time_ns, time.monotonic, time.monotonic_ns, time.perf_counter, time.perf_counter_ns)
"""Clocks that are often taken for the one that is expected, which none of them is."""
_EXPECTED_CLOCK = "expected a callable that gives Unix time in whole microseconds, such as lambda: time.time_ns() // 1000"

_Home = tuple[dict[Any, bytes], Any, bytes | None, Entry | None, Layout | None]
"""Where a charge's bucket lives: in which dictionary, under which key, its value and the bucket if there is one yet; and its
layout if it is plain: of the asked windows, a number for each."""


class MemoryStore(Remade):
    """Keeps at most ``max_buckets`` buckets in this process; each process limits by itself.

    Bans and configuration are never dropped, and kept even where there is no room: clients can make none of them.
    ``clock`` returns Unix time in integer microseconds. ``clock_steps`` counts the buckets that were found written in the
    future, which happens when the clock steps back; the first step of a second or more is logged. The deadline of a call is
    not looked at: nothing here waits.

    A signal handler, a finalizer or a ``clock`` may call a store in the midst of another call of the same thread. What it gives
    back is noted then, and given back when that call ends. Anything else raises `StoreError`: to wait would be for ever.
    """

    measures_silence = takes_plain = True
    """Nobody waits for it, so nobody may be told that there is no time left."""
    answers_at_once = True
    """An event loop may ask by the methods for threads, as nobody waits for it."""
    scheme = "memory"
    """Scheme of its URL."""
    healthy = True
    """True if the store answers, as in every store; this one always does."""

    def __init__(self, clock: Callable[[], int] | None = None, *, max_buckets: int = 1_000_000) -> None:
        if clock is not None and (not callable(clock) or clock in _OTHER_CLOCKS):
            raise TypeError(f"clock is {clock!r:.60}, {_EXPECTED_CLOCK}")
        if not isinstance(max_buckets, int) or isinstance(max_buckets, bool):
            raise TypeError(f"max_buckets is {max_buckets!r:.40}, expected a whole number")
        if max_buckets < 1:
            raise ValueError(f"max_buckets is {max_buckets}, expected at least 1")
        self._clock = clock or system_clock
        self._max_buckets = max_buckets
        self._few = min(_FEW, max_buckets // 64)
        self._configs: dict[str, StoredConfig] = {}
        self._lock = RLock()
        self._busy = False
        self._now = 0
        self._late: deque[Plan] = deque()
        self.forget()
        reset_in_children(self)
        self.clock_steps = 0
        self._furthest_step = 0
        self._stepped = Once(Diagnosis.CLOCK_STEPPED)

    @property
    def state_here(self) -> str:
        """The buckets."""
        return IN_MEMORY

    def forget(self) -> None:
        """Forget every bucket, bans included. What is configured under a name stays."""
        with self._lock:
            shards = min(1 << (self._max_buckets // _SHARD).bit_length(), _SHARDS)
            self._shards: list[dict[Any, bytes]] = [{} for _ in range(shards)]
            self._mask = len(self._shards) - 1
            self._overflow: dict[Any, bytes] = {}
            self._beside: dict[Any, Sequence[State]] = {}
            self._bans: dict[Any, tuple[int, int]] = {}
            """By key when the bucket was banned in Unix µs, and for how long from then on in µs. Its value is a head alone,
            which plain plans decline."""
            self._layouts = Layouts()
            self._count = 0
            self._swept = 0
            self._hand: Iterator[Any] = iter(())
            self._pool: list[tuple[int, Any, bytes]] = []
            """Buckets that may go: when each is full again in Unix µs, its key and its value; the next to go first."""
            self._credit = self._max_buckets
            """Steps of the hand in vain that newcomers may still have it go."""

    def __len__(self) -> int:
        """Number of buckets."""
        return self._count

    def now(self) -> int:
        """Its clock, Unix µs."""
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
        """Carry out ``plan`` under one lock and report the state before it.

        Raises `StoreError` if it interrupts another call of this thread, unless it only gives back.
        """
        if self._busy:
            self._wait_for_others()
        with self._lock:
            if self._busy:
                return self._interrupting(whole(plan))
            self._busy = True
            try:
                clock = self._clock  # no method, so called by a name of its own
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
        """`spend`, for async callers."""
        return self.spend(plan)

    def _wait_for_others(self) -> None:
        """Wait until no other thread is in the midst of a call, by letting others run.

        A thread that waits for the lock itself is given it in its sleep, and holds it until it has the GIL. Others run into
        it meanwhile, and all threads go one behind the other for as long as requests come: with eight under Flask a request
        cost twice as much. An interruption of this thread's own call waits for nobody.
        """
        for _ in range(_MOST_TURNS):
            if not self._busy or self._lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - as `threading.Condition`
                return
            time.sleep(0)

    def _blame_clock(self, error: Exception) -> None:
        """Raise `TypeError` for a failure that comes of a clock that gives something else than whole microseconds."""
        if not isinstance(self._now, int):
            raise TypeError(f"clock gave {self._now!r:.40}, {_EXPECTED_CLOCK}") from error

    def _carry_out_plain(self, plan: PlainSpend, now: int) -> bool:
        """`_carry_out` a plain plan; False if a bucket is not kept as the plan asks for it, or a request has to wait.

        Almost every plan is for one bucket that is there: it is charged here without the lists that others need.
        """
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
        charge = layout.charge  # as the clock
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
        """Charge the buckets of a plain plan, of which any may be new; False as `_carry_out_plain`."""
        shards, mask, known, template = self._shards, self._mask, self._layouts.known, plan.template
        states: list[State] = []
        writes = []
        is_admitted = True
        slot = plan.slot if template.has_slots else 0
        for key, (bucket, cost, enforced, rows) in zip(plan.keys, template.buckets):
            shard, layout = shards[hash(key) & mask], known.get(bucket)
            value = before = shard.get(key)
            if value is None and self._count < self._max_buckets:
                self._reclaim(now)
                layout = layout or Layout(bucket)
                before = layout.opened(now, cost)
            if before is None or layout is None:
                return False
            charge = layout.charge  # as the clock
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
            if value is not None and shard.get(key) is value:
                shard[key] = after
            else:  # it is new, or was dropped for another one, and maybe the layout with it
                known_layout = self._layouts.of(layout.bucket, layout)
                self._put(shard, key, known_layout, known_layout.mark + after[len(known_layout.mark) :], ())
        plan.now, plan.states, plan.admitted = now, states, is_admitted
        return True

    def _refund(self, plan: PlainRefund, now: int) -> bool:
        """`_carry_out` the refund of a plain plan; False if a bucket is not kept as that has left it."""
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
        """Carry out ``request`` under the lock and report the text in force afterwards."""
        key, text, expected, nothing = *request, StoredConfig(0, None)
        with self._lock:
            kept = self._configs.get(key, nothing)
            if text is not None and expected in (None, kept.version):
                kept = self._configs[key] = StoredConfig(kept.version + 1, text)
            return kept

    async def aconfig(self, request: ConfigRequest, timeout: float = 0) -> StoredConfig:
        """`config`, for async callers."""
        return self.config(request)

    def reset_after_fork(self) -> None:
        """In the child of a fork: no thread is left there that could release what another one held."""
        self._lock = RLock()
        self._busy = False

    def close(self) -> None:
        """Nothing to let go of."""

    async def aclose(self) -> None:
        """Nothing to let go of."""

    def _carry_out(self, plan: Plan, now: int) -> Reading:
        """Read all buckets of ``plan``, decide, and make the charges that fit if it is admitted."""
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
            home = self._home(charge, now)
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

    def _make(self, homes: Sequence[_Home], reading: Reading, now: int) -> None:
        """Make the charges that fit if the plan was admitted, and note those that do not."""
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
        """Ban the buckets of a plan, or lift their bans. Where there is no room they are kept all the same."""
        for charge in plan.charges:
            if plan.ban_us:
                self._ban_bucket(charge, plan.ban_us, now)
            else:
                self._bans.pop(charge.key, None)  # the value is as others when it is written again

    def _ban_bucket(self, charge: Charge, us: int, now: int) -> None:
        """Ban the bucket of a charge for at least so many microseconds."""
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
        """Microseconds for which buckets are still banned that something is charged to, by the places of the charges."""
        lefts = [self._ban_left(charge.key, now) if charge.cost else 0 for charge in charges]
        return {place: left for place, left in enumerate(lefts) if left}

    def _ban_left(self, key: Any, now: int) -> int:
        """Microseconds for which a bucket is still banned; 0 if it is not."""
        if key not in self._bans:
            return 0
        began, us = self._bans[key]
        if now < began:  # the clock has stepped back
            began = now
            self._bans[key] = began, us
        left = max(0, began + us - now)
        if not left:
            del self._bans[key]
        return left

    def _interrupting(self, plan: Plan) -> Reading:
        """Reading of an adjustment, which is made when the interrupted call ends; else a `StoreError`."""
        if plan.verb == "spend" or not plan.gives_back:
            raise StoreError(
                "a call of this thread was interrupted by one to the same store, expected it from outside", "timeout"
            )
        self._late.append(plan)
        return read(plan.charges, self._now, [self._view(charge) for charge in plan.charges])

    def _view(self, charge: Charge) -> Sequence[State]:
        """States of a charge's bucket, of which nothing is changed."""
        key, bucket = charge.key, charge.bucket
        value = self._shard(key).get(key)
        if value is None:
            return bucket.algorithm.initial(self._now, bucket)
        return _standing(self._bucket(key, value), bucket, self._now)

    def _shard(self, key: Any) -> dict[Any, bytes]:
        """Dictionary that a key belongs into."""
        return self._shards[hash(key) & self._mask]

    def _keeps_any(self, keys: Sequence[str]) -> bool:
        """True if there is a bucket under one of these keys."""
        for key in keys:  # noqa: SIM110 - any() would make a generator for every call
            if key in self._shards[hash(key) & self._mask]:
                return True
        return False

    def _bucket(self, key: Any, value: bytes) -> Entry:
        return self._layouts.by(value).unpacked(value, self._beside.get(key, ()))

    def _home(self, charge: Charge, now: int) -> _Home:
        """Find where a charge's bucket lives: under its key, or in the overflow bucket of its windows."""
        key, bucket = charge.key, charge.bucket
        shard = self._shards[hash(key) & self._mask]
        value = shard.get(key)
        if value is not None:
            return shard, key, value, self._bucket(key, value), None
        if not bucket.algorithm.IS_LIMIT:  # a ban that newcomers shared would hold for all of them
            if charge.adjustment is not None:
                self._reclaim(now)
            return shard, key, None, None, None
        if self._reclaim(now):
            return shard, key, None, None, None
        shared = bucket.ids
        value = self._overflow.get(shared)
        return self._overflow, shared, value, None if value is None else self._bucket(shared, value), None

    def _read(self, home: _Home, charge: Charge, now: int, *, looks: bool = False) -> Sequence[State]:
        """States of the charge's windows now, after its adjustment. A look changes no count."""
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
        """Make the adjustment of a charge to states, and put how they stand then."""
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
        """True unless the bucket that refuses is banned, or there is no room for the count of its refusals."""
        adjustment = charge.adjustment
        if adjustment is None or self._ban_left(adjustment.back[0].refusing.key, now):
            return False
        return home[2] is not None or self._count < self._max_buckets

    def _write(self, home: _Home, bucket: Bucket, now: int, states: Sequence[State], asked: int = 0) -> None:
        """Put how the asked windows stand; windows of the bucket that were not asked stay as they are.

        ``asked`` is the cost of a charge, 0 for none. The cost that is kept is the last one, or an earlier one that is refused.
        """
        buckets, key, value, entry, layout = home
        cost = asked or 1
        if entry is not None:
            _, last, stored, _ = entry
            if last != asked and (not asked or (last > asked and _wait_us(bucket, states, last))):
                cost = last
            # It is as it was read, unless another charge of the plan is for the same key, or needed the room.
            if layout is not None and buckets.get(key) is value:
                try:
                    buckets[key] = layout.pack(layout.number, now, cost, *states)
                except struct.error:  # more than 64 bits
                    pass
                else:
                    return
            if stored is not bucket:
                bucket, states = _joined(bucket, states, entry, now)
        layout = self._layouts.of(bucket)
        value = head(layout.number, now, cost) if key in self._bans else layout.packed(now, cost, states)
        self._put(buckets, key, layout, value, states)

    def _put(self, buckets: dict[Any, bytes], key: Any, layout: Layout, value: bytes, states: Sequence[State]) -> None:
        """Put a bucket that is new, or is kept in another way than before.

        What is counted is never less than what is there, wherever a signal handler raises an exception in between.
        """
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
        """Keep the cost of a charge that does not fit, so that the bucket stays for as long as it would refuse it."""
        buckets, key, _, entry, _ = home
        cost, bucket = charge.cost, charge.bucket
        if entry is None or entry[1] == cost or not _wait_us(bucket, states, cost):
            return
        live = buckets.get(key)
        if live is not None and (entry[1] < cost or not _wait_us(bucket, states, entry[1])):
            buckets[key] = with_cost(live, cost)

    def _reclaim(self, now: int) -> bool:
        """Make room: expired buckets go, and when there is no room still those that owe least. False if there is none."""
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

    def _sweep(self, now: int, looks: int) -> int:
        """Let go of expired buckets, and where there is no room find some that may go. How many steps the hand has made."""
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
        """Move the hand on to the next bucket. True if that has expired and is gone."""
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
        """Note a bucket that may go, of which those are kept that owe least."""
        entry, pool = (due, key, value), self._pool
        place = bisect_left(pool, entry)
        if place == len(pool) or pool[place] != entry:
            pool.insert(place, entry)
            del pool[_POOL:]

    def _drop_least(self) -> None:
        """Drop the bucket that owes least of those that may go, unless it is not as it was any more."""
        _, key, value = self._pool.pop(0)
        shard = self._shard(key)
        if shard.get(key) is value:
            self._drop(shard, key)

    def _step_back(self, by: int) -> None:
        """Count a bucket that was found written so many microseconds in the future."""
        self.clock_steps += 1
        self._furthest_step = max(self._furthest_step, by)


def system_clock() -> int:
    """This machine's clock, Unix µs."""
    return time.time_ns() // 1000


def _standing(entry: Entry, bucket: Bucket, now: int) -> Sequence[State]:
    """States of the asked windows of a bucket at a time in Unix µs."""
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
    """True if any of the windows that owe something had another count when it was stored."""
    counts = dict(zip(stored.ids, stored.counts))
    asked = zip(bucket.ids, bucket.counts, states)
    return any(state and counts.get(window, count) != count for window, count, state in asked)


def _full_at(entry: Entry) -> int:
    """When a bucket will be as if nobody had used it, in Unix µs."""
    written, _, bucket, states = entry
    return written + max(map(bucket.algorithm.ttl_us, states, bucket.limits))


def _refuses_until(entry: Entry) -> int:
    """When the cost last asked of a bucket will fit into every window, whoever asks, in Unix µs; when written if it did then.

    Bans and what is configured, which are never dropped, stay until they are over.
    """
    written, cost, bucket, states = entry
    wait = _wait_us(bucket, states, cost)
    is_kept = bucket.algorithm is ban or (wait and bucket.has_slots)  # a hint is no promise
    return _full_at(entry) if is_kept else written + wait


def _wait_us(bucket: Bucket, states: Sequence[State], cost: int) -> int:
    """Microseconds until a cost fits into every window for those who have least room; 0 if it does, or if it never will."""
    wait_us, costs = bucket.algorithm.wait_us, repeat(cost)
    waits = list(map(wait_us, states, costs, bucket.strictest.limits))
    if None in waits:  # who has least room never gets that much
        waits = list(map(wait_us, states, costs, bucket.limits))
    return max([wait or 0 for wait in waits], default=0)


def _joined(bucket: Bucket, states: Sequence[State], entry: Entry, now: int) -> tuple[Bucket, Sequence[State]]:
    """The asked windows, and those of ``bucket`` that were not asked and still owe something."""
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
    """The same object for the same windows, so that buckets share it."""
    return Bucket(limits, ids)
