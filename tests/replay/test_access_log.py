"""Lines of access logs, and the files that they stand in."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from limitgate import ConfigError
from limitgate.replay.access_log import LONGEST_LINE, Entry, Log, format_of, parse_json, parser_of, text_parser

AT = 1_431_857_103_000_000  # 17 May 2015, 10:05:03 UTC
TIME = b"[17/May/2015:10:05:03 +0000]"


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        (b'203.0.113.7 - - %b "GET / HTTP/1.1" 200 12' % TIME, Entry(AT, b"203.0.113.7", "GET", "/", 200)),
        (b'::1 - ann %b "POST /a?b=c HTTP/2.0" 404 - "-" "curl"\r' % TIME, Entry(AT, b"::1", "POST", "/a", 404)),
        (b'h - a b %b "GET /%%C3%%A9%%2F HTTP/1.1" 200 1' % TIME, Entry(AT, b"h", "GET", "/é/", 200)),
        (b'h - - %b "GET http://example.com/x?y HTTP/1.1" 200 1' % TIME, Entry(AT, b"h", "GET", "/x", 200)),
        (b'h - - %b "OPTIONS * HTTP/1.1" 200 1' % TIME, Entry(AT, b"h", "OPTIONS", "*", 200)),
        (b'h - - %b "GET /%%ff" - -' % TIME, Entry(AT, b"h", "GET", "/�", None)),
        (b'h - - [17/May/2015:12:05:03 +0200] "HEAD /x HTTP/1.1" 304 0', Entry(AT, b"h", "HEAD", "/x", 304)),
    ],
)
def test_lines_of_the_common_and_combined_format(line: bytes, entry: Entry) -> None:
    """Client, time with its zone, method and decoded path; no query, and no host of a request to a proxy."""
    assert text_parser()(line) == entry


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense",
        b'h - - %b "\\x16\\x03\\x01" 400 0' % TIME,
        b'h - - %b "-" 408 0' % TIME,
        b'h - - [17/Nov/2015] "GET / HTTP/1.1" 200 1',
        b'h - - [17/Xyz/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 1',
        b'h - - [31/Feb/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 1',
        b'h - - [17/May/2015:25:05:03 +0000] "GET / HTTP/1.1" 200 1',
        b'h - - [17/May/2015:10:05:0x +0000] "GET / HTTP/1.1" 200 1',
        b'h - - [31/Dec/9999:23:59:59 -2359] "GET / HTTP/1.1" 200 1',
        b'h - - [31/Dec/1969:23:59:59 +0000] "GET / HTTP/1.1" 200 1',
        b'h - - [17/May/2015:10:05:03 +9900] "GET / HTTP/1.1" 200 1',
        b"\xff" * 300,
    ],
)
def test_other_lines_are_of_no_request(line: bytes) -> None:
    """They are skipped, whatever the line before was."""
    parse = text_parser()
    assert parse(b'h - - %b "GET / HTTP/1.1" 200 1' % TIME)
    assert parse(line) is None


@pytest.mark.parametrize(
    "time", ["1431857103", "1431857103.0", '"1431857103"', '"2015-05-17T10:05:03Z"', '"2015-05-17 12:05:03+02:00"']
)
def test_lines_of_json(time: str) -> None:
    """Times in seconds or as a date with its zone; headers by name in whatever case."""
    line = f'{{"time": {time}, "client": "::1", "method": "get", "path": "/a%20b?c", "headers": {{"X-API-Key": "k"}}}}'
    assert parse_json(line.encode()) == Entry(AT, b"::1", "GET", "/a b", None, {"x-api-key": "k"})


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        "5",
        "{",
        "[" * 100_000,
        '{"time": "2015-05-17T10:05:03", "client": "h", "method": "GET", "path": "/"}',
        '{"time": true, "client": "h", "method": "GET", "path": "/"}',
        '{"time": 1e400, "client": "h", "method": "GET", "path": "/"}',
        '{"time": 1e15, "client": "h", "method": "GET", "path": "/"}',
        '{"time": 1700000000000, "client": "h", "method": "GET", "path": "/"}',
        '{"time": "253402300800", "client": "h", "method": "GET", "path": "/"}',
        '{"time": "nan", "client": "h", "method": "GET", "path": "/"}',
        '{"time": -1, "client": "h", "method": "GET", "path": "/"}',
        '{"time": "1969-12-31T23:59:59Z", "client": "h", "method": "GET", "path": "/"}',
        '{"time": 1, "client": 5, "method": "GET", "path": "/"}',
        '{"time": 1, "client": "h", "method": "GET", "path": "/", "headers": [1]}',
    ],
)
def test_json_that_is_of_no_request(line: str) -> None:
    """It is skipped."""
    assert parse_json(line.encode()) is None


def test_the_format_is_found() -> None:
    """By the first line that is of a request."""
    text, json = b'h - - %b "GET / HTTP/1.1" 200 1' % TIME, b'{"time": 1, "client": "h", "method": "GET", "path": "/"}'
    assert format_of([b"# comment", text], "log") == "combined"
    assert format_of([b"", json], "log") == "json"
    assert format_of([b"# comment"] * 1000 + [json], "log") == "json"
    assert format_of([b"", b" "], "log") == "combined"
    with pytest.raises(ConfigError, match=r"log: no line is of a request, expected the common or combined format"):
        format_of([b"nonsense"], "log")


def lines_of(log: Log) -> list[bytes]:
    return [line for lines, _ in log.blocks() for line in lines if line]


@pytest.mark.parametrize("compressed", [False, True])
def test_files_are_read_in_blocks(tmp_path: Path, *, compressed: bool) -> None:
    """Whatever their size, with or without a newline at the end."""
    line = b'h - - %b "GET /%%d HTTP/1.1" 200 1' % TIME
    whole = b"\n".join(line % number for number in range(50_000))
    file = tmp_path / "log"
    file.write_bytes(gzip.compress(whole) if compressed else whole)
    assert lines_of(Log(str(file))) == whole.split(b"\n")


@pytest.mark.parametrize("more", [1, LONGEST_LINE, 3 * LONGEST_LINE + 7])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_too_long_is_of_no_request(tmp_path: Path, more: int, end: bytes) -> None:
    """Whatever it begins like, and wherever it stands; one that is just as long as may be is read."""
    line = b'h - - %b "GET / HTTP/1.1" 200 1' % TIME
    longest = line + b" " * (LONGEST_LINE - len(line))
    too_long = longest + b"x" * more
    file = tmp_path / "log"
    file.write_bytes(b"\n".join([line, too_long, line, longest, too_long]) + end)
    log = Log(str(file))
    parse = parser_of(log.format)
    read = lines_of(log)
    assert [parse(each) is not None for each in read] == [True, False, True, True, False]
    assert max(map(len, read)) == LONGEST_LINE


@pytest.mark.parametrize(
    "line", [b'h - - %b "GET / HTTP/1.1" 200 1' % TIME, b'{"time": 1, "client": "h", "method": "GET", "path": "/"}']
)
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path, line: bytes) -> None:
    """Nor of its client."""
    file = tmp_path / "log"
    file.write_bytes(b"\xef\xbb\xbf" + line + b"\n" + line)
    log = Log(str(file))
    parse = parser_of(log.format)
    assert [entry.client for each in lines_of(log) if (entry := parse(each))] == [b"h", b"h"]


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    """A file that is missing, a folder, one that is cut off."""
    with pytest.raises(ConfigError, match="No such file or directory, expected an access log that can be read"):
        Log(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="Is a directory"):
        Log(str(tmp_path))
    cut = tmp_path / "cut.gz"
    whole = b"\n".join(b'h - - %b "GET /%d HTTP/1.1" 200 1' % (TIME, number) for number in range(9))
    cut.write_bytes(gzip.compress(whole)[:-9])
    with pytest.raises(ConfigError, match=r"cut.gz: .* expected an access log"):
        lines_of(Log(str(cut)))


def test_parsers_by_name() -> None:
    """The common format is read by the parser of the combined one."""
    line = b'h - - %b "GET / HTTP/1.1" 200 1' % TIME
    assert parser_of("common")(line) == parser_of("combined")(line) is not None
