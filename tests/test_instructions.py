"""How many instructions a request takes, and how that is worked out."""

from __future__ import annotations

import pytest

from benchmarks import instructions
from benchmarks.counted import BARE, FEW, IN_MEMORY, MANY


def part(name: str, requests: int, total: int) -> str:
    return (
        f"part: 1\n\ndesc: Timerange: Basic block 0 - 1\ndesc: Trigger: Client Request: {name}|{requests}\n\ntotals: {total}\n"
    )


def test_no_request_takes_more_instructions_than_was_kept() -> None:
    """A rise that is meant is kept by `make bench-count`, in the same commit.

    The options in memory are left to it: they take as long as all others, and tests/test_path.py counts their calls.
    """
    if reason := instructions.hindrance():
        pytest.skip(reason)
    kept = instructions.kept().get(instructions.python())
    if kept is None:
        pytest.skip(f"no counts are kept for Python {instructions.python()}: `make bench-count` keeps some")
    setting = instructions.setting()
    others = [
        f"{name} {setting.get(name)} instead of {value}" for name, value in kept.setting.items() if setting.get(name) != value
    ]
    if others:
        pytest.skip(f"counts are kept for another setting, here is {'; '.join(others)}")
    assert kept.counts.keys() == BARE.keys(), "other cases are kept: `make bench-count`"
    counts = {name: count for name, count in kept.counts.items() if name not in IN_MEMORY}
    risen = instructions.risen(counts, instructions.counted(1, counts))
    if risen:  # a single run may include rare work
        risen = instructions.risen(counts, instructions.counted(names=counts))
    assert not risen, f"more than {instructions.TOLERANCE:.0%} above what is kept (`make bench-count` keeps them): {risen}"


def test_what_comes_once_in_a_run_cancels_out() -> None:
    """The least of each run counts, few requests are taken off many, and the bare application's off the whole."""
    case, bare = next((case, bare) for case, bare in BARE.items() if bare)
    alone = next(case for case, bare in BARE.items() if not bare)
    parts = [
        *[part(case, FEW, 1_000 + extra + FEW * 500) + part(case, MANY, 1_000 + extra + MANY * 500) for extra in (70, 0, 90)],
        part(bare, FEW, 10 + FEW * 200) + part(bare, MANY, 10 + MANY * 200),
        part(alone, FEW, FEW * 40) + part(alone, MANY, MANY * 40),
    ]
    assert instructions.worked_out("version: 1\ntotals: 9\n" + "".join(parts)) == {case: 300, alone: 40}


def test_a_rise_is_told_with_its_figures() -> None:
    """Three in a hundred are let through, less is welcome, and a case that is not kept cannot be compared."""
    before = {"same": 1_000, "a little": 1_000, "much": 1_000, "less": 1_000, "gone": 5}
    now = {"same": 1_000, "a little": 1_030, "much": 1_031, "less": 10, "new": 7}
    assert instructions.risen(before, now) == ["much: 1,000 -> 1,031", "gone: 5 -> 0", "new: 0 -> 7"]


def test_counts_of_other_versions_stay(tmp_path, monkeypatch) -> None:
    """Each minor version of Python has its own, with the setting that they hold for."""
    file = tmp_path / "instructions.json"
    monkeypatch.setattr(instructions, "setting", lambda: {"machine": "one"})
    for version, count in (("3.13", 7), ("3.11", 5), ("3.13", 6)):
        monkeypatch.setattr(instructions, "python", lambda version=version: version)
        instructions.keep({"case": count}, file)
    kept = instructions.kept(file)
    assert {version: entry.counts for version, entry in kept.items()} == {"3.11": {"case": 5}, "3.13": {"case": 6}}
    assert kept["3.11"].setting == {"machine": "one"}


def test_what_hinders_counting_is_named(monkeypatch) -> None:
    """So a test that is skipped says what to do."""
    monkeypatch.setattr(instructions.shutil, "which", lambda name: None if name == "valgrind" else name)
    assert instructions.hindrance() == "valgrind not installed (`scripts/ensure-valgrind` tries to)"
