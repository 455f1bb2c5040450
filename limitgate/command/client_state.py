"""One client's state in a live store, named on the command line: by a rule and the parts of its key, or by a Limiter's key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, reduce
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

import click

from limitgate.command.output import say
from limitgate.command.rule_sets import RULES, rules_named
from limitgate.errors import ConfigError
from limitgate.gate.journal import Journal
from limitgate.limiter.limiter import Limiter
from limitgate.limiter.rule_bucket import BucketParts, RuleBucket
from limitgate.limits.decision import Decision
from limitgate.limits.duration import as_seconds
from limitgate.messages.suggestions import expected_of
from limitgate.messages.text import masked, shown
from limitgate.rules.callers import DEFAULT_TIER, Caller
from limitgate.rules.options import check_part
from limitgate.rules.rule import Rule, RuleSet
from limitgate.stores import open_sync_store
from limitgate.stores.base import SyncConfigStore

Verb = TypeVar("Verb", bound=Callable[..., Any])
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A token of RFC 9110 section 5.6.2."""
_NO_VALUE = frozenset("\r\n\0")
"""Characters that no server hands on in a value (RFC 9110 section 5.5)."""


class StoreOptions(TypedDict):
    """Options that say which store, and how its keys are made."""

    store: str
    key_prefix: str
    secret: str | None
    ipv6_prefix: int
    timeout: float


class StateOptions(StoreOptions):
    """Options that name one client's state."""

    words: tuple[str, ...]
    rules: str | None
    rule: str | None
    ip: str | None
    path: str | None
    api_key: str | None
    header: tuple[str, ...]
    caller: str | None
    user: str | None
    method: str | None
    host: str | None
    tier: str | None
    limits: tuple[str, ...]


class Timeout(click.FloatRange):
    """Seconds, or text such as ``500ms``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a timeout in seconds."""
        with suppress(ConfigError):
            value = as_seconds(value, self.name)
        return super().convert(value, param, ctx)


timeout_option = click.option(
    "--timeout",
    default=2.0,
    type=Timeout(0, 60, min_open=True),
    metavar="SECONDS",
    help="To wait for the store.",
    show_default=True,
)


def store_options(verb: Verb) -> Verb:
    """Add the options of `StoreOptions`."""
    return _decorated(
        verb,
        click.option(
            "--store",
            required=True,
            metavar="URL",
            envvar="LIMITGATE_STORE",
            show_envvar=True,
            help="Where the service keeps its state.",
        ),
        click.option(
            "--key-prefix", default="limitgate", metavar="TEXT", envvar="LIMITGATE_KEY_PREFIX", help="That of the service."
        ),
        click.option(
            "--secret", metavar="TEXT", envvar="LIMITGATE_SECRET", help="That of the service, better by LIMITGATE_SECRET."
        ),
        click.option(
            "--ipv6-prefix", default=64, metavar="BITS", envvar="LIMITGATE_IPV6_PREFIX", help="That of the service.", type=int
        ),
        timeout_option,
    )


def state_options(verb: Verb) -> Verb:
    """Add the options of `StateOptions`, and the words that are a key and limits."""
    return _decorated(
        store_options(verb),
        click.argument("words", metavar="[KEY [LIMIT...]]", nargs=-1),
        click.option("--rules", metavar="PATH", help=f"{RULES}."),
        click.option("--rule", metavar="NAME", help="The rule."),
        click.option("--ip", metavar="ADDRESS", help="The client's address."),
        click.option("--path", metavar="PATH", help="The path, or the route's template; if not given, the rule's pattern."),
        click.option("--api-key", metavar="KEY", help="The API key as the client sends it."),
        click.option("-H", "--header", multiple=True, metavar="'NAME: VALUE'", help="A header of the client's."),
        click.option("--caller", metavar="ID", help="The caller's id."),
        click.option("--user", metavar="ID", help="The user."),
        click.option("--method", metavar="METHOD", help="The method."),
        click.option("--host", metavar="NAME", help="The host."),
        click.option("--tier", metavar="NAME", help="The tier of the rule; if not given, the caller's, or default."),
        click.option(
            "--limits", multiple=True, metavar="LIMIT", help="The client's limits, where code gives those of the rule."
        ),
    )


