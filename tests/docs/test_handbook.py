"""What docs/ has of the code is as the code says, and the handbook that writes it says it in plain words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal
from xml.etree import ElementTree as ET

import pytest
from pydantic import BaseModel, Field, ImportString

from handbook import figures, reference, side_by_side
from handbook.fields import docstrings, fields_of, plain, table
from handbook.first_minute import curves, picture
from limitgate import Rule, Settings
from limitgate.limits.limit import NAMES
from tests.support.markdown import ROOT, rows, text_of


def test_the_rules_page_has_the_tables_of_the_code() -> None:
    """docs/rules.md is what ``make docs`` makes of it."""
    page = text_of("docs/rules.md")
    assert reference.reference(page) == page


def test_the_page_of_metrics_has_the_table_of_the_code() -> None:
    """docs/observing.md is what ``make docs`` makes of it."""
    page = text_of("docs/observing.md")
    assert figures.figures(page) == page


def test_the_picture_is_drawn_from_the_code() -> None:
    """docs/first-minute.svg is what ``make docs`` draws."""
    assert text_of("docs/first-minute.svg") == picture()


def test_algorithms_are_drawn_side_by_side_from_the_code() -> None:
    """docs/side-by-side.svg is what ``make docs`` draws."""
    assert text_of("docs/side-by-side.svg") == side_by_side.picture()


def test_every_algorithm_is_on_its_page() -> None:
    """docs/algorithms.md tells of each name that a limit may give its algorithm."""
    page = text_of("docs/algorithms.md")
    assert [name for name in NAMES if f"`{name}" not in page] == []


def test_what_each_algorithm_lets_through_of_the_same_traffic() -> None:
    """Each keeps its bound in any period, and comes as near to it as the page says."""
    ways = {way.name: way for way in side_by_side.ways()}
    assert {name: way.most for name, way in ways.items()} == {
        "gcra": 199,  # burst + count - 1
        "gcra, burst 10": 109,
        "with max_delay 2 s": 109,
        "fixed_window": 200,  # twice the count
        "sliding_window": 119,
        "sliding_log": 100,  # never more than the count
        "warm_up 10 s": 77,
        "20 at once": 112,
    }
    assert all(list(way.moments) == sorted(way.moments) for way in ways.values())
    assert ways["gcra"].each_second[34:42] == [10] * 8
    assert ways["fixed_window"].each_second[8:12] == [60, 40, 60, 40]
    assert ways["warm_up 10 s"].each_second[22:42:6] == [4, 4, 5, 10]
    texts = [
        "".join(text.itertext()) for text in ET.fromstring(side_by_side.picture()).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {*ways, "at most 199 in 10 s", "618 in all"} <= set(texts)


def test_every_field_is_described() -> None:
    """The tables have every field of a rule and every option, in their order."""
    assert [row[0] for row in rows("docs/rules.md", "option")] == [f"`{name}`" for name in Settings.model_fields]
    fields = [row[0] for row in rows("docs/rules.md", "field")]
    assert fields == [f"`{name}`" for name in Rule.model_fields]


class Sample(BaseModel):
    some: int = 3
    """How many;
    at least ``one`` | none."""
    named: str
    """See docs/keys.md."""


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (bool, "`true` or `false`"),
        (int, "whole number"),
        (float | None, "number"),
        (Annotated[int, Field(ge=1, le=2000)], "whole number from 1 to 2,000"),
        (Annotated[float, Field(gt=0, le=60)] | None, "number above 0 up to 60"),
        (Literal["a", "b", "c"], "`a`, `b` or `c`"),
        (tuple[Annotated[str, "remark"], ...], "list of text"),
        (frozenset[int] | str, "list of whole number or text"),
        (dict[str, list[int]], "mapping of text to list of whole number"),
        (int | Callable[[str], int], "whole number or callable"),
        (ImportString[Callable[..., Any]] | None, "callable"),
        (Sample, "sample"),
        (Any, "anything"),
        (list, "list"),
    ],
)
def test_types_in_plain_words(annotation: Any, words: str) -> None:
    """A type is said in words that need no Python."""
    assert plain(annotation) == words


def test_a_table_of_fields() -> None:
    """Docstrings become one line of Markdown, pages in it links; what has no default is required."""
    assert table(fields_of(Sample)).splitlines()[2:] == [
        "| `some` | whole number | `3` | How many; at least `one` \\| none. |",
        "| `named` | text | required | See [keys.md](keys.md). |",
    ]
    assert docstrings(Sample).keys() == {"some", "named"}


def test_a_field_without_a_docstring_is_a_mistake() -> None:
    """Nobody can add a field without saying what it means."""

    class Silent(BaseModel):
        some: int = 3

    with pytest.raises(ValueError, match="'some' has no docstring"):
        fields_of(Silent)


def test_a_page_without_marks_is_a_mistake() -> None:
    """A table is put between its marks, and nowhere else."""
    assert reference.inserted("a <!-- x -->old<!-- /x --> b", "x", "new") == "a <!-- x -->\nnew\n<!-- /x --> b"
    with pytest.raises(ValueError, match="no <!-- x -->"):
        reference.inserted("a <!-- x -->old b", "x", "new")


def test_the_picture_shows_what_passes_in_a_minute() -> None:
    """Each limit admits its burst at once and what it earns back in the minute; a fixed window admits twice its count."""
    found = {curve.name: (curve.passed[0], curve.total) for curve in curves()}
    assert found == {
        "fixed window": (60, 120),
        "60/minute": (60, 119),
        "60/minute burst 10": (10, 69),
        "60/minute burst 1": (1, 60),
    }
    texts = ["".join(text.itertext()) for text in ET.fromstring(picture()).iter("{http://www.w3.org/2000/svg}text")]
    assert {f"{name}: {total}" for name, (_, total) in found.items()} <= set(texts)
    assert (ROOT / "docs" / "first-minute.svg").exists()
