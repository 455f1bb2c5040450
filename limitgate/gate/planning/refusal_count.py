"""Counts of refusals in a store: their keys, and the plans that count and forget them, see `limitgate.algorithms.refusals`."""

from __future__ import annotations

from collections.abc import Iterable

from limitgate.algorithms.refusals import Amount
from limitgate.errors import ConfigError
from limitgate.limits.bucket import Bucket
from limitgate.limits.limit import kept_as
from limitgate.limits.plan import Adjustment, Charge, Plan
from limitgate.rules.ban import Ban

_COUNT = Bucket((kept_as("refusals"),))


def count_key(key: str) -> str:
    """Key of the count of a bucket's refusals: in the same hash slot, and with the same beginning.

    Raises `ConfigError` for a key with a brace in its prefix that makes no hash tag (Redis Cluster specification).
    """
    before, brace, rest = key.partition("{")
    tag, closing, _ = rest.partition("}")
    if "}" in before or (brace and not (tag and closing)):
        expected = "expected a key_prefix such as '{shop}', or one without braces"
        raise ConfigError(f"key {key!r:.80} has a brace that is of no hash tag, {expected}")
    return f"{key}:refusals" if brace else f"{key}:refusals:{{{key}}}"


def counting(charge: Charge, ban: Ban, refusals: int) -> Plan:
    """The plan that counts refusals by the bucket of a charge, and bans the bucket if there are too many.

    The bucket stands before the count, which may ban it, and behind, so that the reading has the ban.
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
    """The plan that forgets the refusals by buckets, and the bans that they led to."""
    return Plan.reset([_counter(charge) for charge in charges])


def _counter(charge: Charge) -> Charge:
    return Charge(count_key(charge.key), _COUNT, 0, enforced=False, rule=charge.rule)


def _microseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e6))
