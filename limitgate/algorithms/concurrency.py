"""Requests in flight: so many at once, as a counting semaphore (Dijkstra 1965) whose places are leased. nginx has limit_conn.

A request takes a slot under a name that nobody else has, and gives it back when it is over. A slot is leased for `HELD_US`, and
whoever holds it renews it in time; so what a process held that has crashed is free again after that. Taking and renewing are
the same to a slot that is there, so a call that is repeated takes nothing twice, and giving back one that is gone does nothing.

A state is a timeline, which goes on by the time that has passed and by nothing else, how many places are taken, and the slots,
packed in the order in which they end, as bytes are copied in no time. A refusal may end at any moment, so no wait is promised,
and `HINT_US` is only a hint.
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
"""Microseconds for which a slot is leased."""
HINT_US = 1_000_000
"""Microseconds after which whoever was refused may as well try again."""
MAX_SLOTS = 10_000
"""Places that a limit may have: Redis reads them all, 14 bytes each, when one is taken, and writes them when it goes back."""
LONG = 2048
"""Bytes of the slots of a bucket from which on the script appends to it; each place has 14."""
LOAD = Load(3, 5, 1)
"""Measured: 26 µs to take one of 100 places, among 32 buckets in a call."""
LOAD_OF_PLACE = Load(0.1, 0.0035, 0)
"""Load of each slot besides. Measured with 10,000: 0.45 ms to take one, 1 ms to renew one or to give it back, and 30 µs for
each further one in the same call."""

_OTHERS = -1
"""The name under which `decode_state` puts what it knows of the slots of others; nobody has it."""


_SLOT = struct.Struct("<3q")  # its name, how many places it has, and until when on the timeline
_NAME = struct.Struct("<q")
_pack, _unpack, _size = _SLOT.pack, _SLOT.unpack_from, _SLOT.size
_new = tuple.__new__  # half the time that a named tuple's own takes


class State(NamedTuple):
    """State of a window."""

    at: int = 0
    """Where on its timeline, in µs."""
    taken: int = 0
    """Number of places that are taken."""
    packed: bytes = b""
    """The slots, in the order in which they end."""

    @property
    def slots(self) -> Iterator[tuple[int, int, int]]:
        """The slots: name, places, and until when on the timeline."""
        return _SLOT.iter_unpack(self.packed)

    def later(self, elapsed_us: int) -> State:
        """The state some time later."""
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
        """The state once a slot is given back."""
        at, taken, packed = self
        place = _place_of(name, packed)
        if place < 0:
            return self
        _, places, _ = _unpack(packed, place)
        without: State = _new(State, (at, taken - places, packed[:place] + packed[place + _size :]))
        return without

    def having(self, name: int, places: int) -> State:
        """The state once a slot is taken, or renewed: then it has as many places as before."""
        at, taken, packed = self
        place = _place_of(name, packed)
        if place >= 0:
            _, places, _ = _unpack(packed, place)
            taken, packed = taken - places, packed[:place] + packed[place + _size :]
        having: State = _new(State, (at, taken + places, packed + _pack(name, places, at + HELD_US)))
        return having

    def places(self, name: int) -> int:
        """Number of places of the slot under a name; 0 if there is none."""
        place = _place_of(name, self.packed)
        return 0 if place < 0 else _unpack(self.packed, place)[1]


def _place_of(name: int, packed: bytes) -> int:
    """Where in packed slots the one under a name begins; -1 if there is none. Nobody is called 0."""
    if not (packed and name):
        return -1
    wanted = _NAME.pack(name)
    place = packed.find(wanted)
    while place > 0 and place % _size:
        place = packed.find(wanted, place + 1)
    return place


def reported(taken: int, left: int) -> State:
    """The state of which so many places are taken, by others, and for how long the last one lasts."""
    state: State = _new(State, (0, taken, _pack(_OTHERS, taken, left) if taken else b""))
    return state


STRAIGHT: Straight | None = Straight(
    kept="slots{n},",
    state="slots{n},",
    row="",
    row_of=lambda limit, cost: (),  # noqa: ARG005 - the memory store has lines of its own
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
    """Return what was expected of a limit that this algorithm cannot count, None if it can."""
    if limit.burst != limit.count:
        return "no burst: all of them may come at once"
    return None if limit.count <= MAX_SLOTS else f"at most {MAX_SLOTS:,} at once"


def load(limit: LimitNumbers) -> Load:
    """Load of a window at most."""
    return LOAD.plus(Load(*[us * limit.count for us in LOAD_OF_PLACE]))


def initial(now: int, bucket: BucketNumbers) -> Sequence[State]:  # noqa: ARG001 - as every algorithm's
    """No slot is taken."""
    return [State() for _ in bucket.limits]


def advance(
    states: Sequence[State],
    elapsed_us: int,
    bucket: BucketNumbers,  # noqa: ARG001 - see above
    now: int | None = None,  # noqa: ARG001 - see above
) -> Sequence[State]:
    """The states some time later, without the slots that nobody has renewed."""
    (state,) = states
    return [state.later(elapsed_us)]


def rescaled(state: State, limit: LimitNumbers) -> State:  # noqa: ARG001 - see above
    """Slots are slots under any count."""
    return state


def try_charge(
    states: Sequence[State],
    bucket: BucketNumbers,
    cost: int,
    max_wait_us: int = 0,  # noqa: ARG001 - see above
    slot: int = 0,
    *,
    turn_us: int = 0,  # noqa: ARG001 - see above
) -> Sequence[State] | None:
    """The states once a slot is taken, or renewed if it is there already; None if there is no room."""
    if not cost:
        return states
    (state,), (limit,) = states, bucket.limits
    if state.taken + cost > limit.burst and not state.places(slot):
        return None
    return [state.having(slot, cost)]


def apply_adjustment(
    states: Sequence[State],
    back: Sequence[int],
    elapsed_us: int,  # noqa: ARG001 - see above
    names: Sequence[int],
    bucket: BucketNumbers,
) -> Sequence[State]:
    """The states once slots are given back by their names; where it is negative they are renewed, if need be taken again.

    Where there is no room to take one again that was not renewed in time, it stays gone.
    """
    (state,), (places,), (name,), (limit,) = states, back, names, bucket.limits
    if places > 0:
        return [state.without(name)]
    if places and (state.places(name) or state.taken - places <= limit.burst):
        return [state.having(name, -places)]
    return states


def refund_amount(
    states: Sequence[State],
    bucket: BucketNumbers,  # noqa: ARG001 - see above
    cost: int,
    due: int,
    slot: int = 0,
    *,
    turn_us: int = 0,  # noqa: ARG001 - see above
) -> tuple[Sequence[int], Sequence[int]]:
    """Places to give back, and the name of the slot. While a request is under way it keeps its slot, whatever it costs."""
    return [0 if due else cost] * len(states), [slot] * len(states)


def remaining(state: State, limit: LimitNumbers) -> int:
    """Number of slots that are free; never negative."""
    return max(0, limit.burst - state.taken)


def used(state: State, limit: LimitNumbers) -> int:  # noqa: ARG001 - see above
    """Number of slots that are taken."""
    return state.taken


def left_after(state: State, cost: int, limit: LimitNumbers) -> tuple[int, int]:
    """Number of slots that are free besides a charge, and the microseconds until that one's are over."""
    return limit.burst - state.taken - cost, HELD_US


