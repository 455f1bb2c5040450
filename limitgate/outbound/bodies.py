"""URLs and refusal bodies of urllib3 and requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from http.client import IncompleteRead
from io import BytesIO
from typing import Any

from urllib3.exceptions import HTTPError, IncompleteRead as CutBody, ProtocolError
from urllib3.response import HTTPResponse
from urllib3.util import parse_url

from limitgate.outbound.throttle import LONGEST_READ, MOST_READ, OF_BODIES, Reading, Target, run, shut_after
from limitgate.process.clock import monotonic

_STEP = 65_536
"""Maximum of bytes that are read together."""
_PORTS = {"http": 80, "https": 443}


def host_of(url: str) -> str:
    """Return the lower-case host, with a non-default port."""
    scheme, _, host, port, *_ = parse_url(url)
    # A trailing dot doesn't change the host.
    name = (host or "").removesuffix(".")
    return name if port is None or port == _PORTS.get(scheme or "http") else f"{name}:{port}"


def in_memory(body: object) -> bool:
    """True if a body can be sent again."""
    return body is None or isinstance(body, str | bytes | bytearray)


def kept(response: HTTPResponse) -> HTTPResponse:
    """Read a refusal's body, which frees the connection. A body that is too long, late or broken is dropped."""
    body = _read(response)
    if body is None or not _is_readable(_with(response, body)):
        lost = _with(response, b"")
        for name in OF_BODIES:
            lost.headers.discard(name)
        return lost
    return _with(response, body)


def along(response: HTTPResponse, reading: Reading) -> HTTPResponse:
    if response.closed:
        # The body is empty or in memory.
        reading.feed(response.data or b"")
        run(reading.over())
        return response
    ours = _Along(response, reading)
    # `data`, `stream` and the file methods call these. urllib3 before 2.2 has no `read1`.
    for name in ours.theirs:
        setattr(response, name, getattr(ours, name))
    return response


class _Along:
    """Methods of a response: LimitGate reads the chunks that the application reads."""

    def __init__(self, response: HTTPResponse, reading: Reading) -> None:
        self._response = response
        self._reading = reading
        names = ("read", "read1", "read_chunked", "drain_conn", "release_conn", "close")
        self.theirs: Mapping[str, Any] = {name: getattr(response, name) for name in names if hasattr(response, name)}
        self._is_inside = False
        """True within urllib3, which releases the connection before it returns the last chunk."""
        # Responses of other libraries, such as those for tests, may have another file.
        self._has_steps = "read1" in self.theirs and hasattr(response._fp, "read1")  # noqa: SLF001

    def read(
        self,
        amt: int | None = None,
        decode_content: bool | None = None,  # noqa: FBT001 - as in urllib3
        cache_content: bool = False,  # noqa: FBT001, FBT002
    ) -> bytes:
        amt = None if amt is not None and amt < 0 else amt
        # `data` returns the body again, in newer versions only if no part was read before.
        is_kept = cache_content and amt is None and not getattr(self._response, "_uncached_read_occurred", False)
        if amt == 0 or self._response.closed or not self._has_steps:
            with self._inside():
                chunk: bytes = self.theirs["read"](amt, decode_content, cache_content)
            self._reading.feed(chunk)
        else:
            chunk = self._read_by_steps(amt, decode_content=decode_content)
            if is_kept:
                self._response._body = chunk  # noqa: SLF001
        self._end(is_last=amt is None or bool(amt and not chunk))
        return chunk

    def _read_by_steps(self, amt: int | None, *, decode_content: bool | None) -> bytes:
        """Read as urllib3 does. If it fails, the parts that arrived are known."""
        is_decoded = self._response.decode_content if decode_content is None else decode_content
        parts: list[bytes] = []
        left = _STEP if amt is None else amt
        while left:
            try:
                with self._inside():
                    part: bytes = self.theirs["read1"](min(left, _STEP), decode_content)
            except ProtocolError as error:
                if amt is None or is_decoded or not parts or not isinstance(error.__cause__, CutBody):
                    raise
                # The next call raises.
                break
            if not part:
                break
            self._reading.feed(part)
            parts.append(part)
            left -= 0 if amt is None else len(part)
        return b"".join(parts)

    def read1(self, amt: int | None = None, *args: Any, **options: Any) -> bytes:
        with self._inside():
            chunk: bytes = self.theirs["read1"](amt, *args, **options)
        self._reading.feed(chunk)
        self._end(is_last=not chunk and amt != 0)
        return chunk

    def read_chunked(self, *args: Any, **options: Any) -> Iterator[bytes]:
        chunks = self.theirs["read_chunked"](*args, **options)
        try:
            while True:
                with self._inside():
                    chunk = next(chunks, None)
                if chunk is None:
                    break
                self._reading.feed(chunk)
                yield chunk
        finally:
            self._over()

    def drain_conn(self) -> None:
        # Like urllib3, don't decompress what nobody reads. RuntimeError: a part was decompressed before.
        with suppress(HTTPError, OSError, RuntimeError):
            while self.read(MOST_READ, decode_content=False):
                pass
        self.theirs["drain_conn"]()
        self._over()

    def release_conn(self) -> None:
        self.theirs["release_conn"]()
        self._over()

    def close(self) -> None:
        try:
            self.theirs["close"]()
        finally:
            self._over()

    def _end(self, *, is_last: bool) -> None:
        if is_last or (self._response.closed and not len(getattr(self._response, "_decoded_buffer", b""))):
            self._over()

    def _over(self) -> None:
        if not self._is_inside:
            run(self._reading.over())

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        except BaseException as error:
            self._is_inside = False
            self._reading.feed(_carried_by(error))
            self._over()
            raise
        self._is_inside = False


