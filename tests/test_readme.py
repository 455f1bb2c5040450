"""The README and its like are held to their word: their tables name what is there. Their code is tests/test_docs.py's."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import limitgate
from limitgate import ConfigError, Settings, open_store
from limitgate.headers import STYLES
from limitgate.keys import PARTS
from tests.markdown import PAGES, ROOT, rows, text_of

README = text_of("README.md")


def test_options_table_is_complete_and_has_the_defaults() -> None:
    """The table of options names every setting, with the default it has."""
    table = {row[0].strip("`"): ast.literal_eval(row[2].strip("`")) for row in rows("docs/rules.md", "option")}
    assert table == {name: field.default for name, field in Settings.model_fields.items()}


def test_keys_table_is_complete() -> None:
    """The table of key parts names every part there is."""
    assert {row[0].strip("`") for row in rows("docs/keys.md", "part")} == {*PARTS, "header:NAME"}


def test_styles_table_is_complete() -> None:
    """The table of header styles names every style there is."""
    assert {row[0].strip("`") for row in rows("docs/rules.md", "style")} == set(STYLES)


def test_what_is_said_to_be_missing_is_missing() -> None:
    """The list of what is not there yet is struck from as soon as something is there."""
    missing = README.partition("## Not there yet")[2].partition("\n## ")[0]
    for scheme in re.findall(r"`(redis\+[a-z]+)://`", missing):
        with pytest.raises(ConfigError, match="store"):
            open_store(f"{scheme}://localhost:1")


def test_make_targets_exist() -> None:
    """Every make command that is mentioned is one."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)\b", README)) <= targets


def test_architecture_has_a_place_for_every_module() -> None:
    """The table of modules names every module of the package, and none that is not there."""
    package = Path(limitgate.__file__).parent
    files = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.suffix in (".py", ".lua")}
    cells = [row[0] for row in rows("docs/architecture.md", "module")]
    named = {name for cell in cells for name in re.findall(r"`([a-z0-9_/]+\.(?:py|lua))`", cell)}
    of_use = {"algorithms/__init__.py", "routes/__init__.py", "stores/__init__.py"}
    assert named == {file for file in files if not file.endswith("__init__.py")} | of_use


def test_imported_names_are_public() -> None:
    """Whatever the pages import from the package is one of its public names."""
    lines = [line for page in PAGES for line in re.findall(r"from limitgate import (.*)", text_of(page))]
    imported = {name.strip() for line in lines for name in line.split(",")}
    assert imported <= set(importlib.import_module("limitgate").__all__)
