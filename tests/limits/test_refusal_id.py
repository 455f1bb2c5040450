"""Ids of refusals: they can be read again, are always as long, and nothing else is read as one."""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode
from hashlib import blake2b

import pytest
from hypothesis import given, strategies as st

from limitgate.http.response import LENGTH, URN, RefusalKey, tag_of, time_of

DIGESTS = st.text("0123456789abcdef", min_size=32, max_size=32)
KEYS = st.binary(min_size=32, max_size=32).map(RefusalKey)


@given(key=KEYS, now=st.integers(0, 2**53), rule=st.none() | st.text(max_size=64), digest=DIGESTS, prefix=st.text(max_size=64))
def test_refusal_id_written_is_read_back(key: RefusalKey, now: int, rule: str | None, digest: str, prefix: str) -> None:
    """Time to a hundredth of a second, rule and digest come back, whatever the key begins with; the length is constant."""
    written = key.write(now, rule, f"{prefix}:{rule}:{digest}").decode()
    assert re.fullmatch(r"[A-Za-z0-9_-]{32}", written)
    for text in (written, URN + written, f" {written}\n"):
        found = key.read(text)
        assert 0 <= now / 1e6 - found.at < 0.0101
        assert found.at == time_of(text)
        assert (found.tag, found.digest) == (tag_of(rule), digest)


@pytest.mark.parametrize("text", ["", "x", "a" * 31, "a" * 33, "a" * 31 + "+", "é" * 32, "urn:uuid:" + "a" * 32, "\u0661" * 32])
def test_refusal_id_from_other_text_raises(text: str) -> None:
    """What is no id is told, with what was expected."""
    with pytest.raises(ValueError, match=f"expected {LENGTH} letters, digits"):
        RefusalKey(b"k" * 32).read(text)


@given(key=KEYS, other=KEYS, rule=st.text(max_size=8), digest=DIGESTS)
def test_another_key_reads_only_the_time(key: RefusalKey, other: RefusalKey, rule: str, digest: str) -> None:
    """Neither rule nor bucket is to be had without the key."""
    written = key.write(1_790_000_000_000_000, rule, digest).decode()
    found = other.read(written)
    assert found.at == 1_790_000_000
    assert ((found.tag, found.digest) == (tag_of(rule), digest)) is (key.key == other.key)


def _encrypted(key: RefusalKey, now: int, rule: str, digest: str) -> int:
    return int.from_bytes(urlsafe_b64decode(key.write(now, rule, digest))[5:], "big")


def test_refusal_id_with_one_changed_bit_differs_in_all_bytes() -> None:
    """Of time, rule, bucket and key: ids of one moment have nothing in common that their difference would show."""
    key, digest = RefusalKey(b"k" * 32), "0f" * 16
    plain = _encrypted(key, 0, "api", digest)
    others = [_encrypted(key, 0, "api", f"{int(digest, 16) ^ 1 << bit:032x}") for bit in range(128)]
    others += [_encrypted(key, 10_000 << bit, "api", digest) for bit in range(40)]
    others += [_encrypted(RefusalKey(bytes([*b"k" * 31, each])), 0, "api", digest) for each in range(107)]
    others += [_encrypted(key, 0, f"api{number}", digest) for number in range(100)]
    changes = [plain ^ other for other in others]
    assert all(40 < change.bit_count() < 112 for change in changes)
    assert len(set(changes)) == len(changes)
    for bit in range(152):
        assert 110 < sum(change >> bit & 1 for change in changes) < 265


def test_the_key_of_a_secret_is_not_the_secret() -> None:
    """It is another one for another secret, and unlike what buckets are named by."""
    secret = b"0123456789abcdef"
    derived = RefusalKey.derived(secret).key
    assert len(derived) == 32
    assert derived != RefusalKey.derived(secret + b"g").key
    assert derived[:16] != blake2b(key=secret, digest_size=16).digest()
