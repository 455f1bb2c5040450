"""Requests in flight, counted by a semaphore (Dijkstra 1965) with leased slots.

A slot has a unique name, and a lease of `HELD_US`. The holder renews the lease, so slots of a crashed process expire. All
actions are idempotent. A state has its own clock, which advances only with elapsed time, and packed slots in order of expiry.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from limitgate.algorithms.base import BucketNumbers, LimitNumbers, Load, Straight, StraightRefund, never

REPLY_FIELDS = 4
CAN_WAIT = False
MAX_TURNS = 0
refusal_is_stable = never
IS_LIMIT = True
RESCALES = False

HELD_US = 30_000_000
"""Lease, in µs."""
HINT_US = 1_000_000
"""µs until the next attempt."""
MAX_SLOTS = 10_000
"""Maximum of slots, because each call reads or writes all of them in Redis, 14 bytes each."""
LONG = 2048
"""With more bytes of slots than this, the script appends to the bucket."""
LOAD = Load(3, 5, 1)
"""Measured: 26 µs for one of 100 slots, in a call of 32."""
LOAD_OF_PLACE = Load(0.1, 0.0035, 0)
"""Measured with 10,000 slots: take 0.45 ms; renew or release 1 ms, each further slot 30 µs."""

_OTHERS = -1


_SLOT = struct.Struct("<3q")  # name, number, and expiry on the timeline
_NAME = struct.Struct("<q")
_pack, _unpack, _size = _SLOT.pack, _SLOT.unpack_from, _SLOT.size
_new = tuple.__new__  # twice as fast as the constructor


class State(NamedTuple):
    at: int = 0
    """µs of the state's clock."""
    taken: int = 0
    packed: bytes = b""

    @property
    def slots(self) -> Iterator[tuple[int, int, int]]:
        """Name, number and expiry (µs of the state's clock) of each slot."""
        return _SLOT.iter_unpack(self.packed)

    def later(self, elapsed_us: int) -> State:
        at, taken, packed = self
        if elapsed_us > 0:
            at += elapsed_us
        if packed:
            over = 0
            while over < len(packed):
                _, places, until = _unpack(packed, over)
                if until > at:
                    break
                over += _size
                taken -= places
            packed = packed[over:]
        later: State = _new(State, (at, taken, packed))
        return later

    def without(self, name: int) -> State:
        at, taken, packed = self
        place = _place_of(name, packed)
        if place < 0:
            return self
        _, places, _ = _unpack(packed, place)
        without: State = _new(State, (at, taken - places, packed[:place] + packed[place + _size :]))
        return without

    def having(self, name: int, places: int) -> State:
        """Take a slot, or renew a slot without changing its number."""
        at, taken, packed = self
        place = _place_of(name, packed)
        if place >= 0:
            _, places, _ = _unpack(packed, place)
            taken, packed = taken - places, packed[:place] + packed[place + _size :]
        having: State = _new(State, (at, taken + places, packed + _pack(name, places, at + HELD_US)))
        return having

    def places(self, name: int) -> int:
        place = _place_of(name, self.packed)
        return 0 if place < 0 else _unpack(self.packed, place)[1]


def _place_of(name: int, packed: bytes) -> int:
    if not (packed and name):
        return -1
    wanted = _NAME.pack(name)
    place = packed.find(wanted)
    while place > 0 and place % _size:
        place = packed.find(wanted, place + 1)
    return place


def reported(taken: int, left: int) -> State:
    """Return a state of a script's reply: ``taken`` slots, the last of which expires in ``left`` µs."""
    state: State = _new(State, (0, taken, _pack(_OTHERS, taken, left) if taken else b""))
    return state


