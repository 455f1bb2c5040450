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
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import openai
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from benchmarks.budget_worker import INPUT, QUESTION
from handbook.reference import inserted
from limitgate import Limiter, LimitGate, MemoryStore, Rule
from limitgate.httpx2 import RateLimitTransport
from limitgate.llm import Budget
from tests.support.provider import Provider, serving
from tests.support.redis_server import RedisServer

TOKENS = 50_000
"""Tokens per minute."""
EVENTS = 10_000
"""Of a stream."""
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
def elsewhere(serve: Callable[..., None], **options: Any) -> Iterator[tuple[str, Any]]:
    """Serve in a process of its own; yield the URL, and a connection that answers anything with what ``serve`` says."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=serve, args=(its, options))
    process.start()
    its.close()
    try:
        yield ours.recv(), ours
    finally:
        ours.close()
        process.join()


def _answer(asked: Any, app: Any, said: Callable[[], Any]) -> None:
    """Serve an application until nobody can ask any more."""
    with serving(app) as url, contextlib.suppress(EOFError):
        asked.send(url)
        while True:
            asked.recv()
            asked.send(said())


def provide(asked: Any, options: dict[str, Any]) -> None:
    """Serve a provider that says its calls."""
    dice = random.Random(1)
    is_limited = "limits" in options
    provider = Provider(
        output=lambda body: INPUT * dice.randint(1, 30) if is_limited else body["max_tokens"],
        latency=lambda status: dice.uniform(0.2, 2.0) if is_limited and status == 200 else 0.0,
        **options,
    )
    _answer(asked, provider, lambda: [(call.at, call.status, call.input + call.output) for call in provider.calls])


def gate(asked: Any, _: dict[str, Any]) -> None:
    """Serve a stream under a limit on tokens, and one on requests. Says its CPU time."""
    dice = random.Random(1)
    words = ["the", "answer", "is", '"forty-two"', "\n", "\u00fcber", "everything"]
    deltas = [{"index": 0, "delta": {"content": f" {dice.choice(words)}"}, "finish_reason": None} for _ in range(EVENTS)]
    about = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_790_000_000, "model": "m"}
    events = [f"data: {json.dumps({**about, 'choices': [delta]}, ensure_ascii=False)}\n\n".encode() for delta in deltas]

    async def parts(many: int) -> AsyncIterator[bytes]:
        for event in events[:many]:
            yield event

    async def stream(request: Request) -> StreamingResponse:
        asked_for = await request.json()
        return StreamingResponse(parts(asked_for["max_tokens"]), media_type="text/event-stream")

    limits: dict[str, Any] = {"/requests": "1000000000/day", "/tokens": ("1000000000/day", "tokens")}
    gates = {
        path: LimitGate(
            Starlette(routes=[Route(path, stream, methods=["POST"])]), rules=[Rule("llm", limit, key=["ip"])], store="memory://"
        )
        for path, limit in limits.items()
    }

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await gates[scope["path"]](scope, receive, send)

    _answer(asked, app, time.process_time)


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
    with elsewhere(provide, limits={"tokens": (TOKENS, 60.0)}, counting=counting) as (url, provider):
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
    versions = "print(', '.join(f'{name} {version(name)}' for name in ('litellm', 'token-throttle')))"
    command = [arguments.python, "-c", f"from importlib.metadata import version; {versions}"]
    peers = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    lines += [
        "",
        f"Requests set a maximum of {30 * INPUT} output tokens, except in rows 'no maximum'. The lock of token-throttle may",
        f"wait for 60 seconds. Each row is one run; {peers}.",
    ]
    if arguments.write:
        PAGE.write_text(inserted(PAGE.read_text(), "budgets", "\n".join(lines)))


Reads = Callable[[int, bool], tuple[float, float]]
"""Reads a stream of so many events, with a budget or without; returns its CPU time, and the seconds to its first byte."""


def outbound(url: str) -> Reads:
    """Streams by OpenAI's client. The limiter stays, because its first request of a process starts a thread."""
    budget, limiter = Budget(tokens="1000000000/day"), Limiter(MemoryStore())

    def read(events: int, is_ours: bool) -> tuple[float, float]:  # noqa: FBT001 - as `Reads`
        transport = RateLimitTransport(budget=budget, limiter=limiter) if is_ours else httpx2.HTTPTransport()
        with httpx2.Client(transport=transport) as http:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", http_client=http, max_retries=0, timeout=120)
            began, cpu, first = time.perf_counter(), time.thread_time(), 0.0
            for _ in client.chat.completions.create(model="m", messages=QUESTION, max_tokens=events, stream=True):
                first = first or time.perf_counter() - began
            return time.thread_time() - cpu, first

    return read


def inbound(url: str, server: Any) -> Reads:
    """Streams through a gate, with a limit on tokens or on requests. The CPU time is the server's."""

    def cpu() -> float:
        server.send("cpu")
        return float(server.recv())

    def read(events: int, is_ours: bool) -> tuple[float, float]:  # noqa: FBT001 - as `Reads`
        body = {"model": "m", "messages": QUESTION, "max_tokens": events, "stream": True}
        before, began = cpu(), time.perf_counter()
        with httpx2.stream("POST", f"{url}/{'tokens' if is_ours else 'requests'}", json=body, timeout=120) as response:
            chunks = response.iter_raw()
            next(chunks)
            first = time.perf_counter() - began
            for _ in chunks:
                pass
        return cpu() - before, first

    return read


def rounds(read: Reads, many: int, events: int) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Rounds with a budget and without, in alternating order."""
    found = []
    for number in range(many):
        order = (True, False) if number % 2 else (False, True)
        each = {is_ours: read(events, is_ours) for is_ours in order}
        found.append((each[True], each[False]))
    return found


def compared(name: str, read: Reads) -> None:
    """Print what reading along costs."""
    rounds(read, 2, 100)
    cpu = statistics.median(ours[0] / theirs[0] for ours, theirs in rounds(read, 15, EVENTS))
    # The provider writes a stream before it sends it, so a long one hides the difference.
    first = statistics.median(ours[1] - theirs[1] for ours, theirs in rounds(read, 101, 10))
    print(f"{name}, a stream of {EVENTS:,} events: {cpu:.3f} times the CPU, first byte {first * 1000:+.2f} ms")


def streams() -> None:
    """Measure streams with and without a budget, in alternating rounds."""
    with elsewhere(gate) as (url, server):
        compared("behind a gate", inbound(url, server))
    with elsewhere(provide) as (url, _):
        read = outbound(url)
        compared("in a client", read)

        def peak(events: int) -> int:
            tracemalloc.start()
            read(events, True)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return most

        print(f"memory at its peak: {peak(1_000):,} bytes with 1,000 events, {peak(EVENTS):,} with {EVENTS:,}")


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
