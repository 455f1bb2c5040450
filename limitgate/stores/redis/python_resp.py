"""Replaces the parts of hiredis that LimitGate uses. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import Any

_LONGEST_LINE = 65_536
_MOST_ITEMS = 2**32
_STRINGS = frozenset({b"$", b"=", b"!"})
_PAIRS = frozenset({b"%", b"|"})
_SIZED = _STRINGS | _PAIRS | {b"*", b">", b"~"}
_KINDS = _SIZED | {b"", b"+", b"-", b":", b",", b"(", b"_", b"#"}
_CONSTANTS = {b"_": None, b"#t": True, b"#f": False}
_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}").fullmatch
_BIG_NUMBER = re.compile(rb"-?[0-9]+").fullmatch
_DOUBLE = re.compile(rb"(?i:-?(?:inf|nan|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?))").fullmatch

_Parsing = Generator[None, None, Any]


class ProtocolError(Exception):
    """The bytes are not valid RESP."""


class PushNotification(list[Any]):
    """A message that isn't the reply to a command."""


def pack_command(words: Iterable[str | bytes | int]) -> bytes:
    packed = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n%b" % (len(packed), b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in packed]))


class Reader:
    """`gets` returns ``notEnoughData`` for a partial reply."""

    def __init__(self, *, notEnoughData: object, replyError: Callable[[str], object]) -> None:  # noqa: N803 - hiredis' names
        self._nothing = notEnoughData
        self._error = replyError
        self._data = bytearray()
        self._at = 0
        self._searched = 0
        self._parsing: _Parsing | None = None

    def feed(self, data: bytes) -> None:
        self._data += data

    def has_data(self) -> bool:
        return self._at < len(self._data)

    def gets(self) -> Any:
        """Raises `ProtocolError` for invalid RESP."""
        if self._parsing is None:
            del self._data[: self._at]
            self._at = self._searched = 0
            self._parsing = self._value()
        try:
            next(self._parsing)
        except StopIteration as whole:
            self._parsing = None
            return whole.value
        return self._nothing

    def _value(self) -> _Parsing:
        while (line := self._line()) is None:
            yield
        return (yield from self._sized(line)) if line[:1] in _SIZED else self._simple(line)

    def _sized(self, line: bytes) -> _Parsing:
        kind = line[:1]
        size = _integer(line[1:])
        if size == -1:
            return None
        if size < 0 or (size >= _MOST_ITEMS and kind not in _STRINGS):
            raise ProtocolError("invalid size")
        if kind not in _STRINGS:
            return (yield from self._aggregate(kind, size))
        while (string := self._string(size)) is None:
            yield
        if kind == b"!":
            return self._error(string.decode(errors="replace"))
        return string[4:] if kind == b"=" else string

    def _aggregate(self, kind: bytes, size: int) -> _Parsing:
        items = []
        for _ in range(size * 2 if kind in _PAIRS else size):
            while (line := self._line()) is None:
                yield
            items.append((yield from self._sized(line)) if line[:1] in _SIZED else self._simple(line))
        # Attributes belong to the value that follows.
        if kind == b"|":
            return (yield from self._value())
        if kind == b"%":
            return dict(zip(items[::2], items[1::2]))
        return PushNotification(items) if kind == b">" else items

    def _simple(self, line: bytes) -> Any:
        kind, text = line[:1], line[1:]
        if kind == b":":
            return _integer(text)
        if kind == b"+":
            return text
        if kind == b"-":
            return self._error(text.decode(errors="replace"))
        if kind == b"," and _DOUBLE(text):
            return float(text)
        if kind == b"(" and _BIG_NUMBER(text):
            return text
        if line in _CONSTANTS:
            return _CONSTANTS[line]
        raise ProtocolError("invalid RESP reply")

    def _line(self) -> bytes | None:
        start = self._at
        end = self._data.find(b"\r\n", max(start, self._searched))
        if end < 0:
            self._searched = len(self._data) - 1
            if bytes(self._data[start : start + 1]) not in _KINDS or self._searched - start > _LONGEST_LINE:
                raise ProtocolError("invalid RESP line")
            return None
        self._at = self._searched = end + 2
        return bytes(self._data[start:end])

    def _string(self, size: int) -> bytes | None:
        start, end = self._at, self._at + size
        if len(self._data) < end + 2:
            return None
        if self._data[end : end + 2] != b"\r\n":
            raise ProtocolError("a string does not have the announced size")
        self._at = end + 2
        return bytes(self._data[start:end])


def _integer(text: bytes) -> int:
    if not _INTEGER(text):
        raise ProtocolError("invalid number")
    return int(text)
