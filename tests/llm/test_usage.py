"""What responses say that they cost, whole and in events, however the bytes arrive."""

from __future__ import annotations

import gzip
import json
import math
import random
import time
import zlib
from collections.abc import Callable, Iterable
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate.llm.usage import (
    MOST_EXAMINED,
    MOST_USED,
    BodyReader,
    CompressedReader,
    EventReader,
    Reader,
    Usage,
    bounded,
    reader_for,
    usage_in,
)
from tests.support.provider import TOKEN, Act, Provider, _Asked


def usage_of(body: bytes) -> Usage | None:
    """The usage that a JSON response reports."""
    reader = BodyReader()
    reader.feed(body)
    return reader.finish()


# --- one object -------------------------------------------------------------------------------------------------------

REPORTS: list[tuple[str, Any, Usage | None]] = [
    ("chat", {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}, Usage(9, 5)),
    ("chat, details", {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}, Usage(9, 5)),
    ("reasoning in the total", {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 114}, Usage(9, 105)),
    ("a total that is too small", {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 3}, Usage(9, 5)),
    ("Responses", {"input_tokens": 9, "output_tokens": 5, "total_tokens": 14}, Usage(9, 5)),
    ("Responses, cached", {"input_tokens": 9, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 8}}, Usage(9, 5)),
    ("Messages", {"input_tokens": 9, "output_tokens": 5}, Usage(9, 5)),
    (
        "its cache: what is read does not count, what is written does",
        {"input_tokens": 9, "output_tokens": 5, "cache_read_input_tokens": 4000, "cache_creation_input_tokens": 300},
        Usage(309, 5),
    ),
    ("no cache", {"input_tokens": 9, "output_tokens": 5, "cache_creation_input_tokens": None}, Usage(9, 5)),
    ("embeddings", {"prompt_tokens": 9, "total_tokens": 9}, Usage(9, 0)),
    ("embeddings, no total", {"prompt_tokens": 9}, Usage(9, 0)),
    ("nothing", {"prompt_tokens": 0, "completion_tokens": 0}, Usage(0, 0)),
    ("decimals", {"prompt_tokens": 9.0, "completion_tokens": 5e0}, Usage(9, 5)),
    ("no input", {"completion_tokens": 5}, None),
    ("empty", {}, None),
    *[
        (f"{name} {value}", {"prompt_tokens": 9, "completion_tokens": 5, name: value}, None)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        for value in (-1, -1.0, 5.5, True, "5", [5], {}, math.nan, -math.inf)
    ],
    *[(repr(value), value, None) for value in (None, 5, "5", [], [{"prompt_tokens": 9}], True)],
]


