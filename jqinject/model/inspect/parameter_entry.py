"""The entries of a report for what a model contracts or looks up by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jqinject.model.inspect.coverage import Coverage
from jqinject.model.inspect.coverage_rows import ActivationContraction
from jqinject.model.inspect.layer_numbers import LayerReport
from jqinject.model.inspect.program_contractions import CountedContraction
from jqinject.model.walk import ModelIndex, PlainArray


def parameter_entry(
    name: str, model: nnx.Module, covered: Coverage, found: Sequence[CountedContraction], operations: int
) -> LayerReport:
    """The entry, named by the parameter's path; its "class" is what the model does with it.

    Args:
        name: the path.
        model: the model.
        covered: its coverage.
        found: its contractions in the compiled program that quantizers reach.
        operations: multiply-adds of these.
    """
    rows = [row for row in covered.weights if row.parameter == name]
    kinds = {one.kind for one in found} or {row.contraction for row in rows if row.operation != "take"}
    missed = next((one for one in covered.missed if one.parameter == name), None)
    quantized = any(row.weight for row in rows)
    note = "looks up rows" if not kinds else "" if missed is None else missed.why
    if quantized and "float" in kinds and not note:
        note = _note_of_floats(rows)
    return LayerReport(
        path=name,
        layer=" and ".join(dict.fromkeys(row.operation for row in rows)),
        contraction=" and ".join(sorted(kinds)) or "none",
        program=", ".join(dict.fromkeys(map(str, found))),
        weight_bytes=_bytes_of(model, name),
        note="; ".join(dict.fromkeys(filter(None, (note, *(row.transform for row in rows))))),
        operations=operations or sum(row.operations for row in rows),
    )


def product_entry(
    one: ActivationContraction, found: Sequence[CountedContraction], operations: int
) -> LayerReport:
    """The entry of a contraction of two activations, named by the operation.

    Args:
        one: the contraction.
        found: it, in the compiled program.
        operations: its multiply-adds.
    """
    return LayerReport(
        path=one.name,
        layer=f"{one.operation} of activations",
        contraction=" and ".join(sorted({each.kind for each in found})) or "none",
        program=", ".join(dict.fromkeys(map(str, found))),
        weight_bytes=0,
        note=one.transform,
        operations=operations or one.operations,
    )


def _note_of_floats(rows: Sequence[Any]) -> str:
    if any(row.operation != "take" and not row.input for row in rows):
        return "the input is not quantized"
    return "contracted dequantized, somewhere at least: the operands have no payloads in common there"


def _bytes_of(model: nnx.Module, name: str) -> int:
    nodes = {".".join(path): node for path, node in ModelIndex(model).places}
    node = nodes.get(name)
    if not isinstance(node, nnx.Variable | PlainArray):
        return 0
    held = node.get_raw_value() if isinstance(node, nnx.Variable) else node.get_value()
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))
