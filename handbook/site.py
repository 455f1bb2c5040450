"""``python -m handbook.site`` builds the documentation as a website in build/site.

Pages come from docs/ and the Markdown files of the repository. The reference of the API is made from docstrings of exactly the
public names, and llms.txt (llmstxt.org) lists all pages with their first sentence.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import yaml

import limitgate

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build"
PAGES = BUILD / "pages"
SOURCE = "https://github.com/limitgate/limitgate/blob/main"

OF_REPOSITORY = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "docs/README.md": "contents.md",
}
"""Files of the repository by the page that they become. Other files of docs/ keep their path in it."""
MODULES = (
    "limitgate",
    "limitgate.testing",
    "limitgate.fastapi",
    "limitgate.flask",
    "limitgate.django",
    "limitgate.httpx",
    "limitgate.httpx2",
    "limitgate.aiohttp",
    "limitgate.requests",
    "limitgate.urllib3",
    "limitgate.llm",
    "limitgate.prometheus",
    "limitgate.opentelemetry",
)
"""Public modules."""
_LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?:|#|mailto:)([^)\s#]+)(#[^)]*)?\)")


def page_of(path: str) -> str | None:
    """Return the page that a file of the repository becomes, relative to the site. None for one that becomes none."""
    if path in OF_REPOSITORY:
        return OF_REPOSITORY[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def rewritten(text: str, path: str) -> str:
    """Return the text of a file with links between pages, and links to the source for files that are none."""
    here = posixpath.dirname(page_of(path) or "")

    def link(match: re.Match[str]) -> str:
        start, target, anchor = match[1], match[2], match[3] or ""
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        page = page_of(file)
        if page is None and not (ROOT / file).exists():
            raise FileNotFoundError(f"{path} links to {target}, which does not exist")
        if page is None:
            return f"{start}{SOURCE}/{file}{anchor})"
        return f"{start}{posixpath.relpath(page, here or '.')}{anchor})"

    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join([part if part.startswith("```") else _LINK.sub(link, part) for part in parts])


def names_of(module: str) -> list[str]:
    """Return the public names of a module."""
    if module == "limitgate":
        return list(limitgate.__all__)
    return list(getattr(__import__(module, fromlist=["__all__"]), "__all__", []))


def public_objects() -> dict[str, str]:
    """Return the full path of each public name, with the module that has it first."""
    found: dict[str, str] = {}
    for module in MODULES:
        for name in names_of(module):
            home = f"limitgate.{limitgate._HOMES[name]}" if module == "limitgate" else module  # noqa: SLF001 - our own map
            given = getattr(__import__(home, fromlist=[name]), name)
            found.setdefault(f"{getattr(given, '__module__', home)}.{name}", module)
    return found


def reference() -> str:
    """Return the page of the API: each public name once."""
    lines = ["# API", "", "On this page you find every public name, with its parameters and errors.", ""]
    for module, entries in groupby(public_objects().items(), key=lambda entry: entry[1]):
        lines += [f"## `{module}`", ""]
        for path, _ in entries:
            lines += [f"::: {path}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def sections() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the navigation: sections with the title and page of each entry, in the order of docs/README.md."""
    found: list[tuple[str, list[tuple[str, str]]]] = []
    placed = {"contents.md", "index.md"}
    for line in rewritten((ROOT / "docs/README.md").read_text("utf-8"), "docs/README.md").splitlines():
        if line.startswith("## "):
            found.append((line[3:], []))
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+\.md)", line):
            if target not in placed and found:
                placed.add(target)
                found[-1][1].append((title_of(target), target))
    found[-1][1].append(("Changes", "project/changelog.md"))
    reference_ = next(entries for name, entries in found if name == "Reference")
    reference_.append(("API", "api.md"))
    left = sorted(str(page.relative_to(PAGES)) for page in PAGES.rglob("*.md"))
    known = {page for _, entries in found for _, page in entries} | placed
    found[-1][1].extend((title_of(page), page) for page in left if page not in known)
    return [(name, entries) for name, entries in found if entries]


def title_of(page: str) -> str:
    """Return the title of a staged page."""
    match = re.search(r"^# (.+)$", (PAGES / page).read_text("utf-8"), re.MULTILINE)
    return match[1].replace("`", "") if match else page


def first_sentence(page: str) -> str:
    """Return the first sentence below the title."""
    blocks = (PAGES / page).read_text("utf-8").split("\n\n")[1:]
    text = next((block for block in blocks if block[:1].isalpha()), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(text.split()))
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", plain, maxsplit=1)[0]


def llms(entries: list[tuple[str, list[tuple[str, str]]]], site: str) -> str:
    """Return llms.txt."""
    lines = ["# LimitGate", "", f"> {first_sentence('index.md')}", ""]
    for name, pages in entries:
        lines += [f"## {name}", ""]
        lines += [f"- [{title}]({site}{page.removesuffix('.md')}/): {first_sentence(page)}" for title, page in pages]
        lines.append("")
    return "\n".join(lines)


def stage() -> Path:
    """Write pages and configuration into build/. Return the configuration."""
    shutil.rmtree(PAGES, ignore_errors=True)
    files = [ROOT / name for name in OF_REPOSITORY] + sorted(ROOT.glob("docs/**/*"))
    for file in files:
        path = file.relative_to(ROOT).as_posix()
        page = page_of(path)
        if page is None or not file.is_file():
            continue
        target = PAGES / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            target.write_text(rewritten(file.read_text("utf-8"), path), "utf-8")
        else:
            target.write_bytes(file.read_bytes())
    for name in ("site.css", "site.js"):
        shutil.copyfile(Path(__file__).with_name(name), PAGES / name)
    (PAGES / "api.md").write_text(reference(), "utf-8")
    entries = sections()
    text = (ROOT / "mkdocs.yml").read_text("utf-8").removesuffix("nav:\n")
    site = re.search(r"^site_url: (\S+)$", text, re.MULTILINE)[1]  # type: ignore[index]
    (PAGES / "llms.txt").write_text(llms(entries, site), "utf-8")
    nav = [{"Home": ["index.md", "contents.md"]}, *({name: [{t: p} for t, p in pages]} for name, pages in entries)]
    configuration = BUILD / "mkdocs.yml"
    text = text.replace("build/pages", "pages").replace("build/site", "site").replace("paths: [.]", "paths: [..]")
    configuration.write_text(text + yaml.safe_dump({"nav": nav}, sort_keys=False, allow_unicode=True), "utf-8")
    return configuration


def main() -> None:
    """Build the site. Exit with 1 for a broken link or a page that nothing leads to."""
    configuration = stage()
    builder = sys.argv[1] if len(sys.argv) > 1 else "zensical"
    command = [sys.executable, "-m", builder, "build", "--config-file", str(configuration), "--strict", "--clean"]
    sys.exit(subprocess.run(command, check=False, cwd=BUILD).returncode)  # noqa: S603 - our own command


if __name__ == "__main__":
    main()
