"""Bans that a process has seen."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from limitgate.limits.bucket import bucket_of
from limitgate.limits.plan import BucketReading, Charge, Reading
from limitgate.stores.redis import deny_cache
from limitgate.stores.redis.deny_cache import KnownBans

CHARGE = Charge("key", bucket_of("9/minute", "99/day"), 1, enforced=True, rule="r")


def reading(now: int, left_us: int, cost: int = 1, key: str = "key") -> Reading:
    charge, states = CHARGE._replace(key=key, cost=cost), [0, 0]
    if left_us:
        charge, states = charge.under_ban(), [left_us] * 2
    return Reading(now, [BucketReading(charge, states, None if left_us else states)], not left_us)


@pytest.mark.parametrize(
    ("readings", "left_us"),
    [
        ([reading(1, 7_000_000)], 5_000_000),
        ([reading(1, 1_000_000)], 0),
        ([reading(1, 9_000_000), reading(2, 3_000_000)], 1_000_000),
        ([reading(1, 9_000_000), reading(1, 0)], 0),
        ([reading(2, 9_000_000), reading(1, 0)], 7_000_000),
        ([reading(1, 9_000_000), reading(2, 0, cost=0)], 7_000_000),
        ([reading(1, 9_000_000), reading(2, 0, key="other")], 7_000_000),
        ([reading(1, 0)], 0),
    ],
    ids=["seen", "over", "shorter", "lifted", "read before", "of no cost", "another's", "none"],
)
def test_what_is_left(readings: Sequence[Reading], left_us: int) -> None:
    """So much as the last reading said that could see it, less the time since."""
    bans = KnownBans()
    for each in readings:
        bans.learn(each, 100.0)
    assert bans.left_us("key", 102.0) == left_us


def test_they_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones go first, in the order of their last readings."""
    monkeypatch.setattr(deny_cache, "MAX_BANS", 3)
    bans = KnownBans()
    for key in ("a", "b", "c", "a", "d"):
        bans.learn(reading(1, 9_000_000, key=key), 0.0)
    assert list(bans.ends) == ["c", "a", "d"]


def test_none_is_left_that_has_ended() -> None:
    """However many come and go, only those are kept that hold."""
    bans = KnownBans()
    for number in range(100):
        bans.learn(reading(1, 1_000_000 * (number + 1), key=f"{number}"), 0.0)
    bans.drop_ended(50.0)
    assert len(bans.ends) == 50
    bans.drop_ended(99.5)
    assert list(bans.ends) == ["99"]
    bans.drop_ended(100.0)
    assert not bans.ends
