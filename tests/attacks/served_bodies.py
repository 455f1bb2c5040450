"""An application that echoes bodies behind rules that read them: ``uvicorn tests.attacks.served_bodies:app``."""

from __future__ import annotations

from typing import Any

from limitgate import LimitGate, LimitGateWSGI, Rule
from limitgate.http import body

body.LONGEST_READ_S = 1.0
RULES = [Rule("users", "3/day", key=["json:/user"], path="/users"), Rule("rest", "9000/day", path="/rest")]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body that it receives."""
    if scope["type"] == "lifespan":
        return
    data, more = b"", True
    while more:
        message = await receive()
        data, more = data + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(data))]})
    await send({"type": "http.response.body", "body": data})


def echo_wsgi(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """The same under WSGI."""
    data = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or -1))
    start_response("200 OK", [("Content-Length", str(len(data)))])
    return [data]


app = LimitGate(echo, rules=RULES)
wsgi_app = LimitGateWSGI(echo_wsgi, rules=RULES)
