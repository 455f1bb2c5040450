"""Load of hosts: what answers teach, how many may be in flight, and what is remembered of whom."""

from __future__ import annotations

import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from limitgate import Adaptive, testing
from limitgate.outbound.host_load import MOST, MOST_HOSTS, HostLoad, HostLoads, Place, Refusal, outcome_of
from tests.support.virtual import World

TWO = Adaptive(min=1, max=2)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def throttled() -> HostLoad:
    return HostLoad("shop", None, throttles=True)


def begun(load: HostLoad) -> Place:
    place = load.begin("GET")
    assert isinstance(place, Place)
    return place


@pytest.mark.parametrize(
    ("method", "status", "content_type", "outcome"),
    [
        ("GET", 200, "application/json", "ok"),
        ("POST", 201, None, "ok"),
        ("GET", 302, None, "ok"),
        (None, 200, None, "ok"),
        ("GET", 429, "application/json", "failed"),
        ("GET", 503, None, "failed"),
        ("HEAD", 503, None, "failed"),
        ("HEAD", 200, "application/json", "untaught"),
        ("head", 200, None, "untaught"),
        ("GET", 304, None, "untaught"),
        ("GET", 101, None, "untaught"),
        ("GET", 200, "text/event-stream; charset=utf-8", "untaught"),
        ("GET", 200, "Text/Event-Stream", "untaught"),
        ("GET", 404, "text/html", "untaught"),
        ("GET", 500, None, "untaught"),
        ("GET", 504, None, "untaught"),
    ],
)
def test_what_a_response_teaches(method: str | None, status: int, content_type: str | None, outcome: str) -> None:
    """Only the time of an answer is that of the work; a host that refuses is overloaded, one that errs is not."""
    assert outcome_of(method, status, content_type) == outcome


def test_whom_few_answers_come_from_is_spared(world: World) -> None:
    """Not the caller's own part: what it gave up, or got wrong, says nothing of the host."""
    load = throttled()
    for _ in range(100):
        load.end(None, "untaught", is_accepted=None)
    assert [load.refusal() for _ in range(100)] == [None] * 100
    for _ in range(300):
        load.end(None, "failed", is_accepted=False)
    refusals = [load.refusal() for _ in range(400)]
    assert refusals.count(None) == pytest.approx(400 * (1 - MOST), abs=20)
    waits = {each.retry_after for each in refusals if each is not None}
    assert waits <= set(range(1, 12))
    assert len(waits) > 5


def test_requests_in_flight_are_bounded(world: World) -> None:
    """Whatever they end with gives the place back; who finds none is told the limit."""
    load = HostLoad("shop", TWO, throttles=False)
    places = [begun(load), begun(load)]
    refusal = load.begin("GET")
    assert isinstance(refusal, Refusal)
    assert (refusal.limit, refusal.retry_after) in {(2, wait) for wait in range(1, 12)}
    for outcome in ("ok", "failed", "untaught"):
        load.end(places.pop(0), outcome, is_accepted=None)
        places.append(begun(load))
        assert isinstance(load.begin("GET"), Refusal)


def test_methods_are_told_apart(world: World) -> None:
    """To read takes a different time than to write."""
    load = HostLoad("shop", Adaptive(), throttles=False)
    for method, seconds in (("GET", 0.01), ("POST", 0.1)) * 10:
        place = load.begin(method)
        world.advance(seconds)
        assert isinstance(place, Place)
        load.end(place, "ok", is_accepted=True)
    load.refusal()
    assert place.limit.base_s_by_class == pytest.approx({"GET": 0.01, "POST": 0.1})


def test_a_request_that_ends_twice_counts_once(world: World) -> None:
    load = HostLoad("shop", TWO, throttles=False)
    place, _ = begun(load), begun(load)
    for _ in range(2):
        load.end(place, "ok", is_accepted=True)
    begun(load)
    assert isinstance(load.begin("GET"), Refusal)


