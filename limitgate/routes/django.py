"""The routes of Django and REST framework."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from django.conf import settings
from django.urls import URLPattern, URLResolver, get_resolver
from django.urls.resolvers import RegexPattern, RoutePattern
from django.utils import translation
from django.views import View

from limitgate.http.paths import ANY, REST
from limitgate.http.request import Request
from limitgate.internal_errors import raise_interruption
from limitgate.routes import Route, Routes, pattern_in
from limitgate.routes.overview import METHODS, Listed
from limitgate.rules.decorators import Mark, class_of, marks_of
from limitgate.rules.rule import Rule


class DjangoRoutes(Routes):
    def __init__(self) -> None:
        self._tables: dict[Any, _Table] = {}

    def note(self, urlconf: Any) -> None:
        with contextlib.suppress(Exception):  # Django raises this after the charge
            if urlconf not in self._tables:
                self._table(urlconf)

    def decorated(self) -> bool:
        """True if every request needs a lookup, or if that is unknown."""
        try:
            return any(self._table(urlconf).decorated for urlconf in (None, *self._tables))
        except Exception:  # noqa: BLE001 - Django raises import errors of the URLconf
            return True

    def find(self, request: Request) -> Route | None:
        """Return the route; None if a converter raises."""
        django = getattr(request, "django", None)
        try:
            return self._table(getattr(django, "urlconf", None)).find(django)
        except Exception as error:  # noqa: BLE001 - not found, or Django raises this after the charge
            raise_interruption(error)
            return None

    def version(self, request: Request) -> object:
        try:
            table = self._table(getattr(getattr(request, "django", None), "urlconf", None))
        except Exception as error:  # noqa: BLE001 - Django raises import errors of the URLconf
            raise_interruption(error)
            return None
        return table if table.is_by_path else None

    def _table(self, urlconf: Any) -> _Table:
        resolver = get_resolver(urlconf)
        table = self._tables.get(urlconf)
        if table is None or table.resolver is not resolver or table.is_outdated:
            table = self._tables[urlconf] = _Table(resolver)
        return table


class _Table:
    def __init__(self, resolver: Any) -> None:
        self.resolver = resolver
        self.decorated: bool = any(True for view in views(resolver) for _ in all_marks(view))
        self._lists = list(_lists(resolver))
        self._sizes = [*map(len, self._lists)]
        self.is_by_path = all(map(_is_by_path, [resolver, *chain.from_iterable(self._lists)]))
        """True if only the path selects views."""
        self._templates: dict[tuple[Any, ...], str] = {}

    @property
    def is_outdated(self) -> bool:
        return self._sizes != [*map(len, self._lists)]

    def find(self, django: Any) -> Route:
        match = self.resolver.resolve(django.path_info)
        passed = tuple(dict.fromkeys(match.tried[-1]))  # URLs may include themselves, at a depth that clients choose
        return Route(self._template(passed), _marks(match.func, django.method))

    def _template(self, patterns: tuple[Any, ...]) -> str:
        """Return a template in the default language, so that all languages share it."""
        template = self._templates.get(patterns)
        if template is None:
            with translation.override(settings.LANGUAGE_CODE):
                template = "/" + "".join(str(pattern.pattern).removeprefix("^") for pattern in patterns)
            self._templates[patterns] = template
        return template


_PLACEHOLDER = re.compile(r"<(?:[^>:]*:)?(?P<name>[^>]*)>")
_WITHIN_A_SEGMENT = ("IntConverter", "StringConverter", "SlugConverter", "UUIDConverter")


def _placeholder(converters: Any, found: re.Match[str]) -> str:
    kind = type(converters.get(found["name"]))
    return ANY if kind.__module__ == _CONVERTERS and kind.__name__ in _WITHIN_A_SEGMENT else REST


def views(resolver: Any) -> Iterator[Any]:
    for patterns in _lists(resolver):
        yield from (pattern.callback for pattern in patterns if isinstance(pattern, URLPattern))


def _lists(resolver: Any) -> Iterator[Sequence[Any]]:
    waiting, known = [resolver], set()
    while waiting:
        patterns = waiting.pop().url_patterns
        if id(patterns) not in known:
            known.add(id(patterns))
            waiting += [pattern for pattern in patterns if isinstance(pattern, URLResolver)]
            yield patterns


def _is_by_path(pattern: Any) -> bool:
    """True for one of Django's pattern classes, if it isn't translated."""
    if type(pattern) not in (URLPattern, URLResolver):
        return False
    route = pattern.pattern
    text = getattr(route, _TEXTS.get(type(route), ""), None)
    return isinstance(text, str) and all(type(each).__module__ == _CONVERTERS for each in route.converters.values())


_TEXTS = {RoutePattern: "_route", RegexPattern: "_regex"}
"""The pattern's text; not a `str` if translated."""
_CONVERTERS = "django.urls.converters"


