"""What the benchmark of the adaptive limit works out; without uvicorn, and without waiting for seconds."""

from __future__ import annotations

import asyncio
import math
import socket
from random import Random
from xml.etree import ElementTree as ET

import pytest

from benchmarks.overload import __main__ as command, backend, client, pictures, report
from benchmarks.overload.app import ADAPTIVE, NONE
from benchmarks.overload.client import Answer, Arrival
from benchmarks.overload.report import Bar, most_share
from benchmarks.overload.rows import (
    LOADS,
    NEW_CONNECTIONS,
    SHARES,
    STEADY,
    STEP,
    STEP_DOWN_S,
    STEP_UP_S,
    STEPS_END_S,
    Capacity,
    Results,
    refusal_s,
)
from benchmarks.overload.runs import Run
from handbook.frame import WIDTH
from handbook.reference import inserted

CAPACITY, REQUEST_S = 20.0, 0.02


def run_of(load: float, *, goodput: float = 1.0, took_s: float = 0.1, limits: tuple[int, ...] = (20,), servers: int = 1) -> Run:
    """Ten seconds in which a share of the capacity is answered, and the others are refused."""
    answers, credit = [], [0.0] * servers
    for number in range(round(10 * load * CAPACITY)):
        server = number % servers
        arrival = Arrival(number / (load * CAPACITY), list(SHARES)[number % 3], server)
        credit[server] += goodput / load
        if credit[server] > 1 - 1e-9:
            credit[server] -= 1
            answers.append(Answer(arrival, took_s, 200, limits[number % len(limits)]))
        else:
            answers.append(Answer(arrival, 0.01, 503, 0))
    return Run(10.0, answers, cpu_s=4.9, waited_s=0.0, lag_s=0.001, everything=answers)


def measured() -> Results:
    """Everything as it should be: all is served that can be, in 100 ms."""
    results = Results()
    for work in STEADY:
        results.capacity[work] = Capacity(CAPACITY, REQUEST_S)
        results.idle[work] = run_of(0.1, took_s=0.06)
        for load in LOADS:
            results.limited[work, load] = run_of(load, goodput=min(1, load))
            results.unlimited[work, load] = run_of(load, goodput=min(1, load) if load < 2 else 0)
        for load in (2, 4.5):
            results.priorities[work, load] = run_of(load, goodput=load)
    results.capacity[NEW_CONNECTIONS], results.idle[NEW_CONNECTIONS] = Capacity(CAPACITY, REQUEST_S), run_of(0.1, took_s=0.06)
    results.limited[NEW_CONNECTIONS, 2], results.unlimited[NEW_CONNECTIONS, 2] = run_of(2), run_of(2, goodput=0)
    for limit, goodput in ((24, 0.9), (35, 0.98), (46, 0.97)):
        results.fixed["pool", 1, limit] = run_of(1, goodput=goodput, took_s=0.5 if limit == 46 else 0.1)
    results.steps = {ADAPTIVE: stepped(1.0), NONE: stepped(0.0)}
    results.processes = run_of(2, servers=4, limits=(6,))
    return results


def stepped(share: float) -> Run:
    """Answers that follow the capacity."""
    answers = []
    for tenth in range(round(10 * STEPS_END_S)):
        rate = STEP * CAPACITY if 10 * STEP_UP_S <= tenth < 10 * STEP_DOWN_S else CAPACITY
        answers += [Answer(Arrival(tenth / 10), 0.05, 200, 20)] * round(share * rate / 10)
    return Run(STEPS_END_S, answers, 1.0, 0.0, 0.0, answers)


def test_as_many_requests_come_as_are_expected_at_random_times() -> None:
    arrivals = client.poisson(Random(1), 200, 1.0, 3.0, servers=4)
    assert len(arrivals) == 400
    assert sorted(arrivals, key=lambda each: each.due_s) == arrivals
    assert 1 <= arrivals[0].due_s < arrivals[-1].due_s <= 3
    assert {each.server for each in arrivals} == {0, 1, 2, 3}


