"""One suite for every store, and what the two Redis stores do when Redis does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis

from limitgate import (
    AsyncRedisStore,
    ConfigError,
    Decision,
    Limit,
    MemoryStore,
    RedisStore,
    StoreError,
    open_store,
    open_sync_store,
)
from limitgate.limits.bucket import bucket_of, buckets_of
from limitgate.limits.decision import decide
from limitgate.limits.plan import Charge, Plan, Reading, Verb
from limitgate.stores.redis import wire
from limitgate.stores.redis.plain import Script
from tests.support.cases import case
from tests.support.redis_server import RedisServer
from tests.support.threads import Began

PATIENT = 60.0
"""Seconds, where a test is not about time."""
SLACK = 3.0
"""Seconds that a busy machine may add to a deadline."""


# --- the stores, driven alike -----------------------------------------------------------------------------------------


class Door:
    """A sync store; ``crowd`` sends its plans from fifty threads."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def spend(self, plan: Plan, timeout: float = PATIENT) -> Reading:
        return self.store.spend(plan, timeout)

    def crowd(self, plans: Sequence[Plan]) -> list[Reading]:
        with ThreadPoolExecutor(50) as pool:
            return list(pool.map(self.spend, plans))

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self.store.close()


class AsyncDoor(Door):
    """An async store on an event loop of its own; ``crowd`` sends its plans from as many tasks."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.runner = asyncio.Runner()

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def idle(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    def spend(self, plan: Plan, timeout: float = PATIENT) -> Reading:
        return self.run(self.store.aspend(plan, timeout))

    def crowd(self, plans: Sequence[Plan]) -> list[Reading]:
        return self.run(self._crowd(plans))

    async def _crowd(self, plans: Sequence[Plan]) -> list[Reading]:
        return await asyncio.gather(*[self.store.aspend(plan, PATIENT) for plan in plans])

    def close(self) -> None:
        self.run(self.store.aclose())
        self.runner.close()


MEMORY: dict[str, Callable[[str], Door]] = {
    "memory": lambda _url: Door(MemoryStore()),
    "memory, async": lambda _url: AsyncDoor(MemoryStore()),
}
REDIS: dict[str, Callable[[str], Door]] = {
    "redis": lambda url: Door(RedisStore(url)),
    "redis, async": lambda url: AsyncDoor(AsyncRedisStore(url)),
}
STORES = {
    **{name: (kind, "redis_server") for name, kind in (MEMORY | REDIS).items()},
    **{name.replace("redis", "cluster"): (kind, "redis_cluster") for name, kind in REDIS.items()},
}


@pytest.fixture(params=STORES.values(), ids=STORES)
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """Every store, on the Redis or the cluster that all tests share."""
    kind, server = request.param
    with contextlib.closing(kind(request.getfixturevalue(server).url)) as door:
        yield door


@pytest.fixture(params=REDIS.values(), ids=REDIS)
def open_door(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Door]]:
    """Opens a Redis store of either kind on any URL."""
    with contextlib.ExitStack() as opened:
        yield lambda url: opened.enter_context(contextlib.closing(request.param(url)))


@pytest.fixture(scope="module")
def freezing_redis() -> Iterator[RedisServer]:
    """A Redis for tests that freeze it, and otherwise only need their own keys."""
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture
def freezing_door(open_door: Callable[[str], Door], freezing_redis: RedisServer) -> Door:
    """A Redis store of either kind on it."""
    return open_door(freezing_redis.url)


@pytest.fixture
def own_door(open_door: Callable[[str], Door], own_redis: RedisServer) -> Door:
    """A Redis store of either kind, on a Redis that the test may break."""
    return open_door(own_redis.url)


def a_plan(*limits: str, key: str | None = None, cost: int = 1, verb: Verb = "spend") -> Plan:
    key = uuid4().hex if key is None else key
    return Plan((Charge(key, bucket_of(*limits or ("5/day",)), cost, enforced=True, rule=None),), verb)


def joined(*plans: Plan) -> Plan:
    return Plan(tuple(charge for plan in plans for charge in plan.charges), plans[0].verb)


def hit(door: Door, *limits: str, **options: Any) -> Decision:
    plan = a_plan(*limits, **options)
    return decide(plan, door.spend(plan))


def found_again(door: Door) -> None:
    """Asks until the store has found Redis again."""
    deadline = time.monotonic() + PATIENT
    while True:
        try:
            door.spend(a_plan())
        except StoreError:
            assert time.monotonic() < deadline
            door.idle(0.02)
        else:
            return


def used(door: Door, key: str, *limits: str) -> list[int]:
    return [window.used for window in hit(door, *limits, key=key, verb="peek").windows]


def admitted(plans: Sequence[Plan], readings: Sequence[Reading]) -> int:
    return sum(decide(plan, reading).allowed for plan, reading in zip(plans, readings, strict=True))


# --- what every store does --------------------------------------------------------------------------------------------


def test_spend_until_refused(door: Door) -> None:
    """A bucket gives its burst and then refuses, saying how long to wait."""
    key = uuid4().hex
    decisions = [hit(door, "3/day", key=key) for _ in range(5)]
    assert [decision.allowed for decision in decisions] == [True, True, True, False, False]
    assert [decision.remaining for decision in decisions] == [2, 1, 0, 0, 0]
    assert 86400 / 3 - 60 < decisions[-1].retry_after <= 86400 / 3


def test_peek_charges_nothing(door: Door) -> None:
    """A peek reads the bucket and leaves it as it is."""
    key = uuid4().hex
    assert [used(door, key, "3/day") for _ in range(2)] == [[0], [0]]
    hit(door, "3/day", key=key, cost=2)
    assert [used(door, key, "3/day") for _ in range(2)] == [[2], [2]]


def test_a_look_under_another_count_leaves_the_debt_as_it_is(door: Door) -> None:
    """What is owed of 3 a day drains as slowly as before, though under the count that was looked at it takes 26 µs."""
    key = uuid4().hex
    hit(door, "3/day", key=key, cost=3)
    assert hit(door, "10000000000/day", key=key, verb="look").windows[0].used == 3
    assert used(door, key, "3/day") == [3]


def test_reset_fills_the_bucket(door: Door) -> None:
    """After a reset nothing is owed, and the reading of the reset says so."""
    key = uuid4().hex
    hit(door, "3/day", key=key, cost=3)
    assert hit(door, "3/day", key=key, verb="reset").remaining == 3
    assert [hit(door, "3/day", key=key).remaining for _ in range(3)] == [2, 1, 0]


def test_keys_are_independent(door: Door) -> None:
    """What one key spends, another does not owe."""
    first, second = uuid4().hex, uuid4().hex
    hit(door, "3/day", key=first, cost=3)
    assert used(door, second, "3/day") == [0]
    hit(door, "3/day", key=second, verb="reset")
    assert used(door, first, "3/day") == [3]


def test_a_cost_is_taken_whole(door: Door) -> None:
    """A cost passes as a whole or not at all; one of nothing always passes; one above the burst never does."""
    key = uuid4().hex
    allowed = [hit(door, "10/day", key=key, cost=cost).allowed for cost in (7, 4, 11, 10**30, 0, 3, 1, 0)]
    assert allowed == [True, False, False, False, True, True, False, True]
    assert used(door, key, "10/day") == [10]


def test_two_keys_or_none(door: Door) -> None:
    """A plan over two buckets charges both, or none if one refuses."""
    first, second = uuid4().hex, uuid4().hex
    plan = joined(a_plan("5/day", key=first), a_plan("3/day", key=second))
    readings = [door.spend(plan) for _ in range(5)]
    assert [decide(plan, reading).allowed for reading in readings] == [True, True, True, False, False]
    assert used(door, first, "5/day") == used(door, second, "3/day") == [3]


def test_a_shadow_never_blocks(door: Door) -> None:
    """A bucket that may not refuse is charged while it has room, and the others go on without it."""
    first, second = uuid4().hex, uuid4().hex
    plan = joined(a_plan("5/day", key=first), a_plan("3/day", key=second))
    plan = Plan((plan.charges[0], plan.charges[1]._replace(enforced=False)))
    decisions = [decide(plan, door.spend(plan)) for _ in range(6)]
    assert [decision.allowed for decision in decisions] == [True] * 5 + [False]
    assert [decision.shadow for decision in decisions] == [False] * 3 + [True] * 2 + [False]
    assert (used(door, first, "5/day"), used(door, second, "3/day")) == ([5], [3])


LIMITS_OF_A_SHADOW = (
    Limit("2/day", algorithm="fixed_window"),
    Limit("9 per 2 days", algorithm="sliding_log"),
    Limit("8 per 3 days"),
)
"""Each has a bucket of its own."""


@pytest.mark.parametrize("limits", [*itertools.permutations(LIMITS_OF_A_SHADOW)])
def test_a_shadow_is_charged_whole(door: Door, limits: tuple[Limit, ...]) -> None:
    """As if it were enforced: what one of its limits would refuse is charged to none of them, and to the other rules."""
    real, key = a_plan("9/day"), uuid4().hex
    shady = [Charge(f"{key}{each.suffix}", each, 1, enforced=False, rule="shady") for each in buckets_of(limits)]
    plan = Plan((*real.charges, *shady))
    decisions = [decide(plan, door.spend(plan)) for _ in range(5)]
    assert [decision.shadow for decision in decisions] == [False] * 2 + [True] * 3
    peek, deadline = Plan.peek(plan.charges), time.monotonic() + PATIENT
    while (now := [window.used for window in decide(peek, door.spend(peek)).windows]) != [5, 2, 2, 2]:
        assert time.monotonic() < deadline, now
        door.idle(0.02)  # until a cluster has given back what the others took


def test_some_windows_of_a_bucket(door: Door) -> None:
    """A plan may ask for some of a bucket's windows; the others stay as they are."""
    key = uuid4().hex
    hit(door, "5/day", "9 per 2 days", "8/day", key=key, cost=2)
    assert used(door, key, "9 per 2 days") == [2]
    hit(door, "9 per 2 days", key=key)
    hit(door, "5/day", key=key, verb="reset")
    assert used(door, key, "5/day", "9 per 2 days", "8/day", "7 per 3 days") == [0, 3, 2, 0]


