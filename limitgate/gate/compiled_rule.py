"""Rules made ready at start: from a subject to the charges of one rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from limitgate.gate.cardinality import CardinalityGuard
from limitgate.gate.identity import Subject
from limitgate.keys import Key, Value, given, overflow
from limitgate.limits.plan import Charge
from limitgate.limits.priority import NORMAL, Priority
from limitgate.rules.rule import Rule

ChargeSpec = tuple[str, int, Priority]
"""What a request asks of a rule: the text of its bucket's key, the cost, and the priority where that matters, else normal."""


class CompiledRule:
    """A rule made ready: its key compiled, its windows at hand."""

    __slots__ = (
        "_ahead",
        "_cost",
        "_is_graded",
        "_is_inventable",
        "_key",
        "_newcomers",
        "_owner",
        "_prefix",
        "enforced",
        "rule",
    )

    def __init__(
        self,
        rule: Rule,
        kind: str,
        *,
        key_prefix: str,
        secret: bytes,
        shadow: bool,
        newcomers: CardinalityGuard | None,
        inventable: Callable[[str], bool],
    ) -> None:
        self.rule = rule
        self._owner = f"{kind} {rule.name}"
        self._key = Key(rule.key, self._owner, rule.path, secret, inventable)
        self._newcomers = newcomers
        self._is_inventable = self._key.is_inventable
        self.enforced = not (shadow or rule.shadow)
        self._prefix = f"{key_prefix}:{rule.name}:"
        self._ahead = rule.ahead
        self._cost = None if callable(rule.cost) else rule.cost
        self._is_graded = rule.reserve is not None

    def spec(self, subject: Subject, values: Sequence[Value] = ()) -> ChargeSpec:
        """What a request of this subject asks of this rule."""
        cost = self.rule.cost_of(subject.request) if self._cost is None else self._cost
        text, is_inventable = self._key.text(subject), self._is_inventable
        if values:
            text += given(values, subject)
            is_inventable = is_inventable or any(value.is_inventable for value in values)
        newcomers = self._newcomers
        if is_inventable and newcomers is not None and not newcomers.know((self._owner, text)):
            text = self._opened(newcomers, text, subject, values)
        return (text, cost, subject.priority) if self._is_graded else (text, cost, NORMAL)

    def charges(self, text: str, cost: int, priority: Priority) -> list[Charge]:
        """The charges for what was asked, one for each bucket."""
        key, binding, name = self._prefix + self._key.digest(text), self.enforced, self.rule.name
        buckets = [(each, min(cost, 1) if each.has_slots else cost) for each in self.rule.buckets_for(priority)]
        return [Charge(key + bucket.suffix, bucket, cost, binding, name, max_wait_us=self._ahead) for bucket, cost in buckets]

    def _opened(self, newcomers: CardinalityGuard, text: str, subject: Subject, values: Sequence[Value]) -> str:
        """The text of a bucket that was not known; of its source's overflow bucket where that has opened too many."""
        bucket = self._owner, text
        is_given = any(value.is_inventable and value.text for value in values)
        if not (self._key.is_invented(subject) or (is_given and not subject.is_real)):
            newcomers.note(bucket)
            return text
        source = subject.address()
        return text if newcomers.open(bucket, source, self.rule.name) else overflow(source)
