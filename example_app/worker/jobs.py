"""Jobs in a Redis Stream: filled in, handed to one worker at a time, acknowledged."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Self

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeoutError,
)

log = logging.getLogger(__name__)

Job = tuple[str, dict[str, str]]
"""The id of a message, and its fields."""
RETRY = 0.5
"""Seconds after which a Redis that does not answer is asked again."""


def connect(url: str) -> Any:
    """A client that gives text, and leaves it to its caller to ask again."""
    return Redis.from_url(url, decode_responses=True, retry=Retry(NoBackoff(), 0))


async def fill(redis: Any, stream: str, jobs: int) -> None:
    """Add so many jobs, numbered from 0."""
    async with redis.pipeline(transaction=False) as pipeline:
        for number in range(jobs):
            pipeline.xadd(stream, {"job": number})
        await pipeline.execute()


async def is_drained(redis: Any, stream: str, group: str) -> bool:
    """Whether every job was handed out and acknowledged. No, as long as nobody knows."""
    with suppress(RedisError):
        last = (await redis.xinfo_stream(stream))["last-generated-id"]
        groups = [each for each in await redis.xinfo_groups(stream) if each["name"] == group]
        return [(each["pending"], each["last-delivered-id"]) for each in groups] == [(0, last)]
    return False


class Jobs:
    """The jobs for one worker, as an async iterator without end: one in hand at most, until it is `done` or left."""

    def __init__(self, redis: Any, stream: str, group: str, idle: float) -> None:
        self._redis = redis
        self._stream, self._group, self._me = stream, group, f"{socket.gethostname()}-{os.getpid()}"
        self._idle, self._idle_ms = idle, int(idle * 1000)
        self._in_hand: str | None = None
        self._look_at, self._cursor = 0.0, "0-0"  # when to look for what dead workers have left, and from where on

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Job:
        job: Job | None = None
        while job is None:
            job = await self._answer(self._find)
        self._in_hand = job[0]
        return job

    async def done(self) -> None:
        """Acknowledge the job in hand, however long Redis takes to hear of it."""
        await self._answer(lambda: self._redis.xack(self._stream, self._group, self._in_hand))
        self._in_hand = None

    def leave(self) -> None:
        """Hold the job in hand no longer: whoever looks after the idle time will claim it."""
        self._in_hand = None

    async def give_back(self) -> None:
        """Let the job in hand, if there is one, be claimed by whoever looks next, unless Redis is gone."""
        job, self._in_hand = self._in_hand, None
        if job is not None:
            with suppress(RedisError):
                await self._claim(job, idle=self._idle_ms)

    async def keep_alive(self) -> None:
        """Say again and again that the job in hand is held, without end."""
        while True:
            await asyncio.sleep(self._idle / 4)
            if self._in_hand is not None:
                with suppress(RedisError):
                    await self._claim(self._in_hand, idle=0)

    async def _claim(self, job: str, idle: int) -> None:
        """Say that a job is ours, and has been idle for so many milliseconds."""
        await self._redis.xclaim(self._stream, self._group, self._me, 0, [job], idle=idle, justid=True)

    async def _find(self) -> Any:
        """A job that a dead worker has left, or a new one; None if there is none for a while."""
        group, idle = (self._group, self._me), self._idle_ms
        if monotonic() >= self._look_at:
            self._cursor, left, *_ = await self._redis.xautoclaim(self._stream, *group, idle, self._cursor, count=1)
            if left:
                return left[0]
            if self._cursor == "0-0":
                self._look_at = monotonic() + self._idle / 4
        new = await self._redis.xreadgroup(*group, {self._stream: ">"}, count=1, block=max(1, min(1000, idle // 4)))
        return new[0][1][0] if new else None

    async def _answer(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """What Redis answers, sooner or later."""
        is_news = True
        while True:
            try:
                return await ask()
            except (RedisConnectionError, RedisTimeoutError) as error:
                if is_news:
                    log.warning("no answer from Redis, which is asked again until there is one: %s", error)
                is_news = False
                self._look_at = monotonic() + self._idle  # the others were cut off, too, and get time to say what they hold
            except ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                with suppress(RedisError):  # somebody else has created it, or Redis is gone
                    await self._redis.xgroup_create(self._stream, self._group, id="0", mkstream=True)
            await asyncio.sleep(RETRY)
