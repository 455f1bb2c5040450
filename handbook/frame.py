"""What the pictures in docs/ have in common: their width, their look in light and in dark, a title and captions."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH = 760
_LINE = 18
"""From one caption to the next, in pixels."""
_FIRST, _LAST = 52, 22
"""From what is drawn to the first caption, and from the last one to the end."""

_STYLE = """\
text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }
.back { fill: #ffffff; stroke: #d0d7de }
.title { font-size: 17px; font-weight: 600 }
.small { font-size: 12px; fill: #57606a }
.grid { stroke: #d8dee4 }
.strong { font-weight: 600 }"""
_DARK = """\
  text { fill: #e6edf3 }
  .back { fill: #0d1117; stroke: #30363d }
  .small { fill: #8d96a0 }
  .grid { stroke: #21262d }"""


def framed(title: str, drawn: Sequence[str], bottom: int, captions: Sequence[str], *, style: str, dark: str) -> str:
    """An SVG of what is ``drawn`` down to ``bottom``, with its own ``style`` and what of it differs where it is ``dark``."""
    height = bottom + _FIRST + _LINE * (len(captions) - 1) + _LAST
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}\n{style}\n@media (prefers-color-scheme: dark) {{\n{_DARK}\n{dark}\n}}</style>",
        f'<rect class="back" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="24" y="36">{escape(title)}</text>',
        *drawn,
        *[
            f'<text class="small" x="24" y="{bottom + _FIRST + _LINE * place}">{escape(caption)}</text>'
            for place, caption in enumerate(captions)
        ],
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
