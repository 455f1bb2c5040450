"""A probe that fails by mistake would skip its tests everywhere."""

from __future__ import annotations

import pytest

from tests.support import server_features
from tests.support.redis_server import RedisServer
from tests.support.server_features import Feature

FEATURES = [each for each in vars(server_features).values() if isinstance(each, Feature)]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.what)
def test_redis_has_every_feature(feature: Feature) -> None:
    """Since 7.0; forks have what they have."""
    server = RedisServer()
    try:
        with server.client() as client:
            about = client.info("server")
    finally:
        server.stop()
    is_fork = about.get("server_name", "redis") != "redis" or any(
        f"{name}_version" in about for name in ("dragonfly", "valkey")
    )
    if is_fork or int(about["redis_version"].partition(".")[0]) < 7:
        pytest.skip("not Redis 7.0 or newer")
    assert server_features._is_there(feature)
