"""The script on a real Redis, under a clock of the test's own."""

from __future__ import annotations

from collections.abc import Sequence

import redis

from limitgate.limits.plan import Plan, Reading
from limitgate.limits.template import AnyPlan
from limitgate.stores.redis import wire
from tests.support.clock import Clock

CLOCK = """
local server, fake = redis, table.remove(ARGV)
local function call(command, ...)
  if command == 'TIME' then
    return {string.format('%d', math.floor(fake / 1000000)), string.format('%d', fake % 1000000)}
  elseif command == 'SET' then
    local key, value, _, ttl = ...
    ON_SET
    return server.call('SET', key, value)
  elseif command == 'PEXPIRE' then
    local key, ttl = ...
    ON_SET
    return 1
  end
  return server.pcall(command, ...)
end
local redis = {call = call, pcall = call}
"""
"""Gives the script a clock: its TIME is the last argument. Keys do not expire, since the server's own clock goes on."""
TTL_SUFFIX = ":ttl"


class Scripted:
    """The script on a real Redis, under a clock of the test's own; a store for a Limiter."""

    def __init__(self, client: redis.Redis, clock: Clock | None = None, on_set: str = "") -> None:
        self.client = client
        self.clock = clock
        self.sha = client.script_load(CLOCK.replace("ON_SET", on_set) + wire.SPEND.text)

    def spend(self, plan: Plan, timeout: float) -> Reading:
        return wire.answers([plan], self.client.execute_command(*self.command(plan, self.clock()))).readings[0]

    def close(self) -> None:
        """Nothing to let go of."""

    def command(self, plan: Plan, now: int) -> tuple[object, ...]:
        return self.command_of([plan], now)

    def command_of(self, plans: Sequence[AnyPlan], now: int) -> tuple[object, ...]:
        return "EVALSHA", self.sha, *wire.arguments(plans), now
