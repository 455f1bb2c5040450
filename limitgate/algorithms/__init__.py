"""Algorithms that count requests: modules of pure functions, each with a Lua twin in limitgate/lua/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Final

from limitgate.algorithms import (
    ban,
    concurrency,
    fixed_window,
    gcra,
    holds,
    line,
    refusals,
    sliding_log,
    sliding_window,
    warm_up,
)
from limitgate.algorithms.base import Algorithm, Each

SCRIPTS: Final[dict[str, Algorithm]] = {
    "gcra": gcra,
    "fixed_window": Each(fixed_window),
    "sliding_window": Each(sliding_window),
    "sliding_log": Each(sliding_log),
    "ban": ban,
    "concurrency": concurrency,
    "warm_up": warm_up,
    "refusals": refusals,
    "holds": holds,
    "line": line,
}
ALGORITHMS: Final[dict[str, Algorithm]] = {"gcra": gcra, "token_bucket": gcra, "leaky_bucket": gcra, **SCRIPTS}
STORED_AS: Final[dict[str, int]] = {
    "gcra": 0,
    "token_bucket": 1,
    "leaky_bucket": 2,
    "fixed_window": 3,
    "sliding_window": 4,
    "sliding_log": 5,
    "ban": 6,
    "concurrency": 8,
    "warm_up": 9,
    "refusals": 10,
    "holds": 11,
    "line": 12,
}
"""Numbers of algorithms in the ids of windows. Stores keep the ids, so never reuse a number."""

NUMBERS: Final[dict[Algorithm, int]] = {algorithm: number for number, algorithm in enumerate(SCRIPTS.values())}


_PLAIN = "\n--PLAIN\n"
"""Marker in a Lua twin: the following part belongs to plain.lua."""


def script() -> str:
    """Assemble limitgate/lua/spend.lua with all algorithms."""
    folder = files("limitgate") / "lua"
    texts = [(folder / f"{name}.lua").read_text("utf-8").partition(_PLAIN)[0] for name in SCRIPTS]
    cases = [f"if number == {number} then\n{text}end\n" for number, text in enumerate(texts)]
    return (folder / "spend.lua").read_text("utf-8").replace("--ALGORITHMS\n", "".join(cases))


def plain_pieces() -> Mapping[Algorithm, Mapping[str, Sequence[str]]]:
    """Return each algorithm's Lua lines for limitgate/lua/plain.lua, by the placeholder that they replace."""
    folder = files("limitgate") / "lua"
    return {
        algorithm: _pieces((folder / f"{name}.lua").read_text("utf-8").partition(_PLAIN)[2])
        for name, algorithm in SCRIPTS.items()
    }


def _pieces(text: str) -> Mapping[str, Sequence[str]]:
    pieces: dict[str, list[str]] = {}
    piece: list[str] = []
    for row in text.splitlines():
        if row.startswith("--") and row[2:].isalpha():
            pieces[row] = piece = []
        else:
            piece.append(row)
    return pieces
