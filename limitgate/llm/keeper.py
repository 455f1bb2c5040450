"""Renews the holds of requests under way, and reports them to other processes.

Each event loop has a keeper; all threads share one. Its timer or thread runs only during requests, so that it never calls a
closed store.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol
from uuid import uuid4
from weakref import WeakKeyDictionary, ref

from limitgate.errors import ConfigError, StoreError
from limitgate.internal_errors import logged_errors
from limitgate.limiter.budget_texts import LEAST_S, Report, Row, Said, listing, reporting
from limitgate.limiter.calls import carry_out
from limitgate.limiter.limiter import AsyncLimiter, Limiter
from limitgate.limits.limit import Limit
from limitgate.llm.windows import Windows
from limitgate.messages.text import masked
from limitgate.outbound.throttle import Flow, begin_to_finish, run
from limitgate.process import waiting
from limitgate.process.background import daemon
from limitgate.process.clock import call_later
from limitgate.process.forking import reset_in_children

MOST_KEYS = 1_000
"""The least recently used one is dropped."""
MOST_REPORTS = 50
"""Reports per second."""
SELDOM_S = 10.0
"""Seconds between reports about short requests."""
_LONGEST_S = 1.0
"""Maximum of seconds between checks."""
_LOOKS = 10
"""Idle checks until a thread ends."""
_MOST_TENANTS = 10


class UnderWay(Protocol):
    key: str
    name: str | None
    """None if the key may be secret."""
    tenant: str
    is_waiting: bool
    windows: Windows
    reserved: Sequence[int]
    renew_at: float
    """Time by `waiting.monotonic`."""

    def renewing(self) -> Flow:
        """Renew the hold. If the store fails, try again soon."""


class _Known:
    def __init__(self) -> None:
        self.row = Row()
        self.limits: list[tuple[str, Limit]] = []
        self.next_at = -1.0
        """Next report; negative before the first one."""
        self.said: tuple[Said, ...] = ()
        """The provider's limits since the last report."""