def all_marks(view: Any) -> Iterator[Mark]:
    for method in {*(_allowed(view) or View.http_method_names), *(getattr(view, "actions", None) or ())}:
        yield from _marks(view, method)


def _marks(view: Any, method: str) -> tuple[Mark, ...]:
    name, allowed = method.lower(), _allowed(view)
    if allowed is not None and name not in allowed:
        return marks_of(view, View.http_method_not_allowed.__name__)
    return marks_of(view, method)


def _allowed(view: Any) -> Any:
    told = getattr(view, "view_initkwargs", None) or getattr(view, "initkwargs", None) or {}
    return told.get("http_method_names", getattr(class_of(view), "http_method_names", None))


def routes_of(urlconf: Any = None) -> list[Listed]:
    """Yield the routes of a URLconf (default ``ROOT_URLCONF``) with includes."""
    resolver = get_resolver(urlconf)
    return [
        Listed(
            shown,
            pattern_in(template),
            _methods(view),
            partial(_limits_of, view),
            partial(_takes, resolver, shown),
            partial(_limits_of_throttles, view),
        )
        for shown, template, view in _walk(resolver, "/", "/", frozenset())
    ]


def _limits_of(view: Any, method: str) -> tuple[Mark, ...]:
    return (*_marks(view, method), *_limits_of_throttles(view, method))


def _limits_of_throttles(view: Any, _: str) -> tuple[Rule, ...]:
    rest = sys.modules.get("limitgate.django.rest")
    given = getattr(view, "initkwargs", None) or {}
    return tuple(rest.rules_of_view(class_of(view), given)) if rest is not None else ()


def _walk(resolver: Any, shown: str, template: str, around: frozenset[int]) -> Iterator[tuple[str, str, Any]]:
    """Yield templates for display, templates for matching, and views. ``around`` has the ids of outer lists."""
    for pattern in resolver.url_patterns:
        route = pattern.pattern
        text = getattr(route, "_route", None) if type(route) is RoutePattern else None
        here = f"{shown}{str(route).removeprefix('^')}"
        below = REST if not isinstance(text, str) else _PLACEHOLDER.sub(partial(_placeholder, route.converters), text)
        if not isinstance(pattern, URLResolver):
            yield here, template + below, pattern.callback
        elif id(pattern.url_patterns) not in around:
            yield from _walk(pattern, here, template + below, around | {id(resolver.url_patterns)})


def _methods(view: Any) -> tuple[str, ...]:
    actions = getattr(view, "actions", None)
    allowed = [name for name in _allowed(view) or () if hasattr(class_of(view), name)]
    names = {name.upper() for name in actions or allowed}
    names -= {"HEAD"} if "GET" in names else set()
    return tuple(sorted(names)) or METHODS


def _takes(resolver: Any, shown: str, path: str) -> bool:
    """True if Django resolves a path, or its redirect with a slash."""
    for each in (path, f"{path}/"):
        with contextlib.suppress(Exception):
            return bool(f"/{resolver.resolve(each).route.removeprefix('^')}" == shown)
    return False
