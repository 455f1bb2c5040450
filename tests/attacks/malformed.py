"""Requests that are broken, huge or contradictory: the answer is an answer, and the bucket is the client's own."""

from __future__ import annotations

from tests.attacks.world import (
    ATTACKER,
    PROXY,
    TRUSTED,
    VICTIM,
    Ask,
    Outcome,
    attack,
    one_bucket,
)

HUGE = 100_000
LINES: list[list[tuple[str, str]]] = [
    [("X-API-Key", "x" * HUGE)],
    [("X-API-Key", "\xff" * HUGE)],
    [("X-API-Key", "\x00" * 100)],
    [("X-Forwarded-For", "x" * HUGE)],
    [("X-Forwarded-For", "," * HUGE)],
    [("X-Forwarded-For", ("10.0.0.1," * (HUGE // 9)))],
    [("Forwarded", '"' * HUGE)],
    [("Forwarded", "for=" * (HUGE // 4))],
    [("Forwarded", "\\" * HUGE)],
    [("Authorization", "Bearer " + "x" * HUGE)],
    [("Authorization", "Bearer")],
    [("Authorization", "Bearer ")],
    [("Authorization", "bearer\tx")],
    [("Authorization", " " * HUGE)],
    [("Cookie", "a=b;" * (HUGE // 4))],
    [("Host", "x" * HUGE)],
    [("Host", ":" * HUGE)],
    [("Host", "[" * HUGE)],
    [("Host", "\xff\xfe")],
    [("Host", "")],
    [("Host", "a"), ("Host", "b")],
    [("", "x")],
    [("", "")],
    [(" ", "x")],
    [(":authority", "evil.example")],
    [("\xff", "\xff")],
    [("\x00", "\x00")],
    [("X\r\nY", "a\r\nb: c")],
    [("x" * HUGE, "x")],
    [(f"X-{number}", "v") for number in range(900)],
    [("X-Same", "v")] * 900,
    [("X-API-Key", str(number)) for number in range(900)],
    [("X-Forwarded-For", VICTIM)] * 900,
    [("Host", f"{number}.example") for number in range(900)],
    [("Content-Length", "1"), ("Content-Length", "2")],
    [("Content-Length", "-1")],
    [("Content-Length", "x" * 5000)],
    [("Transfer-Encoding", "chunked"), ("Content-Length", "5")],
    [("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "identity")],
    [("Content-Type", "x" * HUGE)],
    [("Origin", "x")],
    [("Access-Control-Request-Method", "GET")],
    [("Origin", "https://evil.example"), ("Access-Control-Request-Method", "GET")],
    [("Upgrade", "websocket"), ("Connection", "upgrade")],
    [("X-HTTP-Method-Override", "OPTIONS")],
    [("X-Original-URL", "/healthz"), ("X-Rewrite-URL", "/healthz")],
    [("Expect", "100-continue")],
    [("limitgate", "1"), ("X-LimitGate", "off"), ("X-RateLimit-Remaining", "1000")],
]
"""Header lines that break a parser somewhere, or that have switched some limiter off."""

PATHS = [
    "",
    "*",
    "/" * HUGE,
    "/.." * (HUGE // 3),
    "/;" * (HUGE // 2),
    "/a" * (HUGE // 2),
    "/" + "%00" * 1000,
    "/" + "%ff" * 1000,
    "/" + "%0a" * 1000,
    "/%ed%a0%80",
    "/%",
    "/%zz",
    "/?" + "a=b&" * (HUGE // 4),
    "/?" + "=" * HUGE,
    "/?%ff%00",
    "/items/" + "9" * 5000,
    "/" + "\\" * 100,
    "http://" + "x" * 5000,
]


@attack("broken, huge and repeated headers")
def broken_headers() -> Outcome:
    """Whatever else a client sends, its address is its bucket, and nothing fails."""
    victims = [Ask(peer=VICTIM), Ask(peer=None)]
    outcome = one_bucket(Ask(), [Ask(headers) for headers in LINES], victims)
    outcome += one_bucket(Ask(), [Ask(headers) for headers in LINES], victims, trusted_proxies=("10.0.0.0/8",))
    appended = [("X-Forwarded-For", ATTACKER)]
    relayed = [Ask([*headers, *appended], PROXY) for headers in LINES]
    return outcome + one_bucket(Ask(appended, PROXY), relayed, victims, trusted_proxies=TRUSTED)


@attack("broken and huge paths")
def broken_paths() -> Outcome:
    """Whatever path a client asks for, a rule for all paths counts it."""
    return one_bucket(Ask(), [Ask(path=path) for path in PATHS], [Ask(peer=VICTIM)])
