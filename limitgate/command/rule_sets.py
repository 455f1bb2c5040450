"""Rule sets that are named on the command line: by the path of files, or by ``MODULE:NAME`` where rules stand in Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from limitgate.rules.files import load_rules, rules_of
from limitgate.rules.rule import Rule, RuleSet, placed_rules

RULES = "The service's rules: a file, a folder, or MODULE:NAME of an application or a list in Python"
"""Help of options that name a rule set."""


def rules_named(name: str) -> RuleSet:
    """The rules in the files at a path, or of ``MODULE:NAME``: a `RuleSet`, a list of `Rule`, or an application with its gate.

    Raises `ConfigError` as `load_rules` does, `click.UsageError` for a name that leads to no rules.
    """
    if not is_in_python(name):
        return load_rules(name)
    from limitgate.command.applications import application  # noqa: PLC0415 - imports what knows routes

    found = application(name)
    if isinstance(found, RuleSet | Rule | list | tuple):
        return rules_of(found)
    rules = rules_around(found)
    if rules is None:
        raise click.UsageError(f"{name}: no LimitGate around it is seen, expected an application with one, or a list of Rule")
    return rules


def is_in_python(name: str) -> bool:
    """True for a name like ``MODULE:NAME``, and not for the path of a file that happens to look like one."""
    return ":" in name and not Path(name).exists()


def rules_around(app: Any) -> RuleSet | None:
    """The rules of the first gate around an application: in front of it, or among its middleware."""
    return next(gates_around(app), None)


def gates_around(app: Any) -> Iterator[RuleSet]:
    """The rules of all gates around an application, from the outside: in front of it, and among its middleware."""
    return (rules for rules, _ in _gates(app))


def is_identifying(app: Any) -> bool:
    """True if the first gate around an application has an ``identify``."""
    return next((identifies for _, identifies in _gates(app)), False)


def _gates(app: Any) -> Iterator[tuple[RuleSet, bool]]:
    """The rules of each gate around an application, and true if it has an ``identify``."""
    from limitgate.rules.settings import GateSettings  # noqa: PLC0415 - takes long to import, and files need none

    for each in inwards(app):
        gate = getattr(each, "gate", None)
        if gate is not None:
            yield gate.rules.rule_set, gate.identify is not None
        if is_of_django(each):
            from limitgate.django.options import options  # noqa: PLC0415 - needs the settings

            settings = GateSettings(**options())
            yield rules_of(settings.rules), settings.identify is not None
        for entry in getattr(each, "user_middleware", ()):
            if getattr(entry.cls, "__module__", None) == "limitgate.middleware":
                settings = GateSettings(**entry.kwargs)
                yield rules_of(settings.rules), settings.identify is not None


def limits_in_code(name: str) -> list[Rule]:
    """The limits of decorators, dependencies and throttles of an application, ``MODULE:APP``, which is imported for it."""
    from limitgate.command.applications import application  # noqa: PLC0415 - as above

    if any(map(is_of_django, inwards(application(name)))):
        from limitgate.routes.django import routes_of  # noqa: PLC0415 - needs the settings

        for route in routes_of():  # imports the views
            for method in route.methods:
                route.marks(method)  # makes the limits of throttles by rates
    return placed_rules()


def is_of_django(app: object) -> bool:
    """True for what ``get_wsgi_application`` and ``get_asgi_application`` give."""
    return type(app).__module__.startswith("django.core.handlers.")


def inwards(app: Any) -> Iterator[Any]:
    """An application and those within it, from the outside, each once: a wrapper may name itself."""
    known = set()
    while app is not None and id(app) not in known:
        known.add(id(app))
        yield app
        app = vars(app).get("wsgi_app") or getattr(app, "app", None) if hasattr(app, "__dict__") else None
