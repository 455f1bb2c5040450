"""Slots that this process holds for requests in flight, and renews in time: see limitgate/algorithms/concurrency.py.

While anything is held there is a timer in each event loop that holds something, or a thread for all threads, and every `RENEW`
seconds it renews all that is held there, in calls that they share. It also releases slots that may be taken although the
store's reply was lost, and those whose holder has gone without a word.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from contextvars import Context
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from weakref import WeakSet, ref

from limitgate.algorithms import concurrency
from limitgate.errors import StoreError
from limitgate.gate.flow import Flow, arun, run
from limitgate.internal_errors import internal_error, logged_errors
from limitgate.limits.plan import Charge, Plan, Reading
from limitgate.limits.template import PlainSpend
from limitgate.process.clock import monotonic
from limitgate.process.forking import reset_in_children
from limitgate.stores.redis.aio.loop_end import begin
from limitgate.stores.redis.calls import calls_of

log = logging.getLogger("limitgate")

RENEW = 10.0
"""Seconds after which what is held is renewed: it outlasts two renewals that fail."""
AGAIN = 1.0
"""Seconds after which what has failed is tried again."""
SOON = 0.05
"""Seconds after which what was abandoned is given back, together with what else is by then."""
MANY_RELEASES = 100
"""Slots to be given back from which on they are given back `SOON`: thousands of requests may be cancelled in a second."""
MAX_RELEASES = 10_000
"""Slots that are given back later, at most; where there are more of them they end by themselves."""


Taken = Sequence[Charge] | PlainSpend
"""Charges that were made together, maybe with slots among them: of a plain plan no object is made unless it is asked for."""


class _Held(NamedTuple):
    taken: Taken
    holder: ref[object]
    """Plan that gives the slots back; gone where that was forgotten."""

    @property
    def charges(self) -> Sequence[Charge]:
        """The charges that took slots."""
        return _slots(self.taken)


class _Release(NamedTuple):
    charge: Charge
    """Gives the slot back."""
    until: float
    """End of the slot by itself, on the monotonic clock in seconds."""


class _Renewer:
    """Slots held in one event loop, or by all threads. Safe for threads."""

    def __init__(self, slot_keeper: SlotKeeper) -> None:
        self.slot_keeper = slot_keeper
        self.held: dict[int, _Held] = {}
        """By the names of the slots."""
        self.releases: dict[tuple[str, int], _Release] = {}
        """Slots that have yet to be given back, by bucket and name."""
        self.due_at: float | None = None
        """Time of the next `renewal`, on the monotonic clock in seconds; None while nothing is held."""
        self._has_failed = False
        """True if the store failed in the latest `renewal`, so that more haste is of no use."""

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do."""
        return not (self.held or self.releases)

    def hold(self, slot: int, taken: Taken, holder: object) -> None:
        """Renew slots of a name from now on."""
        self.held[slot] = _Held(taken, ref(holder))
        if self.due_at is None:
            self.schedule(RENEW)

    def let_go(self, slot: int) -> bool:
        """Renew a slot no longer. False if it is not held here."""
        return self.held.pop(slot, None) is not None

    def release_later(self, charges: Sequence[Charge]) -> None:
        """Schedule the release of slots that may be taken."""
        until = monotonic() + concurrency.HELD_US / 1e6
        for charge in charges:
            if len(self.releases) < MAX_RELEASES:
                self.releases[charge.key, charge.slot] = _Release(charge.released(), until)
        if charges:
            self._schedule_releases()

    def _schedule_releases(self) -> None:
        self.schedule(SOON if len(self.releases) >= MANY_RELEASES and not self._has_failed else AGAIN)

    def renewal(self) -> Flow[None]:
        """Renew all that is held, and give back what is to be given back. What fails is tried again soon."""
        for slot, held in self.held.copy().items():
            if held.holder() is None and self.let_go(slot):
                self.release_later(held.charges)
        renewed = self.held.copy()
        failed = yield from self._sending([charge.renewed() for held in renewed.values() for charge in held.charges])
        for slot, held in renewed.items():
            if slot not in self.held:  # a renewal may have come after it was given back
                self.release_later(held.charges)
        now = monotonic()
        for place, release in self.releases.copy().items():
            if release.until < now:
                self.releases.pop(place, None)
        failed |= yield from self._sending([release.charge for release in self.releases.copy().values()])
        self._has_failed = failed
        if self.releases:  # in an event loop, the timer of those that came meanwhile may have rung in vain
            self._schedule_releases()
        elif self.held:
            self.schedule(AGAIN if failed else RENEW)

    def ending(self) -> Flow[None]:
        """Give back all that is held, as nobody will renew it."""
        held = [self.held.pop(slot, None) for slot in list(self.held)]
        charges = [charge.released() for each in held if each is not None for charge in each.charges]
        yield from self._sending([*charges, *[release.charge for release in list(self.releases.values())]])

    def _sending(self, charges: Sequence[Charge]) -> Flow[bool]:
        """Send adjustments. True if some of them failed."""
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
        """Renew again soon: this time something happened that nobody foresaw."""
        internal_error(error)
        self.schedule(AGAIN)

    def hasten(self) -> None:
        """Have `renewal` run soon. Takes no lock: the garbage collector may call it, in the midst of anything."""
        raise NotImplementedError

    def schedule(self, seconds: float) -> None:
        """Have `renewal` run in so many seconds, or before."""
        at = monotonic() + seconds
        if self.due_at is None or at < self.due_at:
            self.due_at = at
            self._set_timer()

    def _set_timer(self) -> None:
        """Have `renewal` run at ``due_at``."""
        raise NotImplementedError


