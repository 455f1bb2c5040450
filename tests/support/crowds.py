"""Requests to an async store, many at a time and in turns of the test's choosing."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from limitgate import AsyncRedisStore, StoreError
from limitgate.limits.bucket import bucket_of
from limitgate.limits.plan import Adjustment, Charge, Plan, Reading
from tests.support.proxy import PATIENT


def store_at(url: str) -> Any:
    """A store that asks Redis every time, closed at the end of an ``async with``."""
    return contextlib.aclosing(AsyncRedisStore(url, local_refusals=False))


def a_plan(*limits: str, key: str | None = None, cost: int = 1, verb: Any = "spend") -> Plan:
    bucket = bucket_of(*limits or ("50/day",))
    return Plan((Charge(uuid4().hex if key is None else key, bucket, cost, enforced=True, rule=None),), verb)


def giving_back(key: str) -> Plan:
    """What gives two requests back."""
    bucket = bucket_of("50/day")
    lease = Adjustment(0, 0, [2 * bucket.weights[0]], [0])
    return Plan((Charge(key, bucket, 0, enforced=False, rule=None, adjustment=lease),), "adjust")


def begin(store: Any, *plans: Plan, timeout: float = PATIENT) -> list[asyncio.Task[Reading]]:
    """Requests that arrive in the next turn of the event loop."""
    return [asyncio.create_task(store.aspend(plan, timeout)) for plan in plans]


async def turns(store: Any, *crowds: Sequence[Plan]) -> list[asyncio.Task[Reading]]:
    """Requests that arrive in several turns, so in several calls, all of them sent when this returns."""
    requests = []
    for crowd in (*crowds, []):
        requests += begin(store, *crowd)
        await asyncio.sleep(0)
    return requests


async def ends(requests: Sequence[asyncio.Task[Reading]]) -> list[Any]:
    """How requests end: admitted or not, the fault, or "cancelled"."""
    answers = await asyncio.gather(*requests, return_exceptions=True)
    return [_end(answer) for answer in answers]


def _end(answer: Any) -> Any:
    if isinstance(answer, Reading):
        return answer.admitted
    if isinstance(answer, StoreError):
        return answer.fault
    assert isinstance(answer, asyncio.CancelledError), answer
    return "cancelled"


async def ask(store: Any, *plans: Plan, timeout: float = PATIENT) -> list[Any]:
    """How requests end that arrive at once."""
    return await ends(begin(store, *plans, timeout=timeout))


async def used(store: Any, key: str, limit: str = "50/day") -> int:
    """Requests that a key owes, a begun one counted whole."""
    plan = a_plan(limit, key=key, verb="peek")
    return math.ceil((await store.aspend(plan, PATIENT)).buckets[0].before[0] / plan.charges[0].bucket.weights[0])
