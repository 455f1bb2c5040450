"""``python manage.py check``: what LimitGate says about a project's settings, by id."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.conf.urls.i18n import i18n_patterns
from django.core.checks import CheckMessage, Error, Warning as Caution, run_checks
from django.urls import path

from limitgate import AsyncRedisStore, MemoryStore, RedisStore, Rule, exempt, limit
from limitgate.django import LimitGateMiddleware
from limitgate.django.apps import check
from tests.support.django_app import AUTHENTICATION, GATE, LOCALE, SESSIONS, WAYS, AsyncOnly, hello

RULES = {"RULES": [Rule("api", "9/minute")], "STORE": "redis://localhost:6379/0"}
HELLO = (path("hello", hello),)


class Stricter(LimitGateMiddleware):
    """A project's own version of the middleware."""


OWN = f"{__name__}.Stricter"


def checked(**settings: Any) -> list[CheckMessage]:
    """What the checks say about LimitGate, under these settings; each with a hint."""
    settings = {"LIMITGATE": RULES, "MIDDLEWARE": [GATE], "ROOT_URLCONF": HELLO, **settings}
    with WAYS["wsgi"].project(**settings):
        found = [message for message in run_checks() if message.id.startswith("limitgate.")]
    assert all(message.hint for message in found)
    return found


def ids(**settings: Any) -> list[str]:
    return [message.id for message in checked(**settings)]


def decorated(decorate: Callable[[Any], Any]) -> tuple[Any, ...]:
    return (path("hello", decorate(partial(hello))),)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"LIMITGATE": {"rules": [], "store": "rediss+cluster://h1:1,h2:2"}},
        {"LIMITGATE": RULES | {"STORE": RedisStore("redis://localhost:1/0")}},
        {"LIMITGATE": RULES | {"STORE": AsyncRedisStore("redis://localhost:1/0")}},
        {"LIMITGATE": {"ENABLED": False}},
        {"LIMITGATE": None, "MIDDLEWARE": []},
        {"MIDDLEWARE": [SESSIONS, AUTHENTICATION, OWN]},
        {"MIDDLEWARE": [LOCALE, GATE], "ROOT_URLCONF": tuple(i18n_patterns(*decorated(limit("1/day"))))},
        {"MIDDLEWARE": [GATE, LOCALE], "ROOT_URLCONF": decorated(limit("1/day"))},
        {"MIDDLEWARE": [GATE, SESSIONS, AUTHENTICATION]},
        {"ROOT_URLCONF": decorated(limit("1/day"))},
    ],
)
def test_what_is_right_is_not_told(settings: dict[str, Any]) -> None:
    """A project without mistakes gets neither an error nor a warning."""
    assert checked(**settings) == []


@pytest.mark.parametrize(
    ("given", "id", "told"),
    [
        ([], "E001", "LIMITGATE is a list, expected a dict"),
        ({"RULE": "config/"}, "E001", "unknown option 'RULE', did you mean 'rules'? expected one of"),
        (RULES | {"rules": []}, "E001", "'rules' is set twice"),
        (RULES | {"TIMEOUT": 0}, "E002", "timeout: expected"),
        (RULES | {"TRUSTED_PROXIES": ["10.0.0.0/99"]}, "E002", "10.0.0.0/99"),
        (RULES | {"TRUSTED_PROXIES": ["private", "cloudflair"]}, "E002", "did you mean 'cloudflare'?"),
        (RULES | {"HEADERS": ["draft-99"]}, "E002", "draft-99"),
        (RULES | {"STORE": "postgres://"}, "E002", "store: scheme 'postgres' is unknown, expected"),
        (RULES | {"STORE": 5}, "E002", "is not a store, expected a URL or a store"),
        (RULES | {"ON_DENIED": "no.such.view"}, "E002", "on_denied"),
        (RULES | {"ON_DENIED": "json.dump"}, "E002", "on_denied: dump cannot be called with (request)"),
        (RULES | {"RULES": None}, "E003", "rules are missing"),
        (RULES | {"RULES": "/nowhere/at/all"}, "E003", "/nowhere/at/all"),
        (RULES | {"RULES": [7]}, "E003", "7 is not a Rule"),
    ],
    ids=str,
)
def test_mistakes_in_the_options(given: Any, id: str, told: str) -> None:  # noqa: A002 - what Django calls it
    """Each mistake in ``LIMITGATE`` is told once, as an error that says what was expected."""
    (message,) = checked(LIMITGATE=given)
    assert isinstance(message, Error)
    assert message.id == f"limitgate.{id}"
    assert told in message.msg


