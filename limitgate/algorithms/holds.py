"""Reservations that are given back unless they are settled or renewed in time.

A bucket covers the charges that follow it in every plan. An entry has a name, a deadline, and for each of these charges the
adjustment that refunds it. Each plan first gives back the entries whose deadline has passed, as if they were cancelled at that
moment, before it looks at its charges. Then it carries out its `Action`, if it has one. If that is the release of an entry
that is gone, the plan adjusts nothing.

Deadlines are on the bucket's own clock, which starts with the store's clock and never goes back.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from limitgate.algorithms.base import BucketNumbers, LimitNumbers, Load, Straight, never

REPLY_FIELDS = 3
CAN_WAIT = False
MAX_TURNS = 0
refusal_is_stable = never
left_after = None
STRAIGHT: Straight | None = None
IS_LIMIT = False
RESCALES = False

REGISTER, RELEASE, RENEW, UNDO = 1, 2, 3, 4
"""Actions: add an entry; remove one and adjust the charges, or change nothing if it is gone; prolong one; remove one, or bar it
from being added, and adjust the charges, or change nothing if it may have expired.
"""
MAX_ENTRIES = 5_000
"""Maximum number of entries, for up to four windows. An entry of a GCRA window has 62 bytes in Redis."""
_MAX_REFUNDS = 20_000
"""Maximum number of windows of all entries together."""
MAX_WORK = 100
"""Windows whose refunds a plan makes for entries that have expired; the next plans make the others."""
BARRED_US = 60_000_000
"""Microseconds during which an entry may be added after its charge, and is barred after `UNDO`."""
LOAD = Load(200, 3, 12)
"""Measured with 5,000 entries: 30 µs for a charge, 50 µs to register or release one, 10 µs for each further one in the same
call, and 170 µs if a hundred have expired. An entry whose place is unknown, after a failure, takes 0.8 ms.
"""


class Action(NamedTuple):
    """Amount of an adjustment."""

    what: int
    name: int = 0
    held_us: int = 0
    """Time to the deadline."""
    needed_us: int = 0
    """Time in which the charges drain. An entry is kept at least until then."""
    latest: int = 0
    """The latest time to add an entry, or the time from which one may have expired that is to be barred; Unix µs by the
    store's clock.
    """
    place: int = 0
    """Where Redis keeps the entry, as reported when it was added; 0 if unknown."""


class Entry(NamedTuple):
    """A reservation. Without ``refunds`` it is barred."""

    name: int
    until: int
    refunds: Sequence[Any] = ()
    """For each charge the adjustment that refunds it, or None."""


class State(NamedTuple):
    """State of a bucket."""

    clock: int = 0
    """In µs."""
    needed: int = 0
    """When no entry is needed any more, on the bucket's clock."""
    entries: tuple[Entry, ...] = ()
    """In order of their deadlines and names."""
    held: int = 0
    """Number of entries."""
    found: bool = False
    """True if the action of the plan found its entry, or added or barred it."""
    kept_at: int = 0
    """See `Action.place`."""

    def having(self, entries: Sequence[Entry], needed: int = 0) -> State:
        """Return the state with these entries."""
        return State(self.clock, max(self.needed, needed), tuple(entries), len(entries))

    def place(self, name: int) -> int:
        """Return the index of an entry, -1 if it is gone."""
        return next((place for place, entry in enumerate(self.entries) if entry.name == name), -1)

    def without(self, place: int) -> State:
        """Return the state without the entry at an index."""
        return self.having((*self.entries[:place], *self.entries[place + 1 :]))

    def added(self, entry: Entry, needed_us: int) -> State:
        """Return the state with another entry, which is needed for a time."""
        entries = list(self.entries)
        insort(entries, entry, key=_until)
        return self.having(entries, self.clock + max(needed_us, entry.until - self.clock))

    def expired(self, most: int) -> Sequence[Entry]:
        """Return up to ``most`` entries whose deadline has passed."""
        expired = []
        for entry in self.entries[:most]:
            if entry.until > self.clock:
                break
            expired.append(entry)
        return expired


