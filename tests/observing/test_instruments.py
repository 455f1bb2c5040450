"""The table has the names that others rely on."""

from __future__ import annotations

import re

from limitgate.observing.instruments import INSTRUMENTS

CONTRACT = {
    "limitgate_requests_total": ("outcome", "decided_by"),
    "limitgate_rule_decisions_total": ("rule", "tier", "outcome"),
    "limitgate_rule_utilization": ("rule", "tier"),
    "limitgate_rule_limit": ("rule", "tier", "window"),
    "limitgate_rule_in_flight": ("rule", "tier"),
    "limitgate_rule_waiting": ("rule", "tier"),
    "limitgate_rule_adaptive_limit": ("rule", "tier"),
    "limitgate_store_operation_duration_seconds": ("store", "result"),
    "limitgate_store_up": ("store",),
    "limitgate_store_outages_total": ("store",),
    "limitgate_config_loads_total": ("result",),
    "limitgate_config_last_load_success": (),
    "limitgate_config_last_load_timestamp_seconds": (),
    "limitgate_config_revision": (),
    "limitgate_diagnostics_total": ("code",),
}


def test_names_and_labels_are_those_that_dashboards_rely_on() -> None:
    """Each figure has its name in Prometheus and its labels."""
    named = {each.prometheus_name: each.labels for each in INSTRUMENTS}
    assert {name: named.get(name) for name in CONTRACT} == CONTRACT


def test_names_follow_the_conventions_of_opentelemetry() -> None:
    """Dotted, without unit or kind; https://opentelemetry.io/docs/specs/semconv/general/naming/."""
    assert all(re.fullmatch(r"limitgate(\.[a-z]+(_[a-z]+)*)+", each.name) for each in INSTRUMENTS)
    assert not [each.name for each in INSTRUMENTS if each.name.endswith(("_total", "_seconds"))]
    assert all((each.kind == "histogram") is bool(each.bounds) for each in INSTRUMENTS)


def test_values_of_labels() -> None:
    """Outcomes and sources are those that are documented."""
    requests, decisions = INSTRUMENTS[:2]
    outcomes = {"admitted", "delayed", "refused", "shadow_refused", "unlimited", "failed_open", "failed_closed"}
    assert set(requests.values["outcome"]) == outcomes
    assert set(requests.values["decided_by"]) == {"store", "cache", "lease", "local", "nobody"}
    assert decisions.values["outcome"] == ("admitted", "refused", "shadow_refused")
    durations = next(each for each in INSTRUMENTS if each.name.endswith("duration"))
    assert set(durations.values["result"]) == {"ok", "timeout", "connection", "oom", "reply"}
    utilization = next(each for each in INSTRUMENTS if each.name.endswith("utilization"))
    assert utilization.bounds == (0.1, 0.25, 0.5, 0.8, 0.9, 1.0, 1.5, 2.0)
