"""Applications named ``MODULE:APP`` or ``MODULE:FACTORY``: their routes, gates and rules."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import click

from limitgate.errors import LimitGateError
from limitgate.process.callables import accepts
from limitgate.routes import starlette
from limitgate.routes.overview import Listed
from limitgate.rules.files import load_rules, rules_of
from limitgate.rules.rule import Rule, RuleSet

EXPECTED = "expected MODULE:APP such as shop.main:app, or a factory such as shop.main:create_app"
READABLE = "an application of Starlette, FastAPI, Flask or Django that can be imported outside the service"
_made: dict[str, tuple[Any, Any]] = {}


def application(name: str) -> Any:
    """Import an application or call its factory. Raises `click.UsageError`."""
    module, colon, expression = name.partition(":")
    if not (colon and module and expression):
        raise click.UsageError(f"{name!r:.80} is not the name of an application, {EXPECTED}")
    attribute, arguments = _called(name, expression)
    found: Any = _imported(name, module)
    with failing(name, "", EXPECTED.removeprefix("expected ")):
        for part in attribute.split("."):
            found = getattr(found, part)
    if arguments is None and not _is_factory(found):
        return _checked(name, found)
    factory, app = _made.get(name, (None, None))
    if factory is not found:
        args, options = arguments or ([], {})
        _check_arguments(name, found, args, options)
        with failing(name, f" in {attribute}()", "a factory that returns an application"):
            app = found(*args, **options)
        _made[name] = found, app
    return _checked(name, app)


def _imported(name: str, module: str) -> ModuleType:
    if "/" in module or "" in module.split("."):
        near = module.removeprefix("./").removesuffix(".py").replace("/", ".")
        guess = f"did you mean {near}? " if "" not in near.split(".") else ""
        raise click.UsageError(f"{name!r:.80}: {module!r:.80} is not the name of a module; {guess}{EXPECTED}")
    look_here()
    with failing(name, " during the import", f"a module that python -c 'import {module}' imports"):
        try:
            return import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            if module.endswith(".py"):
                raise click.UsageError(f"{name}: expected the module without .py: {module.removesuffix('.py')}") from error
            raise click.UsageError(f"{name}: {error} in {Path.cwd()} or on the import path, {EXPECTED}") from error


@contextmanager
def failing(name: str, what: str, expected: str) -> Iterator[None]:
    """Convert an application's errors to `click.UsageError`, except `ConfigError`."""
    try:
        yield
    except (click.ClickException, LimitGateError):
        raise
    except (Exception, SystemExit) as error:
        is_plain = not what and isinstance(error, AttributeError | ImportError) and str(error)
        told = str(error) if is_plain else f"{type(error).__name__}{what}: {error}"
        raise click.UsageError(f"{name}: {told}, expected {expected}") from error


def _checked(name: str, found: Any) -> Any:
    if isinstance(found, type):
        raise click.UsageError(f"{name} is a class, expected an application, or {name}() to make one")
    if inspect.isroutine(found) and not (accepts(found, 2) or accepts(found, 3)):
        needed = ", ".join(inspect.signature(found).parameters)
        raise click.UsageError(f"{name} is a function of ({needed}), expected an application, or a call: {name}(...)")
    if not (callable(found) or is_rules(found)):
        raise click.UsageError(f"{name} is an object of {type(found).__name__}, {EXPECTED}")
    return found


def _called(name: str, expression: str) -> tuple[str, tuple[list[Any], dict[str, Any]] | None]:
    attribute, bracket, _ = expression.partition("(")
    if not bracket:
        return attribute, None
    try:
        call: Any = ast.parse(expression, mode="eval").body
        args = [ast.literal_eval(each) for each in call.args]
        options = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AttributeError) as error:
        raise click.UsageError(f"{name!r:.80}: expected a call with literal arguments, such as create_app('test')") from error
    return attribute.strip(), (args, options)