class _Quiet(asyncio.Protocol):
    """A server that answers requests for /normal at once, and never any others."""

    def connection_made(self, transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if b"/normal" in data:
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
            self._transport.write(b"17")


@pytest.mark.parametrize("keep_alive", [True, False])
def test_the_client_sends_whether_or_not_it_is_answered(keep_alive, monkeypatch) -> None:
    """Requests that are never answered hold nobody up, and are given up; latency counts from when they were due."""
    monkeypatch.setattr(client, "CONNECTIONS", 2)
    arrivals = [Arrival(n / 1000, "high" if n % 2 else "normal") for n in range(100)]

    async def main() -> client.Answers:
        server = await asyncio.get_running_loop().create_server(_Quiet, client.HOST, 0)
        port = server.sockets[0].getsockname()[1]
        watch_at = (0.0, 0.05, 0.2)
        offered = await client.offer([port], arrivals, 2.0, keep_alive=keep_alive, watch=lambda: "seen", watch_at=watch_at)
        server.close()
        return offered

    offered = asyncio.run(main())
    assert offered.watched == ["seen"] * 3
    assert [each.arrival for each in offered.answers] == arrivals
    assert {(each.arrival.kind, each.status, each.limit) for each in offered.answers} == {("high", 0, 0), ("normal", 200, 17)}
    assert all(math.isinf(each.took_s) == (each.status == 0) for each in offered.answers)


def test_nobody_listens(monkeypatch) -> None:
    monkeypatch.setattr(client, "CONNECTIONS", 1)
    with socket.create_server((client.HOST, 0)) as closed:
        port = closed.getsockname()[1]
    offer = client.offer([port], [Arrival(0.0)], 0.01, watch=int, watch_at=())
    assert asyncio.run(offer).answers == [Answer(Arrival(0.0), math.inf, 0, 0)]


def test_the_backend_keeps_its_schedule_however_late_its_timers_are(monkeypatch) -> None:
    """A connection is taken by the next at the moment at which it should have been free."""
    loop, now, timers, done = asyncio.new_event_loop(), [100.0], [], []
    monkeypatch.setattr(backend.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(backend.asyncio, "get_running_loop", lambda: loop)
    monkeypatch.setattr(loop, "call_later", lambda pause_s, call, *given: timers.append((now[0] + pause_s, call, given)))
    pool = backend.Backend(1)
    for number in range(100):
        pool.use(lambda number=number: done.append(number))
    while timers:
        when, call, given = timers.pop()
        now[0] = max(now[0], when) + 0.003
        call(*given)
    loop.close()
    assert done == list(range(100))
    assert now[0] - 100 == pytest.approx(100 * backend.MEAN_S, rel=0.05)


def test_a_backend_that_grows_and_shrinks(monkeypatch) -> None:
    loop, timers = asyncio.new_event_loop(), []
    monkeypatch.setattr(backend.asyncio, "get_running_loop", lambda: loop)
    monkeypatch.setattr(loop, "call_later", lambda _, call, *given: timers.append((call, given)))
    pool = backend.Backend(2)
    for _ in range(10):
        pool.use(lambda: None)
    assert len(timers) == 2
    pool.resize(5)
    assert len(timers) == 5
    pool.resize(1)
    for call, given in timers[:4]:
        call(*given)
    assert len(timers) == 5, "the fifth keeps the only connection"
    pool.close()
    call, given = timers[4]
    call(*given)
    assert len(timers) == 5
    loop.close()


def test_figures_of_a_run() -> None:
    answers = [
        Answer(Arrival(0.0, "high"), 0.1, 200, 20),
        Answer(Arrival(0.5, "high"), 1.5, 200, 30),
        Answer(Arrival(1.0, "low"), 0.1, 503, 0),
        Answer(Arrival(1.5, "low"), math.inf, 0, 0),
    ]
    run = Run(2.0, answers, 1.0, 0.0, 0.0, answers)
    assert (run.offered, run.goodput, run.shed) == (2.0, 0.5, 0.25)
    assert (run.share(1.0), run.share(10.0)) == (0.5, 0.25)
    assert (run.quantile_s(0), run.quantile_s(0.5), run.quantile_s(1)) == (0.1, 1.5, math.inf)
    assert (run.answered("high"), run.answered("low")) == (0.5, 0)
    assert run.rate(0, 1) == 1
    assert run.limits == (25, 5)


def test_fairness_counts_what_each_server_did() -> None:
    assert run_of(2, servers=4).fairness == pytest.approx(1, abs=0.01)
    answers = [Answer(Arrival(0.0, server=server), 0.1, 200 if server == 0 else 503, 0) for server in range(4)]
    assert Run(1.0, answers, 0, 0, 0, answers).fairness == 0.25


@pytest.mark.parametrize(
    ("load", "k", "share"), [(0.5, 0.1, 0.5), (1, 0.1, 1), (2, 0.1, 8 / 9), (10, 0.025, 0.769), (10, 0.2, 0)]
)
def test_the_most_that_a_loop_can_serve(load, k, share) -> None:
    assert most_share(load, k) == pytest.approx(share, abs=0.001)


def test_a_refusal_costs_what_the_server_spent_besides_its_answers() -> None:
    """Of 4.9 s of CPU 4 were for 200 requests of 20 ms; 1,800 were refused."""
    results = measured()
    assert refusal_s(results, "loop", 10) == pytest.approx(0.9 / 1800)
    assert refusal_s(results, "loop", 0.5) is None
    assert report.k_of(results, "loop") == pytest.approx(0.9 / 1800 / REQUEST_S)
    assert report.k_of(Results(), "loop") is None


def test_no_bar_is_above_the_capacity_where_refusals_seem_to_cost_less_than_nothing() -> None:
    """Its capacity was measured under a backlog that made requests slower than they are with a limit."""
    results = measured()
    results.capacity["loop"] = Capacity(CAPACITY, 2 * REQUEST_S)
    assert (refusal_s(results, "loop", 10) or 0) < 0
    assert report.k_of(results, "loop") is None
    assert report.most_of(results, "loop", 10) == 1


def test_all_bars_are_met_where_all_is_well() -> None:
    bars = report.bars(measured())
    assert len(bars) == len({bar.what for bar in bars}) >= 30
    assert [bar for bar in bars if not bar.is_met] == []


def test_bars_that_are_missed() -> None:
    results = measured()
    for work in STEADY:
        results.limited[work, 0.5] = run_of(0.5, goodput=0.4)
        results.limited[work, 2] = run_of(2, goodput=0.7, took_s=0.3, limits=(10, 30))
    results.steps[ADAPTIVE] = stepped(0.7)
    results.processes = run_of(2, goodput=0.9, took_s=0.3, limits=(1, 1, 1, 1, 30), servers=4)
    missed = [bar.what for bar in report.bars(results) if not bar.is_met]
    assert missed == [
        "event loop at 0.5: shed",
        "event loop at 2: goodput",
        "event loop at 2: p99 of the admitted",
        "pool at 0.5: shed",
        "pool at 2: goodput",
        "pool at 2: p99 of the admitted",
        "pool at 2: deviation of the limit",
        "2 to 10 s after a step up by 3: goodput",
        "2 to 10 s after a step down by 3: goodput",
        "four processes at 2: goodput",
        "four processes at 2: p99 of the admitted",
        "four processes at 2: deviation of the sum of the limits",
    ]


def test_the_best_fixed_limit_is_one_that_keeps_the_bar_of_latency() -> None:
    assert report.best_fixed(measured(), "pool", 1) == 35
    assert report.best_fixed(measured(), "pool", 2) is None


@pytest.mark.parametrize(
    ("bound", "measured_", "is_most", "is_met"), [(1, 1, False, True), (1, 0.9, False, False), (1, 1, True, True)]
)
def test_a_bar(bound, measured_, is_most, is_met) -> None:
    assert Bar("", bound, measured_, is_most).is_met is is_met


def test_the_report_has_what_was_measured_and_no_more() -> None:
    """Every row of a table has as many cells as its head, and a part of the rows makes a report, too."""
    whole = report.report(measured())
    assert "| pool at 1, fixed limit of 35 | 98 %, 100 ms / 100 ms, 2 % shed |" in whole
    assert (
        "| event loop, a connection for each request, at 2, without a limit | 0 %, over 1 s / over 1 s, 100 % shed |" in whole
    )
    assert "| capacity x 3, then back, without a limit: answered in time | 0/s, then 0/s |" in whole
    assert "missed" not in whole
    part = Results(capacity=measured().capacity, idle=measured().idle)
    for text in (whole, report.report(part), report.report(Results())):
        for each in text.split("\n\n"):
            assert len({line.count("|") for line in each.splitlines()}) <= 1


def test_the_page_has_a_place_for_the_report_under_its_explanation() -> None:
    page = command.PAGE.read_text()
    assert command.SHOWN in page
    assert "a new report" in inserted(page, "overload", "a new report")


@pytest.mark.parametrize("work", [*STEADY, NEW_CONNECTIONS])
def test_a_row_is_reported_alone(work) -> None:
    whole = measured()
    part = Results(
        {work: whole.capacity[work]},
        {work: whole.idle[work]},
        {key: run for key, run in whole.limited.items() if key[0] == work},
        {key: run for key, run in whole.unlimited.items() if key[0] == work},
    )
    assert "| met |" in report.report(part)


def test_a_machine_that_was_busy_is_named() -> None:
    results = measured()
    assert report.disturbed(results) == ""
    results.fixed["pool", 1, 24] = Run(10.0, [], 1.0, 3.0, 0.0, [])
    assert "up to 30%" in report.disturbed(results)


@pytest.mark.parametrize("draw", [pictures.loads, pictures.steps])
def test_pictures_are_svg_with_a_line_for_each_way(draw) -> None:
    tree = ET.fromstring(draw(measured(), ["one & two"]))
    lines = [path.get("class") for path in tree.iter("{http://www.w3.org/2000/svg}path")]
    assert {"line with", "line without", "line most"} == set(lines)
    texts = ["".join(text.itertext()) for text in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"adaptive", "without a limit", "one & two"} <= set(texts)
    for text in tree.iter("{http://www.w3.org/2000/svg}text"):
        to_the_right = {"middle": 0.5, "end": 0.0}.get(text.get("text-anchor"), 1.0)
        assert float(text.get("x")) + to_the_right * 6.5 * len("".join(text.itertext())) <= WIDTH
