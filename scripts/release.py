"""Builds and checks what a release uploads, from a clean tag. Uploads nothing. Called by `make release`.

Each failure is one line that says what to do. `--quick` leaves out the tests of the wheel.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


_USES = """\
from limitgate import Limiter, Rule

rule: Rule = Rule("api", "5/second")
allowed: bool = Limiter("memory://").hit("a", "5/second").allowed
"""


class ReleaseError(Exception):
    """What is wrong and what to do, in one line."""


def run(*command: str | Path, **options: object) -> str:
    """Return the output. Raises `ReleaseError` with the command and the last line of its output."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **{"cwd": ROOT, **options})  # type: ignore[call-overload]
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no output"]
        raise ReleaseError(f"{' '.join(map(str, command))[:200]} failed: {last[0][:300]}")
    output: str = done.stdout
    return output


def check_python() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - says so instead of failing later
        raise ReleaseError(f"Python {sys.version.split()[0]} runs this, expected 3.11 or newer: make release PYTHON=python3.11")


def check_tree() -> None:
    if not (ROOT / ".git").exists():
        raise ReleaseError("this folder is not a clone, expected one: git clone, then make release")
    changed = run("git", "status", "--porcelain").splitlines()
    if changed:
        raise ReleaseError(f"{len(changed)} files differ from the last commit, such as {changed[0][3:]}: commit or remove them")


def tagged_version() -> str:
    """Return the version of the tag at this commit, which is that of pyproject.toml."""
    tags = run("git", "tag", "--points-at", "HEAD").split()
    if not tags:
        raise ReleaseError(f"no tag at this commit, expected v{PROJECT['version']}: git tag -s v{PROJECT['version']}")
    if len(tags) > 1:
        raise ReleaseError(f"{len(tags)} tags at this commit ({', '.join(tags)}), expected one: git tag -d the others")
    try:
        version = str(Version(tags[0].removeprefix("v"))) if tags[0].startswith("v") else None
    except InvalidVersion:
        version = None
    if version is None or f"v{version}" != tags[0]:
        raise ReleaseError(f"the tag {tags[0]} is no version, expected v{PROJECT['version']} (PEP 440)")
    if version != PROJECT["version"]:
        raise ReleaseError(f"the tag {tags[0]} and version {PROJECT['version']} in pyproject.toml differ: change one of them")
    return version


def check_changelog(version: str) -> None:
    fragments = [path.name for path in (ROOT / "changes").glob("*.md") if path.name != "README.md"]
    if fragments:
        raise ReleaseError(
            f"changes/ has {len(fragments)} unreleased texts: run towncrier build --version {version} and commit"
        )
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    if "\n## [Unreleased]" in changelog:
        raise ReleaseError(f"CHANGELOG.md has a section [Unreleased]: move its lines into [{version}]")
    if f"\n## [{version}]" not in changelog:
        raise ReleaseError(
            f"CHANGELOG.md has no section [{version}]: add a text to changes/, then towncrier build --version {version}"
        )


def check_is_new(version: str) -> None:
    """Ask the index that pip uses. An index that does not know the package has none of its versions."""
    command = [sys.executable, "-m", "pip", "index", "versions", PROJECT["name"], "--pre"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    listed = re.search(r"Available versions: (.*)", done.stdout)
    if listed and version in listed[1].split(", "):
        raise ReleaseError(f"{PROJECT['name']} {version} is published already: raise version in pyproject.toml and tag again")
    is_unknown = "No matching distribution" in done.stderr and "Retrying" not in done.stderr
    if not listed and not is_unknown:
        said = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no reason"]
        raise ReleaseError(f"pip cannot ask its index whether {version} is published: {said[0][:200]}")


def check_extras() -> None:
    """Each extra that a message of the package names exists, and pip finds its packages."""
    extras = PROJECT["optional-dependencies"]
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "limitgate").rglob("*.py"))
    for named in sorted(set(re.findall(r"\bextra\(\"(\w+)\"", source))):
        if named not in extras:
            raise ReleaseError(
                f"the package names the extra {named}, which pyproject.toml lacks: add it to optional-dependencies"
            )
    for name, lines in extras.items():
        for requirement in map(Requirement, lines):
            if not requirement.extras and requirement.name == PROJECT["name"]:
                raise ReleaseError(f"the extra {name} requires {PROJECT['name']} itself: name its extras")
        if not lines:
            raise ReleaseError(f"the extra {name} has no package: name one, or remove the extra")