def wait_us(state: State, cost: int, limit: LimitNumbers) -> int | None:
    """Microseconds after which to try again, which may be too early or too late; 0 if it fits now, None if it never does."""
    if state.taken + cost <= limit.burst or not cost:
        return 0
    return None if cost > limit.burst else HINT_US


def refill_us(state: State, limit: LimitNumbers) -> int:  # noqa: ARG001 - see above
    """Microseconds until all slots are over that are taken now, if nobody gives any back or renews it."""
    if not state.packed:
        return 0
    until: int
    _, _, until = _unpack(state.packed, len(state.packed) - _size)
    return until - state.at


ttl_us = refill_us


def date(limit: LimitNumbers) -> int:  # noqa: ARG001 - see above
    """No date matters."""
    return 0


def encode_charge(limit: LimitNumbers, window: int, cost: int, max_wait_us: int, date: int) -> Sequence[int]:  # noqa: ARG001 - see above
    """Numbers of slots that may be taken and that are to be, and the µs for which they are held."""
    return limit.burst, min(cost, limit.burst + 1), HELD_US


def encode_adjustment(limit: LimitNumbers, back: int, name: int) -> Sequence[int]:  # noqa: ARG001 - see above
    """Number of slots to give back, or to renew where it is negative, and their name."""
    return back, name


def decode_state(facts: Sequence[int], bucket: BucketNumbers) -> Sequence[State]:  # noqa: ARG001 - see above
    """The states that the script has reported: places taken, for how long, and, if the asked slot is there, its own."""
    taken, left, name, own = facts
    packed = _pack(_OTHERS, taken - own, left) if taken > own else b""
    state: State = _new(State, (0, taken, packed + _pack(name, own, left) if own else packed))
    return [state]