def test_a_crowd_gets_exactly_the_limit(door: Door) -> None:
    """Of two hundred simultaneous requests exactly as many pass as the limit has."""
    plans = [a_plan("50/day", key="crowd" + uuid4().hex)] * 200
    assert admitted(plans, door.crowd(plans)) == 50


def test_a_crowd_is_charged_to_all_keys_or_none(door: Door) -> None:
    """Under simultaneous requests, too, two buckets are charged together."""
    first, second = uuid4().hex, uuid4().hex
    plans = [joined(a_plan("50/day", key=first), a_plan("30/day", key=second))] * 200
    assert admitted(plans, door.crowd(plans)) == 30
    assert used(door, first, "50/day") == used(door, second, "30/day") == [30]


def test_everybody_in_a_crowd_gets_their_own_answer(door: Door) -> None:
    """Replies are handed to those who asked, however many ask at once."""
    keys = [uuid4().hex for _ in range(200)]
    door.crowd([a_plan("1000/day", key=key, cost=number) for number, key in enumerate(keys)])
    peeks = [a_plan("1000/day", key=key, verb="peek") for key in keys]
    found = [decide(plan, reading).windows[0].used for plan, reading in zip(peeks, door.crowd(peeks), strict=True)]
    assert found == list(range(200))


# --- event loops, threads, connections --------------------------------------------------------------------------------


