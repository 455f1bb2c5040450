"""Requests under way: their holds are renewed while they live, and other processes see them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from limitgate import AsyncLimiter, Limiter, MemoryStore, RedisStore, StoreError
from limitgate.httpx2 import AsyncRateLimitTransport, RateLimitTransport
from limitgate.limiter.budget_texts import Budget as Shown, state_of_budget
from limitgate.limiter.calls import carry_out
from limitgate.llm import Budget
from limitgate.llm.keeper import Keeper, keeper_of
from limitgate.llm.usage import Usage
from limitgate.outbound.throttle import arun, run
from limitgate.process import waiting
from limitgate.stores.base import ConfigRequest
from tests.support.doors import PATIENCE, until
from tests.support.redis_server import RedisServer
from tests.support.virtual import World

BODY = {"model": "m", "messages": [{"role": "user", "content": "How many roads?"}], "max_tokens": 500}
ANSWER = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 96}}
TOKENS = "10000/day"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def budget(**options: Any) -> Budget:
    return Budget(tokens=TOKENS, key=lambda _: "k", **options)


def state(limiter: Any) -> Shown:
    found: Shown | None = carry_out(limiter, state_of_budget(limiter, "k"))
    assert found is not None
    return found


def held(limiter: Any) -> int:
    """Reservations; 0 before the first report."""
    found: Shown | None = carry_out(limiter, state_of_budget(limiter, "k"))
    return 0 if found is None else found.held


async def astate(limiter: Any) -> Shown:
    found: Shown | None = await carry_out(limiter, state_of_budget(limiter, "k"))
    assert found is not None
    return found


def tokens(shown: Shown) -> tuple[int, int, int]:
    """Tokens used, tokens reserved, and reservations held."""
    return shown.decision.windows[0].used, sum(row.reserved[0] for row in shown.live), shown.held


class Slow(httpx2.AsyncBaseTransport):
    """Answers after a time, with a pause between two parts."""

    def __init__(self, seconds: float, between: float = 0.0) -> None:
        self.seconds = seconds
        self.between = between

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await asyncio.sleep(self.seconds)

        async def body() -> AsyncIterator[bytes]:
            yield b'data: {"choices": [{"delta": {"content": "abcd"}}]}\n\n'
            await asyncio.sleep(self.between)
            yield b'data: {"usage": {"prompt_tokens": 4, "completion_tokens": 96}}\n\n'

        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=body(), request=request)


@pytest.mark.parametrize(("before", "between"), [(500, 0), (0, 500), (500, 500)])
def test_a_late_answer_keeps_its_reservation(world: World, before: float, between: float) -> None:
    """Its first byte, or a later one, comes long after the hold would have ended."""

    async def main() -> None:
        limiter = AsyncLimiter(MemoryStore(world))
        transport = AsyncRateLimitTransport(
            budget=budget(hold=60), limiter=limiter, transport=Slow(before, between), timeout=None
        )
        async with httpx2.AsyncClient(transport=transport, timeout=None) as client:
            asked = asyncio.create_task(client.post("http://h/", json=BODY))
            for _ in range(int((before + between) / 50) - 1):
                await asyncio.sleep(50)
                used, reserved, held = tokens(await astate(limiter))
                assert (reserved, held) == (504, 1)
                assert used > 0
            await asked
            used, reserved, held = tokens(await astate(limiter))
            assert (reserved, held) == (0, 0)
            assert used <= 100

    world.run(main())


def test_nothing_is_renewed_any_more_when_a_request_is_over(world: World) -> None:
    async def main() -> None:
        store = MemoryStore(world)
        transport = AsyncRateLimitTransport(budget=budget(hold=60), limiter=AsyncLimiter(store), transport=Slow(1))
        async with httpx2.AsyncClient(transport=transport) as client:
            await client.post("http://h/", json=BODY)
        waits, calls = world.waits, 0
        spend = store.aspend

        async def counted(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return await spend(*args)

        store.aspend = counted  # type: ignore[method-assign, assignment]
        await asyncio.sleep(600)
        assert calls == 0
        assert world.waits - waits < 5

    world.run(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_response_that_is_dropped_is_given_back_after_its_hold(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads or closes it, and it is garbage."""
    clock = [1000.0]
    monkeypatch.setattr(waiting, "monotonic", lambda: clock[0])
    store = MemoryStore(lambda: 1_790_000_000_000_000 + int(clock[0] * 1_000_000))
    limiter: Any = Limiter(store) if kind == "sync" else AsyncLimiter(store)

    async def reserve() -> Any:
        spending = budget(hold=60).spending(None, body=BODY)
        assert spending is not None
        spending.renews = True
        flow = spending.taking(limiter, 0)
        assert (await arun(flow) if kind == "async" else run(flow)).allowed
        keeper = keeper_of(limiter)
        for _ in range(5):
            clock[0] += 40
            await arun(keeper.looking()) if kind == "async" else run(keeper.looking())
        shown = await astate(limiter) if kind == "async" else state(limiter)
        assert shown.held == 1
        return keeper

    async def main() -> None:
        keeper = await reserve()
        gc.collect()
        clock[0] += 61
        await arun(keeper.looking()) if kind == "async" else run(keeper.looking())
        shown = await astate(limiter) if kind == "async" else state(limiter)
        assert tokens(shown) == (0, 0, 0)

    asyncio.run(main())


