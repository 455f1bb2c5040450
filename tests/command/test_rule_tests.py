"""The tests of rule files, as `limitgate check` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command.verbs.test_check import check, found, written

CONFIG = Path(__file__).parents[2] / "config"


def failing(folder: Path, rules: str, *tests: str) -> list[tuple[str, str]]:
    """The fields and messages of tests that fail; each is written ``given > expect``."""
    lines = [f"  - {{given: {{{given}}}, expect: {{{expect}}}}}" for given, expect in (test.split(" > ") for test in tests)]
    written(folder, rules=f"rules: [{rules}]\ntests:\n" + "\n".join(lines))
    return [(each["field"], each["message"]) for each in found(folder) if each["level"] == "error"]


def test_the_tests_that_we_ship_pass() -> None:
    """And are run: of a file that says otherwise they fail."""
    result = check("--strict", CONFIG)
    assert (result.exit_code, found(CONFIG)) == (0, [])


def test_a_test_that_fails_is_a_mistake_with_its_line(tmp_path: Path) -> None:
    """It says what was expected and what happened instead."""
    file = written(
        tmp_path, rules="rules: [{name: a, qps: 5}]\ntests:\n  - given: {path: /}\n    expect:\n      remaining: 5\n"
    )
    result = check(file)
    assert result.exit_code == 1
    assert result.stdout == (
        f"{file}/rules.yaml:5: tests[0].expect.remaining: expected 5, got 4, in the answer "
        "{allowed: true, rule: a, remaining: 4, tier: default, retry_after: 0}\n"
        f"{file}: 1 error, 15 metric series\n"
    )


def test_time_goes_on_by_what_is_given(tmp_path: Path) -> None:
    """In the order of the tests, from full buckets, exact to the microsecond."""
    tests = ["path: / > remaining: 0", "path: / > allowed: false, retry_after: 12, rule: a"]
    tests += ["path: /, at: 11.999999 > retry_after: 0.000001", "path: /, at: 12 > allowed: true", "path: / > allowed: false"]
    assert failing(tmp_path, "{name: a, limits: [5/minute burst 1]}", *tests) == []


@pytest.mark.parametrize(
    ("expect", "fits"),
    [("retry_after: 1", True), ("retry_after: 0.6", True), ("retry_after: 0.5", False), ("retry_after: 2", False)],
)
def test_a_whole_wait_is_one_of_retry_after(tmp_path: Path, expect: str, fits: bool) -> None:  # noqa: FBT001
    """Others are compared as they are: here 0.6 seconds are left."""
    rules = "{name: a, limits: [1/second]}"
    assert (failing(tmp_path, rules, "path: / > allowed: true", f"path: /, at: 0.4 > {expect}") == []) is fits


def test_windows_of_every_length_begin_with_the_clock(tmp_path: Path) -> None:
    """So a fixed window does not end in the midst of a test."""
    for limit, seconds in {"2/minute": 60, "2/hour": 3600, "2/day": 86400, "2/week": 604800}.items():
        rules = f"{{name: a, limits: [{limit}], algorithm: fixed_window}}"
        tests = ["path: / > remaining: 1", f"path: /, at: {seconds - 1} > remaining: 0", "path: / > retry_after: 1"]
        assert failing(tmp_path, rules, *tests, f"path: /, at: {seconds} > remaining: 1") == []


def test_requests_are_in_flight_until_the_clock_goes_on(tmp_path: Path) -> None:
    """Those of one time are there together."""
    rules = "{name: a, concurrency: 2}"
    tests = ["path: / > allowed: true", "path: / > remaining: 0", "path: / > allowed: false", "path: /, at: 1 > remaining: 1"]
    assert failing(tmp_path, rules, *tests) == []


def test_nobody_waits_for_a_turn(tmp_path: Path) -> None:
    """A request that would be delayed is allowed, at once."""
    rules = "{name: a, limits: [1/minute], max_delay: 60}"
    assert failing(tmp_path, rules, "path: / > allowed: true", "path: / > allowed: true", "path: / > allowed: false") == []


def test_who_asks_is_known_as_in_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By key, and by headers and forwarding of those whom `LIMITGATE_TRUSTED_PROXIES` trusts."""
    monkeypatch.setenv("LIMITGATE_TRUSTED_PROXIES", "10.0.0.1,10.0.0.2")
    written(
        tmp_path,
        default="""\
            rules: [{name: a, qps: 5}]
            tests:
              - {given: {path: /, ip: 10.0.0.1, headers: {X-Caller: x}}, expect: {tier: vip}}
              - {given: {path: /, ip: 192.0.2.7, headers: {X-Caller: x}}, expect: {tier: default, remaining: 4}}
              - given: {path: /, ip: 10.0.0.1, headers: {x-forwarded-for: 192.0.2.7}}
                expect: {remaining: 3}
            """,
        vip="""\
            tier: vip
            callers: [{id: x, header: {X-Caller: x}}]
            rules: [{name: a, qps: 50}]
            tests:
              - {given: {path: /, ip: 10.0.0.2, headers: {X-Caller: x}}, expect: {tier: vip, remaining: 49}}
            """,
    )
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("rule", "expect"),
    [
        ("{name: a, deny: true}", "allowed: false, rule: a"),
        ("{name: a, qps: 0}", "allowed: false, retry_after: null"),
        ("{name: a, qps: 0}", "allowed: false, retry_after: .inf"),
        ("{name: a, deny: true, shadow: true}", "allowed: true"),
        ("{name: a, exempt: true}", "allowed: true, rule: null, remaining: null, retry_after: 0"),
        ("{name: a, path: /y, qps: 5}", "allowed: true, rule: null"),
        ("{name: a, qps: 5, cost: 0}", "remaining: 5"),
    ],
)
def test_what_is_decided_by_other_rules(tmp_path: Path, rule: str, expect: str) -> None:
    """Rules that deny, that are a shadow, exempt, elsewhere or free."""
    assert failing(tmp_path, rule, f"path: '/x?a=b%20c', method: post > {expect}") == []


@pytest.mark.parametrize(("expect", "shown"), [("null", "expected null, got 0"), (".inf", "expected inf, got 0")])
def test_a_request_that_passes_waits_for_nothing(tmp_path: Path, expect: str, shown: str) -> None:
    ((_, message),) = failing(tmp_path, "{name: a, qps: 5}", f"path: / > retry_after: {expect}")
    assert message.startswith(shown)


def test_each_file_has_a_clock_and_buckets_of_its_own(tmp_path: Path) -> None:
    """The tests of one file change nothing for those of another."""
    tests = "tests:\n  - {given: {path: /}, expect: {remaining: 0}}\n"
    written(tmp_path, a=f"rules: [{{name: a, limits: [1/day]}}]\n{tests}", b=f"tier: b\n{tests}")
    assert [each for each in found(tmp_path) if each["level"] == "error"] == []
