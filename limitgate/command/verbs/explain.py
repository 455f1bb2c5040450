"""The verb ``explain``: what the service would do with a request, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack
from urllib.parse import unquote

import click

from limitgate.command import refusal
from limitgate.command.applications import application, routes_of
from limitgate.command.client_state import header_of, tell_of_routes, timeout_option
from limitgate.command.decisions import decision_fields, print_decision, window_fields
from limitgate.command.output import FOUND, print_json, print_table, say
from limitgate.command.rule_sets import RULES, is_identifying, is_in_python, limits_in_code, rules_named
from limitgate.errors import ConfigError
from limitgate.gate.explain import Explanation, LookingStore, explain
from limitgate.gate.lifecycle.build import build_gate
from limitgate.http.client_ip import TrustedProxies, canonical
from limitgate.http.request import ASGIRequest, Request, WSGIRequest
from limitgate.rules.files import rules_of
from limitgate.rules.rule import Rule, RuleSet
from limitgate.rules.settings import GateSettings
from limitgate.stores import MemoryStore, open_sync_store

_METHOD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Z-]+")
"""A token of RFC 9110 section 5.6.2, in upper case."""


class Described(TypedDict):
    """A request as it is described on the command line."""

    method: str | None
    path: str | None
    ip: str
    header: tuple[str, ...]


@click.command("explain")
@click.argument("method", required=False)
@click.argument("path", required=False)
@click.option("--id", "refused", metavar="ID", help="The id of a refusal, in the place of METHOD and PATH.")
@click.option("--rules", metavar="PATH", envvar="LIMITGATE_RULES", help=f"{RULES}; if not given, those of --app.")
@click.option("--ip", default="203.0.113.1", metavar="ADDRESS", show_default=True, help="The peer's address.")
@click.option("-H", "--header", multiple=True, metavar="'NAME: VALUE'", help="A header of the request.")
@click.option("--app", metavar="MODULE:APP", help="The application, for its routes and their decorators.")
@click.option("--store", metavar="URL", help="The service's store, for the state of its buckets; without it, all are full.")
@click.option("--trusted-proxy", multiple=True, metavar="ADDRESS", help="That of the service: an address, CIDR or list.")
@timeout_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@click.pass_context
def verb(  # noqa: PLR0917 - click gives them by name
    ctx: click.Context,
    refused: str | None,
    rules: str | None,
    app: str | None,
    store: str | None,
    trusted_proxy: tuple[str, ...],
    timeout: float,
    *,
    as_json: bool,
    **described: Unpack[Described],
) -> None:
    """Explain what the service would do with a request: who it is taken for, which rules apply and why, what it gets.

    With --id, what the id of a refusal says: when it was, by which rule, and how that bucket stands now. Charges nothing. Other
    options of the service are those of LIMITGATE_* as it has them. Exit status 1: the request would be refused.

    For example: limitgate explain GET /api/hello --rules config/ --ip 203.0.113.7 -H 'X-API-Key: demo-vip-key'
    """
    if (named := rules or app) is None:
        raise click.UsageError("expected --rules, or --app with rules of its own")
    options: dict[str, Any] = {"rules": rules_named(named)}
    if trusted_proxy:
        options["trusted_proxies"] = _checked_proxies(trusted_proxy)
    settings = _settings(options)
    if refused is not None:
        if described["method"] is not None:
            raise click.UsageError("expected either METHOD and PATH, or --id, not both")
        in_code = () if app is None else limits_in_code(app)
        _explain_refusal(ctx, refused, settings, in_code, store, timeout, as_json=as_json)
        return
    try:
        opened: Any = MemoryStore() if store is None else open_sync_store(store)
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    try:
        routes, is_wsgi = routes_of(app)
        if (in_python := app or named) and is_in_python(in_python) and is_identifying(application(in_python)):
            options["identify"] = _nobody
        looking = LookingStore(opened)
        gate = build_gate(routes, open_sync_store, store=looking, timeout=timeout, refusal_logs=0, **options).gate
        if gate is None:
            raise ConfigError("LIMITGATE_ENABLED switches LimitGate off, expected it on")
        found = explain(gate, _request(described, is_wsgi=is_wsgi))
    finally:
        opened.close()
    if store is not None and app is None:
        _tell_of_routes(found, options["rules"])
    if as_json:
        print_json(_as_json(found))
    else:
        _print(found)
    ctx.exit(0 if found.status is None else FOUND)


def _nobody(_: Request) -> None:
    """Stands for the ``identify`` of the service, which is not asked: whom it alone names is a stranger."""


def _checked_proxies(trusted: tuple[str, ...]) -> tuple[str, ...]:
    """Addresses and CIDRs as they are. Raises `click.UsageError` for what is none."""
    try:
        TrustedProxies(trusted, "x-forwarded-for")
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    return trusted


def _settings(options: dict[str, Any]) -> GateSettings:
    """The service's settings. Raises `click.UsageError` for a variable that makes no sense."""
    try:
        return GateSettings(**options)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def _tell_of_routes(found: Explanation, rules: RuleSet) -> None:
    """Tell of rules that a service which knows routes counts in other buckets."""
    applied = {rule.name for rule in found.rules if rule.applies}
    for rule in rules.tiers[found.tier]:
        if rule.name in applied:
            tell_of_routes(rule, "--app MODULE:APP, which knows them, or limitgate peek --path ROUTE")


