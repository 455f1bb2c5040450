"""Encodes plain plans: one script per shape of plans, and a reply that is one string of numbers.

See plain.lua and refund.lua in limitgate/lua.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from importlib.resources import files
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from limitgate.algorithms import plain_pieces
from limitgate.algorithms.base import compiled, each_window
from limitgate.errors import StoreError
from limitgate.limits.bucket import Bucket
from limitgate.limits.template import (
    PlainRefund,
    PlainSpend,
    PlanTemplate,
    RefundTemplate,
    ScriptVariant,
    straight_of,
)

_LINES, _REFUND_LINES = [
    (files("limitgate") / "lua" / name).read_text("utf-8").splitlines() for name in ("plain.lua", "refund.lua")
]
"""Read on import, so that no request opens a file."""
_PIECES = plain_pieces()
# Redis' clock, and whether it is out of memory.
_HEAD = struct.Struct("<2q")
_HEAD_SIZE = _HEAD.size
NOT_CARRIED_OUT, ADMITTED = -1, 1
"""Results of a plan: unexpected buckets, or all charges fitted."""


_T = TypeVar("_T", PlanTemplate, RefundTemplate)
_Encoded = TypeVar("_Encoded")


def encoded_once(encode: Callable[[_T], _Encoded]) -> Callable[[_T], _Encoded]:
    """Keep the result in the template. A cache by template would keep the templates of replaced rules alive."""

    def encoded(template: _T) -> _Encoded:
        found: _Encoded | None = template.encodings.get(encoded)
        if found is None:
            found = template.encodings[encoded] = encode(template)
        return found

    return encoded


class Script(NamedTuple):
    text: str
    sha: str
    """SHA-1 of the script, its name in Redis."""

    @classmethod
    def of(cls, text: str) -> Script:
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    def words(self, in_full: bool) -> tuple[str, str]:  # noqa: FBT001 - used for each call
        """Return a command's first words, with the text if ``in_full``."""
        return ("EVAL", self.text) if in_full else ("EVALSHA", self.sha)


@cache
def script_of(shape: ScriptVariant) -> Script:
    return Script.of(_script(shape))


@cache
def words_of(shape: ScriptVariant, in_full: bool) -> tuple[str, str]:  # noqa: FBT001 - same signature as `Script.words`
    return script_of(shape).words(in_full)


def packed_refunds(words: tuple[str, str], shape: ScriptVariant, plans: Sequence[PlainRefund]) -> bytes:
    keys = [key for plan in plans for key in plan.keys]
    numbers = {template: number for number, template in enumerate(dict.fromkeys([plan.template for plan in plans]), 1)}
    which = b""
    if len(numbers) > 1:
        which = struct.pack(f"<{len(plans)}H", *[numbers[plan.template] for plan in plans])
    head, given = _head(words, len(keys), len(numbers) + 1), _given(shape)(plans)
    return head + _packed_keys(keys) + _bulk(which) + _bulk(given) + b"".join(map(_asked_back, numbers))


def packed(words: tuple[str, str], plans: Sequence[PlainSpend]) -> bytes:
    """Pack a command. Equal templates are packed once. ``words`` are from `words_of`."""
    first, is_mixed = plans[0].template, False
    keys: Sequence[str] = plans[0].keys
    if len(plans) > 1:
        keys = []
        for plan in plans:
            keys += plan.keys
            if plan.template is not first:
                is_mixed = True
    elif len(keys) == 1 and not first.has_slots:
        key = keys[0].encode()
        # Usually without a call.
        after: bytes = first.encodings.get(_after_key) or _after_key(first)
        return _before_key(words, len(key)) + key + after
    slots = b""
    if first.has_slots:
        slots = _bulk(struct.pack(f"<{len(plans)}d", *[plan.slot for plan in plans]))
    if not is_mixed:
        return _head(words, len(keys), 1 + first.has_slots) + _packed_keys(keys) + _EMPTY + _asked(first) + slots
    templates = [plan.template for plan in plans]
    numbers = {template: number for number, template in enumerate(dict.fromkeys(templates), 1)}
    which = struct.pack(f"<{len(templates)}H", *[numbers[template] for template in templates])
    head = _head(words, len(keys), len(numbers) + first.has_slots)
    return head + _packed_keys(keys) + _bulk(which) + b"".join(map(_asked, numbers)) + slots


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


_EMPTY = _bulk(b"")


@lru_cache(maxsize=1024)
def _head(words: tuple[str, str], keys: int, templates: int) -> bytes:
    return b"*%d\r\n" % (4 + keys + templates) + b"".join([_bulk(word.encode()) for word in (*words, str(keys))])


@lru_cache(maxsize=1024)
def _before_key(words: tuple[str, str], size: int) -> bytes:
    return _head(words, 1, 1) + b"$%d\r\n" % size


@encoded_once
def _after_key(template: PlanTemplate) -> bytes:
    return b"\r\n" + _EMPTY + _asked(template)


def _packed_keys(keys: Sequence[str]) -> bytes:
    between = f"\r\n${len(keys[0])}\r\n"
    text = f"{between}{between.join(keys)}\r\n"
    if text.isascii() and len(set(map(len, keys))) == 1:
        return text.encode()[2:]
    return b"".join([_bulk(key.encode()) for key in keys])


@encoded_once
def _asked(template: PlanTemplate) -> bytes:
    return _packed_windows([(bucket, cost) for bucket, cost, *_ in template.buckets])


@encoded_once
def _asked_back(template: RefundTemplate) -> bytes:
    return _packed_windows([(charge.bucket, charge.cost) for charge, *_ in template.parts])


