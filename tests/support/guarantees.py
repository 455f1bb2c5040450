"""Rows of docs/guarantees.md: their numbers, which are markers of pytest, and the tests that each row names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
UNTESTED = "by reasoning only"

_ROW = re.compile(r"^\| (G\d\d) \| (.*) \|$", re.MULTILINE)
_NAMED = re.compile(r"`(tests[\w/]*(?:\.py)?)(?:::(test_\w+))?`(?: \(([^)]+)\))?")


class Shown(NamedTuple):
    """Tests that a row names: a folder, a test, or some of its parametrized cases."""

    path: str
    """Relative to the repository."""
    test: str
    """Empty for a folder."""
    cases: tuple[str, ...]
    """Parts of parametrized ids; empty for all cases."""

    def is_in(self, path: str) -> bool:
        return path == self.path or path.startswith(f"{self.path}/")

    def has(self, test: str, case: str) -> bool:
        return self.test in {"", test} and (not self.cases or any(f"-{each}-" in f"-{case}-" for each in self.cases))


class Row(NamedTuple):
    """A row of the page."""

    number: str
    situation: str
    cells: tuple[str, ...]
    shown: tuple[Shown, ...]


@cache
def rows() -> tuple[Row, ...]:
    """All rows, in the order of the page."""
    found = []
    for number, text in _ROW.findall(PAGE.read_text()):
        cells = tuple(text.split(" | "))
        shown = [
            Shown(path, test, tuple(cases.split("; ")) if cases else ()) for path, test, cases in _NAMED.findall(cells[-1])
        ]
        found.append(Row(number, cells[0], cells, tuple(shown)))
    return tuple(found)


@cache
def _naming_in(path: str) -> list[tuple[str, Shown]]:
    """What the rows name in a module, looked up once for all its tests."""
    return [(row.number, shown) for row in rows() for shown in row.shown if shown.is_in(path)]


def numbers_of(path: str, test: str, case: str) -> list[str]:
    """The rows that name a test. ``case`` is its parametrized id, or empty."""
    return list(dict.fromkeys(number for number, shown in _naming_in(path) if shown.has(test, case)))


def selected_files(expression: str) -> tuple[Shown, ...] | None:
    """The tests of the rows in an expression of ``-m`` such as ``G01 or G02``; None for any other expression."""
    if not re.fullmatch(r"G\d\d(?: or G\d\d)*", expression):
        return None
    numbers = expression.split(" or ")
    return tuple(shown for row in rows() if row.number in numbers for shown in row.shown)
