"""Numbers and words that YAML 1.1 takes for something else: an error with line and spelling, in every field."""

from __future__ import annotations

from pathlib import Path

import pytest

from limitgate import ConfigError, load_rules
from limitgate.rules.files import read_rule_files
from tests.support.cases import case

NUMBERS = {
    "010": ("8", "10"),
    "0401": ("257", "401"),
    "-010": ("-8", "-10"),
    "+017": ("15", "+17"),
    "00": ("0", "0"),
    "0_100": ("64", "100"),
    "0x10": ("16", "16"),
    "0xFf": ("255", "255"),
    "0b1": ("1", "1"),
    "0b11": ("3", "3"),
    "1:30": ("90", "90"),
    "1:30:00": ("5400", "5400"),
    "1:30.5": ("90.5", "90.5"),
}
"""By what is written what it is to YAML, and the number to write."""
DURATIONS = {"1:30": "90s", "1:30:00": "90m", "1:30.5": "90.5s"}

FIELDS = [
    "rules: [{name: a, qps: *}]",
    "rules: [{name: a, concurrency: *}]",
    "rules: [{name: a, limits: [*]}]",
    "rules: [{name: a, limits: [{limit: 5/s, burst: *}]}]",
    "rules: [{name: a, limits: [{limit: 5/s, warm_up: *}]}]",
    "rules: [{name: a, qps: 5, cost: *}]",
    "rules: [{name: a, qps: 500, lease: *}]",
    "rules: [{name: a, qps: 5, max_delay: *}]",
    "rules: [{name: a, qps: 5, reserve: *}]",
    "rules: [{name: a, qps: 5, charge_if: {status: [*]}}]",
    "rules: [{name: a, qps: 5, charge_if: {status_not: [5xx, *]}}]",
    "rules: [{name: a, qps: 5, methods: [*]}]",
    "rules: [{name: a, qps: 5, key: [*]}]",
    "rules: [{name: a, qps: 5, tier: *}]",
    "rules: [{name: *, qps: 5}]",
    "rules: [{name: a, adaptive: {min: *}}]",
    "rules: [{name: a, adaptive: {delay: *}}]",
    "tier: *",
    "callers: [{id: *, api_key: a}]",
    "callers: [{id: a, priority: *, api_key: a}]",
    "rules: [{name: a, qps: 5}]\ntests: [{given: {path: /, at: *}, expect: {}}]",
    "rules: [{name: a, qps: 5}]\ntests: [{given: {path: /, headers: {x-id: *}}, expect: {}}]",
    "rules: [{name: a, qps: 5}]\ntests: [{given: {path: /}, expect: {remaining: *}}]",
]


def mistakes(folder: Path, text: str) -> list[ConfigError]:
    """The mistakes in a rule file, behind a line of comment."""
    (folder / "rules.yaml").write_text(f"# rules\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        read_rule_files(folder / "rules.yaml")
    return list(caught.value.every)


@pytest.mark.parametrize("text", FIELDS)
def test_number_that_yaml_reads_differently_is_a_mistake(tmp_path: Path, text: str) -> None:
    """Wherever it stands it is a mistake, once, that says what to write; a secret is not repeated."""
    before, _, _ = text.partition("*")
    for written, (number, expected) in NUMBERS.items():
        with case(written):
            every = mistakes(tmp_path, text.replace("*", written))
            found = [each for each in every if "in YAML, expected" in each.reason or "YAML reads differently" in each.reason]
            assert [each.line for each in found] == [2 + before.count("\n")]
            if text.startswith("callers"):
                assert found[0].reason == "a number that YAML reads differently, expected decimal digits, or quotes around text"
            else:
                reason = f"{written} is {number} in YAML, expected {expected} for the number, or '{written}' in quotes for text"
                if ":" in written and any(f"{name}: *" in text for name in ("warm_up", "max_delay", "delay", "at")):
                    reason = f"{written} is {number} in YAML, expected {DURATIONS[written]} for the duration"
                assert found[0].reason == reason
                assert str(found[0]).startswith(f"{tmp_path}/rules.yaml:{found[0].line}: ")
            assert [each.field for each in every].count(found[0].field) == 1


@pytest.mark.parametrize(
    "text", ["rules: [{name: a, qps: 5, *: 5}]", "*: 5", "callers: [{id: a, limits: {*: 5/s}, api_key: a}]"]
)
def test_name_that_is_no_text_to_yaml_is_a_mistake(tmp_path: Path, text: str) -> None:
    for written in ("010", "0x10", "1:30", "on", "no", "5", "2026-11-28", "null", "~"):
        with case(written):
            (first, *_) = mistakes(tmp_path, text.replace("*", written))
            assert (first.line, first.reason) == (2, f"expected a name, in quotes if it looks like something else: '{written}'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rules: [{name: a, path: [/items/{id}], qps: 5}]", "expected quotes around text with {, such as '/items/{id}'"),
        ("rules: [{name: a, path: /items/{id}, qps: 5}]", "expected quotes around text with {, such as '/items/{id}'"),
        ("rules: [{name: a, qps: {{ qps }}}]", "a template has to be filled in before"),
        ("rules: [{name: a, qps: 5, ban: yes}]", "or in Python Ban(...)"),
        (
            "rules: [{name: a, limits: [{count: 5, period: day}]}]",
            "expected for example {limit: 100/minute, algorithm: fixed_window}",
        ),
    ],
)
def test_what_would_have_been_right_is_said_last(tmp_path: Path, text: str, expected: str) -> None:
    assert mistakes(tmp_path, text)[0].reason.endswith(expected)


