"""What is remembered of clients takes a bounded number of bytes, whatever they send and however long it is."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count
from operator import attrgetter
from typing import Any

import httpx
import pytest

from limitgate import Limiter, MemoryStore, Rule
from limitgate.gate.planning.cardinality import SOURCES, CardinalityGuard
from limitgate.http.client_ip import REMEMBERED, SHORT, TrustedProxies, grouped
from limitgate.http.request import ASGIRequest, Request, WSGIRequest
from limitgate.httpx import RateLimitTransport
from limitgate.keys import Key
from limitgate.limiter.plans import Configured
from limitgate.outbound import throttle
from tests.support.doors import SITES, ASGISite, Site, http_scope, wsgi_environ

LONG, MANY = 60_000, 200
"""Characters of what is sent, and how often something else is: 12 MB, if it were kept."""
MEGABYTE = 1_000_000
BUCKETS = Rule("all", "9/day", key=["ip", "host", "method", "header:x-id", "api_key|ip", "user|header:x-more"])

pytestmark = pytest.mark.usefixtures("_unwatched")


@contextlib.contextmanager
def growing_less_than(most: int) -> Iterator[None]:
    """Fail where more bytes are kept at the end than at the beginning, by more than so many."""
    with traced() as grown:
        yield
        more = grown()
    assert more < most, f"{more / MEGABYTE:.1f} MB"


@contextlib.contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Give a function that tells how many more bytes are kept than at its previous call."""

    def grown() -> int:
        nonlocal before
        gc.collect()
        now, _ = tracemalloc.get_traced_memory()
        more, before = now - before, now
        return more

    before = 0
    tracemalloc.start()
    try:
        yield grown
    finally:
        tracemalloc.stop()


def text(number: int, length: int) -> str:
    """A text that nobody has sent before."""
    return f"{number:08d}".ljust(length, "x")


def newcomers() -> Callable[[str], object]:
    counting, numbers = CardinalityGuard(1000, lambda: 0.0), count()
    return lambda source: counting.open(next(numbers), source, "rule")


def a_key() -> Callable[[str], object]:
    return Key(["ip"], "rule").digest


def a_limiter() -> Callable[[str], object]:
    limiter = Limiter(MemoryStore())
    return lambda key: limiter.hit(key, "5/second")


def a_client() -> Callable[[str], object]:
    """A polite client whose keys have no end, as hosts of redirects, each of them left alone."""
    service = httpx.MockTransport(lambda _: httpx.Response(503, headers={"Retry-After": "900"}))
    keys: list[str] = []
    polite = RateLimitTransport(transport=service, key=lambda _: keys.pop())

    def use(key: str) -> object:
        keys.append(key)
        return polite.handle_request(httpx.Request("GET", "http://service"))

    return use


CACHES: dict[str, Callable[[], Callable[[str], object]]] = {
    "addresses": lambda: TrustedProxies(["192.0.2.1"], "x-forwarded-for").trust,
    "networks": lambda: lambda client: grouped(client, 64),
    "sources": newcomers,
    "digests": a_key,
    "limiter": a_limiter,
    "outbound": a_client,
}
"""What remembers something about a text that others choose."""


@pytest.mark.parametrize("made", CACHES.values(), ids=CACHES)
def test_long_names_are_not_kept(made: Callable[[], Callable[[str], object]], caplog: pytest.LogCaptureFixture) -> None:
    """However long the names are that something is remembered of, they are not kept."""
    caplog.set_level(logging.CRITICAL, "limitgate")  # else what is logged is kept for the test
    use = made()
    use(text(MANY, LONG))
    with growing_less_than(MEGABYTE):
        for number in range(MANY):
            use(text(number, LONG))


@pytest.mark.parametrize(("cache", "most", "length"), [(cache, REMEMBERED, SHORT) for cache in ("addresses", "networks")])
def test_many_names_take_a_bounded_number_of_bytes(cache: str, most: int, length: int) -> None:
    """However many names there are of the greatest length that is remembered, they take 10 MB at most."""
    use = CACHES[cache]()
    with growing_less_than(10 * MEGABYTE):
        for number in range(2 * most):
            use(text(number, length))


