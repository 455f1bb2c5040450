"""Which name was meant by one that is unknown."""

from __future__ import annotations

import pytest

from limitgate.messages.text import expected_of, meant
from limitgate.rules.rule import Rule
from limitgate.rules.settings import Settings


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("qpn", "qpm"),
        ("qmp", "qpm"),
        ("pth", "path"),
        ("rpm", "qpm"),
        ("QPS", "qps"),
        ("limit", "limits"),
        ("max-delay", "max_delay"),
        ("metods", "methods"),
        ("onerror", "on_error"),
        ("", None),
        ("colour", None),
        ("q" * 10_000, None),
    ],
)
def test_a_field_of_a_rule_that_was_meant(wrong: str, right: str | None) -> None:
    assert meant(wrong, Rule.model_fields) == right


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("redis", "store"),
        ("proxies", "trusted_proxies"),
        ("trust", "trusted_proxies"),
        ("header", "headers"),
        ("limits", "rules"),
    ],
)
def test_an_option_that_was_meant(wrong: str, right: str | None) -> None:
    assert meant(wrong, Settings.model_fields) == right


def test_all_names_are_told_behind_the_one_that_was_meant() -> None:
    assert expected_of("RULE", ["STORE", "RULES"], "LIMITGATE_") == (
        "did you mean 'LIMITGATE_RULES'? expected one of LIMITGATE_STORE, LIMITGATE_RULES"
    )
    assert expected_of("x", ["STORE"]) == "expected one of STORE"
