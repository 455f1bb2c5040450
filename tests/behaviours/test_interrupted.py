"""Calls in the midst of calls: finalizers, signal and log handlers run wherever a thread happens to be, locks held."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from limitgate import ConfigError, Decision, Limit, Limiter, MemoryStore, RedisStore, StoreError
from limitgate.gate.planning.cardinality import CardinalityGuard
from limitgate.limits.plan import Plan, Reading
from limitgate.process import background
from tests.support.crowds import a_plan
from tests.support.redis_server import RedisServer

PATIENT = 20.0
LEASED = Limit("1000/day", lease=10)


class Interrupted:
    """In place of a lock: each time that it is taken something happens with it held."""

    def __init__(self, lock: Any, happens: Callable[[], object]) -> None:
        self._lock, self._happens = lock, happens
        self._is_at_it = False
        self.times = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        if not self._is_at_it:
            self._is_at_it = True
            self.times += 1
            try:
                self._happens()
            finally:
                self._is_at_it = False

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class InterruptedTurn(dict[str, object]):
    """In place of the turn to ask: each time that it is taken something happens."""

    def __init__(self, turn: dict[str, object], happens: Callable[[], object]) -> None:
        super().__init__()
        self._lock = turn
        self._happens = happens
        self.times = 0

    def setdefault(self, key: str, mine: object = None) -> object:
        holder = super().setdefault(key, mine)
        if holder is mine:
            self.times += 1
            self._happens()
        return holder


LOCKS: dict[str, Callable[[Limiter], tuple[Any, str]]] = {
    "the turn to ask": lambda limiter: (limiter._store._calls, "_turn"),  # type: ignore[attr-defined]
    "connections": lambda limiter: (limiter._store._servers._connections, "_lock"),  # type: ignore[attr-defined]
    "refusals": lambda limiter: (limiter._store.deny_cache, "_lock"),  # type: ignore[attr-defined]
    "leases": lambda limiter: (limiter._store.leases, "_lock"),  # type: ignore[attr-defined]
    "the end of leases": lambda limiter: (limiter._store, "_lease_lock"),
    "breakers": lambda limiter: (limiter._store._tally, "lock"),  # type: ignore[attr-defined]
    "slots": lambda limiter: (limiter._slot_keeper._in_threads, "_lock"),
}


def ends(work: Callable[[], object]) -> None:
    """Do something in a thread, which must come to an end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENT)
    assert not thread.is_alive(), "it hangs"


def abandoned(limiter: Limiter, key: str) -> Iterator[Decision]:
    with limiter.slot(key, 9) as decision:
        yield decision


def taken(limiter: Limiter, key: str) -> int:
    return limiter.peek(key, "9 at once").windows[0].used


