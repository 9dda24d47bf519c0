"""A coverage as a part of a page."""

from __future__ import annotations

from html import escape

from jqinject.model.inspect.covered import Covered
from jqinject.model.inspect.page.html_table import framed, row_of
from jqinject.model.inspect.page.style import STYLE
from jqinject.model.inspect.page.summary import coverage_tiles


def coverage_fragment(covered: Covered) -> str:
    """A coverage as a part of a page, or of a notebook."""
    beneath = "".join(f"<p>{escape(line)}</p>\n" for line in covered.summary[1:])
    names, rows = covered.table()
    right = names[-1:]
    body = framed(names, [row_of(names, row, right) for row in rows], right) if rows else ""
    return (
        f'<div class="jqinject"><style>{STYLE}</style>\n{coverage_tiles(covered)}'
        f"{body and '<h2>Contractions</h2>'}{body}{beneath}</div>\n"
    )
