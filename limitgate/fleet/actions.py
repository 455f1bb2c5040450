"""Bans, pardons and resets a client that the figures show, by the key of its bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from limitgate.errors import ConfigError
from limitgate.gate.journal import JournalFlows
from limitgate.limiter.rule_bucket import RuleBucketOperations
from limitgate.limits.limit import Limit
from limitgate.limits.plan import Charge
from limitgate.rules.rule import Rule


def client_bucket(
    figures: Mapping[str, Any], rule: str, tier: str, key: str, *, timeout: float = 2.0
) -> tuple[str, RuleBucketOperations]:
    """Return the name and the bucket of a client in these figures, by its rule and its ``key`` there.

    A reset knows the limits of the rule, not those that a caller has of its own. Raises `ConfigError` for a client that the
    figures do not list.
    """
    found = next((each for each in figures["rules"] if (each["name"], each["tier"]) == (rule, tier)), None)
    listed = [] if found is None else [*found["most_refused"], *found["most_used"]]
    who = next((each["who"] for each in listed if each["key"] == key), None)
    if found is None or who is None:
        raise ConfigError(f"rule {rule!r:.80} lists no client {key!r:.80}, expected one of those that the figures list")
    prefix = figures["prefix"]
    return f"{rule} {who}", RuleBucketOperations(
        [charges(f"{prefix}:{rule}:{key}", rule, found["limits"])], timeout, JournalFlows(prefix, timeout)
    )


def charges(key: str, name: str, limits: Iterable[Mapping[str, str]]) -> Sequence[Charge]:
    """Return the charges of a client under a rule with these limits. Raises `ConfigError` for invalid ones."""
    written: list[Any] = [
        Limit(each["limit"], **{name: value for name, value in each.items() if name in ("algorithm", "align")})  # type: ignore[arg-type]
        for each in limits
    ]
    rule = Rule(name, *(written or ["1/second"]))
    return [Charge(key + bucket.suffix, bucket, 1, enforced=True, rule=name) for bucket in rule.buckets]
