"""Names that older checkpoints have for quantizers: a place that several methods run had one for each."""

from __future__ import annotations

from typing import Any

import numpy as np

from jqinject.dot import FrozenParam
from jqinject.model.walk import ModelIndex, Path, dotted
from jqinject.program import OpQuantizers


def with_names_of_now(index: ModelIndex, entries: dict[Path, Any]) -> tuple[dict[Path, Any], dict[str, str]]:
    """Entries of a checkpoint by the names that the model has for its quantizers.

    Args:
        index: of the model that is loaded into.
        entries: path -> array.

    Returns:
        The entries, those of old names only where there are none of the new one; old path of a quantizer -> new path.
    """
    renamed: dict[Path, Path] = {
        (*place, "held", old): (*place, "held", new)
        for place, node in index.places
        if isinstance(node, OpQuantizers)
        for old, new in node.same
    }
    lengths = {len(path) for path in renamed}
    held = {path[:length] for path in entries for length in lengths}
    found: dict[Path, Any] = {}
    merged: dict[str, str] = {}
    frozen = {path for path, node in index.places if isinstance(node, FrozenParam)}
    for path, value in entries.items():
        if path in frozen and np.size(value) == 0:
            continue  # what stood in the place of a kernel whose op stored it
        old = next((path[:length] for length in lengths if path[:length] in renamed), None)
        if old is None:
            found[path] = value
            continue
        new = renamed[old]
        merged[dotted(old)] = dotted(new)
        if new not in held:
            found.setdefault((*new, *path[len(old) :]), value)
    return found, merged
