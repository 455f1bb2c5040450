"""Refusals that clients of OpenAI and Anthropic understand. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from math import ceil, isinf

from limitgate.http.rate_fields import PROVIDERS, Renamed, Style, raw
from limitgate.http.response import Refusal
from limitgate.limits.decision import Decision
from limitgate.limits.plan import REQUESTS, wait_us

NEVER = "x-should-retry"
"""Keeps clients from retrying what can't be admitted."""


def provider_styles(styles: Iterable[Style]) -> frozenset[str]:
    return frozenset(style.style if isinstance(style, Renamed) else style for style in styles) & PROVIDERS.keys()


def as_provider(refusal: Refusal, decision: Decision, styles: Collection[str]) -> Refusal:
    """Add ``error`` to a 429's body, and the fields that clients use to retry."""
    wait = decision.retry_after
    unit = _unit(decision)
    counted = (unit or "usage").replace("_", " ")
    error: dict[str, object] = {"message": f"Rate limit {decision.rule} reached on {counted}. {_advice(wait)}"}
    if "openai" in styles:
        error |= {"type": unit or REQUESTS, "param": None, "code": "rate_limit_exceeded"}
    if "anthropic" in styles:
        error["type"] = "rate_limit_error"
    body = json.dumps({**json.loads(refusal.body), "error": error}).encode()
    fields = [(name, str(len(body)) if name == "Content-Length" else value) for name, value in refusal.fields]
    fields.append((NEVER, "false") if isinf(wait) else ("retry-after-ms", str(max(1, ceil(wait * 1000)))))
    return refusal._replace(fields=fields, raw=raw(fields), body=body)


def _advice(wait: float) -> str:
    return "Waiting does not help." if isinf(wait) else f"Please try again in {wait:.3f}s."


def _unit(decision: Decision) -> str:
    """What the limit with the longest wait counts."""
    found: tuple[float, str] = (-1, REQUESTS)
    for charge, states, after in decision.evidence:
        if after is None and charge.enforced and charge.rule == decision.rule:
            wait = wait_us(charge, states)
            found = max(found, (float("inf") if wait is None else wait, charge.unit))
    return found[1]
