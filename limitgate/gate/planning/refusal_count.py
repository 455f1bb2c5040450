"""Keys and plans of refusal counts, see `limitgate.algorithms.refusals`."""

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
    """Return the key of a refusal count, in the same hash slot as the bucket.

    Raises `ConfigError` for a prefix with a brace outside a hash tag (Redis Cluster specification).
    """
    before, brace, rest = key.partition("{")
    tag, closing, _ = rest.partition("}")
    if "}" in before or (brace and not (tag and closing)):
        expected = "expected a key_prefix such as '{shop}', or one without braces"
        raise ConfigError(f"key {key!r:.80} has a brace that is of no hash tag, {expected}")
    return f"{key}:refusals" if brace else f"{key}:refusals:{{{key}}}"


def counting(charge: Charge, ban: Ban, refusals: int) -> Plan:
    """Return the plan that counts refusals, and bans the bucket if there are too many.

    The bucket comes before the count, which may ban it, and after it, to read the ban.
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
    """Return the plan that forgets refusals and the resulting bans."""
    return Plan.reset([_counter(charge) for charge in charges])


def _counter(charge: Charge) -> Charge:
    return Charge(count_key(charge.key), _COUNT, 0, enforced=False, rule=charge.rule)


def _microseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e6))
