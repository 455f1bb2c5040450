"""Snapshots of processes on every store and both doors, read as one fleet."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from limitgate import AsyncRedisStore, LimitGate, LimitGateWSGI, MemoryStore, RedisStore, Rule, testing
from limitgate.errors import StoreError
from limitgate.fleet import publisher as publishing
from limitgate.fleet.publisher import Publisher
from limitgate.fleet.reader import FleetReader
from limitgate.fleet.snapshot import Snapshot, decode
from limitgate.gate.lifecycle.start import ashutdown, astartup
from limitgate.messages.diagnostics import Diagnosis
from limitgate.stores.base import FleetRequest, StoredFleet, fleet_key
from tests.support.doors import MOMENT, PATIENCE, asgi_reply, wsgi_reply
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer

RULES = [Rule("api", "3/day", key=["ip"], path="/api")]


async def asgi(scope: Any, _: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"hello"})


def wsgi(_: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


def publisher_of(app: LimitGate | LimitGateWSGI) -> Publisher:
    assert app.gate is not None
    assert app.gate.rules.counts is not None
    publisher = app.gate.rules.counts.publisher
    assert isinstance(publisher, Publisher)
    return publisher


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for 2 seconds."""
    monkeypatch.setattr(publishing, "EVERY", 0.05)
    monkeypatch.setattr(publishing, "PERIOD", 0.01)


