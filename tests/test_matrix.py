"""The script that runs the tests on many versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import matrix


def test_an_environment_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run would take it for complete."""
    monkeypatch.setattr(matrix, "BUILD", tmp_path)
    pip, python = tmp_path / "pip" / "bin" / "pip", tmp_path / "python"
    pip.parent.mkdir(parents=True)
    pip.touch()
    python.write_text('#!/bin/sh\nmkdir -p "$4/bin"\ntouch "$4/bin/python"\nexit 1\n')
    python.chmod(0o755)
    cell = matrix.Cell("cell", "", lambda _: "")
    with pytest.raises(RuntimeError, match="python exited with 1"):
        matrix.environment(cell, python, "wanted")
    assert not (cell.folder / "venv").exists()
