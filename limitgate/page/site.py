"""Options, routes and responses of both pages. No I/O: store calls are flows."""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from secrets import token_urlsafe
from typing import Any, NamedTuple

from limitgate.errors import ConfigError, StoreError, check_switches
from limitgate.exchange.base import EXCHANGE, Exchange
from limitgate.fleet.reader import FleetReader, reader_of
from limitgate.gate.flow import ConfigFlow
from limitgate.gate.gate import Gate
from limitgate.http.request import Request
from limitgate.limits.limit import Duration, store_timeout
from limitgate.messages.text import Names, printable, shortened
from limitgate.page import actions, document, explaining
from limitgate.page.screen import as_bytes, screen, shown_figures
from limitgate.rules.files import rules_of
from limitgate.rules.options import check_takes_request
from limitgate.rules.settings import GateSettings, Settings
from limitgate.stores import MemoryStore, Opener, opened, url_of
from limitgate.stores.redis.url import shown

Guard = Callable[[Request], Any]
"""Returns the viewer's name for a `limitgate.Request`, or None to refuse; may be async under ASGI."""
Headers = list[tuple[str, str]]
MOST_BODY = 4096
LONGEST_NAME = 128
_COOKIE = "limitgate_page"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
_SAFE: Headers = [
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
]
_CLOSED: Headers = [*_SAFE, ("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")]
_READS = frozenset({"", "events", "figures", "explain"})


class Answer(NamedTuple):
    status: int
    headers: Headers
    body: bytes

    @property
    def line(self) -> str:
        return f"{self.status} {HTTPStatus(self.status).phrase}"


def answer(status: int, kind: str, body: bytes, *more: tuple[str, str], safe: Headers = _CLOSED) -> Answer:
    """Return a response that is neither stored nor framed."""
    return Answer(status, [("Content-Type", kind), ("Content-Length", str(len(body))), *safe, *more], body)


def error(status: int, text: str, *more: tuple[str, str]) -> Answer:
    return answer(status, "application/json", as_bytes({"error": text}), *more)


NOT_ADMITTED = "you may not look at this page"
STREAM: Headers = [("Content-Type", "text/event-stream"), *_CLOSED, ("X-Accel-Buffering", "no")]


