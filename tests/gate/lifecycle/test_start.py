"""What is told at start, and what happens where the store has to answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flask
import pytest
import redis
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import limitgate.flask
from limitgate import (
    ConfigError,
    LimitGate,
    LimitGateWSGI,
    MemoryStore,
    RedisStore,
    Rule,
    StoreError,
    load_rules,
    open_sync_store,
)
from limitgate.gate.lifecycle import build, start
from tests.support.doors import PATIENCE, PROCESS_PATIENCE, ASGISite, Wire, asgi_reply, until
from tests.support.impostor import Impostor
from tests.support.redis_server import RedisServer, free_port
from tests.support.threads import Began

RULES = [Rule("all", "9/minute"), Rule("all", "99/minute", tier="vip"), Rule("more", "9/minute", tier="vip")]


def app(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    return [b"hello"]


async def aapp(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        assert (await receive())["type"] == "lifespan.startup"
        await send({"type": "lifespan.startup.complete"})
        assert (await receive())["type"] == "lifespan.shutdown"
        await send({"type": "lifespan.shutdown.complete"})
        return
    await ASGISite.answering(200, [], b"hello", [])(scope, receive, send)


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


@pytest.fixture(autouse=True)
def _seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "limitgate")


@pytest.fixture
def guarded() -> Iterator[RedisServer]:
    """A Redis that wants the password ``p``."""
    server = RedisServer(port=str(free_port()))
    with server.client() as client:
        client.config_set("requirepass", "p")
    yield server
    server.stop()


def until_told(caplog: pytest.LogCaptureFixture, code: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not any(message.startswith(code) for message in caplog.messages):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- the line ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", [partial(LimitGate, aapp), partial(LimitGateWSGI, app)])
def test_one_line_says_what_is_on(door: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Version, rules by tier and where they are from, store without user and password, on_error, proxies."""
    store = "redis://me:s3cret@127.0.0.1:1/3?client_name=x"
    door(rules=RULES, store=store, on_error="local", trusted_proxies=["10.0.0.0/8", "unix"])
    rules = "rules: 1 for tier default, 2 for tier vip from Python"
    rest = "store redis://127.0.0.1:1/3; on_error local; trusted proxies 10.0.0.0/8, unix"
    assert lines(caplog) == [f"LimitGate {version('limitgate')}: {rules}; {rest}"]


def test_the_line_names_files_and_other_stores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rules are from a file or folder, whoever has read it; a store that was passed is named by its kind."""
    (tmp_path / "default.yaml").write_text("rules: [{name: a, qps: 1}]")
    LimitGateWSGI(app, rules=tmp_path)
    LimitGateWSGI(app, rules=load_rules(tmp_path), store=MemoryStore(), shadow=True)
    limitgate.flask.LimitGate(flask.Flask("shop"), rules=str(tmp_path))
    first, second, third = lines(caplog)
    assert f"1 for tier default from {tmp_path}; store memory://; on_error open; trusted proxies none" in first
    assert f"from {tmp_path}; store MemoryStore; on_error open; trusted proxies none; shadow, nothing is refused" in second
    assert third == first


def test_the_line_says_that_it_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever wonders why nothing is limited reads it."""
    LimitGateWSGI(app, enabled=False)
    assert lines(caplog) == [f"LimitGate {version('limitgate')} is disabled"]


