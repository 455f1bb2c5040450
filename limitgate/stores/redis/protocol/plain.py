"""Plain plans on the wire: one script for each shape of plan, and a reply that is one string of numbers. Pure: no connection.

Almost every request makes a plain plan. Calls of one shape differ in keys and numbers alone, see limitgate/lua/plain.lua.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from importlib.resources import files
from typing import NamedTuple

from limitgate.errors import StoreError
from limitgate.limits.template import PlainShape, PlainSpend, PlanTemplate
from limitgate.limits.written_out import compiled, each_window

_LINES = (files("limitgate") / "lua" / "plain.lua").read_text("utf-8").splitlines()
"""Read at once: when the first request comes, no file may be left to open."""
_HEAD = struct.Struct("<2q")  # the clock, no memory
_HEAD_SIZE = _HEAD.size
NOT_CARRIED_OUT, ADMITTED = -1, 1
"""Of a plan: a bucket was not as expected, so nothing was charged; it was admitted, and every charge fitted."""


_Repetition = tuple[Mapping[str, object], Sequence[int]]
"""Of a bucket the texts for names in its lines, and the places of its windows."""


class Script(NamedTuple):
    """A script for Redis."""

    text: str
    sha: str
    """The name by which Redis knows it."""

    @classmethod
    def of(cls, text: str) -> Script:
        """The script of a text."""
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    def words(self, in_full: bool) -> tuple[str, str]:  # noqa: FBT001 - called for each call
        """First words of a command that runs it: by its text if ``in_full``. The number of keys, keys and arguments follow."""
        return ("EVAL", self.text) if in_full else ("EVALSHA", self.sha)


@cache
def script_of(shape: PlainShape) -> Script:
    """Script for the plans of a shape."""
    return Script.of(_script(shape))


@cache
def words_of(shape: PlainShape, in_full: bool) -> tuple[str, str]:  # noqa: FBT001 - as `Script.words`
    """The `Script.words` for plans of a shape."""
    return script_of(shape).words(in_full)


def packed(words: tuple[str, str], plans: Sequence[PlainSpend]) -> bytes:
    """Pack the command for plans of one shape in RESP, by its first words, see `Script.words`.

    A crowd mostly asks for the same of different buckets, so what is asked is sent once for each template.
    """
    first, is_mixed = plans[0].template, False
    keys: Sequence[str] = plans[0].keys
    if len(plans) > 1:
        keys = []
        for plan in plans:
            keys += plan.keys
            if plan.template is not first:
                is_mixed = True
    elif len(keys) == 1:
        key = keys[0].encode()
        before, after = _around_key(words, len(key), first)
        return before + key + after
    if not is_mixed:
        before, after = _around_keys(words, len(keys), first)
        return before + _packed_keys(keys) + after
    templates = [plan.template for plan in plans]
    numbers = {template: number for number, template in enumerate(dict.fromkeys(templates), 1)}
    which = struct.pack(f"<{len(templates)}H", *[numbers[template] for template in templates])
    return _head(words, len(keys), len(numbers)) + _packed_keys(keys) + _bulk(which) + b"".join(map(_asked, numbers))


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


_EMPTY = _bulk(b"")


@lru_cache(maxsize=1024)
def _head(words: tuple[str, str], keys: int, templates: int) -> bytes:
    """Pack the beginning of a command, up to the number of keys."""
    return b"*%d\r\n" % (4 + keys + templates) + b"".join([_bulk(word.encode()) for word in (*words, str(keys))])


@lru_cache(maxsize=1024)
def _around_keys(words: tuple[str, str], keys: int, template: PlanTemplate) -> tuple[bytes, bytes]:
    """Pack what stands before and behind the keys of a command for plans of one template."""
    return _head(words, keys, 1), _EMPTY + _asked(template)


@lru_cache(maxsize=1024)
def _around_key(words: tuple[str, str], size: int, template: PlanTemplate) -> tuple[bytes, bytes]:
    """Pack what stands around the only key of a command, of so many bytes."""
    before, after = _around_keys(words, 1, template)
    return before + b"$%d\r\n" % size, b"\r\n" + after


def _packed_keys(keys: Sequence[str]) -> bytes:
    """Pack keys as `_bulk` does, all at once if they are of one length, as ours mostly are: digests behind one prefix."""
    between = f"\r\n${len(keys[0])}\r\n"
    text = f"{between}{between.join(keys)}\r\n"
    if text.isascii() and len(set(map(len, keys))) == 1:
        return text.encode()[2:]
    return b"".join([_bulk(key.encode()) for key in keys])


@lru_cache(maxsize=1024)
def _asked(template: PlanTemplate) -> bytes:
    """Pack the numbers of a template's windows for the script."""
    return _bulk(
        b"".join(
            _packed_window(*bucket.algorithm.encode_charge(limit, window, cost, 0, 0))
            for bucket, cost, *_ in template.buckets
            for limit, window in zip(bucket.limits, bucket.ids)
        )
    )


