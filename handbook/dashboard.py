"""The dashboard for Grafana, deploy/grafana/dashboards/limitgate.json: a panel for every figure that observers are handed.

Panels follow from the kind of a figure, its labels and its unit, so that one which is added to the table has its panel too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from limitgate.observing.instruments import CONFIG_TIMESTAMP, INSTRUMENTS, Instrument

FILE = Path(__file__).parent.parent / "deploy" / "grafana" / "dashboards" / "limitgate.json"

Json = dict[str, Any]

_RANGE = "[$__rate_interval]"
_QUANTILES = (0.5, 0.99)
_UNITS = {"s": "s", "1": "short", "{request}": "short"}
"""Names of Grafana for units of figures; a count of anything else needs none."""
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _HEIGHT, _WIDTH = 24, 8, 8
"""Columns of a dashboard, and the size of a panel in its grid."""
_STAT_HEIGHT, _STAT_WIDTH = 4, 4
_FILTERED = ("rule", "tier")
"""Labels by which whoever looks may choose series, besides the job."""


class Query(NamedTuple):
    """An expression of PromQL, and the name of each of its series."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """What one panel shows."""

    title: str
    meaning: str
    queries: tuple[Query, ...]
    unit: str


def panels_at_a_glance() -> Iterator[Panel]:
    """The figures to look at first, of all rules."""
    of_all = 'limitgate_requests_total{job=~"$job"}'
    refused = 'limitgate_requests_total{job=~"$job", outcome="refused"}'
    failed = 'limitgate_requests_total{job=~"$job", outcome=~"failed_.+"}'
    local = 'limitgate_requests_total{job=~"$job", decided_by="local"}'
    revisions = 'count_values("revision", limitgate_config_revision{job=~"$job"})'
    stats = [
        ("Requests", "Requests a second.", _rate(of_all), "reqps"),
        ("Refused", "Share of requests that were refused.", f"{_rate(refused)} / {_rate(of_all)}", "percentunit"),
        ("Without the store", "Requests a second that on_error decided.", f"{_rate(failed)} + {_rate(local)}", "reqps"),
        ("Store", "1 while every process reaches its store.", 'min(limitgate_store_up{job=~"$job"})', "short"),
        ("Rule sets", "Different rule sets in force; more than 1 only while rules change.", f"count({revisions})", "short"),
        ("Last load", "1 unless a process has rejected the rules that it read last.", _of_last_load(), "short"),
    ]
    for title, meaning, expression, unit in stats:
        yield Panel(title, meaning, (Query(expression, title),), unit)


def _of_last_load() -> str:
    return 'min(limitgate_config_last_load_success{job=~"$job"})'


def _rate(series: str) -> str:
    return f"sum(rate({series}{_RANGE}))"


def panel(instrument: Instrument) -> Panel:
    """The panel of a figure."""
    title = instrument.name.removeprefix("limitgate.").replace(".", " ").replace("_", " ").capitalize()
    return Panel(title, instrument.meaning, tuple(_queries(instrument)), _unit(instrument))


def _queries(instrument: Instrument) -> Iterator[Query]:
    name, by = instrument.prometheus_name, f"by ({', '.join(instrument.labels)}) " if instrument.labels else ""
    chosen = "".join([f', {label}=~"${label}"' for label in instrument.labels if label in _FILTERED])
    selector = f'{{job=~"$job"{chosen}}}'
    legend = " ".join([f"{{{{{label}}}}}" for label in instrument.labels]) or instrument.name
    if instrument is CONFIG_TIMESTAMP:
        yield Query(f"time() - min({name}{selector})", "seconds since")
    elif instrument.kind == "counter":
        yield Query(f"sum {by}(rate({name}{selector}{_RANGE}))", legend)
    elif instrument.kind == "histogram":
        by = f"by ({', '.join([*instrument.labels, 'le'])}) "
        for quantile in _QUANTILES:
            rate = f"sum {by}(rate({name}_bucket{selector}{_RANGE}))"
            yield Query(f"histogram_quantile({quantile}, {rate})", f"p{100 * quantile:g} {legend}")
    elif instrument.joined == "each":
        yield Query(f'count(count_values("value", {name}{selector}))', "different values")
    else:
        yield Query(f"{instrument.joined} {by}({name}{selector})", legend)


def _unit(instrument: Instrument) -> str:
    if instrument.kind == "counter":
        return "reqps" if instrument.unit == "{request}" else "cps"
    return "percentunit" if instrument.kind == "histogram" and instrument.unit == "1" else _UNITS.get(instrument.unit, "short")


def dashboard() -> Json:
    """The dashboard as it is written to `FILE`."""
    return {
        "uid": "limitgate",
        "title": "LimitGate",
        "tags": ["limitgate"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_laid_out()),
    }


def text() -> str:
    """The dashboard as text."""
    return json.dumps(dashboard(), indent=2) + "\n"


def _laid_out() -> Iterator[Json]:
    """Panels in their rows, one for the figures of each kind of thing: requests, rules, the store."""
    numbers, top = count(1), 0
    yield _row(next(numbers), "At a glance", top)
    top += 1
    for place, stat in enumerate(panels_at_a_glance()):
        position = {"x": place * _STAT_WIDTH % _COLUMNS, "y": top, "w": _STAT_WIDTH, "h": _STAT_HEIGHT}
        yield _drawn(next(numbers), "stat", stat, position)
    top += _STAT_HEIGHT
    for subject, instruments in _by_subject().items():
        yield _row(next(numbers), subject.capitalize(), top)
        top += 1
        for place, instrument in enumerate(instruments):
            line, column = divmod(place * _WIDTH, _COLUMNS)
            position = {"x": column, "y": top + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield _drawn(next(numbers), "timeseries", panel(instrument), position)
        top += -(-len(instruments) * _WIDTH // _COLUMNS) * _HEIGHT


def _by_subject() -> dict[str, list[Instrument]]:
    subjects: dict[str, list[Instrument]] = {}
    for instrument in INSTRUMENTS:
        subjects.setdefault(instrument.name.split(".")[1], []).append(instrument)
    return subjects


def _row(number: int, title: str, top: int) -> Json:
    position = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": position, "panels": []}


def _drawn(number: int, kind: str, panel: Panel, position: dict[str, int]) -> Json:
    targets = [
        {"refId": chr(ord("A") + place), "datasource": _DATASOURCE, "expr": query.expression, "legendFormat": query.legend}
        for place, query in enumerate(panel.queries)
    ]
    options: Json = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    if kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    return {
        "id": number,
        "type": kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": options,
        "targets": targets,
    }


def _variables() -> Iterator[Json]:
    """What whoever looks may choose: the data source, and the jobs, rules and tiers that there are."""
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    sources = {"job": "limitgate_requests_total", **dict.fromkeys(_FILTERED, 'limitgate_rule_decisions_total{job=~"$job"}')}
    for label, series in sources.items():
        query = f"label_values({series}, {label})"
        yield {
            "name": label,
            "label": label.capitalize(),
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": query, "refId": label},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
