"""What must not grow: LimitGate's cost with the number of rules, routes, windows and buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from benchmarks.contenders import EASY, PATH, PATIENCE, limitgate, rule, starlette
from benchmarks.drive import Crowd, Crowds
from benchmarks.figures import over
from benchmarks.redis_side import overheard, own_server
from benchmarks.rounds import Plan, alternate
from limitgate import Limit, Limiter, LimitGate, MemoryStore, Rule
from tests.support.redis_server import RedisServer

FEW_BUCKETS = 100

_SCARCE = (Limit("10/day"), Limit("20 per 7 days"))
"""Limits whose buckets stay where they are while it is measured."""
_FILL = """
for number = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  redis.call('RESTORE', ARGV[3] .. string.format('%032x', number), 3600000, ARGV[4])
end
return redis.status_reply('OK')
"""
"""Fills a Redis with copies of a bucket, which live for an hour."""
_BATCH = 1_000


class Growth(NamedTuple):
    """What a request cost over the bare application with little and with much."""

    what: str
    little: str
    much: str
    costs: tuple[Sequence[float], Sequence[float]]
    """µs of CPU, round by round."""


def growth(server: RedisServer, plan: Plan, buckets: int) -> list[Growth]:
    """Everything that must not grow, measured; ``buckets`` is how many are many."""
    return [_rules(plan), _routes(plan), *_windows(server, plan), _in_memory(plan, buckets), _in_redis(server, plan, buckets)]


def _rules(plan: Plan) -> Growth:
    def app(count: int) -> Starlette:
        others = [Rule(f"other-{number}", "5/second", path=f"/other-{number}/**") for number in range(count - 1)]
        return _gated(starlette(), [*others[: count // 2], rule(EASY), *others[count // 2 :]])

    return _compared("rules, one of them matches", ("1", "1,000"), (app(1), app(1_000)), (starlette(), starlette()), plan)


def _routes(plan: Plan) -> Growth:
    """A rule with the key `path`, without Starlette's router, whose own cost grows with the number of routes."""

    class Unrouted(Starlette):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await PlainTextResponse("hello")(scope, receive, send)

    def app(count: int) -> Starlette:
        return Unrouted(routes=[Route(f"/api/things-{number}/{{id}}", _nothing) for number in range(count)])

    by_route = Rule("api", *[f"{count}/{unit}" for unit, count in EASY.items()], path="/api/**", key=["path", "ip"])
    apps = tuple(LimitGate(app(count), rules=[by_route]) for count in (1, 500))
    paths = ("/api/things-0/7", "/api/things-499/7")
    return _compared("routes, rule with the key `path`", ("1", "500"), apps, (app(1), app(500)), plan, paths=paths)


async def _nothing(_: Request) -> PlainTextResponse:
    return PlainTextResponse("")


def _windows(server: RedisServer, plan: Plan) -> list[Growth]:
    five = Rule("api", *[f"{count}/{unit}" for unit, count in EASY.items()], "8000/hour", "20000 per 7 days", path="/api/**")
    one = Rule("api", "10000/day", path="/api/**")
    return [
        _compared(
            f"windows of a rule, {store}",
            ("1", "5"),
            (_gated(starlette(), [one], url), _gated(starlette(), [five], url, key_prefix="five")),
            (starlette(), starlette()),
            plan,
            concurrency=concurrency,
        )
        for store, url, concurrency in (("memory", "memory://", 1), ("Redis, 32 at once", server.url, 32))
    ]


def _in_memory(plan: Plan, buckets: int) -> Growth:
    """Other buckets in the same memory store."""
    stores = []
    for count in (FEW_BUCKETS, buckets):
        store = MemoryStore(max_buckets=2 * buckets)
        with Limiter(store) as limiter:
            for number in range(count):
                limiter.hit(f"{number}", *_SCARCE)
        stores.append(store)
    few, many = (_gated(starlette(), [rule(EASY)], store) for store in stores)
    measured = _compared("buckets in the memory store", _counts(buckets), (few, many), (starlette(), starlette()), plan)
    if len(stores[1]) < buckets:
        raise RuntimeError(f"{len(stores[1])} buckets, expected {buckets}")
    return measured


def _in_redis(server: RedisServer, plan: Plan, buckets: int) -> Growth:
    """Other buckets in the same Redis, copies of one that LimitGate made; few in this one, many in another."""
    with own_server() as other, Crowds() as crowd_of:
        apps = (limitgate(server.url, EASY), limitgate(other.url, EASY))
        for app, filled, count in zip(apps, (server, other), (FEW_BUCKETS, buckets)):
            _fill(filled, crowd_of.asgi(app), count)
        bare = (starlette(), starlette())
        return _compared("buckets in Redis, 32 at once", _counts(buckets), apps, bare, plan, concurrency=32)


def _fill(server: RedisServer, crowd: Crowd, buckets: int) -> None:
    key = next(
        argument for argument in overheard(server, lambda: crowd(iter([0]), 1))[-1] if argument.startswith(b"limitgate:")
    )
    with server.client() as client:
        value = client.dump(key)
        fill = client.register_script(_FILL)
        with client.pipeline(transaction=False) as pipeline:
            for start in range(0, buckets, _BATCH):
                fill([], [start, min(start + _BATCH, buckets) - 1, "limitgate:other:", value], client=pipeline)
            pipeline.execute()
        found = client.dbsize()
    if found < buckets:
        raise RuntimeError(f"{found} keys in Redis, expected {buckets}")


def _compared(
    what: str,
    names: tuple[str, str],
    gated: Sequence[Any],
    bare: Sequence[Any],
    plan: Plan,
    *,
    concurrency: int = 1,
    paths: tuple[str, str] = (PATH, PATH),
) -> Growth:
    with Crowds() as crowd_of:
        crowds: dict[str, Crowd] = {}
        for place in (0, 1):
            crowds[f"gated {place}"] = crowd_of.asgi(gated[place], path=paths[place])
            crowds[f"bare {place}"] = crowd_of.asgi(bare[place], path=paths[place])
        outcomes = alternate(crowds, concurrency, plan)
    little, much = (over(outcomes, f"gated {place}", f"bare {place}") for place in (0, 1))
    if little is None or much is None:
        raise RuntimeError(f"{what}: {outcomes}")
    return Growth(what, *names, (little, much))


def _gated(app: Starlette, rules: Sequence[Rule], store: Any = "memory://", key_prefix: str = "limitgate") -> Starlette:
    app.add_middleware(LimitGate, rules=rules, store=store, on_error="closed", timeout=PATIENCE, key_prefix=key_prefix)
    return app


def _counts(buckets: int) -> tuple[str, str]:
    return f"{FEW_BUCKETS:,}", f"{buckets:,}"
