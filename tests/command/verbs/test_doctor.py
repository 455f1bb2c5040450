"""`limitgate doctor`: what it reports of versions, options, rules and the store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import Result

from limitgate.command.group import limitgate
from limitgate.command.verbs import doctor as doctor_verb
from limitgate.stores.redis import server_facts
from tests.support.command_line import CliRunner
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer, free_port

SECRET = "hunter2-hunter2-hunter2-hunter2-hunter2"


@pytest.fixture(autouse=True)
def _no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def doctor(*words: str) -> Result:
    return CliRunner().invoke(limitgate, ["doctor", "--timeout", "20", *words], catch_exceptions=False)


def facts(*words: str, status: int = 0) -> dict[str, Any]:
    result = doctor(*words, "--json")
    assert result.exit_code == status, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def findings(*words: str, status: int = 0) -> list[tuple[str, str, str | None]]:
    found = facts(*words, status=status)["findings"]
    return [(each["area"], each["level"], each["code"]) for each in found]


def test_doctor_healthy_redis_reports_no_problem(redis_server: RedisServer) -> None:
    found = facts("--store", redis_server.url)
    (server,) = found["store"]["servers"]
    assert server["kind"].startswith(("Redis ", "Valkey "))
    assert server["role"] == "master"
    assert 0 < server["latency"] < 20
    assert abs(server["clock_difference"]) < 20
    assert {each["level"] for each in found["findings"]} <= {"note"}
    assert {"python", "limitgate", "redis", "pydantic"} <= found["versions"].keys()
    text = doctor("--store", redis_server.url).stdout
    assert text.endswith("no problem found\n")


@contextmanager
def user(server: RedisServer, name: str, *rights: str) -> Iterator[None]:
    """A user of the server, with the password `SECRET`."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", name, "reset", "on", f">{SECRET}", *rights)
        try:
            yield
        finally:
            client.execute_command("ACL", "DELUSER", name)


def test_doctor_leaves_no_key(redis_server: RedisServer) -> None:
    assert doctor("--store", redis_server.url, "--key-prefix", "of-doctor").exit_code == 0
    with redis_server.client() as client:
        assert client.keys("of-doctor*") == []


def test_doctor_cluster_describes_each_node(redis_cluster: RedisCluster) -> None:
    servers = facts("--store", redis_cluster.url)["store"]["servers"]
    assert len({each["server"] for each in servers}) == len(servers) >= 1
    assert all(each["kind"] for each in servers)


def test_doctor_memory_says_that_processes_count_alone() -> None:
    assert ("store", "note", None) in findings("--store", "memory://")


def test_doctor_unreachable_store_exits_with_3_and_shows_no_password() -> None:
    result = doctor("--store", f"redis://:{SECRET}@127.0.0.1:{free_port()}/0")
    assert result.exit_code == 3
    assert "error: store: " in result.stdout
    assert SECRET not in result.output


def test_doctor_user_without_rights_reports_them(redis_server: RedisServer) -> None:
    with user(redis_server, "ill", "~limitgate:*", "+@all", "-set"):
        url = redis_server.url.replace("://", f"://ill:{SECRET}@", 1)
        found = facts("--store", url, status=3)
        assert ("store", "error", "LG021") in [(each["area"], each["level"], each["code"]) for each in found["findings"]]
        assert SECRET not in json.dumps(found)


@pytest.fixture(scope="module")
def redis_at_a_port() -> Iterator[str]:
    port = free_port()
    server = RedisServer(port=str(port))
    yield f"127.0.0.1:{port}"
    server.stop()


@pytest.mark.parametrize(
    ("scheme", "path", "code", "reason"),
    [
        ("redis+cluster", "", "LG025", "it is not a cluster node: use redis:// instead of redis+cluster://"),
        ("redis+sentinel", "/main", "LG025", "it is not a Sentinel: use redis:// instead of redis+sentinel://"),
        ("redis", "/999999", "LG023", "the number is too high, see CONFIG GET databases there"),
    ],
)
def test_doctor_url_of_another_server_is_told_once(
    redis_at_a_port: str, scheme: str, path: str, code: str, reason: str
) -> None:
    """The code is that of the service's log line."""
    found = facts("--store", f"{scheme}://{redis_at_a_port}{path}", status=3)["findings"]
    errors = [each for each in found if each["level"] == "error"]
    assert [each["code"] for each in errors] == [code]
    assert errors[0]["message"].endswith(reason)


