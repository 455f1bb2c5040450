"""Budgets for language models: limits on requests and on tokens, in and out.

budget.py           `Budget`: its limits, keys and estimates
windows.py          the limits of a budget by kind, and what a request costs of each
spending.py         one request: reserves the estimate, settles what was used
outgoing.py         a request of a throttled client, whose response is read along
keeper.py           renews holds of requests under way, and reports them to other processes
fair_share.py       the requests of a process that wait, by tenant; the line of all processes is in the store
told_limits.py      limits that a provider states
costs.py            costs of rules in tokens, for requests behind a gate
metering.py         reads the response of such a request along
estimate.py         tokens that a request will probably cost
usage.py            tokens that a response says it has cost
provider_fields.py  the rate fields of providers
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limitgate.llm.budget import Budget
    from limitgate.llm.costs import input_tokens, output_tokens, tokens
    from limitgate.llm.usage import Usage

__all__ = ["Budget", "Usage", "input_tokens", "output_tokens", "tokens"]

_HOMES = {"Budget": "budget", "Usage": "usage", "input_tokens": "costs", "output_tokens": "costs", "tokens": "costs"}
"""Imports are lazy, because only budgets need an extra, and gates need only the pure modules."""

# Hidden from type checkers, which would otherwise accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name on first access (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "Budget":
            from limitgate.messages.text import extra  # noqa: PLC0415 - lazy as all imports here

            with extra("httpx2", "http_sf"):
                import http_sf  # noqa: F401, PLC0415 - raises here if the extra is missing
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
