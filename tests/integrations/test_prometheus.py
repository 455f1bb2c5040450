"""Metrics in a registry of prometheus-client: always up to date, in as many gates and observers as there may be."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from limitgate import Limiter, LimitGateWSGI, MemoryStore, Rule, RuleSet, prometheus
from limitgate.observing.instruments import (
    INSTRUMENTS,
    RULE_DECISIONS,
    RULE_IN_FLIGHT,
    RULE_LIMIT,
    RULE_UTILIZATION,
    RULE_WAITING,
)
from limitgate.observing.series import count_series
from limitgate.prometheus import PrometheusObserver
from tests.support.clock import Clock
from tests.support.doors import wsgi_reply
from tests.support.threads import repeated

RULES = [
    Rule("api", "3/minute", "100/day", path="/api/**"),
    Rule("api", "30/minute", path="/api/**", tier="vip"),
    Rule("slow", "5/second", path="/slow", max_delay=1),
    Rule("few", concurrency=3, path="/few"),
    Rule("no", path="/no", deny=True),
    Rule("health", path="/healthz", exempt=True),
]


def hello(_: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


def gate(registry: CollectorRegistry, *rules: Rule, **options: Any) -> LimitGateWSGI:
    """A gate whose figures are in a registry."""
    options = {"store": MemoryStore(Clock()), "identify": lambda _: None, **options}
    return LimitGateWSGI(hello, rules=[*(rules or RULES)], observers=[PrometheusObserver(registry)], **options)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """A sample of a registry, as it is collected."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return next((one.value for family in families for one in family.samples if one.name == name and one.labels == labels), None)


def test_a_scrape_has_what_was_counted_just_before() -> None:
    """Without waiting for the next second."""
    registry = CollectorRegistry()
    app = gate(registry)
    for expected in (1, 2, 3):
        wsgi_reply(app, "/api/x")
        assert value(registry, "limitgate_requests_total", outcome="admitted", decided_by="store") == expected
        assert value(registry, "limitgate_rule_decisions_total", rule="api", tier="default", outcome="admitted") == expected
    wsgi_reply(app, "/api/x")
    assert value(registry, "limitgate_rule_utilization_bucket", rule="api", tier="default", le="0.5") == 1
    assert value(registry, "limitgate_rule_utilization_count", rule="api", tier="default") == 4
    assert value(registry, "limitgate_rule_utilization_sum", rule="api", tier="default") == pytest.approx(1 / 3 + 2 / 3 + 1 + 1)
    assert value(registry, "limitgate_rule_limit", rule="api", tier="vip", window="minute") == 30


def test_some_of_the_series_are_up_to_date_too() -> None:
    """``/metrics?name[]=...`` collects only these."""
    registry = CollectorRegistry()
    wsgi_reply(gate(registry), "/api/x")
    some = registry.restricted_registry(["limitgate_requests_total"])
    assert value(some, "limitgate_requests_total", outcome="admitted", decided_by="store") == 1  # type: ignore[arg-type]


def test_observers_of_a_registry_are_one() -> None:
    """A name is in a registry once, however many gates, limiters and observers there are; all add up."""
    registry = CollectorRegistry()
    for app in (gate(registry), gate(registry)):
        wsgi_reply(app, "/api/x")
    Limiter("memory://", observers=[PrometheusObserver(registry)]).hit("key", "1/minute")
    assert PrometheusObserver(registry) == PrometheusObserver(registry) != PrometheusObserver(CollectorRegistry())
    assert value(registry, "limitgate_requests_total", outcome="admitted", decided_by="store") == 3
    assert value(registry, "limitgate_rule_decisions_total", rule="(limiter)", tier="default", outcome="admitted") == 1


def test_the_number_of_series_is_known_beforehand() -> None:
    """As ``limitgate check`` says it."""
    registry = CollectorRegistry()
    app = gate(registry)
    wsgi_reply(app, "/api/x")
    of_rules = {each.prometheus_name for each in (RULE_DECISIONS, RULE_UTILIZATION, RULE_LIMIT, RULE_IN_FLIGHT, RULE_WAITING)}
    samples = [one for family in text_string_to_metric_families(generate_latest(registry).decode()) for one in family.samples]
    found = [one for one in samples if one.labels.get("rule") and not one.name.endswith("_created")]
    assert {one.name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for one in found} == of_rules
    assert count_series(RuleSet(RULES)) == len(found)


def test_every_figure_has_its_name() -> None:
    """As the table says, with its help."""
    registry = CollectorRegistry()
    gate(registry)
    lines = generate_latest(registry).decode().splitlines()
    for each in INSTRUMENTS:
        assert any(line.startswith(f"# HELP {each.prometheus_name} {each.meaning}") for line in lines), each.name


