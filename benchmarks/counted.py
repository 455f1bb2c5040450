"""The program that callgrind runs for `benchmarks.instructions`: every case in turn, with a mark before and after.

    python -m benchmarks.counted REDIS_URL MARKS_LIBRARY TIMES

Whatever depends on when and where it runs is kept out: nothing is counted before every case has answered all of its clients
once, the garbage collector has run and is off, and the memory store's clock goes by requests.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from ctypes import CDLL
from functools import partial
from itertools import count, cycle, islice
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from benchmarks.contenders import flask, starlette
from benchmarks.drive import Crowd, Crowds, trouble
from benchmarks.options import PLAIN, options, visit as options_visit
from benchmarks.readme import RULE, bare_example, example, visit
from limitgate import Limiter, LimitGate, LimitGateWSGI, MemoryStore, Rule
from limitgate.flask import LimitGate as Extension
from limitgate.fleet.publisher import Publisher
from limitgate.observing.exporter import exporter
from limitgate.prometheus import PrometheusObserver

FEW, MANY = 32, 96
"""Requests between two marks. Both are counted, and the difference is what so many more cost: what comes once cancels out."""
CROWDED = 32
OPTIONS: dict[str, Any] = {"on_error": "closed", "timeout": 60.0}
"""Nothing is late, however slow it is under callgrind."""
CLIENTS = 128
"""Clients of each case. Each sends a request before the count begins, so there are few."""
_BETWEEN_US = 80_000
"""From one reading of the memory store's clock to the next: a lap of all clients takes ten seconds."""


REFUSING = Rule("api", path="/api/**", key=["path", "ip"], qps=5, qpm=100, qpd=1)
"""README's rule, but that a client's second request of a day is refused."""
ON_REDIS = ("api_key", "two rules, ip and api_key", "charge_if", "concurrency")
"""The options that are counted on Redis, too."""


class Case(NamedTuple):
    """A crowd in front of an application, and how requests are sent."""

    crowd: Crowd
    concurrency: int = 1
    expected: int = 200


_STARLETTE, _STARLETTE_CROWDED, _WSGI, _EXAMPLE = "Starlette", "Starlette, 32 at once", "a WSGI application", "README's routes"
_FLASK = "Flask"
_KEYED, _KEYED_CROWDED = "Starlette, clients with keys", "Starlette, clients with keys, 32 at once"
IN_MEMORY = [f"ASGI, memory, {name}" for name in options() if name != PLAIN]
"""Cases of options in memory. tests/test_path.py counts their calls."""
BARE: Mapping[str, str] = {
    "ASGI, memory": _STARLETTE,
    "ASGI, Redis, 1 at once": _STARLETTE,
    "ASGI, Redis, 32 at once": _STARLETTE_CROWDED,
    "WSGI, memory": _WSGI,
    "WSGI, Redis": _WSGI,
    "Limiter, memory": _WSGI,
    "Limiter, Redis": _WSGI,
    "ASGI, memory, refused": "",
    "ASGI, Redis, refused": "",
    "README's example, memory, 32 at once": _EXAMPLE,
    "README's example, Redis, 32 at once": _EXAMPLE,
    "ASGI, memory, observed": _STARLETTE,
    "ASGI, memory, refused, observed": "",
    "Flask, memory": _FLASK,
    **dict.fromkeys(IN_MEMORY, _KEYED),
    **{f"ASGI, Redis, 32 at once, {name}": _KEYED_CROWDED for name in ON_REDIS},
}
"""The cases that are kept, each with the one that is taken off; "" for none, where no application is reached."""
OBSERVED: Mapping[str, str] = {
    "ASGI, memory, observed": "ASGI, memory",
    "ASGI, memory, refused, observed": "ASGI, memory, refused",
}
"""The cases that are counted for an observer, each with the same one that is not."""


