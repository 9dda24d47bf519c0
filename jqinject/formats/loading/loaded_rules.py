"""How the layers of a model are quantized, so that they take the matrices of a checkpoint."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from flax import nnx

from jqinject.dot import FrozenParam
from jqinject.formats.checkpoint import Checkpoint
from jqinject.formats.loading.column_orders import column_order, permuted
from jqinject.formats.loading.loaded_quantizers import input_quantizer, put_ranges
from jqinject.formats.loading.loading_plan import Assignment
from jqinject.formats.stored_matrix import InputFormat
from jqinject.model import Rule
from jqinject.model.quantizing.rules import counterpart_of
from jqinject.model.walk import ModelIndex, dotted
from jqinject.nn.base.slots import is_on
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.quant import Int8WeightPerChannelFloat


def refuse_quantized(model: nnx.Module) -> None:
    """Raise if weights of a model are quantized already.

    Raises:
        ValueError: names them.
    """
    held = [
        dotted(path)
        for path, node in ModelIndex(model).places
        if isinstance(node, FrozenParam) or (isinstance(node, QuantWeightLayer) and is_on(node.weight_quant))
    ]
    if held:
        shown = ", ".join(held[:4]) + (f" and {len(held) - 4} more" if len(held) > 4 else "")
        raise ValueError(
            f"load takes a float model; this one has quantized weights: {shown}.\n"
            "  cure: the model before quantize and freeze; jqinject.load_state for float weights"
        )


def rules_of(model: nnx.Module, checkpoint: Checkpoint, kept: list[Assignment]) -> list[Rule]:
    """A rule for each matrix: that of its layer, if this is one that quantizers go into; else of the parameter.

    Raises:
        CheckpointError: the checkpoint quantizes an input in a way that no quantizer here does.
    """
    layers, made = _layers(model), []
    for each in kept:
        module, _, _ = each.path.rpartition(".")
        is_layer = module in layers
        inputs, order = (
            input_quantizer(input_of(checkpoint, each), each.path),
            column_order(checkpoint, each),
        )
        made.append(
            Rule(
                re.escape(module if is_layer else each.path),
                weight_quant=Int8WeightPerChannelFloat,
                input_quant=inputs if order is None else permuted(inputs, order),
            )
        )
    return made


def contracted_by_model(model: nnx.Module, kept: list[Assignment]) -> tuple[str, ...]:
    """Paths of the matrices that no layer contracts: how the model does is known from a call of it."""
    layers = _layers(model)
    return tuple(each.path for each in kept if each.path.rpartition(".")[0] not in layers)


def _layers(model: nnx.Module) -> set[str]:
    """Paths of the layers that quantizers go into."""
    return {dotted(path) for path, node in ModelIndex(model).places if counterpart_of(node) is not None}


def input_of(checkpoint: Checkpoint, each: Assignment) -> InputFormat | None:
    """How the input of a parameter is quantized; by the widest range of those of its matrices, which all hold."""
    found = [checkpoint.matrices[name].input_format for name, _ in each.sources]
    known = [one for one in found if one is not None]
    scales = [(float(one.scale.max()), at) for at, one in enumerate(known) if one.scale is not None]
    if scales:
        return known[max(scales)[1]]
    whole = [
        (float(one.global_scale.min()), at) for at, one in enumerate(known) if one.global_scale is not None
    ]
    return known[min(whole)[1]] if whole else found[0]


def put_ranges_of_stacks(model: nnx.Module, checkpoint: Checkpoint, kept: list[Assignment]) -> None:
    """Give each layer of a stack its own static input range; until now all have the widest."""
    stacks = {each.path.rpartition(".")[0]: each for each in kept if each.depth}
    for path, node in ModelIndex(model).places if stacks else ():
        each = stacks.get(dotted(path))
        proxy = vars(node).get("input_quant") if isinstance(node, QuantWeightLayer) else None
        if each is None or not isinstance(proxy, nnx.Module):
            continue
        share = len(each.sources) // math.prod(each.depth)
        single = [
            replace(each, sources=each.sources[at : at + share]) for at in range(0, len(each.sources), share)
        ]
        given = [input_of(checkpoint, one) for one in single]
        if all(one is not None and one.scale is not None for one in given):
            put_ranges(proxy, [one for one in given if one is not None], each.depth)
