"""docs/guarantees.md names the tests that show its rows, and ``pytest -m G07`` runs those of row G07."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.guarantees import PAGE, ROOT, UNTESTED, numbers_of, rows, selected_files

THIS = Path(__file__).relative_to(ROOT).as_posix()


def test_every_row_has_a_number_of_its_own() -> None:
    """Each row of each table, so that no row lacks a marker."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| row")]
    assert [line.split()[1] for line in lines] == [row.number for row in rows()]
    assert len({row.number for row in rows()}) == len(rows()) > 20


def test_every_row_names_its_tests() -> None:
    """Each row names a test, or says that there is none."""
    assert all(len(row.cells) == 4 for row in rows())
    assert [row.number for row in rows() if bool(row.shown) == (UNTESTED in row.cells[-1])] == []


def test_named_tests_exist() -> None:
    """A test that was renamed or removed is no longer named."""
    named = {shown for row in rows() for shown in row.shown}
    assert [shown for shown in named if not (ROOT / shown.path).exists()] == []
    assert [shown for shown in named if shown.test and f"def {shown.test}(" not in (ROOT / shown.path).read_text()] == []


def test_a_named_test_has_the_marker_of_its_row() -> None:
    """A test, each of its named cases, and any test in a named folder."""
    for number, shown in [(row.number, shown) for row in rows() for shown in row.shown]:
        path = shown.path if shown.test else f"{shown.path}/test_faults.py"
        for case in shown.cases or ("",):
            assert number in numbers_of(path, shown.test or "test_wsgi", case)
        assert number not in numbers_of(THIS, "test_named_tests_exist", "")


def test_a_marker_selects_the_named_cases() -> None:
    """Each named case of a parametrized test is collected, and no other case."""
    having_cases = [row for row in rows() if any(shown.cases for shown in row.shown)]
    expression = " or ".join(row.number for row in having_cases)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "-m", expression]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    collected = [line for line in output.splitlines() if line.startswith("tests/")]
    for row in having_cases:
        for shown in row.shown:
            found = [line for line in collected if line.startswith(f"{shown.path}::{shown.test}")]
            assert found, output
            for case in shown.cases:
                assert any(f"{case}]" in line or f"-{case}-" in line for line in found), case
    cases = {case for row in having_cases for shown in row.shown for case in shown.cases if "faults" in shown.path}
    assert len([line for line in collected if "::test_asgi[" in line]) == len(cases)


@pytest.mark.parametrize("expression", ["", "alone", "not alone", "G01 and alone"])
def test_other_expressions_select_from_all_files(expression: str) -> None:
    """Only an expression of row numbers says in which files its tests are."""
    assert selected_files(expression) is None
