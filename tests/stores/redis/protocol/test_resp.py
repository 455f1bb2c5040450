"""RESP in Python reads and writes what hiredis does, which need not be installed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, strategies as st
from redis.exceptions import AskError, MovedError, NoScriptError, OutOfMemoryError, ResponseError, TryAgainError

from limitgate.stores.redis import python_resp, wire
from limitgate.stores.redis.wire import error_of

try:
    import hiredis
except ImportError:
    hiredis = None

NOTHING = object()
needs_hiredis = pytest.mark.skipif(hiredis is None, reason="hiredis, which to compare with, is not installed")


class Error(Exception):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Error) and self.args == other.args

    __hash__ = Exception.__hash__


def heard(readers: Any, data: bytes, size: int) -> list[Any]:
    """Replies to bytes that come in pieces of a size, and "wrong" at the end where there is no further one."""
    reader = readers.Reader(notEnoughData=NOTHING, replyError=Error)
    replies: list[Any] = []
    try:
        for at in range(0, len(data), size):
            reader.feed(data[at : at + size])
            while (reply := reader.gets()) is not NOTHING:
                replies.append((type(reply).__name__, reply))
    except (readers.ProtocolError, TypeError):
        return [*replies, "wrong"]
    return [*replies, reader.has_data()]


REPLIES = [
    b"+OK\r\n", b"+\r\n", b"-ERR \xff x\r\n", b":0\r\n", b":-12\r\n", b"$-1\r\n", b"$0\r\n\r\n", b"$4\r\na\r\nb\r\n",
    b"*-1\r\n", b"*0\r\n", b"*3\r\n:1\r\n$-1\r\n*1\r\n-OOM no\r\n", b"_\r\n", b"#t\r\n", b"#f\r\n", b",1.5\r\n",
    b",-inf\r\n", b",1e5\r\n", b",.5\r\n", b",1.\r\n", b"(-12345678901234567890\r\n", b"=7\r\ntxt:abc\r\n", b"=-1\r\n",
    b"%1\r\n:1\r\n:2\r\n", b"~2\r\n:1\r\n:1\r\n", b">2\r\n+invalidate\r\n:2\r\n", b"*1\r\n" * 12 + b":1\r\n",
]  # fmt: skip
WRONG = [
    b":+1\r\n", b":1_2\r\n", b": 5\r\n", b":\r\n", b":-0\r\n", b":007\r\n", b":99999999999999999999\r\n", b"$-2\r\n",
    b"$03\r\n", b"$?\r\n", b"*-2\r\n", b"*99999999999\r\n", b"_x\r\n", b"#x\r\n", b"#true\r\n", b",x\r\n", b",1_0\r\n",
    b",0x10\r\n", b"(12a\r\n", b"?x\r\n", b"\x80noise", b"\r\n", b"HTTP/1.1 400 Bad Request\r\n",
    b"%1\r\n*1\r\n:1\r\n:2\r\n",
]  # fmt: skip


@needs_hiredis
@given(st.lists(st.sampled_from(REPLIES), max_size=6), st.sampled_from([b"", *WRONG]), st.integers(1, 60))
def test_replies_are_read_as_by_hiredis(replies: list[bytes], wrong: bytes, size: int) -> None:
    """Property: values, their types and mistakes, however the bytes are cut into pieces."""
    data = b"".join(replies) + wrong
    assert heard(python_resp, data, size) == heard(hiredis, data, size)


@pytest.mark.parametrize("wrong", [b"$3\r\nabcXY", b"!5\r\nERR x\r\n!-2\r\n", b"+" + b"x" * 2**17])
def test_what_only_hiredis_believes_is_wrong(wrong: bytes) -> None:
    """A string of another length than was said; a line without end."""
    assert heard(python_resp, wrong, 2**16)[-1] == "wrong"


def test_attributes_are_no_reply() -> None:
    """They are left out: what they belong to counts."""
    assert heard(python_resp, b"|1\r\n:1\r\n:2\r\n:3\r\n", 1) == [("int", 3), False]


@needs_hiredis
@given(st.lists(st.binary(max_size=20) | st.text(st.characters(exclude_categories=["Cs"])) | st.integers(), min_size=1))
def test_commands_are_packed_as_by_hiredis(words: list[Any]) -> None:
    """Property: text, bytes and numbers."""
    assert python_resp.pack_command(words) == hiredis.pack_command(tuple(words))


def test_a_reply_in_many_pieces_takes_time_by_its_size() -> None:
    """Neither a long text nor a long list is read again with each piece."""
    reader = python_resp.Reader(notEnoughData=NOTHING, replyError=Error)
    searched = 0

    class Data(bytearray):
        def find(self, *args: Any) -> int:
            nonlocal searched
            searched += len(self) - args[1]
            return super().find(*args)

    reader._data = Data()
    data = b"*2000\r\n" + b":1\r\n" * 1999 + b"$20000\r\n" + b"x" * 20_000 + b"\r\n"
    replies = []
    for at in range(0, len(data), 64):
        reader.feed(data[at : at + 64])
        if (reply := reader.gets()) is not NOTHING:
            replies.append(reply)
    assert [len(reply) for reply in replies] == [2000]
    assert searched < 64 * 2 * 2002


ERRORS = {
    "ASK 1 h1:7000": AskError("1 h1:7000"),
    "MOVED 1 h1:7000": MovedError("1 h1:7000"),
    "TRYAGAIN later": TryAgainError("later"),
    "NOSCRIPT no": NoScriptError("no"),
    "OOM no": OutOfMemoryError("no"),
    "ERR no such thing": ResponseError("no such thing"),
    "BUSY no": ResponseError("BUSY no"),
    "": ResponseError(""),
}


@pytest.mark.parametrize("text", ERRORS)
def test_the_kind_of_an_error_is_known_by_its_code(text: str) -> None:
    """On every version of redis-py."""
    error = error_of(text)
    assert (type(error), error.args) == (type(ERRORS[text]), ERRORS[text].args)


@pytest.mark.parametrize("text", ["OOM no", "READONLY You can't write", "MISCONF no"])
@pytest.mark.parametrize("before", ["ERR Error running script (call to f_1): @user_script:1", "@user_script: 7"])
def test_errors_that_redis_6_wraps(before: str, text: str) -> None:
    """What a script's command met, alone and returned by the script."""
    error, plain = error_of(f"{before}: -{text}"), error_of(text)
    assert (type(error), error.args) == (type(plain), plain.args)


WITHOUT = """
import sys
from types import ModuleType
sys.modules["hiredis"] = module = {instead}
if module is not None:
    module.__version__, module.Reader, module.pack_command = "3.1.0", object(), object()
from limitgate.stores.redis.aio.store import AsyncRedisStore
from limitgate.stores.redis.threads.store import RedisStore
from limitgate.stores.redis import python_resp
from limitgate.stores.redis import wire
assert wire.Reader is python_resp.Reader and wire.pack_command is python_resp.pack_command
"""


@pytest.mark.parametrize("instead", ["None", "ModuleType('hiredis')"], ids=["absent", "too old"])
def test_without_hiredis_replies_are_read_in_python(instead: str) -> None:
    """Or with one that is too old to tell push messages from replies."""
    subprocess.run([sys.executable, "-c", WITHOUT.format(instead=instead)], check=True)
    assert (wire.Reader is python_resp.Reader) is (hiredis is None)
