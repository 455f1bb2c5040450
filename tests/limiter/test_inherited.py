"""A forked child inherits its parent's blocks, but gives back neither their slots nor their charges."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from limitgate import Limiter, RateLimited
from tests.support.redis_server import RedisServer

KEY = "inherited"
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@pytest.fixture
def limiter(own_redis: RedisServer) -> Iterator[Limiter]:
    with closing(Limiter(own_redis.url, timeout=5)) as opened:
        yield opened


def forked(block: Callable[[], None]) -> None:
    """Run a block whose child leaves it by an error, and wait for the child."""
    here = os.getpid()
    try:
        block()
    except SystemExit:
        if os.getpid() == here:
            raise
    finally:
        if os.getpid() != here:
            os._exit(0)


def fork() -> None:
    child = os.fork()
    if not child:
        raise SystemExit
    os.waitpid(child, 0)


def test_a_slot_is_given_back_by_the_process_that_took_it(limiter: Limiter) -> None:
    def block() -> None:
        with limiter.slot(KEY, 1):
            fork()
            with pytest.raises(RateLimited), limiter.slot(KEY, 1):
                pass

    forked(block)
    with limiter.slot(KEY, 1):
        pass


def test_a_charge_is_cancelled_by_the_process_that_made_it(limiter: Limiter) -> None:
    def block() -> None:
        with limiter.reserve(KEY, "100/day", cost=40) as reservation:
            fork()
            assert limiter.peek(KEY, "100/day").remaining == 60
            reservation.settle(10)

    forked(block)
    assert limiter.peek(KEY, "100/day").remaining == 90
