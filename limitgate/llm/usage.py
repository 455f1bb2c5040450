"""Reads the tokens that a response of a language model has cost, while it passes. Pure.

Of each event of a stream, and of a body, at most `MOST_EXAMINED` bytes are examined: half at its beginning, half at its end.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import NamedTuple

from limitgate.llm.estimate import BYTES_PER_TOKEN

MOST_EXAMINED = 65_536
"""Bytes of an event, or of a body, that are examined, and held meanwhile."""
ABSURD = 100
"""Usage of more than this many times the estimate is wrong."""
CAPPED = 10
"""Wrong usage counts as this many times the estimate."""
MOST_USED = 10_000_000
"""Larger usage is wrong if there is no estimate: no model reads or writes that much."""
_END = MOST_EXAMINED // 2
_MOST_TRIED = 8
"""Places of ``usage`` in an event that are tried, from its end; metadata may have the word, too."""
_LONGEST_USAGE = 8192
"""Bytes of a ``usage`` object that are parsed."""
_AT_ONCE = 65_536
"""Bytes that are decompressed at once."""
_BATCH = 16_384
"""Bytes of events that are examined together, which is cheaper."""

_STRING = rb'"((?:[^"\\\n]++|\\.)++)(?:"|\Z)'
_KEYS = rb'"(?:content|text|refusal|reasoning|reasoning_content|thinking|partial_json|arguments|transcript)"\s*+:\s*+'
_IN_DELTA = rb'\{(?:"type":"[a-z_]++",)?[^\n]{0,300}?' + _KEYS
"""A prefix that the next part would match too is matched faster."""
_DELTA = re.compile(rb'"delta"\s*+:\s*+(?:' + _IN_DELTA + rb")?" + _STRING)
_DELTA_BEGINS = re.compile(rb'"delta"\s*+:\s*+(?:' + _IN_DELTA + rb')?"')
_TEXT = re.compile(_KEYS + _STRING)
_PLAIN = re.compile(rb"(?:(?:event: ?+[a-z._]{1,64}+\n)?+data:[^\n]*+\n\n)*+")
"""Events with at most a type and one line of data."""
_OBJECT = re.compile(rb"\s*+:\s*+(?=\{)")
_USAGE = re.compile(rb'"usage"\s*+:\s*+\{')
_INPUT = ("prompt_tokens", "input_tokens")
_OUTPUT = ("completion_tokens", "output_tokens")
_CREATED = "cache_creation_input_tokens"
_decode = json.JSONDecoder().raw_decode


class Usage(NamedTuple):
    """Tokens that a request has cost."""

    input: int
    """Without tokens read from Anthropic's cache, which do not count."""
    output: int
    is_capped: bool = False
    """True if the provider reported an absurd number, which was cut."""


def usage_in(usage: object) -> Usage | None:
    """Return the tokens in a parsed ``usage`` object of any provider; None if it is incomplete or has a number that is none."""
    into, out = _numbers_in(usage)
    # Embeddings have no output.
    return None if into is None else Usage(into, out or 0)


def bounded(usage: Usage, into: int | None, out: int | None = None) -> Usage:
    """Cap numbers of more than `ABSURD` times the estimates, or than `MOST_USED` without one, and mark the result."""
    capped = _capped(usage.input, into), _capped(usage.output, out)
    return Usage(*capped, usage.is_capped or capped != (usage.input, usage.output))


def _capped(tokens: int, estimate: int | None) -> int:
    if estimate is None:
        return min(tokens, MOST_USED)
    estimate = max(1, estimate)
    return CAPPED * estimate if tokens > ABSURD * estimate else tokens


def _numbers_in(usage: object) -> tuple[int | None, int | None]:
    """Return input and output tokens, None if not reported. One invalid number invalidates the others."""
    if not isinstance(usage, dict):
        return None, None
    given = {name: usage.get(name) for name in (*_INPUT, *_OUTPUT, _CREATED, "total_tokens")}
    numbers = {name: value for name, value in given.items() if value is not None}
    if not all(type(value) is int and value >= 0 for value in numbers.values()):
        return None, None
    into = next((numbers[name] for name in _INPUT if name in numbers), None)
    out = next((numbers[name] for name in _OUTPUT if name in numbers), None)
    if into is not None:
        if "total_tokens" in numbers:
            # Some providers leave reasoning out of the output, but not out of the total.
            out = max(out or 0, numbers["total_tokens"] - into)
        into += numbers.get(_CREATED, 0)
    return into, out


