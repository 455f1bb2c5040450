"""The line of requests that wait for a budget, on every store."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from limitgate import Limiter, MemoryStore, RedisStore
from limitgate.algorithms.line import KEPT_US, MAX_TICKETS, State
from limitgate.limiter.calls import carry_out
from limitgate.limiter.lining import Place, waiting_in_line
from tests.support.redis_server import RedisServer


@pytest.fixture(params=["memory", "redis"])
def limiter(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Limiter]:
    store: Any = MemoryStore() if request.param == "memory" else RedisStore(redis_server.url)
    yield Limiter(store, key_prefix=uuid4().hex, timeout=5)
    store.close()


class Waiting:
    """A request in a line."""

    def __init__(self, limiter: Limiter, tenant: str, tokens: int = 10, stays: float = 60) -> None:
        self.tenant = tenant
        self._place = Place(limiter, "k", tenant, (tokens, 0), stays)
        self.join()

    def join(self) -> State:
        self.state: State = self._place.join()
        return self.state

    def leave(self, *, is_taken: bool) -> State:
        state: State = self._place.leave(is_taken=is_taken)
        return state


def order(waiting: list[Waiting], most: int = 1_000) -> list[str]:
    """The tenants in the order of their turns."""
    called: list[str] = []
    while waiting and len(called) < most:
        first = min(waiting, key=lambda each: each.join().requests)
        assert first.state.requests == 0
        called.append(first.tenant)
        first.leave(is_taken=True)
        waiting.remove(first)
    return called


def test_what_is_ahead_is_reported(limiter: Limiter) -> None:
    first, second = Waiting(limiter, "a", 7), Waiting(limiter, "a", 5)
    third = Place(limiter, "k", "a", (3, 4), 60)
    state = third.join()
    assert first.join()[3:] == (0, 0, 0, 3)
    assert second.join()[3:] == (1, 7, 0, 3)
    assert state[3:] == (2, 12, 0, 3)
    assert Waiting(limiter, "a").state[3:] == (3, 15, 4, 4)


def test_how_many_wait_is_told_to_those_outside_the_line(limiter: Limiter) -> None:
    """Asking neither joins the line nor keeps its tickets."""
    assert carry_out(limiter, waiting_in_line(limiter, "k")) == 0
    waiting = [Waiting(limiter, "a"), Waiting(limiter, "b"), Waiting(limiter, "b")]
    Waiting(limiter, "c", stays=0.000_001)
    assert [carry_out(limiter, waiting_in_line(limiter, key)) for key in ("k", "k", "other")] == [3, 3, 0]
    waiting[1].leave(is_taken=True)
    assert carry_out(limiter, waiting_in_line(limiter, "k")) == 2


def test_a_tenant_with_many_requests_delays_another_by_one(limiter: Limiter) -> None:
    waiting = [*[Waiting(limiter, "many") for _ in range(30)], *[Waiting(limiter, "few") for _ in range(5)]]
    called = order(waiting, 12)
    assert called[:2] == ["many", "few"]
    assert called[:10].count("few") == 5


def test_turns_are_by_tokens(limiter: Limiter) -> None:
    waiting = [*[Waiting(limiter, "large", 1_000) for _ in range(5)], *[Waiting(limiter, "small", 100) for _ in range(40)]]
    assert Counter(order(waiting, 33))["large"] == pytest.approx(3, abs=1)


def test_an_idle_tenant_saves_up_no_turns(limiter: Limiter) -> None:
    waiting = [Waiting(limiter, "a") for _ in range(40)]
    for each in waiting[:20]:
        each.leave(is_taken=True)
    called = order([*waiting[20:], *[Waiting(limiter, "b") for _ in range(10)]], 20)
    assert 9 <= called.count("b") <= 10


def test_a_tenant_that_joins_again_after_its_turn_is_behind_the_others(limiter: Limiter) -> None:
    """Each process has one request of a tenant in the line at a time."""
    a, b = Waiting(limiter, "a"), Waiting(limiter, "b")
    assert order([a], 1) == ["a"]
    again = Waiting(limiter, "a")
    assert b.join().requests == 0
    assert again.state.requests == 1


def test_a_request_that_leaves_does_not_count(limiter: Limiter) -> None:
    head, large = Waiting(limiter, "x"), Waiting(limiter, "a", 1_000_000)
    large.leave(is_taken=False)
    a, b = Waiting(limiter, "a"), Waiting(limiter, "b")
    assert order([head, a, b]) == ["x", "a", "b"]
    # It has left already.
    assert large.leave(is_taken=True).waiting == 0


def test_a_ticket_that_is_not_renewed_leaves(limiter: Limiter) -> None:
    Waiting(limiter, "dead", 50, stays=0.000_001)
    assert Waiting(limiter, "a").state[3:] == (0, 0, 0, 1)


def test_a_full_line_takes_no_more_and_keeps_its_order(limiter: Limiter) -> None:
    inside = [Waiting(limiter, f"t{number}") for number in range(MAX_TICKETS)]
    outside = Waiting(limiter, "late")
    assert outside.state[3:] == (MAX_TICKETS, 10 * MAX_TICKETS, 0, MAX_TICKETS)
    inside[0].leave(is_taken=True)
    assert outside.join()[3:] == (MAX_TICKETS - 1, 10 * (MAX_TICKETS - 1), 0, MAX_TICKETS)


def test_an_unused_line_is_forgotten() -> None:
    now = 10**15
    limiter = Limiter(MemoryStore(clock=lambda: now))
    for _ in range(5):
        order([Waiting(limiter, "a", 1_000)])
    now += KEPT_US
    other = Waiting(limiter, "b")
    assert Waiting(limiter, "a").state.requests == 1
    assert other.join().requests == 0


def test_both_twins_agree_through_any_history(redis_server: RedisServer) -> None:
    """Whatever joins, stays and leaves, Python and Lua report the same."""
    dice = random.Random(5)
    store = RedisStore(redis_server.url)
    limiters = Limiter(MemoryStore()), Limiter(store, timeout=5, key_prefix=uuid4().hex)
    places: list[tuple[Place, Place]] = []
    for _ in range(1_000):
        what = dice.random()
        if what < 0.42 or not places:
            made = dice.choice("abcdefgh"), (dice.randint(0, 50), dice.randint(0, 500)), 0.000_001 if what < 0.01 else 60
            pair = Place(limiters[0], "k", *made), Place(limiters[1], "k", *made)
            places.append(pair)
            in_memory, in_redis = [each.join() for each in pair]
        elif what < 0.7:
            in_memory, in_redis = [each.join() for each in dice.choice(places)]
        else:
            place, is_taken = dice.randrange(len(places)), dice.random() < 0.5
            pair = places[place] if dice.random() < 0.05 else places.pop(place)
            in_memory, in_redis = [each.leave(is_taken=is_taken) for each in pair]
        assert in_memory[3:] == in_redis[3:]
    store.close()


def test_an_unreadable_line_begins_anew(redis_server: RedisServer) -> None:
    store, prefix = RedisStore(redis_server.url), uuid4().hex
    limiter = Limiter(store, key_prefix=prefix, timeout=5)
    Waiting(limiter, "a")
    with redis_server.client() as client:
        (key,) = [each for each in client.keys(f"{prefix}:*") if b":line:" in each]
        client.setrange(key, 0, b"\x01" + b"\xff" * 40)
        assert Waiting(limiter, "b").state[3:] == (0, 0, 0, 1)
        client.set(key, b"x")
        assert Waiting(limiter, "c").state[3:] == (0, 0, 0, 1)
        assert 0 < client.pttl(key) <= 61_000
    store.close()
