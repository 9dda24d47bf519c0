"""Describes quantizers by what their classes say, and writes the index of the ready-made ones.

    python -m jqinject.catalogue.write_index

A test compares the index with what this makes.
"""

import ast
import dataclasses
import importlib
import inspect
import json
from collections.abc import Mapping, Sequence

import jqinject.core
from jqinject.catalogue import examples, index, pages
from jqinject.catalogue.entries import components_of, entry_of_wiring, ready_made, summary_of
from jqinject.inject import ExtendedInjector, errors, explain


def entry_made(name: str, quantizer: type[ExtendedInjector], overrides: Mapping[str, object]) -> index.Entry:
    """The entry of any quantizer, also a user's own, with some names redeclared; all but its curve.

    Args:
        name: the title.
        quantizer: the injector.
        overrides: the redeclared names.

    Raises:
        DependencyError, TypeError, ValueError: the quantizer cannot be assembled like this.
    """
    example = examples.example_of(quantizer, overrides)
    tree = explain(example.proxy, module=example.layer)
    formulas = (
        f"- `{node.name}` {node.value.__name__}: {summary_of(node.value)}" for node in components_of(tree)
    )
    return dataclasses.replace(
        entry_of_wiring(name, quantizer, tree),
        about=(inspect.getdoc(quantizer) or "").split("\n\nExample:")[0],
        given=_shown(example.overrides),
        formulas=tuple(formulas),
        wiring=str(tree),
    )


def with_curve(entry: index.Entry, example: examples.Example) -> index.Entry:
    """The entry with its transfer curve; gradients have none."""
    if entry.kind == "grad":
        return entry
    return dataclasses.replace(entry, points=examples.curve_points(*examples.transfer_curve(example)))


def line_of(entry: index.Entry) -> str:
    """An entry as a line of the index."""
    return json.dumps(dataclasses.asdict(entry), ensure_ascii=False)


def main() -> None:
    """Write the index."""
    entries = (
        with_curve(entry_made(name, quantizer, {}), examples.example_of(quantizer, {}))
        for name, quantizer in ready_made().items()
    )
    index.INDEX.write_text("".join(line_of(entry) + "\n" for entry in entries), encoding="utf-8")


def _shown(overrides: Mapping[str, object]) -> str:
    if not overrides:
        return ""
    return "; here with " + ", ".join(f"`{name}={value!r}`" for name, value in overrides.items())


def explained_anew(name: str, overrides: Sequence[str]) -> str:
    """The text of `explain`, made from the classes. See `jqinject.catalogue.catalogue_command.explained`."""
    quantizer = _imported(name) if ":" in name else index.entry_of(name).quantizer
    values = dict(_override(text) for text in overrides)
    changed = ", ".join(f"{name}={errors.brief(value)}" for name, value in values.items())
    return pages.described(entry_made(name, quantizer, values), changed)


def _imported(name: str) -> type[ExtendedInjector]:
    module, _, attribute = name.partition(":")
    try:
        quantizer = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} cannot be imported: {error}") from None
    if not (isinstance(quantizer, type) and issubclass(quantizer, ExtendedInjector)):
        raise ValueError(f"{name} is not a quantizer: expected a class derived from ExtendedInjector")
    return quantizer


def _override(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise ValueError(f"an override is name=value, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, getattr(jqinject.core, value, value)


if __name__ == "__main__":
    main()
