"""Lists that stay short."""

from __future__ import annotations

import pytest

from limitgate.messages.text import LONGEST, listed, shortened


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (list("abcdefghijk"), "a, b, c, d, e, f, g, h, i, j, k"),
        (list("abcdefghijkl"), "a, b, c, d, e, f, g, h, i, j, … and 2 more"),
        (["x"] * 1_234, "x, x, x, x, x, x, x, x, x, x, … and 1,224 more"),
        (["y" * 1_000, "z"], "y" * (LONGEST - 1) + "…, z"),
    ],
)
def test_many_entries_are_counted_and_long_ones_cut(entries: list[str], text: str) -> None:
    assert listed(entries) == text
    assert listed(dict.fromkeys(entries)) == listed(list(dict.fromkeys(entries)))


def test_what_stands_between() -> None:
    assert listed(["a", "b", "c", "d"], "; ", most=2) == "a; b; … and 2 more"


def test_a_text_that_is_long_enough_to_be_shown_is_not_cut() -> None:
    assert shortened("x" * LONGEST) == "x" * LONGEST
    assert shortened("x" * (LONGEST + 1)) == "x" * (LONGEST - 1) + "…"
