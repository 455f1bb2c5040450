"""Four days of a real web server, again: every request of a public access log sent through a gate over HTTP.

``python -m tests.access_log`` prints who was admitted how often. The log is the sample in Apache's combined format that
Elastic publishes with its examples: 10,000 requests of semicomplete.com from May 2015.
"""

from __future__ import annotations

import gzip
import http.client
import re
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.routing import Mount

from limitgate import LimitGate, Rule
from tests.support.doors import uvicorn_process
from tests.support.redis_server import RedisServer

LOG = Path(__file__).parent / "data" / "access.log.gz"
PER_DAY = 100
CONNECTIONS = 16

_LINE = re.compile(r'(?P<ip>\S+) \S+ \S+ \[(?P<time>[^]]+)\] "(?P<method>[A-Z]+) (?P<target>\S+) HTTP/1\.[01]" [0-9]{3} ')


class Entry(NamedTuple):
    """One request of the log."""

    ip: str
    at: int
    """Unix seconds."""
    method: str
    target: str


class Replay(NamedTuple):
    """What became of the log: responses per client and status, and how many seconds it took."""

    answers: Counter[tuple[str, int]]
    seconds: float


def read_log() -> list[Entry]:
    """The requests in the order of the log; a line that is none is a ValueError."""
    with gzip.open(LOG, "rt", encoding="utf-8") as lines:
        return [_entry(line) for line in lines]


def create_app() -> Any:
    """An application that answers everything, behind a gate of 100 requests per day and client."""
    return LimitGate(Starlette(routes=[Mount("/", _answer)]), rules=[Rule("daily", f"{PER_DAY}/day", key=["ip"])])


def replay(log: Sequence[Entry], redis_url: str) -> Replay:
    """Send the log to the application of `create_app` over a few connections, from a proxy that the gate trusts."""
    # Without --no-proxy-headers uvicorn itself would put the address from X-Forwarded-For in the place of the peer's.
    options = "--factory", "--no-proxy-headers", "--no-access-log"
    settings = {"LIMITGATE_STORE": redis_url, "LIMITGATE_TRUSTED_PROXIES": "127.0.0.1", "LIMITGATE_TIMEOUT": "5"}
    with (
        TemporaryDirectory() as folder,
        uvicorn_process("tests.access_log:create_app", Path(folder), *options, **settings) as url,
        ThreadPoolExecutor(CONNECTIONS) as threads,
    ):
        began = time.monotonic()
        shares = [log[place::CONNECTIONS] for place in range(CONNECTIONS)]
        answers = sum(threads.map(lambda share: _send(share, url), shares), Counter[tuple[str, int]]())
        return Replay(answers, time.monotonic() - began)


def table(log: Sequence[Entry], done: Replay) -> str:
    """Who was admitted how often, and who should have been."""
    requests = Counter(entry.ip for entry in log)
    expected = {ip: min(count, PER_DAY) for ip, count in requests.items()}
    of_status = Counter[int]()
    for (_, status), count in done.answers.items():
        of_status[status] += count
    admitted, refused = of_status.pop(200, 0), of_status.pop(429, 0)
    wrong = sum(done.answers[ip, 200] != count for ip, count in expected.items())
    return "\n".join(
        [
            f"{len(log):,} requests of {len(requests):,} clients, {PER_DAY} per day and client, uvicorn on Redis",
            "",
            _row("client", "requests", "admitted", "refused", "expected"),
            *(
                _row(ip, count, done.answers[ip, 200], done.answers[ip, 429], expected[ip])
                for ip, count in requests.most_common(10)
            ),
            _row("all clients", len(log), admitted, refused, sum(expected.values())),
            "",
            f"{wrong} clients with another number than expected, {of_status.total()} answers other than 200 and 429",
            f"{done.seconds:.1f} s, {len(log) / done.seconds:,.0f} requests per second over {CONNECTIONS} connections",
        ]
    )


def main() -> None:
    """Replay the log on a Redis of its own and print the table."""
    log = read_log()
    server = RedisServer()
    try:
        done = replay(log, server.url)
    finally:
        server.stop()
    print(table(log, done))  # noqa: T201 - what this program is for


def _entry(line: str) -> Entry:
    match = _LINE.match(line)
    if match is None:
        raise ValueError(f"not in combined log format: {line!r:.200}")
    at = datetime.strptime(match["time"], "%d/%b/%Y:%H:%M:%S %z")
    return Entry(match["ip"], int(at.timestamp()), match["method"], match["target"])


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


def _row(client: str, *columns: object) -> str:
    return f"{client:<16}" + "".join(f"{column:>10}" for column in columns)


def _send(share: Sequence[Entry], url: str) -> Counter[tuple[str, int]]:
    answers: Counter[tuple[str, int]] = Counter()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    for entry in share:
        connection.request(entry.method, entry.target, headers={"X-Forwarded-For": entry.ip})
        response = connection.getresponse()
        response.read()
        answers[entry.ip, response.status] += 1
    connection.close()
    return answers


if __name__ == "__main__":
    main()
