"""Renews and releases this process' slots, see limitgate/algorithms/concurrency.py.

Each event loop has a timer; all threads share one thread. Slots are released if their reply is lost or their holder is
garbage collected.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from weakref import WeakSet, ref

from limitgate.algorithms import concurrency
from limitgate.errors import StoreError
from limitgate.gate.flow import Flow, arun, run
from limitgate.internal_errors import internal_error, logged_errors
from limitgate.limits.plan import Charge, Plan, Reading
from limitgate.limits.template import PlainSpend, PlanTemplate
from limitgate.process import switch
from limitgate.process.background import daemon
from limitgate.process.clock import Timer, begin, call_later, monotonic
from limitgate.process.forking import reset_in_children
from limitgate.stores.base import calls_of

log: logging.Logger = logging.getLogger("limitgate")

RENEW = 10.0
"""Seconds between renewals; a slot survives two failures."""
AGAIN = 1.0
"""Seconds before a retry."""
SOON = 0.05
"""Seconds before abandoned slots are released."""
MANY_RELEASES = 100
"""This many releases start a batch early."""
MAX_RELEASES = 10_000
"""Maximum of queued releases. Slots beyond it expire."""


Taken = Sequence[Charge] | PlainSpend


class _Held(NamedTuple):
    slot: int
    taken: Sequence[Charge] | PlanTemplate
    """Charges or a template. A plan would keep the request alive."""
    keys: Sequence[str]
    holder: ref[object]

    @property
    def charges(self) -> Sequence[Charge]:
        taken = self.taken
        return _slots(taken.plan(self.keys, self.slot).charges if isinstance(taken, PlanTemplate) else taken)


class _Renewer:
    """Renews the slots of one event loop, or of all threads. Thread-safe."""

    def __init__(self, slot_keeper: SlotKeeper) -> None:
        self.slot_keeper = slot_keeper
        self.held: dict[int, _Held] = {}
        self.releases: dict[tuple[str, int], tuple[Charge, float]] = {}
        """Charge and expiry of each slot, in monotonic seconds."""
        self.due_at: float | None = None
        """Monotonic seconds; None if nothing is held."""
        self._has_failed = False

    @property
    def is_idle(self) -> bool:
        return not (self.held or self.releases)

    def hold(self, held: _Held) -> None:
        self.held[held.slot] = held
        if self.due_at is None:
            self.schedule(RENEW)

    def let_go(self, slot: int) -> bool:
        """Stop renewing a slot. Return False if this process doesn't hold it."""
        return self.held.pop(slot, None) is not None

    def release_later(self, charges: Sequence[Charge]) -> None:
        until = monotonic() + concurrency.HELD_US / 1e6
        for charge in charges:
            if len(self.releases) < MAX_RELEASES:
                self.releases[charge.key, charge.slot] = charge.released(), until
        if charges:
            self._schedule_releases()

    def _schedule_releases(self) -> None:
        self.schedule(SOON if len(self.releases) >= MANY_RELEASES and not self._has_failed else AGAIN)

    def renewal(self) -> Flow[None]:
        """Renew and release slots; retry failures soon."""
        for slot, held in self.held.copy().items():
            if held.holder() is None and self.let_go(slot):
                self.release_later(held.charges)
        renewed = self.held.copy()
        failed = yield from self._sending([charge.renewed() for held in renewed.values() for charge in held.charges])
        for slot, held in renewed.items():
            # The renewal may have taken the released slot again.
            if slot not in self.held:
                self.release_later(held.charges)
        now = monotonic()
        for place, (_, until) in self.releases.copy().items():
            if until < now:
                self.releases.pop(place, None)
        failed |= yield from self._sending([charge for charge, _ in self.releases.copy().values()])
        self._has_failed = failed
        # The timer may have fired during this renewal.
        if self.releases:
            self._schedule_releases()
        elif self.held:
            self.schedule(AGAIN if failed else RENEW)

    def ending(self) -> Flow[None]:
        held = [self.held.pop(slot, None) for slot in list(self.held)]
        charges = [charge.released() for each in held if each is not None for charge in each.charges]
        yield from self._sending([*charges, *[charge for charge, _ in list(self.releases.values())]])

    def _sending(self, charges: Sequence[Charge]) -> Flow[bool]:
        failed = False
        for together in calls_of([Plan.adjust([charge]) for charge in charges]):
            plan = Plan.adjust([charge for one in together for charge in one.charges])
            try:
                reading = yield plan, self.slot_keeper.timeout
            except StoreError:
                failed = True
            else:
                self._note(reading)
        return failed

    def _note(self, reading: Reading) -> None:
        for charge, [state], _ in reading.buckets:
            gives_back = charge.adjustment is not None and charge.adjustment.back[0] > 0
            if gives_back:
                self.releases.pop((charge.key, charge.slot), None)
            elif not state.places(charge.slot):
                self.slot_keeper.note_lost()

    def renewal_failed(self, error: Exception) -> None:
        internal_error(error)
        self.schedule(AGAIN)

    def hasten(self) -> None:
        """Renew soon. Takes no lock, because the garbage collector may call this."""
        raise NotImplementedError

    def schedule(self, seconds: float) -> None:
        at = monotonic() + seconds
        if self.due_at is None or at < self.due_at:
            self.due_at = at
            self._set_timer()

    def _set_timer(self) -> None:
        raise NotImplementedError


