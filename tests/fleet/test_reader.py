"""The figures of a fleet, from snapshots of any kind."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from limitgate import AsyncRedisStore, MemoryStore, RedisStore
from limitgate.errors import StoreError
from limitgate.fleet.actions import client_bucket
from limitgate.fleet.reader import FleetReader, reader_of
from limitgate.fleet.sketch import Entry, Top
from limitgate.fleet.snapshot import STEP, LoadState, RuleState, Snapshot, StoreState, encode
from limitgate.gate.flow import run
from limitgate.gate.journal import Journal
from limitgate.stores.base import FleetRequest, StoredFleet, fleet_key
from tests.support.redis_server import RedisServer

KEY = fleet_key("limitgate")


def entry(number: int, hits: int, *, error: int = 0, ago: float = 1, since: float = 60) -> Entry:
    now = time.time()
    return Entry(f"{number:032x}", hits, error, now - since, now - ago)


def snapshot(number: int, **more: Any) -> Snapshot:
    now = time.time()
    return Snapshot(
        **{
            "id": f"{number:016x}",
            "host": "web",
            "pid": 7,
            "start": now - 100,
            "at": now,
            "version": "1.0",
            "revision": 5,
            "source": "config/",
            "requests": 10,
            "refused": 3,
            "store": StoreState(up=True, latency=0.001, breaker="closed", scheme="redis"),
            "load": LoadState(ok=True, at=now - 100),
            "rates": (5.0, 1.0),
            **more,
        }
    )


def rule(*refused: Entry, floor: int = 0, names: dict[str, str] | None = None, **more: Any) -> RuleState:
    known = {each.key: f"ip={int(each.key, 16)}" for each in refused} if names is None else names
    return RuleState(
        **{
            "name": "api",
            "tier": "default",
            "admitted": 7,
            "refused": 3,
            "utilization": 0.5,
            "refusals": Top(refused, floor),
            "names": known,
            "limits": [{"limit": "5/second"}],
            **more,
        }
    )


def written(*snapshots: Snapshot | bytes) -> MemoryStore:
    store = MemoryStore()
    for number, each in enumerate(snapshots):
        member = each.id if isinstance(each, Snapshot) else f"{number:016x}"
        store.fleet(FleetRequest(KEY, member, each if isinstance(each, bytes) else encode(each)))
    return store


def figures(*snapshots: Snapshot | bytes) -> dict[str, Any]:
    return FleetReader(written(*snapshots)).read()


def test_processes_with_one_pid() -> None:
    """In containers, host and pid may be equal: the id tells them apart."""
    found = figures(snapshot(1, start=1.0), snapshot(2))
    assert [(each["host"], each["pid"]) for each in found["processes"]] == [("web", 7), ("web", 7)]
    assert found["requests_per_second"] == 10


def test_stragglers_come_first() -> None:
    """The rules of most are those to follow; of equally many, those loaded last."""
    late = LoadState(ok=True, at=time.time())
    found = figures(snapshot(1, revision=4), snapshot(2), snapshot(3))
    assert [each["follows"] for each in found["processes"]] == [False, True, True]
    assert figures(snapshot(1), snapshot(2, revision=6, load=late))["revision"] == 6


def test_counts_and_errors_add_up() -> None:
    """A client that one process does not list may have been there as often as that one's floor says."""
    one = snapshot(1, rules=[rule(entry(1, 9), entry(2, 4, error=1), floor=2)])
    two = snapshot(2, rules=[rule(entry(1, 5), floor=3, utilization=0.9)])
    (found,) = figures(one, two)["rules"]
    assert [(each["who"], each["count"], each["error"]) for each in found["most_refused"]] == [("ip=1", 14, 0), ("ip=2", 7, 4)]
    assert (found["admitted"], found["refused"], found["utilization"]) == (14, 6, 0.9)


