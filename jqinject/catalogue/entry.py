"""One ready-made quantizer, as the catalogue describes it: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FILTERS = ("kind", "format", "granularity", "scaling")


@dataclass(frozen=True)
class Entry:
    """One quantizer.

    Attributes:
        name: its name in `jqinject.quant`.
        kind: its role: weight, act, bias, grad or trunc.
        format: of its numbers: int8, uint8, fp8 e4m3, binary, ...
        granularity: what shares a scale: tensor, channel, group or row.
        scaling: where the scale comes from.
        about: its docstring without the example.
        given: the names that it leaves to its user, with the values of the example, as text.
        formulas: what each of its components computes, as items of a Markdown list.
        wiring: the tree of its components.
        points: its transfer curve, as the points of a line in a picture; empty if absent.
    """

    name: str
    kind: str
    format: str
    granularity: str
    scaling: str
    about: str = ""
    given: str = ""
    formulas: tuple[str, ...] = ()
    wiring: str = ""
    points: str = ""

    @property
    def quantizer(self) -> Any:
        """The injector; looking it up imports JAX."""
        import jqinject.quant

        return getattr(jqinject.quant, self.name)

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring, on one line."""
        return " ".join(self.about.split("\n\n")[0].split())
