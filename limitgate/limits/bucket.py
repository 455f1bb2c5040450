"""The limits of one bucket, checked together: which limits share a bucket, and by what numbers they are known in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any
from weakref import WeakValueDictionary

from limitgate.algorithms import ALGORITHMS, STORED_AS, ban, gcra
from limitgate.algorithms.base import Algorithm, Load
from limitgate.errors import ConfigError
from limitgate.limits.limit import Limit, as_limit, check_months

MAX_WINDOWS = 64
"""Limits in one bucket: every request looks at all of them, in Redis too."""

MAX_AHEAD = 2**51
"""Microseconds (71 years): what is booked no further ahead is remembered to the microsecond."""
MAX_LOAD = 5_000
"""Microseconds that limits which are checked together may cost Redis at most: everybody else waits meanwhile."""
LEASE_SPARE_US = 1_002_000
"""Microseconds of a lease's draining that are not given back: it is used for a second, and clocks differ a little."""
BUCKET = Load(6, 3, 2)
"""Load of a bucket itself, besides its windows."""


class Bucket:
    """The limits of one bucket, checked together, each with the number that names it inside the bucket.

    They are of one algorithm: those of GCRA share a bucket, any other limit has one for itself, see `buckets_of`.
    A window's number holds what tells it from the others of its bucket: its period, its algorithm, and its place among
    those equal in both. Count and burst are left out, so a changed count finds what was owed before. Raises `ConfigError`
    where some limits have a lease and others have none: those would ask Redis about every request all the same.
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
        self.limits = limits
        self.ids = _numbered(limits) if ids is None else ids
        self.counts = tuple([limit.count for limit in limits])
        """Ticks that a microsecond pays back."""
        self.weights = tuple([limit.period_us for limit in limits])
        """Ticks that a request takes."""
        self.capacities = tuple([limit.capacity for limit in limits])
        """Ticks that a full bucket holds."""
        self.lease = min([limit.lease for limit in limits], default=0)
        """Requests that a process may take in advance, 0 for none."""
        self.borrow = any(limit.borrow for limit in limits)
        """True if a request may cost more than there is."""
        self.algorithm: Algorithm = _common_algorithm(limits)
        self.facts = self.algorithm.REPLY_FIELDS * len(limits)
        """Numbers that the script reports of the bucket."""
        self.load = _load(tuple(map(self.algorithm.load, limits)))
        """Cost for Redis, at most."""
        turns = self.algorithm.MAX_TURNS
        waits = [limit.period_us * max(1, turns // limit.count) for limit in limits if turns]
        self.longest_wait_us = min([MAX_AHEAD, *waits])
        """Microseconds that a turn can be booked ahead at most."""
        self.is_dated = any(map(self.algorithm.date, limits))
        """True if the script has to be told about the present date."""
        self.has_slots = self.algorithm is ALGORITHMS["concurrency"]
        """True if these are places for requests in flight, so that a charge has to have a `Charge.slot`."""
        self.refuses_all = any(not limit.count for limit in limits)
        """True for a count of 0: no request that costs anything ever passes."""
        self.suffix = "" if self.algorithm is gcra else f":{self.ids[0]:x}"
        """End of the bucket's key."""
        self._strictest = strictest

    @property
    def strictest(self) -> Bucket:
        """The bucket as callers with the least room find it: a store must not forget a state that refuses them."""
        return self._strictest or self  # not kept, as the cycle would leave each bucket to the garbage collector

    def __deepcopy__(self, memo: object) -> Bucket:
        """Return the bucket itself, as nobody changes it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it is made of, so that rules can be sent to other processes."""
        return Bucket, (self.limits, self.ids, self._strictest)

    def less(self, kept: Sequence[int], strictest: Bucket | None = None) -> Bucket:
        """Return the same windows with so much room less in each, see `Limit.less`; ``strictest`` is the attribute."""
        return Bucket(tuple([limit.less(many) for limit, many in zip(self.limits, kept)]), self.ids, strictest)

    def share(self, processes: int, cost: int = 1) -> Bucket:
        """Return the `Limit.share` of each limit; the same object for all costs that fit into the shares of the bursts."""
        if processes == 1:
            return self
        share = _share(self, processes, 1)
        return share if all(cost <= limit.most for limit in share.limits) else _share(self, processes, cost)


