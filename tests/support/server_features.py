"""What a Redis can: LimitGate runs on earlier ones as well, which lack what some tests are about."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import redis

from tests.support.redis_server import RedisServer


def _asks_for_rights(client: redis.Redis) -> object:
    return client.eval("return redis.acl_check_cmd and 1", 0)


def _grants_reading(client: redis.Redis) -> bool:
    try:
        client.execute_command("ACL", "SETUSER", "reader", "%R~any")
    except redis.ResponseError:
        return False
    client.acl_deluser("reader")
    return True


def _wants_replicas(client: redis.Redis) -> bool:
    client.config_set("min-replicas-to-write", 5)
    try:
        client.eval("return redis.call('SET', KEYS[1], '')", 1, "wanted")
    except redis.ResponseError:
        return True
    finally:
        client.config_set("min-replicas-to-write", 0)
        client.delete("wanted")
    return False


class Feature(NamedTuple):
    """What some servers lack, and how to see it."""

    what: str
    has: Callable[[redis.Redis], object]


CHECKS = Feature("scripts that ask for rights", _asks_for_rights)
READERS = Feature("rights to only read a key", _grants_reading)
REPLICAS = Feature("min-replicas-to-write for scripts", _wants_replicas)


def needs(server: RedisServer, feature: Feature) -> None:
    """Skip a test where the server lacks a feature."""
    with server.client() as client:
        if not feature.has(client):
            pytest.skip(f"this server lacks {feature.what}")
