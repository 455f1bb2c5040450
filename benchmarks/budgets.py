"""A budget for language models, shared by processes, against a provider that counts: ``python -m benchmarks.budgets``.

Prints how much of the provider's limit was used, and how many requests it refused. Answers have 1 to 30 times as many tokens as
the input. With ``--streams`` it prints what reading a stream of 10,000 events along costs.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import time
from typing import Any

import httpx2
import openai

from limitgate import AsyncLimiter, Limiter, MemoryStore
from limitgate.httpx2 import AsyncRateLimitTransport, RateLimitTransport
from limitgate.llm import Budget
from tests.support.provider import Provider, serving
from tests.support.redis_server import RedisServer

TOKENS = 50_000
"""Tokens per minute."""
QUESTION: Any = [{"role": "user", "content": "abcd" * 10}]
INPUT = 10


def work(url: str, store: str, seconds: float, tasks: int) -> None:
    """Ask as often as the budget allows."""

    async def main() -> None:
        limiter = AsyncLimiter(store, timeout=1)
        budget = Budget(tokens=f"{TOKENS}/minute")
        transport = AsyncRateLimitTransport(budget=budget, limiter=limiter, timeout=seconds)
        until = time.monotonic() + seconds
        async with httpx2.AsyncClient(transport=transport, timeout=120) as client:

            async def ask() -> None:
                while time.monotonic() < until:
                    response = await client.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": QUESTION})
                    if response.status_code == 429:
                        return

            await asyncio.gather(*[ask() for _ in range(tasks)])
        await limiter.aclose()

    asyncio.run(main())


def share(arguments: argparse.Namespace) -> None:
    """Measure what several processes use of one limit."""
    dice = random.Random(1)
    provider = Provider(
        limits={"tokens": (TOKENS, 60.0)},
        counting=arguments.counting,
        output=lambda _: INPUT * dice.randint(1, 30),
        latency=lambda status: dice.uniform(0.2, 2.0) if status == 200 else 0.0,
    )
    server = RedisServer()
    with serving(provider) as url:
        began = time.time()
        workers = [
            multiprocessing.get_context("spawn").Process(
                target=work, args=(url, server.url, arguments.seconds, arguments.tasks // arguments.processes)
            )
            for _ in range(arguments.processes)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(arguments.seconds + 60)
    server.stop()
    calls = [call for call in provider.calls if call.at < began + arguments.seconds]
    first = min(call.at for call in calls)
    took = arguments.seconds - (first - began)
    spent = sum(call.input + call.output for call in calls)
    burst = 0 if arguments.counting == "sliding" else TOKENS
    could = TOKENS * took / 60 + burst
    print(
        f"{arguments.counting}: {len(calls)} requests in {took:.1f} s, {spent:,} of {could:,.0f} tokens ({spent / could:.1%})"
    )
    print(f"refused by the provider: {provider.refused} ({provider.refused / len(calls):.2%})")


def streams() -> None:
    """Measure a stream of 10,000 events by OpenAI's client, with and without a budget, in alternating rounds."""
    with serving(Provider(output=lambda _: 10_000)) as url:

        def read(transport: Any) -> tuple[float, float]:
            with httpx2.Client(transport=transport) as http:
                client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", http_client=http, max_retries=0, timeout=120)
                began, cpu, first = time.perf_counter(), time.thread_time(), 0.0
                for _ in client.chat.completions.create(model="m", messages=QUESTION, stream=True):
                    first = first or time.perf_counter() - began
                return time.thread_time() - cpu, first

        rounds = []
        for _ in range(15):
            limiter = Limiter(MemoryStore())
            with_budget = read(RateLimitTransport(budget=Budget(tokens="1000000000/day"), limiter=limiter))
            rounds.append((with_budget, read(httpx2.HTTPTransport())))
        middle = len(rounds) // 2
        cpu = sorted(ours[0] / theirs[0] for ours, theirs in rounds)[middle]
        first = sorted(ours[1] - theirs[1] for ours, theirs in rounds)[middle]
        print(f"a stream of 10,000 events: {cpu:.3f} times the CPU, first byte {first * 1000:+.2f} ms")


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--counting", default="bucket", choices=["bucket", "fixed", "sliding"])
    arguments = parser.parse_args()
    if arguments.streams:
        streams()
    else:
        share(arguments)


if __name__ == "__main__":
    main()
