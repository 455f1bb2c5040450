"""Redis for threads: which of them ask together, and which servers they ask."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Protocol, overload
from weakref import ref

from redis.connection import ConnectionPool

from limitgate.errors import StoreError
from limitgate.internal_errors import logged_errors
from limitgate.limits.plan import Plan, Reading
from limitgate.limits.template import AnyAnswer, AnyPlan, AnyReading, PlainSpend
from limitgate.process.clock import monotonic
from limitgate.process.forking import get_ready_for_forks
from limitgate.process.remaking import Remade
from limitgate.stores.base import ConfigRequest, StoredConfig
from limitgate.stores.redis import background
from limitgate.stores.redis.calls import MAX_BATCH, calls_of
from limitgate.stores.redis.dial.credentials import Credentials, GivesLogin
from limitgate.stores.redis.dial.dialer import CONNECT_TIMEOUT, Dialer
from limitgate.stores.redis.dial.url import scheme_of
from limitgate.stores.redis.leases import LONGEST
from limitgate.stores.redis.replies import Outcome, RedisStoreBase
from limitgate.stores.redis.threads.cluster import SyncCluster
from limitgate.stores.redis.threads.coalescer import CallCoalescer
from limitgate.stores.redis.threads.listen_deadline import ListenDeadline
from limitgate.stores.redis.threads.node import Node
from limitgate.stores.redis.threads.patches import check_patches


class SyncServers(Protocol):
    """One server or a cluster, as threads reach it."""

    def check(self, plan: AnyPlan) -> None:
        """Raise a `StoreError` if nobody is to wait for what a plan needs."""

    def exchange(self, plans: Sequence[AnyPlan], listen_deadline: ListenDeadline) -> list[Outcome]:
        """Carry out plans. Raises `StoreError` once ``listen_deadline`` is over."""

    def config(self, request: ConfigRequest, listen_deadline: ListenDeadline) -> StoredConfig:
        """Carry out a request for configuration. Raises `StoreError`, once ``listen_deadline`` is over at the latest."""

    def connect(self) -> None:
        """Connect, if there is no connection. Raises `StoreError`."""

    def close(self) -> None:
        """Close the connections that no thread is using."""


class _Use:
    """A thread's use of a store."""

    __slots__ = ("closes", "is_asking")

    def __init__(self) -> None:
        self.is_asking = self.closes = False
        """True in the midst of a call; True if to close the store afterwards."""


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.use = _Use()


class RedisStore(RedisStoreBase, Remade):
    """Buckets in Redis for threads: one round trip per request, shared by those that ask at the same time.

    ``url`` is ``redis://``, ``rediss://`` or ``unix://`` with redis-py's query options, or one with several servers, see
    limitgate/stores/redis/dial/url.py. Connects on first use. Callers that are refused are answered without asking until the
    moment they were promised; ``local_refusals=False`` asks every time.

    ``credentials`` is a callable that gives ``(user, password)``, or ``(user, password, seconds it is valid)``; the user may be
    None. It is asked for each new connection, and a connection is replaced before its login expires. The URL has no
    user and password then; Sentinels have theirs in the URL.

    A signal handler, a finalizer or a log handler may call a store in the midst of another call of the same thread. That raises
    `StoreError`: to wait would be for ever. `close` closes it when the other call ends.
    """

    measures_silence = takes_plain = True
    """Readings and errors say for how long Redis was silent while this process was there to listen."""

    def __init__(self, url: str, *, local_refusals: bool = True, credentials: GivesLogin | None = None) -> None:
        check_patches()
        super().__init__(local_refusals=local_refusals)
        self.scheme = scheme_of(url)
        logins = None if credentials is None else Credentials(credentials, may_await=False)
        self._dialer = Dialer(url, ConnectionPool, self.inspection, socket_timeout=CONNECT_TIMEOUT, credentials=logins)
        self._this_thread = _ThreadState()
        self._connects_in_children = False
        get_ready_for_forks(self)
        self._begin()

    def _begin(self) -> None:
        self._connecting: threading.Thread | None = None
        self._servers: SyncServers = SyncCluster(self._dialer, self) if self._dialer.nodes else Node(self._dialer.dial, self)
        self._calls = CallCoalescer(self._servers.exchange, MAX_BATCH)
        self._lease_lock = threading.RLock()
        self._gives_back = False

    def reset_after_fork(self) -> None:
        """Leave the parent's connections to the parent, and its threads' calls."""
        super().reset_after_fork()
        self._this_thread = _ThreadState()
        self._begin()
        if self._connects_in_children:
            self.connect_soon()

    def before_fork(self) -> None:
        """Wait for a moment until nothing connects in the background: locks that it holds would stay locked in the child."""
        if self._connecting is not None and self._connecting is not threading.current_thread():
            self._connecting.join(CONNECT_TIMEOUT)

    def connect_soon(self, *, in_children: bool = False) -> None:
        """Connect in a thread of its own, or ``in_children``: in each process that is forked from this one, and not here."""
        self._connects_in_children = in_children
        if not in_children:
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
        """Carry out ``plan`` in one round trip at most. Raises `StoreError` within about ``timeout`` seconds."""
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
                self.listen_deadline = timeout
                self._servers.check(plan)
                reading = self._calls.spend(plan, timeout)
            return reading
        finally:
            use.is_asking = False
            if use.closes:
                self.close()

    def config(self, request: ConfigRequest, timeout: float) -> StoredConfig:
        """Carry out ``request`` in one round trip. Raises `StoreError` within about ``timeout`` seconds."""
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
        """Give back what was taken in advance, and close the connections: those that a call uses or waits for when it ends."""
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
        """Give back what was taken in advance."""
        if self.leases:
            self._give_back(age=0)

    def _give_back(self, age: float = LONGEST) -> None:
        """Give back leases of an age, in seconds, or above. Those that Redis does not hear of drain there."""
        plans = self.leases.ended(monotonic(), age)
        with contextlib.suppress(StoreError):
            for together in calls_of(plans):
                self._servers.exchange(together, ListenDeadline(CONNECT_TIMEOUT))

    def end_leases_in_time(self) -> None:
        """Start the thread that gives back what is left of leases when they end, unless it runs already."""
        if self._gives_back:
            return
        with self._lease_lock:
            if not self._gives_back:
                with contextlib.suppress(RuntimeError):  # no thread can be started now: the next call tries again
                    background.start("leases", self._keep_giving_back)
                    self._gives_back = True

    def _keep_giving_back(self) -> None:
        while True:
            with self._lease_lock:
                self._gives_back = False  # first, so that a lease that comes now starts another thread
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
    """Connect a store, unless it is gone or was closed. Its failure was told, if no waiting cures it."""
    connecting = store()
    if connecting is None or connecting.closings != closings:
        return
    servers = connecting._servers  # noqa: SLF001 - a thread of the store's own
    with contextlib.suppress(StoreError):
        servers.connect()
    if connecting.closings != closings:
        servers.close()


def _check_is_outermost(use: _Use) -> None:
    """Raise `StoreError` in the midst of another call of this thread, or in a thread that works for the store."""
    if use.is_asking or background.this_thread.is_background:
        raise StoreError("a call of this thread was interrupted by one to the same store, expected it from outside", "timeout")
