"""What the benchmark works out, and how it shows it; without any of the limiters it measures."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks import (
    algorithms,
    attack,
    cpu,
    end_to_end,
    example,
    frameworks,
    growth,
    instructions,
    memory_use,
    pacing,
    readme,
)
from benchmarks.chart import Row, chart
from benchmarks.contenders import LIMITGATE, PEERS, README, WSGI, starlette
from benchmarks.drive import Crowds, trouble
from benchmarks.figures import Bar, Failed, Taken, Turn, best, over, ratio
from benchmarks.floor import Floor
from benchmarks.options import FLASK, PLAIN, options, peer_of, visit
from benchmarks.redis_side import overheard, parsed
from benchmarks.report import BEGIN, END, inserted, number, page, summary
from benchmarks.results import Results, bars
from benchmarks.rounds import Plan, alternate, numbers_of
from benchmarks.setting import Setting
from limitgate import Limiter, LimitGateWSGI, MemoryStore, Rule
from tests.support.doors import wsgi_reply

ROOT = Path(__file__).parents[2]
SETTING = Setting("2026-11-21", "a machine", "3.11.7", "7.0.15", "redis 8.1.0")


def hello(_, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


def taken(*client: float, server: float = 0.0, commands: float = 0.0) -> Taken:
    return Taken([Turn(figure, server) for figure in client], commands)


def measured() -> Results:
    """Two rounds, the second on a machine half as fast; all peers but one cost 100 µs and 30 µs of Redis' time."""
    outcomes = {"Starlette": taken(10, 20), "FastAPI": taken(40, 80), cpu.NO_OP: taken(50, 100)}
    for contender in PEERS:
        outcomes[cpu.on_redis(contender.name)] = taken(110, 220, server=24, commands=3)
        outcomes[cpu.in_memory(contender.name)] = taken(50, 100)
    outcomes[cpu.on_redis("limits")] = Failed("MaxConnectionsError")
    outcomes[cpu.on_redis(LIMITGATE.name)] = taken(30, 60, server=6, commands=1)
    outcomes[cpu.in_memory(LIMITGATE.name)] = taken(15, 30)
    whole = {"Starlette": taken(10, 20), example.BARE_EXAMPLE: taken(12, 24)}
    whole |= {cpu.on_redis(PLAIN): taken(30, 60), cpu.on_redis(example.EXAMPLE): taken(40, 80)}
    crowded = {"Starlette": taken(20, 10), cpu.on_redis(LIMITGATE.name): taken(62, 31)}
    wsgi = {"Flask": taken(10, 20), cpu.on_redis(WSGI[0].name): taken(15, 30), cpu.on_redis(WSGI[1].name): taken(50, 100)}
    attacks = {LIMITGATE.name: attack.Attack(7000, 15, 9.0, 0.001)}
    rushes = {LIMITGATE.name: attack.Rush(999, 50.0, "503")}
    by_framework = {framework.name: {1: added(framework), 32: added(framework)} for framework in frameworks.frameworks()}
    served = {
        cpu.on_redis(LIMITGATE.name): end_to_end.Served(6000.0, 0.7, 0, (10.0, 30.0)),
        cpu.on_redis(PEERS[0].name): end_to_end.Served(3000.0, 0.3, 0, (100.0, 300.0)),
    }
    return Results(
        SETTING,
        gate={1: outcomes, 32: outcomes},
        crowded={32: crowded},
        memory=memory_use.MemoryUse(184.0, 408.0, 200.0, {LIMITGATE.name: 200.0}, {LIMITGATE.name: 300.0}),
        example={32: whole},
        options=of_options(),
        easy=outcomes,
        wsgi={8: wsgi},
        frameworks=by_framework,
        attacks=attacks,
        rushes=rushes,
        throughput=end_to_end.Throughput(served),
        growth=[growth.Growth("rules", "1", "1,000", ([10.0, 20.0], [13.0, 26.0]))],
    )


def of_options() -> dict[str, Taken | Failed]:
    """README's rule costs 20 µs and every option 30; its last peer costs 60, the others 80, and in memory all of them fail."""
    outcomes: dict[str, Taken | Failed] = {"Starlette": taken(10, 20), FLASK: taken(50, 100)}
    for name, option in options().items():
        outcomes[cpu.on_redis(name)] = taken(30, 60) if name == PLAIN else taken(40, 80)
        for peer in option.peers:
            bare = 50 if peer.bare == FLASK else 10
            over_bare = 60 if peer is option.peers[-1] else 80
            outcomes[cpu.on_redis(peer_of(name, peer))] = taken(bare + over_bare, 2 * (bare + over_bare))
            outcomes[cpu.in_memory(peer_of(name, peer))] = Failed("429")
    return outcomes


