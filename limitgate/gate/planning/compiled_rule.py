"""Compiled rules turn a subject into charges and refusal counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from limitgate.algorithms.base import compiled
from limitgate.algorithms.refusals import Amount
from limitgate.errors import ConfigError
from limitgate.fleet.tally import EVERYBODY, Tally
from limitgate.gate.planning.cardinality import CardinalityGuard
from limitgate.gate.planning.identity import Subject
from limitgate.keys import Key, PreparedKey, Value, given, overflow
from limitgate.limits.bucket import NORMAL, Bucket, Priority
from limitgate.limits.limit import Limit, kept_as
from limitgate.limits.plan import REQUESTS, Adjustment, Charge, Plan
from limitgate.messages.text import Names, shown
from limitgate.observing.counts import Counts, RuleSeries
from limitgate.overload.concurrency_limiter import ConcurrencyLimiter
from limitgate.overload.options import Terms
from limitgate.rules.callers import DEFAULT_TIER
from limitgate.rules.options import Ban, LimitsBy
from limitgate.rules.rule import Rule

Kind = Literal["rule", "limit"]


class AdaptiveLimits:
    """A gate's adaptive limits by kind, tier and rule name. They survive reloads. With ``shadow``, requests never wait."""

    def __init__(self, *, shadow: bool = False) -> None:
        self._shadow = shadow
        self._places: dict[tuple[Kind, str, str], ConcurrencyLimiter] = {}

    def of(self, rule: Rule, kind: Kind) -> ConcurrencyLimiter:
        """Return the limit of a rule. Rules with the same name share it, and raise `ConfigError` for different options."""
        name = kind, rule.tier or DEFAULT_TIER, rule.name
        terms = self._terms(rule)
        places = self._places.get(name)
        if places is None:
            # Another thread may have created it.
            places = self._places.setdefault(name, ConcurrencyLimiter(terms))
        # `keep` reconfigures rules of a set.
        if kind == "limit" and places.terms != terms:
            raise ConfigError(
                f"limit {rule.name!r} already has a different adaptive, max_delay or reserve, expected the same on each "
                "@limit of that name, or another name"
            )
        return places

    def keep(self, rules: Iterable[Rule]) -> None:
        """Apply reloaded options; drop removed rules."""
        left = {("rule", rule.tier or DEFAULT_TIER, rule.name): rule for rule in rules if rule.adaptive is not None}
        for name, places in list(self._places.items()):
            if name in left:
                places.reconfigure(self._terms(left[name]))
            elif name[0] == "rule":
                del self._places[name]

    def _terms(self, rule: Rule) -> Terms:
        return rule.terms._replace(max_delay=0.0) if self._shadow else rule.terms


