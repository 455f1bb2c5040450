"""Loads rule files with tests. A `ConfigError` names file, line and field."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StrictBool, StrictStr, ValidationError

from limitgate.errors import MOST_MISTAKES, ConfigError, Field as Place
from limitgate.http.client_ip import canonical
from limitgate.limits.limit import seconds_of
from limitgate.messages.text import expected_of, listed
from limitgate.rules.callers import DEFAULT_TIER, KnownCaller, Text
from limitgate.rules.document import Document
from limitgate.rules.rule import METHOD, Name, Rule, RuleSet

_FIELDS = ("given", "expect")
_LATEST = 10 * 366 * 86400
_ADDRESS = "an address, expected for example '203.0.113.7' or '2001:db8::1'"
_EXAMPLE = "{given: {path: /login, method: POST}, expect: {allowed: true}}"


def _like(is_right: Callable[[str], object], expected: str) -> AfterValidator:
    def checked(value: str) -> str:
        if not is_right(value):
            raise ConfigError(f"{value!r:.80} is not {expected}")
        return value

    return AfterValidator(checked)


def _duration(value: object) -> object:
    return seconds_of(value) if isinstance(value, str) else value


class Given(BaseModel, extra="forbid", frozen=True, hide_input_in_errors=True):
    """Request and time of a test."""

    path: Annotated[StrictStr, _like(lambda path: path.startswith("/"), "a request path, expected for example '/login'")]
    """Path, with or without a query."""
    method: Annotated[StrictStr, _like(METHOD.fullmatch, "a method, expected for example POST")] = "GET"
    """Method; GET if omitted."""
    ip: Annotated[StrictStr, _like(canonical, _ADDRESS)] = "192.0.2.1"
    """Address of the peer; 192.0.2.1 if omitted."""
    headers: dict[StrictStr, StrictStr] = {}
    """Headers by name; none if omitted."""
    at: Annotated[float | None, Field(strict=True, ge=0, le=_LATEST), BeforeValidator(_duration)] = None
    """Seconds, or text such as ``2m``, since the start of the tests: midnight UTC on January 1, 2026. If omitted, the time of
    the previous request.
    """


class Expected(BaseModel, extra="forbid", frozen=True, hide_input_in_errors=True):
    """Expected answer of a test. Missing fields aren't compared."""

    allowed: StrictBool = True
    """False if the request must be refused."""
    rule: Name | None = None
    """Rule that refuses, or has the least remaining; null for none."""
    remaining: Annotated[int | None, Field(strict=True, ge=0)] = None
    """Remaining requests in the fullest window; null without a rule."""
    tier: Text = "default"
    """Tier whose rules apply."""
    retry_after: Annotated[float | None, Field(strict=True, ge=0), BeforeValidator(_duration)] = 0.0
    """Seconds to wait, or ``2m``; 0 if allowed, null if waiting doesn't help. Whole numbers are compared with the wait rounded
    up.
    """


class RuleTest(NamedTuple):
    given: Given
    expect: Expected


def read_rule_test(entry: object) -> RuleTest:
    if not isinstance(entry, dict):
        raise ConfigError(f"expected a mapping, for example {_EXAMPLE}, not {entry!r:.80}")
    mistakes = [ConfigError(f"unknown field, {expected_of(name, _FIELDS)}", (name,)) for name in entry if name not in _FIELDS]
    parts: dict[str, Any] = {}
    for name, model in (("given", Given), ("expect", Expected)):
        try:
            parts[name] = _part(model, entry.get(name))
        except ConfigError as error:
            mistakes += [ConfigError(each.reason, (name, *each.field)) for each in error.every]
    if mistakes:
        raise ConfigError.first_of(mistakes)
    return RuleTest(**parts)


def _part(model: type[BaseModel], value: object) -> BaseModel:
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"expected some of {', '.join(model.model_fields)}, for example {_EXAMPLE}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ConfigError.explaining(error, "", model.model_fields) from error


T = TypeVar("T")

SUFFIXES = (".yaml", ".yml")
MAX_RULES = 20_000
MOST_NOTES = 20


class _File(BaseModel, extra="forbid", hide_input_in_errors=True):
    tier: Text = DEFAULT_TIER
    callers: list[Any] = []
    rules: list[Any] = []
    tests: list[Any] = []


class RuleFile(NamedTuple):
    document: Document
    tier: str
    rules: dict[int, Rule]
    callers: dict[int, KnownCaller]
    tests: dict[int, RuleTest]


