"""The option ``ban`` of a rule: how it may be given, and what is said about mistakes in it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from limitgate import Ban, ConfigError, Rule, RuleSet, load_rules
from limitgate.limits.limit import Limit
from limitgate.rules.revision import digest

GIVEN = {"after": 20, "within": "10m", "for": "1h", "growing": 2, "most": "24h"}


def test_every_way_to_give_it_is_the_same(tmp_path: Path) -> None:
    """In Python, as a mapping and in a file; what is not given has a default."""
    ban = Ban(after=20, within="10m", duration="1h", growing=2, most="24h")
    assert (ban.after, ban.within, ban.duration, ban.growing, ban.most) == (20, 600.0, 3600.0, 2.0, 86_400.0)
    file = tmp_path / "rules.yaml"
    file.write_text("rules:\n  - {name: api, qps: 5, ban: {after: 20, within: 10m, for: 1h, growing: 2, most: 24h}}\n")
    (from_file,) = load_rules(file).tiers["default"]
    for rule in (Rule("r", "5/s", ban=ban), Rule("r", "5/s", ban=GIVEN), from_file):
        assert rule.ban == ban
    assert Rule("r", "5/s").ban is Rule("r", "5/s", ban=None).ban is None
    assert Ban(3, 60, 90) == Ban(after=3, within="60s", duration="90s", growing=1, most="24h")
    assert Ban(3, 60, "48h").most == 48 * 3600  # no shorter than the first
    assert pickle.loads(pickle.dumps(ban)) == copy.deepcopy(ban) == ban
    assert Rule("r", "5/s", ban=ban).having_limits([Limit("1/s")]).ban == ban


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"after": 0}, r"ban.after: expected a whole number of refusals from 1 to 10,000, not 0"),
        ({"after": 10_001}, r"ban.after: expected .* not 10001"),
        ({"after": True}, r"ban.after: expected .* not True"),
        ({"after": 2.0}, r"ban.after: expected .* not 2.0"),
        ({"after": "20"}, r"ban.after: expected .* not '20'"),
        ({"after": None}, r"ban.after: expected .* not None"),
        ({"within": 0}, r"ban.within: expected a duration above 0 and up to a year, such as 10m or 600, not 0"),
        ({"within": "10 fortnights"}, r"ban.within: expected .* not '10 fortnights'"),
        ({"within": -1}, r"ban.within: "),
        ({"within": float("nan")}, r"ban.within: "),
        ({"within": 367 * 86_400}, r"ban.within: "),
        ({"for": "0s"}, r"ban.for: expected a duration above 0 and up to a year, such as 1h or 3600, not '0s'"),
        ({"for": True}, r"ban.for: "),
        ({"for": float("inf")}, r"ban.for: "),
        ({"growing": 0.5}, r"ban.growing: expected a factor from 1 to 100, such as 2, not 0.5"),
        ({"growing": "2"}, r"ban.growing: "),
        ({"growing": True}, r"ban.growing: "),
        ({"growing": 101}, r"ban.growing: "),
        ({"growing": float("nan")}, r"ban.growing: "),
        ({"most": "59m"}, r"ban.most: expected at least as long as the first ban, which lasts 3600 s, not '59m'"),
        ({"most": "long"}, r"ban.most: expected a duration above 0 and up to a year, such as 24h, not 'long'"),
        ({"most": 0}, r"ban.most: expected a duration above 0"),
        ({"limit": 3}, r"ban.limit: unknown field, .*expected one of after, within, for, growing, most"),
        ({"grow": 3}, r"ban.grow: unknown field, did you mean 'growing'"),
        ({"duration": "1h"}, r"ban.duration: duplicates for, expected one of the two"),
    ],
)
def test_a_mistake_names_its_field(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^rule 'r': {message}"):
        Rule("r", "5/s", ban={**GIVEN, **changed})


def test_ban_incomplete_or_invalid_is_refused() -> None:
    """All mistakes come at once."""
    with pytest.raises(ConfigError, match=r"ban\.after: expected .* 1 to 10,000, which is missing") as all_of:
        Rule("r", "5/s", ban={"growing": 0})
    assert [each.field for each in all_of.value.every] == [("ban", name) for name in ("after", "within", "for", "growing")]
    for wrong in (True, 20, "1h", [20, "10m", "1h"], "20/10m"):
        with pytest.raises(ConfigError, match=r"ban: .* is not a ban, expected a mapping such as \{after: 20, within"):
            Rule("r", "5/s", ban=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^ban: within: expected") as own:
        Ban(after=1, within="soon", duration=-1)
    assert [each.field for each in own.value.every] == [("within",), ("duration",)]


def test_a_mistake_in_a_file_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("rules:\n  - name: api\n    qps: 5\n    ban:\n      after: 20\n      within: 10m\n      for: never\n")
    with pytest.raises(ConfigError, match=r"rules.yaml:7: rules\[0\].ban.for: expected a duration"):
        load_rules(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exempt": True}, "rule 'r' is exempt, expected no ban, because it has no limits"),
        ({"deny": True}, "rule 'r' denies, expected no ban, because it has no limits"),
        ({"adaptive": True}, "rule 'r' is adaptive, .* expected no ban, or an additional limit"),
    ],
)
def test_ban_on_a_rule_without_counts_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rule("r", ban=GIVEN, **options)
    assert Rule("r", "5/s", adaptive=True, ban=GIVEN).ban is not None


def test_the_digest_of_rules_without_a_ban_stays() -> None:
    """That of rules with one depends on all of its fields."""
    assert digest(RuleSet([Rule("r", "5/s")])) == digest(RuleSet([Rule("r", "5/s", ban=None)]))
    others = [GIVEN, {**GIVEN, "after": 21}, {**GIVEN, "within": 601}, {**GIVEN, "for": 3601}, {**GIVEN, "growing": 3}]
    assert len({digest(RuleSet([Rule("r", "5/s", ban=each)])) for each in (*others, {**GIVEN, "most": "25h"}, None)}) == 7
