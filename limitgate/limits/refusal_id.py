"""Ids of refusals: when it was, by which rule and in which bucket, in 32 characters.

Nothing is stored for an id, so a refusal costs the same with it, and it can be read for as long as the rules are known. It
tells no more of a client than a key in the store does. It is no secret and no proof: anybody can write one.
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


class RefusalId(NamedTuple):
    """Contents of an id."""

    at: float
    """Unix time of the refusal by the store's clock, in seconds."""
    tag: bytes
    """See `tag_of`."""
    digest: str
    """The 32 hex digits in the key of the bucket that refused."""


def refusal_id(now: int, rule: str | None, key: str) -> bytes:
    """The id of a refusal at ``now``, Unix µs, by a rule's bucket of this key, less its `Bucket.suffix`."""
    named = (now // _TICK).to_bytes(5, "big") + tag_of(rule) + unhexlify(key[-_DIGITS:])
    return b2a_base64(named, newline=False).translate(_TO_URL)


def read_refusal_id(text: str) -> RefusalId:
    """Read an id, alone or with `URN` before it. Raises `ValueError` for anything else."""
    found = re.fullmatch(rf"\s*(?:{URN})?([A-Za-z0-9_-]{{{LENGTH}}})\s*", text, re.ASCII)
    if found is None:
        raise ValueError(f"{text!r:.80} is no id of a refusal, expected {LENGTH} letters, digits, '-' and '_', or {URN}...")
    named = a2b_base64(found[1].translate(_FROM_URL))
    return RefusalId(int.from_bytes(named[:5], "big") * _TICK / 1e6, named[5:8], named[8:].hex())


@lru_cache(maxsize=4096)
def tag_of(rule: str | None) -> bytes:
    """Three bytes that tell a rule from the others of its set; two of a thousand rules share theirs in one set of 34."""
    return blake2b((rule or "").encode(), digest_size=3).digest()
