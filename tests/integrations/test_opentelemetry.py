"""Figures by OpenTelemetry's API, as its SDK exports them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from limitgate import LimitGateWSGI, MemoryStore, Rule
from limitgate.observing.exporter import exporter
from limitgate.observing.instruments import ADAPTIVE_LAG, INSTRUMENTS, RULE_IN_FLIGHT
from limitgate.opentelemetry import OpenTelemetryObserver
from tests.support.clock import Clock
from tests.support.doors import wsgi_reply

RULES = [Rule("api", "3/minute", concurrency=5, path="/api/**")]


def hello(_: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


def exported(reader: InMemoryMetricReader) -> dict[str, Any]:
    """The metrics of a reader by name."""
    exporter.export()
    data = reader.get_metrics_data()
    assert data is not None
    return {one.name: one for each in data.resource_metrics for scope in each.scope_metrics for one in scope.metrics}


def points(metric: Any) -> dict[tuple[str, ...], Any]:
    return {tuple(point.attributes.values()): point for point in metric.data.data_points}


def test_what_is_exported_is_what_was_counted() -> None:
    """Names, units, attributes, counts and sums."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    app = LimitGateWSGI(hello, rules=RULES, store=MemoryStore(Clock()), observers=[OpenTelemetryObserver(provider)])
    before = exported(reader)
    assert points(before["limitgate.requests"])["refused", "store"].value == 0
    assert points(before["limitgate.rule.decisions"])["api", "default", "refused"].value == 0
    for _ in range(4):
        wsgi_reply(app, "/api/x")
    metrics = exported(reader)
    assert {name: one.unit for name, one in metrics.items()} == {
        each.name: each.unit for each in INSTRUMENTS if each.name in metrics
    }
    budgets = {each.name for each in INSTRUMENTS if each.name.startswith("limitgate.budget.")}
    absent = {each.name for each in INSTRUMENTS} - metrics.keys() - budgets
    adaptive = {each.name for each in INSTRUMENTS if "adaptive" in each.name or each.name.endswith("shed")}
    assert absent - {ADAPTIVE_LAG.name} == adaptive - {ADAPTIVE_LAG.name} | {
        "limitgate.rule.bans",
        "limitgate.rule.waiting",
        "limitgate.store.operation.duration",
    }  # no rule and no store has them here
    requests = points(metrics["limitgate.requests"])
    assert (requests["admitted", "store"].value, requests["refused", "store"].value) == (3, 1)
    (used,) = metrics["limitgate.rule.utilization"].data.data_points
    assert used.attributes == {"rule": "api", "tier": "default"}
    assert used.explicit_bounds == (0.1, 0.25, 0.5, 0.8, 0.9, 1.0, 1.5, 2.0)
    assert used.bucket_counts == (0, 0, 1, 1, 0, 2, 0, 0, 0)
    assert used.sum == pytest.approx(1 / 3 + 2 / 3 + 1 + 1)
    assert points(metrics["limitgate.rule.limit"])["api", "default", "minute"].value == 3
    assert points(metrics["limitgate.rule.in_flight"])["api", "default"].value == 0


def test_an_up_down_counter_is_told_differences() -> None:
    """Its API knows no values."""
    reader = InMemoryMetricReader()
    observer = OpenTelemetryObserver(MeterProvider([reader]))
    for value in (3, 5, 2):
        observer.set(RULE_IN_FLIGHT, ("api", "default"), value)
        assert points(exported(reader)["limitgate.rule.in_flight"])["api", "default"].value == value


def test_observers_of_a_provider_are_one() -> None:
    """So several gates with ``observers=["opentelemetry"]`` add up."""
    assert OpenTelemetryObserver() == OpenTelemetryObserver() != OpenTelemetryObserver(MeterProvider())


LATE = """
from limitgate import Limiter
limiter = Limiter("memory://", observers=["opentelemetry"])
limiter.hit("a", "9/minute")
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
from limitgate.observing.exporter import exporter
exporter.export()
limiter.hit("a", "9/minute")
exporter.export()
data = reader.get_metrics_data()
metrics = [one for each in data.resource_metrics for scope in each.scope_metrics for one in scope.metrics]
[requests] = [one for one in metrics if one.name == "limitgate.requests"]
print([point.value for point in requests.data.data_points if point.value])
"""


def test_the_provider_may_be_set_later() -> None:
    """It has all that was counted before."""
    ran = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[2]"
