"""The routes of Django, and of REST framework on top of it."""

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
from limitgate.routes import Pattern, Route
from limitgate.routes.overview import METHODS, Listed
from limitgate.rules.decorators import Mark, class_of, marks_of


class DjangoRoutes:
    """The routes of a Django project: those of ``ROOT_URLCONF``, and of any URLconf that middleware puts in its place."""

    def __init__(self) -> None:
        self._tables: dict[Any, _Table] = {}

    def note(self, urlconf: Any) -> None:
        """Add a URLconf that a request brings along in place of ``ROOT_URLCONF``."""
        with contextlib.suppress(Exception):  # it is Django's to raise, after the request was charged
            if urlconf not in self._tables:
                self._table(urlconf)

    def decorated(self) -> bool:
        """True if any view carries a decorator, or if that cannot be known."""
        try:
            return any(self._table(urlconf).decorated for urlconf in (None, *self._tables))
        except Exception:  # noqa: BLE001 - a URLconf that cannot be imported is Django's to raise
            return True

    def find(self, request: Request) -> Route | None:
        """The route that Django's resolver will choose. Where it fails, by a converter that raises, there is none."""
        django = getattr(request, "django", None)
        try:
            return self._table(getattr(django, "urlconf", None)).find(django)
        except Exception as error:  # noqa: BLE001 - not found, or it is Django's to raise, after the request was charged
            raise_interruption(error)
            return None

    def version(self, request: Request) -> object:
        """The table of a request's URLconf, None if that looks at more than the path, or cannot be known."""
        try:
            table = self._table(getattr(getattr(request, "django", None), "urlconf", None))
        except Exception as error:  # noqa: BLE001 - a URLconf that cannot be imported is Django's to raise
            raise_interruption(error)
            return None
        return table if table.is_by_path else None

    def _table(self, urlconf: Any) -> _Table:
        """The table of a URLconf, read anew when Django's own was, or when patterns were added."""
        resolver = get_resolver(urlconf)
        table = self._tables.get(urlconf)
        if table is None or table.resolver is not resolver or table.is_outdated:
            table = self._tables[urlconf] = _Table(resolver)
        return table


class _Table:
    """Views and marks of one URLconf."""

    def __init__(self, resolver: Any) -> None:
        self.resolver = resolver
        self.decorated: bool = any(True for view in views(resolver) for _ in all_marks(view))
        self._lists = list(_lists(resolver))
        self._sizes = [*map(len, self._lists)]
        self.is_by_path = all(map(_is_by_path, [resolver, *chain.from_iterable(self._lists)]))
        """True if views are chosen by path alone."""
        self._templates: dict[tuple[Any, ...], str] = {}

    @property
    def is_outdated(self) -> bool:
        """True if the URLconf has more patterns than were read."""
        return self._sizes != [*map(len, self._lists)]

    def find(self, django: Any) -> Route:
        match = self.resolver.resolve(django.path_info)
        passed = tuple(dict.fromkeys(match.tried[-1]))  # each once: URLs may include themselves, and clients choose how often
        return Route(self._template(passed), _marks(match.func, django.method))

    def _template(self, patterns: tuple[Any, ...]) -> str:
        """The path that leads through these patterns, one for all languages: as it is written in the default one."""
        template = self._templates.get(patterns)
        if template is None:
            with translation.override(settings.LANGUAGE_CODE):
                template = "/" + "".join(str(pattern.pattern).removeprefix("^") for pattern in patterns)
            self._templates[patterns] = template
        return template


_PLACEHOLDER = re.compile(r"<(?:[^>:]*:)?(?P<name>[^>]*)>")
_WITHIN_A_SEGMENT = ("IntConverter", "StringConverter", "SlugConverter", "UUIDConverter")


def _placeholder(converters: Any, found: re.Match[str]) -> str:
    """`ANY` for a converter that stays within a segment, `REST` for one that may go on."""
    kind = type(converters.get(found["name"]))
    return ANY if kind.__module__ == _CONVERTERS and kind.__name__ in _WITHIN_A_SEGMENT else REST