class RuleFiles(NamedTuple):
    rules: RuleSet
    files: Sequence[RuleFile]

    def place_of(self, entry: Rule | KnownCaller | str) -> tuple[Document, Place]:
        """Return document and field of a rule, caller or tier. Raises `LookupError`."""
        for file in self.files:
            if file.tier == entry:
                return file.document, ()
            for kind, entries in (("rules", file.rules), ("callers", file.callers)):
                for place, each in entries.items():
                    if each is entry:
                        return file.document, (kind, place)
        raise LookupError(entry)


def load_rules(path: str | Path) -> RuleSet:
    """Load the rules at ``path``: a YAML file, or a folder with one file per tier.

    Raises `ConfigError` for a missing path, an empty folder, or an invalid file, with further errors as notes.
    """
    if not isinstance(path, str | PathLike):
        raise TypeError(f"path is a {type(path).__name__}, expected the path of a rule file; in Python use RuleSet([...])")
    if "\n" in str(path):
        raise ConfigError("rules: text with several lines, expected the path of a rule file instead of its content")
    if not str(path) or "\0" in str(path):
        raise ConfigError(f"rules: {path!r:.80} is no path, expected that of a rule file or a folder of rule files")
    try:
        found = read_rule_files(path)
    except ConfigError as error:
        for other in error.others[:MOST_NOTES]:
            error.add_note(str(other))
        raise
    for file in found.files:
        file.document.free()
    return found.rules


def read_rule_files(path: str | Path) -> RuleFiles:
    files: list[RuleFile] = []
    mistakes: list[ConfigError] = []
    paths = files_at(Path(path))
    for file in paths:
        read, of_file = _read(file)
        mistakes += of_file
        files += [] if read is None else [read]
        if (count := sum([len(each.rules) for each in files])) > MAX_RULES:
            raise ConfigError.in_file(str(path), None, ("rules",), f"{count} rules or more, expected at most {MAX_RULES}")
    rules = RuleSet([])
    if len(files) == len(paths):
        mistakes += islice(_contradictions(files), MOST_MISTAKES)
        try:
            rules = _joined(files)
        except ConfigError as error:
            mistakes += error.every
    if mistakes:
        raise ConfigError.first_of(mistakes[:MOST_MISTAKES])
    rules.source = str(path)
    rules.files_digest = digest_of([(file.document.file, file.document.digest) for file in files])
    return RuleFiles(rules, files)


def digest_of(contents: Iterable[tuple[Path, bytes]]) -> bytes:
    return hashlib.sha256(repr([(file.name, content) for file, content in contents]).encode()).digest()


def files_at(path: Path) -> list[Path]:
    """Return a file, or the files in a folder. Raises `ConfigError` if there is none."""
    try:
        in_folder = sorted(path.iterdir()) if path.is_dir() else None
    except OSError as error:
        raise ConfigError.in_file(str(path), None, (), f"{error.strerror}, expected a folder that can be read") from error
    files = [path] if in_folder is None else [file for file in in_folder if _is_rule_file(file)]
    if not files:
        raise ConfigError.in_file(str(path), None, (), "no rule file in this folder, expected *.yaml or *.yml")
    return files


def _is_rule_file(file: Path) -> bool:
    """True for a rule file, even a dangling link. Raises `ConfigError` for a pipe, which could block."""
    # Hidden files are locks of Emacs and attributes of macOS.
    if file.suffix not in SUFFIXES or file.name.startswith("."):
        return False
    try:
        mode = file.stat().st_mode
    except OSError:
        return True
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ConfigError.in_file(str(file), None, (), "is a pipe, socket or device, expected a file")
    return stat.S_ISREG(mode)


def rules_of(option: object) -> RuleSet:
    if option is None or option == "":
        raise ConfigError("rules are missing, expected rules=... or LIMITGATE_RULES: a file, a folder, or a list of Rule")
    if isinstance(option, RuleSet):
        return option
    if isinstance(option, str | Path):
        return load_rules(option)
    if isinstance(option, Rule):
        raise ConfigError(f"rules: a single Rule, expected a list: rules=[Rule({option.name!r}, ...)]")
    rules: list[Rule] = []
    for rule in option if isinstance(option, Iterable) and not isinstance(option, Mapping) else [option]:
        if not isinstance(rule, Rule):
            expected = "the path of a file or a folder, a list of Rule, or a RuleSet"
            raise ConfigError(f"rules: {rule!r:.80} is not a Rule, expected {expected}")
        rules.append(rule)
    return RuleSet(rules)


