"""The cost of one request under a budget: an estimate, then the reported usage. Flows.

The flows yield results of a limiter, or awaitables, as in `limitgate.outbound.throttle`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

from limitgate.algorithms.line import State
from limitgate.errors import StoreError
from limitgate.limiter.budget_texts import Said
from limitgate.limiter.holding import NotHeldError
from limitgate.limiter.limiter import AsyncLimiter
from limitgate.limiter.lining import Place
from limitgate.limits.decision import Decision
from limitgate.llm.estimate import Percentile
from limitgate.llm.fair_share import FairLine
from limitgate.llm.keeper import Keeper, keeper_of
from limitgate.llm.provider_fields import ROUNDING, Told, told
from limitgate.llm.told_limits import ToldLimits
from limitgate.llm.usage import Reader, Usage, bounded, usage_in
from limitgate.llm.windows import Windows
from limitgate.observing.budget_counts import BudgetCounts
from limitgate.observing.instruments import Settlement
from limitgate.outbound.response_fields import Answer, Field
from limitgate.outbound.throttle import Flow, afinish, arun, banned_for, run
from limitgate.process import waiting

_NOTHING = Usage(0, 0)
_NOBODY = State()
_POLL = 0.25
"""Seconds between attempts."""
_STAYS = 5.0
"""The line drops a request after this many seconds without an attempt."""
_EARLIER = 60.0
"""Seconds by which a turn may come early."""
_SHORTEST = 0.001
REFUSED = 429
_MINUTE = 60
_log = logging.getLogger("limitgate.outbound")


_LEAST_INPUT, _LEAST_OUTPUT = 100, 1_000
"""Usage is plausible up to a hundred times these, because short estimates are rough."""


class Expected(NamedTuple):
    usage: Usage
    has_maximum: bool
    """True if the request limits its output."""
    is_partial: bool
    """True if the estimate may be too low."""

    def bounded(self, usage: Usage) -> Usage:
        return bounded(usage, *self._bounds)

    @property
    def _bounds(self) -> tuple[int | None, int]:
        into = None if self.is_partial else max(self.usage.input, _LEAST_INPUT)
        return into, self.usage.output if self.has_maximum else max(self.usage.output, _LEAST_OUTPUT)


class Spending:
    def __init__(
        self,
        key: str,
        expected: Expected,
        windows: Windows,
        answers: Percentile,
        *,
        name: str | None,
        host: str,
        hold: float | None,
        told_limits: ToldLimits | None,
        share: tuple[FairLine, str],
        counts: Callable[[Any], BudgetCounts],
    ) -> None:
        self.key = key
        self.name = name
        """None if the key may be secret."""
        self._host = host
        self.expected = expected
        self.windows: Windows = windows
        self._answers = answers
        self._hold = hold
        self._told_limits = told_limits
        self.tenant: str
        self._line, self.tenant = share
        self._counts_of = counts
        self.is_sent: bool = False
        """True if the provider may have received the request."""
        self._limiter: Any = None
        self.reservation: Any = None
        self.decision: Decision
        """Set by `taking`."""
        self._said: Told | None = None
        self._is_open = False
        self.is_waiting: bool = False
        self.renews = False
        self.renew_at: float = math.inf
        """Time by `waiting.monotonic`."""
        self.reserved: Sequence[int] = ()
        self._keeper: Keeper | None = None

    def taking(self, limiter: Any, timeout: float | None) -> Flow:
        """Reserve within ``timeout`` seconds, and refund earlier reservations. If it is interrupted, run `giving_back`."""
        yield from self.giving_back()
        self._limiter, self.is_sent = limiter, False
        deadline = math.inf if timeout is None else waiting.monotonic() + timeout
        line, tenant = self._line, self.tenant
        is_alone = not line
        counts = self._counts
        self._keeper = keeper = keeper_of(limiter)
        ticket = line.join(tenant, self.expected.usage.input + self.expected.usage.output)
        self.is_waiting = True
        keeper.enter(self, self._hold if self.renews else None)
        counts.wait(1)
        try:
            wait = line.await_ if self._is_async else line.wait
            is_called = yield wait(ticket, timeout)
            decision = yield from self._reserving() if is_alone or not is_called else self._in_line(tenant, deadline)
            if is_alone and is_called and not decision.allowed and self._pause(decision, deadline):
                decision = yield from self._in_line(tenant, deadline)
        finally:
            line.leave(ticket, is_taken=self._is_open)
            counts.wait(-1)
            self.is_waiting = False
            if not self._is_open:
                keeper.leave(self)
        if not decision.allowed:
            counts.refused("budget")
        elif self._is_open:
            counts.reserved(self.expected.usage[:2])
        yield from keeper.reporting(self)
        return decision

    @property
    def _counts(self) -> BudgetCounts:
        return self._counts_of(self._limiter)

    def _in_line(self, tenant: str, deadline: float) -> Flow:
        """Wait in the line of all processes, which determines the order. The limits determine whether there is room."""
        place = Place(self._limiter, self.key, tenant, self.expected.usage[:2], _STAYS)
        try:
            while True:
                ahead = yield place.join()
                pause = yield from self._later(ahead, deadline)
                if not pause:
                    decision = yield from self._reserving(ahead)
                    pause = self._pause(decision, deadline)
                if not pause:
                    break
                if self._is_async:
                    yield waiting.asleep(pause)
                else:
                    waiting.sleep(pause)
            yield self._finish(self._leaving(place))
        except GeneratorExit:
            raise
        except BaseException:
            yield self._finish(self._leaving(place, gives_back=True))
            raise
        return decision

    def _later(self, ahead: State, deadline: float) -> Flow:
        """Return the seconds until the next attempt if requests ahead need all room, otherwise 0."""
        longer = self.windows.takes_longer(self.expected.usage, ahead)
        if not longer:
            return 0.0
        wait = (yield self._limiter.peek(self.key, *self.windows.costed(self.expected.usage))).retry_after + longer
        left = deadline - waiting.monotonic()
        return 0.0 if left <= 0 or wait > left + _EARLIER else min(wait, _POLL, left)

    def _leaving(self, place: Place, *, gives_back: bool = False) -> Flow:
        is_taken = self._is_open and not gives_back
        if gives_back:
            yield from self.giving_back()
        # Otherwise the ticket leaves by itself.
        with suppress(StoreError):
            yield place.leave(is_taken=is_taken)

    def _finish(self, flow: Flow) -> Any:
        return afinish(flow) if self._is_async else run(flow)

    def _pause(self, decision: Decision, deadline: float) -> float:
        """Return the seconds until the next attempt; 0 for no further one.

        Turns may come early, because requests refund excess estimates.
        """
        left = deadline - waiting.monotonic()
        wait = decision.retry_after
        if decision.allowed or left <= 0 or wait > left + (0 if banned_for(decision) else _EARLIER):
            return 0.0
        return max(_SHORTEST, min(wait, _POLL, left))

    @property
    def _is_async(self) -> bool:
        return isinstance(self._limiter, AsyncLimiter)

    def _reserving(self, ahead: State = _NOBODY) -> Flow:
        if self._told_limits is not None:
            self.windows = yield from self._told_limits.read(self._limiter, self.key)
        limits = self.windows.costed(self.expected.usage, ahead)
        if not limits:
            self.decision = yield self._limiter.banned(self.key)
            return self.decision
        is_held = self._hold is not None
        try:
            self.reservation = yield self._limiter.reserve(self.key, *limits, hold=self._hold)
        except NotHeldError:
            # If the process dies, the estimate drains.
            is_held = False
            self.reservation = yield self._limiter.reserve(self.key, *limits)
        self.decision = self.reservation.decision
        self._is_open = self.decision.allowed
        self.reserved = [cost for _, cost in limits]
        self.renew_at = self._due(0.5) if is_held else math.inf
        return self.decision

    def _due(self, share: float) -> float:
        return waiting.monotonic() + self._hold * share if self.renews and self._hold else math.inf

    def giving_back(self) -> Flow:
        """Refund everything. If the store fails, the hold still ends in time."""
        if self._is_open:
            self._close()
            with suppress(StoreError):
                yield self.reservation.cancel()
            yield from self._reporting()

    def _close(self) -> None:
        self._is_open = False
        if self._keeper is not None:
            self._keeper.leave(self)

    def renewing(self) -> Flow:
        """Renew the hold of a request that takes long; return True if it is held. If the store fails, try again soon."""
        self.renew_at = self._due(0.125)
        is_held = False
        # Another thread may settle it meanwhile, which raises RuntimeError.
        with suppress(StoreError, RuntimeError):
            if self._is_open and self._hold is not None:
                is_held = yield self.reservation.renew()
                self.renew_at = self._due(0.5) if is_held else math.inf
        return is_held

    def hear(self, answer: Answer, field: Field) -> Answer:
        """Return ``answer`` with the waits of the provider's own fields, which take precedence."""
        said = self._said = told(answer.status, field, time.time(), self._host)
        if answer.refused:
            self._counts.refused("provider")
        retry_after = answer.retry_after if said.retry_after is None else said.retry_after
        # A refusal contradicts windows that all have tokens left.
        is_silent = said.exhausted is None and (answer.refused or not said.windows)
        return Answer(answer.status, retry_after, answer.exhausted if is_silent else said.exhausted)

    @property
    def may_retry(self) -> bool:
        return self._said is None or self._said.may_retry is not False

    @property
    def is_answered(self) -> bool:
        return self._said is not None and self._said.status < 400

    def settling_read(self, reader: Reader) -> Flow:
        """Settle by the usage that a reader found, at the end of the response."""
        reported = reader.finish()
        usage = self.expected.bounded(reader.settle(self.expected.usage.input))
        yield from self.settling(usage, "arrived" if reported is None else "reported")

    def settling_unknown(self) -> Flow:
        yield from self.settling(Usage(self.expected.usage.input, 0), "arrived")

    def settling_nothing(self) -> Flow:
        yield from self.settling(_NOTHING, "nothing")

    def settling(self, usage: Usage, how: Settlement = "reported") -> Flow:
        if not self._is_open:
            return
        self._close()
        if how == "reported" and not usage.is_capped:
            # For the estimates of later requests.
            self._answers.add(usage.output)
        if usage.is_capped:
            _log.warning(
                "%.260r reported implausible usage, which was reduced to %d input and %d output tokens",
                self.key,
                usage.input,
                usage.output,
            )
        costs = self.windows.costs(usage)
        try:
            yield self.reservation.settle(costs[0] if len(costs) == 1 else costs)
        except StoreError as error:
            how = "failed"
            _log.warning("the tokens of a request to %.260r could not be settled: %s", self.key, error)
        self._counts.settled(how, self.expected.usage[:2], usage[:2])
        yield from self._reporting()

    def _reporting(self) -> Flow:
        if self._keeper is not None:
            yield from self._keeper.reporting(self)

    def learning(self) -> Flow:
        """Adopt limits that the provider reports. Logs store errors."""
        said = self._said
        if said is None or not (said.windows or said.status == REFUSED):
            return
        if self._keeper is not None:
            self._keeper.say(
                self.key, [Said(each.kind, each.period, each.limit, each.remaining, each.reset_after) for each in said.windows]
            )
        try:
            if self._told_limits is not None:
                yield from self._told_limits.hear(self._limiter, self.key, said)
            if self._is_open and self._lower(said):
                yield from self._drawing(said)
            if self._is_open and said.status == REFUSED:
                yield from self._emptying(said)
        except StoreError as error:
            _log.warning("the limits that %.260r reported could not be stored: %s", self.key, error)

    def _drawing(self, said: Told) -> Flow:
        """Charge the usage of other programs, so that no more remains than the provider reports.

        A process that then finds less remaining than reported, because others charged the same tokens, refunds the difference.
        """
        limits = self.windows.every()
        now = (yield self._limiter.peek(self.key, *[(limit, 0) for limit in limits], cost=0)).windows
        theirs = dict(self._lower(said))
        over = {place: now[place].remaining - left for place, left in theirs.items() if now[place].remaining > left}
        if not over:
            return
        decision = yield self._limiter.hit(
            self.key, *[(limit, over.get(place, 0)) for place, limit in enumerate(limits)], cost=0
        )
        if not decision.allowed:
            return
        back = {place: min(many, theirs[place] - decision.windows[place].remaining) for place, many in over.items()}
        if any(many > 0 for many in back.values()):
            given = [(limit, max(0, back.get(place, 0))) for place, limit in enumerate(limits)]
            yield self._limiter.refund(self.key, *given, cost=0)

    def _emptying(self, said: Told) -> Flow:
        """Empty the buckets that may have caused a refusal. The bucket starts to fill when the pause ends.

        This is needed if the provider doesn't use buckets, or other programs share the account.
        """
        limits, costs = self.windows.every(), self.windows.costs(self.expected.usage)
        windows = (yield self._limiter.peek(self.key, *[(limit, 0) for limit in limits], cost=0)).windows
        over = []
        for kind, limit, cost, window in zip(self.windows.kinds(), limits, costs, windows):
            known = [each.remaining for each in said.windows if each.kind == kind and each.period in (None, limit.period)]
            left = [many for many in known if many is not None]
            is_suspect = min(left) < cost if left else limit.period <= _MINUTE
            empty_at = min(said.retry_after or 0.0, limit.period) + limit.burst * limit.period / max(1, limit.count)
            missing = math.ceil((empty_at - window.reset_after) * limit.count / limit.period)
            # Its own tokens will be given back.
            own = 0 if kind == "requests" else cost
            over.append(missing + own if is_suspect and limit.algorithm == "gcra" and missing > 0 else 0)
        if any(over):
            emptied = yield self._limiter.reserve(self.key, *[(limit, 0) for limit in limits], cost=0)
            if emptied.decision.allowed:
                yield emptied.settle(over[0] if len(over) == 1 else over)

    def _lower(self, said: Told) -> list[tuple[int, int]]:
        """Return the windows in which the provider has less remaining, because other programs use the account."""
        found = []
        for place, (kind, limit, window) in enumerate(zip(self.windows.kinds(), self.windows.every(), self.decision.windows)):
            for theirs in said.windows:
                same = theirs.kind == kind and theirs.period in (None, limit.period) and theirs.limit in (None, limit.count)
                if (
                    same
                    and theirs.remaining is not None
                    and theirs.remaining + ROUNDING * (kind != "requests") < window.remaining
                ):
                    found.append((place, theirs.remaining))
        return found


