"""Limiter operations as flows, shared by `AsyncLimiter` and `Limiter`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from limitgate.algorithms import ban
from limitgate.algorithms.gcra import MAX_OWED_US
from limitgate.errors import ConfigError, StoreError
from limitgate.gate.admission import Receipt, Turn
from limitgate.gate.flow import ConfigFlow, Flow
from limitgate.gate.slot_keeper import SlotKeeper
from limitgate.keys import Key
from limitgate.limiter.bookings import Bookings
from limitgate.limiter.holding import Hold, without_hold
from limitgate.limiter.reservation import ChargedOperation
from limitgate.limiter.rule_bucket import BucketParts, RuleBucketOperations, rule_bucket
from limitgate.limiter.stored_limits import Configuration, Configured, Known, decode, encode
from limitgate.limits.bucket import MAX_AHEAD, Bucket, Remembered, buckets_of, parts_of
from limitgate.limits.decision import SECOND, Decision, decide
from limitgate.limits.limit import Duration, Limit, as_limit, as_seconds, kept_as
from limitgate.limits.plan import (
    Adjustment,
    Charge,
    Plan,
    Reading,
    Source,
    Verb,
    check_cost,
    wait_us,
    with_own_costs,
)
from limitgate.limits.template import PlainSpend, PlanTemplate
from limitgate.messages.text import lacking
from limitgate.observing.counts import LimiterCounts, observe
from limitgate.observing.exporter import Observer, observers_of, store_counts
from limitgate.process import switch, waiting
from limitgate.process.forking import IN_MEMORY, Remade
from limitgate.rules.options import check_secret
from limitgate.stores.base import ConfigRequest, StoredConfig
from limitgate.stores.memory import MemoryStore

AnyLimit = Limit | str | Configured | tuple[Limit | str, int]
"""A limit, or a limit and its own cost."""
Limits = tuple[AnyLimit, ...]

_BANS = Bucket((kept_as("ban"),))
LOOK_AGAIN = 1.0
"""Polling interval of a ban in seconds, because it can be lifted early."""
_ROUNDING = 0.001
"""Seconds that a turn may exceed the timeout: the resolution of timers."""
_PREPARED = 16
"""Highest cost of a hit with a cached plan. Higher costs, such as tokens or bytes, rarely repeat."""
_ATTEMPTS = 64
"""Attempts under contention before `Operations._hitting_up_to` reports that nothing is left."""


_HIT = "limiter.hit('user:42', '5/minute'), whose decision says allowed"
_PEEK = "limiter.peek('user:42', '5/minute'), whose decision has allowed, remaining and windows"
_WAIT = "limiter.wait('user:42', '5/minute')"
_LIMITED = (
    "@limiter.limited('5/minute') above a function, limiter.hit('user:42', '5/minute') in one, @limitgate.limit on an endpoint"
)


@lacking(
    "a limiter",
    {
        "acquire": _WAIT,
        "check": f"{_HIT}; or without a charge {_PEEK}",
        "clear": "limiter.reset('user:42', '5/minute')",
        "exempt": "@limitgate.exempt on an endpoint",
        "get_window_stats": _PEEK,
        "init_app": "limitgate.flask.LimitGate",
        "is_allowed": _HIT,
        "limit": _LIMITED,
        "release": "with limiter.slot('user:42', 20), which releases at the end of the block",
        "shared_limit": _LIMITED,
        "test": _PEEK,
        "try_acquire": _HIT,
        "unban": "limiter.pardon('user:42')",
    },
)
class Operations(Remade):
    """Plans of a limiter's calls, and decisions from the store's readings."""

    def __init__(
        self,
        timeout: Duration,
        key_prefix: str,
        secret: str | None = None,
        ipv6_prefix: int = 64,
        observers: Iterable[str | Observer] = (),
    ) -> None:
        timeout = as_seconds(timeout, "timeout")
        if not isinstance(timeout, int | float) or not 0 < timeout <= 60:
            raise ValueError(f"timeout is {timeout!r:.40}, expected seconds above 0, at most 60")
        if not 32 <= ipv6_prefix <= 128:
            raise ConfigError(f"ipv6_prefix is {ipv6_prefix!r:.40}, expected 32 to 128")
        self._timeout = timeout
        self._prefix = f"{key_prefix}:"
        self._secret = check_secret(secret)
        self._ipv6_prefix = ipv6_prefix
        self._key = Key((), "limiter", secret=self._secret)
        self._known = Known()
        self._observers = observers_of(observers)
        self._figures = LimiterCounts() if self._observers else None

    _store: object
    _owns_store: bool
    _bookings: Bookings

    @property
    def state_here(self) -> str:
        """State that a copy lacks: the buckets of a memory store that this limiter opened."""
        return IN_MEMORY if self._owns_store and isinstance(self._store, MemoryStore) else ""

    def _observe(self, store: object, slot_keeper: SlotKeeper) -> None:
        if self._figures is not None:
            self._figures.look_at(slot_keeper)
            observe(self._observers, (self._figures, self), (store_counts(store), store))

    def _count(self, decision: Decision, source: Source) -> None:
        if self._figures is not None:
            self._figures.decided(decision, source)

    def _count_failure(self) -> None:
        if self._figures is not None:
            self._figures.failed()

    def ban_key(self, key: str) -> str:
        """Return the store key of the ban of a limiter's key."""
        return _ban_key(self._name(key))

    def _rule_bucket(self, rule: object, name: str | None, parts: BucketParts) -> RuleBucketOperations:
        return rule_bucket(
            rule,
            name,
            parts,
            timeout=self._timeout,
            key_prefix=self._prefix.removesuffix(":"),
            secret=self._secret,
            ipv6_prefix=self._ipv6_prefix,
        )

    def _prepared(self, key: str, limits: Limits, cost: int) -> PlainSpend | None:
        """Return None for other plans and invalid arguments, which `_deciding` handles."""
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
        name = self._name(key)
        if template.is_of_debts:  # All GCRA windows share one bucket.
            return template.asked((name, _ban_key(name)))
        return template.asked((*[bucket_key(name, bucket) for bucket, *_ in template.buckets], _ban_key(name)))

    def _spending(self, plan: Plan) -> Flow[Reading]:
        try:
            reading: Reading = yield plan, self._timeout
        except StoreError:
            self._count_failure()
            raise
        return reading

    def _counted(self, decision: Decision, reading: Reading) -> Decision:
        self._count(decision, reading.source)
        return decision

    def _deciding(self, verb: Verb, key: str, limits: Limits, cost: int) -> ConfigFlow[Decision]:
        plan = yield from self._planned(verb, key, limits, cost)
        if verb != "spend":
            return decide(plan, (yield plan, self._timeout))
        reading = yield from self._spending(plan)
        return self._counted(decide(plan, reading), reading)

    def _reserving(self, key: str, limits: Limits, cost: int, held_us: int = 0) -> ConfigFlow[ChargedOperation]:
        plan = yield from self._planned("spend", key, limits, cost)
        operation = yield from self._taking(plan, limits, held_us)
        self._count(operation.decision, operation.source)
        return operation

    def _refunding(self, key: str, limits: Limits, cost: int) -> ConfigFlow[Decision]:
        check_cost(cost)
        plan = yield from self._planned("peek", key, limits, 1)
        _check_are_no_slots(charge.bucket for charge in plan.charges)
        costed = _costed(limits)
        charges = [
            _refunded(charge, charge.cost if place in costed else cost) if charge.bucket.algorithm.IS_LIMIT else charge
            for place, charge in enumerate(plan.charges)
        ]
        plan = Plan.adjust(charges)
        return decide(plan, (yield plan, self._timeout))

    def _hitting_up_to(self, key: str, limits: Limits, cost: int) -> ConfigFlow[Decision]:
        """Several attempts under contention."""
        if _costed(limits):
            raise ConfigError(f"{limits!r:.80} have their own costs, expected hit or reserve, or limits without own costs")
        for _ in range(_ATTEMPTS):
            plan = yield from self._planned("spend", key, limits, cost)
            reading = yield from self._spending(plan)
            decision = decide(plan, reading)
            if decision.allowed or cost == 1:
                break
            cost = max(1, min(cost - 1, decision.remaining))
        return self._counted(decision, reading)

    def _booking(
        self, key: str, limits: Limits, cost: int, timeout: float | None, held_us: int = 0
    ) -> ConfigFlow[tuple[ChargedOperation, tuple[Receipt, ...], Turn | None]]:
        """Return the operation, its charges, and the turn, None if it is now."""
        began = waiting.monotonic()
        plan = self._ahead((yield from self._planned("spend", key, limits, cost)), timeout)
        operation = yield from self._taking(plan, limits, held_us)
        charged, turn = operation.turn()
        if timeout is not None and turn is not None and turn.due_at - began - _ROUNDING > timeout:
            delay = operation.decision.delay
            yield from operation.giving_back([*charged, *turn.charged])
            operation.decision = replace(operation.decision, allowed=False, granted=0, delay=0.0, retry_after=delay)
            turn = None
        return operation, charged, turn

    def _taking(self, plan: Plan, limits: Limits, held_us: int = 0) -> Flow[ChargedOperation]:
        hold = None
        if held_us:
            plan = plan._replace(charges=tuple([each._replace(bucket=_without_lease(each.bucket)) for each in plan.charges]))
            hold = Hold(plan.charges, held_us)
            reading = without_hold((yield from self._spending(hold.charging(plan))))
        else:
            reading = yield from self._spending(plan)
        return ChargedOperation(
            decide(plan, reading),
            plan,
            reading,
            timeout=self._timeout,
            costed=_costed(limits),
            bookings=self._bookings,
            hold=hold,
        )

    def _banning(self, key: str, seconds: Duration | None, *, longer: bool = False) -> Flow[Decision]:
        if longer and seconds is None:
            raise ValueError("seconds is None, expected the seconds to add; ban(key) bans permanently")
        us = ban.microseconds(as_seconds(seconds, "seconds"))
        return (yield from self._banned(key, us, ban.MORE if longer else ban.AT_LEAST))

    def _pardoning(self, key: str) -> Flow[None]:
        yield Plan.reset([_ban_of(self._name(key), 1)]), self._timeout

    def _banned(self, key: str, us: int = 0, how: int = ban.AT_LEAST) -> Flow[Decision]:
        charge = _ban_of(self._name(key), 1)
        plan = Plan.adjust([charge._replace(adjustment=Adjustment(0, 0, [us], [how]))]) if us else Plan.peek([charge])
        decision = decide(plan, (yield plan, self._timeout))
        # A ban has no count.
        return replace(decision, remaining=min(decision.remaining, decision.limit))

    def _configuring(
        self, name: str, limits: Sequence[Limit | str], *, per_process: bool, replace: bool
    ) -> ConfigFlow[Configuration]:
        """Keep existing limits unless ``replace``; return the current limits."""
        if not limits:
            raise TypeError("no limits given, expected at least one, for example '100/second'")
        if any(each.has_slots for each in buckets_of(tuple(map(as_limit, limits)))):
            raise ConfigError("places for what is under way at once cannot be kept under a name, expected limits with a period")
        key, text = self._config_key(name), encode(limits, per_process=per_process)
        stored: StoredConfig = yield ConfigRequest(key, text, None if replace else 0), self._timeout
        return self._note(name, stored)

    def _reading(self, name: str) -> ConfigFlow[Configuration | None]:
        key = self._config_key(name)
        stored: StoredConfig = yield ConfigRequest(key), self._timeout
        if stored.text is None:
            self._known.note(key, None)
            return None
        return self._note(name, stored)

    def _note(self, name: str, stored: StoredConfig) -> Configuration:
        configuration = decode(stored.text or "")
        if configuration is None:
            raise StoreError(
                f"the limits that the store keeps under {name!r:.80} cannot be read, expected those of configure", "reply"
            )
        self._known.note(self._config_key(name), configuration)
        return configuration

    def _lookup(self, name: str) -> ConfigFlow[Configuration]:
        """Return a configuration up to `FRESH` seconds old, or the last known one if the store fails."""
        key = self._config_key(name)
        if switch.null_store is not None:
            return self._known.stale(key) or Configuration((as_limit("1/second"),))
        known = self._known.fresh(key)
        if known is None:
            try:
                known = yield from self._reading(name)
            except StoreError:
                known = self._known.stale(key)
                if known is None:
                    raise
        if known is None:
            raise ConfigError(f"nothing is configured under {name!r:.80}, expected limits: call configure first")
        return known

    def _config_key(self, name: str) -> str:
        if not isinstance(name, str):
            raise TypeError(f"name is {name!r:.80}, expected text")
        return f"{self._prefix}configured:{self._key.digest(name)}"

    def _planned(self, verb: Verb, key: str, limits: Limits, cost: int) -> ConfigFlow[Plan]:
        for limit in limits:
            if isinstance(limit, Configured):
                if len(limits) > 1:
                    raise ConfigError(
                        f"{limit!r} stands beside other limits, expected it alone: configure all of them together"
                    )
                stored = yield from self._lookup(limit.name)
                return self._plan(verb, key, stored.limits, cost, self._known.process if stored.per_process else None)
        return self._plan(verb, key, limits, cost)

    def validate(self, key: str, *limits: AnyLimit, cost: int = 1, timeout: Duration | None = 0) -> None:
        """Raise the errors of `hit`, or of `wait` with a ``timeout`` other than 0. No store call."""
        if any(isinstance(limit, Configured) for limit in limits):
            limits = ("1/second",)
        self._ahead(self._plan("spend", key, limits, cost), as_seconds(timeout, "timeout"))

    def _ahead(self, plan: Plan, timeout: float | None) -> Plan:
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            raise ValueError(f"timeout is {timeout!r:.40}, expected seconds of at least 0, or None for as long as it takes")
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
                raise ConfigError(
                    f"{bucket.limits[0]!r} books no turns to wait for, expected another algorithm, or a timeout of 0"
                )
            charges.append(charge._replace(bucket=_without_lease(bucket), max_wait_us=min(us, bucket.longest_wait_us)))
        return plan._replace(charges=tuple(charges))

    def _plan(self, verb: Verb, key: str, limits: Limits, cost: int, process: str | None = None) -> Plan:
        """A process with its own count has its own keys; bans are shared by all processes."""
        if not limits:
            raise TypeError("no limits given, expected at least one, for example '10/second'")
        name, cost = self._name(key), check_cost(cost)
        given, own = with_own_costs(limits)
        try:
            parts = _parts(given, tuple(own))
        except TypeError:  # Unhashable values aren't limits either.
            parts = parts_of(tuple([as_limit(limit) for limit in given]), own)
        except ConfigError as error:
            raise _in_their_order(key, error) from None
        if verb == "spend":
            _check_are_no_slots([bucket for bucket, _ in parts])
        counted = name if process is None else self._name(f"{key}:{process}")
        charges = [
            Charge(bucket_key(counted, bucket), bucket, cost if place is None else own[place], enforced=True, rule=None)
            for bucket, place in parts
        ]
        # `reset` doesn't lift bans.
        if verb != "reset":
            charges.append(_ban_of(name, max(charge.cost for charge in charges)))
        return Plan(tuple(charges), verb)

    def _name(self, key: str) -> str:
        if not isinstance(key, str):
            raise TypeError(f"key is {key!r:.80}, expected text")
        return self._prefix + self._key.digest(key)


