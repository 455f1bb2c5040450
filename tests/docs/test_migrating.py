"""docs/migrating.md compares what can be compared. That ours runs as printed, tests/docs/test_docs.py shows."""

from __future__ import annotations

import ast
import re
from itertools import chain

import pytest

import limitgate
from limitgate import Rule, Settings
from tests.docs.peer_rows import TESTED
from tests.support import examples
from tests.support.markdown import anchors, blocks, text_of
from tests.support.theirs import MARK, PAGE, Pair, pairs

PAIRS = list(pairs())
PEERS = {
    "slowapi": "slowapi",
    "fastapi_limiter": "fastapi-limiter",
    "flask_limiter": "Flask-Limiter",
    "django_ratelimit": "django-ratelimit",
}
"""Other limiters by the package that is imported, as the page calls them."""


def imported(text: str) -> set[str]:
    """The packages that a block imports from."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom | ast.Import)]
    names = chain.from_iterable(
        [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names] for node in nodes
    )
    return {str(name).partition(".")[0] for name in names}


def routes(text: str) -> set[str]:
    """The paths that stand in a block's code, without its comments."""
    values = {
        node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {f"/{value.strip('/')}" for value in values}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.theirs.id)
def test_theirs_stands_beside_ours(pair: Pair) -> None:
    """Theirs is of one other limiter, ours of LimitGate alone, and whatever ours is asked for is a route in both."""
    assert pair.ours.language == "python"
    assert not pair.ours.text.startswith(MARK)
    assert len(imported(pair.theirs.text) & PEERS.keys()) == 1
    assert "limitgate" not in imported(pair.theirs.text)
    assert "limitgate" in imported(pair.ours.text)
    assert not imported(pair.ours.text) & PEERS.keys()
    asked = {ask.path.partition("?")[0] for ask in examples._asks(pair.ours.text)}
    assert asked
    for path in asked:
        parts = [f"/{part}" for part in path.strip("/").split("/")]
        assert all({path, *parts} & routes(block.text) for block in pair)


@pytest.mark.parametrize(("package", "name"), PEERS.items())
def test_every_limiter_has_its_section(package: str, name: str) -> None:
    """A table of concepts and at least one pair; those that more people use have more."""
    assert f"from-{name.lower()}" in anchors(PAGE)
    assert re.search(rf"^\| {name} \| LimitGate \|$", text_of(PAGE), re.MULTILINE)
    theirs = [pair for pair in PAIRS if package in imported(pair.theirs.text)]
    assert len(theirs) >= (1 if package == "django_ratelimit" else 2)


def test_whatever_they_have_has_its_place() -> None:
    """No row of the tables says none: what is left out is a decision, and the row says why."""
    rows = [row.strip("| ").split(" | ") for row in text_of(PAGE).splitlines() if row.startswith("| ")]
    assert [row for row in rows if len(row) < 2 or re.match(r"(none|no|-)\b", row[1])] == []


def rows_of(peer: str) -> list[str]:
    """The left column of a limiter's table."""
    table = text_of(PAGE).partition(f"| {peer} | LimitGate |\n|---|---|\n")[2].partition("\n\n")[0]
    return [row.strip("| ").split(" | ")[0] for row in table.splitlines()]


def test_every_limiter_with_a_table_is_listed() -> None:
    assert re.findall(r"^\| (.+) \| LimitGate \|$", text_of(PAGE), re.MULTILINE) == list(TESTED)


@pytest.mark.parametrize("peer", TESTED)
def test_every_behaviour_of_theirs_has_its_test(peer: str) -> None:
    """Each row is shown by an example that runs, or has a test of that name; none is listed that is not there."""
    rows, tested = rows_of(peer), TESTED[peer]
    assert [sum(row.startswith(begin) for row in rows) for begin in tested] == [1] * len(rows)
    for where in tested.values():
        path, _, name = where.partition("::")
        if path == "page":
            example = text_of(PAGE).partition(f"\n### {name}\n")[2].partition("\n### ")[0]
            assert re.search(r"^```python\n.*?^# (?:GET|POST|WS) /.*? -> .*\b429\b", example, re.MULTILINE | re.DOTALL), name
        else:
            assert re.search(rf"^def {name}\(", text_of(f"tests/{path}"), re.MULTILINE), where


def test_nothing_of_theirs_is_run_as_ours() -> None:
    """Every block that imports another limiter is marked as theirs."""
    for block in blocks(PAGE):
        if block.language in ("python", "text"):
            assert block.text.startswith(MARK) is bool(imported(block.text) & PEERS.keys()), block.id


def test_the_names_in_the_tables_are_ours() -> None:
    """Keyword arguments in the right columns are options, fields of rules or parameters of a limit; settings are settings."""
    right = [row.split(" | ")[1] for row in text_of(PAGE).splitlines() if row.startswith("| ") and row.count(" | ") == 1]
    named = set(re.findall(r"\b([a-z_]+)=", " ".join(right)))
    assert named >= {"cost", "key", "on_error", "shadow", "store"} - {"cost"}
    assert named <= {*Settings.model_fields, *Rule.model_fields}
    upper = set(re.findall(r"`\"?(?:LIMITGATE_)?([A-Z][A-Z0-9_]+)\b", " ".join(right))) - {"LIMITGATE"}
    assert {name.lower() for name in upper} <= set(Settings.model_fields)
    assert set(re.findall(r"`@?(Rule|Limiter|limit|exempt)\b", " ".join(right))) <= set(limitgate.__all__)
