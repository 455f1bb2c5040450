"""What is told as odd about rules, and where; and what is not."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from textwrap import dedent

import pytest

from limitgate import RuleSet
from limitgate.errors import spelled
from limitgate.rules.files import read_rule_files
from limitgate.rules.review import review

KEY = f'api_key: "sha256:{hashlib.sha256(b"key").hexdigest()}"'
CONFIG = Path(__file__).parents[3] / "config"


def odd(folder: Path, *, identifies: bool = False, **files: str) -> list[tuple[str, str]]:
    """The fields and messages of what is odd about files."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(dedent(text))
    read = read_rule_files(folder)
    callers = [caller for file in read.files for caller in file.callers.values()]
    return [
        (spelled((*read.place_of(each.about)[1], *each.field)), each.message)
        for each in review(read.rules, callers, identifies=identifies)
    ]


@pytest.mark.parametrize(
    ("rules", "field", "message"),
    [
        # never applies
        ("{name: a, path: /x, exempt: true}, {name: b, path: /x, qps: 5}", "rules[1]", r"a exempts every"),
        (
            "{name: a, exempt: true, clients: [10.0.0.0/8]}, {name: b, qps: 5, clients: [10.1.0.0/16, 10.2.0.1]}",
            "rules[1]",
            r"a exempts every",
        ),
        ("{name: a, path: /x/**, deny: true}, {name: b, path: /x/y, qps: 5}", "rules[1]", "a denies every"),
        ("{name: a, qps: 5, replaces: [b]}, {name: b, path: /x, qps: 9}", "rules[1]", "a replaces it"),
        ('{name: a, qps: 5, replaces: "*"}, {name: b, path: /x, qps: 9}', "rules[1]", "a replaces it"),
        ("{name: a, qps: 5, clients: [224.0.0.1]}", "rules[0].clients[0]", "client's address"),
        ("{name: a, qps: 5, clients: [10.0.0.1, 240.0.0.0/8]}", "rules[0].clients[1]", "client's address"),
        ('{name: a, qps: 5, clients: ["::"]}', "rules[0].clients[0]", "client's address"),
        ("{name: a, qps: 5, methods: [GET, PSOT]}", "rules[0].methods", "method 'PSOT', did you mean 'POST'"),
        (
            "{name: a, qps: 5, methods: [websocket]}",
            "rules[0].methods",
            "method 'WEBSOCKET', did you mean 'GET', the method of handshakes",
        ),
        # never refuses
        ("{name: a, limits: [10/second, 5/minute]}", "rules[0].limits[0]", "10/second never refuses, because 5/minute always"),
        ("{name: a, limits: [5/minute], qps: 10}", "rules[0].qps", "10/second never refuses"),
        ("{name: a, limits: [5/second], qps: 5}", "rules[0].qps", "duplicate 5/second"),
        ("{name: a, qps: 5, path: /x}, {name: b, qps: 5, path: /x}", "rules[1]", "never refuses, because a counts"),
        ("{name: a, qps: 9, path: /x/y}, {name: b, qps: 5, path: /x/**}", "rules[0]", "never refuses, because b counts"),
        # more than it seems
        ("{name: a, limits: [10/s burst 11]}", "rules[0].limits[0]", "admits 20 within one period, at least twice its count"),
        ("{name: a, qps: 1, key: ['header:X-User']}", "rules[0].key[0]", "can invent header:x-user"),
        ("{name: a, qps: 1, key: [path, 'user|host', ip]}", "rules[0].key[1]", "can invent host"),
        ("{name: a, qps: 1, key: ['api_key|ip']}", "rules[0].key[0]", r"can invent api_key.*callers.*\(LG005\)"),
        (
            "{name: a, qps: 1, path: /x/**, key: [host]}, {name: b, qps: 9, path: /x/y}",
            "rules[0].key[0]",
            "can invent host",
        ),
        ("{name: a, limits: [1/day], on_error: local}", "rules[0].on_error", "each process admits a request under 1/day"),
        # without effect
        (
            "{name: a, qps: 5, shadow: true, on_error: closed}",
            "rules[0].on_error",
            "because the rule is in shadow mode",
        ),
        (
            "{name: a, qps: 5, shadow: true, ban: {after: 2, within: 10m, for: 1h}}",
            "rules[0].ban",
            "because the rule is in shadow mode",
        ),
        ("{name: a, deny: true, path: /x, on_error: closed}", "rules[0].on_error", "no effect because the rule has no limits"),
        ("{name: a, deny: true, path: /x, key: [path]}", "rules[0].key", "no effect because the rule has no limits"),
        ("{name: a, exempt: true, path: /x, key: [api_key]}", "rules[0].key", "no effect because the rule has no limits"),
        ("{name: a, exempt: true, path: /x, cost: 5}", "rules[0].cost", "no effect because the rule has no limits"),
        ("{name: a, deny: true, path: /x, lease: 5}", "rules[0].lease", "no effect because the rule has no limits"),
        ("{name: a, exempt: true, path: /x, shadow: true}", "rules[0].shadow", "no effect because the rule has no limits"),
        ("{name: a, qps: 5, key: [caller]}", "rules[0].key", r"counts by caller"),
        ("{name: a, qps: 5, reserve: 20%}", "rules[0].reserve", r"the reserve is never used"),
    ],
)
def test_review_of_a_suspicious_rule_reports_it(tmp_path: Path, rules: str, field: str, message: str) -> None:
    """It is told once, at its place, and nothing else is."""
    found = odd(tmp_path, rules=f"rules: [{rules}]")
    assert [place for place, _ in found] == [field]
    assert re.search(message, found[0][1])


