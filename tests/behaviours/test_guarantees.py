"""docs/guarantees.md says what may pass at worst, and names the tests that show it; they have to be there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()


def test_every_test_that_is_named_is_there() -> None:
    """A test that was renamed or removed is not named any more."""
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE))
    assert len(named) > 20
    missing = [name for file, name in named if f"def {name}(" not in (ROOT / file).read_text()]
    assert not missing


def test_every_row_says_by_what_it_is_shown() -> None:
    """Each situation names a test, or says openly that there is none."""
    rows = [
        line.strip("|").split(" | ")
        for line in PAGE.splitlines()
        if line.startswith("| ") and not line.startswith("| situation")
    ]
    assert len(rows) > 20
    assert all(len(row) == 4 for row in rows)
    assert all("tests/" in row[3] or "by reasoning only" in row[3] for row in rows)
