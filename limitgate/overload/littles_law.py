"""The limit by Little's law: requests in flight = rate x duration. Pure.

With completions at rate X and unloaded duration R0, B = X R0 requests are in flight without a queue. Each may queue for
d = max((tolerance - 1) R0, delay):

    L = B + X d + 1

The 1 makes equal processes converge to equal shares of a bottleneck. The limit moves only after a refusal, or if the requests
in flight reach it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from limitgate.overload.options import Adaptive

SPARE = 1.0
SMOOTHED_S = (0.3, 3.0)
"""Bounds of the time constant of averages. The constant is twice the largest R0."""
DOWN = 0.4
"""Share of a fall that a window makes. Rises are immediate."""
FAILED_SHARE = 0.1
"""Share of failures that cuts the limit to `AFTER_FAILURES`."""
AFTER_FAILURES = 0.9
MUCH_FASTER = 0.85
"""If requests in a dip take less than this share of the baseline before it, another dip follows."""
CUT = 0.7
"""Factor of a cut. If the queue is local, a cut makes requests faster."""
SLOW = 1.1
"""Requests are slow above this factor of the allowed duration."""
STILL_SLOW = 0.85
"""After a cut, requests are still slow above this share of the previous duration."""
RAISE_EVERY_S = 30.0
"""Minimum of seconds between rises of baselines after cuts."""
QUEUE_FORMS_S = 3.0
"""For this many seconds after a rise, the limit follows the duration."""


@dataclass(slots=True, frozen=True)
class Window:
    span_s: float
    count: int = 0
    seconds: float = 0.0
    base_s: float = 0.0
    """Total duration without load."""
    untaught_s: float = 0.0
    """Duration of other requests, each capped at its unloaded duration."""
    failed: int = 0
    has_refused: bool = False
    """True if a request was refused, for lack of room or for lag."""
    is_full: bool = False
    most_in_flight: int = 0
    longest_base_s: float = 0.0


class LittlesLaw:
    def __init__(self, options: Adaptive) -> None:
        self.options: Adaptive = options
        self.value: float = float(options.start)
        self.rate: float | None = None
        """Completions per second, X."""
        self.base_in_flight: float = 0.0
        """Requests in flight without a queue, B."""
        self.pressed_since: float | None = None
        self.wants_dip: bool = False
        """True if the last dip found much faster requests."""
        self._slow: tuple[float, float] | None = None
        """Limit and duration when requests became slow."""
        self._cut_at: float | None = None
        self._raised_at = -math.inf

    @property
    def whole(self) -> int:
        return int(self.value + 0.5)

    @property
    def base_s(self) -> float:
        return self.base_in_flight / self.rate if self.rate else 0.0

    @property
    def goal(self) -> float:
        rate = self.rate or 0.0
        extra = max((self.options.tolerance - 1) * self.base_in_flight, self.options.delay * rate)
        return self.base_in_flight + extra + SPARE

    def is_slow(self, took_s: float, base_s: float) -> bool:
        """True if requests take longer than the allowed queue explains."""
        return took_s > SLOW * (base_s + self.options.allowed_queue_s(base_s))

    def reconfigure(self, options: Adaptive) -> None:
        self.options = options
        self._move_to(self.value)

    def rest(self) -> None:
        self.pressed_since, self.wants_dip, self._slow = None, False, None

    def rebase(self, took_s: float, before_s: float, after_s: float) -> None:
        """Learn from a dip: its duration, and the baselines before and after it, in seconds."""
        self.wants_dip = took_s < MUCH_FASTER * before_s
        # Only downwards, so that the next dip is deep enough; a higher value may come from a queue, and windows will show it.
        if after_s < before_s:
            self.base_in_flight *= after_s / before_s

    def update(self, window: Window, now: float) -> bool:
        """Learn from an ended window. Return True if its durations may raise a baseline, because there was no local queue."""
        if window.failed > FAILED_SHARE * (window.count + window.failed):
            self._move_to(AFTER_FAILURES * self.value)
        if window.count:
            self._average(window)
        if not self._is_pressed(window):
            self.rest()
            return False
        if self.pressed_since is None:
            self.pressed_since = now
        return bool(window.count) and self._follow(window, now)

    def _average(self, window: Window) -> None:
        rate, in_flight = window.count / window.span_s, (window.base_s + window.untaught_s) / window.span_s
        if self.rate is None:
            self.rate, self.base_in_flight = rate, in_flight
        least, most = SMOOTHED_S
        weight = 1 - math.exp(-window.span_s / min(most, max(least, 2 * window.longest_base_s)))
        self.rate += weight * (rate - self.rate)
        self.base_in_flight += weight * (in_flight - self.base_in_flight)

    def _is_pressed(self, window: Window) -> bool:
        if window.has_refused or window.is_full or not window.count:
            return window.has_refused or window.is_full
        base_s = window.base_s / window.count
        is_late = window.seconds / window.count > base_s + self.options.allowed_queue_s(base_s)
        return is_late and window.most_in_flight > self.goal

    def _follow(self, window: Window, now: float) -> bool:
        goal, took_s, base_s = self.goal, window.seconds / window.count, window.base_s / window.count
        queue_s = self.options.allowed_queue_s(base_s)
        if took_s < base_s + queue_s / 2:
            self.wants_dip = False
            if window.is_full:
                self._move_to(max(self.value, min(max(goal, 1.1 * self.value + 1), 2 * self.value)))
        elif window.is_full or goal < window.most_in_flight:
            if now - self._raised_at < QUEUE_FORMS_S:
                goal = max(goal, self.value * (base_s + queue_s) / took_s + SPARE / 2)
            self._move_to(self.value + (DOWN if goal < self.value else 1) * (goal - self.value))
        if not self.is_slow(took_s, base_s):
            self.wants_dip, self._slow = False, None
            return False
        return self._is_not_ours(took_s, now)

    def _is_not_ours(self, took_s: float, now: float) -> bool:
        """True if a lower limit didn't help, so requests are slow elsewhere."""
        if self._slow is None:
            self._slow, self._cut_at = (self.value, took_s), None
            return False
        limit, slow_s = self._slow
        if self.value > max(self.options.min + 0.5, CUT * limit):
            return False
        if self._cut_at is None:
            self._cut_at = now
        if now - self._cut_at <= 1.5 * took_s:
            return False
        self._slow = None
        if took_s <= STILL_SLOW * slow_s or now - self._raised_at < RAISE_EVERY_S:
            return False
        self._raised_at = now
        return True

    def _move_to(self, value: float) -> None:
        self.value = min(float(self.options.max), max(float(self.options.min), value))
