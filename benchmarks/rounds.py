"""CPU per request, on both sides: contenders take turns in many short rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from benchmarks.drive import Crowd, trouble
from benchmarks.figures import Failed, Outcome, Outcomes, Taken, Turn
from benchmarks.redis_side import Command, Spent, overheard, spent
from tests.support.redis_server import RedisServer


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    rounds: int
    requests: int
    """For each contender and round."""


def alternate(crowds: Mapping[str, Crowd], concurrency: int, plan: Plan, server: RedisServer | None = None) -> Outcomes:
    """Let all take turns; one that does not answer every request with 200 has failed and drops out.

    Before the first round each gets two turns to connect and to fill its caches; during the second the commands that reach
    ``server`` are counted.
    """
    with _Watch(server) as watch:
        failed: dict[str, Outcome] = {}
        commands: dict[str, list[Command]] = {}
        for name, crowd in crowds.items():
            try:
                _send(crowd, concurrency, plan)
                commands[name] = watch.overheard(partial(_send, crowd, concurrency, plan))
            except _TroubleError as error:
                failed[name] = Failed(str(error))
        turns: dict[str, list[Turn]] = {name: [] for name in crowds if name not in failed}
        for number in range(plan.rounds):
            for name in _rotated([name for name in turns if name not in failed], number):
                try:
                    turns[name].append(
                        _turn(crowds[name], concurrency, plan, watch, {command[0] for command in commands[name]})
                    )
                except _TroubleError as error:
                    failed[name] = Failed(str(error))
    return {name: failed.get(name) or Taken(turns[name], len(commands[name]) / plan.requests) for name in crowds}


def _turn(crowd: Crowd, concurrency: int, plan: Plan, watch: _Watch, names: set[bytes]) -> Turn:
    before = watch.spent(names)
    began = time.process_time()
    _send(crowd, concurrency, plan)
    client = (time.process_time() - began) * 1e6
    after = watch.spent(names)
    return Turn(
        client / plan.requests, (after.cpu - before.cpu) / plan.requests, (after.inside - before.inside) / plan.requests
    )


def _send(crowd: Crowd, concurrency: int, plan: Plan) -> None:
    error = trouble(crowd(iter(range(plan.requests)), concurrency))
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
