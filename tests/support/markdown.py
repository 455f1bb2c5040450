"""The project's Markdown pages, taken apart: fenced blocks, tables, headings and links. Looked at by tests only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")))
"""The pages whose examples are held to their word, relative to the repository."""
LANGUAGES = ("python", "yaml", "sh", "text", "mermaid")
"""The languages that a block may be of: the first two are programs and are run, the others are no programs of ours."""

_BLOCK = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
_NAME = re.compile(r"# ((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|yml))\n")
_HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    """The line of its first row of text, counted from 1."""
    language: str
    text: str

    @property
    def id(self) -> str:
        """Where it stands."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that the block shows, where its first line says so: ``# config/vip.yaml``."""
        name = _NAME.match(self.text)
        return name[1] if name else None


def text_of(page: str) -> str:
    """A page as it is written."""
    return (ROOT / page).read_text()


def blocks(page: str, *languages: str) -> list[Block]:
    """The fenced blocks of a page, those of all languages if none are named."""
    text = text_of(page)
    found = [Block(page, text.count("\n", 0, match.start()) + 2, match[1].strip(), match[2]) for match in _BLOCK.finditer(text)]
    return [block for block in found if block.language in languages or not languages]


def folders(page: str) -> list[list[Block]]:
    """The rule files of a page as they belong together: those named in one folder, up to a name that comes again."""
    found: list[list[Block]] = []
    for block in blocks(page, "yaml"):
        last = found[-1] if found else []
        belongs = bool(block.file and last and last[-1].file) and block.file not in [other.file for other in last]
        if belongs and Path(block.file or "").parent == Path(last[-1].file or "").parent:
            last.append(block)
        else:
            found.append([block])
    return found


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of the table whose first head is ``first``."""
    table = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-|: ]+\n((?:\|.*\n)+)", text_of(page), re.MULTILINE)
    assert table, f"no table with the head {first} in {page}"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[1].splitlines()]


def anchors(page: str) -> set[str]:
    """What links may lead to inside a page, as GitHub names headings: lower case, no punctuation, hyphens for spaces."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(_BLOCK.sub("", text_of(page))):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def links(page: str) -> Iterator[tuple[str, str]]:
    """The links of a page to places in the repository, each as a file relative to it and an anchor, ``""`` for none."""
    for match in _LINK.finditer(_BLOCK.sub("", text_of(page))):
        target = match[1] or match[2]
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            file = (ROOT / page).parent / path if path else ROOT / page
            yield file.resolve().relative_to(ROOT.resolve()).as_posix(), anchor
