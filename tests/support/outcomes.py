"""Sites whose answers are told by the request, and what their buckets owe: for limits that depend on how a request ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl

from limitgate import MemoryStore, StoreError
from limitgate.algorithms import gcra
from limitgate.limits.plan import Plan
from tests.support.clock import Clock
from tests.support.doors import ASGISite, WSGISite
from tests.support.stored import buckets

PLAIN = [("Content-Type", "text/plain")]
START: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": []}
END: dict[str, Any] = {"type": "http.response.body", "body": b"hello"}


class Watched(MemoryStore):
    """A store that keeps what it is asked, and fails at some of it."""

    measures_silence = takes_plain = True

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        super().__init__(self.clock)
        self.plans: list[Plan] = []
        self.fails: tuple[str, ...] = ()
        """What it fails at: to ``take``, to ``correct``."""

    def spend(self, plan: Any, timeout: float = 0) -> Any:
        self.plans.append(plan)
        if ("take" if plan.verb == "spend" else "correct") in self.fails:
            raise StoreError("out of order")
        return super().spend(plan)

    @property
    def corrections(self) -> int:
        """How often it was asked to put something right."""
        return sum(plan.verb == "adjust" for plan in self.plans)

    @property
    def owed(self) -> dict[str, float]:
        """Requests that the first windows of each rule's buckets owe by now, where they owe any."""
        return owed(self, self.clock())


def owed(store: MemoryStore, now: int) -> dict[str, float]:
    """Requests that the first windows of each rule's buckets owe at a time, where they owe any."""
    found: dict[str, float] = {}
    for key, (written, _, bucket, debts) in buckets(store).items():
        left = gcra.advance(debts, now - written, bucket)[0] / bucket.weights[0]
        rule = key.split(":")[1]
        if left:
            found[rule] = found.get(rule, 0) + left
    return found


def obey(path_query: str, decision: Any, clock: Clock | None) -> int:
    """Do what a query says, step by step, as ``?wait=3&settle=5&settle=7/tokens&raise=1&status=401``; the status."""
    status = 200
    for step, value in parse_qsl(path_query):
        if step == "wait":
            clock.advance(float(value))
        elif step == "settle":
            cost, _, rule = value.partition("/")
            decision.settle(int(cost), *[rule] if rule else [])
        elif step == "raise":
            raise LookupError("the application's own")
        else:
            status = int(value)
    return status


class ASGIOutcomes(ASGISite):
    """The ASGI door to an application that does what the query says."""

    def __init__(self, *rules: Any, **options: Any) -> None:
        self.store = options.setdefault("store", Watched())
        super().__init__(*rules, **options)
        self.gate = self.app.gate

    def answering(self, status: int, headers: list[tuple[str, str]], body: bytes, seen: list[Any]) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["limitgate"])
            query = scope["query_string"].decode()
            status = obey(query, scope["limitgate"], getattr(self.store, "clock", None))
            await send({**START, "status": status})
            await send({**END, "body": b"" if scope["method"] == "HEAD" else body})

        return app


class WSGIOutcomes(WSGISite):
    """The WSGI door to an application that does what the query says."""

    def __init__(self, *rules: Any, **options: Any) -> None:
        self.store = options.setdefault("store", Watched())
        super().__init__(*rules, **options)
        self.gate = self.app.gate

    def answering(self, status: int, headers: list[tuple[str, str]], body: bytes, seen: list[Any]) -> Any:
        def app(environ: Any, start_response: Any) -> Iterable[bytes]:
            seen.append(environ["limitgate"])
            status = obey(environ["QUERY_STRING"], environ["limitgate"], getattr(self.store, "clock", None))
            start_response(f"{status} As Told", list(PLAIN))
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

        return app
