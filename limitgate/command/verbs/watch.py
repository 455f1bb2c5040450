"""The verbs ``status`` and ``top``: processes of a service, and its clients."""

from __future__ import annotations

import gc
import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from limitgate.command.client_state import Opened, on_store, store_options
from limitgate.command.output import FOUND, print_json, print_table, say, seconds
from limitgate.errors import ConfigError, StoreError
from limitgate.fleet.actions import client_bucket
from limitgate.fleet.figures import Figures
from limitgate.fleet.reader import FleetReader
from limitgate.limits.limit import seconds_of
from limitgate.messages.text import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

EVERY = 2.0
"""Seconds."""
_SHOWN = 9
"""Clients with a key."""


def _reader(opened: Opened) -> FleetReader:
    return FleetReader(opened.store, opened.key_prefix, timeout=opened.timeout)


def _read(reader: FleetReader) -> Figures:
    # Half of the time that a thousand processes take would go into looking for garbage.
    gc.disable()
    figures = reader.read()
    gc.enable()
    if not figures["store"]["up"]:
        raise StoreError(figures["store"]["error"], "connection")
    return figures


def _is_live(*, once: bool, as_json: bool) -> bool:
    return not (once or as_json) and sys.stdout.isatty() and sys.stdin is not None and sys.stdin.isatty()


