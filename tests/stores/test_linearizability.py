"""What many do at the same time can be explained by doing it one after the other, each between its beginning and its end.

Histories of threads and tasks are recorded, then an order is searched (Wing & Gong, Testing and Verifying Concurrent Objects,
1993) in which a store that knows no concurrency says the same to everybody. The clock narrows the search: nobody can have
been served before somebody who was told an earlier time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from limitgate import AsyncRedisStore, Limit, MemoryStore, RedisStore
from limitgate.limits.bucket import buckets_of
from limitgate.limits.decision import Decision, decide
from limitgate.limits.limit import NAMES
from limitgate.limits.plan import Charge, Plan, Reading, Verb, read
from tests.support.clusters import AsyncPlainStore, PlainMemoryStore, PlainStore
from tests.support.redis_server import RedisServer

PATIENT = 10
OTHERS = [name for name in NAMES if name not in ("gcra", "token_bucket", "leaky_bucket", "concurrency")]

Told = tuple[Any, ...]
Buckets = Mapping[str, tuple[int, Sequence[Any]]]


class Call(NamedTuple):
    """What somebody asked, when, and what they were told."""

    began: float
    ended: float
    plan: Plan
    reading: Reading

    @property
    def told(self) -> Told:
        return told(decide(self.plan, self.reading))


def told(decision: Decision) -> Told:
    """What can be told apart about a decision."""
    numbers = decision.remaining, decision.retry_after, decision.reset_after, decision.granted, decision.delay
    return decision.allowed, *numbers, decision.windows


def a_plan(rnd: random.Random, name: str, algorithm: str) -> Plan:
    """A plan over some of three buckets. Some requests may wait for their turn, where a limit lets them."""
    limits = Limit("50/second burst 5"), Limit("40/minute"), _limit(algorithm)
    verb: Verb = rnd.choice(("spend", "spend", "spend", "peek", "reset"))
    wait_us = rnd.choice((0, 0, 200_000)) if verb == "spend" else 0
    charges = [
        Charge(
            f"{name}{key}{bucket.suffix}",
            bucket,
            rnd.choice((1, 1, 1, 2, 3)),
            rnd.random() < 0.9,
            None,
            max_wait_us=wait_us if bucket.algorithm.CAN_WAIT else 0,
        )
        for key in rnd.sample(("a", "b", "c"), rnd.choice((1, 1, 2)))
        for bucket in buckets_of(tuple(rnd.sample(limits, rnd.choice((1, 2, 3)))))
    ]
    return Plan(tuple(charges), verb)


def _limit(algorithm: str) -> Limit:
    return Limit("20/second", **{"warm_up": "1s"} if algorithm == "warm_up" else {"algorithm": algorithm})


def one_by_one(buckets: Buckets, plan: Plan, now: int) -> tuple[Reading, Buckets]:
    """What a store says that serves one after the other, and what it holds then."""
    after, states = dict(buckets), []
    for charge in plan.charges:
        bucket, kind = charge.bucket, charge.bucket.algorithm
        known = dict(zip(bucket.ids, kind.initial(now, bucket)))
        for limit, window in zip(bucket.limits, bucket.ids):
            found = after.get(f"{charge.key}/{window}")
            if found is not None and plan.verb != "reset":
                single = type(bucket)((limit,), (window,))
                (known[window],) = kind.advance(found[1], now - found[0], single, now)
        states.append([known[window] for window in bucket.ids])
    reading = read(plan.charges, now, states)
    for charge, before, then in reading.buckets:
        left = then if plan.verb == "spend" and reading.admitted and then is not None else before
        for window, state in zip(charge.bucket.ids, left):
            after[f"{charge.key}/{window}"] = now, [state]
    return reading, after


def explained(calls: list[Call]) -> bool:
    """Whether there is an order in which everybody would have been told the same."""
    calls = sorted(calls, key=lambda call: (call.reading.now, call.ended, call.began))
    stack: list[tuple[Buckets, tuple[int, ...]]] = [({}, tuple(range(len(calls))))]
    tried: set[tuple[str, tuple[int, ...]]] = set()
    for _ in range(500 * len(calls)):
        if not stack:
            return False
        buckets, left = stack.pop()
        if not left:
            return True
        here = repr(sorted(buckets.items())), left  # whoever has come here in another order goes on from here in the same ways
        if here in tried:
            continue
        tried.add(here)
        earliest, first_end = calls[left[0]].reading.now, min(calls[place].ended for place in left)
        nexts = [place for place in left if calls[place].reading.now == earliest and calls[place].began <= first_end]
        for place in reversed(nexts):
            reading, after = one_by_one(buckets, calls[place].plan, earliest)
            if told(decide(calls[place].plan, reading)) == calls[place].told:
                stack.append((after, tuple([other for other in left if other != place])))
    raise AssertionError("the search takes too long, so the test says nothing")


def by_threads(store: Any, algorithm: str, seed: int) -> list[Call]:
    """What eight threads do at the same time."""
    name = uuid4().hex

    def work(number: int) -> list[Call]:
        rnd, calls = random.Random(seed * 100 + number), []
        for _ in range(15):
            plan, began = a_plan(rnd, name, algorithm), time.monotonic()
            reading = store.spend(plan, PATIENT)
            calls.append(Call(began, time.monotonic(), plan, reading))
        return calls

    with ThreadPoolExecutor(8) as pool:
        return [call for calls in pool.map(work, range(8)) for call in calls]


def by_tasks(open_store: Callable[[], Any], algorithm: str, seed: int) -> list[Call]:
    """What thirty tasks of an event loop do at the same time."""
    name = uuid4().hex

    async def work(store: Any, number: int) -> list[Call]:
        rnd, calls = random.Random(seed * 100 + number), []
        for _ in range(4):
            plan, began = a_plan(rnd, name, algorithm), time.monotonic()
            reading = await store.aspend(plan, PATIENT)
            calls.append(Call(began, time.monotonic(), plan, reading))
            await asyncio.sleep(rnd.choice((0, 0, 0.001)))
        return calls

    async def crowd() -> list[Call]:
        store = open_store()
        try:
            return [call for calls in await asyncio.gather(*[work(store, number) for number in range(30)]) for call in calls]
        finally:
            await store.aclose()

    return asyncio.run(crowd())


@pytest.mark.parametrize("algorithm", OTHERS)
@pytest.mark.parametrize("kind", [RedisStore, PlainStore])
def test_threads_and_redis(redis_server: RedisServer, kind: type[RedisStore], algorithm: str) -> None:
    """Threads that share calls of the script are served one after the other, also by the scripts for plain plans."""
    with contextlib.closing(kind(redis_server.url, local_refusals=False)) as store:
        assert explained(by_threads(store, algorithm, 0))


@pytest.mark.parametrize("algorithm", OTHERS)
@pytest.mark.parametrize("kind", [MemoryStore, PlainMemoryStore])
def test_threads_and_memory(kind: type[MemoryStore], algorithm: str) -> None:
    """So they are by the store in this process."""
    assert explained(by_threads(kind(), algorithm, 1))


@pytest.mark.parametrize("algorithm", OTHERS)
@pytest.mark.parametrize("kind", [AsyncRedisStore, AsyncPlainStore])
def test_tasks_and_redis(redis_server: RedisServer, kind: type[AsyncRedisStore], algorithm: str) -> None:
    """So are tasks, though many are told the same time."""
    assert explained(by_tasks(lambda: kind(redis_server.url, local_refusals=False), algorithm, 0))


def test_what_cannot_be_explained_is_found() -> None:
    """The search is worth something: with one answer changed, or one swapped, there is no such order."""
    calls = by_threads(MemoryStore(), OTHERS[0], 5)
    assert explained(calls)
    admitted = next(place for place, call in enumerate(calls) if call.plan.verb == "spend" and call.reading.admitted)
    wrong = calls[admitted]
    more = [
        [(0, state[1]) if isinstance(state, tuple) else state + 1 for state in each.before] for each in wrong.reading.buckets
    ]
    calls[admitted] = wrong._replace(reading=read(wrong.plan.charges, wrong.reading.now, more))
    assert calls[admitted].told != wrong.told
    assert not explained(calls)
