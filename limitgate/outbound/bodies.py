"""URLs and refusal bodies of urllib3 and requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import BytesIO
from typing import Any

from urllib3.exceptions import HTTPError
from urllib3.response import HTTPResponse
from urllib3.util import parse_url

from limitgate.outbound.throttle import LONGEST_READ, MOST_READ, OF_BODIES, Reading, Target, run, shut_after
from limitgate.process.clock import monotonic

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
    read, read1, read_chunked, close = response.read, response.read1, response.read_chunked, response.close

    def read_along(amt: int | None = None, *args: Any, **options: Any) -> bytes:
        with _over_if_it_fails(reading):
            chunk = read(amt, *args, **options)
        reading.feed(chunk)
        if amt is None or (amt and not chunk) or _is_read(response):
            run(reading.over())
        return chunk

    def read1_along(*args: Any, **options: Any) -> bytes:
        with _over_if_it_fails(reading):
            chunk = read1(*args, **options)
        reading.feed(chunk)
        if not chunk or _is_read(response):
            run(reading.over())
        return chunk

    def read_chunked_along(*args: Any, **options: Any) -> Iterator[bytes]:
        with _over_if_it_fails(reading):
            for chunk in read_chunked(*args, **options):
                reading.feed(chunk)
                yield chunk
        run(reading.over())

    def close_along() -> None:
        try:
            close()
        finally:
            run(reading.over())

    # `data`, `stream` and the file methods call these.
    ours: dict[str, Any] = {"read": read_along, "read_chunked": read_chunked_along, "close": close_along, "read1": read1_along}
    vars(response).update(ours)
    return response


def _is_read(response: HTTPResponse) -> bool:
    return response.closed and not len(getattr(response, "_decoded_buffer", b""))


@contextmanager
def _over_if_it_fails(reading: Reading) -> Iterator[None]:
    try:
        yield
    except BaseException:
        run(reading.over())
        raise


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
