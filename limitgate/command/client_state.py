"""State of one client in a store, named by a rule and key parts, or by a key of a `Limiter`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import unquote

import click

from limitgate.algorithms import ALGORITHMS, gcra
from limitgate.command.applications import RULES
from limitgate.command.opened import Opened, Options, decorated, store_options
from limitgate.command.output import Verb, say
from limitgate.command.service import Service, tell_unidentified
from limitgate.errors import ConfigError, HeadersTooLargeError
from limitgate.gate.explain import doubt_about_bucket, path_reason
from limitgate.gate.planning.identity import Identities
from limitgate.http.client_ip import TrustedProxies, canonical
from limitgate.http.paths import first_interpretation, interpretations
from limitgate.http.request import LONGEST_VALUE, Request
from limitgate.limiter.rule_bucket import BucketParts, RuleBucket
from limitgate.limits.decision import Decision
from limitgate.limits.limit import Limit
from limitgate.messages.text import Names, expected_of, listed, printable, shown
from limitgate.routes.overview import METHODS
from limitgate.rules.callers import DEFAULT_TIER, Caller
from limitgate.rules.options import check_part
from limitgate.rules.rule import Rule

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110 section 5.6.2."""
_NO_VALUE = frozenset("\r\n\0")
_OF_RULES = ("ip", "path", "api_key", "header", "body", "caller", "user", "method", "host", "tier", "given", "limits")
_PART_OPTIONS = {name: name for name in ("ip", "path", "api_key", "caller", "user", "method", "host")} | {"body": "json"}
_OF_LIMITS = ("algorithm", "align")
_OF_BANS = ("ban", "pardon")
_ANY_LIMIT = ["1/second"]
"""Replaces limits that are known at run time only. Bans don't depend on limits."""
_PLACEHOLDERS = frozenset("{<*^")
_VALUE = re.compile(r"[0-9@]")
_WORD = re.compile(r"v[0-9]+([._-][0-9]+)?|[A-Za-z_-]+[0-9]")
"""Route words with digits: ``v2``, ``oauth2``."""


def state_options(verb: Verb) -> Verb:
    return decorated(
        store_options(verb),
        click.argument("words", metavar="[KEY [LIMIT...]]", nargs=-1),
        click.option("--rules", metavar="PATH", help=f"{RULES}.  [env var: LIMITGATE_RULES]"),
        click.option("--rule", metavar="NAME", help="The rule."),
        click.option("--ip", metavar="ADDRESS", help="The client's address."),
        click.option(
            "--path",
            metavar="PATH",
            help="The route's template; with --app also the path or URL of a request. Default: the rule's pattern.",
        ),
        click.option("--api-key", metavar="KEY", help="The API key as the client sends it."),
        click.option(
            "-H", "--header", multiple=True, metavar="'NAME: VALUE'", help="A header of the client, also that of its API key."
        ),
        click.option("--body", metavar="JSON", help="The JSON body that the client sends."),
        click.option("--caller", metavar="ID", help="The caller's id."),
        click.option("--user", metavar="ID", help="The user."),
        click.option("--method", metavar="METHOD", help="The method."),
        click.option("--host", metavar="NAME", help="The host."),
        click.option("--tier", metavar="NAME", help="The tier of the rule; default: that of the caller, or 'default'."),
        click.option("--given", multiple=True, metavar="NAME=VALUE", help="The result of a dependency in the rule's key."),
        click.option("--algorithm", metavar="NAME", help="Algorithm of the limits after KEY, such as fixed_window."),
        click.option("--align", metavar="ZONE", help="Start of the windows after KEY, such as utc."),
        click.option("--limits", multiple=True, metavar="LIMIT", help="The client's limits, if code sets those of the rule."),
    )


def change_options(verb: Verb) -> Verb:
    return decorated(
        state_options(verb),
        click.option("--reason", metavar="TEXT", help="The reason, shown by 'limitgate bans'."),
        click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation."),
        click.option("--dry-run", is_flag=True, help="Show the affected client, and change nothing."),
    )