class Keeper:
    """The keeper of one event loop, or of all threads."""

    def __init__(self, limiter: AsyncLimiter | Limiter, loop: asyncio.AbstractEventLoop | None) -> None:
        self._limiter = ref(limiter)
        self._loop = None if loop is None else ref(loop)
        self._interval = _LONGEST_S
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        self._process = uuid4().hex[:12]
        self._under_way: dict[str, dict[int, ref[UnderWay]]] = {}
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_timed = False

    def enter(self, request: UnderWay, hold: float | None) -> None:
        """Watch a request until it leaves or is garbage-collected."""
        number, key = id(request), request.key
        reference = ref(request, lambda _: self._forget(key, number))
        if hold is not None:
            self._interval = min(self._interval, hold / 8)
        with self._lock:
            self._under_way.setdefault(key, {})[number] = reference
            if self._loop is not None:
                self._set_timer()
            elif self._thread is None:
                # Without a thread, holds are not renewed.
                with suppress(RuntimeError):
                    self._thread = daemon("budgets", self._watch)

    def leave(self, request: UnderWay) -> None:
        self._forget(request.key, id(request))

    def _forget(self, key: str, number: int) -> None:
        """Takes no lock, because the garbage collector may call this."""
        requests = self._under_way.get(key)
        if requests is not None:
            requests.pop(number, None)

    def say(self, key: str, said: Iterable[Said]) -> None:
        self._of(key).said = tuple(said)

    def reporting(self, request: UnderWay) -> Flow:
        """Report a request: at once for a new key or the last request, otherwise later."""
        known = self._of(request.key)
        now = waiting.monotonic()
        is_over = not self._requests(request.key) and (known.row.held or known.row.waiting)
        if known.next_at < 0 or is_over or now > known.next_at + SELDOM_S:
            yield from self._reporting(request.key, request, now)

    def looking(self) -> Flow:
        """Renew holds and report requests that are due. Failures are soon repeated."""
        now = waiting.monotonic()
        reports = 0
        for key in list(self._under_way):
            requests = self._requests(key)
            for request in requests:
                if request.renew_at <= now:
                    yield from request.renewing()
            known = self._of(key)
            if requests and now >= known.next_at and reports < MOST_REPORTS:
                reports += 1
                yield from self._reporting(key, requests[0], now)

    def _reporting(self, key: str, request: UnderWay, now: float) -> Flow:
        """A failure never affects a request."""
        with logged_errors(), suppress(StoreError, ConfigError):
            yield from self._keeping_report(key, request, now)

    def _keeping_report(self, key: str, request: UnderWay, now: float) -> Flow:
        known, limiter = self._of(key), self._limiter()
        limits = request.windows.with_kinds()
        if limiter is None or not limits:
            return
        is_new, said = known.next_at < 0, known.said
        name = masked(key) if request.name is None else request.name
        report = Report(name, request.name is not None, limits, self._row(key, len(limits)), said)
        # Set before the store answers, so that no other report is due.
        known.next_at, known.row = now + LEAST_S, report.row
        wait = yield carry_out(limiter, reporting(limiter, key, self._process, report))
        known.next_at = now + wait
        if known.said is said:
            known.said = ()
        if is_new:
            yield carry_out(limiter, listing(limiter, key, report))

    def _row(self, key: str, limits: int) -> Row:
        requests = self._requests(key)
        held = [request.reserved for request in requests if not request.is_waiting]
        waits = Counter([request.tenant for request in requests if request.is_waiting])
        tenants = {masked(tenant): many for tenant, many in waits.most_common(_MOST_TENANTS) if tenant}
        reserved = [sum(costs) for costs in zip(*held)] or [0] * limits
        return Row(waiting=waits.total(), held=len(held), reserved=reserved, tenants=tenants)

    def _requests(self, key: str) -> list[UnderWay]:
        found = [reference() for reference in list(self._under_way.get(key, {}).values())]
        return [request for request in found if request is not None]

    def _of(self, key: str) -> _Known:
        with self._lock:
            known = self._known.setdefault(key, _Known())
            self._known.move_to_end(key)
            if len(self._known) > MOST_KEYS:
                self._known.popitem(last=False)
            return known

    def _is_idle(self) -> bool:
        with self._lock:
            self._under_way = {key: requests for key, requests in self._under_way.items() if requests}
            return not self._under_way

    def _set_timer(self) -> None:
        loop = None if self._loop is None else self._loop()
        if loop is not None and not self._is_timed:
            self._is_timed = True
            call_later(loop, self._interval, self._begin_to_look)

    def _begin_to_look(self) -> None:
        with logged_errors():
            begin_to_finish(self.looking()).add_done_callback(self._go_on)

    def _go_on(self, looked: asyncio.Future[Any]) -> None:
        self._is_timed = False
        with logged_errors():
            if not looked.cancelled():
                looked.result()
        if not self._is_idle():
            self._set_timer()

    def _watch(self) -> None:
        pause, idle = threading.Event(), 0
        while True:
            pause.wait(self._interval)
            with logged_errors():
                run(self.looking())
            idle = idle + 1 if self._is_idle() else 0
            with self._lock:
                if idle >= _LOOKS and not any(self._under_way.values()):
                    self._thread = None
                    return


_keepers: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Keeper]] = WeakKeyDictionary()


def keeper_of(limiter: AsyncLimiter | Limiter) -> Keeper:
    """The keeper of the running event loop, or of all threads."""
    loop = asyncio.get_running_loop() if isinstance(limiter, AsyncLimiter) else None
    keepers = _keepers.setdefault(limiter, WeakKeyDictionary())
    place = limiter if loop is None else loop
    keeper = keepers.get(place)
    # Two threads may create one at the same time.
    return keepers.setdefault(place, Keeper(limiter, loop)) if keeper is None else keeper
