"""Describes quantizers by what their classes say, and writes the index of the ready-made ones.

    python -m jqinject.catalogue.write_index

A test compares the index with what this makes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from typing import Any

from jqinject.catalogue.curves import curve_points, transfer_curve
from jqinject.catalogue.entries import components_of, entry_for, ready_made, summary_of
from jqinject.catalogue.entry import Entry
from jqinject.catalogue.examples import Example, example_of
from jqinject.catalogue.index import INDEX
from jqinject.inject import ExtendedInjector, explain


def entry_made(name: str, quantizer: type[ExtendedInjector], overrides: Mapping[str, Any]) -> Entry:
    """The entry of any quantizer, also a user's own, with some names redeclared; all but its curve.

    Args:
        name: the title.
        quantizer: the injector.
        overrides: the redeclared names.

    Raises:
        DependencyError, TypeError, ValueError: the quantizer cannot be assembled like this.
    """
    example = example_of(quantizer, overrides)
    tree = explain(example.proxy, module=example.layer)
    formulas = (
        f"- `{node.name}` {node.value.__name__}: {summary_of(node.value)}" for node in components_of(tree)
    )
    return dataclasses.replace(
        entry_for(name, quantizer, overrides),
        about=(inspect.getdoc(quantizer) or "").split("\n\nExample:")[0],
        given=_shown(example.overrides),
        formulas=tuple(formulas),
        wiring=str(tree),
    )


def with_curve(entry: Entry, example: Example) -> Entry:
    """The entry with its transfer curve; gradients have none."""
    if entry.kind == "grad":
        return entry
    return dataclasses.replace(entry, points=curve_points(*transfer_curve(example)))


def line_of(entry: Entry) -> str:
    """An entry as a line of the index."""
    return json.dumps(dataclasses.asdict(entry), ensure_ascii=False)


def main() -> None:
    """Write the index."""
    made = (
        with_curve(entry_made(name, quantizer, {}), example_of(quantizer, {}))
        for name, quantizer in ready_made().items()
    )
    INDEX.write_text("".join(line_of(entry) + "\n" for entry in made), encoding="utf-8")


def _shown(overrides: Mapping[str, Any]) -> str:
    if not overrides:
        return ""
    return "; here with " + ", ".join(f"`{name}={value!r}`" for name, value in overrides.items())


if __name__ == "__main__":
    main()