_until: Final[Callable[[Entry], tuple[int, int]]] = attrgetter("until", "name")


def most_entries(windows: int) -> int:
    """Return the maximum number of entries whose charges have this many windows."""
    return min(MAX_ENTRIES, _MAX_REFUNDS // windows)


def most_expired(work: int) -> int:
    """Return how many entries a plan gives back, whose refunds take this much work each."""
    return max(1, MAX_WORK // work)


def work(bucket: BucketNumbers, *, is_log: bool) -> int:
    """Return the work of refunding a charge to a bucket, in windows. A log moves entries."""
    return 10 + bucket.limits[0].burst // 10 if is_log else len(bucket.ids)


def carried_out(state: State, action: Action, refunds: Sequence[Any], now: int, most: int) -> tuple[State, bool]:
    """Carry out an action at ``now``, Unix µs. Return the state, and False if the plan must adjust nothing.

    ``refunds`` are the adjustments of the charges, ``most`` is the maximum number of entries.
    """
    place = state.place(action.name)
    until = state.clock + action.held_us
    if action.what == REGISTER:
        # The same name is never registered twice.
        if place >= 0 or state.held >= most or now > action.latest:
            return state, False
        return state.added(Entry(action.name, until, refunds), action.needed_us)._replace(found=True), False
    if place >= 0:
        entry = state.entries[place]
        state = state.without(place)
        if action.what == RENEW:
            state = state.added(entry._replace(until=until), action.held_us)
        return state._replace(found=True), True
    if action.what == UNDO and state.held < most and now < action.latest:
        return state.added(Entry(action.name, state.clock + BARRED_US), BARRED_US)._replace(found=True), True
    return state, False


def check(limit: LimitNumbers) -> str | None:
    return None


def load(limit: LimitNumbers) -> Load:
    return LOAD


def initial(now: int, bucket: BucketNumbers) -> Sequence[State]:
    return [State(now)]


def advance(states: Sequence[State], elapsed_us: int, bucket: BucketNumbers, now: int | None = None) -> Sequence[State]:
    (state,) = states
    return [state._replace(clock=state.clock + max(0, elapsed_us))]


def rescaled(state: State, limit: LimitNumbers) -> State:
    return state


def try_charge(
    states: Sequence[State],
    bucket: BucketNumbers,
    cost: int,
    max_wait_us: int = 0,
    slot: int = 0,
    *,
    turn_us: int = 0,
) -> Sequence[State] | None:
    return states


def apply_adjustment(
    states: Sequence[State],
    back: Sequence[Action],
    elapsed_us: int,
    grace_us: Sequence[int],
    bucket: BucketNumbers,
) -> Sequence[State]:
    """Return the same states: a store carries out the action before it reads the other charges."""
    return states


def refund_amount(
    states: Sequence[State],
    bucket: BucketNumbers,
    cost: int,
    due: int,
    slot: int = 0,
    *,
    turn_us: int = 0,
) -> tuple[Sequence[int], Sequence[int]]:
    return [0] * len(states), [0] * len(states)


def remaining(state: State, limit: LimitNumbers) -> int:
    return 0


def used(state: State, limit: LimitNumbers) -> int:
    return state.held


def wait_us(state: State, cost: int, limit: LimitNumbers) -> int:
    return 0


def ttl_us(state: State, limit: LimitNumbers) -> int:
    return max(0, state.needed - state.clock) if state.entries else 0


refill_us = ttl_us


def date(limit: LimitNumbers) -> int:
    return 0


def encode_charge(limit: LimitNumbers, window: int, cost: int, ahead_us: int, date: int) -> Sequence[int]:
    """Return the cost, which is the number of charges that follow."""
    return (cost,)


def encode_adjustment(limit: LimitNumbers, back: Action, grace_us: int) -> Sequence[int]:
    """Return the action."""
    return back


def decode_state(facts: Sequence[int], bucket: BucketNumbers) -> Sequence[State]:
    held, found, place = facts
    return [State(held=held, found=bool(found), kept_at=place)]
