"""Lines of access logs, and the files that they stand in."""

from __future__ import annotations

import gzip
import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from limitgate import ConfigError
from limitgate.replay.access_log import (
    LONGEST_LINE,
    Entry,
    Log,
    TextParser,
    format_of,
    parse_json,
    parser_of,
    why_unread,
)

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
    assert TextParser()(line) == entry


@pytest.mark.parametrize(
    ("before", "client"),
    [
        (b"www.example.com:80 203.0.113.7 - -", b"203.0.113.7"),
        (b"10.0.0.1:80 203.0.113.7 - -", b"203.0.113.7"),
        (b"www.example.com:443 host.example.org - ann", b"host.example.org"),
        (b"May 17 10:05:03 web1 nginx: 203.0.113.7 - -", b"203.0.113.7"),
        (b"May 17 10:05:03 10.0.0.5 nginx: 203.0.113.7 - -", b"203.0.113.7"),
        (b"<190>May 17 10:05:03 web1 nginx[123]: 2001:db8::1 - ann b", b"2001:db8::1"),
        (b"<165>1 2015-05-17T10:05:03Z web1 nginx 12 - - 203.0.113.7 - -", b"203.0.113.7"),
        (b"2015-05-17T10:05:03.123456789Z stdout F 203.0.113.7 - -", b"203.0.113.7"),
        (b"[pod/web-5d8f/container-of-it] 203.0.113.7 - -", b"203.0.113.7"),
        (b"web-1  | [2001:db8::1]:443 - -", b"[2001:db8::1]:443"),
        (b"[2015-05-17 10:05:03 +0000] [12] [INFO] 203.0.113.7:5000 - -", b"203.0.113.7:5000"),
        (b"203.0.113.7 - x 198.51.100.1 - -", b"203.0.113.7"),
        (b"- - -", b"-"),
        (b"203.0.113.7", b"203.0.113.7"),
        (b"web1 203.0.113.7 ann", b"203.0.113.7"),
        (b"203.0.113.7 web1 ann", b"203.0.113.7"),
        (b"2001:db8::1:52000 - -", b"2001:db8::1"),
        (b"2001:db8::1:5200 - -", b"2001:db8::1:5200"),
        (b"2001:db8:1:2:3:4:5:6:52000 - -", b"2001:db8:1:2:3:4:5:6"),
        (b"::ffff:203.0.113.7:52000 - -", b"::ffff:203.0.113.7"),
        (b"::1:52000 - -", b"::1"),
        (b":::52000 - -", b"::"),
    ],
)
def test_what_stands_before_a_line_is_not_the_client(before: bytes, client: bytes) -> None:
    """A virtual host, or what syslog, Kubernetes, Docker and servers put there; nor is an address in a user's name."""
    assert TextParser()(b'%b %b "GET / HTTP/1.1" 200 12' % (before, TIME)) == Entry(AT, client, "GET", "/", 200)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            b'<165>1 2015-05-17T10:05:03Z web1 nginx 12 - - host.example - - %b "GET / HTTP/1.1" 200 1' % TIME,
            "cannot tell the client",
        ),
        (b'web1 nginx: host x y %b "GET / HTTP/1.1" 200 1' % TIME, "cannot tell the client"),
        (b'%b "GET / HTTP/1.1" 200 12' % TIME, "cannot tell the client"),
        (b'203.0.113.7 - - [yesterday] "GET / HTTP/1.1" 200 12', "no time or no client"),
        (b'203.0.113.7 - - [32/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 12', "the time cannot be read"),
        (b'host.example - "GET / HTTP/1.1" 200', "no time"),
        (b"nonsense", None),
        (b'h - - %b "-" 408 0' % TIME, None),
    ],
)
def test_a_client_is_not_guessed(line: bytes, why: str | None) -> None:
    """A line whose client is not told from a host or a process is not read; one with a request in it says why."""
    assert TextParser()(line) is None
    told = why_unread(line)
    assert told is None if why is None else told is not None and told.startswith(why)


