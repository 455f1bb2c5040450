"""Rule sets named on the command line: the path of files, or ``MODULE:NAME`` in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from limitgate.rules.files import load_rules, rules_of
from limitgate.rules.rule import Rule, RuleSet, placed_rules

RULES = "The service's rules: a file, a folder, or MODULE:NAME of an application or a list in Python"


def rules_named(name: str) -> RuleSet:
    """Return the rules at a path, or of ``MODULE:NAME``: a `RuleSet`, a list of `Rule`, or an application with a gate.

    Raises `ConfigError` like `load_rules`, and `click.UsageError` if there are no rules.
    """
    if not is_in_python(name):
        return load_rules(name)
    from limitgate.command.applications import application  # noqa: PLC0415 - imports the frameworks' routing
    from limitgate.command.gates import gates  # noqa: PLC0415 - as above

    found = application(name)
    if is_rules(found):
        return rules_of(found)
    gate = next(gates(found), None)
    if gate is None:
        raise no_gate(name)
    return gate.rules


def is_rules(found: object) -> bool:
    """True for rules in Python, which `rules_of` accepts."""
    return isinstance(found, RuleSet | Rule | list | tuple)


def no_gate(name: str) -> click.UsageError:
    """Return the error for an application without visible rules."""
    return click.UsageError(f"{name}: no LimitGate found around the application, expected one, or --rules")


def is_in_python(name: str) -> bool:
    """True for ``MODULE:NAME``, unless a file has this name."""
    return ":" in name and not Path(name).exists()


def limits_in_code(app: Any) -> list[Rule]:
    """Return the limits of an application's decorators, dependencies and throttles."""
    from limitgate.command.applications import inwards, is_of_django  # noqa: PLC0415 - as above

    if any(map(is_of_django, inwards(app))):
        from limitgate.routes.django import routes_of  # noqa: PLC0415 - needs the settings

        for route in routes_of():  # imports the views
            for method in route.methods:
                route.marks(method)  # makes the limits of throttles by rate
    return placed_rules()