def added(framework: frameworks.Framework) -> dict[str, Taken | Failed]:
    """LimitGate costs 20 µs and one command more than the bare framework; every peer fails."""
    outcomes: dict[str, Taken | Failed] = {framework.name: taken(40, 80)}
    for limiter, store in product(framework.limiters, (cpu.on_redis, cpu.in_memory)):
        ours = taken(60, 100, commands=1) if limiter.name == LIMITGATE.name else Failed("ModuleNotFoundError")
        outcomes[store(limiter.name)] = ours
    return outcomes


def test_a_figure_is_the_difference_within_its_round() -> None:
    """A round on a slow machine compares what that machine did with both."""
    outcomes = {"app": taken(30, 60), "bare": taken(10, 20), "broken": Failed("Oops")}
    assert over(outcomes, "app", "bare") == [20, 40]
    assert over(outcomes, "app", None) == [30, 60]
    assert over(outcomes, "broken", "bare") is None
    assert over(outcomes, "app", "broken") is None
    assert over(outcomes, "absent", "bare") is None


def test_a_ratio_is_the_median_of_those_within_the_rounds() -> None:
    """One round that something else disturbed does not move it."""
    assert ratio([1.0, 2.0, 90.0], [2.0, 4.0, 6.0]) == 0.5
    assert ratio(None, [1.0]) is None
    assert ratio([1.0], None) is None


def test_the_best_has_the_lowest_median_and_has_not_failed() -> None:
    """Who failed is no candidate."""
    assert best({"a": [3.0, 3.0, 0.1], "b": [2.0, 2.0, 9.0], "c": None}) == "b"
    assert best({"c": None}) is None


@pytest.mark.parametrize(
    ("measured", "higher_is_better", "verdict"),
    [
        (0.1, False, "aim reached"),
        (0.2, False, "reached"),
        (0.21, False, "missed"),
        (0.1, True, "missed"),
        (0.2, True, "aim reached"),
        (None, False, "not measured"),
    ],
)
def test_a_bar_says_whether_it_was_reached(measured: float | None, higher_is_better: bool, verdict: str) -> None:  # noqa: FBT001 - a case of the table
    """The mark itself counts as reached, in either direction."""
    must, aim = (0.15, 0.2) if higher_is_better else (0.2, 0.1)
    assert Bar("", must, aim, measured, higher_is_better=higher_is_better).verdict == verdict


def test_bars_are_worked_out_from_what_was_measured(monkeypatch) -> None:
    """Each bar finds its figures, and what was left out is not measured."""
    monkeypatch.setattr(instructions, "kept", dict)
    verdicts = [(bar.measured, bar.verdict) for bar in bars(measured())]
    assert verdicts == [
        (pytest.approx(5 / 40), "aim reached"),
        (pytest.approx(20 / 100), "missed"),
        (None, "not measured"),
        (pytest.approx(20 / 100), "reached"),
        (pytest.approx(6 / 24), "reached"),
        (None, "not measured"),
        (pytest.approx(5 / 40), "missed"),
        (0.7, "aim reached"),
        (pytest.approx(0.1), "reached"),
        (pytest.approx(28 / 20), "reached"),
        (pytest.approx(42 / 20 / 2), "aim reached"),
        (pytest.approx(1.3), "missed"),
        (None, "not measured"),
        (0.001, "aim reached"),
        (300.0, "reached"),
    ]


def test_nothing_measured_is_said_to_be_so(monkeypatch) -> None:
    """A run that left everything out still makes a page."""
    monkeypatch.setattr(instructions, "kept", dict)
    results = Results(SETTING, throughput=end_to_end.Throughput({}, "wrk is not installed"))
    assert {bar.verdict for bar in bars(results)} == {"not measured"}
    assert "Not measured: wrk is not installed." in page(results)


def test_the_page_shows_who_failed_and_by_what() -> None:
    """A peer that fails is in its row, with the error's name."""
    for text in (page(measured()), summary(measured())):
        assert "fails (MaxConnectionsError)" in text
        assert all(contender.name in text for contender in (LIMITGATE, *PEERS))
        assert str(SETTING) in text


