"""Refusals in the header fields of a 403, and answers that are remembered."""

from __future__ import annotations

import asyncio
from typing import Any

from limitgate.forward.nginx import KEPT_S, LONGEST_BODY, MOST_KEPT, MOST_REPEATS, Conversion, Repeats, key_of


def converted(status: int, headers: list[tuple[bytes, bytes]], *bodies: bytes) -> list[dict[str, Any]]:
    """What nginx receives."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer() -> None:
        conversion = Conversion(send)
        await conversion.send({"type": "http.response.start", "status": status, "headers": headers})
        for place, body in enumerate(bodies, 1):
            more = place < len(bodies)
            await conversion.send({"type": "http.response.body", "body": body, "more_body": more})
        assert conversion.sent == sent

    asyncio.run(answer())
    return sent


def test_an_admission_stays_as_it_is() -> None:
    start, body = converted(204, [(b"x-a", b"1")], b"")
    assert (start["status"], start["headers"], body["body"]) == (204, [(b"x-a", b"1")], b"")


def test_a_refusal_is_a_403() -> None:
    headers = [(b"Content-Type", b"text/html"), (b"content-length", b"9"), (b"retry-after", b"3")]
    start, body = converted(429, headers, b"one\r\n two\x00", b"\tthree ")
    assert (start["status"], body["body"]) == (403, b"")
    assert start["headers"] == [
        (b"retry-after", b"3"),
        (b"x-limitgate-status", b"429"),
        (b"x-limitgate-body", b"one two three"),
        (b"content-length", b"0"),
    ]


def test_a_long_body_is_left_out() -> None:
    """Nginx would fail open on a header that is too long."""
    for bodies in ([b"a" * (LONGEST_BODY + 1)], [b"a" * LONGEST_BODY, b"b", b"c" * LONGEST_BODY], [b" \n "], [b""]):
        start, _ = converted(503, [], *bodies)
        assert start["headers"] == [(b"x-limitgate-status", b"503"), (b"content-length", b"0")]


def lines(**changed: str) -> list[tuple[bytes, bytes]]:
    """The header of a subrequest."""
    same = {"x-request-id": "abc", "x-original-method": "GET", "x-original-uri": "/a", "x-forwarded-for": "192.0.2.1"}
    return [(name.encode(), value.encode()) for name, value in {**same, **changed}.items()]


def test_what_makes_a_request_the_same() -> None:
    key = key_of(lines(), "127.0.0.1")
    assert key is not None
    assert key == key_of([*lines(accept="x"), (b"x-other", b"y")], "127.0.0.1")
    for name in ("x-request-id", "x-original-method", "x-original-uri", "x-forwarded-for"):
        assert key_of(lines(**{name: "other"}), "127.0.0.1") != key
        assert key_of([*lines(), (name.encode(), b"again")], "127.0.0.1") != key
    assert key_of(lines(), None) != key
    for value in ("", "a" * 129):
        assert key_of(lines(**{"x-request-id": value}), None) is None


def test_an_answer_is_kept_for_five_seconds() -> None:
    now = 0.0
    repeats = Repeats(lambda: now)
    repeats.keep((b"a",), [{"type": "x"}])
    now = KEPT_S
    assert repeats.find((b"a",)) == [{"type": "x"}]
    assert repeats.find((b"b",)) is None
    now += 0.001
    assert repeats.find((b"a",)) is None
    repeats.keep((b"b",), [])
    assert len(repeats) == 1


def test_an_id_is_worth_few_requests() -> None:
    """A client may choose its id, if nginx isn't told to set it."""
    repeats = Repeats(lambda: 0.0)
    repeats.keep((b"a",), [])
    assert [repeats.find((b"a",)) for _ in range(MOST_REPEATS + 1)] == [[]] * MOST_REPEATS + [None]


def test_few_answers_are_kept() -> None:
    repeats = Repeats(lambda: 0.0)
    for number in range(MOST_KEPT + 10):
        repeats.keep((b"%d" % number,), [])
    assert len(repeats) == MOST_KEPT
    assert repeats.find((b"9",)) is None
    assert repeats.find((b"10",)) == []
