"""`report`: which contraction each layer really runs, the size of its weight, and its quantization error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from jqinject.core._protocols import number_format
from jqinject.dot.tensors.choice import NOT_KEPT
from jqinject.model.frozen_weights import op_of_weight, quantized_op
from jqinject.model.inspect.coverage import Coverage, coverage_of
from jqinject.model.inspect.coverage_rows import ActivationContraction
from jqinject.model.inspect.layer_numbers import LayerReport
from jqinject.model.inspect.layer_report import ContractionReport
from jqinject.model.inspect.measured_report import check_numbers, measure
from jqinject.model.inspect.program_contractions import CountedContraction, program_of
from jqinject.model.inspect.training_bytes import checked_optimizer, training_bytes
from jqinject.model.inspect.weight_numbers import note_of_transform
from jqinject.model.walk import ModelIndex, PlainArray, uncalibrated
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.ops import Codebook, FloatGrid
from jqinject.ops.cut import cut_in_place
from jqinject.ops.groups import fitting_size
from jqinject.ops.sharding import is_split
from jqinject.program import CALL, HELD, Call, Method, checked_method
from jqinject.quant_tensor import CONTRACTED

LAYERS = (QuantWeightLayer, nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose)


def report(
    model: nnx.Module,
    *inputs: Any,
    numbers: bool = False,
    reference: nnx.Module | None = None,
    optimizer: Any = None,
    method: Method = CALL,
    **keywords: Any,
) -> ContractionReport:
    """Report each layer's actual contraction, its cost, why it is not quantized, and its quantization error.

    The model is traced in evaluation mode and compiled for this machine, and the compiled program is read: a product
    that a configuration requests but the backend lacks shows as "float". A CPU, for one, contracts 8-bit floats as
    floats.

    With `numbers`, a copy of the model also runs in evaluation mode: in float, quantized, and twice for each quantized
    layer and for each parameter that the model contracts by itself, whose calls are its contractions and look-ups. All
    outputs of these are kept in memory meanwhile, so a small batch is best.

    Args:
        model: an NNX module; it is not changed.
        inputs, keywords: the model's arguments, of any kind: pytrees of arrays or `jax.ShapeDtypeStruct`s, modules
            (which are not changed), flags, None.
        numbers: measure the quantization error of each layer and of the model; needs arrays.
        reference: for `numbers` after a recipe, which puts the numbers that it chose in the place of float weights: the
            float model that has them, `Result.float_model`. All but these weights is the model's own.
        optimizer: an `nnx.Optimizer`, or an optax transformation: count the bytes of training too, in the program of
            the training mode, whose floating-point outputs are differentiated; nothing of it is run. See
            `TrainingBytes`.
        method: the method that they are arguments of: its name, or a function that takes the model first, as in
            `method=lambda model, x: model(x, numbers=3)`.

    Returns:
        An entry for every jqinject or Flax layer with a weight, and for every parameter that the model contracts or
        looks up by itself, named by its path; with `numbers`, also for every other quantized jqinject layer, and for
        every quantized contraction of two activations, named by the operation. Besides, the static ranges that never
        saw data, the contractions of two activations, and the coverage; with `optimizer`, `training`.

    Raises:
        TypeError: `model` is not an NNX module; `numbers` with inputs or weights that are not concrete arrays;
            `optimizer` is none.
        ValueError: the model has no such method; `numbers` with a frozen model whose float weights are gone: names
            the layers and parameters; the same after a recipe without `reference`, or a reference whose parameters do
            not fit; `reference` without `numbers`; `optimizer` for a model with nothing to train, or no floating-point
            output.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject import calibrate, freeze
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> layer = QuantLinear(16, 8, input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
        >>> _ = calibrate(layer, [jnp.ones((4, 16))], progress=False)
        >>> measured = report(layer, jnp.ones((4, 16)), numbers=True)
        >>> measured.layers[0].numbers.saturation.weight, measured.most_sensitive(1)[0].layer
        (0.0, 'QuantLinear')
        >>> found = report(freeze(layer), jnp.ones((4, 16)))
        >>> found.layers[0].contraction, found.layers[0].program, found.layers[0].operations
        ('int', 's8 x s8 -> s32', 512)
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"report takes an NNX module, got {type(model).__name__}")
    call = Call(inputs, keywords, checked_method(model, method, "report"))
    if reference is not None and not numbers:
        raise ValueError("report(reference=...) has no effect without numbers.\n  cure: numbers=True")
    return report_of(model, call, numbers=numbers, reference=reference, optimizer=optimizer)