@pytest.mark.parametrize(("reported", "usage"), [each[1:] for each in REPORTS], ids=[each[0] for each in REPORTS])
def test_a_report(reported: Any, usage: Usage | None) -> None:
    """As an object, and in a response; one number that is none invalidates the others."""
    assert usage_in(reported) == usage
    assert usage_of(json.dumps({"id": "1", "usage": reported}).encode()) == usage
    assert usage_of(json.dumps({"usage": reported, "choices": []}, indent=1).encode()) == usage
    padding = {"data": [{"embedding": [0.5] * 60_000}]}
    assert usage_of(json.dumps({**padding, "usage": reported}).encode()) == usage
    assert usage_of(json.dumps({"usage": reported, **padding}).encode()) == usage


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"usage"', b'{"usage": {', b'{"usage": {"prompt_tokens": 5', b"\xff", b'{"usage":' * 9999],
)
def test_a_body_without_a_report(body: bytes) -> None:
    assert usage_of(body) is None


def test_text_that_looks_like_a_report() -> None:
    """JSON escapes its quotes, and a schema has no numbers."""
    text = json.dumps({"usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    body = {"usage": {"prompt_tokens": 9, "completion_tokens": 5}, "choices": [{"message": {"content": text}}]}
    assert usage_of(json.dumps(body).encode()) == Usage(9, 5)
    assert usage_of(json.dumps({"text": text, "tools": [{"usage": {"type": "string"}}]}).encode()) is None


@pytest.mark.parametrize(
    ("usage", "into", "out", "expected"),
    [
        (Usage(100, 200), 1, 2, Usage(100, 200)),
        (Usage(101, 200), 1, 2, Usage(10, 200, is_capped=True)),
        (Usage(100, 201), 1, 2, Usage(100, 20, is_capped=True)),
        (Usage(101, 5), 0, 0, Usage(10, 5, is_capped=True)),
        (Usage(10**6, 10**7), None, None, Usage(10**6, 10**7)),
        (Usage(10**6, 5), None, 5, Usage(10**6, 5)),
        (Usage(10**30, 10**7 + 1), None, None, Usage(MOST_USED, MOST_USED, is_capped=True)),
        (Usage(10**30, 0), 10**6, None, Usage(10**7, 0, is_capped=True)),
        (Usage(1, 1, is_capped=True), None, None, Usage(1, 1, is_capped=True)),
    ],
    ids=str,
)
def test_absurd_numbers(usage: Usage, into: int | None, out: int | None, expected: Usage) -> None:
    """Above a hundred times the estimate, ten times it."""
    assert bounded(usage, into, out) == expected


@pytest.mark.parametrize("written", ["9" * 5000, "1e400", "1" + "0" * 400 + ".5"], ids=["digits", "exponent", "decimals"])
def test_numbers_that_python_cannot_hold_are_too_many(written: str) -> None:
    """They don't count as a response without usage."""
    body = f'{{"usage": {{"prompt_tokens": 9, "completion_tokens": {written}}}}}'.encode()
    for reader in (read([body], BodyReader), read([b"data: " + body + b"\n\n"])):
        assert bounded(reader.settle(9), 9, 10) == Usage(9, 100, is_capped=True)


# --- streams ----------------------------------------------------------------------------------------------------------


def events_of(kind: str, tokens: int = 5, **body: Any) -> bytes:
    """A stream of the scripted provider."""
    asked = {"model": "m", "messages": "hello" * 8, "stream": True, "stream_options": {"include_usage": True}, **body}
    return b"".join(_Asked(Provider(), kind, asked, Act(output=tokens)).chunks())


def read(chunks: Iterable[bytes], make: Callable[[], Reader] = EventReader) -> Reader:
    reader = make()
    for chunk in chunks:
        reader.feed(chunk)
    return reader


def data(event: Any, kind: str = "") -> bytes:
    return (f"event: {kind}\n" if kind else "").encode() + b"data: " + json.dumps(event).encode() + b"\n\n"


def other(text: str) -> bytes:
    return data({"type": "tool_result", "x": text})


def delta(text: str) -> bytes:
    return data({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


KINDS = ("chat", "responses", "messages")
REPORT = data({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
def test_a_stream_split_anywhere(kind: str, ends: bytes) -> None:
    """At every byte, also inside a character, with any ends of lines and a byte order mark; and byte by byte."""
    stream = b"\xef\xbb\xbf" + events_of(kind).replace(b"\n", ends).replace(TOKEN.encode(), "\U0001f600".encode())
    for at in range(len(stream) + 1):
        reader = read([stream[:at], stream[at:]])
        assert (reader.finish(), reader.arrived) == (Usage(10, 5), 5)
    reader = read(stream[at : at + 1] for at in range(len(stream)))
    assert (reader.finish(), reader.arrived) == (Usage(10, 5), 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_cut_anywhere(kind: str) -> None:
    """It settles at the text that arrived: never zero, and never more than the provider sent."""
    stream, last = events_of(kind), 0
    assert read([]).settle(7) == Usage(7, 0)
    for at in range(1, len(stream) + 1):
        reader = read([stream[:at]])
        settled = reader.settle(7)
        sent = stream[:at].count(TOKEN.encode() + b'"') if at < stream.find(b'.done"') or kind != "responses" else 5
        # A part of a token has arrived as well.
        assert settled.output in {max(1, sent), max(1, min(sent, 5)), min(sent + 1, 5)}
        assert settled.input in {7, 10}
        assert settled.output >= last
        last = settled.output
    assert settled == Usage(10, 5)


def test_a_body_that_is_cut_costs_its_text() -> None:
    body = b'{"choices": [{"message": {"content": "' + b"abcd" * 1_000
    reader = reader_for("application/json")
    reader.feed(body)
    assert reader.settle(7) == Usage(7, 1_000)


def test_metadata_named_usage_hides_no_report() -> None:
    body = b'{"usage": {"input_tokens": 3, "output_tokens": 4}, "metadata": {"usage": "chat"}}'
    assert usage_of(body) == Usage(3, 4)


def test_several_answers_in_a_stream() -> None:
    reader = read([events_of("chat", n=3)])
    assert (reader.finish(), reader.arrived) == (Usage(10, 15), 15)


def test_a_stream_without_a_report() -> None:
    reader = read([events_of("chat", stream_options=None)])
    assert (reader.finish(), reader.arrived, reader.settle(7)) == (None, 5, Usage(7, 5))


def test_an_incomplete_response() -> None:
    """It was cut by the maximum, and reports."""
    assert read([events_of("responses", max_output_tokens=3)]).finish() == Usage(10, 3)


def test_messages_before_their_end() -> None:
    """The input is known from the first event; the output is what arrived, not what the first event says."""
    stream = events_of("messages")
    begun = stream[: stream.find(b"event: content_block_stop")]
    reader = read([begun])
    assert reader.finish() is None
    assert reader.settle(7) == Usage(10, 5)


def test_cumulative_reports() -> None:
    """The last one counts, and text that came after it."""
    first = data({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}})

    def said(tokens: int, **more: Any) -> bytes:
        return data({"type": "message_delta", "usage": {"output_tokens": tokens, **more}}, "message_delta")

    assert read([first, said(5), said(12)]).finish() == Usage(9, 12)
    assert read([first, said(5), said(12, input_tokens=30, cache_creation_input_tokens=3)]).finish() == Usage(33, 12)
    assert read([first, said(5), said(12, input_tokens=0, cache_creation_input_tokens=None)]).finish() == Usage(9, 12)
    text = data({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x" * 41}})
    assert read([first, text, said(5), text]).finish() == Usage(9, 5 + 11)
    chunks = [
        data({"choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": 9, "completion_tokens": n}}) for n in (1, 2)
    ]
    assert read(chunks).finish() == Usage(9, 2)


def test_reports_elsewhere() -> None:
    """Groq's is in another field; another event lacks the blank line after it."""
    assert read(
        [data({"choices": [], "x_groq": {"id": "1", "usage": {"prompt_tokens": 9, "completion_tokens": 5}}})]
    ).finish() == (Usage(9, 5))
    assert read([REPORT[:-1]]).finish() == read([REPORT[:-2]]).finish() == Usage(9, 5)
    assert read([REPORT[:-4]]).finish() is None


FORMS: list[tuple[str, bytes, bool]] = [
    ("no space", b'data:{"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n', True),
    ("spaces", b'data:   { "usage" : {"prompt_tokens" : 9, "completion_tokens" : 5 } }\n\n', True),
    ("several lines of data", b'data: {"usage":\ndata: {"prompt_tokens":9,\ndata: "completion_tokens":5}}\n\n', True),
    ("other fields", b'id: 1\nevent: x\ndata: {"usage":{"prompt_tokens":9,"completion_tokens":5}}\nretry: 5\n\n', True),
    ("a comment first", b': hello\ndata: {"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n', True),
    (
        "a comment last",
        b'data: {"usage":{"prompt_tokens":9,"completion_tokens":5}}\n: {"usage": {"prompt_tokens": 7}}\n\n',
        True,
    ),
    ("a comment", b': data: {"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n', False),
    ("another field", b'id: {"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n', False),
    ("a name that begins so", b'databytes: {"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n', False),
    ("null", b'data: {"usage": null}\n\n', False),
    ("negative", b'data: {"usage":{"prompt_tokens":-9,"completion_tokens":5}}\n\n', False),
    ("cut", b'data: {"usage":{"prompt_tokens":9,"completion\n\n', False),
    ("deep", b'data: {"usage":' + b'{"a":' * 5000 + b"\n\n", False),
    ("no bytes of UTF-8", b'data: {"usage":{"prompt_tokens":9,"completion_tokens":5,"\xff\xe4":"\xed"}}\n\n', True),
]


@pytest.mark.parametrize(("event", "is_read"), [each[1:] for each in FORMS], ids=[each[0] for each in FORMS])
def test_forms_of_events(event: bytes, *, is_read: bool) -> None:
    """The reader reads the same data as a client, between other events."""
    expected = Usage(9, 5) if is_read else None
    for around in (b"", b": ping\n\n", b"data: [DONE]\n\n", delta("a"), b"\n\n\n"):
        assert read([around, event]).finish() == expected
        assert read([around + event + b"\n"]).finish() == expected


TEXTS: list[tuple[str, Any, str]] = [
    ("chat", {"choices": [{"delta": {"content": "TEXT"}}]}, "plain"),
    ("the first of chat", {"choices": [{"delta": {"role": "assistant", "content": "TEXT", "refusal": None}}]}, "plain"),
    ("reasoning", {"choices": [{"delta": {"content": "", "reasoning_content": "TEXT"}}]}, "plain"),
    ("a refusal", {"choices": [{"delta": {"content": None, "refusal": "TEXT"}}]}, "plain"),
    ("a tool", {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "TEXT"}}]}}]}, "plain"),
    (
        "with probabilities",
        {"choices": [{"delta": {"content": "TEXT"}, "logprobs": {"content": [{"token": "TEXT"}]}}]},
        "plain",
    ),
    ("with the text so far", {"choices": [{"message": {"content": "so far"}, "delta": {"content": "TEXT"}}]}, "plain"),
    ("Responses", {"type": "response.output_text.delta", "delta": "TEXT", "logprobs": []}, "plain"),
    ("Messages", {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "TEXT"}}, "plain"),
    (
        "Messages, a tool",
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "TEXT"}},
        "plain",
    ),
    ("Messages, thinking", {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "TEXT"}}, "plain"),
    ("a signature", {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "TEXT"}}, ""),
    ("the whole at the end", {"type": "response.output_text.done", "text": "TEXT"}, ""),
    ("a block that begins", {"type": "content_block_start", "content_block": {"type": "text", "text": "TEXT"}}, ""),
    ("the end", {"choices": [{"delta": {}, "finish_reason": "stop"}]}, ""),
]


