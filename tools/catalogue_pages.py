"""Writes `docs/catalogue`: Markdown pages with the wiring, formulas, reference cases and curve of every quantizer.

    python tools/catalogue_pages.py

It reads the index, which `tools/catalogue_index.py` makes first.
"""

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from jqinject.catalogue.index import FILTERS, Entry, all_entries

ROOT = Path(__file__).parents[1]
CURVES = "curves"
WIDTH, HEIGHT, MARGIN = 240, 160, 10


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
    entries = sorted(all_entries(), key=lambda entry: (entry.kind, entry.name))
    written = {folder / "README.md": index_page(entries)}
    for kind, members in groupby(entries, key=lambda entry: entry.kind):
        parts = [f"# Quantizers of {PLURALS[kind]}\n"]
        for entry in members:
            curve = ""
            if entry.points:
                curve = f"{CURVES}/{entry.name}.svg"
                written[folder / curve] = line_svg(entry.points, f"transfer curve of {entry.name}")
            parts.append(section(entry, curve, cases.get(entry.name, ())))
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


def index_page(entries: Iterable[Entry]) -> str:
    """The table of all quantizers, each with a link to its section."""
    rows = [
        f"| [`{entry.name}`]({entry.kind}.md#{entry.name.lower()}) | {' | '.join(entry.facts.values())} |"
        for entry in entries
    ]
    return "\n".join(
        [
            "# Ready-made quantizers",
            "",
            "Made by `python tools/catalogue_pages.py`. `python -m jqinject list` searches it, and",
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


def section(entry: Entry, curve: str, cases: Iterable[str]) -> str:
    """The section of one quantizer."""
    parts = [f"## {entry.name}", "", entry.summary, ""]
    facts = ", ".join(f"{name}: {entry.facts[name]}" for name in FILTERS[1:])
    parts += [facts + entry.given, ""]
    if entry.granularity == "group":
        parts += [GROUPS_RUN, ""]
    if curve:
        parts += [f"![transfer curve]({curve})", ""]
    parts += ["Formulas:", "", *entry.formulas, "", "Wiring:", "", "```text", entry.wiring, "```", ""]
    named = ", ".join(f"`{case}`" for case in cases)
    if named:
        parts += [f"Reference cases: {named}", ""]
    return "\n".join(parts)


def golden_cases(manifest: Path | None) -> dict[str, list[str]]:
    """The ids of reference cases by quantizer."""
    if manifest is None:
        return {}
    ids: dict[str, list[str]] = {}
    for case in json.loads(manifest.read_text(encoding="utf-8"))["cases"]:
        if case.get("quantizer"):
            ids.setdefault(case["quantizer"], []).append(case["id"])
    return ids


def line_svg(points: str, title: str) -> str:
    """A curve as a small picture, with the identity line behind it.

    Args:
        points: of the curve, in pixels: "10.0,150.0 230.0,10.0".
        title: alternative text.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img"><title>{title}</title>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
        f'<line x1="{MARGIN}" y1="{HEIGHT - MARGIN}" x2="{WIDTH - MARGIN}" y2="{MARGIN}" stroke="#bbbbbb"/>'
        f'<polyline fill="none" stroke="#1f5fa8" stroke-width="1.5" points="{points}"/></svg>\n'
    )


def main() -> None:
    """Write the pages of this repository."""
    golden = ROOT / "tests" / "golden" / "brevitas" / "manifest.json"
    write_catalogue(ROOT / "docs" / "catalogue", golden=golden)


if __name__ == "__main__":
    main()
