"""`make release` stops with one line that says what to do; what it builds is tried by hand and by the hosted workflow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from handbook import sbom
from tests.support.markdown import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]

VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
print(JsonStrictValidator(SchemaVersion.V1_6).validate_str(sys.stdin.read()))
"""
"""Prints what is wrong with a bill, in a process of its own: conftest.py leaves out the grammars of IRIs that a bill has."""


class Clone:
    """A clean repository of what a release reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scripts").mkdir()
        for name in ("pyproject.toml", "scripts/release.py"):
            (folder / name).write_bytes((ROOT / name).read_bytes())
        (folder / "limitgate").mkdir()
        (folder / "changes").mkdir()
        (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{VERSION}] - 2026-01-01\n")
        self.git("init", "--quiet", "--initial-branch", "main")
        self.commit()

    def git(self, *words: str) -> None:
        subprocess.run([*GIT, *words], cwd=self.folder, check=True, capture_output=True)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "release")

    def released(self, python: str = sys.executable, **environment: str) -> str:
        """The line that stops the release."""
        command = [python, "scripts/release.py", "--quick"]
        done = subprocess.run(
            command, cwd=self.folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1, done.stdout + done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("release: ")
        assert len(line) < 300
        return line


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_release_dirty_tree_stops(clone: Clone) -> None:
    (clone.folder / "new.py").write_text("")
    assert "1 files differ from the last commit, such as new.py" in clone.released()


def test_release_outside_of_a_clone_stops(clone: Clone) -> None:
    (clone.folder / ".git").rename(clone.folder.parent / f"{clone.folder.name}-git")
    assert "not a clone" in clone.released()


def test_release_without_tag_stops(clone: Clone) -> None:
    assert f"expected v{VERSION}" in clone.released()


@pytest.mark.parametrize("tag", ["latest", "v1", "1.0.0", "v01.0.0rc1", "vv1.0.0rc1", "v1.0.0-rc.1"])
def test_release_tag_that_is_no_version_stops(clone: Clone, tag: str) -> None:
    clone.git("tag", tag)
    line = clone.released()
    assert f"the tag {tag} is no version" in line or "differ" in line


def test_release_tag_of_another_version_stops(clone: Clone) -> None:
    clone.git("tag", "v9.9.9")
    assert "differ: change one of them" in clone.released()


def test_release_two_tags_stop(clone: Clone) -> None:
    clone.git("tag", f"v{VERSION}")
    clone.git("tag", "v9.9.9")
    assert "2 tags at this commit" in clone.released()


def test_release_unreleased_fragments_stop(clone: Clone) -> None:
    (clone.folder / "changes" / "+a.added.md").write_text("A.")
    clone.commit()
    clone.git("tag", f"v{VERSION}")
    assert f"towncrier build --version {VERSION}" in clone.released()


def test_release_missing_section_of_the_changelog_stops(clone: Clone) -> None:
    (clone.folder / "CHANGELOG.md").write_text("# Changelog\n\n## [0.0.1] - 2026-01-01\n")
    clone.commit()
    clone.git("tag", f"v{VERSION}")
    assert f"CHANGELOG.md has no section [{VERSION}]" in clone.released()


def test_release_unreleased_section_of_the_changelog_stops(clone: Clone) -> None:
    (clone.folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{VERSION}] - 2026-01-01\n\n## [Unreleased]\n")
    clone.commit()
    clone.git("tag", f"v{VERSION}")
    assert f"move its lines into [{VERSION}]" in clone.released()


def test_release_extra_without_its_package_stops(clone: Clone) -> None:
    (clone.folder / "limitgate" / "a.py").write_text('with extra("celery", "celery"):\n    import celery\n')
    clone.commit()
    assert "names the extra celery, which pyproject.toml lacks" in clone.released()


def test_release_published_version_stops(clone: Clone, tmp_path_factory: pytest.TempPathFactory) -> None:
    index = tmp_path_factory.mktemp("index") / "simple"
    (index / "limitgate").mkdir(parents=True)
    (index / "limitgate" / "index.html").write_text(f'<a href="limitgate-{VERSION}.tar.gz">limitgate-{VERSION}.tar.gz</a>')
    clone.git("tag", f"v{VERSION}")
    environment = {"PIP_INDEX_URL": index.as_uri(), "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull}
    assert f"limitgate {VERSION} is published already" in clone.released(**environment)


def test_release_without_an_index_stops(clone: Clone) -> None:
    """It cannot know whether the version is new."""
    clone.git("tag", f"v{VERSION}")
    environment = {"PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull}
    environment |= {"PIP_RETRIES": "1", "PIP_NO_INDEX": "0"}
    assert f"cannot ask its index whether {VERSION} is published" in clone.released(**environment)


def test_bill_of_materials_is_that_of_the_metadata() -> None:
    """And valid CycloneDX; `make docs` writes it."""
    text = sbom.FILE.read_text()
    assert text == sbom.text()
    assert subprocess.check_output([sys.executable, "-c", VALIDATE], input=text, text=True) == "None\n"
    bill = json.loads(text)
    named = {component["name"] for component in bill["components"]}
    assert {"redis", "pydantic", "starlette", "click"} <= named
    assert not named & {"pytest", "ruff", "limitgate"}
