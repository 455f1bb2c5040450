"""What the attacks on real servers are made on: ``uvicorn tests.attacks.served:app``, and a WSGI twin."""

from __future__ import annotations

import asyncio
from typing import Any

from limitgate import LimitGate, Rule

RULES = [
    Rule("bodies", "3/day", path="/bodies/**", key=["ip"]),
    Rule("chat", "5/day", path="/chat", key=["ip"]),
    Rule("pings", "3/day", path="/pings/**", key=["ip"]),
    Rule("rest", "100/day", path="/rest/**"),
]


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Reads a body to its end and answers; accepts sockets; /tasks says how many tasks there are."""
    if scope["type"] == "lifespan":
        return
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        return
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        more = message.get("more_body", False)
    body = str(len(asyncio.all_tasks())).encode() if scope["path"] == "/tasks" else b"hello"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def hello_wsgi(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """Reads a body to its end and answers."""
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    start_response("200 OK", [("Content-Length", "5")])
    return [b"hello"]


EVERYTHING = [Rule("everything", "1/day", key=["ip"])]

app = LimitGate(hello, rules=RULES)
strict = LimitGate(hello, rules=EVERYTHING)