def test_mistakes_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from ``LIMITGATE_*`` is checked as well."""
    monkeypatch.setenv("LIMITGATE_TIMEOUT", "soon")
    (message,) = checked(LIMITGATE=None)
    assert message.id == "limitgate.E002"
    assert "timeout" in message.msg
    assert "LIMITGATE_*" in message.hint


def test_mistakes_in_a_rule_file(tmp_path: Path) -> None:
    """A mistake in a file is told with the file, the line and the field."""
    (tmp_path / "default.yaml").write_text("rules:\n  - name: api\n    qpm: never\n")
    (message,) = checked(LIMITGATE=RULES | {"RULES": tmp_path})
    assert message.id == "limitgate.E003"
    assert all(part in message.msg for part in ("default.yaml", "3", "qpm"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "LIMITGATE is set"),
        ({"LIMITGATE": None, "ROOT_URLCONF": decorated(limit("1/day"))}, "Views are decorated"),
        ({"LIMITGATE": None, "ROOT_URLCONF": decorated(exempt)}, "Views are decorated"),
    ],
)
def test_the_middleware_is_missing(settings: dict[str, Any], told: str) -> None:
    """Options, or decorated views, without the middleware are an error."""
    (message,) = checked(**{"MIDDLEWARE": [SESSIONS], **settings})
    assert (message.id, isinstance(message, Error)) == ("limitgate.E004", True)
    assert told in message.msg
    assert GATE in message.hint


def test_the_middleware_is_there_twice() -> None:
    """Twice the middleware would charge each rule twice."""
    assert ids(MIDDLEWARE=[GATE, SESSIONS, OWN]) == ["limitgate.E005"]


@pytest.mark.parametrize(
    "settings",
    [
        {"LIMITGATE": RULES | {"RULES": [Rule("mine", "9/day", key=["api_key|user"])]}},
        {"LIMITGATE": RULES | {"RULES": [Rule("mine", "9/day", key=["user"], tier="paid")], "IDENTIFY": bool}},
        {"ROOT_URLCONF": decorated(limit("9/day", name="mine", key=["user"]))},
    ],
)
@pytest.mark.parametrize("gate", [GATE, OWN])
def test_before_authentication(settings: dict[str, Any], gate: str) -> None:
    """Where a rule or a decorator goes by the user, the middleware has to stand below Django's own."""
    (message,) = checked(MIDDLEWARE=[SESSIONS, gate, AUTHENTICATION], **settings)
    assert (message.id, isinstance(message, Error)) == ("limitgate.E006", True)
    assert "mine counts by user" in message.msg
    assert ids(MIDDLEWARE=[SESSIONS, AUTHENTICATION, gate], **settings) == []


def test_before_the_language_is_known() -> None:
    """Where URLs go by language and views are decorated, the middleware has to stand below the one that chooses it."""
    settings = {"ROOT_URLCONF": tuple(i18n_patterns(*decorated(limit("1/day"))))}
    assert ids(MIDDLEWARE=[GATE, LOCALE], **settings) == ["limitgate.E007"]


@pytest.mark.parametrize("store", ["memory://", MemoryStore()])
def test_memory_in_production(store: Any) -> None:
    """A store in memory is a warning, unless under ``DEBUG``."""
    options = RULES | {"STORE": store}
    (message,) = checked(LIMITGATE=options)
    assert (message.id, isinstance(message, Caution)) == ("limitgate.W001", True)
    assert "redis://" in message.hint
    assert ids(LIMITGATE=options, DEBUG=True) == []


def test_several_mistakes_at_once() -> None:
    """Every mistake is told, not just the first."""
    found = ids(LIMITGATE={"RULES": "/nowhere"}, MIDDLEWARE=[GATE, GATE, LOCALE], ROOT_URLCONF=decorated(limit("1/day")))
    assert found == ["limitgate.W001", "limitgate.E003", "limitgate.E005"]


def test_what_is_for_django_to_tell() -> None:
    """Middleware that cannot be imported, and URLs that cannot, are no reason to fail here."""
    with WAYS["wsgi"].project(LIMITGATE=RULES, ROOT_URLCONF="tests.no_such_module", MIDDLEWARE=["no.such.Middleware", GATE]):
        assert check() == []


def test_other_kinds_of_middleware() -> None:
    """Middleware may be a function, too."""
    assert ids(MIDDLEWARE=[f"{__name__}.factory", GATE]) == []


def factory(get_response: Any) -> Any:
    return AsyncOnly(get_response)