def _read(file: Path) -> tuple[RuleFile | None, list[ConfigError]]:
    """Read a file. A stand-in for an invalid rule prevents errors in references to it."""
    try:
        document = Document(file)
    except ConfigError as error:
        return None, [error]
    if not isinstance(document.data, dict):
        what = "empty, expected" if document.data is None else "expected a mapping with"
        return None, [*document.mistakes, document.mistake((), f"{what} tier, callers and rules")]
    top, wrong = _top(document, document.data)
    mistakes = [*document.mistakes, *wrong]
    latest = 0.0

    def test(entry: object) -> RuleTest:
        nonlocal latest
        read = read_rule_test(entry)
        at = latest if read.given.at is None else read.given.at
        if at < latest:
            raise ConfigError(f"{at:g} s is before the previous test, expected at least {latest:g}", ("given", "at"))
        latest = at
        return read

    rules = _entries(mistakes, document, "rules", top.rules, partial(_rule, tier=top.tier))
    named = [(place, rules.get(place) or _stand_in(entry, top.tier)) for place, entry in enumerate(top.rules)]
    callers = _entries(mistakes, document, "callers", top.callers, partial(_caller, tier=top.tier))
    tests = _entries(mistakes, document, "tests", top.tests, test)
    read = RuleFile(document, top.tier, {place: rule for place, rule in named if rule}, callers, tests)
    return None if wrong else read, mistakes


def _entries(
    mistakes: list[ConfigError], document: Document, kind: str, entries: Sequence[object], read: Callable[[object], T]
) -> dict[int, T]:
    found = {}
    for place, entry in enumerate(entries):
        if len(mistakes) < MOST_MISTAKES:
            try:
                found[place] = read(entry)
            except ConfigError as error:
                mistakes += _placed(error, document, (kind, place))
    return found


def _top(document: Document, data: dict[str, Any]) -> tuple[_File, list[ConfigError]]:
    try:
        return _File.model_validate(data), []
    except ValidationError as error:
        explained = ConfigError.explaining(error, "", _File.model_fields)
        wrong = {mistake.field[0] for mistake in explained.every}
        right = {name: value for name, value in data.items() if name not in wrong}
        return _File.model_validate(right), _placed(explained, document, ())


def _placed(error: ConfigError, document: Document, where: Place) -> list[ConfigError]:
    fields = [((*where, *each.field), each.reason) for each in error.every]
    return [document.mistake(field, reason) for field, reason in fields if field not in document.misread]


def _rule(entry: object, tier: str) -> Rule:
    if not isinstance(entry, dict):
        raise ConfigError(f"expected a mapping, for example {{name: api, path: /api/**, qps: 5}}, not {entry!r:.80}")
    if "name" not in entry:
        raise ConfigError("a rule has no name, expected one")
    try:
        return Rule(**{"tier": tier, **entry})
    except TypeError as error:  # only a cost that isn't a number raises TypeError
        raise ConfigError(str(error), ("cost",)) from error


def _stand_in(entry: Any, tier: str) -> Rule | None:
    try:
        return Rule(entry["name"], "1/second", tier=entry.get("tier", tier))
    except (ConfigError, LookupError, TypeError, AttributeError):
        return None


def _caller(entry: object, tier: str) -> KnownCaller:
    if not isinstance(entry, dict):
        raise ConfigError(f"expected a mapping, for example {{id: acme, api_key: 'sha256:...'}}, not a {type(entry).__name__}")
    try:
        return KnownCaller(**{"tier": tier, **entry})
    except ValidationError as error:
        raise ConfigError.explaining(error, "", KnownCaller.model_fields) from None


def _contradictions(files: Sequence[RuleFile]) -> Iterator[ConfigError]:
    tiers: dict[str, Document] = {}
    for file in files:
        other = tiers.setdefault(file.tier, file.document)
        if other is not file.document:
            message = f"tier {file.tier!r} is already described in {other.file}, expected one file per tier"
            if file.tier == DEFAULT_TIER:
                message += ", and tier: NAME in files for other callers"
            yield file.document.mistake(("tier",), message)
    known = sorted({DEFAULT_TIER, *tiers})
    for file in files:
        for kind, entries in (("rules", file.rules), ("callers", file.callers)):
            for place, entry in entries.items():
                if entry.tier not in known:
                    message = f"no file describes tier {entry.tier!r}, expected one of {listed(known)}"
                    yield file.document.mistake((kind, place, "tier"), message)


def _joined(files: Sequence[RuleFile]) -> RuleSet:
    """Join files. If two files contradict each other, the later one is reported."""
    rules = [(file.document, place, rule) for file in files for place, rule in file.rules.items()]
    callers = [(file.document, place, caller) for file in files for place, caller in file.callers.items()]
    try:
        return RuleSet([rule for *_, rule in rules], [caller for *_, caller in callers], [file.tier for file in files])
    except ConfigError as error:
        mistakes = []
        for each in error.every:
            kind, among_all, *field = each.field
            document, place, _ = (rules if kind == "rules" else callers)[int(among_all)]
            mistakes.append(document.mistake((kind, place, *field), each.reason))
        raise ConfigError.first_of(mistakes) from error