@pytest.mark.parametrize(("event", "counts"), [each[1:] for each in TEXTS], ids=[each[0] for each in TEXTS])
def test_output_text(event: Any, counts: str) -> None:
    """Its bytes are exact in every form, escaped or not."""

    def filled(value: Any, text: str) -> Any:
        if isinstance(value, dict):
            return {name: filled(each, text) for name, each in value.items()}
        return [filled(each, text) for each in value] if isinstance(value, list) else text if value == "TEXT" else value

    texts = ["x" * 40, 'a "quote"\n\\u0041 \t\\', "\u4f60\u597d\U0001f600", '{"delta":{"content":"x"}}', "\x00"]
    for text, escapes, separators in product(texts, [True, False], [(",", ":"), (", ", ": ")]):
        written = json.dumps(filled(event, text), ensure_ascii=escapes, separators=separators).encode()
        reader = read([delta("four"), *[b"data: " + written + b"\n\n"] * 3])
        size = 4 + 3 * len(text.encode()) if counts else 4
        assert reader.arrived == max(1, math.ceil(size / 4)), written


@pytest.mark.parametrize("size", [10, 7_000, 100_000])
@pytest.mark.parametrize(
    "made",
    [
        lambda text: {"object": "text_completion", "choices": [{"index": 0, "text": text, "logprobs": None}]},
        lambda text: {"candidates": [{"content": {"parts": [{"text": text}], "role": "model"}}]},
        lambda text: {"content": text, "stop": False},
    ],
    ids=["completions", "Gemini", "llama.cpp"],
)
def test_a_stream_without_deltas(made: Callable[[str], Any], size: int) -> None:
    """All of its text counts, because it costs more than one token."""
    stream = data(made("x" * size)) * 3 + b"data: [DONE]\n\n"
    assert read([stream]).settle(7) == Usage(7, pytest.approx(3 * size / 4, rel=0.01, abs=1))
    assert read([stream[at : at + 1_000] for at in range(0, len(stream), 1_000)]).arrived == read([stream]).arrived
    assert read([stream + data({"usage": {"prompt_tokens": 9, "completion_tokens": 5}})]).finish() == Usage(9, 5)


