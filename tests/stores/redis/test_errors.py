"""Errors of redis-py and the network, as they are told."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError, ResponseError

from limitgate.stores.redis.errors import store_error


@pytest.mark.parametrize("kind", [ResponseError, RedisConnectionError, OSError])
def test_what_a_server_says_is_repeated_as_far_as_it_fits_into_a_line(kind: type[Exception]) -> None:
    """Whoever answers at its address may say anything."""
    assert "no such thing" in str(store_error(kind("no such thing")))
    assert len(str(store_error(kind("x" * 1_000_000)))) < 600


def test_a_command_that_valkey_does_not_name() -> None:
    """Its error from a script has a word where others have the command."""
    assert "CALLED" not in str(store_error(ResponseError("Unknown command called from script script: 5b8c")))
    assert "it does not know GET:" in str(store_error(ResponseError("unknown command 'GET', with args beginning with: 'a'")))
