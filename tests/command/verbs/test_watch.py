"""The verbs ``status``, ``top`` and ``exporter``, as typed."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click
import pytest

from limitgate import RedisStore
from limitgate.command import group
from limitgate.command.fleet_screen import change
from limitgate.command.fleet_text import headline, notes
from limitgate.command.opened import Opened
from limitgate.errors import StoreError
from limitgate.fleet.actions import client_bucket
from limitgate.fleet.reader import FleetReader
from limitgate.fleet.snapshot import LoadState, RuleState, Snapshot, StoreState, encode
from limitgate.stores.base import FleetRequest, fleet_key
from tests.fleet.test_reader import entry, rule, snapshot
from tests.support.command_line import CliRunner
from tests.support.doors import MOMENT, PATIENCE, PROCESS_PATIENCE
from tests.support.redis_server import RedisServer


class Fleet:
    """A fleet that writes what the test says."""

    def __init__(self, url: str, prefix: str) -> None:
        self.url, self.prefix = url, prefix
        self.store = RedisStore(url)

    def write(self, *snapshots: Snapshot | bytes) -> None:
        for number, each in enumerate(snapshots):
            member = each.id if isinstance(each, Snapshot) else f"f{number:015x}"
            packed = each if isinstance(each, bytes) else encode(each)
            self.store.fleet(FleetRequest(fleet_key(self.prefix), member, packed, 60), PATIENCE)

    def run(self, *words: str, code: int = 0) -> Any:
        result = CliRunner().invoke(
            group.limitgate, [words[0], "--store", self.url, "--key-prefix", self.prefix, "--timeout", "20", *words[1:]]
        )
        assert result.exit_code == code, result.output
        return result


@pytest.fixture
def fleet(redis_server: RedisServer) -> Iterator[Fleet]:
    fleet = Fleet(redis_server.url, f"watch-{time.monotonic_ns()}")
    yield fleet
    fleet.store.close()


def refused() -> list[RuleState]:
    """Rules whose clients are refused now."""
    names = {f"{3:032x}": "ip=3"}
    return [rule(entry(1, 30, since=90), entry(2, 4)), rule(name="login", used=rule(entry(3, 8)).refusals, names=names)]


def test_status_lists_every_process(fleet: Fleet) -> None:
    """With its rules, its requests, its store and its errors; for programs with at least the fields of the contract."""
    failed = LoadState(ok=False, at=time.time(), error="config/a.yaml:3: rules[0].qps: expected a number")
    down = StoreState(up=False, latency=None, breaker="open")
    fleet.write(
        snapshot(1, rules=refused()), snapshot(2, load=failed, store=down, last_error="timed out", last_error_at=time.time())
    )
    shown = fleet.run("status").stdout
    assert "2 processes, all with rules 000000000005; 10.0 requests/s, 2.0 refused/s; the store answers in" in shown
    for text in ("web:7", "1.0", "up, 1 ms", "does not answer", "rules rejected: config/a.yaml:3", "timed out (0 s ago)"):
        assert text in shown
    told = json.loads(fleet.run("status", "--json").stdout)
    assert [each["pid"] for each in told["processes"]] == [7, 7]
    assert {"host", "pid", "version", "revision", "requests", "refused", "store", "last_error"} <= told["processes"][0].keys()
    (api, *_) = told["rules"]
    assert {"name", "tier", "admitted", "refused", "utilization", "most_refused", "most_used"} <= api.keys()
    assert {"who", "count", "error"} <= api["most_refused"][0].keys()
    assert {"up", "latency", "breaker"} <= told["store"].keys()
    assert told["bans"] == []


def test_a_process_with_other_rules_is_found(fleet: Fleet) -> None:
    """Exit status 1, and it comes first."""
    fleet.write(snapshot(1), snapshot(2), snapshot(3, revision=0xABC, host="late"))
    shown = fleet.run("status", code=1).stdout
    assert "3 processes, 1 with other rules" in shown
    assert shown.index("late:7") < shown.index("web:7")
    assert "000000000abc (differs from most)" in shown


def test_nobody_there(fleet: Fleet) -> None:
    """Exit status 1, and why."""
    shown = fleet.run("status", code=1).stdout
    assert f"no process has written a snapshot with key_prefix '{fleet.prefix}' for 10 seconds" in shown
    assert "no process has written a snapshot" in fleet.run("top").stdout


def test_the_store_does_not_answer() -> None:
    """Exit status 3."""
    for verb in ("status", "top"):
        result = CliRunner().invoke(group.limitgate, [verb, "--store", "redis://127.0.0.1:1", "--timeout", "5"])
        assert result.exit_code == 3, result.output
        assert "limitgate: " in result.stderr
    memory = CliRunner().invoke(group.limitgate, ["status", "--store", "memory://"])
    assert memory.exit_code == 2


def test_the_first_line_of_top_says_who(fleet: Fleet) -> None:
    """Who is hammering us, under which rule, since when."""
    fleet.write(snapshot(1, rules=refused()))
    first, *rest = fleet.run("top").stdout.splitlines()
    assert re.fullmatch(r"ip=1 is refused under rule api since \d\d:\d\d:\d\d UTC \(1 min \d+ s\), 30 times", first), first
    shown = "\n".join(rest)
    assert shown.index("Rules") < shown.index("Refused most") < shown.index("Used most")
    assert json.loads(fleet.run("top", "--json").stdout)["headline"]["who"] == "ip=1"
    fleet.write(snapshot(1, rules=[rule()]))
    assert fleet.run("top", "--once").stdout.startswith("no client is being refused\n")


def test_shadow_rules_refuse_nobody(fleet: Fleet) -> None:
    """`top` says whom they would refuse."""
    rates: Any = ({}, {f"{1:032x}": 2.5})
    fleet.write(snapshot(1, rules=[rule(entry(1, 30), name="new", refused=0, would_refuse=30, rates=rates)]))
    shown = fleet.run("top").stdout
    assert shown.startswith("no client is being refused; ip=1 would be refused 2.5 times/s under shadow rule new since ")
    assert "30 in shadow" in shown
    assert "new (shadow)" in shown


def test_gates_of_a_process_are_one_line(fleet: Fleet) -> None:
    fleet.write(snapshot(1, process="a", revision=0xABC), snapshot(2, process="a"))
    shown = fleet.run("status").stdout
    assert "1 process, all with rules" in shown
    assert re.search(r"web:7 .* (000000000abc, 000000000005|000000000005, 000000000abc) .* 20 ", shown)


def test_a_store_that_refuses_writes(own_redis: RedisServer) -> None:
    """Exit status 1: limits are not kept there."""
    fleet = Fleet(own_redis.url, "full")
    fleet.write(snapshot(1))
    with own_redis.client() as client:
        client.config_set("maxmemory", 1)
        result = fleet.run("status", code=1)
        assert "; the store refuses writes" in result.stdout
        assert "so limits are not kept there: Redis is out of memory" in result.stderr
    fleet.store.close()


def test_who_may_only_read_sees_no_fault(own_redis: RedisServer) -> None:
    """Exit status 0: whether the service can write is unknown."""
    fleet = Fleet(own_redis.url, "viewed")
    fleet.write(snapshot(1))
    with own_redis.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-set")
        assert "refuses writes" not in fleet.run("status").stdout
    fleet.store.close()


def test_counts_are_shown_with_their_error(fleet: Fleet) -> None:
    fleet.write(snapshot(1, rules=[rule(entry(1, 30, error=4), tier="vip")]))
    shown = fleet.run("top").stdout
    assert "26 to 30 times" in shown
    assert "under rule api of tier vip" in shown
    fleet.write(snapshot(1, rules=[rule(entry(1, 1))]))
    assert fleet.run("top").stdout.splitlines()[0].endswith(", 1 time")


@pytest.mark.parametrize(
    ("since", "shown"),
    [
        (60, r"since [\d:]{8} UTC \(1 min.*\), 30 times"),
        (3600, r".*, 30 times in the last 5 to 10 minutes"),
        (2e5, r"since [\d-]{10} [\d:]{5} UTC .*"),
    ],
)
def test_a_client_may_be_refused_for_longer_than_counts_last(fleet: Fleet, since: float, shown: str) -> None:
    """The first line says what the count covers, and the day if it was another."""
    fleet.write(snapshot(1, rules=[rule(entry(1, 30, since=since))]))
    assert re.fullmatch(rf"ip=1 is refused under rule api {shown}", fleet.run("top").stdout.splitlines()[0])


def test_top_says_what_counts_cover(fleet: Fleet) -> None:
    """Those of clients some minutes, those of rules the life of each process."""
    fleet.write(snapshot(1, rules=refused()))
    shown = fleet.run("top").stdout
    titles = ("Rules (since each process started)", "Refused most (last 5 to 10 minutes)", "Used most (last 5 to 10 minutes)")
    assert all(f"{each}\n" in shown for each in titles)


def test_a_live_view_says_when_figures_were_read(fleet: Fleet) -> None:
    """A store that fails leaves the view as it was."""
    fleet.write(snapshot(1, rules=refused()))
    reader = FleetReader(fleet.store, fleet.prefix, timeout=PATIENCE)
    figures = reader.read()
    shown = headline(figures)
    reader._note_failure(StoreError("no connection", "connection"))
    reader._fresh = PATIENCE
    failed = reader.read()
    assert headline(failed) == shown
    (note,) = notes(failed)
    assert re.fullmatch(r"the store does not answer: no connection; last known at \d\d:\d\d:\d\d UTC", note)


def test_hostile_names_are_printed_safely(fleet: Fleet) -> None:
    """No control character, mark of direction or command of CI reaches a terminal; nor do rich's own marks."""
    names = {f"{1:032x}": "\x1b]0;title\x07\u202ex [red]y[/red] ##[error]z"}
    fleet.write(snapshot(1, host="\x1b[2J", last_error="\r\n::error::x", rules=[rule(entry(1, 30), names=names)]))
    for verb in ("status", "top"):
        shown = fleet.run(verb).stdout
        assert all(each.isprintable() for each in shown.split("\n"))
        assert "##[" not in shown
    assert "[red]y[/red]" in shown


