"""What a request will probably cost, by bodies as SDKs send them and as no one should."""

from __future__ import annotations

import gzip
import json
import math
import random
import time
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate.llm.estimate import (
    AT_FIRST,
    ENOUGH,
    LONGEST_MODEL,
    LOW_DETAIL_TOKENS,
    MEDIA_TOKENS,
    MOST_BYTES,
    MOST_TOKENS,
    MOST_VALUES,
    REMEMBERED,
    Estimate,
    Percentile,
    estimate_of,
)

TEXT = "x" * 40
PNG = "data:image/png;base64," + "iVBORw0KGgo" * 9999
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["a", "b"], "minimum": -12}}}


def of(body: Any, **options: str) -> Estimate:
    """The same of the bytes and of the object."""
    found = estimate_of(json.dumps(body).encode(), **options)
    raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert estimate_of(raw, **options) == found
    assert not isinstance(body, dict) or estimate_of(body, **options) == found
    return found


def content(*blocks: Any, **options: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(blocks)}], **options}


def json_tokens(value: Any) -> int:
    return math.ceil(len(json.dumps(value, separators=(",", ":"))) / 4)


# --- input ------------------------------------------------------------------------------------------------------------

INPUTS: list[tuple[str, dict[str, Any], int]] = [
    ("chat", {"messages": [{"role": "system", "content": TEXT}, {"role": "user", "content": TEXT}]}, 20),
    ("rounded up once", {"messages": [{"role": "user", "content": "hello"}, {"role": "user", "content": "h"}]}, 2),
    ("one byte", {"messages": [{"role": "user", "content": "h"}]}, 1),
    ("blocks", content({"type": "text", "text": TEXT}, {"type": "text", "text": TEXT}), 20),
    ("bytes, not characters", content({"type": "text", "text": "\u4f60\u597d"}), 2),
    ("a lone surrogate", content({"type": "text", "text": "\ud83d" * 4}), 3),
    ("Responses", {"instructions": TEXT, "input": TEXT}, 20),
    (
        "Responses, items",
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": TEXT}]}]},
        10,
    ),
    ("a result of a tool", {"input": [{"type": "function_call_output", "call_id": "c" * 99, "output": TEXT}]}, 10),
    ("Messages", {"system": TEXT, "messages": [{"role": "user", "content": TEXT}]}, 20),
    ("a system of blocks", {"system": [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}]}, 10),
    (
        "a tool of Anthropic",
        content({"type": "tool_use", "id": "t" * 99, "name": "f", "input": {"a": "b"}}),
        math.ceil((1 + 9) / 4),
    ),
    ("its result", content({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": TEXT}]}), 10),
    ("thinking", content({"type": "thinking", "thinking": TEXT, "signature": "s" * 999}), 10),
    ("a call of OpenAI", {"messages": [{"tool_calls": [{"id": "c", "function": {"name": "ff", "arguments": "{}"}}]}]}, 1),
    ("tools", {"messages": [], "tools": [TOOL]}, json_tokens([TOOL])),
    ("a schema", {"messages": [], "response_format": TOOL}, json_tokens(TOOL)),
    ("completions", {"prompt": [TEXT, TEXT]}, 20),
    ("embeddings", {"input": [TEXT, "y"]}, 11),
    ("tokens", {"input": [[1, 22_222, 3], [4]]}, 4),
    ("an image", content({"type": "image_url", "image_url": {"url": PNG}}, {"type": "text", "text": TEXT}), 10 + MEDIA_TOKENS),
    ("of low detail", content({"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}), LOW_DETAIL_TOKENS),
    (
        "an image elsewhere",
        content({"type": "image_url", "image_url": {"url": "https://example.com/" + "x" * 999}}),
        MEDIA_TOKENS,
    ),
    (
        "Responses, low",
        {"input": [{"content": [{"type": "input_image", "image_url": PNG, "detail": "low"}]}]},
        LOW_DETAIL_TOKENS,
    ),
    ("Anthropic's image", content({"type": "image", "source": {"type": "base64", "data": "A" * 99_999}}), MEDIA_TOKENS),
    ("a sound", content({"type": "input_audio", "input_audio": {"data": "A" * 99_999, "format": "wav"}}), MEDIA_TOKENS),
    ("a document", content({"type": "document", "source": {"type": "base64", "data": "A" * 99_999}}), MEDIA_TOKENS),
    ("of text", content({"type": "document", "source": {"type": "text", "data": TEXT}, "title": TEXT}), 20),
    ("an image as a result", {"input": [{"output": {"type": "computer_screenshot", "image_url": PNG}}]}, MEDIA_TOKENS),
    ("an image as text", {"messages": [{"role": "user", "content": PNG}]}, MEDIA_TOKENS),
    ("other fields", {"model": "m", "contents": [{"parts": [{"text": TEXT}]}]}, 10),
    ("no text", {"model": "m"}, 0),
    ("empty", {"model": "m", "messages": []}, 0),
]


@pytest.mark.parametrize(("body", "tokens"), [each[1:] for each in INPUTS], ids=[each[0] for each in INPUTS])
def test_input(body: dict[str, Any], tokens: int) -> None:
    """Bytes of text by four, tools as compact JSON, and a fixed cost for an image."""
    assert of(body).input == tokens


# --- output -----------------------------------------------------------------------------------------------------------

MAXIMA: list[tuple[dict[str, Any], int | None]] = [
    ({}, None),
    ({"max_tokens": 50}, 50),
    ({"max_completion_tokens": 50}, 50),
    ({"max_output_tokens": 50}, 50),
    ({"max_tokens": 50, "max_completion_tokens": 70}, 70),
    ({"max_tokens": 50, "n": 3}, 150),
    ({"max_tokens": 50, "n": 2, "best_of": 4}, 200),
    ({"n": 3}, None),
    ({"max_tokens": 50, "n": 0}, 50),
    ({"max_tokens": 50, "n": "3"}, 50),
    ({"max_tokens": 50, "n": True}, 50),
    ({"max_tokens": 0}, None),
    ({"max_tokens": -1}, None),
    ({"max_tokens": 50.5}, None),
    ({"max_tokens": True}, None),
    ({"max_tokens": "50"}, None),
    ({"max_tokens": [50]}, None),
    ({"max_tokens": None}, None),
    ({"max_tokens": math.nan}, None),
    ({"max_tokens": math.inf}, None),
    ({"max_tokens": 10**400}, MOST_TOKENS),
    ({"max_tokens": 10**9, "n": 10**9}, MOST_TOKENS),
]


@pytest.mark.parametrize(("fields", "output"), MAXIMA, ids=lambda value: ascii(value)[:40])
def test_output(fields: dict[str, Any], output: int | None) -> None:
    """The maximum, times the number of answers. Invalid numbers are ignored."""
    assert estimate_of(json.dumps({"messages": [], **fields}).encode()).output == output


def test_a_number_that_python_does_not_parse() -> None:
    """A body with an integer of more than 4,300 digits is searched."""
    body = b'{"messages": "hello", "max_tokens": ' + b"9" * 5000 + b', "model": "m"}'
    assert estimate_of(body) == Estimate("m", math.ceil(len(body) / 4), None)


@pytest.mark.parametrize(
    ("body", "path", "output"),
    [
        ({"input": "a", "model": "text-embedding-3-small"}, "", 0),
        ({"input": ["a"], "model": "m"}, "", 0),
        ({"input": [[1, 2]], "model": "m"}, "", 0),
        ({"input": "a", "encoding_format": "float"}, "", 0),
        ({"input": "a", "model": "m"}, "/v1/embeddings", 0),
        ({"input": "a", "model": "m"}, "/openai/deployments/d/embeddings?api-version=1", 0),
        ({"messages": [], "model": "m"}, "/v1/messages/count_tokens", 0),
        ({"input": "a", "model": "text-embedding-3-small"}, "/v1/responses", None),
        ({"input": "a", "model": "m"}, "", None),
        ({"input": [{"content": "a"}], "model": "m"}, "", None),
        ({"messages": [], "model": "embed"}, "", None),
    ],
    ids=str,
)
def test_requests_without_output(body: dict[str, Any], path: str, output: int | None) -> None:
    assert of(body, path=path).output == output


def test_model() -> None:
    assert of({"model": "m", "messages": []})[0] == "m"
    assert of({"model": 5, "messages": []})[0] is None
    assert of({"model": "m" * 999})[0] == "m" * LONGEST_MODEL


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": {"id": "conv_1"}},
        {"prompt": {"id": "pmpt_1"}},
        {"container": "c"},
        {"tools": [{"type": "web_search"}]},
        {"input": [{"content": [{"type": "input_file", "file_id": "file_1"}]}]},
    ],
    ids=str,
)
def test_input_that_is_elsewhere(fields: dict[str, Any]) -> None:
    """An estimate of it bounds nothing."""
    assert of({"input": "hi", **fields}).is_partial
    assert not of({"input": "hi", "tools": [TOOL, {"name": "f"}]}).is_partial


# --- no JSON ----------------------------------------------------------------------------------------------------------


def test_other_bodies() -> None:
    """They count as text; a compressed one by the byte, one in parts as a file; none is free that has text."""
    assert estimate_of(b"") == (None, 0, 0, False)
    assert estimate_of(b"hello") == (None, 2, None, False)
    assert estimate_of(b"\xff\xfe\xfd") == (None, 1, None, False)
    assert estimate_of(b'["hello"]') == (None, 3, None, False)
    packed = gzip.compress(b'{"messages": "hello"}')
    assert estimate_of(packed, content_encoding="gzip") == (None, len(packed), None, False)
    assert estimate_of(packed) == estimate_of(packed, content_encoding="br")
    assert estimate_of(b'{"input": "hello"}', content_encoding="Identity").input == 2
    assert estimate_of(b"--b" * 9999, content_type="multipart/form-data; boundary=b") == (None, MEDIA_TOKENS, None, True)


def test_encodings() -> None:
    """JSON in any of Unicode's."""
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32-le"):
        assert estimate_of('{"model": "\xe9", "input": "hello"}'.encode(encoding))[:2] == ("\xe9", 2)


SAID = b'"model": "m", "max_tokens": 70, "n": 2, "stream": true'
UNPARSED = [
    ("cut", b'{%b, "messages": "%b' % (SAID, b"x" * 400)),
    ("too many values", b'{"messages": [%b], %b}' % (b"{}," * MOST_VALUES, SAID)),
    ("too deep", b'{"messages": %b, %b}' % (b"[" * 100_000 + b"]" * 100_000, SAID)),
    ("too long", b'{"messages": "%b", %b}' % (b"x" * MOST_BYTES, SAID)),
    ("too long, first", b'{%b, "messages": "%b"}' % (SAID, b"x" * MOST_BYTES)),
    ("text that looks so", b'{"messages": "\\"max_tokens\\": 9999, \\"model\\": \\"other\\", ", %b' % SAID),
    ("a tool that looks so", b'{"tools": {"max_tokens": {"type": "integer"}, "model": {}}, %b' % SAID),
]


@pytest.mark.parametrize("body", [each[1] for each in UNPARSED], ids=[each[0] for each in UNPARSED])
def test_what_is_not_parsed_is_searched(body: bytes) -> None:
    """For the same fields; all bytes count as text."""
    assert estimate_of(body) == ("m", math.ceil(min(len(body), MOST_BYTES) / 4), 140, False)


def test_images_in_a_body_that_is_not_parsed() -> None:
    image = b'{"type": "image_url", "image_url": {"url": "data:image/png;base64,%b"}},' % (b"iVBORw0KGgo+/" * 1000)
    document = b'{"type": "document", "source": {"data": "%b"}},' % (b"JVBERi0xLjQK" * 1000)
    body = b'{"messages": [%b%b "hello"' % (image * 2, document)
    rest = len(body) - 2 * 13_000 - 12_000
    assert estimate_of(body).input == math.ceil(rest / 4) + 3 * MEDIA_TOKENS


HOSTILE = [
    (b"", b'"model" ', 1_250_000, b""),
    (b"", b'"max_tokens"         ', 500_000, b""),
    (b"", b'"data":"', 1_250_000, b""),
    (b"", b'"data":"' + b"A" * 1023 + b"!", 10_000, b""),
    (b"", b'"', 10_000_000, b""),
    (b"", b"{", 10_000_000, b""),
    (b'{"messages":["', b"\\u4f60", 1_700_000, b'"]}'),
    (b'{"input": [', b"1,", 5_000_000, b"1]}"),
    (b'{"messages": [', b'{"a":["b"]},', MOST_VALUES // 3 - 2, b"{}]}"),
]


@pytest.mark.parametrize(("begin", "repeated", "times", "end"), HOSTILE, ids=[ascii(each[1])[:30] for each in HOSTILE])
def test_10_mb_take_bounded_time(begin: bytes, repeated: bytes, times: int, end: bytes) -> None:
    """Tens of milliseconds; a hundredfold is left for a busy machine."""
    body = begin + repeated * times + end
    began = time.process_time()
    assert estimate_of(body).input > 0
    assert time.process_time() - began < 5


def test_an_object_takes_bounded_time() -> None:
    """One that is wide, deep, or contains itself, which no body does."""
    ring: dict[str, Any] = {"text": TEXT}
    ring["again"] = [ring, ring]
    deep: Any = "hello"
    for _ in range(100_000):
        deep = [deep]
    for messages in (ring, deep, ["hello"] * 1_000_000, [{}] * 1_000_000):
        for name in ("messages", "tools"):
            began = time.process_time()
            estimate_of({"model": "m", name: messages})
            assert time.process_time() - began < 5
    while isinstance(deep, list):
        deep = deep.pop()


# --- anything ---------------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just(PNG[:60])
names = st.sampled_from(
    ["model", "messages", "system", "input", "prompt", "tools", "content", "text", "type", "source", "image_url", "detail"]
) | st.sampled_from(["n", "max_tokens", "stream", "name", "conversation", "", "\xe9"])
kinds = st.sampled_from(["text", "image", "image_url", "document", "input_file", "tool_use"])
values = st.recursive(
    scalars | kinds, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5), max_leaves=20
)


def is_sane(found: Estimate) -> bool:
    return (
        0 <= found.input <= MOST_TOKENS
        and (found.output is None or 0 <= found.output <= MOST_TOKENS)
        and (found.model is None or len(found.model) <= LONGEST_MODEL)
        and isinstance(found.is_partial, bool)
    )


@given(body=st.dictionaries(names, values, max_size=6), cut=st.integers(0, 200))
def test_any_object_property(body: dict[str, Any], cut: int) -> None:
    """Nothing raises, whole or cut, and the bytes say what the object does."""
    raw = json.dumps(body).encode()
    assert is_sane(estimate_of(raw))
    assert estimate_of(raw) == estimate_of(json.loads(raw))
    assert is_sane(estimate_of(body))
    assert is_sane(estimate_of(raw[:cut]))


@given(body=st.binary(max_size=200) | st.text(max_size=99).map(str.encode), encoding=st.sampled_from(["", "gzip", "\x00"]))
def test_any_bytes_property(body: bytes, encoding: str) -> None:
    found = estimate_of(body, content_encoding=encoding)
    assert is_sane(found)
    assert found.input > 0 or not body or body.lstrip().startswith((b"{", b"\xef\xbb\xbf"))


@given(texts=st.lists(st.text(), min_size=1, max_size=9))
def test_text_is_never_free_property(texts: list[str]) -> None:
    """In any form, every byte of it counts."""
    size = sum(len(text.encode()) for text in texts)
    expected = math.ceil(size / 4)
    forms: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": text} for text in texts]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]},
        {"input": texts},
        {"system": texts[0], "messages": [{"content": text} for text in texts[1:]]},
        {"anything": texts},
    ]
    for form in forms:
        assert of(form).input == expected


# --- the percentile ---------------------------------------------------------------------------------------------------


def test_percentile_at_first() -> None:
    """1,000 until there are 20 answers, unless they are longer."""
    answers = Percentile()
    assert answers.value == AT_FIRST
    for _ in range(ENOUGH - 1):
        answers.add(10)
        assert answers.value == AT_FIRST
    answers.add(10)
    assert answers.value == 10
    answers = Percentile()
    answers.add(5000)
    assert answers.value == 5000


def test_percentile_forgets() -> None:
    """One long answer of 20 is ignored; the last 128 decide."""
    answers = Percentile()
    for tokens in [*[100] * 19, 9000]:
        answers.add(tokens)
    assert answers.value == 100
    for _ in range(7):
        answers.add(9000)
    assert answers.value == 9000
    for _ in range(REMEMBERED):
        answers.add(3)
    assert answers.value == 3


@given(answers=st.lists(st.integers(-5, 10**12), min_size=ENOUGH, max_size=3 * REMEMBERED))
def test_percentile_property(answers: list[int]) -> None:
    """At least 95 % of the last answers are no longer, and fewer than 95 % are shorter. Memory is bounded."""
    percentile = Percentile()
    for tokens in answers:
        percentile.add(tokens)
    known = [max(0, min(tokens, MOST_TOKENS)) for tokens in answers[-REMEMBERED:]]
    assert sum(tokens <= percentile.value for tokens in known) >= 0.95 * len(known)
    assert percentile.value == 1 or sum(tokens < percentile.value for tokens in known) < 0.95 * len(known)
    assert len(percentile._answers) <= REMEMBERED


def test_percentile_is_cheap() -> None:
    percentile, rnd = Percentile(), random.Random(37)
    began = time.process_time()
    for _ in range(10_000):
        percentile.add(rnd.randrange(5000))
    assert time.process_time() - began < 2
