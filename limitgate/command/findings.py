"""Errors and warnings about files, as text, GitHub annotations, or JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from limitgate.errors import ConfigError, spelled

Level = Literal["error", "warning"]


class Finding(NamedTuple):
    """An error or warning about a file."""

    file: str | None
    line: int | None
    """Counted from 1; None if the finding has no line."""
    field: str | None
    """Path of the field: ``rules[0].limits[1]``."""
    level: Level
    message: str

    @property
    def text(self) -> str:
        """One line, as compilers print it: ``file:line: field: message``."""
        file = None if self.file is None else shown_path(self.file)
        place = f"{file}:{self.line}" if self.line else file
        parts = [place, "warning" if self.level == "warning" else None, self.field, self.message]
        return ": ".join(part for part in parts if part)

    @property
    def annotation(self) -> str:
        """A workflow command that makes GitHub show the finding beside its line.

        Source: docs.github.com, "Workflow commands for GitHub Actions"; escapes as in ``@actions/core``.
        """
        properties = {"file": self.file, "line": self.line, "title": "limitgate check"}
        given = ",".join(f"{name}={_escaped(str(value), ':,')}" for name, value in properties.items() if value is not None)
        return f"::{self.level} {given}::{_escaped(f'{self.field}: {self.message}' if self.field else self.message)}"


def shown_path(path: str) -> str:
    """Return a path that is safe at the start of a line. ``::`` would start a workflow command of GitHub."""
    return f"./{path}" if path.lstrip().startswith("::") else path


def found(error: ConfigError) -> list[Finding]:
    """Return the findings of an error."""
    return [Finding(each.file, each.line, spelled(each.field) or None, "error", each.reason) for each in error.every]


def _escaped(text: str, more: Iterable[str] = ()) -> str:
    for character in ("%", "\r", "\n", *more):
        text = text.replace(character, f"%{ord(character):02X}")
    return text
