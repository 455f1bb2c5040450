"""Runs what docs/migrating.md shows of other limiters, and compares it with ours: ``python -m tests.support.theirs``.

They are not among the tests' requirements, so this is for whoever changes the page: `make .venv/bench` installs them. Theirs is
asked what the comments in ours say. Both have to admit the same requests; how theirs refuses is its own affair.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

from tests.support import examples
from tests.support.examples import Ask
from tests.support.markdown import Block, blocks

PAGE = "docs/migrating.md"
MARK = "# theirs\n"
"""The first line of a block that shows another limiter."""


class Pair(NamedTuple):
    """Two blocks that do the same."""

    theirs: Block
    ours: Block


def pairs() -> Iterator[Pair]:
    """Theirs, each with the block that follows it."""
    for theirs, ours in pairwise(blocks(PAGE)):
        if theirs.text.startswith(MARK):
            yield Pair(theirs, ours)


def admitted(pair: Pair) -> Iterator[tuple[Ask, list[bool], list[bool]]]:
    """What theirs lets through, and what ours says that it lets through, request by request. Handshakes are left out."""
    module = ModuleType(f"theirs_{pair.theirs.line}")
    sys.modules[module.__name__] = module
    exec(compile(pair.theirs.text, pair.theirs.id, "exec"), vars(module))
    with examples._asking(vars(module)["app"]) as status:
        for ask in examples._asks(pair.ours.text):
            if ask.method != "WS":
                found = [status(ask) for _ in ask.statuses]
                yield ask, [each not in (403, 429) for each in found], [each not in (403, 429) for each in ask.statuses]


def main() -> int:
    """Print who admits what. Returns how many requests they do not agree about."""
    disagreements = 0
    for pair in pairs():
        for ask, theirs, ours in admitted(pair):
            differing = sum(one != other for one, other in zip(theirs, ours))
            disagreements += differing
            print(pair.theirs.id, ask.method, ask.path, *ask.headers.values(), f"{differing} of {len(ours)} differ")
    return disagreements


if __name__ == "__main__":
    sys.exit(main() and 1)
