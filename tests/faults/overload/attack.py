"""Attacks on applications that are served: each situation a function that gives an `Outcome`.

lead ──── attack, beside honest requests ──── tail
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.faults.overload.load import HANG, Crowd, Spec
from tests.faults.overload.outcome import Demand, Honest, Outcome
from tests.faults.overload.servers import LONG, ROOT, Served, served
from tests.support.redis_server import RedisServer

ATTACKER = "203.0.113.66"
HONEST = [f"198.51.100.{number}" for number in range(1, 61)]
"""Enough for each to stay within its limits even if a backlog of many seconds is answered at once."""
RATE = 30.0
"""Honest requests a second."""
GUESSES, PATHS = 60, 30
"""Connections that guess, and that send long paths."""
SECONDS, LEAD, TAIL = 8.0, 0.5, 3.0
LOGINS = Crowd(name="logins", connections=GUESSES, path="/login", address=ATTACKER)
LATER = Crowd({**LOGINS, "delay": 0.3})
"""The same, once the process is busy."""
LONG_PATHS = Crowd(name="paths", connections=PATHS, path="/a;" * (LONG // 3), address=ATTACKER)
UVICORN = "uvicorn uvloop httptools"
THREADS = "waitress"


class Setting(NamedTuple):
    """Where an attack is tried: on which server, through which door, under which policy, on which store."""

    server: str = UVICORN
    door: str = "gate"
    policy: str = "open"
    store: str = "single"
    seconds: float = SECONDS


def run(
    setting: Setting,
    url: str,
    situation: str,
    spec: Spec,
    demand: Demand | None = None,
    *,
    redis: RedisServer | None = None,
    **environment: str,
) -> Outcome:
    """Serve an application and attack it; a ``redis`` that is given stands still from the second to the third quarter."""
    found = Outcome(situation, setting.server, setting.door, setting.policy, setting.store, demand or Demand())
    whole = Spec(
        {
            "lead": LEAD,
            "seconds": setting.seconds,
            "tail": TAIL,
            "honest": RATE,
            "addresses": HONEST,
            "path": "/hello",
            **spec,
        }
    )
    with served(setting.server, setting.door, url, LIMITGATE_ON_ERROR=setting.policy, **environment) as server:
        lines, thawed = server.lines(), 0.0
        with _clients({**whole, "port": server.port}) as clients:
            if redis is not None:
                time.sleep(setting.seconds / 4)
                with redis.frozen():
                    time.sleep(setting.seconds / 2)
                thawed = time.monotonic()
        _note(found, clients, server, thawed)
        found.lines = server.lines() - lines
    return found


@contextlib.contextmanager
def _clients(spec: Spec) -> Iterator[dict[str, Any]]:
    """Clients in a process of their own; the block begins with the attack, and afterwards their answer is there."""
    command = [sys.executable, "-m", "tests.faults.overload.load"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    said: dict[str, Any] = {}
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(spec))
        process.stdin.close()
        process.stdout.readline()
        yield said
        said.update(json.loads(process.stdout.read()))
        process.wait(HANG)
    finally:
        process.stdout.close()
        if process.poll() is None:
            process.kill()
            process.wait()


def _note(found: Outcome, said: dict[str, Any], server: Served, thawed: float) -> None:
    """Put into an outcome what the clients and the application say."""
    found.began, found.over = said["began"], max(said["over"], thawed)
    found.logins = {int(status): count for status, count in said["statuses"].get("logins", {}).items()}
    found.honest = [Honest(*each) for each in said["honest"]]
    found.degraded = sum(said["degraded"].values()) + sum(each.degraded for each in found.honest)
    found.outages = server.state()["outages"]


# --- situations -------------------------------------------------------------------------------------------------------


def long_paths(setting: Setting, url: str) -> Outcome:
    """Guesses beside paths that take long to read, as the first that a process hears of."""
    return run(setting, url, "long paths", {"crowds": [LATER, LONG_PATHS], "lead": 0.0})


def long_paths_later(setting: Setting, url: str) -> Outcome:
    """The same to a process that has asked Redis before."""
    return run(setting, url, "long paths, warm", {"crowds": [LOGINS, LONG_PATHS]})


def guesses_alone(setting: Setting, url: str) -> Outcome:
    """Guesses without anything else."""
    return run(setting, url, "guesses alone", {"crowds": [LOGINS], "lead": 0.0})


def blocked(setting: Setting, url: str) -> Outcome:
    """A handler keeps the loop for 0.15 s each time: calls by others, within their limits, one after the other."""
    blocking = [
        Crowd(name=f"block {number}", connections=1, path="/block", address=f"192.0.2.{number}") for number in range(1, 5)
    ]
    spec = Spec(crowds=[LATER, *blocking], lead=0.0)
    return run(setting, url, "blocking handler", spec, OVERLOAD_TROUBLE="block:0.15")


def stalls(setting: Setting, url: str) -> Outcome:
    """The loop stands still for 20 ms of each 0.1 s, under 200 requests a second of everybody."""
    crowd = Crowd(name="logins", connections=2, path="/login", address=ATTACKER, pause=0.05)
    spec = Spec(crowds=[crowd], honest=200.0, trouble=True)
    return run(setting, url, "20 ms stalls", spec, OVERLOAD_TROUBLE="stall:0.02/0.1")


def starved(setting: Setting, url: str, busy: int) -> Outcome:
    """Threads that never wait take the interpreter from those that handle requests."""
    spec = Spec(crowds=[{**LOGINS, "connections": 8}], trouble=True, lead=0.0, honest=4.0, tail=5.0)
    return run(setting, url, f"{busy} busy threads", spec, OVERLOAD_TROUBLE=f"busy:{busy}")


def no_files(setting: Setting, url: str) -> Outcome:
    """Idle connections take all file descriptors before the first call to Redis."""
    spec = Spec(crowds=[LOGINS], idle=400, lead=0.7, honest=0.0, tail=0.0)
    return run(setting, url, "no file descriptor", spec, Demand(bursts=2, degrades=True), OVERLOAD_TROUBLE="files:256")


def no_threads(setting: Setting, url: str) -> Outcome:
    """No thread can be started from before the first call to Redis."""
    spec = Spec(crowds=[LOGINS], trouble=True, lead=0.0)
    return run(setting, url, "no thread", spec, Demand(bursts=2, degrades=True), OVERLOAD_TROUBLE="threads")


def no_threads_for_names(setting: Setting, url: str) -> Outcome:
    """The same where the store's name has to be looked up, for which asyncio needs a thread."""
    spec = Spec(crowds=[LOGINS], trouble=True, lead=0.0)
    named = url.replace("127.0.0.1", "localhost")
    return run(setting, named, "no thread, a name", spec, Demand(bursts=2, degrades=True), OVERLOAD_TROUBLE="threads")


def slow_clients(setting: Setting, url: str) -> Outcome:
    """Three hundred clients send a request byte by byte."""
    return run(setting, url, "slow clients", {"crowds": [LOGINS], "slow": 300, "lead": 0.0})


def frozen_while_stalling(setting: Setting, url: str, redis: RedisServer) -> Outcome:
    """Redis stands still for half of the time, while the loop stands still for 60 ms of each 0.1 s."""
    demand = Demand(2, degrades=True, unbounded=setting.policy == "open", refuses=setting.policy == "closed")
    spec = Spec(crowds=[{**LOGINS, "connections": 4, "pause": 0.05}], trouble=True)
    found = run(setting, url, "Redis frozen, 60 ms stalls", spec, demand, redis=redis, OVERLOAD_TROUBLE="stall:0.06/0.1")
    if not found.outages:
        found.further.append("a Redis that stands still was not taken for broken")
    return found