WORDS = [
    ("rules: [{name: *, qps: 5}]", "name"),
    ("rules: [{name: a, qps: 5, methods: [*]}]", "methods"),
    ("rules: [{name: a, qps: 5, key: [*]}]", "key"),
    ("rules: [{name: a, qps: 5, tier: *}]", "tier"),
    ("rules: [{name: a, qps: 5, replaces: [*]}]", "replaces"),
    ("rules: [{name: a, qps: 5, on_error: *}]", "on_error"),
    ("rules: [{name: a, qps: *}]", "qps"),
    ("rules: [{name: a, limits: [*]}]", "limits"),
    ("rules: [{name: a, qps: 5, max_delay: *}]", "max_delay"),
    ("rules: [{name: a, qps: 5, charge_if: {status: [*]}}]", "status"),
    ("tier: *", "tier"),
]


@pytest.mark.parametrize(("text", "field"), WORDS)
def test_word_that_is_true_or_false_to_yaml_is_a_mistake(tmp_path: Path, text: str, field: str) -> None:
    """In the place of a name, a method, a number, it says so, and how to write the word."""
    for written, value in (("on", "true"), ("Off", "false"), ("yes", "true"), ("NO", "false")):
        with case(written):
            (found, *_) = [each for each in mistakes(tmp_path, text.replace("*", written)) if field in each.field]
            assert found.line == 2
            assert found.reason.endswith(f"; {written} is {value} in YAML; write '{written}' in quotes for text")


@pytest.mark.parametrize("field", ["qps", "cost", "max_delay", "lease", "concurrency"])
def test_number_that_is_text_to_yaml_is_a_mistake(tmp_path: Path, field: str) -> None:
    for written, number in {
        "1e3": "1000",
        "1E3": "1000",
        "2.5e1": "25",
        "0o10": "8",
        "08": "8",
        "0o9": "9",
        "0o" + "7" * 18: "18014398509481983",
        "1234567e0": "1234567",
        "1e30": "1.0e+30",
        "25e-9": "2.5e-08",
    }.items():
        with case(written):
            (found,) = mistakes(tmp_path, f"rules:\n  - name: a\n    qpd: 5\n    {field}: {written}")
            assert found.line == 5
            assert found.reason.endswith(f"; {written} is text in YAML; write {number} for the number")


HUGE = ["0o" + "7" * 400, "0o" + "7" * 5000, "0o" + "9" * 400, "9" * 400 + "e9", "9" * 5000 + "e9", "9" * 5000]
HUGE += ["9" * 400 + ".5", "1e999", "1.0e+999", ".inf", "0x" + "f" * 5000, "9" * 400 + ":30"]


@pytest.mark.parametrize("text", FIELDS)
def test_yaml_number_that_is_huge_gets_a_short_message(tmp_path: Path, text: str) -> None:
    """It is a mistake, or an ordinary name. The message is short, and asks for decimal digits where YAML reads text."""
    for written in HUGE:
        (tmp_path / "rules.yaml").write_text(text.replace("*", written))
        with case(f"{written:.8}", len(written)):
            try:
                read_rule_files(tmp_path / "rules.yaml")
            except ConfigError as error:
                for mistake in error.every:
                    assert mistake.line == 1 + text[: text.index("*")].count("\n")
                    assert len(mistake.reason) < 600
                    if "is text in YAML" in mistake.reason:
                        assert mistake.reason.endswith("is text in YAML; write decimal digits for the number")


