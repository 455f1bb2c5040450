"""Values that YAML 1.1 (PyYAML) reads differently than people do. Pure."""

from __future__ import annotations

import re
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")
_NOT_DECIMAL = re.compile(r"[-+]?(?:.*:.*|0[0-9_]+|0[xb][0-9a-fA-F_]+)")
_OTHER_NUMBER = re.compile(r"[-+]?(?:0o?[0-9]+|[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]{1,2})")
"""Numbers in YAML 1.2 and JSON that are text in YAML 1.1, and octal numbers with an 8 or 9."""
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"))
_LONGEST = 40
"""Characters of the longest number that a message repeats as decimal digits."""
_LARGEST = 1e15
"""Larger floats are written with an exponent."""
_ZEROS = re.compile(r"^([-+]?)[0_]+(?=[0-9])")


def misread(node: Any, *, is_secret: bool, is_duration: bool = False) -> str | None:
    """Explain a number that is not decimal: its value in YAML, and what was expected. None for other nodes.

    The explanation omits secrets.
    """
    text = node.value
    if node.tag not in _NUMBERS or node.style is not None or not _NOT_DECIMAL.fullmatch(text):
        return None
    if is_secret:
        return "a number that YAML reads differently, expected decimal digits, or quotes around text"
    try:
        number = f"{yaml.safe_load(text)}"
    except ValueError:  # a prefix without digits
        return f"{text} is not a number, expected decimal digits, or {text!r} in quotes for text"
    if is_duration and ":" in text:
        return f"{text} is {number} in YAML, expected {_duration(float(number))} for the duration"
    decimal = _ZEROS.sub(r"\1", text).replace("_", "") if re.fullmatch(r"[-+0-9_]+", text) else number
    return f"{text} is {number} in YAML, expected {decimal} for the number, or {text!r} in quotes for text"


def _duration(seconds: float) -> str:
    """Text in the largest unit that divides the duration."""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds % size == 0), (1, "s"))
    return f"{seconds / size:.12g}{unit}"


def hint(node: Any) -> str:
    """Explain a value that YAML reads differently than people, for the end of a message. Empty for other nodes."""
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return ""
    text = node.value
    if node.tag == f"{_TAG}bool":
        return f"; {text} is {str(yaml.safe_load(text)).lower()} in YAML; write {text!r} in quotes for text"
    if node.tag == f"{_TAG}timestamp":
        return f"; {text} is a date in YAML; write {text!r} in quotes for text"
    if node.tag == f"{_TAG}str" and _OTHER_NUMBER.fullmatch(text):
        number = _decimal(text) if len(text) <= _LONGEST else None
        return f"; {text:.40} is text in YAML; write {number or 'decimal digits'} for the number"
    return ""


def _decimal(text: str) -> str:
    """Return a number as YAML reads it, exactly."""
    if "e" not in text.lower():
        try:
            return str(int(text, 8))
        except ValueError:  # an octal number with an 8 or 9
            return str(int(text.replace("o", "")))
    number = float(text)
    if number.is_integer() and abs(number) < _LARGEST:
        return str(int(number))
    mantissa, exponent, power = str(number).partition("e")
    # Without the point, it would be text again.
    return f"{mantissa}{exponent and '.0' * ('.' not in mantissa)}{exponent}{power}"
