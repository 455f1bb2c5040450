"""Names of clients as logs and lists may show them."""

from __future__ import annotations

_SHOWN = 3
"""Characters that are shown at either end of a long name."""


def masked(name: str) -> str:
    """The first and last characters of a name, at most half of it: ``20….7`` for 203.0.113.7."""
    shown = min(_SHOWN, len(name) // 4)
    return f"{name[:shown]}…{name[len(name) - shown :]}"
