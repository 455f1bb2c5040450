"""Extracts the id of a user, for all frameworks."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any
from uuid import UUID

NAMES = ("identity", "id", "pk", "get_id", "user_id", "sub", "username", "display_name", "email")
"""Attributes or mapping keys that may hold the id, in order of preference.

``identity`` is Starlette's, ``pk`` Django's, ``get_id`` Flask-Login's, ``sub`` OpenID Connect's.
"""
EXPECTED = "text, a number, a UUID, or an object with identity, id, pk or username, or a tuple or mapping of these"


class NoIdError(TypeError):
    """A user has no id."""


def user_id(user: Any) -> str | None:
    """Return the text for a user; None for an anonymous one.

    Integers and UUIDs count as their text, so ``1`` and ``"1"`` are the same user. Tuples never equal text. Raises `NoIdError`
    for a user without an id.
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
    # Raised by base classes of Starlette and Flask-Login.
    except NotImplementedError:
        return default


def _text(value: Any) -> str | None:
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
"""Prefix of a tuple's text. Other text with this prefix gets it twice."""


def _plain(text: str) -> str | None:
    return (_TUPLE + text if text.startswith(_TUPLE) else text) or None


def _joined(users: tuple[Any, ...]) -> str | None:
    """Raise `NoIdError` for a missing element, because strangers may share the others."""
    texts = [user_id(each) for each in users]
    if None in texts:
        raise NoIdError(f"a tuple with an empty element, expected {EXPECTED}")
    return f"{_TUPLE}{texts}" if texts else None
