"""Waiting for a turn that was booked: in a thread, or on an event loop in a line of all who wait for turns of the same kind.

A request never passes before its turn by the store's clock, since the time counts from when the reply was heard. Whoever leaves
a line gives up its place, not its turn: those behind it move up, and what becomes free is the last turn of the line. No other
could be given back, as a bucket only knows when its last turn is.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from operator import attrgetter
from time import monotonic, sleep

from limitgate.gate.admission import Booking, Charged
from limitgate.limits.decision import is_booked
from limitgate.limits.plan import Plan

Place = asyncio.Future[Booking]
"""Somebody's place in a line; done when it is called, with a turn."""

SHORTEST = 0.001
"""Seconds of the shortest timer: no event loop has finer ones, and one that rings a bit early is set again."""


def booked(taken: tuple[Charged, ...], now: int, delay: float) -> tuple[tuple[Charged, ...], Booking]:
    """The turn that comes so many seconds after a store's clock, which has just been heard, and what else was taken."""
    turns = [_part(each, ahead=True) for each in taken]
    rest = [_part(each, ahead=False) for each in taken]
    turn = Booking(now + round(delay * 1_000_000), monotonic() + delay, tuple([part for part in turns if part.plan.charges]))
    return tuple([part for part in rest if part.plan.charges]), turn


def _part(taken: Charged, *, ahead: bool) -> Charged:
    """Of something that was taken, what was booked ahead, or what was not."""
    read = zip(taken.plan.charges, taken.reading.states, taken.reading.after)
    found = [each for each in read if is_booked(each[0], each[1]) is ahead]
    reading = taken.reading._replace(states=[states for _, states, _ in found], after=[then for _, _, then in found])
    return taken._replace(plan=Plan(tuple([charge for charge, _, _ in found])), reading=reading)


def sleep_until(turn: Booking) -> None:
    """Wait in this thread."""
    while (left := turn.at - monotonic()) > 0:
        sleep(left)


class WaitQueues:
    """The lines of a gate: one for all turns in the same buckets, at the same cost, that are waited for on one event loop."""

    def __init__(self) -> None:
        self._lines: dict[asyncio.AbstractEventLoop, dict[object, _Line]] = {}

    def __len__(self) -> int:
        """How many lines there are."""
        return sum(map(len, list(self._lines.values())))

    def join(self, turn: Booking) -> Place:
        """Wait on the running event loop."""
        loop, kind = asyncio.get_running_loop(), _kind(turn)
        lines = self._lines.get(loop)
        if lines is None:
            for ended in [each for each in list(self._lines) if each.is_closed()]:  # nobody there will ever leave
                self._lines.pop(ended, None)
            lines = self._lines[loop] = {}
        line = lines.get(kind)
        if line is None:
            line = lines[kind] = _Line()
        return line.join(turn)

    def leave(self, turn: Booking, place: Place) -> Booking:
        """Wait no more, having been called or not: the turn that was this request's, or that nobody needs any more."""
        loop, kind = place.get_loop(), _kind(turn)
        lines = self._lines.get(loop, {})
        line = lines.get(kind)
        if line is not None and place in line.waiting:
            given = line.leave(place)
        else:
            given = place.result() if place.done() and not place.cancelled() else turn  # its event loop has ended
        if line is not None and not line.waiting:
            del lines[kind]
            if not lines:
                self._lines.pop(loop, None)
        both = zip(turn.charged, given.charged)
        return given._replace(charged=tuple([mine._replace(plan=each.plan, reading=each.reading) for mine, each in both]))


class _Line:
    """Those who wait, and the turns for them: whoever came first has the first. There is one timer, for the first turn."""

    def __init__(self) -> None:
        self.waiting: dict[Place, None] = {}
        self._turns: list[Booking] = []
        self._timer: asyncio.TimerHandle | None = None

    def join(self, turn: Booking) -> Place:
        """Wait, too."""
        place: Place = asyncio.get_running_loop().create_future()
        self.waiting[place] = None
        insort(self._turns, turn, key=_due)
        if self._timer is None or self._turns[0] is turn:
            self._set_timer()
        return place

    def leave(self, place: Place) -> Booking:
        """Wait no more, before one was called."""
        del self.waiting[place]
        turn = self._turns.pop()
        self._set_timer()
        return turn

    def _set_timer(self) -> None:
        """Ring at the first turn."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = next((place.get_loop() for place in self.waiting), None)
        if loop is not None and not loop.is_closed():
            self._timer = loop.call_later(max(self._turns[0].at - monotonic(), SHORTEST), self._call)

    def _call(self) -> None:
        """Call everybody whose turn has come. Those who are about to leave are passed over."""
        self._timer = None
        staying = iter([place for place in self.waiting if not place.done()])
        now = monotonic()
        while self._turns and self._turns[0].at <= now:
            place = next(staying, None)
            if place is None:
                return  # who leaves sets the timer for whoever may have come
            del self.waiting[place]
            place.set_result(self._turns.pop(0))
        self._set_timer()


_due = attrgetter("due")


def _kind(turn: Booking) -> tuple[object, ...]:
    """What tells turns apart that cannot be exchanged."""
    charges = [(each.is_local, charge.key, charge.bucket, charge.cost) for each in turn.charged for charge in each.plan.charges]
    return tuple(charges)