def change_options(verb: Verb) -> Verb:
    """Add the options of verbs that change a state."""
    return _decorated(
        state_options(verb),
        click.option("--reason", metavar="TEXT", help="Why, for those who look at it later."),
        click.option("-y", "--yes", is_flag=True, help="Do not ask first."),
        click.option("--dry-run", is_flag=True, help="Show whom it would hit, and change nothing."),
    )


def _decorated(verb: Verb, *decorators: Callable[[Verb], Verb]) -> Verb:
    return reduce(lambda decorated, decorate: decorate(decorated), reversed(decorators), verb)


class ClientState:
    """State of one client; under a rule that counts by path in several buckets: by the route's template, and by the pattern."""

    def __init__(self, name: str, keys: Sequence[str], buckets: Sequence[RuleBucket | _KeyBucket]) -> None:
        self.name = name
        """Name for people: who is asked for is masked in it."""
        self.keys = keys
        """Keys in the store."""
        self._buckets = buckets

    def peek(self) -> Decision:
        """The decision about a request, which charges nothing: of several buckets the one that leaves least."""
        return min([bucket.peek() for bucket in self._buckets], key=_room)

    def reset(self, reason: str | None) -> Decision:
        """Forget all charges, and decide about a request after that."""
        return min([bucket.reset(reason=reason) for bucket in self._buckets], key=_room)

    def ban(self, seconds: float | None, reason: str | None) -> None:
        """Refuse all requests for so many seconds, for ever if None."""
        for bucket in self._buckets:
            bucket.ban(seconds, reason=reason)

    def pardon(self, reason: str | None) -> None:
        """Lift the ban."""
        for bucket in self._buckets:
            bucket.pardon(reason=reason)


def _room(decision: Decision) -> tuple[float, int]:
    """Order of decisions by how little they leave."""
    return -decision.retry_after, decision.remaining


class _KeyBucket(NamedTuple):
    """What is done to the limits of a Limiter's key."""

    peek: Callable[[], Decision]
    reset: Callable[..., Decision]
    ban: Callable[..., Decision]
    pardon: Callable[..., object]


@contextmanager
def on_store(options: StoreOptions) -> Iterator[tuple[Limiter, Journal]]:
    """A limiter and the journal on the store that the options name. Raises `click.UsageError` for one that cannot be used."""
    url, key_prefix, timeout = options["store"], options["key_prefix"], options["timeout"]
    if url.startswith("memory:"):
        raise click.UsageError("a store in memory is that of one process, expected the URL of one that processes share")
    try:
        store = open_sync_store(url)
        limiter = Limiter(
            store, timeout=timeout, key_prefix=key_prefix, secret=options["secret"], ipv6_prefix=options["ipv6_prefix"]
        )
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if not isinstance(store, SyncConfigStore):
        raise TypeError(f"{type(store).__name__} keeps no configuration, expected a store that does")
    try:
        yield limiter, Journal(store, key_prefix, timeout)
    finally:
        store.close()


def state_of(limiter: Limiter, options: StateOptions, *, needs_limits: bool) -> ClientState:
    """The state that the options name.

    Raises `click.UsageError` where they name none, or with a part or a limit that makes no sense; `ConfigError` for rule files.
    """
    words, rule, rules = options["words"], options["rule"], options["rules"]
    if words and (rule or rules):
        raise click.UsageError("expected either --rules and --rule, or KEY and limits, not both")
    if words:
        return _state_of_key(limiter, words[0], words[1:], needs_limits=needs_limits)
    if not (rule and rules):
        raise click.UsageError(
            "expected whose state it is: --rules PATH --rule NAME and the parts of its key, or KEY and limits"
        )
    chosen = _rule(rules_named(rules), rule, options)
    try:
        return _state_of_rule(limiter, chosen, options)
    except ConfigError as error:
        raise click.UsageError(_by_options(str(error))) from error


def _by_options(message: str) -> str:
    """A message of `Limiter.bucket` that names the parts of a key by the options that give them."""
    message = re.sub(r"headers=\{'(.+?)': \.\.\.\}", r"-H '\1: ...'", message)
    return re.sub(r"\b([a-z]+)(?:_([a-z]+))?=(?=\W|$)", lambda name: "--" + "-".join(filter(None, name.groups())), message)


