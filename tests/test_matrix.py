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


def test_some_cells_leave_the_other_rows_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that has run nothing yet keeps what the page says of the other cells."""
    page, cells = tmp_path / "page.md", [matrix.Cell(name, name, lambda cell: f"{cell.name} a|b") for name in ("one", "two")]
    page.write_text(f"before\n{matrix.START}\n{matrix.END}\nafter\n")
    for name, value in {"PAGE": page, "BUILD": tmp_path, "CELLS": cells}.items():
        monkeypatch.setattr(matrix, name, value)
    for chosen in ("two", "one"):
        monkeypatch.setattr("sys.argv", ["matrix", chosen])
        with pytest.raises(SystemExit, match="0"):
            matrix.main()
    said = page.read_text()
    assert [row.split(" | ")[2] for row in said.splitlines() if row.startswith("| `")] == ["one a/b", "two a/b"]
    assert said.startswith("before\n")
    assert said.endswith("\nafter\n")
