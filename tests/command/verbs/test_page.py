"""``limitgate page``: the live page as a server of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from limitgate import Limiter, RedisStore, Rule
from limitgate.command.group import limitgate
from tests.support.command_line import CliRunner
from tests.support.doors import PROCESS_PATIENCE, server_process
from tests.support.fleet import snapshot, write
from tests.support.redis_server import RedisServer

ROOT = Path(__file__).parents[3]


def serving(tmp_path: Path, *words: str, **environment: str):
    command = [sys.executable, "-m", "limitgate", "page", "--port", "0", *words]
    return server_process(command, tmp_path / "log", lambda text: "is at http" in text, environment)


def test_it_serves_the_page(own_redis: RedisServer, tmp_path: Path) -> None:
    """The document, the figures, an explanation by the rules that were given; read-only, for this machine only."""
    with closing(RedisStore(own_redis.url)) as store:
        write(store, snapshot())
    with (
        serving(tmp_path, "--store", own_redis.url, "--rules", str(ROOT / "config")) as url,
        httpx.Client(base_url=url) as client,
    ):
        assert "LimitGate" in client.get("/").text
        assert client.get("/figures").json()["processes"][0]["host"] == "web-1"
        assert client.get("/explain?path=/healthz").json()["allowed"] is True
        assert client.post("/ban", json={}).status_code == 403
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
        assert client.get("/", headers={"X-Forwarded-For": "198.51.100.7"}).status_code == 403


APP = """
from limitgate import LimitGate, Rule
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route


async def item(request):
    return PlainTextResponse("item")


RULES = [Rule("api", "1/day", path="/api/**", key=["path", "ip"])]
app = Starlette(routes=[Route("/api/items/{id}", item)])
app.add_middleware(LimitGate, rules=RULES, store={store!r}, key_prefix="shop")
"""


@pytest.mark.parametrize(
    ("words", "allowed"), [(["--app", "shop:app"], False), (["--rules", "shop:app"], False), (["--rules", "shop:RULES"], None)]
)
def test_it_knows_an_application(own_redis: RedisServer, tmp_path: Path, words: list[str], *, allowed: bool | None) -> None:
    """Its routes, its store and its options; a list of rules knows no routes."""
    (tmp_path / "shop.py").write_text(APP.replace("{store!r}", repr(own_redis.url)))
    with closing(RedisStore(own_redis.url)) as store, Limiter(store, key_prefix="shop") as limiter:
        write(store, snapshot(), key_prefix="shop")
        rule = Rule("api", "1/day", path="/api/**", key=["path", "ip"])
        bucket = limiter.bucket(rule, ip="203.0.113.7", path="/api/items/{id}")
        bucket.ban(60)
    more = ["--store", own_redis.url, "--key-prefix", "shop"] if "shop:RULES" in words else []
    with serving(tmp_path, *words, *more, PYTHONPATH=str(tmp_path), LIMITGATE_RULES="nowhere.yaml") as url:
        assert httpx.get(f"{url}/figures").json()["processes"][0]["host"] == "web-1"
        assert httpx.get(f"{url}/explain?path=/api/items/7&ip=203.0.113.7").json()["allowed"] is allowed


def test_the_token_is_the_password(own_redis: RedisServer, tmp_path: Path) -> None:
    """With it, nobody sees anything without it; the browser's user name is who has acted."""
    with closing(RedisStore(own_redis.url)) as store:
        write(store, snapshot())
    words = ("--store", own_redis.url, "--actions")
    with serving(tmp_path, *words, LIMITGATE_PAGE_TOKEN="wörd") as url:
        for path in ("/", "/figures", "/events", "/ban"):
            refused = httpx.get(url + path)
            assert (refused.status_code, refused.headers["www-authenticate"][:5]) == (401, "Basic")
        for wrong in ("Basic !", "Basic", "Bearer x", "Basic YTpi", "Digest wörd"):
            assert httpx.get(url, headers={"Authorization": wrong.encode()}).status_code == 401
        assert httpx.get(url, auth=("ann", "wörd")).status_code == 200
        assert httpx.get(f"{url}/figures", headers={"Authorization": "Bearer wörd".encode()}).status_code == 200
        assert '"who": "ann"' in httpx.get(url, auth=("ann", "wörd")).text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Missing option '--store'"),
        (("--store", "memory://"), "a memory store belongs to a single process"),
        (("--store", "redis://h", "--host", "0.0.0.0"), "can be reached by other machines, expected --token"),
        (("--store", "redis://h", "--host", "::"), "can be reached by other machines, expected --token"),
        (("--store", "redis://h", "--token", ""), "--token is empty"),
        (("--app", "no.such.module:app"), "No module named"),
        (("--store", "redis://h", "--host", "no.such.host.invalid", "--token", "x"), "cannot listen on"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], said: str) -> None:
    """Wrong usage is exit status 2 and says what was expected."""
    result = CliRunner().invoke(limitgate, ["page", *words])
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr


def test_a_port_in_use_is_told(own_redis: RedisServer) -> None:
    """Another server on the port is wrong usage, not a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = ["--store", own_redis.url, "--port", str(other.getsockname()[1])]
        result = CliRunner().invoke(limitgate, ["page", *words])
    assert (result.exit_code, "cannot listen on" in result.stderr) == (2, True)


def test_ctrl_c_ends_it(own_redis: RedisServer) -> None:
    """At once, and without a traceback."""
    command = [sys.executable, "-m", "limitgate", "page", "--store", own_redis.url, "--port", "0"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("LIMITGATE_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=outside)
    assert process.stdout is not None
    url = re.search(r"is at (http\S+)", process.stdout.readline())
    assert url
    httpx.get(url[1])  # it serves, so the signal is uvicorn's and gets lost in no finalizer of an import
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PROCESS_PATIENCE)
    assert process.returncode in (0, 130)
    assert "Traceback" not in errors
