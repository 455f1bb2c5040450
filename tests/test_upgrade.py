"""What `make upgrade` finds in the counts of both versions; the run itself is tried by hand."""

from __future__ import annotations

from typing import Any

import pytest

from scripts import upgrade

Counts = dict[str, int]
KEYS = [f"{key}{whose}" for key in upgrade.BOUNDS for whose in ("", " of old", " of new")]


def results(admitted: Counts, refused: Counts) -> dict[str, dict[str, Any]]:
    """Of one process, where all other keys admit what is granted and refuse as much."""
    granted = {key: int(rate * upgrade.SECONDS + burst) for key, (rate, burst) in upgrade.BOUNDS.items()}
    usual = {key: granted[key.partition(" ")[0]] for key in KEYS}
    quiet = dict.fromkeys(("quiet", "quiet of old", "quiet of new"), 0)
    return {
        "old-0": {"admitted": usual | admitted, "refused": usual | quiet | refused, "errors": [], "logged": [], "bans": [True]}
    }


HALF = int(upgrade.SECONDS * 25)


@pytest.mark.parametrize(
    ("admitted", "refused", "found"),
    [
        ({}, {}, []),
        ({"gcra": HALF, "gcra of new": HALF}, {}, ["gcra: ", "gcra of new: "]),
        ({"log": 0, "log of new": 0}, {}, ["log: ", "log of new: "]),
        ({"sliding of new": 0}, {}, ["sliding of new: "]),
        ({"windows of old": 9_999}, {}, ["windows of old: ", "windows: ", "windows of new: "]),
        ({}, {"windows of new": 0}, ["windows of new: nothing refused"]),
        ({}, dict.fromkeys(KEYS, 0), [f"{key}: nothing refused" for key in KEYS]),
        ({}, {"quiet": 1}, ["quiet: 1 refused"]),
    ],
    ids=["healthy", "half", "nothing but by the old", "nothing", "too much", "one unsaturated", "unsaturated", "refused"],
)
def test_what_differs_is_found(admitted: Counts, refused: Counts, found: list[str]) -> None:
    """A new version that admits too little is found alone and beside the old one, and without a refusal nothing is proved."""
    lines = upgrade.findings(results(admitted, refused))
    assert len(lines) == len(found)
    assert all(line.startswith(begins) for line, begins in zip(lines, found, strict=True)), lines