@pytest.fixture(params=["memory", "redis", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return "memory://"
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return server.url
    cluster: RedisCluster = request.getfixturevalue("redis_cluster")
    return cluster.url


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A fleet of the test's own."""
    return f"fleet-{abs(hash(request.node.name)) % 10**8}-{time.monotonic_ns() % 10**6}"


def awaited(condition: Callable[[], Any]) -> Any:
    until = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(MOMENT)
    return found


async def eventually(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE
    while not await condition():
        assert time.monotonic() < until
        await asyncio.sleep(MOMENT)


def check(figures: dict[str, Any], *, refused: int = 2) -> None:
    (process,) = figures["processes"]
    assert (process["requests"], process["refused"]) == (5, refused)
    assert process["pid"] == os.getpid()
    assert process["follows"]
    assert process["store"]["up"]
    (rule,) = figures["rules"]
    assert (rule["name"], rule["tier"], rule["admitted"], rule["refused"]) == ("api", "default", 3, refused)
    assert [(each["who"], each["count"], each["error"]) for each in rule["most_refused"]] == [("ip=19….1", refused, 0)]
    assert [(each["who"], each["count"]) for each in rule["most_used"]] == [("ip=19….1", 3)]
    assert figures["headline"]["who"] == "ip=19….1"
    assert figures["empty"] is None


def test_a_process_of_wsgi(url: str, prefix: str) -> None:
    """A thread writes, from the first request on."""
    app = LimitGateWSGI(wsgi, rules=RULES, store=url, key_prefix=prefix, fleet=True)
    assert app.gate is not None
    reader = FleetReader(app.gate.store, prefix)
    assert [wsgi_reply(app, "/api").status for _ in range(5)] == [200] * 3 + [429] * 2

    def told() -> Any:
        reader._read_at = -1.0
        figures = reader.read()
        return figures if [each["requests"] for each in figures["processes"]] == [5] else None

    check(awaited(told))
    publisher_of(app).end()
    app.gate.store.close()


def test_a_process_of_asgi(url: str, prefix: str) -> None:
    """A task of the event loop writes, and the last snapshot says that the process has ended."""

    async def run() -> None:
        app = LimitGate(asgi, rules=RULES, store=url, key_prefix=prefix, fleet=True)
        assert app.gate is not None
        await astartup(app.gate)
        statuses = [(await asgi_reply(app, "/api")).status for _ in range(5)]
        assert statuses == [200] * 3 + [429] * 2
        reader = FleetReader(app.gate.store, prefix)

        async def is_told() -> bool:
            reader._read_at = -1.0
            figures = await reader.aread()
            return [each["requests"] for each in figures["processes"]] == [5]

        await eventually(is_told)
        check(await reader.aread())
        await ashutdown(app.gate)
        reader._read_at = -1.0
        assert (await reader.aread())["processes"] == []
        (last,) = reader.snapshots
        assert (last.ended, last.requests) == (True, 5)
        await app.gate.store.aclose()

    asyncio.run(run())


def test_gates_of_a_process_add_up(redis_server: RedisServer, prefix: str) -> None:
    """They are one process, even if one of them has other rules."""
    other = [Rule("api", "4/day", key=["ip"], path="/api")]
    apps = [
        LimitGateWSGI(wsgi, rules=rules, store=redis_server.url, key_prefix=prefix, fleet=True)
        for rules in (RULES, RULES, other)
    ]
    for app in apps:
        wsgi_reply(app, "/api")
    store = RedisStore(redis_server.url)
    reader = FleetReader(store, prefix)

    def told() -> Any:
        reader._read_at = -1.0
        figures = reader.read()
        return figures if [each["requests"] for each in figures["processes"]] == [3] else None

    figures = awaited(told)
    (process,) = figures["processes"]
    assert (process["pid"], process["follows"], process["revision"]) == (os.getpid(), True, None)
    assert [each["requests"] for each in process["gates"]] == [1, 1, 1]
    assert len({each["revision"] for each in process["gates"]}) == 2
    (rule,) = figures["rules"]
    assert rule["admitted"] == 3
    assert [(each["who"], each["count"], each["error"]) for each in rule["most_used"]] == [("ip=19….1", 3, 0)]
    assert rule["limits"] in ([{"limit": "3/day"}], [{"limit": "4/day"}])
    for app in apps:
        publisher_of(app).end()
    store.close()


def test_all_snapshots_share_a_hash_slot(redis_cluster: RedisCluster, prefix: str) -> None:
    """Of a prefix with a hash tag, too."""
    from redis.crc import key_slot

    for each in (prefix, f"{{{prefix}}}", f"a{{{prefix}}}b"):
        keys = [fleet_key(each), *[f"{fleet_key(each)}:{number:016x}" for number in range(5)]]
        assert len({key_slot(key.encode()) for key in keys}) == 1
        store = RedisStore(redis_cluster.url)
        for number in range(5):
            store.fleet(FleetRequest(fleet_key(each), f"{number:016x}", b"LG"), PATIENCE)
        calls = redis_cluster.calls()
        assert len(store.fleet(FleetRequest(fleet_key(each)), PATIENCE).snapshots) == 5
        assert redis_cluster.calls() - calls <= 1
        store.close()


def test_nothing_is_written_without_a_fleet(redis_server: RedisServer, prefix: str) -> None:
    app = LimitGateWSGI(wsgi, rules=RULES, store=redis_server.url, key_prefix=prefix, fleet=False)
    assert wsgi_reply(app, "/api").status == 200
    assert app.gate is not None
    assert app.gate.rules.counts is None
    assert FleetReader(app.gate.store, prefix).read()["empty"].startswith("no process has written a snapshot")
    app.gate.store.close()


def test_a_child_is_another_process(redis_server: RedisServer, prefix: str) -> None:
    """It has another id and pid, and what its parent has counted is its parent's."""
    app = LimitGateWSGI(wsgi, rules=RULES, store=redis_server.url, key_prefix=prefix, fleet=True)
    wsgi_reply(app, "/api")
    parent = publisher_of(app)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        wsgi_reply(app, "/api")
        app.gate.rules.counts.tally.count()  # type: ignore[union-attr]
        told = publisher_of(app).snapshot()
        os.write(write, f"{told.id} {told.pid} {told.requests} {told.rules[0].admitted}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    id_, child, requests, admitted = os.read(read, 1000).decode().split()
    assert id_ != parent.id
    assert (int(child), requests, admitted) == (pid, "1", "1")
    assert parent._poller.is_running
    parent._tally.count()
    assert parent.snapshot().requests == 1
    parent.end()
    app.gate.store.close()  # type: ignore[union-attr]


PRELOADED = """
import ctypes, os, sys, time, types

uwsgi, others = types.ModuleType("uwsgi"), []
sys.modules["uwsgi"], uwsgi.post_fork_hook = uwsgi, lambda: others.append("own")

from limitgate import LimitGateWSGI, RedisStore, Rule
from limitgate.fleet.reader import FleetReader

url, prefix, way = sys.argv[1:]
app = LimitGateWSGI(print, rules=[Rule("api", "3/day")], store=url, key_prefix=prefix, fleet=True)
child = os.fork() if way == "hooks" else ctypes.PyDLL(None).fork()
if not child:
    uwsgi.post_fork_hook()
    deadline = time.monotonic() + 30
    while not (found := FleetReader(RedisStore(url), prefix).read()["processes"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    print([each["pid"] for each in found] == [os.getpid()], *others, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("way", ["hooks", "uwsgi"])
def test_workers_of_an_application_that_was_loaded_before(redis_server: RedisServer, prefix: str, way: str) -> None:
    """They are seen before their first request, each under its own pid.

    uWSGI forks without Python's hooks, unless it is told otherwise. Its own hook may be somebody's already.
    """
    program = [sys.executable, "-c", PRELOADED, redis_server.url, prefix, way]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert ran.stdout == "True own\n", ran.stderr


def test_limits_that_are_off_write_nothing(prefix: str) -> None:
    """`limitgate.testing.off` uses no store."""
    store = MemoryStore()
    app = LimitGateWSGI(wsgi, rules=RULES, store=store, key_prefix=prefix, fleet=True)
    with testing.off():
        publisher_of(app).start()
        assert not publisher_of(app)._poller.is_running
    assert store.fleet(FleetRequest(fleet_key(prefix))).processes == 0


class Failing(MemoryStore):
    """A store that limits, and keeps no snapshot."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.asked = 0

    def fleet(self, request: FleetRequest, timeout: float = 0) -> StoredFleet:
        self.asked += 1
        raise self.error


@pytest.mark.parametrize("error", [StoreError("OOM", "oom"), StoreError("read-only"), RuntimeError("a mistake of ours")])
def test_a_failure_harms_no_request(error: Exception, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    """Later snapshots come later and later, at most every 16 seconds."""
    store = Failing(error)
    app = LimitGateWSGI(wsgi, rules=RULES, store=store, key_prefix=prefix, fleet=True)
    publisher = publisher_of(app)
    assert wsgi_reply(app, "/api").status == 200
    awaited(lambda: store.asked >= 2)
    assert [wsgi_reply(app, "/api").status for _ in range(3)] == [200, 200, 429]
    publisher.end()
    if isinstance(error, StoreError):
        assert publisher._pause > publishing.EVERY
        assert "internal error" not in caplog.text
    for _ in range(20):
        publisher._failed()
    assert publisher._pause == 16
    assert not publisher._is_due()
    assert app.gate is not None
    for tell in app.gate.outages.at_recovery:
        tell()
    assert publisher._is_due()


@pytest.mark.parametrize("fault", ["full", "read-only", "replaced", "gone"])
def test_faults_of_redis(fault: str, own_redis: RedisServer, prefix: str) -> None:
    """A store that is full, read-only, replaced by an empty one, or away: requests go by ``on_error``, figures return."""
    store = RedisStore(own_redis.url)
    app = LimitGateWSGI(wsgi, rules=RULES, store=store, key_prefix=prefix, fleet=True, timeout=2)
    wsgi_reply(app, "/api")
    reader = FleetReader(RedisStore(own_redis.url), prefix, timeout=2)

    def told() -> Any:
        reader._read_at = -1.0
        return reader.read()["processes"]

    awaited(told)
    publisher = publisher_of(app)
    failures = publisher.failures
    with own_redis.client() as client:
        if fault == "full":
            client.config_set("maxmemory", 1)
        elif fault == "read-only":
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            client.execute_command("CONFIG", "SET", "replica-serve-stale-data", "yes")
        elif fault == "replaced":
            client.flushall()
        else:
            own_redis.kill()
    if fault != "replaced":
        awaited(lambda: publisher.failures > failures)
    assert wsgi_reply(app, "/api").status == 200
    if fault == "gone":
        own_redis.start()
    with own_redis.client() as client:
        if fault == "full":
            client.config_set("maxmemory", 0)
        elif fault == "read-only":
            client.execute_command("REPLICAOF", "NO", "ONE")
    publisher._due = publisher._pause = 0.0
    awaited(told)
    publisher.end()
    store.close()


def test_a_foreign_index_is_replaced(redis_server: RedisServer, prefix: str) -> None:
    """Whatever stands there: text, a list, ids of nobody."""
    store = RedisStore(redis_server.url)
    index = fleet_key(prefix)
    with redis_server.client() as client:
        for value in ("text", "x" * 17, "\n" * 34):
            client.set(index, value)
            assert store.fleet(FleetRequest(index), PATIENCE).snapshots == []
            assert store.fleet(FleetRequest(index, "0" * 16, b"LG"), PATIENCE).processes == 1
            store.fleet(FleetRequest(index, "0" * 16), PATIENCE)
        client.delete(index)
        client.rpush(index, "a", "b")
        assert store.fleet(FleetRequest(index), PATIENCE).snapshots == []
        assert store.fleet(FleetRequest(index, "0" * 16, b"LG"), PATIENCE).processes == 1
        client.set(f"{index}:{'0' * 16}", "x" * 1_000_000)
        assert store.fleet(FleetRequest(index), PATIENCE).snapshots == [b""]
        assert FleetReader(store, prefix).read()["unreadable"] == ["it is too long"]
    store.close()


def test_snapshots_end_by_themselves(redis_server: RedisServer, prefix: str) -> None:
    """A process that crashes is gone after 10 seconds, and its id leaves the index when another one comes."""
    store, index = RedisStore(redis_server.url), fleet_key(prefix)
    with redis_server.client() as client:
        for number in range(3):
            store.fleet(FleetRequest(index, f"{number:016x}", b"LG"), PATIENCE)
            assert 9_000 < client.pttl(f"{index}:{number:016x}") <= 10_000
        client.delete(f"{index}:{0:016x}")
        assert len(store.fleet(FleetRequest(index), PATIENCE).snapshots) == 2
        assert store.fleet(FleetRequest(index, f"{3:016x}", b"LG"), PATIENCE).processes == 3
        assert len(client.get(index) or b"") == 3 * 17
        assert 0 < client.pttl(index) <= 86_400_000
    store.close()


def test_rights_that_limiting_needs_are_enough(own_redis: RedisServer, prefix: str) -> None:
    """The ACL of docs/deployment.md, even without what is for ``sliding_log``."""
    with own_redis.client() as client:
        client.execute_command(
            "ACL",
            "SETUSER",
            "gate",
            "on",
            ">secret",
            f"~{prefix}:*",
            "-@all",
            "+eval",
            "+evalsha",
            "+get",
            "+set",
            "+del",
            "+time",
        )
    store = RedisStore(own_redis.url, credentials=lambda: ("gate", "secret"))
    index = fleet_key(prefix)
    assert store.fleet(FleetRequest(index, "0" * 16, b"LG"), PATIENCE).processes == 1
    assert store.fleet(FleetRequest(index), PATIENCE).snapshots == [b"LG"]
    assert store.fleet(FleetRequest(index, "0" * 16), PATIENCE).processes == 0
    store.close()


def test_clients_have_rates(prefix: str) -> None:
    """Of the time between two snapshots. A client that stands still has none, one beyond the limit has both."""
    app = LimitGateWSGI(wsgi, rules=RULES, store=MemoryStore(), key_prefix=prefix, fleet=True)
    publisher, tally = publisher_of(app), app.gate.rules.counts.tally  # type: ignore[union-attr]
    publisher._poller.stop()
    assert tally is not None
    for asked, (used, refused) in ((4, (3, 1)), (0, (0, 0)), (6, (0, 6))):
        for _ in range(asked):
            wsgi_reply(app, "/api")
        tally.count()
        publisher._state._looked -= 2
        rates = publisher.snapshot().rules[0].rates
        assert [round(2 * sum(each.values())) for each in rates] == [used, refused]


def test_a_shadow_rule_says_whom_it_would_refuse(prefix: str) -> None:
    shadow = [Rule("api", "3/day", key=["ip"], path="/api", shadow=True)]
    app = LimitGateWSGI(wsgi, rules=shadow, store=MemoryStore(), key_prefix=prefix, fleet=True)
    for _ in range(5):
        assert wsgi_reply(app, "/api").status == 200
    app.gate.rules.counts.tally.count()  # type: ignore[union-attr]
    (rule,) = publisher_of(app).snapshot().rules
    assert (rule.admitted, rule.refused, rule.would_refuse) == (3, 0, 2)
    assert [entry.hits for entry in rule.refusals.entries] == [2]


def test_gates_that_share_a_store_tell_of_it_once(prefix: str) -> None:
    """An exporter adds up what they tell. One that is left tells of what follows, and so does a child of a fork."""

    class Flaky(MemoryStore):
        outages = 2

    store = Flaky()
    apps = [LimitGateWSGI(wsgi, rules=RULES, store=store, key_prefix=prefix, fleet=True) for _ in range(2)]

    def outages() -> list[Any]:
        told = [value for app in apps for value in publisher_of(app).snapshot().counters]
        return [values for name, _, values in told if name == "limitgate.store.outages"]

    assert outages() == [[2]]
    del apps[0]
    gc.collect()
    assert outages() == []
    Flaky.outages = 5
    assert outages() == [[3]]
    publisher_of(apps[0]).reset_after_fork()
    assert outages() == []


def diagnoses(told: Snapshot, diagnosis: Diagnosis = Diagnosis.LOGIN) -> int:
    values = {labels: values[0] for name, labels, values in told.counters if name == "limitgate.diagnostics"}
    return int(values.get((diagnosis.code,), 0))


def test_each_fleet_of_a_process_hears_of_its_diagnoses(prefix: str) -> None:
    """Once, by either of its gates, though these may have stores of their own."""
    url = "redis://localhost:1"
    apps = [LimitGateWSGI(wsgi, rules=RULES, store=url, key_prefix=prefix + each, fleet=True) for each in "aabb"]
    before = [diagnoses(publisher_of(app).snapshot()) for app in apps]
    Diagnosis.LOGIN.log("Redis", "the password is wrong")
    after = [diagnoses(publisher_of(app).snapshot()) for app in apps]
    heard = [now - was for now, was in zip(after, before)]
    assert (sorted(heard[:2]), sorted(heard[2:])) == ([0, 1], [0, 1])


def test_a_child_tells_of_itself_by_whichever_gate_writes(redis_server: RedisServer, prefix: str) -> None:
    """A gate that gets no request there writes nothing."""
    store = RedisStore(redis_server.url)
    apps = [LimitGateWSGI(wsgi, rules=RULES, store=store, key_prefix=prefix, fleet=True) for _ in range(3)]
    Diagnosis.LOGIN.log("Redis", "the password is wrong")
    store._tally.outages = 5
    for app in apps:
        publisher_of(app).snapshot()
    found = []
    for writing in range(3):
        read, write = os.pipe()
        if not (pid := os.fork()):
            Diagnosis.LOGIN.log("Redis", "the password is wrong")
            store._tally.outages += 2
            later = LimitGateWSGI(wsgi, rules=RULES, store=store, key_prefix=prefix, fleet=True)
            told = [publisher_of(each).snapshot() for each in (apps[writing], *apps, later)]
            outages = [values for name, _, values in told[0].counters if name == "limitgate.store.outages"]
            os.write(write, f"{[*map(diagnoses, told)]} {outages}".encode())
            os._exit(0)
        os.waitpid(pid, 0)
        found.append(os.read(read, 1000).decode())
    assert found == ["[1, 1, 0, 0, 0] [[2]]", "[1, 0, 1, 0, 0] [[2]]", "[1, 0, 0, 1, 0] [[2]]"]
    store.close()


def test_two_gates_that_begin_at_once(prefix: str) -> None:
    """Only one of them tells of what they share."""
    together = threading.Barrier(2)

    class Meeting(MemoryStore):
        outages = 2

        def __hash__(self) -> int:
            with suppress(threading.BrokenBarrierError):
                together.wait(0.2)
            return 1

    store = Meeting()
    apps = [LimitGateWSGI(wsgi, rules=RULES, store=store, key_prefix=prefix, fleet=True) for _ in range(2)]
    together.reset()
    with ThreadPoolExecutor() as pool:
        told = list(pool.map(lambda app: publisher_of(app).snapshot(), apps))
    assert [name for each in told for name, *_ in each.counters].count("limitgate.store.outages") == 1


def test_observers_see_what_they_saw_before(prefix: str) -> None:
    """With observers, requests are counted at once, as without a fleet; the snapshot has the same counters."""
    from tests.support.observed import Recorder

    recorder = Recorder()
    app = LimitGateWSGI(wsgi, rules=RULES, store=MemoryStore(), key_prefix=prefix, fleet=True, observers=[recorder])
    for _ in range(5):
        wsgi_reply(app, "/api")
    assert app.gate is not None
    counts = app.gate.rules.counts
    assert counts is not None
    assert not counts.defers
    assert counts.requests["admitted", "store"] == 3
    assert counts.tally is not None
    counts.tally.count()
    told = publisher_of(app).snapshot()
    assert ("limitgate.requests", ("admitted", "store"), [3]) in told.counters
    assert told.rules[0].used.entries[0].hits == 3
    assert decode(publisher_of(app)._request().snapshot).requests == 5


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """No thread of a test writes during the next."""
    yield
    for each in list(publishing._all):
        each._poller.stop()


def test_async_store_outside_an_event_loop(redis_server: RedisServer, prefix: str) -> None:
    """Nothing is begun there, and nothing is raised."""
    app = LimitGate(asgi, rules=RULES, store=AsyncRedisStore(redis_server.url), key_prefix=prefix, fleet=True)
    publisher_of(app).start()
    assert not publisher_of(app)._poller.is_running
