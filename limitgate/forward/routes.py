"""Routes of a gate that gets requests but no responses."""

from __future__ import annotations

from collections.abc import Iterator

from limitgate.errors import ConfigError
from limitgate.routes import NoRoutes
from limitgate.rules.rule import Rule, RuleSet


class DescribedRoutes(NoRoutes):
    """Knows no routes, so ``path`` in a key is the rule's pattern."""

    def check(self, rules: RuleSet) -> None:
        """Raise `ConfigError` for rules that need a response, a body or messages."""
        every = {id(rule): rule for of_tier in rules.tiers.values() for rule in of_tier}.values()
        mistakes = [mistake for rule in every for mistake in _mistakes(rule)]
        if mistakes:
            raise ConfigError.first_of(mistakes)


def _mistakes(rule: Rule) -> Iterator[ConfigError]:
    needed = {
        "charge_if": rule.charge_if is not None,
        "concurrency": any(bucket.has_slots for bucket in rule.buckets),
        "adaptive": rule.adaptive is not None,
        "max_delay": rule.max_delay is not None,
        "body": rule.reads_body,
        "per": rule.per == "message",
    }
    for option in (name for name, is_given in needed.items() if is_given):
        reason = f"needs {_NEEDED.get(option, 'the response')}, which doesn't pass through this gate; {_EXPECTED}"
        yield ConfigError.at((option,), reason, f"rule {rule.name!r}")


_NEEDED = {"body": "the request's body", "per": "its messages"}
_EXPECTED = "expected it in the rules of the application, or no such rule"
