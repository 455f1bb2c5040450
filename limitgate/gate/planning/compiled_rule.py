"""Rules made ready at start: from a subject to the charges of one rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from limitgate.gate.planning.adaptive_limits import AdaptiveLimits
from limitgate.gate.planning.cardinality import CardinalityGuard
from limitgate.gate.planning.identity import Subject
from limitgate.gate.planning.refusal_count import count_key
from limitgate.keys import Key, PreparedKey, Value, given, overflow
from limitgate.limits.limit import Limit
from limitgate.limits.plan import Charge
from limitgate.limits.priority import NORMAL, Priority
from limitgate.limits.written_out import compiled
from limitgate.messages.text import Names, shown
from limitgate.observing.counts import Counts
from limitgate.rules.callers import DEFAULT_TIER
from limitgate.rules.rule import Rule


class CompiledRule:
    """A rule made ready for one gate: key compiled, buckets at hand."""

    __slots__ = (
        "_cardinality",
        "_cost",
        "_key",
        "_max_wait_us",
        "_owner",
        "_prefix",
        "enforced",
        "has_slots",
        "id_name",
        "is_by_outcome",
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
        kind: Literal["rule", "limit"],
        *,
        key_prefix: str,
        secret: bytes,
        shadow: bool,
        cardinality: CardinalityGuard | None,
        inventable: Callable[[str], bool],
        counts: Counts | None = None,
        adaptive_limits: AdaptiveLimits | None = None,
    ) -> None:
        self.rule = rule
        self.name = rule.name
        self.id_name = id_name(rule)
        """The name by which ids of refusals know it."""
        self.written = rule
        """The rule as it was written, where ``rule`` has other limits."""
        self.is_decorator = kind != "rule"
        self.limits_by = rule.limits_by
        """The callable that gives its limits; None where they are written only."""
        self._owner = f"{kind} {rule.name}"
        self._key = Key(rule.key, self._owner, "\n".join(rule.paths), secret, inventable)
        self._cardinality = cardinality
        self.is_guarded = cardinality is not None and self._key.is_inventable
        """True if its key has to pass `admitted_key`, since clients may make up values of it."""
        self.enforced = not (shadow or rule.shadow)
        self.row = None if counts is None or rule.exempt else counts.rule(rule)
        """Its figures, None without observers."""
        self._prefix = f"{key_prefix}:{rule.name}:"
        if rule.ban is not None:
            count_key(self._prefix)  # raises for a prefix that counts cannot have
        self._max_wait_us = rule.max_wait_us
        self._cost = None if callable(rule.cost) else rule.cost
        self.is_graded = rule.reserve is not None
        """True if its charges depend on the priority of the caller."""
        self.places = None if rule.adaptive is None or adaptive_limits is None else adaptive_limits.of(rule, kind)
        """Places under its adaptive limit; None where it has none, or nobody is in flight."""
        self.priority = rule.priority
        """The priority under its adaptive limit, that of the caller if None."""
        if self.row is not None:
            self.row.adapt(self.places)
        self.is_by_outcome = bool(rule.charge_if)
        """True if it is charged by the outcome."""
        self.has_slots = any(bucket.has_slots for bucket in rule.buckets)
        """True if it takes slots for requests in flight."""

    def named(self, subject: Subject, names: Names) -> str:
        """Name of who is counted in a subject's bucket, for people: ``ip=20….7``; empty where everybody is."""
        parts = [(label, shown(label, value, names)) for label, value in self._key.named(subject)]
        return " ".join([f"{label}={text}" for label, text in parts if text])

    def having_limits(self, limits: Sequence[Limit]) -> CompiledRule:
        """The same with limits that were given at run time. Raises `ConfigError` where the rule cannot have them."""
        limited = CompiledRule.__new__(CompiledRule)
        _copy_slots(self, limited)
        limited.rule = self.rule.having_limits(limits)
        limited.has_slots = any(bucket.has_slots for bucket in limited.rule.buckets)
        return limited

    def admitted_charges(self, subject: Subject, values: Sequence[Value]) -> list[Charge]:
        """The charges of one request by these further parts of the key, from a bucket that may be opened."""
        cost = self.rule.cost_of(subject.request) if self._cost is None else self._cost
        key = self._key_of(subject, values)
        if self.is_guarded or (values and self._cardinality is not None and any(value.is_inventable for value in values)):
            key = self.admitted_key(key, subject, values)
        return self.charges(key, cost, subject.priority if self.is_graded else NORMAL)

    def _key_of(self, subject: Subject, values: Sequence[Value]) -> str:
        text = self._key.text(subject)
        return self._prefix + self._key.digest(text + given(values, subject) if values else text)

    def charges(self, key: str, cost: int, priority: Priority) -> list[Charge]:
        """The charges by a key less the suffixes of buckets, one for each bucket."""
        enforced, name, wait = self.enforced, self.rule.name, self._max_wait_us
        return [
            Charge(key + bucket.suffix, bucket, min(cost, 1) if bucket.has_slots else cost, enforced, name, None, wait)
            for bucket in self.rule.buckets_for(priority)
        ]

    def charges_of(self, subject: Subject, values: Sequence[Value] = ()) -> list[Charge]:
        """The charges of one request, at a cost of 1 where that is worked out for each; whether the bucket is known or not."""
        return self.charges(self._key_of(subject, values), self._cost or 1, subject.priority)

    @property
    def cost(self) -> int | None:
        """What it charges; None if that is worked out for each request."""
        return self._cost

    def prepared_key(self, subject: Subject) -> PreparedKey:
        """Key of this rule for all requests of a subject's tier, method and route."""
        return self._key.prepared(subject, self._prefix)

    def admitted_key(self, key: str, subject: Subject, values: Sequence[Value] = ()) -> str:
        """The key itself if its bucket is known or may be opened, else the key of the overflow bucket of its source."""
        cardinality = self._cardinality
        if cardinality is None or cardinality.know(key):
            return key
        is_given = any(value.is_inventable and value.text for value in values)
        if not (self._key.is_invented(subject) or (is_given and not subject.is_real)):
            cardinality.note(key)
            return key
        source = subject.address()
        return key if cardinality.open(key, source, self.rule.name) else self._prefix + self._key.digest(overflow(source))


def id_name(rule: Rule) -> str:
    """The name by which ids of refusals know a rule: with its tier, unless that is the default, as tiers share names."""
    return rule.name if rule.tier in (None, DEFAULT_TIER) else f"{rule.name} {rule.tier}"


_copy_slots = compiled(
    "\n    ".join(["def copy_slots(source, target):", *[f"target.{name} = source.{name}" for name in CompiledRule.__slots__]]),
    "copy_slots",
)
"""`copy` takes ten times as long, and a loop four times."""
