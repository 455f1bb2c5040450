"""What the redis-server in PATH can do: LimitGate runs on others as well, which lack what some tests are about."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import redis

from tests.support.redis_server import RedisServer


class Feature(NamedTuple):
    """What some servers lack, and how to see it."""

    what: str
    has: Callable[[redis.Redis], object]


def _grants_reading(client: redis.Redis) -> bool:
    try:
        client.execute_command("ACL", "SETUSER", "reader", "%R~any")
    except redis.ResponseError:
        return False
    return True


def _wants_replicas(client: redis.Redis) -> bool:
    client.config_set("min-replicas-to-write", 1)
    try:
        client.eval("return redis.call('SET', KEYS[1], '')", 1, "any")
    except redis.ResponseError:
        return True
    return False


ANNOUNCES = Feature("ports of cluster nodes that change", lambda client: client.info("server")["redis_version"] >= "7")
"""Before Redis 7, a node announces the new port to the other nodes only."""
CHECKS = Feature("scripts that ask for rights", lambda client: client.eval("return redis.acl_check_cmd and 1", 0))
READERS = Feature("rights to only read a key", _grants_reading)
REPLICAS = Feature("min-replicas-to-write for scripts", _wants_replicas)
TLS = Feature("TLS", lambda client: client.config_get("tls-port"))


@cache
def _is_there(feature: Feature) -> bool:
    server = RedisServer()
    try:
        with server.client() as client:
            return bool(feature.has(client))
    finally:
        server.stop()


def needs(feature: Feature) -> None:
    """Skip a test where the server lacks a feature."""
    if not _is_there(feature):
        pytest.skip(f"this redis-server lacks {feature.what}")
