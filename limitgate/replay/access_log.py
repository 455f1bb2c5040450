"""Parses access logs: common and combined formats, uvicorn's, and JSON.

Parsing works on bytes, for millions of lines. Servers log at the end of a response, so `TimeOrder` sorts.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote_to_bytes

from limitgate.errors import ConfigError
from limitgate.http.client_ip import canonical

Format = Literal["combined", "common", "json"]

LONGEST_LINE = 1 << 20
"""Bytes; longer lines are skipped."""
_TOO_LONG = b"-"
"""Replaces a longer line; no format parses it."""
_REQUEST = rb'\[([^]"]{20,32})\] "([A-Z]{1,20}) (\S+)(?: (?:HTTP/)?[0-9.]+)?"(?: ([0-9]{3})(?= |$))?'
"""Time, method, target and status. hypercorn omits ``HTTP/``."""
_TEXT = re.compile(rb"(\S+) \S+ \S+ " + _REQUEST)
_PREFIXED = re.compile(rb"(.*?) ?" + _REQUEST)
"""A request after a virtual host, or after a prefix of syslog, Docker or Kubernetes."""
_UVICORN = re.compile(
    rb' - "(?:([A-Z]{1,20}) (\S+) HTTP/[0-9.]+" ([0-9]{3})(?![0-9])|WebSocket (\S+)" (?:\[accepted\]|([0-9]{3})))'
)
"""uvicorn's line after the client. A refused WebSocket has a status."""
_IPV6_PORT = re.compile(rb"([0-9a-fA-F:.]*:[0-9a-fA-F.]+|[0-9a-fA-F:.]*::):([1-9][0-9]{4})")
_ANY_REQUEST = re.compile(rb'"(?:[A-Z]{1,20}|WebSocket) /\S*(?: [^"]*)?"')
_COLOURS = re.compile(rb"\x1b\[[0-9;]*m")
_ISO_TIME = re.compile(
    rb"(?<![0-9])([0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2})(?:[.,]([0-9]{1,9}))?"
    rb"(?: ?(Z|[+-][0-9]{2}:?[0-9]{2}))?"
)
"""Times of Docker, Kubernetes, rsyslog and Python's logging; UTC by default."""
_SYSLOG_TIME = re.compile(rb"(?:^|[ >])([A-Z][a-z]{2}) ([ 0-9][0-9]) ([0-9]{2}:[0-9]{2}:[0-9]{2}) ")
"""Time by RFC 3164, without a year."""
_MONTHS = {name: number for number, name in enumerate(b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)}
_SECOND = 1_000_000
_LATEST = 253_402_300_800 * _SECOND
"""End of the year 9999. Times in ms exceed it."""
_BLOCK = LONGEST_LINE


class Entry(NamedTuple):
    at: int
    """Unix µs, often with whole seconds."""
    client: bytes
    method: str
    path: str
    """Decoded, without query."""
    status: int | None = None
    headers: Mapping[str, str] | None = None
    """By lower-case name."""


Parse = Callable[[bytes], Entry | None]


class TextParser:
    """Parser of the common, combined and uvicorn formats, after any prefix."""

    def __init__(self) -> None:
        self.untimed: int = 0
        """Number of requests without a time. They get the time of the previous line."""
        self._latest = 0

    def __call__(self, line: bytes) -> Entry | None:
        """Parse a line; None without a request of a known client."""
        found = _TEXT.match(line)
        if found is not None and _is_address(found[1]):
            client, time, method, target, status = found.groups()
        else:
            if b"\x1b" in line:
                line = _COLOURS.sub(b"", line)
            found = _PREFIXED.match(line)
            if found is None:
                return self._of_uvicorn(line)
            before, time, method, target, status = found.groups()
            named = _client_in(before)
            if named is None:
                return None
            client = named
        if b":" in client:
            client = _without_port(client)
        at = _time(time)
        if at is None:
            return None
        self._latest = at
        return Entry(at, client, method.decode(), _path(target), int(status) if status else None)

    def _of_uvicorn(self, line: bytes) -> Entry | None:
        found = _UVICORN.search(line)
        if found is None:
            return None
        method, target, status, socket, refused = found.groups()
        before, _, client = line[: found.start()].rpartition(b" ")
        client = _without_port(client)
        if client and not _is_address(client):
            return None
        at = _time_before(before)
        if at is None:
            self.untimed += 1
        else:
            self._latest = at
        status = status or refused or b"101"
        return Entry(self._latest, client or b"-", (method or b"GET").decode(), _path(target or socket), int(status))


