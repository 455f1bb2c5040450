"""Names as logs and lists show them."""

from __future__ import annotations

import pytest

from limitgate.masking import masked


@pytest.mark.parametrize(
    ("name", "shown"),
    [("", "…"), ("abc", "…"), ("abcd", "a…d"), ("203.0.113.7", "20….7"), ("a-very-long-secret-key", "a-v…key")],
)
def test_at_most_half_of_a_name_is_shown(name: str, shown: str) -> None:
    """A few characters at either end."""
    assert masked(name) == shown