def _packed_windows(buckets: Sequence[tuple[Bucket, int]]) -> bytes:
    return _bulk(
        b"".join(
            straight_of(bucket.algorithm).asked(limit, window, cost)
            for bucket, cost in buckets
            for limit, window in zip(bucket.limits, bucket.ids)
        )
    )


_GIVEN = """
def given(plans):
    packed = []
    for plan in plans:
        {was} = plan.states
        {counts} = plan.template.counts
        packed.append(pack(plan.spent.now, {graces}))
    return b"".join(packed)
"""


@cache
def _given(shape: ScriptVariant) -> Callable[[Sequence[PlainRefund]], bytes]:
    windows = [straight_of(bucket.algorithm) for bucket in shape.buckets for _ in range(bucket.windows)]
    source = _GIVEN.format(
        was=" ".join([f"was_{each.kept}".replace("{n}", str(n)) for n, each in enumerate(windows)]),
        counts=each_window(len(windows), "count{n},"),
        graces=", ".join([each.refund.grace.replace("{n}", str(n)) for n, each in enumerate(windows) if each.refund]),
    )
    return compiled(source, "given", pack=struct.Struct(f"<{1 + len(windows)}d").pack)  # type: ignore[no-any-return]


PlainAnswers = tuple[int, bool, Sequence[int] | None]
"""Server clock in Unix µs, True if Redis is out of memory, and a result per plan (None if all are `ADMITTED`). A result is
`ADMITTED`, `NOT_CARRIED_OUT`, 0 if refused, 2 if admitted but not all charges fit.
"""


def answers(shape: ScriptVariant, plans: Sequence[PlainSpend | PlainRefund], reply: object) -> PlainAnswers:
    """Decode a reply into the plans. Raises `StoreError`."""
    layout, note = _layout(shape)
    if type(reply) is not bytes or len(reply) != _HEAD_SIZE + len(plans) * layout.size:
        raise StoreError(f"unexpected reply of {type(reply).__name__} from the script", "reply")
    now, unwritten = _HEAD.unpack_from(reply)
    numbers = reply[_HEAD_SIZE:]
    if note(plans, layout.iter_unpack(numbers), now):
        return now, unwritten > 0, None
    return now, unwritten > 0, [verdict for verdict, *_ in layout.iter_unpack(numbers)]


_Note = Callable[[Sequence[Any], Iterator[Sequence[int]], int], bool]
_NOTE = """
def note(plans, each, now):
    all_admitted = True
    for plan, (verdict, {numbers}) in zip(plans, each):
        {counts} = plan.template.counts
        plan.now = now
        plan.states = {states}
        plan.admitted = verdict > 0
        if verdict != {admitted}:
            all_admitted = False
    return all_admitted
"""


@cache
def _layout(shape: ScriptVariant) -> tuple[struct.Struct, _Note]:
    if shape.gives_back:
        return struct.Struct("<q"), _note_refunds
    windows = [straight_of(bucket.algorithm) for bucket in shape.buckets for _ in range(bucket.windows)]
    source = _NOTE.format(
        admitted=ADMITTED,
        numbers=" ".join([each.reported.replace("{n}", str(n)) for n, each in enumerate(windows)]),
        counts=each_window(len(windows), "count{n},"),
        states=f"({' '.join([each.reported_state.replace('{n}', str(n)) for n, each in enumerate(windows)])})",
    )
    numbers = sum([bucket.algorithm.REPLY_FIELDS * bucket.windows for bucket in shape.buckets if bucket.windows])
    known = dict([name for each in windows for name in each.known])
    return struct.Struct(f"<{1 + numbers}q"), compiled(source, "note", **known)


def _note_refunds(plans: Sequence[PlainRefund], each: Iterator[Sequence[int]], now: int) -> bool:
    for plan in plans:
        plan.now = now
    return all(verdict == ADMITTED for (verdict,) in each)


_Expand = Callable[[Sequence[str]], Iterator[str]]


def _expanded(
    names: Mapping[str, object],
    windows: Sequence[Mapping[str, object]],
    pieces: Mapping[str, Sequence[str]],
    block: Sequence[str],
) -> Iterator[str]:
    for line in chain.from_iterable([pieces.get(line, (line,)) for line in block]):
        filled = _filled(line, names)
        if filled.endswith("--window"):
            yield from [_filled(filled.removesuffix("--window").rstrip(), window) for window in windows]
        else:
            yield filled


def _script(shape: ScriptVariant) -> str:
    first, reported = 1, 2
    buckets: dict[str, list[_Expand]] = {"--bucket": [], "--ban": []}
    for place, (algorithm, windows, enforced) in enumerate(shape.buckets):
        names = {"$b": place, "$buckets": len(shape.buckets), "$windows": windows, "$refuses": str(enforced).lower()}
        fields = algorithm.REPLY_FIELDS
        places = [{"$w": first + n, "$r": reported + fields * n} for n in range(windows)]
        buckets["--bucket" if windows else "--ban"].append(partial(_expanded, names, places, _PIECES[algorithm]))
        first, reported = first + windows, reported + fields * windows
    lines: list[str] = []
    block: list[str] | None = None
    repeated: Sequence[_Expand] = ()
    for line in _REFUND_LINES if shape.gives_back else _LINES:
        if line in buckets:
            block, repeated = [], buckets[line]
        elif line == "--end" and block is not None:
            for expand in repeated:
                lines += expand(block)
            block = None
        else:
            (lines if block is None else block).append(line)
    numbers = {"$buckets": len(shape.buckets), "$numbers": reported - 1, "$may_wait": str(shape.may_wait).lower()}
    return _filled("\n".join(lines), numbers)


def _filled(text: str, names: Mapping[str, object]) -> str:
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, str(names[name]))
    return text
