"""JSON bodies, for keys and callables. Pure.

A body that is too large, deep or slow raises `BodyError`: otherwise padding would evade limits.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from limitgate.errors import BodyError, ConfigError

BODY_LIMIT = 65_536
DEEPEST = 100
"""Nesting; frameworks allow some hundreds."""
LONGEST_READ_S = 10.0
"""Before any charge or permit."""
MOST_PARTS = 4096
"""Each takes memory beside its bytes."""
LONGEST_POINTER = 256
"""Characters."""

FORMS = frozenset({"multipart/form-data", "application/x-www-form-urlencoded"})
UNREAD: Any = object()
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Possessive: a missing end must not take quadratic time."""
_BRACKET = re.compile(r"[\[\]{}]")
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_WRONG_ESCAPE = re.compile(r"~(?![01])")


def too_large(most: int) -> BodyError:
    return BodyError(413, f"The request's body has more than {most:,} bytes, so its limit cannot be determined.")


def too_slow() -> BodyError:
    return BodyError(408, f"The request's body did not arrive within {LONGEST_READ_S:g} s.")


def too_many_parts() -> BodyError:
    return BodyError(413, f"The request's body came in more than {MOST_PARTS:,} parts.")


def incomplete() -> BodyError:
    return BodyError(400, "The request's body is incomplete.")


def without_length() -> BodyError:
    return BodyError(411, "The request's body needs a Content-Length.")


def declared_length(value: str | None) -> int | None:
    value = (value or "").strip()
    return int(value[:20]) if value.isascii() and value.isdigit() else None


def parsed(data: bytes) -> Any:
    """Parse a body as `json.loads` does, like most applications. None if not JSON.

    Raises `BodyError` beyond `DEEPEST`, or for an integer that Python doesn't parse.
    """
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
        if _is_too_deep(text):
            raise BodyError(413, f"The request's body is nested more than {DEEPEST} levels deep.")
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    except RecursionError:
        raise BodyError(413, f"The request's body is nested more than {DEEPEST} levels deep.") from None
    except ValueError:
        raise BodyError(413, "The request's body has an integer of too many digits.") from None


def _is_too_deep(text: str) -> bool:
    if text.count("[") + text.count("{") <= DEEPEST:
        return False
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > DEEPEST:
            return True
    return False


@lru_cache(maxsize=1024)
def pointer(text: str) -> tuple[str, ...]:
    """Tokens of a JSON pointer (RFC 6901). Raises `ConfigError`."""
    if not text.startswith("/") or len(text) > LONGEST_POINTER or _WRONG_ESCAPE.search(text):
        raise ConfigError(
            f"{text!r:.80} is not a JSON pointer of up to {LONGEST_POINTER} characters, expected for example /user/id, "
            "with ~1 for a slash and ~0 for a tilde in a name"
        )
    return tuple([token.replace("~1", "/").replace("~0", "~") for token in text[1:].split("/")])


def text_at(document: Any, tokens: tuple[str, ...]) -> str | None:
    """Return the text of a string, number or boolean; None for others."""
    for token in tokens:
        if isinstance(document, dict):
            document = document.get(token)
        elif isinstance(document, list) and _INDEX.fullmatch(token) and int(token) < len(document):
            document = document[int(token)]
        else:
            return None
    if isinstance(document, str):
        return document
    if isinstance(document, bool | int | float):
        return _spelled(document)
    return None


def _spelled(value: float) -> str:
    """Return one spelling per number, because clients could alternate between 1, 1.0 and 1e0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)
