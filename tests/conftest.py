from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import io
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from pydantic_settings import InitSettingsSource

from limitgate import AsyncLimiter, Limiter, Settings
from limitgate.exchange import application
from limitgate.observing.logs import Episodes
from limitgate.overload.lag import heartbeats
from limitgate.process.forking import living
from tests.support import guarantees
from tests.support.doors import PATIENCE
from tests.support.effort import EXAMPLES, FUZZED
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer
from tests.support.scripted import Scripted

TESTS = Path(__file__).parent
LONG = {"test_failover.py", "test_instructions.py", "test_testing.py", "test_typing.py", "test_worker.py", "test_yaml.py"}
"""Modules with tests of many seconds, which begin first: begun last, one would run while the other processes have ended."""

LOGGERS = [logging.getLogger(name) for name in (None, "limitgate")]
DEFAULTS = [inspect.unwrap(limiter.__init__).__kwdefaults__ for limiter in (Limiter, AsyncLimiter)]
(TIMEOUT,) = {defaults["timeout"] for defaults in DEFAULTS}

VARIABLES = {"limitgate_timeout": str(PATIENCE), "limitgate_fleet": "false"}
"""Tests count calls, keys, timers and threads: snapshots are written where a test is about them."""
SOURCES = Settings.settings_customise_sources

application.AT_ONCE = 0.0
"""Gates that tests have dropped are not told of in the midst of others, see test_around.py."""
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A suite that is started in the background ignores Ctrl-C, and so would the processes that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["SSL_CERT_FILE"], os.environ["SSL_CERT_DIR"] = "", str(TESTS / "data")
"""No certificates: only our own servers are asked, and each client of httpx and of TLS would read those of all authorities."""
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
"""jsonschema does without it, and saves each process seconds of compiling grammars for a format that no schema here has."""

