"""The verb `replay`."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from hashlib import sha256
from pathlib import Path

import pytest

from limitgate.command.group import limitgate
from limitgate.command.verbs import replay
from tests.support.command_line import CliRunner

LOG = Path(__file__).parents[2] / "data" / "access.log.gz"
LINE = '{client} - - [17/May/2015:10:05:{second:02} +0000] "GET / HTTP/1.1" 200 1\n'


@pytest.fixture
def rules(tmp_path: Path) -> str:
    file = tmp_path / "rules.yaml"
    file.write_text("rules: [{name: all, key: [ip], qpm: 2}]")
    return str(file)


@pytest.fixture
def log(tmp_path: Path) -> str:
    file = tmp_path / "access.log"
    lines = [LINE.format(client="203.0.113.7", second=number) for number in range(5)]
    file.write_text("".join([*lines, "nonsense\n", LINE.format(client="203.0.113.8", second=9)]))
    return str(file)


def run(*words: str, status: int = 0, feed: str | None = None) -> str:
    result = CliRunner().invoke(limitgate, ["replay", *words], input=feed, catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


def test_json(log: str, rules: str) -> None:
    """One value: lines, requests, rules, and the clients with most refusals first."""
    found = json.loads(run(log, "--rules", rules, "--json"))
    assert found["lines"] == 7
    assert found["skipped"] == 1
    assert (found["requests"], found["admitted"], found["refused"]) == (6, 3, 3)
    assert found["rules"] == {"all": {"admitted": 3, "refused": 3}}
    assert found["clients"][0] == {"client": "203.0.113.7", "requests": 5, "refused": 3}
    assert {"against", "suggest"}.isdisjoint(found)


def test_empty_lines_are_no_lines(rules: str, tmp_path: Path) -> None:
    """Whatever ends them."""
    file = tmp_path / "access.log"
    file.write_text("\r\n".join(["", LINE.format(client="::1", second=1).strip(), " ", ""]) + "\n", newline="")
    found = json.loads(run(str(file), "--rules", rules, "--json"))
    assert (found["lines"], found["skipped"], found["requests"]) == (1, 0, 1)


def test_clients_that_no_table_has_room_for(rules: str, tmp_path: Path) -> None:
    """They are cut for people; JSON has them as they stand in the log."""
    file, client = tmp_path / "access.log", "h" * 5_000
    file.write_text("".join(LINE.format(client=client, second=number) for number in range(5)))
    assert max(map(len, run(str(file), "--rules", rules).splitlines())) < 300
    assert max(map(len, run(str(file), "--rules", rules, "--against", rules).splitlines())) < 300
    assert json.loads(run(str(file), "--rules", rules, "--json"))["clients"][0]["client"] == client


def test_rules_to_try_and_limits_to_suggest(log: str, rules: str, tmp_path: Path) -> None:
    """Figures of the others stand beside, with what would be new; the smallest limits per rule and unit."""
    other = tmp_path / "other.yaml"
    other.write_text("rules: [{name: all, key: [ip], qpm: 1}]")
    found = json.loads(run(log, "--rules", rules, "--against", str(other), "--suggest", "--json"))
    assert found["refused"] == 3
    assert found["against"]["refused"] == 4
    assert (found["against"]["newly_refused"], found["against"]["newly_admitted"]) == (1, 0)
    assert found["suggest"] == {"all": {"second": 1, "minute": 5, "hour": 5, "day": 5}}
    text = run(log, "--rules", rules, "--against", str(other), "--suggest")
    assert "1 requests newly refused, 0 newly admitted" in text
    assert "Smallest limits" in text


def test_limits_that_cannot_be_suggested(log: str, rules: str) -> None:
    """Their units are left out, and listed with the reason. A suggestion for the others is at least the cost."""
    Path(rules).write_text("""rules:
  - {name: dear, limits: [9/minute], cost: 3}
  - {name: both, limits: [9/minute, {limit: 900/minute, cost: 100}]}
  - {name: places, concurrency: 5}
