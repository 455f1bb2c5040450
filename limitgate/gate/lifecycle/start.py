"""Logs the configuration and its risks, and connects to the store before the first request."""

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
from limitgate.fleet.publisher import Publisher
from limitgate.fleet.tally import Tally
from limitgate.gate.gate import Gate
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.rate_fields import WINDOW_UNITS
from limitgate.limits.bucket import bucket_of
from limitgate.limits.plan import Charge, Plan
from limitgate.messages.diagnostics import Diagnosis
from limitgate.messages.text import listed
from limitgate.observing.counts import Counts
from limitgate.observing.exporter import exporter
from limitgate.process import switch
from limitgate.process.clock import asyncio_loop
from limitgate.rules.rule import Rule, RuleSet
from limitgate.rules.settings import Settings, server_options, workers_of_server
from limitgate.stores import AsyncStore, MemoryStore, SyncStore, is_async_redis, is_redis
from limitgate.stores.base import AsyncFleetStore, SyncFleetStore
from limitgate.stores.redis.url import shown

log: logging.Logger = logging.getLogger("limitgate")

ANSWER_TIMEOUT = 5.0
"""Seconds."""


def announce(settings: Settings, rules: RuleSet | None) -> None:
    """Log the configuration without secrets. The gate is None if disabled."""
    if rules is None:
        log.info("LimitGate %s is disabled", installed_version())
    else:
        log.info(
            "LimitGate %s: %s from %s%s; store %s; on_error %s; trusted proxies %s%s",
            installed_version(),
            _counted(rules),
            rules.source or (settings.rules if isinstance(settings.rules, str | Path) else "Python"),
            f", polled every {settings.reload:g} s" if settings.reload else "",
            shown(settings.store),
            settings.on_error,
            listed(settings.trusted_proxies) or "none",
            "; shadow, nothing is refused" if settings.shadow else "",
        )


@cache
def installed_version() -> str:
    with suppress(PackageNotFoundError):
        return version("limitgate")
    return "(not installed)"


def _counted(rules: RuleSet) -> str:
    tiers = [f"{len(of_tier)} for tier {tier}" for tier, of_tier in rules.tiers.items()]
    return f"rules: {listed(tiers)}"


def warn_about_headers(settings: Settings, rules: RuleSet, proxies: TrustedProxies) -> None:
    for internet in proxies.trust_everybody:
        Diagnosis.TRUSTS_ALL.log(internet)
    header = settings.forwarded_header
    if "_" in header:
        Diagnosis.UNDERSCORE.log(header, header.replace("_", "-"))
    if settings.headers == ("x-ratelimit-windows",):
        every = dict.fromkeys(rule.name for of_tier in rules.tiers.values() for rule in of_tier if _shows_no_window(rule))
        for name in every:
            Diagnosis.NO_FIELDS.log(name, listed(WINDOW_UNITS))


def _shows_no_window(rule: Rule) -> bool:
    limits = [limit for limit in rule.every_limit if limit.period]
    return bool(limits) and not any(limit.unit in WINDOW_UNITS for limit in limits)


def warn_about_workers(settings: Settings, rules: RuleSet, store: object) -> None:
    workers = workers_of_server()
    if workers > 1 and isinstance(store, MemoryStore):
        Diagnosis.MEMORY_PER_WORKER.log(workers)
    elif workers > 1 and settings.processes == 1 and _has_local_rules(settings, rules):
        Diagnosis.LOCAL_PER_WORKER.log(workers)


def _has_local_rules(settings: Settings, rules: RuleSet) -> bool:
    every = [rule for of_tier in rules.tiers.values() for rule in of_tier]
    return "local" in (settings.on_error, *(rule.on_error for rule in every))


def counts_of(settings: Settings, *, is_observed: bool) -> Counts | None:
    if settings.fleet:
        return Counts(Tally(), defers=not is_observed)
    return Counts() if is_observed else None


def watch(gate: Gate, counts: Counts, settings: Settings) -> None:
    """Write snapshots for the fleet once the store has answered."""
    store, tally = gate.store, counts.tally
    if tally is not None and isinstance(store, SyncFleetStore | AsyncFleetStore):
        counts.publisher = Publisher(
            gate, store, settings.key_prefix, counts, tally=tally, names=settings.names, version=installed_version()
        )
        # Start in the process that gets requests, because uWSGI may fork without notice.
        gate.outages.at_first_answer.append(counts.publisher.start)
        gate.outages.at_recovery.append(counts.publisher.resume)


def begin_to_publish(gate: Gate, *, in_children: bool = False) -> None:
    counts = gate.rules.counts
    if counts is not None and counts.publisher is not None:
        counts.publisher.start(in_children=in_children)


async def astartup(gate: Gate) -> None:
    """Connect, and poll for rules. Raises `ConfigError` for a wrong event loop."""
    for rules in gate.rules.planner.rule_set.tiers.values():
        for rule in rules:
            if (option := rule.needs_asyncio) is not None:
                asyncio_loop(f"{option} of rule {rule.name!r}")
    if is_async_redis(gate.store) and switch.null_store is None:
        await gate.store.connect()
        gate.refusals.agree_soon()
    if gate.poller is not None:
        gate.poller.start()
    begin_to_publish(gate)


async def ashutdown(gate: Gate) -> None:
    """Stop polling, wait for refunds, journal bans, and export metrics."""
    if gate.poller is not None:
        gate.poller.stop()
    await gate.refunds.asettled()
    await gate.charging.bans.notes.asettled()
    counts = gate.rules.counts
    if counts is not None and counts.publisher is not None:
        await counts.publisher.aend()
    if gate.rules.counts is not None:
        exporter.export()


def require(store: Any, key_prefix: str) -> None:
    """Check that a sync or async store works. Raises `StoreError`."""
    if isinstance(store, SyncStore):
        try:
            store.spend(_question(key_prefix), ANSWER_TIMEOUT)
        except StoreError as error:
            raise _no_answer(error) from error
        if is_redis(store):
            # The server may fork, and children must not inherit connections.
            store.close()
    else:
        # This thread may run an event loop.
        with ThreadPoolExecutor(1) as elsewhere:
            elsewhere.submit(asyncio.run, _required_once(store, key_prefix)).result()


async def arequire(store: AsyncStore, key_prefix: str) -> None:
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
    return Plan.reset([Charge(f"{key_prefix}:start:probe", bucket_of("1/second"), 1, enforced=False, rule=None)])


def _no_answer(error: StoreError) -> StoreError:
    return StoreError(f"require_store: the store does not answer: {error}", error.fault)


def ask_in_background(store: object) -> None:
    """Connect in the background, to log problems before the first request. If a fork follows, only the children connect."""
    if is_redis(store):
        store.connect_soon(in_children=is_going_to_fork())


def is_going_to_fork() -> bool:
    return "uwsgi" in sys.modules or "--preload" in server_options()