settings.register_profile(
    "limitgate",
    max_examples=EXAMPLES,
    derandomize=not FUZZED,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("limitgate")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--quick``."""
    parser.addoption("--quick", action="store_true", help="only unit tests that start no process")


def pytest_configure(config: pytest.Config) -> None:
    """Register the rows of docs/guarantees.md as markers, print progress at once, and collect garbage less often."""
    for row in guarantees.rows():
        config.addinivalue_line("markers", f"{row.number}: {row.situation}, see docs/guarantees.md")
    gc.set_threshold(50_000)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(write_through=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip modules without a selected test.

    ``--quick`` selects the unit tests, which have the paths of their modules. Few modules have tests that are ``alone``, or are
    named by a row of docs/guarantees.md.
    """
    parts = collection_path.relative_to(TESTS).parts if collection_path.is_relative_to(TESTS) else ()
    is_unit = not parts or parts[0].endswith(".py") or (TESTS.parent / "limitgate" / parts[0]).is_dir()
    if config.getoption("quick") and not is_unit:
        return True
    if not (collection_path.name.startswith("test_") and collection_path.is_file()):
        return None
    selected = guarantees.selected_files(config.option.markexpr)
    if selected is not None:
        path = collection_path.relative_to(TESTS.parent).as_posix()
        return None if any(shown.is_in(path) for shown in selected) else True
    return True if config.option.markexpr == "alone" and "mark.alone" not in collection_path.read_text() else None


def _import_a_share_first(config: pytest.Config, worker: dict[str, Any]) -> None:
    """Let each xdist worker start with different modules, so that each module is compiled once.

    Pytest compiles test modules itself, for its messages about failed assertions. In a new checkout, all workers would compile
    all modules.
    """
    if config.args != config.getini("testpaths"):
        return
    modules = sorted(TESTS.rglob("test_*.py"))
    first = len(modules) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for module in modules[first:] + modules[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # pytest imports it again, and tells
            importlib.import_module(".".join(module.relative_to(TESTS.parent).with_suffix("").parts))


def _start_no_process(*_: object, **__: object) -> None:
    pytest.skip("starts a process")


def _note_guarantees(item: pytest.Item) -> None:
    """Mark a test with the rows of docs/guarantees.md that name it."""
    case = item.callspec.id if hasattr(item, "callspec") else ""
    path = item.nodeid.partition("::")[0]
    for number in guarantees.numbers_of(path, getattr(item, "originalname", item.name), case):
        item.add_marker(number)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[Any]:
    """Tests are no garbage: the collector does not look at them while they come about."""
    gc.disable()
    try:
        if isinstance(worker := getattr(session.config, "workerinput", None), dict):
            _import_a_share_first(session.config, worker)
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long tests first, leave out what is not quick, and refuse names that differ from process to process.

    Such names, for example with addresses, would make xdist's workers collect different tests. Runs before pytest selects
    tests by their markers.
    """
    for item in items:
        _note_guarantees(item)
    if config.getoption("quick"):
        subprocess.Popen.__init__ = _start_no_process  # type: ignore[method-assign]
        items[:] = [item for item in items if not item.get_closest_marker("alone")]
    if wrong := [item.nodeid for item in items if re.search(r" at 0x\w*", item.nodeid)]:
        raise pytest.UsageError(f"tests are named by addresses, expected other ids: {wrong[:3]}")
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Let go of the reports of earlier tests where another process shows them.

    They would become 200,000 objects, which each test that calls the collector would have it look at.
    """
    if hasattr(item.config, "workerinput"):
        item.config.pluginmanager.get_plugin("terminalreporter").stats.clear()


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """Let go of what a test was given.

    A fixture of the session, such as `redis_server`, keeps whatever asked for it in order to end that first. What has ended is
    kept as well, with all that its test was given, and each test that calls the collector would have it look at that.
    """
    for name in fixturedef.argnames if fixturedef.scope == "function" else ():
        asked = request._get_active_fixturedef(name)
        if asked.scope != "function":
            asked._finalizers[:] = [
                each for each in asked._finalizers if getattr(each, "keywords", {}).get("request") is not request
            ]


@pytest.fixture(autouse=True, scope="session")
def _only_garbage_of_tests() -> None:
    """Spare the collector what was there before, such as thousands of tests: many tests have it look at everything.

    Later is too late: what a test has left behind for a moment, such as a store whose thread still looks for Redis, would never
    be let go of again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No test hears that a bucket of an earlier one has ceased to refuse, or has the log levels that an earlier one has set.

    Litestar sets that of the root logger while an application is built. A level that is as it was is not set again: all loggers
    would forget what they have worked out.
    """
    levels = [logger.level for logger in LOGGERS]
    yield
    for episodes in living(Episodes):
        episodes.reset_after_fork()
    for logger, level in zip(LOGGERS, levels):
        if logger.level != level:
            logger.setLevel(level)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A Redis for tests that only need their own keys; nobody stops or fills it."""
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """A client of the Redis for all tests."""
    with redis_server.client() as client:
        yield client


@pytest.fixture(scope="session")
def scripted(client: redis.Redis) -> Scripted:
    """The script on it, under a clock of the test's own."""
    return Scripted(client)


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    """A Redis Cluster of three masters for tests that only need their own keys."""
    cluster = RedisCluster()
    yield cluster
    cluster.stop()


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis for one test to stop, fill or break."""
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture
def _unwatched() -> Iterator[None]:
    """Coverage does not look: for tests that run lines thousands of times which others run, too. It takes half of the time."""
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)


def _sources_of_tests(*sources: Any, **named: Any) -> tuple[Any, ...]:
    """Read the variables of all tests from a dictionary: pydantic takes a millisecond for them, for each gate."""
    return tuple(_of_tests(source) for source in SOURCES(*sources, **named))


def _of_tests(source: Any) -> Any:
    found = {name: value for name, value in getattr(source, "env_vars", {}).items() if name.startswith("limitgate_")}
    if not found or not found.items() <= VARIABLES.items():
        return source
    return InitSettingsSource(Settings, {name.removeprefix("limitgate_"): value for name, value in found.items()})


@pytest.fixture(autouse=True, scope="session")
def _no_settings_from_outside() -> Iterator[None]:
    """A test sees no variable of the shell, and no short ``timeout`` that it did not ask for.

    The default is as long as a busy machine may take, unless the test is about the default of the package.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in [name for name in os.environ if name.startswith("LIMITGATE_")]:
            monkeypatch.delenv(name)
        for name, value in VARIABLES.items():
            monkeypatch.setenv(name.upper(), value)
        monkeypatch.setattr(Settings, "settings_customise_sources", _sources_of_tests)
        for defaults in DEFAULTS:
            monkeypatch.setitem(defaults, "timeout", PATIENCE)
        yield


@pytest.fixture
def punctual_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates take no event loop for late, however busy the machine is."""
    monkeypatch.setattr(heartbeats, "refuses", lambda *_: False)


@pytest.fixture
def default_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says no ``timeout`` has the one of the package, 0.1 seconds."""
    monkeypatch.delenv("LIMITGATE_TIMEOUT")
    for defaults in DEFAULTS:
        monkeypatch.setitem(defaults, "timeout", TIMEOUT)
