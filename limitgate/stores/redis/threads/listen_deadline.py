"""Patience of a thread that waits for Redis, counted while it was there to listen.

A thread that waits for the GIL, or for a processor, hears nothing, so that time is nobody's silence. It waits in slices: what
the kernel has waited for in vain was Redis' time, however late the thread came back to know it, and an answer that came while
it was away is read all the same.
"""

from __future__ import annotations

from limitgate.process.clock import monotonic

SLICE = 0.0125
"""Seconds of a slice, at most."""
GRACE = 0.02
"""Seconds for reading on when patience is over: of several servers each gets a last look."""
SHORTEST = 0.001
"""Seconds of a slice at least: sockets would take none for not blocking."""

STARVED_TURNS = 40
"""How often a thread that others wait for may have to wait for the GIL: to connect, 5 to 25 times were measured."""
LATE_S = 0.004
"""Seconds by which a thread comes late that has waited for the GIL; others keep it for 5 ms."""


class ListenDeadline:
    """Seconds for which a call may wait; ``spent`` are those that others have waited before it."""

    __slots__ = ("left", "spent")

    def __init__(self, seconds: float, spent: float = 0.0) -> None:
        self.left = seconds
        self.spent = spent
        """Seconds waited in vain so far."""

    @property
    def is_over(self) -> bool:
        """True if nothing is left, nor was the shortest slice more of any use."""
        return self.left <= -SHORTEST

    @property
    def is_exhausted(self) -> bool:
        """True if what had arrived when it was over is read by now, so that what still comes is only trickling."""
        return self.left <= -GRACE

    def slice(self) -> float:
        """Seconds to wait next. Where nothing is left, the shortest: what has arrived by now is read."""
        return max(min(self.left, SLICE), SHORTEST)

    def waited_in_vain(self, seconds: float) -> None:
        """A slice is over, and nothing came."""
        self.left -= seconds
        self.spent += seconds

    def waited_since(self, began: float, slice_: float) -> None:
        """Something came in a slice that began at a time by `time.monotonic`; if it seems longer, this thread was away."""
        seconds = monotonic() - began
        if seconds <= slice_:
            self.left -= seconds


class WaitForThread:
    """A thread's wait for another one, which may be starved of the GIL as well and hears nothing then."""

    def __init__(self, listen_deadline: ListenDeadline) -> None:
        self.listen_deadline = listen_deadline
        self._turns = 0.0
        """How often the other one has waited for the GIL meanwhile, at most."""

    def waited_in_vain(self, slice_: float, elapsed: float) -> None:
        """A slice is over, which has taken ``elapsed`` seconds until this thread had the GIL again.

        The other one waits as long for each of its turns. What may have been nothing else is not counted, and after that only
        its share of the time.
        """
        late_s = elapsed - slice_
        if late_s > LATE_S and self._turns < STARVED_TURNS:
            self._turns += elapsed / late_s
        else:
            self.listen_deadline.waited_in_vain(slice_ * slice_ / elapsed if late_s > slice_ else slice_)
