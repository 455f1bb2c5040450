"""Estimates tokens of a request from its body. Pure.

Reads bodies of OpenAI's chat and Responses, Anthropic's Messages, and embeddings. Never raises. Searches at most
`MOST_BYTES`, and visits at most `MOST_VALUES` JSON values.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)

BYTES_PER_TOKEN = 4
"""English text."""
MEDIA_TOKENS = 1600
"""Tokens per image, sound or file: Anthropic's largest image, twice OpenAI's 1024 x 1024."""
LOW_DETAIL_TOKENS = 85
"""OpenAI's ``detail: low``."""
MOST_TOKENS = 1_000_000_000
"""Maximum of an estimate."""
MOST_BYTES = 33_554_432
"""32 MiB; no model reads more text."""
MOST_VALUES = 20_000
"""A larger body isn't parsed. It counts as text, except base64, and its ends are searched for model and maximum.
"""
MOST_SEARCHED = 1_048_576
"""Bytes at each end of an unparsed body."""
MOST_MEDIA = 1000
"""Maximum of base64 texts in an unparsed body."""
LONGEST_MODEL = 256
"""Characters."""
AT_FIRST = 1000
"""Output tokens assumed before a key's answers are known."""
ENOUGH = 20
"""Number of answers needed for a percentile, which ignores one of 20."""
REMEMBERED = 128
"""Maximum of answers per key."""
MOST_KEYS = 1_000
"""The least recently used one is dropped."""

_CONTENT = ("messages", "system", "instructions", "input", "prompt")
"""Fields with text in blocks. Other fields count only if these are empty."""
_SCHEMAS = ("tools", "functions", "response_format", "text", "output_config", "output_format")
"""Schemas, which count as JSON."""
_MAXIMA = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_NO_OUTPUT = ("/embeddings", "/moderations", "/count_tokens", "/input_tokens")
"""Ends of paths without output."""
_ELSEWHERE = ("previous_response_id", "conversation", "container", "mcp_servers")
"""Fields that refer to input outside the body."""
_NO_TEXT = frozenset(
    [
        *("type", "role", "id", "call_id", "tool_call_id", "tool_use_id", "file_id", "status", "phase", "detail", "media_type"),
        *("cache_control", "signature"),
    ]
)
"""Fields of blocks that aren't text."""
_IMAGES = frozenset(["image", "image_url", "input_image", "computer_screenshot"])
_MEDIA = _IMAGES | {"audio", "input_audio", "video", "video_url", "file", "input_file", "document"}
"""Types of blocks that cost `MEDIA_TOKENS`."""
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.ASCII | re.IGNORECASE)
_BASE64 = re.compile(rb"[A-Za-z0-9+/\\_=-]{1024,}")
_BEFORE_BASE64 = (b";base64,", b'"data":"', b'"data": "')
_MODEL = re.compile(rb'"model"\s{0,9}:\s{0,9}"([^"\\]{1,256})"')
_MAXIMUM = re.compile(rb'"max_(?:completion_|output_)?tokens"\s{0,9}:\s{0,9}([0-9]{1,15})\s{0,9}[,}]')
_CHOICES = re.compile(rb'"n"\s{0,9}:\s{0,9}([0-9]{1,9})\s{0,9}[,}]')


class Estimate(NamedTuple):
    model: str | None
    input: int
    """Tokens in the body: text, schemas and media."""
    output: int | None
    """Maximum output tokens; None if unknown."""
    is_partial: bool = False
    """True if some input is outside the body: a conversation, a file, or a provider's tool."""


def estimate_of(
    body: bytes | Mapping[str, Any],
    *,
    path: str = "",
    content_type: str = "",
    content_encoding: str = "",
    document: dict[str, Any] | None = None,
) -> Estimate:
    """Estimate a request's cost from its body, as bytes or as the parsed object.

    By ``path``, requests without output are recognized. Bytes that aren't JSON count as text, and a multipart body as one file.
    Compressed bytes count as one token each, because text shrinks to a quarter. ``document`` is the parsed body.
    """
    if isinstance(body, Mapping):
        return _of_object(body, path)
    if not body:
        return Estimate(None, 0, 0)
    if content_encoding.strip().lower() not in ("", "identity") or body.startswith(b"\x1f\x8b"):
        return Estimate(None, min(len(body), MOST_TOKENS), None)
    if content_type.strip().lower().startswith("multipart/"):
        return Estimate(None, MEDIA_TOKENS, None, is_partial=True)
    parsed = _parsed(body, document)
    return _of_bytes(body, path) if parsed is None else _of_object(parsed, path)


