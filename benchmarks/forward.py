"""What asking the gate adds to a proxy's own hop: ``python -m benchmarks.forward [--requests 3000]``.

nginx with the configuration of deploy/ asks ``limitgate serve`` on a unix socket, about requests that it answers itself. The
same nginx without ``auth_request`` is the proxy's own hop, and with a subrequest that nginx itself answers, that of asking.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

from tests.support.doors import until
from tests.support.proxies import missing, running
from tests.support.redis_server import RedisServer

RULES = "rules: [{name: all, path: /**, key: [path, ip], qps: 1000000, qpm: 60000000}]\n"
ROUNDS = 5
AUTH = "auth_request /.limitgate;"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000, help="per round and row")
    count = parser.parse_args().requests
    reason = missing("nginx")
    if reason is not None:
        sys.exit(reason)
    with TemporaryDirectory(prefix="limitgate-bench-") as folder, contextlib.ExitStack() as opened:
        rules = Path(folder) / "rules.yaml"
        rules.write_text(RULES)
        redis = RedisServer()
        opened.callback(redis.stop)
        rows: dict[str, Callable[[str], str]] = {
            "nginx alone": lambda text: text.replace(AUTH, ""),
            "nginx asks nginx": _asking_itself,
        }
        for store in ("memory://", redis.url):
            uds = f"{folder}/{store.partition(':')[0]}.sock"
            opened.enter_context(_serving(rules, store, uds))
            rows[f"nginx asks LimitGate, {store.partition(':')[0]}"] = _asking(uds)
        ports = {}
        for name, change in rows.items():
            proxy = opened.enter_context(running("nginx", 1, 1, _both(_answering, change)))
            ports[name] = proxy.port
        found: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(ROUNDS):
            for name, port in ports.items():
                found[name] += _latencies(port, count)
    _print(found)


def _both(first: Callable[[str], str], then: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: then(first(text))


def _answering(text: str) -> str:
    """The application is nginx itself."""
    return text.replace("proxy_pass http://application;", "try_files /none =204;", 1)


def _asking(uds: str) -> Callable[[str], str]:
    return lambda text: text.replace("server 127.0.0.1:1;", f"server unix:{uds};", 1)


def _asking_itself(text: str) -> str:
    return re.sub(r"proxy_pass http://limitgate/nginx;", "return 204;", text)


@contextlib.contextmanager
def _serving(rules: Path, store: str, uds: str) -> Iterator[None]:
    command = [sys.executable, "-m", "limitgate", "serve", "--rules", str(rules), "--store", store, "--uds", uds]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: os.path.exists(uds), 60)  # noqa: PTH110 - a socket
        yield
    finally:
        process.terminate()
        process.wait()


def _latencies(port: int, count: int) -> list[float]:
    """In ms, on one connection."""
    found = []
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        for _ in range(count):
            began = time.perf_counter()
            connection.request("GET", "/api/hello")
            response = connection.getresponse()
            response.read()
            found.append((time.perf_counter() - began) * 1000)
            if response.status != 204:
                raise RuntimeError(f"{response.status}, expected 204")
    return found


def _print(found: dict[str, list[float]]) -> None:
    own = _middle(next(iter(found.values())))
    print("| | p50, ms | p99, ms | added at p50, ms |\n|---|--:|--:|--:|")
    for name, latencies in found.items():
        print(f"| {name} | {_middle(latencies):.3f} | {quantiles(latencies, n=100)[98]:.3f} | {_middle(latencies) - own:.3f} |")


def _middle(latencies: list[float]) -> float:
    return quantiles(latencies, n=2)[0]


if __name__ == "__main__":
    main()
