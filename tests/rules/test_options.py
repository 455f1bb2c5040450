"""Options of rules, wherever some of them are taken: as `help` shows them, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import pytest

from limitgate import Rule, limit
from limitgate.fastapi import RateLimit
from limitgate.rules.options import DependencyOptions, LimitOptions

TAKING: list[tuple[Callable[..., Any], Any, str]] = [
    (limit, LimitOptions, "limit"),
    (RateLimit, DependencyOptions, "RateLimit"),
]


@pytest.mark.parametrize(("function", "options", "name"), TAKING, ids=["limit", "RateLimit"])
def test_help_shows_each_option_with_its_default(function: Callable[..., Any], options: Any, name: str) -> None:
    """A signature says all that may be given, as if each was a parameter, and what holds if it is not."""
    shown = {each.name: each for each in signature(function).parameters.values() if each.kind is Parameter.KEYWORD_ONLY}
    assert shown.keys() == {"name", "key", *options.__annotations__}
    defaults = {each: Rule.model_fields[each].default for each in shown if each != "name"}
    assert {each: parameter.default for each, parameter in shown.items()} == {"name": None, **defaults}
    assert shown["qps"].annotation == "int | None"


@pytest.mark.parametrize(("function", "options", "name"), TAKING, ids=["limit", "RateLimit"])
@pytest.mark.parametrize("wrong", ["qpx", "path", "limits"])
def test_what_is_no_option_is_told_as_python_does(function: Callable[..., Any], options: Any, name: str, wrong: str) -> None:
    """A misspelt option, or one of rules only, is a `TypeError` that names it."""
    with pytest.raises(TypeError, match=rf"{name}.*\(\) got an unexpected keyword argument '{wrong}'"):
        function("5/minute", **{wrong: 5})
