"""The catalogue: Markdown pages with the wiring, formulas, reference cases and curve of every quantizer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from jqinject.catalogue.curves import curve_svg, transfer_curve
from jqinject.catalogue.entries import FILTERS, Entry, all_entries, components_of, summary_of
from jqinject.catalogue.examples import Example, example_of
from jqinject.inject import explain
from jqinject.inject.show import brief

CURVES = "curves"


def write_catalogue(folder: Path, *, golden: Path | None = None) -> list[Path]:
    """Write the catalogue: `README.md` with a table of all quantizers, a page for each kind, curves as SVG.

    Args:
        folder: the target; created if needed. Files of the same names are replaced.
        golden: a manifest of reference cases (`{"cases": [{"id": ..., "quantizer": ...}]}`), to name those of each
            quantizer.

    Returns:
        The files that were written.

    Raises:
        OSError: a file cannot be read or written.
    """
    cases = golden_cases(golden)
    (folder / CURVES).mkdir(parents=True, exist_ok=True)
    known = sorted(all_entries(), key=lambda entry: (entry.kind, entry.name))
    written = {folder / "README.md": index_page(known)}
    for kind, members in groupby(known, key=lambda entry: entry.kind):
        parts = [f"# Quantizers of {PLURALS[kind]}\n"]
        for entry in members:
            example = example_of(entry.quantizer, {})
            curve = ""
            if entry.kind != "grad":
                curve = f"{CURVES}/{entry.name}.svg"
                x, y = transfer_curve(example)
                written[folder / curve] = curve_svg(x, y, f"transfer curve of {entry.name}")
            parts.append(section(entry, example_of(entry.quantizer, {}), curve, cases.get(entry.name, ())))
        written[folder / f"{kind}.md"] = "\n".join(parts)
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    return list(written)


PLURALS = {
    "weight": "weights",
    "act": "activations",
    "bias": "biases",
    "grad": "gradients",
    "trunc": "accumulators",
}


def index_page(known: Iterable[Entry]) -> str:
    """The table of all quantizers, each with a link to its section."""
    rows = [
        f"| [`{entry.name}`]({entry.kind}.md#{entry.name.lower()}) | "
        + " | ".join(getattr(entry, name) for name in FILTERS)
        + " |"
        for entry in known
    ]
    return "\n".join(
        [
            "# Ready-made quantizers",
            "",
            "Made by `python -m jqinject catalogue docs/catalogue`. `python -m jqinject list` searches it, and",
            "`python -m jqinject explain NAME [key=value ...]` shows one with overrides.",
            "",
            "| quantizer | " + " | ".join(FILTERS) + " |",
            "| --- |" + " --- |" * len(FILTERS),
            *rows,
            "",
        ]
    )


GROUPS_RUN = (
    "Groups run along one axis and not over several: of a weight along the inputs, in a convolution along the input "
    "channels at one place of the window; of an activation along the features. An axis that is shorter than a group is "
    "one group: the kernel of a convolution of 3 input channels has a scale for every 3 numbers."
)


def section(entry: Entry, example: Example, curve: str, cases: Iterable[str]) -> str:
    """The section of one quantizer."""
    parts = [f"## {entry.name}", "", summary_of(entry.quantizer), ""]
    facts = ", ".join(f"{name}: {getattr(entry, name)}" for name in FILTERS[1:])
    parts += [facts + _shown(example.overrides), ""]
    if entry.granularity == "group":
        parts += [GROUPS_RUN, ""]
    if curve:
        parts += [f"![transfer curve]({curve})", ""]
    parts += ["Formulas:", "", *formulas(example), "", "Wiring:", "", "```text", wiring(example), "```", ""]
    named = ", ".join(f"`{case}`" for case in cases)
    if named:
        parts += [f"Reference cases: {named}", ""]
    return "\n".join(parts)


def formulas(example: Example) -> list[str]:
    """What each component of a quantizer computes, the outermost first."""
    tree = explain(example.proxy, module=example.layer)
    return [
        f"- `{node.name}` {node.value.__name__}: {summary_of(node.value)}" for node in components_of(tree)
    ]


def wiring(example: Example) -> str:
    """The wiring tree as text."""
    return str(explain(example.proxy, module=example.layer))


def golden_cases(manifest: Path | None) -> dict[str, list[str]]:
    """The ids of reference cases by quantizer."""
    if manifest is None:
        return {}
    found: dict[str, list[str]] = {}
    for case in json.loads(manifest.read_text(encoding="utf-8"))["cases"]:
        if case.get("quantizer"):
            found.setdefault(case["quantizer"], []).append(case["id"])
    return found


def described(entry: Entry, example: Example, overrides: Mapping[str, Any]) -> str:
    """One quantizer for the terminal: docstring, facts, formulas and wiring.

    Args:
        entry: its entry, with the overrides.
        example: a layer that holds it, with the overrides.
        overrides: the names that the reader redeclared; the docstring describes the quantizer without them.
    """
    changed = ", ".join(f"{name}={brief(value)}" for name, value in overrides.items())
    width = max(map(len, FILTERS))
    facts = [f"  {name.ljust(width)}  {getattr(entry, name)}" for name in FILTERS]
    text = inspect.getdoc(entry.quantizer) or ""
    about = text.split("\n\nExample:")[0]
    return "\n".join(
        [
            f"{entry.name} with {changed}" if changed else entry.name,
            "",
            f"Without {'them' if len(overrides) > 1 else 'it'}: {about}" if changed else about,
            "",
            *facts,
            "",
            "Formulas",
            "",
            *formulas(example),
            "",
            "Wiring",
            "",
            wiring(example),
        ]
    )


def _shown(overrides: Mapping[str, Any]) -> str:
    if not overrides:
        return ""
    return "; here with " + ", ".join(f"`{name}={value!r}`" for name, value in overrides.items())