def visitors(server: RedisServer) -> int:
    """Connections to the server, but for the one that asks."""
    with server.client() as client:
        return len(client.client_list()) - 1


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true soon: a server notices only after a moment that somebody has left."""
    deadline = time.monotonic() + PATIENT
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_one_store_serves_loops_one_after_another(own_redis: RedisServer) -> None:
    """A store that was closed in one event loop goes on in the next."""
    store = AsyncRedisStore(own_redis.url)

    async def visit() -> Decision:
        reading = await store.aspend(plan := a_plan("50/day", key="loops"), PATIENT)
        await store.aclose()
        return decide(plan, reading)

    assert [asyncio.run(visit()).remaining for _ in range(20)] == list(range(49, 29, -1))
    assert eventually(lambda: visitors(own_redis) == 0)
    gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # asyncio's word on loops that end with connections open
def test_loops_that_have_ended_keep_no_connection(own_redis: RedisServer) -> None:
    """A store that is never closed goes on in the next event loop, and keeps no connection for those that have ended."""
    store = AsyncRedisStore(own_redis.url)
    plan = a_plan("50/day", key="loops")
    try:
        readings = [asyncio.run(store.aspend(plan, PATIENT)) for _ in range(20)]
        assert [decide(plan, reading).remaining for reading in readings] == list(range(49, 29, -1))
        gc.collect()
        assert eventually(lambda: visitors(own_redis) <= 1), f"{visitors(own_redis)} connections"
    finally:
        del store
        gc.collect()


def test_one_store_serves_loops_side_by_side(redis_server: RedisServer) -> None:
    """Event loops in several threads share a store."""
    store, key = AsyncRedisStore(redis_server.url), uuid4().hex

    async def visit() -> int:
        plans = [a_plan("50/day", key=key)] * 40
        readings = await asyncio.gather(*[store.aspend(plan, PATIENT) for plan in plans])
        await store.aclose()
        return admitted(plans, readings)

    with ThreadPoolExecutor(5) as pool:
        assert sum(pool.map(lambda _: asyncio.run(visit()), range(5))) == 50


def test_loops_that_were_closed_without_care_are_forgotten(own_redis: RedisServer) -> None:
    """Of loops whose asynchronous generators nobody closed, a store keeps no more than the last one and its connection."""
    store = AsyncRedisStore(own_redis.url)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(5):
            loop = asyncio.new_event_loop()
            loop.run_until_complete(store.aspend(a_plan(), PATIENT))
            loop.close()
            del loop
        gc.collect()
        assert eventually(lambda: visitors(own_redis) == 1)
        store._loops.clear()
        gc.collect()


def test_a_key_that_is_no_text_is_a_store_error(own_door: Door) -> None:
    """A key prefix that came from an environment variable of odd bytes fails each call, not the application."""
    with pytest.raises(StoreError, match="cannot be sent"):
        own_door.spend(a_plan(key="\udcff"))
    assert own_door.spend(a_plan()).admitted


def test_a_thousand_calls_at_once_share_one_connection(own_redis: RedisServer) -> None:
    """A thousand simultaneous calls are all decided, over a single connection."""
    plans = [a_plan("900/day", key="thousand")] * 1000
    with contextlib.closing(AsyncDoor(AsyncRedisStore(own_redis.url))) as door:
        assert admitted(plans, door.crowd(plans)) == 900
        assert visitors(own_redis) == 1


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("size", [100, 2000])
def test_whoever_goes_away_disturbs_nobody(freezing_redis: RedisServer, size: int, turns: int) -> None:
    """Of many simultaneous calls half are cancelled, at any stage; the rest get their own answers."""
    keys = [uuid4().hex for _ in range(size)]

    async def crowd(store: AsyncRedisStore) -> list[Any]:
        peeks = [a_plan("9999/day", "99999/hour", key=key, verb="peek") for key in keys]
        with freezing_redis.frozen():  # so that two thousand calls are more than the socket takes
            calls = [asyncio.create_task(store.aspend(plan, PATIENT)) for plan in peeks]
            for _ in range(turns):
                await asyncio.sleep(0)
            for call in calls[::2]:
                call.cancel()
            await asyncio.sleep(0)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [
            decide(plan, answer).windows[0].used if isinstance(answer, Reading) else answer
            for plan, answer in zip(peeks[1::2], answers[1::2], strict=True)
        ]

    with contextlib.closing(AsyncDoor(AsyncRedisStore(freezing_redis.url))) as door:
        door.crowd([a_plan("9999/day", key=key, cost=number) for number, key in enumerate(keys)])
        assert door.run(crowd(door.store)) == list(range(size))[1::2]


def test_a_closed_store_leaves_nothing(own_door: Door, own_redis: RedisServer) -> None:
    """After closing there is no connection, and nothing that complains about being left; the store can be used again."""
    for spent in (1, 2):
        own_door.crowd([a_plan()] * 20)
        assert visitors(own_redis) >= 1
        assert hit(own_door, "5/day", key="again").windows[0].used == spent
        if isinstance(own_door, AsyncDoor):
            own_door.run(own_door.store.aclose())
        else:
            own_door.close()
        assert eventually(lambda: visitors(own_redis) == 0)
        gc.collect()


def test_closing_a_store_that_begins_to_connect(own_redis: RedisServer) -> None:
    """What connects in the background is closed when it is through, whoever has asked for it."""
    store = RedisStore(own_redis.url)
    with ThreadPoolExecutor(1) as threads:
        with own_redis.frozen():
            call = threads.submit(store.spend, a_plan(), PATIENT)
            store.connect_soon()
            pool = store._servers._connections  # type: ignore[attr-defined]  # of one server

            def both_connect() -> bool:
                with pool._lock:  # a thread that wants a connection begins to connect under the same lock
                    return pool._wanted == 2

            assert eventually(both_connect)
            store.close()
        assert call.result().admitted
    assert eventually(lambda: visitors(own_redis) == 0 and not pool._connecting)


def test_closing_leaves_no_task(own_redis: RedisServer) -> None:
    """After aclose no task of the store is left, even if calls were still waiting; those fail."""
    store = AsyncRedisStore(own_redis.url)

    async def leave() -> tuple[list[object], set[asyncio.Task[Any]]]:
        await store.aspend(a_plan(), PATIENT)
        with own_redis.frozen():
            calls = [asyncio.create_task(store.aspend(a_plan(), PATIENT)) for _ in range(10)]
            await asyncio.sleep(0.01)
            await store.aclose()
            answers = await asyncio.gather(*calls, return_exceptions=True)
        return answers, asyncio.all_tasks() - {asyncio.current_task()}

    answers, tasks = asyncio.run(leave())
    assert [type(answer) for answer in answers] == [StoreError] * 10
    assert not tasks
    assert eventually(lambda: visitors(own_redis) == 0)


def test_an_idle_store_has_no_task(redis_server: RedisServer) -> None:
    """Between calls nothing of the store runs in the event loop, so a loop can end without leftovers."""
    store = AsyncRedisStore(redis_server.url)

    async def idle() -> set[asyncio.Task[Any]]:
        await store.aspend(a_plan(), PATIENT)
        await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await store.aclose()
        return tasks

    assert not asyncio.run(idle())


def test_a_forked_child_makes_its_own_connections(own_redis: RedisServer) -> None:
    """After a fork, parent and child share the buckets but no connection."""
    began, door = Began(), Door(RedisStore(own_redis.url))
    hit(door, "50/day", key="family")
    for thread in began.running():
        thread.join(PATIENT)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os._exit(len([None for _ in range(20) if hit(door, "50/day", key="family").allowed]))
        os._exit(99)
    allowed = [hit(door, "50/day", key="family").allowed for _ in range(20)]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == sum(allowed) == 20
    assert used(door, "family", "50/day") == [41]
    door.close()


# --- when Redis does not answer ---------------------------------------------------------------------------------------


def failure(door: Door, timeout: float, plan: Plan | None = None) -> StoreError:
    """The error of a call, which comes within its timeout."""
    start = time.monotonic()
    with pytest.raises(StoreError) as caught:
        door.spend(plan or a_plan(), timeout)
    assert time.monotonic() - start < timeout + SLACK
    return caught.value


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_the_script_is_sent_again_when_redis_forgot_it(own_door: Door, own_redis: RedisServer) -> None:
    """A flush of the script cache goes unnoticed."""
    with own_redis.client() as client:
        for remaining in (4, 3, 2):
            client.script_flush()
            assert hit(own_door, "5/day", key="flushed").remaining == remaining


def test_many_calls_meet_a_flushed_script_at_once(own_door: Door, own_redis: RedisServer) -> None:
    """A flush of the script cache goes unnoticed by a crowd, too, and nobody is charged twice."""
    own_door.crowd([a_plan()] * 20)
    with own_redis.client() as client:
        client.script_flush()
    plans = [a_plan("50/day", key="flushed")] * 200
    assert admitted(plans, own_door.crowd(plans)) == 50


def test_a_connection_closed_by_the_server_is_replaced(own_door: Door, own_redis: RedisServer) -> None:
    """When the server has closed an idle connection, the next call makes another and succeeds."""
    with own_redis.client() as client:
        for remaining in (4, 3, 2):
            assert hit(own_door, "5/day", key="killed").remaining == remaining
            assert client.client_kill_filter(_type="normal", skipme=True) >= 1


def test_connections_closed_under_load_cost_errors_only(own_door: Door, own_redis: RedisServer) -> None:
    """While the server closes connections again and again, every call gets an answer or a store error, none too much."""
    plan, done = a_plan("2000/day", key="hunted"), threading.Event()

    def hunt() -> None:
        with own_redis.client() as client:
            while not done.wait(0.05):
                client.client_kill_filter(_type="normal", skipme=True)

    with ThreadPoolExecutor(1) as pool:
        hunter = pool.submit(hunt)
        answers = [answer for _ in range(20) for answer in attempts(own_door, [plan] * 200)]
        done.set()
        hunter.result()
    deadline = time.monotonic() + PATIENT
    while not own_door.store.healthy and time.monotonic() < deadline:
        own_door.idle(0.01)
    allowed = [answer for answer in answers if isinstance(answer, Reading) and decide(plan, answer).allowed]
    assert all(isinstance(answer, Reading | StoreError) for answer in answers)
    assert 0 < len(allowed) <= min(2000, used(own_door, "hunted", "2000/day")[0])


def attempts(door: Door, plans: Sequence[Plan]) -> list[Any]:
    """What simultaneous calls come to: readings and errors."""
    if isinstance(door, AsyncDoor):
        return door.run(_gathered([door.store.aspend(plan, PATIENT) for plan in plans]))

    def attempt(plan: Plan) -> Any:
        try:
            return door.spend(plan)
        except Exception as error:  # noqa: BLE001 - to be looked at by the test
            return error

    with ThreadPoolExecutor(50) as pool:
        return list(pool.map(attempt, plans))


def test_a_connection_closed_while_the_loop_runs_is_replaced(own_redis: RedisServer) -> None:
    """In a running event loop, too, a connection that the server has closed fails no call."""
    store = AsyncRedisStore(own_redis.url)

    def kill() -> None:
        with own_redis.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)

    async def visit() -> list[int]:
        remaining = []
        for _ in range(4):
            plan = a_plan("5/day", key="killed")
            remaining.append(decide(plan, await store.aspend(plan, PATIENT)).remaining)
            await asyncio.to_thread(kill)
        await store.aclose()
        return remaining

    assert asyncio.run(visit()) == [4, 3, 2, 1]


def test_a_restarted_server_is_found_again(own_door: Door, own_redis: RedisServer) -> None:
    """While the server is gone every call fails fast, and the first one after its return is decided."""
    own_door.spend(a_plan())
    own_redis.kill()
    assert [failure(own_door, 0.5).fault for _ in range(3)] == ["connection"] * 3
    own_redis.start()
    assert hit(own_door, "5/day").remaining == 4


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "not yet connected"])
@pytest.mark.parametrize("timeout", [0.05, 0.2])
def test_a_frozen_server_is_a_timeout(
    freezing_door: Door, freezing_redis: RedisServer, timeout: float, *, connected: bool
) -> None:
    """A server that does not answer costs a caller the timeout and no more; once it answers, so does the store."""
    if connected:
        freezing_door.spend(a_plan())
    with freezing_redis.frozen():
        for _ in range(3):
            start = time.monotonic()
            assert failure(freezing_door, timeout).fault == "timeout"
            assert time.monotonic() - start >= timeout - 0.01
    assert hit(freezing_door, "5/day").remaining == 4


def test_a_server_frozen_for_long_is_found_again(freezing_door: Door, freezing_redis: RedisServer) -> None:
    """Calls fail for as long as the server is frozen, and succeed soon after it is back."""
    freezing_door.spend(a_plan())
    with freezing_redis.frozen():
        faults = [failure(freezing_door, 0.1).fault for _ in range(7)]
    assert set(faults) <= {"timeout", "connection"}
    found_again(freezing_door)
    assert hit(freezing_door, "5/day").remaining == 4


def test_a_crowd_before_a_frozen_server_fails_in_time(freezing_door: Door, freezing_redis: RedisServer) -> None:
    """A hundred simultaneous callers of a frozen server all get their error in time."""
    freezing_door.spend(a_plan())

    def attempt() -> str:
        if isinstance(freezing_door, AsyncDoor):
            calls = [freezing_door.store.aspend(a_plan(), 0.3) for _ in range(100)]
            return {error.fault for error in freezing_door.run(_gathered(calls))}
        with ThreadPoolExecutor(100) as pool:
            return {error.fault for error in pool.map(lambda _: failure(freezing_door, 0.3), range(100))}

    with freezing_redis.frozen():
        start = time.monotonic()
        assert attempt() == {"timeout"}
        assert time.monotonic() - start < 0.3 + SLACK
    assert hit(freezing_door, "5/day").remaining == 4


async def _gathered(calls: list[Any]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


def refusing_urls() -> dict[str, str]:
    return {"no socket": "unix:///nonexistent/redis.sock", "no listener": f"redis://127.0.0.1:{free_port()}/0"}


@pytest.mark.parametrize("place", ["no socket", "no listener"])
def test_a_refused_connection_is_an_error_at_once(open_door: Callable[[str], Door], place: str) -> None:
    """Where nobody listens, a call does not wait for its timeout."""
    door = open_door(refusing_urls()[place])
    start = time.monotonic()
    assert [failure(door, PATIENT).fault for _ in range(3)] == ["connection"] * 3
    assert time.monotonic() - start < PATIENT / 2


def test_a_crowd_is_refused_at_once(open_door: Callable[[str], Door]) -> None:
    """Many simultaneous callers of a server that is not there all fail fast, each with the store's error."""
    door = open_door("unix:///nonexistent/redis.sock")
    start = time.monotonic()
    with pytest.raises(StoreError):
        door.crowd([a_plan()] * 200)
    assert time.monotonic() - start < PATIENT / 2