""")
    lines = run(log, "--rules", rules, "--suggest").splitlines()
    at = lines.index("Smallest limits that would have refused no request, or at most one in 1,000:")
    assert lines[at + 1 :] == [
        "Rule  Per second  Per minute  Per hour  Per day",
        "dear  3           15          15        15",
        "both  1           -           5         5",
        "",
        "No limit is suggested for:",
        "Rule    Unit    Reason",
        "both    minute  its limits of this unit differ in algorithm or cost",
        "places  all     it limits requests in flight, but a log has no durations",
    ]
    found = json.loads(run(log, "--rules", rules, "--suggest", "--json"))
    assert found["suggest"]["both"].keys() == found["suggest_almost"]["both"].keys() == {"second", "hour", "day"}
    assert found["unsuggested"][1] == {
        "rule": "places",
        "units": ["second", "minute", "hour", "day"],
        "reason": "it limits requests in flight, but a log has no durations",
    }
    Path(rules).write_text("rules: [{name: places, concurrency: 5}]")
    assert "Smallest" not in run(log, "--rules", rules, "--suggest")


def test_text(log: str, rules: str) -> None:
    """A summary, the highest rates, and tables of rules and clients."""
    lines = run(log, "--rules", rules, "--clients", "1").splitlines()
    assert lines == [
        "6 requests of 2 clients, 2015-05-17 10:05:00 UTC to 2015-05-17 10:05:09 UTC (1 of 7 lines have no request)",
        "3 admitted, 3 refused (50.00%)",
        "Highest rate of one client: 1 in a second (203.0.113.7)",
        "Highest rate of one client: 5 in a minute (203.0.113.7)",
        "",
        "Rule  Admitted  Refused",
        "all   3         3",
        "",
        "Client       Requests  Refused",
        "203.0.113.7  5         3",
    ]


def test_refusals_in_shadow_are_marked(log: str, rules: str, tmp_path: Path) -> None:
    """Nothing is refused by them, which the summary says, and the row of the rule."""
    trial = tmp_path / "trial.yaml"
    trial.write_text("rules: [{name: all, key: [ip], qpm: 4}, {name: trial, key: [ip], qpm: 2, shadow: true}]")
    lines = run(log, "--rules", str(trial)).splitlines()
    assert "5 admitted, 1 refused (16.67%), 2 in shadow" in lines
    assert lines[6:8] == ["all    5         1", "trial  3         2 in shadow"]
    found = json.loads(run(log, "--rules", str(trial), "--json"))
    assert found["rules"]["trial"] == {"admitted": 3, "refused": 2}
    assert found["in_shadow"] == {"requests": 2, "rules": {"trial": 2}}
    against = json.loads(run(log, "--rules", rules, "--against", str(trial), "--json"))
    assert (against["in_shadow"]["requests"], against["against"]["in_shadow"]) == (0, found["in_shadow"])
    assert "0 requests newly refused, 2 newly admitted, 2 in shadow" in run(log, "--rules", rules, "--against", str(trial))
    assert "in shadow" not in run(log, "--rules", rules)


def test_a_name_in_shadow_in_one_tier(tmp_path: Path) -> None:
    """Refusals of both are in one row, the part in shadow apart; a rule that denies is told in the summary."""
    folder = tmp_path / "config"
    folder.mkdir()
    digest = sha256(b"k").hexdigest()
    (folder / "a.yaml").write_text("rules: [{name: all, qpm: 1}, {name: shut, path: /shut, deny: true, shadow: true}]")
    callers = f'callers: [{{id: a, api_key: "sha256:{digest}"}}]'
    (folder / "b.yaml").write_text(f"tier: b\n{callers}\nrules: [{{name: all, qpm: 1, key: [caller], shadow: true}}]")
    log = tmp_path / "log"
    lines = [
        {"time": 1, "client": "::1", "method": "GET", "path": "/", "headers": headers} for headers in ({}, {"X-API-Key": "k"})
    ]
    log.write_text(
        "".join(f"{json.dumps(line)}\n" for line in [*lines, *lines, {**lines[0], "client": "::5:0:0:0:1", "path": "/shut"}])
    )
    text = run(str(log), "--rules", str(folder))
    assert "4 admitted, 1 refused (20.00%), 2 in shadow" in text
    assert "\nall   3         2 (1 in shadow)\n" in text


def test_the_log_of_uvicorn(rules: str, tmp_path: Path) -> None:
    """As it stands: without times all requests come at once, which is said. With times before the lines they are known."""
    lines = [f'INFO:     203.0.113.7:{50_000 + number} - "GET / HTTP/1.1" 200 OK' for number in range(5)]
    (tmp_path / "bare").write_text("INFO:     Started server process [1]\n" + "\n".join(lines))
    found = json.loads(run(str(tmp_path / "bare"), "--rules", rules, "--json"))
    assert (found["requests"], found["refused"], found["untimed"], found["skipped"]) == (5, 3, 5, 1)
    assert found["clients"] == [{"client": "203.0.113.7", "requests": 5, "refused": 3}]
    text = run(str(tmp_path / "bare"), "--rules", rules)
    assert "5 requests of 1 clients (1 of 6 lines" in text
    assert "5 requests have no time and count as simultaneous with the previous line" in text
    timed = [f"2026-11-28T16:0{minute}:00Z {line}" for minute, line in enumerate(lines)]
    (tmp_path / "timed").write_text("\n".join(timed))
    found = json.loads(run(str(tmp_path / "timed"), "--rules", rules, "--json"))
    assert (found["requests"], found["refused"], found["untimed"]) == (5, 0, 0)


def test_a_port_after_an_ipv6_address_is_no_client(rules: str, tmp_path: Path) -> None:
    """Servers such as uvicorn write one without brackets."""
    lines = [f'INFO:     2001:db8::1:{50_000 + number} - "GET / HTTP/1.1" 200 OK' for number in range(5)]
    (tmp_path / "log").write_text("\n".join(lines))
    found = json.loads(run(str(tmp_path / "log"), "--rules", rules, "--json"))
    assert found["clients"] == [{"client": "2001:db8::/64", "requests": 5, "refused": 3}]


def test_clients_without_an_address_are_said(rules: str, tmp_path: Path) -> None:
    """They may be proxies, hosts or sockets, which count as one client each."""
    clients = ["web.internal", "unix:", "web.internal", "203.0.113.7", "2001:db8::1", "[2001:db8::1]:443"]
    (tmp_path / "log").write_text("".join(LINE.format(client=client, second=1) for client in clients))
    text = run(str(tmp_path / "log"), "--rules", rules)
    assert "3 requests have a client that is not an address, for example 'web.internal'; each name counts as one client" in text
    assert json.loads(run(str(tmp_path / "log"), "--rules", rules, "--json"))["unaddressed"] == 3
    (tmp_path / "log").write_text(LINE.format(client="203.0.113.7", second=1))
    assert "a client that is not an address" not in run(str(tmp_path / "log"), "--rules", rules)


def test_what_is_not_read_is_said(rules: str, tmp_path: Path) -> None:
    """Lines with a request whose client or time is not known, by reason and with the first of them."""
    unread = LINE.format(client="nginx: host x", second=0).strip()
    (tmp_path / "log").write_text(f"{LINE.format(client='203.0.113.7', second=1)}{unread}\n{unread}\nnonsense\n")
    found = json.loads(run(str(tmp_path / "log"), "--rules", rules, "--json"))
    assert (found["requests"], found["skipped"]) == (1, 3)
    assert found["unread"] == [{"reason": "cannot tell the client from a host", "lines": 2, "first": unread}]
    text = run(str(tmp_path / "log"), "--rules", rules)
    assert "2 lines with a request were not read: cannot tell the client from a host, for example 'nginx: host x - -" in text


@pytest.mark.parametrize("app", ["example_app.main:app", "example_app.wsgi:app", "example_app.main:create_app"])
def test_an_application_brings_routes(app: str, tmp_path: Path) -> None:
    """Its rules, limits in its code, and a bucket for each route where rules count by path."""
    paths = ["/api/items/1", "/api/items/2", "/api/items/3", "/api/hello", "/api/hello", "/api/hello", "/login"]
    (tmp_path / "log").write_text(
        "".join([LINE.format(client="h", second=0).replace("GET /", f"GET {path}") for path in paths])
    )
    found = json.loads(run(str(tmp_path / "log"), "--app", app, "--json"))
    assert found["rules"]["api"] == {"admitted": 6, "refused": 0}
    post = LINE.format(client="h", second=0).replace("GET /", "POST /login")
    (tmp_path / "log").write_text(post * 2)
    found = json.loads(run(str(tmp_path / "log"), "--app", app, "--json"))
    assert found["rules"]["login-hourly"] == found["rules"]["login"] == {"admitted": 2, "refused": 0}
    assert run(str(tmp_path / "log"), "--app", app, "--processes", "2", status=2)


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input(rules: str, name: str) -> None:
    """A pipe is a log, too, also one with a name, as shells make them of `<(zcat access.log.gz)`."""
    command = [sys.executable, "-m", "limitgate", "replay", name, "--rules", rules, "--json"]
    feed = "".join(LINE.format(client="h", second=number) for number in range(3))
    result = subprocess.run(command, input=feed, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout)["refused"] == 1


def test_a_compressed_log_by_two_processes(rules: str) -> None:
    """The figures are those of one."""
    assert run(str(LOG), "--rules", rules, "--json", "--processes", "2") == run(str(LOG), "--rules", rules, "--json")


def test_a_process_that_is_ended(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the kernel, for want of memory: that is one line."""

    def ended(*_: object) -> None:
        raise BrokenProcessPool

    monkeypatch.setattr(replay, "replay_shared", ended)
    assert run(str(LOG), "--rules", rules, "--processes", "2", status=1).endswith("expected --processes 1\n")