def test_scrapes_beside_traffic_lose_nothing() -> None:
    """Requests in threads, and scrapes in another one."""
    registry = CollectorRegistry()
    app = gate(registry, Rule("api", "1000000/second"))
    done = threading.Event()

    def scrape() -> None:
        while not done.is_set():
            generate_latest(registry)

    def ask() -> None:
        for _ in range(200):
            wsgi_reply(app)

    scraping, *asking = [threading.Thread(target=target) for target in (scrape, ask, ask, ask)]
    for thread in (scraping, *asking):
        thread.start()
    for thread in asking:
        thread.join()
    done.set()
    scraping.join()
    assert value(registry, "limitgate_requests_total", outcome="admitted", decided_by="store") == 600
    assert value(registry, "limitgate_rule_utilization_count", rule="api", tier="default") == 600


@pytest.mark.parametrize(
    ("written", "read"),
    [(generate_latest, text_string_to_metric_families), (openmetrics.generate_latest, openmetrics_families)],
)
def test_both_formats_of_prometheus_client_have_the_samples(written: Any, read: Any) -> None:
    """Whatever is in a label, beside metrics of others. None says when its series was created, a fourth of all."""
    registry = CollectorRegistry()
    Gauge("before", "Of somebody else.", registry=registry).set(1)
    wsgi_reply(gate(registry), "/api/x")
    odd = 'a"b\\c\n%s'
    PrometheusObserver(registry).add(RULE_DECISIONS, ("odd", odd, "admitted"), 7)
    samples = {
        (one.name, *sorted(one.labels.items())): one.value
        for family in read(written(registry).decode())
        for one in family.samples
    }
    assert samples["before",] == 1
    assert samples["limitgate_rule_decisions_total", ("outcome", "admitted"), ("rule", "odd"), ("tier", odd)] == 7
    buckets = [
        samples["limitgate_rule_utilization_bucket", ("le", le), ("rule", "api"), ("tier", "default")]
        for le in ("0.1", "0.25", "0.5", "0.8", "0.9", "1.0", "1.5", "2.0", "+Inf")
    ]
    assert buckets == [0, 0, *[1] * 7]
    assert not [name for name, *_ in samples if name.endswith("_created")]


def test_scrapes_are_whole_while_series_come() -> None:
    """Under WSGI, in threads: the last one has all series."""
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    with repeated(lambda: list(text_string_to_metric_families(generate_latest(registry).decode()))):
        for number in range(300):
            observer.add(RULE_DECISIONS, (str(number), "default", "admitted"), 1)
    assert generate_latest(registry).count(b'tier="default"} 1.0\n') == 300


@pytest.mark.parametrize("name", ["generate_latest", "make_asgi_app", "make_wsgi_app"])
def test_functions_of_prometheus_client_stand_here_too(name: str) -> None:
    """Once they were of LimitGate's own."""
    assert getattr(prometheus, name) is getattr(prometheus_client, name)


def script(code: str, folder: object) -> list[str]:
    """The lines that Python code prints in multiprocess mode, which is chosen when prometheus-client is imported."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return (done.stdout or done.stderr).splitlines()


def test_a_folder_of_workers_that_is_missing_is_told() -> None:
    """At once, and not at the first request."""
    last = script("import limitgate; limitgate.Limiter('memory://', observers=['prometheus'])", "/nowhere")[-1]
    assert last.startswith(
        "limitgate.errors.ConfigError: PROMETHEUS_MULTIPROC_DIR: /nowhere: No such file or directory, expected"
    )


WORKERS = """
import os, signal
from prometheus_client import CollectorRegistry, generate_latest
from limitgate import Limiter
from limitgate.observing.exporter import exporter
from limitgate.prometheus import MultiProcessCollector, PrometheusObserver

registry = CollectorRegistry()
limiters = [Limiter("memory://", observers=[PrometheusObserver(each)]) for each in (None, registry)]
for _ in range(2):
    if not os.fork():
        for limiter in limiters:
            assert [limiter.hit(str(os.getpid()), "3/hour").allowed for _ in range(4)] == [True] * 3 + [False]
        exporter.export()
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()
limiters[0].hit("parent", "3/hour")
exporter.export()
shared = CollectorRegistry()
MultiProcessCollector(shared)
print(generate_latest(registry).decode() + generate_latest(shared).decode())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_what_killed_workers_have_counted_stays(tmp_path: Path) -> None:
    """In multiprocess mode, each request once, whatever registries observers were given: in those is nothing."""
    (tmp_path / "histogram_x.db").mkdir()
    (tmp_path / f"gauge_livesum_{10**30}.db").touch()  # of no process: there is none with this number
    lines = script(WORKERS, tmp_path)
    rule = 'rule="(limiter)",tier="default"'
    assert f'limitgate_rule_decisions_total{{outcome="admitted",{rule}}} 13.0' in lines
    assert f'limitgate_rule_decisions_total{{outcome="refused",{rule}}} 4.0' in lines
    assert f"limitgate_rule_utilization_count{{{rule}}} 17.0" in lines
    assert f'limitgate_rule_utilization_bucket{{le="0.5",{rule}}} 5.0' in lines
    assert len(lines) == len(set(lines))