def test_snapshots_that_cannot_be_read_are_told(fleet: Fleet) -> None:
    fleet.write(snapshot(1), b"LG\x09", b"x" * 1_000_000)
    assert "2 snapshots cannot be read: it has version 9" in fleet.run("status").stderr


def opened(fleet: Fleet) -> Opened:
    return Opened(fleet.store, fleet.prefix, PATIENCE, {})


def test_keys_change_a_client_after_a_question(fleet: Fleet) -> None:
    """Ban, pardon and reset, each in the journal; a no changes nothing."""
    fleet.write(snapshot(1, rules=refused()))
    figures = FleetReader(fleet.store, fleet.prefix, timeout=PATIENCE).read()
    name, operations = client_bucket(figures, "api", "default", f"{1:032x}", timeout=PATIENCE)
    access = opened(fleet)
    bucket = access.carried_out(operations)

    @click.command()
    @click.argument("action")
    def act(action: str) -> None:
        click.echo(change(access, action, name, bucket))

    def done(action: str, words: str) -> str:
        result = CliRunner().invoke(act, [action], input=words)
        return result.stdout if result.exit_code == 0 else result.output + "(no)"

    assert "(no)" in done("ban", "10m\nscraper\nn\n")
    assert bucket.peek().allowed
    assert "not done" in done("ban", "soon\n\ny\n")
    assert "not done" in done("ban", "0\n\ny\n")
    assert "api ip=1: banned for 10 min" in done("ban", "10m\nscraper\ny\n")
    assert not bucket.peek().allowed
    assert [(each.key, each.reason) for each in access.journal.bans()] == [("api ip=1", "scraper")]
    assert "(no)" in done("pardon", "n\n")
    assert "pardoned" in done("pardon", "y\n")
    assert bucket.peek().allowed
    assert access.journal.bans() == []
    assert "reset" in done("reset", "y\n")
    assert [each.action for each in access.journal.events()] == ["reset", "pardon", "ban"]


