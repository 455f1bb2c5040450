"""JSON bodies: what is parsed, what a pointer finds, and that a WSGI application reads the same bytes as before."""

from __future__ import annotations

import io
import json
import math
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from limitgate.errors import BodyError, ConfigError
from limitgate.http import body as reading
from limitgate.http.body import DEEPEST, LONGEST_POINTER, ReplayedInput, declared_length, parsed, pointer, read_input, text_at
from tests.support.effort import EXAMPLES


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


# --- parsing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"user=1",
        b"{",
        b'{"user": }',
        b"\xff\xfe\xfd",
        b'{"user": "\xff"}',
        b"\x1f\x8b\x08",
        b"--x\r\n",
        b"\xef\xbb\xbf",
    ],
)
def test_body_that_is_not_json_is_none(data: bytes) -> None:
    assert parsed(data) is None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be"])
def test_encodings_that_applications_read(encoding: str) -> None:
    """Python's `json.loads` reads them, so that a client could otherwise hide a member from its limit."""
    data = '{"user": "ä\\"[[["}'.encode(encoding)
    assert parsed(data) == json.loads(data) == {"user": 'ä"[[['}


def test_the_last_of_duplicate_members_counts() -> None:
    """As in Python's parsers."""
    assert parsed(b'{"user": 1, "user": 2}') == {"user": 2}


def test_a_body_may_be_as_deep_as_is_sensible() -> None:
    assert parsed(nested(DEEPEST)) is not None
    assert parsed(b"[" + b",".join([nested(DEEPEST - 1)] * 50) + b"]") is not None
    assert parsed(b'{"text": "' + b"[" * 1000 + b'"}') == {"text": "[" * 1000}
    for deep in (nested(DEEPEST + 1), nested(100_000), b'{"a":' * 30_000, nested(1000).decode().encode("utf-16")):
        with pytest.raises(BodyError, match="nested more than 100 levels deep") as raised:
            parsed(deep)
        assert raised.value.status == 413


def test_an_integer_that_python_does_not_parse() -> None:
    with pytest.raises(BodyError, match="too many digits"):
        parsed(b'{"user": ' + b"9" * 5000 + b"}")


@settings(max_examples=EXAMPLES)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_body_is_parsed_as_applications_do(data: bytes) -> None:
    try:
        expected = json.loads(data)
    except ValueError:
        expected = None
    found = parsed(data)
    assert found == expected or repr(found) == repr(expected)  # NaN does not equal itself


@pytest.mark.parametrize(
    ("text", "length"),
    [(None, None), ("", None), ("0", 0), (" 12 ", 12), ("-1", None), ("1e3", None), ("\u0663", None), ("9" * 50, None)],
)
def test_content_length_is_parsed_or_none(text: str | None, length: int | None) -> None:
    if text == "9" * 50:
        assert (declared_length(text) or 0) > 10**18
    else:
        assert declared_length(text) == length


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 101 + b'"' + b'\\"' * 30_000,
        b"[" * 101 + b'"' * 65_000,
        b"[" * 101 + b"\\" * 65_000,
        b'["' + b"{" * 101 + b"\\" * 65_000,
        b"[" + b"1" * 65_000 + b".5]",
        b"[1e" + b"9" * 65_000 + b"]",
        b"[" + b"[]," * 21_000 + b"[]]",
        b'["' + b"\\ud800" * 10_000 + b'"]',
    ],
    ids=lambda data: repr(data[-8:]),
)
def test_body_parsing_at_worst_takes_bounded_time(data: bytes) -> None:
    """Four times the input takes no more than about four times as long."""
    began = time.process_time()
    for _ in range(3):
        with suppress(BodyError):
            parsed(data)
    assert time.process_time() - began < 1


# --- pointers ---------------------------------------------------------------------------------------------------------

DOCUMENT = {
    "user": {"id": 7, "": "empty", "a/b": "slash", "m~n": "tilde", "~1": "both", "0": "zero", " ": "space"},
    "list": ["first", {"id": "second"}, True, None, 1.5],
    "": "nameless",
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("/user/id", "7"),
        ("/user/", "empty"),
        ("/user/a~1b", "slash"),
        ("/user/m~0n", "tilde"),
        ("/user/~01", "both"),
        ("/user/0", "zero"),
        ("/user/ ", "space"),
        ("/", "nameless"),
        ("/list/0", "first"),
        ("/list/1/id", "second"),
        ("/list/2", "true"),
        ("/list/3", None),
        ("/list/4", "1.5"),
        ("/list/5", None),
        ("/list/01", None),
        ("/list/-1", None),
        ("/list/-", None),
        ("/list/\u0660", None),
        ("/list/99999999999999999999", None),
        ("/list", None),
        ("/user", None),
        ("/User/id", None),
        ("/user/id/0", None),
        ("/list/0/0", None),
        ("/nobody", None),
    ],
)
def test_a_pointer_finds_text(text: str, value: str | None) -> None:
    assert text_at(DOCUMENT, pointer(text)) == value


@pytest.mark.parametrize("text", ["", "user", "#/user", "/a~2", "/a~", "/" + "x" * LONGEST_POINTER])
def test_json_pointer_invalid_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a JSON pointer"):
        pointer(text)


