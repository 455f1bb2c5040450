"""A fuzzer that needs nothing but a corpus: ``python -m tests.attacks.fuzz --inputs 1000000 [--seed N]``.

Prints a Markdown table of inputs, seconds and findings. Any input that makes a parser raise is a finding; it is printed,
and the exit status says so.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Sequence

from tests.attacks.mutations import corpus, mutated
from tests.attacks.parsers import PARSERS, Parser

MOST_FINDINGS = 5
"""Findings of one parser that are printed."""


def fuzz(parser: Parser, inputs: int, seed: int) -> list[tuple[bytes, str]]:
    """What a parser raised for, out of so many inputs."""
    chosen, seeds = random.Random(seed), corpus()
    findings = []
    for place in range(inputs):
        data = seeds[place] if place < len(seeds) else mutated(chosen, seeds)
        try:
            parser(data)
        except Exception:  # noqa: BLE001 - whatever it raises is what is looked for
            findings.append((data, traceback.format_exc()))
    return findings


def run(inputs: int, seed: int, names: Sequence[str] = ()) -> int:
    """Drive every parser with its share of the inputs, print the table; the number of findings."""
    share = -(-inputs // len(names or PARSERS))
    print("| parser | inputs | seconds | findings |\n|---|---|---|---|")
    found, began = 0, time.monotonic()
    for name in names or PARSERS:
        start = time.monotonic()
        findings = fuzz(PARSERS[name], share, seed)
        print(f"| {name.removeprefix('fuzz_')} | {share:,} | {time.monotonic() - start:.1f} | {len(findings)} |", flush=True)
        for data, text in findings[:MOST_FINDINGS]:
            print(f"{data!r}\n{text}", file=sys.stderr)
        found += len(findings)
    print(f"| all | {share * len(names or PARSERS):,} | {time.monotonic() - began:.1f} | {found} |")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="inputs over all parsers together")
    parser.add_argument("--seed", type=int, default=None, help="a number, to repeat a run")
    parser.add_argument("--only", action="append", choices=list(PARSERS), default=[], help="parsers to drive, all if not given")
    told = parser.parse_args()
    seed = random.randrange(1 << 32) if told.seed is None else told.seed
    print(f"seed {seed}\n")
    return 1 if run(told.inputs, seed, told.only) else 0


if __name__ == "__main__":
    sys.exit(main())
