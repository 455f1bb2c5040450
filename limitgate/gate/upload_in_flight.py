"""The body of a WSGI request in flight under adaptive limits: others may have its places while its client is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from limitgate.gate.load import MOST_DIGITS, Permits

_READ_ALL = frozenset({"read", "readall", "readlines"})
"""Methods that read all there is unless they are given a size."""
_READS = frozenset({"read1", "readinto", "readinto1", "readline", *_READ_ALL})


class UploadInFlight:
    """A server's stream of a body of ``length`` bytes; None if that is not known."""

    def __init__(self, stream: Any, in_flight: Permits, length: int | None) -> None:
        self._stream = stream
        self._in_flight = in_flight
        self._left = length

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stream, name)
        return self._reading(found, reads_all=name in _READ_ALL) if name in _READS else found

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def _reading(self, read: Callable[..., Any], *, reads_all: bool) -> Callable[..., Any]:
        """A method of the stream that reads, which has to wait for the client."""

        def reading(*size: Any) -> Any:
            self._in_flight.idle()
            try:
                got = read(*size)
            finally:
                self._in_flight.busy()
            if self._left is not None and got:  # bytes, lines, or a number of bytes
                self._left -= got if isinstance(got, int) else sum(map(len, got)) if isinstance(got, list) else len(got)
            is_all = reads_all and (not size or size[0] is None or size[0] < 0)
            if is_all or not got or (self._left is not None and self._left <= 0):
                self._in_flight.has_body()
            return got

        return reading


def watched(stream: Any, in_flight: Permits, environ: Mapping[str, Any]) -> Any:
    """The stream of a body, watched if there is one."""
    length = str(environ.get("CONTENT_LENGTH") or "")
    if not length:
        return UploadInFlight(stream, in_flight, None) if environ.get("HTTP_TRANSFER_ENCODING") else stream
    is_known = length.isdecimal() and length.isascii() and len(length) <= MOST_DIGITS
    return UploadInFlight(stream, in_flight, int(length) if is_known else None) if length != "0" else stream
