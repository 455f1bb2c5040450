"""The verb ``check``: rule files, read as the service would."""

from __future__ import annotations

import re
from pathlib import Path

import click

from limitgate.command.exits import FOUND
from limitgate.command.output import print_json
from limitgate.errors import ConfigError
from limitgate.rules.files import load_rules

_PLACE = re.compile(r"(?P<file>.+?):(?:(?P<line>\d+):)? (?:(?P<field>[\w.\[\]]+): )?(?P<message>.+)", re.DOTALL)


@click.command("check")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="How mistakes are printed.")
@click.pass_context
def verb(ctx: click.Context, paths: tuple[Path, ...], form: str) -> None:
    """Read rule files and folders as the service would, and print what is wrong.

    For example: limitgate check config/
    """
    mistakes = []
    for path in paths:
        try:
            load_rules(path)
        except ConfigError as error:
            mistakes.append(str(error))
    if form == "json":
        print_json([{**_parts(mistake), "level": "error"} for mistake in mistakes])
    else:
        for mistake in mistakes:
            click.echo(mistake)
    ctx.exit(FOUND if mistakes else 0)


def _parts(mistake: str) -> dict[str, str | int | None]:
    found = _PLACE.fullmatch(mistake)
    if found is None:
        return {"file": None, "line": None, "field": None, "message": mistake}
    return {**found.groupdict(), "line": int(found["line"]) if found["line"] else None}
