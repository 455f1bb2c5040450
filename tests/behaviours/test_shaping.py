"""Requests that wait for their turn instead of being refused, through every door; mostly in a time that goes on by itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from hypothesis import given, strategies as st

from limitgate import LimitGate, LimitGateWSGI, MemoryStore, Rule, RuleSet, StoreError, load_rules
from limitgate.exchange.asgi import MOST_KEPT
from limitgate.exchange.base import EXCHANGE
from limitgate.limits.limit import Limit
from tests.behaviours.test_late_limits import Late
from tests.gate.test_wait_queue import _passes_no_more
from tests.support.doors import (
    SITES,
    ASGISite,
    Site,
    Wire,
    WSGISite,
    asgi_reply,
    http_scope,
    validated,
    websocket_scope,
    wsgi_reply,
)
from tests.support.outcomes import END, PLAIN, START, ASGIOutcomes, Watched, WSGIOutcomes, owed
from tests.support.virtual import World

ONE = Rule("r", "10/second burst 1", key=["global"], max_delay=5)
GONE = {"type": "http.disconnect"}
LAST = {"type": "http.request", "body": b"", "more_body": False}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture(params=SITES, ids=lambda site: site.door)
def site(request: pytest.FixtureRequest, world: World) -> Iterator[Callable[..., Site]]:
    """Opens an application behind either door, on a store and an event loop of the world."""
    with contextlib.ExitStack() as opened:

        def open_site(*rules: Any, **options: Any) -> Site:
            found: Site = opened.enter_context(request.param(*rules, **{"store": MemoryStore(world), **options}))
            if isinstance(found, ASGISite):
                found.runner.close()
                found.runner = asyncio.Runner(loop_factory=world.loop)
            return found

        yield open_site


# --- both doors -------------------------------------------------------------------------------------------------------


def test_requests_wait_for_their_turn(site: Callable[..., Site], world: World) -> None:
    """Each passes at its turn, and sees for how long it waited."""
    it = site(ONE)
    passed = [(it.ask().status, world.now) for _ in range(4)]
    assert passed == [(200, 0), (200, 0.1), (200, 0.2), (200, 0.3)]
    assert [round(decision.delay, 5) for decision in it.seen] == [0, 0.1, 0.1, 0.1]
    assert [decision.allowed for decision in it.seen] == [True] * 4


def test_a_burst_need_not_wait(site: Callable[..., Site], world: World) -> None:
    """What a full bucket holds passes at once."""
    it = site(Rule("r", "10/second burst 3", max_delay="1s"))
    assert [(it.ask().status, world.now) for _ in range(5)] == [(200, 0), (200, 0), (200, 0), (200, 0.1), (200, 0.2)]


def test_who_would_wait_too_long_is_refused_at_once(site: Callable[..., Site], world: World) -> None:
    """Retry-After is the time until the same request may wait: just then it does, and passes at its turn."""
    it = site(Rule("r", "10/second", cost=10, max_delay="300ms"), headers=["draft-11"])
    assert it.ask().status == 200
    refused = it.ask()
    assert (refused.status, refused.wait, world.now) == (429, 1, 0)
    assert refused.json()["violated-policies"] == ["r"]
    assert refused.headers["ratelimit"] == '"r";r=0;t=1'
    world.advance(0.7)
    assert (it.ask().status, world.now) == (200, 1)


@pytest.mark.parametrize("method", ["HEAD", "POST", "DELETE"])
def test_every_method_waits(site: Callable[..., Site], world: World, method: str) -> None:
    """HEAD waits like GET, and so does everything else that the rule is for."""
    it = site(ONE)
    it.ask()
    reply = it.ask(method=method)
    assert (reply.status, world.now, reply.body == b"") == (200, 0.1, method == "HEAD")


def test_what_is_never_counted_never_waits(site: Callable[..., Site], world: World) -> None:
    """Exempt paths, other methods, preflights and requests that cost nothing pass by the line."""
    it = site(ONE.model_copy(update={"path": "/a/**", "methods": frozenset({"GET"})}), Rule("no", path="/a/no", exempt=True))
    it.ask("/a")
    for path, method in (("/b", "GET"), ("/a", "POST"), ("/a/no", "GET")):
        assert it.ask(path, method).status == 200
    assert world.now == 0


def test_the_rate_fields_are_right_after_the_wait(site: Callable[..., Site], world: World) -> None:
    """The reset is a moment by the store's clock, at which the bucket is full again indeed."""
    it = site(Rule("r", "1/second", max_delay=10))
    for _ in range(3):
        it.ask()
    reply = it.ask()
    assert reply.rate == {"x-ratelimit-limit": "1", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "1790000004"}
    world.advance(1)
    assert it.ask("/", "GET").rate["x-ratelimit-reset"] == "1790000006"


