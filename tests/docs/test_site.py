"""The pages that `make site` hands to Zensical: every page has its place, every link leads somewhere, the API is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import limitgate
from handbook import site


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "PAGES", folder / "pages")
        patch.setattr(site, "BUILD", folder)
        site.stage()
    return folder


def test_site_navigation_has_each_page_once(staged: Path) -> None:
    configuration = yaml.safe_load((staged / "mkdocs.yml").read_text())
    listed = re.findall(r"[\w/.-]+\.md", yaml.safe_dump(configuration["nav"]))
    pages = [path.relative_to(staged / "pages").as_posix() for path in (staged / "pages").rglob("*.md")]
    assert sorted(listed) == sorted(pages)


def test_site_links_lead_to_staged_files(staged: Path) -> None:
    for page in (staged / "pages").rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)\s#]+)", text):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"


def test_site_link_to_a_missing_file_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"docs/a\.md links to \.\./nowhere\.py"):
        site.rewritten("See [x](../nowhere.py).", "docs/a.md")


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("[a](docs/start.md#x)", "README.md", "[a](start.md#x)"),
        ("[a](../SECURITY.md)", "docs/start.md", "[a](project/security.md)"),
        ("[a](../SECURITY.md)", "docs/README.md", "[a](project/security.md)"),
        ("[a](../overload.md)", "docs/internals/overload.md", "[a](../overload.md)"),
        ("[a](docs/start.md)", "CHANGELOG.md", "[a](../start.md)"),
        ("[a](LICENSE)", "README.md", f"[a]({site.SOURCE}/LICENSE)"),
        ("![p](docs/benchmark.svg)", "README.md", "![p](benchmark.svg)"),
        ("[a](https://example.com/a.md)", "README.md", "[a](https://example.com/a.md)"),
        ("```\n[a](docs/start.md)\n```", "README.md", "```\n[a](docs/start.md)\n```"),
    ],
)
def test_site_links_are_rewritten(text: str, path: str, expected: str) -> None:
    assert site.rewritten(text, path) == expected


def test_site_reference_has_exactly_the_public_names() -> None:
    named = re.findall(r"^::: ([\w.]+)$", site.reference(), re.MULTILINE)
    assert len(named) == len(set(named))
    assert {name.rpartition(".")[2] for name in named} >= set(limitgate.__all__)
    assert not [name for name in named if name.rpartition(".")[2].startswith("_")]


def test_site_llms_lists_each_page_with_a_sentence(staged: Path) -> None:
    lines = [line for line in (staged / "pages" / "llms.txt").read_text().splitlines() if line.startswith("- ")]
    assert len(lines) > 30
    assert all(re.fullmatch(r"- \[[^\]]+\]\(https://\S+/\): \S.+", line) for line in lines), lines
