"""README and every page in docs/ are held to their word: their code runs, their rule files load, their links lead somewhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from pathlib import Path

import pytest

from limitgate import load_rules
from tests.support import examples
from tests.support.markdown import LANGUAGES, PAGES, ROOT, Block, anchors, blocks, folders, links, text_of
from tests.support.redis_server import RedisServer

CODE = [block for page in PAGES for block in blocks(page, "python")]
FOLDERS = [folder for page in PAGES for folder in folders(page)]
LINKED = (*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A Redis for the pages, emptied before each example."""
    server = RedisServer()
    yield server
    server.stop()


@pytest.mark.parametrize("block", CODE, ids=attrgetter("id"))
def test_python_runs(block: Block, redis: RedisServer, tmp_path: Path) -> None:
    """Every piece of code runs and prints what it says; every application in it serves, and limits something."""
    with redis.client() as client:
        client.flushall()
    examples.run(block, tmp_path, redis.url)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder[0].id)
def test_yaml_loads(folder: list[Block], tmp_path: Path) -> None:
    """Every rule file loads, together with those it is shown beside; one that is in config/ says the same as that."""
    for block in folder:
        (tmp_path / Path(block.file or "rules.yaml").name).write_text(block.text)
    load_rules(tmp_path)
    for block in folder:
        if block.file and block.file.startswith("config/") and (ROOT / block.file).exists():
            shown, real = load_rules(tmp_path / Path(block.file).name), load_rules(ROOT / block.file)
            assert shown.tiers == real.tiers
            assert shown.callers.with_key("demo-vip-key") == real.callers.with_key("demo-vip-key")
            assert shown.callers.list_keys == real.callers.list_keys


def test_there_is_something_to_test() -> None:
    """The blocks are found, so the tests above are about something."""
    assert len([block for block in CODE if block.page == "README.md"]) >= 5
    assert len([block for block in CODE if block.page.startswith("docs/")]) >= 1
    assert {block.file for folder in FOLDERS for block in folder} >= {"config/default.yaml", "config/vip.yaml"}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_found(page: str) -> None:
    """No block escapes by being indented, unclosed, or of a language that nobody tests."""
    found = blocks(page)
    assert {block.language for block in found} <= set(LANGUAGES)
    assert text_of(page).count("```") == 2 * len(found)
    assert "~~~" not in text_of(page)


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page: str) -> None:
    """Every link to a place in the repository leads to a file that is there, and to a heading that is there."""
    for file, anchor in links(page):
        assert (ROOT / file).exists(), file
        assert not anchor or anchor in anchors(file), f"{file}#{anchor}"


def test_every_page_can_be_reached() -> None:
    """From README one gets to every page by links."""
    reached, ahead = set(), {"README.md"}
    while ahead:
        reached |= ahead
        ahead = {file for page in ahead if page in PAGES for file, _ in links(page)} - reached
    assert set(PAGES) <= reached


def test_the_index_names_every_page() -> None:
    """docs/README.md leads to every other page in docs/."""
    assert {file for file, _ in links("docs/README.md")} >= {page for page in PAGES if page.startswith("docs/")} - {
        "docs/README.md"
    }


def test_every_figure_is_shown() -> None:
    """Every picture in docs/ stands on some page."""
    shown = set(chain.from_iterable([file for file, _ in links(page)] for page in PAGES))
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.svg")} <= shown
