"""The JSON Schema of a rule file, for editors that complete and underline: limitgate/rules/schema.json.

What `limitgate check` accepts the schema accepts. Not the other way round: whether fields go together only the check knows.
Draft 7, which every editor reads (SchemaStore recommends it), with descriptions from the docstrings of the fields.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from handbook.fields import docstrings
from handbook.reference import LIMIT_COST
from limitgate import Limit, Rule
from limitgate.limits.bucket import MAX_RESERVE, RESERVES
from limitgate.limits.limit import ABBREVIATIONS, MONTH, NAMES, PATTERN, SECONDS
from limitgate.llm.costs import COSTS
from limitgate.overload.options import HIGHEST, LARGEST_TOLERANCE, LONGEST_DELAY_S, Adaptive
from limitgate.rules.callers import KnownCaller
from limitgate.rules.files import Expected, Given
from limitgate.rules.options import HIGHEST_GROWTH, LONGEST_S, MOST_REFUSALS, PARTS, Ban, ChargeIf
from limitgate.rules.rule import MAX_DELAY

FILE = Path(__file__).parent.parent / "limitgate" / "rules" / "schema.json"

Schema = dict[str, Any]


def _letters(word: str) -> str:
    """A pattern of a word in letters of either case: patterns of a schema have no flags."""
    return "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in word)


def _either(words: list[str]) -> str:
    return f"(?:{'|'.join(words)})"


_WORDS = [_letters(unit) for unit in (*[f"{unit}s?" for unit in (*SECONDS, MONTH)], *ABBREVIATIONS) if unit != "m"]
_UNIT = _either([*_WORDS, "m"])
_SOME = r"0*[1-9][0-9]{0,17}"
_COUNTED = r"[0-9]{1,18}"
_PERIOD = rf"\s*(?:/|{_letters('per')}\b)\s*(?:{_SOME}\s*)?{_UNIT}"
_BURST = rf"\s+{_letters('burst')}\s+"
_RATE = rf"(?:{_SOME}{_PERIOD}(?:{_BURST}{_SOME})?|0{{1,18}}{_PERIOD}(?:{_BURST}{_COUNTED})?)"
_AT_ONCE = rf"{_COUNTED}\s+{_letters('at')}\s+{_letters('once')}"

_NAME = r"[A-Za-z0-9._-]{1,64}"
_PART = rf"\s*(?:{'|'.join(PARTS)}|header:[!#$%&'*+.^_`|~0-9A-Za-z-]{{1,128}}|json:/(?:[^|~]|~[01])*)\s*"
_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": 256}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_AMOUNT: Schema = {"type": "integer", "minimum": 0}
_PATH: Schema = {"type": "string", "pattern": "^/"}
_METHOD: Schema = {
    "anyOf": [{"enum": ["DELETE", "GET", "PATCH", "POST", "PUT"]}, {"type": "string", "pattern": "^[A-Za-z][A-Za-z-]*$"}]
}
_STATUS: Schema = {
    "anyOf": [{"type": "integer", "minimum": 100, "maximum": 599}, {"enum": ["1xx", "2xx", "3xx", "4xx", "5xx"]}]
}
_LIMIT_TEXT: Schema = {
    "type": "string",
    "pattern": rf"^\s*(?:{_RATE}|{_AT_ONCE})\s*$",
    "examples": ["100/minute", "10/s burst 20", "5 per 15 minutes", "20 at once"],
}


def _duration(**bounds: float) -> Schema:
    """A duration; ``bounds`` are those of numbers of seconds, as text has units."""
    text = {"type": "string", "pattern": f"^{PATTERN}$"}
    return {"anyOf": [{"type": "number", **bounds}, text]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def _list(entry: Schema) -> Schema:
    return {"type": "array", "items": entry, "minItems": 1}


def _name(*more: str) -> Schema:
    return {"type": "string", "pattern": f"^{_either([_NAME, *more])}$"}


def _or_null(form: Schema) -> Schema:
    if isinstance(form.get("type"), str):
        return {**form, "type": [form["type"], "null"]}
    return {"anyOf": [*form.get("anyOf", [form]), {"type": "null"}]}


_LIMITS = {
    "burst": _or_null(_COUNT),
    "algorithm": {"enum": [*NAMES, "concurrency", None]},
    "lease": _AMOUNT,
    "align": _or_null({"type": "string"}),
    "borrow": _FLAG,
    "warm_up": _or_null(_duration(minimum=0)),
}

_IN_FLIGHT: Schema = {**_COUNT, "maximum": HIGHEST}
_BOUNDS = {
    "min": _IN_FLIGHT,
    "max": _IN_FLIGHT,
    "tolerance": {"type": "number", "exclusiveMinimum": 1, "maximum": LARGEST_TOLERANCE},
    "delay": _duration(exclusiveMinimum=0, maximum=LONGEST_DELAY_S),
}

_BAN_LASTS = _duration(exclusiveMinimum=0, maximum=LONGEST_S)
_BAN = {
    "after": {**_COUNT, "maximum": MOST_REFUSALS},
    "within": _BAN_LASTS,
    "duration": _BAN_LASTS,
    "growing": {"type": "number", "minimum": 1, "maximum": HIGHEST_GROWTH},
    "most": _or_null(_BAN_LASTS),
}

_COST = {"anyOf": [_AMOUNT, {"enum": [*COSTS]}]}
FORMS: dict[type, dict[str, Schema]] = {
    Rule: {
        "name": _name(),
        "limits": {"type": "array", "items": _ref("limit")},
        **dict.fromkeys(["qps", "qpm", "qph", "qpd", "concurrency"], _or_null(_AMOUNT)),
        "adaptive": {"anyOf": [_FLAG, _ref("adaptive"), {"type": "null"}]},
        "path": {"anyOf": [_PATH, _list(_PATH)]},
        "exclude": _list(_PATH),
        "methods": _or_null(_list(_METHOD)),
        "clients": _list({"type": "string"}),
        "when": {"type": "null"},
        "replaces": {"anyOf": [{"const": "*"}, _list(_name(r"\*"))]},
        "key": _list({"anyOf": [{"enum": list(PARTS)}, {"type": "string", "pattern": rf"^{_PART}(?:\|{_PART})*$"}]}),
        "tier": _or_null(_TEXT),
        "cost": _COST,
        "on_error": {"enum": ["open", "closed", "local", None]},
        "charge_if": _or_null({"anyOf": [_ref("charge_if")]}),
        "ban": _or_null({"anyOf": [_ref("ban")]}),
        "per": {"enum": ["request", "message"]},
        **dict.fromkeys(["body", "shadow", "exempt", "deny"], _FLAG),
        "lease": _AMOUNT,
        "algorithm": {"enum": [*NAMES, None]},
        "align": _or_null({"type": "string"}),
        "max_delay": _or_null(_duration(minimum=0, maximum=MAX_DELAY)),
        "priority": {"enum": [*RESERVES, None]},
        "reserve": {
            "anyOf": [
                {"type": "string", "pattern": r"^\s*[0-9]{1,3}(?:\.[0-9]{1,6})?\s*%\s*$"},
                {"type": "number", "exclusiveMinimum": 0, "maximum": float(MAX_RESERVE)},
                {"type": "null"},
            ]
        },
    },
    ChargeIf: {"status": {"type": "array", "items": _STATUS}, "status_not": {"type": "array", "items": _STATUS}},
    KnownCaller: {
        "id": _TEXT,
        "api_key": _or_null({"type": "string", "pattern": "^sha256:[0-9a-fA-F]{64}$"}),
        "header": _or_null({"type": "object", "propertyNames": _TEXT, "additionalProperties": _TEXT}),
        "set_by_proxy": _FLAG,
        "tier": _or_null(_TEXT),
        "priority": {"enum": [*RESERVES]},
        "limits": _or_null({"type": "object", "additionalProperties": {"anyOf": [_ref("limit"), _list(_ref("limit"))]}}),
    },
    Given: {
        "path": _PATH,
        "method": _METHOD,
        "ip": {"type": "string"},
        "headers": {"type": "object", "additionalProperties": {"type": "string"}},
        "at": _or_null(_duration(minimum=0)),
    },
    Expected: {
        "allowed": _FLAG,
        "rule": _or_null(_name()),
        "remaining": _or_null(_AMOUNT),
        "tier": _TEXT,
        "retry_after": _or_null(_duration(minimum=0)),
    },
}
"""Forms of the fields of each model as they may stand in a file."""

_HAS_LIMITS = ("limits", "qps", "qpm", "qph", "qpd", "concurrency", "adaptive", "exempt", "deny")


def schema() -> Schema:
    """The schema as it is written to `FILE`."""
    rule = {**_object(Rule), "anyOf": [{"required": [field]} for field in _HAS_LIMITS]}
    caller = {**_object(KnownCaller), "anyOf": [{"required": ["api_key"]}, {"required": ["header"]}]}
    test = _mapping({"given": _object(Given), "expect": {**_object(Expected), "minProperties": 1}}, ["given", "expect"])
    properties = {
        "tier": {**_TEXT, "description": "The tier that the file describes; default, which is for everybody, if not given."},
        "rules": {"type": "array", "items": _ref("rule"), "description": "The rules of the tier."},
        "callers": {"type": "array", "items": _ref("caller"), "description": "Who is of the tier, and how to recognise them."},
        "tests": {
            "type": "array",
            "items": _ref("test"),
            "description": "Requests and what is expected of them, in their order; limitgate check runs them.",
        },
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Rule file of LimitGate",
        **_mapping(properties, []),
        "definitions": {
            "rule": rule,
            "limit": {"anyOf": [_LIMIT_TEXT, _limit()]},
            "charge_if": {**_object(ChargeIf), "minProperties": 1},
            "adaptive": _adaptive(),
            "ban": _ban(),
            "caller": caller,
            "test": test,
        },
    }


def text() -> str:
    """The schema as text."""
    return json.dumps(schema(), indent=2) + "\n"


def _object(model: type[BaseModel]) -> Schema:
    """The mapping that a model is in a file, every field with its docstring, and its default if that can be written."""
    texts, forms = docstrings(model, markdown=False), FORMS[model]
    properties = {}
    for name, field in model.model_fields.items():
        properties[name] = {**forms[name], "description": texts[name]}
        if not field.is_required() and field.default not in (None, (), {}):
            properties[name]["default"] = field.default  # tuples are lists in JSON
    return _mapping(properties, [name for name, field in model.model_fields.items() if field.is_required()])


def _limit() -> Schema:
    """The mapping that stands for a limit with options of its own."""
    texts = docstrings(Limit, markdown=False)
    options = {name: {**form, "description": texts[name]} for name, form in _LIMITS.items()}
    limit = {**_LIMIT_TEXT, "description": "Count and period, optionally with a burst."}
    cost = {**_COST, "description": LIMIT_COST}
    return _mapping({"limit": limit, **options, "cost": cost}, ["limit"])


def _adaptive() -> Schema:
    """The mapping of the bounds of an adaptive limit."""
    texts = docstrings(Adaptive, markdown=False)
    return _mapping({name: {**form, "description": texts[name]} for name, form in _BOUNDS.items()}, [])


def _ban() -> Schema:
    """The mapping of a ban, in which the duration is mostly called ``for``."""
    texts = docstrings(Ban, markdown=False)
    fields = {name: {**form, "description": texts[name]} for name, form in _BAN.items()}
    return {**_mapping({**fields, "for": fields["duration"]}, ["after", "within"]), "minProperties": 3}


def _mapping(properties: dict[str, Schema], required: list[str]) -> Schema:
    needed = {"required": required} if required else {}
    return {"type": "object", "properties": properties, **needed, "additionalProperties": False}
