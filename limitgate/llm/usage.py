"""Reads the tokens that a response reports, while the response passes. Pure.

Examines up to `MOST_EXAMINED` bytes of each event or body: half at its beginning, half at its end.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from limitgate.llm.estimate import BYTES_PER_TOKEN, MOST_TOKENS

MOST_EXAMINED = 65_536
"""Bytes of an event or body."""
ABSURD = 100
"""Usage is implausible above the estimate times this factor."""
CAPPED = 10
"""Implausible usage is cut to the estimate times this factor."""
MOST_USED = 10_000_000
"""Maximum usage without an estimate."""
_END = MOST_EXAMINED // 2
_MOST_TRIED = 8
"""Maximum of places where ``usage`` is tried, from the end."""
_LONGEST_USAGE = 8192
"""Maximum of bytes in a ``usage`` object."""
_AT_ONCE = 65_536
"""Maximum of decompressed bytes per step."""
_FIRST = 8
_BATCH = 16_384
"""Maximum of bytes of events per step."""
_MOST_DIGITS = 100
_MOST_ENCODINGS = 5

_STRING = rb'"((?:[^"\\\n]++|\\.)++)(?:"|\Z)'
_KEYS = rb'"(?:content|text|refusal|reasoning|reasoning_content|thinking|partial_json|arguments|transcript)"\s*+:\s*+'
_IN_DELTA = rb'\{(?:"type":"[a-z_]++",)?[^\n]{0,300}?' + _KEYS
"""The optional prefix makes the search faster."""
_DELTA = re.compile(rb'"delta"\s*+:\s*+(?:' + _IN_DELTA + rb")?" + _STRING)
_DELTA_BEGINS = re.compile(rb'"delta"\s*+:\s*+(?:' + _IN_DELTA + rb')?"')
_TEXT = re.compile(_KEYS + _STRING)
_PLAIN = re.compile(rb"(?:(?:event: ?+[a-z._]{1,64}+\n)?+data:[^\n]*+\n\n)*+")
"""Events that have at most a type and one line of data."""
_OBJECT = re.compile(rb"\s*+:\s*+(?=\{)")
_INPUT = ("prompt_tokens", "input_tokens")
_OUTPUT = ("completion_tokens", "output_tokens")
_CREATED = "cache_creation_input_tokens"
_decode = json.JSONDecoder().raw_decode
# `int` raises for thousands of digits.
_decode_usage = json.JSONDecoder(parse_int=lambda digits: int(digits[:_MOST_DIGITS])).raw_decode


class Usage(NamedTuple):
    """Tokens that a request has cost."""

    input: int
    """Input tokens, without those from Anthropic's cache."""
    output: int
    is_capped: bool = False
    """True if an implausible number was cut."""


def usage_in(usage: object) -> Usage | None:
    """Read the ``usage`` of any provider; None if incomplete or invalid."""
    into, out = _numbers_in(usage)
    # Embeddings have no output.
    return None if into is None else Usage(into, out or 0)


def bounded(usage: Usage, into: int | None = None, out: int | None = None) -> Usage:
    """Cap numbers above `ABSURD` times the estimates, or above `MOST_USED` without one."""
    capped = _capped(usage.input, into), _capped(usage.output, out)
    return Usage(*capped, usage.is_capped or capped != (usage.input, usage.output))


def _capped(tokens: int, estimate: int | None) -> int:
    if estimate is None:
        return min(tokens, MOST_USED)
    estimate = max(1, estimate)
    return CAPPED * estimate if tokens > ABSURD * estimate else tokens


def _numbers_in(usage: object) -> tuple[int | None, int | None]:
    """Return both numbers; None if not reported. An invalid number invalidates both."""
    if not isinstance(usage, dict):
        return None, None
    given = {name: usage.get(name) for name in (*_INPUT, *_OUTPUT, _CREATED, "total_tokens")}
    numbers = {name: _tokens(value) for name, value in given.items() if value is not None}
    if min(numbers.values(), default=0) < 0:
        return None, None
    into = next((numbers[name] for name in _INPUT if name in numbers), None)
    out = next((numbers[name] for name in _OUTPUT if name in numbers), None)
    if into is not None:
        if "total_tokens" in numbers:
            # Some providers leave reasoning out of the output, but not out of the total.
            out = max(out or 0, numbers["total_tokens"] - into)
        into += numbers.get(_CREATED, 0)
    return into, out