def worker_file(path: Path, rule: str, count: float) -> None:
    """Write what a worker has counted."""
    file = MmapedDict(str(path))
    file.write_value(mmap_key("limitgate_x", "limitgate_x_total", ["rule"], [rule], "X."), count, 0)
    file.close()


@pytest.fixture
def shared(tmp_path: Path) -> CollectorRegistry:
    """The metrics of the workers that share a folder, of which one has counted."""
    registry = CollectorRegistry()
    worker_file(tmp_path / "counter_1.db", "api", 7)
    prometheus.MultiProcessCollector(registry, str(tmp_path))
    return registry


def foreign(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" * 99)


def cut_off(path: Path) -> None:
    worker_file(path, "api", 1)
    path.write_bytes(path.read_bytes()[:20])


def no_json(path: Path) -> None:
    worker_file(path, "api", 1)
    path.write_bytes(path.read_bytes().replace(b'["lim', b'{"lim'))


def no_key(path: Path) -> None:
    worker_file(path, "api", 1)
    path.write_bytes(path.read_bytes().replace(b'{"rule": "api"}', b'"rule is an api"'[:15]))


@pytest.mark.parametrize("name", ["counter_2.db", "gauge_livesum_2.db", "gauge_2.db", "histogram_2.db", "shop.db", "some_2.db"])
@pytest.mark.parametrize(
    "made",
    [
        os.mkfifo,
        Path.mkdir,
        Path.touch,
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("/dev/zero"),
    ],
    ids=["fifo", "folder", "empty", "dangling", "circle", "device"],
)
def test_what_is_no_file_neither_hangs_nor_fails_a_scrape(
    shared: CollectorRegistry, tmp_path: Path, made: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor one that another worker is just making. There is nothing to tell of that."""
    made(tmp_path / name)
    assert value(shared, "limitgate_x_total", rule="api") == 7
    assert not caplog.records


@pytest.mark.parametrize("made", [foreign, cut_off, no_json, no_key], ids=lambda made: made.__name__)
@pytest.mark.parametrize("name", ["counter_2.db", "gauge_livesum_2.db", "histogram_2.db"])
def test_what_no_worker_has_written_is_left_out(
    shared: CollectorRegistry, tmp_path: Path, made: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line in the log, as what it should have is missing; it counts again once it can be read."""
    made(tmp_path / name)
    with caplog.at_level(logging.WARNING, "limitgate"):
        for _ in range(2):
            assert value(shared, "limitgate_x_total", rule="api") == 7
    assert [record.message.split(" is left out")[0] for record in caplog.records] == [str(tmp_path / name)]
    (tmp_path / name).unlink()
    worker_file(tmp_path / "counter_2.db", "api", 1)
    assert value(shared, "limitgate_x_total", rule="api") == 8


ENDED = """
import os
from prometheus_client import CollectorRegistry, generate_latest
from limitgate.observing.exporter import exporter
from limitgate.prometheus import MultiProcessCollector, PrometheusObserver
from limitgate import Limiter

limiters = [Limiter("memory://", observers=["prometheus"])] if {is_worker} else []
shared = CollectorRegistry()
MultiProcessCollector(shared)
child = os.fork()
if not child:
    limiters = limiters or [Limiter("memory://", observers=["prometheus"])]
    exporter.export()
    os._exit(0)
os.waitpid(child, 0)
print(f"pid=\\"{{child}}\\"" in generate_latest(shared).decode())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("is_worker", [True, False])
def test_a_worker_that_is_scraped_removes_gauges_of_those_that_ended(tmp_path: Path, *, is_worker: bool) -> None:
    """No later worker has to start. A process that is no worker removes nothing, because it may see other pids."""
    assert script(ENDED.format(is_worker=is_worker), tmp_path) == [str(not is_worker)]


def test_gauges_of_the_dead_are_removed(shared: CollectorRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When gunicorn says so."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for pid in (2, 3):
        file = MmapedDict(str(tmp_path / f"gauge_livesum_{pid}.db"))
        file.write_value(mmap_key("limitgate_y", "limitgate_y", [], [], "Y."), pid, 0)
        file.close()
    assert value(shared, "limitgate_y") == 5
    prometheus.child_exit(None, SimpleNamespace(pid=2))
    assert value(shared, "limitgate_y") == 3
