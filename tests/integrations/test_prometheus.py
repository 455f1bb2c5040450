"""Figures in a registry of prometheus-client: always up to date, in as many gates and observers as there may be."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, make_wsgi_app
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from limitgate import Limiter, LimitGateWSGI, MemoryStore, Rule, RuleSet, prometheus
from limitgate.observing.handover import handover
from limitgate.observing.instruments import (
    INSTRUMENTS,
    RULE_DECISIONS,
    RULE_IN_FLIGHT,
    RULE_LIMIT,
    RULE_UTILIZATION,
    RULE_WAITING,
)
from limitgate.observing.series import series
from limitgate.prometheus import PrometheusObserver
from tests.support.clock import Clock
from tests.support.doors import asgi_reply, wsgi_reply
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
    assert series(RuleSet(RULES)) == len(found)


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


def test_samples_are_those_of_prometheus_client() -> None:
    """By name, labels and value, in both of its formats, but for when each series was created: nobody asks for that."""
    registry, plain = CollectorRegistry(), CollectorRegistry()
    app = gate(registry)
    for _ in range(5):
        wsgi_reply(app, "/api/x")
    handover.hand_over()
    for metric in list(registry._collector_to_names):
        plain.register(Plain(metric))
    for written, read in (
        (generate_latest, text_string_to_metric_families),
        (openmetrics.generate_latest, openmetrics_families),
    ):
        ours, theirs = (
            {(one.name, *sorted(one.labels.items())): one.value for family in read(text) for one in family.samples}
            for text in (written(registry).decode(), written(plain).decode())  # type: ignore[operator]
        )
        assert ours == {place: value for place, value in theirs.items() if not place[0].endswith("_created")}


def test_samples_are_kept_until_they_change() -> None:
    """Those of a rule that decided about nothing meanwhile are the same objects, which take no time and no memory."""
    registry = CollectorRegistry()
    app = gate(registry)
    wsgi_reply(app, "/api/x")
    before, _, after = ({id(each): each for metric in registry.collect() for each in metric.samples} for _ in range(3))
    assert before.keys() == after.keys()
    wsgi_reply(app, "/api/x")
    new = {id(each): each for metric in registry.collect() for each in metric.samples}
    changed = [each for place, each in new.items() if place not in before]
    assert {each.labels.get("rule") for each in changed if each.name.startswith("limitgate_rule")} == {"api"}
    assert value(registry, "limitgate_rule_decisions_total", rule="api", tier="default", outcome="admitted") == 2


class Plain:
    """A metric of ours, as prometheus-client itself collects it."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def collect(self) -> Any:
        return MetricWrapperBase.collect(self._metric)


def test_the_text_is_that_of_prometheus_client() -> None:
    """Byte for byte, with metrics of others between, after each change, and with labels that have to be escaped."""
    registry = CollectorRegistry()
    Gauge("before", "Of somebody else.", ["path"], registry=registry).labels('a"b\\c\n').set(1)
    app = gate(registry)
    Counter("after", "Of somebody else,\nby \\.", registry=registry).inc()
    PrometheusObserver(registry).add(RULE_DECISIONS, ("odd", 'a"b\\c\n%s', "admitted"), 1)
    for path in ("/api/x", "/api/x", "/api/x", "/api/x", "/slow", "/healthz"):
        wsgi_reply(app, path)
        text = prometheus.generate_latest(registry)
        assert text == generate_latest(registry)
    assert rb'{outcome="admitted",rule="odd",tier="a\"b\\c\n%s"} 1.0' in text


def test_the_text_has_series_that_come_and_go() -> None:
    """Those of decorators begin with the first request, and an application may clear a metric."""
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    for rule in ("a", "b", "b", "c"):
        observer.add(RULE_DECISIONS, (rule, "default", "admitted"), 1)
        assert prometheus.generate_latest(registry) == generate_latest(registry)
    (decisions,) = [each for each in registry._collector_to_names if each._name == "limitgate_rule_decisions"]  # type: ignore[attr-defined]
    decisions.remove("a", "default", "admitted")  # type: ignore[attr-defined]
    assert prometheus.generate_latest(registry) == generate_latest(registry)
    decisions.clear()  # type: ignore[attr-defined]
    assert prometheus.generate_latest(registry) == generate_latest(registry)


def test_texts_are_made_in_threads_while_series_come() -> None:
    """Under WSGI: each has whole lines, and the last one all series."""
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    with repeated(lambda: list(text_string_to_metric_families(prometheus.generate_latest(registry).decode()))):
        for number in range(300):
            observer.add(RULE_DECISIONS, (str(number), "default", "admitted"), 1)
    assert prometheus.generate_latest(registry) == generate_latest(registry)
    assert prometheus.generate_latest(registry).count(b'tier="default"} 1.0\n') == 300


def test_the_text_is_served() -> None:
    """By ASGI and by WSGI, up to date, with the type that Prometheus asks for."""
    registry = CollectorRegistry()
    app = gate(registry)
    wsgi, asgi = prometheus.make_wsgi_app(registry), prometheus.make_asgi_app(registry)
    for _ in range(2):
        wsgi_reply(app, "/api/x")
        for reply in (wsgi_reply(wsgi), asyncio.run(asgi_reply(asgi))):
            assert (reply.status, reply.body) == (200, generate_latest(registry))
            assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_a_folder_of_workers_that_is_missing_is_told() -> None:
    """In multiprocess mode, which is chosen when prometheus-client is imported."""
    code = "import limitgate; limitgate.Limiter('memory://', observers=['prometheus'])"
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "limitgate.errors.ConfigError: PROMETHEUS_MULTIPROC_DIR: /nowhere: No such file or directory, expected"
    )


def test_the_rest_is_served_as_by_prometheus_client() -> None:
    """Some metrics by their names, and other methods than GET."""
    registry = CollectorRegistry()
    wsgi_reply(gate(registry), "/api/x")
    served = prometheus.make_wsgi_app(registry)
    some = registry.restricted_registry(["limitgate_requests_total"])
    assert wsgi_reply(served, "/?name[]=limitgate_requests_total").body == generate_latest(some)  # type: ignore[arg-type]
    answers: list[list[Any]] = []
    for each in (served, make_wsgi_app(registry)):
        begun: list[Any] = []
        body = list(each({"REQUEST_METHOD": "OPTIONS", "PATH_INFO": "/"}, lambda *head: begun.extend(head)))  # noqa: B023
        answers.append([*begun, *body])
    assert answers[0] == answers[1]
    with pytest.raises(AssertionError):  # theirs, which serves no WebSockets
        asyncio.run(prometheus.make_asgi_app(registry)({"type": "websocket"}, None, None))


def test_a_thousand_rules_are_scraped_in_no_time() -> None:
    """Less than half of prometheus-client's CPU, the figures of all rules being new, and a fifth where none is."""
    registry = CollectorRegistry()
    app = gate(registry, *[Rule(f"rule{number}", "9/minute", path=f"/{number}") for number in range(1000)])
    theirs, ours, again = [], [], []
    for _ in range(3):
        for number in range(1000):
            wsgi_reply(app, f"/{number}")
        handover.hand_over()
        for took, made in ((ours, prometheus.generate_latest), (again, prometheus.generate_latest), (theirs, generate_latest)):
            began = time.process_time()
            text = made(registry)
            took.append(time.process_time() - began)
            assert text.count(b"\n") > 15_000
    assert min(ours) < min(theirs) / 2, (ours, theirs)
    assert min(again) < min(theirs) / 5, (again, theirs)
