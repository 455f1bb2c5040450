"""README's whole example beside its plain rule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.contenders import starlette
from benchmarks.cpu import in_memory, on_redis
from benchmarks.drive import CLIENTS, Crowd, Crowds
from benchmarks.figures import Outcomes
from benchmarks.options import PLAIN, options
from benchmarks.readme import bare_example, example, visit
from benchmarks.rounds import Plan, alternate
from tests.support.redis_server import RedisServer

EXAMPLE, BARE_EXAMPLE = "README's whole example", "its routes without limits"


def measured(server: RedisServer, concurrencies: Sequence[int], plan: Plan) -> dict[int, Outcomes]:
    """README's whole example and its plain rule, on both stores, by concurrency."""
    visits = partial(visit, clients=CLIENTS)
    with Crowds() as crowd_of:
        crowds: dict[str, Crowd] = {
            "Starlette": crowd_of.asgi(starlette()),
            BARE_EXAMPLE: crowd_of.asgi(bare_example(), visit=visits),
        }
        for store, url in ((in_memory, ""), (on_redis, server.url)):
            crowds[store(PLAIN)] = crowd_of.asgi(options()[PLAIN].app(url))
            crowds[store(EXAMPLE)] = crowd_of.asgi(example(url), visit=visits)
        return {concurrency: alternate(crowds, concurrency, plan, server) for concurrency in concurrencies}
