"""The verb ``schema``: prints the JSON Schema of rule files, which `handbook.schema` generates."""

from __future__ import annotations

from importlib.resources import files

import click

from limitgate.command.output import write


@click.command("schema")
def verb() -> None:
    """Print the JSON Schema of rule files, for completion and validation in editors.

    Keep it beside the rules, and start each file with: # yaml-language-server: $schema=rules.schema.json

    For example: limitgate schema > config/rules.schema.json
    """
    write((files("limitgate.rules") / "schema.json").read_text(encoding="utf-8").removesuffix("\n"))
