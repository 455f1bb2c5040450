"""docs/command.md says what the command says."""

from __future__ import annotations

from pathlib import Path

import pytest

from limitgate.command.group import VERBS, limitgate
from tests.support.command_line import CliRunner
from tests.support.markdown import blocks, text_of

PAGE = "docs/command.md"


def test_what_is_told_of_the_rules_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Word for word, as a reader may try it."""
    (rules,), (output,) = blocks(PAGE, "yaml"), blocks(PAGE, "text")
    (tmp_path / "rules.yaml").write_text(rules.text)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(limitgate, ["check", "rules.yaml"])
    assert (result.exit_code, result.stdout) == (1, output.text)


def test_every_verb_is_on_the_page() -> None:
    """With what it does, or where that is said."""
    page = text_of(PAGE)
    assert [verb for verb in VERBS if f"`{verb}" not in page] == []
