"""Makes plans of a limiter's calls from keys and limits. Reads limits that the store keeps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from uuid import uuid4

from limitgate.algorithms import ban
from limitgate.algorithms.gcra import MAX_OWED_US
from limitgate.errors import ConfigError
from limitgate.keys import Key
from limitgate.limits.bucket import MAX_AHEAD, Bucket, Remembered, buckets_of, parts_of
from limitgate.limits.limit import Limit, as_limit, kept_as
from limitgate.limits.plan import Adjustment, Charge, Plan, Verb, check_cost, with_own_costs
from limitgate.limits.template import PlainSpend, PlanTemplate
from limitgate.process import switch
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children
from limitgate.rules.options import check_prefix, check_secret

FRESH = 0.5
"""Seconds."""


@dataclass(frozen=True)
class Configured:
    """Limits that `Limiter.configure` stores under a name: ``limiter.hit("user:42", Configured("orders"))``."""

    name: str


class Configuration(NamedTuple):
    limits: tuple[Limit, ...]
    per_process: bool = False
    kinds: Sequence[str] = ()
    """Units of a budget's limits."""


AnyLimit = Limit | str | Configured | tuple[Limit | str, int]
Limits = tuple[AnyLimit, ...]

_BANS = Bucket((kept_as("ban"),))
_PREPARED = 16
"""Plans up to this cost are cached, because numbers of tokens or bytes rarely repeat."""


class Plans:
    def __init__(self, key_prefix: str, secret: str | None) -> None:
        self.key_prefix: str = check_prefix(key_prefix)
        self.secret: bytes = check_secret(secret)
        self._start = f"{key_prefix}:"
        self._key = Key((), "limiter", secret=self.secret)

    def name(self, key: str) -> str:
        if not isinstance(key, str):
            raise TypeError(f"key is {key!r:.80}, expected text")
        return self._start + self._key.digest(key)

    def ban_key(self, key: str) -> str:
        return _ban_key(self.name(key))

    def config_key(self, name: str) -> str:
        if not isinstance(name, str):
            raise TypeError(f"name is {name!r:.80}, expected text")
        return f"{self._start}configured:{self._key.digest(name)}"

    def budget_key(self, key: str) -> str:
        return f"{self._start}budget:{self._key.digest(key)}"

    @property
    def budgets_key(self) -> str:
        return f"{self._start}budgets"

    def prepared(self, key: str, limits: Limits, cost: int) -> PlainSpend | None:
        """Make a plain plan; None for others and invalid arguments; see `plan`."""
        if type(cost) is not int or cost > _PREPARED or not isinstance(key, str) or switch.null_store is not None:
            return None
        if limits and isinstance(limits[0], Configured):
            return None
        try:
            template = _template(cost, limits)
        except (TypeError, ConfigError):
            return None
        if template is None:
            return None
        name = self.name(key)
        if template.is_of_debts:  # All GCRA windows share one bucket.
            return template.asked((name, _ban_key(name)))
        return template.asked((*[bucket_key(name, bucket) for bucket, *_ in template.buckets], _ban_key(name)))

    def plan(self, verb: Verb, key: str, limits: Limits, cost: int, process: str | None = None) -> Plan:
        """Make a plan. Limits with ``per_process`` have other keys in each process, but share bans."""
        if not limits:
            raise TypeError("no limits given, expected at least one, for example '10/second'")
        name, cost = self.name(key), check_cost(cost)
        given, own = with_own_costs(limits)
        try:
            parts = _parts(given, tuple(own))
        except TypeError:  # Unhashable values aren't limits either.
            parts = parts_of(tuple([as_limit(limit) for limit in given]), own)
        except ConfigError as error:
            raise _in_their_order(key, error) from None
        if verb == "spend":
            check_are_no_slots([bucket for bucket, _ in parts])
        counted = name if process is None else self.name(f"{key}:{process}")
        charges = [
            Charge(bucket_key(counted, bucket), bucket, cost if place is None else own[place], enforced=True, rule=None)
            for bucket, place in parts
        ]
        # `reset` doesn't lift bans.
        if verb != "reset":
            charges.append(_ban_of(name, max(charge.cost for charge in charges)))
        return Plan(tuple(charges), verb)

    def ban(self, key: str, seconds: float | None, *, longer: bool) -> Plan:
        """Lengthen a ban if ``longer``; None is permanent."""
        us, how = ban.microseconds(seconds), ban.MORE if longer else ban.AT_LEAST
        return Plan.adjust([_ban_of(self.name(key), 1)._replace(adjustment=Adjustment(0, 0, [us], [how]))])

    def read_ban(self, key: str) -> Plan:
        return Plan.peek([_ban_of(self.name(key), 1)])

    def pardon(self, key: str) -> Plan:
        return Plan.reset([_ban_of(self.name(key), 1)])


