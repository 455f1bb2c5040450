"""Compiles functions with unrolled loops, which run two to three times as fast."""

from __future__ import annotations

from itertools import repeat
from typing import Any


def each_window(windows: int, text: str, between: str = " ") -> str:
    """Repeat text for each window, whose number replaces ``{n}``."""
    return between.join(map(text.replace, repeat("{n}"), map(str, range(windows))))


def compiled(source: str, name: str, **known: Any) -> Any:
    """Compile source and return the object called ``name``. ``known`` are its globals.

    The source must consist of internal templates only.
    """
    made: dict[str, Any] = {}
    exec(source, known, made)  # noqa: S102 - internal templates only
    return made[name]
