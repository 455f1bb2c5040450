"""Runs the Python of the project's pages as a reader would: saved as a file, beside the other files of the page.

What a block says it ``# prints``, it has to print. Functions named ``test_...`` in it are called. Where it defines ``app`` or
``application``, that is asked for what the comments in the block say, or else for its routes:

    # GET /api/hello                                        until it is refused
    # GET /api/hello -> 200 (5 times), 429                  just so often, with just these statuses
    # POST /login with {"user": "ann"} -> 401, 401, 429     with a body of JSON
    # GET /hello with X-Token: abc -> 200                   with a header
    # GET /hello from 10.0.0.1 with X-Token: abc -> 200     from this peer
    # WS /chat -> 101, 429                                  a WebSocket's handshake

Django can be set up only once in a process, so what uses it runs in one of its own: ``python -m tests.support.examples``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import io
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from limitgate import testing
from tests.support import forks
from tests.support.doors import PATIENCE, PROCESS_PATIENCE, asgi_reply, asgi_through_httpx, handshake, wsgi_reply
from tests.support.markdown import ROOT, Block, blocks

REDIS = "redis://localhost:6379/0"
"""What the pages call the reader's Redis."""
UNNAMED = "documented.py"
"""The file that a block becomes which names none."""
ROUNDS = 250
"""How often an application is asked the same before it counts as one that limits nothing."""

FIXTURES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "monkeypatch": pytest.MonkeyPatch.context,
    "limitgate_off": testing.off,
    "limitgate_clock": testing.frozen,
}
"""What functions named ``test_...`` may ask for."""

_ASK = re.compile(r"^ *# (GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|WS) (/\S*)(.*)$", re.MULTILINE)
_HOW = re.compile(
    r"(?: from (?P<peer>[0-9a-f.:]+))?(?: with (?P<header>[\w-]+: [^{]+?|(?P<json>\{.*\}|\[.*\])))?"
    r"(?: -> (?P<statuses>[\d(), a-z]+))?"
)
_STATUS = re.compile(r"(\d{3,4})(?: \((\d+) times\))?")
_REFUSED = (429, 1013)


class Ask(NamedTuple):
    """A request that a block says to make."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    statuses: list[int]
    """Those that it has to get in turn; none to ask until it is refused."""
    peer: str | None = None
    """Address that it comes from; None for that of all others."""


def write(block: Block, folder: Path, redis_url: str) -> str:
    """Write a block and the files that its page shows before it into ``folder``. ``redis_url`` stands in for `REDIS`.

    Returns the name of the block's own file.
    """
    for name in ("default.yaml", "vip.yaml"):
        _write(folder / "config" / name, (ROOT / "config" / name).read_text())
    before = [shown for shown in blocks(block.page, "python", "yaml") if shown.file and shown.line < block.line]
    for shown in (*before, block):
        _write(folder / (shown.file or UNNAMED), shown.text.replace(REDIS, redis_url))
    return block.file or UNNAMED


def run(block: Block, folder: Path, redis_url: str) -> None:
    """Run a block of Python in ``folder`` and hold it to what it says. ``redis_url`` stands in for `REDIS`."""
    file = write(block, folder, redis_url)
    if "django" in block.text.lower() or block.page.endswith("django.md"):
        command = [sys.executable, "-m", "tests.support.examples", str(folder), file]
        status, said = forks.ended(command, folder / "said", os.environ, PROCESS_PATIENCE, imported=forks.DJANGO)
        assert status == 0, said
    else:
        run_here(folder, file)


def run_here(folder: Path, file: str) -> None:
    """Import a file of ``folder`` in this process and hold it to what it says."""
    code = (folder / file).read_text()
    printed = io.StringIO()
    with _as_it_was(), contextlib.redirect_stdout(printed), imported(file, folder) as module:
        for name, value in list(vars(module).items()):
            if name.startswith("test_") and callable(value):
                with contextlib.ExitStack() as fixtures:
                    value(**{name: fixtures.enter_context(FIXTURES[name]()) for name in inspect.signature(value).parameters})
        assert printed.getvalue().splitlines() == re.findall(r"# prints (.*)$", code, re.MULTILINE)
        app = vars(module).get("app", vars(module).get("application"))
        asks = list(_asks(code))
        assert not asks or app is not None, "the comments say what to ask, expected app or application"
        if app is not None:
            _hold(app, asks or _routes(app))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Afterwards the environment, the loggers and the event loop are as before, whatever an example does to them."""
    environment = dict(os.environ)
    loggers = [logging.getLogger(name) for name in (None, "limitgate", "limitgate.store")]
    before = [(list(logger.handlers), list(logger.filters), logger.level) for logger in loggers]
    try:
        with asyncio.Runner() as runner:
            asyncio.set_event_loop(runner.get_loop())  # Mangum makes one that nobody closes where there is none
            yield
    finally:
        asyncio.set_event_loop(None)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        for logger, (handlers, filters, level) in zip(loggers, before):
            logger.handlers[:], logger.filters[:] = handlers, filters
            logger.setLevel(level)


