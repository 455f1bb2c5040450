"""`click.testing` as it is since click 8.2, on earlier ones, too: stdout and stderr apart, and both together as the output."""

from __future__ import annotations

from inspect import signature
from typing import Any

import click.testing

OPTIONS = {"mix_stderr": False} if "mix_stderr" in signature(click.testing.CliRunner).parameters else {}


class EarlierResult(click.testing.Result):
    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class CliRunner(click.testing.CliRunner):
    def __init__(self) -> None:
        super().__init__(**OPTIONS)

    def invoke(self, *args: Any, **options: Any) -> click.testing.Result:
        result = super().invoke(*args, **options)
        if OPTIONS:
            result.__class__ = EarlierResult
        return result
