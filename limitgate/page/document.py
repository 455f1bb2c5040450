"""Builds the document. It needs no other file, so it works under any prefix."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any


@cache
def _page() -> str:
    folder = files("limitgate.page")
    text, style, script = [(folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")]
    return text.replace("{{style}}", style).replace("{{script}}", script)


def document(nonce: str, title: str, facts: Mapping[str, Any]) -> bytes:
    values = {
        "nonce": nonce,
        "title": escape(title),
        # Nothing in it may end the script element.
        "facts": json.dumps(facts).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda name: values[name[1]], _page()).encode()


def policy(nonce: str) -> str:
    """Return the Content-Security-Policy (CSP level 3)."""
    return (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
