"""Output of verbs: JSON, tables, and lines. Exit statuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import click

from limitgate.messages.text import ORDERS, printable

_ORDER = re.compile(r"\s*::.*::")
"""A line that GitHub would run as a command, unlike ``::1``."""

FOUND = 1
"""Exit status: invalid rules, a request that would be refused, or a process that does not follow."""
WRONG_USAGE = 2
NO_STORE = 3
"""Exit status: the store does not answer."""
INTERRUPTED = 130
"""128 plus SIGINT, as in shells."""
NO_READER = 141
"""128 plus SIGPIPE, as in shells."""


def write(text: str, *, err: bool = False) -> None:
    """Write a line. Raises `click.ClickException` if writing fails, for example on a full disk."""
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise click.ClickException(f"the output cannot be written: {error.strerror}") from error


def say(*lines: str, err: bool = False) -> None:
    """Print lines, an empty one if there are none.

    Lines may contain names from files and clients, so control characters and CI commands are escaped. No name may start a
    line.
    """
    write("\n".join(map(printable, lines)), err=err)


def print_json(value: Any) -> None:
    """Print one JSON value. Infinite numbers become ``null``; unprintable characters and CI commands are escaped."""
    text = ORDERS.sub(r"#\\u0023", json.dumps(_finite(value), indent=2, ensure_ascii=False))
    write("\n".join([line if line.isprintable() else _escaped(line) for line in text.split("\n")]))


def _escaped(line: str) -> str:
    return "".join([each if each.isprintable() else json.dumps(each)[1:-1] for each in line])


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """Print a table without frames, two spaces between columns, so that other tools can cut and search it."""
    from rich.console import Console  # noqa: PLC0415 - importing rich takes a third of the start-up time
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, header_style="bold", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(str(cell))) for cell in row))
    console = Console()
    with console.capture() as captured:
        console.print(table, width=None if console.is_terminal else _WIDE, soft_wrap=not console.is_terminal)
    for line in captured.get().splitlines():
        write(line.rstrip())


def _cell(text: str) -> str:
    """Escape text that may start a line."""
    text = printable(text)
    return text.replace(":", r"\x3a", 1) if _ORDER.match(text) else text


_WIDE = 10_000
"""Characters per line without a terminal: nothing is cut or folded."""


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
