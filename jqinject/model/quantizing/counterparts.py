"""Which jqinject layer replaces which Flax layer, and which quantizers of a rule it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from jqinject.nn import (
    QuantBatchNorm,
    QuantConv,
    QuantConvTranspose,
    QuantEinsum,
    QuantEmbed,
    QuantGroupNorm,
    QuantLayerNorm,
    QuantLinear,
    QuantLinearGeneral,
    QuantLoRALinear,
    QuantRMSNorm,
)

OF_WEIGHTS = ("weight_quant", "bias_quant", "input_quant", "output_quant", "grad_quant")
OF_TABLES = ("weight_quant", "output_quant", "grad_quant")
# The input of a normalization comes from a contraction, and devices fuse the two.
OF_NORMS = ("output_quant", "grad_quant")


@dataclass(frozen=True)
class Counterpart:
    """The jqinject class that replaces a Flax layer.

    Attributes:
        layer: the class.
        slots: the quantizers of a rule that it takes.
    """

    layer: type
    slots: tuple[str, ...]


COUNTERPARTS: dict[type, Counterpart] = {
    nnx.Linear: Counterpart(QuantLinear, OF_WEIGHTS),
    nnx.LinearGeneral: Counterpart(QuantLinearGeneral, OF_WEIGHTS),
    nnx.Einsum: Counterpart(QuantEinsum, OF_WEIGHTS),
    nnx.Conv: Counterpart(QuantConv, OF_WEIGHTS),
    nnx.ConvTranspose: Counterpart(QuantConvTranspose, OF_WEIGHTS),
    nnx.LoRALinear: Counterpart(QuantLoRALinear, OF_WEIGHTS),
    nnx.Embed: Counterpart(QuantEmbed, OF_TABLES),
    nnx.BatchNorm: Counterpart(QuantBatchNorm, OF_NORMS),
    nnx.LayerNorm: Counterpart(QuantLayerNorm, OF_NORMS),
    nnx.RMSNorm: Counterpart(QuantRMSNorm, OF_NORMS),
    nnx.GroupNorm: Counterpart(QuantGroupNorm, OF_NORMS),
}
LAYER_NAMES = tuple(kind.__name__ for kind in COUNTERPARTS)


def counterpart_of(module: Any) -> Counterpart | None:
    """The counterpart of a Flax layer; None for others, and for subclasses of Flax's, whose forward may differ."""
    return COUNTERPARTS.get(type(module))


def slots_for(module: Any, counterpart: Counterpart, named: bool) -> tuple[str, ...]:
    """The quantizers of a rule that a layer takes.

    Args:
        module: the layer.
        counterpart: its counterpart.
        named: whether the rule names the layer's class; if so, a normalization takes an input quantizer too.
    """
    slots = counterpart.slots
    if named and slots is OF_NORMS:
        slots = ("input_quant", *slots)
    without_bias = "bias" in vars(module) and vars(module)["bias"] is None
    return tuple(slot for slot in slots if slot != "bias_quant" or not without_bias)