def seconds_left(timeout: float | None, began: float) -> float | None:
    """``began`` is in monotonic seconds. None is unbounded."""
    if timeout is None or timeout >= MAX_AHEAD / 1e6:
        return None
    return max(0.0, timeout - (waiting.monotonic() - began))


def ask_again_in(decision: Decision, left: float | None) -> float:
    """Seconds until the next attempt to book a turn; 0 if a turn was granted or the timeout is too short."""
    refused = [(charge, states) for charge, states, after in decision.evidence if after is None and charge.enforced]
    waits = [wait_us(charge, states) for charge, states in refused]
    if decision.allowed or not waits:
        return 0.0
    longest = max([math.inf if wait is None else wait / SECOND for wait in waits])
    is_in_time = longest < math.inf if left is None else longest <= left + _ROUNDING
    return min(decision.retry_after, LOOK_AGAIN) if is_in_time else 0.0


def _in_their_order(key: str, error: ConfigError) -> ConfigError:
    """Adapt the error about an invalid limit if the key and the limit are swapped."""
    try:
        Limit(key)
    except ConfigError:
        return error
    return ConfigError(f"{error}; the key {key!r:.80} is one, expected the key before its limits: 'user:42', {key!r:.80}")


def _check_are_no_slots(buckets: Iterable[Bucket]) -> None:
    """Raise `ConfigError` for concurrency limits, whose slots most operations would never release."""
    if any(bucket.has_slots for bucket in buckets):
        raise ConfigError("nobody would give back what is 'at once', expected slot(...) for that, or peek and reset")