def test_doctor_wrong_login_is_told_once(redis_server: RedisServer) -> None:
    with user(redis_server, "well", "~*", "+@all"):
        url = redis_server.url.replace("://", "://well:wrong@", 1)
        assert findings("--store", url, status=3)[-1] == ("store", "error", "LG022")
        assert [level for _, level, _ in findings("--store", url, status=3)].count("error") == 1


def test_doctor_options_are_without_secrets(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMITGATE_SECRET", SECRET)
    monkeypatch.setenv("LIMITGATE_STORE", redis_server.url)
    monkeypatch.setenv("LIMITGATE_TRUSTED_PROXIES", "10.0.0.0/8")
    monkeypatch.setenv("LIMITGATE_TRUSTED_PROXYS", "10.0.0.0/8")
    result = doctor("--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    del found["options"]["timeout"], found["options"]["fleet"]  # set for all tests
    assert found["options"] == {"secret": "set", "trusted_proxies": ["10.0.0.0/8"]}
    assert ("options", "LG003") in [(each["area"], each["code"]) for each in found["findings"]]
    assert SECRET not in result.output


def test_doctor_rules_reports_every_error(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("rules:\n  - {name: a, qps: -1}\n  - {name: b, qpm: many}\n")
    assert findings("--store", "memory://", "--rules", "rules.yaml", status=1).count(("rules", "error", None)) == 2


def test_doctor_app_takes_its_options(redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_doctor.py").write_text(
        "from limitgate import LimitGateWSGI, RedisStore, Rule\n"
        "app = LimitGateWSGI(lambda *_: [], rules=[Rule('api', '5/second')],\n"
        f"    store=RedisStore({redis_server.url!r}, credentials=lambda: ('of-app', {SECRET!r})), key_prefix='shop')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with user(redis_server, "of-app", "~shop:*", "+@all"):
        found = facts("--app", "of_doctor:app")
    assert found["options"]["key_prefix"] == "shop"
    assert found["options"]["rules"] == {"default": 1}
    assert len(found["store"]["servers"]) == 1
    assert SECRET not in json.dumps(found)


def test_doctor_clock_apart_is_a_warning(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ahead:
        perf_counter = staticmethod(time.perf_counter)

        @staticmethod
        def time() -> float:
            return time.time() - 90

    monkeypatch.setattr(server_facts, "time", Ahead)
    result = doctor("--store", redis_server.url)
    assert result.exit_code == 1
    assert "1 min 30 s ahead of this machine's" in result.stdout


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ({"kind": "Redis 6.0.16"}, "error"),
        ({"latency": 3_600.0}, "warning"),
        ({"saves": False}, "note"),
        ({"kind": "Redis 6.2.0", "latency": 0.001, "saves": True}, None),
        ({"kind": None, "role": None, "clock_difference": None, "policy": None, "saves": None}, None),
    ],
)
def test_doctor_server_facts_are_judged(
    server: dict[str, Any], expected: str | None, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = server_facts.ServerFacts("Redis", "Redis 7.4.1", "master", 0.001, 0.0, "noeviction", True)
    monkeypatch.setattr(doctor_verb, "server_facts", lambda *_: [healthy._replace(**server)])
    status = int(expected in {"error", "warning"})
    found = [level for area, level, _ in findings("--store", redis_server.url, status=status) if area == "store"]
    assert found == [] if expected is None else expected in found


def test_doctor_package_out_of_range_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["redis<9,>=99", "click>=8; extra == 'cli'", "ruff==0; extra == 'dev'"]
    monkeypatch.setattr(doctor_verb, "requires", lambda _: declared)
    found = facts("--store", "memory://", status=1)["findings"]
    assert [each["message"] for each in found if each["area"] == "versions" and each["level"] == "error"] == [
        f"redis {redis.__version__} is installed, expected <9,>=99"
    ]
