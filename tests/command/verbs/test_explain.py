"""The verb `explain`."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
import time
import uuid
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from click.testing import Result
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from limitgate import Caller, LimitGate, LimitGateWSGI, Request, Rule
from limitgate.command import service
from limitgate.command.group import limitgate
from limitgate.gate import refused_rules
from limitgate.gate.planning.compiled_rule import CompiledRule
from limitgate.http.response import RefusalKey
from tests.support.command_line import CliRunner
from tests.support.doors import WSGISite, until, wsgi_reply
from tests.support.redis_server import RedisServer

SECRET = "a secret of tests"
KEY = RefusalKey.derived(SECRET.encode())
CONFIG = str(Path(__file__).parents[3] / "config")


def run(*words: str, status: int = 0) -> Result:
    result = CliRunner().invoke(limitgate, ["explain", *words], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result


def told(*words: str, status: int = 0) -> Any:
    return json.loads(run(*words, "--json", status=status).stdout)


def test_json() -> None:
    """Who, which rules and why, the decision, and the answer with its fields."""
    found = told("GET", "/api//hello?x=1", "--rules", CONFIG, "--ip", "203.0.113.7", "-H", "X-API-Key: demo-vip-key")
    assert {name: found[name] for name in ("client", "caller", "tier", "path", "status")} == {
        "client": "203.0.113.7",
        "caller": "acme",
        "tier": "vip",
        "path": "/api/hello",
        "status": 200,
    }
    assert [(rule["name"], rule["tier"], rule["applies"]) for rule in found["rules"]] == [
        ("api", "default", False),
        ("login", "default", False),
        ("health", "default", False),
        ("api", "vip", True),
    ]
    assert found["decision"]["allowed"] is True
    assert len(found["decision"]["windows"]) == 3
    assert ["X-RateLimit-Limit", "50"] in found["headers"]


def test_text() -> None:
    """The same for people."""
    text = run("POST", "/login", "--rules", CONFIG, "--ip", "2001:db8::1").stdout
    assert "Counted as 2001:db8::/64, no known caller, tier default, path /login" in text
    assert "limits POST /login: path /login, for POST" in text
    assert "X-RateLimit-Limit: 3" in text
    assert "rule health" not in run("GET", "/healthz", "--rules", CONFIG).stdout.split("health  ")[0]
    assert "no rule limits this request" in run("GET", "/healthz", "--rules", CONFIG).stdout


def test_an_assumed_peer_is_told() -> None:
    """A client that nobody named is not shown as if it were known."""
    words = "GET", "/healthz", "--rules", CONFIG
    assert "\n203.0.113.1  assumed as the peer, because --ip is not given; not a trusted proxy" in run(*words).stdout
    assert "\n203.0.113.1  the peer; not a trusted proxy" in run(*words, "--ip", "203.0.113.1").stdout


def test_a_bucket_for_each_route_is_told_of(redis_server: RedisServer) -> None:
    """Without the application it is not that of the service that is looked at. Once for each rule that applies."""
    words = "--rules", CONFIG, "--store", redis_server.url, "--timeout", "10"
    told_of = "rule api has a bucket for each route: this is that of /api/**"
    assert run("GET", "/api/x", *words, "--json").stderr.count(told_of) == 1
    assert told_of not in run("GET", "/api/x", *words, "-H", "X-API-Key: demo-vip-key").stderr  # that of vip counts by caller
    assert told_of not in run("POST", "/login", *words).stderr
    assert told_of not in run("GET", "/api/x", *words, "--app", "example_app.main:app").stderr
    assert told_of not in run("GET", "/api/x", "--rules", CONFIG).stderr
    unknown = "it is not known whether the application answers, with"
    assert unknown in run("GET", "/api/x", *words, "--ip", "192.0.2.99").stdout
    for known in (["--app", "example_app.main:app"], ["-H", "X-API-Key: demo-vip-key"]):
        assert unknown not in run("GET", "/api/x", *words, *known, "--ip", "192.0.2.99").stdout


async def known(request: Request) -> Caller | None:
    return Caller("ann", tier="paid") if request.headers.get("x-api-key") == "anns" else None


def raises(_: Request) -> Caller | None:
    raise KeyError("session")


RULES = [Rule("api", "1/minute", key=["api_key"]), Rule("mine", "5/minute", key=["caller"], tier="paid")]
GATE = LimitGate(PlainTextResponse("hello"), rules=RULES, identify=known)
BEHIND = Starlette(middleware=[Middleware(LimitGate, rules=RULES, identify=known)])
STRANGERS = LimitGate(PlainTextResponse("hello"), rules=RULES)
RAISING = LimitGate(PlainTextResponse("hello"), rules=RULES, identify=raises)


@pytest.mark.parametrize("name", ["GATE", "BEHIND"])
def test_the_service_may_name_callers(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its identify is asked, even if it is async; a key that it does not know counts as none."""
    app = f"{__name__}:{name}"
    found = told("GET", "/", "--app", app, "-H", "X-API-Key: anns")
    assert (found["caller"], found["tier"]) == ("ann", "paid")
    assert [rule["name"] for rule in found["rules"] if rule["applies"]] == ["api", "mine"]
    words = "GET", "/", "--rules", app
    (key,) = told(*words)["buckets"]
    assert told(*words, "-H", "X-API-Key: k")["buckets"] == [key]
    assert "LG005" not in caplog.text
    told("GET", "/", "--rules", f"{__name__}:STRANGERS")
    assert "LG005" in caplog.text


