"""All metrics: source of instruments and documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from limitgate.limits.bucket import RESERVES
from limitgate.limits.plan import Source
from limitgate.messages.diagnostics import Diagnosis
from limitgate.overload.shedding import Refusal

Outcome = Literal["unlimited", "admitted", "shadow_refused", "delayed", "failed_open", "refused", "failed_closed"]
"""Outcome of a request. An outcome of a later gate or limit replaces an earlier one."""
RuleOutcome = Literal["admitted", "refused", "shadow_refused"]
Result = Literal["ok", "timeout", "connection", "oom", "reply"]
Kind = Literal["counter", "gauge", "up_down", "histogram"]
Joined = Literal["sum", "min", "max", "each"]
"""How a gauge is combined across processes and gates."""


@dataclass(frozen=True, eq=False)
class Instrument:
    name: str
    """Name in OpenTelemetry."""
    kind: Kind
    unit: str
    """Unit in UCUM."""
    meaning: str
    labels: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bounds: tuple[float, ...] = ()
    """Upper bounds, without infinity."""
    joined: Joined = "sum"

    @property
    def prometheus_name(self) -> str:
        """Name in Prometheus, as the OpenTelemetry exporter would write it."""
        seconds = "_seconds" if self.unit == "s" else ""
        return self.name.replace(".", "_") + seconds + ("_total" if self.kind == "counter" else "")


REQUESTS = Instrument(
    "limitgate.requests",
    "counter",
    "{request}",
    "Requests by outcome and by source of the decision; each is counted once.",
    ("outcome", "decided_by"),
    {"outcome": get_args(Outcome), "decided_by": get_args(Source)},
)
RULE_DECISIONS = Instrument(
    "limitgate.rule.decisions",
    "counter",
    "{decision}",
    "Decisions of each rule: it admitted or refused a request, or would have refused it in shadow mode.",
    ("rule", "tier", "outcome"),
    {"outcome": get_args(RuleOutcome)},
)
RULE_UTILIZATION = Instrument(
    "limitgate.rule.utilization",
    "histogram",
    "1",
    "Used share of a rule's fullest window after each decision; above 1 if turns are booked or costs were underestimated.",
    ("rule", "tier"),
    bounds=(0.1, 0.25, 0.5, 0.8, 0.9, 1.0, 1.5, 2.0),
)
RULE_LIMIT = Instrument(
    "limitgate.rule.limit",
    "gauge",
    "{request}",
    "Count of each limit in the rules, by period; 0 after the limit was removed.",
    ("rule", "tier", "window"),
    joined="max",
)
RULE_IN_FLIGHT = Instrument(
    "limitgate.rule.in_flight",
    "up_down",
    "{request}",
    "Requests in flight under a rule with concurrency, or an adaptive rule.",
    ("rule", "tier"),
)
RULE_WAITING = Instrument(
    "limitgate.rule.waiting",
    "up_down",
    "{request}",
    "Requests that wait for a turn or place under a rule with max_delay.",
    ("rule", "tier"),
)
RULE_ADAPTIVE_LIMIT = Instrument(
    "limitgate.rule.adaptive_limit",
    "gauge",
    "{request}",
    "Current limit on the requests in flight of an adaptive rule.",
    ("rule", "tier"),
)
RULE_ADAPTIVE_BASE = Instrument(
    "limitgate.rule.adaptive_base",
    "gauge",
    "s",
    "Mean duration of the requests of an adaptive rule without a queue, R0; 0 while unknown.",
    ("rule", "tier"),
    joined="max",
)
RULE_BANS = Instrument(
    "limitgate.rule.bans",
    "counter",
    "{ban}",
    "Bans set by a rule with ban, counted by the process whose refusal caused the ban.",
    ("rule", "tier"),
)
RULE_SHED = Instrument(
    "limitgate.rule.shed",
    "counter",
    "{request}",
    "Requests that an adaptive rule refused, because no place was free, the event loop was late, or others had priority.",
    ("rule", "tier", "priority", "reason"),
    {"priority": tuple(RESERVES), "reason": get_args(Refusal)},
)
ADAPTIVE_LAG = Instrument(
    "limitgate.adaptive.lag",
    "gauge",
    "s",
    "Lag of the event loop or of the proxy's queue, as measured for adaptive rules; 0 without requests.",
    joined="max",
)
STORE_DURATION = Instrument(
    "limitgate.store.operation.duration",
    "histogram",
    "s",
    "Duration of each call to the store; requests can share a call. Memory stores are not measured.",
    ("store", "result"),
    {"result": get_args(Result)},
    bounds=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
STORE_UP = Instrument(
    "limitgate.store.up",
    "gauge",
    "1",
    "1 while the store answers, 0 while it does not and on_error decides.",
    ("store",),
    joined="min",
)
STORE_OUTAGES = Instrument(
    "limitgate.store.outages",
    "counter",
    "{outage}",
    "Outages: how often requests stopped waiting for a server of the store.",
    ("store",),
)
CONFIG_LOADS = Instrument(
    "limitgate.config.loads",
    "counter",
    "{load}",
    "Rule sets that were loaded: applied or rejected.",
    ("result",),
    {"result": ("ok", "rejected")},
)
CONFIG_SUCCESS = Instrument(
    "limitgate.config.last_load_success",
    "gauge",
    "1",
    "1 if the last loaded rule set is in force, 0 if it was rejected.",
    joined="min",
)
CONFIG_TIMESTAMP = Instrument(
    "limitgate.config.last_load_timestamp",
    "gauge",
    "s",
    "Unix time at which the rules in force were loaded.",
    joined="min",
)
CONFIG_REVISION = Instrument(
    "limitgate.config.revision",
    "gauge",
    "1",
    "First 12 hex digits of the SHA-256 of the rule set, as a number: equal in processes with equal rules.",
    joined="each",
)
DIAGNOSTICS = Instrument(
    "limitgate.diagnostics",
    "counter",
    "{diagnosis}",
    "Logged diagnostics, by code.",
    ("code",),
    {"code": tuple(each.code for each in Diagnosis)},
)
Direction = Literal["input", "output"]
BUDGET_TOKENS = Instrument(
    "limitgate.budget.tokens",
    "counter",
    "{token}",
    "Tokens of budgets: reserved by estimates, and settled by the cost of responses.",
    ("budget", "direction", "stage"),
    {"direction": get_args(Direction), "stage": ("reserved", "settled")},
)
BUDGET_USAGE_RATIO = Instrument(
    "limitgate.budget.usage_ratio",
    "histogram",
    "1",
    "Tokens that a response cost, divided by the estimate.",
    ("budget", "direction"),
    bounds=(0.1, 0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 5.0, 10.0),
)
Settlement = Literal["reported", "arrived", "nothing", "failed"]
BUDGET_SETTLEMENTS = Instrument(
    "limitgate.budget.settlements",
    "counter",
    "{request}",
    "Requests of budgets by the source of their tokens: reported, estimated from what arrived, nothing, or not settled.",
    ("budget", "usage"),
    {"usage": get_args(Settlement)},
)
Refuser = Literal["provider", "budget"]
BUDGET_REFUSALS = Instrument(
    "limitgate.budget.refusals",
    "counter",
    "{request}",
    "Attempts that the provider refused with a 429, and requests that the budget refused.",
    ("budget", "by"),
    {"by": get_args(Refuser)},
)
BUDGET_WAITING = Instrument(
    "limitgate.budget.waiting",
    "up_down",
    "{request}",
    "Requests that wait for their turn under a budget.",
    ("budget",),
)

INSTRUMENTS = tuple([each for each in list(globals().values()) if isinstance(each, Instrument)])
