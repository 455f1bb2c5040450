"""Whether the server has put a client's own word in the place of its address, judged by what arrives."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address
from types import FrameType
from typing import Any

from limitgate.http.request import Request

Address = IPv4Address | IPv6Address

_ANYBODY = ("1.1.1.1", "8.8.8.8", "203.0.113.1", "2606:4700::1111")
"""Addresses that no list of proxies has all of, unless it has everybody's."""


def trusts_anybody(request: Request, forwarded: Sequence[Address | None]) -> bool:
    """True if the server lets clients choose their addresses. ``forwarded`` are those of the header, from the right.

    uvicorn leaves no more than the address that it believes, with port 0 where the header has none. The middleware that has put
    it there is still on the stack, and says whom it trusts. Where it is not, as behind middleware that runs the application in
    a task of its own: only a server that trusts everybody passes over a public address to believe the leftmost of several, as
    proxies of one's own have private ones.
    """
    scope = request.scope
    if scope is None or not forwarded or request.peer is None:
        return False
    rewriting = _proxy_headers_middleware()
    if rewriting is not None:
        return all(address in rewriting.trusted_hosts for address in _ANYBODY)
    passed_over = [address for address in forwarded[:-1] if address is not None and address != forwarded[-1]]
    return scope["client"][1] == 0 and any(address.is_global for address in passed_over)


def _proxy_headers_middleware() -> Any:
    """Uvicorn's middleware that this request has come through, None if there is none on the stack."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - nothing else knows the middleware around a request
    while frame is not None:
        if frame.f_globals.get("__name__") == "uvicorn.middleware.proxy_headers":
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None