STRAIGHT: Straight | None = Straight(
    kept="slots{n},",
    state="slots{n},",
    row="",
    row_of=lambda limit, cost: (),  # noqa: ARG005 - the memory store has its own code
    advance="",
    fits="",
    charged="",
    refund=StraightRefund(grace="plan.spent.slot", refunded=""),
    asked=lambda limit, window, cost: struct.pack("<3d", *encode_charge(limit, window, cost, 0, 0)),
    reported="taken{n}, left{n}, _, _,",
    reported_state="reported(taken{n}, left{n}),",
    known=(("reported", reported),),
    most=LONG // 14 - 1,
)


def check(limit: LimitNumbers) -> str | None:
    if limit.burst != limit.count:
        return "no burst: all of them may come at once"
    return None if limit.count <= MAX_SLOTS else f"at most {MAX_SLOTS:,} at once"


def load(limit: LimitNumbers) -> Load:
    return LOAD.plus(Load(*[us * limit.count for us in LOAD_OF_PLACE]))


def initial(now: int, bucket: BucketNumbers) -> Sequence[State]:
    return [State() for _ in bucket.limits]


def advance(states: Sequence[State], elapsed_us: int, bucket: BucketNumbers, now: int | None = None) -> Sequence[State]:
    (state,) = states
    return [state.later(elapsed_us)]


def rescaled(state: State, limit: LimitNumbers) -> State:
    return state


def try_charge(
    states: Sequence[State], bucket: BucketNumbers, cost: int, max_wait_us: int = 0, slot: int = 0, *, turn_us: int = 0
) -> Sequence[State] | None:
    if not cost:
        return states
    (state,), (limit,) = states, bucket.limits
    if state.taken + cost > limit.burst and not state.places(slot):
        return None
    return [state.having(slot, cost)]


def apply_adjustment(
    states: Sequence[State], back: Sequence[int], elapsed_us: int, names: Sequence[int], bucket: BucketNumbers
) -> Sequence[State]:
    """Release slots, or renew them if ``back`` is negative. Expired slots are taken again if they fit."""
    (state,), (places,), (name,), (limit,) = states, back, names, bucket.limits
    if places > 0:
        return [state.without(name)]
    if places and (state.places(name) or state.taken - places <= limit.burst):
        return [state.having(name, -places)]
    return states


def refund_amount(
    states: Sequence[State], bucket: BucketNumbers, cost: int, due: int, slot: int = 0, *, turn_us: int = 0
) -> tuple[Sequence[int], Sequence[int]]:
    """Refund the slot, unless the request is still in flight."""
    return [0 if due else cost] * len(states), [slot] * len(states)


def remaining(state: State, limit: LimitNumbers) -> int:
    return max(0, limit.burst - state.taken)


def used(state: State, limit: LimitNumbers) -> int:
    return state.taken


def left_after(state: State, cost: int, limit: LimitNumbers) -> tuple[int, int]:
    return limit.burst - state.taken - cost, HELD_US


def wait_us(state: State, cost: int, limit: LimitNumbers) -> int | None:
    if state.taken + cost <= limit.burst or not cost:
        return 0
    return None if cost > limit.burst else HINT_US


def refill_us(state: State, limit: LimitNumbers) -> int:
    if not state.packed:
        return 0
    until: int
    _, _, until = _unpack(state.packed, len(state.packed) - _size)
    return until - state.at


ttl_us = refill_us


def date(limit: LimitNumbers) -> int:
    return 0


def encode_charge(limit: LimitNumbers, window: int, cost: int, max_wait_us: int, date: int) -> Sequence[int]:
    """Return maximum, requested slots, and the lease in µs."""
    return limit.burst, min(cost, limit.burst + 1), HELD_US


def encode_adjustment(limit: LimitNumbers, back: int, name: int) -> Sequence[int]:
    return back, name


def decode_state(facts: Sequence[int], bucket: BucketNumbers) -> Sequence[State]:
    taken, left, name, own = facts
    packed = _pack(_OTHERS, taken - own, left) if taken > own else b""
    state: State = _new(State, (0, taken, packed + _pack(name, own, left) if own else packed))
    return [state]