class ClientState(NamedTuple):
    name: str
    """For output and the audit log, as the option ``names`` allows."""
    typed: str
    """For questions: in full, except credentials."""
    keys: Sequence[str]
    bucket: Any
    if_unused: str | None = None
    of_route: Sequence[str] = ()
    """Keys of the bucket if the path has a route."""
    if_of_pattern: str | None = None

    def hint(self, peeked: Decision | None = None) -> str | None:
        """Return what to check if the bucket is unused, or that of paths without a route. Peeks if ``peeked`` is None."""
        if self.if_unused is None:
            return None
        decision = self.bucket.peek() if peeked is None else peeked
        if decision.allowed and not any(window.used for window in decision.windows):
            return self.if_unused
        return None if any(charge.key in self.of_route for charge, *_ in decision.evidence) else self.if_of_pattern


Use = Literal["peek", "reset", "ban", "pardon"]


def state_of(opened: Opened, options: Options, use: Use) -> ClientState:
    words, rule = options["words"], options["rule"]
    if words and (rule or options["rules"]):
        raise click.UsageError("expected either --rules and --rule, or KEY and limits, not both")
    if words and (unused := _given(options, _OF_RULES)):
        raise click.UsageError(f"{unused}: for a client of a --rule only, expected KEY and limits without it")
    if len(words) < 2 and (unused := _given(options, _OF_LIMITS)):
        raise click.UsageError(f"{unused}: for the limits after KEY only, expected KEY and limits, such as '10/second'")
    if words:
        return _state_of_key(opened, words[0], _limits(words[1:], options), needs_limits=use == "reset")
    if not (rule and opened.service):
        raise click.UsageError(
            "expected a client: --rules PATH (or --app MODULE:APP) --rule NAME and the parts of its key, or KEY and limits"
        )
    try:
        return _state_of_rule(opened, opened.service, rule, options, use)
    except ConfigError as error:
        raise click.UsageError(_by_options(str(error))) from error
    except HeadersTooLargeError as error:
        raise click.UsageError(
            f"a header or API key has more than {LONGEST_VALUE:,} characters, so services refuse it, expected a shorter one"
        ) from error


def _given(options: Options, names: Sequence[str]) -> str:
    return ", ".join([f"--{name.replace('_', '-')}" for name in names if options[name] not in (None, ())])


def _by_options(message: str) -> str:
    message = message.replace("json= with", "--body with")
    message = re.sub(r"headers=\{'(.+?)': \.\.\.\}", r"-H '\1: ...'", message)
    message = re.sub(r"\b([a-z]+)(?:_([a-z]+))?=(?=\W|$)", lambda name: "--" + "-".join(filter(None, name.groups())), message)
    return re.sub(r"--given\{'(.+?)': \.\.\.\}", r"--given \1=...", message)


def _limits(texts: Sequence[str], options: Options) -> list[Limit | str]:
    named = {"algorithm": options["algorithm"], "align": options["align"]}
    chosen: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    try:
        return [Limit(text, **chosen) if chosen else text for text in texts]
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from error


def _state_of_key(opened: Opened, key: str, limits: Sequence[Limit | str], *, needs_limits: bool) -> ClientState:
    limiter = opened.limiter
    if needs_limits and not limits:
        raise click.UsageError(f"expected the limits of {key!r:.80} after it, such as '10/second'")
    try:
        limiter.validate(key, *(limits or ["1/second"]))
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    peek = partial(limiter.peek, key, *limits) if limits else partial(limiter.banned, key)
    reset, ban, pardon = partial(limiter.reset, key, *limits), partial(limiter.ban, key), partial(limiter.pardon, key)
    if canonical(key) is not None:
        say(
            "limitgate: this is the key of a Limiter; for a client of a rule, expected --rules PATH (or --app MODULE:APP), "
            "--rule NAME and --ip ADDRESS",
            err=True,
        )
    bucket = SimpleNamespace(peek=peek, reset=reset, ban=ban, pardon=pardon)
    typed = shown("key", key, "full")
    return ClientState(shown("key", key, opened.names) or "key", typed, [limiter.ban_key(key)], bucket)


