"""Booked or unsettled charges of a limiter, which earlier charges' refunds change."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from threading import Event, RLock
from typing import Protocol

from limitgate.gate.admission import Receipt, Turn
from limitgate.gate.turns import WaitQueues, lowered, moved_up
from limitgate.limits.plan import Returned
from limitgate.process import waiting
from limitgate.process.forking import reset_in_children


class Sleeper:
    """A thread that sleeps until its turn. Refunds of earlier charges move the turn up."""

    def __init__(self, turn: Turn) -> None:
        self.turn: Turn = turn
        self._is_done = False
        self._wake = Event()

    def sleep(self) -> None:
        while (left := self.turn.due_at - waiting.monotonic()) > 0:
            waiting.sleep(left, self._wake)
            self._wake.clear()

    def move_up(self, returned: Sequence[Returned]) -> None:
        turn = self.turn
        self.turn = moved_up(turn, tuple([lowered(each, returned) for each in turn.charged]))
        if self.turn is not turn:
            self._wake.set()

    def done(self) -> bool:
        return self._is_done

    def leave(self) -> None:
        self._is_done = True


class Sleepers:
    """A limiter's sleepers. Methods run under the lock of `Bookings`."""

    def __init__(self) -> None:
        self._asleep: dict[int, Sleeper] = {}

    def __len__(self) -> int:
        return len(self._asleep)

    def join(self, turn: Turn) -> Sleeper:
        sleeper = Sleeper(turn)
        self._asleep[id(sleeper)] = sleeper
        return sleeper

    def leave(self, sleeper: Sleeper) -> Turn:
        sleeper.leave()
        self._asleep.pop(id(sleeper), None)
        return sleeper.turn

    def move_up(self, returned: Sequence[Returned]) -> None:
        """Move up turns behind refunded charges."""
        for sleeper in list(self._asleep.values()):
            sleeper.move_up(returned)


_RECENT = 256
"""Number of refunds to keep for bookings whose replies are in flight."""


class Unsettled(Protocol):
    keys: frozenset[str]

    def lower(self, returned: Sequence[Returned]) -> None:
        """Note refunds of earlier charges."""


class Bookings:
    """Reports refunds to waiting and unsettled charges: turns move up, and later refunds stay exact."""

    def __init__(self, queues: WaitQueues | Sleepers) -> None:
        self.queues = queues
        self.reset_after_fork()
        reset_in_children(self)
        self._unsettled: dict[str, dict[int, weakref.ref[Unsettled]]] = {}
        """Charges by bucket key and object id. References are weak, because some charges are never settled."""
        self._recent: deque[tuple[int, Returned]] = deque(maxlen=_RECENT)

    def reset_after_fork(self) -> None:
        self.lock: RLock = RLock()
        """Held so that a new turn gets each refund exactly once."""

    def __len__(self) -> int:
        return len({number for known in list(self._unsettled.values()) for number in list(known)})

    def add(self, charge: Unsettled) -> None:
        number, keys = id(charge), charge.keys
        reference = weakref.ref(charge, lambda _: self._forget(number, keys))
        for key in keys:
            self._unsettled.setdefault(key, {})[number] = reference

    def remove(self, charge: Unsettled) -> None:
        self._forget(id(charge), charge.keys)

    def _forget(self, number: int, keys: Iterable[str]) -> None:
        """Takes no lock, because the garbage collector may call this."""
        for key in keys:
            known = self._unsettled.get(key)
            if known is not None:
                known.pop(number, None)
                if not known:
                    self._unsettled.pop(key, None)

    def note(self, returned: Sequence[Returned], now: int) -> None:
        if returned:
            with self.lock:
                self._note(returned, now)

    def _note(self, returned: Sequence[Returned], now: int) -> None:
        self._recent.extend([(now, each) for each in returned])
        told = {number: reference for each in returned for number, reference in list(self._unsettled.get(each.key, {}).items())}
        for reference in told.values():
            charge = reference()
            if charge is not None:
                charge.lower(returned)
        self.queues.move_up(returned)

    def caught_up(self, receipts: tuple[Receipt, ...]) -> tuple[Receipt, ...]:
        """Adjust receipts for refunds that were noted while the reply was in flight."""
        return tuple([lowered(each, self._since(each.reading.now)) for each in receipts])

    def _since(self, now: int) -> list[Returned]:
        since = []
        for noted, each in reversed(list(self._recent)):
            if noted <= now:
                break
            since.append(each)
        return since

    def caught_up_turn(self, turn: Turn) -> Turn:
        return moved_up(turn, self.caught_up(turn.charged))
