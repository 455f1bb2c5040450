"""Explains the id of a refusal: time, rule, current state of the bucket, and log lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from datetime import UTC, datetime
from typing import Any, NamedTuple

import click

from limitgate.command.bucket_owners import Trace, search
from limitgate.command.output import banned, decision_fields, print_decision, say, seconds
from limitgate.command.service import Service
from limitgate.command.stored import store_of
from limitgate.errors import ConfigError
from limitgate.gate.journal import Ban, Journal
from limitgate.gate.refusals import kept_keys, place_of_keys
from limitgate.gate.refused_rules import RefusedRule
from limitgate.http.response import RefusalId, RefusalKey, time_of
from limitgate.limits.decision import Decision, decide
from limitgate.messages.text import listed, printable, shortened
from limitgate.rules.options import check_part
from limitgate.stores import SyncStore
from limitgate.stores.base import ConfigRequest, SyncConfigStore


class _Refused(NamedTuple):
    by: RefusedRule
    decision: Decision | None
    """Current state; None without a store, or for callable limits."""
    ban: Ban | None

    @property
    def is_certain(self) -> bool:
        return self.by.is_certain_of(self.decision)


class _Resolved(NamedTuple):
    id: RefusalId
    found: Sequence[_Refused]
    is_state_known: bool
    traces: Sequence[Trace] | None
    knows_routes: bool
    key_prefix: str


def resolve(text: str, asked: Service, logs: Sequence[str], *, timeout: float) -> _Resolved:
    """Resolve an id by a service's rules and the key that encrypts its ids.

    Raises `click.UsageError` for an invalid id or missing key, `ConfigError` if the store has no key, and `StoreError`.
    """
    settings = asked.settings
    try:
        time_of(text)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    secret = settings.secret_bytes
    opened = store_of(settings.store)
    if opened is None and not secret and "store" not in settings.model_fields_set:
        raise click.UsageError("ids are encrypted, expected --store with their key, or LIMITGATE_SECRET")
    with nullcontext() if opened is None else closing(opened):
        keys = [RefusalKey.derived(secret)] if secret else _kept_keys(opened, settings.key_prefix, timeout)
        refusal, candidates = asked.refusers.read(text, keys)
        bans = [] if opened is None else Journal(opened, settings.key_prefix, timeout).bans()
        found = [_standing(opened, timeout, bans, each, asked) for each in candidates]
    if not found:
        _check_time(text, refusal.at)
    traces = search(logs, keys, refusal, [each.by.key for each in found], asked) if logs else None
    return _Resolved(refusal, found, opened is not None, traces, asked.knows_routes, settings.key_prefix)


_FIRST = datetime(2020, 1, 1, tzinfo=UTC).timestamp()
_AHEAD = 2 * 366 * 86_400
"""An id's time may be this many seconds ahead of this clock."""


def _standing(store: SyncStore | None, timeout: float, bans: Sequence[Ban], by: RefusedRule, asked: Service) -> _Refused:
    plan = by.plan(asked.settings)
    decision = decide(plan, store.spend(plan, timeout)) if store is not None and plan.charges else None
    charged = {charge.key for charge in plan.charges}
    ban = next((ban for ban in bans if charged & set(ban.keys)), None)
    return _Refused(by, decision, ban)


def _kept_keys(store: SyncConfigStore | None, key_prefix: str, timeout: float) -> list[RefusalKey]:
    place = place_of_keys(key_prefix)
    keys = () if store is None else kept_keys(store.config(ConfigRequest(place), timeout).text)
    if not keys:
        raise ConfigError(
            f"the store has no key of ids under {place}, expected the store and --key-prefix of the service, or its "
            "LIMITGATE_SECRET if it has one"
        )
    return [*map(RefusalKey, keys)]


def _check_time(text: str, at: float) -> None:
    if not _FIRST < at < time.time() + _AHEAD:
        when = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}"
        raise click.UsageError(
            f"{text!r:.80} can't be the id of a refusal, because its time is {when}; expected the id exactly as in the response"
        )