def test_anything_that_arrives_costs_a_token() -> None:
    assert read([]).arrived == read([b""]).arrived == 0
    for stream in (b"d", b"\r", b": ping\n\n", data({"type": "ping"})):
        assert read([stream]).arrived == read([stream], BodyReader).arrived == 1
    assert read([gzip.compress(b"")[:9]], lambda: reader_for("application/json", "gzip")).arrived == 1


# --- what is long -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [MOST_EXAMINED - 200, MOST_EXAMINED, MOST_EXAMINED + 1, 1_000_000])
@pytest.mark.parametrize("step", [997, 16_384, 65_536, 10**9])
def test_long_events(size: int, step: int) -> None:
    """The usage after a long text is found in the event's end, the input of a long beginning in its own; nothing is held."""
    text = "x" * size
    over = {
        "type": "response.completed",
        "response": {"output": [{"text": text}], "usage": {"input_tokens": 9, "output_tokens": 5}},
    }
    begun = {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}, "content": text}}
    turned = {"usage": {"prompt_tokens": 9, "completion_tokens": 5}, "choices": text}
    for event, expected in ((over, Usage(9, 5)), (begun, Usage(9, 1)), (turned, Usage(9, 5))):
        stream = delta("four") + data(event) + delta("more") * (event is begun)
        reader = EventReader()
        for at in range(0, len(stream), step):
            reader.feed(stream[at : at + step])
            assert len(reader._pending) <= MOST_EXAMINED
            assert reader._size <= 16_384
            assert len(reader._head) <= MOST_EXAMINED // 2
        assert reader.settle(7) == (expected if event is not begun else Usage(9, 2))
    assert read([delta(text)]).arrived == pytest.approx(size / 4, abs=50)