def _parsed(body: bytes, document: dict[str, Any] | None) -> dict[str, Any] | None:
    """Parse a body; None if it isn't an object, or has too many brackets and commas."""
    if len(body) > MOST_BYTES or sum(map(body.count, (b",", b"[", b"{"))) >= MOST_VALUES:
        return None
    if document is not None:
        return document
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _of_object(body: Mapping[str, Any], path: str) -> Estimate:
    model = body.get("model")
    model = model[:LONGEST_MODEL] if isinstance(model, str) else None
    size = _Size()
    for name in _CONTENT:
        size.add(body.get(name))
    for name in _SCHEMAS:
        if isinstance(body.get(name), dict | list):
            size.add(body[name], as_json=True)
    if not size.tokens:
        size.add({name: value for name, value in islice(body.items(), MOST_VALUES) if name != "model"})
    output: int | None = 0
    if not _has_no_output(body, model, path):
        named = [_count(body.get(name)) for name in _MAXIMA]
        choices = max(1, _count(body.get("n")), _count(body.get("best_of")))
        output = min(max(named) * choices, MOST_TOKENS) or None
    is_partial = (
        size.has_references
        or any(body.get(name) for name in _ELSEWHERE)
        or isinstance(body.get("prompt"), dict)
        or _has_provider_tools(body.get("tools"))
    )
    return Estimate(model, size.tokens, output, is_partial)


