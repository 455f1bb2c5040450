"""What counting costs: nothing of a request outlives it."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from limitgate import LimitGateWSGI, MemoryStore, Rule
from limitgate.observing.counts import Counts
from tests.support.clock import Clock
from tests.support.observed import Recorder

REQUESTS = 4_000


def hello(_: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    return [b"hello"]


def visit(app: LimitGateWSGI, requests: int) -> None:
    """Requests that are admitted, refused by a bucket, and of no rule, in turn."""
    for number in range(requests):
        path = ("/free", "/api", "/full")[number % 3]
        list(app({"REQUEST_METHOD": "GET", "PATH_INFO": path, "REMOTE_ADDR": "192.0.2.1"}, lambda *_: None))


@pytest.mark.parametrize("observers", [0, 1, 2])
def test_no_memory_is_kept_for_a_request(observers: int) -> None:
    """However many are counted, and for however many observers: a list of integers is all there is."""
    rules = [Rule("api", "1000000/second", "9000000/minute", path="/api"), Rule("full", "1/day", path="/full")]
    app = LimitGateWSGI(hello, rules=rules, store=MemoryStore(Clock()), observers=[Recorder() for _ in range(observers)])
    visit(app, REQUESTS)  # until no counter is one of the small integers that CPython keeps anyway
    gc.collect()
    before = sys.getallocatedblocks()
    visit(app, REQUESTS)
    gc.collect()
    assert sys.getallocatedblocks() - before < REQUESTS / 10


def test_every_outcome_has_its_place() -> None:
    """By outcome and by where that was decided: no two pairs share one."""
    counts = Counts()
    (series,) = counts.series()
    pairs = [(outcome, source) for outcome in ("unlimited", "admitted", "refused") for source in ("nobody", "store", "cache")]
    for outcome, source in pairs:
        counts.count(outcome, source)  # type: ignore[arg-type]
    assert sorted(series.values)[-10:] == [0, *[1] * len(pairs)]
