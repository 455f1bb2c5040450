"""How requests are counted against a limit. Each algorithm is a module of pure functions, its twin is in limitgate/lua/."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from limitgate.algorithms import ban, concurrency, fixed_window, gcra, register, sliding_log, sliding_window, warm_up
from limitgate.algorithms.base import Algorithm
from limitgate.algorithms.each import Each
from limitgate.algorithms.kept import Kept

SCRIPTS: Final[dict[str, Algorithm]] = {
    "gcra": gcra,
    "fixed_window": Each(fixed_window),
    "sliding_window": Each(sliding_window),
    "sliding_log": Each(sliding_log),
    "ban": Kept(ban),
    "register": Kept(register),
    "concurrency": concurrency,
    "warm_up": warm_up,
}
"""By the name of their twin in limitgate/lua/. A place among them is part of the stored state, so new ones go to the end."""

ALGORITHMS: Final[dict[str, Algorithm]] = {"gcra": gcra, "token_bucket": gcra, "leaky_bucket": gcra, **SCRIPTS}
"""By the names that limits give them."""

NUMBERS: Final[dict[Algorithm, int]] = {algorithm: number for number, algorithm in enumerate(SCRIPTS.values())}
"""What the script calls them."""


def script() -> str:
    """The script with every algorithm in it."""
    folder = files("limitgate") / "lua"
    texts = [(folder / f"{name}.lua").read_text("utf-8") for name in SCRIPTS]
    cases = [f"if number == {number} then\n{text}end\n" for number, text in enumerate(texts)]
    return (folder / "spend.lua").read_text("utf-8").replace("--ALGORITHMS\n", "".join(cases))
