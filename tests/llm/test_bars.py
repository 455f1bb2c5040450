"""What budgets promise, over minutes in virtual time: how much of a limit is used, how much more, and whose turn it is."""

from __future__ import annotations

import asyncio
import random
import statistics

import pytest

from limitgate import AsyncLimiter, Limit
from limitgate.llm import Budget, Usage
from tests.llm.virtual_time import BEGIN, Loop, Store, process, run, virtual_time
from tests.support.provider import Provider

TOKENS = 20_000
PROCESSES, TASKS = 8, 40


def used(counting: str, seconds: float, offset: float = 0.0, *, states: bool = True) -> list[tuple[int, int, int]]:
    """Tokens that a provider has admitted, requests, and those that it refused, at the end of each minute.

    Answers cost 1 to 30 times the input.
    """
    dice = random.Random(1)
    with virtual_time() as loop:
        loop.now = BEGIN + offset
        provider = Provider(
            limits={"tokens": (TOKENS, 60.0)},
            counting=counting,
            clock=loop.time,
            output=lambda _: 10 * dice.randint(1, 30),
            latency=lambda status: dice.uniform(0.2, 2.0) if status == 200 else 0.0,
        )
        if not states:
            provider._fields = lambda *_: {}  # type: ignore[method-assign]
        store, began = Store(loop), loop.now
        plans = [Budget(tokens=f"{TOKENS}/minute") for _ in range(PROCESSES)]
        run(loop, *[process(loop, store, plan, provider, (TASKS // PROCESSES, seconds)) for plan in plans])
    minutes = [began + end for end in range(60, int(seconds) + 1, 60)]
    until = [[call for call in provider.calls if call.at < end] for end in minutes]
    return [
        (sum(call.input + call.output for call in calls), len(calls), sum(call.status == 429 for call in calls))
        for calls in until
    ]


def is_kept(minute: tuple[int, int, int], could: int) -> bool:
    tokens, requests, refused = minute
    return 0.95 * could <= tokens <= could and refused <= 0.01 * requests


@pytest.mark.parametrize(
    ("counting", "could", "states"),
    [
        ("bucket", 2 * TOKENS, True),
        ("bucket", 2 * TOKENS, False),
        ("fixed", TOKENS, True),
        ("fixed", TOKENS, False),
        ("sliding", TOKENS, True),
    ],
)
def test_a_minute_uses_the_limit_however_the_provider_counts(counting: str, could: int, *, states: bool) -> None:
    """With and without its fields."""
    (minute,) = used(counting, 60, states=states)
    assert is_kept(minute, could), minute


@pytest.mark.parametrize(("counting", "offset", "states"), [("fixed", 40, True), ("sliding", 0, False)])
def test_further_minutes_do_too(counting: str, offset: float, *, states: bool) -> None:
    first, (tokens, requests, refused) = used(counting, 120, offset, states=states)
    # A fixed window that begins later in the run admits another count.
    assert offset or is_kept(first, TOKENS), first
    assert 0.95 * 2 * TOKENS <= tokens <= (3 if offset else 2) * TOKENS
    assert refused <= 0.01 * requests


def test_above_the_limit_is_at_most_what_answers_cost_beyond_their_estimates() -> None:
    """Each of 20 requests in flight costs 200 tokens more than was reserved, which the bucket then owes."""
    burst, excess, tasks = 5_000, 200, 20
    with virtual_time() as loop:
        provider = Provider(clock=loop.time, output=lambda _: 300, latency=lambda _: 1.0)
        store = Store(loop)
        plans = [Budget(tokens=f"60000/minute burst {burst}", estimate=lambda _: (10, 100)) for _ in range(4)]
        run(loop, *[process(loop, store, plan, provider, (tasks // 4, 60)) for plan in plans])
    calls = [(call.at, call.input + call.output) for call in provider.calls]
    most = 0.0
    for place, (first, _) in enumerate(calls):
        total = 0
        for at, tokens in calls[place:]:
            total += tokens
            # A request is up to 20 ms later than its turn.
            most = max(most, total - burst - 1_000 * (at - first + 0.02))
    assert excess < most <= tasks * excess


def test_with_a_maximum_nothing_is_above_the_limit() -> None:
    burst, dice = 5_000, random.Random(4)
    with virtual_time() as loop:
        provider = Provider(clock=loop.time, output=lambda _: dice.randint(1, 400), latency=lambda _: dice.uniform(0.2, 2))
        store = Store(loop)
        plans = [Budget(tokens=f"60000/minute burst {burst}") for _ in range(4)]
        run(loop, *[process(loop, store, plan, provider, (25, 60), max_tokens=300) for plan in plans])
    calls = [(call.at, call.input + call.output) for call in provider.calls]
    assert sum(tokens for _, tokens in calls) > 55_000
    for place, (first, _) in enumerate(calls):
        total = 0
        for at, tokens in calls[place:]:
            total += tokens
            assert total <= burst + 1_000 * (at - first + 0.02)


Plan = list[tuple[str, int, float]]
"""Tenants of a process, each with its name, the number of its requests, and the seconds until they come."""


async def tenants(loop: Loop, store: Store, plan: Plan, budget: Budget, cost: int) -> list[tuple[str, float]]:
    """A process with requests of tenants; their waits."""
    limiter, began, waits = AsyncLimiter(store), loop.now, list[tuple[str, float]]()

    async def ask(tenant: str, after: float) -> None:
        await asyncio.sleep(after)
        body = {"tenant": tenant, "messages": [{"role": "user", "content": "abcd" * 10}], "max_tokens": cost - 10}
        reservation = await budget.areserve(limiter, body, timeout=100)
        waits.append((tenant, loop.now - began - after))
        await reservation.settle(Usage(10, cost - 10))

    asked = [asyncio.create_task(ask(tenant, after)) for tenant, many, after in plan for _ in range(many)]
    await asyncio.sleep(20)
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    return waits


def median_wait(plans: list[Plan], cost: int, limit: str) -> float:
    with virtual_time() as loop:
        store = Store(loop)
        run(loop, AsyncLimiter(store).hit("k", (limit, Limit(limit).burst)))
        budgets = [Budget(tokens=limit, key=lambda _: "k", share=lambda body: body["tenant"]) for _ in plans]
        waits = run(loop, *[tenants(loop, store, plan, budget, cost) for plan, budget in zip(plans, budgets)])
    small = [wait for each in waits for tenant, wait in each if tenant == "small"]
    assert len(small) == 20
    return statistics.median(small)


@pytest.mark.parametrize(
    ("processes", "small_in", "limit", "cost", "many"),
    [
        (1, 1, "60000/minute", 100, 400),
        (1, 1, "1000/second burst 100", 100, 400),
        (4, 1, "60000/minute", 100, 2_000),
        (4, 1, "60000/minute burst 1000", 300, 400),
        (4, 4, "1000/second burst 100", 100, 400),
        (4, 4, "60000/minute burst 1000", 300, 400),
    ],
)
def test_a_small_tenant_waits_at_most_twice_as_long_beside_a_large_one(
    processes: int, small_in: int, limit: str, cost: int, many: int
) -> None:
    """A tenant sends 20 requests, one second after another one has sent ``many``, twice as many as pass before the end."""
    small = [[("small", 20 // small_in, 1.0)] if number < small_in else [] for number in range(processes)]
    # As many as pass in the first second.
    first = [("first", 1_000 // cost, 0.0)]
    alone = median_wait([[*first, *small[0]], *small[1:]], cost, limit)
    beside = median_wait([[("large", many // processes, 0.0), *each] for each in small], cost, limit)
    assert beside <= 2 * alone
