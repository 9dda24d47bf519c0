"""Why a layer or a parameter is contracted in floats, as a report's note."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import nnx

from jqinject.dot.tensors.choice import NOT_KEPT
from jqinject.model.frozen_weights import op_of_weight
from jqinject.model.inspect.model_weights import note_of_transform
from jqinject.model.inspect.site_table import SiteRow, SiteTable, joined
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.ops.cut import cut_in_place
from jqinject.ops.groups import fitting_size
from jqinject.ops.sharding import is_split
from jqinject.quant_tensor import CONTRACTED

NO_UNITS = "this backend has no such product and takes floats"


def note_of_layer(path: str, layer: object, kinds: Sequence[str], sites: SiteTable) -> str:
    """The note of a layer: why it contracts floats, groups that cross shards, a transform of its input.

    Args:
        path: of the layer.
        layer: a layer of jqinject or of Flax.
        kinds: of its contractions in the compiled program.
        sites: the site table of the model, of one call.
    """
    ours = isinstance(layer, QuantWeightLayer)
    return joined(
        _why_float(path, layer, kinds, sites),
        _crossing(layer) if ours else "",
        note_of_transform(layer.input_quant) if ours else "",
    )


def note_of_parameter(uses: Sequence[SiteRow], kinds: Sequence[str]) -> str:
    """The note of a parameter that the model contracts by itself.

    Args:
        uses: its rows.
        kinds: of its contractions in the compiled program.
    """
    note = "looks up rows" if not kinds else next((row.why for row in uses if row.why), "")
    if "float" in kinds and not note:
        contracted = [row for row in uses if row.operation != "take"]
        note = (
            "the input is not quantized"
            if any(not row.input for row in contracted)
            else "contracted dequantized, somewhere at least: the operands have no payloads in common there"
        )
    return joined(note, *(row.note for row in uses))


def _why_float(path: str, layer: object, kinds: Sequence[str], sites: SiteTable) -> str:
    if not kinds:
        return (
            "looks up rows"
            if isinstance(layer, nnx.Embed)
            else "was not called, or the compiler could do without"
        )
    if "float" not in kinds:
        return ""
    op = op_of_weight(layer)
    if isinstance(layer, QuantWeightLayer) and op is None:
        return _why_ours(path, layer, sites)
    if op is None:
        in_program = any(name.startswith(f"{path}.") for name in sites.weights.quantizers or ())
        return "fake-quantized by the program around it: see op_quant" if in_program else "is not quantized"
    missing = [side for side, has in zip(("input", "weight"), op.module.quantizes, strict=True) if not has]
    if missing:
        return f"the {' and the '.join(missing)} has no bits in the configuration"
    spec = op.module.scheme
    if op.module.countdown is not None:
        return f"{spec.before.as_before} in its first {spec.delay} calls in training, then by {spec.name}"
    if spec is not None:
        return "operands without a payload in common, or scales that vary along what is summed: see QDotGeneral.explain"
    return NO_UNITS


def _why_ours(path: str, layer: QuantWeightLayer, sites: SiteTable) -> str:
    """Why a layer of jqinject contracts floats."""
    grid = sites.weights.grid_of(f"{path}.{layer.weight_name}" if path else layer.weight_name)
    if grid is None:
        return "the weight is not quantized"
    if layer.input_quant is None or not layer.input_quant.is_quant_enabled:
        return "the input is not quantized by this layer: give it input_quant=..."
    if layer.contraction == "float":
        return "contraction='float'"
    form, in_groups = grid.form, grid.group_size is not None
    if form is not None and form.is_table:
        return "no backend contracts indices into a table: runs dequantized"
    if form is not None and in_groups:
        return f"{form} with a scale for each group: runs dequantized"
    if form is not None:
        has_units = form.dtype in CONTRACTED
        return (
            f"no 8-bit floats: {NO_UNITS}" if has_units else f"no backend contracts {form}: runs dequantized"
        )
    if in_groups and layer.contraction == "auto":
        return "a scale for each group: contracted dequantized, or group by group as integers with contraction='int'"
    reason = sites.calls[0].running.reasons.get(path, "")
    if layer.frozen is None and layer.contraction == "auto" and reason in ("", NOT_KEPT):
        return "quantized in float until it is frozen (or with contraction='int')"
    return (
        reason or "input or weight has no integers of at most 8 bits, or a scale varies along what is summed"
    )


def _crossing(layer: QuantWeightLayer) -> str:
    """The note for a weight whose groups cross the borders of its shards; empty for any other."""
    if layer.frozen is not None or layer.weight_quant is None:
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