@pytest.mark.parametrize(
    ("store", "named"),
    [
        ("redis://u:s3cret@h1", "redis://h1"),
        ("redis://u:s3cret@h1:1?socket_keepalive=1&db=3", "redis://h1:1?db=3"),
        ("unix://:s3cret@/a.sock?db=2", "unix:///a.sock?db=2"),
        ("redis+cluster://u:s3cret@h1:1,h2:2", "redis+cluster://h1:1,h2:2"),
    ],
)
def test_the_line_holds_no_password(store: str, named: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of no kind of URL, and of its options only the database."""
    LimitGate(aapp, rules=RULES, store=store)
    assert "s3cret" not in caplog.text
    assert f"store {named};" in lines(caplog)[0]


# --- asked in the background ------------------------------------------------------------------------------------------


def test_a_wrong_store_is_told_before_any_request(guarded: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """Under threads a store is asked as soon as the middleware is built; an error with its cure is in the log."""
    LimitGateWSGI(app, rules=RULES, store=f"redis://127.0.0.1:{guarded.port}")
    until_told(caplog, "LG022")
    (error,) = lines(caplog, logging.ERROR)
    assert "redis://user:password@host" in error


def test_a_wrong_store_is_told_when_lifespan_begins(guarded: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """On ASGI the event loop asks, when the server starts; the application starts all the same."""

    async def served() -> None:
        wire = Wire({"type": "lifespan.startup"})
        gate = LimitGate(aapp, rules=RULES, store=f"redis://:q@127.0.0.1:{guarded.port}")
        task = asyncio.create_task(gate({"type": "lifespan"}, wire.receive, wire.send))
        await wire.until_sent(1)
        assert wire.types == ["lifespan.startup.complete"]
        await asyncio.to_thread(until_told, caplog, "LG022")
        task.cancel()
        await gate.gate.store.aclose()

    asyncio.run(served())
    assert len(lines(caplog, logging.ERROR)) == 1


def test_it_is_told_again_after_it_was_cured(guarded: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """A password that is changed while everything runs is told, too: once, as the first time."""
    with redis.Redis(unix_socket_path=str(guarded.socket), password="p") as client:
        store = open_sync_store(f"redis://:p@127.0.0.1:{guarded.port}")
        gate = LimitGateWSGI(app, rules=RULES, store=store, timeout=5)
        store._connecting.join(PATIENCE)
        for password, errors in (("p", 0), ("other", 1), ("other", 1), ("p", 1), ("third", 2)):
            client.config_set("requirepass", password)
            asked, told, deadline = 0, store.inspection._told, time.monotonic() + PATIENCE
            while asked < 2 or (
                (len(lines(caplog, logging.ERROR)) < errors or (password == "p" and told)) and time.monotonic() < deadline
            ):
                store.close()  # a thread in the background may have a connection that has logged in before
                gate({"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "192.0.2.1"}, lambda *_: None)
                asked += 1
            assert len(lines(caplog, logging.ERROR)) == errors
        store.close()


PROGRAM = """
import os, sys, threading, time
from limitgate import LimitGateWSGI, Rule
LimitGateWSGI(lambda *_: [], rules=[Rule("all", "9/minute")], store=sys.argv[1])
{}
"""


def ran(store: str, rest: str = "") -> str:
    command = [sys.executable, "-W", "error", "-c", PROGRAM.format(rest), store]
    whole = {"cwd": Path(__file__).parents[3], "timeout": PROCESS_PATIENCE}
    return subprocess.run(command, capture_output=True, text=True, check=True, **whole).stdout


@pytest.mark.parametrize("words", [{"HELLO": None}, {}], ids=["silent", "unhelpful"])
def test_nothing_keeps_a_process_alive(words: dict[str, Any]) -> None:
    """A process that only builds the middleware ends, whether or not its store answers."""
    with Impostor(**words) as impostor:
        began = time.monotonic()
        ran(f"redis://{impostor.place}")
        assert time.monotonic() - began < 15


def test_no_thread_of_ours_runs_while_a_process_forks(redis_server: RedisServer) -> None:
    """What connects in the background is over before a fork, or was not worth waiting for; the child may use the store."""
    with Impostor(HELLO=None) as impostor:
        out = ran(
            f"redis://{impostor.place}",
            "began = time.monotonic()\npid = os.fork()\n"
            "if not pid: os._exit(threading.active_count())\n"
            "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), time.monotonic() - began < 5)",
        )
    assert out.split() == ["1", "True"]


def test_where_a_server_is_going_to_fork_each_child_connects_before_its_first_request(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent, which answers no request, neither connects nor starts a thread."""
    for module in (build, start):
        monkeypatch.setattr(module, "is_going_to_fork", lambda: True)
    began = Began()
    with own_redis.client() as client:
        alone = len(client.client_list())
        gated = LimitGateWSGI(app, rules=RULES, store=RedisStore(own_redis.url))
        assert (began.names(), len(client.client_list())) == ([], alone)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException), own_redis.client() as mine:
            until(lambda: len(mine.client_list()) > 1)
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert began.names() == []
    assert gated.gate.store.healthy


# --- required ---------------------------------------------------------------------------------------------------------


def test_wsgi_is_not_built_without_its_store(guarded: RedisServer) -> None:
    """With ``require_store`` the constructor raises a StoreError that says why; with an answer it does not."""
    nobody = f"redis://127.0.0.1:{free_port()}"
    for url, reason in ((nobody, "refused"), (f"redis://127.0.0.1:{guarded.port}", "password")):
        with pytest.raises(StoreError, match=f"require_store: .*{reason}"):
            LimitGateWSGI(app, rules=RULES, store=url, require_store=True)
        with pytest.raises(StoreError, match="require_store"):
            limitgate.flask.LimitGate(flask.Flask("shop"), rules=RULES, store=url, require_store=True)
        LimitGateWSGI(app, rules=RULES, store=url)
    LimitGateWSGI(app, rules=RULES, store=f"redis://:p@127.0.0.1:{guarded.port}", require_store=True)
    LimitGateWSGI(app, rules=RULES, require_store=True)
    LimitGateWSGI(app, rules=RULES, store=nobody, require_store=True, enabled=False)


