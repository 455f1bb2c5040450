"""Calls and chunks between a WSGI application and its server while a gate watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, TypeVar

from limitgate.exchange.base import Exchange
from limitgate.gate.admission import Admission
from limitgate.gate.load import InFlight
from limitgate.gate.nesting import response_fields
from limitgate.http.rate_fields import Fields, raw
from limitgate.rules.decorators import decided_marks

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

    def __init__(self, chunks: Iterable[bytes], exchange: Exchange) -> None:
        self._chunks: Any = chunks
        self._iterator: Iterator[bytes] | None = None
        self._exchange = exchange
        self._marks, self._in_flight = exchange.marks, exchange.in_flight

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        token = decided_marks.set(self._marks)
        try:
            if self._iterator is None:
                self._iterator = iter(self._chunks)
            if self._in_flight is None:
                return next(self._iterator)
            self._in_flight.busy()
            chunk = next(self._iterator)
            self._in_flight.sends(len(chunk))
            self._in_flight.idle()  # until the server has sent it and asks for more
            return chunk  # noqa: TRY300 - what is noted before may fail, too
        except StopIteration:
            self._exchange.sent()
            raise
        except Exception:
            self._exchange.admission.failed()
            raise
        finally:
            decided_marks.reset(token)

    def close(self) -> None:
        """The server is done with it."""
        try:
            getattr(self._chunks, "close", bool)()
            if self._in_flight is not None:
                self._in_flight.end()
        finally:
            self._exchange.end()


class SizedBody(Body):
    """The chunks of a WSGI response whose number is known, which is all that servers want to know besides."""

    def __len__(self) -> int:
        return len(self._chunks)


def starting(admission: Admission, start_response: StartResponse, waiting: Fields | None = None) -> StartResponse:
    """``start_response`` that adds rate fields and notes the status.

    Of the answer to a refusal, which has to have the fields of ``waiting``, too, only those are added that are not set yet.
    """

    def start(status: str, headers: Fields, *exc_info: Any) -> Callable[[bytes], object]:
        fields = response_fields(admission)
        if waiting is not None:
            present = {name.lower() for name, _ in headers}
            fields = [field for field in [*waiting, *fields] if field[0].lower() not in present]
        write = start_response(status, [*headers, *fields], *exc_info)
        code = status_code(status)
        admission.begun(code)
        if admission.in_flight is not None:
            return written_in_flight(write, admission.in_flight, code, headers)
        return write

    return start


def written_in_flight(
    write: Callable[[bytes], object], in_flight: InFlight, status: int | None, headers: Fields
) -> Callable[[bytes], object]:
    """Note how the response of a request in flight starts. Returns ``write``, while which the client is waited for."""
    in_flight.starts(status, raw(headers))

    def write_in_flight(data: bytes) -> object:
        in_flight.sends(len(data))
        in_flight.idle()
        try:
            return write(data)
        finally:
            in_flight.busy()

    return write_in_flight


def status_code(status: str) -> int | None:
    """The number that a status line begins with; None if it is none."""
    code = status[:3]
    return int(code) if code.isdecimal() else None