def as_json(resolved: _Resolved) -> dict[str, Any]:
    return {
        "at": resolved.id.at,
        "digest": resolved.id.digest,
        "found": [
            {
                "rule": each.by.rule.name,
                "tiers": list(each.by.tiers),
                "key": each.by.key,
                "caller": each.by.caller,
                "decision": decision_fields(each.decision) if each.decision is not None and each.is_certain else None,
                "ban": None if each.ban is None else each.ban.fields(time.time()),
            }
            for each in resolved.found
        ],
        "log": None if resolved.traces is None else [each._asdict() for each in resolved.traces],
    }


def show(resolved: _Resolved) -> None:
    at, prefix = resolved.id.at, resolved.key_prefix
    elapsed = time.time() - at
    ago = f"{seconds(round(elapsed))} ago" if elapsed >= 1 else "just now"
    say(f"refused {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC, {ago}")
    for place, each in enumerate(resolved.found):
        rule, tiers, ban = each.by.rule, each.by.tiers, each.ban
        of_caller = "" if each.by.caller is None else f" of caller {each.by.caller}"
        by = "or by" if place else "by"
        counted = f"counted by {', '.join(rule.counted_by)}"
        say("", f"{by} rule {rule.name} of tier {listed(tiers, ' and ')}: {each.by.limits}{of_caller}, {counted}")
        say(each.by.key)
        if not each.is_certain:
            say(
                f"the limits of this client are not known, because its caller may have limits of its own; expected limitgate "
                f"peek --rule {rule.name} --limits LIMIT with the parts of its key"
                if rule.buckets
                else f"the limits come from a callable; expected limitgate peek --rule {rule.name} --limits LIMIT with the "
                "parts of its key"
            )
        if each.decision is not None:
            if not each.is_certain:
                say("under the limits of the rule:")
            print_decision(each.decision)
            if each.decision.allowed and not any(window.used for window in each.decision.windows):
                say(f"unused: refilled or reset since, or the service has another store or --key-prefix than {prefix}")
        if ban is not None:
            why = f": {printable(ban.reason)}" if ban.reason else ""
            say(f"{banned(ban.by, ban.retry_after(time.time()))}{why}")
    if not resolved.found:
        say(
            "",
            "none of these rules refused this request: pass --app for decorators, or other rules; the bucket's key ends in "
            f"{resolved.id.digest}",
        )
        say(
            "or the id was encrypted with another key: before a flush of the store, or by a process with another store, secret "
            f"or --key-prefix than {prefix}"
        )
        say("or the id is mistyped: copy it from the response, because one wrong character makes it unreadable")
    _show_traces(resolved.traces)
    if resolved.traces is not None and not any(each.client for each in resolved.traces):
        _say_unlogged(resolved.found, knows_routes=resolved.knows_routes)


def _show_traces(traces: Sequence[Trace] | None) -> None:
    if traces is None:
        say("", "to find the client: --log FILE with the service's log or an access log")
        return
    say("", "in the logs:" if traces else "these logs have no line about this bucket")
    for each in traces:
        client = "" if each.client is None else f"client {each.client}, "
        say(f"{client}{each.file}:{each.line}: {shortened(each.text)}")


def _say_unlogged(found: Sequence[_Refused], *, knows_routes: bool) -> None:
    for rule in [each.by.rule for each in found]:
        labels = [*(label for part in rule.key for label in check_part(part)), *rule.given_parts]
        absent = [label for label in labels if label not in _LOGGED]
        if absent:
            say(f"rule {rule.name} counts by {listed(absent)}, which only a JSON access log with headers has")
        if "path" in labels and not knows_routes:
            say(f"rule {rule.name} counts by route, so an access log needs --app MODULE:APP, which knows the routes")


_LOGGED = frozenset({"path", "ip", "method", "tier", "global"})