def _explain_refusal(  # noqa: PLR0917 - two calls of it, in one function
    ctx: click.Context,
    refused: str,
    settings: GateSettings,
    in_code: Sequence[Rule],
    store: str | None,
    timeout: float,
    *,
    as_json: bool,
) -> None:
    """Explain the id of a refusal. Exit status 1: no rule has made it, or the client would be refused now, too."""
    rules = rules_of(settings.rules)
    found = refusal.resolve(
        refused,
        rules,
        in_code,
        store=store,
        key_prefix=settings.key_prefix,
        secret=settings.secret_bytes,
        timeout=timeout,
    )
    if as_json:
        print_json(refusal.as_json(found))
    else:
        refusal.show(found)
    decisions = [each.decision for each in found.found]
    ctx.exit(0 if found.found and all(each is None or each.allowed for each in decisions) else FOUND)


def _request(described: Described, *, is_wsgi: bool) -> Request:
    """The request as a server would hand it on."""
    headers = [header_of(text) for text in described["header"]]
    if described["method"] is None or described["path"] is None:
        raise click.UsageError("expected METHOD and PATH of a request, or --id with the id of a refusal")
    sent, _, query = described["path"].partition("?")
    method, path = described["method"].upper(), unquote(sent)
    if not _METHOD.fullmatch(method):
        raise click.UsageError(f"{method!r:.80} is no method, expected one such as GET")
    if canonical(described["ip"]) is None:
        raise click.UsageError(f"{described['ip']!r:.80} is no address, expected one such as 203.0.113.7")
    if not path.startswith("/"):
        raise click.UsageError(f"{path!r:.80} is no path, expected one such as /api/hello")
    if is_wsgi:
        variables: dict[str, str] = {}
        for name, value in headers:
            variable = "HTTP_" + name.upper().replace("-", "_")
            variables[variable] = f"{variables[variable]}, {value}" if variable in variables else value
        native = path.encode().decode("latin-1")
        server = {"SERVER_NAME": "localhost", "SERVER_PORT": "80", "wsgi.url_scheme": "http", "SCRIPT_NAME": ""}
        asked = {"REQUEST_METHOD": method, "PATH_INFO": native, "QUERY_STRING": query, "REMOTE_ADDR": described["ip"]}
        return WSGIRequest({**server, **asked, **variables})
    raw = [(name.lower().encode("latin-1", "replace"), value.encode()) for name, value in headers]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": path,
        "raw_path": sent.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": raw,
        "client": (described["ip"], 50_000),
        "server": ("localhost", 80),
    }
    return ASGIRequest(scope)


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
        "hops": [hop._asdict() for hop in found.hops],
        "buckets": [
            {"key": each.charge.key, "rule": each.charge.rule, "windows": [window_fields(window) for window in each.windows()]}
            for each in buckets
        ],
    }


def _print(found: Explanation) -> None:
    print_table(("From", ""), [(hop.address or "a unix socket", hop.why) for hop in found.hops])
    caller = "nobody that is known" if found.caller is None else f"caller {found.caller.id}"
    client = found.counted_as or "a client without an address"
    say("", f"Counted as {client}, {caller}, tier {found.tier}, path {found.path}", "")
    rows = [(rule.name, rule.tier or "-", "applies" if rule.applies else "no", rule.why) for rule in found.rules]
    print_table(("Rule", "Tier", "Applies", "Why"), rows)
    decision = found.decision
    say()
    if decision is None:
        say("no rule limits this request")
    else:
        for each in decision.standings:
            say(f"{each.charge.rule}: {each.charge.key}")
        print_decision(decision)
    say("", f"{found.status or 'whatever the application answers'}" + (", with" if found.fields else ""))
    for name, value in found.fields:
        say(f"{name}: {value}")
