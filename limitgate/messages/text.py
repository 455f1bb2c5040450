"""Text as log lines, lists and messages show it: short lists, masked names of clients, printable characters. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

MOST = 10
"""Entries of a list that are told; of the others how many there are."""
LONGEST = 200
"""Characters of an entry, of a name that is shown in full, or of a text that anybody may have made long."""


def listed(entries: Collection[str], between: str = ", ", *, most: int = MOST) -> str:
    """List entries: ``a, b, … and 990 more`` where there are many. One that is left over is told as well."""
    told = entries if len(entries) <= most + 1 else [*entries][:most]
    text = between.join([shortened(each) for each in told])
    left_out = len(entries) - len(told)
    return f"{text}{between}… and {left_out:,} more" if left_out else text


def shortened(text: str, longest: int = LONGEST) -> str:
    """Cut a text that is too long for a line."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


Names = Literal["masked", "full", "off"]
"""How much of a client's name is shown: its first and last characters, all of it, or nothing."""

_SAYABLE = frozenset({"path", "method", "tier"})
"""Parts of a key that tell nothing of anybody."""
_CREDENTIALS = frozenset({"api_key", "header:authorization", "header:proxy-authorization", "header:cookie"})
"""Parts of a key that are never shown in full: whoever reads them could use them."""
_SHOWN = 3
"""Characters that are shown at either end of a long name."""
ORDERS = re.compile(r"##(?=[A-Za-z]*\[)")
"""Begins an order to CI anywhere in a line: ``##[error]`` to GitHub, ``##vso[`` to Azure Pipelines, ``##teamcity[``."""


def masked(name: str) -> str:
    """The first and last characters of a name, at most half of it: ``20….7`` for 203.0.113.7."""
    shown = min(_SHOWN, len(name) // 4)
    return _replaced(f"{name[:shown]}…{name[len(name) - shown :]}")


def printable(text: str) -> str:
    """Text as one line on which no terminal and no CI acts: what is not printable, or an order, as Python escapes it."""
    text = ORDERS.sub(r"#\\x23", text)
    if text.isprintable():
        return text
    return "".join([each if each.isprintable() else each.encode("unicode_escape").decode() for each in text])


def shown(label: str, value: str, names: Names = "masked") -> str:
    """The value of a key's part as it may be shown, without characters that are not printable; empty where names are off."""
    if names == "off":
        return ""
    is_full = label in _SAYABLE or (names == "full" and label.lower() not in _CREDENTIALS)
    return _replaced(value[:LONGEST]) if is_full else masked(value)


def _replaced(text: str) -> str:
    return "".join([character if character.isprintable() else "\ufffd" for character in text])