def test_where_one_rule_refuses_nobody_waits_and_nothing_is_booked(site: Callable[..., Site], world: World) -> None:
    """All or nothing: a turn is booked only if every other limit has room."""
    store = MemoryStore(world)
    it = site(ONE, Rule("two", "2/day", key=["global"]), store=store)
    assert [it.ask().status for _ in range(2)] == [200, 200]
    before, now = owed(store, world()), world.us
    assert [it.ask().status for _ in range(2)] == [429, 429]
    assert (owed(store, world()), world.us) == (before, now)


def test_of_several_rules_the_longest_wait_counts(site: Callable[..., Site], world: World) -> None:
    """A request waits once, until all limits that make it wait have room."""
    it = site(ONE, Rule("two", "1/second", key=["global"], max_delay=2))
    assert [(it.ask().status, world.now) for _ in range(3)] == [(200, 0), (200, 1), (200, 2)]


def test_a_log_of_requests_makes_wait(site: Callable[..., Site], world: World) -> None:
    """As many at once as a period has, and the next ones when these are a period old; nobody is told to wait for too short."""
    it = site(Rule("r", Limit("2/second", algorithm="sliding_log"), key=["global"], max_delay=2))
    passed = [(it.ask().status, round(world.now, 3)) for _ in range(5)]
    assert passed == [(200, 0), (200, 0), (200, 1), (200, 1), (200, 2)]
    assert [round(decision.delay, 5) for decision in it.seen] == [0, 0, 1, 0, 1]


def test_a_log_beside_a_rate(site: Callable[..., Site], world: World) -> None:
    """Those whose turn by the log comes together still pass one by one by the other rule."""
    rules = Rule("log", Limit("3 per 10 seconds", algorithm="sliding_log"), key=["global"], max_delay=60), ONE
    it = site(*rules)
    passed = [(it.ask().status, round(world.now, 3)) for _ in range(6)]
    assert passed == [(200, 0), (200, 0.1), (200, 0.2), (200, 10), (200, 10.1), (200, 10.2)]


def test_under_the_option_shadow_nobody_waits(site: Callable[..., Site], world: World) -> None:
    """Nobody is held up where nobody is refused."""
    it = site(ONE, shadow=True)
    assert it.statuses(5) == [200] * 5
    assert world.us == 0


def test_a_rule_file_says_so_too(site: Callable[..., Site], world: World, tmp_path: Path) -> None:
    """YAML's 500ms is half a second."""
    (tmp_path / "default.yaml").write_text("rules: [{name: r, limits: [10/second], cost: 5, max_delay: 500ms}]")
    rules = load_rules(tmp_path)
    assert isinstance(rules, RuleSet)
    it = site(rules=rules)
    assert [(it.ask().status, world.now) for _ in range(3)] == [(200, 0), (200, 0), (200, 0.5)]


class Failing(MemoryStore):
    """A store that never answers."""

    def spend(self, plan: Any, timeout: float = 0) -> Any:
        raise StoreError("out of order")


def test_without_the_store_a_local_bucket_makes_wait(site: Callable[..., Site], world: World) -> None:
    """Under on_error local this process books turns itself, in its own share; the promised bound is the same."""
    it = site(ONE, store=Failing(world), on_error="local", processes=2)
    it.app.gate.outages._local_store = MemoryStore(world)
    assert [(it.ask().status, world.now) for _ in range(3)] == [(200, 0), (200, 0.2), (200, 0.4)]
    assert all(decision.degraded for decision in it.seen)