def report_of(
    model: nnx.Module,
    call: Call,
    *,
    numbers: bool,
    reference: nnx.Module | None = None,
    optimizer: Any = None,
) -> ContractionReport:
    """See `report`."""
    if optimizer is not None:
        checked_optimizer(optimizer)
    if numbers:
        check_numbers(model, call, reference)
    copy = nnx.clone(model)
    copy.eval()
    modules = {".".join(map(str, path)): node for path, node in nnx.iter_modules(copy)}
    layers = {name: node for name, node in modules.items() if isinstance(node, LAYERS)}
    covered = coverage_of(copy, [call])
    parameters = _entries_of_parameters(covered, layers)
    products = {one.name: one for one in covered.activations if numbers and (one.lhs or one.rhs)}
    parameters |= {name: name for name in products}
    program = program_of(copy, call, tuple(layers), parameters)
    by_layer: dict[str, list[CountedContraction]] = {name: [] for name in (*layers, *parameters.values())}
    for one in program.contractions:
        by_layer[one.layer].append(one)
    quantized_sites = tuple(vars(model).get(HELD) or ())
    entries = {
        name: _entry(
            name,
            layers[name],
            by_layer[name],
            program.operations[name],
            any(site.startswith(f"{name}.") for site in quantized_sites),
            program.reasons.get(name, ""),
        )
        for name in layers
    }
    sites = tuple(
        parameter_entry(name, copy, covered, by_layer[name], program.operations[name])
        for name in dict.fromkeys(parameters.values())
        if name not in layers and name not in products
    )
    unseen = uncalibrated(ModelIndex(model))
    switched = _quantized_entries(covered, parameters)
    training = None if optimizer is None else training_bytes(model, call, optimizer, switched)
    formats = _formats_of_entries(covered, parameters)
    if not numbers:
        rows = (replace(row, formats=formats.get(row.path, "")) for row in (*entries.values(), *sites))
        return ContractionReport(tuple(rows), None, unseen, covered, training)
    found = measure(copy, call, switched, reference)
    both = (
        entries.get(name) or _without_weight(name, node)
        for name, node in modules.items()
        if name in entries or name in found.entries
    )
    between = (product_entry(one, by_layer[name], program.operations[name]) for name, one in products.items())
    rows = (
        replace(row, formats=formats.get(row.path, ""), numbers=found.entries.get(row.path))
        for row in (*both, *sites, *between)
    )
    return ContractionReport(tuple(rows), found.output_sqnr_db, unseen, covered, training)


def _entries_of_parameters(covered: Coverage, layers: Mapping[str, Any]) -> dict[str, str]:
    """The parameters that are contracted or looked up -> the layer's entry that they belong to, else their own."""
    found = {}
    for row in covered.weights:
        layer = row.parameter.rpartition(".")[0]
        found[row.parameter] = layer if layer in layers else row.parameter
    return found


def _quantized_entries(covered: Coverage, parameters: Mapping[str, str]) -> dict[str, str]:
    """The parameters and the products of activations that are quantized -> their entries."""
    weights = {row.parameter: parameters[row.parameter] for row in covered.weights if row.weight or row.input}
    return weights | {one.name: one.name for one in covered.activations if one.lhs or one.rhs}


def _formats_of_entries(covered: Coverage, parameters: Mapping[str, str]) -> dict[str, str]:
    """Map each entry to the numbers that quantizers make of its operands, as text."""
    texts: dict[str, list[str]] = {}
    for row in covered.weights:
        if row.weight or row.input:
            both = (
                row.weight if row.operation == "take" else f"{row.input or 'float'} x {row.weight or 'float'}"
            )
            texts.setdefault(parameters[row.parameter], []).append(both)
    for product in covered.activations:
        if product.lhs or product.rhs:
            texts.setdefault(product.name, []).append(f"{product.lhs or 'float'} x {product.rhs or 'float'}")
    return {name: ", ".join(dict.fromkeys(both)) for name, both in texts.items()}


def _without_weight(name: str, layer: Any) -> LayerReport:
    return LayerReport(path=name, layer=type(layer).__name__, contraction="none", program="", weight_bytes=0)


def _entry(
    name: str, layer: Any, found: list[CountedContraction], operations: int, in_program: bool, reason: str
) -> LayerReport:
    kinds = sorted({contraction.kind for contraction in found})
    return LayerReport(
        path=name,
        layer=type(layer).__name__,
        contraction=" and ".join(kinds) or "none",
        program=", ".join(dict.fromkeys(map(str, found))),
        weight_bytes=_weight_bytes(layer),
        note="; ".join(
            filter(None, (_note(layer, kinds, in_program, reason), _crossing(layer), _transform(layer)))
        ),
        operations=operations,
    )