@pytest.mark.parametrize("make", [EventReader, BodyReader])
def test_10_mb_without_an_end(make: Callable[[], Reader]) -> None:
    """Memory is flat, whatever comes, and so is time."""
    for piece in (b"x", b'"delta":{', b'"usage":{', b"data: ", b'data: {"delta":"', b"\n", b"\r", b"\r\n", b'"content":"\\\\'):
        chunk = (piece * 65_536)[:65_536]
        began = time.process_time()
        reader = read([chunk] * 160, make)
        reader.finish()
        assert time.process_time() - began < 30
        assert sum(len(each) for each in vars(reader).values() if isinstance(each, bytes | bytearray)) <= 2 * MOST_EXAMINED


def test_a_long_body() -> None:
    """The middle of it counts as text where no usage is reported."""
    text = "x" * 500_000
    body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
    assert read([body], BodyReader).settle(7) == Usage(7, pytest.approx(125_000, rel=0.2))
    short = json.dumps({"choices": [{"message": {"content": "x" * 40}}]}).encode()
    assert read([short[:9], short[9:]], BodyReader).settle(7) == Usage(7, 10)


# --- compressed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), (" GZIP ", gzip.compress)])
@pytest.mark.parametrize("step", [1, 100, 10**6])
def test_compressed_responses(encoding: str, pack: Callable[[bytes], bytes], step: int) -> None:
    stream, body = events_of("chat"), json.dumps({"usage": {"prompt_tokens": 10, "completion_tokens": 5}}).encode()
    for content_type, plain in (("text/event-stream; charset=utf-8", stream), ("application/json", body)):
        packed = pack(plain)
        reader = reader_for(content_type, encoding)
        for at in range(0, len(packed), step):
            reader.feed(packed[at : at + step])
        assert (reader.finish(), reader.settle(7)) == (Usage(10, 5), Usage(10, 5))


