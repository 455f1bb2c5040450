"""The verb ``explain``."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import click

from limitgate.command import refusal
from limitgate.command.applications import RULES
from limitgate.command.client_state import document_of, header_of, target_of
from limitgate.command.opened import app_option, key_options, rules_beside, timeout_option
from limitgate.command.output import (
    FOUND,
    decision_fields,
    json_option,
    logs_from,
    print_decision,
    print_json,
    print_table,
    say,
    window_fields,
)
from limitgate.command.service import Service, lenient, service, tell_unidentified
from limitgate.command.stored import store_of
from limitgate.errors import ConfigError
from limitgate.gate.explain import Explanation, LookingStore, aexplain, doubts_about_buckets, explain
from limitgate.gate.lifecycle.build import build_gate
from limitgate.http.client_ip import Hop, canonical
from limitgate.messages.text import expected_of, listed
from limitgate.rules.callers import DEFAULT_TIER, Caller
from limitgate.rules.settings import Settings
from limitgate.stores import MemoryStore, SyncStore, open_sync_store

_METHOD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Z-]+")
"""RFC 9110 section 5.6.2."""
_PEER = "203.0.113.1"
_OF_THE_PROCESS = {
    "headers": None,
    "observers": (),
    "fleet": False,
    "on_denied": None,
    "refusal_logs": 0,
    "reload": 0,
    "require_store": False,
}
"""Options that don't influence a decision."""


@click.command("explain")
@click.argument("method", required=False)
@click.argument("path", required=False)
@click.option("--id", "refused", metavar="ID", help="The id of a refusal, instead of METHOD and PATH.")
@click.option("--log", "logs", multiple=True, metavar="FILE", help="With --id: a log in which to find the client.")
@click.option("--rules", metavar="PATH", envvar="LIMITGATE_RULES", help=f"{RULES}; default: those of --app.")
@click.option("--ip", metavar="ADDRESS", show_default=_PEER, help="The peer's address.")
@click.option("-H", "--header", multiple=True, metavar="'NAME: VALUE'", help="A header of the request.")
@click.option("--body", metavar="JSON", help="The JSON body of the request.")
@click.option("--user", metavar="ID", help="The user that the service authenticates.")
@click.option("--caller", metavar="ID", help="The caller, instead of the one that the headers identify.")
@click.option("--tier", metavar="NAME", help="With --caller: its tier, unless the rules list the caller.")
@app_option
@click.option("--store", metavar="URL", help="Store of the service; default: that of --app. memory:// has full buckets.")
@key_options
@click.option("--trusted-proxy", multiple=True, metavar="ADDRESS", help="Trusted proxy of the service: address, CIDR or list.")
@timeout_option
@json_option
@click.pass_context
def verb(  # noqa: PLR0917 - click passes them by name
    ctx: click.Context,
    /,
    refused: str | None,
    logs: tuple[str, ...],
    rules: str | None,
    app: str | None,
    store: str | None,
    key_prefix: str | None,
    secret: str | None,
    ipv6_prefix: int | None,
    trusted_proxy: tuple[str, ...],
    timeout: float,
    *,
    as_json: bool,
    **described: Any,
) -> None:
    """Explain how the service would decide on a request: its client, the rules that apply and why, and the response.

    With --id, explain the id of a refusal: its time, its rule, and the current state of the bucket. Charges nothing. Other
    options come from the gate around --app, or from LIMITGATE_*. Exit status 1: the request would be refused; with --id also:
    its rule or the client's limits are not known.

    For example: limitgate explain GET /api/hello --rules config/ --ip 203.0.113.7 -H 'X-API-Key: demo-vip-key'
    """
    rules = rules_beside(app, rules)
    of_keys = {"key_prefix": key_prefix, "secret": secret, "ipv6_prefix": ipv6_prefix}
    asked = service(rules, app, store=store, trusted_proxies=trusted_proxy or None, **of_keys)
    if refused is not None:
        if described["method"] is not None:
            raise click.UsageError("expected either METHOD and PATH, or --id, not both")
        _explain_refusal(ctx, refused, asked, logs, timeout, as_json=as_json)
        return
    if logs:
        raise click.UsageError("--log needs --id, expected both")
    opened: SyncStore | None = store_of(asked.settings.store)
    if opened is None and store is None:
        say("limitgate: no store is given, so every bucket counts as full; pass --store URL of the service", err=True)
    try:
        found = _explained(asked, opened or MemoryStore(), described, timeout)
    finally:
        if opened is not None:
            opened.close()
    doubts = {} if opened is None or asked.knows_routes else doubts_about_buckets(found, asked.rules)
    for doubt in doubts.values():
        say(f"{doubt}; expected --app MODULE:APP, which knows the routes, or limitgate peek --path ROUTE", err=True)
    if as_json:
        print_json(_as_json(found))
    else:
        _print(found, asked, is_peer_given=described["ip"] is not None, is_known=not found.unused & doubts.keys())
    ctx.exit(0 if found.status is None else FOUND)


