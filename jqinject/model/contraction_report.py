"""`report`: what each layer of a model really contracts, and what its weight takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jqinject.core import FloatQuant
from jqinject.model.frozen_ops import quantized_op
from jqinject.model.program import Contraction, contractions
from jqinject.nn._weight_layer import QuantWeightLayer

LAYERS = (QuantWeightLayer, nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose)


@dataclass(frozen=True)
class LayerReport:
    """What one layer does.

    Attributes:
        path: where it is in the model.
        layer: its class.
        contraction: "int", "fp8" or "float", as it stands in the compiled program; "none" where it has none there.
        program: dtypes of the operands and of the output, in XLA's words.
        weight_bytes: of its weight, with scales and zero points.
        note: why numbers are contracted as floats though they are quantized, or why they are not quantized.
    """

    path: str
    layer: str
    contraction: str
    program: str
    weight_bytes: int
    note: str = ""


@dataclass(frozen=True)
class ContractionReport:
    """What every layer with a weight does, by path.

    `str()` of it is a table.

    Attributes:
        layers: an entry for each.
    """

    layers: tuple[LayerReport, ...]

    def __getitem__(self, path: str) -> LayerReport:
        return {entry.path: entry for entry in self.layers}[path]

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.layers)

    @property
    def weight_bytes(self) -> int:
        """Of all the layers."""
        return sum(entry.weight_bytes for entry in self.layers)

    def __str__(self) -> str:
        head = ("layer", "class", "contracts", "program", "bytes", "note")
        rows = [
            (e.path, e.layer, e.contraction, e.program, f"{e.weight_bytes:,}", e.note) for e in self.layers
        ]
        rows.append(("", "", "", "", f"{self.weight_bytes:,}", ""))
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = ("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in (head, *rows))
        return "\n".join(line.rstrip() for line in lines)


def report(model: nnx.Module, *inputs: Any) -> ContractionReport:
    """Say which contraction each layer really runs, how many bytes its weight takes, and where it is not quantized.

    The model is traced in evaluation mode and compiled for this machine, and the program is read: what a configuration
    asks for and a backend does not have shows as "float". A CPU, for one, contracts 8-bit floats as floats.

    Args:
        model: an NNX module; it is not changed.
        inputs: what it is called with: arrays, or `jax.ShapeDtypeStruct`s.

    Returns:
        An entry for every layer of ours and of Flax's with a weight.

    Raises:
        TypeError: `model` is no NNX module.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject import freeze
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> layer = QuantLinear(16, 8, input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
        >>> found = report(freeze(layer), jnp.ones((4, 16)))
        >>> found.layers[0].contraction, found.layers[0].program
        ('int', 's8 x s8 -> s32')
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"report takes an NNX module, got {type(model).__name__}")
    copy = nnx.clone(model)
    copy.eval()
    layers = {
        ".".join(map(str, path)): node for path, node in nnx.iter_modules(copy) if isinstance(node, LAYERS)
    }
    by_layer: dict[str, list[Contraction]] = {name: [] for name in layers}
    for found in contractions(copy, inputs, layers):
        by_layer[found.layer].append(found)
    return ContractionReport(tuple(_entry(name, layers[name], by_layer[name]) for name in layers))


def _entry(name: str, layer: Any, found: list[Contraction]) -> LayerReport:
    kinds = sorted({contraction.kind for contraction in found})
    return LayerReport(
        path=name,
        layer=type(layer).__name__,
        contraction=" and ".join(kinds) or "none",
        program=", ".join(dict.fromkeys(map(str, found))),
        weight_bytes=_weight_bytes(layer),
        note=_note(layer, kinds),
    )


def _weight_bytes(layer: Any) -> int:
    held: list[Any] = [vars(layer).get("kernel"), vars(layer).get("frozen")]
    op = quantized_op(layer)
    if op is not None:
        held.append(op.module.rhs_freezer)
    arrays = [x for part in held if part is not None for x in jax.tree.leaves(part)]
    return sum(x.size * x.dtype.itemsize for x in arrays)


def _note(layer: Any, kinds: list[str]) -> str:
    if not kinds:
        return "was not called, or the compiler could do without"
    if "float" not in kinds:
        return ""
    if isinstance(layer, QuantWeightLayer):
        return _note_of_ours(layer)
    op = quantized_op(layer)
    if op is None:
        return "is not quantized"
    numerics = op.module.general.fwd
    missing = [
        side
        for side, quantizer in (("input", numerics.lhs_quantizer), ("weight", numerics.rhs_quantizer))
        if quantizer.numerics is None
    ]
    if missing:
        return f"the {' and the '.join(missing)} has no bits in the configuration"
    return _NO_UNITS


_NO_UNITS = "this backend has no such product and takes floats"


def _note_of_ours(layer: QuantWeightLayer) -> str:
    quantized = layer.frozen is not None or (
        layer.weight_quant is not None and layer.weight_quant.is_quant_enabled
    )
    if not quantized:
        return "the weight is not quantized"
    if layer.input_quant is None or not layer.input_quant.is_quant_enabled:
        return "the input is not quantized by this layer: give it input_quant=..."
    if layer.contraction == "float":
        return "contraction='float'"
    if _in_float8(layer):
        return "no 8-bit floats: " + _NO_UNITS
    if layer.frozen is None and layer.contraction == "auto":
        return "quantized in float until it is frozen (or with contraction='int')"
    return "input or weight has no integers of at most 8 bits, or a scale varies along what is summed"


def _in_float8(layer: QuantWeightLayer) -> bool:
    if layer.frozen is not None:
        return not layer.frozen.has_integers
    return isinstance(layer.weight_quant.tensor_quant, FloatQuant)
