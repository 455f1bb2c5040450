"""Reservations that are refunded unless they are settled or renewed in time.

In a plan, the bucket of a hold comes before the charges that it covers. An entry has a name, a deadline, and the adjustments
that refund these charges. Each plan first refunds entries after their deadline, then carries out its `Action`, if any. If the
action releases a missing entry, the plan adjusts nothing.

Deadlines are on the bucket's clock, which starts with the store's clock and never goes back.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from limitgate.algorithms.base import BucketNumbers, LimitNumbers, Load
from limitgate.algorithms.no_limit import *  # noqa: F403 - what isn't below

REPLY_FIELDS = 3

REGISTER, RELEASE, RENEW, UNDO = 1, 2, 3, 4
"""Actions. RELEASE removes an entry and adjusts its charges. UNDO also prevents a later REGISTER, if the entry can't have
expired.
"""
MAX_ENTRIES = 5_000
"""Maximum of entries with up to four windows each. A GCRA entry takes 62 bytes in Redis."""
_MAX_REFUNDS = 20_000
"""Maximum of windows in all entries of a bucket."""
MAX_WORK = 100
"""Maximum of windows that one plan refunds for expired entries."""
BARRED_US = 60_000_000
"""µs within which an entry may follow its charge. `UNDO` bars an entry for this time."""
LOAD = Load(200, 3, 12)
"""Measured with 5,000 entries: charge 30 µs, register or release 50 µs, with 100 expired 170 µs, unknown place 0.8 ms."""


class Action(NamedTuple):
    what: int
    name: int = 0
    held_us: int = 0
    needed_us: int = 0
    """µs until the charges have drained; the entry is kept at least that long."""
    latest: int = 0
    """Latest time to add an entry, or earliest expiry of a barred entry; Unix µs of the store."""
    place: int = 0
    """The entry's place in Redis; 0 if unknown."""


class Entry(NamedTuple):
    """A reservation. A barred entry has no ``refunds``."""

    name: int
    until: int
    refunds: Sequence[Any] = ()
    """Each charge's refund, or None."""


class State(NamedTuple):
    clock: int = 0
    """µs of the bucket's clock."""
    needed: int = 0
    """Time until which the bucket must be kept."""
    entries: tuple[Entry, ...] = ()
    """Sorted by deadline and name."""
    held: int = 0
    found: bool = False
    """True if the action found, added or barred its entry."""
    kept_at: int = 0
    """See `Action.place`."""

    def later(self, elapsed_us: int) -> State:
        return self._replace(clock=self.clock + elapsed_us)

    def having(self, entries: Sequence[Entry], needed: int = 0) -> State:
        return State(self.clock, max(self.needed, needed), tuple(entries), len(entries))

    def place(self, name: int) -> int:
        """Return the index of an entry, -1 if absent."""
        return next((place for place, entry in enumerate(self.entries) if entry.name == name), -1)

    def without(self, place: int) -> State:
        return self.having((*self.entries[:place], *self.entries[place + 1 :]))

    def added(self, entry: Entry, needed_us: int) -> State:
        entries = list(self.entries)
        insort(entries, entry, key=_until)
        return self.having(entries, self.clock + max(needed_us, entry.until - self.clock))

    def expired(self, most: int) -> Sequence[Entry]:
        expired = []
        for entry in self.entries[:most]:
            if entry.until > self.clock:
                break
            expired.append(entry)
        return expired


_until: Final[Callable[[Entry], tuple[int, int]]] = attrgetter("until", "name")


def most_entries(windows: int) -> int:
    """Return the maximum number of entries that have this many windows each."""
    return min(MAX_ENTRIES, _MAX_REFUNDS // windows)


def most_expired(work: int) -> int:
    """Return how many expired entries one plan may refund, if each takes this much work."""
    return max(1, MAX_WORK // work)


def work(bucket: BucketNumbers, *, is_log: bool) -> int:
    """Return the work of a refund, in windows. A sliding log also moves entries."""
    return 10 + bucket.limits[0].burst // 10 if is_log else len(bucket.ids)


def carried_out(state: State, action: Action, refunds: Sequence[Any], now: int, most: int) -> tuple[State, bool]:
    """Carry out an action at ``now``, in Unix µs. Return the state, and whether the plan makes its adjustments."""
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


def load(limit: LimitNumbers) -> Load:
    return LOAD


def initial(now: int, bucket: BucketNumbers) -> Sequence[State]:
    return [State(now)]


def apply_adjustment(
    states: Sequence[State],
    back: Sequence[Action],
    elapsed_us: int,
    grace_us: Sequence[int],
    bucket: BucketNumbers,
) -> Sequence[State]:
    """Do nothing, because the store carries out the action before it reads the other charges."""
    return states


def used(state: State, limit: LimitNumbers) -> int:
    return state.held


def ttl_us(state: State, limit: LimitNumbers) -> int:
    return max(0, state.needed - state.clock) if state.entries else 0


refill_us = ttl_us


def encode_charge(limit: LimitNumbers, window: int, cost: int, ahead_us: int, date: int) -> Sequence[int]:
    return (cost,)


def encode_adjustment(limit: LimitNumbers, back: Action, grace_us: int) -> Sequence[int]:
    return back


def decode_state(facts: Sequence[int], bucket: BucketNumbers) -> Sequence[State]:
    held, found, place = facts
    return [State(held=held, found=bool(found), kept_at=place)]
