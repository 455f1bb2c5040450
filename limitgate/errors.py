"""The errors that LimitGate raises. All of them derive from LimitGateError."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pydantic import ValidationError


_SHOULD = re.compile(r"\A\w+ should (be|have|match) ")
"""Phrase in which pydantic names the expected value."""
_EXPECTED = {"be": "expected ", "have": "expected something with ", "match": "expected something that matches "}

_IN_WORDS = {
    "tuple_type": "expected a list",
    "frozen_set_type": "expected a list",
    "list_type": "expected a list",
    "string_type": "expected text",
    "string_pattern_mismatch": "expected 1 to 64 letters, digits, '.', '_' or '-' (a rule's name stands before its limits)",
    "model_type": "expected a mapping, for example {status: [401, 403]}",
    "model_attributes_type": "expected a mapping, for example {status: [401, 403]}",
}
"""Messages in place of some of pydantic's. The only model within a model is `ChargeIf`, the only pattern is a name's."""

_SECRETS = frozenset({"api_key", "callers", "header", "secret", "store"})
"""Fields whose values are never repeated in a message."""

StoreFault = Literal["timeout", "connection", "oom", "reply", "overload"]
"""Kind of a store's failure: too late, unreachable, out of memory, an error or malformed reply; or this process cannot send."""


class LimitGateError(Exception):
    """Base class of every error raised by LimitGate."""


class ConfigError(LimitGateError, ValueError):
    """A mistake in a rule, a limit, a file or an option. The message ends with the expected value.

    ``field`` is the path to the mistake inside the checked object, for example ``("limits", 0)``; ``reason`` is the message
    without that path.
    """

    def __init__(self, message: str, field: tuple[str | int, ...] = (), reason: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.reason = message if reason is None else reason

    @classmethod
    def explaining(cls, error: ValidationError, what: str, known: Iterable[str]) -> ConfigError:
        """Make an error of the first mistake that pydantic reports about ``what``, whose fields are ``known``."""
        first = error.errors(include_url=False)[0]
        field, message = first["loc"], first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = f"unknown field, expected one of {', '.join(known)}"
        elif first["type"] == "missing":
            message = "missing, expected a value"
        elif first["type"] != "value_error":
            message = _SHOULD.sub(lambda found: _EXPECTED[found[1]], message, count=1)
            message = _IN_WORDS.get(first["type"]) or (
                message if message.startswith("expected") else f"expected otherwise: {message}"
            )
            if not isinstance(first["input"], dict) and not _SECRETS.intersection(field):
                message += f", not {first['input']!r:.80}"
        return cls(f"{what}: {'.'.join(map(str, field)) or 'all'}: {message}", field, message)


class StoreError(LimitGateError):
    """The store could not decide in time. ``fault`` names the kind of failure.

    ``keys`` are the buckets of a cluster's node that does not answer, while others may still be asked for; empty if the whole
    store failed. ``waited`` is the time in seconds for which the store was silent while this process was listening, as far as
    the store measures that.
    """

    def __init__(self, message: str, fault: StoreFault = "connection", keys: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.fault: StoreFault = fault
        self.keys = keys
        self.waited = 0.0