def test_an_identify_that_misses_something_is_told() -> None:
    """It runs outside of the service, so the caller is one that it does not name."""
    result = run("GET", "/", "--app", f"{__name__}:RAISING", "--json")
    assert json.loads(result.stdout)["caller"] is None
    assert "identify raised KeyError: 'session' outside the service, so the request has no caller" in result.stderr


def test_an_identify_that_finds_nobody_is_told() -> None:
    """It may need the application's startup, so the caller can be named."""
    app = "--app", f"{__name__}:GATE"
    found = "identify found no caller for these headers (the application's startup was not run)"
    assert found in run("GET", "/", *app, "-H", "X-API-Key: other").stderr
    assert found not in run("GET", "/", *app).stderr
    assert found not in run("GET", "/", *app, "-H", "X-API-Key: anns").stderr
    named = told("GET", "/", *app, "--caller", "bob", "--tier", "paid")
    assert (named["caller"], named["tier"]) == ("bob", "paid")
    assert [rule["name"] for rule in named["rules"] if rule["applies"]] == ["api", "mine"]
    listed = told("GET", "/api/x", "--rules", CONFIG, "--caller", "acme")
    assert (listed["caller"], listed["tier"]) == ("acme", "vip")
    assert "no file describes tier 'gold'" in run("GET", "/", *app, "--caller", "a", "--tier", "gold", status=2).stderr
    assert "--tier needs --caller" in run("GET", "/", *app, "--tier", "paid", status=2).stderr


def test_behind_a_proxy() -> None:
    """The proxies that are trusted are those that are named, or those of the environment."""
    words = "GET", "/api/x", "--rules", CONFIG, "--ip", "10.0.0.1", "-H", "X-Forwarded-For: 203.0.113.7"
    assert told(*words)["client"] == "10.0.0.1"
    found = told(*words, "--trusted-proxy", "10.0.0.0/8")
    assert found["client"] == "203.0.113.7"
    assert [hop["address"] for hop in found["hops"]] == ["10.0.0.1", "203.0.113.7"]


@pytest.mark.parametrize("app", ["example_app.main:app", "example_app.wsgi:app"])
def test_routes_of_an_application(app: str) -> None:
    """Its templates are in the keys, and its decorators among the rules."""
    found = told("GET", "/api/items/5", "--rules", CONFIG, "--app", app)
    other = told("GET", "/api/items/6", "--rules", CONFIG, "--app", app)
    hello = told("GET", "/api/hello", "--rules", CONFIG, "--app", app)
    assert found["buckets"][0]["key"] == other["buckets"][0]["key"] != hello["buckets"][0]["key"]


