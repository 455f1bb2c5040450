"""The live views of ``status`` and ``top`` in a terminal."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from limitgate.command.fleet_text import PROCESSES, SHOWN, clients_of, headline, notes, process_rows, summary, top_tables
from limitgate.command.opened import Opened
from limitgate.command.output import seconds
from limitgate.errors import ConfigError, StoreError
from limitgate.fleet.actions import client_bucket
from limitgate.fleet.figures import Figures
from limitgate.fleet.reader import FleetReader
from limitgate.limits.limit import seconds_of
from limitgate.messages.text import printable

EVERY = 2.0
"""Seconds."""


def _table(title: str | None, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, header_style="dim", overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def status_view(figures: Figures, height: int) -> list[RenderableType]:
    if figures["empty"]:
        return [Text(printable(figures["empty"]))]
    rows = process_rows(figures)
    shown = rows[: max(1, height - 5)]
    more = [] if len(shown) == len(rows) else [Text(f"and {len(rows) - len(shown):,} more")]
    return [Text(printable(summary(figures)), style="bold"), _table(None, PROCESSES, shown), *more]


def top_view(figures: Figures, height: int) -> list[RenderableType]:
    most = figures["headline"]
    style = "bold red" if most and not most["shadow"] else "bold"
    view: list[RenderableType] = [Text(printable(headline(figures)), style=style)]
    if figures["empty"]:
        return view
    view.append(Text(printable(summary(figures)), style="dim"))
    left = height - 5
    for title, heads, rows in top_tables(figures, SHOWN, SHOWN):
        if left > 2:
            view.append(_table(title, heads, rows[: left - 2]))
            left -= len(rows) + 2
    return view


class Screen:
    """A view that is renewed until q. With ``changes``, keys select a client and an action."""

    def __init__(
        self,
        opened: Opened,
        reader: FleetReader,
        view: Callable[[Figures, int], list[RenderableType]],
        *,
        changes: bool = False,
    ) -> None:
        self._opened, self._reader, self._view, self._changes = opened, reader, view, changes
        self._figures: Figures = {}
        self._selected = 1
        self._said = ""

    def run(self) -> None:
        console = Console()
        while True:
            with _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
                key = self._look(lambda view: live.update(Group(*view), refresh=True), console)
            if key == "q":
                return
            self._change(key)

    def _look(self, show: Callable[[list[RenderableType]], None], console: Console) -> str:
        while True:
            # If the store fails, this returns the error with the previous figures.
            self._figures = self._reader.read()
            due = time.monotonic() + EVERY
            while (left := due - time.monotonic()) > 0:
                help_line = "q quit"
                if self._changes:
                    help_line = f"1-9 select (now {self._selected}), b ban, p pardon, r reset, q quit"
                lines = [Text(printable(self._said), style="green")] if self._said else []
                lines = [*[Text(printable(note), style="bold red") for note in notes(self._figures)], *lines]
                show([*lines, *self._view(self._figures, console.height - len(lines)), Text(help_line, style="dim")])
                key = _key(left)
                if key in ("q", "\x04"):
                    return "q"
                if self._changes and key.isdecimal() and key != "0":
                    self._selected = int(key)
                elif self._changes and key in ("b", "p", "r") and self._client() is not None:
                    return key

    def _client(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        figures = self._figures
        listed = clients_of(figures, "most_refused")[:SHOWN]
        listed += clients_of(figures, "most_used")[: SHOWN - len(listed)]
        return listed[self._selected - 1] if self._selected <= len(listed) else None

    def _change(self, key: str) -> None:
        chosen = self._client()
        if chosen is None:
            return
        rule, client = chosen
        action = {"b": "ban", "p": "pardon", "r": "reset"}[key]
        try:
            name, operations = client_bucket(
                self._figures, rule["name"], rule["tier"], client["key"], timeout=self._opened.timeout
            )
            self._said = change(self._opened, action, name, self._opened.carried_out(operations))
        except (ConfigError, StoreError) as error:
            self._said = f"not done: {error}"
        except (click.Abort, EOFError):
            self._said = f"no {action}"


def change(opened: Opened, action: str, name: str, bucket: Any) -> str:
    """Return what was done. Raises `click.Abort` for no."""
    if action == "ban":
        text = click.prompt(f"Ban {printable(name)} for (such as 10m, 1h)", default="10m", err=True)
        try:
            duration = seconds_of(str(text))
        except ConfigError as error:
            return f"not done: {error}"
        if duration <= 0:
            return "not done: a ban needs a duration above 0"
        reason = click.prompt("Reason", default="", show_default=False, err=True) or None
        click.confirm(f"Ban {printable(name)} for {seconds(duration)}?", abort=True, err=True)
        bucket.ban(duration, reason=reason)
        opened.journal.note("ban", name, bucket.keys, reason, duration, bans=True)
        return f"{name}: banned for {seconds(duration)}"
    question = f"Lift the ban of {printable(name)}?" if action == "pardon" else f"Reset the usage of {printable(name)}?"
    click.confirm(question, abort=True, err=True)
    if action == "pardon":
        bucket.pardon()
    else:
        bucket.reset()
    opened.journal.note(action, name, bucket.keys, None)
    return f"{name}: {'pardoned' if action == 'pardon' else 'reset'}"


@contextmanager
def _keys() -> Iterator[None]:
    try:
        import termios
        import tty

        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (ImportError, OSError, ValueError):
        yield
        return
    except termios.error:
        yield
        return
    tty.setcbreak(number)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _key(left: float) -> str:
    try:
        ready, _, _ = select.select([sys.stdin], [], [], left)
    except (OSError, ValueError):  # A Windows console isn't a socket.
        time.sleep(left)
        return ""
    if not ready:
        return ""
    return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace").lower() or "q"