def test_it_is_required_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """``LIMITGATE_REQUIRE_STORE`` is as good as the option."""
    monkeypatch.setenv("LIMITGATE_REQUIRE_STORE", "true")
    monkeypatch.setenv("LIMITGATE_STORE", f"redis://127.0.0.1:{free_port()}")
    with pytest.raises(StoreError, match="require_store"):
        LimitGateWSGI(app, rules=RULES)
    with pytest.raises(ConfigError, match=r"require_store.*expected"):
        LimitGateWSGI(app, rules=RULES, require_store="perhaps")


async def begun(gate: Any) -> list[dict[str, Any]]:
    """The server's side of a start: what is sent, the error that was raised last."""
    wire = Wire({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    try:
        await wire.call(gate, {"type": "lifespan"})
    except StoreError as error:
        wire.sent.append({"type": "raised", "message": str(error)})
    return wire.sent


@pytest.mark.parametrize("inside", [False, True], ids=["around", "added"])
def test_asgi_does_not_start_without_its_store(redis_server: RedisServer, inside: object) -> None:
    """The server is told that the start has failed, and why; the application itself is not started."""

    def gated(url: str) -> Any:
        if not inside:
            return LimitGate(aapp, rules=RULES, store=url, require_store=True)
        starlette = Starlette(routes=[Route("/", lambda _: PlainTextResponse("hello"))])
        starlette.add_middleware(LimitGate, rules=RULES, store=url, require_store=True)
        return starlette

    failed, raised = asyncio.run(begun(gated(f"redis://127.0.0.1:{free_port()}")))
    assert failed["type"] == "lifespan.startup.failed"
    assert "require_store: the store does not answer" in failed["message"]
    assert raised["message"] == failed["message"]
    started = asyncio.run(begun(gated(redis_server.url)))
    assert [message["type"] for message in started] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize("last", ["shutdown.complete", "shutdown.failed", "startup.failed"])
def test_all_is_settled_before_the_server_hears_of_the_end(redis_server: RedisServer, last: str) -> None:
    """It closes the event loop at once, also if the application goes on."""

    async def ending(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if last != "startup.failed":
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": f"lifespan.{last}"})
        await asyncio.Event().wait()

    closings: list[int] = []

    async def main() -> None:
        gate = LimitGate(ending, rules=RULES, store=redis_server.url)

        async def send(message: Any) -> None:
            closings.append(gate.gate.store.closings)
            if message["type"] == f"lifespan.{last}":
                life.cancel()

        async def receive() -> Any:
            return {"type": "lifespan.shutdown" if closings else "lifespan.startup"}

        life = asyncio.create_task(gate({"type": "lifespan", "state": {}}, receive, send))
        await asyncio.wait([life], timeout=PATIENCE)
        assert life.cancelled()

    asyncio.run(main())
    assert closings == ([1] if last == "startup.failed" else [0, 1])


def test_without_lifespan_the_first_request_asks(redis_server: RedisServer) -> None:
    """Where a server sends no lifespan events, no request is answered until the store is."""

    async def requests() -> None:
        away = RedisServer(start=False)
        gate = LimitGate(aapp, rules=RULES, store=away.url, require_store=True)
        for _ in range(2):
            with pytest.raises(StoreError, match="require_store"):
                await asgi_reply(gate)
        await asyncio.to_thread(away.start)
        for left in (8, 7):
            assert (await asgi_reply(gate)).headers["x-ratelimit-remaining"] == str(left)
        await gate.gate.store.aclose()
        away.stop()

    asyncio.run(requests())


def test_no_thread_is_left(redis_server: RedisServer) -> None:
    """Once the store has answered, all that is left is a connection for the first request."""
    began, gate = Began(), LimitGateWSGI(app, rules=RULES, store=redis_server.url)
    gate.gate.store._connecting.join(PATIENCE)
    assert "limitgate-start" not in began.names()
    gate.gate.store.close()


@pytest.mark.parametrize("build", ["get_wsgi_application", "get_asgi_application"])
def test_django_is_not_built_without_its_store(redis_server: RedisServer, build: str) -> None:
    """Under WSGI and ASGI alike, where Django builds its middleware."""
    from django.test import override_settings

    from tests.support import django_app

    def options(store: str) -> dict[str, Any]:
        return {"RULES": RULES, "STORE": store, "REQUIRE_STORE": True}

    with (
        override_settings(LIMITGATE=options(f"redis://127.0.0.1:{free_port()}")),
        pytest.raises(StoreError, match="require_store"),
    ):
        getattr(django_app, build)()
    with override_settings(LIMITGATE=options(redis_server.url)):
        assert getattr(django_app, build)()