@pytest.mark.parametrize(
    "rules",
    [
        "{name: a, qps: 5, qpm: 100, qpd: 2000}",
        "{name: a, limits: [5/minute burst 3]}",
        "{name: a, limits: [10/s burst 20, 15/s burst 1]}",
        "{name: a, path: /x, exempt: true, methods: [GET]}, {name: b, path: /x, qps: 5}",
        "{name: a, exempt: true, clients: [10.1.0.0/16]}, {name: b, qps: 5, clients: [10.0.0.0/8]}",
        "{name: a, deny: true, shadow: true, path: /x}, {name: b, path: /x, qps: 5}",
        "{name: a, qps: 5, replaces: [b], clients: [10.0.0.0/8]}, {name: b, qps: 9}",
        "{name: a, qps: 5, replaces: [b]}, {name: b, qps: 9, replaces: [a]}",
        "{name: a, qps: 1, path: /x, key: [host]}, {name: b, qpm: 900, path: /x}",
        "{name: a, qps: 1, key: ['header:X-User'], clients: [10.0.0.0/8]}",
        "{name: a, qps: 9, methods: [get, LOCK, PROPFIND, QUERY, PURGE]}",
        "{name: a, qps: 9, on_error: local}",
        "{name: a, deny: true, path: /x, key: ['json:/user']}",
        "{name: a, qps: 9, clients: [203.0.113.9, '2001:db8::/32', 0.0.0.0/0]}",
    ],
)
def test_review_of_good_rules_reports_nothing(tmp_path: Path, rules: str) -> None:
    """What people write on purpose is not told."""
    assert odd(tmp_path, rules=f"rules: [{rules}]") == []


def test_review_of_a_tier_without_callers_names_its_file(tmp_path: Path) -> None:
    """Unless the application names callers, or a caller is listed, be it by header."""
    default, vip = "rules: [{name: a, qps: 5}]", "tier: vip\nrules: [{name: a, qps: 50}]"
    (found,) = odd(tmp_path, default=default, vip=vip)
    assert found[0] == "tier"
    assert "no listed caller has tier vip" in found[1]
    assert odd(tmp_path, identifies=True, default=default, vip=vip) == []
    assert odd(tmp_path, default=default, vip=f"{vip}\ncallers: [{{id: x, header: {{X-Caller: x}}}}]") == []


def test_what_is_odd_in_one_tier_only_is_told_with_it(tmp_path: Path) -> None:
    """A rule of the default tier may have no use where another tier's rules are laid over it."""
    default = "rules: [{name: api, qps: 5, path: /api/**}, {name: items, limits: [10/second], path: /api/items}]"
    vip = f"tier: vip\nrules: [{{name: api, qps: 50, path: /api/**}}]\ncallers: [{{id: x, {KEY}}}]"
    (found,) = odd(tmp_path, default=default, vip=vip)
    assert found == (
        "rules[1]",
        "in tier default, never refuses, because api counts its requests by the same key and always refuses first",
    )


def test_a_callers_own_limit_below_the_cost_is_told(tmp_path: Path) -> None:
    """Such a caller would never be admitted."""
    rules = f"rules: [{{name: a, qps: 9, cost: 5}}]\ncallers: [{{id: x, {KEY}, limits: {{a: 3/second}}}}]"
    (found,) = odd(tmp_path, rules=rules)
    assert found[0] == "callers[0].limits.a"
    assert found[1].startswith("cost 5 of rule 'a' exceeds 3/second")


def test_api_keys_that_identify_vouches_for_are_not_made_up(tmp_path: Path) -> None:
    """The service says no more at start than is told here, either way."""
    rules = "rules: [{name: a, qps: 1, key: [api_key]}, {name: b, qps: 5, key: [caller], path: /x}]"
    assert [field for field, _ in odd(tmp_path, rules=rules)] == ["rules[1].key", "rules[0].key[0]"]
    assert odd(tmp_path, identifies=True, rules=rules) == []


def test_review_of_the_shipped_rules_reports_nothing() -> None:
    """Nor are those of an empty set."""
    read = read_rule_files(CONFIG)
    callers = [caller for file in read.files for caller in file.callers.values()]
    assert list(review(read.rules, callers)) == list(review(RuleSet([]))) == []