def test_a_thread_that_waits_for_an_answer_keeps_its_reservation() -> None:
    """No thread per request: one looks after all."""
    limiter, go = Limiter(MemoryStore()), threading.Event()

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert go.wait(PATIENCE)
        return httpx2.Response(200, json=ANSWER, request=request)

    transport = RateLimitTransport(budget=budget(hold=3), limiter=limiter, transport=httpx2.MockTransport(answer))
    others = _watching()
    with httpx2.Client(transport=transport) as client:
        threads = [threading.Thread(target=client.post, args=("http://h/",), kwargs={"json": BODY}) for _ in range(5)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: held(limiter) == 5)
            began = time.monotonic()
            while time.monotonic() - began < 4.5:
                assert state(limiter).held == 5
                time.sleep(0.05)
            assert len(_watching() - others) == 1
        finally:
            go.set()
            for thread in threads:
                thread.join(PATIENCE)
    until(lambda: tokens(state(limiter))[1:] == (0, 0))
    assert tokens(state(limiter))[0] <= 500


def test_threads_that_come_first_at_once_share_a_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would start a thread, and report the requests of a process twice."""
    limiter, both, make = Limiter(MemoryStore()), threading.Barrier(2), Keeper.__init__

    def slowly(*values: Any) -> None:
        both.wait(PATIENCE)
        make(*values)

    monkeypatch.setattr(Keeper, "__init__", slowly)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(keeper_of, [limiter] * 2)
    assert one is other


def _watching() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "limitgate-budgets"}


def test_redis_is_away_when_a_hold_is_renewed(own_redis: RedisServer) -> None:
    """It is renewed when Redis is back in time, and otherwise charged in full at the end."""
    store = RedisStore(own_redis.url)
    limiter = Limiter(store, timeout=0.3)
    spending = budget(hold=60).spending(None, body=BODY)
    assert spending is not None
    spending.renews = True
    assert run(spending.taking(limiter, 0)).allowed
    keeper = keeper_of(limiter)
    with own_redis.frozen():
        spending.renew_at = 0
        run(keeper.looking())
    assert 0 < spending.renew_at - waiting.monotonic() < 20
    until(lambda: _is_renewed(keeper, spending))
    run(spending.settling(Usage(4, 96)))
    until(lambda: _quiet(lambda: tokens(state(limiter))[1:]) == (0, 0))
    assert tokens(state(limiter))[0] == 100
    store.close()


def _is_renewed(keeper: Any, spending: Any) -> bool:
    spending.renew_at = 0
    run(keeper.looking())
    return bool(spending.renew_at - waiting.monotonic() > 20)


def _quiet(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except StoreError:
        return None


def test_redis_comes_back_empty_while_a_request_is_under_way(own_redis: RedisServer) -> None:
    """The reservation is gone; the end charges what was used."""
    store = RedisStore(own_redis.url)
    limiter = Limiter(store, timeout=0.5)
    spending = budget(hold=60).spending(None, body=BODY)
    assert spending is not None
    assert run(spending.taking(limiter, 0)).allowed
    own_redis.kill()
    own_redis.start()
    until(lambda: _quiet(lambda: limiter.banned("k").allowed))
    run(spending.settling(Usage(4, 96)))
    assert limiter.peek("k", *spending.windows.every()).windows[0].used == 100
    store.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_the_child_of_a_fork_leaves_requests_to_its_parent(redis_server: RedisServer) -> None:
    """It neither renews nor reports nor settles them, and has its own."""
    code = f"""
