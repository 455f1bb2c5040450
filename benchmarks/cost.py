"""What a request costs: ``python -m benchmarks.cost`` measures and prints it, in about a minute.

CPU is that of this process, the applications' own and the framework's included; so the figure to look at is the difference
to the bare application. The applications take turns in many short rounds, since the machine's speed changes meanwhile.
Redis runs beside on a unix socket; what it costs there is measured by Redis itself.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from limitgate import Limit, Limiter, LimitGate, LimitGateWSGI, MemoryStore, Rule
from limitgate.limits import Windows, windows_of
from limitgate.plan import Charge, Plan
from limitgate.stores import wire
from tests.redis_server import RedisServer

ROUNDS = 30
REQUESTS = 1_000
"""Requests per application and round."""
CLIENTS = 250
CONCURRENCIES = (1, 32)
CALLS = 20_000
"""Script calls per figure."""
PIPELINED = 500
BUCKETS = 20_000

LIMITS = (Limit("10000/hour"), Limit("10000/day"), Limit("10000 per 7 days"))
"""Three windows that never refuse here, and whose buckets are never full again before the next request."""
RULE = Rule("api", *LIMITS, path="/api/**", key=["ip"])

Round = Callable[[int], float]
"""Takes a concurrency, handles `REQUESTS` requests and says how many µs of CPU each took."""


def main() -> None:
    """Measure everything and print it."""
    began = time.monotonic()
    server = RedisServer()
    try:
        _print_setting(server)
        _print_asgi(server)
        _print_wsgi(server)
        _print_commands(server)
        _print_server_time(server)
        _print_memory(server)
    finally:
        server.stop()
    print(f"\nmeasured in {time.monotonic() - began:.0f} s")


def _print_setting(server: RedisServer) -> None:
    with server.client() as client:
        redis_version = client.info("server")["redis_version"]
    packages = ", ".join(f"{name} {version(name)}" for name in ("limitgate", "starlette", "redis", "hiredis"))
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {_processor()}, {os.cpu_count()} cores, {platform.system()}")
    print(f"{platform.python_implementation()} {platform.python_version()}, Redis {redis_version}, {packages}")


def _processor() -> str:
    """The processor's name where Linux tells it, its architecture elsewhere."""
    file = Path("/proc/cpuinfo")
    names = (
        [line.partition(": ")[2] for line in file.read_text().splitlines() if line.startswith("model name")]
        if file.exists()
        else []
    )
    return names[0] if names else platform.machine()


# --- CPU per request --------------------------------------------------------------------------------------------------


def _print_asgi(server: RedisServer) -> None:
    gates = {
        "bare Starlette": _starlette(),
        "memory store": _starlette("memory://"),
        "Redis store": _starlette(server.url),
    }
    with asyncio.Runner() as runner:
        rounds = {name: _asgi_round(app, runner) for name, app in gates.items()}
        _print_rounds("ASGI, one rule of three windows", rounds)
        for app in gates.values():
            runner.run(_shut_down(app))


def _print_wsgi(server: RedisServer) -> None:
    gated = [LimitGateWSGI(_wsgi_app, rules=[RULE], store=store) for store in ("memory://", server.url)]
    rounds = {"bare WSGI app": _wsgi_round(_wsgi_app)}
    rounds |= zip(("memory store", "Redis store"), [_wsgi_round(app) for app in gated], strict=True)
    _print_rounds("WSGI, the same rule (concurrency in threads)", rounds)
    for app in gated:
        if app.gate is not None:
            app.gate.store.close()


def _print_rounds(title: str, rounds: dict[str, Round]) -> None:
    """The first of ``rounds`` is the bare application."""
    print(f"\nCPU µs per request: {title}\n")
    print(f"{'concurrency':<13}{'application':<18}{'median':>8}{'min':>8}{'over bare: median':>20}{'min':>8}{'times bare':>12}")
    for concurrency in CONCURRENCIES:
        taken: dict[str, list[float]] = {name: [] for name in rounds}
        for one_round in rounds.values():
            one_round(concurrency)
        for _ in range(ROUNDS):
            for name, one_round in rounds.items():
                taken[name].append(one_round(concurrency))
        bare_median, bare_min = 0.0, 0.0
        for name, figures in taken.items():
            median, least = statistics.median(figures), min(figures)
            bare_median, bare_min = bare_median or median, bare_min or least
            over = f"{median - bare_median:>20.1f}{least - bare_min:>8.1f}{median / bare_median:>12.1f}"
            print(f"{concurrency:<13}{name:<18}{median:>8.1f}{least:>8.1f}{over}")


def _starlette(store: str | None = None) -> Starlette:
    async def hello(_: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app = Starlette(routes=[Route("/api/hello", hello)])
    if store:
        app.add_middleware(LimitGate, rules=[RULE], store=store)
    return app


def _scope(number: int) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/api/hello",
        "raw_path": b"/api/hello",
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"localhost"),
            (b"user-agent", b"benchmark"),
            (b"accept", b"*/*"),
            (b"connection", b"keep-alive"),
        ],
        "client": (_client(number), 50000),
        "server": ("127.0.0.1", 8000),
    }


def _client(number: int) -> str:
    return f"192.0.2.{number % CLIENTS}"


def _asgi_round(app: Starlette, runner: asyncio.Runner) -> Round:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        _check(message.get("status", 200))

    async def ask(numbers: Iterable[int]) -> None:
        for number in numbers:
            await app(_scope(number), receive, send)

    async def all_asked(concurrency: int) -> float:
        began = time.process_time()
        await asyncio.gather(*[ask(share) for share in _shares(concurrency)])
        return (time.process_time() - began) / REQUESTS * 1e6

    return lambda concurrency: runner.run(all_asked(concurrency))


