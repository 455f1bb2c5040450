"""Ids of refusals: when it was, by which rule and in which bucket, in 32 characters.

Nothing is stored for an id, so a refusal costs almost the same with it, and it can be read for as long as the rules and the key
are known. Rule and bucket are encrypted: an id without its key tells only the time. It is no proof: anybody can make one up.
"""

from __future__ import annotations

import re
from binascii import a2b_base64, b2a_base64, unhexlify
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

LENGTH = 32
"""Characters of an id: base64url (RFC 4648 section 5) of 24 bytes."""
URN = "urn:limitgate:refusal:"
"""Before an id, where a URI is expected: ``instance`` of a problem (RFC 9457 section 3.1.5)."""

_DIGITS = 32
"""Hex digits at the end of a bucket's key."""
_TICK = 10_000
"""Microseconds in which times are told: five bytes of them last until the year 2318."""
_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), str.maketrans("-_", "+/")
_LEFT, _RIGHT = 9, 10
"""Bytes of the halves of what is encrypted: three of the rule's tag and 16 of the bucket's digest."""


class RefusalId(NamedTuple):
    """Contents of an id."""

    at: float
    """Unix time of the refusal by the store's clock, in seconds."""
    tag: bytes
    """See `tag_of`."""
    digest: str
    """The 32 hex digits in the key of the bucket that refused."""


class RefusalKey:
    """A key of 32 bytes, by which ids are written and read.

    Rule and bucket go through a Feistel network of four rounds (Luby and Rackoff 1988) with keyed BLAKE2b as its round function
    and the time as its tweak. So every byte of the result depends on all others and on the key, and two ids of the same time
    have nothing in common that their XOR would show, as those of a stream cipher would have.
    """

    __slots__ = ("_pairs", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key
        rounds = [
            blake2b(key=key, digest_size=size, person=b"refusal id %d" % number)
            for number, size in enumerate((_LEFT, _RIGHT, _LEFT, _RIGHT))
        ]
        self._pairs = (rounds[0], rounds[1]), (rounds[2], rounds[3])
        """The round functions: of each pair the first changes the left half, and the second the right one."""

    @staticmethod
    def derived(secret: bytes) -> RefusalKey:
        """The key of services with this ``secret``, 16 to 64 bytes."""
        return RefusalKey(blake2b(key=secret, digest_size=32, person=b"refusal key").digest())

    def write(self, now: int, rule: str | None, key: str) -> bytes:
        """The id of a refusal at ``now``, Unix µs, by a rule's bucket of this key, less its `Bucket.suffix`."""
        time = (now // _TICK).to_bytes(5, "big")
        block = tag_of(rule) + unhexlify(key[-_DIGITS:])
        left, right = block[:_LEFT], block[_LEFT:]
        for to_left, to_right in self._pairs:
            digest = to_left.copy()
            digest.update(time + right)
            left = (int.from_bytes(left, "big") ^ int.from_bytes(digest.digest(), "big")).to_bytes(_LEFT, "big")
            digest = to_right.copy()
            digest.update(time + left)
            right = (int.from_bytes(right, "big") ^ int.from_bytes(digest.digest(), "big")).to_bytes(_RIGHT, "big")
        return b2a_base64(time + left + right, newline=False).translate(_TO_URL)

    def read(self, text: str) -> RefusalId:
        """Read an id, alone or with `URN` before it; of one by another key, only the time is right.

        Raises `ValueError` for anything else.
        """
        named = _bytes_of(text)
        time, left, right = named[:5], named[5 : 5 + _LEFT], named[5 + _LEFT :]
        for to_left, to_right in reversed(self._pairs):
            digest = to_right.copy()
            digest.update(time + left)
            right = (int.from_bytes(right, "big") ^ int.from_bytes(digest.digest(), "big")).to_bytes(_RIGHT, "big")
            digest = to_left.copy()
            digest.update(time + right)
            left = (int.from_bytes(left, "big") ^ int.from_bytes(digest.digest(), "big")).to_bytes(_LEFT, "big")
        return RefusalId(time_of(text), left[:3], (left[3:] + right).hex())


def time_of(text: str) -> float:
    """Unix time of the refusal that an id names, in seconds, which needs no key. Raises `ValueError` as `RefusalKey.read`."""
    return int.from_bytes(_bytes_of(text)[:5], "big") * _TICK / 1e6


def _bytes_of(text: str) -> bytes:
    found = re.fullmatch(rf"\s*(?:{URN})?([A-Za-z0-9_-]{{{LENGTH}}})\s*", text, re.ASCII)
    if found is None:
        raise ValueError(f"{text!r:.80} is no id of a refusal, expected {LENGTH} letters, digits, '-' and '_', or {URN}...")
    return a2b_base64(found[1].translate(_FROM_URL))


@lru_cache(maxsize=4096)
def tag_of(rule: str | None) -> bytes:
    """Three bytes that tell a rule from the others of its set; two of a thousand rules share theirs in one set of 34."""
    return blake2b((rule or "").encode(), digest_size=3).digest()
