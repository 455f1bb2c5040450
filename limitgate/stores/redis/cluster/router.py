"""Routes of calls that a node of a Redis Cluster has not carried out, decided here for asyncio and threads alike.

MOVED      another node holds the hash slot: there at once, as will be later calls; who holds which slot is looked up anew
ASK        another node is taking the slot over and has this bucket: there at once, announced by ASKING, this time only
TRYAGAIN   the slot is moving, and the call's buckets are on both sides: plan by plan to the holder, after a pause

Whoever is sent on more than `MAX_HOPS` times pauses, since the nodes disagree. CLUSTERDOWN is no redirection but a failure: no
node serves the slot, so ``on_error`` decides, and who holds which slot is looked up anew, as after any failure.

Knows no connection and no clock.
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
"""Seconds after which a call is sent that is parked or split."""
MAX_HOPS = 5
"""Redirections that a call follows without a pause."""


class Send(NamedTuple):
    """Send the call to a node at once."""

    address: Address


class Park(NamedTuple):
    """Send the call to a node after `PAUSE`."""

    address: Address


class Split(NamedTuple):
    """Send each plan of the call as a call of its own to a node after `PAUSE`."""

    address: Address


Route = Send | Park | Split


class Router:
    """Follows the redirections of a cluster's nodes, and keeps the map of its slots up to date with them."""

    def __init__(self, slots: SlotMap[Any]) -> None:
        self._slots = slots

    def route(self, call: Call, redirection: Redirection, origin: Address) -> Route:
        """Decide where a call goes that the node at an address has redirected."""
        slot = hash_slot(first_key(call.first))
        if isinstance(redirection, TryAgainError):
            return Split(self._slots.holder(slot))
        address = address_at(redirection.host, redirection.port, origin)
        call.hops += 1
        call.asking = not isinstance(redirection, MovedError)
        if not call.asking:
            self._slots.moved(slot, address)
        return Send(address) if call.hops <= MAX_HOPS else Park(address)
