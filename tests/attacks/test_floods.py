from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.attacks.flood import BUCKETS, FLOODS, VICTIMS, in_a_process
from tests.support.doors import PATIENCE
from tests.support.redis_server import RedisServer

ON_REDIS = 3_000


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return in_a_process()


@pytest.mark.parametrize("place", range(len(FLOODS)))
def test_a_crowd_of_strangers(outcomes: list[dict[str, Any]], place: int) -> None:
    """Victims who had used up their limit stay refused, memory stays bounded, and strangers are served while there is room.

    Where newcomers leave room for one another all are admitted, else they share what is left.
    """
    told, outcome = FLOODS[place], outcomes[place]
    assert (outcome["requests"], outcome["served"]) == (told["requests"], VICTIMS * told["burst"])
    assert outcome["victims let through"] == 0
    assert outcome["buckets"] <= BUCKETS
    assert outcome["may go"] <= 16
    assert outcome["overflow buckets"] <= 1
    assert outcome["grown by"] < 200 << 20
    if told["burst"] > 1:
        assert outcome["admitted"] == told["requests"]
    else:
        assert BUCKETS - VICTIMS <= outcome["admitted"] <= BUCKETS + 1


def test_a_flood_leaves_nothing_in_redis_for_good(own_redis: RedisServer) -> None:
    """Every key that thousands of strangers leave goes by itself when nothing is owed any more, and none is long or large."""
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
