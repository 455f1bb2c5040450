"""Text in log lines, lists and messages: short lists, masked names, printable characters. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

MOST = 10
"""Entries of a list that are shown."""
LONGEST = 200
"""Characters of an entry, of a full name, or of text that a client may have made long."""


def listed(entries: Collection[str], between: str = ", ", *, most: int = MOST) -> str:
    """List entries: ``a, b, … and 990 more``. A single remaining entry is listed."""
    told = entries if len(entries) <= most + 1 else [*entries][:most]
    text = between.join([shortened(each) for each in told])
    left_out = len(entries) - len(told)
    return f"{text}{between}… and {left_out:,} more" if left_out else text


def shortened(text: str, longest: int = LONGEST) -> str:
    """Shorten a text to ``longest`` characters."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


Names = Literal["masked", "full", "off"]
"""How names of clients are shown: first and last characters, all, or nothing."""

_SAYABLE = frozenset({"path", "method", "tier"})
"""Parts of a key that identify no client."""
_CREDENTIALS = frozenset({"api_key", "header:authorization", "header:proxy-authorization", "header:cookie"})
"""Parts of a key that are never shown in full, because they are credentials."""
_SHOWN = 3
"""Characters shown at each end of a long name."""
ORDERS = re.compile(r"##(?=[A-Za-z]*\[)")
"""Starts a command to CI in a line: ``##[error]`` (GitHub), ``##vso[`` (Azure Pipelines), ``##teamcity[``."""


def masked(name: str) -> str:
    """Return the first and last characters of a name, at most half of it: ``20….7`` for 203.0.113.7."""
    shown = min(_SHOWN, len(name) // 4)
    return _replaced(f"{name[:shown]}…{name[len(name) - shown :]}")


def printable(text: str) -> str:
    """Escape unprintable characters and CI commands, so that a text is one harmless line."""
    text = ORDERS.sub(r"#\\x23", text)
    if text.isprintable():
        return text
    return "".join([each if each.isprintable() else each.encode("unicode_escape").decode() for each in text])


def shown(label: str, value: str, names: Names = "masked") -> str:
    """Return the value of a key's part as it may be shown, with printable characters; empty if names are off."""
    if names == "off":
        return ""
    is_full = label in _SAYABLE or (names == "full" and label.lower() not in _CREDENTIALS)
    return _replaced(value[:LONGEST]) if is_full else masked(value)


def _replaced(text: str) -> str:
    return "".join([character if character.isprintable() else "\ufffd" for character in text])
