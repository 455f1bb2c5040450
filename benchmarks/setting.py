"""Where and when it was measured, and of which versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.support.redis_server import RedisServer

_COMMON = ("starlette", "fastapi", "flask", "django", "uvicorn", "redis", "hiredis")
_PEERS = (
    "asgi-ratelimit",
    "throttled-py",
    "limits",
    "fastapi-limiter",
    "pyrate-limiter",
    "slowapi",
    "Flask-Limiter",
    "django-ratelimit",
)


@dataclass(frozen=True)
class Setting:
    """What figures depend on."""

    date: str
    machine: str
    python: str
    redis: str
    versions: str
    """Of the packages that take part."""

    def __str__(self) -> str:
        return f"{self.date}, {self.machine}, Python {self.python}, Redis {self.redis}"


def setting(server: RedisServer) -> Setting:
    """The setting of this process and ``server``."""
    with server.client() as untyped:
        client: Any = untyped
        redis_version = client.info("server")["redis_version"]
    return Setting(_date(), _machine(), platform.python_version(), redis_version, _versions((*_PEERS, *_COMMON)))


def machine() -> str:
    """Date, machine and version of Python, for what is measured without Redis."""
    return f"{_date()}, {_machine()}, Python {platform.python_version()}"


def _date() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def _machine() -> str:
    return f"{_processor()}, {os.cpu_count()} cores, {platform.system()}"


def _processor() -> str:
    """The processor's name where Linux tells it, its architecture elsewhere."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _versions(names: Iterable[str]) -> str:
    return ", ".join(f"{name} {_version(name)}" for name in names)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"
