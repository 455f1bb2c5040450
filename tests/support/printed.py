"""The programs that pages print, as modules, for tests that look closer at them than tests/support/examples.py does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.markdown import blocks


def printed(page: str, file: str) -> str:
    """The text that a page shows as the file of this name."""
    (text,) = [block.text for block in blocks(page) if block.file == file]
    return text


def imported(page: str, file: str, folder: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """The module in that file, saved in ``folder`` and imported from there until ``patch`` is undone."""
    (folder / file).write_text(printed(page, file))
    name = file.removesuffix(".py")
    patch.syspath_prepend(folder)
    patch.setitem(sys.modules, name, ModuleType(name))  # which is undone, so that the module is forgotten in the end
    del sys.modules[name]
    return importlib.import_module(name)
