"""The sums of all processes for Prometheus: equal to their own, and never falling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from limitgate import LimitGateWSGI, MemoryStore, Rule
from limitgate.errors import StoreError
from limitgate.fleet.exporter import FleetCollector, Totals
from limitgate.fleet.reader import FleetReader
from limitgate.fleet.snapshot import Snapshot, encode
from limitgate.messages.diagnostics import Diagnosis
from limitgate.prometheus import PrometheusObserver
from limitgate.stores.base import ConfigRequest, FleetRequest, StoredConfig, StoredFleet, fleet_key
from tests.fleet.test_publisher import publisher_of
from tests.fleet.test_reader import KEY, snapshot
from tests.support.clock import Clock
from tests.support.doors import wsgi_reply

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def collector(store: Any) -> FleetCollector:
    return FleetCollector(FleetReader(store), store, "limitgate")


def samples(collects: Any) -> Samples:
    registry = collects if isinstance(collects, CollectorRegistry) else CollectorRegistry()
    if registry is not collects:
        collects._reader._read_at = -1.0
        registry.register(collects)
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((name, tuple(sorted(labels.items()))))


def wsgi(_: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


def test_equal_to_the_sum_of_the_processes_own() -> None:
    """Three gates with observers of their own: each counter and histogram of the exporter is their sum."""
    together, owns, fleet = MemoryStore(), [], []
    rules = [Rule("api", "20/day", key=["ip"], path="/api"), Rule("login", "2/day", key=["ip"], path="/login", shadow=True)]
    for number in range(3):
        registry = CollectorRegistry()
        app = LimitGateWSGI(
            wsgi,
            rules=rules,
            store=MemoryStore(Clock()),
            fleet=True,
            observers=[PrometheusObserver(registry)] if number else [],
        )
        for path in ("/api",) * (10 + 10 * number) + ("/login",) * 4 + ("/free",) * number:
            wsgi_reply(app, path)
        owns.append(registry)
        fleet.append(app)
        app.gate.rules.counts.tally.count()  # type: ignore[union-attr]
        told = replace(publisher_of(app).snapshot(), process=str(number))
        together.fleet(FleetRequest(KEY, told.id, encode(told)))
    found = samples(collector(together))
    own = [samples(registry) for registry in owns[1:]]
    # The first has no observer: it counts later, and equally.
    assert value(found, "limitgate_requests_total", outcome="admitted", decided_by="store") == 10 + 20 + 20 + 2 * 3
    assert value(found, "limitgate_requests_total", outcome="refused", decided_by="store") == 10
    assert value(found, "limitgate_requests_total", outcome="shadow_refused", decided_by="store") == 2 * 3
    assert value(found, "limitgate_requests_total", outcome="unlimited", decided_by="nobody") == 3
    first = publisher_of(fleet[0]).snapshot()
    of_first = FleetReader(MemoryStore())
    of_first.snapshots = [first]
    alone = Totals()
    alone.update([first], 0.0)
    compared = 0
    for name in ("limitgate_rule_decisions_total", "limitgate_rule_utilization_bucket", "limitgate_rule_utilization_count"):
        for key, total in found.items():
            if key[0] == name:
                others = sum(each[key] for each in own)
                mine = _own(alone, key)
                assert total == others + mine, key
                compared += 1
    assert compared == 2 * (3 + 9 + 1)
    assert value(found, "limitgate_fleet_processes") == 3
    assert value(found, "limitgate_rule_limit", rule="api", tier="default", window="day") == 20


def test_diagnoses_are_told_once_per_process() -> None:
    """By one of its gates, for they are the process'."""
    store, registry = MemoryStore(), CollectorRegistry()
    apps = [
        LimitGateWSGI(wsgi, rules=[Rule("api", "2/day")], store=store, fleet=True, observers=[PrometheusObserver(registry)])
        for _ in range(2)
    ]
    Diagnosis.DROPPED.log("a", "b")
    for app in apps:
        write(store, publisher_of(app).snapshot())
    found, own = samples(collector(store)), samples(registry)
    code = Diagnosis.DROPPED.code
    assert value(found, "limitgate_diagnostics_total", code=code)
    for key, total in own.items():
        if key[0] == "limitgate_diagnostics_total":
            assert found[key] == total


def _own(alone: Totals, key: tuple[str, tuple[tuple[str, str], ...]]) -> float:
    name, labels = key
    named = dict(labels)
    of_rule = named["rule"], named["tier"]
    sums = alone.sums()
    if name.endswith("_total"):
        return sums.get(("limitgate.rule.decisions", (*of_rule, named["outcome"])), [0])[0]
    counts = sums.get(("limitgate.rule.utilization", of_rule), [0] * 10)[:-1]
    if name.endswith("_count"):
        return sum(counts)
    bounds = ["0.1", "0.25", "0.5", "0.8", "0.9", "1.0", "1.5", "2.0", "+Inf"]
    return sum(counts[: bounds.index(named["le"]) + 1])


def counted(number: int, count: int, **more: Any) -> Snapshot:
    return snapshot(number, counters=[("limitgate.requests", ("admitted", "store"), [count])], **more)


