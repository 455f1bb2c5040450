"""Users of every kind: each has one id, in every place that counts by users."""

from __future__ import annotations

import asyncio
import uuid
from collections import UserDict
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
from starlette.authentication import BaseUser, SimpleUser, UnauthenticatedUser
from werkzeug.local import LocalProxy

from limitgate import Limiter, LimitGate, LimitGateWSGI, MemoryStore, Rule
from limitgate.gate.planning.identity import ID_FIELDS, NoIdError, user_id
from limitgate.keys import text_of
from tests.support.doors import asgi_reply, wsgi_reply

KEY = uuid.UUID(int=7)
BY_USER = Rule("mine", "1/day", key=["user"])


class LoginUser:
    """A user of Flask-Login, whose base class says that it has no id unless it is overridden."""

    is_authenticated = True

    def __init__(self, token: Any = None) -> None:
        self._token = token

    def get_id(self) -> str:
        if self._token is None:
            raise NotImplementedError("No `id` attribute - override `get_id`")
        return self._token


class Nameless(BaseUser):
    """A user that overrides nothing of Starlette's base class but that it is there."""

    is_authenticated = True


class Key:
    """An id of a database driver's own type."""

    def __str__(self) -> str:
        return "65f0"


class Person(NamedTuple):
    """A user that is a tuple, too."""

    id: int
    seen: str


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("ada", "ada"),
        (5, "5"),
        (0, "0"),
        (KEY, str(KEY)),
        (SimpleUser("ada"), "ada"),
        (LoginUser("token"), "token"),
        (LocalProxy(lambda: LoginUser("token")), "token"),
        (LocalProxy(lambda: {"sub": "ada"}), "ada"),
        (LocalProxy(lambda: "ada"), "ada"),
        (SimpleNamespace(id=Key()), "65f0"),
        (SimpleNamespace(id=b"\x01"), r"b'\x01'"),
        ({"sub": "ada", "name": "same"}, "ada"),
        ({"user_id": 5}, "5"),
        ({"email": "ada@shop.example"}, "ada@shop.example"),
        ({"id": None, "sub": "", "email": "a"}, "a"),
        (UserDict(sub="ada"), "ada"),
        (MappingProxyType({"id": KEY}), str(KEY)),
        (Person(5, "noon"), "5"),
        *[(SimpleNamespace(**{name: 5}), "5") for name in ID_FIELDS],
        *[({name: "x"}, "x") for name in ID_FIELDS],
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_a_user_has_an_id(user: Any, expected: str) -> None:
    assert user_id(user) == text_of(user, "user") == expected


@pytest.mark.parametrize(
    "user",
    [
        None,
        "",
        True,
        False,
        {},
        (),
        UnauthenticatedUser(),
        LocalProxy(lambda: None),
        SimpleNamespace(is_authenticated=False, id=7),
        {"is_authenticated": False, "sub": "ada"},
    ],
    ids=lambda value: ascii(type(value).__name__),
)
def test_nobody_has_none(user: Any) -> None:
    assert user_id(user) is text_of(user, "user") is None


def test_the_first_name_counts() -> None:
    """The order of names is fixed, for objects and mappings alike."""
    names = {name: name for name in ID_FIELDS}
    while names:
        assert user_id(names) == user_id(SimpleNamespace(**names)) == next(iter(names))
        del names[next(iter(names))]


@pytest.mark.parametrize(
    "user",
    [
        object(),
        SimpleNamespace(),
        Nameless(),
        LoginUser(),
        MagicMock(),
        1.5,
        b"ada",
        ["ada"],
        {"name": "same"},
        {"sub": None},
        ("acme", None),
        ("acme", object()),
        SimpleNamespace(id=object()),
        SimpleNamespace(id=True),
        SimpleNamespace(id=lambda: "ada"),
        SimpleNamespace(id=("acme", "")),
    ],
    ids=lambda value: ascii(type(value).__name__),
)
def test_a_user_without_an_id(user: Any) -> None:
    """What names a place in memory, or what users share, is no id."""
    with pytest.raises(NoIdError):
        user_id(user)
    with pytest.raises(TypeError, match=r"key part who returned a .*, expected text, a number, a UUID"):
        text_of(user, "who")


def test_a_tuple_is_told_from_others_and_from_text() -> None:
    """The parts of a composite id do not run into each other, and no text spells a tuple."""
    different = [("a", "b"), ("a,b",), ("a", "b,"), ("a', 'b",), (("a", "b"),), ("a", ("b",)), ("a", KEY), "('a', 'b')"]
    texts = [user_id(each) for each in different]
    texts += [user_id(text) for text in texts[:-1]]
    assert len(set(texts)) == len(texts)
    assert user_id(("acme", 5)) == user_id(("acme", "5")) == user_id(SimpleNamespace(pk=("acme", 5)))


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body"})


def _wsgi_hello(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return []


USERS = [5, KEY, {"sub": "ada"}, ("acme", 5), SimpleNamespace(email="ada@shop.example"), LoginUser("token"), "ada"]


@pytest.mark.parametrize("user", USERS, ids=lambda value: ascii(value)[:40])
@pytest.mark.parametrize("door", ["asgi", "wsgi"])
def test_a_user_has_one_bucket_wherever_it_calls_from(door: str, user: Any) -> None:
    """``key: [user]`` counts by the user, and its bucket is found by the same user, or by an id of the other type."""
    store = MemoryStore()

    def status(peer: str, user: Any) -> int:
        if door == "asgi":
            return asyncio.run(asgi_reply(LimitGate(_hello, rules=[BY_USER], store=store), peer=peer, user=user)).status
        gate = LimitGateWSGI(_wsgi_hello, rules=[BY_USER], store=store)
        return wsgi_reply(lambda environ, start: gate({**environ, "REMOTE_USER": user}, start), peer=peer).status

    assert [status(peer, user) for peer in ("192.0.2.1", "192.0.2.2")] == [200, 429]
    assert status("192.0.2.1", "bob") == 200
    with Limiter(store) as limiter:
        assert limiter.bucket(BY_USER, user=user).peek().remaining == 0
        if isinstance(user, int | uuid.UUID):
            assert limiter.bucket(BY_USER, user=str(user)).peek().remaining == 0
        with pytest.raises(TypeError, match="key part user returned a object, expected text"):
            limiter.bucket(BY_USER, user=object(), ip="192.0.2.1")
