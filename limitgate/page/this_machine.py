"""A guard for this machine."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from limitgate.http.request import Request

_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


def this_machine(request: Request) -> str | None:
    """Admit browsers on this machine, for a service without a proxy: ``Page(store, guard=this_machine)``.

    The client and the host in the request must be this machine. Otherwise another site could point its name here (DNS
    rebinding) and read the page.
    """
    if any(name in request.headers for name in _FORWARDED):
        return None
    is_here = _is_loopback(request.peer) and _is_loopback(request.client)
    return "this machine" if is_here and is_local_host(request.headers.get("host", "")) else None


def is_local_host(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or name.endswith(".localhost") or _is_loopback(name)


def _is_loopback(address: str | None) -> bool:
    try:
        return address is not None and ip_address(address).is_loopback
    except ValueError:
        return False