@pytest.mark.parametrize("written", ["0b_", "0x_"])
def test_yaml_number_prefix_without_digits_is_refused(tmp_path: Path, written: str) -> None:
    """Yaml itself cannot read it."""
    (found, *_) = mistakes(tmp_path, f"rules: [{{name: a, qps: {written}}}]")
    assert (found.line, "expected" in found.reason) == (2, True)


def test_yaml_values_in_plain_form_are_read(tmp_path: Path) -> None:
    """Decimal numbers in every spelling, truth in every word, and anything in quotes."""
    (tmp_path / "rules.yaml").write_text(
        "tier: '010'\n"
        "rules:\n"
        "  - {name: '0x10', qps: 1_000, qpm: +900, shadow: yes, exempt: off, methods: ['on']}\n"
        "  - {name: 1e3, limits: [10/minute, '010/hour'], cost: 0, reserve: 0.2, adaptive: on}\n"
        "  - {name: 08-a, qps: 10, max_delay: 1.0e+1, charge_if: {status: [401, 5xx]}}\n"
    )
    first, second, third = load_rules(tmp_path / "rules.yaml").tiers["010"]
    assert (first.name, first.qps, first.qpm, first.shadow, first.methods) == ("0x10", 1000, 900, True, {"ON"})
    assert (second.name, [limit.count for limit in second.limits]) == ("1e3", [10, 10])
    assert (third.name, third.max_delay) == ("08-a", 10.0)


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    """Neither a key in the place of its digest nor a header's value."""
    text = "callers: [{id: a, api_key: 0x5ec4e7}, {id: b, header: {X-Caller: 0157}}, {id: c, header: {X-Caller: on}}]"
    told = " ".join(map(str, mistakes(tmp_path, text))).replace(str(tmp_path), "")
    assert not [secret for secret in ("5ec4e7", "6210791", "0157", "111", "True", "on is") if secret in told]


EMPTY = [
    *[f"rules:\n  - name: a\n    qpd: 5\n    {field}:" for field in ("qps", "qpm", "limits", "ban", "concurrency", "key")],
    *[f"rules:\n  - name: a\n    qpd: 5\n    {field}:" for field in ("adaptive", "charge_if", "max_delay", "reserve", "tier")],
    "rules:\n  - limits:\n      - limit: 5/s\n        burst:\n    name: a",
    "rules:\n  - name: a\n    qpd: 5\n    ban:\n      after: 2\n      within: 10m\n      for: 1h\n      most:",
    "rules:\n  - {name: a, qpd: 5}\n  - name: b\n    qpm:",
    "callers:\n  - id: a\n    api_key:",
    "callers:\n  - id: a\n    header: {X-Id: a}\n    limits:",
    "rules: []\ntests:",
    "rules: []\ntier:",
]


@pytest.mark.parametrize("text", EMPTY)
def test_an_empty_field_is_a_mistake(tmp_path: Path, text: str) -> None:
    """With its line, and once: such a limit would silently be none."""
    found = mistakes(tmp_path, text)
    line = 2 + max(number for number, each in enumerate(text.splitlines()) if each.endswith(":"))
    if "burst" in text:
        line = 5
    assert (found[0].line, found[0].reason) == (line, "empty, expected a value, or omit the field")
    assert [each.field for each in found].count(found[0].field) == 1


def test_a_null_that_is_written(tmp_path: Path) -> None:
    """It stands for the default."""
    (tmp_path / "rules.yaml").write_text("rules: [{name: a, qps: 5, qpm: null, ban: ~}]\n")
    rule = read_rule_files(tmp_path / "rules.yaml").files[0].rules[0]
    assert (rule.qpm, rule.ban) == (None, None)


def test_a_flag_that_is_on_is_no_text(tmp_path: Path) -> None:
    """An error about it does not ask for quotes."""
    (tmp_path / "rules.yaml").write_text("rules: [{name: api, qpm: 5, exempt: on}]")
    with pytest.raises(ConfigError) as raised:
        load_rules(tmp_path / "rules.yaml")
    assert str(raised.value).endswith("is exempt and has limits, expected one or the other")