def ahead(plan: Plan, timeout: float | None) -> Plan:
    """Allow turns up to ``timeout`` seconds ahead; None for any time."""
    if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
        raise ValueError(f"timeout is {timeout!r:.40}, expected seconds of at least 0, or None for no bound")
    if timeout == 0:
        return plan
    us = MAX_AHEAD if timeout is None or timeout >= MAX_AHEAD / 1e6 else int(timeout * 1e6)
    charges = []
    for charge in plan.charges:
        bucket = charge.bucket
        if not bucket.algorithm.IS_LIMIT or bucket.refuses_all:
            charges.append(charge)
            continue
        if not bucket.algorithm.CAN_WAIT:
            raise ConfigError(f"{bucket.limits[0]!r} can't book turns, expected another algorithm, or a timeout of 0")
        charges.append(charge._replace(bucket=without_lease(bucket), max_wait_us=min(us, bucket.longest_wait_us)))
    return plan._replace(charges=tuple(charges))


def _in_their_order(key: str, error: ConfigError) -> ConfigError:
    """Explain an error if key and limit were probably swapped."""
    try:
        Limit(key)
    except ConfigError:
        return error
    return ConfigError(f"{error}; the key {key!r:.80} is a limit, expected the key before its limits: 'user:42', {key!r:.80}")


def check_are_no_slots(buckets: Iterable[Bucket]) -> None:
    """Raise `ConfigError` for concurrency limits, because most operations would never release their slots."""
    if any(bucket.has_slots for bucket in buckets):
        raise ConfigError("the slot of a limit 'at once' would never be released here, expected slot(...), peek or reset")


_Parts = tuple[tuple[Bucket, int | None], ...]
_known_parts = Remembered[tuple[Limits, tuple[int, ...]], _Parts]()
_known_templates = Remembered[tuple[int, Limits], PlanTemplate | None]()


def _parts(limits: Limits, costed: tuple[int, ...] = ()) -> _Parts:
    key = limits, costed
    parts = _known_parts.values.get(key)
    if parts is None:
        parts = parts_of(tuple([as_limit(limit) for limit in limits]), costed)
        _known_parts.add(key, parts)
    return parts


def costed(limits: Limits) -> tuple[int, ...]:
    """Return the places of charges that have their own costs, in the order of the limits."""
    given, own = with_own_costs(limits)
    if not own:
        return ()
    places = {limit: charge for charge, (_, limit) in enumerate(_parts(given, tuple(own)))}
    return tuple([places[limit] for limit in own])


def _template(cost: int, limits: Limits) -> PlanTemplate | None:
    key = cost, limits
    template = _known_templates.values.get(key)
    if template is None and key not in _known_templates.values:
        if any(isinstance(limit, tuple) for limit in limits):
            return None
        buckets = [bucket for bucket, _ in _parts(limits)]
        check_are_no_slots(buckets)
        charges = [Charge("", bucket, cost, enforced=True, rule=None) for bucket in buckets]
        with suppress(ValueError):
            template = PlanTemplate([*charges, _ban_of("", cost)])
        _known_templates.add(key, template)
    return template


@lru_cache(maxsize=4096)
def without_lease(bucket: Bucket) -> Bucket:
    """Return the bucket without leases, which can't book turns."""
    if not bucket.lease:
        return bucket
    return Bucket(tuple([limit.leased(0) for limit in bucket.limits]), bucket.ids)


def _ban_of(name: str, cost: int) -> Charge:
    return Charge(_ban_key(name), _BANS, cost, enforced=True, rule=None)


def bucket_key(name: str, bucket: Bucket) -> str:
    """Return the key of a bucket. The buckets of one limiter key share a hash slot, so that turns are booked together."""
    return f"{name}{bucket.suffix}:{{{name}}}" if bucket.suffix else name


def _ban_key(name: str) -> str:
    return f"{name}:ban:{{{name}}}"


def refunded(charge: Charge, cost: int) -> Charge:
    bucket = charge.bucket
    back, _ = bucket.algorithm.refund_amount(bucket.algorithm.initial(0, bucket), bucket, cost, 0)
    return charge._replace(adjustment=Adjustment(0, 0, back, [MAX_OWED_US] * len(back)))


class Known:
    """Limits read from the store. A change applies in other processes within a second."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[Configuration, float]] = {}
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self.process: str = f"{os.getpid()}:{uuid4().hex}"

    def fresh(self, key: str) -> Configuration | None:
        """Return a configuration younger than `FRESH` seconds."""
        configuration, since = self._read.get(key, (None, 0.0))
        return configuration if monotonic() - since < FRESH else None

    def stale(self, key: str) -> Configuration | None:
        return self._read[key][0] if key in self._read else None

    def note(self, key: str, configuration: Configuration | None) -> None:
        if switch.null_store is not None:
            return
        if configuration is None:
            self._read.pop(key, None)
        else:
            self._read[key] = configuration, monotonic()


def encode(limits: Sequence[Limit | str], *, per_process: bool, kinds: Sequence[str] = ()) -> str:
    """Encode limits. Raises `ConfigError` for an invalid limit or a concurrency limit."""
    if any(each.has_slots for each in buckets_of(tuple(map(as_limit, limits)))):
        raise ConfigError("limits 'at once' cannot be stored under a name, expected limits with a period")
    text = {"limits": [as_limit(limit).given for limit in limits], "per_process": per_process}
    return json.dumps({**text, "kinds": kinds} if kinds else text, separators=(",", ":"))


def decode(text: str) -> Configuration | None:
    try:
        read = json.loads(text)
        limits = tuple([as_limit(limit) for limit in read["limits"]])
        buckets_of(limits)
        return Configuration(limits, bool(read["per_process"]), read.get("kinds", ())) if limits else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
