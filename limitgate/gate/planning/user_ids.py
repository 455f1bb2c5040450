"""The one rule for the id of a user, whichever framework or application has made it."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any
from uuid import UUID

NAMES = ("identity", "id", "pk", "get_id", "user_id", "sub", "username", "display_name", "email")
"""Attributes, or keys of a mapping, that may hold the id, in this order: the first that is present counts.

``identity`` is Starlette's, ``pk`` Django's, the method ``get_id`` Flask-Login's, ``sub`` that of OpenID Connect.
"""
EXPECTED = "text, a number, a UUID, or an object with identity, id, pk or username, or a tuple or mapping of these"


class NoIdError(TypeError):
    """A user has nothing that tells it from others."""


def user_id(user: Any) -> str | None:
    """The text that stands for a user; None if there is none, or an anonymous one.

    Integers and UUIDs count as their text, so ``1`` is the user ``"1"``. No text equals a tuple. Raises `NoIdError` for a
    user without an id.
    """
    if isinstance(user, _PLAIN):
        return _text(user)
    fields = user if isinstance(user, Mapping) else None
    if not _field(user, fields, "is_authenticated", default=True):
        return None
    for name in NAMES:
        text = _text(_field(user, fields, name))
        if text:
            return text
    if isinstance(user, tuple) or fields == {}:
        return _joined(tuple(user))
    raise NoIdError(f"a {type(user).__name__}, expected {EXPECTED}")


def _field(user: Any, fields: Mapping[Any, Any] | None, name: str, *, default: Any = None) -> Any:
    try:
        value = getattr(user, name, default) if fields is None else fields.get(name, default)
        return value() if name == "get_id" and callable(value) else value
    except NotImplementedError:  # the base classes of Starlette and Flask-Login, where an application does not override them
        return default


def _text(value: Any) -> str | None:
    """Text of an attribute; None if it is empty, or would tell one object in memory from another instead of users."""
    if isinstance(value, _PLAIN):
        return None if isinstance(value, NoneType | bool) else _plain(str(value))
    if isinstance(value, tuple):
        return _joined(value)
    kind: Any = type(value)
    if callable(value) or (kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__):
        return None
    return _plain(str(value))


_PLAIN = (str, int, UUID, NoneType)
_TUPLE = "\0"
"""Marks a tuple's text. Other text that begins with it gets one more."""


def _plain(text: str) -> str | None:
    return (_TUPLE + text if text.startswith(_TUPLE) else text) or None


def _joined(users: tuple[Any, ...]) -> str | None:
    """Text of a composite id; None if it is empty. Raises `NoIdError` if an element is absent: strangers may share the rest."""
    texts = [user_id(each) for each in users]
    if None in texts:
        raise NoIdError(f"a tuple with an empty element, expected {EXPECTED}")
    return f"{_TUPLE}{texts}" if texts else None