def bare(content: bytes) -> bytes:
    """Deflate without zlib's header."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


def members(content: bytes) -> bytes:
    return b"".join([gzip.compress(content[at : at + 70]) for at in range(0, len(content), 70)])


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("deflate", bare),
        ("gzip", members),
        ("identity, gzip,", gzip.compress),
        ("deflate, gzip", lambda content: gzip.compress(zlib.compress(content))),
        (", ".join(["gzip"] * 5), lambda content: [content := gzip.compress(content) for _ in range(5)][-1]),
    ],
    ids=["no header", "members", "identity", "two", "five"],
)
@pytest.mark.parametrize("step", [1, 100, 10**6])
def test_other_forms_of_compressed_responses(encoding: str, pack: Callable[[bytes], bytes], step: int) -> None:
    """Of text that shrinks to less than a quarter, they would otherwise cost too little."""
    told, body = events_of("chat"), json.dumps({"choices": [{"message": {"content": "x" * 200_000}}]}).encode()
    for content_type, plain, usage in (("text/event-stream", told, Usage(10, 5)), ("application/json", body, None)):
        packed = pack(plain)
        reader = reader_for(content_type, encoding)
        for at in range(0, len(packed), step):
            reader.feed(packed[at : at + step])
        assert reader.finish() == usage
        assert usage or reader.arrived == pytest.approx(50_000, rel=0.4)


def test_too_many_encodings_are_text() -> None:
    reader = reader_for("application/json", ", ".join(["gzip"] * 6))
    reader.feed(b"x" * 40)
    assert reader.settle(7) == Usage(7, 10)


def test_compressed_responses_that_cannot_be_read() -> None:
    """Their bytes are text, since some have arrived."""
    reader = reader_for("application/json", "br")
    reader.feed(b"x" * 40)
    assert (reader.finish(), reader.arrived, reader.settle(7)) == (None, 10, Usage(7, 10))
    reader = reader_for("text/event-stream", "gzip")
    packed = gzip.compress(events_of("chat"))
    reader.feed(packed[:200])
    reader.feed(b"broken" * 10)
    assert reader.finish() is None
    assert reader.arrived >= 1


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 65_536 + 200, 3 * 65_536, 10**6])
def test_compressed_bodies_lose_nothing(size: int) -> None:
    """Not even the bytes that are still in the decompressor when the last chunk has come."""
    body = b'{"usage": {"prompt_tokens": 10, "completion_tokens": 5}'
    body += b" " * (size - len(body) - 1) + b"}"
    unpacked = 0

    class Watched(BodyReader):
        def feed(self, chunk: bytes) -> None:
            nonlocal unpacked
            unpacked += len(chunk)
            super().feed(chunk)

    reader = CompressedReader(Watched(), "gzip")
    reader.feed(gzip.compress(body)[:-8])  # without its checksum
    assert (unpacked, reader.finish()) == (size, Usage(10, 5))


def test_a_bomb() -> None:
    """It is unpacked a little at a time."""
    packed = gzip.compress(b"x" * 50_000_000)
    largest = 0

    class Watched(BodyReader):
        def feed(self, chunk: bytes) -> None:
            nonlocal largest
            largest = max(largest, len(chunk))
            super().feed(chunk)

    CompressedReader(Watched(), "gzip").feed(packed)
    assert largest <= 65_536


# --- anything ---------------------------------------------------------------------------------------------------------

PIECES = [
    b"data:",
    b"data: ",
    b"\n",
    b"\n\n",
    b"\r",
    b"\r\n",
    b"event: x\n",
    b": c\n",
    b'"usage":',
    b'"usage": {',
    b"}",
    b"{",
    b'"',
    b"\\",
]
PIECES += [
    b'"prompt_tokens":9',
    b'"completion_tokens":5',
    b",",
    b'"delta":"',
    b'"delta":{"content":"',
    b"abc",
    b"\xf0\x9f\x98\x80",
    b"\xff",
]
PIECES += [b'"message_start"', b"[DONE]", b"\xef\xbb\xbf", b"null", b"x" * 40_000, b"\\u4f60"]
streams = st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join) | st.binary(max_size=200)


@given(stream=streams, cuts=st.lists(st.integers(0, 10**5), max_size=6))
def test_chunks_make_no_difference_property(stream: bytes, cuts: list[int]) -> None:
    """Nothing raises, and what is read of a short stream is the same however it is split."""
    at = sorted({0, len(stream), *[cut % (len(stream) + 1) for cut in cuts]})
    chunks = [stream[begin:end] for begin, end in pairwise(at)]
    assert read(chunks, lambda: reader_for("text/event-stream", "gzip")).settle(7).output <= len(stream)
    for make in (EventReader, BodyReader):
        whole, split = read([stream], make), read(chunks, make)
        assert (whole.finish(), whole.arrived, whole.settle(7)) == (split.finish(), split.arrived, split.settle(7))
        usage = whole.finish()
        assert usage is None or (usage.input >= 0 and usage.output >= 0)
        assert 0 <= bounded(whole.settle(7), 7, 7).output <= max(700, len(stream))


USUAL = b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'
UNUSUAL = [
    b": ping\n\n",
    b'data: {"choices":[{"index":1,"delta":{"content":"other"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}},{"index":1,"delta":{"content":"bb"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
    b'data: {"choices":[{"index":0,"delta":{}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"a","role":"assistant"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"a","usage":{"prompt_tokens":9,"completion_tokens":2},"x":"y"}}]}\n\n',
    USUAL % b"one" + USUAL % b"two",
    b"data: [DONE]",
    b'data: {"type":"tool_result","x":"' + b"z" * 2_000 + b'"}\n\n',
]
usual_texts = st.sampled_from([b"abc ", b"", b"x" * 99, "über".encode(), rb"\n", rb"\"", rb"\u00e9", b"}]}", b"data: "])
alike = st.lists(
    st.tuples(st.integers(1, 3) | st.integers(1, 400), usual_texts.map(lambda text: USUAL % text) | st.sampled_from(UNUSUAL)),
    max_size=8,
)


@given(runs=alike, size=st.sampled_from([1_000, 16_384, 40_000]), several=st.sampled_from([1, 20, 128]))
def test_events_that_are_alike_property(runs: list[tuple[int, bytes]], size: int, several: int) -> None:
    """They are read as one by one, in chunks of one event and in others."""
    events = [event for many, event in runs for _ in range(many)]
    stream = b"".join(events)
    chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
    alone, by_events, together = EventReader(), EventReader(), EventReader()
    for event in (stream + b"\n\n").split(b"\n\n"):
        alone._examine(event)
    for at in range(0, len(events), several):
        by_events.feed_all(events[at : at + several])
    for chunk in chunks:
        together.feed(chunk)
    for reader in (by_events, together):
        reader.finish()
        assert (reader._input, reader._output, reader._text) == (alone._input, alone._output, alone._text)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_chunks_of_any_bytes(kind: Any) -> None:
    """Frameworks and servers take them all."""
    reader = EventReader()
    reader.feed_all([kind(USUAL % b"word") for _ in range(100)])
    reader.finish()
    assert reader._text == 400


@pytest.mark.parametrize("kind", KINDS)
def test_text_of_a_long_stream(kind: str) -> None:
    """Texts become longer, events get quotes, and other events come between."""
    rnd, many = random.Random(5), 6_000
    stream = events_of(kind, many, stream_options=None).split(b"\n\n")
    text = 0
    for place, event in enumerate(stream):
        if TOKEN.encode() in event and event.count(b'delta"'):
            word = rnd.choice(["a", "word", "a longer one", '"quoted"\n', "\u00fcber"]) * (1 + 5 * (place > many // 2))
            stream[place] = event.replace(TOKEN.encode(), json.dumps(word, ensure_ascii=False)[1:-1].encode())
            text += len(word.encode())
        if place % 500 == 499:
            stream[place] += b"\n\n: ping"
    reader = read([event + b"\n\n" for event in stream])
    assert reader.arrived == math.ceil(text / 4)


@pytest.mark.parametrize(
    "several",
    [
        [delta("~" * 20), other("z" * 2_000)],
        [*[delta("~" * 20)] * 100, other("z" * 16_000)],
        [*[delta("~" * 20)] * 40, other("z" * 8_000)],
        [*[delta("~")] * 40, *[delta("~" * 9_000)] * 2],
    ],
    ids=["as many others", "a long other", "a shorter other", "texts of two sizes"],
)
@pytest.mark.parametrize("size", [1_000, 16_384, 40_000])
def test_what_comes_between_hides_no_text(several: list[bytes], size: int) -> None:
    """The caller may have asked for other events, for texts of certain sizes, and for no usage."""
    stream = b"".join(several * (1_000_000 // sum(map(len, several))))
    reader = read([stream[at : at + size] for at in range(0, len(stream), size)])
    assert reader.arrived == math.ceil(stream.count(b"~") / 4)


other_lines = st.lists(
    st.sampled_from([": ping", "event: x", "id: 1", "retry: 5", "data", "data:", ': {"usage": {"prompt_tokens": 1}}']),
    max_size=2,
)
shapes = st.sampled_from(
    [
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 70}},
        {"choices": [{"delta": {"content": "four"}}], "usage": None},
        {"choices": [{"delta": {"content": "\u4f60\u597d\n"}}]},
        {"type": "response.output_text.delta", "delta": 'quoted "text"'},
        {"text": '"usage": {"prompt_tokens": 1}, "delta": "text"'},
    ]
)


@st.composite
def events(draw: Any) -> list[str]:
    """The lines of an event: its data in one line or several, between other lines."""
    indent = draw(st.booleans())
    said = json.dumps(draw(shapes), indent=1 if indent else None, ensure_ascii=indent).split("\n")
    data_lines = draw(
        st.sampled_from([[], ["data: [DONE]"], *[[f"{name}{line}" for line in said] for name in ("data: ", "data:")]])
    )
    return [*draw(other_lines), *data_lines, *draw(other_lines), ""]


@given(
    parts=st.lists(events(), max_size=12),
    ends=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(0, 10**5), max_size=6),
)
def test_events_are_those_of_a_client_property(parts: list[list[str]], ends: str, cuts: list[int]) -> None:
    """Usage and text are those in the events that OpenAI's client decodes."""
    from openai._streaming import SSEDecoder  # takes a second to import, which no other test here needs

    stream = "".join(line + ends for part in parts for line in part).encode()
    usage, text, other = None, 0, 0
    for event in SSEDecoder().iter_bytes(iter([stream])):
        try:
            parsed = json.loads(event.data)
        except ValueError:
            continue
        usage = usage_in(parsed.get("usage")) or usage
        deltas = [choice["delta"]["content"] for choice in parsed.get("choices", ())]
        text += len("".join([*deltas, parsed.get("delta", "")]).encode())
        other += len(parsed.get("text", ""))
    at = sorted({0, len(stream), *[cut % (len(stream) + 1) for cut in cuts]})
    reader = read(stream[begin:end] for begin, end in pairwise(at))
    found = reader.finish()
    assert reader.arrived == (max(1, math.ceil((text or other) / 4)) if stream else 0)
    assert (found is None) == (usage is None)
    assert found is None or found.input == 9


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["input_tokens", "x", ""]), inner, max_size=3),
    max_leaves=9,
)
token_names = st.sampled_from(
    ["prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens", "cache_creation_input_tokens"]
)


