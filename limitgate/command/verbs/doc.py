"""The verb ``doc``."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from importlib.resources import files
from pathlib import Path

import click

from limitgate.command.output import json_option, print_json, say
from limitgate.messages.text import meant

_NUMBER = re.compile(r"(?:LG)?[ _-]?0*([0-9]{1,3})")
_ENTRY = re.compile(r"^## (LG\d{3})\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@click.command("doc")
@click.argument("code", required=False)
@json_option
def verb(code: str | None, *, as_json: bool) -> None:
    """Explain a code of a log line: what it means, why it matters, what to do. Without a code, list all of them.

    For example: limitgate doc LG006
    """
    entries = {name: text.strip() for name, text in _ENTRY.findall(_page())}
    if code is not None:
        wanted = _found(code, entries)
        entries = {wanted: entries[wanted]}
    if as_json:
        print_json([{"code": name, "summary": _summary(text), "text": text} for name, text in entries.items()])
    elif code is None:
        say(*[f"{name}  {_summary(text)}" for name, text in entries.items()])
    else:
        _print(*entries.popitem())


def _found(code: str, entries: Collection[str]) -> str:
    wanted = code.strip().upper()
    if number := _NUMBER.fullmatch(wanted):
        wanted = f"LG{int(number[1]):03}"
    if wanted not in entries:
        near = meant(wanted, entries)
        hint = "'limitgate doc' lists them" if near is None else f"did you mean {near}?"
        raise click.UsageError(f"{code!r:.40} is not a code of LimitGate; {hint}")
    return wanted


def _print(name: str, text: str) -> None:
    text = f"# {name}\n\n{text}"
    if not sys.stdout.isatty():
        say(*text.split("\n"))
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))


def _summary(text: str) -> str:
    first = text.split("\n\n", maxsplit=1)[0].replace("\n", " ")
    return re.sub(r"[*`]", "", first.partition("**")[2].partition("**")[0]).rstrip(".")


def _page() -> str:
    page = files("limitgate.messages") / "diagnostics.md"
    if not page.is_file():
        page = Path(__file__).parents[3] / "docs" / "diagnostics.md"
    return page.read_text("utf-8")
