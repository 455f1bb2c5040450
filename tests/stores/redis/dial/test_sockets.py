"""Options of the sockets to Redis."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from limitgate import AsyncRedisStore, RedisStore
from limitgate.stores.redis.redis_py import KEEPALIVE
from tests.support.crowds import a_plan
from tests.support.drops import ForgetfulNat
from tests.support.redis_server import RedisServer

ASKED = {"": True, "?socket_keepalive=true": True, "?socket_keepalive=false": False}


def options_of(connected: Any) -> tuple[bool, dict[int, int]]:
    """Whether the kernel looks after a socket, and how."""
    is_on = connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
    return is_on, {option: connected.getsockopt(socket.IPPROTO_TCP, option) for option in KEEPALIVE}


async def on_asyncio(url: str) -> tuple[bool, dict[int, int]]:
    store = AsyncRedisStore(url)
    await store.aspend(a_plan(), 20)
    (state,) = store._loops.values()
    (connection,) = state.servers._connections  # type: ignore[attr-defined]
    try:
        return options_of(connection._transport.get_extra_info("socket"))
    finally:
        await store.aclose()


@pytest.mark.parametrize("query", ASKED)
def test_the_kernel_keeps_connections_alive(redis_server: RedisServer, query: str) -> None:
    """It asks the other end while there is nothing to say, unless the URL says no."""
    with ForgetfulNat(redis_server) as nat, contextlib.closing(RedisStore(nat.url + query)) as store:
        store.spend(a_plan(), 20)
        found = [options_of(store._servers._connections._idle[0]._socket), asyncio.run(on_asyncio(nat.url + query))]  # type: ignore[attr-defined]
    for is_on, how in found:
        assert is_on is ASKED[query]
        assert how == KEEPALIVE or not is_on
    assert len(KEEPALIVE) == 3
