"""Describes the servers of a store for ``limitgate doctor``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

from redis.connection import ConnectionPool
from redis.exceptions import RedisError, ResponseError

from limitgate.stores.redis.credentials import Credentials
from limitgate.stores.redis.dialer import CONNECT_TIMEOUT, Dialer
from limitgate.stores.redis.errors import store_error
from limitgate.stores.redis.inspection import Inspection
from limitgate.stores.redis.url import server_name

PINGS = 5
T = TypeVar("T")


class ServerFacts(NamedTuple):
    """A field that the user may not read is None."""

    server: str
    """Address in a Cluster, otherwise the URL."""
    kind: str | None
    """``Redis`` or ``Valkey``, with version."""
    role: str | None
    latency: float
    """Median round trip in seconds."""
    clock_difference: float | None
    """Seconds ahead of this machine."""
    policy: str | None
    """``maxmemory-policy``."""
    saves: bool | None
    """True if data survives a restart."""


def server_facts(url: str, credentials: Callable[[], Any] | None, prefix: str) -> list[ServerFacts]:
    """Connect to each server of ``url``, with the store's ``credentials``.

    Logs problems like `Inspection`. Raises `ConfigError`, `StoreError`.
    """
    logins = None if credentials is None else Credentials(_called(credentials), may_await=False)
    inspection = Inspection()
    inspection.expect(prefix)
    dialer = Dialer(url, ConnectionPool, inspection, socket_timeout=CONNECT_TIMEOUT, credentials=logins)
    found = []
    for address in dialer.nodes or (None,):
        try:
            connection = dialer.dial(address)
            try:
                if address is not None:
                    _check_cluster(connection, server_name(address), inspection)
                found.append(_facts(connection, server_name(address)))
            finally:
                connection.disconnect()
        except (RedisError, OSError) as error:
            raise store_error(error) from error
    return found


def _check_cluster(connection: Any, server: str, inspection: Inspection) -> None:
    """Raise `ResponseError` if a server isn't a cluster node. A call alone doesn't show it, because the server answers it."""
    connection.send_command("CLUSTER", "SLOTS")
    try:
        connection.read_response()
    except ResponseError as error:
        inspection.failed(server, error)
        raise


def _called(credentials: Callable[[], Any]) -> Callable[[], Any]:
    def login() -> Any:
        given = credentials()
        return asyncio.run(_awaited(given)) if hasattr(given, "__await__") else given

    return login


async def _awaited(given: Coroutine[Any, Any, T]) -> T:
    return await given


def _facts(connection: Any, server: str) -> ServerFacts:
    fields: dict[str, str] = {}
    for section in ("server", "replication", "memory", "persistence"):
        text = _answer(connection, "INFO", section)
        fields |= dict(line.split(":", 1) for line in str(text or "").splitlines() if ":" in line)
    version = fields.get("valkey_version") or fields.get("redis_version")
    name = "Valkey" if fields.get("server_name") == "valkey" or "valkey_version" in fields else "Redis"
    save = _answer(connection, "CONFIG", "GET", "save")
    return ServerFacts(
        server,
        None if version is None else f"{name} {version}",
        fields.get("role"),
        sorted(_latency(connection) for _ in range(PINGS))[PINGS // 2],
        _clock_difference(connection),
        fields.get("maxmemory_policy"),
        _saves(fields, save),
    )


def _saves(fields: dict[str, str], save: Any) -> bool | None:
    if fields.get("aof_enabled") == "1":
        return True
    values = list(save.values()) if isinstance(save, dict) else save[1::2] if isinstance(save, list) else None
    return None if values is None or "aof_enabled" not in fields else any(values)


def _latency(connection: Any) -> float:
    began = time.perf_counter()
    _answer(connection, "PING")
    return time.perf_counter() - began


def _clock_difference(connection: Any) -> float | None:
    before = time.time()
    told = _answer(connection, "TIME")
    if told is None:
        return None
    seconds, micros = cast(list[Any], told)
    return int(seconds) + int(micros) / 1e6 - (before + time.time()) / 2


def _answer(connection: Any, *command: str) -> Any:
    with suppress(ResponseError):
        connection.send_command(*command)
        answer = connection.read_response()
        return answer.decode(errors="replace") if isinstance(answer, bytes) else _text(answer)
    return None


def _text(answer: Any) -> Any:
    if isinstance(answer, list):
        return [each.decode(errors="replace") if isinstance(each, bytes) else each for each in answer]
    if isinstance(answer, dict):
        return {_text([name])[0]: _text([value])[0] for name, value in answer.items()}
    return answer
