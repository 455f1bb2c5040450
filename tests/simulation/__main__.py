"""Histories by seed: ``python -m tests.simulation --seeds 10000``; one of them with all that happened: ``--seed 123``."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from contextlib import nullcontext

from tests.simulation import bugs
from tests.simulation.installed import worlds
from tests.simulation.scenario import simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one and print its history")
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--steps", type=int, help="callbacks of event loops after which callers stop; by default, by the seed")
    parser.add_argument("--bug", choices=sorted(bugs.BUGS), help="put back a past bug")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first finding")
    options = parser.parse_args()
    with worlds(), bugs.put_back(options.bug) if options.bug else nullcontext():
        if options.seed is not None:
            return _show(options.seed, options.steps)
        return _run(options)


def _show(seed: int, steps: int | None) -> int:
    world = simulate(seed, steps=steps, keeps_history=True)
    for line in world.history:
        print(line)
    print(f"seed {seed}: {world.steps} steps, {world.us / 1e6:.1f} simulated seconds, {len(world.findings)} findings")
    for finding in world.findings:
        print(f"  {finding}")
    return bool(world.findings)


def _run(options: argparse.Namespace) -> int:
    began, steps, us, bad = time.perf_counter(), 0, 0, 0
    seeds = range(options.first, options.first + options.seeds)
    gc.freeze()
    for number, seed in enumerate(seeds, 1):
        world = simulate(seed, steps=options.steps)
        steps, us = steps + world.steps, us + world.us
        if world.findings:
            bad += 1
            repeat = f"--seed {seed}" + (f" --steps {options.steps}" if options.steps else "")
            repeat += f" --bug {options.bug}" if options.bug else ""
            print(f"{world.findings[0]}\n  repeat with: python -m tests.simulation {repeat}", flush=True)
            if not options.keep_going:
                break
        if number % 10 == 0:
            # Histories run without garbage collection.
            gc.collect()
        if number % 1000 == 0:
            _tell(number, steps, us, began)
    _tell(number, steps, us, began)
    print(f"{bad} seeds with findings")
    return bool(bad)


def _tell(seeds: int, steps: int, us: int, began: float) -> None:
    minutes = (time.perf_counter() - began) / 60
    print(
        f"{seeds:,} seeds, {steps:,} steps, {us / 3.6e9:,.1f} simulated hours: {steps / minutes:,.0f} steps a minute",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
