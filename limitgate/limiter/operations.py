"""Limiter operations as flows, shared by `AsyncLimiter` and `Limiter`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from limitgate.errors import ConfigError, StoreError, check_switches
from limitgate.gate.admission import Receipt, Turn
from limitgate.gate.flow import ConfigFlow, Flow
from limitgate.limiter.bookings import Bookings
from limitgate.limiter.holding import Hold, Holds, without_hold
from limitgate.limiter.plans import (
    AnyLimit,
    Configuration,
    Configured,
    Known,
    Limits,
    Plans,
    ahead,
    check_are_no_slots,
    costed,
    decode,
    encode,
    refunded,
    without_lease,
)
from limitgate.limiter.reservation import ChargedOperation
from limitgate.limiter.rule_bucket import BucketParts, RuleBucketOperations, rule_bucket
from limitgate.limits.decision import Decision, decide
from limitgate.limits.limit import Duration, Limit, as_limit, as_seconds, store_timeout
from limitgate.limits.plan import Plan, Reading, Source, Verb, check_cost
from limitgate.messages.text import lacking
from limitgate.observing.counts import Held, LimiterCounts, observe
from limitgate.observing.exporter import Observer, observers_of, store_counts
from limitgate.process import switch, waiting
from limitgate.process.forking import IN_MEMORY, Remade
from limitgate.rules.callers import API_KEY_HEADER
from limitgate.stores.base import ConfigRequest, StoredConfig
from limitgate.stores.memory import MemoryStore

ROUNDING = 0.001
"""Seconds by which a turn may exceed the timeout, because timers are inexact."""
_ATTEMPTS = 64
"""Number of attempts under contention."""


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
    def __init__(
        self,
        timeout: Duration,
        key_prefix: str,
        secret: str | None,
        ipv6_prefix: int,
        observers: Iterable[str | Observer],
    ) -> None:
        if not 32 <= ipv6_prefix <= 128:
            raise ConfigError(f"ipv6_prefix is {ipv6_prefix!r:.40}, expected 32 to 128")
        self._timeout: float = store_timeout(timeout)
        self._plans = Plans(key_prefix, secret)
        self._ipv6_prefix = ipv6_prefix
        self._known = Known()
        self._observers = observers_of(observers)
        self._figures = LimiterCounts() if self._observers else None

    _store: object
    _owns_store: bool
    _bookings: Bookings
    _holds: Holds

    @property
    def observers(self) -> tuple[Observer, ...]:
        return self._observers

    @property
    def state_here(self) -> str:
        """Label of buckets in memory, if this limiter opened the store."""
        return IN_MEMORY if self._owns_store and isinstance(self._store, MemoryStore) else ""

    def _observe(self, store: object, slot_keeper: Held) -> None:
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
        return self._plans.ban_key(key)

    def _rule_bucket(self, rule: object, name: str | None, parts: BucketParts) -> RuleBucketOperations:
        return rule_bucket(
            rule,
            name,
            parts,
            timeout=self._timeout,
            key_prefix=self._plans.key_prefix,
            secret=self._plans.secret,
            ipv6_prefix=self._ipv6_prefix,
            api_key_header=API_KEY_HEADER,
        )

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
        operation = yield from self._taking(key, plan, limits, held_us)
        self._count(operation.decision, operation.source)
        return operation

    def _refunding(self, key: str, limits: Limits, cost: int) -> ConfigFlow[Decision]:
        check_cost(cost)
        plan = yield from self._planned("peek", key, limits, 1)
        check_are_no_slots(charge.bucket for charge in plan.charges)
        own = costed(limits)
        charges = [
            refunded(charge, charge.cost if place in own else cost) if charge.bucket.algorithm.IS_LIMIT else charge
            for place, charge in enumerate(plan.charges)
        ]
        plan = Plan.adjust(charges)
        return decide(plan, (yield plan, self._timeout))

    def _hitting_up_to(self, key: str, limits: Limits, cost: int) -> ConfigFlow[Decision]:
        if costed(limits):
            raise ConfigError(
                f"{limits!r:.80} have their own costs, expected limits without costs, or the method hit or reserve"
            )
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
        began = waiting.monotonic()
        plan = ahead((yield from self._planned("spend", key, limits, cost)), timeout)
        operation = yield from self._taking(key, plan, limits, held_us)
        charged, turn = operation.turn()
        if timeout is not None and turn is not None and turn.due_at - began - ROUNDING > timeout:
            delay = operation.decision.delay
            yield from operation.giving_back([*charged, *turn.charged])
            operation.decision = replace(operation.decision, allowed=False, granted=0, delay=0.0, retry_after=delay)
            turn = None
        return operation, charged, turn

    def _taking(self, key: str, plan: Plan, limits: Limits, held_us: int = 0) -> Flow[ChargedOperation]:
        hold = None
        if held_us:
            plan = plan._replace(charges=tuple([each._replace(bucket=without_lease(each.bucket)) for each in plan.charges]))
            hold = Hold(plan.charges, held_us, self._holds, key)
            reading = without_hold((yield from self._spending(hold.charging(plan))))
        else:
            reading = yield from self._spending(plan)
        return ChargedOperation(
            decide(plan, reading),
            plan,
            reading,
            timeout=self._timeout,
            costed=costed(limits),
            bookings=self._bookings,
            hold=hold,
        )

    def _banning(self, key: str, seconds: Duration | None, *, longer: bool = False) -> Flow[Decision]:
        if longer and seconds is None:
            raise ValueError("seconds is None, expected the seconds to add; ban(key) bans permanently")
        return (yield from self._reading_ban(self._plans.ban(key, as_seconds(seconds, "seconds"), longer=longer)))

    def _pardoning(self, key: str) -> Flow[None]:
        yield self._plans.pardon(key), self._timeout

    def _banned(self, key: str) -> Flow[Decision]:
        return (yield from self._reading_ban(self._plans.read_ban(key)))

    def _reading_ban(self, plan: Plan) -> Flow[Decision]:
        decision = decide(plan, (yield plan, self._timeout))
        # A ban has no count.
        return replace(decision, remaining=min(decision.remaining, decision.limit))

    def _configuring(
        self, name: str, limits: Sequence[Limit | str], *, per_process: bool, replace: bool, kinds: Sequence[str] = ()
    ) -> ConfigFlow[Configuration]:
        if not limits:
            raise TypeError("no limits given, expected at least one, for example '100/second'")
        check_switches(per_process=per_process, replace=replace)
        key, text = self._plans.config_key(name), encode(limits, per_process=per_process, kinds=kinds)
        stored: StoredConfig = yield ConfigRequest(key, text, None if replace else 0), self._timeout
        return self._note(name, stored)

    def _reading(self, name: str) -> ConfigFlow[Configuration | None]:
        key = self._plans.config_key(name)
        stored: StoredConfig = yield ConfigRequest(key), self._timeout
        if stored.text is None:
            self._known.note(key, None)
            return None
        return self._note(name, stored)

    def _note(self, name: str, stored: StoredConfig) -> Configuration:
        configuration = decode(stored.text or "")
        if configuration is None:
            raise StoreError(
                f"the limits stored under {name!r:.80} are unreadable, expected limits written by configure", "reply"
            )
        self._known.note(self._plans.config_key(name), configuration)
        return configuration

    def _refunding_ended(self, key: str) -> Flow[None]:
        refunded_buckets = set()
        for hold in self._holds.ended(key):
            if hold.bucket not in refunded_buckets:
                yield hold.refunding(), self._timeout
                refunded_buckets.add(hold.bucket)
            hold.is_over()

    def _lookup(self, name: str) -> ConfigFlow[Configuration]:
        key = self._plans.config_key(name)
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
            raise ConfigError(f"no limits are configured under {name!r:.80}, expected a call of configure first")
        return known

    def _planned(self, verb: Verb, key: str, limits: Limits, cost: int) -> ConfigFlow[Plan]:
        plan = yield from self._planned_alone(verb, key, limits, cost)
        if key in self._holds.of_key:
            yield from self._refunding_ended(key)
        return plan

    def _planned_alone(self, verb: Verb, key: str, limits: Limits, cost: int) -> ConfigFlow[Plan]:
        for limit in limits:
            if isinstance(limit, Configured):
                if len(limits) > 1:
                    raise ConfigError(
                        f"{limit!r} is combined with other limits, expected it alone: configure all of them under one name"
                    )
                stored = yield from self._lookup(limit.name)
                return self._plans.plan(verb, key, stored.limits, cost, self._known.process if stored.per_process else None)
        return self._plans.plan(verb, key, limits, cost)

    def validate(self, key: str, *limits: AnyLimit, cost: int = 1, timeout: Duration | None = 0) -> None:
        """Raise the errors that `hit` or `wait` would raise for these arguments, without a store call."""
        if any(isinstance(limit, Configured) for limit in limits):
            limits = ("1/second",)
        ahead(self._plans.plan("spend", key, limits, cost), as_seconds(timeout, "timeout"))