@pytest.mark.parametrize(("on_error", "status"), [("open", 200), ("closed", 503)])
def test_without_the_store_nobody_else_waits(site: Callable[..., Site], world: World, on_error: Any, status: int) -> None:
    """Where nothing is known of any bucket, there is no turn to wait for."""
    it = site(ONE, store=Failing(world), on_error=on_error)
    assert it.statuses(3) == [status] * 3
    assert world.us == 0


@pytest.mark.parametrize("door", [ASGIOutcomes, WSGIOutcomes])
def test_what_a_request_turns_out_to_cost_is_put_right_after_a_wait(door: Any, world: World) -> None:
    """An outcome that is not charged, or a cost that is settled, has its effect as ever."""
    store = Watched(world)
    store.clock = world
    with door(Rule("r", "1/second", key=["global"], charge_if={"status": [401]}, max_delay=5), store=store) as it:
        if isinstance(it, ASGISite):
            it.runner = asyncio.Runner(loop_factory=world.loop)
        it.ask("/?status=401")
        it.ask("/?status=200")
        assert (round(store.owed.get("r", 0), 5), world.now) == (0, 1)
        it.ask("/?settle=3&status=401")
        assert (round(store.owed["r"], 5), world.now) == (3, 1)


# --- ASGI: order, leaving, bodies -------------------------------------------------------------------------------------


class Crowd:
    """Requests to one ASGI application, each a task; notes when each passes."""

    def __init__(self, world: World, *rules: Rule, **options: Any) -> None:
        self.world = world
        self.store = options.setdefault("store", MemoryStore(world))
        self.passed: list[tuple[float, str]] = []
        self.passed_us: list[int] = []
        self.app: Any = LimitGate(self._app, rules=rules, **options)
        self.wires: dict[str, Wire] = {}

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed.append((self.world.now, scope["path"][1:]))
        self.passed_us.append(self.world.us)
        await send(START)
        await send(END)

    def come(self, name: str, *incoming: Any, method: str = "GET") -> asyncio.Task[Any]:
        """A request of this name; its client says something and is silent then, or leaves after so many seconds."""
        wire = self.wires[name] = Timed(*(incoming or (LAST,)))
        return asyncio.create_task(self.app(http_scope(f"/{name}", method), wire.receive, wire.send))

    @property
    def owed(self) -> float:
        """Requests that the rules' buckets owe by now, to a hundredth of a millisecond at ten per second."""
        return round(sum(owed(self.store, self.world()).values()), 4)


class Timed(Wire):
    """A wire on which numbers among what comes in are seconds of silence."""

    async def receive(self) -> Any:
        if self.incoming and isinstance(self.incoming[0], float):
            await asyncio.sleep(self.incoming.popleft())
        return await super().receive()


def test_fifty_at_once_pass_in_order_and_evenly(world: World) -> None:
    """A crowd passes in the order of arrival, exactly a tenth of a second apart; who would wait too long is told at once."""
    crowd = Crowd(world, ONE)

    async def main() -> None:
        tasks = [crowd.come(str(number)) for number in range(60)]
        await asyncio.sleep(0.01)
        refused = [name for name, wire in crowd.wires.items() if wire.sent and wire.reply().status == 429]
        assert refused == [str(number) for number in range(51, 60)]
        await asyncio.gather(*tasks)

    world.run(main())
    assert crowd.passed == [(round(number / 10, 5), str(number)) for number in range(51)]
    assert len(crowd.app.gate.turns.queues) == 0