def cases(url: str, crowd_of: Crowds) -> Mapping[str, Case]:
    """All cases by name."""
    visits = partial(visit, clients=CLIENTS)
    asgi, wsgi = partial(crowd_of.asgi, clients=CLIENTS), partial(crowd_of.wsgi, clients=CLIENTS)
    bare = asgi(starlette())

    def keyed(app: Any, name: str = PLAIN) -> Crowd:
        return crowd_of.asgi(app, visit=partial(options_visit, name))

    bare_keyed = keyed(starlette())
    crowds = (
        Case(asgi(_gated(memory()))),
        # Two applications: after 2,048 requests to one, a request would count the clients, which otherwise a timer does.
        Case(asgi(_gated(url))),
        Case(asgi(_gated(url)), CROWDED),
        Case(wsgi(_gated_wsgi(memory()))),
        Case(wsgi(_gated_wsgi(url))),
        Case(wsgi(_limited_wsgi(memory()))),
        Case(wsgi(_limited_wsgi(url))),
        Case(crowd_of.asgi(_gated(memory(), REFUSING), clients=1), expected=429),
        Case(crowd_of.asgi(_gated(url, REFUSING), clients=1), expected=429),
        Case(crowd_of.asgi(example(memory(), **OPTIONS), visit=visits), CROWDED),
        Case(crowd_of.asgi(example(url, **OPTIONS), visit=visits), CROWDED),
        Case(asgi(_observed())),
        Case(crowd_of.asgi(_observed(REFUSING), clients=1), expected=429),
        Case(wsgi(_gated_flask(memory()))),
        *[Case(keyed(option.app(memory(), **OPTIONS), name)) for name, option in options().items() if name != PLAIN],
        *[Case(keyed(options()[name].app(url, **OPTIONS), name), CROWDED) for name in ON_REDIS],
    )
    return {
        _STARLETTE: Case(bare),
        _STARLETTE_CROWDED: Case(bare, CROWDED),
        _WSGI: Case(wsgi(_bare_wsgi)),
        _FLASK: Case(wsgi(flask())),
        _KEYED: Case(bare_keyed),
        _KEYED_CROWDED: Case(bare_keyed, CROWDED),
        _EXAMPLE: Case(crowd_of.asgi(bare_example(), visit=visits), CROWDED),
        **dict(zip(BARE, crowds, strict=True)),
    }


def main() -> None:
    """Answer every case's requests, or those of the named cases, between marks."""
    url, library, times, *names = sys.argv[1:]
    chosen = {each for name in names or BARE for each in (name, BARE[name])}
    marks = CDLL(library)
    # What is off a request's way isn't counted: clocks that go by looks would have snapshots written all the time.
    Publisher.start = lambda *_, **__: None  # type: ignore[method-assign]
    with Crowds() as crowd_of:
        prepared = {name: (case, cycle(range(CLIENTS))) for name, case in cases(url, crowd_of).items() if name in chosen}
        for case, numbers in prepared.values():
            case.crowd(islice(numbers, CLIENTS), case.concurrency)
        gc.collect()
        gc.freeze()
        gc.disable()
        for case, numbers in prepared.values():
            case.crowd(islice(numbers, FEW), case.concurrency)
        marks.begin()
        for _ in range(int(times)):
            for name, (case, numbers) in prepared.items():
                for requests in (FEW, MANY):
                    run = islice(numbers, requests)
                    marks.zero()
                    tally = case.crowd(run, case.concurrency)
                    marks.keep(f"{name}|{requests}".encode())
                    if tally[case.expected] != requests:
                        raise RuntimeError(f"{name}: {trouble(tally, (case.expected,))}")


def memory() -> MemoryStore:
    """A store in memory whose clock goes by requests."""
    return MemoryStore(partial(next, count(1_700_000_000_000_000, _BETWEEN_US)))


def _gated(store: Any, rule: Rule = RULE) -> LimitGate:
    return LimitGate(starlette(), rules=[rule], store=store, **OPTIONS)


def _observed(rule: Rule = RULE) -> LimitGate:
    """A gate that counts. Nothing is handed over meanwhile, as the thread that does it is taken to be awake already."""
    app = LimitGate(starlette(), rules=[rule], store=memory(), observers=[PrometheusObserver(CollectorRegistry())], **OPTIONS)
    exporter.is_idle = False
    return app


def _gated_wsgi(store: Any) -> LimitGateWSGI:
    return LimitGateWSGI(_bare_wsgi, rules=[RULE], store=store, **OPTIONS)


def _gated_flask(store: Any) -> Any:
    app = flask()
    Extension(app, rules=[RULE], store=store, **OPTIONS)
    return app


def _limited_wsgi(store: Any) -> Any:
    """The application that asks a limiter by itself, for README's own limits."""
    limiter = Limiter(store, timeout=OPTIONS["timeout"])

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if not limiter.hit(environ["REMOTE_ADDR"], *RULE.limits).allowed:
            raise RuntimeError("a client was refused, expected buckets that drain between two visits")
        return _bare_wsgi(environ, start_response)

    return app


def _bare_wsgi(_: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("content-type", "text/plain"), ("content-length", "5")])
    return [b"hello"]


if __name__ == "__main__":
    main()
