"""Rules, limits, callers and rule sets."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

from limitgate import Adaptive, Caller, Limit, Request, Rule, RuleSet, Settings, load_rules
from limitgate.llm import input_tokens


def cost_of(request: Request) -> int:
    """What a request costs, by everything that may be looked at."""
    assert_type(request.method, str)
    assert_type(request.path, str)
    assert_type(request.client, str | None)
    assert_type(request.headers.get("x-cost"), str | None)
    assert_type(request.headers["x-cost"], str)
    assert_type(list(request.headers), list[str])
    assert_type(request.query.get("cost"), str | None)
    return int(request.query.get("cost", "1"))


def name_of(request: Request) -> str:
    """No cost."""
    return request.path


limit = Limit("100/minute", burst=20, algorithm="gcra", lease=5)
Limit("100/day", algorithm="fixed_window", align="Europe/Berlin")
Rule("daily", qpd=100, algorithm="fixed_window", align="first-request")
Rule("daily", qpd=100, algorithm=5)  # type: ignore[arg-type]
Rule("daily", qpd=100, align=True)  # type: ignore[arg-type]
assert_type(limit.count, int)
assert_type(limit.period, int)
assert_type(limit.burst, int)

Rule("all", adaptive=True)
Rule("all", adaptive=Adaptive(min=4, max=200), reserve="10%", priority="high", max_delay="50ms")
Rule("all", adaptive={"min": 4, "delay": "20ms"})
Rule("all", adaptive="yes")  # type: ignore[arg-type]
assert_type(Rule("all", adaptive=True).adaptive, Adaptive | None)

rule = Rule("api", "5/second", limit, qpm=100, qph=1000, qpd=2000, path="/api/**", methods=["GET", "POST"], key=["path", "ip"])
assert_type(rule, Rule)
assert_type(rule.name, str)
assert_type(rule.limits, tuple[Limit, ...])
Rule("login", qps=5, methods={"POST"}, key=("ip",), tier="paid", cost=cost_of, on_error="closed", shadow=True, lease=2)
Rule("health", path="/healthz", exempt=True)
Rule("failed", "5/hour", charge_if={"status": [401, 403]})
Rule("served", "5/hour", charge_if={"status_not": ["5xx", 404]}, per="request")
Rule("chat", "5/second", per="message")
Rule("llm", "5/second", ("900/minute", "tokens"), (Limit("900/day"), input_tokens), ("9/day", 3), cost="output_tokens")

Rule("api", "5/second", qpx=5)  # type: ignore[call-arg]
Rule("api", 5)  # type: ignore[arg-type]
Rule("api", "5/second", on_error="sometimes")  # type: ignore[arg-type]
Rule("api", "5/second", qpm="100")  # type: ignore[arg-type]
Rule("api", "5/second", cost=name_of)  # type: ignore[arg-type]
Rule("api", "5/second", cost="2")  # type: ignore[arg-type]
Rule("api", "5/second", ("900/minute", "words"))  # type: ignore[arg-type]
Rule("api", "5/second", key=None)  # type: ignore[arg-type]
Rule("api", "5/second", path=Path("/api"))  # type: ignore[arg-type]
Rule("api", "5/second", shadow="yes")  # type: ignore[arg-type]
Rule("api", "5/second", per="byte")  # type: ignore[arg-type]
Rule("api", "5/second", charge_if=401)  # type: ignore[arg-type]
Rule("api", "5/second", charge_if={"status": 401})  # type: ignore[dict-item]
Rule()  # type: ignore[call-arg]
rule.name = "other"  # type: ignore[misc]
Limit(100)  # type: ignore[arg-type]
Limit("100/minute", period=60)  # type: ignore[call-arg]
limit.burst = 5  # type: ignore[misc]

assert_type(load_rules("config/"), RuleSet)
assert_type(load_rules(Path("config")), RuleSet)
load_rules(None)  # type: ignore[arg-type]
RuleSet([rule])
RuleSet(["5/second"])  # type: ignore[list-item]

caller = Caller("ann", tier="paid")
assert_type(caller.id, str)
assert_type(caller.tier, str)
Caller(42)  # type: ignore[arg-type]
caller.id = "bob"  # type: ignore[misc]

assert_type(Settings().timeout, float)
assert_type(Settings(timeout=0.5, rules="config/").trusted_proxies, tuple[str, ...])
