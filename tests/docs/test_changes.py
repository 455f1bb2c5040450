"""changes/ has what towncrier reads: one file per change, of a type that pyproject.toml names."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.support.markdown import ROOT, text_of

TOWNCRIER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
FRAGMENTS = [path for path in (ROOT / TOWNCRIER["directory"]).glob("*") if path.name != "README.md"]


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: path.name)
def test_a_fragment_has_a_type_and_a_text(fragment: Path) -> None:
    """Any other file would be left out of the changelog without a word."""
    types = "|".join(each["directory"] for each in TOWNCRIER["type"])
    assert re.fullmatch(rf"(\+[a-z-]+|\d+)\.({types})\.md", fragment.name)
    assert fragment.read_text().strip().endswith(".")


def test_the_changelog_has_a_place_for_the_next_version() -> None:
    """Above the latest version, and once."""
    changelog = text_of(TOWNCRIER["filename"])
    before, _, after = changelog.partition(TOWNCRIER["start_string"])
    assert "\n## " not in before
    assert after.startswith("\n## ")
    assert changelog.count(TOWNCRIER["start_string"]) == 1
