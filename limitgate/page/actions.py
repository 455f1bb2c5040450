"""Ban, pardon and reset, by the page itself only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from limitgate.errors import ConfigError
from limitgate.fleet.actions import charges, client_bucket
from limitgate.gate.flow import ConfigFlow
from limitgate.gate.journal import JournalFlows
from limitgate.http.request import Request
from limitgate.limiter.rule_bucket import RuleBucketOperations
from limitgate.limits.limit import seconds_of
from limitgate.messages.text import printable, shortened
from limitgate.observing.logs import audited

ACTIONS = frozenset({"ban", "pardon", "reset"})
TOKEN_HEADER = "x-limitgate-token"  # noqa: S105 - its name
LONGEST_BAN_S = 366 * 86_400
_DIGEST = re.compile(r"[0-9a-f]{32}")


def not_from_here(request: Request) -> str | None:
    """Return why a request may come from another site, or None.

    Scripts can't set ``Sec-Fetch-Site``. Older browsers send ``Origin``, and proxies may change the host.
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


def acting(
    figures: Mapping[str, Any], action: str, asked: Mapping[str, Any], who: str, timeout: float
) -> ConfigFlow[dict[str, Any]]:
    """Raises `ConfigError` for an unlisted client, and `StoreError`."""
    rule, tier, key = [_text(asked.get(name), 128) for name in ("rule", "tier", "key")]
    if not _DIGEST.fullmatch(key):
        raise ConfigError("key is missing, expected the 32 hex digits that name the client's bucket")
    if action == "pardon":
        name, bucket = yield from _banned(figures, key, timeout)
    else:
        name, bucket = client_bucket(figures, rule, tier, key, timeout=timeout)
    reason = _text(asked.get("reason"), 500) or None
    seconds = _seconds(asked.get("seconds")) if action == "ban" else None
    flow = bucket.banning(seconds) if action == "ban" else bucket.pardoning() if action == "pardon" else bucket.resetting()
    yield from audited(flow, action, partial(str, name), reason, author=who)
    journal = JournalFlows(figures["prefix"], timeout)
    yield from journal.noting(action, name, bucket.keys, reason, seconds, bans=action == "ban", by=who)
    return {"done": action, "name": name}


def _banned(figures: Mapping[str, Any], digest: str, timeout: float) -> ConfigFlow[tuple[str, RuleBucketOperations]]:
    prefix = figures["prefix"]
    journal = JournalFlows(prefix, timeout)
    listed = yield from journal.listing()
    ban = next((each for each in listed if each.digest == digest), None)
    if ban is None:
        raise ConfigError(f"no ban has the key {digest!r}, expected that of a ban in the list")
    rule = ban.key.partition(" ")[0]
    limits = next((each["limits"] for each in figures["rules"] if each["name"] == rule), None)
    known = {} if limits is None else {each.key: each for each in charges(f"{prefix}:{rule}:{digest}", rule, limits)}
    found = [known.get(key) or charges(key, "ban", ())[0] for key in ban.keys]
    return ban.key, RuleBucketOperations([found], timeout, journal)


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
