"""The verbs about one client's state in a live store: peek, reset, ban, pardon and bans."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import Result

from limitgate import Limit, Limiter, LimitGateWSGI, open_sync_store
from limitgate.command.group import limitgate
from limitgate.gate.journal import MOST_EVENTS, Journal
from limitgate.stores.base import ConfigRequest
from tests.support.command_line import CliRunner
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer
from tests.support.versions import needs

RULES = """
rules:
  - {name: api, path: /api/**, key: [path, ip], qpd: 3}
  - {name: keyed, path: /keyed, key: [api_key], qpd: 2}
  - {name: headed, path: /headed, key: ["header:X-Id"], qpd: 2}
"""
IP, KEY = "203.0.113.7", "sesame-open-now"


class World:
    """A service on Redis, and the command beside it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.prefix = url, f"t{uuid.uuid4().hex}"
        self.rules = folder / "rules.yaml"
        self.rules.write_text(RULES)
        self.gate = LimitGateWSGI(_app, rules=self.rules, store=url, key_prefix=self.prefix, timeout=5)

    def request(self, path: str = "/api/hello", ip: str = IP, **headers: str) -> str:
        """Status of a request."""
        answers: list[str] = []
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "REMOTE_ADDR": ip, **headers}
        list(self.gate(environ, lambda status, _: answers.append(status[:3])))
        return answers[0]

    def run(self, verb: str, *words: str, feed: str | None = None) -> Result:
        command = [verb, "--store", self.url, "--key-prefix", self.prefix, "--timeout", "10", *words]
        return CliRunner().invoke(limitgate, command, input=feed, catch_exceptions=False)

    def json(self, verb: str, *words: str, status: int = 0) -> Any:
        result = self.run(verb, *words, "--json")
        assert result.exit_code == status, result.output
        return json.loads(result.stdout)

    def of(self, rule: str, *words: str) -> list[str]:
        return ["--rules", str(self.rules), "--rule", rule, *words]


def _app(_: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    return []


@pytest.fixture(params=["single", "cluster"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    kind: RedisServer | RedisCluster = request.getfixturevalue("redis_server" if request.param == "single" else "redis_cluster")
    return World(kind.url, tmp_path)


def test_a_client_of_a_rule(world: World) -> None:
    """Its state is that of the gate, whether the path is given or not; a reset fills its buckets."""
    assert [world.request() for _ in range(4)] == ["200", "200", "200", "429"]
    seen = world.json("peek", *world.of("api", "--ip", IP), status=1)
    assert (seen["allowed"], seen["limit"], seen["remaining"], seen["rule"]) == (False, 3, 0, "api")
    assert 0 < seen["retry_after"] <= 28_800
    assert seen["windows"][0]["used"] == 3
    assert world.json("peek", *world.of("api", "--ip", IP, "--path", "/api/hello"), status=1)["remaining"] == 0
    assert world.json("peek", *world.of("api", "--ip", "203.0.113.8"))["remaining"] == 3
    done = world.json("reset", *world.of("api", "--ip", IP, "--path", "/api/hello"), "-y")
    assert (done["allowed"], done["remaining"]) == (True, 3)
    assert world.json("peek", *world.of("api", "--ip", IP))["remaining"] == 3


def test_a_ban_that_the_gate_heeds(world: World) -> None:
    """It is listed with its time and reason until it is lifted, and tells nobody in Redis who it is."""
    banned = world.json("ban", *world.of("keyed", "--api-key", KEY, "--ip", IP), "--for", "1h", "--reason", "a scraper", "-y")
    assert banned["retry_after"] == 3600
    assert world.request("/keyed", HTTP_X_API_KEY=KEY) == "429"
    assert world.request("/keyed", ip="203.0.113.8", HTTP_X_API_KEY="another") == "200"
    (listed,) = world.json("bans")
    assert 3500 < listed["retry_after"] <= 3600
    assert listed["reason"] == "a scraper"
    assert listed["key"] == banned["key"] == "keyed api_key=ses…now"
    assert "a scraper" in world.run("bans").stdout
    assert re.match(
        r"a request would be refused: banned, retry in .+\n", world.run("peek", *world.of("keyed", "--api-key", KEY)).stdout
    )
    assert "banned" in world.run("reset", *world.of("keyed", "--api-key", KEY), "-y").stdout
    pardoned = world.run("pardon", *world.of("keyed", "--api-key", KEY), feed="y\n")
    assert pardoned.exit_code == 0
    assert world.json("bans") == []
    assert world.run("bans").stdout == "no ban set by a command or a rule is in force\n"
    assert world.json("peek", *world.of("keyed", "--api-key", KEY))["remaining"] == 2
    assert [event["action"] for event in world.json("bans", "--log")] == ["pardon", "reset", "ban"]
    assert "a scraper" in world.run("bans", "--log").stdout


def test_a_limiters_key(world: World) -> None:
    """By the key, and by its limits where these are asked about."""
    with Limiter(world.url, key_prefix=world.prefix, timeout=5) as limiter:
        limiter.hit("user:42", "2/day")
        assert world.json("peek", "user:42", "2/day")["remaining"] == 1
        world.json("ban", "user:42", "--for", "90s", "-y")
        assert not limiter.hit("user:42", "2/day").allowed
        assert 80 < world.json("peek", "user:42", status=1)["retry_after"] <= 90
        assert "banned" in world.run("peek", "user:42", "2/day").stdout
        world.json("pardon", "user:42", "-y")
        assert world.run("peek", "user:42").stdout.startswith("not banned")
        world.json("reset", "user:42", "2/day", "-y")
        assert limiter.peek("user:42", "2/day").remaining == 2


def test_nothing_in_redis_tells_who_it_is(redis_server: RedisServer, client: redis.Redis, tmp_path: Path) -> None:
    """Names are masked in the journal, too."""
    world = World(redis_server.url, tmp_path)
    world.json("ban", *world.of("keyed", "--api-key", KEY, "--ip", IP), "-y")
    kept = b"".join(client.get(key) or b"" for key in client.scan_iter(f"{world.prefix}:*"))
    assert b"keyed" in kept
    assert not [text for text in (KEY, IP) if text.encode() in kept]


@pytest.mark.parametrize("verb", ["peek", "reset", "ban", "pardon"])
def test_an_address_is_no_key_of_a_rule(world: World, verb: str) -> None:
    """It would change nothing of the service, so the command says how to name a rule's client."""
    more = {"peek": [], "reset": ["9/minute", "-y"]}.get(verb, ["-y"])
    for key, warns in (("127.0.0.77", True), ("2001:db8::7", True), ("user:42", False)):
        told = world.run(verb, key, *more).stderr
        assert ("this is the key of a Limiter; for a client of a rule, expected --rules PATH" in told) is warns
    assert "of a Limiter" not in world.run("peek", *world.of("keyed", "--api-key", KEY, "--ip", IP)).stderr


@pytest.mark.parametrize("verb", ["reset", "ban", "pardon"])
def test_what_changes_something_asks_first(redis_server: RedisServer, tmp_path: Path, verb: str) -> None:
    """Without a yes nothing happens, and with --dry-run neither; a ban without an end is told as such.

    The question has the address as it was typed, so that it can be checked; what may be logged is masked.
    """
    needs("click", "8.2")  # its runner for tests raises `EOFError` at the end of the input since then, as a terminal does
    world = World(redis_server.url, tmp_path)
    assert [world.request() for _ in range(3)] == ["200"] * 3
    whom = world.of("api", "--ip", IP)
    refused, unanswered, dry = world.run(verb, *whom, feed="n\n"), world.run(verb, *whom), world.run(verb, *whom, "--dry-run")
    assert [result.exit_code for result in (refused, unanswered, dry)] == [1, 2, 0]
    assert "Standard input is closed, expected -y" in unanswered.output
    assert [IP in result.output for result in (refused, unanswered, dry)] == [True, True, False]
    assert "20….7" in dry.output
    assert world.json("peek", *whom, status=1)["remaining"] == 0
    assert world.json("bans", "--log") == []
    world.json("ban", *whom, "-y")
    assert world.json("bans")[0]["retry_after"] is None
    for peeked in (world.json("peek", *whom, status=1), world.json("peek", *whom, "--path", "/api/hello", status=1)):
        assert peeked["retry_after"] is None
        assert [window["retry_after"] for window in peeked["windows"]] == [None]
    assert "would be refused: banned permanently" in world.run("peek", *whom).stdout
    assert "banned permanently" in world.run("ban", *whom, "-y").stdout


def test_a_listed_caller_has_the_rule_of_its_tier(redis_server: RedisServer, tmp_path: Path) -> None:
    """By its id or by its API key; others have that of everybody, and ``--tier`` says another."""
    world = World(redis_server.url, tmp_path)
    (tmp_path / "vip.yaml").write_text(
        f"tier: vip\ncallers: [{{id: acme, api_key: 'sha256:{sha256(KEY.encode()).hexdigest()}'}}]\n"
        "rules: [{name: api, path: /api/**, key: [caller], qpd: 2}]"
    )
    world.rules = tmp_path
    world.gate = LimitGateWSGI(_app, rules=tmp_path, store=world.url, key_prefix=world.prefix, timeout=5)
    assert [world.request(HTTP_X_API_KEY=KEY) for _ in range(3)] == ["200", "200", "429"]
    for whom in (["--caller", "acme"], ["--api-key", KEY], ["--caller", "acme", "--tier", "vip"]):
        assert world.json("peek", *world.of("api", *whom), status=1)["limit"] == 2
    assert world.json("peek", *world.of("api", "--ip", IP, "--api-key", "other"))["limit"] == 3
    assert world.json("peek", *world.of("api", "--caller", "acme", "--ip", IP, "--tier", "default"))["limit"] == 3
    assert world.json("reset", *world.of("api", "--caller", "acme"), "-y")["remaining"] == 2


VIP = f"""
tier: vip
callers:
  - {{id: acme, api_key: 'sha256:{sha256(KEY.encode()).hexdigest()}'}}
  - {{id: billing, header: {{X-Caller: billing}}}}
rules: [{{name: api, path: /api/**, key: [caller], qpd: 5}}]
"""


@pytest.mark.parametrize("header", ["x-api-key", "X-Token", "authorization"])
@pytest.mark.parametrize("lists", [False, True])
def test_an_api_key_as_a_header(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str, *, lists: bool
) -> None:
    """``-H`` with the header of the service is ``--api-key``, for every verb, and as the gate itself counts."""
    monkeypatch.setenv("LIMITGATE_API_KEY_HEADER", header)
    world = World(redis_server.url, tmp_path)
    value = f"Bearer {KEY}" if header == "authorization" else KEY
    given, sent = ["-H", f"{header.title()}: {value}"], {f"HTTP_{header.upper().replace('-', '_')}": value}
    if lists:
        (tmp_path / "vip.yaml").write_text(VIP)
        world.rules = tmp_path
        world.gate = LimitGateWSGI(_app, rules=tmp_path, store=world.url, key_prefix=world.prefix, timeout=5)
    for rule, path in (("keyed", "/keyed"), *([("api", "/api/hello")] if lists else [])):
        client = world.of(rule, "--ip", IP, *given)
        assert world.request(path, **sent) == "200"
        for way in (given, ["--api-key", KEY], [*given, "--api-key", KEY]):
            seen = world.json("peek", *world.of(rule, "--ip", IP, *way))
            assert [(window["limit"], window["used"]) for window in seen["windows"]] == [(5 if rule == "api" else 2, 1)]
        assert world.json("reset", *client, "-y")["windows"][0]["used"] == 0
        banned = world.json("ban", *client, "--for", "1h", "-y")
        assert banned["key"] == f"{rule} api_key=ses…now"
        assert (world.request(path, **sent), world.request(path)) == ("429", "200")
        assert world.json("pardon", *client, "-y")["was_banned"] is True
        refused = world.run("peek", *client, "--api-key", "another")
        assert (refused.exit_code, f"--api-key and -H '{header}: ...' are different keys" in refused.stderr) == (2, True)


def test_another_header_is_no_api_key(redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that of the service is, and of ``Authorization`` only a Bearer token."""
    world = World(redis_server.url, tmp_path)
    for header, name in (("X-Token", "X-API-Key: abc"), ("authorization", "Authorization: Basic YTpi")):
        monkeypatch.setenv("LIMITGATE_API_KEY_HEADER", header)
        assert "expected --api-key, or --ip" in world.run("peek", *world.of("keyed", "-H", name)).stderr
        client = world.of("keyed", "-H", name, "--api-key", KEY)
        assert world.json("peek", *client)["allowed"]
        assert "api_key=ses…now" in world.json("ban", *client, "-y", "--dry-run")["key"]


def test_a_header_of_the_api_key_in_a_key(redis_server: RedisServer, tmp_path: Path) -> None:
    """A rule may count by it as by any header."""
    world = World(redis_server.url, tmp_path)
    world.rules.write_text("rules: [{name: raw, key: ['header:X-API-Key'], qpd: 2}]")
    world.gate = LimitGateWSGI(_app, rules=world.rules, store=world.url, key_prefix=world.prefix, timeout=5)
    assert world.request(HTTP_X_API_KEY=KEY) == "200"
    assert world.json("peek", *world.of("raw", "-H", f"X-API-Key: {KEY}"))["remaining"] == 1


def test_an_api_key_of_a_rule_by_its_header(redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--api-key`` and ``-H`` are the same client of a rule that counts by the header itself."""
    world = World(redis_server.url, tmp_path)
    for header, value in (("x-api-key", KEY), ("authorization", f"Bearer {KEY}")):
        monkeypatch.setenv("LIMITGATE_API_KEY_HEADER", header)
        world.rules.write_text(f"rules: [{{name: {header}, key: ['header:{header}'], qpd: 2}}]")
        world.gate = LimitGateWSGI(_app, rules=world.rules, store=world.url, key_prefix=world.prefix, timeout=5)
        assert world.request(**{f"HTTP_{header.upper().replace('-', '_')}": value}) == "200"
        for way in (["--api-key", KEY], ["-H", f"{header.title()}: {value}"]):
            assert world.json("peek", *world.of(header, *way))["remaining"] == 1
            banned = world.run("ban", *world.of(header, *way), "-y", "--dry-run")
            assert (banned.stdout, banned.stderr) == (f"{header} api_key=ses…now: would be banned permanently\n", "")
    basic = world.of("authorization", "-H", "Authorization: Basic YTpi")
    assert "headers=Authorization:" in world.run("ban", *basic, "-y", "--dry-run").stdout


@pytest.mark.parametrize("long", [["-H", f"X-Api-Key: {'a' * 20_000}"], ["--api-key", "a" * 20_000]])
@pytest.mark.parametrize("rule", ["api", "keyed"])
def test_a_header_that_is_too_long(redis_server: RedisServer, tmp_path: Path, long: list[str], rule: str) -> None:
    """The service refuses such a request, so it has no bucket."""
    world = World(redis_server.url, tmp_path)
    result = world.run("peek", *world.of(rule, "--ip", IP, *long))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "a header or API key has more than 16,384 characters" in result.stderr


@pytest.mark.parametrize(
    ("rule", "words", "name", "unused"),
    [
        ("login", ["--caller", "acme"], "login ip=20….7", "--caller has"),
        ("login", ["--user", "7", "-H", "X-Other: b", "--path", "/login"], "login ip=20….7", "--path, --user, -H X-Other have"),
        ("login", ["--api-key", KEY], "login ip=20….7", "--api-key has"),
        ("login", ["--tier", "default"], "login ip=20….7", None),
        ("tiered", ["--caller", "acme"], "tiered ip=20….7", None),
        ("tiered", ["--api-key", KEY], "tiered ip=20….7", None),
        ("tiered", ["-H", f"X-Api-Key: {KEY}", "--host", "h"], "tiered ip=20….7", "--host has"),
        ("either", ["--api-key", "other"], "either ip=20….7 api_key=o…r", None),
        ("either", ["--api-key", KEY], "either ip=20….7 api_key=ses…now", None),
        ("called", ["--api-key", KEY], "called api_key=ses…now", "--ip has"),
        ("called", [], "called ip=20….7", None),
        ("bodies", ["--body", '{"user": 7}', "-H", "x-ID: c"], 'bodies headers=x-ID:… json={"…7}', "--ip has"),
    ],
)
def test_parts_that_the_key_lacks(  # noqa: PLR0917 - pytest passes them by name
    redis_server: RedisServer, tmp_path: Path, rule: str, words: list[str], name: str, unused: str | None
) -> None:
    """They don't look as if they narrowed the ban, but select the tier; only a ban names them."""
    world = World(redis_server.url, tmp_path)
    keys = {"login": "ip", "tiered": "ip", "either": "api_key|ip", "called": "caller", "bodies": "'json:/user', 'header:X-Id'"}
    world.rules.write_text("rules:\n" + "".join(f"- {{name: {each}, key: [{keys[each]}], qpd: 3}}\n" for each in keys))
    (tmp_path / "vip.yaml").write_text(
        f"tier: vip\ncallers: [{{id: acme, api_key: 'sha256:{sha256(KEY.encode()).hexdigest()}'}}]\n"
        "rules: [{name: tiered, key: [ip], qpd: 7}]"
    )
    world.rules = tmp_path
    whom = world.of(rule, "--ip", IP, *words)
    banned = world.run("ban", *whom, "-y")
    assert banned.stdout == f"{name}: banned permanently\n"
    assert world.json("bans")[0]["key"] == name
    if unused is None:
        assert not banned.stderr
    else:
        assert f"{unused} no effect: rule {rule} counts by" in banned.stderr
    for verb in ("reset", "pardon"):
        done = world.run(verb, *whom, "-y")
        assert (done.stdout.startswith(f"{name}: "), done.stderr) == (True, "")
    if rule == "tiered":
        assert world.json("peek", *whom)["limit"] == 7


def test_a_caller_by_another_header(redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listed caller's header is accepted from a trusted client, as in the service and in ``explain``."""
    monkeypatch.setenv("LIMITGATE_TRUSTED_PROXIES", "10.0.0.1")
    world = World(redis_server.url, tmp_path)
    (tmp_path / "vip.yaml").write_text(VIP)
    world.rules = tmp_path
    header = ["-H", "X-Caller: billing"]
    assert world.json("peek", *world.of("api", "--ip", "10.0.0.1", *header))["limit"] == 5
    assert world.json("peek", *world.of("api", "--ip", "10.0.0.1"))["limit"] == 3
    assert world.json("peek", *world.of("api", "--ip", IP, *header))["limit"] == 3


def test_where_nobody_can_be_asked_a_yes_is_wanted() -> None:
    """Standard input is closed, as a service manager may have it."""
    closes = 'exec "$@" <&-'
    command = [sys.executable, "-m", "limitgate", "ban", "key", "--store", "redis://127.0.0.1:1"]
    process = subprocess.run(["sh", "-c", closes, "sh", *command], capture_output=True, text=True, timeout=60, check=False)
    assert (process.returncode, "Standard input is closed, expected -y" in process.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["peek"], 2, "expected a client"),
        (["peek", "key", "--rule", "api"], 2, "not both"),
        (["reset", "key", "-y"], 2, "expected the limits of 'key'"),
        (["peek", "key", "3/s", "--ip", IP], 2, "--ip: for a client of a --rule only"),
        (["ban", "key", "-y", "--tier", "t", "-H", "A: b", "--path", "/"], 2, "--path, --header, --tier: for a client of a"),
        (["reset", "key", "3/s", "-y", "--api-key", KEY, "--user", "", "--host", "h"], 2, "--api-key, --user, --host: for"),
        (["pardon", "key", "-y", "--given", "a=b", "--limits", "3/s"], 2, "--given, --limits: for a client of a --rule only"),
        (["peek", "key", "--body", "{{}}", "--caller", "x", "--method", "GET"], 2, "--body, --caller, --method: for a client"),
        (["peek", "key", "--algorithm", "gcra"], 2, "--algorithm: for the limits after KEY only"),
        (["peek", "--rules", "{rules}", "--rule", "api", "--align", "utc"], 2, "--align: for the limits after KEY only"),
        (["peek", "--rules", "missing", "--rule", "api"], 1, "expected a rule file or a folder"),
        (["peek", "key", "5/fortnight"], 2, "fortnight"),
        (["reset", "key", "often", "-y"], 2, "often"),
        (
            ["peek", "--rules", "{rules}", "--rule", "nope"],
            2,
            "expected one of api, keyed, headed; for a limit in code use limiter.bucket",
        ),
        (["peek", "--rules", "{rules}", "--rule", "api"], 2, "expected --ip\n"),
        (["peek", "--rules", "{rules}", "--rule", "keyed"], 2, "expected --api-key, or --ip for a client"),
        (["peek", "--rules", "{rules}", "--rule", "headed"], 2, "expected -H 'x-id: ...', or --ip for a client"),
        (["peek", "--rules", "{rules}", "--rule", "api", "--ip", "nowhere"], 2, "expected an address"),
        (["peek", "--rules", "{rules}", "--rule", "api", "--tier", "gold"], 2, "no file describes tier 'gold'"),
        (["peek", "--rules", "{rules}", "--rule", "api", "-H", "nonsense"], 2, "expected 'Name: value'"),
        (["ban", "key", "--for", "soon"], 2, "is not a duration, expected seconds"),
        (["ban", "key", "--for", "0"], 2, "expected more than 0"),
        (["ban", "key", "--for", "36601d"], 2, "at most 100 years"),
        (["bans", "--timeout", "0"], 2, "0<x<=60"),
        (["bans", "--ipv6-prefix", "31"], 2, "32<=x<=128"),
        (["bans", "--store", "memory://"], 2, "belongs to a single process"),
        (["bans", "--store", "ftp://h"], 2, "ftp"),
        (["bans", "--store", "redis://127.0.0.1:1", "--timeout", "1"], 3, ""),
    ],
)
def test_mistakes_are_told(tmp_path: Path, words: list[str], status: int, told: str) -> None:
    """Wrong usage, wrong rules, and a store that does not answer."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    store = [] if "--store" in words else ["--store", "redis://127.0.0.1:1"]
    command = [words[0], *store, *[word.format(rules=rules) for word in words[1:]]]
    result = CliRunner().invoke(limitgate, command, catch_exceptions=False)
    assert result.exit_code == status, result.output
    assert told in result.stderr
    assert result.stderr.count("limitgate: ") <= 1


def test_a_missing_store_is_told_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """By click, as it does since 8.2."""
    needs("click", "8.2")
    monkeypatch.delenv("LIMITGATE_STORE", raising=False)
    result = CliRunner().invoke(limitgate, ["bans"])
    assert (result.exit_code, "Missing option '--store' (env var: 'LIMITGATE_STORE')" in result.stderr) == (2, True)


def test_a_rule_that_counts_by_path_wants_one(redis_server: RedisServer, tmp_path: Path) -> None:
    """Else it is said whose bucket is shown, as that of the pattern may be nobody's; not of a rule for a single path."""
    world = World(redis_server.url, tmp_path)
    shown = world.run("peek", *world.of("api", "--ip", IP))
    assert "that of /api/**, which a service uses only if its routes are unknown; expected --path" in shown.stderr
    assert "expected" not in shown.stdout
    for words in (world.of("api", "--ip", IP, "--path", "/api/hello"), world.of("keyed", "--api-key", KEY)):
        assert not world.run("peek", *words).stderr


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5h", 5400), ("7d", 604_800)])
def test_durations(redis_server: RedisServer, tmp_path: Path, text: str, seconds: float) -> None:
    """As people write them."""
    assert World(redis_server.url, tmp_path).json("ban", "key", "--for", text, "--dry-run")["retry_after"] == seconds


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[]",
        "null",
        "[" * 100_000,
        '{"bans": 3, "events": {"a": 1}}',
        '{"bans": [3, [], ["k"], ["k", [], 9e99, null, "me"], ["k", 7, 9e99, null, "me"]], "events": [3, [1]]}',
        '{"bans": [["k", ["a"], "soon", null, "me"], [1, ["a"], 9e99, null, "me"]], "events": [["now", "a", "b", "c", null]]}',
        '{"bans": {"a": 1}, "events": [[9e999, "me", "ban", "k", null]]}',
    ],
    ids=lambda text: text[:40],
)
def test_a_journal_that_is_damaged_keeps_nobody_from_banning(redis_server: RedisServer, tmp_path: Path, text: str) -> None:
    """What of it is no entry is left out. One of a later version, which may have more in its entries, is read."""
    world = World(redis_server.url, tmp_path)
    store = open_sync_store(world.url)
    store.config(ConfigRequest(f"{world.prefix}:journal", text), 10)  # type: ignore[attr-defined]
    assert world.run("bans").exit_code == world.run("bans", "--log").exit_code == 0
    world.json("bans", "--log")
    world.json("ban", "user:42", "--for", "1h", "-y")
    assert [ban["key"] for ban in world.json("bans")] == ["u…2"]
    kept = {"bans": [["later", ["a"], None, "why", "me", "more"]], "events": [[1.0, "me", "ban", "later", None, "more"]]}
    store.config(ConfigRequest(f"{world.prefix}:journal", json.dumps(kept)), 10)  # type: ignore[attr-defined]
    assert world.json("bans") == [{"key": "later", "retry_after": None, "reason": "why", "by": "me", "digest": None}]
    assert world.json("bans", "--log")[0]["key"] == "later"
    store.close()


def test_a_change_that_cannot_be_noted_is_told_as_made(redis_server: RedisServer, client: redis.Redis, tmp_path: Path) -> None:
    """As where Redis has memory for a ban and none for the journal: nobody should think that nothing was changed."""
    world = World(redis_server.url, tmp_path)
    client.lpush(f"{world.prefix}:journal", "no journal")
    result = world.run("ban", *world.of("keyed", "--ip", IP), "-y")
    assert result.exit_code == 3
    assert result.stderr.startswith("limitgate: the ban of keyed ip=20….7 is in effect, but is not in the journal: ")
    assert "banned" in world.run("peek", *world.of("keyed", "--ip", IP)).stdout


def test_the_journal_is_bounded_and_loses_nothing(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operators write at once; the oldest events go, and bans that are over."""
    now = [1000.0]
    store = open_sync_store(redis_server.url)
    prefix = f"t{uuid.uuid4().hex}"
    one, other = (Journal(store, prefix, 10, lambda: now[0]) for _ in range(2))
    write: Callable[..., Any] = one._writing

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(one, "_writing", write)
        other.note("ban", "b", ["k2"], "theirs", 60, bans=True)
        return write(*args)

    monkeypatch.setattr(one, "_writing", interrupted)
    one.note("ban", "a", ["k1"], "ours", 10, bans=True)
    assert [(ban.key, ban.reason) for ban in one.bans()] == [("a", "ours"), ("b", "theirs")]
    one.note("ban", "a", ["k1"], "shorter", 5, bans=True)
    assert one.bans()[0].retry_after(now[0]) == 10
    now[0] += 30
    assert [ban.key for ban in one.bans()] == ["b"]
    for number in range(MOST_EVENTS // 100 + 1):
        monkeypatch.setattr("limitgate.gate.journal.MOST_EVENTS", 5)
        one.note("reset", str(number), ["k"], None)
    assert [event.key for event in one.events()] == [str(number) for number in range(10, 5, -1)]
    store.close()


def test_a_rule_in_shadow_is_told_as_one(redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By peek and explain; the verdict is about enforced rules."""
    world = World(redis_server.url, tmp_path)
    world.rules.write_text("rules: [{name: tried, path: /api/**, key: [ip], qpd: 1, shadow: true}]")
    world.gate = LimitGateWSGI(_app, rules=world.rules, store=world.url, key_prefix=world.prefix, timeout=5)
    whom = world.of("tried", "--ip", IP)
    assert "rule tried is in shadow: refuses nothing\n" in world.run("peek", *whom).stdout
    assert [world.request() for _ in range(2)] == ["200", "200"]
    told = "a request would be admitted\nrule tried is in shadow: refuses nothing, but would refuse this request\n"
    assert told in world.run("peek", *whom).stdout
    monkeypatch.setenv("LIMITGATE_KEY_PREFIX", world.prefix)
    explain = ["explain", "GET", "/api/hello", "--rules", str(world.rules), "--ip", IP, "--store", world.url, "--timeout", "10"]
    result = CliRunner().invoke(limitgate, explain, catch_exceptions=False)
    assert (result.exit_code, told in result.stdout) == (0, True)
    world.rules.write_text(
        "rules: [{name: tried, path: /api/**, key: [ip], qpd: 1, shadow: true}, {name: api, key: [ip], qpm: 9}]"
    )
    result = CliRunner().invoke(limitgate, explain, catch_exceptions=False)
    assert "a request would be admitted, 8 of 9 remaining after it\nrule tried is in shadow" in result.stdout
    world.rules.write_text("rules: [{name: tried, path: /api/**, key: [ip], qpd: 1}]")
    assert world.run("peek", *whom).exit_code == 1
    monkeypatch.setenv("LIMITGATE_SHADOW", "true")  # the whole gate
    result = world.run("peek", *whom)
    assert (result.exit_code, told in result.stdout) == (0, True)


@pytest.mark.parametrize("key", [None, "user:42"])
def test_a_pardon_of_somebody_who_is_not_banned(redis_server: RedisServer, tmp_path: Path, key: str | None) -> None:
    """It is no success, and the journal has none."""
    world = World(redis_server.url, tmp_path)
    whom = world.of("api", "--ip", IP) if key is None else [key]
    result = world.run("pardon", *whom, "-y")
    assert (result.exit_code, "was not banned" in result.stdout, "pardoned" in result.stdout) == (1, True, False)
    assert "is not banned" in world.run("pardon", *whom, "--dry-run").stdout
    assert world.json("bans", "--log") == []
    assert world.json("pardon", *whom, "-y", status=1)["was_banned"] is False
    world.json("ban", *whom, "-y")
    assert world.json("pardon", *whom, "-y")["was_banned"] is True
    assert [event["action"] for event in world.json("bans", "--log")] == ["pardon", "ban"]


@pytest.mark.parametrize("key", [None, "user:42"])
def test_a_shorter_ban_tells_the_time_in_force(redis_server: RedisServer, tmp_path: Path, key: str | None) -> None:
    """A ban never shortens an earlier one."""
    world = World(redis_server.url, tmp_path)
    whom = world.of("keyed", "--ip", IP) if key is None else [key]
    assert world.run("ban", *whom, "--for", "1h", "-y").stdout.endswith("banned for 1 h\n")
    assert re.search(r"banned for (1 h|59 min .*), by an earlier ban\n", world.run("ban", *whom, "--for", "30", "-y").stdout)
    assert 3500 < world.json("ban", *whom, "--for", "30", "-y")["retry_after"] <= 3600
    assert world.json("ban", *whom, "-y")["retry_after"] is None
    assert world.run("ban", *whom, "--for", "30", "-y").stdout.endswith("banned permanently, by an earlier ban\n")


@pytest.mark.parametrize(("names", "shown"), [("full", "keyed api_key=ses…now"), ("off", "keyed"), ("masked", None)])
def test_names_in_bans(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, shown: str | None
) -> None:
    """As the option of the service says; API keys are never shown. JSON has the author and the digest of ids, too."""
    world = World(redis_server.url, tmp_path)
    monkeypatch.setenv("LIMITGATE_NAMES", names)
    world.json("ban", *world.of("keyed", "--api-key", KEY, "--ip", IP), "-y")
    (listed,) = world.json("bans")
    assert listed["key"] == (shown or "keyed api_key=ses…now")
    assert "@" in listed["by"]
    assert re.fullmatch("[0-9a-f]{32}", listed["digest"])
    world.json("ban", *world.of("api", "--ip", IP, "--path", "/api/hello"), "-y")
    address = {"full": f" ip={IP} path=/api/hello", "off": "", "masked": " ip=20….7 path=/api/hello"}[names]
    assert f"api{address}" in [each["key"] for each in world.json("bans")]
    world.json("ban", "user:42", "--for", "1h", "-y")
    assert world.json("bans")[0]["key"] == {"full": "user:42", "off": "key", "masked": "u…2"}[names]


def test_rules_by_their_variable(redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for explain; a Limiter's key needs none."""
    world = World(redis_server.url, tmp_path)
    monkeypatch.setenv("LIMITGATE_RULES", str(world.rules))
    assert world.json("peek", "--rule", "keyed", "--ip", IP)["limit"] == 2
    assert world.json("peek", "user:42", "2/day")["limit"] == 2
    assert "LIMITGATE_RULES: there is no rule 'nope'" in world.run("peek", "--rule", "nope").stderr


def test_the_algorithm_of_a_limiters_key(redis_server: RedisServer, tmp_path: Path) -> None:
    """Months need a fixed window."""
    world = World(redis_server.url, tmp_path)
    limit = Limit("1000/month", algorithm="fixed_window", align="utc")
    with Limiter(world.url, key_prefix=world.prefix, timeout=5) as limiter:
        limiter.hit("user:42", limit)
        words = "user:42", "1000/month", "--algorithm", "fixed_window", "--align", "utc"
        assert world.json("peek", *words)["remaining"] == 999
        assert world.json("reset", *words, "-y")["remaining"] == 1000
        assert limiter.peek("user:42", limit).remaining == 1000
    assert world.run("peek", "user:42", "1/day", "--algorithm", "nonsense").exit_code == 2
