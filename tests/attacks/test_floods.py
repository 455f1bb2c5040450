from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.attacks.flood import BUCKETS, FLOODS, REQUESTS, VICTIMS, in_a_process
from tests.support.doors import PATIENCE
from tests.support.redis_server import RedisServer

ON_REDIS = 50_000


@pytest.fixture(scope="module")
def floods() -> Iterator[list[dict[str, Any]]]:
    """What came of all floods, two at a time."""
    with ThreadPoolExecutor(2) as two:
        yield list(two.map(in_a_process, FLOODS))


def test_a_crowd_of_strangers_frees_no_victim(floods: list[dict[str, Any]]) -> None:
    """Whoever had used up its limit before the flood is refused during and after it: no exhausted bucket makes room."""
    assert sum(found["requests"] for found in floods) == REQUESTS
    assert [found["served"] for found in floods] == [VICTIMS * told["burst"] for told in FLOODS]
    assert [found["victims let through"] for found in floods] == [0] * len(FLOODS)


def test_a_crowd_of_strangers_fits_into_the_memory_there_is(floods: list[dict[str, Any]]) -> None:
    """No more buckets are kept than the store was told, nothing beside them grows, and the process stays small."""
    for found in floods:
        assert found["buckets"] <= BUCKETS
        assert found["may go"] <= 16
        assert found["overflow buckets"] <= 1
        assert found["grown by"] < 200 << 20


def test_strangers_are_served_as_long_as_there_is_room(floods: list[dict[str, Any]]) -> None:
    """Where newcomers leave room for one another all are admitted, else they share what is left."""
    assert [found["admitted"] for found in floods[:2]] == [told["requests"] for told in FLOODS[:2]]
    assert all(BUCKETS - VICTIMS <= found["admitted"] <= BUCKETS + 1 for found in floods[2:])


def test_a_flood_leaves_nothing_in_redis_for_good(own_redis: RedisServer) -> None:
    """Every key that 50,000 strangers leave goes by itself when nothing is owed any more, and none is long or large."""
    command = [sys.executable, "-m", "tests.attacks.flood", "--requests", str(ON_REDIS), "--redis", own_redis.url]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10 * PATIENCE)
    assert json.loads(done.stdout) == {"requests": ON_REDIS, "admitted": ON_REDIS}
    with own_redis.client() as client:
        keys = list(client.scan_iter(count=10_000))
        assert len(keys) == ON_REDIS
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.pttl(key)
            pipeline.strlen(key)
        found = pipeline.execute()
    hour_and_ninth_of_a_day = 86_400_000 / 9 + 1000
    assert all(0 < left <= hour_and_ninth_of_a_day for left in found[::2])
    assert max(found[1::2]) <= 8 + 2 * 25
    assert max(map(len, keys)) <= len("limitgate:all:") + 32
