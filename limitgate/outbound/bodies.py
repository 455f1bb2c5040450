"""What the doors for requests and for urllib3 share, as requests sends with urllib3: URLs, and the responses that refuse."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from threading import Timer

from urllib3.exceptions import HTTPError
from urllib3.response import HTTPResponse
from urllib3.util import parse_url

from limitgate.outbound.throttle import LONGEST_READ, MOST_READ, OF_BODIES

_PORTS = {"http": 80, "https": 443}


def host_of(url: str) -> str:
    """The host of a URL in lower case, with its port if it is not that of the scheme."""
    scheme, _, host, port, *_ = parse_url(url)
    name = (host or "").removesuffix(".")  # a name that ends in a dot is the same one
    return name if port is None or port == _PORTS.get(scheme or "http") else f"{name}:{port}"


def in_memory(body: object) -> bool:
    """True if a request's body is there to be sent again; one that is streamed is gone."""
    return body is None or isinstance(body, str | bytes | bytearray)


def kept(response: HTTPResponse) -> HTTPResponse:
    """A refusal with its body in memory, whose connection is free again; without a body that is too much, late or broken."""
    body = _read(response)
    if body is None or not _is_readable(_with(response, body)):
        lost = _with(response, b"")
        for name in OF_BODIES:
            lost.headers.discard(name)
        return lost
    return _with(response, body)


def _read(response: HTTPResponse) -> bytes | None:
    """The body as it is on the wire, None if it is more than we are willing to read; its connection is closed then."""
    body, until = b"", time.monotonic() + LONGEST_READ
    try:
        with _ending(response, LONGEST_READ):
            while chunk := response.read(MOST_READ + 1 - len(body), decode_content=False):
                body += chunk
                if len(body) > MOST_READ:
                    return None
    except (HTTPError, OSError):
        return None
    finally:
        response.close()
        response.release_conn()
    return None if response.length_remaining or time.monotonic() > until else body


@contextmanager
def _ending(response: HTTPResponse, seconds: float) -> Iterator[None]:
    """Let what is read of a response end after so many seconds, however slowly it comes: each read may take any time."""
    try:
        fileno = response.fileno()
    except (OSError, AttributeError):  # it is in memory, or has been read
        yield
        return
    with socket.fromfd(fileno, socket.AF_INET, socket.SOCK_STREAM) as line:
        timer = Timer(seconds, _shut, [line])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _shut(line: socket.socket) -> None:
    with suppress(OSError):  # it may be gone by now
        line.shutdown(socket.SHUT_RDWR)


def _with(response: HTTPResponse, body: bytes) -> HTTPResponse:
    """A response like another, not read yet."""
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
    """True if a body can be decoded, and is no larger for it than it might have been on the wire."""
    try:
        return len(response.read(MOST_READ + 1, decode_content=True)) <= MOST_READ
    except HTTPError:
        return False
