"""What editors and ``help()`` show: every field, option and parameter that a user meets says what it is."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

import limitgate.httpx2
from limitgate import (
    Adaptive,
    AsyncLimiter,
    Caller,
    Configured,
    Decision,
    Limit,
    Limiter,
    MemoryStore,
    Request,
    Rule,
    Settings,
    Window,
    exempt,
    limit,
    load_rules,
    open_store,
    open_sync_store,
    usage,
)
from limitgate.aiohttp import RateLimitMiddleware
from limitgate.fastapi import RateLimit
from limitgate.gate.lifecycle.build import GateOptions
from limitgate.httpx import AsyncRateLimitTransport, RateLimitTransport
from limitgate.limiter.adaptive import AdaptiveOptions
from limitgate.limiter.rule_bucket import BucketParts
from limitgate.outbound.options import ClientOptions
from limitgate.requests import RateLimitAdapter
from limitgate.rules.callers import KnownCaller
from limitgate.rules.options import ChargeIf, DependencyOptions, LimitOptions, RuleOptions, ThrottleOptions
from limitgate.urllib3 import RateLimitPoolManager

SAID_ONCE = {"algorithm", "align", "borrow", "burst", "lease", "warm_up"}
"""Options of a `Limit`, whose fields say what they are."""


def words(owner: type) -> dict[str, str]:
    """What stands below each field of a class, as editors show it, in one line."""
    module = ast.parse(inspect.getsource(sys.modules[owner.__module__]))
    body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == owner.__name__)
    below = {}
    for field, following in zip(body, [*body[1:], None]):
        if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.unparse(field.annotation):
            continue
        if isinstance(field.target, ast.Name) and not field.target.id.startswith("_"):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            below[field.target.id] = " ".join(str(following.value.value).split()) if is_text else ""
    return below


OWNERS = [
    Adaptive,
    *(AdaptiveOptions, BucketParts, Caller, ChargeIf, ClientOptions, Decision),
    *(KnownCaller, Limit, Request, Rule, Settings, Window),
]


@pytest.mark.parametrize("owner", OWNERS, ids=lambda one: one.__name__)
def test_every_field_says_what_it_is(owner: type) -> None:
    said = words(owner)
    assert said
    assert {field for field, text in said.items() if not text} == set()


@pytest.mark.parametrize(
    ("options", "owner"),
    [
        (ThrottleOptions, Rule),
        (DependencyOptions, Rule),
        (LimitOptions, Rule),
        (RuleOptions, Rule),
        (GateOptions, Settings),
    ],
    ids=lambda one: one.__name__,
)
def test_options_have_types_and_their_owner_the_words(options: type, owner: type) -> None:
    """No description stands twice: the docstring of the options names the class whose fields have it."""
    said = words(options)
    assert said
    assert set(said.values()) == {""}
    assert said.keys() <= words(owner).keys()
    assert f"`{owner.__name__}`" in (inspect.getdoc(options) or "")


METHODS = (
    "hit",
    "peek",
    "refund",
    "hit_up_to",
    "wait",
    "reserve",
    "slot",
    "ban",
    "penalize",
    "pace",
    "limited",
    "bucket",
    "adaptive",
    "configure",
)
CALLABLES = [
    *(getattr(kind, name) for kind in (Limiter, AsyncLimiter) for name in METHODS),
    *(
        Limiter,
        AsyncLimiter,
        MemoryStore,
        Configured,
        Limit,
        RateLimit,
        limit,
        exempt,
        load_rules,
        open_store,
        open_sync_store,
        usage,
    ),
    *(AsyncRateLimitTransport, RateLimitTransport),
    *(limitgate.httpx2.AsyncRateLimitTransport, limitgate.httpx2.RateLimitTransport),
    *(RateLimitMiddleware, RateLimitAdapter, RateLimitPoolManager),
]


@pytest.mark.parametrize("function", CALLABLES, ids=lambda one: one.__qualname__)
def test_every_parameter_is_in_the_docstring(function: Callable[..., Any]) -> None:
    """Of those of a `Rule` and of a `Limit` the fields say what they are."""
    text = inspect.getdoc(function) or ""
    if "." in function.__qualname__:
        text += inspect.getdoc(getattr(sys.modules[function.__module__], function.__qualname__.partition(".")[0])) or ""
    elsewhere = {"self", *Rule.model_fields, *SAID_ONCE} if function in (limit, RateLimit, Limit) else {"self"}
    named = set(inspect.signature(function).parameters) - elsewhere
    assert {name for name in named if not re.search(rf"\b{name.removesuffix('s')}s?\b", text, re.IGNORECASE)} == set()


def test_limit_shows_what_it_takes() -> None:
    """Each option with its default, and no ``**options`` that says nothing."""
    parameters = inspect.signature(limit).parameters
    assert not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    assert {"qps", "key", "cost", "replaces"} <= parameters.keys()
