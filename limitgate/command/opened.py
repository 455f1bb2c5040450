"""Options and store of a verb. Imports service and settings only if needed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from limitgate.command.output import Verb
from limitgate.command.stored import MEMORY_STORE, MISSING_STORE, settings_of, store_of
from limitgate.errors import ConfigError
from limitgate.gate.flow import Budget, measures_silence, run
from limitgate.gate.journal import Journal
from limitgate.limits.bucket import LONGEST_PREFIX
from limitgate.limits.limit import as_seconds
from limitgate.messages.text import Names
from limitgate.stores.base import SyncConfigStore

if TYPE_CHECKING:
    from limitgate.command.service import Service
    from limitgate.limiter.limiter import Limiter
    from limitgate.limiter.rule_bucket import BucketParts, RuleBucket, RuleBucketOperations
    from limitgate.rules.rule import Rule
    from limitgate.rules.settings import Settings

Options = Mapping[str, Any]


class _Timeout(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        with suppress(ConfigError):
            value = as_seconds(value, self.name)
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{seconds} is not in the range {self.min:g}<x<={self.max:g}.", param, ctx)
        return seconds


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
store_option: Callable[[Verb], Verb] = click.option(
    "--store", metavar="URL", help="Store of the service; default: that of --app.  [env var: LIMITGATE_STORE]"
)
key_prefix_option: Callable[[Verb], Verb] = click.option(
    "--key-prefix", metavar="TEXT", help="Key prefix of the service.  [env var: LIMITGATE_KEY_PREFIX]"
)
secret_option: Callable[[Verb], Verb] = click.option(
    "--secret", metavar="TEXT", help="Secret of the service; prefer the variable LIMITGATE_SECRET."
)


def store_options(verb: Verb) -> Verb:
    return decorated(
        verb,
        app_option,
        store_option,
        key_options,
        timeout_option,
    )


def key_options(verb: Verb) -> Verb:
    return decorated(
        verb,
        key_prefix_option,
        secret_option,
        click.option(
            "--ipv6-prefix",
            metavar="BITS",
            help="IPv6 prefix of the service.  [env var: LIMITGATE_IPV6_PREFIX]",
            type=click.IntRange(32, 128),
        ),
    )


def chosen_of(options: Options) -> dict[str, Any]:
    """Return the options of `store_options` that are settings of the service."""
    return {name: options[name] for name in ("store", "key_prefix", "secret", "ipv6_prefix")}


def rules_beside(app: str | None, rules: str | None) -> str | None:
    """Drop LIMITGATE_RULES beside ``--app``, because the rules of the application's gate override it."""
    source = click.get_current_context().get_parameter_source("rules")
    return None if app is not None and source == ParameterSource.ENVIRONMENT else rules


def decorated(verb: Verb, *decorators: Callable[[Verb], Verb]) -> Verb:
    return reduce(lambda decorated, decorate: decorate(decorated), reversed(decorators), verb)


class Opened:
    def __init__(
        self,
        store: SyncConfigStore,
        key_prefix: str,
        timeout: float,
        chosen: dict[str, Any],
        service: Service | None = None,
    ) -> None:
        self.service = service
        self._chosen = chosen
        self.store: SyncConfigStore = store
        self.key_prefix: str = key_prefix
        self.timeout: float = timeout
        self.journal: Journal = Journal(store, key_prefix, timeout)

    @cached_property
    def _settings(self) -> Settings:
        return _settings(self.service, self._chosen)

    @property
    def names(self) -> Names:
        return self._settings.names

    @cached_property
    def limiter(self) -> Limiter:
        from limitgate.limiter.limiter import Limiter

        secret = None if self._settings.secret is None else self._settings.secret.get_secret_value()
        return Limiter(self.store, timeout=self.timeout, key_prefix=self.key_prefix, secret=secret)

    def bucket(self, rule: Rule, parts: BucketParts, templates: Sequence[str | None] | None) -> RuleBucket:
        """Raises `ConfigError`."""
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


@contextmanager
def on_store(options: Options, rules: str | None = None) -> Iterator[Opened]:
    if rules is None and options.get("rule") and options["app"] is None:
        rules = os.environ.get("LIMITGATE_RULES")
    chosen, named = chosen_of(options), None
    if rules or options["app"]:
        from limitgate.command.service import service

        named = service(rules, options["app"], **chosen)
    where = _chosen_place(chosen) if named is None else None
    if where is None:
        settings = _settings(named, chosen)
        if "store" not in settings.model_fields_set:
            raise click.UsageError(MISSING_STORE)
        where = settings.store, settings.key_prefix
    store = store_of(where[0])
    if store is None:
        raise click.UsageError(MEMORY_STORE)
    try:
        yield Opened(store, where[1], options["timeout"], chosen, named)
    finally:
        store.close()


def _settings(service: Service | None, chosen: dict[str, Any]) -> Settings:
    return settings_of(chosen) if service is None else service.settings


def _chosen_place(chosen: Options) -> tuple[str, str] | None:
    """Return store and key prefix if they need no `Settings`."""
    variables = {name.upper(): value for name, value in os.environ.items()}
    store, key_prefix = chosen["store"], chosen["key_prefix"]
    if store is None:
        store = variables.get("LIMITGATE_STORE")
    if key_prefix is None:
        key_prefix = variables.get("LIMITGATE_KEY_PREFIX", "limitgate")
    is_valid = 0 < len(key_prefix) <= LONGEST_PREFIX and not variables.get("LIMITGATE_ENV_FILE")
    return (store, key_prefix) if store and is_valid else None