def _usage(given: object) -> Usage:
    if isinstance(given, Usage) and all(type(tokens) is int and tokens >= 0 for tokens in given[:2]):
        return given
    dumped = given.model_dump() if hasattr(given, "model_dump") else given
    found = usage_in(dumped)
    if found is None:
        raise TypeError(f"usage is {given!r:.80}, expected the usage of a response, or limitgate.llm.Usage(input, output)")
    return found


class BudgetReservation:
    """A reservation by `Budget.reserve`. An exception in its ``with`` block refunds everything."""

    def __init__(self, spending: Spending) -> None:
        self._spending = spending

    @property
    def decision(self) -> Decision:
        return self._spending.decision

    def settle(self, usage: Usage | Mapping[str, Any] | object) -> None:
        """Replace the estimate by the ``usage`` of a response, or ``Usage(input, output)``, once. Raises `TypeError`.

        Logs errors of the store.
        """
        run(self._spending.settling(self._spending.expected.bounded(_usage(usage))))

    def renew(self) -> bool:
        """Hold the reservation for another `hold` from now; return True if it is held.

        It isn't held if it was settled, if its hold has ended, or if the store fails.
        """
        is_held: bool = run(self._spending.renewing())
        return is_held

    def cancel(self) -> None:
        """Refund everything, including the request."""
        run(self._spending.giving_back())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The garbage collector may close a generator anywhere, so don't call the store then.
        if error is not None and not isinstance(error, GeneratorExit):
            run(self._spending.giving_back())


class AsyncBudgetReservation:
    """A reservation by `Budget.areserve`. An exception in its ``async with`` block refunds everything."""

    def __init__(self, spending: Spending) -> None:
        self._spending = spending

    @property
    def decision(self) -> Decision:
        return self._spending.decision

    async def settle(self, usage: Usage | Mapping[str, Any] | object) -> None:
        """See `BudgetReservation.settle`."""
        await arun(self._spending.settling(self._spending.expected.bounded(_usage(usage))))

    async def renew(self) -> bool:
        """See `BudgetReservation.renew`."""
        is_held: bool = await arun(self._spending.renewing())
        return is_held

    async def cancel(self) -> None:
        """Refund everything, including the request."""
        await arun(self._spending.giving_back())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A closed coroutine cannot wait for the store.
        if error is not None and not isinstance(error, GeneratorExit):
            await afinish(self._spending.giving_back())
