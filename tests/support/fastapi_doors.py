"""FastAPI applications behind a gate whose clock stands still, and FastAPI's own client for them, which is Starlette's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import fastapi
from starlette.testclient import TestClient, WebSocketDenialResponse as Denied

from limitgate import LimitGate, MemoryStore
from tests.support.clock import Clock
from tests.support.doors import PEER
from tests.support.stored import buckets

__all__ = ["Denied", "TestClient", "client", "gated", "refused_by", "statuses", "used"]


def gated(app: fastapi.FastAPI, *rules: Any, **options: Any) -> MemoryStore:
    """Put a gate into an application; its store."""
    store = options.setdefault("store", MemoryStore(Clock()))
    app.add_middleware(LimitGate, rules=rules, **options)
    return store


def client(app: Any, peer: str = PEER, **more: Any) -> TestClient:
    """FastAPI's own client, calling from an address. Starlette's has a parameter for that since 0.42 only."""

    async def called(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "client": (peer, 50000)}, receive, send)

    return TestClient(called, **more)


def statuses(app: Any, *paths: str, method: str = "GET", **more: Any) -> list[int]:
    """The statuses of requests through FastAPI's client."""
    return [client(app).request(method, path, **more).status_code for path in paths]


def refused_by(reply: Any) -> list[str]:
    """The limits that a refusal names."""
    assert reply.status_code == 429
    assert reply.headers["content-type"] == "application/problem+json"
    policies: list[str] = reply.json()["violated-policies"]
    return policies


def used(store: MemoryStore) -> dict[str, int]:
    """What all buckets of each limit have been charged, to the tick."""
    total: Counter[str] = Counter()
    for key, (_, _, bucket, debts) in buckets(store).items():
        requests, rest = divmod(debts[0], bucket.limits[0].period_us)
        assert rest == 0
        total[key.split(":")[1]] += requests
    return {name: requests for name, requests in total.items() if requests}
