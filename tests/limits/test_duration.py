from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, strategies as st

from limitgate.errors import ConfigError
from limitgate.limits.limit import seconds_of


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0),
        (2, 2.0),
        (0.25, 0.25),
        ("2s", 2.0),
        ("0s", 0.0),
        ("0.5s", 0.5),
        ("500ms", 0.5),
        ("1ms", 0.001),
        ("0.001ms", 0.000001),
        ("1m", 60.0),
        ("1.5m", 90.0),
        ("2h", 7200.0),
        ("007s", 7.0),
        (" 2 s ", 2.0),
        ("2", 2.0),
        (" 0.5 ", 0.5),
        ("2sec", 2.0),
        ("2 seconds", 2.0),
        ("1 minute", 60.0),
        ("15 mins", 900.0),
        ("2hrs", 7200.0),
        ("1 day", 86_400.0),
        ("7 days", 604_800.0),
        ("1w", 604_800.0),
        ("1 week", 604_800.0),
        ("250 milliseconds", 0.25),
        (timedelta(minutes=1, milliseconds=5), 60.005),
        (timedelta(0), 0.0),
    ],
)
def test_duration_in_any_form_is_converted_to_seconds(given: Any, seconds: float) -> None:
    """Numbers are seconds, text has a unit."""
    found = seconds_of(given)
    assert (found, type(found)) == (seconds, float)


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "s", "2S", "2 Seconds", "1M", "1ms s", "2hs", "1 month", "-2s", "-2", "08", "00.5", "1e3", "+2s", "1e3s", ".5s"),
        *("2.s", "1m30s", "2s\x00", "\u0662s", "1_0s", "9" * 13 + "s", -1, -0.001, math.nan, math.inf, -math.inf, 10**400),
        *(True, False, None, b"2s", [2], {"s": 2}, 2j, timedelta(-1)),
    ],
    ids=lambda wrong: f"{wrong!a:.20}",
)
def test_duration_invalid_is_refused(wrong: Any) -> None:
    """Anything else is a mistake, and the error says what was expected."""
    with pytest.raises(ConfigError, match=r"is not a duration, expected seconds, or text such as '2s', '500ms'"):
        seconds_of(wrong)


@given(st.integers(0, 10**9))
def test_duration_in_equivalent_forms_is_equal_property(number: int) -> None:
    """Milliseconds, seconds, minutes and hours as text are what they are as numbers."""
    assert seconds_of(f"{number}ms") == seconds_of(number / 1000)
    assert seconds_of(f"{number}s") == seconds_of(number) == seconds_of(float(number))
    assert seconds_of(f"{number}m") == seconds_of(number * 60)
    assert seconds_of(f"{number}h") == seconds_of(number * 3600)


@given(st.text(max_size=12))
def test_duration_from_any_text_is_valid_or_a_config_error_property(text: str) -> None:
    """No text brings anything else about."""
    try:
        assert seconds_of(text) >= 0
    except ConfigError as error:
        assert "expected" in str(error)  # noqa: PT017 - either is right