def waited(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def use(limiter: Limiter, key: str) -> None:
    """Take every lock there is: a connection is made, a lease taken, a refusal remembered, an error counted."""
    limiter._store.close()
    with limiter.slot(key, 9):
        limiter.hit(f"{key}:leased", LEASED)
        limiter.hit(f"{key}:refused", "1/day")
        limiter.hit(f"{key}:refused", "1/day")
    limiter._slot_keeper._in_threads._set_timer()
    assert limiter._store.healthy  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", LOCKS.values(), ids=LOCKS)
@pytest.mark.parametrize("interruption", ["finalizer", "hit", "slot", "close"])
def test_no_lock_is_waited_for_by_whom_it_is_held(
    redis_server: RedisServer, place: Callable[[Limiter], tuple[Any, str]], interruption: str
) -> None:
    """Whatever a thread is interrupted by, with whatever lock held, it comes to an end, and so does everybody else."""
    key = uuid4().hex
    with Limiter(redis_server.url, timeout=2) as limiter:
        generators = []
        for _ in range(9):
            generators.append(abandoned(limiter, key))
            next(generators[-1])

        def happens() -> None:
            with contextlib.suppress(StoreError):
                if interruption == "finalizer" and generators:
                    generators.pop().close()
                elif interruption == "hit":
                    limiter.hit(f"{key}:nested", "1000/day")
                elif interruption == "slot":
                    with limiter.slot(f"{key}:nested", 1000):
                        pass
                elif interruption == "close":
                    limiter.close()

        where, name = place(limiter)
        lock = (InterruptedTurn if name == "_turn" else Interrupted)(getattr(where, name), happens)
        setattr(where, name, lock)
        ends(lambda: use(limiter, f"{key}:others"))
        assert lock.times > 0
        setattr(where, name, lock._lock)
        while generators:
            generators.pop().close()
        ends(lambda: use(limiter, f"{key}:later"))
        waited(lambda: taken(limiter, key) == 0)


@pytest.mark.parametrize("url", ["memory", "redis"])
def test_an_abandoned_generator_gives_its_slot_back(
    redis_server: RedisServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector waits for no store and no lock: what was held is given back soon, by another thread."""
    monkeypatch.setattr("limitgate.gate.slot_keeper.RENEW", 1000.0)  # not only when slots are renewed
    calls: list[tuple[int, Plan]] = []
    kind: Any = MemoryStore if url == "memory" else RedisStore

    class Noted(kind):  # type: ignore[misc]
        def spend(self, plan: Plan, timeout: float = 0) -> Reading:
            calls.append((threading.get_ident(), plan))
            return super().spend(plan, timeout)  # type: ignore[no-any-return]

    store = Noted() if url == "memory" else Noted(redis_server.url)
    limiter, key = Limiter(store, timeout=2), uuid4().hex
    with contextlib.closing(store):
        for _ in range(3):
            generator = abandoned(limiter, key)
            next(generator)
            cycle: list[Any] = [generator]
            cycle.append(cycle)
        del generator, cycle
        mine = len(calls)
        gc.collect()
        assert [ident for ident, _ in calls[mine:] if ident == threading.get_ident()] == []
        waited(lambda: len(limiter._slot_keeper) == 0 and taken(limiter, key) == 0)


def test_a_slot_abandoned_on_an_event_loop() -> None:
    """A slot of plain code that was taken where an event loop runs is given back in that loop."""

    async def run() -> None:
        limiter, key = Limiter("memory://"), uuid4().hex
        generator = abandoned(limiter, key)
        next(generator)
        await asyncio.to_thread(generator.close)
        async with asyncio.timeout(PATIENT):
            while taken(limiter, key):  # noqa: ASYNC110 - given back by a timer of the library
                await asyncio.sleep(0.005)

    asyncio.run(run())


def test_a_log_handler_that_asks_the_store(redis_server: RedisServer) -> None:
    """A log line in the midst of a call: a handler that asks the same store is told so at once, and nobody waits for it."""
    heard: list[Any] = []

    class Limited(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                heard.append(limiter.hit("log lines", "10/second"))
            except StoreError as error:
                heard.append(error)

    handler = Limited()
    logging.getLogger("limitgate.store").addHandler(handler)
    try:
        with contextlib.closing(RedisStore(redis_server.url)) as store, redis_server.client() as client:
            limiter = Limiter(store, timeout=60)
            plan = a_plan()
            client.set(plan.charges[0].key, "not ours")
            ends(lambda: heard.append(store.spend(plan, 60)))
            assert [type(each) for each in heard] == [StoreError, Reading]
            assert "expected calls outside of handlers" in str(heard[0])
            assert limiter.hit("log lines", "10/second").allowed
    finally:
        logging.getLogger("limitgate.store").removeHandler(handler)


def test_our_own_threads_can_be_interrupted(redis_server: RedisServer) -> None:
    """A finalizer that runs in a thread of the store's own does not ask: that thread may hold what it would wait for."""
    heard: list[Any] = []
    with contextlib.closing(RedisStore(redis_server.url)) as store:

        def ask() -> None:
            try:
                heard.append(store.spend(a_plan(), 5))
            except StoreError as error:
                heard.append(error)

        background.start("test", ask).join(PATIENT)
        ask()
    assert [type(each) for each in heard] == [StoreError, Reading]


def test_closing_in_the_midst_of_a_call(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that closes the store has it closed when the call that it interrupts has ended."""
    with contextlib.closing(RedisStore(redis_server.url)) as store:
        understood = store.understood

        def interrupted(*heard: Any) -> Any:
            store.close()
            return understood(*heard)

        monkeypatch.setattr(store, "understood", interrupted)
        assert store.spend(a_plan(), 5).admitted
        assert not store._servers._connections._idle  # type: ignore[attr-defined]


def test_a_count_of_newcomers_can_be_interrupted() -> None:
    """Requests within a request, by a finalizer or a signal handler, are counted as any others."""
    nested = [True]

    def clock() -> float:
        if nested.pop() if nested else False:
            newcomers.open("b", "source", "rule")
        return 0.0

    newcomers = CardinalityGuard(10, clock)
    ends(lambda: newcomers.open("a", "source", "rule"))
    assert newcomers.know("a")
    assert newcomers.know("b")


# --- green threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "call"), [("gevent", "gevent.monkey.patch_all()"), ("eventlet", "eventlet.monkey_patch()")]
)
def test_threads_that_are_replaced_too_late(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, library: str, call: str
) -> None:
    """Threads patched after LimitGate was imported: one error says so, at the first call or where a store is made."""
    with contextlib.closing(RedisStore(redis_server.url)) as store, monkeypatch.context() as patched:
        made = threading.Lock

        def lock() -> Any:
            return made()

        lock.__module__ = f"{library}.thread"
        patched.setattr(threading, "Lock", lock)
        for work in (lambda: store.spend(a_plan(), 5), lambda: RedisStore(redis_server.url)):
            with pytest.raises(ConfigError, match=re.escape(f"expected {call} before anything else is imported")):
                work()


def test_threads_that_somebody_watches(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other replacements of locks, as debuggers make, do no harm."""
    made = threading.Lock
    monkeypatch.setattr(threading, "Lock", partial(made))
    with contextlib.closing(RedisStore(redis_server.url)) as store:
        assert store.spend(a_plan(), 5).admitted
