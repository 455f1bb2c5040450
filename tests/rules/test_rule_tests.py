"""The tests that rule files have of themselves, as they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from limitgate import load_rules
from limitgate.errors import ConfigError
from limitgate.rules.files import read_rule_files, read_rule_test

FILE = "rules:\n  - {name: a, qps: 5}\ntests:\n  - "


def test_a_test_is_read() -> None:
    """With what is left out: a GET of a documentation address at the time of the request before."""
    test = read_rule_test({"given": {"path": "/x"}, "expect": {"remaining": 4, "rule": None}})
    assert (test.given.method, test.given.ip, test.given.headers, test.given.at) == ("GET", "192.0.2.1", {}, None)
    assert test.expect.model_fields_set == {"remaining", "rule"}


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ("5", "tests[0]"),
        ("{}", "tests[0].given"),
        ("{given: {path: /x}}", "tests[0].expect"),
        ("{expect: {allowed: true}}", "tests[0].given"),
        ("{given: {path: /x}, expect: {}}", "tests[0].expect"),
        ("{given: 5, expect: {allowed: true}}", "tests[0].given"),
        ("{given: {path: /x}, expect: {allowed: true}, then: {}}", "tests[0].then"),
        ("{given: {ip: 192.0.2.1}, expect: {allowed: true}}", "tests[0].given.path"),
        ("{given: {path: x}, expect: {allowed: true}}", "tests[0].given.path"),
        ("{given: {path: /x, method: 'a b'}, expect: {allowed: true}}", "tests[0].given.method"),
        ("{given: {path: /x, ip: localhost}, expect: {allowed: true}}", "tests[0].given.ip"),
        ("{given: {path: /x, headers: [a]}, expect: {allowed: true}}", "tests[0].given.headers"),
        ("{given: {path: /x, headers: {a: 5}}, expect: {allowed: true}}", "tests[0].given.headers.a"),
        ("{given: {path: /x, at: -1}, expect: {allowed: true}}", "tests[0].given.at"),
        ("{given: {path: /x, at: .nan}, expect: {allowed: true}}", "tests[0].given.at"),
        ("{given: {path: /x, at: .inf}, expect: {allowed: true}}", "tests[0].given.at"),
        ("{given: {path: /x, at: '5 x'}, expect: {allowed: true}}", "tests[0].given.at"),
        ("{given: {path: /x, port: 5}, expect: {allowed: true}}", "tests[0].given.port"),
        ("{given: {path: /x}, expect: {allowed: 1}}", "tests[0].expect.allowed"),
        ("{given: {path: /x}, expect: {rule: a b}}", "tests[0].expect.rule"),
        ("{given: {path: /x}, expect: {remaining: -1}}", "tests[0].expect.remaining"),
        ("{given: {path: /x}, expect: {tier: 5}}", "tests[0].expect.tier"),
        ("{given: {path: /x}, expect: {retry_after: soon}}", "tests[0].expect.retry_after"),
        ("{given: {path: /x}, expect: {retry_after: true}}", "tests[0].expect.retry_after"),
        ("{given: {path: /x}, expect: {status: 429}}", "tests[0].expect.status"),
    ],
)
def test_a_mistake_in_a_test_is_found_where_it_stands(tmp_path: Path, entry: str, field: str) -> None:
    """The service does not start on it either, as on any other field that it cannot read."""
    file = tmp_path / "rules.yaml"
    file.write_text(FILE + entry)
    with pytest.raises(ConfigError, match="expected") as caught:
        load_rules(file)
    assert str(caught.value).startswith(f"{file}:4: {field}: ")


def test_time_does_not_run_backwards(tmp_path: Path) -> None:
    """A test is never before the one above it."""
    file = tmp_path / "rules.yaml"
    entries = [f"  - {{given: {{path: /x{at}}}, expect: {{allowed: true}}}}" for at in (", at: 5", "", ", at: 5", ", at: 4")]
    file.write_text("rules: []\ntests:\n" + "\n".join(entries))
    with pytest.raises(ConfigError, match=r":6: tests\[3\]\.given\.at: 4 s is before .* expected at least 5"):
        load_rules(file)


def test_the_service_ignores_tests_that_fail(tmp_path: Path) -> None:
    """What is expected is for `limitgate check`."""
    file = tmp_path / "rules.yaml"
    file.write_text(FILE + "{given: {path: /x}, expect: {allowed: false}}")
    assert [rule.name for rule in load_rules(file).tiers["default"]] == ["a"]
    assert list(read_rule_files(file).files[0].tests) == [0]
