"""Ids of refusals: they can be read again, are always as long, and nothing else is read as one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from limitgate.limits.refusal_id import LENGTH, URN, read_refusal_id, refusal_id, tag_of

KEYS = st.text("0123456789abcdef", min_size=32, max_size=32)


@given(now=st.integers(0, 2**53), rule=st.none() | st.text(max_size=64), digest=KEYS, prefix=st.text(max_size=64))
def test_what_was_written_is_read(now: int, rule: str | None, digest: str, prefix: str) -> None:
    """Time to a hundredth of a second, rule and digest come back, whatever the key begins with; the length is constant."""
    written = refusal_id(now, rule, f"{prefix}:{rule}:{digest}").decode()
    assert re.fullmatch(r"[A-Za-z0-9_-]{32}", written)
    for text in (written, URN + written, f" {written}\n"):
        found = read_refusal_id(text)
        assert 0 <= now / 1e6 - found.at < 0.0101
        assert (found.tag, found.digest) == (tag_of(rule), digest)


@pytest.mark.parametrize("text", ["", "x", "a" * 31, "a" * 33, "a" * 31 + "+", "é" * 32, "urn:uuid:" + "a" * 32, "\u0661" * 32])
def test_anything_else_is_none(text: str) -> None:
    """What is no id is told, with what was expected."""
    with pytest.raises(ValueError, match=f"expected {LENGTH} letters, digits"):
        read_refusal_id(text)