def _segments(template: str) -> Pattern:
    """A template with `ANY` and `REST` in it as segments."""
    pattern: list[str] = []
    for segment in filter(None, template.split("/")):
        if REST in segment:
            return (*pattern, REST)
        pattern.append(ANY if ANY in segment else segment)
    return tuple(pattern)


def views(resolver: Any) -> Iterator[Any]:
    """All views of a URLconf, those of included ones too."""
    for patterns in _lists(resolver):
        yield from (pattern.callback for pattern in patterns if isinstance(pattern, URLPattern))


def _lists(resolver: Any) -> Iterator[Sequence[Any]]:
    """The patterns of a URLconf, and those of included ones; of one that includes itself, once."""
    waiting, known = [resolver], set()
    while waiting:
        patterns = waiting.pop().url_patterns
        if id(patterns) not in known:
            known.add(id(patterns))
            waiting += [pattern for pattern in patterns if isinstance(pattern, URLResolver)]
            yield patterns


def _is_by_path(pattern: Any) -> bool:
    """True if a pattern looks at the path alone: it is Django's own, and so are its converters, and none is translated."""
    if type(pattern) not in (URLPattern, URLResolver):
        return False
    route = pattern.pattern
    text = getattr(route, _TEXTS.get(type(route), ""), None)
    return isinstance(text, str) and all(type(each).__module__ == _CONVERTERS for each in route.converters.values())


_TEXTS = {RoutePattern: "_route", RegexPattern: "_regex"}
"""By kind of pattern the attribute with its text; a translated one is no `str`."""
_CONVERTERS = "django.urls.converters"


def all_marks(view: Any) -> Iterator[Mark]:
    """The marks on a view for any method."""
    for method in {*(_allowed(view) or View.http_method_names), *(getattr(view, "actions", None) or ())}:
        yield from _marks(view, method)


def _marks(view: Any, method: str) -> tuple[Mark, ...]:
    """The marks on a view, and on what it is made of."""
    name, allowed = method.lower(), _allowed(view)
    if allowed is not None and name not in allowed:
        return marks_of(view, View.http_method_not_allowed.__name__)
    return marks_of(view, method)


def _allowed(view: Any) -> Any:
    """Methods that a class-based view answers, in lower case: those given to ``as_view``, else those of its class."""
    told = getattr(view, "view_initkwargs", None) or getattr(view, "initkwargs", None) or {}
    return told.get("http_method_names", getattr(class_of(view), "http_method_names", None))


def routes_of(urlconf: Any = None) -> list[Listed]:
    """The routes of a URLconf for the overview, by default of ``ROOT_URLCONF``, with those of the URLconfs that it includes."""
    resolver = get_resolver(urlconf)
    return [
        Listed(shown, _segments(template), _methods(view), partial(_limits_of, view), partial(_takes, resolver, shown))
        for shown, template, view in _walk(resolver, "/", "/", frozenset())
    ]


def _limits_of(view: Any, method: str) -> tuple[Mark, ...]:
    """The decorators on the view of a method, and the throttles of REST framework, where that is in use."""
    rest = sys.modules.get("limitgate.django.rest")
    given = getattr(view, "initkwargs", None) or {}
    return (*_marks(view, method), *(rest.rules_of_view(class_of(view), given) if rest is not None else ()))


def _walk(resolver: Any, shown: str, template: str, around: frozenset[int]) -> Iterator[tuple[str, str, Any]]:
    """Templates as they are written, with `ANY` and `REST` in them, and views. ``around`` are the lists that include these."""
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
    """The methods that a view has handlers for, any for a function: HEAD only without GET, OPTIONS only alone."""
    actions = getattr(view, "actions", None)
    allowed = [name for name in _allowed(view) or () if hasattr(class_of(view), name)]
    names = {name.upper() for name in actions or allowed}
    names -= {"HEAD"} if "GET" in names else set()
    return tuple(sorted(names)) or METHODS


def _takes(resolver: Any, shown: str, path: str) -> bool:
    """True if Django leads a path to the route of a template, if need be after it has asked for a slash at the end."""
    for each in (path, f"{path}/"):
        with contextlib.suppress(Exception):  # not found, or a converter of the project's that raises
            return bool(f"/{resolver.resolve(each).route.removeprefix('^')}" == shown)
    return False
