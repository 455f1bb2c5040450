"""JSON bodies, for keys and callables. Reads the body of a WSGI request (PEP 3333) so that the application can read it again.

A body that is too large, deep or slow raises `BodyError`, because padding could otherwise evade limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, MutableMapping
from functools import lru_cache
from io import BytesIO
from time import monotonic
from typing import Any

from limitgate.errors import BodyError, ConfigError

BODY_LIMIT = 65_536
DEEPEST = 100
"""Levels of nesting; frameworks allow some hundreds."""
LONGEST_READ_S = 10.0
"""Longest read in seconds, before any charge or permit."""
MOST_PARTS = 4096
"""Maximum of parts, each of which takes memory besides its bytes."""
LONGEST_POINTER = 256
"""Characters."""

FORMS = frozenset({"multipart/form-data", "application/x-www-form-urlencoded"})
UNREAD: Any = object()
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Possessive quantifiers, because a missing quote must not take quadratic time."""
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
    """Parse a body like `json.loads`, as most applications do. None if it isn't JSON.

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
    """Return the tokens of a JSON pointer (RFC 6901). Raises `ConfigError`."""
    if not text.startswith("/") or len(text) > LONGEST_POINTER or _WRONG_ESCAPE.search(text):
        raise ConfigError(
            f"{text!r:.80} is not a JSON pointer of up to {LONGEST_POINTER} characters, expected for example /user/id, "
            "with ~1 for a slash and ~0 for a tilde in a name"
        )
    return tuple([token.replace("~1", "/").replace("~0", "~") for token in text[1:].split("/")])


def text_at(document: Any, tokens: tuple[str, ...]) -> str | None:
    """Return the text of a string, number or boolean; None for other values."""
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
    """Return one text for equal numbers, because clients could alternate between 1, 1.0 and 1e0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)


_PART = 16_384
"""Bytes to read before the deadline is checked."""


class ReplayedInput:
    """A WSGI input that first returns bytes that were already read."""

    def __init__(self, head: bytes, rest: Any) -> None:
        self._head = BytesIO(head)
        self._rest = rest

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            return self._head.read() + bytes(self._rest.read())
        data = self._head.read(size)
        return data if len(data) == size else data + bytes(self._rest.read(size - len(data)))

    def readline(self, size: int | None = -1) -> bytes:
        is_bounded = size is not None and size >= 0
        line = self._head.readline(size if is_bounded else -1)
        if line.endswith(b"\n") or len(line) == size:
            return line
        return line + bytes(self._rest.readline(size - len(line)) if size is not None and is_bounded else self._rest.readline())

    def readinto(self, buffer: bytearray | memoryview) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        getattr(self._rest, "close", bool)()

    def readlines(self, hint: int | None = -1) -> list[bytes]:
        lines, size = [], 0
        for line in self:
            lines.append(line)
            size += len(line)
            if hint is not None and 0 < hint <= size:
                break
        return lines


def read_input(environ: MutableMapping[str, Any], most: int) -> bytes:
    """Read a body of at most ``most`` bytes, and put them back.

    Raises `BodyError` if the body is larger, incomplete, slow, or endless. The server's timeout applies to each read.
    """
    stream = environ.get("wsgi.input")
    length = declared_length(environ.get("CONTENT_LENGTH"))
    if length is None and not environ.get("wsgi.input_terminated"):
        if environ.get("HTTP_TRANSFER_ENCODING"):
            raise without_length()
        return b""
    if stream is None or length == 0:
        return b""
    if length is not None and length > most:
        raise too_large(most)
    parts: list[bytes] = []
    try:
        _read_parts(stream, parts, most + 1 if length is None else length)
    finally:
        data = b"".join(parts)
        environ["wsgi.input"] = ReplayedInput(data, stream)
    if len(data) > most:
        raise too_large(most)
    if length is not None and len(data) < length:
        raise incomplete()
    environ["wsgi.input"] = BytesIO(data)
    return data


def _read_parts(stream: Any, parts: list[bytes], left: int) -> None:
    deadline = monotonic() + LONGEST_READ_S
    while left > 0:
        try:
            part = stream.read(min(left, _PART))
        except OSError as error:
            raise incomplete() from error
        if not part:
            return
        parts.append(part)
        left -= len(part)
        if left > 0 and monotonic() > deadline:
            raise too_slow()