def _tokens(value: Any) -> int:
    if type(value) is float and (value.is_integer() or value == math.inf):
        return int(min(value, MOST_TOKENS))
    return value if type(value) is int else -1


class Reader:
    """Call `feed` with each chunk, then `finish` or `settle`."""

    def __init__(self) -> None:
        self._input: int | None = None
        self._output: int | None = None
        self._text = 0
        self._other_text = 0
        """Text outside deltas."""
        self._text_before = 0
        self._has_arrived = False

    def feed(self, chunk: bytes) -> None:
        """Never raises."""
        raise NotImplementedError

    def feed_all(self, chunks: Sequence[bytes]) -> None:
        self.feed(b"".join(chunks))

    def skip(self, size: int) -> None:
        """Count bytes that aren't readable text."""
        self._has_arrived = True
        self._text += size

    def finish(self) -> Usage | None:
        if self._input is None or self._output is None:
            return None
        return Usage(self._input, self._output + self._since)

    @property
    def arrived(self) -> int:
        """Tokens of output text, at least 1 after any byte."""
        return max(1, -(-(self._text or self._other_text) // BYTES_PER_TOKEN)) if self._has_arrived else 0

    @property
    def _since(self) -> int:
        return -(-(self._text - self._text_before) // BYTES_PER_TOKEN)

    def settle(self, into: int) -> Usage:
        """Return the reported cost. Without a report, it is the estimated input ``into`` and the output that arrived."""
        self.finish()
        reported = into if self._input is None else self._input
        output = self.arrived if self._output is None else self._output + self._since
        return bounded(Usage(reported, output))

    def _report(self, data: bytes, begin: int, end: int, head: bytes) -> None:
        """Read the last ``usage`` object.

        Text can't imitate it, because its quotes are escaped. ``head`` has the event's type.
        """
        found, before = None, end
        for _ in range(_MOST_TRIED):
            before = data.rfind(b'"usage"', begin, before)
            if before < 0:
                return
            if found := _OBJECT.match(data, before + 7, end):
                break
        if found is None:
            return
        text = data[found.end() : min(end, found.end() + _LONGEST_USAGE)].decode("utf-8", "replace")
        try:
            usage, _ = _decode_usage(text)
        except (ValueError, RecursionError):
            return
        into, out = _numbers_in(usage)
        # All reports are cumulative. Anthropic's first one has only the beginning of the output.
        if into is not None:
            self._input = max(into, self._input or 0)
        if out is not None and head.find(b'"message_start"', 0, _END) < 0:
            self._output = max(out, self._output or 0)
            self._text_before = self._text


class _Frame(NamedTuple):
    """What an event has around its text, mostly the same in a stream."""

    before: bytes
    after: bytes
    cut: Callable[[bytes], bytes]

    @classmethod
    def of(cls, event: bytes) -> _Frame | None:
        found = _DELTA.search(event)
        if found is None:
            return None
        before, after = event[: found.start(1)], event[found.end(1) :]
        if not after.startswith(b'"') or before.count(b'"delta"') > 1 or b'"delta"' in after or _TEXT.search(after):
            return None
        return cls(before, after, itemgetter(slice(len(before), -len(after))))

    def size(self, events: bytes, texts: list[bytes]) -> int | None:
        """Return the size of ``texts``; None if ``events`` have other content."""
        text = b"".join(texts)
        texts[0] = self.before + texts[0]
        texts[-1] = b"".join((texts[-1], self.after))
        return _size_in_string(text) if (self.after + self.before).join(texts) == events else None


class EventReader(Reader):
    r"""Reads server-sent events.

    Output text is the first text of each ``delta``, or all text if there is no delta. Its size is estimated in events above
    `MOST_EXAMINED` bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fed: list[bytes] = []
        self._size = 0
        self._pending = bytearray()
        """An incomplete event, or the end of a long one."""
        self._head = b""
        self._cut = 0
        """Number of bytes cut from a long event."""
        self._after_cr = False
        self._is_first = True
        self._frame: _Frame | None = None

    def feed(self, chunk: bytes) -> None:
        self._fed.append(chunk)
        self._size += len(chunk)
        if self._size >= _BATCH:
            self._examine_fed()

    def feed_all(self, chunks: Sequence[bytes]) -> None:
        if self._frame is None and not self._fed:
            self.feed(b"".join(chunks[:_FIRST]))
            self._examine_fed()
            chunks = chunks[_FIRST:]
        joined, frame = b"".join(chunks), self._frame
        if frame is not None and joined.endswith(frame.after) and not (self._fed or self._pending or self._after_cr):
            size = frame.size(joined, [*map(frame.cut, chunks)])
            if size is not None:
                self._text += size
                return
        self.feed(joined)

    def finish(self) -> Usage | None:
        self._examine_fed()
        if self._pending:
            event = bytes(self._pending)
            self._pending.clear()
            self._examine(event)
        return super().finish()

    @property
    def arrived(self) -> int:
        self._examine_fed()
        return super().arrived

    def _examine_fed(self) -> None:
        chunk = b"".join(self._fed)
        self._fed.clear()
        self._size = 0
        if not chunk:
            return
        self._has_arrived = True
        if self._after_cr or b"\r" in chunk:
            chunk = self._with_line_feeds(chunk)
        if self._pending:
            begin = len(self._pending) - 1
            self._pending += chunk
            end = self._pending.rfind(b"\n\n", begin)
            chunk = bytes(self._pending) if end >= 0 else b""
        else:
            end = chunk.rfind(b"\n\n")
        if end >= 0:
            self._pending.clear()
            self._examine_all(chunk[: end + 2])
            chunk = chunk[end + 2 :]
        self._pending += chunk
        if len(self._pending) > MOST_EXAMINED:
            self._head = self._head or bytes(self._pending[:_END])
            self._cut += len(self._pending) - _END
            del self._pending[:-_END]

    def _examine_all(self, events: bytes) -> None:
        # Every report has such names. Text can't, because its quotes are escaped.
        if not self._cut and len(events) <= MOST_EXAMINED and b'_tokens"' not in events and _PLAIN.fullmatch(events):
            self._is_first = False
            # Samples would miss text: the caller steers its sizes, and may ask for a stream without usage.
            self._count_alike(events)
            return
        for event in events[:-2].split(b"\n\n"):
            self._examine(event)

    def _count_alike(self, events: bytes) -> None:
        frame = self._frame
        if frame is not None and events.endswith(frame.after):
            size = frame.size(events, frame.cut(events).split(frame.after + frame.before))
            if size is not None:
                self._text += size
                return
        self._frame = _Frame.of(events[events.rfind(b"\n\n", 0, -2) + 1 :].removeprefix(b"\n")) or frame
        self._count(events, 0, len(events))

    def _with_line_feeds(self, chunk: bytes) -> bytes:
        """Normalize line ends, also if a chunk ends within one."""
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._after_cr = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _examine(self, event: bytes) -> None:
        if self._is_first:
            self._is_first = False
            event = event.removeprefix(b"\xef\xbb\xbf")
        if self._cut or len(event) > MOST_EXAMINED:
            self._examine_long(event)
            return
        begin = 5
        if not event.startswith(b"data:"):
            begin = event.find(b"\ndata:") + 6
            if begin == 5:
                return
        end = event.find(b"\n", begin)
        if end < 0:
            end = len(event)
        elif event.find(b"\ndata:", end) >= 0:
            event = b" ".join([line[5:] for line in event.split(b"\n") if line.startswith(b"data:")])
            begin, end = 0, len(event)
        self._count(event, begin, end)
        at = event.rfind(b'"usage"', begin, end)
        if at >= 0 and not event.startswith(b":null", at + 7):
            self._report(event, at, end, event)

    def _count(self, events: bytes, begin: int, end: int) -> None:
        deltas = _DELTA.findall(events, begin, end)
        self._text += _size_of(b"".join(deltas))
        if not self._text:
            self._other_text += _size_of(b"".join(_TEXT.findall(events, begin, end)))

    def _examine_long(self, event: bytes) -> None:
        head, size = self._head or event[:_END], self._cut + len(event)
        self._head, self._cut = b"", 0
        if not (head.startswith(b"data:") or b"\ndata:" in head):
            return
        if _DELTA_BEGINS.search(head):
            self._text += size
        elif _TEXT.search(head):
            self._other_text += size
        tail = event[-_END:]
        for part in (head, tail):
            self._report(part, 0, len(part), head)


class BodyReader(Reader):
    """Reads a JSON response, which may be long."""

    def __init__(self) -> None:
        super().__init__()
        self._head = bytearray()
        self._tail = bytearray()
        self._cut = 0

    def feed(self, chunk: bytes) -> None:
        if not chunk:
            return
        self._has_arrived = True
        if room := _END - len(self._head):
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        if len(self._tail) > MOST_EXAMINED:
            self._cut += len(self._tail) - _END
            del self._tail[:-_END]

    def finish(self) -> Usage | None:
        if self._head:
            self._cut += max(0, len(self._tail) - _END)
            parts = [bytes(self._head), bytes(self._tail[-_END:])]
            self._head, self._tail = bytearray(), bytearray()
            for part in parts if self._cut else [b"".join(parts)]:
                self._text += _size_of(b"".join(_TEXT.findall(part)))
                self._report(part, 0, len(part), b"")
            self._text += self._cut
            self._text_before = self._text
        if self._input is not None and self._output is None:
            # Embeddings have no output.
            self._output = 0
        return super().finish()


class CompressedReader(Reader):
    """Decompresses for another reader. Unknown or broken encodings count as text."""

    def __init__(self, reader: Reader, encoding: str) -> None:
        super().__init__()
        self._reader = reader
        self._encoding = encoding if encoding in ("gzip", "x-gzip", "deflate") else ""
        self._unpack: Any = None

    def feed(self, chunk: bytes) -> None:
        if not chunk:
            return
        try:
            while chunk and self._encoding:
                chunk = self._rest_of(chunk)
        except zlib.error:
            self._encoding = ""
        self._reader.skip(len(chunk))

    def _rest_of(self, chunk: bytes) -> bytes:
        unpack = self._unpack = self._unpack or zlib.decompressobj(self._window_of(chunk))
        plain = unpack.decompress(chunk, _AT_ONCE)
        self._reader.feed(plain)
        while len(plain) == _AT_ONCE and not unpack.unconsumed_tail:
            plain = unpack.decompress(b"", _AT_ONCE)
            self._reader.feed(plain)
        if not unpack.eof:
            return bytes(unpack.unconsumed_tail)
        # gzip may have several members.
        self._unpack = None
        return bytes(unpack.unused_data)

    def _window_of(self, chunk: bytes) -> int:
        # Some servers send deflate without a header.
        is_bare = self._encoding == "deflate" and chunk[0] & 0x0F != zlib.DEFLATED and chunk[0] != 0x1F
        return -zlib.MAX_WBITS if is_bare else 47

    def finish(self) -> Usage | None:
        return self._reader.finish()

    @property
    def arrived(self) -> int:
        return self._reader.arrived

    def settle(self, into: int) -> Usage:
        return self._reader.settle(into)


def reader_for(content_type: str, content_encoding: str = "") -> Reader:
    """Return a reader for a response with these fields."""
    is_stream = content_type.strip().lower().startswith("text/event-stream")
    reader: Reader = EventReader() if is_stream else BodyReader()
    named = [each.strip().lower() for each in content_encoding.split(",")]
    encodings = [each for each in named if each not in ("", "identity")]
    for encoding in encodings if len(encodings) <= _MOST_ENCODINGS else [content_encoding]:
        reader = CompressedReader(reader, encoding)
    return reader


def _size_of(text: bytes) -> int:
    size = _size_in_string(text)
    return len(text) if size is None else size


def _size_in_string(text: bytes) -> int | None:
    """Return None if this isn't the content of one string."""
    escapes, quotes = text.count(b"\\"), text.count(b'"')
    if escapes == quotes + (text.count(b"\\n") if escapes else 0) and (not quotes or text.count(b'\\"') == quotes):
        return len(text) - escapes
    try:
        string = f'"{text.decode()}"'
        content, end = _decode(string)
    except ValueError:
        return None
    return len(content.encode("utf-8", "surrogatepass")) if end == len(string) else None
