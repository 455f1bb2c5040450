"""What a client sends never comes back: not in a header, not in a problem body, not in the name of a policy."""

from __future__ import annotations

import http.client
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from limitgate import Caller, ConfigError, LimitGateWSGI, Rule, limit
from tests.attacks.world import DOORS
from tests.support.doors import PATIENCE, Reply, Site, threaded_wsgi, uvicorn_process

EVIL = "evil4711"
BREAKS = ["\r\n", "\n", "\r", "%0d%0a", "%0a", "\x00", "\x85", "\u2028", '"', "\\", ",", ";", "<script>", "\x1b[31m"]
INJECTED = [f"x{broken}Set-Cookie: {EVIL}=1{broken}{broken}{EVIL}" for broken in BREAKS]
STYLES = ("x-ratelimit", "x-ratelimit-windows", "draft-11")
NAMES = {"everything", "every-part", "login", "a.b_c-1"}
PARTS = ["api_key", "header:x-a", "host", "method", "user", "caller", "path", "ip"]
RULES = [
    Rule("every-part", "3/day", "2/hour", key=PARTS),
    Rule("login", "3/day", path="/login/**", cost=lambda _: 1),
    Rule("a.b_c-1", "3/minute"),
]


def hostile(text: str) -> dict[str, Any]:
    """A request that says the same thing everywhere."""
    sent = text.encode("utf-8").decode("latin-1")
    headers = [(name, sent) for name in ("X-API-Key", "X-A", "Host", "Authorization", "Cookie", "Origin", "User-Agent", sent)]
    return {"path": f"/login/{text.replace('%', '%25')}?{EVIL}", "method": sent, "headers": headers}


def is_clean(reply: Reply) -> None:
    """No line of the response holds a control character or anything of the client's; the policies are those of the rules."""
    for name, value in reply.headers.multi_items():
        assert re.fullmatch(r"[A-Za-z0-9-]+", name)
        assert re.fullmatch(r"[\x20-\x7e]*", value)
        assert EVIL not in name + value
    assert EVIL.encode() not in reply.body
    if reply.status == 429:
        assert set(reply.json()["violated-policies"]) <= NAMES
        assert set(reply.json()) == {"type", "title", "status", "detail", "instance", "violated-policies"}
        assert re.fullmatch(r"urn:limitgate:refusal:[A-Za-z0-9_-]{32}", reply.json()["instance"])
        assert re.fullmatch(r"Too many requests\. Try again in [0-9]+ s\.", reply.json()["detail"])


@pytest.mark.parametrize("text", INJECTED)
@pytest.mark.parametrize("door", DOORS)
def test_nothing_of_a_request_is_in_its_answer(door: type[Site], text: str) -> None:
    """Whether it is admitted or refused, line ends and quotes in any part of a request stay there."""

    def identify(_: Any) -> Caller:
        return Caller(text, text)

    with door(*RULES, headers=STYLES, identify=identify) as site:
        replies = [site.ask(**hostile(text)) for _ in range(5)]
    assert {reply.status for reply in replies} == {200, 429}
    for reply in replies:
        is_clean(reply)


@pytest.mark.parametrize("text", [*INJECTED, "a b", "a,b", 'a"b', "a\n", "\u00e9", "a" * 65, "", " a", "a;b", "a=b", "a:b"])
def test_no_rule_can_have_a_name_that_breaks_a_header(text: str) -> None:
    """A rule's and a decorator's name is made of letters, digits, dots and dashes, or it is a mistake."""
    with pytest.raises(ConfigError):
        Rule(text, "1/day")
    if text:
        with pytest.raises(ConfigError):
            limit("1/day", name=text)(lambda: None)


RAW = [
    b"GET /x%0d%0aSet-Cookie:%20evil4711=1 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /x%0aX-Evil:%20evil4711 HTTP/1.1\r\nHost: evil4711\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: a\r\nX-API-Key: a\r\n evil4711\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: a\r\nX-API-Key: a\rX-Evil: evil4711\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: a\r\nX-API-Key: a\nX-Evil: evil4711\r\n\r\n",
    b"GET http://evil4711/x HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET //evil4711/x HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET x/x HTTP/1.1\r\nHost: a\r\n\r\n",
    b"EVIL4711 /x HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"GET /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 198.51.100.7\r\nX_Forwarded_For: 198.51.100.8\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: a\r\nX-API-Key: one\r\nX-API-Key: two\r\nX_API_Key: three\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: v\r\n" % number for number in range(90)) + b"\r\n",
    b"GET /x HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * 30_000 + b"\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: a\r\nX-A: \xff\xfe\xe9\r\n\r\n",
    b"GET /x\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x00\xff\r\n\r\n",
    b"GET /x\r\n\r\n",
]
"""What real servers are sent; some of it they refuse themselves."""


def exchange(url: str, request: bytes) -> Reply | None:
    """What a server answers to raw bytes; None if it closes the connection instead."""
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        response = http.client.HTTPResponse(connection)
        try:
            response.begin()
        except (http.client.HTTPException, ConnectionError):
            return None
        body = response.read()
    lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.getheaders()]
    return Reply(response.status, http_headers(lines), body)


def http_headers(lines: list[tuple[bytes, bytes]]) -> Any:
    import httpx

    return httpx.Headers(lines)


def _storm(url: str) -> None:
    """Send everything raw twice, to a server on which one request was admitted before; nothing more gets through."""
    first = exchange(url, b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
    assert first is not None
    assert first.status == 200
    for request in RAW * 2:
        reply = exchange(url, request)
        assert reply is None or reply.status != 200, request
        if reply is not None and reply.status == 429:
            is_clean(reply)
            assert json.loads(reply.body)["violated-policies"] == ["everything"]


def test_raw_requests_to_uvicorn(tmp_path: Path) -> None:
    """On a real ASGI server, no raw request gets past a limit that is used up, or anything of its own into the answer."""
    with uvicorn_process("tests.attacks.served:strict", tmp_path, "--no-proxy-headers") as url:
        _storm(url)


def test_raw_requests_to_a_threaded_server() -> None:
    """The same on a real WSGI server."""
    from tests.attacks.served import EVERYTHING, hello_wsgi

    with threaded_wsgi(LimitGateWSGI(hello_wsgi, rules=EVERYTHING)) as url:
        _storm(url)