def test_the_headline_without_a_rate_or_refusals() -> None:
    assert headline({"empty": "why", "headline": None}) == "why"
    assert headline({"empty": None, "headline": None}) == "no client is being refused"


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.pid, self.file = pty.fork()
        if not self.pid:
            os.environ.update(TERM="xterm", COLUMNS="120", LINES="40")
            os.execv(sys.executable, [sys.executable, "-m", "limitgate", *words])
        self.shown = ""

    def until(self, text: str) -> None:
        end = time.monotonic() + PROCESS_PATIENCE
        while text not in self.shown:
            assert time.monotonic() < end, self.shown[-2_000:]
            ready, _, _ = select.select([self.file], [], [], MOMENT)
            if ready:
                self.shown += os.read(self.file, 65_536).decode(errors="replace")

    def type(self, text: str) -> None:
        self.shown = ""
        os.write(self.file, text.encode())

    def ended(self) -> int:
        end = time.monotonic() + PROCESS_PATIENCE
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.file)
                return os.waitstatus_to_exitcode(status)
            ready, _, _ = select.select([self.file], [], [], MOMENT)
            if ready:
                try:
                    os.read(self.file, 65_536)
                except OSError:
                    continue
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("it did not end")


def test_top_on_a_terminal(fleet: Fleet) -> None:
    """Live, with keys: a ban asks for its duration, its reason, and whether it is meant."""
    fleet.write(snapshot(1, rules=refused()))
    terminal = Terminal("top", "--store", fleet.url, "--key-prefix", fleet.prefix, "--timeout", "20")
    terminal.until("b ban, p pardon")
    terminal.type("2")
    terminal.until("now 2")
    terminal.type("b")
    terminal.until("Ban api ip=2 for")
    terminal.type("5m\n")
    terminal.until("Reason")
    terminal.type("\n")
    terminal.until("for 5 min?")
    terminal.type("y\n")
    terminal.until("api ip=2: banned for 5 min")
    terminal.type("q")
    assert terminal.ended() == 0
    assert [each.key for each in opened(fleet).journal.bans()] == ["api ip=2"]