def test_the_headline_is_who_is_refused_now() -> None:
    """Not who was refused more, ten minutes ago."""
    found = figures(snapshot(1, rules=[rule(entry(1, 900, ago=300), entry(2, 20, since=30)), rule(entry(3, 5), name="login")]))
    assert (found["headline"]["who"], found["headline"]["rule"], found["headline"]["count"]) == ("ip=2", "api", 20)
    assert time.time() - found["headline"]["since"] == pytest.approx(30, abs=5)
    assert figures(snapshot(1, rules=[rule(entry(1, 900, ago=300))]))["headline"] is None


def test_a_client_without_a_name_is_shown_by_its_key() -> None:
    """With ``names="off"``, or before it was named."""
    (found,) = figures(snapshot(1, rules=[rule(entry(0xAB << 120, 5), names={})]))["rules"]
    assert found["most_refused"][0]["who"] == "#ab000000"


def test_a_clock_that_is_an_hour_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is shown, with how far its clock is off, and its history is where it belongs."""
    now = time.time()
    step = int((now + 3600) // STEP) - 2
    ahead = rule(entry(1, 9, ago=-3599, since=-3540))
    found = figures(snapshot(1, at=now + 3600, start=now + 3500, history=[(step, 10, 3)], rules=[ahead]))
    (process,) = found["processes"]
    assert process["clock_ahead"] == pytest.approx(3600, abs=30)
    assert process["uptime"] == pytest.approx(100, abs=1)
    assert found["headline"]["since"] == pytest.approx(now - 60, abs=30)
    assert sum(each["refused"] for each in found["history"]) == 3


def test_history_of_15_minutes() -> None:
    """In steps of 30 seconds, of processes that have ended since, too."""
    step = int(time.time() // STEP)
    store = written(snapshot(1, history=[(step - 3, 10, 4)]), snapshot(2, history=[(step - 3, 5, 1), (step - 1, 2, 0)]))
    reader = FleetReader(store)
    reader.read()
    store.fleet(FleetRequest(KEY, f"{1:016x}"))
    reader._read_at = -1.0
    found = reader.read()
    assert len(found["processes"]) == 1
    assert len(found["history"]) == 30
    assert sum(each["refused"] for each in found["history"]) == 5
    assert sum(each["admitted"] for each in found["history"]) == 12


def test_what_cannot_be_read_is_told() -> None:
    """A snapshot of another version, a damaged one, and one of 1 MB."""
    whole = encode(snapshot(9))
    found = figures(snapshot(9), b"LG\x07" + whole[3:], whole[:-5], b"x" * 1_000_000)
    assert len(found["processes"]) == 1
    assert len(found["unreadable"]) == 3
    assert "version 7" in found["unreadable"][0]
    assert "no snapshot can be read" in figures(b"nonsense")["empty"]


def test_why_it_is_empty() -> None:
    """The prefix may be another, or the store a memory store."""
    assert "only this process" in figures()["empty"]
    assert figures(snapshot(1))["empty"] is None
    assert figures(snapshot(1, ended=True))["empty"]


class Away(MemoryStore):
    """A store that can be away."""

    is_away = True
    asked = 0

    def fleet(self, request: FleetRequest, timeout: float = 0) -> StoredFleet:
        self.asked += request.member is None
        if self.is_away:
            raise StoreError("no connection", "connection")
        return super().fleet(request, timeout)


def test_a_store_that_is_away() -> None:
    """The figures say so, and keep what was read before."""
    store = Away()
    reader = FleetReader(store)
    away = {"up": False, "latency": None, "writes": None, "breaker": "closed", "error": "no connection"}
    assert reader.read()["store"] == away
    assert reader.read()["empty"] == "the store does not answer: no connection"
    store.is_away = False
    store.fleet(FleetRequest(KEY, "0" * 16, encode(snapshot(0))))
    reader._read_at = -1.0
    assert len(reader.read()["processes"]) == 1
    known_at = reader.read()["at"]
    store.is_away = True
    reader._read_at = -1.0
    found = reader.read()
    assert not found["store"]["up"]
    assert (len(found["processes"]), found["at"]) == (1, known_at)


def test_one_reading_serves_all_viewers() -> None:
    """Of a second, in threads and on an event loop."""
    store = Away()
    store.is_away = False
    assert reader_of(store) is reader_of(store)
    assert reader_of(store) is not reader_of(store, "other")

    async def view() -> None:
        await asyncio.gather(*[reader_of(store).aread() for _ in range(50)])

    asyncio.run(view())
    assert store.asked == 1
    for _ in range(50):
        reader_of(store).read()
    assert store.asked == 1
    with pytest.raises(TypeError, match="expected a MemoryStore"):
        reader_of(object())


def test_bans_with_the_time_left() -> None:
    store = written(snapshot(1))
    journal = Journal(store, "limitgate", 1)
    journal.note("ban", "api ip=1", [f"limitgate:api:{1:032x}"], "scraper", 60, bans=True)
    journal.note("ban", "api ip=2", ["limitgate:api:2"], None, bans=True)
    first, second = FleetReader(store).read()["bans"]
    assert (first["key"], first["reason"], first["digest"]) == ("api ip=1", "scraper", f"{1:032x}")
    assert first["retry_after"] == pytest.approx(60, abs=5)
    assert second["retry_after"] is None


def test_a_client_of_the_figures_can_be_banned() -> None:
    """By the key that stands there, whatever the algorithms of its rule."""
    limits = [{"limit": "5/second"}, {"limit": "100/day", "algorithm": "sliding_log"}]
    store = written(snapshot(1, rules=[rule(entry(1, 9), limits=limits)]))
    found = FleetReader(store).read()
    name, operations = client_bucket(found, "api", "default", f"{1:032x}")
    assert name == "api ip=1"
    assert operations.keys[0].startswith(f"limitgate:api:{1:032x}")
    assert len(operations.keys) == 2
    assert run(store, operations.peeking()).allowed
    run(store, operations.banning(60))
    assert not run(store, operations.peeking()).allowed
    run(store, operations.pardoning())
    assert run(store, operations.peeking()).allowed
    run(store, operations.resetting())
    for wrong in (("api", "default", "f" * 32), ("api", "vip", f"{1:032x}"), ("other", "default", f"{1:032x}")):
        with pytest.raises(Exception, match="expected a listed client"):
            client_bucket(found, *wrong)


def test_rates_of_processes_add_up() -> None:
    """The first reading has them: processes report them."""
    rates = [({}, {f"{1:032x}": 1.5, f"{2:032x}": 30.0}), ({}, {f"{1:032x}": 2.0})]
    found = figures(*[snapshot(n, rules=[rule(entry(1, 10), entry(2, 9), rates=each)]) for n, each in enumerate(rates)])
    assert [each["per_second"] for each in found["rules"][0]["most_refused"]] == [3.5, 30.0]
    assert (found["headline"]["who"], found["headline"]["per_second"]) == ("ip=2", 30.0)


def test_shadow_rules_come_last() -> None:
    """The headline is of a shadow rule if nobody is refused, and says so."""
    shadow = rule(entry(1, 900), name="new", refused=0, would_refuse=900)
    found = figures(snapshot(1, rules=[shadow]))
    assert (found["headline"]["who"], found["headline"]["shadow"]) == ("ip=1", True)
    assert (found["rules"][0]["shadow"], found["rules"][0]["would_refuse"]) == (True, 900)
    found = figures(snapshot(1, rules=[shadow, rule(entry(2, 5))]))
    assert (found["headline"]["who"], found["headline"]["shadow"]) == ("ip=2", False)


def test_a_rule_is_in_shadow_before_every_process_says_so() -> None:
    """One that has not loaded the rules yet, or can't say it, refuses nobody by them. If it does, the rule is not in shadow."""
    shadow = rule(entry(1, 900), refused=0, would_refuse=900)
    found = figures(snapshot(1, rules=[shadow]), snapshot(2, rules=[rule(refused=0)]))
    assert (found["rules"][0]["shadow"], found["headline"]["shadow"]) == (True, True)
    found = figures(snapshot(1, rules=[shadow]), snapshot(2, rules=[rule(entry(1, 3))]))
    assert (found["rules"][0]["shadow"], found["headline"]["shadow"]) == (False, False)
    assert not figures(snapshot(1, rules=[rule(refused=0)]))["rules"][0]["shadow"]


