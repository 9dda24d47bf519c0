"""What older checkpoints hold otherwise: a quantizer for each method that runs a place; zero points that are all 0;
axes of frozen parameters in the parameter's own order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jqinject.dot import FrozenParam
from jqinject.dot.frozen.frozen_form import ROWS
from jqinject.model.walk import ModelIndex, Path, VariableEntry, dotted
from jqinject.ops.devices.processes import on_host
from jqinject.program import OpQuantizers
from jqinject.quant_tensor import is_concrete


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
    frozen = {path: node for path, node in index.places if isinstance(node, FrozenParam)}
    by_rows = {path: node for path, node in frozen.items() if node.form.payload == ROWS}
    for path, value in entries.items():
        if path in frozen and np.size(value) == 0:
            continue  # what stood in the place of a kernel whose op stored it
        holder = next((holder for holder in _holders(path) if holder in by_rows), None)
        if holder is not None:
            path, value = (*holder, ROWS), _in_rows(by_rows[holder], value)
        old = next((path[:length] for length in lengths if path[:length] in renamed), None)
        if old is None:
            found[path] = value
            continue
        new = renamed[old]
        merged[dotted(old)] = dotted(new)
        if new not in held:
            found.setdefault((*new, *path[len(old) :]), value)
    return found, merged


def _holders(path: Path) -> tuple[Path, ...]:
    """The parameters whose payload `value` may be at a path: Orbax, without a target, has it in another `value`."""
    return tuple(path[:-count] for count in (1, 2) if path[-count:] == ("value",) * count)


def _in_rows(parameter: FrozenParam, value: Any) -> Any:
    """The payload of a frozen parameter, which lay in the parameter's order of axes when it was named `value`."""
    now = parameter.fitted_form.stored
    before = replace(now, summed=())
    known = jax.eval_shape(before.stored, jax.ShapeDtypeStruct(now.shape, now.dtype)).shape
    return now.stored(before.payload(value)) if np.shape(value) == known else value


def without_known_zeros(
    entries: Mapping[Path, Any], by_path: Mapping[Path, VariableEntry]
) -> dict[Path, Any]:
    """Entries without the zero points, all 0, of frozen weights that have none in the model.

    Args:
        entries: path -> array.
        by_path: the Variables of the model that is loaded into.
    """

    def has_numbers(holder: Path) -> bool:
        payloads = ((*holder, name) for name in ("value", ROWS))
        return (*holder, "scale") in by_path and any(path in by_path for path in payloads)

    def is_dropped(path: Path, value: Any) -> bool:
        is_left_over = path[-1] == "zero_point" and path not in by_path and has_numbers(path[:-1])
        is_array = isinstance(value, jax.Array | np.ndarray) and is_concrete(value)
        return is_left_over and is_array and not np.any(on_host(value))

    return {path: value for path, value in entries.items() if not is_dropped(path, value)}
