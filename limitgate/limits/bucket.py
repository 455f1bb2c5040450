"""Groups limits into buckets, with reserves by priority, and caches derived values."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache, reduce
from random import random
from typing import Any, Final, Generic, Literal, TypeGuard, TypeVar
from weakref import WeakValueDictionary

from limitgate.algorithms import ALGORITHMS, STORED_AS, ban, gcra
from limitgate.algorithms.base import Algorithm, Load
from limitgate.errors import ConfigError
from limitgate.limits.limit import Limit, as_limit, check_months

LONGEST_PREFIX = 64
MAX_WINDOWS = 64
"""Maximum of windows, because each request checks all of them, also in Redis."""

MAX_AHEAD = 2**51
"""Maximum wait in µs (71 years)."""
MAX_LOAD = 5_000
"""µs in Redis per plan, because other clients wait."""
LEASE_SPARE_US = 1_002_000
"""µs of a lease that are never refunded: a lease lasts a second, and clocks differ."""
BUCKET = Load(6, 3, 2)


class Bucket:
    """Limits that are checked together. Each limit has a number that identifies its window.

    GCRA limits share a bucket; other limits have their own. The number encodes period, algorithm and position among equal ones,
    so a changed count or burst keeps usage. Raises `ConfigError` if only some limits have a lease.
    """

    __slots__ = (
        "__weakref__",
        "_strictest",
        "algorithm",
        "borrow",
        "capacities",
        "counts",
        "facts",
        "has_slots",
        "ids",
        "is_dated",
        "lease",
        "limits",
        "load",
        "longest_wait_us",
        "refuses_all",
        "suffix",
        "weights",
    )

    def __init__(self, limits: tuple[Limit, ...], ids: tuple[int, ...] | None = None, strictest: Bucket | None = None) -> None:
        self.limits: tuple[Limit, ...] = limits
        self.ids: tuple[int, ...] = _numbered(limits) if ids is None else ids
        self.counts: tuple[int, ...] = tuple([limit.count for limit in limits])
        self.weights: tuple[int, ...] = tuple([limit.period_us for limit in limits])
        self.capacities: tuple[int, ...] = tuple([limit.capacity for limit in limits])
        """Ticks of a full bucket."""
        self.lease: int = min([limit.lease for limit in limits])
        self.borrow: bool = any(limit.borrow for limit in limits)
        self.algorithm: Algorithm = _common_algorithm(limits)
        self.facts: int = self.algorithm.REPLY_FIELDS * len(limits)
        self.load: Load = _load(tuple(map(self.algorithm.load, limits)))
        turns = self.algorithm.MAX_TURNS
        waits = [limit.period_us * max(1, turns // limit.count) for limit in limits if turns]
        self.longest_wait_us: int = min([MAX_AHEAD, *waits])
        """Maximum time until a turn, in µs."""
        self.is_dated: bool = any(map(self.algorithm.date, limits))
        self.has_slots: bool = self.algorithm is ALGORITHMS["concurrency"]
        self.refuses_all: bool = any(not limit.count for limit in limits)
        self.suffix: str = "" if self.algorithm is gcra else f":{self.ids[0]:x}"
        self._strictest = strictest

    @property
    def strictest(self) -> Bucket:
        """The bucket of the lowest priority. A store must remember all its refusals."""
        # Avoids a reference cycle.
        return self._strictest or self

    def __deepcopy__(self, memo: object) -> Bucket:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Bucket, (self.limits, self.ids, self._strictest)

    def less(self, kept: Sequence[int], strictest: Bucket | None = None) -> Bucket:
        return Bucket(tuple([limit.less(many) for limit, many in zip(self.limits, kept)]), self.ids, strictest)

    def share(self, processes: int, cost: int = 1) -> Bucket:
        if processes == 1:
            return self
        share = _share(self, processes, 1)
        return share if all(cost <= limit.most for limit in share.limits) else _share(self, processes, cost)


@lru_cache(maxsize=64)
def _load(windows: tuple[Load, ...]) -> Load:
    return reduce(Load.plus, windows, BUCKET)


@lru_cache(maxsize=4096)
def _share(bucket: Bucket, processes: int, cost: int) -> Bucket:
    strictest = None if bucket._strictest is None else bucket._strictest.share(processes, cost)  # noqa: SLF001 - same class
    return Bucket(tuple([limit.share(processes, cost) for limit in bucket.limits]), bucket.ids, strictest)


@lru_cache(maxsize=4096)
def banned(bucket: Bucket) -> Bucket:
    under_ban = Bucket(bucket.limits, bucket.ids, bucket.strictest)
    under_ban.algorithm, under_ban.has_slots, under_ban.lease = ban, False, 0
    return under_ban


@lru_cache(maxsize=4096)
def bucket_of(*limits: Limit | str) -> Bucket:
    """Return the cached bucket of these limits."""
    return Bucket(tuple(as_limit(limit) for limit in limits))


_in_use: WeakValueDictionary[tuple[tuple[Limit, ...], tuple[int, ...]], Bucket] = WeakValueDictionary()
"""Equal buckets are the same object."""


def buckets_of(limits: tuple[Limit, ...]) -> tuple[Bucket, ...]:
    """Group limits into buckets. Raises `ConfigError` for too many limits, or beyond `MAX_LOAD`.

    Buckets in use are the same objects, so that caches and leases survive a reload.
    """
    return tuple([bucket for bucket, _ in parts_of(limits, ())])


def parts_of(limits: tuple[Limit, ...], costed: Collection[int]) -> tuple[tuple[Bucket, int | None], ...]:
    """Group limits like `buckets_of`. A limit whose place is in ``costed`` gets its own bucket, returned with the place.

    Buckets of the same key are parts of one stored bucket.
    """
    together: dict[tuple[int, int | None], list[int]] = {}
    ids = _numbered(limits)
    for place, limit in enumerate(limits):
        kind = 0 if ALGORITHMS[limit.algorithm] is gcra else ids[place]
        together.setdefault((kind, place if place in costed else None), []).append(place)
    if len(together) == 1:
        buckets = [_bucket(limits, ids)]
    else:
        buckets = [_bucket(tuple([limits[n] for n in each]), tuple([ids[n] for n in each])) for each in together.values()]
    load = sum([sum(bucket.load) for bucket in buckets])
    if load > MAX_LOAD:
        raise ConfigError(
            f"{len(limits)} limits that are checked together may occupy Redis for {load:,.0f} µs, expected at most "
            f"{MAX_LOAD:,}: fewer of them, or lower counts of a sliding_log or of 'at once'"
        )
    return tuple([(bucket, place) for bucket, (_, place) in zip(buckets, together)])


def _bucket(limits: tuple[Limit, ...], ids: tuple[int, ...]) -> Bucket:
    bucket = _in_use.get((limits, ids))
    return _in_use.setdefault((limits, ids), Bucket(limits, ids)) if bucket is None else bucket


def _numbered(limits: tuple[Limit, ...]) -> tuple[int, ...]:
    places: dict[tuple[int, str, int], int] = {}
    ids = []
    for place, limit in enumerate(limits):
        check_months(limit, (place,))
        kind = limit.period, limit.algorithm, limit.series
        ids.append(limit.period << 16 | STORED_AS[limit.algorithm] << 8 | limit.series * MAX_WINDOWS + places.get(kind, 0))
        places[kind] = places.get(kind, 0) + 1
    if len(limits) > MAX_WINDOWS:
        raise ConfigError(f"{len(limits)} limits are checked together, expected at most {MAX_WINDOWS}")
    passing = [limit for limit in limits if limit.count]
    leased = [bool(limit.lease) for limit in passing]
    if any(leased) and not all(leased):
        names = " and ".join([f"{limit} {'has' if limit.lease else 'has no'} lease" for limit in passing])
        raise ConfigError(f"{names}, expected one for all limits that are checked together or for none")
    return tuple(ids)


def _common_algorithm(limits: tuple[Limit, ...]) -> Algorithm:
    algorithm = ALGORITHMS[limits[0].algorithm] if limits else gcra
    if (algorithm is not gcra and len(limits) > 1) or any(ALGORITHMS[limit.algorithm] is not algorithm for limit in limits):
        raise ValueError(f"{', '.join(map(repr, limits))} cannot share a bucket, expected limits of GCRA or a single one")
    return algorithm


Priority = Literal["high", "normal", "low"]

NORMAL: Final[Priority] = "normal"
RESERVES: Final[Mapping[Priority, int]] = {"high": 0, "normal": 1, "low": 2}
"""Number of reserves that each priority must leave free."""
MAX_RESERVE = Fraction(49, 100)
"""Maximum of a reserve, so that low priority has room."""

_PERCENT = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%\s*", re.ASCII)


def is_priority(value: object) -> TypeGuard[Priority]:
    return isinstance(value, str) and value in RESERVES


def share_of(value: object) -> Fraction:
    """Parse ``20%`` or 0.2 exactly. Raises `ConfigError` outside of 0 to 49 %."""
    share = None
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
        share = Fraction(match[1]) / 100
    elif isinstance(value, float) and math.isfinite(value):
        share = Fraction(repr(value))
    elif isinstance(value, Fraction):
        share = value
    if share is None or not 0 < share <= MAX_RESERVE:
        raise ConfigError(f"{value!r:.80} is not a reserve, expected a share above 0 and up to 49 %, such as '20%' or 0.2")
    return share


def graded(buckets: tuple[Bucket, ...], reserve: Fraction) -> dict[Priority, tuple[Bucket, ...]]:
    """Return the buckets of each priority, with reserves rounded up. Raises `ConfigError` if no room is left."""
    kept = [[math.ceil(reserve * limit.burst) for limit in bucket.limits] for bucket in buckets]
    low = [bucket.less([2 * each for each in much]) for bucket, much in zip(buckets, kept)]
    found: dict[Priority, tuple[Bucket, ...]] = {}
    for priority, times in RESERVES.items():
        rooms = zip(buckets, kept, low)
        found[priority] = tuple([bucket.less([times * each for each in much], least) for bucket, much, least in rooms])
    return found


def percent(share: Fraction) -> str:
    return f"{float(share * 100):g}%"


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST_REMEMBERED = 1024
"""Maximum of entries, because a full garbage collection visits all of them."""
_ADMITTED = 8
"""A full cache adds one of this many new values."""


class Remembered(Generic[K, V]):
    """A cache of `MOST_REMEMBERED` values that adds few new ones if full, and evicts at random.

    With LRU or FIFO, cyclic requests for slightly too many keys would always miss, and each miss would make garbage.
    """

    __slots__ = ("_keys", "values")

    def __init__(self) -> None:
        self.values: Final[dict[K, V]] = {}
        self._keys: list[K] = []

    def add(self, key: K, value: V) -> None:
        """Add a value. A full cache ignores most new ones."""
        if len(self._keys) < MOST_REMEMBERED:
            self._keys.append(key)
        else:
            place = int(random() * MOST_REMEMBERED * _ADMITTED)  # noqa: S311 - no cryptographic use
            if place >= MOST_REMEMBERED:
                return
            self.values.pop(self._keys[place], None)
            self._keys[place] = key
        self.values[key] = value
        if len(self.values) > MOST_REMEMBERED:
            with suppress(RuntimeError):
                self.values.pop(next(iter(self.values)), None)
