"""Connections that the network has dropped while they lay idle, without a word to either side."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from limitgate import StoreError
from limitgate.limits.plan import Plan, full_refund
from limitgate.limits.template import PlanTemplate, RefundTemplate
from limitgate.stores.redis import dialer, session as sessions
from limitgate.stores.redis.session import DOUBT, MOST_DOUBT, Doubts
from tests.stores.test_config import ask as ask_config
from tests.stores.test_stores import PATIENT, Door
from tests.support.clusters import KINDS, PLAIN_KINDS, charge, keys_on, plan, used
from tests.support.crowds import store_at, used as used_by
from tests.support.drops import ForgetfulNat
from tests.support.impostor import Impostor
from tests.support.proxy import in_a_loop
from tests.support.redis_cluster import RedisCluster, eventually
from tests.support.redis_server import RedisServer
from tests.support.server_features import ANNOUNCES, needs

TIMEOUT = 4.0
"""Seconds: a sixteenth of it is enough, but the machine may be busy."""
IDLE = 0.02
"""Seconds."""
MASTERS = 2


@pytest.fixture(autouse=True)
def _soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection counts as idle when the network forgets it, and is doubted soon."""
    monkeypatch.setattr(sessions, "IDLE", IDLE)
    monkeypatch.setattr(sessions, "LONGEST_DOUBT", 0.05)
    monkeypatch.setattr(dialer, "ASK_TIMEOUT", PATIENT)
    monkeypatch.setattr(dialer, "_BRIEF", dict.fromkeys(dialer._BRIEF, PATIENT))


class Servers:
    """Servers behind networks that forget."""

    def __init__(self, url: str, nats: list[ForgetfulNat]) -> None:
        self.url = url
        self._nats = nats

    def forget(self) -> None:
        for nat in self._nats:
            nat.forget()
        time.sleep(2 * IDLE)

    @property
    def made(self) -> int:
        """Connections so far."""
        return sum(nat.made for nat in self._nats)


@pytest.fixture
def one(redis_server: RedisServer) -> Iterator[Servers]:
    with ForgetfulNat(redis_server) as nat:
        yield Servers(nat.url, [nat])


@pytest.fixture
def sentinel(one: Servers) -> Iterator[Servers]:
    port = one.url.rpartition(":")[2].partition("/")[0]
    with Impostor(SENTINEL=f"*2\r\n$9\r\n127.0.0.1\r\n${len(port)}\r\n{port}\r\n".encode()) as place:
        yield Servers(f"redis+sentinel://{place.place}/limits", one._nats)


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[RedisCluster, list[ForgetfulNat]]]:
    """Nodes of a cluster that name the addresses of their networks."""
    needs(ANNOUNCES)
    with contextlib.ExitStack() as stack:
        cluster = RedisCluster(MASTERS)
        stack.callback(cluster.stop)
        nats = [stack.enter_context(ForgetfulNat(node)) for node in cluster.masters]
        for node, nat in zip(cluster.masters, nats, strict=True):
            cluster.say(node, "CONFIG", "SET", "cluster-announce-bus-port", node.port + 10_000)
            cluster.say(node, "CONFIG", "SET", "cluster-announce-port", nat.port)
        ports = {nat.port for nat in nats}
        for node in cluster.masters:
            eventually(lambda asked=node: ports == _ports(cluster.say(asked, "CLUSTER", "SLOTS")), "all ports")  # type: ignore[misc]
        yield cluster, nats


def _ports(slots: Any) -> set[int]:
    return {master[1] for _, _, master, *_ in slots}


@pytest.fixture
def cluster(nodes: tuple[RedisCluster, list[ForgetfulNat]]) -> Servers:
    nats = nodes[1]
    return Servers(f"redis+cluster://{','.join(f'127.0.0.1:{nat.port}' for nat in nats)}", nats)


@pytest.fixture(params=["one", "sentinel", "cluster"])
def servers(request: pytest.FixtureRequest) -> Servers:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=PLAIN_KINDS)
def door(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Door]:
    with contextlib.closing(PLAIN_KINDS[request.param](servers.url, local_refusals=False)) as door:
        yield door


@pytest.fixture(params=KINDS)
def single(request: pytest.FixtureRequest, one: Servers) -> Iterator[Door]:
    with contextlib.closing(KINDS[request.param](one.url, local_refusals=False)) as door:
        yield door


def admitted(door: Door, *plans: Plan) -> list[bool]:
    return [door.spend(each, TIMEOUT).admitted for each in plans]


def test_no_request_is_decided_without_redis(door: Door, servers: Servers) -> None:
    """However often connections are dropped: the first call gets its answer on another one, and is charged once."""
    plans = [plan(charge(uuid4().hex, "5/day"))] * 2
    assert admitted(door, *plans) == [True] * 2
    for expected in ([True, True], [True, False], [False, False]):
        servers.forget()
        assert admitted(door, *plans) == expected
    assert door.store.failures == 0
    assert used(door, *plans[0].charges) == [5]


@pytest.mark.parametrize("kind", KINDS)
def test_all_nodes_that_a_request_needs_at_once(kind: str, cluster: Servers) -> None:
    """Connections to several nodes may be dropped at the same time."""
    charges = [charge(next(keys_on(place, masters=MASTERS)), "5/day") for place in range(MASTERS)]
    with contextlib.closing(KINDS[kind](cluster.url, local_refusals=False)) as door:
        assert admitted(door, plan(*charges)) == [True]
        for _ in range(2):
            cluster.forget()
            assert admitted(door, plan(*charges)) == [True]
        assert used(door, *charges) == [3, 3]
        assert (door.store.failures, door.store.not_given_back) == (0, 0)


