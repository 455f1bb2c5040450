"""``"limitgate.django"`` in ``INSTALLED_APPS`` adds system checks for configuration errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import isclass
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.conf.urls.i18n import is_language_prefix_patterns_used
from django.core.checks import CheckMessage, Error, Warning as Caution, register
from django.urls import get_resolver
from django.utils.module_loading import import_string

from limitgate.django.middleware import LimitGateMiddleware, options
from limitgate.errors import ConfigError
from limitgate.messages.text import listed
from limitgate.routes.django import all_marks, views
from limitgate.rules.decorators import Mark
from limitgate.rules.files import rules_of
from limitgate.rules.options import check_refuses
from limitgate.rules.rule import Rule
from limitgate.rules.settings import GateSettings
from limitgate.stores import AsyncStore, MemoryStore, SyncStore, open_sync_store


class LimitGateConfig(AppConfig):  # type: ignore[misc]  # Django is not typed
    """Has Django check settings, middleware and rules when a command starts."""

    name = "limitgate.django"
    label = "limitgate"
    verbose_name: str = "LimitGate"

    def ready(self) -> None:
        """Register the checks."""
        register(check)


_AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"
_LOCALE = "django.middleware.locale.LocaleMiddleware"
_OURS = "limitgate.django.LimitGateMiddleware"


def check(**_: Any) -> list[CheckMessage]:
    """Check ``LIMITGATE``, the rules, and the position of the middleware; ``W...`` are warnings."""
    middleware = _middleware()
    ours = [place for place, each in enumerate(middleware) if isclass(each) and issubclass(each, LimitGateMiddleware)]
    marks = _marks()
    given = getattr(settings, "LIMITGATE", None) is not None
    messages, rules = _options() if given or ours else ([], [])
    if not ours and (given or marks):
        messages.append(_missing(given=given))
    if len(ours) > 1:
        hint = f"Keep one {_OURS!r} in MIDDLEWARE."
        messages.append(
            Error("LimitGateMiddleware is listed twice, so rules are charged twice.", hint=hint, id="limitgate.E005")
        )
    if ours:
        messages += _order(middleware[ours[0] :], rules, marks)
    return messages


def _options() -> tuple[list[CheckMessage], list[Rule]]:
    try:
        chosen = options()
    except ConfigError as error:
        return [Error(str(error), hint="LIMITGATE = {'RULES': 'config/', ...}", id="limitgate.E001")], []
    try:
        read = GateSettings(**chosen)
        if not read.enabled:
            return [], []
        check_refuses(read.on_denied, "request")
        counts_alone = _is_memory(read.store)
    except ConfigError as error:
        hint = "Correct it in LIMITGATE, or in the environment if it comes from a LIMITGATE_* variable."
        return [Error(f"LIMITGATE: {error}", hint=hint, id="limitgate.E002")], []
    messages: list[CheckMessage] = []
    if counts_alone and not settings.DEBUG:
        message = "LIMITGATE: the store is memory://, so each process counts separately, and a restart resets the counts."
        hint = "Set LIMITGATE['STORE'] to 'redis://...', or silence this check if a single process serves."
        messages.append(Caution(message, hint=hint, id="limitgate.W001"))
    try:
        tiers = rules_of(read.rules).tiers
    except ConfigError as error:
        hint = "LIMITGATE['RULES'] is a rule file, a folder of them, or a list of Rule; if you use only decorators, set []."
        return [*messages, Error(f"LIMITGATE: {error}", hint=hint, id="limitgate.E003")], []
    return messages, [rule for of_tier in tiers.values() for rule in of_tier]


def _is_memory(store: Any) -> bool:
    if isinstance(store, str):
        store = open_sync_store(store)
        store.close()
    elif not isinstance(store, SyncStore | AsyncStore):
        raise ConfigError(f"store: {store!r:.80} is not a store, expected a URL or a store")
    return isinstance(store, MemoryStore)


def _missing(*, given: bool) -> CheckMessage:
    message = "LIMITGATE is set" if given else "Views are decorated with @limit or @exempt"
    hint = f"Add {_OURS!r} to MIDDLEWARE, below AuthenticationMiddleware if there is one."
    return Error(f"{message}, but LimitGateMiddleware is not in MIDDLEWARE.", hint=hint, id="limitgate.E004")


def _order(behind: Sequence[Any], rules: Sequence[Rule], marks: Sequence[Mark]) -> Iterator[CheckMessage]:
    limits = [*rules, *(mark for mark in marks if isinstance(mark, Rule))]
    by_user = sorted({rule.name for rule in limits if rule.key_asks("user")})
    if by_user and any(_is(each, _AUTHENTICATION) for each in behind):
        message = f"LimitGateMiddleware is above AuthenticationMiddleware, but {listed(by_user)} counts by user."
        hint = f"Move {_OURS!r} below {_AUTHENTICATION!r} in MIDDLEWARE."
        yield Error(message, hint=hint, id="limitgate.E006")
    if marks and any(_is(each, _LOCALE) for each in behind) and is_language_prefix_patterns_used(settings.ROOT_URLCONF)[0]:
        message = "LimitGateMiddleware is above LocaleMiddleware, so it cannot find decorated views below i18n_patterns."
        hint = f"Move {_OURS!r} below {_LOCALE!r} in MIDDLEWARE."
        yield Error(message, hint=hint, id="limitgate.E007")


def _middleware() -> list[Any]:
    classes = []
    for path in settings.MIDDLEWARE:
        try:
            classes.append(import_string(path))
        except ImportError:
            classes.append(None)
    return classes


def _marks() -> list[Mark]:
    try:
        return [mark for view in views(get_resolver()) for mark in all_marks(view)]
    except Exception:  # noqa: BLE001 - modules of the project may raise anything
        return []


def _is(middleware: Any, path: str) -> bool:
    return isclass(middleware) and any(f"{kind.__module__}.{kind.__qualname__}" == path for kind in middleware.__mro__)