def test_gates_of_a_process_are_one_process() -> None:
    """A process follows if its gates have the rules that most processes have; one may have had no request yet."""
    gates = [
        *[snapshot(n, process="a", revision=n, start=1.0) for n in (1, 2)],
        *[snapshot(10 + n, process="b", revision=n) for n in (1, 2)],
        snapshot(21, process="c", revision=1),
        *[snapshot(30 + n, process="d", revision=n, last_error=str(n), last_error_at=float(n)) for n in (1, 3)],
    ]
    found = figures(*gates)
    processes = {each["id"]: each for each in found["processes"]}
    assert {id_: each["follows"] for id_, each in processes.items()} == {"a": True, "b": True, "c": True, "d": False}
    assert found["revisions"] == {"1, 2": 2, "1": 1, "1, 3": 1}
    assert (processes["c"]["revision"], processes["a"]["revision"]) == (1, None)
    assert (processes["a"]["requests"], processes["a"]["requests_per_second"]) == (20, 10.0)
    assert [each["revision"] for each in processes["d"]["gates"]] == [1, 3]
    assert processes["d"]["last_error"] == "3"


async def read_by_task(url: str) -> dict[str, Any]:
    store = AsyncRedisStore(url)
    found = await FleetReader(store).aread()
    await store.aclose()
    return found