def test_a_wrong_password_is_a_store_error(open_door: Callable[[str], Door], own_redis: RedisServer) -> None:
    """A wrong password fails at once without being told; the right one works."""
    with own_redis.client() as client:
        client.config_set("requirepass", "secret")
    error = failure(open_door(f"{own_redis.url}?password=mistaken"), PATIENT)
    assert error.fault in {"connection", "reply"}
    assert "mistaken" not in str(error)
    assert hit(open_door(f"{own_redis.url}?password=secret"), "5/day").remaining == 4


def test_a_missing_password_is_a_store_error(own_door: Door, own_redis: RedisServer) -> None:
    """A server that wants a password, and gets none, is a store error on every call, and none once it wants none."""
    with own_redis.client() as client:
        client.config_set("requirepass", "secret")
        assert {failure(own_door, PATIENT).fault for _ in range(3)} <= {"connection", "reply"}
        client.execute_command("AUTH", "secret")
        client.config_set("requirepass", "")
    assert hit(own_door, "5/day").remaining == 4


REPLIES = {
    "text": "return 'OK'",
    "nothing": "return false",
    "a number": "return 1",
    "too short": "return {1, 0, 0}",
    "too long": "return {1, 0, 0, 0, 0, 0, 0}",
    "text inside": "return {1, 0, 0, 'x', 0}",
    "a list inside": "return {1, 0, 0, {}, 0}",
    "an error": "return redis.error_reply('ERR no')",
    "wrong type": "return redis.error_reply('WRONGTYPE no')",
    "read only": "return redis.error_reply('READONLY no')",
    "not permitted": "return redis.error_reply('NOPERM no')",
    "no password": "return redis.error_reply('NOAUTH no')",
    "loading": "return redis.error_reply('LOADING no')",
    "no master": "return redis.error_reply('MASTERDOWN no')",
    "busy": "return redis.error_reply('BUSY no')",
    "cluster": "return redis.error_reply('MOVED 1 127.0.0.1:1')",
    "script error": "return nothing.here",
}


