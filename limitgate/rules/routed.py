"""Routes that a decorator below ours has just made: then ours stands above the route decorator, out of the route's sight.

A framework is known by what its objects have, as none of them need be installed. Where what has the routes is not a name of the
code that decorates, nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any


def path_just_routed(endpoint: Any, frame: FrameType | None) -> str | None:
    """Path of the latest route of an application or router that ``frame`` has a name for, if that is to ``endpoint``."""
    if frame is None:
        return None
    for value in list({**frame.f_globals, **frame.f_locals}.values()):
        kind = type(value)
        if hasattr(kind, "add_route") or hasattr(kind, "add_url_rule"):
            with suppress(Exception):  # whatever has methods of these names is asked for more
                for path, routed in _latest(value):
                    if routed is endpoint:
                        return path
    return None


def _latest(value: Any) -> Iterator[tuple[str, Any]]:
    """The path of the latest route of an application, a router or a blueprint, and what it may lead to."""
    if hasattr(value, "add_route"):
        route = value.routes[-1]
        yield str(route.path), route.endpoint
    elif hasattr(value, "url_map"):
        name, view = list(value.view_functions.items())[-1]
        yield next((rule.rule for rule in value.url_map.iter_rules(name)), name), view
    else:
        inside = [cell.cell_contents for cell in value.deferred_functions[-1].__closure__ or ()]
        path = next((each for each in inside if isinstance(each, str) and each.startswith("/")), value.name)
        yield from ((path, each) for each in inside if callable(each))