@pytest.mark.parametrize(
    ("spellings", "text"),
    [
        (["1", "1.0", "1e0", "10e-1", '"1"'], "1"),
        (["0", "-0", "-0.0", "0e9"], "0"),
        (["100", "1e2", "100.0"], "100"),
        (["-1.5", "-15e-1"], "-1.5"),
        (["true", '"true"'], "true"),
        (["false"], "false"),
        (["1e400", "2e999", "Infinity"], "Infinity"),
        (["NaN"], "NaN"),
        (['"\\u0061"', '"a"'], "a"),
    ],
)
def test_equal_values_have_one_spelling(spellings: list[str], text: str) -> None:
    """A client cannot choose another bucket by another spelling of the same number."""
    assert {text_at(parsed(f"[{spelling}]".encode()), pointer("/0")) for spelling in spellings} == {text}


@pytest.mark.parametrize("document", [None, [], {}, "text", 1, math.nan, [[]], [{}], [None]])
def test_json_pointer_to_a_missing_value_finds_nothing(document: Any) -> None:
    assert text_at(document, pointer("/0")) is None


# --- WSGI's input -----------------------------------------------------------------------------------------------------


def environ_of(data: bytes, **more: Any) -> dict[str, Any]:
    return {"wsgi.input": io.BytesIO(data), "CONTENT_LENGTH": str(len(data)), **more}


def test_a_body_is_read_and_given_back() -> None:
    environ = environ_of(b"hello")
    assert read_input(environ, 5) == b"hello"
    assert environ["wsgi.input"].read() == b"hello"


def test_no_byte_beyond_the_body_is_read() -> None:
    """A server need not simulate the end of the file (PEP 3333): the next request of the connection may follow."""
    stream = io.BytesIO(b"helloGET / HTTP/1.1")
    assert read_input({"wsgi.input": stream, "CONTENT_LENGTH": "5"}, 100) == b"hello"
    assert stream.read() == b"GET / HTTP/1.1"


@pytest.mark.parametrize("more", [{"CONTENT_LENGTH": ""}, {"CONTENT_LENGTH": "0"}])
def test_wsgi_request_without_a_body_reads_nothing(more: dict[str, Any]) -> None:
    environ = environ_of(b"unread", **more)
    assert read_input(environ, 5) == b""
    assert environ["wsgi.input"].read() == b"unread"


@pytest.mark.parametrize("size", [5, 6])
def test_a_body_that_ends_with_its_input(size: int) -> None:
    environ = {"wsgi.input": io.BytesIO(b"x" * size), "wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
    if size > 5:
        with pytest.raises(BodyError, match="more than 5 bytes"):
            read_input(environ, 5)
    else:
        assert read_input(environ, 5) == b"xxxxx"
    assert environ["wsgi.input"].read() == b"x" * size


def test_a_chunked_body_whose_end_is_unknown() -> None:
    """It is not absent, as the application may know how to read it."""
    with pytest.raises(BodyError) as raised:
        read_input({"wsgi.input": io.BytesIO(b"5\r\nhello"), "HTTP_TRANSFER_ENCODING": "chunked"}, 5)
    assert raised.value.status == 411


def test_a_body_that_is_too_large_is_not_touched() -> None:
    environ = environ_of(b"x" * 6)
    stream = environ["wsgi.input"]
    with pytest.raises(BodyError) as raised:
        read_input(environ, 5)
    assert (raised.value.status, stream.tell(), environ["wsgi.input"]) == (413, 0, stream)


class Broken(io.BytesIO):
    """An input whose client leaves after what it has."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if not data:
            raise ConnectionResetError
        return data


@pytest.mark.parametrize("stream", [io.BytesIO, Broken])
def test_body_of_a_client_that_leaves_is_incomplete(stream: Any) -> None:
    environ = {"wsgi.input": stream(b"hell"), "CONTENT_LENGTH": "5"}
    with pytest.raises(BodyError) as raised:
        read_input(environ, 5)
    assert raised.value.status == 400
    assert environ["wsgi.input"].read(4) == b"hell"


def test_body_of_a_slow_client_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is checked between two reads, and what was read is given back."""
    now = iter(range(0, 1000, 6))
    monkeypatch.setattr(reading, "monotonic", lambda: float(next(now)))
    data = b"x" * 60_000
    environ = environ_of(data)
    with pytest.raises(BodyError) as raised:
        read_input(environ, 65_536)
    assert raised.value.status == 408
    assert environ["wsgi.input"].read() == data


READS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["read", "readline", "readlines"]), st.integers(-1, 12)),
        st.tuples(st.sampled_from(["read", "readline", "readlines"]), st.just(None)),
    ),
    max_size=8,
)


@settings(max_examples=EXAMPLES)
@given(st.binary(max_size=30).map(lambda data: data.replace(b"\x00", b"\n")), st.integers(0, 30), READS)
def test_replayed_input_reads_like_a_file(data: bytes, place: int, reads: list[tuple[str, int | None]]) -> None:
    replayed, file = ReplayedInput(data[:place], io.BytesIO(data[place:])), io.BytesIO(data)
    for name, size in reads:
        arguments = () if size is None else (size,)
        assert getattr(replayed, name)(*arguments) == getattr(file, name)(*arguments)
    assert [*replayed] == [*file]
    replayed.close()


def test_replayed_input_is_read_into_a_buffer() -> None:
    replayed, buffer = ReplayedInput(b"hel", io.BytesIO(b"lo")), bytearray(4)
    assert (replayed.readinto(buffer), bytes(buffer)) == (4, b"hell")
    assert (replayed.readinto(buffer), bytes(buffer[:1])) == (1, b"o")
