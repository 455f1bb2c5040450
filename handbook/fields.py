"""Tables of a model's fields: name, kind of value in plain words, default, and the docstring below the field."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import textwrap
import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ImportString, SecretStr
from pydantic.fields import FieldInfo

HEADS = ("field", "value", "default", "meaning")


class Field(NamedTuple):
    """A row of a table."""

    name: str
    value: str
    default: str
    meaning: str


def fields_of(model: type[BaseModel]) -> list[Field]:
    """The fields of a pydantic model, in its order. Raises `ValueError` for one without a docstring."""
    texts = docstrings(model)
    return [_field(name, field, texts) for name, field in model.model_fields.items()]


def table(fields: Iterable[Field], heads: Sequence[str] = HEADS) -> str:
    """The fields as a Markdown table."""
    rows = [heads, ["---"] * len(heads), *fields]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def docstrings(owner: type, *, markdown: bool = True) -> dict[str, str]:
    """The texts that stand below the fields of a class, in one line each, as Markdown or plain."""
    spell = as_markdown if markdown else as_plain
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    statements = body.body if isinstance(body, ast.ClassDef) else []
    found = {}
    for field, text in itertools.pairwise(statements):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = spell(ast.literal_eval(text.value))
    return found


def as_markdown(docstring: str) -> str:
    """A docstring as it may stand in a table in docs/: one line, code in single backticks, bars escaped, pages as links."""
    text = " ".join(docstring.split()).replace("``", "`").replace("|", "\\|")
    return re.sub(r"\bdocs/(\w+\.md)\b", r"[\1](\1)", text)


def as_plain(docstring: str) -> str:
    """A docstring as an editor shows it beside a field: one line, code in single backticks."""
    return " ".join(docstring.split()).replace("``", "`")


def plain(annotation: Any, bounds: Sequence[Any] = ()) -> str:
    """What kind of value a field takes, in plain words. ``bounds`` is what pydantic knows besides of a number."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return plain(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        return either_of(dict.fromkeys(plain(each, bounds) for each in arguments if each is not type(None)))
    if origin is Literal:
        return either_of(f"`{each}`" for each in arguments)
    if annotation in (int, float):
        return _number("whole number" if annotation is int else "number", bounds)
    return _several(origin or annotation, arguments) or _single(annotation)


def _several(kind: Any, arguments: Sequence[Any]) -> str | None:
    """What a container of values is called; None for anything else."""
    if kind is dict:
        return " to ".join(["mapping", *map(plain, arguments)]).replace(" to ", " of ", 1)
    if kind in (list, tuple, set, frozenset):
        return " of ".join(["list", *map(plain, arguments[:1])])
    return None


def _single(annotation: Any) -> str:
    words = {bool: "`true` or `false`", str: "text", SecretStr: "text", Any: "anything", ImportString: "callable"}
    name = str(getattr(annotation, "__name__", annotation))
    return words[annotation] if annotation in words else name.lower()


def _number(noun: str, bounds: Sequence[Any]) -> str:
    known = {type(bound): bound for each in bounds for bound in getattr(each, "metadata", [each])}
    least, most = known.get(Ge), known.get(Le)
    words = [noun]
    if least:
        words.append(f"from {least.ge:,}")
    if Gt in known:
        words.append(f"above {known[Gt].gt:,}")
    if most:
        words.append(f"to {most.le:,}" if least else f"up to {most.le:,}")
    return " ".join(words)


def either_of(words: Iterable[str]) -> str:
    """Words as a choice between them."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _field(name: str, field: FieldInfo, texts: dict[str, str]) -> Field:
    if name not in texts:
        raise ValueError(f"field {name!r} has no docstring, expected one below it")
    return Field(f"`{name}`", plain(field.annotation, field.metadata), default(field), texts[name])


def default(field: FieldInfo) -> str:
    """What a field is if it is not given, as it is written in Python."""
    if field.is_required():
        return "required"
    return spelled(field.get_default(call_default_factory=True))


def spelled(value: Any) -> str:
    """A value as code, with double quotes."""
    text = json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')
    return f"`{text}`"