def test_a_live_store(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is seen as the service gives it, exit status 1, and nothing is charged by asking."""
    prefix = f"t{uuid.uuid4().hex}"
    monkeypatch.setenv("LIMITGATE_KEY_PREFIX", prefix)
    gate = LimitGateWSGI(lambda _, start: start("200 OK", []) or [], rules=CONFIG, store=redis_server.url, timeout=5)
    asked = {"REQUEST_METHOD": "POST", "PATH_INFO": "/login", "REMOTE_ADDR": "203.0.113.7"}
    words = "POST", "/login", "--rules", CONFIG, "--ip", "203.0.113.7", "--store", redis_server.url, "--timeout", "10"
    for left in (2, 1, 0):
        for _ in range(3):
            assert told(*words)["decision"]["remaining"] == left
        assert f", {left} of 3 remaining after it\nWith this request:\nRule " in run(*words).stdout
        list(gate(dict(asked), lambda *_: None))
    found = told(*words, status=1)
    assert "With this request" not in run(*words, status=1).stdout
    assert found["status"] == 429
    assert found["decision"]["allowed"] is False
    assert "Retry-After" in dict(found["headers"])
    assert "would be refused" in run(*words, status=1).stdout


def test_a_body(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rule by the body is explained with it, and finds the same bucket as the gate; so does `peek`."""
    monkeypatch.setenv("LIMITGATE_KEY_PREFIX", f"t{uuid.uuid4().hex}")
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - {name: tools, limits: [2/day], key: ['json:/params/name', ip], methods: [POST]}\n")
    app = WSGISite.answering(200, [("Content-Type", "text/plain")], b"", [])
    gate = LimitGateWSGI(app, rules=str(rules), store=redis_server.url, timeout=5)
    body = '{"params": {"name": "search"}}'
    assert wsgi_reply(gate, "/", "POST", body=body.encode(), peer="203.0.113.7").status == 200
    words = "--rules", str(rules), "--ip", "203.0.113.7", "--store", redis_server.url, "--timeout", "10"
    for document, left in ((body, 0), ('{"params": {"name": "other"}}', 1), ("[]", 1)):
        assert told("POST", "/", *words, "--body", document)["decision"]["remaining"] == left
    assert told("POST", "/", *words)["decision"]["remaining"] == 1
    result = CliRunner().invoke(limitgate, ["peek", *words, "--rule", "tools", "--body", body, "--json"])
    assert json.loads(result.stdout)["remaining"] == 1
    result = CliRunner().invoke(limitgate, ["ban", *words, "--rule", "tools", "--body", body, "--json", "-y"])
    assert re.search("^tools ip=.* json=.*…", json.loads(result.stdout)["key"])
    assert "search" not in result.stdout
    assert wsgi_reply(gate, "/", "POST", body=body.encode(), peer="203.0.113.7").status == 429


class Refused:
    """A service on Redis under the example's rules, and a client that it has refused."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch, requests: int = 4) -> None:
        self.prefix = f"t{uuid.uuid4().hex}"
        monkeypatch.setenv("LIMITGATE_KEY_PREFIX", self.prefix)
        self.store = "--store", url, "--timeout", "10"
        gate = LimitGateWSGI(lambda _, start: start("200 OK", []) or [], rules=CONFIG, store=url, timeout=5)
        asked = {"REQUEST_METHOD": "POST", "PATH_INFO": "/login", "REMOTE_ADDR": "203.0.113.7"}
        for _ in range(requests):
            time.sleep(0.011)  # ids tell times in 10 ms, so each has another one
            (*_, body) = [b"", *gate(dict(asked), lambda *_: None)]
        until(lambda: gate.gate is not None and gate.gate.refusals.is_agreed)
        self.instance = json.loads(body)["instance"]
        self.id = self.instance.rpartition(":")[2]


def test_the_id_of_a_refusal(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it was, which rule, the bucket's key and its state now; as a URN, too, and after the bucket is gone."""
    refused = Refused(redis_server.url, monkeypatch)
    for text in (refused.id, refused.instance):
        value = told("--id", text, "--rules", CONFIG, *refused.store, status=1)
        assert 0 <= time.time() - value["at"] < 600
        (found,) = value["found"]
        assert (found["rule"], found["tiers"]) == ("login", ["default", "vip"])
        assert found["key"] == f"{refused.prefix}:login:{value['digest']}"
        assert found["decision"]["allowed"] is False
        assert found["ban"] is None
    text = run("--id", refused.id, "--rules", CONFIG, *refused.store, status=1).stdout
    assert "by rule login of tier default and vip: 5/minute burst 3, counted by ip" in text
    assert "would be refused: retry in" in text
    with redis_server.client() as client:
        assert client.delete(found["key"]) == 1
    (later,) = told("--id", refused.id, "--rules", CONFIG, *refused.store)["found"]
    assert (later["rule"], later["decision"]["allowed"]) == ("login", True)
    text = run("--id", refused.id, "--rules", CONFIG, *refused.store).stdout
    assert f"unused: refilled or reset since, or the service has another store or --key-prefix than {refused.prefix}\n" in text


def test_an_id_under_another_prefix(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix is an option, and told where it may be the wrong one."""
    refused, other = (Refused(redis_server.url, monkeypatch) for _ in range(2))
    words = "--id", refused.id, "--rules", CONFIG, *refused.store
    assert f"store, secret or --key-prefix than {other.prefix}\n" in run(*words, status=1).stdout
    assert "expected the store and --key-prefix of the service" in run(*words, "--key-prefix", "nobodys", status=1).stderr
    (found,) = told(*words, "--key-prefix", refused.prefix, status=1)["found"]
    assert (found["rule"], found["decision"]["allowed"]) == ("login", False)
    asked = "POST", "/login", "--rules", CONFIG, "--ip", "203.0.113.7", *refused.store, "--key-prefix", refused.prefix
    assert told(*asked, status=1)["status"] == 429


def test_options_of_keys() -> None:
    """Secret and IPv6 prefix, as for the verbs that act on a client."""
    words = "POST", "/login", "--rules", CONFIG, "--ip", "2001:db8:0:1::1"
    plain, wide, secret = (run(*words, *options).stdout for options in ((), ("--ipv6-prefix", "48"), ("--secret", SECRET)))
    assert "Counted as 2001:db8:0:1::/64" in plain
    assert "Counted as 2001:db8::/48" in wide
    (of_plain, of_secret) = (re.findall("login: (limitgate:login:.*)", text) for text in (plain, secret))
    assert of_plain != of_secret


def test_an_id_leaves_the_bucket_as_it_is(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where a rule of the same name in another tier would have it drain a thousand times as quickly."""
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "default.yaml").write_text(Path(CONFIG, "default.yaml").read_text())
    (rules / "vip.yaml").write_text("tier: vip\nrules:\n  - {name: login, path: /login, key: [caller], qpm: 5000}\n")
    refused = Refused(redis_server.url, monkeypatch)
    key = told("--id", refused.id, "--rules", CONFIG, *refused.store, status=1)["found"][0]["key"]
    with redis_server.client() as client:
        before = client.get(key)
        found = told("--id", refused.id, "--rules", str(rules), *refused.store, status=1)["found"]
        assert [each["tiers"] for each in found] == [["default"]]
        assert client.get(key) == before


def test_an_id_tells_of_a_ban(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has set it, why, and for how long it holds."""
    refused = Refused(redis_server.url, monkeypatch)
    words = ["--rules", CONFIG, "--rule", "login", "--ip", "203.0.113.7", "--for", "1h", "--reason", "guessing", "-y"]
    assert CliRunner().invoke(limitgate, ["ban", *refused.store, *words]).exit_code == 0
    (found,) = told("--id", refused.id, "--rules", CONFIG, *refused.store, status=1)["found"]
    assert found["ban"]["reason"] == "guessing"
    assert 3000 < found["ban"]["retry_after"] <= 3600
    assert 3000 < found["decision"]["retry_after"] <= 3600
    text = run("--id", refused.id, "--rules", CONFIG, *refused.store, status=1).stdout
    assert re.search(r"banned by \S+ for (1 h|5\d min .*) more: guessing", text)


LINE = '{client} - - [28/Nov/2026:10:05:03 +0000] "{method} {path} HTTP/1.1" 429 1\n'


def test_an_id_leads_to_the_log_line_and_to_the_client(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That of any refusal of an episode, of which the log has the first one's only; and in an access log to the client."""
    caplog.set_level(logging.INFO, "limitgate.refusals")
    refused = Refused(redis_server.url, monkeypatch, 7)
    (message,) = [each for each in caplog.messages if each.startswith("rule login begins to refuse")]
    assert refused.id not in message
    log, access = tmp_path / "service.log", tmp_path / "access.log"
    log.write_text(f"INFO other line\nINFO rule login begins to refuse ip=19….1 (refusal {'a' * 32})\nINFO {message}\n")
    others = [LINE.format(client=f"198.51.100.{number}", method="POST", path="/login") for number in range(9)]
    ours = LINE.format(client="203.0.113.7:5000", method="POST", path="/login")
    access.write_text("".join([*others, ours.replace("POST", "GET"), ours, ours]))
    words = "--id", refused.id, "--rules", CONFIG
    found = told(*words, *refused.store, "--log", str(log), "--log", str(access), status=1)["log"]
    assert [(each["file"], each["line"], each["client"]) for each in found] == [
        (str(log), 3, None),
        (str(access), 11, "203.0.113.7:5000"),
    ]
    text = run(*words, *refused.store, "--log", str(log), "--log", str(access), status=1).stdout
    assert f"{log}:3: INFO {message}" in text
    assert f"client 203.0.113.7:5000, {access}:11: " in text
    assert "to find the client: --log FILE" in run(*words, *refused.store, status=1).stdout
    access.write_text("".join(others))
    assert "these logs have no line about this bucket" in run(*words, *refused.store, "--log", str(access), status=1).stdout
    monkeypatch.setenv("LIMITGATE_SECRET", SECRET)  # the public has another key, or none
    assert told(*words, "--log", str(log), "--log", str(access), status=1)["log"] == []


@pytest.mark.parametrize("app", ["example_app.main:app", "example_app.wsgi:app"])
def test_an_id_leads_to_the_client_of_a_route(app: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the key has a route; headers of a log of JSON lead to callers."""
    # Other tests may have limits in code with the same name.
    monkeypatch.setattr(service, "placed_rules", list)
    monkeypatch.setenv("LIMITGATE_SECRET", SECRET)
    keyed = json.dumps({"time": 1, "client": "h", "method": "GET", "path": "/api/x", "headers": {"X-API-Key": "demo-vip-key"}})
    lines = [LINE.format(client="203.0.113.7", method="GET", path="/api/items/5"), f"{keyed}\n"]
    (tmp_path / "log").write_text("".join(lines))
    words = "--ip", "203.0.113.7", "--app", app
    (of_route,) = told("GET", "/api/items/1", *words)["buckets"]
    (of_caller,) = told("GET", "/api/x", *words, "-H", "X-API-Key: demo-vip-key")["buckets"]
    for bucket, id_name, line in ((of_route, "api", 1), (of_caller, "api vip", 2)):
        made = KEY.write(1_790_000_000_000_000, id_name, bucket["key"]).decode()
        value = told("--id", made, "--app", app, "--log", str(tmp_path / "log"))
        assert [each["line"] for each in value["log"]] == [line]
        assert [each["tiers"] for each in value["found"]] == [["default"] if line == 1 else ["vip"]]


@pytest.mark.parametrize("key", [None, "demo-vip-key"])
def test_an_id_tells_the_tier(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, key: str | None) -> None:
    """Where tiers have rules of one name, as a service writes the id."""
    monkeypatch.setenv("LIMITGATE_KEY_PREFIX", prefix := f"t{uuid.uuid4().hex}")
    monkeypatch.setenv("LIMITGATE_SECRET", SECRET)
    gate = LimitGateWSGI(lambda _, start: start("200 OK", []) or [], rules=CONFIG, store=redis_server.url, timeout=5)
    asked = {"REQUEST_METHOD": "GET", "PATH_INFO": "/api/x", "REMOTE_ADDR": "203.0.113.7"} | (
        {} if key is None else {"HTTP_X_API_KEY": key}
    )
    bodies = [b"".join(gate(dict(asked), lambda *_: None)) for _ in range(80)]
    refused = json.loads(next(filter(None, bodies)))
    value = told("--id", refused["instance"], "--rules", CONFIG)
    assert [(each["rule"], each["tiers"]) for each in value["found"]] == [("api", ["default"] if key is None else ["vip"])]
    assert value["found"][0]["key"].startswith(f"{prefix}:api:")


@pytest.mark.parametrize("app", ["example_app.main:app", "example_app.wsgi:app"])
def test_the_id_of_a_refusal_by_a_decorator(app: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found where the application is named, with its limits and its key, in every tier."""
    monkeypatch.setenv("LIMITGATE_SECRET", SECRET)
    made = KEY.write(1_790_000_000_000_000, "login-hourly", f"limitgate:login-hourly:{'0f' * 16}").decode()
    assert told("--id", made, "--rules", CONFIG, status=1)["found"] == []
    found = told("--id", made, "--rules", CONFIG, "--app", app)["found"]
    assert {(each["rule"], *each["tiers"], each["key"]) for each in found} == {
        ("login-hourly", "default", "vip", f"limitgate:login-hourly:{'0f' * 16}")
    }
    text = run("--id", made, "--rules", CONFIG, "--app", app).stdout
    assert "\nby rule login-hourly of tier default and vip: 20/hour, counted by ip\n" in text


def test_an_id_by_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time, rule and key need no store then; an id by other rules or another key says what is known of it."""
    monkeypatch.setenv("LIMITGATE_SECRET", SECRET)
    made = KEY.write(1_790_000_000_000_000, "api", f"limitgate:api:{'0f' * 16}").decode()
    (found,) = told("--id", made, "--rules", CONFIG)["found"]
    assert (found["rule"], found["tiers"], found["decision"]) == ("api", ["default"], None)
    text = run("--id", made, "--rules", CONFIG).stdout
    assert text.startswith("refused 2026-09-21 14:13:20 UTC, ")
    assert "\nby rule api of tier default: 5/second, 100/minute, 2000/day, counted by path, ip\n" in text
    assert f"limitgate:api:{'0f' * 16}" in text
    others = [key.write(1_790_000_000_000_000, "other", "0f" * 16).decode() for key in (KEY, RefusalKey(b"k" * 32))]
    for other in others:
        assert told("--id", other, "--rules", CONFIG, status=1)["found"] == []
        text = run("--id", other, "--rules", CONFIG, status=1).stdout
        assert text.startswith("refused 2026-09-21 14:13:20 UTC, ")
        assert "none of these rules refused" in text
        assert "the id was encrypted with another key" in text
        assert "or the id is mistyped: copy it" in text


def test_an_id_that_cannot_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong character in the time makes one of another century, which no store has given out."""
    monkeypatch.setenv("LIMITGATE_SECRET", SECRET)
    made = KEY.write(1_790_000_000_000_000, "api", f"limitgate:api:{'0f' * 16}").decode()
    for mistyped, year in ((f"z{made[1:]}", ""), ("a" * 32, "2113"), ("-" * 32, ""), ("A" * 32, "1970")):
        result = run("--id", mistyped, "--rules", CONFIG, status=2)
        assert f"can't be the id of a refusal, because its time is {year}" in result.stderr
    # Another clock, such as that of a test, can give any time, if the rest is readable.
    early = KEY.write(1_000_000, "api", f"limitgate:api:{'0f' * 16}").decode()
    assert told("--id", early, "--rules", CONFIG)["at"] == 1


@pytest.mark.parametrize("around", ['"%s",', " <%s>\n", "(%s).", '"urn:limitgate:refusal:%s"', "URN:LimitGate:refusal:%s;"])
def test_an_id_as_it_was_copied(around: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMITGATE_SECRET", SECRET)
    made = KEY.write(1_790_000_000_000_000, "api", f"limitgate:api:{'0f' * 16}").decode()
    assert told("--id", around % made, "--rules", CONFIG)["found"][0]["rule"] == "api"


@pytest.mark.parametrize("length", [0, 31, 33])
def test_an_id_of_another_length(length: int) -> None:
    assert "is not the id of a refusal, expected 32 letters" in run("--id", "a" * length, "--rules", CONFIG, status=2).stderr


def test_an_id_by_any_key_of_the_store(redis_server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the one in force, and of processes that had refused before they knew it; without any, that is told."""
    monkeypatch.setenv("LIMITGATE_KEY_PREFIX", prefix := f"t{uuid.uuid4().hex}")
    keys = [bytes([number]) * 32 for number in range(3)]
    store = "--store", redis_server.url, "--timeout", "10"
    made = [RefusalKey(key).write(1_790_000_000_000_000, "login", "0f" * 16).decode() for key in keys]
    told_without = run("--id", made[0], "--rules", CONFIG, *store, status=1).stderr
    assert f"the store has no key of ids under {prefix}:refusal-ids" in told_without
    assert client.get(f"{prefix}:refusal-ids") is None
    client.set(f"{prefix}:refusal-ids", b"2 " + b" ".join(key.hex().encode() for key in keys))
    for each in made:
        (found,) = told("--id", each, "--rules", CONFIG, *store)["found"]
        assert (found["rule"], found["key"]) == ("login", f"{prefix}:login:{'0f' * 16}")
    monkeypatch.setenv("LIMITGATE_SECRET", SECRET)
    assert told("--id", made[0], "--rules", CONFIG, *store, status=1)["found"] == []


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["GET", "x", "--rules", CONFIG], 2, "expected one such as /api/hello"),
        (["GET", "/", "--rules", "missing"], 1, "missing"),
        (["GET", "/"], 2, "--rules"),
        (["GET", "/", "--rules", CONFIG, "--ip", "nowhere"], 2, "'nowhere' is not an address"),
        (["GET", "/", "--rules", CONFIG, "-H", "nonsense"], 2, "expected 'Name: value'"),
        (["GET", "/", "--rules", CONFIG, "-H", "X Tenant: a"], 2, "expected 'Name: value'"),
        (["GET", "/", "--rules", CONFIG, "-H", "X-Tenant: a\nX-Other: b"], 2, "expected 'Name: value'"),
        (["GET", "/", "--rules", CONFIG, "--body", "{"], 2, "--body is not JSON"),
        (["GET", "/", "--rules", CONFIG, "--app", "nonsense"], 2, "expected MODULE:APP"),
        (["GET", "/", "--rules", CONFIG, "--app", "no.such:app"], 2, "expected MODULE:APP"),
        (["GET", "/", "--rules", CONFIG, "--app", "json:nope"], 2, "expected MODULE:APP"),
        (["GET", "/", "--rules", CONFIG, "--store", "ftp://h"], 2, "ftp"),
        (["--rules", CONFIG], 2, "expected METHOD and PATH of a request, or --id"),
        (["GET", "--rules", CONFIG], 2, "expected METHOD and PATH of a request, or --id"),
        (["GET", "/", "--id", "x", "--rules", CONFIG], 2, "not both"),
        (["--id", "x", "--rules", CONFIG], 2, "is not the id of a refusal"),
        (["--id", "a" * 32, "--rules", CONFIG, "--store", "ftp://h"], 2, "ftp"),
        (["--id", "a" * 32, "--rules", "missing"], 1, "missing"),
        (["--id", "a" * 32, "--rules", CONFIG], 2, "expected --store with their key, or LIMITGATE_SECRET"),
        (["--id", "a" * 32, "--rules", CONFIG, "--store", "memory://"], 1, "the store has no key of ids"),
        (["GET", "/", "--rules", CONFIG, "--trusted-proxy", "nowhere"], 2, "is not an address or CIDR"),
        (["GET", "/", "--rules", CONFIG, "--timeout", "0"], 2, "0<x<=60"),
        (["", "/", "--rules", CONFIG], 2, "'' is not a method, expected one such as GET"),
        (["GE T", "/", "--rules", CONFIG], 2, "'GE T' is not a method"),
    ],
)
def test_mistakes_are_told(words: list[str], status: int, message: str) -> None:
    """Wrong words, options and files."""
    assert message in run(*words, status=status).stderr


def test_a_variable_that_makes_no_sense_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is for the verbs about one client: exit status 1 would say that the request is refused."""
    monkeypatch.setenv("LIMITGATE_IPV6_PREFIX", "7")
    told = run("GET", "/", "--rules", CONFIG, status=2).stderr
    assert "expected at least 32, not '7' (from the variable LIMITGATE_IPV6_PREFIX)" in told


def test_a_store_that_is_gone() -> None:
    """Exit status 3: what `on_error` would do is no explanation."""
    gone = "--rules", CONFIG, "--store", "redis://127.0.0.1:1", "--timeout", "1"
    for words in (("GET", "/api/x"), ("--id", "a" * 32)):
        (line,) = run(*words, *gone, status=3).stderr.splitlines()
        assert line.startswith("limitgate: cannot reach Redis")


def test_the_documentation_shows_what_it_prints() -> None:
    """The page's command, but for the last field, which depends on the time."""
    page = (Path(__file__).parents[3] / "docs" / "explain.md").read_text()
    command = page.split("```sh\n")[1].split("\n```")[0].replace(" config/ ", f" {CONFIG} ")
    printed = page.split("```text\n")[1].split("```")[0]
    result = run(*shlex.split(command)[2:])
    assert re.sub(r"(-Reset: )[0-9]+", r"\1", result.stdout) == re.sub(r"(-Reset: )[0-9]+", r"\1", printed)
    assert page.split("on standard error: `")[1].split("`")[0] in result.stderr


OWN_LIMITS = """
callers:
  - {id: acme, api_key: "sha256:%s", limits: {api: 2/minute}}
  - {id: plain, api_key: "sha256:%s"}
rules:
  - {name: api, path: /api/**, key: [%s], limits: [100/minute, 1000/day]}
"""
ACME, PLAIN = (sha256(key).hexdigest() for key in (b"acmes", b"plains"))


class Own:
    """A service on Redis whose callers have limits of their own, and a caller that it has refused."""

    def __init__(self, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, key: str, **options: Any) -> None:
        self.prefix = f"t{uuid.uuid4().hex}"
        monkeypatch.setenv("LIMITGATE_KEY_PREFIX", self.prefix)
        monkeypatch.setenv("LIMITGATE_SECRET", SECRET)
        self.rules = folder / "rules.yaml"
        self.rules.write_text(OWN_LIMITS % (ACME, PLAIN, key))
        gate = LimitGateWSGI(lambda _, start: start("200 OK", []) or [], rules=self.rules, store=url, timeout=5, **options)
        asked = {"REQUEST_METHOD": "GET", "PATH_INFO": "/api/x", "REMOTE_ADDR": "203.0.113.7", "HTTP_X_API_KEY": "acmes"}
        bodies = [b"".join(gate(dict(asked), lambda *_: None)) for _ in range(3)]
        self.words = "--id", json.loads(bodies[-1])["instance"], "--store", url, "--timeout", "10"


@pytest.mark.parametrize("key", ["caller", "api_key", "path, caller", "method, api_key|ip, tier"])
def test_an_id_finds_the_own_limits_of_a_listed_caller(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The key of its bucket shows which caller it is."""
    own = Own(redis_server.url, tmp_path, monkeypatch, key)
    (found,) = told(*own.words, "--rules", str(own.rules), status=1)["found"]
    assert (found["caller"], found["decision"]["allowed"], found["decision"]["limit"]) == ("acme", False, 2)
    text = run(*own.words, "--rules", str(own.rules), status=1).stdout
    assert "by rule api of tier default: 2/minute of caller acme, counted by" in text
    assert "would be refused" in text
    Path(own.rules).write_text(own.rules.read_text().replace("2/minute", "20/minute"))
    assert told(*own.words, "--rules", str(own.rules))["found"][0]["decision"]["limit"] == 20


def test_an_id_whose_caller_may_have_own_limits_is_not_called_admitted(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key by address doesn't show the caller, and an application's identify may give limits."""
    own = Own(redis_server.url, tmp_path, monkeypatch, "ip")
    (found,) = told(*own.words, "--rules", str(own.rules), status=1)["found"]
    assert (found["caller"], found["decision"]) == (None, None)
    text = run(*own.words, "--rules", str(own.rules), status=1).stdout
    assert "its caller may have limits of its own; expected limitgate peek --rule api --limits LIMIT" in text
    own.rules.write_text(own.rules.read_text().replace(", limits: {api: 2/minute}", ""))
    assert told(*own.words, "--rules", str(own.rules))["found"][0]["decision"]["limit"] == 100
    app = f"{__name__}:OF_IDENTIFY"
    assert told(*own.words, "--app", app, "--rules", str(own.rules), status=1)["found"][0]["decision"] is None


def test_an_id_of_a_route_is_not_called_admitted_without_the_routes(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket's key has the route, so rules alone don't show whether it is the bucket of a caller with limits of its own."""
    own = Own(redis_server.url, tmp_path, monkeypatch, "path, caller")
    own.rules.write_text(own.rules.read_text().replace("api: 2/minute", "x: 2/minute").replace("name: api", "name: x"))
    routed = Starlette(routes=[Route("/api/{name}", lambda _: PlainTextResponse("hello"))])
    app = LimitGate(routed, rules=own.rules, store=redis_server.url, timeout=5)
    with TestClient(app) as client:
        refused = [client.get("/api/x", headers={"X-API-Key": "acmes"}) for _ in range(3)][-1].json()["instance"]
    words = "--id", refused, *own.words[2:]
    (found,) = told(*words, "--rules", str(own.rules), status=1)["found"]
    assert (found["caller"], found["decision"]) == (None, None)
    module = ModuleType("routed_app")
    module.app = app
    monkeypatch.setitem(sys.modules, "routed_app", module)
    (found,) = told(*words, "--app", "routed_app:app", status=1)["found"]
    assert (found["caller"], found["decision"]["limit"]) == ("acme", 2)


def test_an_id_is_compared_with_thousands_of_callers(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is compiled once, not for each caller: 8,000 callers took 100 s."""
    own = Own(redis_server.url, tmp_path, monkeypatch, "caller")
    listed = [f"  - {{id: c{number}, api_key: 'sha256:{number:064}', limits: {{api: 3/day}}}}" for number in range(1_000)]
    own.rules.write_text(own.rules.read_text().replace("callers:", "\n".join(["callers:", *listed])))
    compiled = Mock(wraps=CompiledRule)
    monkeypatch.setattr(refused_rules, "CompiledRule", compiled)
    (found,) = told(*own.words, "--rules", str(own.rules), status=1)["found"]
    assert (found["caller"], compiled.call_count) == ("acme", 1)


OF_IDENTIFY = LimitGate(PlainTextResponse("hello"), rules=RULES, identify=known)


def test_a_client_of_an_access_log_is_told_once(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever its port, by the refusal nearest to the id's time."""
    refused = Refused(redis_server.url, monkeypatch)
    lines = [f'INFO:     203.0.113.7:{50_000 + number} - "POST /login HTTP/1.1" 200 OK' for number in range(3)]
    lines += [f'INFO:     203.0.113.7:{51_000 + number} - "POST /login HTTP/1.1" 429 Too Many' for number in range(3)]
    (tmp_path / "uvicorn.log").write_text("\n".join(lines))
    at = told("--id", refused.id, "--rules", CONFIG, *refused.store, status=1)["at"]
    moments = [time.strftime("%d/%b/%Y:%H:%M:%S +0000", time.gmtime(at + offset)) for offset in (-90, 0, 90)]
    line = LINE.format(client="203.0.113.7", method="POST", path="/login")
    (tmp_path / "access.log").write_text("".join([line.replace("28/Nov/2026:10:05:03 +0000", each) for each in moments]))
    for name, number in (("uvicorn.log", 4), ("access.log", 2)):
        words = "--id", refused.id, "--rules", CONFIG, *refused.store, "--log", str(tmp_path / name)
        assert [each["line"] for each in told(*words, status=1)["log"]] == [number]


def test_a_key_that_an_access_log_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMITGATE_SECRET", SECRET)
    made = KEY.write(1_790_000_000_000_000, "mine paid", f"limitgate:mine:{'0f' * 16}").decode()
    (tmp_path / "log").write_text(LINE.format(client="203.0.113.7", method="GET", path="/"))
    text = run("--id", made, "--rules", f"{__name__}:RULES", "--log", str(tmp_path / "log")).stdout
    assert "rule mine counts by caller, which only a JSON access log with headers has" in text


def test_a_rule_by_route_needs_the_application_for_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the routes no line could match, although the client is in the log."""
    monkeypatch.setenv("LIMITGATE_SECRET", SECRET)
    made = KEY.write(1_790_000_000_000_000, "api", f"limitgate:api:{'0f' * 16}").decode()
    (tmp_path / "log").write_text(LINE.format(client="203.0.113.7", method="GET", path="/api/x"))
    words = "--id", made, "--log", str(tmp_path / "log")
    needed = "rule api counts by route, so an access log needs --app MODULE:APP"
    assert needed in run(*words, "--rules", CONFIG).stdout
    assert needed not in run(*words, "--app", "example_app.main:app").stdout


def test_only_a_peer_without_an_address_is_a_unix_socket() -> None:
    """Not a header that is missing."""
    text = run("GET", "/", "--rules", CONFIG, "--ip", "127.0.0.1", "--trusted-proxy", "loopback").stdout
    assert "unix socket" not in text
    assert "no address in x-forwarded-for, so the hop before it is the client" in text
