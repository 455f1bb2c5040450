"""Names as logs and lists show them."""

from __future__ import annotations

import pytest

from limitgate.messages.text import masked, printable, shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("", "…"),
        ("abc", "…"),
        ("abcd", "a…d"),
        ("203.0.113.7", "20….7"),
        ("a-very-long-secret-key", "a-v…key"),
        ("\x1b[31m-long-name\n", "\ufffd[3…me\ufffd"),
    ],
)
def test_at_most_half_of_a_name_is_shown(name: str, shown: str) -> None:
    """A few characters at either end."""
    assert masked(name) == shown


def test_nothing_of_a_name_is_an_order_to_a_terminal() -> None:
    """Where it is shown in full."""
    assert shown("caller", "\x1b[31mred\u202e", "full") == "\ufffd[31mred\ufffd"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("/naïve/café", "/naïve/café"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("two\nlines", "two\\nlines"),
        ("8-bit \x9b31m", "8-bit \\x9b31m"),
        ("turned \u202e", "turned \\u202e"),
        ("of no encoding \udcff", "of no encoding \\udcff"),
    ],
)
def test_what_is_not_printable_is_escaped(text: str, line: str) -> None:
    """Escapes begin or end nothing; letters of any language stay."""
    assert printable(text) == line
