"""The table of `docs/concepts/literature.md`: written by a run, and read by the tests.

    python -m tests.literature.page

A section's table stands between its heading and the next blank line after it.
"""

import re
from pathlib import Path

from tests.literature import _algorithms, _blocks, _rounding, _scalar
from tests.literature._rows import Row

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "literature.md"
SECTIONS = _rounding.SECTIONS | _scalar.SECTIONS | _blocks.SECTIONS | _algorithms.SECTIONS
HEAD = ["| quantity | literature | jqinject | within | source |", "|---|---|---|---|---|"]


def cells(row: Row, measured: float) -> list[str]:
    """The cells of a row."""
    within = row.why if row.tolerance == 0 else f"{row.tolerance:.2g}: {row.why}"
    texts = [row.name, row.printed, f"{measured:.6g}", within, row.source]
    return [text.replace("|", "\\|") for text in texts]


def lines(rows: list[Row], values: list[float]) -> list[str]:
    """The lines of a section's table."""
    return HEAD + [f"| {' | '.join(cells(row, value))} |" for row, value in zip(rows, values, strict=True)]


TABLE = re.compile(r"^## (.*)\n\n((?:\|.*\n)+)", flags=re.MULTILINE)


def tables(text: str) -> dict[str, list[str]]:
    """The lines of the tables of a page, by the heading before them."""
    return {heading: table.splitlines() for heading, table in TABLE.findall(text)}


def measured(section: re.Match[str]) -> str:
    """A section of the page with numbers of a run."""
    rows = SECTIONS[section[1]]()
    return "\n".join([f"## {section[1]}", "", *lines(rows, [row.measure() for row in rows]), ""])


def write() -> None:
    """Measure everything, and write the tables of the page."""
    PAGE.write_text(TABLE.sub(measured, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
