"""Threads that sleep until their turns, which move up after refunds ahead."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

from limitgate.gate.admission import Turn
from limitgate.gate.turns import lowered, moved_up
from limitgate.limits.returned import Returned
from limitgate.process import waiting


class Sleeper:
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
