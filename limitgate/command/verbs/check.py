"""The verb ``check``: reads rule files as the service does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import click

from limitgate.command.findings import Finding, found, shown_path
from limitgate.command.output import FOUND, print_json, say
from limitgate.command.rule_sets import is_in_python, rules_named
from limitgate.errors import MOST_MISTAKES, ConfigError, spelled
from limitgate.observing.counts import series
from limitgate.rules.files import RuleFiles, read_rule_files
from limitgate.rules.review.review import Oddity, review
from limitgate.rules.rule import Rule


class _Checked(NamedTuple):
    path: Path
    findings: list[Finding]
    series: int | None
    """None if the rules cannot be read."""


@click.command("check")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "github"]),
    default="text",
    help="text for people, json for programs, github for annotations in a workflow.",
)
@click.option("--json", "is_json", is_flag=True, help="The same as --format json.")
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings as well.")
@click.option("--identify", "identifies", is_flag=True, help="Assume that the application identifies callers.")
@click.pass_context
def verb(ctx: click.Context, paths: tuple[Path, ...], form: str, *, is_json: bool, strict: bool, identifies: bool) -> None:
    """Read rule files and folders as the service does, and print errors and warnings.

    Each PATH is a rule set: a file, a folder with a file per tier, or MODULE:NAME of an application or a list of rules in
    Python. The last line counts errors, warnings, and metric series. Exit status 1: there are errors.

    For example: limitgate check config/
    """
    checked = [_look_at(path, identifies=identifies) for path in paths]
    findings = [finding for each in checked for finding in each.findings]
    form = "json" if is_json else form
    _FORMS[form](findings)
    for each in checked:
        if each.series is not None:
            say(f"{shown_path(str(each.path))}: {_sum(each)}", err=form != "text")  # programs read findings only
    if sum(each.level == "error" for each in findings) >= MOST_MISTAKES:
        say(f"limitgate: there may be more errors; the search stops after {MOST_MISTAKES} in a rule set", err=True)
    ctx.exit(FOUND if any(strict or each.level == "error" for each in findings) else 0)


def _sum(checked: _Checked) -> str:
    levels = [finding.level for finding in checked.findings]
    mistakes, warnings = levels.count("error"), levels.count("warning")
    parts = [f"{mistakes or 'no'} error{'' if mistakes == 1 else 's'}"]
    parts += [f"{warnings} warning{'' if warnings == 1 else 's'}"] if warnings else []
    return ", ".join([*parts, f"{checked.series:,} metric series"])


def _look_at(path: Path, *, identifies: bool) -> _Checked:
    if is_in_python(str(path)):
        return _look_at_python(path, identifies=identifies)
    try:
        read = read_rule_files(path)
    except ConfigError as error:
        return _Checked(path, _in_order(found(error)), None)
    callers = [caller for file in read.files for caller in file.callers.values()]
    odd = [_warning(read, oddity) for oddity in review(read.rules, callers, identifies=identifies)]
    return _Checked(path, _in_order([*odd, *_failed_tests(read)]), series(read.rules))


def _look_at_python(name: Path, *, identifies: bool) -> _Checked:
    try:
        rules = rules_named(str(name))
    except ConfigError as error:
        mistakes = [
            each if each.file else each._replace(file=str(name), field=_place_of(mistake))
            for each, mistake in zip(found(error), error.every)
        ]
        return _Checked(name, mistakes, None)
    odd = [
        Finding(str(name), None, ": ".join(filter(None, (_about(each), spelled(each.field)))), "warning", each.message)
        for each in review(rules, rules.listed_callers, identifies=identifies)
    ]
    return _Checked(name, odd, series(rules))


def _place_of(mistake: ConfigError) -> str | None:
    return str(mistake).removesuffix(mistake.reason).removesuffix(": ") or None


def _about(oddity: Oddity) -> str:
    about = oddity.about
    if isinstance(about, str):
        return f"tier {about!r}"
    return f"rule {about.name!r}" if isinstance(about, Rule) else f"caller {about.id!r}"


def _failed_tests(read: RuleFiles) -> Iterable[Finding]:
    if not any(file.tests for file in read.files):
        return ()
    from limitgate.command.rule_tests import failures  # noqa: PLC0415 - imports the gate, which only tests need

    return failures(read)


def _warning(read: RuleFiles, oddity: Oddity) -> Finding:
    document, where = read.place_of(oddity.about)
    field = (*where, *oddity.field)
    return Finding(str(document.file), document.line_of(field), spelled(field) or None, "warning", oddity.message)


def _in_order(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda each: (each.file or "", each.line or 0))


def _print_text(findings: list[Finding]) -> None:
    for each in findings:
        say(each.text)


def _print_annotations(findings: list[Finding]) -> None:
    for each in findings:
        say(each.annotation)


def _print_json(findings: list[Finding]) -> None:
    print_json([each._asdict() for each in findings])


_FORMS = {"text": _print_text, "github": _print_annotations, "json": _print_json}