class Reader:
    """Reads along a response. Call `feed` with each chunk, then `finish` or `settle`."""

    def __init__(self) -> None:
        self._input: int | None = None
        self._output: int | None = None
        self._text = 0
        """Bytes of text."""
        self._text_before = 0
        """Bytes of text before the last reported usage."""
        self._has_arrived = False

    def feed(self, chunk: bytes) -> None:
        """Examine a chunk. Never raises."""
        raise NotImplementedError

    def skip(self, size: int) -> None:
        """Count bytes that can't be read as text."""
        self._has_arrived = True
        self._text += size

    def finish(self) -> Usage | None:
        """Examine the rest; return the reported usage, or None if it is incomplete."""
        if self._input is None or self._output is None:
            return None
        return Usage(self._input, self._output + self._since)

    @property
    def arrived(self) -> int:
        """Tokens of output text, at least 1 if any byte has arrived."""
        return max(1, -(-self._text // BYTES_PER_TOKEN)) if self._has_arrived else 0

    @property
    def _since(self) -> int:
        """Tokens of text after the last reported usage."""
        return -(-(self._text - self._text_before) // BYTES_PER_TOKEN)

    def settle(self, into: int, out: int | None = None, *, is_partial: bool = False) -> Usage:
        """Return what the request has cost: as reported, otherwise the estimated input and the output that has arrived.

        The estimates ``into`` and ``out`` bound reported numbers, except the input if the estimate ``is_partial``.
        """
        self.finish()
        reported = into if self._input is None else self._input
        output = self.arrived if self._output is None else self._output + self._since
        return bounded(Usage(reported, output), None if is_partial else into, out)

    def _report(self, data: bytes, begin: int, end: int, head: bytes) -> None:
        """Read the last ``usage`` in data, if it is an object. Text doesn't match, because its quotes are escaped.

        ``head`` is the beginning of the event, which has its type.
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
            usage, _ = _decode(text)
        except (ValueError, RecursionError):
            return
        into, out = _numbers_in(usage)
        # All reports are cumulative. Anthropic's first one has only the beginning of the output.
        if into is not None:
            self._input = max(into, self._input or 0)
        if out is not None and head.find(b'"message_start"', 0, _END) < 0:
            self._output = max(out, self._output or 0)
            self._text_before = self._text


class EventReader(Reader):
    r"""Reads along a stream of server-sent events.

    Output text is the first text in each ``delta``, and providers send no second one. Its size is exact, except that text in an
    event of more than `MOST_EXAMINED` bytes has the size of the event.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fed: list[bytes] = []
        self._size = 0
        """Bytes in ``_fed``."""
        self._pending = bytearray()
        """The event that has begun; its end if it is long."""
        self._head = b""
        """The beginning of a long event."""
        self._cut = 0
        """Bytes that a long event has lost."""
        self._after_cr = False
        self._is_first = True
        self._frame = b"", b"", 0
        """What is around the text of a usual event of this stream, and its quotes."""

    def feed(self, chunk: bytes) -> None:
        """Keep a chunk, and examine some chunks together. Never raises."""
        self._fed.append(chunk)
        self._size += len(chunk)
        if self._size >= _BATCH:
            self._examine_fed()

    def finish(self) -> Usage | None:
        """Examine the event that has begun; return the reported usage, or None if it is incomplete."""
        self._examine_fed()
        if self._pending:
            event = bytes(self._pending)
            self._pending.clear()
            self._examine(event)
        return super().finish()

    @property
    def arrived(self) -> int:
        """Tokens of output text in whole events, at least 1 if any byte has arrived."""
        self._examine_fed()
        return super().arrived

    def _examine_fed(self) -> None:
        """Examine the events that have ended."""
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
        if not self._cut and len(events) <= MOST_EXAMINED:
            size = self._size_in_frames(events)
            if size is None and _PLAIN.fullmatch(events) and not _USAGE.search(events):
                size = _size_of(b"".join(_DELTA.findall(events)))
                self._frame = _frame_of(events[: events.find(b"\n\n") + 2])
            if size is not None:
                self._is_first = False
                self._text += size
                return
        for event in events[:-2].split(b"\n\n"):
            self._examine(event)

    def _size_in_frames(self, events: bytes) -> int | None:
        """Return the size of the text if the events differ in nothing else, which takes a third of the time.

        As the text has no quotes, nothing but text is between two frames.
        """
        begin, end, quotes = self._frame
        if not quotes or b"\\" in events or not (events.startswith(begin) and events.endswith(end)):
            return None
        many = events.count(end + begin) + 1
        return len(events) - many * len(end + begin) if events.count(b'"') == many * quotes else None

    def _with_line_feeds(self, chunk: bytes) -> bytes:
        """Normalize the ends of lines: a line feed after a carriage return belongs to it, also in the next chunk."""
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
        self._text += _size_of(b"".join(_DELTA.findall(event, begin, end)))
        at = event.rfind(b'"usage"', begin, end)
        if at >= 0 and not event.startswith(b":null", at + 7):
            self._report(event, at, end, event)

    def _examine_long(self, event: bytes) -> None:
        head, size = self._head or event[:_END], self._cut + len(event)
        self._head, self._cut = b"", 0
        if not (head.startswith(b"data:") or b"\ndata:" in head):
            return
        if _DELTA_BEGINS.search(head):
            self._text += size
        tail = event[-_END:]
        for part in (head, tail):
            self._report(part, 0, len(part), head)


class BodyReader(Reader):
    """Reads along a JSON response, such as one of embeddings, which may be long."""

    def __init__(self) -> None:
        super().__init__()
        self._head = bytearray()
        self._tail = bytearray()
        self._cut = 0

    def feed(self, chunk: bytes) -> None:
        """Keep the ends of the body. Never raises."""
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
        """Examine the ends of the body; return the reported usage, or None if it is incomplete."""
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
    """Decompresses a response for another reader. Bytes of an unknown or broken encoding count as text."""

    def __init__(self, reader: Reader, encoding: str) -> None:
        super().__init__()
        self._reader = reader
        self._unpack = zlib.decompressobj(wbits=47) if encoding in ("gzip", "x-gzip", "deflate") else None

    def feed(self, chunk: bytes) -> None:
        """Decompress a chunk, at most 64 KiB at once. Never raises."""
        if not chunk:
            return
        try:
            while self._unpack is not None and not self._unpack.eof:
                plain = self._unpack.decompress(chunk, _AT_ONCE)
                self._reader.feed(plain)
                chunk = self._unpack.unconsumed_tail
                if not chunk and len(plain) < _AT_ONCE:
                    break
        except zlib.error:
            self._unpack = None
        self._reader.skip(len(chunk))

    def finish(self) -> Usage | None:
        """Return the usage reported to the other reader."""
        return self._reader.finish()

    @property
    def arrived(self) -> int:
        """Tokens of output text that reached the other reader."""
        return self._reader.arrived

    def settle(self, into: int, out: int | None = None, *, is_partial: bool = False) -> Usage:
        """Return what the request has cost according to the other reader."""
        return self._reader.settle(into, out, is_partial=is_partial)


def reader_for(content_type: str, content_encoding: str = "") -> Reader:
    """Return a reader for a response with these fields."""
    is_stream = content_type.strip().lower().startswith("text/event-stream")
    reader = EventReader() if is_stream else BodyReader()
    encoding = content_encoding.strip().lower()
    return reader if encoding in ("", "identity") else CompressedReader(reader, encoding)


def _frame_of(event: bytes) -> tuple[bytes, bytes, int]:
    """Return what is around the only text of an event, and the number of quotes; none without such a text."""
    found = [*_DELTA.finditer(event)]
    if len(found) != 1:
        return b"", b"", 0
    begin, end = event[: found[0].start(1)], event[found[0].end(1) :]
    return begin, end, begin.count(b'"') + end.count(b'"')


def _size_of(text: bytes) -> int:
    """Return the size of JSON text without its escapes."""
    if b"\\" not in text:
        return len(text)
    try:
        return len(_decode(f'"{text.decode()}"')[0].encode("utf-8", "surrogatepass"))
    except ValueError:
        return len(text)