def _weight_bytes(layer: Any) -> int:
    held: list[Any] = [vars(layer).get(name) for name in ("kernel", "embedding", "frozen")]
    op = quantized_op(layer)
    if op is not None:
        held.append(op.module.rhs_freezer)
    arrays = [x for part in held if part is not None for x in jax.tree.leaves(part)]
    return sum(x.size * x.dtype.itemsize for x in arrays)


def _note(layer: Any, kinds: list[str], in_program: bool, reason: str) -> str:
    if not kinds:
        if isinstance(layer, nnx.Embed):
            return "looks up rows"
        return "was not called, or the compiler could do without"
    if "float" not in kinds:
        return ""
    op = op_of_weight(layer)
    if isinstance(layer, QuantWeightLayer) and op is None:
        return _note_of_ours(layer, reason)
    if op is None:
        return "fake-quantized by the program around it: see op_quant" if in_program else "is not quantized"
    missing = [side for side, has in zip(("input", "weight"), op.module.quantizes, strict=True) if not has]
    if missing:
        return f"the {' and the '.join(missing)} has no bits in the configuration"
    if op.module.countdown is not None:
        spec = op.module.scheme
        return f"{spec.before.as_before} in its first {spec.delay} calls in training, then by {spec.name}"
    if op.module.scheme is not None:
        return "operands without a payload in common, or scales that vary along what is summed: see QDotGeneral.explain"
    return _NO_UNITS


_NO_UNITS = "this backend has no such product and takes floats"


def _note_of_ours(layer: QuantWeightLayer, reason: str) -> str:
    """Why a layer contracts floats.

    Args:
        layer: the layer.
        reason: that of the table of contractions; empty where it was not asked or has none.
    """
    quantized = layer.frozen is not None or (
        layer.weight_quant is not None and layer.weight_quant.is_quant_enabled
    )
    if not quantized:
        return "the weight is not quantized"
    if layer.input_quant is None or not layer.input_quant.is_quant_enabled:
        return "the input is not quantized by this layer: give it input_quant=..."
    if layer.contraction == "float":
        return "contraction='float'"
    form = _float_format(layer)
    if form is not None and form.is_table:
        return "no backend contracts indices into a table: runs dequantized"
    if form is not None and _has_groups(layer):
        return f"{form} with a scale for each group: runs dequantized"
    if form is not None:
        known = form.dtype in CONTRACTED
        return f"no 8-bit floats: {_NO_UNITS}" if known else f"no backend contracts {form}: runs dequantized"
    if _has_groups(layer) and layer.contraction == "auto":
        return "a scale for each group: contracted dequantized, or group by group as integers with contraction='int'"
    if layer.frozen is None and layer.contraction == "auto" and reason in ("", NOT_KEPT):
        return "quantized in float until it is frozen (or with contraction='int')"
    return (
        reason or "input or weight has no integers of at most 8 bits, or a scale varies along what is summed"
    )


def _has_groups(layer: QuantWeightLayer) -> bool:
    """Whether the layer's weight has a scale for each group."""
    if layer.frozen is not None:
        return layer.frozen.form.groups is not None
    return layer.weight_quant.quant_metadata.group_size is not None


def _transform(layer: Any) -> str:
    """The note for a transform before the quantizer of a layer's input; empty without one."""
    return note_of_transform(layer.input_quant) if isinstance(layer, QuantWeightLayer) else ""


def _crossing(layer: Any) -> str:
    """The note for a weight whose groups cross the borders of its shards; empty for any other."""
    if not isinstance(layer, QuantWeightLayer) or layer.frozen is not None or layer.weight_quant is None:
        return ""
    size, axis = layer.weight_quant.quant_metadata.group_size, layer.weight_quant.quant_metadata.group_dim
    weight = layer.weight[...]
    if size is None or axis is None or not isinstance(weight, jax.Array):
        return ""
    length, shard = weight.shape[axis], weight.sharding.shard_shape(weight.shape)[axis]
    size = fitting_size(size, length)
    cut = cut_in_place(weight, size, axis % weight.ndim)
    across = f"groups of {size} cross its shards of {shard} along axis {axis}"
    if cut is not None:
        return f"{across}: integers are contracted in pieces of {cut.piece}"
    gathers = is_split(weight) and shard % size and shard != length
    return f"{across}, an explicit one: the weight is gathered for each use" if gathers else ""


def _float_format(layer: QuantWeightLayer) -> FloatGrid | Codebook | None:
    """The minifloat format of the layer's weight, or its codebook; None if it has neither."""
    if layer.frozen is not None:
        return layer.frozen.form.format
    return number_format(layer.weight_quant.tensor_quant)


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
