"""`limitgate check`: every mistake of rule files at once, in each format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from click.testing import Result

from limitgate.command.group import limitgate
from tests.rules.test_files import MISTAKES, prefix_of
from tests.support.command_line import CliRunner

MANY = """\
tier: default
tier: vip
rulez: []
rules:
  - name: api
    qps: -1
    qpm: many
    paht: /x
    limits: [often, 5/s, seldom]
  - 5
  - name: login
    path: /login
    exclude: [/login]
    qps: 5
    cost: 9
  - {qps: 5}
  - {name: other, qps: 5, replaces: [api, nobody, nothing]}
callers:
  - {id: a, api_key: plain, sex: f}
  - nobody
"""


def check(*words: str | Path) -> Result:
    return CliRunner().invoke(limitgate, ["check", *map(str, words)])


def found(*words: str | Path) -> list[dict[str, Any]]:
    result = check("--format", "json", *words)
    findings: list[dict[str, Any]] = json.loads(result.stdout)
    assert all(list(each) == ["file", "line", "field", "level", "message"] for each in findings)
    return findings


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(dedent(text))
    return folder


def test_every_mistake_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    """Each with its line and field: several in one rule, in several rules and callers, and at the top."""
    written(tmp_path, rules=MANY)
    assert [(each["line"], each["field"]) for each in found(tmp_path)] == [
        (2, "tier"),
        (3, "rulez"),
        (6, "rules[0].qps"),
        (7, "rules[0].qpm"),
        (8, "rules[0].paht"),
        (9, "rules[0].limits[0]"),
        (9, "rules[0].limits[2]"),
        (10, "rules[1]"),
        (13, "rules[2].exclude"),
        (15, "rules[2].cost"),
        (16, "rules[3]"),
        (19, "callers[0].api_key"),
        (19, "callers[0].sex"),
        (20, "callers[1]"),
    ]


def test_mistakes_of_all_files_are_told_and_those_between_them(tmp_path: Path) -> None:
    """A rule with a mistake of its own is known to the others all the same."""
    written(
        tmp_path,
        default="rules:\n  - {name: api, qps: -1}\n  - {name: api, qps: 1}\n",
        vip="tier: vip\nrules:\n  - {name: a, qps: 5, replaces: [api, apy]}\n  - {name: b, qps: 5, tier: gold}\n",
    )
    assert [(Path(each["file"]).name, each["line"], each["field"]) for each in found(tmp_path)] == [
        ("default.yaml", 2, "rules[0].qps"),
        ("default.yaml", 3, "rules[1].name"),
        ("vip.yaml", 3, "rules[0].replaces[1]"),
        ("vip.yaml", 4, "rules[1].tier"),
    ]


def test_a_file_that_is_no_yaml_hides_no_mistake_of_others(tmp_path: Path) -> None:
    """But tiers and names that it may describe are not missed."""
    written(tmp_path, default="rules: [", vip="tier: vip\nrules:\n  - {name: a, qps: -1, replaces: [api], tier: gold}\n")
    assert [(Path(each["file"]).name, each["field"]) for each in found(tmp_path)] == [
        ("default.yaml", None),
        ("vip.yaml", "rules[0].qps"),
    ]


def test_several_paths_are_rule_sets_of_their_own(tmp_path: Path) -> None:
    """Two folders may have rules of the same names; a missing one is a finding without a line."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        written(tmp_path / name, rules="rules: [{name: api, qps: 5}]")
    assert check(tmp_path / "a", tmp_path / "b").exit_code == 0
    result = check(tmp_path / "a", tmp_path / "c")
    assert (result.exit_code, result.stdout.startswith(f"{tmp_path / 'c'}: ")) == (1, True)
    (missing,) = found(tmp_path / "a", tmp_path / "c")
    assert (missing["file"], missing["line"], missing["field"]) == (str(tmp_path / "c"), None, None)


def test_mistakes_are_told_as_the_service_tells_them(tmp_path: Path) -> None:
    """Whatever would keep the service from starting, with file, line, field and what was expected."""
    file = tmp_path / "rules.yaml"
    for text, where in MISTAKES:
        file.write_text(text)
        result = check(file)
        assert result.exit_code == 1, text
        lines = result.stdout.splitlines()
        assert any(re.match(prefix_of(where), line.removeprefix(f"{file}:")) for line in lines), (text, lines)
        assert all(line.startswith(f"{file}:") and "expected" in line for line in lines), (text, lines)