def _state_of_rule(opened: Opened, asked: Service, name: str, options: Options, use: Use) -> ClientState:
    parts = _parts(options)
    caller = _caller(asked, options, parts)
    rule = _rule(asked, name, caller, options)
    _settle_key_header(asked, rule, parts)
    if caller is None and not options["limits"]:
        _consider_own_limits(asked, rule, options, use)
    if use in _OF_BANS and rule.limits_by is not None and not options["limits"] and _has_one_bucket(rule):
        parts["limits"] = _ANY_LIMIT
    templates, if_unused, if_of_pattern = None, None, None
    of_route: Sequence[str] = ()
    if rule.key_asks("path"):
        templates = _templates(asked, rule, options)
        parts["path"] = next(filter(None, templates), rule.paths[0])
        if options["path"] is not None and not asked.knows_routes:
            under = " or ".join(dict.fromkeys([str(parts["path"]), rule.paths[0]]))
            if_unused = (
                f"this client has no usage under {under}; if the route has parameters, expected "
                "its template as --path, or --app MODULE:APP, which knows the routes"
            )
            if_of_pattern = (
                f"this is the bucket of {rule.paths[0]}, for paths without a route; if {parts['path']} is a route, its own "
                "bucket has more room, expected --app MODULE:APP, which knows the routes"
            )
    bucket = _bucket_of(opened, rule, parts, templates)
    if if_of_pattern is not None and templates is not None:
        of_route = opened.bucket(rule, parts, templates[:1]).keys
    counted = _counted(opened, asked, rule, parts, templates, bucket)
    if "path" in counted:
        counted["path"] = options["path"]
    if use == "ban":
        _tell_unused(asked, rule, caller, options, parts, counted)
    name, typed = [_named(rule, counted, names) for names in (opened.names, "full")]
    keys = list(dict.fromkeys(bucket.keys))
    return ClientState(name, typed, keys, bucket, if_unused, of_route, if_of_pattern)


def _named(rule: Rule, counted: Mapping[str, Any], names: Names) -> str:
    texts = [(label, _shown(label, value, names)) for label, value in counted.items() if value is not None]
    return " ".join([rule.name, *[f"{label}={text}" for label, text in texts if text]])


def _settle_key_header(asked: Service, rule: Rule, parts: BucketParts) -> None:
    """Keep the header of the API key only if the rule counts by it, and then also for ``--api-key``."""
    name, headers, api_key = asked.settings.api_key_header, parts.get("headers", {}), parts.get("api_key")
    others = dict(_without(name, headers.items()))
    if not rule.key_asks(f"header:{name.lower()}"):
        parts["headers"] = others
    elif api_key is not None and len(others) == len(headers):
        parts["headers"] = {**headers, name: _as_header(name, api_key)}


def _counted(  # noqa: PLR0917 - called above only
    opened: Opened,
    asked: Service,
    rule: Rule,
    parts: BucketParts,
    templates: Sequence[str | None] | None,
    bucket: RuleBucket,
) -> dict[str, Any]:
    """Return the parts that the rule counts by, or that select the bucket otherwise, such as the address for a missing key."""
    key_header = asked.settings.api_key_header.lower()
    labels = {label for part in rule.key for label in check_part(part)}

    def selects(label: str) -> bool:
        others = cast("BucketParts", {other: value for other, value in parts.items() if other != label})
        try:
            return opened.bucket(rule, others, templates).keys != bucket.keys
        except ConfigError:
            return True

    def counts_by(label: str) -> bool:
        if label == "api_key" and f"header:{key_header}" in labels:
            return True
        return label in labels or label in rule.given_parts or label == "given" or selects(label)

    found: dict[str, Any] = {}
    for label, value in parts.items():
        if label == "headers":
            headers = {name: text for name, text in parts["headers"].items() if f"header:{name.lower()}" in labels}
            found[label] = dict(_without(key_header, headers.items())) if "api_key" in parts else headers
        elif label == "json":
            found |= {label: value} if any(each.startswith("json:") for each in labels) else {}
        elif label != "limits" and counts_by(label):
            found[label] = value
    return found


