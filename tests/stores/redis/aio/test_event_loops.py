"""Event loops that begin tasks at once, and several event loops in several threads with one limiter."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from limitgate import AsyncLimiter, AsyncRedisStore, MemoryStore, StoreError
from limitgate.gate.slot_keeper import SlotKeeper
from limitgate.stores.redis.aio.cluster import AsyncCluster
from tests.support.crowds import a_plan
from tests.support.redis_server import RedisServer, free_port

PATIENT = 20.0


class _Ended(asyncio.Future[Any]):
    """A task that has ended before anybody could name it, which some versions of Python do then."""

    def set_name(self, _: object) -> None:
        """Need no name."""


def _eager(loop: asyncio.AbstractEventLoop, work: Any, **_: Any) -> asyncio.Future[Any]:
    """As `asyncio.eager_task_factory` does with what ends without waiting; the rest is a task of what is left."""
    try:
        waits_for = work.send(None)
    except StopIteration as end:
        ended = _Ended(loop=loop)
        ended.set_result(end.value)
        return ended
    except Exception as error:  # noqa: BLE001 - the task's own
        failed = _Ended(loop=loop)
        failed.set_exception(error)
        failed.exception()
        return failed
    return asyncio.Task(_rest(work, waits_for), loop=loop)


class _Again:
    """Awaits what a coroutine waits for already."""

    def __init__(self, waits_for: Any) -> None:
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        if self._waits_for is not None:
            self._waits_for._asyncio_future_blocking = True
        return (yield self._waits_for)


async def _rest(work: Any, waits_for: Any) -> Any:
    while True:
        try:
            heard, error = await _Again(waits_for), None
        except BaseException as raised:  # noqa: BLE001 - the coroutine's
            heard, error = None, raised
        try:
            waits_for = work.throw(error) if error is not None else work.send(heard)
        except StopIteration as end:
            return end.value


FACTORIES: dict[str, Callable[..., Any]] = {"by hand": _eager}
if sys.version_info >= (3, 12):
    FACTORIES["of asyncio"] = asyncio.eager_task_factory


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_a_failed_connection_is_not_for_ever(own_redis: RedisServer, tmp_path: Path, factory: Callable[..., Any]) -> None:
    """Where tasks begin at once, connecting to a socket that is not there has failed before anybody knows of the task."""
    path = tmp_path / "redis.sock"

    async def run() -> None:
        asyncio.get_running_loop().set_task_factory(factory)
        async with contextlib.aclosing(AsyncRedisStore(f"unix://{path}")) as store:
            for _ in range(2):
                with pytest.raises(StoreError):
                    await store.aspend(a_plan(), 5)
            path.symlink_to(own_redis.socket)
            assert (await store.aspend(a_plan(), 5)).admitted

    asyncio.run(asyncio.wait_for(run(), PATIENT))


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
def test_the_slots_of_a_cluster_are_looked_for_again(factory: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tasks begin at once, looking for who holds which slot has ended before anybody knows of the task."""
    looks = []

    async def look_once(self: AsyncCluster) -> None:
        looks.append(self)
        self._map.is_outdated = False

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(factory)
        store = AsyncRedisStore(f"redis+cluster://127.0.0.1:{free_port()}")
        async with contextlib.aclosing(store):
            await store.connect()
            here: Any = store._loops[loop].servers
            for _ in range(2):
                here.troubled()
                async with asyncio.timeout(PATIENT):
                    while here._looking is not None:  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0)
        assert len(looks) >= 2

    monkeypatch.setattr(AsyncCluster, "_look_once", look_once)
    monkeypatch.setattr("limitgate.stores.redis.aio.cluster.MAP_PAUSE", 0)
    asyncio.run(run())


@pytest.mark.parametrize("url", ["memory", "redis"])
def test_event_loops_in_several_threads(redis_server: RedisServer, url: str) -> None:
    """One limiter from event loops that come and go in several threads, as Flask's async views have it."""
    limiter = AsyncLimiter("memory://" if url == "memory" else redis_server.url, timeout=10)
    key = uuid4().hex

    async def view(number: int) -> None:
        async with limiter.slot(key, 100), limiter.slot(f"{key}:{number}", 1):
            assert (await limiter.hit(key, "10000/day")).allowed
        assert (await limiter.wait(f"{key}:{number}", "1000/second burst 1", timeout=10)).allowed

    def worker(number: int) -> None:
        for _ in range(15):
            asyncio.run(view(number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(worker, range(8)))


def test_loops_that_end_while_another_begins() -> None:
    """What was held in loops that have ended is let go by whichever thread comes first, and nothing is gone through twice."""
    holding: Any = SlotKeeper(MemoryStore(), 1.0)

    class Ended:
        """An event loop that has ended; meanwhile another thread finds that, too, and holds something in a loop of its own."""

        def is_closed(self) -> bool:
            holding._in_loops.pop(self, None)
            begun.append(Begun())
            holding._in_loops[begun[-1]] = object()
            return True

    class Begun:
        def is_closed(self) -> bool:
            return False

    async def come() -> None:
        holding._here()

    begun: list[Begun] = []
    ended = [Ended() for _ in range(3)]
    holding._in_loops.update(dict.fromkeys(ended))  # type: ignore[arg-type]
    asyncio.run(come())
    assert len(begun) == 3
    assert not any(each in holding._in_loops for each in ended)
