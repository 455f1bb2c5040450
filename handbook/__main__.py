"""``python -m handbook`` writes the tables of docs/rules.md and the pictures of docs/faq.md and docs/algorithms.md anew."""

from __future__ import annotations

from pathlib import Path

from handbook import first_minute, side_by_side
from handbook.reference import reference

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    """Write everything."""
    page = DOCS / "rules.md"
    page.write_text(reference(page.read_text()))
    (DOCS / "first-minute.svg").write_text(first_minute.picture())
    (DOCS / "side-by-side.svg").write_text(side_by_side.picture())


if __name__ == "__main__":
    main()
