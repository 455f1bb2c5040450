"""`ForwardGate`, the ASGI application that answers the subrequests of proxies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Unpack

from limitgate.errors import ConfigError, called_as
from limitgate.exchange.application import Message, Receive, Send
from limitgate.exchange.base import OUTCOME, REFUSAL_ID
from limitgate.forward.dialects import (
    ANY_METHOD,
    ENVOY,
    FORWARDED_FOR,
    NGINX,
    Dialect,
    UndescribedError,
    as_itself,
    declared,
    described,
)
from limitgate.forward.nginx import STATUS, Conversion, Repeats, key_of
from limitgate.gate.lifecycle.build import ASGIApp, ASGIOptions
from limitgate.http.client_ip import TrustedProxies
from limitgate.http.rate_fields import RawFields
from limitgate.http.request import ASGIRequest, Scope
from limitgate.http.response import Refusal, bad_request
from limitgate.limits.decision import Decision
from limitgate.messages.diagnostics import Diagnosis, Once, OncePerValue
from limitgate.middleware import LimitGate
from limitgate.process.clock import monotonic
from limitgate.routes import NoRoutes, Routes
from limitgate.rules.rule import Rule, RuleSet
from limitgate.rules.settings import GateSettings

HEALTH = "/healthz"
_FORWARDED_FOR = FORWARDED_FOR.encode()
_REMOTE_ADDRESS = "the entry remote_address"
"""The same in a gRPC call."""
_OF_CONFIGURATION = (Diagnosis.DISAGREEING, Diagnosis.NO_METHOD, Diagnosis.NO_CLIENT, Diagnosis.NO_URI)
_DENIAL = "websocket.http.response"


class Decided(NamedTuple):
    refusal: Refusal | None
    headers: RawFields
    decision: Decision | None


class ForwardGate:
    """ASGI application for nginx ``auth_request``, Caddy, Traefik, Envoy's HTTP ``ext_authz`` and HAProxy.

    ``ForwardGate(rules="config/", store="redis://localhost:6379/0", trusted_proxies=["10.0.0.7"])``. `Settings` documents the
    options. The first segment of a subrequest's path is ``/nginx``, ``/caddy``, ``/traefik``, ``/envoy`` or ``/haproxy``. Only
    peers in ``trusted_proxies`` may describe requests. ``/healthz`` answers 200 without a store call.

    Raises `ConfigError` for invalid options, and for rules that need a response or body: ``charge_if``, ``concurrency``,
    ``adaptive``, ``max_delay``, ``body`` and ``per: message``.
    """

    @called_as('ForwardGate(rules="config/", store="redis://..."): options have names')
    def __init__(self, **options: Unpack[ASGIOptions]) -> None:
        settings = GateSettings(**options)
        if settings.enabled and settings.forwarded_header.lower() != FORWARDED_FOR:
            raise ConfigError(
                f"forwarded_header is {settings.forwarded_header!r:.80}, which a proxy may pass on from its clients, expected "
                f"{FORWARDED_FOR}, which every proxy sets"
            )
        self.reports_to_prometheus: bool = "prometheus" in settings.observers
        self.api_key_header: str = settings.api_key_header.lower()
        self._proxies = TrustedProxies(settings.trusted_proxies, FORWARDED_FOR)
        self._decides = DescribedGate(_admit, **options)
        self._repeats = Repeats(monotonic)
        self._untrusted = Once(Diagnosis.UNTRUSTED_FORWARDING)
        self._mistaken = {each: OncePerValue(each) for each in _OF_CONFIGURATION}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one subrequest."""
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._answer_handshake(scope, receive, send)
        else:
            await self._decides(scope, receive, send)

    async def decide(self, scope: Scope, cost: int | None = None) -> Decided:
        """Decide about a described request. ``cost`` replaces the costs of rules."""
        gate = self._decides.gate
        if gate is None:
            return Decided(None, [], None)
        if self._proxies.trust(_peer(scope)):
            self._note_missing(scope, "gRPC", _REMOTE_ADDRESS, "the entry method")
        elif _names_client(scope):
            self._untrusted.log(_REMOTE_ADDRESS)
            scope = {**scope, "headers": [line for line in scope["headers"] if line[0] != _FORWARDED_FOR]}
        request = ASGIRequest(scope)
        request.cost = cost
        admission = await gate.acheck(request)
        refusal, fields = admission.refusal, admission.raw_fields()
        if refusal is None:
            admission.begun(200)
        if admission.end():
            await gate.refunds.asettle(admission)
        return Decided(refusal, [*(refusal.raw if refusal else ()), *fields], admission.decision)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].removeprefix(scope.get("root_path", "")) == HEALTH:
            await _send(send, 200, _HEALTHY, b"ok\n")
            return
        dialect, rest = declared(scope)
        if dialect is not NGINX:
            await self._decide(scope, dialect, rest, receive, refusing(send) if dialect is ENVOY else send)
            return
        key = key_of(scope["headers"], _peer(scope)) if self._proxies.trust(_peer(scope)) else None
        known = None if key is None else self._repeats.find(key)
        if known is not None:
            for message in known:
                await send({**message})
            return
        converted = Conversion(send)
        await self._decide(scope, dialect, rest, receive, converted.send)
        if key is not None:
            self._repeats.keep(key, converted.sent)

    async def _decide(self, scope: Scope, dialect: Dialect, rest: bytes, receive: Receive, send: Send) -> None:
        if self._proxies.trust(_peer(scope)):
            try:
                request = described(scope, dialect, rest)
            except UndescribedError as error:
                if error.diagnosis is not None:
                    self._mistaken[error.diagnosis].log(error.values, *error.values)
                refusal = bad_request(error.detail)
                await _send(send, refusal.status, refusal.raw, refusal.body)
                return
            self._note_missing(request, dialect.place, FORWARDED_FOR, " or ".join([name.decode() for name in dialect.methods]))
        else:
            request = as_itself(scope)
            if (told_by := _told_by(scope, dialect)) is not None:
                self._untrusted.log(told_by)
        await self._decides(request, receive, send)
        # For access logs around this application.
        for name in (OUTCOME, REFUSAL_ID):
            if name in request:
                scope[name] = request[name]

    def _note_missing(self, request: Scope, place: str, client: str, method: str) -> None:
        if not _names_client(request):
            self._mistaken[Diagnosis.NO_CLIENT].log(place, place, client)
        if request["method"] == ANY_METHOD:
            self._mistaken[Diagnosis.NO_METHOD].log(place, place, method)

    async def _answer_handshake(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a subrequest that the server takes for a WebSocket handshake, because of its headers."""
        await receive()
        if _DENIAL not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": 1008, "reason": "expected a subrequest without Upgrade"})
            return

        async def answer(message: Message) -> None:
            await send({**message, "type": message["type"].replace("http.response", _DENIAL)})

        await self._answer({**scope, "type": "http", "method": "GET"}, receive, answer)


class DescribedGate(LimitGate):
    NAME: ClassVar[str] = "ForwardGate"
    PUT_AROUND: ClassVar[str] = "app = ForwardGate(rules=...) in the module that the server imports"

    def routes_of(self, app: ASGIApp) -> Routes:
        return _DescribedRoutes()


class _DescribedRoutes(NoRoutes):
    """Knows no routes, so ``path`` in a key is the rule's pattern."""

    def check(self, rules: RuleSet) -> None:
        """Raise `ConfigError` for rules that need a response, a body or messages."""
        every = {id(rule): rule for of_tier in rules.tiers.values() for rule in of_tier}.values()
        mistakes = [mistake for rule in every for mistake in _mistakes(rule)]
        if mistakes:
            raise ConfigError.first_of(mistakes)


def _mistakes(rule: Rule) -> Iterator[ConfigError]:
    needed = {
        "charge_if": rule.charge_if is not None,
        "concurrency": any(bucket.has_slots for bucket in rule.buckets),
        "adaptive": rule.adaptive is not None,
        "max_delay": rule.max_delay is not None,
        "body": rule.reads_body,
        "per": rule.per == "message",
    }
    for option in (name for name, is_given in needed.items() if is_given):
        reason = f"needs {_NEEDED.get(option, 'the response')}, which doesn't pass through this gate; {_EXPECTED}"
        yield ConfigError.at((option,), reason, f"rule {rule.name!r}")


_NEEDED = {"body": "the request's body", "per": "its messages"}
_EXPECTED = "expected it in the rules of the application, or no such rule"


_HEALTHY = [(b"content-type", b"text/plain"), (b"content-length", b"3"), (b"cache-control", b"no-store")]


def refusing(send: Send) -> Send:
    """Send a 5xx as 403 with the real status in a header: Envoy may fail open on a 5xx."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 500:
            headers = [*message["headers"], (STATUS, str(message["status"]).encode())]
            message = {**message, "status": 403, "headers": headers}
        await send(message)

    return sending


async def _admit(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})
        return
    await _send(send, 200, [(b"content-length", b"0")], b"")


async def _send(send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*headers]})
    await send({"type": "http.response.body", "body": body})


def _peer(scope: Scope) -> str | None:
    client = scope.get("client")
    return client[0] if client else None


def _names_client(scope: Scope) -> bool:
    return any(name == _FORWARDED_FOR for name, _ in scope["headers"])


def _told_by(scope: Scope, dialect: Dialect) -> str | None:
    describing = (*dialect.uris, *dialect.methods, _FORWARDED_FOR)
    place = f"the path {dialect.place}" if dialect.name else None
    return next((name.decode() for name, _ in scope["headers"] if name in describing), place)