class _LoopRenewer(_Renewer):
    """Renews in tasks, by a timer."""

    def __init__(self, slot_keeper: SlotKeeper, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(slot_keeper)
        self._loop = loop
        self._timer: Timer | None = None
        self._task: asyncio.Task[None] | None = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.due_at is not None:
            left = max(0.0, self.due_at - monotonic())
            self._timer = call_later(self._loop, left, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self.due_at = None, None
        if not self.is_idle and (self._task is None or self._task.done()):
            self._task = begin(self._renew())

    async def _renew(self) -> None:
        try:
            await arun(self.slot_keeper.store, self.renewal())
        except Exception as error:  # noqa: BLE001 - renewals have to continue
            self.renewal_failed(error)

    def hasten(self) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.schedule, SOON)


class _ThreadRenewer(_Renewer):
    """Renews in a thread that ends when idle."""

    def __init__(self, slot_keeper: SlotKeeper) -> None:
        super().__init__(slot_keeper)
        self._lock = threading.RLock()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        """A `SimpleQueue`, because finalizers can put into it."""
        self._runs = False

    def hasten(self) -> None:
        if self._runs:
            soon = monotonic() + SOON
            self.due_at = soon if self.due_at is None else min(soon, self.due_at)
            self._wakeups.put(None)

    def _set_timer(self) -> None:
        with self._lock:
            self._wakeups.put(None)
            if self._runs:
                return
            # Set first: a finalizer may call this meanwhile.
            self._runs = True
            try:
                daemon("slots", self._run)
            # The next slot tries again.
            except RuntimeError:
                self._runs, self.due_at = False, None
            except BaseException:
                self._runs = False
                raise

    def _run(self) -> None:
        try:
            while (left := self._left()) is not None:
                if self._is_time(left):
                    self.due_at = None
                    self._renew()
        except BaseException:
            self._runs, self.due_at = False, None
            raise

    def _renew(self) -> None:
        store = self.slot_keeper.store
        if switch.stand_in is not None:
            # Under trio, it replaces a store without `spend`.
            store = switch.stand_in(store) or store
        try:
            run(store, self.renewal())
        except Exception as error:  # noqa: BLE001 - renewals have to continue
            self.renewal_failed(error)

    def _is_time(self, left: float) -> bool:
        try:
            self._wakeups.get(timeout=left)
        except Empty:
            return True
        return False

    def _left(self) -> float | None:
        with self._lock:
            while not self._wakeups.empty():
                self._wakeups.get()
            # Set first: after an interruption, the next caller starts a thread.
            self._runs = False
            if self.due_at is None:
                return None
            self._runs = True
            return max(0.0, self.due_at - monotonic())


class SlotKeeper:
    """``timeout`` is in seconds per call. Slots that can't be renewed or released expire."""

    def __init__(self, store: Any, timeout: float) -> None:
        self.store = store
        self.timeout = timeout
        self._serves_loops = hasattr(store, "aspend")
        self._lost = count()
        self.reset_after_fork()
        reset_in_children(self)
        _all.add(self)

    def reset_after_fork(self) -> None:
        self._in_threads = _ThreadRenewer(self)
        self._in_loops: dict[asyncio.AbstractEventLoop, _LoopRenewer] = {}
        """Shared by threads, so use only atomic operations."""

    def __len__(self) -> int:
        return sum(len(renewer.held) for renewer in self._renewers())

    @property
    def held(self) -> list[Charge]:
        return [charge for renewer in self._renewers() for held in list(renewer.held.values()) for charge in held.charges]

    def hold(self, taken: Taken, holder: object) -> None:
        """Renew until release, or until ``holder`` is collected."""
        if isinstance(taken, PlainSpend):
            self._here().hold(_Held(taken.slot, taken.template, taken.keys, ref(holder)))
            return
        for slot in _names(taken):
            self._here().hold(_Held(slot, taken, (), ref(holder)))

    def release(self, taken: Taken) -> None:
        here = self._here()
        for slot in _names(taken):
            # Taken in another thread or event loop.
            if not here.let_go(slot):
                for renewer in self._renewers():
                    renewer.let_go(slot)

    def abandon(self, charges: Sequence[Charge]) -> None:
        for charge in _slots(charges):
            for renewer in self._renewers():
                if charge.slot in renewer.held:
                    renewer.hasten()

    def release_later(self, taken: Taken) -> None:
        """Release slots the store may have taken."""
        if slots := _slots(taken):
            self._here().release_later(slots)

    def end(self) -> None:
        if hasattr(self.store, "spend"):
            with logged_errors():
                run(self.store, self._in_threads.ending())

    def note_lost(self) -> None:
        if next(self._lost) == 0:
            log.warning(
                "a request in flight lost its slot, which was not renewed within %d s, so more requests may be in "
                "flight than the limit allows; further cases are not logged",
                concurrency.HELD_US // 1_000_000,
            )

    def _renewers(self) -> list[_Renewer]:
        return [self._in_threads, *list(self._in_loops.values())]

    def _here(self) -> _Renewer:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._in_threads
        if not self._serves_loops:
            return self._in_threads
        renewer = self._in_loops.get(loop)
        if renewer is None:
            for ended in [each for each in list(self._in_loops) if each.is_closed()]:
                self._in_loops.pop(ended, None)
            renewer = self._in_loops[loop] = _LoopRenewer(self, loop)
        return renewer


_all: WeakSet[SlotKeeper] = WeakSet()


@atexit.register
def _end() -> None:
    for slot_keeper in list(_all):
        slot_keeper.end()


def _slots(taken: Taken) -> list[Charge]:
    charges = taken.charges if isinstance(taken, PlainSpend) else taken
    return [charge for charge in charges if charge.slot and charge.cost]


def _names(taken: Taken) -> Collection[int]:
    return (taken.slot,) if type(taken) is PlainSpend else {charge.slot for charge in _slots(taken)}
