"""Puts the world's clock and chance in the places where the engine takes its own."""

from __future__ import annotations

import gc
import importlib
import logging
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from limitgate import AsyncRedisStore, internal_errors
from limitgate.limits import plan
from limitgate.process import clock
from limitgate.stores.redis import breaker, cluster
from limitgate.stores.redis.aio import connection
from limitgate.stores.redis.replies import RedisStoreBase
from tests.simulation.world import World


class SimStore(AsyncRedisStore):
    """The store as a process has it, on the connections of the world."""

    def __init__(self, dialer, monotonic, *, local_refusals: bool = True) -> None:
        RedisStoreBase.__init__(self, local_refusals=local_refusals, clock=monotonic)
        self.scheme = "redis"
        self._dialer = dialer
        self._loops = {}
        self._opening = Lock()


_own_monotonic = clock.monotonic


class Installed:
    """The world in force. All modules read its clock through this object, so that the next world needs no second visit."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.entropy = random.Random(0)
        self.chance = random.Random(0)

    def monotonic(self) -> float:
        return _own_monotonic() if self.world is None else self.world.monotonic()

    def urandom(self, size: int) -> bytes:
        return self.entropy.randbytes(size)


_installed = Installed()


@contextmanager
def worlds() -> Iterator[None]:
    """The engine asks the worlds that `entered` names, instead of the machine, in a ``with`` block."""
    for name in ("limiter.limiter", "gate.slot_keeper", "gate.turns", "process.waiting", "stores.redis.aio.cluster"):
        importlib.import_module(f"limitgate.{name}")
    replaced = [
        (module, "monotonic", _installed.monotonic)
        for name, module in list(sys.modules.items())
        if name.startswith("limitgate.") and getattr(module, "monotonic", None) is _own_monotonic
    ]
    replaced += [
        (plan, "urandom", _installed.urandom),
        (breaker, "CHANCE", _installed.chance),
        (cluster, "CHANCE", _installed.chance),
        (connection, "has_data", lambda sock: sock.has_data()),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    hook, level, hooks = sys.unraisablehook, logging.root.manager.disable, sys.get_asyncgen_hooks()
    try:
        for module, name, value in replaced:
            setattr(module, name, value)
        # Killed processes leave unfinished coroutines.
        sys.unraisablehook = lambda _: None
        sys.set_asyncgen_hooks(firstiter=None, finalizer=_abandoned.append)
        logging.disable(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
            gc.collect()
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        sys.unraisablehook = hook
        sys.set_asyncgen_hooks(*hooks)
        logging.disable(level)
        _abandoned.clear()


_abandoned: list = []
"""Unfinished asynchronous generators of ended worlds."""


@contextmanager
def entered(world: World, seed: int) -> Iterator[None]:
    """One world, inside of `worlds`."""
    _installed.world = world
    _installed.entropy.seed(seed)
    _installed.chance.seed(seed)
    internal_errors._reported.clear()
    try:
        yield
        for place in internal_errors._reported:
            world.found(f"an internal error at {place}")
    finally:
        _installed.world = None
        _abandoned.clear()
        internal_errors._reported.clear()
