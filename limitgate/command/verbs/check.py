"""The verb ``check``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import click

from limitgate.command.applications import is_in_python, rules_named
from limitgate.command.output import FOUND, print_json, say
from limitgate.errors import MOST_MISTAKES, ConfigError, Field, spelled
from limitgate.observing.series import count_series
from limitgate.rules.document import Document
from limitgate.rules.files import read_rule_files
from limitgate.rules.review import Oddity, review
from limitgate.rules.rule import Rule

Level = Literal["error", "warning"]


class _Finding(NamedTuple):
    file: str | None
    line: int | None
    field: str | None
    level: Level
    message: str

    @property
    def text(self) -> str:
        file = None if self.file is None else _shown_path(self.file)
        place = f"{file}:{self.line}" if self.line else file
        parts = [place, "warning" if self.level == "warning" else None, self.field, self.message]
        return ": ".join(part for part in parts if part)

    @property
    def annotation(self) -> str:
        # Workflow commands of GitHub Actions (docs.github.com); escapes as in ``@actions/core``.
        properties = {"file": self.file, "line": self.line, "title": "limitgate check"}
        given = ",".join(f"{name}={_escaped(str(value), ':,')}" for name, value in properties.items() if value is not None)
        return f"::{self.level} {given}::{_escaped(f'{self.field}: {self.message}' if self.field else self.message)}"


@click.command("check")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "github"]),
    help="text for people (the default), json for programs, github for annotations in a workflow.",
)
@click.option("--json", "is_json", is_flag=True, help="The same as --format json.")
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings as well.")
@click.option("--identify", "identifies", is_flag=True, help="Assume that the application identifies callers.")
@click.pass_context
def verb(
    ctx: click.Context, paths: tuple[Path, ...], form: str | None, *, is_json: bool, strict: bool, identifies: bool
) -> None:
    """Read rule files and folders as the service does, and print errors and warnings.

    Each PATH is a rule set: a file, a folder with a file per tier, or MODULE:NAME of an application or a list of rules in
    Python. The last line counts errors, warnings, and metric series. Exit status 1: there are errors.

    For example: limitgate check config/
    """
    if is_json and form not in (None, "json"):
        raise click.UsageError(f"expected either --json or --format {form}, not both")
    form = "json" if is_json else form or "text"
    checked = [(path, *_look_at(path, identifies=identifies)) for path in paths]
    findings = [finding for _, found, _ in checked for finding in found]
    if form == "json":
        print_json([each._asdict() for each in findings])
    else:
        for each in findings:
            say(each.annotation if form == "github" else each.text)
    for path, found, number in checked:
        if number is not None:
            say(f"{_shown_path(str(path))}: {_sum(found)}, {number:,} metric series", err=form != "text")  # for people only
    if sum(each.level == "error" for each in findings) >= MOST_MISTAKES:
        say(f"limitgate: there may be more errors; the search stops after {MOST_MISTAKES} in a rule set", err=True)
    ctx.exit(FOUND if any(strict or each.level == "error" for each in findings) else 0)


def _sum(findings: list[_Finding]) -> str:
    levels = [finding.level for finding in findings]
    mistakes, warnings = levels.count("error"), levels.count("warning")
    told = f"{mistakes or 'no'} error{'' if mistakes == 1 else 's'}"
    return f"{told}, {warnings} warning{'' if warnings == 1 else 's'}" if warnings else told


def _look_at(path: Path, *, identifies: bool) -> tuple[list[_Finding], int | None]:
    if is_in_python(str(path)):
        return _look_at_python(str(path), identifies=identifies)
    try:
        read = read_rule_files(path)
    except ConfigError as error:
        return _in_order(_found(error)), None
    callers = [caller for file in read.files for caller in file.callers.values()]
    places = [(oddity, *read.place_of(oddity.about)) for oddity in review(read.rules, callers, identifies=identifies)]
    odd = [_located(document, (*where, *each.field), each.message, "warning") for each, document, where in places]
    if any(file.tests for file in read.files):
        from limitgate.command.rule_tests import failures

        odd += [_located(*failure, "error") for failure in failures(read)]
    return _in_order(odd), count_series(read.rules)


def _look_at_python(name: str, *, identifies: bool) -> tuple[list[_Finding], int | None]:
    try:
        rules = rules_named(name)
    except ConfigError as error:
        places = [str(each).removesuffix(each.reason).removesuffix(": ") or None for each in error.every]
        found = zip(_found(error), places)
        return [each if each.file else each._replace(file=name, field=place) for each, place in found], None
    oddities = review(rules, rules.listed_callers, identifies=identifies)
    return [_Finding(name, None, _place(each), "warning", each.message) for each in oddities], count_series(rules)


def _place(oddity: Oddity) -> str:
    about = oddity.about
    what = f"tier {about!r}"
    if not isinstance(about, str):
        what = f"rule {about.name!r}" if isinstance(about, Rule) else f"caller {about.id!r}"
    return ": ".join(filter(None, (what, spelled(oddity.field))))


def _located(document: Document, field: Field, message: str, level: Level) -> _Finding:
    return _Finding(str(document.file), document.line_of(field), spelled(field) or None, level, message)


def _in_order(findings: Iterable[_Finding]) -> list[_Finding]:
    return sorted(findings, key=lambda each: (each.file or "", each.line or 0))


def _shown_path(path: str) -> str:
    """Return a path to print, because GitHub runs lines that start with ``::`` as workflow commands."""
    return f"./{path}" if path.lstrip().startswith("::") else path


def _found(error: ConfigError) -> list[_Finding]:
    return [_Finding(each.file, each.line, spelled(each.field) or None, "error", each.reason) for each in error.every]


def _escaped(text: str, more: Iterable[str] = ()) -> str:
    for character in ("%", "\r", "\n", *more):
        text = text.replace(character, f"%{ord(character):02X}")
    return text
