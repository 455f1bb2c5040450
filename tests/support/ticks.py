"""Lets a uvicorn in this process notice ten times as fast that it is to end, and that all its connections have ended.

It looks ten times a second, once more after a pause: most tests would wait for that longer than for all else.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import uvicorn.server

PARTS = 10


async def _shorter(seconds: float, result: Any = None) -> Any:
    return await asyncio.sleep(seconds / PARTS, result)


uvicorn.server.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": _shorter})  # type: ignore[attr-defined]