def _tell_unused(  # noqa: PLR0917 - called above only
    asked: Service, rule: Rule, caller: Caller | None, options: Options, parts: BucketParts, counted: dict[str, Any]
) -> None:
    """Report options on which neither the bucket nor the tier depends."""
    sent = {f"-H {name}": f"header:{name.lower()}" for name, _ in map(header_of, options["header"])}
    given = {f"--{name.replace('_', '-')}": label for name, label in _PART_OPTIONS.items() if options[name] is not None} | sent
    used = {*counted, *(f"header:{name.lower()}" for name in counted.get("headers", {}))}
    if "api_key" in counted:
        used.add(f"header:{asked.settings.api_key_header.lower()}")
    if "path" in counted and asked.knows_routes:
        used |= {"method", "host"}
    if caller is not None and ("caller" in counted or _rule(asked, rule.name, None, options) is not rule):
        if options["caller"] is not None:
            used.add("caller")
        elif "caller" in parts:  # found by identify, or by a header from a trusted address
            used |= {*given.values()} - {"json"}
        else:
            used |= {"api_key", *sent.values()}
    unused = [option for option, label in given.items() if label not in used]
    if unused:
        have = "has" if len(unused) == 1 else "have"
        counts = f"rule {rule.name} counts by {', '.join(rule.counted_by)}"
        say(f"limitgate: {', '.join(unused)} {have} no effect: {counts}", err=True)


def _caller(asked: Service, options: Options, parts: BucketParts) -> Caller | None:
    """Return the caller, and add it and the API key to the parts."""
    callers, identities = asked.rules.callers, _identities(asked)
    request = _request(asked, options, identities)
    api_key, caller = identities.presented_key(request), identities.listed(request)
    if api_key is not None:
        parts["api_key"] = api_key
    if options["caller"] is not None:
        caller = callers.named(options["caller"])
    elif asked.settings.identify is not None:
        identified = asked.caller_of(request)
        if identified is None and (options["api_key"] or options["header"]) and caller is None:
            tell_unidentified("--caller ID")
        if identified is not None:
            parts["caller"] = caller = identified
        elif not callers.list_keys:
            parts.pop("api_key", None)  # an unidentified key counts as none
    if caller is not None and "caller" not in parts and (api_key is None or callers.with_key(api_key) is None):
        parts["caller"] = caller  # by other headers
    return caller


def _bucket_of(opened: Opened, rule: Rule, parts: BucketParts, templates: Sequence[str | None] | None) -> RuleBucket:
    """Return a client's bucket. As in the service, the rule's limits replace invalid limits of a caller."""
    own = parts.get("caller")
    if isinstance(own, Caller) and own.limits.get(rule.name, ()) is None and "limits" not in parts:
        say(f"limitgate: rule {rule.name} does not limit this caller, whose own limits for it are None", err=True)
    try:
        return opened.bucket(rule, parts, templates)
    except ConfigError as error:
        if not (isinstance(own, Caller) and own.limits.get(rule.name) and rule.every_limit) or "limits" in parts:
            raise
        others = {name: limits for name, limits in own.limits.items() if name != rule.name}
        parts["caller"] = replace(own, limits=others)
        bucket = opened.bucket(rule, parts, templates)
        say(f"limitgate: the caller's own limits are invalid, so those of rule {rule.name} apply: {error}", err=True)
        return bucket


def _consider_own_limits(asked: Service, rule: Rule, options: Options, use: Use) -> None:
    """Report that a reset may miss limits that only ``identify`` knows."""
    if options["caller"] is None or asked.settings.identify is None or not rule.buckets:
        return
    if use in _OF_BANS and _has_one_bucket(rule):
        return
    told = (
        f"the application's identify may give this caller other limits than those of rule {rule.name}, "
        f"{listed([*map(str, rule.every_limit)])}"
    )
    expected = "expected --limits with those of this caller, or its --api-key or -H"
    if use == "reset":
        raise click.UsageError(f"{told}; {expected}")
    say(f"limitgate: {told}; if they differ, {expected}", err=True)


