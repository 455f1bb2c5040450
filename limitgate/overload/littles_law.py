"""The limit by Little's law: in flight = rate x time. Pure.

With completions at rate X, of requests that take R0 on an idle server, B = X R0 are in flight where nothing queues. The limit
is what is in flight if each may queue for d = max((tolerance - 1) R0, delay):

    L = B + X d + 1

The one more is why equal processes on one bottleneck come to equal shares: it is more to those that have less.
It moves only while pressed, when somebody was refused or the limit was reached: an idle service teaches nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from limitgate.overload.options import Adaptive

SPARE = 1.0
"""Requests beyond B and its queue."""
SMOOTHED_S = (0.3, 3.0)
"""Least and largest time constant of the moving averages of X and B; in between it is twice the largest R0."""
DOWN = 0.4
"""Part of the way that a limit falls within a window. Up it goes all the way."""
FAILED_SHARE = 0.1
"""Share of failed requests in a window above which the limit is cut to `AFTER_FAILURES`."""
AFTER_FAILURES = 0.9
MUCH_FASTER = 0.85
"""Share of the baseline below which requests in a dip were so fast that another dip soon tells more."""
CUT = 0.7
"""How far a limit has to fall for requests to get faster, if a queue of ours makes them slow."""
SLOW = 1.1
"""Times of what requests may take, the queue that is allowed included, above which they are slow."""
STILL_SLOW = 0.85
"""Requests that take more than this share of what they took before the cut have not got faster."""
RAISE_EVERY_S = 30.0
"""Seconds between two times that baselines are raised for it."""
QUEUE_FORMS_S = 3.0
"""Seconds after that in which the limit follows the time that requests take."""


@dataclass(slots=True, frozen=True)
class Window:
    """Requests of a window of time."""

    span_s: float
    count: int = 0
    """Requests that count as samples."""
    seconds: float = 0.0
    """Seconds that they took in all."""
    base_s: float = 0.0
    """Seconds that they would have taken on an idle server."""
    untaught_s: float = 0.0
    """Seconds that other requests, of which nothing is learned, were in flight, at most as long as on an idle server."""
    failed: int = 0
    has_refused: bool = False
    """True if any were refused for want of room or because the event loop was late."""
    is_full: bool = False
    """True if the limit was reached."""
    most_in_flight: int = 0
    longest_base_s: float = 0.0
    """The largest R0 of any class."""


class LittlesLaw:
    """The limit, and what it follows from."""

    def __init__(self, options: Adaptive) -> None:
        self.options = options
        self.value = float(options.start)
        """The limit, L."""
        self.rate: float | None = None
        """Completions per second, X; None while nothing is known."""
        self.base_in_flight = 0.0
        """Requests that would be in flight without a queue, B."""
        self.pressed_since: float | None = None
        self.wants_dip = False
        """True if the last dip found requests much faster, so that another one soon will tell more."""
        self._slow: tuple[float, float] | None = None
        """The limit and the seconds that requests took when they became slow."""
        self._cut_at: float | None = None
        self._raised_at = -math.inf

    @property
    def whole(self) -> int:
        """The limit in whole requests, within ``min`` and ``max``."""
        return int(self.value + 0.5)

    @property
    def base_s(self) -> float:
        """Mean R0 of the requests that come, in seconds."""
        return self.base_in_flight / self.rate if self.rate else 0.0

    @property
    def goal(self) -> float:
        """The limit that Little's law gives."""
        rate = self.rate or 0.0
        extra = max((self.options.tolerance - 1) * self.base_in_flight, self.options.delay * rate)
        return self.base_in_flight + extra + SPARE

    def is_slow(self, took_s: float, base_s: float) -> bool:
        """True if requests take longer than the limit allows them to wait."""
        return took_s > SLOW * (base_s + self.options.allowed_queue_s(base_s))

    def reconfigure(self, options: Adaptive) -> None:
        """Go on under other options, with everything that is known."""
        self.options = options
        self._move_to(self.value)

    def rest(self) -> None:
        """Note that nobody came for a while: nothing presses any more, and the rest stays."""
        self.pressed_since, self.wants_dip, self._slow = None, False, None

    def rebase(self, took_s: float, before_s: float, after_s: float) -> None:
        """Learn from a dip: seconds that its requests took, and would have taken by the baselines before and after."""
        self.wants_dip = took_s < MUCH_FASTER * before_s
        if after_s < before_s:  # so that the next dip is deep enough; upwards it may be some queue, and windows will tell
            self.base_in_flight *= after_s / before_s

    def update(self, window: Window, now: float) -> bool:
        """Learn from a window that ends now. True if its requests took their time without a queue of ours, as a baseline."""
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
        """True if the limit was cut and requests did not get faster for it: they do not queue here, but are slow elsewhere."""
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
