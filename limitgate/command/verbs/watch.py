"""The verbs ``status`` and ``top``."""

from __future__ import annotations

import gc
import sys
from typing import Any

import click

from limitgate.command.fleet_text import PROCESSES, headline, notes, process_rows, summary, top_tables
from limitgate.command.opened import on_store, store_options
from limitgate.command.output import FOUND, json_option, print_json, print_table, say
from limitgate.errors import StoreError
from limitgate.fleet.figures import Figures
from limitgate.fleet.reader import FleetReader


def _read(reader: FleetReader) -> Figures:
    # Garbage collection would take half of the time.
    gc.disable()
    figures = reader.read()
    gc.freeze()
    gc.enable()
    if not figures["store"]["up"]:
        raise StoreError(figures["store"]["error"], "connection")
    return figures


def _look(options: dict[str, Any], *, once: bool, as_json: bool, brief: bool, changes: bool) -> Figures | None:
    """Return the figures; None after a live view. With ``changes``, the view is that of ``top``."""
    with on_store(options) as opened:
        reader = FleetReader(opened.store, opened.key_prefix, timeout=opened.timeout, brief=brief)
        figures = _read(reader)
        if once or as_json or not sys.stdout.isatty() or sys.stdin is None or not sys.stdin.isatty():
            return figures
        from limitgate.command.fleet_screen import Screen, status_view, top_view

        Screen(opened, reader, top_view if changes else status_view, changes=changes).run()
        return None


@click.command("status")
@store_options
@click.option("--once", is_flag=True, help="Print once, even on a terminal.")
@json_option
@click.pass_context
def status(ctx: click.Context, /, *, once: bool, as_json: bool, **options: Any) -> None:
    """Show every live process of a service: its rules, its requests, its store and its last error.

    On a terminal, the view is updated every 2 seconds until q or Ctrl-C. Exit status 1: a process has other rules than most,
    there is no process, or the store refuses writes.

    For example: limitgate status --store redis://localhost
    """
    figures = _look(options, once=once, as_json=as_json, brief=not as_json, changes=False)
    if figures is None:
        return
    if as_json:
        print_json(_fields(figures))
    else:
        _print_status(figures)
    follow = all(each["follows"] for each in figures["processes"])
    ctx.exit(0 if figures["processes"] and follow and figures["store"]["writes"] is not False else FOUND)


@click.command("top")
@store_options
@click.option("--once", is_flag=True, help="Print once, even on a terminal.")
@json_option
def top(*, once: bool, as_json: bool, **options: Any) -> None:
    """Show which clients are refused most now, by which rule and since when; then the rules, and which clients use most.

    Counts of clients cover the last 5 to 10 minutes, those of rules the time since each process started. On a terminal, the
    view is updated every 2 seconds. Press the number of a client, then b to ban it, p to lift its ban, or r to reset its usage;
    q quits. Each action asks for confirmation.

    For example: limitgate top --store redis://localhost
    """
    figures = _look(options, once=once, as_json=as_json, brief=False, changes=True)
    if figures is None:
        return
    if as_json:
        print_json(_fields(figures))
    else:
        _print_top(figures)


def _fields(figures: Figures) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name != "history"}


def _print_status(figures: Figures) -> None:
    if figures["empty"]:
        say(figures["empty"])
        return
    say(summary(figures))
    print_table(PROCESSES, process_rows(figures))
    for note in notes(figures):
        say(note, err=True)


def _print_top(figures: Figures) -> None:
    say(headline(figures))
    if figures["empty"]:
        return
    say(summary(figures))
    for title, heads, rows in top_tables(figures, 20, 20):
        say("")
        print_table(heads, rows, title=title)
    for note in notes(figures):
        say(note, err=True)
