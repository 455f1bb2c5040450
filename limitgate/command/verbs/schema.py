"""The verb ``schema``: the JSON Schema of a rule file, which `handbook.schema` has made of the code."""

from __future__ import annotations

from importlib.resources import files

import click

from limitgate.command.output import write


@click.command("schema")
def verb() -> None:
    """Print the JSON Schema of a rule file, by which editors complete and underline.

    Keep it beside the rules, and begin each file with: # yaml-language-server: $schema=rules.schema.json

    For example: limitgate schema > config/rules.schema.json
    """
    write((files("limitgate.rules") / "schema.json").read_text(encoding="utf-8").removesuffix("\n"))
