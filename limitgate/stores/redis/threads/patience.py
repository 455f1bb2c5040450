"""Patience of a thread that waits for Redis, counted while it was there to listen.

A thread that waits for the GIL, or for a processor, hears nothing, so that time is nobody's silence. It waits in slices: what
the kernel has waited for in vain was Redis' time, however late the thread came back to know it, and an answer that came while
it was away is read all the same.
"""

from __future__ import annotations

from time import monotonic

SLICE = 0.0125
"""Seconds of a slice, at most."""
GRACE = 0.02
"""Seconds for reading on when patience is over: of several servers each gets a last look."""
SHORTEST = 0.001
"""Seconds of a slice at least: sockets would take none for not blocking."""


class Patience:
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