_Parts = tuple[tuple[Bucket, int | None], ...]
_known_parts = Remembered[tuple[Limits, tuple[int, ...]], _Parts]()
_known_templates = Remembered[tuple[int, Limits], PlanTemplate | None]()


def _parts(limits: Limits, costed: tuple[int, ...] = ()) -> _Parts:
    """Return the buckets of limits without costs, see `parts_of`."""
    key = limits, costed
    parts = _known_parts.values.get(key)
    if parts is None:
        parts = parts_of(tuple([as_limit(limit) for limit in limits]), costed)
        _known_parts.add(key, parts)
    return parts


def _costed(limits: Limits) -> tuple[int, ...]:
    """Return the places of the charges whose limits have their own cost, in the order of the limits."""
    given, own = with_own_costs(limits)
    if not own:
        return ()
    places = {limit: charge for charge, (_, limit) in enumerate(_parts(given, tuple(own)))}
    return tuple([places[limit] for limit in own])


def _template(cost: int, limits: Limits) -> PlanTemplate | None:
    """None if it isn't plain. Raises `ConfigError` for an invalid limit."""
    key = cost, limits
    template = _known_templates.values.get(key)
    if template is None and key not in _known_templates.values:
        if any(isinstance(limit, tuple) for limit in limits):
            return None
        buckets = [bucket for bucket, _ in _parts(limits)]
        _check_are_no_slots(buckets)
        charges = [Charge("", bucket, cost, enforced=True, rule=None) for bucket in buckets]
        with suppress(ValueError):
            template = PlanTemplate([*charges, _ban_of("", cost)])
        _known_templates.add(key, template)
    return template


@lru_cache(maxsize=4096)
def _without_lease(bucket: Bucket) -> Bucket:
    """Leased requests can't book turns."""
    if not bucket.lease:
        return bucket
    return Bucket(tuple([limit.leased(0) for limit in bucket.limits]), bucket.ids)


def _ban_of(name: str, cost: int) -> Charge:
    return Charge(_ban_key(name), _BANS, cost, enforced=True, rule=None)


def bucket_key(name: str, bucket: Bucket) -> str:
    """Hash slot of the limiter key, so that its buckets book turns together."""
    return f"{name}{bucket.suffix}:{{{name}}}" if bucket.suffix else name


def _ban_key(name: str) -> str:
    return f"{name}:ban:{{{name}}}"


def _refunded(charge: Charge, cost: int) -> Charge:
    """Return the adjustment that refunds ``cost`` requests, whenever they were charged."""
    bucket = charge.bucket
    back, _ = bucket.algorithm.refund_amount(bucket.algorithm.initial(0, bucket), bucket, cost, 0)
    return charge._replace(adjustment=Adjustment(0, 0, back, [MAX_OWED_US] * len(back)))
