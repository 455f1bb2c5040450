"""Functions that are written out window by window and compiled: a loop over three windows takes two or three times as long."""

from __future__ import annotations

from itertools import repeat
from typing import Any


def each_window(windows: int, text: str, between: str = " ") -> str:
    """The text once for each window, with its number in the place of ``{n}``."""
    return between.join(map(text.replace, repeat("{n}"), map(str, range(windows))))


def compiled(source: str, name: str, **known: Any) -> Any:
    """Compile source that is a template of ours and numbers of windows, and return what it calls ``name``.

    It knows the builtins, and these objects by their names.
    """
    made: dict[str, Any] = {}
    exec(source, known, made)  # noqa: S102 - nothing that comes from outside
    return made[name]
