"""Lists in log lines and messages, which stay short however many entries there are, and however long each is. Pure."""

from __future__ import annotations

from collections.abc import Collection

MOST = 10
"""Entries of a list that are told; of the others how many there are."""
LONGEST = 200
"""Characters of an entry, or of a text that anybody may have made long."""


def listed(entries: Collection[str], between: str = ", ", *, most: int = MOST) -> str:
    """List entries: ``a, b, … and 990 more`` where there are many. One that is left over is told as well."""
    told = entries if len(entries) <= most + 1 else [*entries][:most]
    text = between.join([shortened(each) for each in told])
    left_out = len(entries) - len(told)
    return f"{text}{between}… and {left_out:,} more" if left_out else text


def shortened(text: str, longest: int = LONGEST) -> str:
    """Cut a text that is too long for a line."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
