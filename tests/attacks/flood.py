"""Floods of new keys and addresses through a gate: ``python -m tests.attacks.flood --requests 1000000 [--door wsgi]``.

Prints what came of it as JSON: how many requests were admitted, how many buckets are kept, by how much the process has grown,
and whether victims, who had used up their limit before, were still refused now and then and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from limitgate import LimitGate, LimitGateWSGI, MemoryStore, Rule
from limitgate.http.request import ASGIRequest, WSGIRequest
from tests.attacks.parsers import completed
from tests.support.effort import EXAMPLES

TWO_WINDOWS = Rule("all", "2/hour", "9/day", key=["api_key", "ip"])
VICTIMS = 100
LOOKS = 50
"""How often the victims are looked at during a flood."""

BUCKETS = 500
"""What the store is told to keep at most."""
REQUESTS = 100 * EXAMPLES
"""In all floods together: a crowd of ten times the buckets by default."""
FLOODS = [
    {"requests": REQUESTS // 2, "door": "asgi", "part": "api_key", "burst": 5},
    {"requests": REQUESTS // 8, "door": "wsgi", "part": "ip", "burst": 5},
    {"requests": REQUESTS // 8, "door": "asgi", "part": "ip", "burst": 1},
    {"requests": REQUESTS // 4, "door": "wsgi", "part": "api_key", "burst": 1},
]
"""Each from somebody new. After a burst of 1 every newcomer has used up its limit, too."""

Check = Callable[[str, str], bool]


def asgi_check(rules: list[Rule], store: MemoryStore) -> Check:
    """Whether a request with this API key from this address is admitted, by an ASGI gate."""
    gate: Any = LimitGate(None, rules=rules, store=store).gate

    def check(key: str, address: str) -> bool:
        headers = [(b"x-api-key", key.encode())]
        request = ASGIRequest({"type": "http", "method": "GET", "path": "/", "headers": headers, "client": (address, 1)})
        return completed(gate.acheck(request)).refusal is None

    return check


def wsgi_check(rules: list[Rule], store: MemoryStore) -> Check:
    """The same by a WSGI gate."""
    gate: Any = LimitGateWSGI(None, rules=rules, store=store).gate

    def check(key: str, address: str) -> bool:
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": address, "HTTP_X_API_KEY": key}
        return gate.check(WSGIRequest(environ)).refusal is None

    return check


CHECKS = {"asgi": asgi_check, "wsgi": wsgi_check}


def strangers(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """API keys and addresses that nobody has used before, IPv4 and IPv6 in turn."""
    chosen = random.Random(seed)
    for number in range(count):
        bits = chosen.getrandbits(64)
        if number % 2:
            yield f"{bits:016x}", f"{1 + (bits >> 24) % 223}.{bits >> 16 & 255}.{bits >> 8 & 255}.{bits & 255}"
        else:
            yield f"{bits:016x}", f"2001:{bits >> 48:x}:{bits >> 32 & 65535:x}:{bits >> 16 & 65535:x}::{bits & 65535:x}"


def _grown() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def flood(requests: int, *, door: str, part: str, burst: int, buckets: int, seed: int) -> dict[str, Any]:
    """Send a flood and say what came of it."""
    store = MemoryStore(max_buckets=buckets)
    check = CHECKS[door]([Rule("all", f"{burst}/day", key=[part])], store)
    victims = [(f"victim-{number}", f"198.51.100.{number}") for number in range(VICTIMS)]
    served = sum(check(*victim) for victim in victims for _ in range(burst))
    gc.collect()
    before, admitted, let_through, most = _grown(), 0, 0, 0
    for number, stranger in enumerate(strangers(requests, seed)):
        admitted += check(*stranger)
        if number % max(1, requests // LOOKS) == 0:
            let_through += check(*victims[number % VICTIMS])
            most = max(most, len(store))
    let_through += sum(check(*victim) for victim in victims)
    return {
        "requests": requests,
        "served": served,
        "admitted": admitted,
        "victims let through": let_through,
        "buckets": max(most, len(store)),
        "may go": len(store._pool),
        "overflow buckets": len(store._overflow),
        "grown by": _grown() - before,
    }


async def async_redis_flood(url: str, count: int) -> int:
    """How many of so many strangers an ASGI gate on Redis admits, in crowds."""
    gate: Any = LimitGate(None, rules=[TWO_WINDOWS], store=url, timeout=60).gate
    admitted, asking = 0, []
    for number, (key, address) in enumerate(strangers(count, seed=1), 1):
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/",
            "headers": [(b"x-api-key", key.encode())],
            "client": (address, 1),
        }
        asking.append(gate.acheck(ASGIRequest(scope)))
        if len(asking) == 1000 or number == count:
            admitted += sum(answer.refusal is None for answer in await asyncio.gather(*asking))
            asking.clear()
    await gate.store.aclose()
    return admitted


def redis_flood(url: str, count: int) -> int:
    """The same by a WSGI gate, one after the other."""
    gate: Any = LimitGateWSGI(None, rules=[TWO_WINDOWS], store=url, timeout=60).gate
    admitted = 0
    for key, address in strangers(count, seed=2):
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": address, "HTTP_X_API_KEY": key}
        admitted += gate.check(WSGIRequest(environ)).refusal is None
    gate.store.close()
    return admitted


def both_redis_floods(url: str, count: int) -> dict[str, int]:
    """A flood through both doors on Redis, most of it through the quicker one."""
    beside = count // 10
    admitted = asyncio.run(async_redis_flood(url, count - beside)) + redis_flood(url, beside)
    return {"requests": count, "admitted": admitted}


def in_a_process() -> list[dict[str, Any]]:
    """All floods, one after the other, in a process of their own, whose memory is theirs."""
    command = [sys.executable, "-m", "tests.attacks.flood", "--all"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--door", choices=list(CHECKS), default="asgi")
    parser.add_argument("--part", default="api_key")
    parser.add_argument("--burst", type=int, default=5)
    parser.add_argument("--buckets", type=int, default=BUCKETS, help="what the store is told to keep at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--redis", default="", help="the URL of a Redis to flood instead; the other options do not apply")
    parser.add_argument("--all", action="store_true", help="the floods of the tests instead")
    told = parser.parse_args()
    options = vars(told)
    url, is_all = options.pop("redis"), options.pop("all")
    if is_all:
        print(json.dumps([flood(**each, buckets=BUCKETS, seed=0) for each in FLOODS]))
    else:
        print(json.dumps(both_redis_floods(url, told.requests) if url else flood(**options)))


if __name__ == "__main__":
    main()
