"""Envoy's rate limit service (``envoy.service.ratelimit.v3.RateLimitService``), of the extra ``envoy``.

All descriptors of a call together describe one request.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import unquote

from limitgate.forward.dialects import ANY_METHOD, FORWARDED_FOR, split
from limitgate.forward.gate import Decided, ForwardGate
from limitgate.http.request import Scope
from limitgate.limits.decision import Decision, Window
from limitgate.limits.limit import SECONDS
from limitgate.messages.text import extra

with extra("envoy", "grpc", "google"):
    import grpc
    from grpc import aio

    from limitgate.forward.rate_limit_pb2 import Header, Request, Response

SERVICE = "envoy.service.ratelimit.v3.RateLimitService"
GRACE_S = 5.0
HEADER = "header:"
MOST = 0xFFFFFFFF
_UNITS = {SECONDS[unit.lower()]: number for unit, number in Response.Limit.Unit.items() if unit.lower() in SECONDS}
_UNSENT = frozenset({b"content-length"})


async def started(gate: ForwardGate, address: str) -> aio.Server:
    """Start a server at ``host:port``. Raises `RuntimeError` if it cannot listen there."""

    async def should_rate_limit(request: Request, context: aio.ServicerContext[Request, Response]) -> Response:
        scope = scope_of(request, context.peer(), gate.api_key_header)
        return _response(request, await gate.decide(scope, _hits(request)))

    method = grpc.unary_unary_rpc_method_handler(
        should_rate_limit, request_deserializer=Request.FromString, response_serializer=Response.SerializeToString
    )
    server = aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"ShouldRateLimit": method}),))
    server.add_insecure_port(address)
    await server.start()
    return server


def scope_of(request: Request, peer: str, api_key_header: str) -> Scope:
    """Return the scope of the described request. The first of several equal entries counts."""
    found: dict[str, str] = {}
    for descriptor in request.descriptors:
        for entry in descriptor.entries:
            found.setdefault(entry.key, entry.value)
    headers = {key.removeprefix(HEADER).lower(): value for key, value in found.items() if key.startswith(HEADER)}
    if "api_key" in found:
        headers[api_key_header] = f"Bearer {found['api_key']}" if api_key_header == "authorization" else found["api_key"]
    for key, name in (("host", "host"), ("remote_address", FORWARDED_FOR)):
        headers.pop(name, None)
        if key in found:
            headers[name] = found[key]
    path, query, _ = split(found.get("path", "/").encode())
    method = found.get("method", ANY_METHOD)
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "GET" if method == "HEAD" else method,
        "path": path,
        "query_string": query,
        "root_path": "",
        "client": _address(peer),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }


def _hits(request: Request) -> int | None:
    of_descriptors = [each.hits_addend.value for each in request.descriptors if each.HasField("hits_addend")]
    return max(of_descriptors) if of_descriptors else request.hits_addend or None


def _address(peer: str) -> tuple[str, int] | None:
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    host, _, port = rest.rpartition(":")
    return str(ip_address(host.strip("[]").partition("%")[0])), int(port)


def _response(request: Request, decided: Decided) -> Response:
    refusal = decided.refusal
    code = Response.OK if refusal is None else Response.OVER_LIMIT
    fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in decided.headers if name not in _UNSENT]
    return Response(
        overall_code=code,
        statuses=[_status(code, decided.decision) for _ in request.descriptors],
        response_headers_to_add=[Header(key=name, value=value) for name, value in fields],
        raw_body=b"" if refusal is None else refusal.body,
    )


def _status(code: int, decision: Decision | None) -> Response.Status:
    status = Response.Status(code=code)
    window = None if decision is None or decision.degraded else _tightest(decision.windows)
    if window is not None:
        status.current_limit.requests_per_unit = min(window.limit, MOST)
        status.current_limit.unit = _UNITS.get(window.period, Response.Limit.NONE)
        status.current_limit.name = window.rule or ""
        status.limit_remaining = min(window.remaining, MOST)
        status.duration_until_reset.FromMilliseconds(round(min(window.reset_after, 366 * 86_400) * 1000))
    return status


def _tightest(windows: Iterable[Window]) -> Window | None:
    return min(windows, key=lambda each: (each.remaining, -each.reset_after), default=None)