def _check_arguments(name: str, factory: Any, args: list[Any], options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # not a function, or one in C
        return
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        expected = ", ".join(signature.parameters) or "none"  # without defaults, which may be secret
        message = f"{name}: the factory does not take these arguments: {error}, expected some of: {expected}"
        raise click.UsageError(message) from error


def _is_factory(found: Any) -> bool:
    if not inspect.isroutine(found):
        return False
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # some functions in C
        return False
    return all(each.default is not each.empty or each.kind is each.VAR_KEYWORD for each in parameters)


def look_here() -> None:
    """Import from the working folder, as servers do."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def inwards(app: Any) -> Iterator[Any]:
    known = set()
    while app is not None and id(app) not in known:
        known.add(id(app))
        yield app
        own = getattr(app, "__dict__", {})
        wrapped = next(filter(None, map(own.get, ("wsgi_app", "asgi_app", "asgi_handler"))), None)
        app = wrapped or (getattr(app, "app", None) if own else None)


def is_of_django(app: object) -> bool:
    return type(app).__module__.startswith("django.core.handlers.")


def routes_of(app: Any) -> list[Listed]:
    """Empty if the application doesn't list its routes. Raises `click.UsageError`."""
    with failing("the routes of the application", "", READABLE):
        if any(map(is_of_django, inwards(app))):
            from limitgate.routes.django import routes_of as routes_of_django

            return routes_of_django()
        flask = next((each for each in inwards(app) if hasattr(each, "url_map") and hasattr(each, "view_functions")), None)
        if flask is not None:
            from limitgate.flask import routes_of as routes_of_flask

            return list(routes_of_flask(flask))
        return starlette.routes_of(app)


Door = Literal["asgi", "wsgi", "django"]


class GateAround(NamedTuple):
    door: Door
    rules: RuleSet
    options: Mapping[str, Any]


def gates(app: Any) -> Iterator[GateAround]:
    """Outermost first. Raises `click.UsageError`."""
    with failing("the application", "", READABLE):
        yield from _gates(app)


def _gates(app: Any) -> Iterator[GateAround]:
    from limitgate.middleware import LimitGate, LimitGateWSGI
    from limitgate.rules.settings import GateSettings

    for each in inwards(app):
        if isinstance(each, LimitGate | LimitGateWSGI):
            door: Door = "asgi" if isinstance(each, LimitGate) else "wsgi"
            rules = rules_of(GateSettings(**each.options).rules) if each.gate is None else each.gate.rules.rule_set
            yield GateAround(door, rules, each.options)
        if is_of_django(each):
            from limitgate.django.middleware import options

            if (given := GateSettings(**options()).rules) is not None:
                yield GateAround("django", rules_of(given), options())
        for entry in getattr(each, "user_middleware", ()):
            if isinstance(entry.cls, type) and issubclass(entry.cls, LimitGate):
                yield GateAround("asgi", rules_of(GateSettings(**entry.kwargs).rules), entry.kwargs)


RULES = "The service's rules: a file, a folder, or MODULE:NAME of an application or a list in Python"


def rules_named(name: str) -> RuleSet:
    """Raises `ConfigError` and `click.UsageError`."""
    if not is_in_python(name):
        return load_rules(name)
    found = application(name)
    if is_rules(found):
        return rules_of(found)
    gate = next(gates(found), None)
    if gate is None:
        raise no_gate(name)
    return gate.rules


def is_rules(found: object) -> bool:
    # isinstance() of pydantic before 2.12 reads attributes, which may raise.
    return isinstance(found, RuleSet | list | tuple) or issubclass(type(found), Rule)


def no_gate(name: str) -> click.UsageError:
    return click.UsageError(f"{name}: no LimitGate found around the application, expected one, or --rules")


def is_in_python(name: str) -> bool:
    """True for ``MODULE:NAME``, unless a file has this name."""
    return ":" in name and not Path(name).exists()