@pytest.mark.parametrize("script", REPLIES.values(), ids=REPLIES)
def test_a_reply_that_is_none_of_ours_is_a_store_error(
    open_door: Callable[[str], Door], redis_server: RedisServer, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error or a reply of another shape is a store error, and the next call is decided on a fresh connection."""
    door = open_door(redis_server.url)
    door.spend(a_plan())
    with monkeypatch.context() as patched:
        patched.setattr(wire, "SPEND", Script.of(script))
        assert failure(door, PATIENT).fault in {"reply", "connection"}
    assert hit(door, "5/day").remaining == 4


def test_the_shape_of_a_reply_has_a_fault_of_its_own(
    open_door: Callable[[str], Door], redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply of another shape is not mistaken for a lost connection."""
    monkeypatch.setattr(wire, "SPEND", Script.of("return {1, 2}"))
    assert failure(open_door(redis_server.url), PATIENT).fault == "reply"


def test_out_of_memory_has_a_fault_of_its_own(own_door: Door, own_redis: RedisServer) -> None:
    """A full Redis is told from one that is gone, charges nothing, and works again when it has room."""
    hit(own_door, "5/day", key="full")
    with own_redis.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
        assert [failure(own_door, PATIENT, a_plan(key="full")).fault for _ in range(3)] == ["oom"] * 3
        client.config_set("maxmemory", "0")
    assert hit(own_door, "5/day", key="full").remaining == 3


def test_a_full_redis_still_refuses_the_exhausted(own_door: Door, own_redis: RedisServer) -> None:
    """A refusal writes nothing, so it needs no memory."""
    hit(own_door, "1/day", key="exhausted")
    with own_redis.client() as client:
        client.config_set("maxmemory", "1")
        assert not hit(own_door, "1/day", key="exhausted").allowed


def test_in_a_full_redis_a_crowd_fails_only_where_something_was_taken(own_redis: RedisServer) -> None:
    """Of requests that share a call without memory, those that would take something fail, the others are answered."""

    async def visit() -> list[object]:
        store = AsyncRedisStore(own_redis.url)
        await store.aspend(a_plan("1/day", key="exhausted"), PATIENT)
        with own_redis.client() as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "1")
        plans = [a_plan(key="new"), a_plan("1/day", key="exhausted"), a_plan(key="new", verb="peek"), a_plan(key="other")]
        outcomes = await asyncio.gather(*[store.aspend(plan, PATIENT) for plan in plans], return_exceptions=True)
        await store.aclose()
        return [outcome.fault if isinstance(outcome, StoreError) else outcome.admitted for outcome in outcomes]

    assert asyncio.run(visit()) == ["oom", False, True, "oom"]
    with own_redis.client() as client:
        assert len(client.keys()) == 1


