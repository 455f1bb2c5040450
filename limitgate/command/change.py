"""What verbs that change something have in common: they ask first, and take durations."""

from __future__ import annotations

import sys
from typing import Any

import click

from limitgate.algorithms.ban import FOR_EVER
from limitgate.errors import ConfigError
from limitgate.limits.duration import seconds_of

_DAY = 86_400
_LONGEST = FOR_EVER / 1e6
"""Seconds of a hundred years."""


def confirm(question: str, *, yes: bool) -> None:
    """Ask whether to go on, unless it was said already.

    Raises `click.Abort` unless the answer is yes, `click.UsageError` where standard input is closed or at its end.
    """
    if yes:
        return
    nobody = click.UsageError(f"{question} Nobody can be asked, expected -y")
    if sys.stdin is None:
        raise nobody
    try:
        click.confirm(question, abort=True, err=True)
    except click.Abort as abort:
        if isinstance(abort.__context__, EOFError):
            click.echo(err=True)  # the question stands on a line of its own
            raise nobody from None
        raise


class Duration(click.ParamType):  # type: ignore[type-arg]  # not generic in every click
    """A duration: seconds, or text such as ``90s``, ``1h`` and ``7d``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read a duration in seconds."""
        text = str(value).strip()
        try:
            found = float(text[:-1]) * _DAY if text.endswith("d") and text[:-1].isdecimal() else _seconds(text)
        except ConfigError as error:
            self.fail(f"{error} or '7d'", param, ctx)
        if not 0 < found <= _LONGEST:
            self.fail(f"{text!r:.80} is no time, expected more than 0, at most 100 years", param, ctx)
        return found


def _seconds(text: str) -> float:
    return seconds_of(float(text) if text.replace(".", "", 1).isdecimal() else text)


DURATION = Duration()
