"""One process of ``benchmarks.budgets``: asks a provider as often as a limiter allows.

It runs in the environment of the limiter and imports nothing else: ``python benchmarks/budget_worker.py LIMITER URL STORE
SECONDS TASKS TOKENS MAXIMUM``. It prints ``ready``, begins when it reads a line, and prints at the end how many tasks failed.
"""

# ruff: noqa: PLC0415 - each environment has one of the limiters

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

NAME, URL, STORE, SECONDS, TASKS, TOKENS, MAXIMUM = sys.argv[1:] if __name__ == "__main__" else ["0"] * 7
INPUT = 10
QUESTION: Any = [{"role": "user", "content": "abcd" * INPUT}]
BODY: dict[str, Any] = {"model": "m", "messages": QUESTION, **({"max_tokens": int(MAXIMUM)} if int(MAXIMUM) else {})}
PATH = "/v1/chat/completions"
Ask = Callable[[], Awaitable[bool]]
"""Sends a request; returns False if it was refused."""


@contextlib.asynccontextmanager
async def by_limitgate() -> AsyncIterator[Ask]:
    """LimitGate's transport."""
    import httpx2

    from limitgate import AsyncLimiter
    from limitgate.httpx2 import AsyncRateLimitTransport
    from limitgate.llm import Budget

    limiter = AsyncLimiter(STORE, timeout=2)
    transport = AsyncRateLimitTransport(budget=Budget(tokens=f"{TOKENS}/minute"), limiter=limiter, timeout=float(SECONDS))
    async with httpx2.AsyncClient(transport=transport, timeout=120) as client:

        async def ask() -> bool:
            return (await client.post(URL + PATH, json=BODY)).status_code != 429

        yield ask
    await limiter.aclose()


@contextlib.asynccontextmanager
async def by_token_throttle() -> AsyncIterator[Ask]:
    """The same client in a reservation of token-throttle, which is told the input and the maximum."""
    import httpx2
    from redis import asyncio as redis
    from token_throttle import (  # type: ignore[import-not-found]  # in an environment of its own
        PerModelConfig,
        Quota,
        RateLimiter,
        RedisBackendBuilder,
        UsageQuotas,
    )

    logging.disable(logging.CRITICAL)
    connections = redis.from_url(STORE, max_connections=1_000)
    limiter = RateLimiter(
        PerModelConfig(quotas=UsageQuotas([Quota(metric="tokens", limit=int(TOKENS), per_seconds=60)])),
        # By default its lock gives up after some seconds, and with it the request.
        backend=RedisBackendBuilder(connections, key_prefix="budget", lock_blocking_timeout_seconds=60),
    )
    async with httpx2.AsyncClient(timeout=120) as client:

        async def ask() -> bool:
            async with limiter.reserve({"tokens": INPUT + int(MAXIMUM)}, model="m") as handle:
                response = await client.post(URL + PATH, json=BODY)
                used = response.json()["usage"]["total_tokens"] if response.status_code == 200 else 0
                handle.set_actual_usage({"tokens": used})
            return response.status_code != 429

        yield ask
    await connections.aclose()


@contextlib.asynccontextmanager
async def by_litellm() -> AsyncIterator[Ask]:
    """Litellm's router, which enforces the tokens per minute of its only deployment."""
    # Otherwise it fetches prices.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm  # type: ignore[import-not-found]  # in an environment of its own

    logging.disable(logging.CRITICAL)
    litellm.suppress_debug_info = True
    deployment = {"model": "openai/m", "api_base": f"{URL}/v1", "api_key": "x", "tpm": int(TOKENS)}
    router = litellm.Router(
        model_list=[{"model_name": "m", "litellm_params": deployment}],
        redis_url=STORE,
        routing_strategy="usage-based-routing-v2",
        optional_pre_call_checks=["enforce_model_rate_limits"],
        num_retries=0,
        disable_cooldowns=True,
    )

    # The first call imports much. Another key, so that it doesn't count.
    await litellm.acompletion(model="openai/m", api_base=f"{URL}/v1", api_key="y", messages=QUESTION, max_tokens=1)

    async def ask() -> bool:
        try:
            await router.acompletion(**BODY)
        except litellm.exceptions.RateLimitError:
            return False
        return True

    yield ask


LIMITERS = {"limitgate": by_limitgate, "token-throttle": by_token_throttle, "litellm": by_litellm}


async def main() -> None:
    """Run the tasks. A refused task tries again after a second."""
    async with LIMITERS[NAME]() as ask:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        until = time.monotonic() + float(SECONDS)

        async def work() -> None:
            while time.monotonic() < until:
                if not await ask():
                    await asyncio.sleep(random.uniform(0.5, 1.5))

        tasks = [asyncio.create_task(work()) for _ in range(int(TASKS))]
        await asyncio.wait(tasks, timeout=float(SECONDS) + 1)
        for task in tasks:
            task.cancel()
        failed = [each for each in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(each, Exception)]
        print(len(failed))
        if failed:
            print(f"{len(failed)} tasks failed: {failed[0]!r:.300}", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main())