def admitted(found: Samples) -> float | None:
    return value(found, "limitgate_requests_total", outcome="admitted", decided_by="store")


def write(store: MemoryStore, *snapshots: Snapshot) -> None:
    for each in snapshots:
        store.fleet(FleetRequest(KEY, each.id, encode(each)))


def test_no_restart_makes_a_counter_fall() -> None:
    """Neither that of a process, nor that of the exporter, nor that of the store."""
    store = MemoryStore()
    exports = collector(store)
    write(store, counted(1, 100), counted(2, 50))
    assert admitted(samples(exports)) == 150
    # One process begins anew, under the same host and pid.
    store.fleet(FleetRequest(KEY, f"{1:016x}"))
    write(store, counted(3, 7))
    assert admitted(samples(exports)) == 157
    exports.save()
    # The exporter begins anew while one more process is gone.
    store.fleet(FleetRequest(KEY, f"{2:016x}"))
    again = collector(store)
    assert admitted(samples(again)) == 157
    write(store, counted(3, 9))
    assert admitted(samples(again)) == 159
    # The store is replaced by an empty one.
    store._fleets.clear()
    store._configs.clear()
    assert admitted(samples(again)) == 159
    write(store, counted(4, 1))
    assert admitted(samples(again)) == 160


def test_a_process_that_comes_back_is_counted_once() -> None:
    """It did not write for a while, as a suspended one does not. After an hour, what it had counted is kept without its id."""
    totals = Totals()
    one = counted(1, 5)
    totals.update([one], 0.0)
    totals.update([], 3_000.0)
    totals.update([replace(one, counters=[("limitgate.requests", ("admitted", "store"), [6])])], 3_500.0)
    assert totals.sums()["limitgate.requests", ("admitted", "store")] == [6]
    totals.update([], 8_000.0)
    assert totals.sums()["limitgate.requests", ("admitted", "store")] == [6]
    assert not totals._processes
    other = Totals()
    other.restore(totals.state())
    assert other.sums() == totals.sums()


def test_counters_of_others_are_left_out() -> None:
    """Another version may know other instruments; a damaged or hostile snapshot may say anything."""
    totals = Totals()
    wrong: list[Any] = [
        ("limitgate.unknown", ("a",), [1]),
        ("limitgate.requests", ("admitted",), [1]),
        ("limitgate.requests", ("admitted", "store"), [1, 2]),
        ("limitgate.rule.utilization", ("api", "default"), [1]),
        ("limitgate.rule.limit", ("api", "default", "second"), [1]),
    ]
    totals.update([snapshot(1, counters=wrong)], 0.0)
    assert totals.sums() == {}
    for text in ("", "nonsense", "eJw=", "e30="):
        totals.restore(text)
    assert totals.sums() == {}


def test_gauges_are_of_those_that_live() -> None:
    """Sums, extremes, or each by its process, as the instrument says."""
    store = MemoryStore()
    gauges: list[Any] = [
        [("limitgate.rule.in_flight", ("all", "default"), [3]), ("limitgate.store.up", ("redis",), [1])],
        [("limitgate.rule.in_flight", ("all", "default"), [4]), ("limitgate.store.up", ("redis",), [0])],
    ]
    revision = [("limitgate.config.revision", (), [5])]
    write(store, snapshot(1, gauges=gauges[0] + revision), snapshot(2, gauges=gauges[1] + revision))
    write(store, snapshot(3, gauges=gauges[0], ended=True))
    found = samples(collector(store))
    assert value(found, "limitgate_rule_in_flight", rule="all", tier="default") == 7
    assert value(found, "limitgate_store_up", store="redis") == 0
    assert value(found, "limitgate_config_revision", host="web", pid="7", process=f"{2:016x}") == 5
    assert value(found, "limitgate_fleet_processes") == 2


class Away(MemoryStore):
    is_away = False

    def fleet(self, request: FleetRequest, timeout: float = 0) -> StoredFleet:
        if self.is_away:
            raise StoreError("no connection", "connection")
        return super().fleet(request, timeout)

    def config(self, request: ConfigRequest, timeout: float = 0) -> StoredConfig:
        if self.is_away or request.text is not None:
            raise StoreError("read-only", "connection")
        return super().config(request, timeout)


def test_a_store_that_is_away_or_read_only() -> None:
    """Counters stay, and a gauge says so."""
    store = Away()
    write(store, counted(1, 5))
    exports = collector(store)
    store.is_away = True
    assert value(samples(exports), "limitgate_fleet_store_up") == 0
    store.is_away = False
    assert admitted(samples(exports)) == 5
    store.is_away = True
    found = samples(exports)
    assert (admitted(found), value(found, "limitgate_fleet_store_up"), value(found, "limitgate_fleet_processes")) == (5, 0, 0)


@pytest.mark.usefixtures("_unwatched")
def test_a_scrape_of_a_thousand_processes_sums_all() -> None:
    store = MemoryStore()
    write(store, *[counted(number, number) for number in range(1_000)])
    assert admitted(samples(collector(store))) == sum(range(1_000))
    assert fleet_key("limitgate") == KEY
