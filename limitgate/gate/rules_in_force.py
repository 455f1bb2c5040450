"""Rules in force: all that belongs to one rule set. A request takes them once, and ends under them whatever comes meanwhile."""

from __future__ import annotations

from limitgate.gate.planner import Planner
from limitgate.http.response import Fields, rate_fields
from limitgate.limits.decision import Decision


class RulesInForce:
    """What all requests under one rule set of one gate have in common. Another rule set has another object, whole at once.

    ``timeout`` is the seconds that a request may wait for the store, and ``is_measured`` is true if the store says for how long
    it was silent.
    """

    def __init__(self, planner: Planner, header_styles: tuple[str, ...], *, timeout: float, is_measured: bool) -> None:
        self.planner = planner
        self.rule_set = planner.rule_set
        self.rule_names = planner.names
        """Names of all rules, of whatever tier."""
        self.header_styles = header_styles
        self.has_commonest_style = header_styles == ("x-ratelimit",)
        """True if ASGI's form of the fields can be made at once."""
        self.timeout = timeout
        self.is_measured = is_measured

    def fields(self, decision: Decision, now: int) -> Fields:
        """Rate fields of a decision at ``now`` by the store's clock, Unix µs."""
        return rate_fields(self.header_styles, decision, now, self.rule_names)
