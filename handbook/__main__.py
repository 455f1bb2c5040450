"""``python -m handbook`` writes anew what is made of the code: parts of docs/, the schema of rules, dashboard, pictures."""

from __future__ import annotations

from pathlib import Path

from handbook import dashboard, figures, first_minute, pictures, sbom, schema, side_by_side
from handbook.reference import reference

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    """Write everything."""
    page = DOCS / "rules.md"
    page.write_text(reference(page.read_text()))
    observing = DOCS / "observing.md"
    observing.write_text(figures.figures(observing.read_text()))
    (DOCS / "first-minute.svg").write_text(first_minute.picture())
    (DOCS / "side-by-side.svg").write_text(side_by_side.picture())
    schema.FILE.write_text(schema.text())
    dashboard.FILE.write_text(dashboard.text())
    sbom.FILE.write_text(sbom.text())
    pictures.take(DOCS)


if __name__ == "__main__":
    main()
