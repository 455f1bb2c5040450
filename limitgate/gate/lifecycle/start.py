"""Start and end of a service: one line says what is on, and the store is asked before the first request needs it."""

from __future__ import annotations

import asyncio
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from limitgate.errors import StoreError
from limitgate.gate.gate import Gate
from limitgate.limits.bucket import bucket_of
from limitgate.limits.plan import Charge, Plan
from limitgate.messages.text import listed
from limitgate.observing.exporter import exporter
from limitgate.process import switch
from limitgate.rules.rule import RuleSet
from limitgate.rules.settings import Settings, server_options
from limitgate.stores import AsyncStore, SyncStore, is_async_redis, is_redis
from limitgate.stores.redis.dial.url import shown

log = logging.getLogger("limitgate")

ANSWER_TIMEOUT = 5.0
"""Seconds that a store which is required may take to answer."""


def announce(settings: Settings, rules: RuleSet | None) -> None:
    """Log what is on, in one line without any secret; ``rules`` is None where LimitGate is switched off."""
    if rules is None:
        log.info("LimitGate %s is switched off", _version())
    else:
        log.info(
            "LimitGate %s: %s from %s%s; store %s; on_error %s; trusted proxies %s%s",
            _version(),
            _counted(rules),
            rules.source or (settings.rules if isinstance(settings.rules, str | Path) else "Python"),
            f", looked at every {settings.reload:g} s" if settings.reload else "",
            shown(settings.store),
            settings.on_error,
            listed(settings.trusted_proxies) or "none",
            "; shadow, nothing is refused" if settings.shadow else "",
        )


@cache
def _version() -> str:
    with suppress(PackageNotFoundError):
        return version("limitgate")
    return "(not installed)"


def _counted(rules: RuleSet) -> str:
    """Number of the rules in force for each tier: ``3 rules for tier default, 4 for vip``."""
    tiers = [f"{len(of_tier)} for tier {tier}" for tier, of_tier in rules.tiers.items()]
    return f"rules: {listed(tiers)}"


async def astartup(gate: Gate) -> None:
    """Begin to serve on the running event loop: connect, and look for other rules, if that is wanted.

    Raises `ConfigError` for an event loop that the store cannot run on.
    """
    if is_async_redis(gate.store) and switch.null_store is None:
        await gate.store.connect()
        gate.refusals.agree_soon()
    if gate.poller is not None:
        gate.poller.start()


async def ashutdown(gate: Gate) -> None:
    """Serve no more: look for no other rules, wait for what is under way, and hand over what was counted."""
    if gate.poller is not None:
        gate.poller.stop()
    await gate.refunds.asettled()
    if gate.rules.counts is not None:
        exporter.export()


def require(store: Any, key_prefix: str) -> None:
    """Ask a store of either kind and wait for the answer. Raises `StoreError` if there is none."""
    if isinstance(store, SyncStore):
        try:
            store.spend(_question(key_prefix), ANSWER_TIMEOUT)
        except StoreError as error:
            raise _no_answer(error) from error
        if is_redis(store):
            store.close()  # a server may fork now, and connections are no inheritance
    else:
        with ThreadPoolExecutor(1) as elsewhere:  # an event loop may run here
            elsewhere.submit(asyncio.run, _required_once(store, key_prefix)).result()


async def arequire(store: AsyncStore, key_prefix: str) -> None:
    """Ask a store in the running event loop and wait for the answer. Raises `StoreError` if there is none."""
    if switch.null_store is not None:
        return
    try:
        await store.aspend(_question(key_prefix), ANSWER_TIMEOUT)
    except StoreError as error:
        raise _no_answer(error) from error


async def _required_once(store: AsyncStore, key_prefix: str) -> None:
    try:
        await arequire(store, key_prefix)
    finally:
        await store.aclose()


def _question(key_prefix: str) -> Plan:
    """A plan that clears a bucket which nobody uses: a store that cannot write is of no use either."""
    return Plan.reset([Charge(f"{key_prefix}:start:probe", bucket_of("1/second"), 1, enforced=False, rule=None)])


def _no_answer(error: StoreError) -> StoreError:
    return StoreError(f"require_store: the store does not answer: {error}", error.fault)


def ask_in_background(store: object) -> None:
    """Have a store of threads connect by itself, so that what is wrong with it is told before the first request.

    Not in a process that is about to fork, but in its children.
    """
    if is_redis(store):
        store.connect_soon(in_children=is_going_to_fork())


def is_going_to_fork() -> bool:
    """True if the server loads the application before it forks: uWSGI, which forks in C unsaid, or gunicorn --preload."""
    return "uwsgi" in sys.modules or "--preload" in server_options()
