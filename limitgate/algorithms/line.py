"""The line of requests in all processes that wait for a budget: tenants take turns by tokens.

Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996) with equal weights. In virtual time, a ticket starts when its
tenant's previous one ends, but not before the start of the last served ticket. The earliest start goes first, so a tenant with
many requests delays another tenant's first request by a single request.

The line only reports the cost of the tickets ahead of a request; the limits keep room for that cost. A ticket that isn't
renewed is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from limitgate.algorithms.base import BucketNumbers, LimitNumbers, Load
from limitgate.algorithms.no_limit import *  # noqa: F403 - what isn't below

REPLY_FIELDS = 4

JOIN, LEAVE, TAKE = 1, 2, 3
"""Actions. JOIN adds or renews a ticket; TAKE removes it after admission."""
MAX_TICKETS = 256
"""Maximum of tickets, and of tenants whose end is in the future. Further requests get no ticket and come last."""
KEPT_US = 60_000_000
"""A line is deleted after this many µs without an action."""
MAX_TOKENS = 2**40
"""Keeps Lua's doubles exact."""
LOAD = Load(20, 1, 120)
"""Measured with 256 tickets."""


class Action(NamedTuple):
    what: int
    name: int
    tenant: int = 0
    input: int = 0
    output: int = 0
    held_us: int = 0
    """µs after which a ticket is removed if it isn't renewed."""


class Ticket(NamedTuple):
    name: int
    tenant: int
    start: int
    """Virtual time, in tokens."""
    input: int
    output: int
    left_us: int

    @property
    def end(self) -> int:
        """End of the ticket: the earliest start of the tenant's next one."""
        return self.start + max(1, self.input + self.output)


class State(NamedTuple):
    now: int = 0
    """Current virtual time."""
    tickets: tuple[Ticket, ...] = ()
    """Tickets in the order of their turns."""
    ends: tuple[tuple[int, int], ...] = ()
    """End of each tenant's last ticket, if in the future; the latest change last."""
    requests: int = 0
    """Number of tickets ahead."""
    input: int = 0
    """Input tokens of the tickets ahead."""
    output: int = 0
    waiting: int = 0

    def end_of(self, tenant: int) -> int:
        return next((end for each, end in self.ends if each == tenant), self.now)

    def having(self, tickets: Sequence[Ticket], tenant: int, end: int) -> State:
        others = [(each, till) for each, till in self.ends if each != tenant]
        ends = [(each, till) for each, till in (*others, (tenant, end)) if till > self.now]
        return State(self.now, tuple(tickets), tuple(ends[-MAX_TICKETS:]))

    def telling(self, place: int) -> State:
        """Return the state with totals of the tickets ahead of a place."""
        ahead = self.tickets[:place]
        return self._replace(
            requests=len(ahead),
            input=sum([each.input for each in ahead]),
            output=sum([each.output for each in ahead]),
            waiting=len(self.tickets),
        )

    def carried_out(self, action: Action) -> State:
        place = next((place for place, each in enumerate(self.tickets) if each.name == action.name), -1)
        if action.what == JOIN:
            return self._joined(place, action)
        if place < 0:
            return self.telling(0)
        ticket = self.tickets[place]
        rest = (*self.tickets[:place], *self.tickets[place + 1 :])
        if action.what == TAKE:
            later = self._replace(now=max(self.now, ticket.start))
            return later.having(rest, ticket.tenant, self.end_of(ticket.tenant)).telling(0)
        end = self.end_of(ticket.tenant)
        return self.having(rest, ticket.tenant, ticket.start if end == ticket.end else end).telling(0)

    def _joined(self, place: int, action: Action) -> State:
        tickets = list(self.tickets)
        if place >= 0:
            tickets[place] = tickets[place]._replace(left_us=action.held_us)
            return self._replace(tickets=tuple(tickets)).telling(place)
        if len(tickets) >= MAX_TICKETS:
            return self.telling(len(tickets))
        ticket = Ticket(action.name, action.tenant, self.end_of(action.tenant), action.input, action.output, action.held_us)
        place = sum([each.start <= ticket.start for each in tickets])
        tickets.insert(place, ticket)
        return self.having(tickets, ticket.tenant, ticket.end).telling(place)

    def later(self, elapsed_us: int) -> State:
        if elapsed_us >= KEPT_US:
            return State()
        staying = [each._replace(left_us=each.left_us - elapsed_us) for each in self.tickets if each.left_us > elapsed_us]
        return State(self.now, tuple(staying), self.ends, waiting=len(staying))


def load(limit: LimitNumbers) -> Load:
    return LOAD


def initial(now: int, bucket: BucketNumbers) -> Sequence[State]:
    return [State()]


def apply_adjustment(
    states: Sequence[State], back: Sequence[Action], elapsed_us: int, grace_us: Sequence[int], bucket: BucketNumbers
) -> Sequence[State]:
    return [state.carried_out(action) for state, action in zip(states, back, strict=True)]


def used(state: State, limit: LimitNumbers) -> int:
    return state.waiting


def ttl_us(state: State, limit: LimitNumbers) -> int:
    return KEPT_US if state.tickets or state.ends else 0


refill_us = ttl_us


def encode_charge(limit: LimitNumbers, window: int, cost: int, ahead_us: int, date: int) -> Sequence[int]:
    return ()


def encode_adjustment(limit: LimitNumbers, back: Action, grace_us: int) -> Sequence[int]:
    return back


def decode_state(facts: Sequence[int], bucket: BucketNumbers) -> Sequence[State]:
    requests, into, output, waiting = facts
    return [State(requests=requests, input=into, output=output, waiting=waiting)]
