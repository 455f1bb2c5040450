"""Processes calls and chunks between a WSGI application and its server."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import IO, Any, TypeVar

from limitgate.exchange.base import Exchange
from limitgate.exchange.in_flight import chunks_in_flight, written_in_flight
from limitgate.gate.admission import Admission
from limitgate.gate.nesting import response_fields
from limitgate.http.rate_fields import Fields, without
from limitgate.llm.metering import ResponseMeter
from limitgate.rules import decorators
from limitgate.rules.decorators import Mark, decided_marks

T = TypeVar("T")
StartResponse = Callable[..., Callable[[bytes], object]]


class Upload:
    """A WSGI request body that notes if the client aborts it."""

    def __init__(self, stream: IO[bytes], admission: Admission) -> None:
        self._stream = stream
        self._admission = admission

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def read(self, *size: int) -> bytes:
        return self._noting(self._stream.read, *size)

    def readline(self, *size: int) -> bytes:
        return self._noting(self._stream.readline, *size)

    def readlines(self, *hint: int) -> list[bytes]:
        return self._noting(self._stream.readlines, *hint)

    def _noting(self, read: Callable[..., T], *size: int) -> T:
        try:
            return read(*size)
        except OSError:
            self._admission.client_left = True
            raise


class Body:
    """The chunks of a WSGI response, during which the application may still run.

    Refunds are made after the last chunk and on `close`, which some servers never call.
    """

    __slots__ = ("_chunks", "_exchange", "_iterator")

    def __init__(self, chunks: Iterable[bytes], exchange: Exchange, admission: Admission) -> None:
        self._chunks: Any = chunks
        self._exchange = exchange
        if admission.permits is not None:
            chunks = chunks_in_flight(chunks, admission.permits)
        if admission.marks or decorators.notes_none:
            chunks = _made(chunks, admission.marks)
        if admission.meter is not None:
            chunks = admission.meter.along(chunks)
        self._iterator = _noted(chunks, exchange)

    def __iter__(self) -> Iterator[bytes]:
        return self._iterator

    def __next__(self) -> bytes:
        return next(self._iterator)

    def close(self) -> None:
        try:
            getattr(self._chunks, "close", bool)()
        finally:
            self._exchange.close()


class SizedBody(Body):
    """A body for servers that call `len`."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._chunks)


def _noted(chunks: Iterable[bytes], exchange: Exchange) -> Iterator[bytes]:
    try:
        for chunk in chunks:  # noqa: UP028 - `yield from` would close `chunks` early
            yield chunk
    except Exception:
        exchange.open_admission().failed()
        raise
    exchange.sent()


def _made(chunks: Iterable[bytes], marks: Container[Mark]) -> Iterator[bytes]:
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


def _read_along(write: Callable[[bytes], object], meter: ResponseMeter) -> Callable[[bytes], object]:
    def writing(data: bytes) -> object:
        meter.feed(data)
        return write(data)

    return writing


def denied_by(
    answer: Callable[..., Iterable[bytes]], environ: dict[str, Any], start_response: StartResponse
) -> Iterable[bytes]:
    """Return the answer, without a body for HEAD."""
    if environ["REQUEST_METHOD"] != "HEAD":
        return answer(environ, start_response)

    def start(*response: Any) -> Callable[[bytes], object]:
        start_response(*response)
        return bool

    chunks = answer(environ, start)
    try:
        # The first chunk may start the response.
        next(iter(chunks), None)
    finally:
        getattr(chunks, "close", bool)()
    return []


def starting(admission: Admission, start_response: StartResponse, waiting: Fields | None = None) -> StartResponse:
    """Return a ``start_response`` that notes the status and replaces rate fields. Those in ``waiting`` stay."""

    def start(status: str, headers: Fields, *exc_info: Any) -> Callable[[bytes], object]:
        fields = admission.fields if admission.is_plain or not admission.is_nested else response_fields(admission)
        if waiting is not None:
            fields = without([*waiting, *fields], headers)
        else:
            initials = admission.rules.initials
            for name, _ in headers:
                if not name or name[0] in initials or admission.is_nested:
                    headers = without(headers, fields)
                    break
        fields = [*headers, *fields]
        write = start_response(status, fields, *exc_info) if exc_info else start_response(status, fields)
        if admission.is_plain:
            # Set this before `has_begun`, because other threads read it afterwards.
            admission.sent_status = status
            admission.has_begun = True
            if not admission.is_counted and admission.rules.counts is not None:
                admission.count_once()
        else:
            admission.begun(status)
        if admission.meter is not None:
            given = {name.lower(): value for name, value in headers}
            admission.meter.starts(admission.status, given.get("content-type", ""), given.get("content-encoding", ""))
            write = _read_along(write, admission.meter)
        if admission.permits is not None:
            return written_in_flight(write, admission.permits, admission.status, headers)
        return write

    return start