def _carried_by(error: BaseException) -> bytes:
    """Return the part of a chunk that arrived before its connection broke."""
    cause = error.__cause__
    partial: object = cause.partial if isinstance(cause, IncompleteRead) else b""
    return partial if isinstance(partial, bytes) else b""


def target_of(body: object, url: str, headers: Mapping[str, Any]) -> Target:
    fields = {str(name).lower(): value for name, value in headers.items()}

    def field(name: str) -> str | None:
        value = fields.get(name)
        return value.decode("latin-1") if isinstance(value, bytes) else None if value is None else str(value)

    text = body.encode() if isinstance(body, str) else bytes(body) if isinstance(body, bytes | bytearray) else None
    return Target(b"" if body is None else text, parse_url(url).path or "", field)


def _read(response: HTTPResponse) -> bytes | None:
    body, until = b"", monotonic() + LONGEST_READ
    try:
        with _deadline(response):
            while chunk := response.read(MOST_READ + 1 - len(body), decode_content=False):
                body += chunk
                if len(body) > MOST_READ:
                    return None
    except (HTTPError, OSError):
        return None
    finally:
        response.close()
        response.release_conn()
    return None if response.length_remaining or monotonic() > until else body


def _deadline(response: HTTPResponse) -> AbstractContextManager[None]:
    try:
        fileno = response.fileno()
    except (OSError, AttributeError):  # The response is in memory or already read.
        return nullcontext()
    return shut_after(LONGEST_READ, fileno)


def _with(response: HTTPResponse, body: bytes) -> HTTPResponse:
    return HTTPResponse(
        BytesIO(body),
        headers=response.headers,
        status=response.status,
        version=response.version,
        reason=response.reason,
        preload_content=False,
        decode_content=response.decode_content,
        retries=response.retries,
        enforce_content_length=False,
        request_url=response.geturl(),
    )


def _is_readable(response: HTTPResponse) -> bool:
    try:
        return len(response.read(MOST_READ + 1, decode_content=True)) <= MOST_READ
    except HTTPError:
        return False
