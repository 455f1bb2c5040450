"""Metrics reach every observer, each once, whoever counts, fails, forks or goes away."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import weakref
from typing import Any

import pytest

from limitgate import Limiter, LimitGateWSGI, MemoryStore, Rule
from limitgate.observing import exporter as module
from limitgate.observing.counts import Counts, observe
from limitgate.observing.exporter import MetricsExporter, Series, exporter
from limitgate.observing.instruments import DIAGNOSTICS, REQUESTS, RULE_IN_FLIGHT, RULE_UTILIZATION, STORE_UP, Instrument
from tests.support.doors import until, wsgi_environ
from tests.support.observed import Recorder

THREADS, EACH = 4, 5_000


class Counted:
    """Something that counts."""

    def __init__(self) -> None:
        self.counter = Series([0], [(REQUESTS, ("admitted", "store"))])
        self.present: list[tuple[Instrument, tuple[str, ...], float]] = []

    def series(self) -> list[Series]:
        return [self.counter]

    def gauges(self) -> list[tuple[Instrument, tuple[str, ...], float]]:
        return self.present


class Owner:
    """Owner of metrics."""


@pytest.fixture
def own() -> MetricsExporter:
    """An exporter of the test's own."""
    return MetricsExporter()


def hello(_: Any, start_response: Any) -> list[bytes]:
    """A WSGI application."""
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