def test_waiting_costs_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the clock meanwhile: an event loop wakes up once for each turn, with one timer at a time."""
    crowd = Crowd(world, Rule("r", "1/second", key=["global"], max_delay=60))

    async def main() -> None:
        loop, timers = asyncio.get_running_loop(), []
        call_later = loop.call_later
        monkeypatch.setattr(
            loop, "call_later", lambda *given, **options: timers.append(given[0]) or call_later(*given, **options)
        )
        await asyncio.gather(*[crowd.come(str(number)) for number in range(61)])
        assert len(timers) == 60
        assert world.waits == 60

    world.run(main())
    assert world.now == 60


def test_who_leaves_gives_the_turn_back(world: World) -> None:
    """Whoever comes next gets it, the application never hears of the request that left, and nothing is sent to it."""
    crowd = Crowd(world, ONE)

    async def main() -> None:
        tasks = [crowd.come("a"), crowd.come("left", LAST, 0.05, GONE)]
        await asyncio.sleep(0.06)
        assert (tasks[1].done(), crowd.wires["left"].sent, crowd.owed) == (True, [], 0.4)
        await asyncio.gather(*tasks, crowd.come("b"))

    world.run(main())
    assert crowd.passed == [(0, "a"), (0.1, "b")]


def test_those_behind_who_leaves_move_up(world: World) -> None:
    """Nobody is held up by a request that is gone: those who wait behind it pass earlier, in order, and evenly still."""
    crowd = Crowd(world, ONE)

    async def main() -> None:
        leaving = {"1": 0.05, "3": 0.05, "4": 0.15}
        tasks = [crowd.come(name, LAST, *([leaving[name], GONE] if name in leaving else [])) for name in map(str, range(7))]
        await asyncio.sleep(0.27)
        await asyncio.gather(*tasks, crowd.come("new"))

    world.run(main())
    assert crowd.passed == [(0, "0"), (0.1, "2"), (0.2, "5"), (0.3, "6"), (0.4, "new")]


def test_those_behind_who_leaves_move_up_in_a_log(world: World) -> None:
    """The last turn becomes free, so in no period more pass than before, and whoever comes next has it."""
    crowd = Crowd(world, Rule("r", Limit("2/second", algorithm="sliding_log"), key=["global"], max_delay=60))

    async def main() -> None:
        leaving = {"2": 0.05, "3": 0.05}
        tasks = [crowd.come(name, LAST, *([leaving[name], GONE] if name in leaving else [])) for name in map(str, range(7))]
        await asyncio.sleep(0.1)
        await asyncio.gather(*tasks, crowd.come("new"))

    world.run(main())
    assert crowd.passed == [(0, "0"), (0, "1"), (1, "4"), (1, "5"), (2, "6"), (2, "new")]


@pytest.mark.parametrize("how", ["leaves", "is cancelled"])
def test_a_crowd_that_is_gone_leaves_nothing_behind(world: World, how: str) -> None:
    """When all have left, the bucket owes what was let in and nothing else, and nobody is waited for."""
    crowd = Crowd(world, ONE, Rule("day", "100/day", key=["global"]))

    async def main() -> None:
        tasks = [crowd.come(str(n), LAST, *([0.05, GONE] if n and how == "leaves" else [])) for n in range(40)]
        await asyncio.sleep(0.06)
        for task in tasks[1:]:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled = sum(isinstance(end, asyncio.CancelledError) for end in ends)
        assert cancelled == (39 if how == "is cancelled" else 0)
        assert {name: round(requests, 2) for name, requests in owed(crowd.store, world()).items()} == {"r": 0.4, "day": 1.0}

    world.run(main())
    assert crowd.passed == [(0, "0")]
    assert len(crowd.app.gate.turns.queues) == 0


def test_requests_of_different_callers_move_up_in_what_they_share(world: World) -> None:
    """Where a limit for all makes wait, the turn in it passes from one to the other; what is one's own is given back."""
    crowd = Crowd(world, ONE, Rule("own", "100/day", key=["header:x-who"]))

    async def main() -> None:
        def come(who: str, *incoming: Any) -> asyncio.Task[Any]:
            wire = crowd.wires[who] = Timed(LAST, *incoming)
            return asyncio.create_task(crowd.app(http_scope(f"/{who}", headers={"x-who": who}), wire.receive, wire.send))

        await asyncio.gather(come("ann"), come("bob", 0.05, GONE), come("cay"), come("dan"))

    world.run(main())
    assert crowd.passed == [(0, "ann"), (0.1, "cay"), (0.2, "dan")]
    assert round(owed(crowd.store, world())["own"], 2) == 3