import os, time, threading
from limitgate import Limiter, RedisStore
from limitgate.limiter.budget_texts import state_of_budget
from limitgate.limiter.calls import carry_out
from limitgate.llm import Budget, Usage
from limitgate.llm.keeper import keeper_of
from limitgate.outbound.throttle import run
limiter = Limiter(RedisStore({redis_server.url!r}), key_prefix={uuid4().hex!r}, timeout=5)
plan = Budget(tokens="100000/day", key=lambda _: "k", hold=0.4)
body = {{"messages": [], "max_tokens": 500}}
def spend():
    spending = plan.spending(None, body=body)
    spending.renews = True
    assert run(spending.taking(limiter, 0)).allowed
    return spending
ours = spend()
child = os.fork()
if not child:
    run(keeper_of(limiter).looking())
    assert not keeper_of(limiter)._under_way
    run(spend().settling(Usage(0, 7)))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
time.sleep(1)
shown = carry_out(limiter, state_of_budget(limiter, "k"))
assert shown.held == 1, shown
run(ours.settling(Usage(0, 10)))
shown = carry_out(limiter, state_of_budget(limiter, "k"))
assert shown.held == 0 and 14 <= shown.decision.windows[0].used <= 17, shown
print("fine")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert result.stdout == "fine\n", result.stderr


def test_an_interrupt_while_a_request_is_under_way_leaves_nothing_reserved() -> None:
    """In the main thread, at any time of a slow answer: it costs its input, as it may have been sent."""
    limiter = Limiter(MemoryStore())

    def answer(request: httpx2.Request) -> httpx2.Response:
        signal.raise_signal(signal.SIGINT)
        time.sleep(PATIENCE)
        return httpx2.Response(200, request=request)

    transport = RateLimitTransport(budget=budget(), limiter=limiter, transport=httpx2.MockTransport(answer))
    with httpx2.Client(transport=transport) as client, pytest.raises(KeyboardInterrupt):
        client.post("http://h/", json=BODY)
    assert tokens(state(limiter)) == (4, 0, 0)


# --- reports ----------------------------------------------------------------------------------------------------------


def test_who_waits_is_reported() -> None:
    async def main() -> None:
        limiter = AsyncLimiter(MemoryStore())
        plan = Budget(requests="1 per 60 seconds burst 1", tokens=TOKENS, key=lambda _: "k", share=lambda body: body["user"])
        first = await plan.areserve(limiter, {**BODY, "user": "ann"})
        assert first.decision.allowed
        waits = [
            asyncio.create_task(plan.areserve(limiter, {**BODY, "user": user}, timeout=PATIENCE * 99))
            for user in ("benjamin", "benjamin", "caroline")
        ]
        for _ in range(int(PATIENCE * 20)):
            (row,) = (await astate(limiter)).live
            if row.waiting == 3:
                break
            await asyncio.sleep(0.05)
        assert (row.waiting, row.held, list(row.reserved)) == (3, 1, [1, 504])
        assert row.tenants == {"be…in": 2, "ca…ne": 1}
        for task in waits:
            task.cancel()
        await asyncio.wait(waits)
        for _ in range(int(PATIENCE * 20)):
            (row,) = (await astate(limiter)).live
            if not row.waiting:
                break
            await asyncio.sleep(0.05)
        assert row.waiting == 0

    asyncio.run(main())


def test_processes_report_side_by_side(redis_server: RedisServer) -> None:
    """Each in a row of its own; one that has ended is not counted any more."""
    prefix = uuid4().hex
    limiters = [Limiter(RedisStore(redis_server.url), key_prefix=prefix, timeout=5) for _ in range(3)]
    kept = [budget().reserve(limiter, BODY) for limiter in limiters]
    assert tokens(state(limiters[0])) == (3 * 504, 3 * 504, 3)
    kept[0].settle(Usage(4, 96))
    kept[1].cancel()
    assert tokens(state(limiters[0])) == (604, 504, 1)
    shown = state(limiters[0])
    assert len(shown.rows) == 3
    assert not shown._replace(now=shown.now + 60_000_000).live
    for limiter in limiters:
        limiter._store.close()