def test_the_page_shows_every_framework_with_each_of_its_limiters() -> None:
    """What is over the bare framework, what is not, and who failed."""
    shown = page(measured()).partition("## Frameworks")[2]
    for framework in frameworks.frameworks():
        rows = shown.partition(f"| {framework.name} |")[2].partition("\n\n")[0].splitlines()
        assert rows[2] == f"| LimitGate on Redis |{' 20 (20) |' * 2} 1.0 |"
        assert rows[-1] == f"| bare (total CPU) |{' 60 (40) |' * 2} - |"
        peers = [limiter.name for limiter in framework.limiters if limiter.name != LIMITGATE.name]
        assert [row.count("fails (ModuleNotFoundError)") for row in rows if any(peer in row for peer in peers)] == [
            3
        ] * 2 * len(peers)


def test_every_copy_of_limitgate_limits_in_its_framework(own_redis) -> None:
    """On both stores two requests of a client pass and the third is refused, so what is measured is a limiter at work."""
    program = """if True:
        import sys
        from collections import Counter
        from benchmarks import django_side
        from benchmarks.drive import Crowds
        from benchmarks.frameworks import frameworks

        with django_side.configured(sys.argv[1]):
            for client, framework in enumerate(frameworks()):
                for url in (sys.argv[1], ""):
                    with Crowds() as crowd_of:
                        door = crowd_of.wsgi if framework.door == "wsgi" else crowd_of.asgi
                        crowd = door(framework.limiters[0].build(url, {"day": 2}))
                        print(sum((crowd(iter([client]), 1) for _ in range(3)), Counter()))
    """
    command = [sys.executable, "-c", program, own_redis.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.splitlines() == [str(Counter({200: 2, 429: 1}))] * 2 * len(frameworks.frameworks()), done.stderr


def test_tables_are_rectangular() -> None:
    """Every row of a table has as many cells as its head."""
    for table in page(measured()).split("\n\n"):
        if table.startswith("|"):
            assert len({line.replace(r"\|", "").count("|") for line in table.splitlines()}) == 1


@pytest.mark.parametrize(("figure", "text"), [(1234.5, "1,234"), (12.34, "12"), (1.26, "1.3"), (0.00123, "0.0012"), (0, "0")])
def test_figures_have_the_digits_they_deserve(figure: float, text: str) -> None:
    """Neither more than was measured nor so few that nothing is left."""
    assert number(figure) == text


def test_the_summary_is_written_between_its_marks() -> None:
    """What stands around the marks stays, and writing twice is writing once."""
    text = f"before\n{BEGIN}\nold\n{END}\nafter"
    once = inserted(text, "new")
    assert once == f"before\n{BEGIN}\nnew\n{END}\nafter"
    assert inserted(once, "new") == once
    with pytest.raises(ValueError, match="no <!-- benchmark -->"):
        inserted("nothing", "new")


def test_readme_has_room_for_the_summary() -> None:
    """The marks are there for `make bench` to write between."""
    readme = (ROOT / "README.md").read_text()
    assert summary(measured()) in inserted(readme, summary(measured()))


def test_the_chart_is_svg_with_a_bar_for_everyone_who_did_not_fail() -> None:
    """Lengths follow the costs, and names are escaped."""
    rows = [Row("slow <one>", 200.0), Row("ours", 50.0, ours=True), Row("broken", None, "fails (Oops)")]
    tree = ET.fromstring(chart("CPU", "µs", rows, ["one & two"]))
    texts = ["".join(text.itertext()) for text in tree.iter("{http://www.w3.org/2000/svg}text")]
    rects = [rect for rect in tree.iter("{http://www.w3.org/2000/svg}rect") if rect.get("class") in ("bar", "ours")]
    assert [rect.get("class") for rect in rects] == ["ours", "bar"]
    assert float(rects[1].get("width")) == pytest.approx(4 * float(rects[0].get("width")))
    assert {"slow <one>", "fails (Oops)", "one & two", "50", "200 · 4.0\N{MULTIPLICATION SIGN}"} <= set(texts)


def test_a_line_of_monitor_becomes_a_command() -> None:
    """Bytes come back as they were sent; what a script called is left out."""
    line = rb'+1700000000.1 [0 unix:/tmp/redis.sock] "EVALSHA" "a\"b\\" "\x00\xff\r\n" ""' + b"\r\n"
    assert parsed(line) == (b"EVALSHA", b'a"b\\', b"\x00\xff\r\n", b"")
    assert parsed(b'+1700000000.1 [0 lua] "GET" "key"\r\n') is None
    with pytest.raises(RuntimeError, match="no line of MONITOR"):
        parsed(b"-ERR\r\n")


@pytest.fixture
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are taken from one bucket, as no test compares them. A bucket of 10,000 requests takes 5,000 calls to fill."""
    monkeypatch.setattr(algorithms, "CALLS", 1)


@pytest.mark.usefixtures("_few_calls")
def test_the_page_has_what_algorithms_cost_redis(own_redis) -> None:
    """Each is measured; only those that remember every request take more memory for a higher count.

    The bytes in docs/algorithms.md are those of a run; a Redis of another version may differ a little.
    """
    costs = algorithms.measured(own_redis, algorithms.LIMITS, rounds=1)
    assert min(cost.time for cost in costs.values()) > 0
    assert costs["gcra"].memory < costs["sliding_log, 10"].memory < costs["sliding_log, 100"].memory
    assert costs["gcra"].memory < costs["10 at once"].memory < costs["100 at once"].memory
    page = algorithms.PAGE.read_text()
    rows = [row.split("|")[1:4] for row in page.partition("<!-- costs -->")[2].partition("<!-- /costs -->")[0].splitlines()[3:]]
    found = {name.strip(): tuple(int(each.replace(",", "")) for each in figures) for name, *figures in rows}
    assert found.keys() == algorithms.LIMITS.keys()
    for name, figures in found.items():
        assert figures == pytest.approx((costs[name].memory, costs[name].of_limiter), rel=0.1), name
    assert algorithms.page(page, costs).count("\n") == page.count("\n")


@pytest.mark.usefixtures("_few_calls")
def test_memory_is_that_of_real_keys(own_redis) -> None:
    """A rule and a limiter have keys of the lengths that were measured."""
    several = {"fixed_window": algorithms.LIMITS["fixed_window"], "gcra": algorithms.LIMITS["gcra"]}
    costs = algorithms.measured(own_redis, several, rounds=1)
    for name, limits in several.items():
        with own_redis.client() as client, Limiter(own_redis.url) as limiter:
            client.flushall()
            limiter.hit_up_to("somebody", *limits, cost=1000)
            (key,) = client.keys()
            assert client.memory_usage(key, samples=0) == costs[name].of_limiter
            client.flushall()
            gate = LimitGateWSGI(hello, rules=[Rule("api", *limits, cost=1000)], store=own_redis.url)
            wsgi_reply(gate)
            (key,) = [key for key in client.scan_iter() if b"refusal-ids" not in key]
            assert client.memory_usage(key, samples=0) == costs[name].memory
            gate.gate.store.close()


def test_the_floor_asks_redis_for_what_limitgate_asks_for(own_redis) -> None:
    """Requests at the same time share a call of the script that LimitGate runs, which charges a bucket for each."""
    with Crowds() as crowd_of:
        crowds = [crowd_of.asgi(app) for app in (Floor(starlette(), own_redis), LIMITGATE.build(own_redis.url, README))]
        for crowd in crowds:
            assert trouble(crowd(iter(range(8)), 8)) == ""
        floor, ours = [overheard(own_redis, partial(crowd, iter(range(8, 24)), 8)) for crowd in crowds]
    assert [command[:3] for command in floor] == [command[:3] for command in ours] == [(b"EVALSHA", floor[0][1], b"8")] * 2
    keys = [key for command in floor for key in command[3:11]]
    with own_redis.client() as client:
        assert client.exists(*keys) == len(set(keys)) == 16


def test_commands_are_heard_without_those_of_scripts(own_redis) -> None:
    """A script that calls two commands is one command."""
    with own_redis.client() as client:
        heard = overheard(own_redis, lambda: client.eval("redis.call('PING') return redis.call('ECHO', 'x')", 0))
    assert [command[0] for command in heard] == [b"EVAL"]


def test_report_of_wrk_is_read() -> None:
    """Answers other than 2xx and broken connections are failures."""
    good = "Requests/sec:   5669.22\n"
    assert end_to_end.parsed(good) == (5669.22, 0)
    bad = "Socket errors: connect 1, read 2, write 0, timeout 3\n  Non-2xx or 3xx responses: 4\n" + good
    assert end_to_end.parsed(bad) == (5669.22, 10)
    with pytest.raises(RuntimeError, match="no report"):
        end_to_end.parsed("")


def test_trouble_is_the_commonest_unexpected_outcome() -> None:
    """What was expected is no trouble, however rare."""
    assert trouble(Counter({200: 1, "Oops": 5, 500: 2})) == "Oops"
    assert trouble(Counter({200: 1, 429: 3}), (200, 429)) == ""


def test_who_does_not_answer_with_200_drops_out() -> None:
    """Applications that raise or refuse fail by name, and the others are measured all the same."""

    async def good(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def refusing(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 429})

    async def raising(scope, receive, send) -> None:
        raise TimeoutError

    with Crowds() as crowd_of:
        crowds = {"good": crowd_of.asgi(good), "refusing": crowd_of.asgi(refusing), "raising": crowd_of.asgi(raising)}
        outcomes = alternate(crowds, 4, Plan(rounds=3, requests=10))
    assert outcomes["refusing"] == Failed("429")
    assert outcomes["raising"] == Failed("TimeoutError")
    assert isinstance(outcomes["good"], Taken)
    assert len(outcomes["good"].turns) == 3


def test_turns_go_on_where_the_last_one_ended() -> None:
    """So with more clients than requests in a turn, others come in the next."""
    visits: list[int] = []

    def crowd(numbers, concurrency) -> Counter[int | str]:
        visits.extend(numbers)
        return Counter({200: 1})

    plan = Plan(rounds=2, requests=3)
    alternate({"one": crowd}, 1, plan, first=100)
    assert visits == list(range(100, 100 + numbers_of(plan)))


def test_the_whole_example_limits_all_that_it_is_asked(redis_server) -> None:
    """In three laps nobody is refused, and the caller of the tier, every login twice, and every client have a bucket."""
    for store in (MemoryStore(), redis_server.url):
        with Crowds() as crowd_of:
            crowd = crowd_of.asgi(readme.example(store), visit=partial(readme.visit, clients=1_000))
            assert crowd(iter(range(3 * readme.LAP)), 8) == {200: 3 * readme.LAP}
        if isinstance(store, MemoryStore):
            assert len(store) == 1 + 2 * 9 + 3 * 27


UNLIMITED = ("global", "charge_if", "concurrency", "shadow", "lease of 50")
"""Options by which one client is never refused, if it waits for its answers and they are good."""


@pytest.mark.parametrize("name", options())
def test_every_option_is_measured_on_an_application_that_limits(name: str) -> None:
    """A client is admitted, and is refused once it has used up the rule."""
    with Crowds() as crowd_of:
        crowd = crowd_of.asgi(
            options({"minute": 5})[name].app(MemoryStore(lambda: 1_700_000_000_000_000)), visit=lambda _: visit(name, 7)
        )
        assert crowd(iter(range(20)), 1) == ({200: 20} if name in UNLIMITED else {200: 5, 429: 15})


def test_options_go_by_what_they_are_named_after() -> None:
    """As many buckets as there are keys in a lap of all clients, two of each where two rules count."""
    for name, option in options().items():
        store = MemoryStore(lambda: 1_700_000_000_000_000)
        with Crowds() as crowd_of:
            assert crowd_of.asgi(option.app(store), visit=partial(visit, name))(iter(range(10)), 1) == {200: 10}
        buckets = {"global": 1, "lease of 50": 1, "two rules, ip and api_key": 20}
        assert len(store) == buckets.get(name, 10), name


def test_the_page_shows_every_option_beside_the_cheapest_peer() -> None:
    """By µs, by README's rule and by the peer; a peer that fails is shown to fail, and where there is none it is said."""
    shown = page(measured()).partition("## What each option costs")[2].partition("\n## ")[0]
    in_memory, on_redis = [
        {row.split(" | ")[0].removeprefix("| ").replace(r"\|", "|"): row for row in table.splitlines()[2:]}
        for table in shown.split("\n\n")[1:3]
    ]
    assert list(in_memory) == list(on_redis) == list(options())
    assert on_redis["header"] == "| header | 45 (30) | 1.5 | asgi-ratelimit | 90 (60) | 0.5 |"
    assert on_redis["sliding_window"] == "| sliding_window | 45 (30) | 1.5 | throttled-py | 90 (60) | 0.5 |"
    assert on_redis["charge_if"] == "| charge_if | 45 (30) | 1.5 | Flask-Limiter | 90 (60) | 0.5 |"
    assert on_redis["draft-11"] == "| draft-11 | 45 (30) | 1.5 | no peer | - | - |"
    assert in_memory["header"] == "| header | - | - | asgi-ratelimit | fails (429) | - |"


def test_a_paced_rate_is_measured(redis_server) -> None:
    """What comes in the first second is left out, as a burst is no rate; the row says how much of the limit was achieved."""
    case = pacing.Case(redis_server.url, "100/second", even=False, processes=1, tasks=2, seconds=0.5)
    achieved = pacing.measured(case)
    assert 50 < achieved.rate < 200, "about 100, as exactly as half a second of a busy machine tells"
    assert achieved.most < 50
    assert pacing._row(case, achieved._replace(rate=99.5))[:4] == ("100/second, in bursts", "1", "99.5", "99.50%")