def test_who_waits_is_in_flight(world: World) -> None:
    """A request that waits holds its place where requests in flight are counted, and gives it back with its turn."""
    crowd = Crowd(world, ONE, Rule("flight", concurrency=2, key=["global"]))

    async def main() -> None:
        await crowd.come("a")
        tasks = [crowd.come("b"), crowd.come("left", LAST, 0.05, GONE)]
        await asyncio.sleep(0)
        await crowd.come("refused")
        assert crowd.wires["refused"].reply().status == 429
        await tasks[1]
        await asyncio.gather(*tasks, crowd.come("c"))

    world.run(main())
    assert crowd.passed == [(0, "a"), (0.1, "b"), (0.2, "c")]


def test_who_moves_up_is_settled_by_its_own_rules(world: World) -> None:
    """A turn comes from another request, but what it turns out to cost goes by the rules of the request that has it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["limitgate"].settle(3)
        await send(START)
        await send(END)

    store = MemoryStore(world)
    tokens = Rule("tokens", "1000/day", path="/b", key=["global"], cost=100)
    gate = LimitGate(app, rules=[Rule("r", "1/second", key=["global"], max_delay=5), tokens], store=store)

    async def main() -> None:
        await asgi_reply(gate)
        left, other = Timed(LAST, 0.05, GONE), Timed(LAST)
        waiting = asyncio.create_task(gate(http_scope("/b"), left.receive, left.send))
        await asyncio.sleep(0)
        await gate(http_scope("/a"), other.receive, other.send)
        await waiting
        assert {name: round(requests, 3) for name, requests in owed(store, world()).items()} == {"r": 3}

    world.run(main())


def test_a_request_leaves_no_cycle(world: World) -> None:
    """What is remembered of a request is gone when it is over, without the garbage collector."""
    admissions = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        admissions.append(ref(scope[EXCHANGE].open_admission()))
        await send(START)
        await send(END)

    gate = LimitGate(app, rules=[ONE], store=MemoryStore(world))

    async def main() -> None:
        await asyncio.gather(*[asgi_reply(gate) for _ in range(3)])

    gc.collect()
    gc.disable()
    try:
        world.run(main())
        assert [admission() for admission in admissions] == [None, None, None]
    finally:
        gc.enable()


def test_turns_of_different_costs_are_not_exchanged(world: World) -> None:
    """Behind who leaves, only those of the same cost move up; a request of another one keeps its own turn."""
    rule = Rule("r", "10/second burst 2", key=["global"], cost=lambda request: int(request.query.get("cost")), max_delay=5)
    crowd = Crowd(world, rule)

    async def main() -> None:
        def come(name: str, cost: int, *incoming: Any) -> asyncio.Task[Any]:
            wire = Timed(LAST, *incoming)
            return asyncio.create_task(crowd.app(http_scope(f"/{name}?cost={cost}"), wire.receive, wire.send))

        await asyncio.gather(come("a", 2), come("left", 2, 0.05, GONE), come("c", 1), come("d", 2))

    world.run(main())
    assert crowd.passed == [(0, "a"), (0.2, "d"), (0.3, "c")]


@given(
    limit=st.builds(lambda count, burst: Limit(f"{count}/second", burst=burst), st.sampled_from([1, 3, 10]), st.integers(1, 3)),
    crowd=st.lists(st.tuples(st.sampled_from([0, 0, 0.001, 0.1, 0.5]), st.sampled_from([None, None, 0.05, 0.7])), max_size=25),
)
def test_a_crowd_in_which_some_leave_passes_within_the_limit_property(
    limit: Limit, crowd: list[tuple[float, float | None]]
) -> None:
    """Whoever comes and leaves, the others pass in order, never above the limit, and none later than it was told."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(monkeypatch)
        it = Crowd(world, Rule("r", limit, key=["global"], max_delay=60))

        async def main() -> None:
            tasks = []
            for number, (pause, listen_deadline) in enumerate(crowd):
                await asyncio.sleep(pause)
                tasks.append(it.come(str(number), LAST, *([] if listen_deadline is None else [listen_deadline, GONE])))
            came = world.now
            await asyncio.gather(*tasks)
            staying = sum(listen_deadline is None for _, listen_deadline in crowd)
            assert world.now <= came + staying / limit.count + 0.71

        world.run(main())
    assert [int(name) for _, name in it.passed] == sorted(int(name) for _, name in it.passed)
    assert {str(number) for number, (_, listen_deadline) in enumerate(crowd) if listen_deadline is None} <= {
        name for _, name in it.passed
    }
    _passes_no_more(limit, [(us, 1) for us in it.passed_us])


