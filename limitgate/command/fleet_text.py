"""The figures of a fleet as text, for ``status`` and ``top``."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from limitgate.command.output import seconds
from limitgate.fleet.figures import Figures
from limitgate.fleet.sketch import counts_from

SHOWN = 9
"""Clients selectable by a key."""
PROCESSES = "Process", "Up", "Version", "Rules", "Req/s", "Refused/s", "Requests", "Refused", "Store", "Last error"


def process_rows(figures: Figures) -> list[tuple[str, ...]]:
    return [
        (
            f"{each['host']}:{each['pid']}",
            seconds(each["uptime"]),
            each["version"],
            _revisions(each["gates"]) + ("" if each["follows"] else " (differs from most)"),
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


def _revisions(gates: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(dict.fromkeys([_revision(each["revision"]) for each in gates]))


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


def summary(figures: Figures) -> str:
    count = len(figures["processes"])
    store = figures["store"]
    answers = f"the store answers in {store['latency'] * 1000:.2g} ms" if store["up"] else f"the store fails: {store['error']}"
    if store["writes"] is False:
        answers = "the store refuses writes"
    others = sum(not each["follows"] for each in figures["processes"])
    rules = f"{others} with other rules" if others else f"all with rules {_revisions(figures['processes'][-1]['gates'])}"
    per_second = f"{figures['requests_per_second']:,.1f} requests/s, {figures['refused_per_second']:,.1f} refused/s"
    return f"{count} {'process' if count == 1 else 'processes'}, {rules}; {per_second}; {answers}"


def notes(figures: Figures) -> list[str]:
    found = []
    store = figures["store"]
    if not store["up"]:
        known = f"; last known at {_clock(figures['at'], time.time())}" if figures["processes"] else ""
        found.append(f"the store does not answer: {store['error']}{known}")
    elif store["writes"] is False:
        found.append(f"the store refuses writes, so limits are not kept there: {store['error']}")
    if figures["unreadable"]:
        count, first = len(figures["unreadable"]), figures["unreadable"][0]
        found.append(f"{count} {'snapshot' if count == 1 else 'snapshots'} cannot be read: {first}")
    return found


_PERIOD = "5 to 10 minutes"
_DAY = 86_400.0
_NOT_ONE = "no client is being refused"


def headline(figures: Figures) -> str:
    if figures["empty"]:
        return str(figures["empty"])
    most = figures["headline"]
    if most is None:
        return _NOT_ONE
    rate = f" {most['per_second']:,.1f} times/s" if most["per_second"] else ""
    tier = "" if most["tier"] == "default" else f" of tier {most['tier']}"
    now, times = figures["at"], "time" if most["count"] == 1 else "times"
    period = f" in the last {_PERIOD}" if most["since"] < counts_from(now) else ""
    does, rule = ("would be refused", "shadow rule") if most["shadow"] else ("is refused", "rule")
    found = (
        f"{most['who']} {does}{rate} under {rule} {most['rule']}{tier} since {_clock(most['since'], now)} "
        f"({seconds(max(1.0, round(now - most['since'])))}), {_count(most)} {times}{period}"
    )
    return f"{_NOT_ONE}; {found}" if most["shadow"] else found


def _clock(at: float, now: float) -> str:
    with suppress(OverflowError, OSError, ValueError):
        return f"{datetime.fromtimestamp(at, UTC):{'%H:%M:%S' if now - at < _DAY else '%Y-%m-%d %H:%M'}} UTC"
    return "?"


def _count(entry: Mapping[str, Any]) -> str:
    least = entry["count"] - entry["error"]
    return f"{least:,}" if not entry["error"] else f"{least:,} to {entry['count']:,}"


_RULES = "Rule", "Tier", "Utilization", "Refused", "Admitted"


def _rule_rows(figures: Figures) -> list[tuple[str, ...]]:
    ordered = sorted(figures["rules"], key=lambda each: (-each["refused"], -each["utilization"], each["name"]))
    return [
        (each["name"], each["tier"], f"{each['utilization']:.0%}", _refused(each), f"{each['admitted']:,}") for each in ordered
    ]


def _refused(rule: Mapping[str, Any]) -> str:
    return f"{rule['would_refuse']:,} in shadow" if rule["shadow"] else f"{rule['refused']:,}"


_CLIENTS = "", "Client", "Rule", "Count", "Per second", "Since"


def clients_of(figures: Figures, kind: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Recent ones first, then by count."""
    found = [(rule, each) for rule in figures["rules"] for each in rule[kind]]
    return sorted(found, key=lambda each: (figures["at"] - each[1]["last"] > 30, each[1]["error"] - each[1]["count"]))


def _client_rows(
    clients: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], first: int, now: float
) -> list[tuple[str, ...]]:
    return [
        (
            str(place) if place <= SHOWN else "",
            each["who"],
            _called(rule),
            _count(each),
            f"{each['per_second']:,.1f}",
            _clock(each["since"], now),
        )
        for place, (rule, each) in enumerate(clients, first)
    ]


def _called(rule: Mapping[str, Any]) -> str:
    more = [rule["tier"]] * (rule["tier"] != "default") + ["shadow"] * rule["shadow"]
    return f"{rule['name']} ({', '.join(more)})" if more else str(rule["name"])


def top_tables(figures: Figures, refused: int, used: int) -> Iterator[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
    yield "Rules (since each process started)", _RULES, _rule_rows(figures)
    clients = clients_of(figures, "most_refused")[:refused]
    if clients:
        yield f"Refused most (last {_PERIOD})", _CLIENTS, _client_rows(clients, 1, figures["at"])
    using = clients_of(figures, "most_used")[:used]
    if using:
        yield f"Used most (last {_PERIOD})", _CLIENTS, _client_rows(using, len(clients) + 1, figures["at"])
    if figures["bans"]:
        heads = "Client", "Ends in", "By", "Reason"
        bans = figures["bans"][:used]
        yield "Banned", heads, [(each["key"], _left(each["retry_after"]), each["by"], each["reason"] or "") for each in bans]


def _left(retry_after: float | None) -> str:
    return seconds(math.inf if retry_after is None else retry_after)