class Site:
    def __init__(
        self,
        store: Any,
        guard: Guard | None,
        names: Names,
        *,
        open_store: Opener[Any],
        streams: bool,
        actions: bool,
        rules: Any,
        key_prefix: str | None,
        secret: str | None,
        timeout: Duration,
    ) -> None:
        if not callable(guard):
            raise ConfigError(
                f"guard is {guard!r:.80}, expected a callable (request) -> name of the viewer, or None to refuse; the page "
                "shows who uses the service"
            )
        try:
            check_takes_request(guard)
        except ConfigError as wrong:
            raise ConfigError(f"guard: {wrong}") from None
        if names not in ("masked", "full", "off"):
            raise ConfigError(f"names is {names!r:.80}, expected masked, full or off")
        check_switches(actions=actions)
        given = {"key_prefix": key_prefix, "secret": secret}
        self._given = {name: value for name, value in given.items() if value is not None}
        self.settings: Settings = GateSettings(**self._given)
        self._described = rules if isinstance(rules, explaining.Described) else None
        if self._described is not None:
            self._follow(self._described.settings)
        self.guard = guard
        self.names: Names = names
        self.has_actions = actions
        self.streams = streams
        self.timeout: float = store_timeout(timeout)
        prefix = self.settings.key_prefix
        self.owns_store: bool = isinstance(store, str)
        self.store_shown: str = _described(store)
        self.store: Any = opened(store, open_store, prefix)
        try:
            self.reader: FleetReader = reader_of(self.store, prefix, timeout=self.timeout)
        except TypeError as problem:
            raise ConfigError(f"store: {problem}") from None
        self._rules = None if rules is None else rules_of(self._described.rules if self._described else rules)
        self._has_gate = False

    def _follow(self, settings: Settings) -> None:
        own = {name: getattr(self.settings, name) for name in (*self._given, "rules")}
        self.settings = settings.model_copy(update=own)

    def named(self, who: Any) -> str | None:
        """Return the viewer's name for display; None to refuse."""
        if who is None or who == "":
            return None
        if not isinstance(who, str):
            raise TypeError(f"guard returned {who!r:.80}, expected the name of the viewer, or None to refuse")
        return shortened(printable(who), LONGEST_NAME)

    def prepare(self, request: Request) -> str:
        """Return the route below the mount point. Sets the client that the gate found."""
        exchange = _exchange(request)
        request.resolve_client = (lambda _: exchange.open_admission().request.client) if exchange else (lambda this: this.peer)
        if exchange is not None and not self._has_gate:
            if (settings := exchange.gate.rules.settings) is not None:
                self._follow(settings)
                self.reader = reader_of(self.store, self.settings.key_prefix, timeout=self.timeout)
            self._has_gate = True
        return request.path.strip("/")

    def at_once(self, request: Request, route: str, who: str) -> Answer | None:
        """None for routes that need the store."""
        refused = self._refused(request, route)
        if refused is not None or route:
            return refused
        return self._document(request, who)

    def _refused(self, request: Request, route: str) -> Answer | None:
        if route not in _READS and route not in actions.ACTIONS:
            return error(404, "there is no such page")
        allowed = ("POST",) if route in actions.ACTIONS else ("GET", "HEAD")
        if request.sent_method not in allowed:
            return error(405, f"expected {' or '.join(allowed)}", ("Allow", ", ".join(allowed)))
        return self._refused_action(request) if route in actions.ACTIONS else None

    def _refused_action(self, request: Request) -> Answer | None:
        if not self.has_actions:
            return error(403, "this page is read-only, expected actions=True")
        why = actions.not_from_here(request)
        token = request.headers.get(actions.TOKEN_HEADER, "")
        if why is None and not (_TOKEN.fullmatch(token) and hmac.compare_digest(token, _cookie(request))):
            why = "the token of the page is missing or old; reload the page"
        return None if why is None else error(403, why)

    def _document(self, request: Request, who: str) -> Answer:
        nonce = token_urlsafe(16)
        title = f"{self.store_shown}, prefix {self.settings.key_prefix}"
        facts: dict[str, Any] = {"streams": self.streams, "actions": self.has_actions, "who": who}
        facts |= {"store": self.store_shown, "prefix": self.settings.key_prefix}
        more = [("Content-Security-Policy", document.policy(nonce))]
        if self.has_actions:
            token = _cookie(request)
            facts["token"] = token = token if _TOKEN.fullmatch(token) else token_urlsafe(32)
            secure = "; Secure" if _is_https(request) else ""
            more.append(("Set-Cookie", f"{_COOKIE}={token}; HttpOnly; SameSite=Strict{secure}"))
        return answer(200, "text/html; charset=utf-8", document.document(nonce, title, facts), *more, safe=_SAFE)

    def figures(self, read: Mapping[str, Any], request: Request) -> Answer:
        is_screen = "screen" in request.query
        return answer(200, "application/json", self.on_screen(read) if is_screen else as_bytes(shown_figures(read, self.names)))

    def on_screen(self, read: Mapping[str, Any]) -> bytes:
        return as_bytes(screen(shown_figures(read, self.names)))

    def answering(self, request: Request, route: str, who: str, body: bytes, read: Mapping[str, Any]) -> ConfigFlow[Answer]:
        """Explain or act. Errors become responses."""
        try:
            if route == "explain":
                found = yield from explaining.explaining(self._known(request), request.query)
            else:
                found = yield from actions.acting(read, route, _json(body), who, self.timeout)
        except StoreError as problem:
            return error(503, str(problem))
        except (ConfigError, ValueError) as problem:
            return error(400, str(problem))
        return answer(200, "application/json", as_bytes(found))

    def _known(self, request: Request) -> explaining.Known:
        exchange = _exchange(request)
        gate: Gate | None = None if exchange is None else exchange.gate
        rules = self._rules
        if rules is None and gate is not None:
            rules = gate.rules.rule_set
        if rules is None and self.settings.rules:
            rules = self._rules = rules_of(self.settings.rules)
        is_wsgi = request.environ is not None
        return explaining.Known(rules, self.settings, self.store, self.timeout, gate, self._described, is_wsgi=is_wsgi)


def _described(store: Any) -> str:
    if isinstance(store, MemoryStore):
        return "memory://"
    return shown(url_of(store) or store)


def _exchange(request: Request) -> Exchange | None:
    place: Any = request.scope if request.environ is None else request.environ
    found = place.get(EXCHANGE)
    return found if isinstance(found, Exchange) else None


def _cookie(request: Request) -> str:
    for pair in request.headers.get("cookie", "").split(";"):
        name, _, value = pair.strip().partition("=")
        if name == _COOKIE:
            return value
    return ""


def _is_https(request: Request) -> bool:
    if request.scope is not None:
        return bool(request.scope.get("scheme") == "https")
    return bool((request.environ or {}).get("wsgi.url_scheme") == "https")


def _json(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError("the body is not a JSON object, expected one")
    return found