async def _reads_all(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the whole body, and with how the request ended."""
    read = b""
    while (message := await receive())["type"] == "http.request":
        read += message["body"]
        if not message.get("more_body"):
            break
    await send(START)
    await send({**END, "body": read})


def part(text: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": text, "more_body": more}


@pytest.mark.parametrize("parts", [1, 2, MOST_KEPT, MOST_KEPT + 1, 50])
@pytest.mark.parametrize("pause", [0.0, 0.03, 0.2])
def test_a_body_that_comes_meanwhile_is_whole(world: World, parts: int, pause: float) -> None:
    """An upload reaches the application in order, however much of it came while the request waited; only a little is kept."""
    sent = [part(b"%d;" % number, more=number < parts - 1) for number in range(parts)]
    gate = LimitGate(_reads_all, rules=[ONE], store=MemoryStore(world))

    async def main() -> None:
        await asgi_reply(gate)
        wire = Timed(*[each for message in sent for each in (pause, message)])
        asking = asyncio.create_task(wire.call(gate, http_scope(method="POST")))
        await asyncio.sleep(0.099)
        assert not wire.sent
        assert wire.received <= min(parts + 1, MOST_KEPT)
        await asking
        assert wire.reply().body == b"".join(message["body"] for message in sent)

    world.run(main())


def test_who_leaves_during_an_upload_is_heard(world: World) -> None:
    """As long as only few messages have come, a client that breaks off is noticed."""
    crowd = Crowd(world, ONE)

    async def main() -> None:
        await crowd.come("a")
        await crowd.come("left", 0.01, part(b"1"), 0.01, part(b"2"), 0.01, GONE, method="POST")
        assert (world.now, crowd.owed) == (0.03, 0.7)

    world.run(main())
    assert [name for _, name in crowd.passed] == ["a"]


def test_the_application_hears_who_leaves_later(world: World) -> None:
    """What was listened for while the request waited goes on, so a disconnect after the turn reaches the application."""
    heard = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append([(await receive())["type"], (await receive())["type"], world.now])

    gate = LimitGate(app, rules=[ONE], store=MemoryStore(world))

    async def main() -> None:
        for _ in range(2):
            wire = Timed(LAST, 0.3, GONE)
            await gate(http_scope(), wire.receive, wire.send)

    world.run(main())
    assert heard == [["http.request", "http.disconnect", at] for at in (0.3, 0.6)]


def test_nothing_is_left_behind(world: World) -> None:
    """An application that never asks for a message leaves nobody listening."""
    crowd = Crowd(world, ONE)

    async def main() -> None:
        await asyncio.gather(*[crowd.come(str(number)) for number in range(3)])
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    world.run(main())


def test_a_store_that_fails_to_take_a_turn_back(world: World) -> None:
    """Then it lapses: nobody fails for it, and it is counted."""
    store = Watched(world)
    crowd = Crowd(world, ONE, store=store)

    async def main() -> None:
        await crowd.come("a")
        store.fails = ("correct",)
        await crowd.come("left", LAST, 0.05, GONE)
        store.fails = ()
        await crowd.come("b")

    world.run(main())
    assert crowd.passed == [(0, "a"), (0.2, "b")]
    assert crowd.app.gate.uncorrected == 1


def test_shutting_down_waits_until_turns_are_given_back(world: World) -> None:
    """Requests that a server cancels when it stops give their turns back before the lifespan is over."""

    class Slow(MemoryStore):
        async def aspend(self, plan: Any, timeout: float = 0) -> Any:
            if plan.verb == "adjust":
                await asyncio.sleep(0.3)
            return self.spend(plan)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
        else:
            await send(START)
            await send(END)

    store = Slow(world)
    gate = LimitGate(app, rules=[ONE], store=store)

    async def main() -> None:
        life = Wire()
        living = asyncio.create_task(gate({"type": "lifespan"}, life.receive, life.send))
        await asgi_reply(gate)
        waiting = asyncio.create_task(asgi_reply(gate))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        living.cancel()
        with pytest.raises(asyncio.CancelledError):
            await living
        await gate.gate.refunds.asettled()
        assert not owed(store, world())

    world.run(main())


def test_a_loop_that_is_gone_takes_its_line_along(world: World) -> None:
    """Where an event loop was closed on requests that wait, nothing is left of them, and another loop goes on."""
    crowd = Crowd(world, ONE)
    loop = world.loop()
    wires = [Wire(LAST), Wire(LAST)]
    first, second = [crowd.app(http_scope(f"/{name}"), wire.receive, wire.send) for name, wire in zip("ab", wires, strict=True)]
    asyncio._set_running_loop(loop)
    with contextlib.suppress(StopIteration):
        first.send(None)
    second.send(None)
    asyncio._set_running_loop(None)
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    second.close()
    assert len(crowd.app.gate.turns.queues) == 0
    world.advance(1)
    world.run(asgi_reply(crowd.app, "/c"))
    assert [name for _, name in crowd.passed] == ["a", "c"]


# --- WebSockets -------------------------------------------------------------------------------------------------------


def test_a_handshake_waits(world: World) -> None:
    """A WebSocket is accepted at its turn, and its messages come in order."""
    heard = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append((await receive())["type"])
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            heard.append(message["text"])
        heard.append((message["type"], world.now))

    gate = LimitGate(app, rules=[ONE], store=MemoryStore(world))
    said = [{"type": "websocket.receive", "text": str(number)} for number in range(3)]

    async def main() -> None:
        for _ in range(2):
            wire = Timed({"type": "websocket.connect"}, 0.15, *said, {"type": "websocket.disconnect", "code": 1000})
            await wire.call(gate, websocket_scope())
            assert wire.reply().status == 101
            assert wire.reply().headers["x-ratelimit-remaining"] == "0"

    world.run(main())
    rest = ["websocket.connect", "0", "1", "2"]
    assert heard == [*rest, ("websocket.disconnect", 0.15), *rest, ("websocket.disconnect", 0.3)]


def test_a_handshake_that_is_given_up(world: World) -> None:
    """A client that leaves meanwhile gives its turn back, and the server is told that this is over."""
    gate = LimitGate(_reads_all, rules=[ONE], store=MemoryStore(world))

    async def main() -> None:
        await asgi_reply(gate)
        wire = Timed({"type": "websocket.connect"}, 0.05, {"type": "websocket.disconnect", "code": 1006})
        await wire.call(gate, websocket_scope())
        assert (wire.types, world.now) == (["websocket.close"], 0.05)
        await asgi_reply(gate)

    world.run(main())
    assert world.now == 0.1


# --- limits that are asked for later ----------------------------------------------------------------------------------

FIRST = Rule("first", "100/minute", key=["global"])
LATE = Rule("late", "10/second burst 1", key=["global"], max_delay=0.2)


@pytest.fixture(params=["asgi", "wsgi"])
def late(request: pytest.FixtureRequest, world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Late]:
    """Opens an application that asks for limits while a request is under way, at either door."""

    def open_late(*rules: Rule, **options: Any) -> Late:
        options = {"rules": [FIRST], "store": MemoryStore(world), **options}
        it = Late(request.param, *rules, **options)
        monkeypatch.setattr(asyncio, "run", world.run)
        return it

    return open_late


def test_late_limits_wait_too(late: Callable[..., Late], world: World) -> None:
    """Each that is asked for makes wait by itself, and the decision says for how long in all."""
    it = late(LATE, Rule("later", "2/second burst 1", key=["global"], max_delay=2), rules=[ONE])
    assert [(it.ask().status, world.now) for _ in range(2)] == [(200, 0), (200, 0.5)]
    assert [round(decision.delay, 5) for decision in it.decisions] == [0.1, 0.5]


def test_a_late_limit_that_refuses_gives_the_turns_back(late: Callable[..., Late], world: World) -> None:
    """What was waited for was for nothing, but costs nothing either."""
    store = MemoryStore(world)
    it = late(Rule("day", "1/day", key=["global"]), rules=[ONE], store=store)
    assert [it.ask().status for _ in range(2)] == [200, 429]
    assert {name: round(requests, 4) for name, requests in owed(store, world()).items()} == {"day": 1}


def test_a_turn_that_is_waited_for_is_no_part_of_the_timeout() -> None:
    """However long a request has waited for its turn, later limits may still ask the store."""
    waited = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        waited.append(0.05 - scope[EXCHANGE].open_admission().budget.left)
        await scope[EXCHANGE].afurther([(LATE, ())])
        waited.append(0.05 - scope[EXCHANGE].open_admission().budget.left)
        await send(START)
        await send(END)

    gate = LimitGate(app, rules=[ONE], store=MemoryStore(), timeout=0.05)

    async def main() -> list[int]:
        return [(await asgi_reply(gate)).status for _ in range(2)]

    assert asyncio.run(main()) == [200, 200]
    assert max(waited) < 0.05


def test_who_leaves_while_a_late_limit_makes_wait(world: World) -> None:
    """Everything that was taken goes back, and the application is told that it is refused."""
    ends = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope[EXCHANGE]
        assert (await receive())["type"] == "http.request"
        await exchange.afurther([(LATE, ())])
        ends.append((exchange.open_admission().refusal is None, world.now))
        if exchange.open_admission().refusal is None:
            await send(START)
            await send(END)

    store = MemoryStore(world)
    gate = LimitGate(app, rules=[FIRST], store=store)

    async def main() -> None:
        await asgi_reply(gate)
        before = owed(store, world())["first"]
        wire = Timed(LAST, 0.05, GONE)
        await wire.call(gate, http_scope())
        assert (wire.sent, owed(store, world())["first"] < before, round(owed(store, world())["late"], 4)) == ([], True, 0.5)

    world.run(main())
    assert ends == [(True, 0), (False, 0.05)]


def test_nobody_listens_beside_the_application(world: World) -> None:
    """Where a task of the application is receiving, a late limit leaves the messages to it."""
    read = []
    rule = Rule("late", "2/second burst 1", key=["global"], max_delay=1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope[EXCHANGE]

        async def reads() -> None:
            read.extend([await receive() for _ in range(2)])

        reading = asyncio.create_task(reads())
        await asyncio.sleep(0)
        await exchange.afurther([(rule, ())])
        read.append(world.now)
        await reading
        await send(START)
        await send(END)

    gate = LimitGate(app, rules=[], store=MemoryStore(world))

    async def main() -> None:
        for _ in range(2):
            wire = Timed(part(b"1"), 0.15, part(b"2", more=False))
            assert (await wire.call(gate, http_scope())).reply().status == 200

    world.run(main())
    first, last = part(b"1"), part(b"2", more=False)
    assert read == [0, first, last, first, last, 0.5]


# --- WSGI -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["at the gate", "later"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeoutError])
def test_a_thread_that_is_interrupted_gives_its_turn_back(
    world: World, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], *, late: bool
) -> None:
    """A signal's handler, or gevent, may end the wait; then the request was never let in."""
    store = MemoryStore(world)
    rules = {False: [FIRST, ONE], True: [FIRST]}[late]
    it = Late("wsgi", *[LATE] if late else [], rules=rules, store=store)
    assert it.ask().status == 200
    before = owed(store, world())

    def interrupted(seconds: float) -> None:
        raise error

    monkeypatch.setattr("limitgate.process.waiting.sleep", interrupted)
    with pytest.raises(error):
        it.ask()
    assert owed(store, world()) == before


def test_a_sleep_that_ends_early_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody passes before the turn, whatever stands in for the interpreter's own sleep."""
    monkeypatch.setattr("limitgate.process.waiting.sleep", lambda seconds: world.sleep(seconds / 2))
    gate = LimitGateWSGI(validated(WSGISite.answering(200, PLAIN, b"", [])), rules=[ONE], store=MemoryStore(world))
    for _ in range(2):
        wsgi_reply(gate)
    assert 0.1 <= world.us / 1_000_000 < 0.10005
