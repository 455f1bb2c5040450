"""Applications that are named on the command line, ``MODULE:APP``, and their routes."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from limitgate.errors import LimitGateError
from limitgate.routes import NoRoutes, Routes
from limitgate.routes.flask import wsgi_routes
from limitgate.routes.starlette import asgi_routes


def application(name: str) -> Any:
    """Import the application of a name. Raises `click.UsageError` where there is none."""
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise click.UsageError(f"{name!r:.80} names no application, expected MODULE:APP such as shop.main:app")
    look_here()
    try:
        found = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise click.UsageError(f"{name}: {error}, expected MODULE:APP such as shop.main:app") from error
    except LimitGateError:
        raise
    except Exception as error:
        failed = f"{type(error).__name__} when it was imported: {error}"
        raise click.UsageError(f"{name}: {failed}; expected a module that python -c 'import {module}' imports") from error
    return found


def look_here() -> None:
    """Have modules of the working folder imported, as servers do it."""
    sys.path.insert(0, str(Path.cwd()))


def routes_of(name: str | None) -> tuple[Routes, bool]:
    """The routes of an application, and true if it is one of WSGI. No name has no routes."""
    if name is None:
        return NoRoutes(), False
    app = application(name)
    if hasattr(app, "wsgi_app"):
        return wsgi_routes(app), True
    return asgi_routes(app), False
