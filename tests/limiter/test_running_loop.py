"""A sync limiter that stops an event loop says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from limitgate import Limiter
from tests.support.redis_server import RedisServer

CALLS: dict[str, Callable[[Limiter], object]] = {
    "hit": lambda limiter: limiter.hit("a", "9/s"),
    "peek": lambda limiter: limiter.peek("a", "9/s"),
    "wait": lambda limiter: limiter.wait("a", "9/s"),
    "limited": lambda limiter: limiter.limited("9/s")(lambda: None)(),
    "ban": lambda limiter: limiter.ban("b", 1),
}


def said(caplog: pytest.LogCaptureFixture) -> int:
    return sum(message.startswith("LG029") for message in caplog.messages)


async def called(limiter: Limiter, call: Callable[[Limiter], object], times: int = 3) -> None:
    for _ in range(times):
        call(limiter)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_inside_of_a_running_loop(call: Callable[[Limiter], object], caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is called there, once; and nothing where no loop runs in the thread, as in one that a loop has started."""
    with Limiter("memory://") as limiter:
        call(limiter)
        asyncio.run(asyncio.to_thread(call, limiter))
        assert said(caplog) == 0
        for _ in range(2):
            asyncio.run(called(limiter, call))
        assert said(caplog) == 1


def test_it_is_looked_for_in_the_first_calls(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """After a thousand calls nobody looks any more."""
    with Limiter(redis_server.url, timeout=5) as limiter:
        for _ in range(1000):
            limiter.hit("loop", "9/s")
        asyncio.run(called(limiter, CALLS["hit"]))
    assert said(caplog) == 0