async def _shut_down(app: Starlette) -> None:
    """Send the lifespan events, so that the gate closes its connection."""
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(_: Any) -> None:
        """Nobody listens."""

    await app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)


def _wsgi_app(_: Any, start_response: Callable[..., Any]) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "5")])
    return [b"hello"]


def _environ(number: int) -> dict[str, Any]:
    return {
        "REQUEST_METHOD": "GET",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/api/hello",
        "QUERY_STRING": "",
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "8000",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": _client(number),
        "HTTP_HOST": "localhost",
        "HTTP_USER_AGENT": "benchmark",
        "HTTP_ACCEPT": "*/*",
        "HTTP_CONNECTION": "keep-alive",
        "wsgi.url_scheme": "http",
    }


def _wsgi_round(app: Callable[..., Iterable[bytes]]) -> Round:
    def start_response(status: str, _: Any, __: Any = None) -> None:
        _check(int(status[:3]))

    def ask(numbers: Iterable[int]) -> None:
        for number in numbers:
            list(app(_environ(number), start_response))

    def all_asked(concurrency: int) -> float:
        began = time.process_time()
        if concurrency == 1:
            ask(range(REQUESTS))
        else:
            with ThreadPoolExecutor(concurrency) as threads:
                list(threads.map(ask, _shares(concurrency)))
        return (time.process_time() - began) / REQUESTS * 1e6

    return all_asked


def _shares(concurrency: int) -> list[range]:
    return [range(start, REQUESTS, concurrency) for start in range(concurrency)]


def _check(status: int) -> None:
    if status != 200:
        raise RuntimeError(f"status {status}, expected 200")


# --- what Redis does --------------------------------------------------------------------------------------------------


def _print_commands(server: RedisServer) -> None:
    print("\nScript calls per request\n")
    app = _starlette(server.url)
    with asyncio.Runner() as runner, server.client() as untyped:
        client: Any = untyped
        one_round = _asgi_round(app, runner)
        for concurrency in CONCURRENCIES:
            client.config_resetstat()
            one_round(concurrency)
            calls = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            print(f"{calls / REQUESTS:.2f} at concurrency {concurrency}")
        runner.run(_shut_down(app))


def _print_server_time(server: RedisServer) -> None:
    print("\nRedis' own µs per request, calls pipelined\n")
    together = [windows_of(*LIMITS)]
    apart = [windows_of(limit) for limit in LIMITS]
    with server.client() as untyped:
        client: Any = untyped
        nothing = client.script_load("return 1")
        client.script_load(wire.SPEND)
        measured: dict[str, Callable[[], float]] = {
            "three windows, one call": lambda: _usec_per_request(client, _spends("together", together)),
            "three calls of one window": lambda: _usec_per_request(client, _spends("apart", apart)) * len(apart),
            "one call of an empty script": lambda: _usec_per_request(client, iter([["EVALSHA", nothing, 0]] * CALLS)),
        }
        rounds = [{name: measure() for name, measure in measured.items()} for _ in range(3)]
    for name in measured:
        print(f"{name:<30}{min(figures[name] for figures in rounds):>6.1f}")


def _spends(name: str, charges: Sequence[Windows]) -> Iterator[list[Any]]:
    for number in range(CALLS):
        place = number % len(charges)
        key = f"limitgate:{name}:{place}:{number // len(charges) % CLIENTS:032x}"
        yield ["EVALSHA", wire.SHA, *wire.arguments(Plan((Charge(key, charges[place], 1, True, "api"),)))]


def _usec_per_request(client: Any, commands: Iterator[list[Any]]) -> float:
    client.config_resetstat()
    for _ in range(CALLS // PIPELINED):
        with client.pipeline(transaction=False) as pipeline:
            for _, command in zip(range(PIPELINED), commands, strict=False):
                pipeline.execute_command(*command)
            pipeline.execute()
    stats = client.info("commandstats")["cmdstat_evalsha"]
    if stats["calls"] != CALLS or stats["failed_calls"]:
        raise RuntimeError(f"{stats}, expected {CALLS} calls that succeed")
    return float(stats["usec_per_call"])


def _print_memory(server: RedisServer) -> None:
    print("\nBytes per bucket of three windows, each with something taken\n")
    with server.client() as client, Limiter(server.url) as limiter:
        client.flushall()
        for number in range(CLIENTS):
            limiter.hit(f"client:{number}", *LIMITS)
        sizes = [client.memory_usage(key) or 0 for key in client.keys("*")]
        client.flushall()
        for number in range(CLIENTS):
            for limit in LIMITS:
                limiter.hit(f"client:{number}:{limit}", limit)
        apart = sum(client.memory_usage(key) or 0 for key in client.keys("*")) / CLIENTS
    print(f"{'Redis, one key':<30}{statistics.mean(sizes):>6.0f}")
    print(f"{'Redis, a key for each window':<30}{apart:>6.0f}")
    print(f"{f'memory store, of {BUCKETS:,}':<30}{_memory_store_bytes():>6.0f}")


def _memory_store_bytes() -> float:
    store = MemoryStore()
    with Limiter(store) as limiter, _traced() as taken:
        before = taken()
        for number in range(BUCKETS):
            limiter.hit(f"client:{number}", *LIMITS)
        after = taken()
    if len(store) != BUCKETS:
        raise RuntimeError(f"{len(store)} buckets, expected {BUCKETS}")
    return (after - before) / BUCKETS


@contextmanager
def _traced() -> Iterator[Callable[[], int]]:
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


if __name__ == "__main__":
    main()
