"""URLs and refusal bodies of urllib3, also for requests, which uses urllib3."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from io import BytesIO

from urllib3.exceptions import HTTPError
from urllib3.response import HTTPResponse
from urllib3.util import parse_url

from limitgate.outbound.throttle import LONGEST_READ, MOST_READ, OF_BODIES, shut_after
from limitgate.process.clock import monotonic

_PORTS = {"http": 80, "https": 443}


def host_of(url: str) -> str:
    """The lower-case host of a URL, with a non-default port."""
    scheme, _, host, port, *_ = parse_url(url)
    # A trailing dot doesn't change the host.
    name = (host or "").removesuffix(".")
    return name if port is None or port == _PORTS.get(scheme or "http") else f"{name}:{port}"


def in_memory(body: object) -> bool:
    """True if a request body can be sent again, which excludes streams."""
    return body is None or isinstance(body, str | bytes | bytearray)


def kept(response: HTTPResponse) -> HTTPResponse:
    """Read a refusal's body into memory, which frees its connection; drop it if too long, late or broken."""
    body = _read(response)
    if body is None or not _is_readable(_with(response, body)):
        lost = _with(response, b"")
        for name in OF_BODIES:
            lost.headers.discard(name)
        return lost
    return _with(response, body)


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
