"""Deadline of a thread that counts only listening time.

A thread that waits for the GIL or a processor receives no replies, so that time must not count. It waits in slices: a slice
counts only if the kernel waited for all of it, and a reply that arrived meanwhile is still read.
"""

from __future__ import annotations

from limitgate.process.clock import monotonic

SLICE = 0.0125
"""Maximum seconds of a slice."""
GRACE = 0.02
"""Extra seconds to read after the deadline, for each of several servers."""
SHORTEST = 0.001
"""Minimum seconds of a slice."""

STARVED_TURNS = 40
"""Allowed GIL waits of the other thread; connecting needs 5 to 25."""
LATE_S = 0.004
"""A thread this late has waited for the GIL, which others hold for 5 ms."""


class ListenDeadline:
    """Remaining and spent seconds of a wait."""

    __slots__ = ("left", "spent")

    def __init__(self, seconds: float, spent: float = 0.0) -> None:
        self.left = seconds
        self.spent = spent

    @property
    def is_over(self) -> bool:
        """True if the time, including a last short slice, is used up."""
        return self.left <= -SHORTEST

    @property
    def is_exhausted(self) -> bool:
        """True if all data of before the deadline has been read."""
        return self.left <= -GRACE

    def slice(self) -> float:
        """Seconds of the next slice."""
        return max(min(self.left, SLICE), SHORTEST)

    def waited_in_vain(self, seconds: float) -> None:
        """Count a slice without a reply."""
        self.left -= seconds
        self.spent += seconds

    def waited_since(self, began: float, slice_: float) -> None:
        """Count a slice that ended with data, unless this thread was away. ``began`` is `time.monotonic`."""
        seconds = monotonic() - began
        if seconds <= slice_:
            self.left -= seconds


class WaitForThread:
    """Wait for another thread, which may wait for the GIL as well."""

    def __init__(self, listen_deadline: ListenDeadline) -> None:
        self.listen_deadline = listen_deadline
        self._turns = 0.0

    def waited_in_vain(self, slice_: float, elapsed: float) -> None:
        """Count a slice of ``elapsed`` seconds without progress.

        The other thread also waits for the GIL, so the first `STARVED_TURNS` waits do not count, and later ones only in part.
        """
        late_s = elapsed - slice_
        if late_s > LATE_S and self._turns < STARVED_TURNS:
            self._turns += elapsed / late_s
        else:
            self.listen_deadline.waited_in_vain(slice_ * slice_ / elapsed if late_s > slice_ else slice_)
