"""`PageWSGI`. Browsers poll, because a stream would occupy a worker."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import isawaitable
from typing import Any

from limitgate.errors import BodyError, called_as
from limitgate.gate.flow import run
from limitgate.http.body import read_input
from limitgate.http.request import WSGIRequest
from limitgate.limits.limit import Duration
from limitgate.messages.text import Names
from limitgate.page.actions import ACTIONS
from limitgate.page.site import MOST_BODY, NOT_ADMITTED, Answer, Guard, Site, error
from limitgate.stores import open_sync_store


class PageWSGI:
    """The live page, a WSGI application, with the options of `Page`; ``guard`` is a plain function.

    Mount it, for example with ``werkzeug.middleware.dispatcher.DispatcherMiddleware``.
    """

    @called_as("PageWSGI(store, guard=...): options have names")
    def __init__(
        self,
        store: Any,
        *,
        guard: Guard | None = None,
        names: Names = "masked",
        actions: bool = False,
        rules: Any = None,
        key_prefix: str | None = None,
        secret: str | None = None,
        timeout: Duration = 2.0,
    ) -> None:
        self._site = Site(
            store,
            guard,
            names,
            open_store=open_sync_store,
            streams=False,
            actions=actions,
            rules=rules,
            key_prefix=key_prefix,
            secret=secret,
            timeout=timeout,
        )

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer one request."""
        request = WSGIRequest(environ)
        found = self._answer(request, environ, self._site.prepare(request))
        start_response(found.line, found.headers)
        return [b"" if request.sent_method == "HEAD" else found.body]

    def _answer(self, request: WSGIRequest, environ: dict[str, Any], route: str) -> Answer:
        site = self._site
        who = site.named(_plain(site.guard(request)))
        if who is None:
            return error(403, NOT_ADMITTED)
        found = site.at_once(request, route, who)
        if found is not None:
            return found
        if route == "figures":
            return site.figures(site.reader.read(), request)
        if route == "events":
            # Tells browsers not to reconnect (HTML, server-sent events).
            return Answer(204, [("Cache-Control", "no-store")], b"")
        try:
            body = read_input(environ, MOST_BODY) if route in ACTIONS else b""
        except BodyError as problem:
            return error(problem.status, str(problem))
        read = site.reader.read() if route in ACTIONS else {}
        found = run(site.store, site.answering(request, route, who, body, read))
        if route in ACTIONS:
            site.reader.expire()
        return found


def _plain(given: Any) -> Any:
    if isawaitable(given):
        getattr(given, "close", bool)()
        raise TypeError("guard is async, expected a plain function under WSGI")
    return given