@lru_cache(maxsize=64)
def _load(windows: tuple[Load, ...]) -> Load:
    """Load of a bucket with windows of these loads: of most buckets the same ones."""
    return reduce(Load.plus, windows, BUCKET)


@lru_cache(maxsize=4096)
def _share(bucket: Bucket, processes: int, cost: int) -> Bucket:
    strictest = None if bucket._strictest is None else bucket._strictest.share(processes, cost)  # noqa: SLF001 - it is one of ours
    return Bucket(tuple([limit.share(processes, cost) for limit in bucket.limits]), strictest=strictest)


@lru_cache(maxsize=4096)
def banned(bucket: Bucket) -> Bucket:
    """Return the same windows as they stand under a ban: all that a state says is for how long it lasts, in µs."""
    under_ban = Bucket(bucket.limits, bucket.ids, bucket.strictest)
    under_ban.algorithm, under_ban.has_slots, under_ban.lease = ban, False, 0
    return under_ban


@lru_cache(maxsize=4096)
def bucket_of(*limits: Limit | str) -> Bucket:
    """Return the `Bucket` of limits or their text; cached, since callers repeat the same few."""
    return Bucket(tuple(as_limit(limit) for limit in limits))


_in_use: WeakValueDictionary[tuple[tuple[Limit, ...], tuple[int, ...]], Bucket] = WeakValueDictionary()
"""Buckets by limits and numbers, as long as somebody has them."""


def buckets_of(limits: tuple[Limit, ...]) -> tuple[Bucket, ...]:
    """Divide limits that apply together into buckets, in the order in which their first limits were given.

    Buckets that are in use already are the same objects. A rule that is read again so has the same ones, refusals and leases
    that a process holds of them stay, and the memory store finds what it keeps. Raises `ConfigError` for too many limits, and
    for those that hold Redis up for longer than `MAX_LOAD`.
    """
    together: dict[int, list[int]] = {}
    ids = _numbered(limits)
    for place, limit in enumerate(limits):
        together.setdefault(0 if ALGORITHMS[limit.algorithm] is gcra else ids[place], []).append(place)
    if len(together) == 1:
        buckets = [_bucket(limits, ids)]
    else:
        buckets = [_bucket(tuple([limits[n] for n in each]), tuple([ids[n] for n in each])) for each in together.values()]
    load = sum([sum(bucket.load) for bucket in buckets])
    if load > MAX_LOAD:
        raise ConfigError(
            f"{len(limits)} limits that are to be checked together may hold Redis up for {load:,.0f} µs, expected at most "
            f"{MAX_LOAD:,}: fewer of them, or lower counts of a sliding_log or of 'at once'"
        )
    return tuple(buckets)


def _bucket(limits: tuple[Limit, ...], ids: tuple[int, ...]) -> Bucket:
    """The bucket of some limits with these numbers."""
    bucket = _in_use.get((limits, ids))
    return _in_use.setdefault((limits, ids), Bucket(limits, ids)) if bucket is None else bucket


def _numbered(limits: tuple[Limit, ...]) -> tuple[int, ...]:
    places: dict[tuple[int, str], int] = {}
    ids = []
    for place, limit in enumerate(limits):
        check_months(limit, (place,))
        kind = limit.period, limit.algorithm
        ids.append(limit.period << 16 | STORED_AS[limit.algorithm] << 8 | places.get(kind, 0))
        places[kind] = places.get(kind, 0) + 1
    if len(limits) > MAX_WINDOWS:
        raise ConfigError(f"{len(limits)} limits are to be checked together, expected at most {MAX_WINDOWS}")
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
