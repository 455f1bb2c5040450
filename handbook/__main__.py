"""``python -m handbook`` writes the tables of docs/rules.md and the picture of docs/faq.md anew."""

from __future__ import annotations

from pathlib import Path

from handbook.first_minute import picture
from handbook.reference import reference

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    """Write everything."""
    page = DOCS / "rules.md"
    page.write_text(reference(page.read_text()))
    (DOCS / "first-minute.svg").write_text(picture())


if __name__ == "__main__":
    main()