class _LoopRenewer(_Renewer):
    """Slots held in one event loop: a timer, which starts a task. It is the last one if nothing is held when it rings."""

    def __init__(self, slot_keeper: SlotKeeper, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(slot_keeper)
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.due_at is not None:
            left = max(0.0, self.due_at - monotonic())
            self._timer = asyncio.get_running_loop().call_later(left, self._on_timer, context=Context())

    def _on_timer(self) -> None:
        self._timer, self.due_at = None, None
        if not self.is_idle and (self._task is None or self._task.done()):
            self._task = begin(self._renew())

    async def _renew(self) -> None:
        try:
            await arun(self.slot_keeper.store, self.renewal())
        except Exception as error:  # noqa: BLE001 - what is held must go on being renewed
            self.renewal_failed(error)

    def hasten(self) -> None:
        """Have `renewal` run soon, see `_Renewer.hasten`."""
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self.schedule, SOON)


class _ThreadRenewer(_Renewer):
    """Slots held by threads: a thread of its own renews them, and ends when it finds that nothing is held any more."""

    def __init__(self, slot_keeper: SlotKeeper) -> None:
        super().__init__(slot_keeper)
        self._lock = threading.RLock()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        """Wakes the thread; a queue, as finalizers may put something into one."""
        self._runs = False

    def hasten(self) -> None:
        """Have `renewal` run soon, see `_Renewer.hasten`."""
        if self._runs:
            soon = monotonic() + SOON
            self.due_at = soon if self.due_at is None else min(soon, self.due_at)
            self._wakeups.put(None)

    def _set_timer(self) -> None:
        with self._lock:
            self._wakeups.put(None)
            if self._runs:
                return
            self._runs = True  # first: a finalizer may come here while the thread is being started
            try:
                threading.Thread(target=Context().run, args=[self._run], name="limitgate-slots", daemon=True).start()
            except RuntimeError:  # no thread can be started now: the next one who takes a slot tries again
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
        try:
            run(self.slot_keeper.store, self.renewal())
        except Exception as error:  # noqa: BLE001 - what is held must go on being renewed
            self.renewal_failed(error)

    def _is_time(self, left: float) -> bool:
        """Wait for so many seconds. False if it may be time earlier."""
        try:
            self._wakeups.get(timeout=left)
        except Empty:
            return True
        return False

    def _left(self) -> float | None:
        """Seconds until the next renewal; None if there is none, and then the thread is over."""
        with self._lock:
            while not self._wakeups.empty():
                self._wakeups.get()
            self._runs = False  # first: whoever interrupts this thread here starts another one
            if self.due_at is None:
                return None
            self._runs = True
            return max(0.0, self.due_at - monotonic())


class SlotKeeper:
    """Slots that this process holds in a store, an `AsyncStore` where an event loop runs, a `SyncStore` elsewhere.

    ``timeout`` is in seconds, for each call. Nothing is ever raised: what cannot be renewed or given back ends by itself.
    """

    def __init__(self, store: Any, timeout: float) -> None:
        self.store = store
        self.timeout = timeout
        self._serves_loops = hasattr(store, "aspend")
        self._lost = count()
        self.reset_after_fork()
        reset_in_children(self)
        _all.add(self)

    def reset_after_fork(self) -> None:
        """In the child of a fork: what is held is the parent's, and so are its threads."""
        self._in_threads = _ThreadRenewer(self)
        self._in_loops: dict[asyncio.AbstractEventLoop, _LoopRenewer] = {}
        """Loops may run in several threads: only what a dictionary does in one step is done with it."""

    def __len__(self) -> int:
        """Number of slots that are held."""
        return sum(len(renewer.held) for renewer in self._renewers())

    @property
    def held(self) -> list[Charge]:
        """Charges of the slots that are held."""
        return [charge for renewer in self._renewers() for held in list(renewer.held.values()) for charge in held.charges]

    def hold(self, taken: Taken, holder: object) -> None:
        """Renew the slots among charges that were taken together, until they are let go or ``holder`` is gone."""
        for slot in _names(taken):
            self._here().hold(slot, taken, holder)

    def release(self, taken: Taken) -> None:
        """Renew the slots among charges no longer: they are about to be given back."""
        here = self._here()
        for slot in _names(taken):
            if not here.let_go(slot):  # it was taken elsewhere
                for renewer in self._renewers():
                    renewer.let_go(slot)

    def abandon(self, charges: Sequence[Charge]) -> None:
        """Give slots back soon whose holder is gone, see `_Renewer.hasten`."""
        for charge in _slots(charges):
            for renewer in self._renewers():
                if charge.slot in renewer.held:
                    renewer.hasten()

    def release_later(self, taken: Taken) -> None:
        """Schedule the release of slots that may be taken, as the reply was lost, though nobody holds them."""
        if slots := _slots(taken):
            self._here().release_later(slots)

    def end(self) -> None:
        """Give back what threads hold: the process ends."""
        if hasattr(self.store, "spend"):
            with logged_errors():
                run(self.store, self._in_threads.ending())

    def note_lost(self) -> None:
        """A slot was not renewed in time, and is not to be had any more."""
        if next(self._lost) == 0:
            log.warning(
                "a request in flight has lost its place, as it was not renewed within %d s: more are in flight than the limit "
                "says; further ones are not told",
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
    """The charges that took slots."""
    charges = taken.charges if isinstance(taken, PlainSpend) else taken
    return [charge for charge in charges if charge.slot and charge.cost]


def _names(taken: Taken) -> Collection[int]:
    """The names of the slots."""
    return (taken.slot,) if type(taken) is PlainSpend else {charge.slot for charge in _slots(taken)}
