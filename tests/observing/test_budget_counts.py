"""Metrics of budgets: estimates beside what was used, refusals, requests that wait."""

from __future__ import annotations

import threading
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from limitgate import ConfigError, Limiter, MemoryStore, RedisStore
from limitgate.httpx2 import RateLimitTransport
from limitgate.llm import Budget, Usage
from limitgate.observing.exporter import exporter
from limitgate.opentelemetry import OpenTelemetryObserver
from limitgate.prometheus import PrometheusObserver
from tests.support.doors import PATIENCE, until
from tests.support.observed import Recorder
from tests.support.redis_server import RedisServer

BODY = {"model": "m", "messages": [{"role": "user", "content": "How many roads?"}], "max_tokens": 500}


def answer(status: int = 200, **fields: Any) -> httpx2.Response:
    return httpx2.Response(status, json={"choices": [], **fields})


def told(responses: list[httpx2.Response], budget: Budget, limiter: Limiter, times: int | None = None) -> None:
    """Send requests that get these responses."""
    left = iter(responses)
    transport = RateLimitTransport(
        budget=budget, limiter=limiter, transport=httpx2.MockTransport(lambda _: next(left)), timeout=5
    )
    with httpx2.Client(transport=transport) as client:
        for _ in range(len(responses) if times is None else times):
            client.post("http://h/", json=BODY)


def test_estimates_and_answers() -> None:
    recorder = Recorder()
    limiter = Limiter(MemoryStore(), observers=[recorder])
    plan = Budget(tokens="1000000/minute", name="chat")
    usage = {"prompt_tokens": 8, "completion_tokens": 600}
    told([answer(usage=usage), answer(), answer(400)], plan, limiter)
    assert recorder.of("budget.tokens") == {
        ("chat", "input", "reserved"): 3 * 4,
        ("chat", "output", "reserved"): 1500,
        ("chat", "input", "settled"): 8 + 4,
        ("chat", "output", "settled"): 601,
    }
    assert recorder.of("budget.settlements") == {
        ("chat", "reported"): 1,
        ("chat", "arrived"): 1,
        ("chat", "nothing"): 1,
        ("chat", "failed"): 0,
    }
    # Twice the input and 1.2 times the output; then as much input, and a token of output.
    assert recorder.of("budget.usage_ratio") == {
        ("chat", "input"): [0, 0, 0, 0, 1, 0, 1, 0, 0, 0],
        ("chat", "output"): [1, 0, 0, 0, 0, 1, 0, 0, 0, 0],
    }


def test_refusals() -> None:
    recorder = Recorder()
    limiter = Limiter(MemoryStore(), observers=[recorder])
    busy = httpx2.Response(429, headers={"retry-after-ms": "1"})
    told([busy, answer(usage={"prompt_tokens": 1, "completion_tokens": 1})], Budget(tokens="1000000/minute"), limiter, times=1)
    assert recorder.of("budget.refusals") == {("budget", "provider"): 1, ("budget", "budget"): 0}
    small = Budget(tokens="10/day", name="small", key=lambda _: "k")
    first = small.reserve(limiter, BODY)
    assert not small.reserve(limiter, BODY).decision.allowed
    assert recorder.new("budget.refusals") == {("budget", "provider"): 1, ("small", "budget"): 1}
    first.cancel()


def test_requests_that_wait() -> None:
    recorder = Recorder()
    limiter = Limiter(MemoryStore(), observers=[recorder])
    plan = Budget(tokens="10/day", key=lambda _: "k")
    first = plan.reserve(limiter, BODY)
    waiting = threading.Thread(target=lambda: plan.reserve(limiter, BODY, timeout=100_000).cancel(), daemon=True)
    waiting.start()
    until(lambda: recorder.of("budget.waiting") == {("budget",): 1})
    first.settle(Usage(0, 0))
    waiting.join(PATIENCE)
    assert recorder.of("budget.waiting") == {("budget",): 0}


def test_a_store_that_fails_at_the_end(own_redis: RedisServer) -> None:
    recorder, store = Recorder(), RedisStore(own_redis.url)
    reservation = Budget(tokens="1000/day").reserve(Limiter(store, timeout=0.3, observers=[recorder]), BODY)
    own_redis.kill()
    reservation.settle(Usage(1, 1))
    assert recorder.new("budget.settlements") == {("budget", "failed"): 1}
    store.close()


def test_prometheus_and_opentelemetry() -> None:
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    limiter = Limiter(
        MemoryStore(), observers=[PrometheusObserver(registry), OpenTelemetryObserver(MeterProvider(metric_readers=[reader]))]
    )
    told([answer(usage={"prompt_tokens": 4, "completion_tokens": 250})], Budget(tokens="1000000/minute"), limiter)
    text = generate_latest(registry).decode()
    assert 'limitgate_budget_tokens_total{budget="budget",direction="output",stage="settled"} 250.0' in text
    assert 'limitgate_budget_usage_ratio_bucket{budget="budget",direction="output",le="0.5"} 1.0' in text
    assert 'limitgate_budget_usage_ratio_sum{budget="budget",direction="output"} 0.5' in text
    assert 'limitgate_budget_settlements_total{budget="budget",usage="reported"} 1.0' in text
    exporter.export()
    data: Any = reader.get_metrics_data()
    metrics = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert {"limitgate.budget.tokens", "limitgate.budget.refusals", "limitgate.budget.waiting"} <= metrics.keys()
    (output,) = [
        point
        for point in metrics["limitgate.budget.usage_ratio"].data.data_points
        if point.attributes == {"budget": "budget", "direction": "output"}
    ]
    assert (output.count, output.sum) == (1, 0.5)


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "\u0661", None, 5, "a\n"])
def test_names_make_no_new_series(name: Any) -> None:
    with pytest.raises(ConfigError, match="expected up to 64 letters"):
        Budget(tokens="5/minute", name=name)