class CompiledRule:
    __slots__ = (
        "_cardinality",
        "_key",
        "_max_wait_us",
        "_owner",
        "_prefix",
        "asks_route",
        "cost",
        "counts",
        "enforced",
        "has_slots",
        "id_name",
        "is_by_outcome",
        "is_conditional",
        "is_decorator",
        "is_graded",
        "is_guarded",
        "limits_by",
        "name",
        "places",
        "priority",
        "row",
        "rule",
        "written",
    )

    def __init__(
        self,
        rule: Rule,
        kind: Kind,
        *,
        key_prefix: str,
        secret: bytes,
        shadow: bool,
        cardinality: CardinalityGuard | None,
        inventable: Callable[[str], bool],
        counts: Counts | None = None,
        adaptive_limits: AdaptiveLimits | None = None,
    ) -> None:
        self.rule: Rule = rule
        self.name: str = rule.name
        self.id_name: str = id_name(rule)
        self.written: Rule = rule
        """The rule as written, without limits from run time."""
        self.is_decorator: bool = kind != "rule"
        self.limits_by: LimitsBy | None = (
            rule.limits_by_body if rule.limits_by is not None and rule.reads_body else rule.limits_by
        )
        self._owner = f"{kind} {rule.name}"
        self._key = Key(rule.key, self._owner, "\n".join(rule.paths), secret, inventable)
        self._cardinality = cardinality
        self.is_guarded: bool = cardinality is not None and self._key.is_inventable
        """True if clients may invent keys."""
        self.enforced: bool = not (shadow or rule.shadow)
        self.counts: Counts | None = counts
        self.row: RuleSeries | None = None if counts is None or rule.exempt else counts.rule(rule)
        self._prefix = f"{key_prefix}:{rule.name}:"
        if rule.ban is not None:
            # Raises for a prefix that is invalid for refusal counts.
            count_key(self._prefix)
        self._max_wait_us = rule.max_wait_us
        self.cost: int | tuple[int, ...] | None = rule.fixed_costs
        """None if it depends on the request."""
        self.is_graded: bool = rule.reserve is not None
        self.places: ConcurrencyLimiter | None = (
            None if rule.adaptive is None or adaptive_limits is None else adaptive_limits.of(rule, kind)
        )
        self.asks_route: bool = self.places is not None or rule.key_asks("path")
        self.priority = rule.priority
        if self.row is not None:
            self.row.is_shadow = not self.enforced
            self.row.adapt(self.places)
        self.is_by_outcome: bool = bool(rule.charge_if) or bool(rule.token_kinds)
        self.is_conditional: bool = rule.is_conditional or rule.reads_body
        """True if more than tier, method and path select the rule."""
        self.has_slots: bool = any(bucket.has_slots for bucket in rule.buckets)

    def named(self, subject: Subject, names: Names) -> str:
        """Return the owner of a bucket, such as ``ip=20….7``; empty if global."""
        parts = self._key.named(subject, (subject.request.given_values or {}).get(self.name, ()))
        return " ".join([f"{label}={text}" for label, value in parts if (text := shown(label, value, names))])

    @property
    def tally(self) -> Tally | None:
        return None if self.counts is None else self.counts.tally

    @property
    def tally_that_defers(self) -> Tally | None:
        return None if self.counts is None or not self.counts.defers else self.counts.tally

    def name_of(self, admission: Any) -> str:
        planner = admission.rules.planner
        subject = planner.subject(admission.request, admission.identified)
        if self._key.may_be_shared and not self.named(subject, "full"):
            return EVERYBODY
        return self.named(subject, planner.names_shown)

    def having_limits(self, limits: Sequence[Limit]) -> CompiledRule:
        """Return this rule with limits from run time. Raises `ConfigError`."""
        limited = CompiledRule.__new__(CompiledRule)
        _copy_slots(self, limited)
        limited.rule = self.rule.having_limits(limits)
        limited.cost = limited.rule.fixed_costs
        limited.has_slots = any(bucket.has_slots for bucket in limited.rule.buckets)
        return limited

    def admitted_charges(self, subject: Subject, values: Sequence[Value]) -> list[Charge]:
        cost = self.rule.costs_of(subject.request) if self.cost is None else self.cost
        key = self.key_of(subject, values)
        if self.is_guarded or (values and self._cardinality is not None and any(value.is_inventable for value in values)):
            key = self.admitted_key(key, subject, values)
        return self.charges(key, cost, subject.priority if self.is_graded else NORMAL)

    def key_of(self, subject: Subject, values: Sequence[Value] = ()) -> str:
        text = self._key.text(subject)
        return self._prefix + self._key.digest(text + given(values, subject) if values else text)

    def charges(self, key: str, cost: int | tuple[int, ...], priority: Priority) -> list[Charge]:
        """Return a charge for each bucket. ``cost`` is a tuple if limits have their own costs."""
        enforced, name, wait = self.enforced, self.rule.name, self._max_wait_us
        if isinstance(cost, tuple):
            buckets = self.rule.buckets_for(priority)
            if kinds := self.rule.token_kinds:
                cost = tuple([_fitting(each, bucket) if kind else each for each, bucket, kind in zip(cost, buckets, kinds)])
            parts = zip(buckets, cost, self.rule.bucket_units, strict=True)
            return [
                Charge(key + bucket.suffix, bucket, _places(bucket, each, unit), enforced, name, None, wait, unit=unit)
                for bucket, each, unit in parts
            ]
        return [
            Charge(key + bucket.suffix, bucket, min(cost, 1) if bucket.has_slots else cost, enforced, name, None, wait)
            for bucket in self.rule.buckets_for(priority)
        ]

    def charges_of(self, subject: Subject, values: Sequence[Value] = ()) -> list[Charge]:
        """Return charges without opening a bucket. An unknown cost is 1."""
        cost = self.cost or (1,) * len(self.rule.bucket_costs) or 1
        return self.charges(self.key_of(subject, values), cost, subject.priority)

    def prepared_key(self, subject: Subject) -> PreparedKey:
        return self._key.prepared(subject, self._prefix)

    def admitted_key(self, key: str, subject: Subject, values: Sequence[Value] = ()) -> str:
        """Return the key, or the overflow bucket."""
        cardinality = self._cardinality
        if cardinality is None or cardinality.know(key):
            return key
        is_given = any(value.is_inventable and value.text for value in values)
        if not (self._key.is_invented(subject) or (is_given and not subject.is_real)):
            cardinality.note(key)
            return key
        source = subject.address()
        return key if cardinality.open(key, source, self.rule.name) else self._prefix + self._key.digest(overflow(source))


