"""Builds the ASGI scope or WSGI environ of a request that a command or the page describes."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

Lines = Iterable[tuple[str, str]]


def asgi_scope(method: str, target: str, peer: str | None, headers: Lines, user: str | None = None) -> dict[str, Any]:
    """``target`` is the raw path, with an optional query."""
    sent, _, query = target.partition("?")
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": unquote(sent),
        "raw_path": sent.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(name.lower().encode("latin-1", "replace"), value.encode()) for name, value in headers],
        "client": None if peer is None else (peer, 50_000),
        "server": ("localhost", 80),
    }
    return scope if user is None else {**scope, "user": user}


def wsgi_environ(method: str, target: str, peer: str | None, headers: Lines, user: str | None = None) -> dict[str, Any]:
    sent, _, query = target.partition("?")
    environ: dict[str, Any] = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(sent).decode("latin-1"),
        "QUERY_STRING": _native(query),
        "REMOTE_ADDR": peer or "",
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "wsgi.url_scheme": "http",
        "wsgi.input": BytesIO(),
    }
    for name, value in headers:
        variable = name.upper().replace("-", "_")
        variable = variable if variable in {"CONTENT_TYPE", "CONTENT_LENGTH"} else f"HTTP_{variable}"
        environ[variable] = f"{environ[variable]}, {_native(value)}" if variable in environ else _native(value)
    return environ if user is None else {**environ, "REMOTE_USER": user}


def _native(text: str) -> str:
    return text.encode().decode("latin-1")
