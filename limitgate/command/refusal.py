"""What the id of a refusal says: when it was, which rule refused, and how the bucket stands that had no room."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, NamedTuple

import click

from limitgate.command.decisions import decision_fields, print_decision, seconds
from limitgate.command.output import say
from limitgate.errors import ConfigError
from limitgate.gate.journal import Ban, Journal
from limitgate.gate.refusals import kept_keys, place_of_keys
from limitgate.limits.decision import Decision, decide
from limitgate.limits.plan import Charge, Plan
from limitgate.limits.refusal_id import RefusalId, RefusalKey, tag_of, time_of
from limitgate.messages.text import listed, printable
from limitgate.rules.rule import Rule, RuleSet
from limitgate.stores import SyncStore, open_sync_store
from limitgate.stores.base import ConfigRequest, SyncConfigStore


class Refused(NamedTuple):
    """A bucket that may have refused: mostly the only one, as few rules share a tag."""

    rule: Rule
    tiers: Sequence[str]
    """Tiers in which the rule has this name and these limits."""
    key: str
    decision: Decision | None
    """How the bucket stands now; None without a store, and for limits that a callable gives."""
    ban: Ban | None
    """The ban that somebody has set by this command, None if there is none."""


class Resolved(NamedTuple):
    """An id with what is known of it."""

    id: RefusalId
    found: Sequence[Refused]


def resolve(
    text: str, rules: RuleSet, in_code: Sequence[Rule], *, store: str | None, key_prefix: str, secret: bytes, timeout: float
) -> Resolved:
    """Resolve an id by the rules of the service and its limits ``in_code``; its key comes from the secret, or from the store.

    Raises `click.UsageError` for what is none and without a key, `ConfigError` if the store has no key, and `StoreError` as the
    store does.
    """
    try:
        time_of(text)
        opened = None if store is None else open_sync_store(store)
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if opened is None:
        if not secret:
            raise click.UsageError("ids are encrypted, expected --store, which keeps their key, or LIMITGATE_SECRET")
        refusal, candidates = _read(text, [RefusalKey.derived(secret)], rules, in_code, key_prefix)
        return Resolved(refusal, [Refused(*each, None, None) for each in candidates])
    with closing(opened):
        keys = [RefusalKey.derived(secret)] if secret else _kept_keys(opened, key_prefix, timeout)
        refusal, candidates = _read(text, keys, rules, in_code, key_prefix)
        bans = Journal(opened, key_prefix, timeout).bans() if isinstance(opened, SyncConfigStore) else []
        found = []
        for rule, tiers, key in candidates:
            charges = [Charge(key + bucket.suffix, bucket, 1, enforced=True, rule=rule.name) for bucket in rule.buckets]
            plan = Plan.look(charges)
            decision = decide(plan, opened.spend(plan, timeout)) if charges else None
            charged = {charge.key for charge in charges}
            found.append(Refused(rule, tiers, key, decision, next((ban for ban in bans if charged & set(ban.keys)), None)))
        return Resolved(refusal, found)


def _kept_keys(store: SyncStore, key_prefix: str, timeout: float) -> list[RefusalKey]:
    place = place_of_keys(key_prefix)
    kept = store.config(ConfigRequest(place), timeout).text if isinstance(store, SyncConfigStore) else None
    if not (keys := kept_keys(kept)):
        raise ConfigError(
            f"the store keeps no key of ids under {place}, expected the store and LIMITGATE_KEY_PREFIX of the service, or its "
            "LIMITGATE_SECRET if it has one"
        )
    return [*map(RefusalKey, keys)]


def _read(
    text: str, keys: Sequence[RefusalKey], rules: RuleSet, in_code: Sequence[Rule], key_prefix: str
) -> tuple[RefusalId, list[tuple[Rule, Sequence[str], str]]]:
    """Read an id by the first key under which there are rules that may have made it, else by the first one."""
    read = [key.read(text) for key in keys]
    for refusal in read:
        if candidates := list(_candidates(refusal, rules, in_code, key_prefix)):
            return refusal, candidates
    return read[0], []


def _candidates(
    refusal: RefusalId, rules: RuleSet, in_code: Sequence[Rule], key_prefix: str
) -> Iterator[tuple[Rule, Sequence[str], str]]:
    """Rules that may have made an id, with their tiers and the key of the bucket."""
    of_tiers = [(tier, rule) for tier, of_tier in rules.tiers.items() for rule in of_tier if tag_of(rule.name) == refusal.tag]
    places: list[Rule] = []
    for rule in in_code:
        if tag_of(rule.name) == refusal.tag and rule not in places:  # places of one name may share their limits
            places.append(rule)
            of_tiers += [(tier, rule) for tier in ([rule.tier] if rule.tier else rules.tiers)]
    for rule in {id(rule): rule for _, rule in of_tiers}.values():
        yield rule, [tier for tier, each in of_tiers if each is rule], f"{key_prefix}:{rule.name}:{refusal.digest}"


def as_json(resolved: Resolved) -> dict[str, Any]:
    """The value of ``--json``."""
    return {
        "at": resolved.id.at,
        "digest": resolved.id.digest,
        "found": [
            {
                "rule": each.rule.name,
                "tiers": list(each.tiers),
                "key": each.key,
                "decision": None if each.decision is None else decision_fields(each.decision),
                "ban": None if each.ban is None else _ban(each.ban),
            }
            for each in resolved.found
        ],
    }


def _ban(ban: Ban) -> dict[str, Any]:
    return {"key": ban.key, "retry_after": ban.retry_after(time.time()), "reason": ban.reason, "by": ban.by}


def show(resolved: Resolved) -> None:
    """Print it for people."""
    at = resolved.id.at
    say(f"refused {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC, {_ago(time.time() - at)}")
    for place, (rule, tiers, key, decision, ban) in enumerate(resolved.found):
        limits = listed([*map(str, rule.every_limit)]) or "limits from a callable"
        by = "or by" if place else "by"
        say("", f"{by} rule {rule.name} of tier {listed(tiers, ' and ')}: {limits}, counted by {', '.join(rule.counted_by)}")
        say(key)
        if decision is not None:
            print_decision(decision)
        if ban is not None:
            why = f": {printable(ban.reason)}" if ban.reason else ""
            say(f"banned by {ban.by} for {seconds(ban.retry_after(time.time()))} more{why}")
    if not resolved.found:
        ending = resolved.id.digest
        say("", f"no rule of these refused: a decorator or dependency did (--app), or other rules; its key ends in {ending}")
        say("unless the id is of another key: older than a flush of the store, or of a process without this store or secret")


def _ago(elapsed: float) -> str:
    return f"{seconds(round(elapsed))} ago" if elapsed >= 1 else "a moment ago"
