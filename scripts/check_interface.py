"""Lints the hosted workflows, and compares the public names with those of the last release. Called by `make check-interface`.

A break fails unless a text in changes/ declares it (`*.removed.md`). Public is what docs/stability.md says.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from handbook.site import public_objects  # noqa: E402 - the repository is no package


def lint_workflows() -> None:
    command = [
        str(Path(sys.executable).parent / "zizmor"),
        "--offline",
        "--quiet",
        "--persona",
        "pedantic",
        ".github/workflows",
    ]
    if subprocess.run(command, check=False, cwd=ROOT).returncode:
        sys.exit("check-interface: zizmor found problems in .github/workflows: mend them")


def last_release() -> str | None:
    command = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout.strip() or None


def breaks(release: str) -> Iterable[str]:
    """Yield what the present code breaks of the public names."""
    public = public_objects()
    before = griffe.load_git("limitgate", ref=release, repo=ROOT)
    now = griffe.load("limitgate", search_paths=[ROOT])
    for each in griffe.find_breaking_changes(before, now):
        path = each.obj.canonical_path
        if any(path == name or path.startswith((f"{name}.", f"{name}(")) for name in public):
            yield each.explain(griffe.ExplanationStyle.ONE_LINE)


def main() -> None:
    lint_workflows()
    release = last_release()
    if release is None:
        print("check-interface: no release to compare with yet")
        return
    found = list(breaks(release))
    for line in found:
        print(line)
    if not found:
        print(f"check-interface: nothing public was broken since {release}")
    elif any((ROOT / "changes").glob("*.removed.md")):
        print(f"check-interface: changes/ declares what was broken since {release}")
    else:
        sys.exit(f"check-interface: public names broke since {release}: keep them, or say so in changes/+SUBJECT.removed.md")


if __name__ == "__main__":
    main()