def _has_one_bucket(rule: Rule) -> bool:
    """True if all limits share a bucket and a ban, including those from run time."""
    return (rule.algorithm is None or ALGORITHMS[rule.algorithm] is gcra) and not any(each.suffix for each in rule.buckets)


def _identities(asked: Service) -> Identities:
    settings = asked.settings
    return Identities(
        asked.rules.callers,
        TrustedProxies(settings.trusted_proxies, settings.forwarded_header),
        asked.rules.tiers,
        identifies=False,
        api_key_header=settings.api_key_header,
        ipv6_prefix=settings.ipv6_prefix,
    )


def _request(asked: Service, options: Options, identities: Identities) -> Request:
    """Return the client's request. Raises `click.UsageError` for two API keys."""
    headers = [header_of(text) for text in options["header"]]
    if options["host"] is not None:
        headers.append(("Host", options["host"]))
    method, path = (options["method"] or "GET").upper(), target_of(options["path"] or "/")[0]

    def with_headers(lines: Sequence[tuple[str, str]]) -> Request:
        request = asked.request(method, path, options["ip"], lines, options["user"])
        request.resolve_client = lambda this: this.peer
        return request

    request, key, name = with_headers(headers), options["api_key"], asked.settings.api_key_header
    sent = identities.presented_key(request)
    if key is None or sent == _as_sent(key):
        return request
    if sent is not None:
        raise click.UsageError(f"--api-key and -H '{name}: ...' are different keys, expected one of them")
    return with_headers([*_without(name, headers), (name, _as_header(name, key))])


def _as_header(name: str, api_key: str) -> str:
    return f"Bearer {api_key}" if name.lower() == "authorization" else api_key


def _without(name: str, headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(other, value) for other, value in headers if other.lower() != name.lower()]


def _rule(asked: Service, name: str, caller: Caller | None, options: Options) -> Rule:
    rules, tier, whose = asked.rules, options["tier"], options["rules"] or options["app"] or "LIMITGATE_RULES"
    if tier is not None and tier not in rules.tiers:
        raise click.UsageError(f"{whose}: no file describes tier {tier!r:.80}, {expected_of(tier, rules.tiers)}")
    if tier is None and caller is not None:
        tier = caller.tier if caller.tier in rules.tiers else DEFAULT_TIER
    tiers = [tier] if tier is not None else list(rules.tiers)
    for of_tier in tiers:
        for rule in rules.tiers[of_tier]:
            if rule.name == name:
                return rule
    in_code = {rule.name: rule for rule in asked.in_code}
    if name in in_code:
        return in_code[name]
    known = dict.fromkeys([*(rule.name for of_tier in tiers for rule in rules.tiers[of_tier]), *in_code])
    elsewhere = "" if options["app"] else "; for a limit in code use limiter.bucket in Python, or --app MODULE:APP"
    raise click.UsageError(f"{whose}: there is no rule {name!r:.80}, {expected_of(name, known)}{elsewhere}")


def _parts(options: Options) -> BucketParts:
    parts = {label: options[label] for label in ("ip", "caller", "user", "method", "host", "tier")}
    if options["api_key"] is not None:
        parts["api_key"] = _as_sent(options["api_key"])
    if options["limits"]:
        parts["limits"] = list(options["limits"])
    if options["given"]:
        parts["given"] = dict(map(_named_value, options["given"]))
    if options["header"]:
        parts["headers"] = {name: _as_sent(value) for name, value in map(header_of, options["header"])}
    if options["body"] is not None:
        parts["json"] = document_of(options["body"])
    return cast("BucketParts", {label: value for label, value in parts.items() if value is not None})


def _named_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name and value):
        raise click.UsageError(f"{text!r:.80} is not the result of a dependency, expected NAME=VALUE")
    return name, value


def _as_sent(value: str) -> str:
    return value.encode().decode("latin-1")