@pytest.mark.parametrize("kind", SITES, ids=attrgetter("door"))
@pytest.mark.parametrize("headers", [{}, {"x-forwarded-for": "203.0.{high}.{low}"}], ids=["direct", "by a proxy"])
@pytest.mark.parametrize("options", [{}, {"charge_if": {"status": [401]}}], ids=["plain", "by outcome"])
def test_nothing_is_remembered_of_clients(kind: type[Site], headers: dict[str, str], options: Any) -> None:
    """By what most services run, a gate keeps nothing of its clients beside their buckets."""
    rule = Rule("api", "5/second", key=["path", "ip"], **options)
    store = MemoryStore(max_buckets=10)
    make: Any = http_scope if kind is ASGISite else wsgi_environ
    with kind(rule, store=store, trusted_proxies=["10.0.0.0/8"] if headers else []) as it:

        def requests(numbers: range) -> Iterator[Any]:
            for number in numbers:
                high, low = divmod(number, 256)
                sent = {name: value.format(high=high, low=low) for name, value in headers.items()}
                yield make("/a", headers=sent, peer="10.0.0.1" if sent else f"192.0.{high}.{low}")

        async def acheck(numbers: range) -> None:  # in one task, as pytest keeps what asyncio logs of each that took long
            for made in requests(numbers):
                await it.app.gate.acheck(ASGIRequest(made))

        def ask(numbers: range) -> None:
            if isinstance(it, ASGISite):
                it.runner.run(acheck(numbers))
            else:
                for made in requests(numbers):
                    it.app.gate.check(WSGIRequest(made))

        with traced() as grown:  # from the first request on: what replaces an untraced object looks like growth
            ask(range(600))
            before = grown()
            rounds = []
            for first in range(600, 6_000, 600):  # other threads of the process may keep something meanwhile
                ask(range(first, first + 600))
                rounds.append(grown())
                if rounds[-1] < 5_000:
                    break
        assert min(rounds) < 5_000, (before, rounds)


def test_many_sources_take_a_bounded_number_of_bytes() -> None:
    """However many addresses open buckets, what is known of them takes 40 MB at most."""
    use = CACHES["sources"]()
    with growing_less_than(40 * MEGABYTE):
        for number in range(SOURCES + SOURCES // 2):
            use(text(number, 100))


def long_requests(kind: type[Site], length: int, numbers: range) -> Iterator[Request]:
    """Requests in which everything is long that a client, or a server that believes it, may choose."""
    for number in numbers:
        long = text(number, length)
        headers = {
            "x-id": long,
            "x-more": long,
            "x-api-key": long,
            "host": long,
            "x-forwarded-for": long,
            "forwarded": f"for={long}",
        }
        make: Any = http_scope if kind is ASGISite else wsgi_environ
        made = make(f"/{long}?{long}", method=long.upper(), headers=headers, peer=long)
        yield (ASGIRequest if kind is ASGISite else WSGIRequest)(made)


@pytest.mark.parametrize("length", [240, 16_000, LONG])
@pytest.mark.parametrize("kind", SITES, ids=attrgetter("door"))
def test_a_gate_keeps_nothing_long(kind: type[Site], length: int) -> None:
    """Whatever is long in a request, a gate keeps none of it once the request is over: not a fifth of 16,000 characters."""
    store = MemoryStore(max_buckets=10)
    with kind(BUCKETS, store=store, trusted_proxies=["192.0.2.1"]) as it:
        gate, most = it.app.gate, max(MEGABYTE, 4000 * MANY)

        def ask(numbers: range) -> None:
            for request in long_requests(kind, length, numbers):
                if isinstance(it, ASGISite):
                    it.runner.run(gate.acheck(request))
                else:
                    gate.check(request)

        ask(range(MANY, MANY + 5))
        with growing_less_than(most):
            ask(range(MANY))


def test_keys_of_many_long_parts(site_of_many: Site) -> None:
    """Of keys whose parts are just not cut off, nothing is remembered either."""
    gate = site_of_many.app.gate
    with growing_less_than(MEGABYTE):
        for number in range(2_000):
            value = text(number, 190)
            headers = {f"x-part-{part}": value for part in range(8)}
            gate.check(WSGIRequest(wsgi_environ(headers=headers)))


@pytest.fixture
def site_of_many() -> Iterator[Site]:
    """A site whose key has eight parts."""
    rule = Rule("parts", "9/day", key=[f"header:x-part-{part}" for part in range(8)])
    kind = next(kind for kind in SITES if kind is not ASGISite)
    with kind(rule, store=MemoryStore(max_buckets=10), new_buckets=0) as it:
        yield it


def test_configured_names_that_nobody_configured_are_not_kept() -> None:
    """Names under which nothing is configured leave nothing behind."""
    limiter = Limiter(MemoryStore())
    with growing_less_than(MEGABYTE):
        for number in range(MANY):
            with contextlib.suppress(Exception):
                limiter.hit("key", Configured(text(number, LONG)))


def test_what_a_client_throttle_remembers_is_bounded() -> None:
    """Ten thousand keys take 10 MB at most, however long they are."""
    times: dict[str, float] = {}
    with growing_less_than(10 * MEGABYTE):
        for number in range(throttle.REMEMBERED):
            throttle._remember(times, throttle._short(text(number, 1000)), math.inf)