def _explained(asked: Service, store: SyncStore, described: Mapping[str, Any], timeout: float) -> Explanation:
    settings = asked.settings
    if not settings.enabled:
        raise ConfigError("LimitGate is disabled (enabled, LIMITGATE_ENABLED), expected it enabled")
    options: dict[str, Any] = {name: getattr(settings, name) for name in Settings.model_fields}
    options |= {**_OF_THE_PROCESS, "headers": settings.headers, "store": LookingStore(store), "timeout": timeout}
    if (caller := _caller(described, asked)) is not None:
        options["identify"] = lambda _: caller
    elif settings.identify is not None:
        options["identify"] = lenient(settings.identify)
    with logs_from(logging.WARNING):
        gate = build_gate(asked.routes, open_sync_store, **options).gate
    if gate is None:
        raise TypeError("a gate that is switched on was not built")
    request = _request(described, asked)
    late_limits = asked.late_limits(request)
    found = asyncio.run(aexplain(gate, request, late_limits)) if asked.awaits else explain(gate, request, late_limits)
    if settings.identify is not None and found.caller is None and described["header"]:
        tell_unidentified("--caller ID")
    return found


def _caller(described: Mapping[str, Any], asked: Service) -> Caller | None:
    name, tier, tiers = described["caller"], described["tier"], asked.rules.tiers
    if name is None and tier is not None:
        raise click.UsageError("--tier needs --caller, expected both")
    if tier is not None and tier not in tiers:
        raise click.UsageError(f"no file describes tier {tier!r:.80}, {expected_of(tier, tiers)}")
    if name is None:
        return None
    known = asked.rules.callers.named(name)
    if known is None and asked.settings.identify is not None:
        say("limitgate: identify may give this caller its own limits, which --caller does not know", err=True)
    return known or Caller(name, tier or DEFAULT_TIER)


def _explain_refusal(
    ctx: click.Context, refused: str, asked: Service, logs: tuple[str, ...], timeout: float, *, as_json: bool
) -> None:
    found = refusal.resolve(refused, asked, logs, timeout=timeout)
    if as_json:
        print_json(refusal.as_json(found))
    else:
        refusal.show(found)
    is_open = [each.is_certain and each.decision is not None and each.decision.allowed for each in found.found]
    ctx.exit(0 if is_open and (all(is_open) or not found.is_state_known) else FOUND)


def _request(described: Mapping[str, Any], asked: Service) -> Any:
    headers = [header_of(text) for text in described["header"]]
    if described["method"] is None or described["path"] is None:
        raise click.UsageError("expected METHOD and PATH of a request, or --id with the id of a refusal")
    target, host = target_of(described["path"])
    headers += [("Host", host)] if host else []
    method, path = described["method"].upper(), unquote(target)
    if not _METHOD.fullmatch(method):
        raise click.UsageError(f"{method!r:.80} is not a method, expected one such as GET")
    peer = _PEER if described["ip"] is None else described["ip"]
    if canonical(peer) is None:
        raise click.UsageError(f"{peer!r:.80} is not an address, expected one such as 203.0.113.7")
    if not path.startswith("/"):
        raise click.UsageError(f"{path!r:.80} is not a path, expected one such as /api/hello")
    request = asked.request(method, target, peer, headers, described["user"])
    request.document = document_of(described["body"])
    return request


def _as_json(found: Explanation) -> dict[str, Any]:
    buckets = [] if found.decision is None else found.decision.standings
    return {
        "client": found.client,
        "caller": None if found.caller is None else found.caller.id,
        "tier": found.tier,
        "path": found.path,
        "rules": [rule._asdict() for rule in found.rules],
        "decision": None if found.decision is None else decision_fields(found.decision),
        "status": found.status or 200,
        "headers": [list(field) for field in found.fields],
        "unevaluated": [rule.name for rule in found.unevaluated],
        "hops": [hop._asdict() for hop in found.hops],
        "buckets": [
            {"key": each.charge.key, "rule": each.charge.rule, "windows": [window_fields(window) for window in each.windows()]}
            for each in buckets
        ],
    }


def _hop(hop: Hop) -> tuple[str, str]:
    is_socket = hop.address is None and hop.why.startswith("the peer")
    return ("a unix socket" if is_socket else hop.address or "-"), hop.why


def _print(found: Explanation, asked: Service, *, is_peer_given: bool, is_known: bool) -> None:
    hops = [_hop(hop) for hop in found.hops]
    if not is_peer_given:
        address, why = hops[0]
        hops[0] = address, why.replace("the peer", "assumed as the peer, because --ip is not given", 1)
    print_table(("From", ""), hops)
    caller = "no known caller" if found.caller is None else f"caller {found.caller.id}"
    client = found.counted_as or "a client without an address"
    say("", f"Counted as {client}, {caller}, tier {found.tier}, path {found.path}", "")
    rows = [(rule.name, rule.tier or "-", "applies" if rule.applies else "no", rule.why) for rule in found.rules]
    print_table(("Rule", "Tier", "Applies", "Why"), rows)
    decision = found.decision
    say()
    for rule in found.unevaluated:
        say(f"also limited by the {asked.late_kind} {rule.name}: not evaluated, because it counts by {listed(rule.counted_by)}")
    if decision is None:
        say("no other rule limits this request" if found.unevaluated else "no rule limits this request")
    else:
        for each in decision.standings:
            say(f"{each.charge.rule}: {each.charge.key}")
        print_decision(decision, is_charged=True)
    answer = "the application answers" if is_known else "it is not known whether the application answers"
    say("", f"{found.status or answer}" + (", with" if found.fields else ""))
    for name, value in found.fields:
        say(f"{name}: {value}")
    if found.status is not None and asked.answers_refusals:
        say("a handler of the application (or on_denied) makes the body, and may change the status and other fields")
