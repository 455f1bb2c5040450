from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

import pytest
import redis
from hypothesis import HealthCheck, settings

from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer
from tests.support.scripted import Scripted

settings.register_profile(
    "limitgate",
    max_examples=int(os.environ.get("LIMITGATE_TEST_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("limitgate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give what is `timed` three attempts, each with fixtures of its own; those that were needed are in the summary as reruns.

    Names that differ from process to process, as by an address, would part the processes that share the tests.
    """
    for item in items:
        if item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.flaky(reruns=2))
    if wrong := [item.nodeid for item in items if re.search(r" at 0x\w*", item.nodeid)]:
        raise pytest.UsageError(f"tests are named by addresses, expected other ids: {wrong[:3]}")


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


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("LIMITGATE_"):
            monkeypatch.delenv(name)
