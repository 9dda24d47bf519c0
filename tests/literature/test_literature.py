"""Numbers that the literature predicts, and what jqinject gives for them; the page that shows both."""

import re

import pytest

from tests.literature import _reference as theory
from tests.literature._blocks import CROSSINGS
from tests.literature.page import PAGE, SECTIONS, cells, tables

PRINTED = 1e-3  # of a number in four digits
QUICK = ("Numbers of formats",)
TABLES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.heavy, id=name.replace(" ", "-"))
    for name in SECTIONS
]


@pytest.mark.parametrize("section", TABLES)
def test_numbers_are_those_of_the_literature(section: str) -> None:
    rows = SECTIONS[section]()
    values = [row.measure() for row in rows]
    off = [
        f"{row.name}: {value:.7g}, expected {row.printed} within {row.tolerance:.2g} ({row.source})"
        for row, value in zip(rows, values, strict=True)
        if not abs(value - float(row.published)) <= row.tolerance
    ]
    assert not off, "\n".join(off)
    _, _, *shown = tables(PAGE.read_text(encoding="utf-8"))[section]
    assert len(shown) == len(rows), "python -m tests.literature.page"
    for row, value, line in zip(rows, values, shown, strict=True):
        name, published, ours, *reasons = re.split(r" (?<!\\)\| ", line.removeprefix("| ").removesuffix(" |"))
        expected = cells(row, value)
        assert [name, *reasons] == [expected[0], *expected[3:]], "python -m tests.literature.page"
        near = max(PRINTED * abs(value), row.tolerance / 4)
        if isinstance(row.published, str):
            assert published == row.published, f"{row.name}: python -m tests.literature.page"
        else:
            assert abs(float(published) - row.published) <= near, (
                f"{row.name}: python -m tests.literature.page"
            )
        assert abs(float(ours) - value) <= near, f"{row.name}: {value}; python -m tests.literature.page"


def test_the_page_has_every_table() -> None:
    assert list(tables(PAGE.read_text(encoding="utf-8"))) == list(SECTIONS)


@pytest.mark.parametrize("form", CROSSINGS)
def test_formulas_of_crest_factors_are_the_papers(form: tuple[int, int, int, float]) -> None:
    """With scales that are 3/2 times too large they give the crest factors that the paper prints."""
    bits, exponent_bits, mantissa_bits, largest = form
    factor = theory.crossing(
        lambda kappa: theory.int_sqnr(bits, kappa, 1.5),
        lambda kappa: theory.float_sqnr(exponent_bits, mantissa_bits, largest, kappa, 1.5),
    )
    assert abs(factor - float(CROSSINGS[form])) < 5e-3