def _fitting(cost: int, bucket: Bucket) -> int:
    """Cap estimated tokens at a full bucket, because a request above it would never pass."""
    return max(1, cost) if bucket.refuses_all else min(cost, *[limit.most for limit in bucket.limits])


def _places(bucket: Bucket, cost: int, unit: str) -> int:
    return min(cost, 1) if bucket.has_slots and unit == REQUESTS else cost


def id_name(rule: Rule) -> str:
    """Return a rule's name in ids. It has the tier, because tiers may share names."""
    return rule.name if rule.tier in (None, DEFAULT_TIER) else f"{rule.name} {rule.tier}"


_copy_slots = compiled(
    "\n    ".join(["def copy_slots(source, target):", *[f"target.{name} = source.{name}" for name in CompiledRule.__slots__]]),
    "copy_slots",
)
"""`copy` takes ten times as long."""


_COUNT = Bucket((kept_as("refusals"),))


def count_key(key: str) -> str:
    """Return the key of a bucket's refusal count, in the bucket's hash slot.

    Raises `ConfigError` for a brace outside a hash tag.
    """
    before, brace, rest = key.partition("{")
    tag, closing, _ = rest.partition("}")
    if "}" in before or (brace and not (tag and closing)):
        expected = "expected a key_prefix such as '{shop}', or one without braces"
        raise ConfigError(f"key {key!r:.80} has a brace outside a hash tag, {expected}")
    return f"{key}:refusals" if brace else f"{key}:refusals:{{{key}}}"


def counting(charge: Charge, ban: Ban, refusals: int) -> Plan:
    """Count refusals, and ban after too many.

    The plan reads the bucket twice, before and after the count, because the count may ban the bucket.
    """
    charge = charge._replace(max_wait_us=0, slot=0, adjustment=None)
    amount = Amount(
        refusals,
        ban.after,
        _microseconds(ban.within),
        _microseconds(ban.duration),
        ban.growing,
        _microseconds(ban.most),
        charge,
    )
    return Plan.adjust([charge, _counter(charge)._replace(adjustment=Adjustment(0, 0, [amount], [0])), charge])


def forgetting(charges: Iterable[Charge]) -> Plan:
    return Plan.reset([_counter(charge) for charge in charges])


def _counter(charge: Charge) -> Charge:
    return Charge(count_key(charge.key), _COUNT, 0, enforced=False, rule=charge.rule)


def _microseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e6))