OWN_TIME = 1_795_881_600_000_000  # 28 November 2026, 16:00


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        (b'127.0.0.1:52000 - "GET /a?b HTTP/1.1" 200', Entry(0, b"127.0.0.1:52000", "GET", "/a", 200)),
        (b'INFO:     127.0.0.1:52000 - "POST /a HTTP/1.1" 404 Not Found', Entry(0, b"127.0.0.1:52000", "POST", "/a", 404)),
        (
            b'\x1b[32mINFO\x1b[0m:     [::1]:33142 - "\x1b[1mGET / HTTP/1.1\x1b[0m" \x1b[32m200 OK\x1b[0m',
            Entry(0, b"[::1]:33142", "GET", "/", 200),
        ),
        (b'INFO:     2001:db8::1:52000 - "GET /a HTTP/1.1" 200 OK', Entry(0, b"2001:db8::1", "GET", "/a", 200)),
        (b'INFO:     ::ffff:203.0.113.7:52000 - "GET /a HTTP/1.1" 200 OK', Entry(0, b"::ffff:203.0.113.7", "GET", "/a", 200)),
        (b'INFO:      - "GET /a HTTP/1.1" 200 OK', Entry(0, b"-", "GET", "/a", 200)),
        (b'INFO:     127.0.0.1:5000 - "WebSocket /ws" [accepted]', Entry(0, b"127.0.0.1:5000", "GET", "/ws", 101)),
        (b'INFO:     127.0.0.1:5000 - "WebSocket /ws" 403', Entry(0, b"127.0.0.1:5000", "GET", "/ws", 403)),
        (
            b'2026-11-28 16:00:00,123 INFO uvicorn.access 127.0.0.1:5000 - "GET /a HTTP/1.1" 200',
            Entry(OWN_TIME + 123_000, b"127.0.0.1:5000", "GET", "/a", 200),
        ),
        (
            b'2026-11-28T17:00:00.123456789+01:00 stdout F INFO:     127.0.0.1:5000 - "GET /a HTTP/1.1" 200 OK',
            Entry(OWN_TIME + 123_456, b"127.0.0.1:5000", "GET", "/a", 200),
        ),
    ],
)
def test_lines_of_uvicorn(line: bytes, entry: Entry) -> None:
    """They have no time of their own: the time is what stands before them, else that of the line before."""
    parse = TextParser()
    assert parse(line) == entry
    assert parse.untimed == (entry.at == 0)


def test_a_line_without_a_time_has_that_of_the_one_before() -> None:
    """So the log of a server is in order, whatever of it has times."""
    parse = TextParser()
    parse(b'h - - %b "GET / HTTP/1.1" 200 1' % TIME)
    found = parse(b'INFO:     127.0.0.1:52000 - "GET / HTTP/1.1" 200 OK')
    assert (found and found.at, parse.untimed) == (AT, 1)


@pytest.mark.parametrize("day", [1, 28])
def test_times_of_syslog_have_no_year(day: int) -> None:
    """They are of the last twelve months."""
    for month in ("Jan", "Jul", "Dec"):
        found = TextParser()(b'%b %2d 16:00:00 web1 uvicorn[12]: 127.0.0.1:1 - "GET / HTTP/1.1" 200' % (month.encode(), day))
        assert found is not None
        at = datetime.fromtimestamp(found.at / 1e6, UTC)
        assert (at.strftime("%b"), at.day, at.hour) == (month, day, 16)
        assert timedelta() <= datetime.now(UTC) - at + timedelta(days=2) <= timedelta(days=369)


@pytest.mark.parametrize("own", [True, False])
def test_lines_that_docker_has_put_into_json(*, own: bool) -> None:
    """With the time of the line, or else with Docker's."""
    text = f"203.0.113.7 - - {TIME.decode()}" if own else "INFO:     203.0.113.7 -"
    line = json.dumps(
        {"log": f'{text} "GET /a HTTP/1.1" 200 OK\n', "stream": "stdout", "time": "2026-11-28T16:00:00.000000001Z"}
    )
    assert parse_json(line.encode()) == Entry(AT if own else OWN_TIME, b"203.0.113.7", "GET", "/a", 200)


@pytest.mark.parametrize(
    "line", [b"x" * LONGEST_LINE, b"[" * LONGEST_LINE, b' - "' * (LONGEST_LINE // 4), b'"A /' * (LONGEST_LINE // 4)]
)
def test_long_lines_take_no_long_time(line: bytes) -> None:
    """Clients may have a hand in them: a second is no more than a slow machine needs for some of them."""
    began = time.process_time()
    assert TextParser()(line) is None
    why_unread(line)
    assert time.process_time() - began < 1


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
    parse = TextParser()
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
    text, line = b'h - - %b "GET / HTTP/1.1" 200 1' % TIME, b'{"time": 1, "client": "h", "method": "GET", "path": "/"}'
    assert format_of([b"# comment", text], "log") == "combined"
    assert format_of([b"", line], "log") == "json"
    assert format_of([b"# comment"] * 1000 + [line], "log") == "json"
    assert format_of([b"", b" "], "log") == "combined"
    assert format_of([b"", text], "log", "common") == format_of([], "log", "common") == "common"
    for given, other in (("json", text), ("combined", line)):
        with pytest.raises(ConfigError, match=rf"log: no line has a request in the format {given}, expected the common"):
            format_of([other], "log", given)
    with pytest.raises(ConfigError, match=r"log: no line has a request, expected the common or combined format"):
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
    with pytest.raises(ConfigError, match="No such file or directory, expected a readable access log"):
        Log(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="Is a directory"):
        Log(str(tmp_path))
    cut = tmp_path / "cut.gz"
    whole = b"\n".join(b'h - - %b "GET /%d HTTP/1.1" 200 1' % (TIME, number) for number in range(9))
    cut.write_bytes(gzip.compress(whole)[:-9])
    with pytest.raises(ConfigError, match=r"cut.gz: .* expected a readable access log"):
        lines_of(Log(str(cut)))


def test_parsers_by_name() -> None:
    """The common format is read by the parser of the combined one."""
    line = b'h - - %b "GET / HTTP/1.1" 200 1' % TIME
    assert parser_of("common")(line) == parser_of("combined")(line) is not None