def build(folder: Path) -> list[Path]:
    """Build a sdist, and a wheel from it, with the time of the commit."""
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, env=environment)
    return sorted(folder.iterdir())


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def check_repeatable(first: list[Path], second: list[Path]) -> None:
    for one, other in zip(first, second, strict=True):
        if digest(one) != digest(other):
            raise ReleaseError(f"two builds of {one.name} differ: find what is not fixed by SOURCE_DATE_EPOCH")


def check_metadata(files: list[Path], version: str) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    wheel = next(file for file in files if file.suffix == ".whl")
    with zipfile.ZipFile(wheel) as archive:
        about = f"{PROJECT['name']}-{version}.dist-info"
        names = archive.namelist()
        for needed in (f"{about}/licenses/LICENSE", f"{about}/sboms/limitgate.cdx.json", "limitgate/py.typed"):
            if needed not in names:
                raise ReleaseError(f"the wheel lacks {needed}: see [tool.hatch.build.targets.wheel]")
        metadata = message_from_bytes(archive.read(f"{about}/METADATA"))
        bill = json.loads(archive.read(f"{about}/sboms/limitgate.cdx.json"))
    if bill["metadata"]["component"]["version"] != version:
        raise ReleaseError("limitgate.cdx.json is of another version: run make docs and commit")
    text = str(metadata.get_payload())
    relative = re.search(r"\]\((?!https?:|#)([^)]+)\)", text)
    if relative:
        raise ReleaseError(
            f"the description links to {relative[1]}, which is relative: see fancy-pypi-readme in pyproject.toml"
        )


def check_typing(wheel: Path, folder: Path) -> None:
    """Type completeness of the installed wheel, as others see it."""
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "venv", folder)
    extras = "fastapi,flask,django,rest,httpx,httpx2,aiohttp,requests,urllib3,cli,serve,envoy,prometheus,opentelemetry"
    stubs = ["django-stubs==6.1.2", "djangorestframework-stubs==3.18.1"]  # else classes derived from Django's count as unknown
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[{extras}]", "mypy==2.4.1", *stubs)
    where = run(python, "-I", "-c", "import limitgate; print(limitgate.__file__)").strip()
    if ROOT in Path(where).parents and folder not in Path(where).parents:
        raise ReleaseError(f"{where} was examined, expected the installed wheel")
    with tempfile.TemporaryDirectory() as elsewhere:
        # --verifytypes finds the package by the Python on the path, whatever --pythonpath says.
        environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        command = [sys.executable, "-m", "pyright", "--verifytypes", "limitgate", "--ignoreexternal", "--outputjson"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=elsewhere, env=environment)
        score = json.loads(done.stdout)["typeCompleteness"]["completenessScore"]
        if score < 1:
            raise ReleaseError(
                f"pyright --verifytypes finds {score:.1%} of the types, expected all: run it to see which are missing"
            )
        uses = Path(elsewhere) / "uses.py"
        uses.write_text(_USES)
        run(python, "-I", "-m", "mypy", "--strict", uses, cwd=elsewhere)


def main() -> None:
    """Build into dist/, check everything, and write dist/SHA256SUMS."""
    quick = "--quick" in sys.argv[1:]
    steps: list[tuple[str, Callable[[], None]]] = [
        ("Python", check_python),
        ("tree", check_tree),
        ("extras", check_extras),
    ]
    try:
        for name, step in steps:
            step()
            print(f"{name}: fine")
        version = tagged_version()
        check_changelog(version)
        check_is_new(version)
        print(f"tag, changelog, index: {version} can be released")
        dist = ROOT / "dist"
        shutil.rmtree(dist, ignore_errors=True)
        with tempfile.TemporaryDirectory() as other, tempfile.TemporaryDirectory() as environment:
            files = build(dist)
            check_repeatable(files, build(Path(other)))
            print("two builds: equal to the byte")
            check_metadata(files, version)
            print("metadata, license, SBOM: fine")
            check_typing(next(file for file in files if file.suffix == ".whl"), Path(environment) / "venv")
            print("types: complete")
        if not quick:
            run(ROOT / "scripts" / "test-wheel", sys.executable, "-n", "4", "--dist", "worksteal")
            print("tests of the sdist against the wheel: passed")
        sums = "".join(f"{digest(file)}  {file.name}\n" for file in files)
        (dist / "SHA256SUMS").write_text(sums)
        print(sums, end="")
    except ReleaseError as error:
        sys.exit(f"release: {error}")


if __name__ == "__main__":
    main()
