"""Responses through nginx ``auth_request``, which turns statuses except 2xx, 401 and 403 into 500."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from limitgate.exchange.application import Message, Send

STATUS, BODY = b"x-limitgate-status", b"x-limitgate-body"
LONGEST_BODY = 4096
"""nginx fails open if headers exceed ``proxy_buffer_size``."""
_UNSENDABLE = re.compile(rb"[\x00-\x20\x7f]+")
_OF_BODY = frozenset({b"content-length", b"content-type", b"transfer-encoding"})

KEPT_S = 5.0
MOST_KEPT = 16_384
MOST_REPEATS = 10
"""nginx redirects internally at most ten times."""
LONGEST_ID = 128

Key = tuple[bytes, ...]


class Conversion:
    """Sends a refusal as 403, with status and body in headers. Keeps the messages."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._refused: Message | None = None
        self._body = b""
        self.sent: list[Message] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not 200 <= message["status"] < 300:
            self._refused = message
        elif self._refused is not None and message["type"] == "http.response.body":
            if len(self._body) <= LONGEST_BODY:
                self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._pass(_converted(self._refused, self._body))
                await self._pass({"type": "http.response.body", "body": b""})
        else:
            await self._pass(message)

    async def _pass(self, message: Message) -> None:
        # A server may change the message.
        self.sent.append({**message})
        await self._send(message)


def _converted(start: Message, body: bytes) -> Message:
    headers = [line for line in start.get("headers", ()) if line[0].lower() not in _OF_BODY]
    headers.append((STATUS, str(start["status"]).encode()))
    if len(body) <= LONGEST_BODY and (line := _UNSENDABLE.sub(b" ", body).strip()):
        headers.append((BODY, line))
    headers.append((b"content-length", b"0"))
    return {**start, "status": 403, "headers": headers}


@dataclass(slots=True)
class _Kept:
    until: float
    messages: list[Message]
    repeats: int = 0


class Repeats:
    """Remembers answers for `KEPT_S` seconds, because nginx asks again after ``index``, ``try_files`` and ``error_page``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()

    def find(self, key: Key) -> list[Message] | None:
        kept = self._kept.get(key)
        if kept is None or kept.until < self._clock() or kept.repeats >= MOST_REPEATS:
            return None
        kept.repeats += 1
        return kept.messages

    def keep(self, key: Key, messages: list[Message]) -> None:
        now, kept = self._clock(), self._kept
        while kept and (len(kept) >= MOST_KEPT or next(iter(kept.values())).until < now):
            kept.popitem(last=False)
        kept.pop(key, None)
        kept[key] = _Kept(now + KEPT_S, messages)

    def __len__(self) -> int:
        return len(self._kept)


def key_of(lines: list[tuple[bytes, bytes]], peer: str | None) -> Key | None:
    """Return id, method, URI and client of a subrequest; None without an id."""
    found: dict[bytes, bytes] = {}
    for name, value in lines:
        if name in _DISTINCT:
            found[name] = found[name] + b", " + value if name in found else value
    of_request = found.get(b"x-request-id", b"")
    if not of_request or len(of_request) > LONGEST_ID:
        return None
    return (*[found.get(name, b"") for name in _DISTINCT], (peer or "").encode())


_DISTINCT = (b"x-request-id", b"x-original-method", b"x-original-uri", b"x-forwarded-for")
