"""The verb ``replay``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import click

from limitgate.command.applications import RULES, is_in_python, rules_named
from limitgate.command.output import json_option, print_json, print_table, say
from limitgate.command.service import Service, service
from limitgate.http.request import Request
from limitgate.messages.text import listed, shortened
from limitgate.replay.access_log import Format, Log
from limitgate.replay.engine import Comparison, Engine, Figures, Progress, counts_by_client, name_of, replay, replay_shared
from limitgate.replay.suggestion import UNITS, Arrivals, Suggestions
from limitgate.rules.rule import RuleSet

_WORTH_PROCESSES = 100 << 20
"""From this size in bytes, several processes are faster."""
_SHOWN = 120
_MOST_CLIENTS = 10_000
"""Maximum of clients in JSON output, to save memory."""


@click.command("replay")
@click.argument("log", metavar="LOG", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--rules", metavar="PATH", help=f"{RULES}; default: those of --app.")
@click.option("--app", metavar="MODULE:APP", help="The application, for its routes, decorators, and clients.")
@click.option("--against", metavar="PATH", help="Rules to compare: which requests would be refused now?")
@click.option("--suggest", is_flag=True, help="Find the smallest limits that would have refused no request.")
@click.option(
    "--format", "form", type=click.Choice(["combined", "common", "json"]), help="Format of the log; default: detected."
)
@click.option("--clients", type=click.IntRange(min=0), metavar="N", help="Clients to list; default: 10, in JSON 10,000.")
@click.option(
    "--processes", type=click.IntRange(min=1), metavar="N", help="Number of processes; needs rules that all count by address."
)
@json_option
def verb(  # noqa: PLR0917 - click passes them by name
    log: str,
    rules: str | None,
    app: str | None,
    against: str | None,
    form: Format | None,
    clients: int | None,
    processes: int | None,
    *,
    suggest: bool,
    as_json: bool,
) -> None:
    """Send an access log through rules, on the log's clock, and show what would have been refused.

    LOG is a file, or "-" for standard input, optionally compressed by gzip: in the common or combined format of Apache, nginx
    and gunicorn, with lines of uvicorn, or with one JSON object per line (time, client, method, path, headers). Prefixes of
    syslog, Docker and Kubernetes are skipped. Lines may be up to two minutes late.

    For example: limitgate replay access.log --rules config/ --against new/ --suggest
    """
    asked = service(rules, app)
    tried = None if against is None else rules_named(against)
    opened = Log(log, form)
    if form is not None:
        opened.check_format()
    arrivals = Arrivals(rule for of_tier in asked.rules.tiers.values() for rule in of_tier) if suggest else None
    in_files = rules is not None and not any(map(is_in_python, filter(None, (rules, against)))) and app is None
    sets = [asked.rules, *([] if tried is None else [tried])]
    number = _processes(opened, sets, processes, can_share=in_files and not suggest and not asked.settings.trusted_proxies)
    if number > 1:
        try:
            found = replay_shared(opened, str(rules), against, number, asked.settings)
        except BrokenProcessPool as error:
            raise click.ClickException("a process was killed, perhaps for lack of memory; expected --processes 1") from error
    else:
        first, *others = [_engine(each, asked) for each in sets]
        first.arrivals = arrivals
        with _progress(opened) as progress:
            found = replay(opened, first, others[0] if others else None, progress=progress)
    suggestions = None if arrivals is None else arrivals.suggestions()
    late = asked.every_late_limit
    if as_json:
        value = _as_json(found, suggestions, _MOST_CLIENTS if clients is None else clients)
        print_json({**value, "unevaluated": late})
        return
    _print(found, suggestions, 10 if clients is None else clients)
    if late:
        say("")
    for name in late:
        say(f"also limited by the {asked.late_kind} {name}: not evaluated")


def _engine(rules: RuleSet, asked: Service) -> Engine:
    if not asked.knows_routes:
        return Engine(rules, asked.settings)

    def describe(method: str, path: str, peer: str, headers: Mapping[str, str] | None) -> Request:
        return asked.request(method, quote(path), peer, (headers or {}).items())

    return Engine(rules, asked.settings, asked.routes, describe)


def _processes(log: Log, sets: list[RuleSet], wished: int | None, *, can_share: bool) -> int:
    can_share = can_share and log.is_file and all(map(counts_by_client, sets))
    if wished is not None and wished > 1 and not can_share:
        raise click.UsageError(
            "several processes need a file, and rule files with ip in every key; they cannot use --suggest, --app or "
            "trusted proxies; expected --processes 1"
        )
    if wished is None:
        wished = len(os.sched_getaffinity(0)) if can_share and log.size >= _WORTH_PROCESSES else 1
    return wished


@contextmanager
def _progress(log: Log) -> Iterator[Progress | None]:
    if not (sys.stderr.isatty() and log.size):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress as Bar, TimeRemainingColumn

    with Bar(BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=log.size)
        yield lambda read: bar.update(task, completed=read)


def _as_json(found: Comparison, suggestions: Suggestions | None, clients: int) -> dict[str, Any]:
    value = found.figures.as_json(clients)
    value["untimed"], value["of_proxies"] = found.figures.untimed, found.figures.of_proxies
    value["in_shadow"] = _in_shadow(found.figures)
    value["unaddressed"] = sum([found.figures.requests_by[each] for each in found.figures.unaddressed])
    value["unread"] = [
        {"reason": reason, "lines": number, "first": name_of(line)} for reason, (number, line) in found.figures.unread.items()
    ]
    if found.tried is not None:
        value["against"] = {
            **found.tried.as_json(clients),
            "in_shadow": _in_shadow(found.tried),
            "newly_refused": found.newly_refused,
            "newly_admitted": found.newly_admitted,
        }
    if suggestions is not None:
        counts = suggestions.counts
        value["suggest"] = {rule: {unit: each[0] for unit, each in units.items()} for rule, units in counts.items()}
        value["suggest_almost"] = {rule: {unit: each[1] for unit, each in units.items()} for rule, units in counts.items()}
        value["unsuggested"] = [
            {"rule": rule, "units": units, "reason": reason}
            for rule, reasons in suggestions.left_out.items()
            for reason, units in reasons.items()
        ]
    return value


def _in_shadow(figures: Figures) -> dict[str, Any]:
    return {"requests": figures.in_shadow, "rules": dict(figures.in_shadow_by)}


def _print(found: Comparison, suggestions: Suggestions | None, clients: int) -> None:
    figures, tried = found.figures, found.tried
    say(*_summary(figures))
    _print_unread(figures)
    _print_peaks(figures)
    say()
    _print_rules(figures, tried)
    if clients:
        say()
        _print_clients(figures, tried, clients)
    if tried is not None:
        newly = f"{found.newly_refused:,} requests newly refused, {found.newly_admitted:,} newly admitted"
        say("", f"{newly}{_shadow(tried.in_shadow)}")
    if suggestions is not None:
        _print_suggestions(suggestions)


def _print_suggestions(found: Suggestions) -> None:
    if not any(found):
        say("", "No rule applies to any of these requests, so there is nothing to suggest.")
    if found.counts:
        say("", "Smallest limits that would have refused no request, or at most one in 1,000:")
        rows = [(rule, *(_both(of_unit.get(unit)) for unit in UNITS)) for rule, of_unit in found.counts.items()]
        print_table(("Rule", *(f"Per {unit}" for unit in UNITS)), rows)
    if found.left_out:
        say("", "No limit is suggested for:")
        left_out = [(rule, *each) for rule, reasons in found.left_out.items() for each in reasons.items()]
        rows = [(rule, "all" if len(units) == len(UNITS) else listed(units), reason) for rule, reason, units in left_out]
        print_table(("Rule", "Unit", "Reason"), rows)


def _both(counts: tuple[int, int] | None) -> str:
    for_all, almost = counts or (None, None)
    return "-" if for_all is None else f"{for_all:,}; {almost:,}" if almost != for_all else f"{for_all:,}"


def _summary(figures: Figures) -> tuple[str, str]:
    when = ""
    if figures.first is not None and figures.last:
        when = f", {_moment(figures.first)} to {_moment(figures.last)}"
    skipped = f" ({figures.skipped:,} of {figures.lines:,} lines have no request)" if figures.skipped else ""
    share = figures.refused / figures.requests if figures.requests else 0.0
    return (
        f"{figures.requests:,} requests of {len(figures.requests_by):,} clients{when}{skipped}",
        f"{figures.admitted:,} admitted, {figures.refused:,} refused ({share:.2%}){_shadow(figures.in_shadow)}",
    )


def _shadow(number: int) -> str:
    return f", {number:,} in shadow" if number else ""


def _print_unread(figures: Figures) -> None:
    for reason, (number, line) in figures.unread.items():
        say(f"{number:,} lines with a request were not read: {reason}, for example {shortened(name_of(line), _SHOWN)!r}")
    if figures.untimed:
        say(
            f"{figures.untimed:,} requests have no time and count as simultaneous with the previous line, so the refusals are "
            "an upper bound; expected lines with times, as from docker logs -t or kubectl logs --timestamps"
        )
    if unaddressed := figures.unaddressed:
        number = sum([figures.requests_by[each] for each in unaddressed])
        first = shortened(name_of(unaddressed[0]), _SHOWN)
        say(f"{number:,} requests have a client that is not an address, for example {first!r}; each name counts as one client")
    if figures.of_proxies:
        say(
            f"{figures.of_proxies:,} requests are logged under the address of a trusted proxy, so their clients count as one; "
            "expected a log with the resolved address"
        )


def _print_peaks(figures: Figures) -> None:
    for unit, peak in figures.highest().items():
        if peak["requests"]:
            say(f"Highest rate of one client: {peak['requests']:,} in a {unit} ({shortened(peak['client'])})")


def _print_rules(figures: Figures, tried: Figures | None) -> None:
    every = [figures, *([] if tried is None else [tried])]
    heads = "Rule", "Admitted", "Refused", "Admitted against", "Refused against"
    names = dict.fromkeys(name for each in every for name in each.rules)
    rows = [(name, *(cell for each in every for cell in _counts(each, name))) for name in names]
    print_table(heads[: 2 * len(every) + 1], rows)


def _counts(figures: Figures, name: str) -> tuple[str, str]:
    if name not in figures.rules:
        return "-", "-"
    admitted, refused = figures.rules[name]
    in_shadow = figures.in_shadow_by[name]
    marked = f" ({in_shadow:,} in shadow)" if 0 < in_shadow < refused else " in shadow" if in_shadow else ""
    return f"{admitted:,}", f"{refused:,}{marked}"


def _print_clients(figures: Figures, tried: Figures | None, most: int) -> None:
    numbers = [figures.requests_by, figures.refused_by, *([] if tried is None else [tried.refused_by])]
    first = (figures if tried is None else tried).clients(most)
    heads = "Client", "Requests", "Refused", "Refused against"
    print_table(heads[: len(numbers) + 1], [(shortened(name_of(each)), *(f"{by[each]:,}" for by in numbers)) for each in first])


def _moment(at: int) -> str:
    return f"{datetime.fromtimestamp(at // 1_000_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
