"""Ids of refusals: 32 characters that contain the time, the rule and the bucket.

Nothing is stored for an id. You can read it as long as you have the rules and the key; without the key, it reveals only the
time. It does not prove a refusal, because it can be forged.
"""

from __future__ import annotations

import re
from binascii import a2b_base64, b2a_base64, unhexlify
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

LENGTH = 32
"""Base64url (RFC 4648 section 5) of 24 bytes."""
URN = "urn:limitgate:refusal:"
"""For ``instance`` of a problem (RFC 9457 section 3.1.5)."""

_DIGITS = 32
"""Hex digits at the end of a bucket's key."""
_TICK = 10_000
"""Resolution in µs. Five bytes last until the year 2318."""
_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), str.maketrans("-_", "+/")
_LEFT, _RIGHT = 9, 10
"""Bytes of the halves, which hold 3 bytes of the rule's tag and 16 of the bucket's digest."""


class RefusalId(NamedTuple):
    """Contents of an id."""

    at: float
    """Unix time in seconds by the store's clock."""
    tag: bytes
    digest: str
    """32 hex digits."""


class RefusalKey:
    """A key of 32 bytes that encrypts and decrypts ids.

    It uses a four-round Feistel network (Luby and Rackoff 1988) with keyed BLAKE2b and the time as its tweak. Unlike with a
    stream cipher, two ids of the same time reveal nothing by their XOR.
    """

    __slots__ = ("_pairs", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key
        rounds = [
            blake2b(key=key, digest_size=size, person=b"refusal id %d" % number)
            for number, size in enumerate((_LEFT, _RIGHT, _LEFT, _RIGHT))
        ]
        self._pairs = (rounds[0], rounds[1]), (rounds[2], rounds[3])
        """Each pair changes the left half, then the right half."""

    @staticmethod
    def derived(secret: bytes) -> RefusalKey:
        """Derive the key from a ``secret`` of 16 to 64 bytes."""
        return RefusalKey(blake2b(key=secret, digest_size=32, person=b"refusal key").digest())

    def write(self, now: int, rule: str | None, key: str) -> bytes:
        """Return the id of a refusal at ``now``, Unix µs. ``key`` is the bucket's key without suffix."""
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
        """Decrypt an id, with or without `URN`. With a wrong key, only the time is correct.

        Raises `ValueError` for other text.
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
    """Return the Unix time of a refusal in seconds. Needs no key. Raises `ValueError` for other text."""
    return int.from_bytes(_bytes_of(text)[:5], "big") * _TICK / 1e6


def _bytes_of(text: str) -> bytes:
    found = re.fullmatch(rf"\s*(?:{URN})?([A-Za-z0-9_-]{{{LENGTH}}})\s*", text, re.ASCII)
    if found is None:
        raise ValueError(f"{text!r:.80} is no id of a refusal, expected {LENGTH} letters, digits, '-' and '_', or {URN}...")
    return a2b_base64(found[1].translate(_FROM_URL))


@lru_cache(maxsize=4096)
def tag_of(rule: str | None) -> bytes:
    """Return three bytes for a rule. One in 34 sets of a thousand rules has a collision."""
    return blake2b((rule or "").encode(), digest_size=3).digest()
