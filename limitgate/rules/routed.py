"""Routes that a decorator below ours has just made: then ours stands above the route decorator, out of the route's sight.

A framework is known by what its objects have, as none of them need be installed. Where what has the routes is not a name of the
code that decorates, nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from inspect import getattr_static
from types import FrameType, FunctionType, ModuleType
from typing import Any

_NONE = object()
_PLAIN = (type, FunctionType, ModuleType, str, int, float, list, tuple, dict, type(None))
"""Kinds of most of a module's names, none of which has routes."""


def path_just_routed(endpoint: Any, frame: FrameType | None) -> str | None:
    """Path of the latest route of an application or router that ``frame`` has a name for, if that is to ``endpoint``."""
    if frame is None:
        return None
    values = {id(value): value for names in (frame.f_locals, frame.f_globals) for value in list(names.values())}
    for value in values.values():
        if not isinstance(value, _PLAIN):
            with suppress(Exception):  # whatever has attributes of these names is asked for them
                for path, routed in _latest(value):
                    if routed is endpoint:
                        return path
    return None


def _latest(value: Any) -> Iterator[tuple[str, Any]]:
    """The latest route of an application, a router or a blueprint, and what it may lead to; nothing of anything else."""
    if _has(value, "routes") and isinstance(value.routes, list) and value.routes:
        route = value.routes[-1]
        yield str(route.path), route.endpoint
    if _has(value, "url_map") and value.view_functions:
        name, view = list(value.view_functions.items())[-1]
        yield next((rule.rule for rule in value.url_map.iter_rules(name)), name), view
    elif _has(value, "deferred_functions") and value.deferred_functions:
        inside = [cell.cell_contents for cell in value.deferred_functions[-1].__closure__ or ()]
        path = next((each for each in inside if isinstance(each, str) and each.startswith("/")), value.name)
        yield from ((path, each) for each in inside if callable(each))


def _has(value: Any, name: str) -> bool:
    """True if an object has an attribute, without asking those that make one of any name."""
    return getattr_static(value, name, _NONE) is not _NONE
