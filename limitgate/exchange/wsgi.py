"""Calls and chunks between a WSGI application and its server while a gate watches."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import IO, Any, TypeVar

from limitgate.exchange.base import Exchange
from limitgate.exchange.in_flight import chunks_in_flight, written_in_flight
from limitgate.gate.admission import Admission
from limitgate.gate.nesting import response_fields
from limitgate.http.rate_fields import Fields, without
from limitgate.rules import decorators
from limitgate.rules.decorators import Mark, decided_marks

T = TypeVar("T")
StartResponse = Callable[..., Callable[[bytes], object]]


class Upload:
    """The body of a WSGI request, with an eye on whether the client breaks it off."""

    def __init__(self, stream: IO[bytes], admission: Admission) -> None:
        self._stream = stream
        self._admission = admission

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def read(self, *size: int) -> bytes:
        """Read as the server's stream does."""
        return self._noting(self._stream.read, *size)

    def readline(self, *size: int) -> bytes:
        """Read a line as the server's stream does."""
        return self._noting(self._stream.readline, *size)

    def readlines(self, *hint: int) -> list[bytes]:
        """Read lines as the server's stream does."""
        return self._noting(self._stream.readlines, *hint)

    def _noting(self, read: Callable[..., T], *size: int) -> T:
        try:
            return read(*size)
        except OSError:
            self._admission.client_left = True
            raise


class Body:
    """The chunks of a WSGI response, whose making may be all of the application that has yet to run.

    Refunds that are due are made at the end of the chunks, and when they are closed: not every server, and hardly a test
    client, closes them, but code that runs then may still settle the cost.
    """

    __slots__ = ("_chunks", "_exchange", "_iterator")

    def __init__(self, chunks: Iterable[bytes], exchange: Exchange, admission: Admission) -> None:
        self._chunks: Any = chunks
        self._exchange = exchange
        if admission.permits is not None:
            chunks = chunks_in_flight(chunks, admission.permits)
        if admission.marks or decorators.notes_none:
            chunks = _made(chunks, admission.marks)
        self._iterator = _noted(chunks, exchange)

    def __iter__(self) -> Iterator[bytes]:
        return self._iterator

    def __next__(self) -> bytes:
        return next(self._iterator)

    def close(self) -> None:
        """The server is done with it."""
        try:
            getattr(self._chunks, "close", bool)()
        finally:
            self._exchange.close()


class SizedBody(Body):
    """The chunks of a WSGI response whose number is known, which is all that servers want to know besides."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._chunks)


def _noted(chunks: Iterable[bytes], exchange: Exchange) -> Iterator[bytes]:
    """The chunks of a response, whose end is noted. What breaks off leaves them for `Body.close`."""
    try:
        for chunk in chunks:  # noqa: UP028 - `yield from` would close them as soon as nobody reads on
            yield chunk
    except Exception:
        exchange.open_admission().failed()
        raise
    exchange.sent()


def _made(chunks: Iterable[bytes], marks: Container[Mark]) -> Iterator[bytes]:
    """The chunks of a response, each made with the decorators of the request noted."""
    iterator: Iterator[bytes] | None = None
    while True:
        token = decided_marks.set(marks)
        try:
            if iterator is None:
                iterator = iter(chunks)
            chunk = next(iterator)
        except StopIteration:
            return
        finally:
            decided_marks.reset(token)
        yield chunk


def starting(admission: Admission, start_response: StartResponse, waiting: Fields | None = None) -> StartResponse:
    """``start_response`` that adds rate fields and notes the status.

    Rate fields of the application's own are replaced. The answer to a refusal has to have the fields of ``waiting``, too; there
    only those are added that it has not set.
    """

    def start(status: str, headers: Fields, *exc_info: Any) -> Callable[[bytes], object]:
        fields = admission.fields if admission.is_plain or not admission.is_nested else response_fields(admission)
        if waiting is not None:
            fields = without([*waiting, *fields], headers)
        else:
            initials = admission.rules.initials
            for name, _ in headers:
                if name[:1] in initials or admission.is_nested:
                    headers = without(headers, fields)
                    break
        fields = [*headers, *fields]
        write = start_response(status, fields, *exc_info) if exc_info else start_response(status, fields)
        if admission.is_plain:  # `Admission.begun`
            admission.sent_status = status  # first, as other threads read it once a response has begun
            admission.has_begun = True
            if admission.rules.counts is not None and not admission.is_counted:
                admission.count_once(admission.rules.counts)
        else:
            admission.begun(status)
        if admission.permits is not None:
            return written_in_flight(write, admission.permits, admission.status, headers)
        return write

    return start
