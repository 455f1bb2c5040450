"""The code that is printed in the documentation, to be run as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"


def code_below(page: str, heading: str, language: str = "python") -> str:
    """The one block of code in a language between a heading and the next one; the page's title is a heading, too."""
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", _without_code_comments(page), re.MULTILINE | re.DOTALL)
    assert section, f"{page} has no heading {heading}"
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    code: str = found.replace("\0", "#")
    return code


def run_code(code: str, name: str) -> Any:
    """The module that the code makes; it can be found under its name, as some frameworks look up their handlers' modules."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(code, f"<{name}>", "exec"), module.__dict__)
    return module


def _without_code_comments(page: str) -> str:
    """A page's text in which no comment of a block of code can be taken for a heading."""
    text = (DOCS / page).read_text()
    return re.sub(r"^```.*?^```$", lambda block: block[0].replace("#", "\0"), text, flags=re.MULTILINE | re.DOTALL)
