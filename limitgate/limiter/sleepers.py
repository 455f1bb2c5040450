"""Threads that sleep until their turns, which move up when a charge ahead of them is given back."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

from limitgate.gate.admission import Turn
from limitgate.gate.turns import lowered, moved_up
from limitgate.limits.returned import Returned
from limitgate.process import waiting


class Sleeper:
    """A thread that waits for its turn."""

    def __init__(self, turn: Turn) -> None:
        self.turn: Turn = turn
        self._is_done = False
        self._wake = Event()

    def sleep(self) -> None:
        """Sleep until the turn comes."""
        while (left := self.turn.due_at - waiting.monotonic()) > 0:
            waiting.sleep(left, self._wake)
            self._wake.clear()

    def move_up(self, returned: Sequence[Returned]) -> None:
        """Take an earlier turn if this one is behind a refunded charge."""
        turn = self.turn
        self.turn = moved_up(turn, tuple([lowered(each, returned) for each in turn.charged]))
        if self.turn is not turn:
            self._wake.set()

    def done(self) -> bool:
        """Return True when the turn has come, or was given up."""
        return self._is_done

    def leave(self) -> None:
        """Note that the turn has come, or is given up."""
        self._is_done = True


class Sleepers:
    """The sleeping threads of a limiter. Its methods run under the lock of `Bookings`."""

    def __init__(self) -> None:
        self._asleep: dict[int, Sleeper] = {}

    def __len__(self) -> int:
        return len(self._asleep)

    def join(self, turn: Turn) -> Sleeper:
        """Return a sleeper for this thread."""
        sleeper = Sleeper(turn)
        self._asleep[id(sleeper)] = sleeper
        return sleeper

    def leave(self, sleeper: Sleeper) -> Turn:
        """Return the turn that has come, or is given up."""
        sleeper.leave()
        self._asleep.pop(id(sleeper), None)
        return sleeper.turn

    def move_up(self, returned: Sequence[Returned]) -> None:
        """Move the turns up that are behind refunded charges."""
        for sleeper in list(self._asleep.values()):
            sleeper.move_up(returned)
