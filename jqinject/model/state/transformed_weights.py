"""Weights that are stored for a transform of what they contract, and a state that does not know of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from jqinject.model.walk import ModelIndex, Path, dotted
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.program import OpQuantizers


def transformed_inputs(index: ModelIndex, entries: Mapping[Path, Any]) -> tuple[str, ...]:
    """The quantizers whose transform a loaded float state knows nothing of; none if the state holds quantizers.

    A state without any number of a quantizer, for a model that has some, is taken for a float model's.

    Args:
        index: of the model.
        entries: of the state, by path.
    """
    by_path = index.by_path
    of_quantizers = any(by_path[path].in_quantizer for path in entries)
    if of_quantizers or not any(entry.in_quantizer for entry in index.variables):
        return ()
    return tuple(_with_transform(index))


def warn_of_transforms(found: tuple[str, ...]) -> None:
    """Warn that float weights were loaded into a model that keeps others.

    Args:
        found: see `transformed_inputs`.
    """
    if found:
        shown = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
        warnings.warn(
            "load_state: the state holds weights and no quantizers, as a float model's does, and this model's weights "
            f"are stored for transforms of their inputs: {shown}. With other weights it computes something else.\n"
            "  cure: the recipe that made this model, on a float model with that state; or a state of this model",
            UserWarning,
            4,
        )


def _with_transform(index: ModelIndex) -> Iterator[str]:
    for path, node in index.places:
        if isinstance(node, QuantWeightLayer):
            if node.input_quant is not None and vars(node.input_quant).get("pre_transform") is not None:
                yield dotted((*path, "input_quant"))
        elif isinstance(node, OpQuantizers):
            for name, proxy in node.held.items():
                stem, _, side = name.rpartition("_")
                other = f"{stem}_{'lhs' if side == 'rhs' else 'rhs'}"
                # Of a product of two activations both operands are transformed, and no weight.
                alone = side in ("lhs", "rhs") and other not in node.held
                if alone and vars(proxy).get("pre_transform") is not None:
                    yield name
