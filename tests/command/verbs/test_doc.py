"""`limitgate doc`: the entry of each code, from the page."""

from __future__ import annotations

import json
from operator import attrgetter

import pytest
from click.testing import Result

from limitgate.command.group import limitgate
from limitgate.messages.diagnostics import Diagnosis
from tests.support.command_line import CliRunner


def doc(*words: str) -> Result:
    return CliRunner().invoke(limitgate, ["doc", *words])


@pytest.mark.parametrize("diagnosis", Diagnosis, ids=attrgetter("code"))
def test_doc_code_prints_its_entry(diagnosis: Diagnosis) -> None:
    result = doc(diagnosis.code)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"# {diagnosis.code}\n")
    assert "*What to do:*" in result.stdout
    assert result.stdout.count("# LG") == 1


@pytest.mark.parametrize("spelling", ["LG006", "lg006", "6", "006", " lg006 ", "LG6", "lg 6", "LG-06", "LG0006"])
def test_doc_code_in_other_spelling_finds_it(spelling: str) -> None:
    assert doc(spelling).stdout.startswith("# LG006\n")


def test_doc_without_code_lists_all() -> None:
    lines = doc().stdout.splitlines()
    assert [line[:5] for line in lines] == sorted(diagnosis.code for diagnosis in Diagnosis)
    assert all(len(line) > 10 for line in lines)


def test_doc_json_is_one_value() -> None:
    (entry,) = json.loads(doc("LG006", "--json").stdout)
    assert list(entry) == ["code", "summary", "text"]
    assert entry["code"] == "LG006"
    assert "trusted_proxies" in entry["text"]
    assert len(json.loads(doc("--json").stdout)) == len(Diagnosis)


@pytest.mark.parametrize("code", ["LG999", "", "x" * 300, "²", "9" * 5000, "LG06\x1b[31m"])
def test_doc_unknown_code_is_wrong_usage(code: str) -> None:
    result = doc(code)
    assert result.exit_code == 2
    assert "is not a code of LimitGate" in result.stderr
    assert "\x1b" not in result.stderr
    assert len(result.stderr) < 400
