"""Limits and rules that never refuse: held against what really passes, one request after the other."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from limitgate import Limit, Limiter, MemoryStore, Rule
from limitgate.rules.review import idle_limits, idle_rules, is_tighter

ALGORITHMS = ("gcra", "fixed_window", "sliding_window", "sliding_log")
some = st.builds(
    lambda count, period, burst, algorithm: Limit(
        f"{count} per {period} seconds" + (f" burst {burst}" if algorithm == "gcra" else ""), algorithm=algorithm
    ),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from(ALGORITHMS),
)
waits = st.lists(st.sampled_from([0, 0, 1, 250_000, 999_999, 1_000_000, 2_500_000]), max_size=40)


@given(some, some, waits)
def test_a_limit_that_is_called_idle_never_refuses_property(limit: Limit, other: Limit, waits: list[int]) -> None:
    """Of two limits that are checked together: whatever the tighter one admits, the other one has room for."""
    if not is_tighter(limit, other):
        return
    now = 1_767_225_600_000_000
    limiter = Limiter(MemoryStore(clock=lambda: now))
    for wait in waits:
        now += wait
        decision = limiter.hit("k", limit, other)
        refusing = {(window.limit, window.period) for window in decision.windows if window.retry_after}
        assert not refusing or (limit.burst, limit.period) in refusing


@pytest.mark.parametrize(
    ("limits", "idle"),
    [
        (["10/second", "5/minute"], [("10/second", "5/minute")]),
        (["5/second", "100/minute", "2000/day"], []),
        (["5/second", "5/second"], [("5/second", "5/second")]),
        (["5/second", "10 per 2 seconds"], [("10 per 2 seconds", "5/second")]),
        (["5/second burst 9", "10 per 2 seconds burst 9"], [("10 per 2 seconds burst 9", "5/second burst 9")]),
        (["10/second burst 2", "5/minute"], []),
        (["20 at once", "30 at once"], [("30 at once", "20 at once")]),
        (["20 at once", "5/second"], []),
    ],
)
def test_limits_of_a_rule_that_never_refuse(limits: list[str], idle: list[tuple[str, str]]) -> None:
    """Each with the limit that always refuses before; of two that do the same it is the latter."""
    parsed = [Limit(text) for text in limits]
    assert [(str(parsed[place]), str(other)) for place, other in idle_limits(parsed)] == idle


TIGHT = Rule("tight", "5/minute", path="/api/**")


@pytest.mark.parametrize(
    ("rule", "is_idle"),
    [
        (Rule("r", "10/minute", path="/api/items/{id}"), True),
        (Rule("r", "5/minute", path="/api/**"), True),
        (Rule("r", "10/minute", path=["/api", "/api/x"], methods=["POST"], clients=["10.0.0.0/8"]), True),
        (Rule("r", "10/minute", path="/**"), False),
        (Rule("r", "10/minute", path="/api/x", key=["global"]), False),
        (Rule("r", "10/minute", path="/api/x", cost=2), False),
        (Rule("r", "10/minute", "1/second", path="/api/x"), False),
        (Rule("r", "10/minute", path="/api/x", replaces=["tight"]), False),
        (Rule("r", "10/minute", path="/api/x", charge_if={"status": [401]}), False),
        (Rule("r", lambda _: "10/minute", path="/api/x"), False),
        (Rule("r", path="/api/x", exempt=True), False),
    ],
)
def test_rules_that_never_refuse(rule: Rule, is_idle: bool) -> None:  # noqa: FBT001
    """A rule is idle if another one is for all of its requests, by the same key, and tighter."""
    assert list(idle_rules([TIGHT, rule])) == ([(rule, TIGHT)] if is_idle else [])


@pytest.mark.parametrize(
    "tight",
    [
        Rule("tight", "5/minute", path="/api/**", shadow=True),
        Rule("tight", "5/minute", path="/api/**", clients=["10.0.0.0/8"]),
        Rule("tight", "5/minute", path="/api/**", exclude=["/api/x"]),
        Rule("tight", "5/minute", path="/api/**", methods=["GET"]),
        Rule("tight", "5/minute", path="/api/**", when=lambda _: True),
        Rule("tight", "5/minute", path=["/api/{id}", "/api/**"], key=["path", "ip"]),
    ],
)
def test_a_rule_that_may_not_be_there_makes_none_idle(tight: Rule) -> None:
    """A shadow, one for some of the requests only, or one that counts in more buckets."""
    assert list(idle_rules([tight, Rule("r", "10/minute", path="/api/**", key=tight.key)])) == []


@pytest.mark.parametrize(
    ("limit", "other", "tighter"),
    [
        (Limit("3/minute", algorithm="fixed_window"), Limit("5/minute"), False),
        (Limit("3/minute", algorithm="fixed_window"), Limit("6/minute"), True),
        (Limit("3/minute", algorithm="sliding_window"), Limit("5/minute"), False),
        (Limit("3/minute", algorithm="sliding_log"), Limit("5/minute"), True),
        (Limit("3/minute"), Limit("5/minute", algorithm="sliding_log"), True),
        (Limit("3/minute"), Limit("4/minute", algorithm="fixed_window"), False),
        (Limit("3/minute"), Limit("9/minute", algorithm="sliding_window"), False),
        (Limit("3/day", algorithm="fixed_window", align="Europe/Berlin"), Limit("9/day"), False),
        (Limit("3/minute", borrow=True), Limit("9/minute"), False),
    ],
    ids=str,
)
def test_algorithms_admit_different_numbers_at_once(limit: Limit, other: Limit, tighter: bool) -> None:  # noqa: FBT001
    """At the border of two windows two counts pass; of windows whose length varies nothing is said."""
    assert is_tighter(limit, other) is tighter
