"""Reads the body of a WSGI request (PEP 3333), and gives it back to the application."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from io import BytesIO
from time import monotonic
from typing import Any

from limitgate.http.body import LONGEST_READ_S, declared_length, incomplete, too_large, too_slow, without_length

_PART = 16_384
"""Bytes between checks of the deadline."""


class ReplayedInput:
    """A WSGI input that starts with bytes already read."""

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

    Raises `BodyError` if it is larger, incomplete, slow, or endless. The server's timeout applies to each read.
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
