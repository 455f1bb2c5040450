"""Bans, pardons and resets clients by the keys in the figures."""

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
    """Return name and bucket of a client by its rule and its ``key`` in the figures.

    Raises `ConfigError` for an unlisted client. A reset uses the limits of the rule, not of a caller.
    """
    found = next((each for each in figures["rules"] if (each["name"], each["tier"]) == (rule, tier)), None)
    listed = [] if found is None else [*found["most_refused"], *found["most_used"]]
    who = next((each["who"] for each in listed if each["key"] == key), None)
    if found is None or who is None:
        raise ConfigError(f"the figures list no client {key!r:.80} of rule {rule!r:.80}, expected a listed client")
    prefix = figures["prefix"]
    return f"{rule} {who}", RuleBucketOperations(
        [charges(f"{prefix}:{rule}:{key}", rule, found["limits"])], timeout, JournalFlows(prefix, timeout)
    )


def charges(key: str, name: str, limits: Iterable[Mapping[str, str]]) -> Sequence[Charge]:
    """Raises `ConfigError` for invalid limits."""
    written: list[Any] = [
        Limit(each["limit"], **{name: value for name, value in each.items() if name in ("algorithm", "align")})  # type: ignore[arg-type]
        for each in limits
    ]
    rule = Rule(name, *(written or ["1/second"]))
    return [Charge(key + bucket.suffix, bucket, 1, enforced=True, rule=name) for bucket in rule.buckets]
