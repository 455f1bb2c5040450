"""The public API as typed code: what tests/typing says of it is true for code outside of the repository, too."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from limitgate import Rule
from limitgate.gate.lifecycle.build import GateOptions
from limitgate.rules.options import RuleOptions
from limitgate.rules.settings import Settings

CHECKED = Path(__file__).parent / "typing"


def mypy(folder: Path, config: pytest.Config) -> str:
    """What mypy says of a folder, with its strictest settings and none of ours."""
    cache = config.cache.mkdir("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={cache}", "--no-error-summary", "."]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder).stdout


def test_the_api_is_typed_for_whoever_installs_it(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Outside of the repository every type is as asserted, and every wrong call is rejected by the error that is named."""
    shutil.copytree(CHECKED, tmp_path / "shop", ignore=shutil.ignore_patterns("__pycache__"))
    assert mypy(tmp_path, pytestconfig) == ""


def test_what_is_not_rejected_is_noticed(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """The test above can fail: an assertion that is false and an error that is none are reported."""
    program = """\
    from typing import assert_type
    from limitgate import Limit, Rule

    assert_type(Rule("api", "5/second").name, int)
    Limit("5/second")  # type: ignore[arg-type]
    """
    (tmp_path / "shop.py").write_text("\n".join(line.strip() for line in program.splitlines()))
    said = mypy(tmp_path, pytestconfig)
    assert [line.rpartition("[")[2] for line in said.splitlines()] == ["assert-type]", "unused-ignore]"]


def test_typed_options_are_all_options() -> None:
    """The options that type checkers know are those that there are."""
    assert set(RuleOptions.__annotations__) == set(Rule.model_fields) - {"name", "limits"}
    assert set(GateOptions.__annotations__) == set(Settings.model_fields)