def test_reports_cost_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred short requests of a key: one report, and none of the others."""
    store, calls, now = MemoryStore(), [], waiting.monotonic()
    monkeypatch.setattr(waiting, "monotonic", lambda: now)
    config = store.config
    monkeypatch.setattr(store, "config", lambda request, *_: calls.append(request) or config(request))
    limiter, plan = Limiter(store), budget()
    for _ in range(100):
        plan.reserve(limiter, BODY).settle(Usage(4, 96))
    assert len(calls) <= 8


def test_a_store_that_fails_makes_no_request_fail(own_redis: RedisServer) -> None:
    """What cannot be reported is reported later."""
    limiter = Limiter(RedisStore(own_redis.url), timeout=0.3)
    spending = budget(hold=None).spending(None, body=BODY)
    assert spending is not None
    assert run(spending.taking(limiter, 0)).allowed
    with own_redis.frozen():
        run(keeper_of(limiter).looking())
        run(spending.settling(Usage(1, 1)))
    limiter._store.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_store_that_keeps_no_texts(kind: str) -> None:
    """A store of one's own has only to spend."""

    class Own:
        def __init__(self) -> None:
            self.store = MemoryStore()

        def spend(self, plan: Any, timeout: float) -> Any:
            return self.store.spend(plan, timeout)

        async def aspend(self, plan: Any, timeout: float) -> Any:
            return self.store.spend(plan, timeout)

        def close(self) -> None:
            """Nothing to close."""

        async def aclose(self) -> None:
            """Nothing to close."""

    async def main() -> None:
        limiter: Any = Limiter(Own()) if kind == "sync" else AsyncLimiter(Own())
        reserved = budget().reserve(limiter, BODY) if kind == "sync" else await budget().areserve(limiter, BODY)
        assert reserved.decision.allowed
        settled = reserved.settle(Usage(4, 96))
        if kind == "async":
            await settled

    asyncio.run(main())


def test_a_reservation_that_is_renewed_by_hand_is_left_to_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its hold lasts, it may be renewed; then it is given back, though it is alive."""
    clock = [1000.0]
    monkeypatch.setattr(waiting, "monotonic", lambda: clock[0])
    limiter = Limiter(MemoryStore(lambda: 1_790_000_000_000_000 + int(clock[0] * 1_000_000)))
    reservation = budget(hold=60).reserve(limiter, BODY)
    for _ in range(3):
        clock[0] += 50
        reservation.renew()
    assert state(limiter).held == 1
    clock[0] += 50
    run(keeper_of(limiter).looking())
    clock[0] += 11
    assert state(limiter).held == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        "{}",
        '{"limits": 5}',
        '{"limits": [["tokens"]]}',
        '{"limits": [["tokens", {"limit": "nonsense"}, 1]]}',
        "[" * 9999,
    ],
)
def test_texts_of_others_are_no_budgets(text: str) -> None:
    limiter = Limiter(MemoryStore())
    kept = budget().reserve(limiter, BODY)
    (place,) = [key for key in limiter._store._configs if ":budget:" in key]  # type: ignore[attr-defined]
    limiter._store.config(ConfigRequest(place, text), 1)  # type: ignore[attr-defined]
    assert carry_out(limiter, state_of_budget(limiter, "k")) is None
    kept.settle(Usage(1, 1))


def test_rows_of_others_are_left_out() -> None:
    limiter = Limiter(MemoryStore())
    budget().reserve(limiter, BODY)
    (place,) = [key for key in limiter._store._configs if ":budget:" in key]  # type: ignore[attr-defined]
    rows = '{"a": 5, "b": [1], "c": ["x", 1, 1, 1, [], {}], "d": [1, 1, 1, 1, ["x"], {}], "e": [1, 1, 1, 1, [], {"t": "x"}]}'
    text = f'{{"limits": [["tokens", {{"limit": "5/day"}}, 1]], "rows": {rows}, "said": [1, [["tokens", "x", 1, 1, 1], 7]]}}'
    limiter._store.config(ConfigRequest(place, text), 1)  # type: ignore[attr-defined]
    shown = state(limiter)
    assert (shown.rows, shown.said, len(shown.limits)) == ({}, [], 1)
