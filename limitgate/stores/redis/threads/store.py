"""The Redis store for threads."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, overload
from weakref import ref

from redis.connection import ConnectionPool

from limitgate.errors import ConfigError, StoreError, called_as
from limitgate.internal_errors import logged_errors
from limitgate.limits.plan import Plan, Reading
from limitgate.limits.template import AnyAnswer, AnyPlan, AnyReading, PlainSpend
from limitgate.process import background, switch
from limitgate.process.clock import monotonic
from limitgate.process.forking import Remade, get_ready_for_forks
from limitgate.stores.base import MAX_BATCH, ConfigRequest, FleetRequest, StoredConfig, StoredFleet, calls_of
from limitgate.stores.redis.credentials import Credentials, GivesLogin
from limitgate.stores.redis.dialer import CONNECT_TIMEOUT, Dialer
from limitgate.stores.redis.leases import LONGEST
from limitgate.stores.redis.replies import RedisStoreBase
from limitgate.stores.redis.threads.cluster import SyncCluster
from limitgate.stores.redis.threads.coalescer import CallCoalescer
from limitgate.stores.redis.threads.connection import ListenDeadline
from limitgate.stores.redis.threads.node import Node
from limitgate.stores.redis.url import scheme_of
from limitgate.stores.redis.wire import Kept, KeptRequest


class _Use:
    __slots__ = ("closes", "is_asking")

    def __init__(self) -> None:
        self.is_asking = self.closes = False
        """True while a call is running, also to close the store afterwards."""


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.use = _Use()


class RedisStore(RedisStoreBase, Remade):
    """Buckets in Redis for threads. Concurrent requests share a call.

    ``url``, ``local_refusals`` and a sync ``credentials`` are those of `limitgate.stores.redis.aio.store.AsyncRedisStore`.
    Raises `ConfigError`. If a signal handler, a finalizer or a log handler calls the store during a call, this raises
    `StoreError`, because waiting would deadlock. There, `close` takes effect when the outer call ends.
    """

    measures_silence = takes_plain = True
    """Readings and errors report silence."""

    @called_as("RedisStore('redis://localhost:6379/0'), whose URL has other options")
    def __init__(self, url: str, *, local_refusals: bool = True, credentials: GivesLogin | None = None) -> None:
        check_patches()
        super().__init__(local_refusals=local_refusals)
        self.scheme: str = scheme_of(url)
        logins = None if credentials is None else Credentials(credentials, may_await=False)
        self._dialer = Dialer(url, ConnectionPool, self.inspection, socket_timeout=CONNECT_TIMEOUT, credentials=logins)
        self._this_thread = _ThreadState()
        self._connects_in_children = False
        get_ready_for_forks(self)
        self._begin()

    def _begin(self) -> None:
        self._connecting: threading.Thread | None = None
        self._servers: Node | SyncCluster = (
            SyncCluster(self._dialer, self) if self._dialer.nodes else Node(self._dialer.dial, self)
        )
        self._calls = CallCoalescer(self._servers.exchange, MAX_BATCH)
        self._lease_lock = threading.RLock()
        self._gives_back = False

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._this_thread = _ThreadState()
        self._begin()
        if self._connects_in_children:
            self.connect_soon()

    def before_fork(self) -> None:
        """Wait for a background attempt, because it holds locks."""
        if self._connecting is not None and self._connecting is not threading.current_thread():
            self._connecting.join(CONNECT_TIMEOUT)

    def connect_soon(self, *, in_children: bool = False) -> None:
        """Connect in the background, or with ``in_children`` only in forks."""
        self._connects_in_children = in_children
        if not in_children and switch.stand_in is None:
            with contextlib.suppress(RuntimeError):  # no thread can be started now
                self._connecting = background.start("start", _connect, ref(self), self.closings)

    def __repr__(self) -> str:
        return "RedisStore()"

    @overload
    def spend(self, plan: Plan, timeout: float) -> Reading: ...
    @overload
    def spend(self, plan: PlainSpend, timeout: float) -> AnyReading: ...
    @overload
    def spend(self, plan: AnyPlan, timeout: float) -> AnyAnswer: ...

    def spend(self, plan: AnyPlan, timeout: float) -> AnyAnswer:
        """Carry out ``plan`` in at most one round trip. Raises `StoreError` within about ``timeout`` seconds."""
        if isinstance(plan, Plan):
            return self._ask(plan, timeout)
        cache = self.deny_cache
        if cache is not None and cache.refusals and type(plan) is PlainSpend and cache.knows(plan.keys):
            known = cache.answer_plain(plan, self._clock())
            if known is not None:
                return known
        reading = self._ask(plan, timeout)
        if not isinstance(reading, Reading) or reading.buckets:
            return reading
        waited = reading.waited
        try:
            reading = self._ask(plan.whole_plan, max(0.0, timeout - waited))
        except StoreError as error:
            error.waited += waited
            raise
        return reading.having_waited(reading.waited + waited)

    def _ask(self, plan: AnyPlan, timeout: float) -> AnyAnswer:
        check_patches()
        use = self._this_thread.use
        _check_is_outermost(use)
        try:
            use.is_asking = True
            reading: AnyAnswer | None = self.locally(plan) if isinstance(plan, Plan) else None
            if reading is None:
                self.listen_deadline: float = timeout
                self._servers.check(plan)
                reading = self._calls.spend(plan, timeout)
            return reading
        finally:
            use.is_asking = False
            if use.closes:
                self.close()

    def config(self, request: ConfigRequest, timeout: float) -> StoredConfig:
        """Carry out ``request`` in one round trip. Raises `StoreError` within about ``timeout`` seconds."""
        stored: Any = self._keep(request, timeout)
        return stored  # type: ignore[no-any-return]

    def fleet(self, request: FleetRequest, timeout: float) -> StoredFleet:
        """Carry out ``request`` in one round trip. Raises `StoreError` within about ``timeout`` seconds."""
        stored: Any = self._keep(request, timeout)
        return stored  # type: ignore[no-any-return]

    def _keep(self, request: KeptRequest, timeout: float) -> Kept:
        check_patches()
        use = self._this_thread.use
        _check_is_outermost(use)
        listen_deadline = ListenDeadline(timeout)
        try:
            use.is_asking = True
            self.listen_deadline = timeout
            stored = self._servers.config(request, listen_deadline)
        except StoreError as error:
            error.waited = min(listen_deadline.spent, timeout)
            raise
        finally:
            use.is_asking = False
            if use.closes:
                self.close()
        return stored.having_waited(min(listen_deadline.spent, timeout))

    def close(self) -> None:
        """Return leases and close the connections, those in use after their calls."""
        use = self._this_thread.use
        use.closes = use.is_asking
        if use.closes:
            return
        self.closings += 1
        try:
            use.is_asking = True
            self._give_back(age=0)
            self._servers.close()
        finally:
            use.is_asking = use.closes = False

    def give_back_leases(self) -> None:
        if self.leases:
            self._give_back(age=0)

    def _give_back(self, age: float = LONGEST) -> None:
        plans = self.leases.ended(monotonic(), age)
        if switch.stand_in is not None:
            return
        with contextlib.suppress(StoreError):
            for together in calls_of(plans):
                self._servers.exchange(together, ListenDeadline(CONNECT_TIMEOUT))

    def end_leases_in_time(self) -> None:
        if self._gives_back:
            return
        with self._lease_lock:
            if not self._gives_back:
                # The next call tries again.
                with contextlib.suppress(RuntimeError):
                    background.start("leases", self._keep_giving_back)
                    self._gives_back = True

    def _keep_giving_back(self) -> None:
        while True:
            with self._lease_lock:
                # First, so that a concurrent lease starts another thread.
                self._gives_back = False
                pause = self.leases.pause(monotonic())
                if pause is None:
                    return
                self._gives_back = True
            time.sleep(pause)
            closings = self.closings
            with logged_errors():
                self._give_back()
            if self.closings != closings:
                self._servers.close()


def _connect(store: ref[RedisStore], closings: int) -> None:
    connecting = store()
    if connecting is None or connecting.closings != closings:
        return
    servers = connecting._servers  # noqa: SLF001 - the store's background thread
    with contextlib.suppress(StoreError):
        servers.connect()
    if connecting.closings != closings:
        servers.close()


def _check_is_outermost(use: _Use) -> None:
    if use.is_asking or background.is_background():
        raise StoreError(
            "a handler or finalizer called the store during another call of the same thread, expected calls outside of "
            "handlers",
            "timeout",
        )


_LOCK = threading.Lock
_PATCHES = {"gevent": "gevent.monkey.patch_all()", "eventlet": "eventlet.monkey_patch()"}


def check_patches() -> None:
    """Raise `ConfigError` if a library replaced threads, because a wait would then block the process."""
    lock = threading.Lock
    if lock is _LOCK:
        return
    library = str(getattr(lock, "__module__", "")).partition(".")[0]
    if library in _PATCHES:
        raise ConfigError(
            f"store: {library} has replaced threads after limitgate was imported, so a waiting request would block the whole "
            f"process, expected {_PATCHES[library]} before anything else is imported (with gunicorn: no --preload)"
        )