def _state_of_key(limiter: Limiter, key: str, limits: Sequence[str], *, needs_limits: bool) -> ClientState:
    if needs_limits and not limits:
        raise click.UsageError(f"expected the limits of {key!r:.80} after it, such as '10/second'")
    try:
        limiter.validate(key, *(limits or ["1/second"]))
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    peek = partial(limiter.peek, key, *limits) if limits else partial(limiter.banned, key)
    bucket = _KeyBucket(peek, partial(limiter.reset, key, *limits), partial(limiter.ban, key), partial(limiter.pardon, key))
    return ClientState(masked(key), [limiter.ban_key(key)], [bucket])


def _state_of_rule(limiter: Limiter, rule: Rule, options: StateOptions) -> ClientState:
    parts = _parts(options)
    buckets = [limiter.bucket(rule, **each) for each in _by_path(rule, parts, options["path"])]
    named = [f"{label}={_shown(label, value)}" for label, value in parts.items() if label != "limits"]
    return ClientState(" ".join([rule.name, *named]), [key for bucket in buckets for key in bucket.keys], buckets)


def _rule(rules: RuleSet, name: str, options: StateOptions) -> Rule:
    """The rule of a name that limits the client: that of the client's tier, as far as it is known."""
    path, tier = options["rules"], options["tier"]
    if tier is not None and tier not in rules.tiers:
        raise click.UsageError(f"{path}: no file describes tier {tier!r:.80}, {expected_of(tier, rules.tiers)}")
    caller = _listed_caller(rules, options)
    if tier is None and caller is not None:
        tier = caller.tier if caller.tier in rules.tiers else DEFAULT_TIER
    tiers = [tier] if tier is not None else list(rules.tiers)
    for of_tier in tiers:
        for rule in rules.tiers[of_tier]:
            if rule.name == name:
                return rule
    known = dict.fromkeys(rule.name for of_tier in tiers for rule in rules.tiers[of_tier])
    in_code = "for a limit in code, limiter.bucket in Python"
    raise click.UsageError(f"{path}: there is no rule {name!r:.80}, {expected_of(name, known)}; {in_code}")


def _listed_caller(rules: RuleSet, options: StateOptions) -> Caller | None:
    """The caller of the rule files that the options name, by id or by API key."""
    if options["caller"] is not None:
        return rules.callers.named(options["caller"])
    return None if options["api_key"] is None else rules.callers.with_key(options["api_key"])


def _parts(options: StateOptions) -> BucketParts:
    given: Mapping[str, Any] = options
    parts = {label: given[label] for label in ("ip", "api_key", "caller", "user", "method", "host", "tier", "path")}
    if options["limits"]:
        parts["limits"] = list(options["limits"])
    if options["header"]:
        parts["headers"] = dict(map(header_of, options["header"]))
    return cast("BucketParts", {label: value for label, value in parts.items() if value is not None})


def _by_path(rule: Rule, parts: BucketParts, path: str | None) -> list[BucketParts]:
    """The parts by each path that a gate may count by: a route's template, or a pattern of the rule."""
    if not any("path" in check_part(part) for part in rule.key):
        return [parts]
    pattern = rule.paths[0]
    if path is None:
        tell_of_routes(rule, "--path with the route, such as /api/hello or /items/{id}")
    paths = dict.fromkeys([*([] if path is None else [path]), pattern])
    return [{**parts, "path": each} for each in paths]


def tell_of_routes(rule: Rule, expected: str) -> None:
    """Tell people if a rule has a bucket for each route, while that of its pattern is looked at."""
    pattern = rule.paths[0]
    if any("path" in check_part(part) for part in rule.key) and set("*{") & set(pattern):
        say(
            f"rule {rule.name} has a bucket for each route: this is that of {pattern}, which only a service counts by whose "
            f"routes are not known; expected {expected}",
            err=True,
        )


def header_of(text: str) -> tuple[str, str]:
    """Name and value of ``Name: value``. Raises `click.UsageError` for anything else."""
    name, colon, value = text.partition(":")
    if not (colon and _HEADER_NAME.fullmatch(name.strip())) or _NO_VALUE & set(value.strip()):
        raise click.UsageError(f"{text!r:.80} is no header, expected 'Name: value'")
    return name.strip(), value.strip()


def _shown(label: str, value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}:{masked(text)}" for name, text in value.items())
    return shown(label, str(value))
