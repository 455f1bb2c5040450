"""Plans of reservations with a hold, see `limitgate.algorithms.holds`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from threading import RLock

from limitgate.algorithms import holds
from limitgate.errors import StoreError
from limitgate.limits.bucket import MAX_AHEAD, Bucket
from limitgate.limits.decision import SECOND
from limitgate.limits.limit import Duration, as_seconds, kept_as
from limitgate.limits.plan import Adjustment, Charge, Plan, Reading, full_refund, new_slot
from limitgate.process import waiting
from limitgate.process.forking import reset_in_children
from limitgate.stores.memory import MemoryStore


class NotHeldError(StoreError):
    """A reservation can't be held. Its charge was refunded."""


LONGEST = 366 * 86_400
"""Seconds."""
_MOST_KEYS = 1_000
_HOLDS = Bucket((kept_as("holds"),))

Made = Sequence[tuple[Plan, Reading]]


def hold_us(hold: Duration | None) -> int:
    """µs, 0 for none. Raises `ConfigError` or `ValueError`."""
    if hold is None:
        return 0
    seconds = as_seconds(hold, "hold")
    if not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST:
        raise ValueError(f"hold is {hold!r:.40}, expected seconds above 0, at most {LONGEST:,}, or None")
    return max(1, round(seconds * 1_000_000))


class Holds:
    """Holds of a limiter. After their end, a call for the key refunds them."""

    def __init__(self, store: object) -> None:
        self.of_key: dict[str, dict[int, Hold]] = {}
        self._earliest: dict[str, int] = {}
        self._now: Callable[[], int] = store.now if isinstance(store, MemoryStore) else _monotonic_us
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self._lock = RLock()

    def add(self, key: str, name: int, hold: Hold) -> None:
        with self._lock:
            if key not in self.of_key and len(self.of_key) >= _MOST_KEYS:
                self._forget(next(iter(self.of_key)))
            hold.ends_at = self._now() + hold.us
            self.of_key.setdefault(key, {})[name] = hold
            self._earliest[key] = min(hold.ends_at, self._earliest.get(key, hold.ends_at))

    def remove(self, key: str, name: int) -> None:
        with self._lock:
            holds_of_key = self.of_key.get(key, {})
            holds_of_key.pop(name, None)
            if not holds_of_key:
                self._forget(key)

    def ended(self, key: str) -> list[Hold]:
        with self._lock:
            now = self._now()
            if now < self._earliest.get(key, 0):
                return []
            kept = tuple(self.of_key.get(key, {}).values())
            self._earliest[key] = min([hold.ends_at for hold in kept if hold.ends_at > now], default=now)
            return [hold for hold in kept if hold.ends_at <= now]

    def _forget(self, key: str) -> None:
        self.of_key.pop(key, None)
        self._earliest.pop(key, None)


def _monotonic_us() -> int:
    return round(waiting.monotonic() * SECOND)


class Hold:
    def __init__(self, charges: Iterable[Charge], us: int, here: Holds | None = None, key: str = "") -> None:
        self._covered = [
            charge._replace(cost=0, enforced=False, max_wait_us=0) for charge in charges if charge.bucket.algorithm.IS_LIMIT
        ]
        self._name = new_slot()
        self._ends_us = 0
        """Unix µs of the store."""
        self.kept_at = 0
        self.us = us
        self.ends_at = 0
        """See `Holds`."""
        self._here = here
        self._key = key
        self._first = Charge(_key(self._covered), _HOLDS, len(self._covered), enforced=False, rule=None)

    @property
    def bucket(self) -> str:
        return self._first.key

    def begins(self) -> None:
        if self._here is not None:
            self._here.add(self._key, self._name, self)

    def is_over(self) -> None:
        if self._here is not None:
            self._here.remove(self._key, self._name)

    def charging(self, plan: Plan) -> Plan:
        return plan._replace(charges=(self._first, *plan.charges))

    def registering(self, made: Made, now: int) -> Plan:
        undone = Plan.adjust([charge for plan, reading in made for charge in full_refund(plan, reading).charges])
        needed = max([_drain_us(reading) for _, reading in made])
        self._ends_us = now + self.us
        action = holds.Action(holds.REGISTER, self._name, self.us, min(needed, MAX_AHEAD), now + holds.BARRED_US)
        return self._acting(action, undone)

    def releasing(self, correction: Plan) -> Plan:
        """End the hold and correct its charges, unless the store has refunded them."""
        return self._acting(holds.Action(holds.RELEASE, self._name, place=self.kept_at), correction)

    def undoing(self, correction: Plan) -> Plan:
        """Correct charges if the hold may have begun. Do nothing if the hold may have ended."""
        return self._acting(holds.Action(holds.UNDO, self._name, latest=self._ends_us), correction)

    def renewing(self) -> Plan:
        return self._acting(holds.Action(holds.RENEW, self._name, self.us, place=self.kept_at), Plan.adjust(()))

    def refunding(self) -> Plan:
        """Refund reservations whose hold has ended. An action on an unknown name does only that."""
        return self._acting(holds.Action(holds.RENEW, new_slot(), self.us), Plan.adjust(()))

    def _acting(self, action: holds.Action, correction: Plan) -> Plan:
        corrected = {(charge.key, charge.bucket.ids): charge for charge in correction.charges}
        covered = [corrected.get((charge.key, charge.bucket.ids), charge) for charge in self._covered]
        first = self._first._replace(adjustment=Adjustment(0, 0, [action], [0]))
        return Plan.adjust([first, *covered])


def state_of(reading: Reading) -> holds.State:
    state: holds.State = reading.buckets[0].before[0]
    return state


def without_hold(reading: Reading) -> Reading:
    return reading._replace(buckets=reading.buckets[1:])


def is_full(state: holds.State, charges: Iterable[Charge]) -> bool:
    return state.held >= holds.most_entries(
        sum([len(charge.bucket.ids) for charge in charges if charge.bucket.algorithm.IS_LIMIT])
    )


def _key(charges: Sequence[Charge]) -> str:
    """Return the key of holds, in the hash slot of the charges.

    A key is for one set of windows, so that all entries have the same form.
    """
    (key, bucket, *_), *_ = charges
    # See `limitgate.limiter.plans.bucket_key`.
    name = key[: (len(key) - len(bucket.suffix) - 3) // 2] if bucket.suffix else key
    windows = repr([charge.bucket.ids for charge in charges]).encode()
    return f"{name}:holds:{blake2b(windows, digest_size=8).hexdigest()}:{{{name}}}"


def _drain_us(reading: Reading) -> int:
    return max(
        [
            charge.bucket.algorithm.ttl_us(state, limit)
            for charge, _, after in reading.buckets
            if after is not None and charge.bucket.algorithm.IS_LIMIT
            for state, limit in zip(after, charge.bucket.limits)
        ],
        default=0,
    )
