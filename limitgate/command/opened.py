"""Options and store of a verb. Imports the service only if ``--app`` or rules are given, so that ``status`` starts fast."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import click

from limitgate.command.stored import settings_of, store_of
from limitgate.errors import ConfigError
from limitgate.gate.flow import Budget, measures_silence, run
from limitgate.gate.journal import Journal
from limitgate.limits.limit import as_seconds
from limitgate.rules.rule import Rule, RuleSet
from limitgate.rules.settings import Settings
from limitgate.stores.base import SyncConfigStore

if TYPE_CHECKING:
    from limitgate.command.service import Service
    from limitgate.limiter.limiter import Limiter
    from limitgate.limiter.rule_bucket import BucketParts, RuleBucket, RuleBucketOperations

Options = Mapping[str, Any]
Verb = TypeVar("Verb", bound=Callable[..., Any])


class _Timeout(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        with suppress(ConfigError):
            value = as_seconds(value, self.name)
        return super().convert(value, param, ctx)


timeout_option: Callable[[Verb], Verb] = click.option(
    "--timeout",
    default=2.0,
    type=_Timeout(0, 60, min_open=True),
    metavar="SECONDS",
    help="How long to wait for the store.",
    show_default=True,
)
app_option: Callable[[Verb], Verb] = click.option(
    "--app", metavar="MODULE:APP", help="The application or a factory, for its routes, limits in code, and options."
)


def store_options(verb: Verb) -> Verb:
    return decorated(
        verb,
        app_option,
        click.option(
            "--store", metavar="URL", help="Store of the service; default: that of --app.  [env var: LIMITGATE_STORE]"
        ),
        key_options,
        timeout_option,
    )


def key_options(verb: Verb) -> Verb:
    return decorated(
        verb,
        click.option("--key-prefix", metavar="TEXT", help="Key prefix of the service.  [env var: LIMITGATE_KEY_PREFIX]"),
        click.option("--secret", metavar="TEXT", help="Secret of the service; prefer the variable LIMITGATE_SECRET."),
        click.option(
            "--ipv6-prefix", metavar="BITS", help="IPv6 prefix of the service.  [env var: LIMITGATE_IPV6_PREFIX]", type=int
        ),
    )


def decorated(verb: Verb, *decorators: Callable[[Verb], Verb]) -> Verb:
    return reduce(lambda decorated, decorate: decorate(decorated), reversed(decorators), verb)


class Opened:
    def __init__(self, store: SyncConfigStore, settings: Settings, timeout: float, named: Service | None) -> None:
        self.service = named
        self.names = settings.names
        self._settings = settings
        self.store: SyncConfigStore = store
        self.key_prefix: str = settings.key_prefix
        self.timeout: float = timeout
        self.journal: Journal = Journal(store, settings.key_prefix, timeout)

    @cached_property
    def limiter(self) -> Limiter:
        from limitgate.limiter.limiter import Limiter

        secret = None if self._settings.secret is None else self._settings.secret.get_secret_value()
        return Limiter(self.store, timeout=self.timeout, key_prefix=self.key_prefix, secret=secret)

    def bucket(self, rule: Rule, parts: BucketParts, templates: Sequence[str | None] | None) -> RuleBucket:
        """Return the bucket that the service uses for one client. Raises `ConfigError`."""
        from limitgate.limiter.rule_bucket import rule_bucket

        settings = self._settings
        operations = rule_bucket(
            rule,
            None,
            parts,
            timeout=self.timeout,
            key_prefix=settings.key_prefix,
            secret=settings.secret_bytes,
            ipv6_prefix=settings.ipv6_prefix,
            templates=templates,
            rules=None if self.service is None else self.service.rules,
            shadow=settings.shadow,
        )
        return self.carried_out(operations)

    def carried_out(self, operations: RuleBucketOperations) -> RuleBucket:
        from limitgate.limiter.rule_bucket import RuleBucket

        measured = measures_silence(self.store)
        return RuleBucket(operations, lambda flow: run(self.store, flow, Budget(self.timeout, measured=measured)))


def _service(rules: str | None, app: str | None, chosen: dict[str, Any]) -> Service:
    from limitgate.command.service import service

    return service(rules, app, **chosen)


@contextmanager
def on_store(options: Options, rules: str | None = None) -> Iterator[Opened]:
    if rules is None and options.get("rule") and options["app"] is None:
        rules = os.environ.get("LIMITGATE_RULES")
    chosen = {name: options[name] for name in ("store", "key_prefix", "secret", "ipv6_prefix")}
    named = _service(rules, options["app"], chosen) if rules or options["app"] else None
    settings = settings_of(None, RuleSet([]), chosen) if named is None else named.settings
    if "store" not in settings.model_fields_set:
        raise click.UsageError("Missing option '--store' (env var: 'LIMITGATE_STORE').")
    store = store_of(settings)
    if store is None:
        raise click.UsageError("a memory store belongs to a single process, expected the URL of a shared store")
    try:
        yield Opened(store, settings, options["timeout"], named)
    finally:
        store.close()