@pytest.mark.parametrize("fault", ["read-only", "full"])
def test_a_store_that_refuses_writes(fault: str, own_redis: RedisServer) -> None:
    """It answers, but keeps no limits: the figures say why, and then that it is well again."""
    store = RedisStore(own_redis.url)
    reader = FleetReader(store)
    with own_redis.client() as client:
        assert reader.read()["store"]["writes"]
        if fault == "full":
            client.config_set("maxmemory", 1)
        else:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
        reader.expire()
        found = reader.read()
        assert (found["store"]["up"], found["store"]["writes"]) == (True, False)
        assert ("out of memory" if fault == "full" else "it is a replica") in found["store"]["error"]
        assert found["empty"].startswith("the store cannot be written to, so no process can report: ")
        assert asyncio.run(read_by_task(own_redis.url))["store"]["writes"] is False
        client.config_set("maxmemory", 0)
        client.execute_command("REPLICAOF", "NO", "ONE")
        reader.expire()
        assert reader.read()["store"]["writes"]
    store.close()


def test_whether_a_store_can_be_written_to_may_be_unknown(own_redis: RedisServer) -> None:
    """Whoever looks may only read, and the service write."""
    with own_redis.client() as client:
        client.execute_command("ACL", "SETUSER", "viewer", "on", ">secret", "~*", "+@all", "-set")
        store = RedisStore(own_redis.url, credentials=lambda: ("viewer", "secret"))
        found = FleetReader(store).read()["store"]
        assert (found["up"], found["writes"], found["error"]) == (True, None, None)
    store.close()


def test_a_brief_reading_has_the_processes() -> None:
    """As ``status`` shows them, without what it doesn't."""
    store = written(snapshot(1, rules=[rule(entry(1, 9))], history=[(int(time.time() // STEP) - 3, 10, 4)]))
    whole, brief = [FleetReader(store, brief=each).read() for each in (False, True)]
    left_out = {"rules", "history", "headline", "at", "store"}
    same = [{name: value for name, value in each.items() if name not in left_out} for each in (whole, brief)]
    for each in same:
        each["processes"][0].pop("clock_ahead")
    assert same[0] == same[1]
    assert (whole["rules"] != [], brief["rules"], brief["headline"]) == (True, [], None)
    assert not sum(each["refused"] for each in brief["history"])


def test_limits_that_are_none_are_left_out() -> None:
    """A foreign snapshot may have anything there."""
    found = figures(snapshot(1, rules=[rule(entry(1, 9), limits=[None, {"limit": 5}, {"limit": "5/second"}])]))
    assert found["rules"][0]["limits"] == [{"limit": "5/second"}]
