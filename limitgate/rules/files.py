"""Rule files: YAML becomes a `RuleSet`. Every mistake is a `ConfigError` that names file, line and field.

Files may come from people who mean no good: what is read, built up and said about it is bounded, and no tag runs code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from limitgate.errors import ConfigError
from limitgate.rules.callers import DEFAULT_TIER, KnownCaller, Text
from limitgate.rules.rule import Rule, RuleSet

MAX_BYTES = 1 << 20
"""Size of a rule file."""
MAX_NODES = 100_000
"""Values in a rule file, those behind an alias counted each time."""
MAX_NUMBER = 100
"""Characters of a number, or of anything else that is no text; longer ones are none that a rule could hold."""

SUFFIXES = (".yaml", ".yml")

Field = tuple[str | int, ...]

_TEXT = "tag:yaml.org,2002:str"
_NAMES = (_TEXT, "tag:yaml.org,2002:merge")


class _File(BaseModel):
    """The top of a rule file. Rules and callers are checked one by one, each by its own model."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    tier: Text = DEFAULT_TIER
    callers: list[dict[str, Any]] = []
    rules: list[dict[str, Any]] = []


class _Loader(yaml.SafeLoader):
    """Safe YAML whose every error knows its line, and which does not build up what is going to be refused."""

    _composed = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._composed += 1
        if self._composed > 2 * MAX_NODES:  # each may have a name
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_NODES} values, expected fewer")
        compose: Callable[[Any, Any], Any] = super().compose_node
        return compose(parent, index)

    def construct_object(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - as PyYAML has it
        construct: Callable[[Any, bool], Any] = super().construct_object
        try:
            return construct(node, deep)
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:  # what PyYAML makes of a wrong tag
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


class _Document:
    """A YAML document that knows on which line each of its fields stands."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            with file.open("rb") as opened:
                text = opened.read(MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise ConfigError(f"{file}: too many bytes, expected at most {MAX_BYTES}")
            loader = _Loader(text)
            self._root = loader.get_single_node()
            self._check((), self._root, [MAX_NODES])
            construct: Callable[[Any], Any] = loader.construct_document
            self.data = construct(self._root) if self._root else None
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}, expected a file that can be read") from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            message = f"{file}{line}: expected YAML: {getattr(error, 'problem', None) or error}"
            raise ConfigError(message) from None  # PyYAML's error quotes the line, and what is secret in it
        except RecursionError as error:
            raise ConfigError(f"{file}: nested too deeply, expected a few levels") from error

    def mistake(self, field: Field, message: str) -> ConfigError:
        """The error that names this file, the line of ``field``, and the field."""
        node, line = self._root, self._root.start_mark.line if self._root else 0
        for part in field:
            child = _child(node, part)
            if child is None:
                break
            node, line = child
        return ConfigError(f"{self.file}:{line + 1}: {_spelled(field)}{message}", field)

    def _check(self, field: Field, node: Any, budget: list[int]) -> None:
        """Refuse fields that stand there twice or have no name, and documents that grow out of bounds through aliases."""
        budget[0] -= 1
        if budget[0] < 0:
            raise ConfigError(f"{self.file}: more than {MAX_NODES} values, expected fewer (aliases count each time)")
        if isinstance(node, yaml.MappingNode):
            names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for key, value in node.value:
                here = (*field, key.value if isinstance(key, yaml.ScalarNode) else "?")
                if key.tag not in _NAMES:
                    raise self._at(key, here, "expected a name, in quotes if it looks like something else")
                if names[key.value] > 1:
                    raise self._at(key, here, "expected once, is there twice")
                self._check(here, value, budget)
        elif isinstance(node, yaml.SequenceNode):
            for place, value in enumerate(node.value):
                self._check((*field, place), value, budget)
        elif node is not None and node.tag != _TEXT and len(node.value) > MAX_NUMBER:
            raise self._at(node, field, f"expected at most {MAX_NUMBER} characters, or text in quotes")

    def _at(self, node: Any, field: Field, message: str) -> ConfigError:
        return ConfigError(f"{self.file}:{node.start_mark.line + 1}: {_spelled(field)}{message}", field, message)


class _Described(NamedTuple):
    """Rules and callers of a document, in its order."""

    document: _Document
    tier: str
    rules: list[Rule]
    callers: list[KnownCaller]


def load_rules(path: str | Path) -> RuleSet:
    """The rules in a YAML file, or in a folder of them, one file per tier.

    Raises `ConfigError` for a missing path, an empty folder, and every mistake in a file.
    """
    path = Path(path)
    try:
        in_folder = sorted(path.iterdir()) if path.is_dir() else None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}, expected a folder that can be read") from error
    files = [path] if in_folder is None else [file for file in in_folder if file.suffix in SUFFIXES and not file.is_dir()]
    if not files:
        raise ConfigError(f"{path}: no rule file in this folder, expected *.yaml or *.yml")
    rules = _joined([_described(_Document(file)) for file in files])
    rules.source = str(path)
    return rules


def rules_of(option: object) -> RuleSet:
    """The rule set that the option ``rules`` gives, in whatever form. Raises `ConfigError` if it is none."""
    if option is None:
        raise ConfigError("rules are missing, expected rules=... or LIMITGATE_RULES: a file, a folder, or a list of Rule")
    if isinstance(option, RuleSet):
        return option
    if isinstance(option, str | Path):
        return load_rules(option)
    rules: list[Rule] = []
    for rule in option if isinstance(option, Iterable) else [option]:
        if not isinstance(rule, Rule):
            raise ConfigError(f"rules: {rule!r:.80} is no Rule, expected a path, a list of Rule, or a RuleSet")
        rules.append(rule)
    return RuleSet(rules)


def _described(document: _Document) -> _Described:
    if document.data is None:
        raise document.mistake((), "empty, expected tier, callers and rules")
    if not isinstance(document.data, dict):
        raise document.mistake((), "expected a mapping with tier, callers and rules")
    try:
        top = _File.model_validate(document.data)
    except ValidationError as error:
        mistake = ConfigError.explaining(error, "", _File.model_fields)
        raise document.mistake(mistake.field, mistake.reason) from error
    rules = [_rule(document, place, {"tier": top.tier, **entry}) for place, entry in enumerate(top.rules)]
    callers = [_caller(document, place, {"tier": top.tier, **entry}) for place, entry in enumerate(top.callers)]
    return _Described(document, top.tier, rules, callers)


def _rule(document: _Document, place: int, entry: dict[str, Any]) -> Rule:
    if "name" not in entry:
        raise document.mistake(("rules", place), "a rule without a name, expected one")
    try:
        return Rule(**entry)
    except ConfigError as error:
        raise document.mistake(("rules", place, *error.field), error.reason) from error
    except TypeError as error:  # all that is left when the names are: no number
        raise document.mistake(("rules", place, "cost"), str(error)) from error


def _caller(document: _Document, place: int, entry: dict[str, Any]) -> KnownCaller:
    try:
        return KnownCaller(**entry)
    except ValidationError as error:
        mistake = ConfigError.explaining(error, "", KnownCaller.model_fields)
        raise document.mistake(("callers", place, *mistake.field), mistake.reason) from error


def _joined(parts: list[_Described]) -> RuleSet:
    """One rule set out of all files; where they contradict each other, the later one is the mistake."""
    tiers: dict[str, _Document] = {}
    for part in parts:
        if part.tier in tiers:
            message = f"tier {part.tier!r} is described in {tiers[part.tier].file} already, expected one file a tier"
            raise part.document.mistake(("tier",), message)
        tiers[part.tier] = part.document
    known = {DEFAULT_TIER, *tiers}
    for part in parts:
        named = [("rules", place, rule.tier) for place, rule in enumerate(part.rules)]
        named += [("callers", place, caller.tier) for place, caller in enumerate(part.callers)]
        for kind, place, tier in named:
            if tier not in known:
                message = f"no file describes tier {tier!r}, expected one of {', '.join(sorted(known))}"
                raise part.document.mistake((kind, place, "tier"), message)
    origins = {
        "rules": [(part.document, place) for part in parts for place in range(len(part.rules))],
        "callers": [(part.document, place) for part in parts for place in range(len(part.callers))],
    }
    try:
        return RuleSet(
            [rule for part in parts for rule in part.rules], [caller for part in parts for caller in part.callers], known
        )
    except ConfigError as error:
        which, among_all, *field = error.field
        document, place = origins[str(which)][int(among_all)]
        raise document.mistake((which, place, *field), error.reason) from error


def _child(node: Any, part: str | int) -> tuple[Any, int] | None:
    """The child of a node under a name or at an index, and its line, counted from 0; None if there is none."""
    if isinstance(node, yaml.MappingNode):
        return next(((value, key.start_mark.line) for key, value in node.value if key.value == part), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part].start_mark.line
    return None


def _spelled(field: Field) -> str:
    """A field as people write it: ``rules[0].limits[1]``; a name that is too long for one is cut."""
    parts = "".join(f"[{part}]" if isinstance(part, int) else f".{part:.80}" for part in field)
    return f"{parts.removeprefix('.')}: " if parts else ""
