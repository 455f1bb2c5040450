"""Options that are True or False."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from limitgate import AsyncLimiter, AsyncRedisStore, ConfigError, Limit, Limiter, RedisStore, Rule
from limitgate.httpx import AsyncRateLimitTransport, RateLimitTransport
from limitgate.page import Page
from tests.support.cases import case


async def _configure(**switches: Any) -> object:
    async with AsyncLimiter("memory://") as limiter:
        return await limiter.configure("plan", "5/minute", **switches)


def _limiter(verb: str, *given: Any, **switches: Any) -> object:
    with Limiter("memory://") as limiter:
        return getattr(limiter, verb)(*given, **switches)


def _awaited(**switches: Any) -> object:
    with pytest.raises(StopIteration) as ended:
        _configure(**switches).send(None)
    return ended.value.value


SWITCHES: list[tuple[str, Callable[..., object]]] = [
    ("borrow", partial(Limit, "5/minute")),
    ("shadow", partial(Rule, "api", "5/minute")),
    ("strict", partial(RateLimitTransport, "5/minute")),
    ("throttle", partial(AsyncRateLimitTransport, "5/minute")),
    ("per_process", partial(_limiter, "configure", "plan", "5/minute")),
    ("replace", partial(_limiter, "configure", "plan", "5/minute")),
    ("replace", _awaited),
    ("even", partial(_limiter, "pace", [1], "5/minute")),
    ("local_refusals", partial(RedisStore, "redis://localhost")),
    ("local_refusals", partial(AsyncRedisStore, "redis://localhost")),
    ("actions", partial(Page, "memory://", guard=lambda _: "me")),
]


def test_text_is_neither_true_nor_false() -> None:
    """``"no"`` would be true."""
    for name, make in SWITCHES:
        with case(f"{name} of {make}"):
            make(**{name: False})
            for wrong in ("no", "false", 0, None):
                with pytest.raises(ConfigError, match=rf"(?s){name}.*expected|expected .*{name}"):
                    make(**{name: wrong})
