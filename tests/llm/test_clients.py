"""Budgets through the clients of every library, against a service on a port of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from limitgate import Limiter, MemoryStore, RateLimited
from limitgate.llm import Budget
from tests.support.clients import CLIENTS, Client
from tests.support.service import Service, Told, serving

LIMIT = "1000000000/week"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 1000}
INPUT = 100
ESTIMATE = 1100


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


@pytest.fixture(params=CLIENTS.values(), ids=CLIENTS)
def kind(request: pytest.FixtureRequest) -> type[Client]:
    return request.param


class Opened:
    """A client under a budget with one key. Its clock stands still, so nothing drains."""

    def __init__(self, kind: type[Client], **options: Any) -> None:
        self.store = MemoryStore(lambda: 1_790_000_000_000_000)
        limiter = kind.limiter(self.store)
        self.client = kind(budget=Budget(tokens=LIMIT, key=lambda _: "k"), **{"limiter": limiter, "timeout": 0, **options})

    def ask(self, service: Service, **options: Any) -> Any:
        return self.client.request("POST", service.url, json=ASKED, **options)

    @property
    def used(self) -> int:
        return Limiter(self.store).peek("k", LIMIT).windows[0].used

    @property
    def pause(self) -> float:
        return Limiter(self.store).banned("k").retry_after


@pytest.fixture
def opened(kind: type[Client]) -> Iterator[Callable[..., Opened]]:
    with contextlib.ExitStack() as stack:

        def opens(**options: Any) -> Opened:
            opened = Opened(kind, **options)
            stack.callback(opened.client.close)
            return opened

        yield opens


Opens = Callable[..., Opened]


# --- pauses -----------------------------------------------------------------------------------------------------------

NOTHING_LEFT = {
    "RateLimit": {"RateLimit": '"a";r=0;t=50'},
    "RateLimit of draft 07": {"RateLimit": "limit=10, remaining=0, reset=50"},
    "RateLimit-Remaining": {"RateLimit-Remaining": "0", "RateLimit-Reset": "50"},
    "X-RateLimit-Remaining": {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "50"},
}
EXHAUSTED = {
    "x-ratelimit-limit-tokens": "1000",
    "x-ratelimit-remaining-tokens": "0",
    "x-ratelimit-reset-tokens": "6s",
}
WITH_ROOM = EXHAUSTED | {"x-ratelimit-remaining-tokens": "900"}


def paused(opened: Opens, service: Service, status: int, fields: dict[str, str]) -> float:
    """Ask once, and return the pause of the key."""
    service.answers = [Told(status, fields, b"{}")]
    client = opened()
    with contextlib.suppress(RateLimited):
        client.ask(service)
    return client.pause


@pytest.mark.parametrize("status", [200, 429])
@pytest.mark.parametrize("fields", NOTHING_LEFT.values(), ids=NOTHING_LEFT)
def test_fields_of_any_service_count_under_a_budget(
    opened: Opens, service: Service, status: int, fields: dict[str, str]
) -> None:
    """As without a budget."""
    assert paused(opened, service, status, fields) == 50


@pytest.mark.parametrize(
    ("status", "fields", "pause"),
    [
        (200, EXHAUSTED, 6),
        (429, EXHAUSTED, 6),
        (429, {"retry-after-ms": "3000"}, 3),
        (200, WITH_ROOM, 0),
        # The provider doesn't say when to return.
        (429, WITH_ROOM, 50),
    ],
)
def test_fields_of_the_provider_come_first(
    opened: Opens, service: Service, status: int, fields: dict[str, str], pause: float
) -> None:
    assert paused(opened, service, status, NOTHING_LEFT["RateLimit"] | fields) == pause


@pytest.mark.parametrize(("first", "second"), [("10", "20"), ("20", "10"), ("soon", "20")])
def test_of_two_waits_the_longest_applies(opened: Opens, service: Service, first: str, second: str) -> None:
    assert paused(opened, service, 429, {"Retry-After": first, "retry-after": second}) == 20


@pytest.mark.parametrize("name", EXHAUSTED)
def test_fields_of_the_provider_that_contradict_each_other_do_not_count(opened: Opens, service: Service, name: str) -> None:
    twice = EXHAUSTED | {name.upper(): "5s" if "reset" in name else "5"}
    assert paused(opened, service, 200, twice) == 0