def test_to_end_a_request_waits_for_nobody() -> None:
    """As it may be the garbage collector that does so, within anything."""
    load = HostLoad("shop", TWO, throttles=True)
    place, _ = begun(load), begun(load)
    with load._lock:
        load.end(place, "ok", is_accepted=True)
    begun(load)


def test_any_thread_may_send(world: World) -> None:
    """Places are neither lost nor given away twice."""
    load, most, lock = HostLoad("shop", Adaptive(min=8, max=8), throttles=True), 0, threading.Lock()
    in_flight: set[int] = set()

    def send(_: int) -> bool:
        nonlocal most
        assert load.refusal() is None
        place = load.begin("GET")
        if not isinstance(place, Place):
            return False
        with lock:
            in_flight.add(id(place))
            most = max(most, len(in_flight))
        with lock:
            in_flight.remove(id(place))
        load.end(place, "ok", is_accepted=True)
        return True

    with ThreadPoolExecutor(16) as pool:
        sent = sum(pool.map(send, range(2000)))
    assert sent
    assert most <= 8
    assert sum(isinstance(load.begin("GET"), Place) for _ in range(20)) == 8


def test_the_child_of_a_fork_begins_anew(world: World) -> None:
    """Though a thread of its parent had the lock, and requests were in flight."""
    loads = HostLoads(TWO, throttles=True)
    load = loads["shop"]
    place, _ = begun(load), begun(load)
    with loads._lock, load._lock:
        loads.reset_after_fork()
        load.end(place, "ok", is_accepted=True)
        assert loads["shop"] is not load
        for _ in range(2):
            begun(load)
        assert isinstance(load.begin("GET"), Refusal)


def test_what_was_learned_by_the_clock_of_a_test_is_forgotten() -> None:
    """Which may have been years ahead."""
    load = HostLoad("shop", TWO, throttles=True)
    with testing.frozen() as clock:
        places = [begun(load), begun(load)]
        clock.advance(86_400)
        for _ in range(100):
            load.end(None, "failed", is_accepted=False)
        load.end(places[0], "ok", is_accepted=True)
    assert [load.refusal() for _ in range(10)] == [None] * 10
    new = [begun(load), begun(load)]
    load.end(places[1], "ok", is_accepted=True)
    assert isinstance(load.begin("GET"), Refusal)
    load.end(new[0], "ok", is_accepted=True)
    begun(load)


def test_only_so_many_hosts_are_remembered() -> None:
    """Those that were sent to last: the other side may choose them, by its redirects."""
    loads = HostLoads(None, throttles=True)
    first, second = loads["first"], loads["second"]
    for each in range(MOST_HOSTS - 1):
        assert loads["first"] is first
        loads[f"host {each}"]
    assert loads["first"] is first
    assert loads["second"] is not second
    assert len(loads._hosts) == MOST_HOSTS


def test_one_line_is_logged_for_a_while_of_refusals(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the host and why."""
    monkeypatch.setattr(random, "random", lambda: 0.0)
    caplog.set_level(logging.INFO, "limitgate.outbound")
    load, full = throttled(), HostLoad("depot", TWO, throttles=False)
    for seconds in (9, 9, 11, 0):
        for _ in range(10):
            load.end(None, "failed", is_accepted=False)
        for _ in range(10):
            assert load.refusal()
        world.advance(seconds)
    for _ in range(10):
        full.begin("GET")
    assert [each.message for each in caplog.records] == [
        "'shop' is overloaded, so requests to it are refused here: few requests succeed",
        "'shop' is overloaded, so requests to it are refused here: few requests succeed",
        "'depot' is overloaded, so requests to it are refused here: 2 requests are in flight",
    ]


def test_who_logs_may_send_the_line_to_the_host_itself(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for itself then."""
    load, answers = HostLoad("logs", Adaptive(min=1, max=1), throttles=False), []

    class Sending(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert not load._lock.locked(), record
            answers.append(load.begin("POST"))

    caplog.set_level(logging.INFO, "limitgate.outbound")
    monkeypatch.setattr(logging.getLogger("limitgate.outbound"), "handlers", [Sending()])
    begun(load)
    load.begin("GET")
    assert [type(each) for each in answers] == [Refusal]
