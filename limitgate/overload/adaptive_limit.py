"""`AdaptiveLimit` admits requests under a learned limit. Pure.

A request costs a comparison and a few additions; the rest is computed once per window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from fractions import Fraction
from typing import Literal, NamedTuple, Protocol

from limitgate.limits.bucket import NORMAL, RESERVES, Priority
from limitgate.overload.baseline import FIRST, LEAST, PRESSED_S, Baseline, Baselines, Dip, Schedule
from limitgate.overload.littles_law import LittlesLaw, Window
from limitgate.overload.options import Adaptive
from limitgate.overload.shedding import PriorityLevel, RecentShare, Refusal, Thinning, WaitingLine, retry_after_s

Outcome = Literal["ok", "failed", "untaught"]
"""``ok``: its duration is a sample. ``failed``: timeout, disconnect or 503. ``untaught``: not a sample, such as a stream, HEAD,
304, or an error before the handler.
"""

WINDOW_S = 0.1
WINDOW_REQUESTS = 25
"""Requests in a window, unless `WINDOW_MOST_S` is over: with fewer requests, noise looks like a queue."""
WINDOW_MOST_S = 1.0
IDLE_S = 1.0
"""A window is discarded after this many seconds without a request."""
TICK_S = 0.1
STUCK_S = 60.0
STUCK_BASES = 10
"""If no request ends for `STUCK_S` or this many R0 while others are refused, all requests in flight count as lost. Otherwise,
stuck work could block the process.
"""
SMALL_LIMIT = 16
"""At limits up to this one, fast requests (less than half of ``delay``) cause no dips, because errors of R0 are harmless."""


class Guard(Protocol):
    def refuses(self, now: float, share: float = 1.0) -> bool:
        """See `limitgate.overload.lag.LagGuard.refuses`."""


class Permit:
    # Without an `__init__`, which would take as long as the rest of `begin`.
    __slots__ = ("began", "came", "client", "era", "priority", "request_class")
    came: float
    """Time when a waiting request got its permit."""
    began: float | None
    """None while the request waits, and after its end."""
    request_class: Hashable
    client: Hashable
    priority: Priority
    era: object

    @property
    def waits(self) -> bool:
        return self.began is None

    @property
    def waited_s(self) -> float:
        """Seconds; 0 before the permit and after its end."""
        return 0.0 if self.began is None else self.began - self.came


class Served(NamedTuple):
    called: list[Permit]
    gave_way: list[Permit]


class AdaptiveLimit:
    """Limit on requests in flight, learned from their durations. Not thread-safe.

    ``now`` is monotonic seconds, which ``wall_offset`` converts to Unix time. ``reserve`` is for higher priorities, and
    ``max_delay`` is the longest wait in seconds.
    """

    # At most 29 attributes: Python 3.11 keeps more of them in a dictionary, which is slower.

    def __init__(
        self,
        options: Adaptive,
        *,
        wall_offset: Callable[[], float],
        reserve: Fraction | None = None,
        max_delay: float = 0.0,
    ) -> None:
        self.in_flight: int = 0
        """Number of requests in flight, without lost ones."""
        self.limit: int = options.start
        """The limit outside of dips."""
        self.levels: Mapping[Priority, PriorityLevel] = {priority: PriorityLevel(priority) for priority in RESERVES}
        """By priority, highest first."""
        self._baselines = Baselines()
        self._law = LittlesLaw(options)
        self._wall_offset = wall_offset
        self._schedule = Schedule()
        self._dip: Dip | None = None
        self._recent = RecentShare()
        self._line: WaitingLine[Permit] | None = None
        self._displaced: list[Permit] = []
        self._idle: dict[Permit, float] = {}
        """Requests that wait for their clients, and the time when they lose their permits."""
        self._idle_due = math.inf
        """Lower bound of the times in `_idle`."""
        self._top = 0
        self._due = self._last_done = self._moved_at = -math.inf
        self._era = object()
        """Replaced when all requests count as lost. Permits of an earlier era end without effect."""
        self._open_window(0.0)
        self.reconfigure(options, reserve=reserve, max_delay=max_delay)

    @property
    def waiting(self) -> int:
        return 0 if self._line is None else len(self._line)

    @property
    def rate(self) -> float:
        return self._law.rate or 0.0

    @property
    def base_s(self) -> float:
        return self._law.base_s

    @property
    def base_s_by_class(self) -> Mapping[Hashable, float]:
        return self._baselines.by_class()

    def reconfigure(self, options: Adaptive, *, reserve: Fraction | None = None, max_delay: float = 0.0) -> None:
        self._law.reconfigure(options)
        self._has_reserve = reserve is not None
        for level in self.levels.values():
            level.keep(reserve)
        if self._line is None and max_delay:
            self._line = WaitingLine(max_delay)
        # Refuse waiting requests if the new options allow no wait.
        elif self._line is not None:
            self._line.max_delay = max_delay
        self._restart_thinning()
        self._make_room()
        self._pace_line()

    def begin(
        self, now: float, request_class: Hashable, priority: Priority = NORMAL, guard: Guard | None = None
    ) -> Permit | Refusal:
        """Begin a request, or return why it is refused. A permit may have to wait, see `serve`.

        Requests of one ``request_class``, such as a route, take about equally long. ``guard`` belongs to the event loop, if
        any.
        """
        if now >= self._due:
            self._tick(now)
        level = self.levels[priority]
        in_flight = self.in_flight
        if in_flight >= level.free:
            if (without := self._without_place(now, request_class, level)) is not None:
                return without
            in_flight = self.in_flight  # Idle requests may have released permits.
        if guard is not None and guard.refuses(now, level.budget):
            level.lag += 1
            self._has_refused = True
            return "lag"
        level.admitted += 1  # Inlined `_let_in`, whose call would cost a tenth of this method.
        self.in_flight = in_flight = in_flight + 1
        if in_flight > self._top:  # noqa: PLR1730 - max() costs 50 ns more for each request
            self._top = in_flight
        permit = Permit()
        permit.began = now
        permit.request_class = request_class
        permit.client = None
        permit.priority = priority
        permit.era = self._era
        return permit

    def done(self, permit: Permit, now: float, outcome: Outcome = "ok") -> None:
        """End a request or its wait. Idempotent. Streams end without a sample when recognized."""
        began = permit.began
        if began is None:
            self._leave(permit)
            return
        permit.began = None
        self._last_done = now
        if permit.era is not self._era:
            return
        self.in_flight -= 1
        took_s = now - began
        if outcome != "ok" or took_s < 0:  # The clock may go back.
            self._note_end(permit, took_s, now, outcome)
            return
        request_class = self._baselines.classes.get(permit.request_class)
        if request_class is None:
            request_class = self._baselines.open(permit.request_class, now)
        baseline = request_class.sampled(permit.client)
        if baseline.known < FIRST:
            baseline.begin_with(took_s)
        if self._dip is not None:
            self._done_in_dip(self._dip, began, baseline, now)
            return
        if baseline.count:
            baseline.count += 1
            baseline.seconds += took_s
        else:
            self._baselines.note(baseline, took_s)
        self._ended += 1
        if now >= self._earliest and (self._ended >= WINDOW_REQUESTS or now >= self._latest):
            self._close_window(now)

    def idle(self, permit: Permit, until: float) -> None:
        """Note that a request waits for its client. From ``until`` on, it has no permit. Thread-safe."""
        self._idle[permit] = until
        self._idle_due = min(self._idle_due, until)

    def busy(self, permit: Permit, idle_s: float) -> None:
        """End the wait for the client, which doesn't count as work."""
        if self._idle.pop(permit, None) is not None and permit.began is not None:
            permit.began += idle_s

    def resume(self, permit: Permit, now: float) -> None:
        """Continue a request that lost its permit, even beyond the limit."""
        self._occupy()
        permit.began, permit.era = now, self._era

    def serve(self, now: float) -> Served:
        """Return waiting requests that begin now, and those that waited too long.

        With a ``max_delay``, call this when a request ends or starts to wait, and at `due_at`.
        """
        if self._line is None:
            return Served([], [])
        if now >= self._due:
            self._tick(now)
        self._take_from_idle(now)
        gave_way, self._displaced = [*self._displaced, *self._line.overdue(now)], []
        for permit in gave_way:
            self.levels[permit.priority].limit += 1
        called = []
        for level in self.levels.values():
            while self.in_flight < level.room and (called_ticket := self._line.call(now, level.priority)) is not None:
                self._let_in(level)
                called_ticket.began, called_ticket.era = now, self._era
                called.append(called_ticket)
        return Served(called, gave_way)

    def due_at(self, now: float) -> float:
        """Return when `serve` is due; infinite without waiting requests."""
        if not self._line:
            return now if self._displaced else math.inf
        return now if self._displaced else min(self._line.due_at(now), self._idle_due)

    def retry_after_s(self, random: Callable[[], float]) -> int:
        """Return randomized whole seconds, which grow with the refusals. ``random`` is in [0, 1)."""
        return retry_after_s(self._recent.of(*self._totals()), random)

    def _note_end(self, permit: Permit, took_s: float, now: float, outcome: Outcome) -> None:
        if took_s < 0:
            return
        if self._dip is not None:
            self._go_on_with_dip(self._dip, now)
            return
        if outcome == "failed":
            self._failed += 1
            self._failed_by[permit.client] = self._failed_by.get(permit.client, 0) + 1
            self._ended += 1
        else:
            self._untaught_s += min(took_s, self._baselines.mean_s(permit.request_class, permit.client))
        if now >= self._earliest and (self._ended >= WINDOW_REQUESTS or now >= self._latest):
            self._close_window(now)

    def _without_place(self, now: float, request_class: Hashable, level: PriorityLevel) -> Permit | Refusal | None:
        if level.kept < 1 and not level.passes_thinning():
            level.thinned += 1
            return "thinned"
        self._take_from_idle(now)
        if self.in_flight >= level.room or (self._line is not None and self._line.is_before(level.priority)):
            return self._wait_or_refuse(now, request_class, level)
        return None

    def _wait_or_refuse(self, now: float, request_class: Hashable, level: PriorityLevel) -> Permit | Refusal:
        self._has_refused = self._has_no_room = True
        # Without a `max_delay`, only requests from before a reconfiguration wait.
        if self._line is not None and self._line.max_delay:
            permit = Permit()
            permit.came, permit.began = now, None
            permit.request_class, permit.client, permit.priority = request_class, None, level.priority
            permit.era = self._era
            displaced = self._line.join(now, permit, level.priority)
            if displaced is not permit:
                self._displaced += [] if displaced is None else [displaced]
                return permit
        level.limit += 1
        return "limit"

    def _let_in(self, level: PriorityLevel) -> None:
        level.admitted += 1
        self._occupy()

    def _occupy(self) -> None:
        self.in_flight += 1
        self._top = max(self._top, self.in_flight)

    def _take_from_idle(self, now: float) -> None:
        if now < self._idle_due:
            return
        self._idle_due = math.inf
        for permit, until in list(self._idle.items()):
            if until > now:
                self._idle_due = min(self._idle_due, until)
            elif self._idle.pop(permit, None) is not None:
                self.done(permit, now, "untaught")

    def _leave(self, permit: Permit) -> None:
        if self._line is not None:
            self._line.leave(permit, permit.priority)
            self._displaced = [each for each in self._displaced if each is not permit]

    def _totals(self) -> tuple[int, int]:
        # Unrolled, because every refusal calls this, and a loop takes twice as long.
        high, normal, low = self.levels.values()
        shed = high.limit + high.lag + high.thinned + normal.limit + normal.lag + normal.thinned
        shed += low.limit + low.lag + low.thinned
        admitted = high.admitted + normal.admitted + low.admitted
        return shed + admitted, shed

    def _open_window(self, now: float) -> None:
        self._opened, self._earliest, self._latest = now, now + WINDOW_S, now + WINDOW_MOST_S
        self._ended = self._failed = 0
        self._failed_by: dict[Hashable, int] = {}
        self._top = 0
        self._untaught_s = 0.0
        self._has_refused = self._has_no_room = False
        self._baselines.forget_window()

    def _close_window(self, now: float) -> None:
        seen, law = self._baselines.seen, self._law
        count = sum([each.count for each in seen])
        seconds, base_s = sum([each.seconds for each in seen]), sum([each.base_s for each in seen])
        if count and law.is_slow(seconds / count, base_s / count):
            for each in seen:
                each.rise_again(now)
            base_s = sum([each.base_s for each in seen])
        window = Window(
            span_s=now - self._opened,
            count=count,
            seconds=seconds,
            base_s=base_s,
            untaught_s=self._untaught_s,
            failed=self._failed_of_many(),
            has_refused=self._has_refused,
            is_full=self._has_no_room or self._top >= law.whole,
            most_in_flight=self._top,
            longest_base_s=max([each.mean_s for each in seen], default=0.0),
        )
        is_quiet = law.pressed_since is None
        if law.update(window, now):
            for each in seen:
                each.learn(now)
        elif is_quiet:
            for each in seen:
                each.learn_quietly(now)
        self._open_window(now)
        self._make_room()
        self._pace_line()

    def _failed_of_many(self) -> int:
        """Return the failed requests. Among many clients, the one with the most failures doesn't count."""
        most = max([number for client, number in self._failed_by.items() if client is not None], default=0)
        return self._failed - most if most and self._baselines.have_many_clients else self._failed

    def _make_room(self) -> None:
        self.limit = self._law.whole
        limit = self.limit if self._dip is None else min(self.limit, self._dip.limit)
        for level in self.levels.values():
            level.make_room(limit)
        self._open_levels()

    def _pace_line(self) -> None:
        if self._line is not None and self.rate:
            self._line.place_s = 1 / self.rate

    def _tick(self, now: float) -> None:
        self._due = now + TICK_S
        if self._idle:
            self._idle_due = now  # Another thread may have added a time in the meantime.
            self._take_from_idle(now)
        self._recent.note(now, *self._totals())
        if not self.in_flight and now - self._last_done > IDLE_S:
            self._rest(now)
        if not self._has_no_room or self._last_done >= self._moved_at:
            self._moved_at = now
        elif now - self._moved_at >= STUCK_S and now - self._moved_at >= STUCK_BASES * (self._baselines.longest_s or math.inf):
            self._give_up(now)
        if self._dip is not None:
            if self._dip.is_over(now):
                self._end_dip(self._dip, now)
        elif self._may_dip(now):
            wall = now + self._wall_offset()
            wait_s = self._schedule.wait_s(wall, wants_dip=self._law.wants_dip)
            self._due = min(self._due, now + wait_s)
            if not wait_s:
                self._begin_dip(now, is_shared=self._schedule.begin(wall))
        if self._has_reserve:
            self._thinning.step()
            self._thin()

    def _give_up(self, now: float) -> None:
        """Declare all requests in flight lost. They are no samples."""
        self.in_flight = 0
        self._era = object()
        self._moved_at = now
        self._rest(now)

    def _rest(self, now: float) -> None:
        """After idle time, keep the learned limit and forget the pressure."""
        self._law.rest()
        self._dip = None
        self._restart_thinning()
        self._open_window(now)
        self._make_room()

    def _restart_thinning(self) -> None:
        self._thinning = Thinning(self.levels)
        self._thin()

    def _thin(self) -> None:
        for priority, level in self.levels.items():
            level.kept = self._thinning.kept(priority)
        self._open_levels()

    def _open_levels(self) -> None:
        """Open the fast path for priorities that aren't thinned, if no request waits."""
        for level in self.levels.values():
            level.free = level.room if level.kept == 1 and self._line is None else 0

    def _may_dip(self, now: float) -> bool:
        law = self._law
        if law.pressed_since is None or now - law.pressed_since < PRESSED_S:
            return False
        return law.value > SMALL_LIMIT or law.base_s >= law.options.delay / 2

    def _begin_dip(self, now: float, *, is_shared: bool) -> None:
        law = self._law
        self._baselines.forget_window()
        self._earliest = -math.inf  # The next completed request may end it.
        self._dip = Dip(now, law.base_in_flight, law.base_s, law.value, is_shared=is_shared)
        self._dip.note_in_flight(self.in_flight, now)
        self._make_room()

    def _done_in_dip(self, dip: Dip, began: float, baseline: Baseline, now: float) -> None:
        if began >= dip.clean_at:
            dip.count += 1
            self._baselines.note(baseline, now - began)
        self._go_on_with_dip(dip, now)

    def _go_on_with_dip(self, dip: Dip, now: float) -> None:
        dip.note_in_flight(self.in_flight, now)
        if dip.is_over(now):
            self._end_dip(dip, now)

    def _end_dip(self, dip: Dip, now: float) -> None:
        seen = self._baselines.seen
        if dip.count >= LEAST:
            before_s = sum([each.base_s for each in seen])
            for each in seen:
                if dip.is_shared or each.seconds < each.base_s:
                    each.learn(now)
            self._law.rebase(sum([each.seconds for each in seen]), before_s, sum([each.base_s for each in seen]))
        self._dip = None
        self._open_window(now)
        self._make_room()
