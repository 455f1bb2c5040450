"""The gates around an application that is imported, but not served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from limitgate.command.applications import inwards, is_of_django
from limitgate.middleware import LimitGate, LimitGateWSGI
from limitgate.rules.files import rules_of
from limitgate.rules.rule import RuleSet
from limitgate.rules.settings import GateSettings

Door = Literal["asgi", "wsgi", "django"]


class GateAround(NamedTuple):
    """A gate around an application."""

    door: Door
    rules: RuleSet
    options: Mapping[str, Any]


def gates(app: Any) -> Iterator[GateAround]:
    """Yield the gates around an application, outermost first: its wrappers and its middleware."""
    for each in inwards(app):
        if isinstance(each, LimitGate | LimitGateWSGI):
            door: Door = "asgi" if isinstance(each, LimitGate) else "wsgi"
            yield GateAround(door, _rules(each.options) if each.gate is None else each.gate.rules.rule_set, each.options)
        if is_of_django(each):
            from limitgate.django.options import options  # noqa: PLC0415 - needs Django's settings

            if GateSettings(**options()).rules is not None:
                yield GateAround("django", _rules(options()), options())
        for entry in getattr(each, "user_middleware", ()):
            if isinstance(entry.cls, type) and issubclass(entry.cls, LimitGate):
                yield GateAround("asgi", _rules(entry.kwargs), entry.kwargs)


def _rules(options: Mapping[str, Any]) -> RuleSet:
    return rules_of(GateSettings(**options).rules)
