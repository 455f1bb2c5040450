"""Routes calls that a Redis Cluster node has redirected.

    MOVED      another node holds the hash slot: resend there at once, and look up the map
    ASK        the bucket has moved ahead of its slot: resend there once, after ASKING
    TRYAGAIN   the slot is moving and splits the call's buckets: resend each plan after a pause

After `MAX_HOPS` redirections a call pauses, because the nodes disagree. CLUSTERDOWN is a failure, so ``on_error`` decides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from redis.exceptions import MovedError, TryAgainError

from limitgate.stores.redis.breaker import first_key
from limitgate.stores.redis.cluster.slot_map import SlotMap, address_at, hash_slot
from limitgate.stores.redis.dial.url import Address
from limitgate.stores.redis.errors import Redirection
from limitgate.stores.redis.protocol.wire import Call

PAUSE = 0.01
"""Seconds before a parked or split call is sent."""
MAX_HOPS = 5
"""Redirections without a pause."""


class Send(NamedTuple):
    """Send the call to a node at once."""

    address: Address


class Park(NamedTuple):
    """Send the call to a node after `PAUSE`."""

    address: Address


class Split(NamedTuple):
    """Send each plan of the call separately to a node after `PAUSE`."""

    address: Address


Route = Send | Park | Split


class Router:
    """Follows redirections and updates the slot map."""

    def __init__(self, slots: SlotMap[Any]) -> None:
        self._slots = slots

    def route(self, call: Call, redirection: Redirection, origin: Address) -> Route:
        """Route a call that the node at ``origin`` has redirected."""
        slot = hash_slot(first_key(call.first))
        if isinstance(redirection, TryAgainError):
            return Split(self._slots.holder(slot))
        address = address_at(redirection.host, redirection.port, origin)
        call.hops += 1
        call.asking = not isinstance(redirection, MovedError)
        if not call.asking:
            self._slots.moved(slot, address)
        return Send(address) if call.hops <= MAX_HOPS else Park(address)
