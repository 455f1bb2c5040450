"""Tracks requests under adaptive limits. While a client sends or reads slowly, other requests may use its permits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, MutableMapping
from types import CoroutineType, coroutine
from typing import Any, TypeVar

from limitgate.exchange.application import Message, Send
from limitgate.exchange.asgi import BEGINNINGS, CLIENT_GONE, ASGIExchange, marked_as_coroutine
from limitgate.exchange.base import EXCHANGE, OUTCOME
from limitgate.gate.admission import Admission
from limitgate.gate.permits import MOST_DIGITS, Permits
from limitgate.http.rate_fields import Fields, raw
from limitgate.http.request import Scope

T = TypeVar("T")

_READ_ALL = frozenset({"read", "readall", "readlines"})
"""Methods that by default read the whole body."""
_READS = frozenset({"read1", "readinto", "readinto1", "readline", *_READ_ALL})
_ENDS = frozenset({"http.response.pathsend", "http.response.zerocopysend", *BEGINNINGS}) - {"http.response.start"}
"""Messages that end the application's work: a WebSocket handshake, or a file that the server sends."""


async def turn_shed_away(admission: Admission, scope: Scope, send: Send) -> None:
    """Send the refusal. Copy its headers, because outer middleware may change the list."""
    refusal: Any = admission.refusal
    if admission.rules.counts is not None:
        admission.rules.counts.count("refused", "nobody")
    scope[OUTCOME] = "refused"
    body = b"" if admission.request.sent_method == "HEAD" else refusal.body
    try:
        await send({"type": "http.response.start", "status": refusal.status, "headers": refusal.raw.copy()})
        await send({"type": "http.response.body", "body": body})
    # `suppress` would slow down every refusal.
    except CLIENT_GONE:
        pass


def turn_shed_away_here(
    admission: Admission, environ: dict[str, Any], start_response: Callable[..., object]
) -> Iterable[bytes]:
    refusal: Any = admission.refusal
    permits: Any = admission.permits
    if admission.rules.counts is not None:
        admission.rules.counts.count("refused", "nobody")
    environ["limitgate"] = permits.refused(refusal)
    environ[EXCHANGE], environ[OUTCOME] = None, "refused"
    start_response(f"{refusal.status} {refusal.reason}", refusal.fields.copy())
    return [] if admission.request.sent_method == "HEAD" else [refusal.body]


_send = ASGIExchange.send
"""`super` is slower."""


class ASGIExchangeInFlight(ASGIExchange):
    permits: Permits
    _has_body = False

    async def receive(self) -> Message:
        """Lend the permits while the client is slow to send."""
        if self._has_body:
            return await ASGIExchange.receive(self)
        message = await for_client(ASGIExchange.receive(self), self.permits)
        if not message.get("more_body"):
            self._has_body = True
            if message["type"] == "http.request":
                self.permits.has_body()
        return message

    @marked_as_coroutine
    def send(self, message: Message) -> Awaitable[None]:
        """Release the permits at the end; lend them while the client is slow to read."""
        kind, permits = message["type"], self.permits
        if kind == "http.response.body":
            if not message.get("more_body"):
                if permits.held:
                    permits.end()
                return _send(self, message)
            permits.sends(len(message.get("body") or b""))
        elif kind == "http.response.start":
            permits.starts(message.get("status"), message.get("headers") or ())
        elif kind in _ENDS:
            permits.end("untaught")
        sent = _send(self, message)
        return for_client(sent, permits) if permits.held else sent


async def for_client(call: Awaitable[T], permits: Permits) -> T:
    """Await a call. While it doesn't return immediately, it waits for the client."""
    steps: Any = call
    try:
        if type(steps) is CoroutineType:
            pending = steps.send(None)
        else:
            steps = call.__await__()
            pending = next(steps)
    except StopIteration as returned:
        result: T = returned.value
    else:
        permits.idle()
        try:
            result = await _resumed(steps, pending)
        finally:
            permits.busy()
    return result


@coroutine
def _resumed(steps: Any, pending: Any) -> Generator[Any, Any, Any]:
    """Continue an awaitable whose first step has run, as `await` does (PEP 380)."""
    try:
        while True:
            try:
                sent = yield pending
            except BaseException as error:
                if not hasattr(steps, "throw"):
                    raise
                pending = steps.throw(error)
            else:
                pending = steps.send(sent) if hasattr(steps, "send") else next(steps)
    except StopIteration as returned:
        return returned.value


class UploadInFlight:
    """A WSGI body. Its ``length`` is in bytes, None if unknown."""

    def __init__(self, stream: Any, permits: Permits, length: int | None) -> None:
        self._stream = stream
        self._permits = permits
        self._left = length

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stream, name)
        return self._reading(found, reads_all=name in _READ_ALL) if name in _READS else found

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def _reading(self, read: Callable[..., Any], *, reads_all: bool) -> Callable[..., Any]:

        def reading(*size: Any) -> Any:
            self._permits.idle()
            try:
                got = read(*size)
            finally:
                self._permits.busy()
            if self._left is not None and got:
                self._left -= got if isinstance(got, int) else sum(map(len, got)) if isinstance(got, list) else len(got)
            is_all = reads_all and (not size or size[0] is None or size[0] < 0)
            if is_all or not got or (self._left is not None and self._left <= 0):
                self._permits.has_body()
            return got

        return reading


def watched(stream: Any, permits: Permits, environ: Mapping[str, Any]) -> Any:
    length = str(environ.get("CONTENT_LENGTH") or "")
    if not length:
        return UploadInFlight(stream, permits, None) if environ.get("HTTP_TRANSFER_ENCODING") else stream
    is_known = length.isdecimal() and length.isascii() and len(length) <= MOST_DIGITS
    return UploadInFlight(stream, permits, int(length) if is_known else None) if length != "0" else stream


def watch_upload(environ: MutableMapping[str, Any], permits: Permits) -> None:
    if "wsgi.input" in environ:
        environ["wsgi.input"] = watched(environ["wsgi.input"], permits, environ)


def chunks_in_flight(chunks: Iterable[bytes], permits: Permits) -> Iterator[bytes]:
    """Yield the chunks. Only the time to make them counts as work."""
    iterator: Iterator[bytes] | None = None
    while True:
        permits.busy()
        try:
            if iterator is None:
                iterator = iter(chunks)
            chunk = next(iterator)
        except StopIteration:
            return
        permits.sends(len(chunk))
        # The server sends the chunk before it asks for another one.
        permits.idle()
        yield chunk


def written_in_flight(
    write: Callable[[bytes], object], permits: Permits, status: int | None, headers: Fields
) -> Callable[[bytes], object]:
    """Note the start of a response. Calls of ``write`` wait for the client."""
    permits.starts(status, raw(headers))

    def write_in_flight(data: bytes) -> object:
        permits.sends(len(data))
        permits.idle()
        try:
            return write(data)
        finally:
            permits.busy()

    return write_in_flight