@click.command("status")
@store_options
@click.option("--once", is_flag=True, help="Print once, even on a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@click.pass_context
def status(ctx: click.Context, /, *, once: bool, as_json: bool, **options: Any) -> None:
    """Show every live process of a service: its rules, its requests, its store and its last error.

    On a terminal, the view is renewed every 2 seconds until q or Ctrl-C. Exit status 1: a process has other rules than most, or
    no process is there.

    For example: limitgate status --store redis://localhost
    """
    with on_store(options) as opened:
        reader = _reader(opened)
        figures = _read(reader)
        if _is_live(once=once, as_json=as_json):
            _Screen(opened, reader, _status_view).run()
            return
    if as_json:
        print_json(_fields(figures))
    else:
        _print_status(figures)
    follow = all(each["follows"] for each in figures["processes"])
    ctx.exit(0 if figures["processes"] and follow else FOUND)


@click.command("top")
@store_options
@click.option("--once", is_flag=True, help="Print once, even on a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def top(*, once: bool, as_json: bool, **options: Any) -> None:
    """Show who is refused most at present, under which rule and since when; then the rules, and who uses most.

    Counts are those of the last 5 to 10 minutes, over all processes. On a terminal, the view is renewed every 2 seconds. Press
    the number of a client, then b to ban it, p to lift its ban, or r to reset its usage; each asks first. q ends.

    For example: limitgate top --store redis://localhost
    """
    with on_store(options) as opened:
        reader = _reader(opened)
        figures = _read(reader)
        if _is_live(once=once, as_json=as_json):
            _Screen(opened, reader, _top_view, changes=True).run()
            return
    if as_json:
        print_json(_fields(figures))
    else:
        _print_top(figures)


def _fields(figures: Figures) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name != "history"}


_PROCESSES = "Process", "Up", "Version", "Rules", "Req/s", "Refused/s", "Requests", "Refused", "Store", "Last error"


def _process_rows(figures: Figures) -> list[tuple[str, ...]]:
    return [
        (
            f"{each['host']}:{each['pid']}",
            seconds(each["uptime"]),
            each["version"],
            _revision(each["revision"]) + ("" if each["follows"] else " (others have another)"),
            f"{each['requests_per_second']:,.1f}",
            f"{each['refused_per_second']:,.1f}",
            f"{each['requests']:,}",
            f"{each['refused']:,}",
            _store(each["store"]),
            _error(each, figures["at"]),
        )
        for each in figures["processes"]
    ]


def _revision(number: int | None) -> str:
    return "-" if number is None else f"{number:012x}"


def _store(store: Mapping[str, Any]) -> str:
    if not store["up"]:
        return "does not answer"
    return "up" if store["latency"] is None else f"up, {store['latency'] * 1000:.2g} ms"


def _error(process: Mapping[str, Any], now: float) -> str:
    told = []
    if process["last_load"]["error"]:
        told.append(f"rules rejected: {process['last_load']['error']}")
    if process["last_error"]:
        told.append(f"{process['last_error']} ({_ago(process['last_error_at'], now)})")
    if process["clock_ahead"]:
        told.append(f"its clock is {abs(process['clock_ahead']):,.0f} s {'ahead' if process['clock_ahead'] > 0 else 'behind'}")
    return "; ".join(told)


def _ago(at: float | None, now: float) -> str:
    return "" if at is None else f"{seconds(max(0.0, round(now - at)))} ago"


def _summary(figures: Figures) -> str:
    count = len(figures["processes"])
    store = figures["store"]
    answers = f"the store answers in {store['latency'] * 1000:.2g} ms" if store["up"] else f"the store fails: {store['error']}"
    others = sum(not each["follows"] for each in figures["processes"])
    rules = f"{others} with other rules" if others else f"all with rules {_revision(figures['revision'])}"
    per_second = f"{figures['requests_per_second']:,.1f} requests/s, {figures['refused_per_second']:,.1f} refused/s"
    return f"{count} {'process' if count == 1 else 'processes'}, {rules}; {per_second}; {answers}"


def _notes(figures: Figures) -> list[str]:
    found = []
    if figures["unreadable"]:
        count, first = len(figures["unreadable"]), figures["unreadable"][0]
        found.append(f"{count} {'snapshot' if count == 1 else 'snapshots'} cannot be read: {first}")
    return found


def _print_status(figures: Figures) -> None:
    if figures["empty"]:
        say(figures["empty"])
        return
    say(_summary(figures))
    print_table(_PROCESSES, _process_rows(figures))
    for note in _notes(figures):
        say(note, err=True)


def headline(figures: Figures) -> str:
    if figures["empty"]:
        return str(figures["empty"])
    most = figures["headline"]
    if most is None:
        return "nobody is being refused"
    rate = "" if most["per_second"] is None else f" {most['per_second']:,.1f} times/s"
    tier = "" if most["tier"] == "default" else f" of tier {most['tier']}"
    return (
        f"{most['who']} is refused{rate} under rule {most['rule']}{tier} since {_clock(most['since'])} "
        f"({seconds(max(1.0, round(figures['at'] - most['since'])))}), {_count(most)} times"
    )


def _clock(at: float) -> str:
    with suppress(OverflowError, OSError, ValueError):
        return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"
    return "?"


def _count(entry: Mapping[str, Any]) -> str:
    """Show the minimum and the maximum of a count."""
    least = entry["count"] - entry["error"]
    return f"{least:,}" if not entry["error"] else f"{least:,} to {entry['count']:,}"


_RULES = "Rule", "Tier", "Utilization", "Refused", "Admitted"


def _rule_rows(figures: Figures) -> list[tuple[str, ...]]:
    ordered = sorted(figures["rules"], key=lambda each: (-each["refused"], -each["utilization"], each["name"]))
    return [
        (each["name"], each["tier"], f"{each['utilization']:.0%}", f"{each['refused']:,}", f"{each['admitted']:,}")
        for each in ordered
    ]


_CLIENTS = "", "Client", "Rule", "Count", "Per second", "Since"


def _clients(figures: Figures, kind: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Rules and entries, those seen in the last seconds first, then the greatest."""
    found = [(rule, each) for rule in figures["rules"] for each in rule[kind]]
    return sorted(found, key=lambda each: (figures["at"] - each[1]["last"] > 30, each[1]["error"] - each[1]["count"]))


def _client_rows(clients: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], first: int) -> list[tuple[str, ...]]:
    return [
        (
            str(place) if place <= _SHOWN else "",
            each["who"],
            rule["name"] if rule["tier"] == "default" else f"{rule['name']} ({rule['tier']})",
            _count(each),
            "" if each["per_second"] is None else f"{each['per_second']:,.1f}",
            _clock(each["since"]),
        )
        for place, (rule, each) in enumerate(clients, first)
    ]


def _print_top(figures: Figures) -> None:
    say(headline(figures))
    if figures["empty"]:
        return
    say(_summary(figures))
    for title, heads, rows in _top_tables(figures, 20, 20):
        say("")
        print_table(heads, rows, title=title)
    for note in _notes(figures):
        say(note, err=True)


def _top_tables(figures: Figures, refused: int, used: int) -> Iterator[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
    yield "Rules", _RULES, _rule_rows(figures)
    clients = _clients(figures, "most_refused")[:refused]
    if clients:
        yield "Refused most (last 5 to 10 minutes)", _CLIENTS, _client_rows(clients, 1)
    using = _clients(figures, "most_used")[:used]
    if using:
        yield "Used most (last 5 to 10 minutes)", _CLIENTS, _client_rows(using, len(clients) + 1)
    if figures["bans"]:
        heads = "Client", "Ends in", "By", "Reason"
        bans = figures["bans"][:used]
        yield "Banned", heads, [(each["key"], _left(each["retry_after"]), each["by"], each["reason"] or "") for each in bans]


def _left(retry_after: float | None) -> str:
    return seconds(math.inf if retry_after is None else retry_after)


def _table(title: str | None, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    from rich.table import Table  # noqa: PLC0415 - importing rich takes a third of the start-up time
    from rich.text import Text  # noqa: PLC0415

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, header_style="dim", overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _status_view(figures: Figures, height: int) -> list[RenderableType]:
    from rich.text import Text  # noqa: PLC0415 - as above

    if figures["empty"]:
        return [Text(printable(figures["empty"]))]
    rows = _process_rows(figures)
    shown = rows[: max(1, height - 5)]
    more = [] if len(shown) == len(rows) else [Text(f"and {len(rows) - len(shown):,} more")]
    notes = [Text(printable(note), style="yellow") for note in _notes(figures)]
    return [Text(printable(_summary(figures)), style="bold"), _table(None, _PROCESSES, shown), *more, *notes]


def _top_view(figures: Figures, height: int) -> list[RenderableType]:
    from rich.text import Text  # noqa: PLC0415 - as above

    style = "bold red" if figures["headline"] else "bold"
    view: list[RenderableType] = [Text(printable(headline(figures)), style=style)]
    if figures["empty"]:
        return view
    view.append(Text(printable(_summary(figures)), style="dim"))
    left = height - 5
    for title, heads, rows in _top_tables(figures, _SHOWN, _SHOWN):
        if left > 2:
            view.append(_table(title, heads, rows[: left - 2]))
            left -= len(rows) + 2
    return view


class _Screen:
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
        from rich.console import Console, Group  # noqa: PLC0415 - as above
        from rich.live import Live  # noqa: PLC0415

        console = Console()
        while True:
            with _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
                key = self._look(lambda view: live.update(Group(*view), refresh=True), console)
            if key == "q":
                return
            self._change(key)

    def _look(self, show: Callable[[list[RenderableType]], None], console: Console) -> str:
        from rich.text import Text  # noqa: PLC0415 - as above

        while True:
            # A store that fails is shown, with the figures before.
            self._figures = self._reader.read()
            due = time.monotonic() + EVERY
            while (left := due - time.monotonic()) > 0:
                help_line = "q quit"
                if self._changes:
                    help_line = f"1-9 select (now {self._selected}), b ban, p pardon, r reset, q quit"
                lines = [Text(printable(self._said), style="green")] if self._said else []
                store = self._figures["store"]
                if not store["up"]:
                    lines.insert(0, Text(printable(f"the store does not answer: {store['error']}"), style="bold red"))
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
        listed = _clients(figures, "most_refused")[:_SHOWN]
        listed += _clients(figures, "most_used")[: _SHOWN - len(listed)]
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
    """Ask, then change a client's state. Return what was done. Raises `click.Abort` for no."""
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
    """Read single keys without echo, if the terminal can."""
    try:
        import termios  # noqa: PLC0415 - not on Windows
        import tty  # noqa: PLC0415

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
    except (OSError, ValueError):  # A console of Windows is no socket.
        time.sleep(left)
        return ""
    if not ready:
        return ""
    return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace").lower() or "q"
