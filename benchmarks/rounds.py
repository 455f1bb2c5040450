"""CPU per request, on both sides: contenders take turns in many short rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from benchmarks.drive import Crowd, trouble
from benchmarks.figures import Failed, Outcome, Outcomes, Taken, Turn
from benchmarks.redis_side import Command, Spent, overheard, spent
from tests.support.redis_server import RedisServer

_WARMING = 2
"""Turns before those that count."""


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    rounds: int
    requests: int
    """For each contender and round."""
    apart: float = 0.0
    """Seconds from the beginning of a round to that of the next, at least: what clients owe has drained by then."""


def alternate(
    crowds: Mapping[str, Crowd], concurrency: int, plan: Plan, server: RedisServer | None = None, *, first: int = 0
) -> Outcomes:
    """Let all take turns; one that does not answer every request with 200 has failed and drops out.

    Before the first round each gets two turns to connect and to fill its caches; during the second the commands that reach
    ``server`` are counted. Requests are numbered from ``first`` on, turn after turn.
    """
    turn_of = [range(start, start + plan.requests) for start in range(first, first + numbers_of(plan), plan.requests)]
    with _Watch(server) as watch:
        failed: dict[str, Outcome] = {}
        commands: dict[str, list[Command]] = {}
        for name, crowd in crowds.items():
            try:
                _send(crowd, concurrency, turn_of[0])
                commands[name] = watch.overheard(partial(_send, crowd, concurrency, turn_of[1]))
            except _TroubleError as error:
                failed[name] = Failed(str(error))
        due = time.monotonic() + plan.apart
        turns: dict[str, list[Turn]] = {name: [] for name in crowds if name not in failed}
        for number in range(plan.rounds):
            time.sleep(max(0.0, due - time.monotonic()))
            due = time.monotonic() + plan.apart
            for name in _rotated([name for name in turns if name not in failed], number):
                try:
                    sent = {command[0] for command in commands[name]}
                    turns[name].append(_turn(crowds[name], concurrency, turn_of[number + _WARMING], watch, sent))
                except _TroubleError as error:
                    failed[name] = Failed(str(error))
    return {name: failed.get(name) or Taken(turns[name], len(commands[name]) / plan.requests) for name in crowds}


def numbers_of(plan: Plan) -> int:
    """How many requests a contender gets, those that warm it up included."""
    return (plan.rounds + _WARMING) * plan.requests


def _turn(crowd: Crowd, concurrency: int, numbers: Sequence[int], watch: _Watch, names: set[bytes]) -> Turn:
    before = watch.spent(names)
    began = time.process_time()
    _send(crowd, concurrency, numbers)
    client = (time.process_time() - began) * 1e6
    after = watch.spent(names)
    requests = len(numbers)
    return Turn(client / requests, (after.cpu - before.cpu) / requests, (after.inside - before.inside) / requests)


def _send(crowd: Crowd, concurrency: int, numbers: Sequence[int]) -> None:
    error = trouble(crowd(iter(numbers), concurrency))
    if error:
        raise _TroubleError(error)


def _rotated(names: list[str], number: int) -> list[str]:
    """Each round begins with another one, so that nobody always follows the same neighbour."""
    place = number % len(names) if names else 0
    return names[place:] + names[:place]


class _TroubleError(Exception):
    """A contender did not answer as it should."""


class _Watch:
    """Looks at a server, if there is one to look at."""

    def __init__(self, server: RedisServer | None) -> None:
        self._server = server
        self._client: Any = server.client() if server else None

    def spent(self, names: set[bytes]) -> Spent:
        return spent(self._client, names) if self._client and names else Spent(0.0, 0.0)

    def overheard(self, send: Callable[[], object]) -> list[Command]:
        if self._server:
            return overheard(self._server, send)
        send()
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client:
            self._client.close()
