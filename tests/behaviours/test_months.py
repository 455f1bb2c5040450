"""Calendar months wherever limits stand: on rules, for callers, from callables, in rule files and headers."""

from __future__ import annotations

from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from limitgate import Caller, ConfigError, Limit, Limiter, MemoryStore, Rule, load_rules
from limitgate.observing.series import windows_of
from limitgate.rules.lint import most_within
from limitgate.rules.review import review
from limitgate.rules.revision import changes, digest
from limitgate.rules.rule import RuleSet
from tests.support.clock import Clock
from tests.support.doors import SITES, Site

NOVEMBER = int(datetime(2026, 11, 28, 10, tzinfo=UTC).timestamp()) * 1_000_000
LEFT = (2 * 24 + 14) * 3600
FIXED = {"algorithm": "fixed_window"}
MONTH = Limit("2/month", **FIXED)

GIVEN: dict[str, tuple[Rule, Any]] = {
    "text, and the rule's algorithm": (Rule("api", "2/month", **FIXED), None),
    "a limit": (Rule("api", MONTH), None),
    "a mapping": (Rule("api", limits=[{"limit": "2/month", **FIXED}]), None),
    "a callable, and the rule's algorithm": (Rule("api", lambda _: "2/month", **FIXED), None),
    "a callable's list": (Rule("api", lambda _: [MONTH], qpm=9), None),
    "a caller, and the rule's algorithm": (Rule("api", "9/day", **FIXED), "2/month"),
    "a caller": (Rule("api", "9/day"), MONTH),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("door", SITES, ids=attrgetter("door"))
def test_a_month_is_up_when_it_is(door: type[Site], given: str) -> None:
    """Whoever says the algorithm; Retry-After leads to the first of the next month."""
    rule, own = GIVEN[given]
    clock = Clock(NOVEMBER)
    options: dict[str, Any] = {} if own is None else {"identify": lambda _: Caller("me", limits={"api": own})}
    with door(rule, store=MemoryStore(clock), headers=["x-ratelimit", "draft-11", "x-ratelimit-windows"], **options) as it:
        assert it.statuses(2) == [200, 200]
        refused = it.ask()
        assert (refused.status, refused.headers["retry-after"]) == (429, str(LEFT))
        assert refused.headers["x-ratelimit-reset"] == str(NOVEMBER // 1_000_000 + LEFT)
        assert refused.headers["ratelimit-policy"] == '"api";q=2;w=2678400'
        assert refused.headers["ratelimit"] == f'"api";r=0;t={LEFT}'
        assert not [name for name in refused.headers if name.startswith("x-ratelimit-limit-")]
        clock.advance(LEFT)
        assert it.statuses(3) == [200, 200, 429]


OTHERS = [
    lambda: Rule("api", "2/month"),
    lambda: Rule("api", "5/second", "2/month", algorithm="sliding_window"),
    lambda: Rule("api", limits=[{"limit": "2/month", "algorithm": "gcra"}]),
    lambda: Limiter("memory://").hit("k", "2/month"),
    lambda: Limiter("memory://").hit("k", "5/second", "2/month"),
]


@pytest.mark.parametrize("make", OTHERS)
def test_other_algorithms_know_none(make: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"only a fixed_window counts by calendar months, .* expected algorithm: fixed_window"
    ):
        make()


def test_a_rule_file(tmp_path: Path) -> None:
    """Of rules and callers; a month that nobody can count is told with its line."""
    key = f"api_key: 'sha256:{'0' * 64}'"
    text = (
        "rules:\n  - name: api\n    algorithm: fixed_window\n    align: Europe/Berlin\n    limits:\n      - 100/month\n"
        "      - 9/day\n  - name: other\n    qpm: 5\ncallers:\n  - {id: acme, limits: {api: 7/month}, KEY}\n"
    ).replace("KEY", key)
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    rules = load_rules(file)
    api = rules.tiers["default"][0]
    assert [(str(limit), limit.align) for limit in api.every_limit] == [
        ("100/month", "Europe/Berlin"),
        ("9/day", "Europe/Berlin"),
    ]
    assert windows_of(api.every_limit) == {"month": 100, "day": 9}
    assert not [oddity for oddity in review(rules, rules.listed_callers) if "month" in oddity.message]
    for wrong, where in (
        (text.replace("    algorithm: fixed_window\n    align: Europe/Berlin\n", ""), "rules.yaml:4: rules[0].limits[0]: "),
        (text.replace("limits: {api:", "limits: {other:"), "rules.yaml:11: callers[0].limits.other: "),
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="calendar months") as caught:
            load_rules(file)
        assert where in str(caught.value)


def test_months_are_no_days() -> None:
    """Rules that differ in that are told apart, keep what was used, and are compared by the shortest month."""
    days, months = (RuleSet([Rule("a", each, **FIXED)]) for each in ("5 per 31 days", "5/month"))
    assert digest(days) != digest(months)
    assert (changes(days, months).changed, changes(days, months).begun_anew) == (("a",), ())
    assert most_within(31 * 86400, [Limit("5/month", **FIXED)]) == 15
    (oddity,) = review(RuleSet([Rule("a", "5/month", "9/month", **FIXED)]))
    assert "9/month never refuses, because 5/month always refuses first" in oddity.message
