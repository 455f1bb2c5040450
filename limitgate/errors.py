"""The errors that LimitGate raises. All of them derive from LimitGateError."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


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

Field = tuple[str | int, ...]
"""Path to a field inside of an object, for example ``("limits", 0)``."""

MOST_MISTAKES = 100
"""Mistakes of one kind after which no others are looked for: files may come from people who mean no good."""

StoreFault = Literal["timeout", "connection", "oom", "reply", "overload"]
"""Kind of a store's failure: too late, unreachable, out of memory, an error or malformed reply; or this process cannot send."""


class LimitGateError(Exception):
    """Base class of every error raised by LimitGate."""


class ConfigError(LimitGateError, ValueError):
    """A mistake in a rule, a limit, a file or an option. The message ends with the expected value.

    ``field`` is the path to the mistake inside the checked object; ``reason`` is the message without that path, and without
    the ``file`` and ``line`` that it stands on, if it is in one. ``others`` are further mistakes that were found with it.
    """

    def __init__(self, message: str, field: Field = (), reason: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.reason = message if reason is None else reason
        self.file: str | None = None
        self.line: int | None = None
        self.others: tuple[ConfigError, ...] = ()

    @property
    def every(self) -> tuple[ConfigError, ...]:
        """This mistake and those that were found with it."""
        return self, *self.others

    @classmethod
    def in_file(cls, file: str, line: int | None, field: Field, reason: str) -> ConfigError:
        """Make an error of a mistake on a line of a file, counted from 1; None if it is on no line."""
        place = file if line is None else f"{file}:{line}"
        mistake = cls(f"{place}: {f'{spelled(field)}: ' if field else ''}{reason}", field, reason)
        mistake.file, mistake.line = file, line
        return mistake

    @classmethod
    def first_of(cls, mistakes: Sequence[ConfigError]) -> ConfigError:
        """The first of several mistakes, with all others of them and of those found with them, each once."""
        first, *others = dict.fromkeys([each for mistake in mistakes for each in mistake.every])
        first.others = tuple(others)
        return first

    @classmethod
    def explaining(cls, error: ValidationError, what: str, known: Iterable[str]) -> ConfigError:
        """Make an error of all mistakes that pydantic reports about ``what``, whose fields are ``known``."""
        return cls.first_of([cls._explaining(detail, what, known) for detail in error.errors(include_url=False)])

    @classmethod
    def _explaining(cls, detail: ErrorDetails, what: str, known: Iterable[str]) -> ConfigError:
        field, message = detail["loc"], detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            message = f"unknown field, expected one of {', '.join(known)}"
        elif detail["type"] == "missing":
            message = "missing, expected a value"
        elif detail["type"] != "value_error":
            message = _SHOULD.sub(lambda found: _EXPECTED[found[1]], message, count=1)
            message = _IN_WORDS.get(detail["type"]) or (
                message if message.startswith("expected") else f"expected otherwise: {message}"
            )
            if not isinstance(detail["input"], dict) and not _SECRETS.intersection(field):
                message += f", not {detail['input']!r:.80}"
        return cls(f"{what}: {'.'.join(map(str, field)) or 'all'}: {message}", field, message)


def spelled(field: Field) -> str:
    """A field as people write it: ``rules[0].limits[1]``; a name that is too long for one is cut."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part:.80}" for part in field).removeprefix(".")


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
