"""The tables of docs/rules.md: what may be written in a rule, a limit, a caller and the options."""

from __future__ import annotations

import inspect
from typing import get_type_hints

from pydantic import BaseModel

from handbook.fields import HEADS, Field, docstrings, either_of, fields_of, plain, spelled, table
from limitgate import Limit, Rule, Settings
from limitgate.limits.limit import NAMES
from limitgate.rules.callers import KnownCaller
from limitgate.rules.options import ChargeIf

_VALUES = {
    "rules": "path or rules",
    "store": "URL or store",
    "charge_if": "mapping, see below",
    "path": "text or list of text",
    "when": "callable",
    "replaces": 'list of text, or `"*"`',
    "reserve": "share above 0 up to 49 %",
    "algorithm": either_of(f"`{name}`" for name in NAMES),
    "adaptive": "`true`, or a mapping of bounds",
    "ban": "mapping, see [bans](#bans)",
    "max_delay": "duration up to 60 s",
}
"""What is to be said of values whose type says too little."""


def tables() -> dict[str, str]:
    """The tables by the marks that they stand between."""
    return {
        "rule": table(_fields(Rule)),
        "charge_if": table(_fields(ChargeIf)),
        "limit": table(_limit()),
        "caller": table(_fields(KnownCaller)),
        "options": table(_fields(Settings), ("option", *HEADS[1:])),
    }


def _fields(model: type[BaseModel]) -> list[Field]:
    """The fields of a model, values described by hand where that says more."""
    return [field._replace(value=_VALUES.get(field.name.strip("`"), field.value)) for field in fields_of(model)]


def _limit() -> list[Field]:
    """What `Limit` takes, and a mapping that stands for one in a rule file."""
    texts = docstrings(Limit)
    types = get_type_hints(Limit.__init__)
    fields = [
        Field(
            "`limit`",
            "text",
            "required",
            "Count and period, optionally with a burst; in Python the first argument.",
        )
    ]
    for name, parameter in inspect.signature(Limit).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            value = _VALUES.get(name) or plain(types[name])
            fields.append(Field(f"`{name}`", value, spelled(parameter.default), texts[name]))
    return [*fields, Field("`cost`", "integer or text", "that of the rule", LIMIT_COST)]


LIMIT_COST = (
    "Cost of a request under this limit of a rule, a number or `tokens`, `input_tokens` or `output_tokens`; in Python "
    "`(limit, cost)`, where the cost may be a callable."
)


def inserted(text: str, name: str, block: str) -> str:
    """``text`` with ``block`` between the marks of this name. Raises `ValueError` if it has none."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"no {begin} … {end} to write between")
    return f"{before}{begin}\n{block}\n{end}{after}"


def reference(text: str) -> str:
    """The page with its tables as the code has them now."""
    for name, block in tables().items():
        text = inserted(text, name, block)
    return text
