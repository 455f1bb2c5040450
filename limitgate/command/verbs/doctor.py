"""The verb ``doctor``."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, Literal, NamedTuple

import click
from packaging.specifiers import SpecifierSet

from limitgate.command.applications import RULES
from limitgate.command.opened import chosen_of, store_options
from limitgate.command.output import FOUND, NO_STORE, Warnings, json_option, print_json, print_table, say, seconds
from limitgate.command.service import service
from limitgate.command.stored import settings_of, store_of
from limitgate.errors import ConfigError, StoreError
from limitgate.limiter.limiter import Limiter
from limitgate.rules.review import review
from limitgate.rules.rule import Rule, RuleSet
from limitgate.rules.settings import Settings, warn_about_environment
from limitgate.stores import url_of
from limitgate.stores.redis.server_facts import ServerFacts, server_facts
from limitgate.stores.redis.url import shown

Level = Literal["error", "warning", "note"]

_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;.*extra\s*==\s*['\"]([\w-]+)['\"])?")
_DIAGNOSIS = re.compile(r"(LG\d{3}) (.*) \(limitgate doc LG\d{3}\)", re.DOTALL)
_DEVELOPMENT = frozenset({"bench", "dev", "docs", "fuzz", "proxies", "release", "test"})
_OLDEST_SERVER = (6, 2)
_SLOW_CLOCK = 1.0
"""Seconds."""
_SECRETS = frozenset({"secret", "store"})


class _Finding(NamedTuple):
    area: Literal["versions", "options", "rules", "store"]
    level: Level
    code: str | None
    message: str


class _Report:
    def __init__(self) -> None:
        self.findings: list[_Finding] = []
        self.reachable = True

    def add(self, area: Any, level: Level, message: str, code: str | None = None) -> None:
        finding = _Finding(area, level, code, message)
        if finding not in self.findings:
            self.findings.append(finding)

    def drop_repeated(self) -> None:
        """Drop errors of the store that a diagnostic repeats with its code."""
        diagnosed = [each.message for each in self.findings if each.code is not None]

        def is_repeated(finding: _Finding) -> bool:
            reason = finding.message.partition(": ")[2]
            return finding.code is None and bool(reason) and any(message.endswith(f": {reason}") for message in diagnosed)

        self.findings = [each for each in self.findings if not is_repeated(each)]

    @contextmanager
    def logged(self, area: str) -> Iterator[None]:
        """Turn diagnostics that are logged in the block into findings."""
        log, warnings = logging.getLogger("limitgate"), Warnings()
        before, propagates = log.handlers[:], log.propagate
        log.handlers[:], log.propagate = [warnings], False
        try:
            yield
        finally:
            log.handlers[:], log.propagate = before, propagates
            for record in warnings.records:
                if diagnosis := _DIAGNOSIS.fullmatch(record.getMessage()):
                    level: Level = "error" if record.levelno >= logging.ERROR else "warning"
                    self.add(area, level, diagnosis[2], diagnosis[1])


@click.command("doctor")
@store_options
@click.option("--rules", metavar="PATH", help=f"{RULES}.  [env var: LIMITGATE_RULES]")
@json_option
@click.pass_context
def verb(ctx: click.Context, /, *, rules: str | None, as_json: bool, **options: Any) -> None:
    """Examine the versions, options, rules and store of a service. The output has no secrets, so you can send it to others.

    Exit status 1: there are errors or warnings; 3: the store does not answer.

    For example: limitgate doctor --app shop.main:app
    """
    report = _Report()
    versions = _versions(report)
    with report.logged("options"):
        warn_about_environment()
        settings, in_force = _settings(rules, options, report)
    _review(in_force, report)
    with report.logged("store"):
        servers = _servers(settings, options["timeout"], report)
    report.drop_repeated()
    facts = {
        "versions": versions,
        "options": _options(settings, in_force),
        "store": {"url": shown(settings.store), "servers": [each._asdict() for each in servers]},
        "findings": [each._asdict() for each in report.findings],
    }
    if as_json:
        print_json(facts)
    else:
        _print(facts, servers, report)
    is_ill = any(each.level != "note" for each in report.findings)
    ctx.exit(FOUND if is_ill and report.reachable else 0 if report.reachable else NO_STORE)


def _settings(rules: str | None, options: dict[str, Any], report: _Report) -> tuple[Settings, RuleSet | None]:
    chosen = chosen_of(options)
    rules = rules or (None if options["app"] else os.environ.get("LIMITGATE_RULES"))
    if rules or options["app"]:
        try:
            named = service(rules, options["app"], **chosen)
        except ConfigError as error:
            for mistake in error.every:
                report.add("rules", "error", str(mistake))
        else:
            return named.settings, named.rules
    return settings_of(chosen), None


def _versions(report: _Report) -> dict[str, str]:
    found = {"python": sys.version.split()[0], "limitgate": _version("limitgate") or "not installed"}
    for text in requires("limitgate") or [] if _version("limitgate") else []:
        name, wanted, extra = _REQUIREMENT.match(text).groups()  # type: ignore[union-attr]
        there = None if name == "limitgate" or extra in _DEVELOPMENT else _version(name)
        if there is None:
            continue
        found[name.lower()] = there
        wanted = wanted.strip("() ")
        if there not in SpecifierSet(wanted, prereleases=True):
            report.add("versions", "error", f"{name} {there} is installed, expected {wanted}")
    if "hiredis" not in found:
        report.add(
            "versions", "note", "hiredis is not installed; it parses Redis' replies faster: pip install 'limitgate[hiredis]'"
        )
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _options(settings: Settings, rules: RuleSet | None) -> dict[str, Any]:
    told = {name: _shown(getattr(settings, name)) for name in sorted(settings.model_fields_set - {"rules"} - _SECRETS)}
    if settings.secret is not None:
        told["secret"] = "set"  # noqa: S105 - not the secret itself
    if rules is not None:
        told["rules"] = {tier: len(of_tier) for tier, of_tier in rules.tiers.items()}
    return told


def _shown(value: Any) -> Any:
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _shown(each) for name, each in value.items()}
    return getattr(value, "__qualname__", type(value).__qualname__)


def _review(rules: RuleSet | None, report: _Report) -> None:
    if rules is None:
        return
    for oddity in review(rules, rules.listed_callers, identifies=True):
        about: Any = oddity.about
        name = about if isinstance(about, str) else about.name if isinstance(about, Rule) else about.id
        report.add("rules", "warning", f"{name}: {oddity.message}")


def _servers(settings: Settings, timeout: float, report: _Report) -> list[ServerFacts]:
    try:
        store = store_of(settings.store)
    except click.UsageError as error:
        report.add("store", "error", error.message)
        return []
    if store is None:
        report.add("store", "note", "memory:// counts in each process separately; set a redis:// URL for several processes")
        return []
    servers: list[ServerFacts] = []
    try:
        try:
            if (where := _where(settings.store)) is not None:
                servers = server_facts(*where, settings.key_prefix)
            limiter = Limiter(store, timeout=timeout, key_prefix=settings.key_prefix)
            limiter.hit("limitgate-doctor", "1000/second")
            limiter.reset("limitgate-doctor", "1000/second")
        finally:
            store.close()
    except (StoreError, ConfigError) as error:
        report.reachable = isinstance(error, ConfigError)
        report.add("store", "error", str(error))
    for server in servers:
        _examine(server, settings, report)
    return servers


def _where(store: Any) -> tuple[str, Any] | None:
    url = url_of(store)
    credentials = None if isinstance(store, str) or url is None else store.made_of[1].get("credentials")
    return None if url is None else (url, credentials)


def _examine(server: ServerFacts, settings: Settings, report: _Report) -> None:
    name = server.server
    number = re.search(r"(\d+)\.(\d+)", server.kind or "")
    if number and (int(number[1]), int(number[2])) < _OLDEST_SERVER:
        report.add("store", "error", f"{name} is {server.kind}, expected Redis 6.2 or newer, or Valkey")
    if server.clock_difference is not None and abs(server.clock_difference) > _SLOW_CLOCK:
        ahead = "ahead of" if server.clock_difference > 0 else "behind"
        apart = seconds(abs(server.clock_difference))
        report.add("store", "warning", f"the clock of {name} is {apart} {ahead} this machine's; let NTP set both")
    if server.latency > settings.timeout / 2:
        slow = f"a call to {name} takes {seconds(server.latency)}, and the option timeout is {seconds(settings.timeout)}"
        report.add("store", "warning", f"{slow}; set a longer timeout, or move service and store closer together")
    if server.saves is False:
        report.add("store", "note", f"{name} loses its data when it restarts; set appendonly to yes to keep usage and bans")


def _print(facts: dict[str, Any], servers: list[ServerFacts], report: _Report) -> None:
    say(f"versions: {', '.join([f'{name} {number}' for name, number in facts['versions'].items()])}")
    say(f"options: {', '.join([f'{name}={value}' for name, value in facts['options'].items()]) or 'defaults'}")
    say(f"store: {facts['store']['url']}")
    rows = [
        (
            each.server,
            each.kind or "unknown",
            each.role or "unknown",
            f"{each.latency * 1000:.2f} ms",
            "unknown" if each.clock_difference is None else f"{each.clock_difference:+.3f} s",
            each.policy or "unknown",
            {True: "yes", False: "no", None: "unknown"}[each.saves],
        )
        for each in servers
    ]
    if rows:
        print_table(("Server", "Version", "Role", "Latency", "Clock", "Eviction", "Saves"), rows)
    say()
    for each in report.findings:
        say(f"{each.level}: {each.area}: {f'{each.code} ' if each.code else ''}{each.message}")
    if not any(each.level != "note" for each in report.findings):
        say("no problem found")