def _packed_window(window: int, count: int, *numbers: int) -> bytes:
    """Pack what is asked of a window, by the numbers of its charge."""
    return window.to_bytes(6, "little") + count.to_bytes(6, "little") + struct.pack("<5d", count, *numbers)


PlainAnswers = tuple[int, bool, Sequence[int] | None]
"""Clock of the server in Unix µs; true if Redis is out of memory, so that nothing was charged; and per plan `ADMITTED`,
`NOT_CARRIED_OUT`, or 0 or 2 where a charge did not fit: None where all plans were admitted."""


def answers(shape: PlainShape, plans: Sequence[PlainSpend], reply: object) -> PlainAnswers:
    """Decode the reply to plans of a shape, and note in each what it read. Raises `StoreError` for any other reply."""
    layout, note = _layout(shape)
    if type(reply) is not bytes or len(reply) != _HEAD_SIZE + len(plans) * layout.size:
        raise StoreError(f"unexpected reply of {type(reply).__name__} from the script", "reply")
    now, unwritten = _HEAD.unpack_from(reply)
    numbers = reply[_HEAD_SIZE:]
    if note(plans, layout.iter_unpack(numbers), now):
        return now, unwritten > 0, None
    return now, unwritten > 0, [verdict for verdict, *_ in layout.iter_unpack(numbers)]


_Note = Callable[[Sequence[PlainSpend], Iterator[Sequence[int]], int], bool]
_NOTE = """
def note(plans, each, now):
    all_admitted = True
    for plan, (verdict, {numbers}) in zip(plans, each):
        {counts} = plan.template.counts
        plan.now = now
        plan.debts = {debts}
        plan.admitted = verdict > 0
        if verdict != {admitted}:
            all_admitted = False
    return all_admitted
"""


@cache
def _layout(shape: PlainShape) -> tuple[struct.Struct, _Note]:
    """Layout of the reply to a plan, and the function that notes replies in plans. It returns true if all were `ADMITTED`.

    It is written out window by window, as the script is: a loop takes twice as long.
    """
    windows = sum(windows for windows, _ in shape.buckets)
    each = partial(each_window, windows)
    source = _NOTE.format(
        admitted=ADMITTED,
        numbers=each("whole{n}, rest{n},"),
        counts=each("count{n},"),
        debts=f"({each('whole{n} * count{n} + rest{n},')})",
    )
    return struct.Struct(f"<{1 + 2 * windows}q"), compiled(source, "note")


def _script(shape: PlainShape) -> str:
    """Write out the repeated lines of limitgate/lua/plain.lua for plans of a shape."""
    first = 1
    buckets: dict[str, list[_Repetition]] = {"--bucket": [], "--ban": []}
    names: Mapping[str, object]
    for place, (windows, enforced) in enumerate(shape.buckets):
        value = "<BI7" + "c12I7I6" * windows
        names = {"$b": place, "$bytes": 8 + 25 * windows, "$value": value, "$refuses": str(enforced).lower()}
        buckets["--bucket" if windows else "--ban"].append((names, range(first, first + windows)))
        first += windows
    lines: list[str] = []
    block: list[str] | None = None
    repeated: Sequence[_Repetition] = ()
    for line in _LINES:
        if line in buckets:
            block, repeated = [], buckets[line]
        elif line == "--end" and block is not None:
            for names, of_bucket in repeated:
                lines += [_filled(each, names) for each in _unrolled(block, of_bucket)]
            block = None
        else:
            (lines if block is None else block).append(line)
    return _filled("\n".join(lines), {"$buckets": len(shape.buckets), "$numbers": 2 * (first - 1) + 1})


def _unrolled(block: Sequence[str], windows: Sequence[int]) -> Iterator[str]:
    """Lines of a block, those that end in ``--window`` once for each window."""
    for line in block:
        if line.endswith("--window"):
            yield from [_filled(line.removesuffix("--window").rstrip(), {"$w": window}) for window in windows]
        else:
            yield line


def _filled(text: str, names: Mapping[str, object]) -> str:
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, str(names[name]))
    return text
