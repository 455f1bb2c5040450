"""A budget for language models, shared by processes, against a provider that counts: ``python -m benchmarks.budgets``.

Measures LimitGate and its peers one after the other: how much of the provider's limit they use, and how many requests it
refuses. Answers have 1 to 30 times as many tokens as the input. ``--write`` puts the table into docs/budgets.md. ``--python``
is that of an environment with the peers, made by::

    python3.12 -m venv peers && peers/bin/pip install litellm token-throttle httpx2 redis

``--limiter`` and ``--counting`` select rows. With ``--streams`` it prints what reading a stream of 10,000 events along costs,
in a client and behind a gate.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import openai

from benchmarks.budget_worker import INPUT, QUESTION
from handbook.reference import inserted
from limitgate import Limiter, MemoryStore
from limitgate.httpx2 import RateLimitTransport
from limitgate.llm import Budget
from tests.support.provider import Provider, serving
from tests.support.redis_server import RedisServer

TOKENS = 50_000
"""Tokens per minute."""
WORKER = Path(__file__).with_name("budget_worker.py")
PAGE = Path(__file__).parent.parent / "docs" / "budgets.md"
WITHOUT = ", no maximum"
"""Of a limiter whose requests name no maximum of output tokens. The peers need one."""
ROWS = ["limitgate", f"limitgate{WITHOUT}", "token-throttle", "litellm"]
COUNTINGS = ["bucket", "fixed", "sliding"]
HEAD = (
    "| limiter | provider counts by | tokens used | of what it admits | requests that it refused | errors |",
    "|---|---|---:|---:|---:|---|",
)


@contextlib.contextmanager
def provider_elsewhere(**options: Any) -> Iterator[tuple[str, Any]]:
    """Serve a provider in a process of its own; yield its URL, and a connection that answers anything with the calls."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=provide, args=(its, options))
    process.start()
    its.close()
    try:
        yield ours.recv(), ours
    finally:
        ours.close()
        process.join()


def provide(asked: Any, options: dict[str, Any]) -> None:
    """Serve a provider until nobody can ask for its calls any more."""
    dice = random.Random(1)
    is_limited = "limits" in options
    provider = Provider(
        output=lambda body: INPUT * dice.randint(1, 30) if is_limited else body["max_tokens"],
        latency=lambda status: dice.uniform(0.2, 2.0) if is_limited and status == 200 else 0.0,
        **options,
    )
    with serving(provider) as url, contextlib.suppress(EOFError):
        asked.send(url)
        while True:
            asked.recv()
            asked.send([(call.at, call.status, call.input + call.output) for call in provider.calls])


class Row(NamedTuple):
    """One run of a limiter."""

    limiter: str
    counting: str
    tokens: int
    """That the provider admitted."""
    requests: int
    refused: int
    """By the provider."""
    failed: int
    """Tasks that ended with an error."""

    def written(self, seconds: float) -> str:
        """A line of the table."""
        minutes = seconds / 60
        most = TOKENS * (1 + minutes if self.counting == "bucket" else max(1, minutes))
        failed = f"{self.failed} tasks failed" if self.failed else "-"
        refused = f"{self.refused} of {self.requests} ({self.refused / max(1, self.requests):.1%})"
        return f"| {self.limiter} | {self.counting} | {self.tokens:,} | {self.tokens / most:.1%} | {refused} | {failed} |"


def measured(limiter: str, counting: str, arguments: argparse.Namespace) -> Row:
    """Measure what several processes use of one limit."""
    name, _, without = limiter.partition(WITHOUT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = RedisServer(port=str(port))
    with provider_elsewhere(limits={"tokens": (TOKENS, 60.0)}, counting=counting) as (url, provider):
        numbers = [arguments.seconds, arguments.tasks // arguments.processes, TOKENS, 0 if without else 30 * INPUT]
        # The peers' environment has no LimitGate.
        python, path = (sys.executable, str(Path.cwd())) if name == "limitgate" else (arguments.python, "")
        command = [python, str(WORKER), name, url, f"redis://127.0.0.1:{port}/0", *map(str, numbers)]
        workers = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
            )
            for _ in range(arguments.processes)
        ]
        pipes = [(worker.stdin, worker.stdout) for worker in workers if worker.stdin and worker.stdout]
        for _, out in pipes:
            if out.readline() != "ready\n":
                raise RuntimeError("a worker did not get ready")
        if counting == "fixed":
            # The run has one window.
            time.sleep(-time.time() % 60 + 0.01)
        began = time.time()
        for into, _ in pipes:
            into.write("\n")
            into.flush()
        failed = sum([int(worker.communicate(timeout=arguments.seconds + 60)[0]) for worker in workers])
        provider.send("calls")
        calls = [call for call in provider.recv() if began <= call[0] < began + arguments.seconds]
    server.stop()
    refused = sum(status == 429 for _, status, _ in calls)
    return Row(limiter, counting, sum(tokens for *_, tokens in calls), len(calls), refused, failed)


def share(arguments: argparse.Namespace) -> None:
    """Measure the limiters one after the other, and print or write a table."""
    lines = list(HEAD)
    for limiter in arguments.limiter or ROWS:
        for counting in arguments.counting or COUNTINGS:
            lines.append(measured(limiter, counting, arguments).written(arguments.seconds))
            print(f"{lines[-1]} load {os.getloadavg()[0]:.1f}", flush=True)
    if arguments.write:
        PAGE.write_text(inserted(PAGE.read_text(), "budgets", "\n".join(lines)))


def streams() -> None:
    """Measure streams by OpenAI's client, with and without a budget, in alternating rounds."""
    with provider_elsewhere() as (url, _):

        def read(events: int, *, is_ours: bool) -> tuple[float, float]:
            limiter = Limiter(MemoryStore())
            transport: Any = (
                RateLimitTransport(budget=Budget(tokens="1000000000/day"), limiter=limiter)
                if is_ours
                else httpx2.HTTPTransport()
            )
            with httpx2.Client(transport=transport) as http:
                client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", http_client=http, max_retries=0, timeout=120)
                began, cpu, first = time.perf_counter(), time.thread_time(), 0.0
                for _ in client.chat.completions.create(model="m", messages=QUESTION, max_tokens=events, stream=True):
                    first = first or time.perf_counter() - began
                return time.thread_time() - cpu, first

        def rounds(many: int, events: int) -> list[tuple[tuple[float, float], tuple[float, float]]]:
            return [(read(events, is_ours=True), read(events, is_ours=False)) for _ in range(many)]

        def peak(events: int) -> int:
            tracemalloc.start()
            read(events, is_ours=True)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return most

        rounds(2, 100)
        cpu = sorted(ours[0] / theirs[0] for ours, theirs in rounds(15, 10_000))[7]
        # The provider writes a stream before it sends it, so a long one hides the difference.
        first = sorted(ours[1] - theirs[1] for ours, theirs in rounds(201, 10))[100]
        print(f"a stream of 10,000 events: {cpu:.3f} times the CPU, first byte {first * 1000:+.2f} ms")
        print(f"memory at its peak: {peak(1_000):,} bytes with 1,000 events, {peak(10_000):,} with 10,000")


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--counting", action="append", choices=COUNTINGS)
    parser.add_argument("--limiter", action="append", choices=ROWS)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.streams:
        streams()
    else:
        share(arguments)


if __name__ == "__main__":
    main()