def _client_in(before: bytes) -> bytes | None:
    """Return the client. It precedes the ident, which is ``-``, and the user, which may contain blanks."""
    words = before.split()
    for client, ident in pairwise(words):
        if ident == b"-" and _is_address(client):
            return client
    if len(words) == 3 and not _is_address(words[0]) and _is_address(words[1]):
        return words[1]
    if words[1:2] == [b"-"] or len(words) == 3:
        return words[0]
    if len(words) == 4 and words[2] == b"-" and (b":" in words[0] or b"." in words[0]):
        return words[1]  # after a virtual host
    return words[0] if len(words) in (1, 2) and _is_address(words[0]) else None


@lru_cache(maxsize=4096)
def _is_address(word: bytes) -> bool:
    word = _without_port(word)
    return canonical(word.decode("latin-1")) is not None


def _without_port(client: bytes) -> bytes:
    """Remove the port. uvicorn writes IPv6 addresses without brackets, so four digits may belong to the address."""
    if client.count(b":") < 2:
        return client
    found = _IPV6_PORT.fullmatch(client)
    return client if found is None else found[1]


def _time_before(before: bytes) -> int | None:
    if (found := _ISO_TIME.search(before)) is not None:
        date, fraction, zone = found.groups()
        text = b"%b.%b%b" % (date, (fraction or b"0")[:6].ljust(6, b"0"), zone or b"Z")
    elif (found := _SYSLOG_TIME.search(before)) is not None:
        month, day, clock = found.groups()
        now = datetime.now(UTC)
        year = now.year - ((_MONTHS.get(month, 0), int(day)) > (now.month, now.day + 1))
        text = b"%d-%02d-%02dT%b.000000Z" % (year, _MONTHS.get(month, 0), int(day), clock)
    else:
        return None
    with suppress(ValueError):
        return _within_range(round(datetime.fromisoformat(text.decode()).timestamp() * _SECOND))
    return None


def why_unread(line: bytes) -> str | None:
    """Return None for a line without a request."""
    text = _COLOURS.sub(b"", line)
    if not _ANY_REQUEST.search(text):
        return None
    found = _PREFIXED.match(text)
    if found is None:
        return "no time or no client before the request"
    return "cannot tell the client from a host" if _client_in(found[1]) is None else "the time cannot be read"