def test_the_first_counts_are_exported_at_once(own: MetricsExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a quiet second nobody waits for the next: a process that is killed then has nothing left to say."""
    monkeypatch.setattr(module, "PERIOD", 3600.0)
    recorder, counted, owner = Recorder(), Counted(), Owner()
    own.attach([recorder], (counted, owner))
    counted.counter.values[0] += 1
    own.wake()
    until(lambda: list(recorder.told.values()) == [1])


def test_counts_are_exported_until_nothing_is_new(own: MetricsExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then whoever counts has to wake it again."""
    monkeypatch.setattr(module, "PERIOD", 0.01)
    recorder, counted, owner = Recorder(), Counted(), Owner()
    own.attach([recorder], (counted, owner))
    for count in range(1, 4):
        counted.counter.values[0] += 1
        assert own.is_idle
        own.wake()
        until(lambda count=count: own.is_idle and list(recorder.told.values()) == [count])


def test_it_goes_on_while_a_store_is_down(own: MetricsExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come back without any request."""
    monkeypatch.setattr(module, "PERIOD", 0.01)
    recorder, counted, owner = Recorder(), Counted(), Owner()
    counted.present = [(STORE_UP, ("redis",), 0)]
    own.attach([recorder], (counted, owner))
    own.wake()
    until(lambda: not own.is_idle)
    counted.present = [(STORE_UP, ("redis",), 1)]
    until(lambda: own.is_idle and recorder.told["limitgate.store.up", ("redis",)] == 1)


def test_no_count_is_lost_between_threads() -> None:
    """However often the interpreter goes from one thread to another."""
    recorder = Recorder()
    counts = Counts()
    observe([recorder], (counts, counts))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: [counts.count("admitted", "store") for _ in range(EACH)]) for _ in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert recorder.new("requests") == {("admitted", "store"): THREADS * EACH}


def test_gauges_of_several_owners_add_up(own: MetricsExporter) -> None:
    """Two gates of a process are one service; the worst store counts."""
    recorder, owners, several = Recorder(), [Owner(), Owner()], [Counted(), Counted()]
    for each, (in_flight, up) in zip(several, [(2, 1), (3, 0)]):
        each.present = [(RULE_IN_FLIGHT, ("api", "default"), in_flight), (STORE_UP, ("redis",), up)]
    own.attach([recorder], *zip(several, owners))
    assert recorder.told["limitgate.rule.in_flight", ("api", "default")] == 5
    assert recorder.told["limitgate.store.up", ("redis",)] == 0
    del owners[0]
    own.export()
    assert recorder.told["limitgate.rule.in_flight", ("api", "default")] == 3
    owners.clear()
    own.export()
    assert recorder.told["limitgate.rule.in_flight", ("api", "default")] == 0


def test_what_has_gone_is_told_for_the_last_time(own: MetricsExporter) -> None:
    """Neither the owner nor what it counted is kept alive."""
    recorder, counted, owner = Recorder(), Counted(), Owner()
    own.attach([recorder], (counted, owner))
    counted.counter.values[0] += 7
    row, gone = weakref.ref(owner), weakref.ref(counted)
    del owner, counted
    assert row() is None
    assert own.export()
    gc.collect()
    assert list(recorder.told.values()) == [7]
    assert gone() is None


def test_a_gate_is_not_kept_alive() -> None:
    """A gate with observers, its store and its metrics go when the application does."""
    store = MemoryStore()
    gate = LimitGateWSGI(hello, rules=[Rule("api", "9/minute")], store=store, observers=[Recorder()])
    gate(wsgi_environ(), lambda *_: None)
    left = weakref.ref(gate.gate), weakref.ref(store)
    del gate, store

    def are_gone() -> bool:
        gc.collect()
        exporter.export()
        return [each() for each in left] == [None, None]

    until(are_gone)  # a thread of another test may hold them for a moment


class Failing(Recorder):
    """An observer that fails."""

    def add(self, *_: object) -> None:
        raise OSError("disk full")


def test_an_observer_that_fails_harms_nobody(own: MetricsExporter, caplog: pytest.LogCaptureFixture) -> None:
    """It is told of once, and others are told everything."""
    failing, recorder, counted, owner = Failing(), Recorder(), Counted(), Owner()
    own.attach([failing, recorder], (counted, owner))
    counted.counter.values[0] += 2
    with caplog.at_level(logging.WARNING, "limitgate"):
        own.export()
    assert list(recorder.told.values()) == [2]
    assert [record.message.split()[0] for record in caplog.records] == ["LG036"]
    assert "disk full" not in caplog.text


def test_an_observer_may_ask_for_what_it_is_told(own: MetricsExporter) -> None:
    """Whoever collects a registry while it is told does not wait for itself."""
    counted, owner, told = Counted(), Owner(), []

    class Asking(Recorder):
        def add(self, instrument: Instrument, labels: tuple[str, ...], amount: int) -> None:
            told.append(own.export())

    own.attach([Asking()], (counted, owner))
    assert told == [False]


def test_series_are_there_from_the_start_but_for_rare_ones() -> None:
    """With 0; later only what has come since is added, of histograms the buckets and the sum of each."""
    told: list[tuple[Any, ...]] = []

    class Noting(Recorder):
        def add(self, instrument: Instrument, labels: tuple[str, ...], amount: int) -> None:
            told.append((labels, amount))

        def record(self, instrument: Instrument, labels: tuple[str, ...], counts: Any, sums: Any) -> None:
            told.append((labels, [*counts], [*sums]))

    often, rarely, api = ("admitted", "store"), ("unlimited", "cache"), ("api", "default")
    width = len(RULE_UTILIZATION.bounds) + 1
    none = [0] * width
    series = Series([0, 0, *none, *none], [(REQUESTS, often), (REQUESTS, rarely)], [(RULE_UTILIZATION, api)], rare=[rarely])
    series.export(Noting(), None, series.values)
    assert told == [(often, 0), (api, none, none)]
    told.clear()
    before = series.values.copy()
    series.export(Noting(), before, before)
    assert told == []
    series.values[1] += 2
    series.values[3] += 1
    series.values[3 + width] += 0.25
    series.export(Noting(), before, series.values)
    assert told == [(rarely, 2), (api, [0, 1, *none[2:]], [0, 0.25, *none[2:]])]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_exports_its_own_counts() -> None:
    """What the parent has counted is told by the parent alone, what it has told is not told again, and the child goes on."""
    recorder = Recorder()
    limiter = Limiter("memory://", observers=[recorder])
    for _ in range(3):
        limiter.hit("key", "100/minute")
    told, child = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - in the child
        try:
            recorder.told.clear()
            for _ in range(2):
                limiter.hit("key", "100/minute")
            until(lambda: recorder.told.get(("limitgate.requests", ("admitted", "store")), 0) == 2)
            os.write(child, b"2")
        finally:
            os._exit(0)
    os.close(child)
    os.waitpid(pid, 0)
    with os.fdopen(told, "rb") as answer:
        assert answer.read() == b"2"
    assert recorder.new("requests") == {("admitted", "store"): 3}


def test_diagnoses_are_counted_by_their_code() -> None:
    """All codes are there from the start."""
    recorder = Recorder()
    Limiter("memory://", observers=[recorder])
    before = recorder.of("diagnostics")
    assert {code for (code,) in before} == set(DIAGNOSTICS.values["code"])
    LimitGateWSGI(print, rules=[Rule("api", "9/minute", key=["api_key"])], observers=[recorder])
    assert recorder.of("diagnostics")["LG005",] == before["LG005",] + 1
