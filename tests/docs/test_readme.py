"""The README and its like are held to their word: their tables name what is there. Their code is tests/docs/test_docs.py's."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import limitgate
from limitgate import ConfigError, Settings, open_store
from limitgate.command.group import VERBS
from limitgate.http.rate_fields import FIELDS
from limitgate.rules.options import PARTS
from tests.support.markdown import PAGES, ROOT, rows, text_of

README = text_of("README.md")


def test_options_table_is_complete_and_has_the_defaults() -> None:
    """The table of options names every setting, with the default it has."""
    table = {row[0].strip("`"): ast.literal_eval(row[2].strip("`")) for row in rows("docs/rules.md", "option")}
    assert table == {name: field.default for name, field in Settings.model_fields.items()}


def test_keys_table_is_complete() -> None:
    """The table of key parts names every part there is."""
    assert {row[0].strip("`") for row in rows("docs/keys.md", "part")} == {*PARTS, "header:NAME", "json:/POINTER"}


def test_styles_table_is_complete() -> None:
    """The table of header styles names every style there is."""
    assert {row[0].strip("`") for row in rows("docs/rules.md", "style")} == set(FIELDS)


def test_what_is_said_to_be_missing_is_missing() -> None:
    """The list of what is not there yet is struck from as soon as something is there."""
    missing = README.partition("## Not there yet")[2].partition("\n## ")[0]
    for scheme in re.findall(r"`(redis\+[a-z]+)://`", missing):
        with pytest.raises(ConfigError, match="store"):
            open_store(f"{scheme}://localhost:1")


def test_make_targets_exist() -> None:
    """Every make command that is mentioned is one."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text_of(page), re.MULTILINE)) <= targets


def test_the_map_names_every_folder_and_every_module_at_the_top() -> None:
    """The map of the package in its docstring and in docs/architecture.md."""
    package = Path(limitgate.__file__).parent
    names = {path.name + "/" * path.is_dir() for path in package.iterdir()} - {
        "__init__.py",
        "__pycache__/",
        "py.typed",
        "lua/",
    }
    for text in (limitgate.__doc__ or "", text_of("docs/architecture.md")):
        assert {name for name in names if not re.search(rf"\b{re.escape(name)}", text)} == set()


def test_architecture_names_modules_that_there_are() -> None:
    """A module or a test that the page speaks of is where it says."""
    package = Path(limitgate.__file__).parent
    named = re.findall(r"`([a-z_/]+\.(?:py|lua))`", text_of("docs/architecture.md"))
    assert [name for name in named if not ((package / name).exists() or (ROOT / name).exists())] == []


def test_architecture_names_every_module() -> None:
    """Except packages, verbs of the command, and generated code."""
    package = Path(limitgate.__file__).parent
    modules = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    elsewhere = {name for name in modules if name.endswith(("__init__.py", "_pb2.py")) or name.startswith("command/verbs/")}
    named = set(re.findall(r"`([a-z0-9_/]+\.py)`", text_of("docs/architecture.md")))
    assert sorted(modules - elsewhere - named) == []


def test_imported_names_are_public() -> None:
    """Whatever the pages import from the package is one of its public names."""
    lines = [line for page in PAGES for line in re.findall(r"from limitgate import (.*)", text_of(page))]
    imported = {name.strip() for line in lines for name in line.split(",")}
    assert imported <= set(importlib.import_module("limitgate").__all__)


@pytest.mark.parametrize(
    ("words", "is_there"),
    [
        ("check rule files", "check" in VERBS),
        ("one client's buckets", "peek" in VERBS),
        ("read again", "reload" in Settings.model_fields),
        ("Metrics", "observers" in Settings.model_fields),
    ],
)
def test_nothing_is_called_missing_that_is_there(words: str, is_there: object) -> None:
    """Neither as not there yet, nor as what other limiters have and LimitGate has not."""
    missing = README.partition("## Not there yet")[2].partition("\n## ")[0]
    missing += README.partition("What they offer that LimitGate doesn't:")[2].partition("\n\n")[0]
    assert not (is_there and words in missing)


def test_algorithms_are_not_called_missing() -> None:
    """Fixed and sliding windows, which the others begin with."""
    missing = README.partition("What they offer that LimitGate doesn't:")[2].partition("\n\n")[0]
    assert missing.strip()
    assert not re.search("window", missing)