def test_a_caller_does_not_wait_for_a_slow_connection_twice(own_door: Door, own_redis: RedisServer) -> None:
    """Connecting goes on past the deadline of the caller who began it, so a slow server is reached in the end."""
    with own_redis.frozen():
        failure(own_door, 0.05)
        thaw = threading.Timer(0.2, lambda: own_redis.process.send_signal(signal.SIGCONT))
        thaw.start()
        assert hit(own_door, "5/day").remaining == 4
        thaw.join()
    assert visitors(own_redis) == 1


class Tunnel:
    """Passes TCP connections on to a server's unix socket, until it is told to swallow what goes through those it has."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._swallowed: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def swallow(self) -> None:
        """Let nothing more through the present connections, without closing them; new ones are passed on."""
        self._swallowed.update(self._ends)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()  # first, since it may be about to keep sockets
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.socket(socket.AF_UNIX)
                self._ends += [near, far]
                far.connect(str(self._target))
                for source, sink in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._step_down, args=(source, sink)))
                    self._threads[-1].start()

    def _step_down(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source not in self._swallowed:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def tunnel(redis_server: RedisServer) -> Iterator[Tunnel]:
    with contextlib.closing(Tunnel(redis_server.socket)) as tunnel:
        yield tunnel


def test_a_connection_that_leads_nowhere_is_given_up(open_door: Callable[[str], Door], tunnel: Tunnel) -> None:
    """When the network swallows a connection without closing it, calls time out, and soon another one is used."""
    door, key = open_door(tunnel.url), uuid4().hex
    assert hit(door, "5/day", key=key).remaining == 4
    tunnel.swallow()
    start, decision = time.monotonic(), None
    assert failure(door, 0.1).fault == "timeout"
    while decision is None:
        assert time.monotonic() - start < 2 + SLACK
        with contextlib.suppress(StoreError):
            plan = a_plan("5/day", key=key)
            decision = decide(plan, door.spend(plan, 0.2))
    assert decision.remaining == 3


# --- store URLs -------------------------------------------------------------------------------------------------------

OPENERS = [open_store, open_sync_store]
URLS = {
    "memory://": (MemoryStore, MemoryStore),
    "redis://localhost:6379/0": (AsyncRedisStore, RedisStore),
    "rediss://user:secret@localhost:6379/0": (AsyncRedisStore, RedisStore),
    "unix:///run/redis.sock?db=2": (AsyncRedisStore, RedisStore),
}
BAD_URLS = [
    "",
    "memory",
    "redis",
    "localhost:6379",
    "http://localhost",
    "memory:/",
    "memory://here",
    "REDISS//localhost",
    "redis:/localhost",
    "redis://localhost:port/0",
    "redis://localhost:99999999/0",
    "redis://[::1/0",
    "redis://localhost?socket_timeout=soon",
    "redis://localhost?no_such_option=1",
    *[
        "REDIS://localhost",
        "redis://",
        "redis:///0",
        "redis://:6379/0",
        "redis://localhost:/0",
        "redis://localhost:0/0",
        "redis://localhost:-1",
        "redis://::1/0",
        "redis://localhost/zero",
        "redis://localhost/-1",
        "redis://localhost/0/1",
        "redis://localhost/0x1",
        "redis://localhost?db=zero",
        "redis://localhost/1?db=2",
        "redis://${HOST}:6379/0",
        "redis://<host>/0",
        "redis://h1,h2/0",
        "redis://secret@localhost/0",
        "redis://:pa/ss@localhost",
        "redis://:pa#ss@localhost",
        "redis://:pa?ss@localhost",
        "redis://u:12/34@localhost",
        "redis://u:12?34=5@localhost",
        "redis://localhost?bd=1",
        "redis://localhost?ssl_ca_certs=/x",
        "redis://localhost?retry=3",
        "rediss://localhost?ssl_ca_certs=/nowhere.pem",
        "rediss://localhost?ssl_cert_reqs=maybe",
        "redis://localhost?protocol=9",
        "unix://",
        "unix:///",
        "unix://run/redis.sock",
        "unix:///run/redis.sock?db=x",
    ],
    "redis://localhost/0 ",
    "redis://localhost/0\n",
    "redis:// localhost",
]


@pytest.mark.parametrize("url", URLS)
def test_a_url_opens_its_store(url: str) -> None:
    """A URL names the kind of store; nothing is connected, and no password is shown."""
    for opener, kind in zip(OPENERS, URLS[url], strict=True):
        store = opener(url)
        assert type(store) is kind
        assert "secret" not in repr(store)


@pytest.mark.parametrize("opener", OPENERS)
def test_a_mistake_in_a_url_is_a_config_error(opener: Callable[[str], Any]) -> None:
    """A URL that names no store is refused when it is opened, not at the first request, and it is said what was expected."""
    for url in BAD_URLS:
        with case(url), pytest.raises(ConfigError, match=r"store.* expected") as caught:
            opener(url)
        assert "12" not in str(caught.value)
        assert "34" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://localhost/zero", "not a number"),
        ("redis:///0", "no host"),
        ("redis://localhost:99999/0", "the port is out of range"),
        ("redis://localhost?timout=1", "'timout', did you mean 'socket_timeout'[?]"),
        ("redis://localhost?timout=1", "LimitGate's option timeout"),
        ("redis://localhost?ssl_ca_certs=/x", "expected rediss://"),
        ("unix:///run/redis.sock?socket_keepalive=true", "is for TCP"),
        ("redis://h1,h2/0", r"redis\+cluster://"),
        ("redis://secret@localhost/0", "redis://:password@"),
        ("redis://:pa/ss@localhost/0", "/ is %2F"),
        ("unix://run/redis.sock", "unix:///run/redis.sock"),
        ("redis://${HOST}:6379/0", "unexpanded variable"),
    ],
)
def test_a_mistake_in_a_url_is_told_with_its_cure(url: str, words: str) -> None:
    """What is wrong with a URL is said in words, not what redis-py would have made of it."""
    with pytest.raises(ConfigError, match=words):
        open_sync_store(url)


NO_EFFECT = ["health_check_interval=9", "socket_timeout=5", "socket_connect_timeout=5", "retry_on_timeout=true", "retry=x"]
NO_EFFECT += ["decode_responses=true", "max_connections=9", "socket_read_size=9", "timeout=1", "retry_on_error=x"]
NO_EFFECT += ["legacy_responses=no", "socket_keepalive_options=x", "socket_type=1", "decode_responses="]
NO_EFFECT += ["client_name=me&socket_timeout=soon"]


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("url", ["redis://h", "redis+cluster://h1,h2", "redis+sentinel://h1/m", "unix:///s.sock"])
def test_an_option_that_would_do_nothing(opener: Callable[[str], Any], url: str) -> None:
    """An option of redis-py that does not fit is refused with what there is instead, not taken without a word."""
    for option in NO_EFFECT:
        name = option.rpartition("&")[2].partition("=")[0]
        expected = f"store: option '{name}' has no effect, expected a URL without it: .+"
        with case(option), pytest.raises(ConfigError, match=expected):
            opener(f"{url}?{option}")


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://localhost/",
        "redis://localhost:6379/15",
        "redis://u:p@s@localhost/0",
        "redis://:@localhost/0",
        "redis://[::1]:6379/0",
        "redis://h?password=p@ss&username=u",
        "redis://h/1?db=1",
        "redis://h_1.example/0?",
        "redis://h?encoding=latin-1&client_name=me&socket_keepalive=false",
        "rediss://h?ssl_cert_reqs=none",
        "unix://:p@/s.sock",
    ],
)
def test_a_url_without_a_mistake(opener: Callable[[str], Any], url: str) -> None:
    """What redis-py understands as it was meant is a store."""
    assert opener(url)


@pytest.mark.parametrize("opener", OPENERS)
def test_a_config_error_tells_no_password(opener: Callable[[str], Any]) -> None:
    """A mistake in a URL is reported without its password."""
    with pytest.raises(ConfigError) as caught:
        opener("redis://user:s3cret@localhost:port/0")
    assert "s3cret" not in str(caught.value)


def test_redis_py_is_not_needed_to_read_the_errors() -> None:
    """No error of redis-py is part of what a store raises."""
    assert not issubclass(StoreError, redis.RedisError)


def test_many_failures_at_once_leave_no_dead_end(tmp_path: Path) -> None:
    """However many calls find no Redis at once and come again, the store is reached soon after there is one."""
    folder = tmp_path / "later"

    async def visit() -> bool:
        store = AsyncRedisStore(f"unix://{folder}/redis.sock")
        plan = a_plan("9/day", key="later")

        async def insist() -> None:
            for _ in range(5):
                with contextlib.suppress(StoreError):
                    await store.aspend(plan, 0.05)

        await asyncio.gather(*[insist() for _ in range(8)])
        later = RedisServer()
        folder.symlink_to(later.folder)
        try:
            for _ in range(200):
                if store.healthy:
                    break
                await asyncio.sleep(0.01)
            return (await store.aspend(plan, PATIENT)).admitted
        finally:
            await store.aclose()
            later.stop()

    assert asyncio.run(visit())


def test_one_call_too_many_fails_alone(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too many calls are waiting, the one more is refused and those that wait get their answers."""
    monkeypatch.setattr("limitgate.stores.redis.aio.batcher.MAX_QUEUED", 20)
    plan = a_plan("999/day", key=uuid4().hex)

    async def visit() -> list[bool]:
        store = AsyncRedisStore(redis_server.url)
        await store.aspend(plan, PATIENT)
        answers = await asyncio.gather(*[store.aspend(plan, PATIENT) for _ in range(21)], return_exceptions=True)
        await store.aclose()
        return [isinstance(answer, StoreError) for answer in answers]

    assert asyncio.run(visit()) == [False] * 20 + [True]