def parse_json(line: bytes) -> Entry | None:
    """Parse a line with ``time``, ``client``, ``method`` and ``path``. ``status`` and ``headers`` are optional."""
    try:
        entry = json.loads(line)
        if "log" in entry and "client" not in entry:
            return _of_docker(entry)
        at = _json_time(entry["time"])
        client, method, path, headers = entry["client"], entry["method"], entry["path"], entry.get("headers") or {}
        if not (isinstance(client, str) and isinstance(method, str) and isinstance(path, str)):
            return None
        status = entry.get("status")
        named = {str(name).lower(): str(value) for name, value in headers.items()}
        is_status = isinstance(status, int) and not isinstance(status, bool)
        own = _without_port(client.encode())
        return Entry(at, own, method.upper(), _path(path.encode()), status if is_status else None, named or None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _of_docker(entry: dict[str, Any]) -> Entry | None:
    parse = TextParser()
    found = parse(entry["log"].encode())
    return found._replace(at=_json_time(entry["time"])) if found is not None and parse.untimed else found


def parser_of(form: Format) -> Parse:
    return parse_json if form == "json" else TextParser()


def format_of(lines: Sequence[bytes], name: str, given: Format | None = None) -> Format:
    """Detect or check the format by the first lines. Raises `ConfigError`."""
    forms: tuple[Format, ...] = (given,) if given else ("combined", "json")
    for form in forms:
        if any(map(parser_of(form), lines)):
            return form
    if any(line.strip() for line in lines):
        where = f" in the format {given}" if given else ""
        raise ConfigError(
            f"{name}: no line has a request{where}, expected the common or combined format of Apache, nginx and gunicorn, "
            "lines of uvicorn, or JSON with time (in seconds, or as a date with a zone), client, method and path on each line"
        )
    return forms[0]


class Log:
    """A log file, optionally gzip, or ``-``. Raises `ConfigError` if no format fits."""

    def __init__(self, name: str, form: Format | None = None) -> None:
        self.name = name
        self._blocks = self._read_blocks()
        self._first = next(self._blocks, [])
        self.format: Format = form or format_of(self._first, name)

    def check_format(self) -> None:
        """Raises `ConfigError`."""
        format_of(self._first, self.name, self.format)

    @property
    def is_file(self) -> bool:
        return self.name != "-" and Path(self.name).is_file()

    @property
    def size(self) -> int:
        """Size in bytes; 0 if unknown."""
        return Path(self.name).stat().st_size if self.is_file else 0

    def blocks(self) -> Iterator[tuple[list[bytes], int]]:
        """Yield blocks of thousands of lines, with the bytes read so far."""
        yield self._first, self._at
        for lines in self._blocks:
            yield lines, self._at

    def _read_blocks(self) -> Iterator[list[bytes]]:
        self._at = 0
        try:
            with open(0 if self.name == "-" else self.name, "rb") as raw:  # noqa: PTH123 - 0 is standard input
                is_gzip = raw.peek(2)[:2] == b"\x1f\x8b"
                lines: Any = gzip.GzipFile(fileobj=raw) if is_gzip else raw
                rest, mark = b"", BOM_UTF8
                while block := lines.read(_BLOCK):
                    self._at = raw.tell() if raw.seekable() else 0  # a named pipe is not seekable
                    *whole, rest = (rest + block.removeprefix(mark)).split(b"\n")
                    mark, rest = b"", rest[: LONGEST_LINE + 1]
                    if whole:
                        whole[0] = _bounded(whole[0])  # no other line is longer than a block
                        yield whole
                if rest:
                    yield [_bounded(rest)]
        except (OSError, EOFError, zlib.error) as error:  # for example a truncated gzip file
            message = f"{self.name}: {getattr(error, 'strerror', None) or error}, expected a readable access log"
            raise ConfigError(message) from error


def _bounded(line: bytes) -> bytes:
    return line if len(line) <= LONGEST_LINE else _TOO_LONG


@lru_cache(maxsize=1)
def _time(text: bytes) -> int | None:
    with suppress(ValueError):
        midnight, hour, minute, second = _midnight(text[:11], text[20:]), int(text[12:14]), int(text[15:17]), int(text[18:20])
        if hour < 24 and minute < 60 and second < 61:
            return _within_range((midnight + hour * 3600 + minute * 60 + second) * _SECOND)
    return None


@lru_cache(maxsize=100)  # most lines share the last days
def _midnight(date: bytes, zone: bytes) -> int:
    month = _MONTHS.get(date[3:6])
    if month is None or date[2:3] + date[6:7] != b"//":
        raise ValueError(date)
    moment = f"{int(date[7:11]):04}-{month:02}-{int(date[:2]):02}T00:00:00{zone.decode().strip() or '+0000'}"
    return int(datetime.fromisoformat(moment).timestamp())


@lru_cache(maxsize=4096)  # most requests of a log have the same few targets
def _path(target: bytes) -> str:
    if not target.startswith(b"/") and b"://" in target:
        target = b"/" + target.split(b"://", 1)[1].partition(b"/")[2]
    path = target.partition(b"?")[0].partition(b"#")[0]
    return (unquote_to_bytes(path) if b"%" in path else path).decode("utf-8", "replace")


def _json_time(value: object) -> int:
    text = str(value)
    try:
        seconds = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError(f"{text} has no time zone") from None
        seconds = moment.timestamp()
    return _within_range(round(seconds * _SECOND))


def _within_range(at: int) -> int:
    if not 0 <= at < _LATEST:
        raise ValueError(f"{at} µs is before 1970 or after 9999")
    return at


LATE = 120
"""Seconds; later lines are decided at the current time."""
MOST = 500_000
"""Maximum of requests kept for sorting."""
_at = itemgetter(0)


class TimeOrder:
    """Sorts almost ordered requests; stable."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Entry]] = {}
        self._count = 0
        self._latest = 0
        self._next = 0

    def push(self, entry: Entry) -> Sequence[Entry]:
        """Return requests that no later line can precede."""
        second = max(entry.at // _SECOND, self._next)
        waiting = self._waiting.get(second)
        if waiting is None:
            self._waiting[second] = [entry]
        else:
            waiting.append(entry)
        self._count += 1
        if second > self._latest:
            self._latest = second
            return [*self._until(second - LATE)]
        return [*self._until(min(self._waiting) + 1)] if self._count > MOST else ()

    def rest(self) -> Sequence[Entry]:
        return [*self._until(self._latest + 1)]

    def _until(self, end: int) -> Iterator[Entry]:
        for second in sorted(each for each in self._waiting if each < end):
            entries = self._waiting.pop(second)
            self._count -= len(entries)
            self._next = second + 1
            entries.sort(key=_at)
            yield from entries
