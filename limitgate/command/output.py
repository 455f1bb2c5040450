"""Output of verbs: decisions, JSON, tables, and lines. Exit statuses, and the option ``--json``."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unicodedata import combining, east_asian_width

import click

from limitgate.algorithms.ban import FOR_EVER
from limitgate.limits.decision import Decision, Window
from limitgate.messages.text import ORDERS, printable

_ORDER = re.compile(r"\s*::.*::")
"""A GitHub workflow command. The address ``::1`` isn't one."""

FOUND = 1
"""Exit status for invalid rules, or a refusal."""
WRONG_USAGE = 2
NO_STORE = 3
"""Exit status if the store doesn't answer."""
INTERRUPTED = 130
"""128 + SIGINT."""
NO_READER = 141
"""128 + SIGPIPE."""

Verb = TypeVar("Verb", bound=Callable[..., Any])
json_option: Callable[[Verb], Verb] = click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")


def write(text: str, *, err: bool = False) -> None:
    """Raises `click.ClickException`, for example on a full disk."""
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise click.ClickException(f"the output cannot be written: {error.strerror}") from error


def say(*lines: str, err: bool = False) -> None:
    """Escape control characters and CI commands, because names may contain them."""
    write("\n".join(map(printable, lines)), err=err)


def print_json(value: Any) -> None:
    """Infinite numbers become ``null``; control characters and CI commands are escaped."""
    text = _as_json(value, None)
    # Indenting takes long.
    if len(text) < _LONG:
        text = _as_json(value, 2)
    text = ORDERS.sub(r"#\\u0023", text)
    write("\n".join([line if line.isprintable() else _escaped(line) for line in text.split("\n")]))


_LONG = 500_000
"""Characters."""


def _as_json(value: Any, indent: int | None) -> str:
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, ensure_ascii=False)


def _escaped(line: str) -> str:
    return "".join([each if each.isprintable() else json.dumps(each)[1:-1] for each in line])


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """Print a table without frames, which other tools can read. Fold cells on a narrow terminal."""
    cells = [[_cell(str(cell)) for cell in row] for row in rows]
    widths = [max([_width(row[place]) for row in (heads, *cells)]) for place in range(len(heads))]
    is_terminal = sys.stdout.isatty()
    if is_terminal and sum(widths) + 2 * len(widths) > shutil.get_terminal_size().columns:
        _print_folded(heads, cells, title)
        return
    if title is not None:
        write(title)
    write(_line([click.style(head, bold=True) for head in heads] if is_terminal else heads, heads, widths))
    for row in cells:
        write(_line(row, row, widths))


def _line(shown: Sequence[str], cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [text + " " * (width - _width(cell)) for text, cell, width in zip(shown, cells, widths)]
    return "  ".join(padded).rstrip()


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum([0 if combining(each) else 2 if east_asian_width(each) in ("W", "F") else 1 for each in text])


def _print_folded(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, header_style="bold", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        write(line.rstrip())


def _cell(text: str) -> str:
    text = printable(text)
    return text.replace(":", r"\x3a", 1) if _ORDER.match(text) else text


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


_AGES = FOR_EVER / 2e6
"""A longer ban, in seconds, is permanent."""


def decision_fields(decision: Decision) -> dict[str, Any]:
    names = (
        "allowed",
        "limit",
        "remaining",
        "retry_after",
        "reset_after",
        "granted",
        "rule",
        "windows",
        "degraded",
        "shadow",
        "delay",
    )
    found = {name: getattr(decision, name) for name in names}
    times = {name: _endless(found[name]) for name in ("retry_after", "reset_after")}
    return found | times | {"windows": [window_fields(window) for window in decision.windows]}


def window_fields(window: Window) -> dict[str, Any]:
    return window._asdict() | {name: _endless(getattr(window, name)) for name in ("reset_after", "retry_after")}


def _endless(number: float) -> float:
    return math.inf if number > _AGES else number


def print_decision(decision: Decision, *, is_charged: bool = False) -> None:
    """With ``is_charged``, the figures include the request if it was admitted."""
    is_charged &= decision.allowed
    shadows: dict[str, bool] = {}
    for each in decision.standings:
        if not each.charge.enforced and each.charge.rule is not None:
            shadows[each.charge.rule] = shadows.get(each.charge.rule, True) and each.fits
    enforced = [window for each in decision.standings if each.charge.enforced for window in each.windows()]
    if not decision.allowed:
        say(f"a request would be refused: {_why(decision)}")
    elif shadows and not enforced:
        say("a request would be admitted")
    else:
        least = min(enforced, key=lambda window: window.remaining) if shadows else decision
        after = " after it" if is_charged else ""
        say(f"a request would be admitted, {least.remaining:,} of {least.limit:,} remaining{after}")
    for name, fits in shadows.items():
        say(f"rule {name} is in shadow: refuses nothing{'' if fits else ', but would refuse this request'}")
    heads = "Rule", "Window", "Limit", "Used", "Remaining", "Full in", "Free in"
    rows = [
        (
            window.rule or "-",
            f"{window.period:,} s" if window.period else "at once",
            f"{window.limit:,}",
            f"{window.used:,}",
            f"{window.remaining:,}",
            seconds(window.reset_after),
            seconds(window.retry_after),
        )
        for window in decision.windows
    ]
    if rows:
        print_table(heads, rows, title="With this request:" if is_charged else None)


def ban_in_force(decision: Decision) -> float:
    bans = [each for each in decision.standings if not each.charge.bucket.algorithm.IS_LIMIT]
    return _endless(max([int(state) for each in bans for state in each.states], default=0) / 1e6)


def _why(decision: Decision) -> str:
    if decision.is_permanent_ban:
        return "banned permanently"
    if _endless(decision.retry_after) == math.inf:
        return "retrying does not help"
    return f"{'banned, ' if decision.is_ban else ''}retry in {seconds(decision.retry_after)}"


def banned(by: str, retry_after: float) -> str:
    is_endless = _endless(retry_after) == math.inf
    return f"banned permanently by {by}" if is_endless else f"banned by {by} for {seconds(retry_after)} more"


def seconds(number: float) -> str:
    if _endless(number) == math.inf:
        return "never"
    if number < 60:
        return f"{number:.3g} s"
    whole = round(number)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    parts = (("d", days), ("h", hours), ("min", minutes), ("s", whole % 60))
    return " ".join([f"{value} {unit}" for unit, value in parts if value][:2])


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def logs_from(least: int) -> Iterator[None]:
    """Suppress LimitGate's log lines below a level, for a gate without requests."""
    log = logging.getLogger("limitgate")
    level = log.level
    log.setLevel(max(level, least))
    try:
        yield
    finally:
        log.setLevel(level)