def test_a_mistake_in_python_is_told_with_its_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limits_with_a_mistake.py").write_text("from limitgate import Rule\nRULES = [Rule('b', qpm=5, path='/b*')]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "limits_with_a_mistake:RULES: rule 'b': path: path '/b*' has" in check("limits_with_a_mistake:RULES").stdout


def test_github_is_told_by_annotations_with_escapes(tmp_path: Path) -> None:
    """Nothing in a file can begin another command: line ends, and in properties colons and commas, are escaped."""
    folder = tmp_path / "a,b:c%"
    folder.mkdir()
    file = folder / "rules.yaml"
    file.write_text('rules:\n  - {name: api, qps: 5, path: "/a\\n::error::%41"}\n')
    result = check("--format", "github", folder)
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    place = str(file).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    assert line.startswith(f"::error file={place},line=2,title=limitgate check::rules[0].path: ")
    assert "%2541" in line


def test_fine_rules_print_nothing_to_mend(tmp_path: Path) -> None:
    """An empty list as JSON, and exit status 0; the line that counts them, and metric series, stands beside."""
    written(tmp_path, rules="rules: [{name: api, qps: 5}]")
    assert found(tmp_path) == []
    line = f"{tmp_path}: no errors, 15 metric series\n"
    assert check(tmp_path).stdout == line
    assert check("--json", tmp_path).stderr == check("--format", "github", tmp_path).stderr == line
    assert check("--format", "github", tmp_path).stdout == ""
    assert check("--json", tmp_path).stdout == check("--format", "json", tmp_path).stdout == "[]\n"
    assert check("--json", "--format", "json", tmp_path).exit_code == 0
    both = check("--json", "--format", "github", tmp_path)
    assert (both.exit_code, "expected either --json or --format github, not both" in both.stderr) == (2, True)


def test_series_are_counted_for_each_rule_set(tmp_path: Path) -> None:
    """Those of all its rules that are not exempt, in all tiers; of rules that cannot be read nobody knows."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    written(tmp_path / "a", rules="rules: [{name: api, limits: [5/s, 9/m], max_delay: 1}, {name: all, exempt: true}]")
    written(tmp_path / "b", rules="rules: [{name: 5}]")
    written(tmp_path / "a", vip="tier: vip\nrules: [{name: api, concurrency: 3}]")
    lines = check(tmp_path / "a", tmp_path / "b").stdout.splitlines()
    assert [line for line in lines if line.endswith(" metric series")] == [
        f"{tmp_path / 'a'}: no errors, 2 warnings, 33 metric series"
    ]


def test_what_is_found_is_bounded(tmp_path: Path) -> None:
    """A file made of nothing but mistakes does not fill the memory."""
    written(tmp_path, rules="rules:\n" + "  - {name: 5}\n" * 1_000)
    assert len(found(tmp_path)) == 100
    assert "there may be more" in check(tmp_path).stderr


ODD = "rules:\n  - name: a\n    limits:\n      - 10/second\n      - 5/minute\n"


def test_what_is_odd_is_a_warning(tmp_path: Path) -> None:
    """With its line; only `--strict` makes the exit status 1 of it."""
    file = written(tmp_path, rules=ODD) / "rules.yaml"
    result = check(file)
    assert (result.exit_code, check("--strict", file).exit_code) == (0, 1)
    assert result.stdout.startswith(f"{file}:4: warning: rules[0].limits[0]: 10/second never refuses")
    (finding,) = found(file)
    assert (finding["line"], finding["field"], finding["level"]) == (4, "rules[0].limits[0]", "warning")
    assert check("--format", "github", file).stdout.startswith("::warning file=")


def test_callers_that_identify_names_are_taken_for_granted_if_told(tmp_path: Path) -> None:
    """Files alone do not say whether the application knows callers."""
    written(tmp_path, rules="rules: [{name: a, qps: 5, key: [caller]}]")
    assert check("--strict", tmp_path).exit_code == 1
    assert check("--strict", "--identify", tmp_path).exit_code == 0
