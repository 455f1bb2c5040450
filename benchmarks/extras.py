"""README's whole example beside its plain rule, and what each option costs on top of that rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from benchmarks.contenders import BARE, PATH, README, quota_texts, rule, starlette
from benchmarks.cpu import in_memory, on_redis
from benchmarks.drive import CLIENTS, Crowd, Crowds, Visit, address, scope
from benchmarks.figures import Outcomes
from benchmarks.readme import CONFIG, PROXY, bare_example, example, options, visit
from benchmarks.rounds import Plan, alternate
from limitgate import Adaptive, Caller, LimitGate, Rule, limit
from tests.support.redis_server import RedisServer

PLAIN = "README's rule"
EXAMPLE, BARE_EXAMPLE = "README's whole example", "its routes without limits"
BUSY, LEASED = "one bucket for all clients", "the same with a lease of 50"
_Build = Callable[[str], Any]


def measured_example(server: RedisServer, concurrencies: Sequence[int], plan: Plan) -> dict[int, Outcomes]:
    """README's whole example and its plain rule, on both stores, by concurrency."""
    visits = partial(visit, clients=CLIENTS)
    with Crowds() as crowd_of:
        crowds: dict[str, Crowd] = {
            "Starlette": crowd_of.asgi(starlette()),
            BARE_EXAMPLE: crowd_of.asgi(bare_example(), visit=visits),
        }
        for store, url in _stores(server):
            crowds[store(PLAIN)] = crowd_of.asgi(_gated(url, rules=[rule(README)]))
            crowds[store(EXAMPLE)] = crowd_of.asgi(example(url), visit=visits)
        return {concurrency: alternate(crowds, concurrency, plan, server) for concurrency in concurrencies}


def measured_options(server: RedisServer, concurrency: int, plan: Plan) -> Outcomes:
    """README's rule with each option, named as in `variants`, on both stores."""
    with Crowds() as crowd_of:
        crowds: dict[str, Crowd] = {"Starlette": crowd_of.asgi(BARE["Starlette"]())}
        for store, url in _stores(server):
            crowds |= {store(name): crowd_of.asgi(build(url), visit=_visits.get(name)) for name, build in variants().items()}
        return alternate(crowds, concurrency, plan, server)


def variants() -> Mapping[str, _Build]:
    """Applications by what is different from the plain rule; each takes the URL of a Redis, or "" for memory."""
    plain = rule(README)
    busy: dict[str, Any] = {"key": ["global"], "path": "/api/**"}
    by_address: dict[str, Any] = {"key": ["ip"], "path": "/api/**"}
    return {
        PLAIN: partial(_gated, rules=[plain]),
        "behind a trusted proxy": partial(_gated, rules=[plain], trusted_proxies=[PROXY]),
        "rules of config/, with its tier": partial(_gated, rules=str(CONFIG)),
        "a decorated endpoint": _decorated,
        "three rules": partial(
            _gated, rules=[plain, Rule("second", "6000/minute", **by_address), Rule("third", "90000/hour", **by_address)]
        ),
        "charge_if": partial(_gated, rules=[_with(charge_if={"status_not": ["5xx"]})]),
        "concurrency": partial(_gated, rules=[_with(concurrency=100)]),
        "adaptive": partial(_gated, rules=[_with(adaptive=Adaptive(min=100))]),
        "identify": partial(_gated, rules=[plain], identify=_identify),
        "shadow": partial(_gated, rules=[_with(shadow=True)]),
        "draft-11 headers besides": partial(_gated, rules=[plain], headers=["x-ratelimit", "draft-11"]),
        BUSY: partial(_gated, rules=[Rule("api", "100000/second", **busy)]),
        LEASED: partial(_gated, rules=[Rule("api", "100000/second", lease=50, **busy)]),
    }


_visits: Mapping[str, Visit] = {
    "behind a trusted proxy": lambda number: scope(
        PATH, PROXY, fields=[(b"x-forwarded-for", address(number % CLIENTS).encode())]
    )
}


def _stores(server: RedisServer) -> Sequence[tuple[Callable[[str], str], str]]:
    return (in_memory, ""), (on_redis, server.url)


def _with(**others: Any) -> Rule:
    return Rule("api", *quota_texts(README), path="/api/**", key=["path", "ip"], **others)


def _gated(url: str, app: Starlette | None = None, **others: Any) -> Starlette:
    app = app or starlette()
    app.add_middleware(LimitGate, **options(url), key_prefix=f"limitgate-{id(app)}", **others)
    return app


def _decorated(url: str) -> Starlette:

    @limit("90000/hour", key=["ip"])
    async def hello(_: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    return _gated(url, Starlette(routes=[Route(PATH, hello)]), rules=[rule(README)])


def _identify(_: Any) -> Caller:
    return Caller("ann")