def _templates(asked: Service, rule: Rule, options: Options) -> list[str | None]:
    path, pattern = options["path"], rule.paths[0]
    if not asked.knows_routes:
        if path is None and (doubt := doubt_about_bucket(rule)) is not None:
            say(f"{doubt}; expected --path with the route, such as /api/hello or /items/{{id}}", err=True)
        return [*dict.fromkeys([pattern if path is None else _template_of(rule, path), pattern, None])]
    templates = asked.templates_for(rule)
    if path is None and len(templates) == 1:
        return [*templates]
    if path is None or (path in asked.templates and path not in templates):
        expected = f"--path as one of {listed(templates)}" if templates else "a rule that matches a route"
        raise click.UsageError(f"rule {rule.name} has a bucket for each matching route, expected {expected}")
    if path in templates and _PLACEHOLDERS & set(path):
        return [path]
    target, host = target_of(path)
    _check_is_for(rule, target)
    hosts = [("Host", name) for name in [options["host"] or host] if name]
    methods = [options["method"]] if options["method"] else [*(rule.methods or METHODS)]

    def found(target: str) -> list[str | None]:
        routes = [asked.routes.find(asked.request(method.upper(), target, options["ip"], hosts)) for method in methods]
        return [*dict.fromkeys([each.template for each in routes if each is not None])]

    if its_routes := found(target):
        return its_routes
    sent, mark, query = target.partition("?")
    other = sent.rstrip("/") if sent.endswith("/") else f"{sent}/"
    near = f"; did you mean {printable(other)}?" if other and found(f"{other}{mark}{query}") else ""
    bucket = f"this is the bucket of {rule.paths[0]} for paths without a route{near}"
    say(f"no route matches {printable(sent)}, so {bucket}", err=True)
    return [None]


def target_of(text: str) -> tuple[str, str | None]:
    scheme, mark, rest = text.partition("://")
    if not (mark and scheme.isalpha()):
        return text.partition("#")[0], None
    host, slash, target = rest.partition("#")[0].partition("/")
    return slash + target or "/", host or None


def _check_is_for(rule: Rule, target: str) -> None:
    path = unquote(target.partition("?")[0])
    why = path_reason(rule, interpretations(path))
    if why is not None:
        raise click.UsageError(f"rule {rule.name} does not match this path: {why}")


def _template_of(rule: Rule, path: str) -> str:
    """Raise an error for a request's path, because services count by template."""
    if path in rule.paths or _PLACEHOLDERS & set(path):
        return path
    target = target_of(path)[0].partition("?")[0]
    _check_is_for(rule, target)
    sent = first_interpretation(unquote(target))
    template = _probable_template(rule, sent)
    if template != sent:
        raise click.UsageError(
            f"{path!r:.200} is the path of one request, but a service counts by the template of its route, such as "
            f"{template!r:.200}; expected that as --path, or --app MODULE:APP, which knows the routes"
        )
    return sent


def _probable_template(rule: Rule, sent: str) -> str:
    given = sent.split("/")
    for pattern in rule.paths:
        *first, last = pattern.split("/")
        head = first if last == "**" else [*first, last]
        rest = given[len(head) :]
        if (last == "**" or not rest) and len(head) <= len(given) and all("{" in a or a == b for a, b in zip(head, given)):
            return "/".join([*[a if "{" in a else b for a, b in zip(head, given)], *map(_or_placeholder, rest)])
    return "/".join(map(_or_placeholder, given))


def _or_placeholder(segment: str) -> str:
    return "{id}" if _VALUE.search(segment) and not _WORD.fullmatch(segment) else segment


def header_of(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and _HEADER_NAME.fullmatch(name.strip())) or _NO_VALUE & set(value.strip()):
        raise click.UsageError(f"{text!r:.80} is not a header, expected 'Name: value'")
    return name.strip(), value.strip()


def document_of(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--body is not JSON: {error}, expected for example '{{\"user\": 7}}'") from error


def _shown(label: str, value: object, names: Names) -> str:
    if isinstance(value, Caller):
        value = value.id
    if label == "json":
        value = json.dumps(value)
    if isinstance(value, dict):
        kind = "header:" if label == "headers" else ""
        texts = [(name, shown(f"{kind}{name.lower()}", text, names)) for name, text in value.items()]
        return ",".join([f"{name}:{text}" for name, text in texts if text])
    return shown(label, str(value), names)