@given(fields=st.dictionaries(token_names, st.integers(-1, 10**30) | json_values, max_size=6))
def test_any_report_property(fields: dict[str, Any]) -> None:
    """It is a usage of whole numbers or none, the same in an event, a body and as an object."""
    found = usage_in(json.loads(json.dumps(fields)))
    assert found == usage_of(json.dumps({"usage": fields}).encode())
    streamed = read([data({"usage": fields})]).finish()
    assert streamed in {found, None}
    if found is not None:
        capped = bounded(found, 10, 10)
        assert max(capped[:2]) <= 1000
        assert capped.is_capped == (max(found[:2]) > 1000)


# --- costs ------------------------------------------------------------------------------------------------------------


def cpu(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


@pytest.mark.alone
@pytest.mark.parametrize("kind", KINDS)
def test_reading_along_costs_less_than_half_of_parsing(kind: str) -> None:
    """Per event it takes less than half of `json.loads` of the event, which every client does besides all else."""
    events = [event + b"\n\n" for event in events_of(kind, 10_000).split(b"\n\n") if event][:10_000]
    parts = [event[event.find(b"data:") + 5 :] for event in events if b"[DONE]" not in event]
    ours = min(cpu(lambda: read(events)) for _ in range(5))
    parsing = min(cpu(lambda: [json.loads(part) for part in parts]) for _ in range(5))
    assert ours < parsing / 2


def test_random_splits_of_a_long_stream() -> None:
    stream, rnd = events_of("messages", 2000), random.Random(37)
    at = sorted({0, len(stream), *[rnd.randrange(len(stream)) for _ in range(5000)]})
    reader = read(stream[begin:end] for begin, end in pairwise(at))
    assert (reader.finish(), reader.arrived) == (Usage(10, 2000), 2000)
