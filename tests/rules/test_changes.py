"""What is told of a change from one rule set to another."""

from __future__ import annotations

import pytest

from limitgate import Limit, Rule, RuleSet
from limitgate.rules.callers import KnownCaller
from limitgate.rules.revision import changes

API = Rule("api", "5/second", path="/api/**")


def told(before: list[Rule], after: list[Rule]) -> str:
    return str(changes(RuleSet(before, tiers=["vip"]), RuleSet(after, tiers=["vip"])))


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([API], "no rule has changed"),
        ([Rule("api", "5/second", path="/api/**")], "no rule has changed"),
        ([], "removed api"),
        ([API, Rule("b", "1/s"), Rule("c", "1/s")], "added b, c"),
        ([API, Rule("api", "1/s", tier="vip")], "added vip/api"),
        ([Rule("b", "5/second", path="/api/**")], "added b; removed api"),
        ([Rule("api", "6/second", path="/api/**")], "changed api"),
        ([Rule("api", "5/second burst 9", path="/api/**")], "changed api"),
        ([Rule("api", "5/second", "9/minute", path="/api/**")], "changed api"),
        ([Rule("api", "5/minute", path="/api/**")], "changed api"),
        ([Rule("api", "5/second", path="/b")], "changed api"),
        ([Rule("api", "5/second", path="/api/**", shadow=True)], "changed api"),
        (
            [Rule("api", Limit("5/second", algorithm="sliding_log"), path="/api/**")],
            "changed api; buckets reset api (sliding_log instead of gcra)",
        ),
        (
            [Rule("api", "5/second", path="/api/**", key=["caller", "ip"])],
            "changed api; buckets reset api (key caller, ip instead of ip)",
        ),
    ],
)
def test_changed_rules_are_listed(after: list[Rule], expected: str) -> None:
    """By name, of a tier where it was written; what keeps its debt does not begin anew."""
    assert told([API], after) == expected


def test_a_rule_that_counts_by_path_begins_anew_with_another_one() -> None:
    """Where the framework's routes are not known, its own pattern is in its keys."""
    before, after = (Rule("a", "1/s", path=path, key=["path", "ip"]) for path in ("/a", "/b"))
    assert told([before], [after]) == "changed a; buckets reset a (path, which is part of its key)"


def test_changed_callers_are_listed() -> None:
    """New, gone, with another key, with one key more; one that is listed as before is not told."""
    one, other = ("sha256:" + digit * 64 for digit in "01")
    before = [KnownCaller(id=name, header={"X": name}) for name in ("same", "gone", "more")] + [
        KnownCaller(id="b", api_key=one)
    ]
    after = [KnownCaller(id=name, header={"X": name}) for name in ("more", "same", "new")] + [
        KnownCaller(id="b", api_key=other)
    ]
    after.append(KnownCaller(id="more", header={"Y": "more"}))
    assert str(changes(RuleSet([API], before), RuleSet([API], after))) == "callers changed gone, more, b, new"
