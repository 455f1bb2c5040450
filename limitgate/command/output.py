"""What verbs print: one JSON value, tables, and plain lines where there is no terminal; and what they exit with."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import click

from limitgate.messages.text import ORDERS, printable

_ORDER = re.compile(r"\s*::.*::")
"""A line that is an order to GitHub; of ``::1`` it makes none."""

FOUND = 1
"""Exit status of a mistake, a request that would be refused, a process that does not follow."""
WRONG_USAGE = 2
"""click's own."""
NO_STORE = 3
"""The store does not answer."""
INTERRUPTED = 130
"""128 and the number of SIGINT, as shells have it: Ctrl-C ended it, and nothing was found."""
NO_READER = 141
"""128 and the number of SIGPIPE: whoever read the output has gone."""


def write(text: str, *, err: bool = False) -> None:
    """Write a text and an end of line. Raises `click.ClickException` where it cannot be written, as on a disk that is full."""
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise click.ClickException(f"the output cannot be written: {error.strerror}") from error


def say(*lines: str, err: bool = False) -> None:
    """Print lines; an empty one if there are none.

    Names from files and clients may stand in them, so nothing in them is an order to a terminal, and no name begins a line,
    which may be an order to CI.
    """
    write("\n".join(map(printable, lines)), err=err)


def print_json(value: Any) -> None:
    """Print one JSON value. Infinite numbers become ``null``, as JSON has none; what is not printable is escaped.

    So is what would be an order to CI.
    """
    text = ORDERS.sub(r"#\\u0023", json.dumps(_finite(value), indent=2, ensure_ascii=False))
    write("\n".join([line if line.isprintable() else _escaped(line) for line in text.split("\n")]))


def _escaped(line: str) -> str:
    return "".join([each if each.isprintable() else json.dumps(each)[1:-1] for each in line])


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """Print a table; columns are two spaces apart, without frames, so that it can be cut and searched."""
    from rich.console import Console  # noqa: PLC0415 - takes a third of the time in which the command has to start
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
    """A text that may begin a line."""
    text = printable(text)
    return text.replace(":", r"\x3a", 1) if _ORDER.match(text) else text


_WIDE = 10_000
"""Characters of a line without a terminal: nothing is cut or folded for a program that reads it."""


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
