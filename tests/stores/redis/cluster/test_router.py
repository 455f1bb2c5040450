"""Redirections of a cluster's nodes: where calls go next. No connections, no servers."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import AskError, MovedError, TryAgainError

from limitgate import RedisStore
from limitgate.stores.redis.breaker import Breaker
from limitgate.stores.redis.cluster import MAX_HOPS, Route, SlotMap, hash_slot_of
from limitgate.stores.redis.threads.cluster import _Errand
from limitgate.stores.redis.wire import Call
from tests.support.clusters import charge, plan, tagged
from tests.support.crowds import a_plan

SEED, HOLDER, ASKED = ("seed", 1), ("10.0.0.1", 7001), ("asked", 7000)
MOVED, ASK, TRY_AGAIN = MovedError("1 10.0.0.1:7001"), AskError("1 10.0.0.1:7001"), TryAgainError("Multiple keys")


@pytest.fixture
def slots() -> SlotMap[Any]:
    return SlotMap([SEED], lambda _: SimpleNamespace(breaker=Breaker()))


@pytest.fixture
def call() -> Call:
    return Call([a_plan()])


def test_a_slot_that_has_moved(slots: SlotMap[Any], call: Call) -> None:
    """The call goes there at once, as later ones do, and somebody is asked who holds the other slots."""
    call.asking = True
    assert slots.route(call, MOVED, ASKED) == Route(HOLDER, "send")
    assert not call.asking
    assert slots.holder(hash_slot_of(call.plans[0])) == HOLDER
    assert slots.is_outdated


def test_a_bucket_that_has_moved(slots: SlotMap[Any], call: Call) -> None:
    """The call goes there at once, announced; later ones ask the node that still holds the slot."""
    assert slots.route(call, ASK, ASKED) == Route(HOLDER, "send")
    assert call.asking
    assert slots.holder(hash_slot_of(call.plans[0])) == SEED
    assert not slots.is_outdated


def test_buckets_on_both_sides_of_a_move(slots: SlotMap[Any], call: Call) -> None:
    """They can only be had where all of a plan are, so each plan is asked for by itself, where the slot is, after a pause."""
    assert slots.route(call, TRY_AGAIN, ASKED) == Route(SEED, "split")
    assert call.hops == 0


@pytest.mark.parametrize("redirection", [MOVED, ASK])
def test_nodes_that_send_calls_to_each_other(slots: SlotMap[Any], call: Call, redirection: Any) -> None:
    """After some hops each further one has to wait."""
    routes = [slots.route(call, redirection, ASKED) for _ in range(MAX_HOPS + 2)]
    assert routes == [Route(HOLDER, "send")] * MAX_HOPS + [Route(HOLDER, "park")] * 2


@pytest.mark.parametrize(
    ("redirection", "address"),
    [
        (MovedError("1 10.0.0.1:7001"), ("10.0.0.1", 7001)),
        (AskError("1 ::1:7001"), ("::1", 7001)),
        (MovedError("1 :7001"), ("asked", 7001)),
        (MovedError("1 ?:7001"), ("asked", 7001)),
        (MovedError("1 node.example:7001"), ("node.example", 7001)),
    ],
)
def test_where_a_redirection_leads(slots: SlotMap[Any], call: Call, redirection: Any, address: Any) -> None:
    """To a host and a port, without a host to another port of the one that was asked."""
    assert slots.route(call, redirection, ASKED) == Route(address, "send")


def test_what_a_target_cannot_do_goes_back_to_the_holder() -> None:
    """Redis 6.2 sends calls to the target of which some buckets are still here; plan by plan they are asked here first."""
    store = RedisStore("redis+cluster://127.0.0.1:1")
    first, second = (plan(charge(key)) for key in islice(tagged(7), 2))
    errand = _Errand([first, second], [0, 1], ("127.0.0.1", 2))
    errand.asking = True
    alone = store._servers._sent_on(errand, TRY_AGAIN)  # type: ignore[attr-defined]
    assert [(each.address, each.asking, each.is_parked, each.places) for each in alone] == [
        (("127.0.0.1", 1), False, True, [0]),
        (("127.0.0.1", 1), False, True, [1]),
    ]
