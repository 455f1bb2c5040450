"""Budgets for language models: limits on requests and tokens."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limitgate.llm.budget import Budget
    from limitgate.llm.costs import input_tokens, output_tokens, tokens
    from limitgate.llm.usage import Usage

__all__ = ["Budget", "Usage", "input_tokens", "output_tokens", "tokens"]

_HOMES = {"Budget": "budget", "Usage": "usage", "input_tokens": "costs", "output_tokens": "costs", "tokens": "costs"}
"""Names are imported on first use, because only budgets need an extra."""

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
