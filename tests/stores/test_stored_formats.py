"""What earlier versions have stored is read by this one: tests/data/stored/*.json, one file for each format.

``python -m tests.stores.test_stored_formats NUMBER`` writes such a file with the present code. Existing files stay as they are.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from limitgate import Limit, Limiter
from tests.support.clock import Clock
from tests.support.redis_server import RedisServer
from tests.support.scripted import Scripted

FOLDER = Path(__file__).parents[1] / "data" / "stored"
FORMATS = sorted(FOLDER.glob("*.json"))
NOW = 1_795_000_000_000_000
"""Unix microseconds when the files were written."""

BUCKETS: dict[str, tuple[Limit | str, ...]] = {
    "gcra": ("10/minute", "100/day"),
    "burst": ("1/minute burst 5",),
    "fixed": (Limit("10/hour", algorithm="fixed_window"),),
    "sliding": (Limit("10/hour", algorithm="sliding_window"),),
    "log": (Limit("10/hour", algorithm="sliding_log"),),
    "warm": (Limit("60/minute", warm_up=600),),
    "month": (Limit("10/month", algorithm="fixed_window", align="Europe/Berlin"),),
}
COST = 3


def limiter_on(client: redis.Redis, now: int) -> Limiter:
    return Limiter(Scripted(client, Clock(now)), timeout=20)  # type: ignore[arg-type]


def fill(limiter: Limiter, kept: ExitStack) -> None:
    for key, limits in BUCKETS.items():
        assert limiter.hit(key, *limits, cost=COST).allowed
    limiter.hit("banned", "10/hour", cost=COST)
    limiter.ban("banned", 3600)
    limiter.ban("banned for ever")
    kept.enter_context(limiter.slot("slots", "2 at once"))
    limiter.reserve("held", "10/hour", cost=COST, hold="10m")


def states(limiter: Limiter) -> dict[str, Any]:
    """What a user sees of each bucket."""
    found: dict[str, Any] = {key: [window.used for window in limiter.peek(key, *of).windows] for key, of in BUCKETS.items()}
    for key in ("banned", "banned for ever"):
        decision = limiter.banned(key)
        found[key] = [decision.allowed, round(min(decision.retry_after, 1e9))]
    found["after the ban"] = [window.used for window in limiter.peek("banned", "10/hour").windows]
    found["held"] = [window.used for window in limiter.peek("held", "10/hour").windows]
    with limiter.slot("slots", "2 at once") as decision:
        found["slots"] = decision.remaining
    return found


@pytest.mark.parametrize("file", FORMATS, ids=lambda file: file.stem)
def test_stored_format_is_read(file: Path, redis_server: RedisServer) -> None:
    """Two seconds later no usage is lost, no ban, no slot and no reservation."""
    stored = json.loads(file.read_text())
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushdb()
        for key, value in stored["keys"].items():
            client.set(key, bytes.fromhex(value))
        assert states(limiter_on(client, stored["now"] + 2_000_000)) == stored["states"]


def test_stored_format_of_the_present_code_has_a_file(redis_server: RedisServer) -> None:
    """The newest file is what this version writes: a change of the format needs another file, and the changelog says so."""
    stored = json.loads(FORMATS[-1].read_text())
    with redis.Redis.from_url(redis_server.url) as client:
        written, found = dump(client)
    assert {key: len(value) for key, value in written.items()} == {key: len(value) for key, value in stored["keys"].items()}
    exact = [key for key in written if ":800:" not in key and ":holds:" not in key]  # slots and holds have random names
    assert {key: written[key] for key in exact} == {key: stored["keys"][key] for key in exact}
    assert found == stored["states"]


def dump(client: redis.Redis) -> tuple[dict[str, str], dict[str, Any]]:
    """Fill a server and return its values, and the states two seconds later."""
    client.flushdb()
    with ExitStack() as kept:
        fill(limiter_on(client, NOW), kept)
        keys = {key.decode(): client.get(key).hex() for key in sorted(client.keys())}
        return keys, states(limiter_on(client, NOW + 2_000_000))


if __name__ == "__main__":
    server = RedisServer()
    try:
        with redis.Redis.from_url(server.url) as opened:
            values, seen = dump(opened)
    finally:
        server.stop()
    FOLDER.mkdir(exist_ok=True)
    target = FOLDER / f"{int(sys.argv[1])}.json"
    target.touch(exist_ok=False)
    target.write_text(json.dumps({"now": NOW, "keys": values, "states": seen}, indent=1) + "\n")