def test_all_clients_of_a_day_are_listed(tmp_path: Path, rules: str) -> None:
    """In JSON 10,000 of them, unless another number is given; most refusals first."""
    log = tmp_path / "access.log"
    log.write_text("".join([LINE.format(client=f"h{number}", second=0) for number in range(10_002)]))
    assert len(json.loads(run(str(log), "--rules", rules, "--json"))["clients"]) == 10_000
    assert len(json.loads(run(str(log), "--rules", rules, "--json", "--clients", "20000"))["clients"]) == 10_002


def test_nothing_has_no_client_of_the_highest_rate(tmp_path: Path, rules: str) -> None:
    """What does not apply is null."""
    (tmp_path / "empty").touch()
    highest = json.loads(run(str(tmp_path / "empty"), "--rules", rules, "--json"))["highest"]
    assert highest == {unit: {"client": None, "requests": 0} for unit in ("second", "minute")}


def test_an_empty_log(tmp_path: Path, rules: str) -> None:
    """Nothing came, nothing is refused."""
    (tmp_path / "empty").touch()
    assert run(str(tmp_path / "empty"), "--rules", rules, "--suggest").startswith(
        "0 requests of 0 clients\n0 admitted, 0 refused"
    )


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["missing", "--rules", "{rules}"], 2, "'missing' does not exist"),
        ([".", "--rules", "{rules}"], 2, "is a directory"),
        (["{log}", "--rules", "missing"], 1, "missing"),
        (["{log}"], 2, "--rules"),
        (["{log}", "--rules", "{rules}", "--processes", "2", "--suggest"], 2, "several processes need a file"),
        (["{rules}", "--rules", "{rules}"], 1, "no line has a request"),
        (["{log}", "--rules", "{rules}", "--format", "json"], 1, "no line has a request in the format json"),
        (["{log}", "--rules", "{rules}", "--format", "xml"], 2, "combined"),
    ],
)
def test_mistakes_are_told(log: str, rules: str, words: list[str], status: int, told: str) -> None:
    """A missing file, rules or options; a file that is no log."""
    assert told in run(*[word.format(log=log, rules=rules) for word in words], status=status)


def test_the_documentation_shows_what_it_prints(tmp_path: Path) -> None:
    """The page's rules and command, to the letter."""
    page = (Path(__file__).parents[3] / "docs" / "replay.md").read_text()
    (tmp_path / "rules.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    command = page.split("```sh\n")[1].split("```")[0]
    printed = page.split("```text\n")[1].split("```")[0]
    words = command.split()
    assert words[:2] == ["limitgate", "replay"]
    words = [str(LOG) if word.endswith(".gz") else str(tmp_path / word) if word == "rules.yaml" else word for word in words[2:]]
    assert run(*words) == printed