def test_status_on_a_terminal(fleet: Fleet) -> None:
    """Live until q."""
    fleet.write(snapshot(1))
    terminal = Terminal("status", "--store", fleet.url, "--key-prefix", fleet.prefix, "--timeout", "20")
    terminal.until("web:7")
    fleet.write(replace(snapshot(2), host="another"))
    terminal.until("another:7")
    terminal.type("q")
    assert terminal.ended() == 0


def test_the_exporter_serves_and_keeps_its_totals(fleet: Fleet) -> None:
    """Told to end, it writes what it knows and exits with 0; the next one goes on from there."""
    counters = [("limitgate.requests", ("admitted", "store"), [41])]
    fleet.write(snapshot(1, counters=counters))
    command = [sys.executable, "-m", "limitgate", "exporter", "--store", fleet.url, "--key-prefix", fleet.prefix]
    command += ["--port", "0", "--timeout", "20"]
    for lives in (True, False):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            text = answer.read().decode()
        assert 'limitgate_requests_total{decided_by="store",outcome="admitted"} 41.0' in text
        assert f"limitgate_fleet_processes {1.0 if lives else 0.0}" in text
        process.send_signal(signal.SIGTERM)
        assert process.wait(PROCESS_PATIENCE) == 0
        process.stdout.close()
        fleet.store.fleet(FleetRequest(fleet_key(fleet.prefix), f"{1:016x}"), PATIENCE)


def test_the_exporter_needs_a_port_of_its_own(fleet: Fleet) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = fleet.run("exporter", "--port", str(taken.getsockname()[1]), code=2)
    assert "expected a free port" in result.stderr
