"""YAML documents with lines of fields. Files may be hostile, so all sizes are bounded, and no tag runs code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import yaml

from limitgate.errors import MOST_MISTAKES, SECRETS, ConfigError, Field
from limitgate.messages.text import shortened

_TAG = "tag:yaml.org,2002:"
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")
_NOT_DECIMAL = re.compile(r"[-+]?(?:.*:.*|0[0-9_]+|0[xb][0-9a-fA-F_]+)")
_OTHER_NUMBER = re.compile(r"[-+]?(?:0o?[0-9]+|[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]{1,2})")
"""Numbers that YAML 1.1 reads as text."""
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"))
_LONGEST = 40  # characters
_LARGEST = 1e15  # larger floats have an exponent
_ZEROS = re.compile(r"^([-+]?)[0_]+(?=[0-9])")


def _misread(node: Any, field: Field) -> str | None:
    text = node.value
    if node.tag not in _NUMBERS or node.style is not None or not _NOT_DECIMAL.fullmatch(text):
        return None
    if not SECRETS.isdisjoint(field):
        return "a number that YAML reads differently, expected decimal digits, or quotes around text"
    try:
        number = f"{yaml.safe_load(text)}"
    except ValueError:  # a prefix without digits
        return f"{text} is not a number, expected decimal digits, or {text!r} in quotes for text"
    if field and field[-1] in _DURATIONS and ":" in text:
        seconds = float(number)
        size, unit = next(((size, unit) for size, unit in _UNITS if seconds % size == 0), (1, "s"))
        return f"{text} is {number} in YAML, expected {seconds / size:.12g}{unit} for the duration"
    decimal = _ZEROS.sub(r"\1", text).replace("_", "") if re.fullmatch(r"[-+0-9_]+", text) else number
    return f"{text} is {number} in YAML, expected {decimal} for the number, or {text!r} in quotes for text"


def _hint(node: Any, message: str) -> str:
    """Explain a value that YAML reads in an unexpected way."""
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return ""
    text = node.value
    if node.tag == f"{_TAG}bool":
        value = str(yaml.safe_load(text))
        # Other messages are about a field that takes true or false.
        is_text = value in message and "expected a mapping" not in message
        return f"; {text} is {value.lower()} in YAML; write {text!r} in quotes for text" if is_text else ""
    if node.tag == f"{_TAG}timestamp":
        return f"; {text} is a date in YAML; write {text!r} in quotes for text"
    if node.tag == f"{_TAG}str" and _OTHER_NUMBER.fullmatch(text):
        number = _decimal(text) if len(text) <= _LONGEST else None
        return f"; {text:.40} is text in YAML; write {number or 'decimal digits'} for the number"
    return ""


def _decimal(text: str) -> str:
    if "e" not in text.lower():
        is_octal = not set(text) & {"8", "9"}
        return str(int(text, 8) if is_octal else int(text.replace("o", "")))
    number = float(text)
    if number.is_integer() and abs(number) < _LARGEST:
        return str(int(number))
    mantissa, exponent, power = str(number).partition("e")
    # Without the point, it would be text again.
    return f"{mantissa}{exponent and '.0' * ('.' not in mantissa)}{exponent}{power}"


MAX_BYTES = 1 << 20
MAX_NODES = 100_000
MAX_NUMBER = 100

_CURES = {
    "another document": "expected --- only at the top, because each tier has its own file",
    "block end": "expected all fields of a rule below each other, with equal indentation",
    "block mapping start": "expected all fields of a rule below each other, with equal indentation",
    "but got '{'": "expected quotes around text with {, such as '/items/{id}'",
    "cannot start any token": "expected spaces instead of tabs, and quotes around text that starts with @, ` or %",
    "could not find expected ':'": "expected a colon after each name, and a dash before each list entry",
    "expected alphabetic or numeric character": "expected quotes around text that starts with * or &",
    "mapping values are not allowed": "expected fields of a rule below each other, and quotes around text with a colon",
    "unacceptable character": "expected text in UTF-8, without control characters",
    "undefined alias": "expected quotes around text that starts with * or &",
}

_DURATIONS = frozenset({"at", "delay", "duration", "for", "max_delay", "most", "retry_after", "warm_up", "within"})
_TEXT = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"
_NAMES = (_TEXT, "tag:yaml.org,2002:merge")


class _Loader(yaml.SafeLoader):
    def __init__(self, text: bytes) -> None:
        super().__init__(text)
        self.nodes: list[Any] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        if len(self.nodes) > 2 * MAX_NODES:  # each may have a name
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_NODES} values, expected fewer")
        compose: Callable[[Any, Any], Any] = super().compose_node
        node = compose(parent, index)
        self.nodes.append(node)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - as PyYAML has it
        construct: Callable[[Any, bool], Any] = super().construct_object
        try:
            return construct(node, deep)
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:  # PyYAML raises these for a wrong tag
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


def read_bytes(file: Path) -> bytes:
    """Read at most one byte more than `MAX_BYTES`. Raises `OSError`."""
    with file.open("rb") as opened:
        return opened.read(MAX_BYTES + 1)


class Document:
    """A YAML document. Raises `ConfigError`.

    ``data`` omits duplicated, nameless and empty fields; ``mistakes`` reports them.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.mistakes: list[ConfigError] = []
        self.misread: set[Field] = set()
        try:
            text = read_bytes(file)
            self.digest: bytes = hashlib.sha256(text).digest()
            if len(text) > MAX_BYTES:
                raise self._mistake(None, f"the file is too large, expected at most {MAX_BYTES} bytes")
            loader = _Loader(text)
            self._root = loader.get_single_node()
            self._nodes = loader.nodes
            self._check((), self._root, [MAX_NODES])
            construct: Callable[[Any], Any] = loader.construct_document
            self.data: Any = construct(self._root) if self._root else None
        except OSError as error:
            seen_from = "" if file.is_absolute() else f", relative to {Path.cwd()}"
            message = f"{error.strerror}, expected a rule file or a folder of rule files{seen_from}"
            raise self._mistake(None, message) from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = shortened(str(getattr(error, "problem", None) or error).partition("\n")[0])
            line = mark.line + 1 if mark else None
            if isinstance(error, yaml.reader.ReaderError):
                line = text.count(b"\n", 0, error.position) + 1
            message = f"expected YAML: {problem}{next((f'; {cure}' for part, cure in _CURES.items() if part in problem), '')}"
            # PyYAML's error quotes the line, which may contain a secret.
            raise self._mistake(line, message) from None
        except RecursionError as error:
            raise self._mistake(None, "nested too deeply, expected a few levels") from error

    def free(self) -> None:
        """Free the tree in small steps, because freeing it at once blocks all threads."""
        self._root = None
        while self._nodes:
            self._nodes.pop()

    def mistake(self, field: Field, message: str) -> ConfigError:
        node, line = self._find(field)
        return self._mistake(line, message if not SECRETS.isdisjoint(field) else f"{message}{_hint(node, message)}", field)

    def line_of(self, field: Field) -> int:
        """Return the line (from 1) of a field, or of its nearest parent."""
        return self._find(field)[1]

    def _find(self, field: Field) -> tuple[Any, int]:
        node, line = self._root, self._root.start_mark.line if self._root else 0
        for part in field:
            child = _child(node, part)
            if child is None:
                return None, int(line) + 1
            node, line = child
        return node, int(line) + 1

    def _mistake(self, line: int | None, message: str, field: Field = ()) -> ConfigError:
        return ConfigError.in_file(str(self.file), line, field, message)

    def _check(self, field: Field, node: Any, budget: list[int]) -> None:
        budget[0] -= 1
        if budget[0] < 0:
            raise self._mistake(None, f"more than {MAX_NODES} values, expected fewer (aliases count each time)")
        if isinstance(node, yaml.MappingNode):
            pairs: dict[object, tuple[Any, Any]] = {}
            for key, value in node.value:
                here = (*field, key.value if isinstance(key, yaml.ScalarNode) else "?")
                if (wrong := _wrong_pair(key, value, pairs)) is not None:
                    self._note(key, here, wrong)
                else:
                    pairs[key.value] = key, value
                    self._check(here, value, budget)
            node.value = list(pairs.values())
        elif isinstance(node, yaml.SequenceNode):
            for place, value in enumerate(node.value):
                self._check((*field, place), value, budget)
        elif node is not None and node.tag != _TEXT and len(node.value) > MAX_NUMBER:
            message = f"expected at most {MAX_NUMBER} characters, or text in quotes"
            raise self._mistake(node.start_mark.line + 1, message, field)
        elif node is not None and (wrong := _misread(node, field)):
            self.misread.add(field)
            self._note(node, field, wrong)

    def _note(self, node: Any, field: Field, message: str) -> None:
        if len(self.mistakes) < MOST_MISTAKES:
            self.mistakes.append(self._mistake(node.start_mark.line + 1, message, field))


def _wrong_pair(key: Any, value: Any, others: Container[object]) -> str | None:
    if key.tag not in _NAMES:
        if not isinstance(key, yaml.ScalarNode):
            return "{{ }} and {[ ]} are mappings in YAML, expected a value; a template has to be filled in before"
        return f"expected a name, in quotes if it looks like something else: {key.value!r:.80}"
    if key.value in others:
        return "duplicate field, expected it once"
    if isinstance(value, yaml.ScalarNode) and value.tag == _NULL and not value.value:
        return "empty, expected a value, or omit the field"
    return None


def _child(node: Any, part: str | int) -> tuple[Any, int] | None:
    if isinstance(node, yaml.MappingNode):
        return next(((value, key.start_mark.line) for key, value in node.value if key.value == part), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part].start_mark.line
    return None
