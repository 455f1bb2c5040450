"""Ban, pardon and reset one client. Only the page itself may ask for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from limitgate.algorithms import ban
from limitgate.errors import ConfigError
from limitgate.gate.flow import ConfigFlow
from limitgate.gate.journal import JournalFlows
from limitgate.gate.planning.compiled_rule import forgetting
from limitgate.http.request import Request
from limitgate.limits.limit import seconds_of
from limitgate.limits.plan import Charge, Plan
from limitgate.messages.text import printable, shortened
from limitgate.observing.logs import audited
from limitgate.page.explaining import Known, every_rule
from limitgate.rules.callers import DEFAULT_TIER
from limitgate.rules.rule import Rule

ACTIONS = frozenset({"ban", "pardon", "reset"})
TOKEN_HEADER = "x-limitgate-token"  # noqa: S105 - its name
LONGEST_BAN_S = 366 * 86_400
_DIGEST = re.compile(r"[0-9a-f]{32}")


def not_from_here(request: Request) -> str | None:
    """Return why a request may be that of another site; None if it is of this page.

    Browsers set ``Sec-Fetch-Site`` and no script can. ``Origin`` is for those that don't, and proxies may change the host.
    """
    headers = request.headers
    site = headers.get("sec-fetch-site")
    if site is not None and site != "same-origin":
        return f"the request comes from another site (Sec-Fetch-Site: {site:.40}), expected same-origin"
    origin = headers.get("origin")
    if site is None and (origin is None or not _is_host(origin, headers.get("host", ""))):
        return "the header Origin is not this host, expected a request of the page itself"
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return "the body is not declared as JSON, expected Content-Type: application/json"
    return None


def _is_host(origin: str, host: str) -> bool:
    with suppress(ValueError):
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()
    return False


def acting(known: Known, action: str, asked: Mapping[str, Any], who: str) -> ConfigFlow[dict[str, Any]]:
    """Change the state of a client, and note in the journal who did it. Raises `ConfigError` and `StoreError`."""
    digest, tier = asked.get("key"), asked.get("tier") or DEFAULT_TIER
    if not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise ConfigError("key is missing, expected the 32 hex digits that name the client's bucket")
    rules = _rules_named(known, asked.get("rule"), tier)
    name = " ".join([rules[0].name, _text(asked.get("who"), 128) or f"#{digest[:8]}"])
    reason = _text(asked.get("reason"), 500) or None
    seconds = _seconds(asked.get("seconds")) if action == "ban" else None
    charges = [charge for rule in rules for charge in known.charges(rule, digest)]
    unique = list({charge.key: charge for charge in charges}.values())
    yield from audited(_changing(known, action, unique, seconds), action, partial(str, name), reason, author=who)
    keys = [charge.key for charge in unique]
    journal = JournalFlows(known.settings.key_prefix, known.timeout)
    yield from journal.noting(action, name, keys, reason, seconds, bans=action == "ban", by=who)
    return {"done": action, "name": name}


def _changing(known: Known, action: str, charges: Sequence[Charge], seconds: float | None) -> ConfigFlow[None]:
    if action == "reset":
        yield Plan.reset(charges), known.timeout
        return
    if action == "pardon":
        yield forgetting(charges), known.timeout
    yield Plan.ban(charges, ban.microseconds(seconds) if action == "ban" else 0), known.timeout


def _rules_named(known: Known, name: Any, tier: Any) -> list[Rule]:
    """Return the rule of a tier, or, if it is not there, all of this name: they may count in the same bucket."""
    found = [rule for _, rule in every_rule(known) if rule.name == name and rule.has_counts]
    of_tier = [rule for of, rule in every_rule(known) if rule.name == name and of == tier and rule.has_counts]
    if not found:
        raise ConfigError(f"there is no rule {name!r:.80} that counts, expected one of the service's rules")
    return (of_tier or found)[:1] if of_tier else found


def _seconds(given: Any) -> float:
    try:
        seconds = seconds_of(given)
    except ConfigError as error:
        raise ConfigError(f"seconds: {error}") from None
    if not 0 < seconds <= LONGEST_BAN_S:
        raise ConfigError(f"seconds is {given!r:.80}, expected more than 0, at most a year")
    return seconds


def _text(given: Any, longest: int) -> str:
    return shortened(printable(given[: 2 * longest]), longest).strip() if isinstance(given, str) else ""