@contextlib.contextmanager
def imported(file: str, folder: Path) -> Iterator[ModuleType]:
    """The module in a file of ``folder``, the working directory meanwhile. Afterwards all modules from there are forgotten."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.syspath_prepend(str(folder))
            yield importlib.import_module(file.removesuffix(".py").replace("/", "."))
    finally:
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


# --- asking -----------------------------------------------------------------------------------------------------------


def _asks(code: str) -> Iterator[Ask]:
    """The requests that a block says to make."""
    for method, path, how in _ASK.findall(code):
        found = _HOW.fullmatch(how.rstrip())
        assert found, f"cannot read {how!r} behind {method} {path}"
        body = found["json"] or ""
        name, _, value = "Content-Type: application/json".partition(": ") if body else (found["header"] or "").partition(": ")
        if body:
            json.loads(body)
        statuses = [int(status) for status, times in _STATUS.findall(found["statuses"] or "") for _ in range(int(times or 1))]
        assert bool(statuses) == bool(found["statuses"])
        yield Ask(method, path, {name: value} if name else {}, body.encode(), statuses, found["peer"])


def _routes(app: Any) -> list[Ask]:
    """The routes of Starlette, FastAPI and Flask that have no parameters."""
    if hasattr(app, "url_map"):
        routes = [(method, rule.rule) for rule in app.url_map.iter_rules() for method in rule.methods or ()]
    else:
        table = getattr(app, "routes", ())
        routes = [(method, route.path) for route in table for method in getattr(route, "methods", None) or ()]
    own = [(method, path) for method, path in routes if method in ("GET", "POST") and not re.search(r"[{<]|docs|openapi", path)]
    assert own, "an application without routes that are known, expected a line like '# GET /api/hello' in the block"
    return [Ask(method, path, {}, b"", []) for method, path in own]


def _hold(app: Any, asks: list[Ask]) -> None:
    """An application has to answer as it is said to, admit something and refuse something."""
    told = [ask for ask in asks if ask.statuses]
    with _asking(app) as status:
        if told:
            found = [[status(ask) for _ in ask.statuses] for ask in told]
            assert found == [ask.statuses for ask in told]
            statuses = {each for several in found for each in several}
        else:
            statuses = _until_refused(asks, status)
    assert not statuses.isdisjoint(_REFUSED), "expected an application that limits something"
    assert min(statuses) < 400, "expected an application that lets something through"


def _until_refused(asks: list[Ask], status: Callable[[Ask], int]) -> set[int]:
    """The statuses of all requests, asked in turn until there is one that was refused."""
    statuses: set[int] = set()
    for _ in range(ROUNDS):
        statuses |= {status(ask) for ask in asks}
        assert all(each < 400 or each in _REFUSED for each in statuses), statuses
        if statuses.intersection(_REFUSED):
            break
    return statuses


@contextlib.contextmanager
def _asking(app: Any) -> Iterator[Callable[[Ask], int]]:
    """What asks an ASGI or a WSGI application and gives the status."""
    if len(inspect.signature(app).parameters) == 2:
        peer = lambda ask: {"REMOTE_ADDR": ask.peer} if ask.peer else {}  # noqa: E731
        yield lambda ask: wsgi_reply(app, ask.path, ask.method, ask.headers, ask.body, **peer(ask)).status
        return
    with asyncio.Runner() as runner:
        lifespan = _Lifespan(app)
        runner.run(lifespan.step("startup"))
        yield lambda ask: runner.run(_asgi_status(app, ask))
        runner.run(lifespan.step("shutdown"))


async def _asgi_status(app: Any, ask: Ask) -> int:
    if ask.method == "WS":
        return (await handshake(app, ask.path, ask.headers)).status
    if ask.peer:
        return (await asgi_reply(app, ask.path, ask.method, ask.headers, ask.body, peer=ask.peer)).status
    return (await asgi_through_httpx(app, ask.path, ask.method, ask.headers, ask.body)).status


class _Lifespan:
    """Starts and shuts down an application as a server does; one that knows nothing of that is left alone."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._running: asyncio.Task[None] | None = None
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()

    async def step(self, event: str) -> None:
        """Tell the application of ``startup`` or ``shutdown``, and wait until it is done with that."""
        if self._running is None:
            scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
            self._running = asyncio.create_task(self._app(scope, self._incoming.get, self._outgoing.put))
        await self._incoming.put({"type": f"lifespan.{event}"})
        answer = asyncio.create_task(self._outgoing.get())
        await asyncio.wait([self._running, answer], return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE)
        if answer.done():
            assert answer.result()["type"] == f"lifespan.{event}.complete"
        else:
            answer.cancel()
            assert self._running.done()
        if self._running.done() or event == "shutdown":
            await asyncio.gather(self._running, return_exceptions=True)


if __name__ == "__main__":
    warnings.simplefilter("error")
    run_here(Path(sys.argv[1]), sys.argv[2])