def test_a_crowd(single: Door, one: Servers) -> None:
    """Many that come at the same time are all answered, and the limit holds."""
    crowded = plan(charge(uuid4().hex, "50/day"))
    assert admitted(single, crowded) == [True]
    one.forget()
    found = [reading.admitted for reading in single.crowd([crowded] * 100)]
    assert found.count(True) <= 49
    assert single.store.failures == 0
    assert one.made == 2


def test_a_poll_for_configuration(single: Door, one: Servers) -> None:
    """Whatever comes first is asked again."""
    key = uuid4().hex
    assert ask_config(single, key, "kept") == (1, "kept")
    one.forget()
    assert ask_config(single, key, timeout=TIMEOUT) == (1, "kept")
    assert single.store.failures == 0


def test_what_gives_back_is_not_lost(single: Door, one: Servers) -> None:
    """It must not be sent twice, so it is sent once it is known that the connection was not dropped."""
    taking = plan(charge(uuid4().hex, "5/day", cost=3))
    back = full_refund(taking, single.spend(taking, PATIENT))
    one.forget()
    single.spend(back, TIMEOUT)
    assert used(single, *taking.charges) == [0]
    assert single.store.failures == 0
    assert one.made == 2


@in_a_loop
async def test_a_refund_after_an_unanswered_call_is_not_lost(one: Servers) -> None:
    """The other call is in flight on the same connection, so nothing shows yet that it was dropped."""
    async with store_at(one.url) as store:
        taking, other = [plan(charge(uuid4().hex, "5/day", cost=3)) for _ in range(2)]
        spent = await store.aspend(taking, PATIENT)
        one.forget()
        calls = [asyncio.ensure_future(store.aspend(other, TIMEOUT))]
        await asyncio.sleep(0.01)
        calls.append(asyncio.ensure_future(store.aspend(full_refund(taking, spent), TIMEOUT)))
        await asyncio.gather(*calls)
        assert [await used_by(store, each.charges[0].key, "5/day") for each in (taking, other)] == [0, 3]
        assert one.made == 2


@pytest.mark.parametrize("limit", ["5/day", "5 at once"])
def test_a_plain_refund_is_not_lost(single: Door, one: Servers, limit: str) -> None:
    """As above, for one by a script of its own."""
    template = PlanTemplate([charge("", limit, cost=3)])
    spent = single.spend(template.asked([key := uuid4().hex]), PATIENT)
    one.forget()
    single.spend(RefundTemplate(template, [0]).of(spent), TIMEOUT)
    taken = charge(key, limit)
    (before,) = single.spend(Plan.peek([taken]), PATIENT).buckets[0].before
    assert taken.bucket.algorithm.used(before, taken.bucket.limits[0]) == 0
    assert single.store.failures == 0
    assert one.made == 2


def test_what_gives_back_does_not_ask_before_each_call(single: Door, one: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on a connection that lay idle."""
    monkeypatch.setattr(sessions, "IDLE", PATIENT)
    taking = plan(charge(uuid4().hex, "5/day", cost=3))
    asked: list[int] = []
    understood = single.store.understood
    single.store.understood = lambda call, *rest: (asked.append(len(call.plans[0].charges)), understood(call, *rest))[1]
    single.spend(full_refund(taking, single.spend(taking, PATIENT)), PATIENT)
    assert asked == [1, 1]
    assert one.made == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_only_slow(kind: str, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer comes first where its server goes on: nothing is charged twice, and no connection is left over."""
    monkeypatch.setattr(sessions, "IDLE", 0.0)
    monkeypatch.setattr(sessions, "DOUBT", 0.01)
    slow = plan(charge(uuid4().hex, "5/day"))
    with ForgetfulNat(own_redis) as nat, contextlib.closing(KINDS[kind](nat.url, local_refusals=False)) as door:
        assert admitted(door, slow) == [True]
        with own_redis.frozen():
            thaw = threading.Thread(target=_thaw, args=(own_redis, nat))
            thaw.start()
            assert admitted(door, slow) == [True]
            thaw.join()
        assert nat.made >= 2, "it was not doubted"
        assert used(door, *slow.charges) == [2]
        assert door.store.failures == 0
        with own_redis.client() as client:
            eventually(lambda: len(client.client_list(_type="normal")) <= 3, "the other connection to be closed")


def _thaw(server: RedisServer, nat: ForgetfulNat) -> None:
    deadline = time.monotonic() + TIMEOUT / 2
    while nat.made < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.process is not None
    server.process.send_signal(signal.SIGCONT)


def test_a_connection_in_use_is_believed(single: Door, one: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis may be slow: without a time in which it lay idle, no other connection is made before the timeout is over."""
    monkeypatch.setattr(sessions, "IDLE", PATIENT)
    assert admitted(single, plan(charge(uuid4().hex, "5/day"))) == [True]
    one.forget()
    with pytest.raises(StoreError) as caught:
        single.spend(plan(charge(uuid4().hex, "5/day")), 0.2)
    assert caught.value.fault == "timeout"
    assert one.made == 1


def test_how_long_silence_is_allowed() -> None:
    """A part of the timeout, and more of it where doubts were mistaken; never longer than a moment."""
    doubts = Doubts()
    assert doubts.silence_allowed(0.1) == pytest.approx(0.1 * DOUBT)
    assert doubts.silence_allowed(60) == sessions.LONGEST_DOUBT
    for _ in range(5):
        doubts.begun()
    assert doubts.silence_allowed(0.1) == pytest.approx(0.1 * MOST_DOUBT)
    doubts.confirmed()
    assert doubts.silence_allowed(0.1) == pytest.approx(0.1 * DOUBT)
