"""`python -m jqinject show`: quantizers as one web page on which their choices are turned.

The page is whole in itself. `explorer.html` is its body, `explorer.js` fills it from the numbers of `variants`, which
are written into it, and its policy forbids to load anything.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from itertools import product

from jqinject.catalogue.entries import summary_of
from jqinject.catalogue.index import GOALS, entry_of, goal_named
from jqinject.catalogue.variants import (
    EXTENT,
    POINTS,
    TITLES,
    Injector,
    QuantizerChoice,
    Variant,
    data_sets,
    shown_kind,
    variants_of,
)
from jqinject.model.inspect import page

HTML, CSS, JS = (
    resources.files("jqinject.catalogue").joinpath(f"explorer.{kind}").read_text(encoding="utf-8")
    for kind in ("html", "css", "js")
)
POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'\">"
)
#: Digits of an output on a curve.
DIGITS = 4
Json = dict[str, object]


def usual_quantizers(goal: str = "") -> tuple[str, ...]:
    """Return the names of the quantizers to show for a goal, or where nothing is asked for.

    Args:
        goal: one of `jqinject.catalogue.index.GOALS`: those of weights and activations that it lists. Without one, the
            first of weights and the first of activations of every goal, unless there is one already with its format and
            its kind of scale.

    Raises:
        ValueError: there is no such goal.

    Example:
        >>> usual_quantizers()[:2]
        ('Int8WeightPerChannelFloat', 'Int8DynamicActPerRowAbsMax')
    """
    if goal:
        return tuple(name for name in goal_named(goal).quantizers if entry_of(name).kind in TITLES)
    names: dict[tuple[str, str, str], str] = {}
    for listed, kind in product(GOALS.values(), TITLES):
        for entry in [entry for entry in map(entry_of, listed.quantizers) if entry.kind == kind][:1]:
            names.setdefault((kind, entry.format, entry.scaling), entry.name)
    return tuple(names.values())


def explorer_page(quantizers: Iterable[Injector], progress: Callable[[str], object] | None = None) -> str:
    """Return a self-contained HTML page of quantizers, on which their choices are turned.

    For every combination of choices (see `jqinject.catalogue.variants`) it has the transfer curve, the error on
    Gaussian and Laplace numbers and on numbers with outliers, the wiring, and the class to write.

    Args:
        quantizers: of weights or activations; the first is shown first.
        progress: called with the name of each quantizer before its variants are measured.

    Raises:
        ValueError: a quantizer of something else.
        DependencyError, TypeError, ValueError: a quantizer that cannot be assembled.
    """
    listed = list(dict.fromkeys(quantizers))
    for quantizer in listed:
        shown_kind(quantizer)
    lines: dict[str, int] = {}
    entries: list[Json] = []
    for quantizer in listed:
        if progress is not None:
            progress(quantizer.__name__)
        entries.append(_entry(quantizer, lines))
    data = {
        "extent": EXTENT,
        "points": POINTS,
        "dataSets": list(data_sets()),
        "quantizers": entries,
        "lines": list(lines),
    }
    # No text of the data can end the element that holds it.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )
    body = (
        f'<div class="jqinject"><style>\n{page.STYLE}{CSS}</style>\n{HTML}</div>\n'
        f'<script id="data" type="application/json">{text}</script>\n<script>\n{JS}</script>\n'
    )
    return page.document("jqinject: explore a quantizer", body, POLICY)


def _entry(quantizer: Injector, lines: dict[str, int]) -> Json:
    """A quantizer as the page's script reads it; texts are places in the table of lines, which it shares."""
    choices, variants = variants_of(quantizer)
    return {
        "name": quantizer.__name__,
        "kind": (kind := shown_kind(quantizer)),
        "title": TITLES[kind],
        "about": summary_of(quantizer),
        "choices": [_choice(choice) for choice in choices],
        "variants": [_variant(variant, lines) for variant in variants],
    }


def _choice(choice: QuantizerChoice) -> Json:
    return {
        "name": choice.name,
        "meaning": choice.meaning,
        "options": [option.label for option in choice.options],
        "own": choice.own,
        "refused": [[label, reason.splitlines()[0]] for label, reason in choice.refused],
    }


def _variant(variant: Variant, lines: dict[str, int]) -> Json:
    def places(text: str) -> list[int]:
        return [lines.setdefault(line, len(lines)) for line in text.splitlines()]

    if variant.curve is None:
        return {"code": places(variant.code), "fault": variant.fault}
    return {
        "code": places(variant.code),
        "facts": variant.facts,
        "wiring": places(variant.wiring),
        "curve": _steps(variant.curve.tolist()),
        "errors": [[f"{sqnr:.2f}", f"{mse:.3g}"] for sqnr, mse in variant.errors],
    }


def _steps(outputs: Sequence[float]) -> list[float | None]:
    """Where a curve changes, and to which output, None if it is not finite: place, output, place, output, ..."""
    steps: list[float | None] = []
    for place, output in enumerate(outputs):
        level = round(output, DIGITS) if math.isfinite(output) else None
        if not steps or level != steps[-1]:
            steps += [place, level]
    return steps
