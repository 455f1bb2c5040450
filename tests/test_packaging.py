"""What is handed out: the wheel, and the sdist that it was built from. Needs the source tree, see scripts/test-wheel."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Set as AbstractSet
from email.message import Message
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FRAMEWORKS = {"django", "fastapi", "flask", "starlette", "uvicorn", "werkzeug"}
HANDED_OUT = ("limitgate", "changes", "tests", "benchmarks", "handbook", "docs", "deploy", "example_app", "config", "scripts")
"""The folders of the sdist."""


class Built(NamedTuple):
    """What `make dist` builds."""

    wheel: frozenset[str]
    sdist: frozenset[str]
    metadata: Message


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist, and the wheel built from it, by the tools that are installed."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    stem = f"{PROJECT['name']}-{PROJECT['version']}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl") as wheel:
        metadata = email.message_from_bytes(wheel.read(f"{stem}.dist-info/METADATA"))
        in_wheel = frozenset(wheel.namelist())
    with tarfile.open(folder / f"{stem}.tar.gz") as sdist:
        in_sdist = frozenset(name.removeprefix(f"{stem}/") for name in sdist.getnames())
    return Built(in_wheel, in_sdist, metadata)


def sources(folder: str) -> AbstractSet[str]:
    """The files of a folder, without what Python left there."""
    paths = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(ROOT).as_posix() for path in paths}


def test_the_wheel_is_the_package_and_nothing_else(built: Built) -> None:
    """Modules, scripts for Redis, the mark of a typed package and pytest's plugin; nobody else's top-level names."""
    about = {name for name in built.wheel if name.startswith(f"limitgate-{PROJECT['version']}.dist-info/")}
    assert built.wheel - about == sources("limitgate") | {"_limitgate_pytest.py", "limitgate/messages/diagnostics.md"}
    assert {"limitgate/py.typed", "limitgate/lua/spend.lua", "limitgate/http/proxies/cloudflare.txt"} <= built.wheel
    assert f"limitgate-{PROJECT['version']}.dist-info/licenses/LICENSE" in about


def test_the_sdist_holds_all_that_is_needed_to_build_and_to_test(built: Built) -> None:
    """Every file of the repository but those of its own machinery, so `make test` works from it."""
    expected = {path for folder in HANDED_OUT for path in sources(folder)}
    top = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "SECURITY.md", "pyproject.toml"}
    top |= {"_limitgate_pytest.py", "limitgate.cdx.json", "mkdocs.yml"}
    assert built.sdist == expected | top | {".gitignore", "PKG-INFO"}


def test_what_is_installed_needs_no_framework(built: Built) -> None:
    """Without an extra only what the engine itself needs comes along."""
    needed = [Requirement(text) for text in built.metadata.get_all("Requires-Dist", [])]
    runtime = {canonicalize_name(one.name) for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})}
    assert runtime == {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert not runtime & FRAMEWORKS


@pytest.mark.parametrize("extra", ["fastapi", "flask", "django", "example"])
def test_extras_allow_the_versions_that_are_tested(built: Built, extra: str) -> None:
    """Every extra is in the wheel's metadata, and the versions that these tests run on are within its bounds."""
    assert extra in built.metadata.get_all("Provides-Extra", [])
    for text in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(version(requirement.name)), f"{text} excludes {version(requirement.name)}"


def test_tests_pin_what_they_run_on() -> None:
    """What `make test` installs is the same tomorrow: but for the extras of our own, everything has one version."""
    extras = PROJECT["optional-dependencies"]
    for text in (*extras["test"], *extras["dev"], *extras["bench"], *extras["fuzz"]):
        requirement = Requirement(text)
        pinned = [clause.operator for clause in requirement.specifier] == ["=="]
        assert pinned or requirement.name == "limitgate", f"{text} is not pinned"
