from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer

settings.register_profile(
    "limitgate",
    max_examples=int(os.environ.get("LIMITGATE_TEST_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("limitgate")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A Redis for tests that only need their own keys; nobody stops or fills it."""
    server = RedisServer()
    yield server
    server.stop()


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


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("LIMITGATE_"):
            monkeypatch.delenv(name)