def _of_bytes(body: bytes, path: str) -> Estimate:
    """Search the ends of an unparsed body. Text in it can't match, because its quotes are escaped."""
    ends = body if len(body) <= 2 * MOST_SEARCHED else body[:MOST_SEARCHED] + body[-MOST_SEARCHED:]
    found = _MODEL.search(ends)
    model = found[1].decode("utf-8", "replace") if found else None
    output: int | None = 0
    if not _has_no_output({}, model, path):
        most = max(map(int, _MAXIMUM.findall(ends)), default=0)
        choices = max(map(int, _CHOICES.findall(ends)), default=1)
        output = min(most * max(1, choices), MOST_TOKENS) or None
    media, size = _media_in(body)
    tokens = -(-(min(len(body), MOST_BYTES) - size) // BYTES_PER_TOKEN) + media * MEDIA_TOKENS
    return Estimate(model, min(tokens, MOST_TOKENS), output)


def _media_in(body: bytes) -> tuple[int, int]:
    media = size = 0
    for before in _BEFORE_BASE64:
        at = 0
        for _ in range(MOST_MEDIA):
            at = body.find(before, at, MOST_BYTES)
            if at < 0:
                break
            at += len(before)
            if found := _BASE64.match(body, at, MOST_BYTES):
                media, size, at = media + 1, size + found.end() - at, found.end()
    return media, size


class _Size:
    """Bytes of text, in at most `MOST_VALUES` values."""

    def __init__(self) -> None:
        self.has_references = False
        self._bytes = 0
        self._media = 0
        self._left = MOST_VALUES

    @property
    def tokens(self) -> int:
        return min(-(-self._bytes // BYTES_PER_TOKEN) + self._media, MOST_TOKENS)

    def add(self, value: Any, *, as_json: bool = False) -> None:
        """Add a value, without recursion, because a body may be deep."""
        pending: list[tuple[Any, bool]] = [(value, as_json)]
        while pending:
            each, is_json = pending.pop()
            if isinstance(each, str):
                self._add_text(each, is_json=is_json)
            elif isinstance(each, list | tuple):
                self._bytes += max(2, 1 + len(each)) * is_json
                pending += [(item, is_json) for item in self._taken(each)]
            elif isinstance(each, dict):
                pending += self._fields_as_json(each) if is_json else self._fields_of_block(each)
            elif is_json:
                self._bytes += _digits(each)
            elif isinstance(each, int | float):
                # An input may be a list of tokens.
                self._bytes += BYTES_PER_TOKEN

    def _taken(self, values: Iterable[Any]) -> list[Any]:
        taken = list(islice(values, self._left))
        self._left -= len(taken)
        return taken

    def _add_text(self, text: str, *, is_json: bool) -> None:
        if not is_json and text.startswith(("data:", "DATA:")) and _DATA_URL.match(text):
            self._media += MEDIA_TOKENS
        else:
            self._bytes += _length(text) + 2 * is_json

    def _fields_as_json(self, fields: dict[Any, Any]) -> list[tuple[Any, bool]]:
        self._bytes += max(2, 1 + len(fields))
        taken = self._taken(fields.items())
        self._bytes += sum([_length(name) + 3 for name, _ in taken if isinstance(name, str)])
        return [(value, True) for _, value in taken]

    def _fields_of_block(self, block: dict[Any, Any]) -> list[tuple[Any, bool]]:
        kind = block.get("type")
        if isinstance(kind, str) and kind in _MEDIA:
            source = block.get("source")
            if not (isinstance(source, dict) and source.get("type") in ("text", "content")):
                return self._add_media(block)
            return [(each, False) for each in (source.get("data"), source.get("content"), block.get("title")) if each]
        found: list[tuple[Any, bool]] = []
        for name, value in self._taken(block.items()):
            if isinstance(value, str | list | tuple) and name not in _NO_TEXT:
                found.append((value, False))
            elif isinstance(value, dict):
                # The input of a tool is JSON.
                found.append((value, name == "input"))
        return found

    def _add_media(self, block: dict[Any, Any]) -> list[tuple[Any, bool]]:
        inner = block.get("image_url")
        details = block.get("detail"), inner.get("detail") if isinstance(inner, dict) else None
        self._media += LOW_DETAIL_TOKENS if "low" in details else MEDIA_TOKENS
        self.has_references = self.has_references or not _is_image(block)
        return []


def _is_image(block: dict[Any, Any]) -> bool:
    return block["type"] in _IMAGES


def _has_no_output(body: Mapping[str, Any], model: str | None, path: str) -> bool:
    if path.partition("?")[0].rstrip("/").endswith(_NO_OUTPUT):
        return True
    if path or "messages" in body:
        return False
    given = body.get("input")
    is_batch = isinstance(given, list) and bool(given) and not isinstance(given[0], dict)
    return is_batch or "encoding_format" in body or (model is not None and "embed" in model.lower())


def _has_provider_tools(tools: Any) -> bool:
    if not isinstance(tools, list):
        return False
    kinds = [tool.get("type") for tool in tools[:MOST_VALUES] if isinstance(tool, dict)]
    return any(kind not in (None, "function", "custom") for kind in kinds)


def _count(value: Any) -> int:
    return min(value, MOST_TOKENS) if type(value) is int and value > 0 else 0


def _length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _digits(value: Any) -> int:
    if type(value) is int and value.bit_length() > 64:
        return int(value.bit_length() * math.log10(2))
    return len(repr(value)) if value is None or isinstance(value, int | float) else 0


class Percentile:
    """95th percentile of the last `REMEMBERED` answers, in output tokens; thread-safe.

    Before `ENOUGH` answers, at least `AT_FIRST`.
    """

    __slots__ = ("_answers", "_next", "value")

    def __init__(self) -> None:
        self.value: int = AT_FIRST
        self._answers: list[int] = []
        self._next = 0

    def add(self, tokens: int) -> None:
        tokens = max(0, min(tokens, MOST_TOKENS))
        if len(self._answers) < REMEMBERED:
            self._answers.append(tokens)
        else:
            self._answers[self._next % REMEMBERED] = tokens
            self._next += 1
        # A copy, because another thread may add an answer.
        ordered = sorted(self._answers)
        found = ordered[math.ceil(0.95 * len(ordered)) - 1]
        self.value = max(1, found if len(ordered) >= ENOUGH else max(AT_FIRST, found))


class Answers(Generic[K]):
    """A `Percentile` for each of the last `MOST_KEYS` keys; thread-safe."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: OrderedDict[K, Percentile] = OrderedDict()

    def of(self, key: K) -> Percentile:
        found = self._kept.get(key)
        if found is None:
            found = self._kept.setdefault(key, Percentile())
        # Another thread may just have dropped it, or the others.
        with suppress(KeyError):
            self._kept.move_to_end(key)
            if len(self._kept) > MOST_KEYS:
                self._kept.popitem(last=False)
        return found
