"""The verb ``page``."""

from __future__ import annotations

import hmac
from binascii import Error as Base64Error, a2b_base64
from typing import Any

import click

from limitgate.command.applications import RULES
from limitgate.command.listening import extra_for_verb, listen
from limitgate.command.opened import app_option, key_prefix_option, rules_beside, secret_option, store_option, timeout_option
from limitgate.command.output import say
from limitgate.command.service import service
from limitgate.command.stored import MEMORY_STORE, MISSING_STORE, settings_of
from limitgate.http.request import Request
from limitgate.page import Page, this_machine
from limitgate.page.explaining import Described
from limitgate.page.this_machine import is_local_host
from limitgate.stores import url_of
from limitgate.stores.redis.url import scheme_of, shown

_CHALLENGE = [(b"www-authenticate", b'Basic realm="LimitGate", charset="UTF-8"'), (b"cache-control", b"no-store")]
_ENDS_WITHIN_S = 2


@click.command("page")
@store_option
@click.option("--rules", metavar="PATH", envvar="LIMITGATE_RULES", help=f"{RULES}, to explain requests and refusals.")
@app_option
@key_prefix_option
@secret_option
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", default=9380, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on.")
@click.option("--actions", is_flag=True, help="Let the page ban, pardon and reset clients.")
@click.option("--token", metavar="TEXT", envvar="LIMITGATE_PAGE_TOKEN", show_envvar=True, help="Password of the page.")
@click.option(
    "--names", default="masked", show_default=True, type=click.Choice(["masked", "full", "off"]), help="How to show clients."
)
@timeout_option
def verb(
    *,
    rules: str | None,
    app: str | None,
    host: str,
    port: int,
    actions: bool,
    token: str | None,
    names: Any,
    timeout: float,
    **options: Any,
) -> None:
    """Serve a page that shows which clients are refused, by which rules, and the health of all processes of a service.

    Without --token, only browsers on this machine can open the page. With --token, the browser asks for it as the password; the
    journal records the user name with every change. Put TLS in front of the page.

    For example: limitgate page --store redis://localhost --app shop.main:app
    """
    if token is None and not is_local_host(_shown_host(host)):
        raise click.UsageError(f"{host} can be reached by other machines, expected --token, or --host 127.0.0.1")
    if token == "":
        raise click.UsageError("--token is empty, expected a password that is hard to guess")
    with extra_for_verb("page", "uvicorn"):
        import uvicorn
    rules = rules_beside(app, rules)
    asked = service(rules, app, **options) if rules or app else None
    settings = settings_of(options) if asked is None else asked.settings
    store = url_of(settings.store)
    if "store" not in settings.model_fields_set or store is None:
        raise click.UsageError(MISSING_STORE)
    if scheme_of(store) == "memory":
        raise click.UsageError(MEMORY_STORE)
    known = None if asked is None else Described(asked.rules, settings, asked.routes, asked.request, asked.refusers)
    secret = None if settings.secret is None else settings.secret.get_secret_value()
    shared: dict[str, Any] = {"rules": known, "key_prefix": settings.key_prefix, "secret": secret, "timeout": timeout}
    guard = this_machine if token is None else _named
    page: Any = Page(store, guard=guard, names=names, actions=actions, **shared)
    listening = listen(host, port)
    config = uvicorn.Config(
        page if token is None else _Password(page, token),
        access_log=False,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_ENDS_WITHIN_S,
    )
    say(f"the page of {shown(store)} is at http://{_shown_host(host)}:{listening.getsockname()[1]}/ until you press Ctrl-C")
    uvicorn.Server(config).run(sockets=[listening])


def _shown_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Password:
    """Asks for a password by HTTP Basic (RFC 7617). Also accepts a Bearer token."""

    def __init__(self, app: Any, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not self._is_known(scope):
            await send({"type": "http.response.start", "status": 401, "headers": _CHALLENGE})
            await send({"type": "http.response.body", "body": b"expected the token as password"})
            return
        await self._app(scope, receive, send)

    def _is_known(self, scope: Any) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(_login(given)[1], self._token)


def _login(given: bytes) -> tuple[bytes, bytes]:
    scheme, _, rest = given.partition(b" ")
    if scheme.lower() == b"bearer":
        return b"", rest.strip()
    if scheme.lower() != b"basic":
        return b"", b""
    try:
        user, _, password = a2b_base64(rest.strip()).partition(b":")
    except Base64Error:
        return b"", b""
    return user, password


def _named(request: Request) -> str:
    user = _login(request.headers.get("authorization", "").encode("latin-1", "replace"))[0]
    return user.decode("utf-8", "replace") or "a program with the token"
