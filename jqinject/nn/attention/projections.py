"""The projections of quantized multi-head attention: which layers they are, and which quantizers they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flax import nnx

from jqinject.nn.attention.attention_base import act_slot
from jqinject.nn.base.slots import BIAS, GRAD, INPUT, OUTPUT, WEIGHT, hold_proxies
from jqinject.nn.base.weight_layer import ContractionKind
from jqinject.nn.linear.linear_general import QuantLinearGeneral
from jqinject.program import change_class

IN_PROJ_INPUT = act_slot("in_proj_input_")
IN_PROJ, OUT_PROJ = "in_proj_", "out_proj_"
PROJECTION_SLOTS = tuple(
    replace(slot, name=side + slot.name, prefix=side + slot.prefix)
    for side, slots in (
        (IN_PROJ, (INPUT, WEIGHT, BIAS, GRAD)),
        (OUT_PROJ, (INPUT, WEIGHT, BIAS, OUTPUT, GRAD)),
    )
    for slot in slots
)
IN_LAYERS = ("query", "key", "value")
# Shared by projections that are one matrix, if it is one number for the matrix.
SHARED = ("weight_quant", "bias_quant")


def hold_projections(
    attention: Any,
    arguments: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    packed: bool,
    return_quant_tensor: bool,
    contraction: ContractionKind,
    rngs: nnx.Rngs | None,
) -> None:
    """Make the projections of a `nnx.MultiHeadAttention` quantized layers; their parameters stay what they are.

    Args:
        attention: holds `query`, `key`, `value` and `out`, of Flax.
        arguments: quantizers by name with the prefix `in_proj_` or `out_proj_`.
        overrides: the user's keywords with those prefixes.
        packed: whether queries, keys and values are projected as by one matrix: one quantizer of the input, held by
            `attention`, and one of the weights and of the biases where these have one scale for a tensor.
        return_quant_tensor: of the output projection.
        contraction: of all of them.
        rngs: for quantizers that draw random numbers.

    Raises:
        TypeError, ValueError: what `QuantLinearGeneral` refuses; packed in NNX's tree mode, which knows no sharing.
    """
    of_in, of_out = _with_prefix(IN_PROJ, arguments), _with_prefix(OUT_PROJ, arguments)
    in_overrides, out_overrides = _with_prefix(IN_PROJ, overrides), _with_prefix(OUT_PROJ, overrides)
    common: dict[str, Any] = {} if contraction == "auto" else {"contraction": contraction}
    if packed:
        of_input = {n: v for n, v in in_overrides.items() if n.startswith("input_")}
        in_overrides = {n: v for n, v in in_overrides.items() if n not in of_input}
        prefixed = {IN_PROJ + name: v for name, v in of_input.items()}
        channels = {IN_PROJ_INPUT.name: (attention.in_features,)}
        input_quant = {IN_PROJ_INPUT.name: of_in.pop("input_quant", None)}
        stack, slots = stack_along(attention), (IN_PROJ_INPUT,)
        hold_proxies(
            attention, input_quant, prefixed, rngs, slots=slots, stack=stack, channel_shapes=channels
        )
    try:
        _quantize(attention.query, of_in | common, in_overrides, False, rngs)
        shared = _of_one_matrix(attention.query) if packed else {}
        names = tuple(name.removesuffix("quant") for name in shared)
        own = {n: v for n, v in in_overrides.items() if not (names and n.startswith(names))}
        for name in IN_LAYERS[1:]:
            _quantize(getattr(attention, name), of_in | shared | common, own, False, rngs)
    except Exception as error:
        error.add_note(
            f"in the {'packed ' if packed else ''}projections of queries, keys and values, whose keywords start with "
            f"{IN_PROJ}" + (" (packed_in_proj=False gives each its own quantizers)" if packed else "")
        )
        raise
    try:
        _quantize(attention.out, of_out | common, out_overrides, return_quant_tensor, rngs)
    except Exception as error:
        error.add_note(f"in the output projection, whose keywords start with {OUT_PROJ}")
        raise


def stack_along(attention: Any) -> tuple[int, ...]:
    """The sizes of the leading axes that a stack of attention layers has (built under `nnx.vmap`)."""
    return tuple(attention.query.kernel.shape[:-3])


def _quantize(
    layer: Any,
    arguments: Mapping[str, Any],
    overrides: Mapping[str, Any],
    return_quant_tensor: bool,
    rngs: nnx.Rngs | None,
) -> None:
    change_class(layer, QuantLinearGeneral)
    layer._init_quantizers(arguments, overrides, return_quant_tensor, rngs)


def _with_prefix(prefix: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in arguments.items() if name.startswith(prefix)}


def _of_one_matrix(query: QuantLinearGeneral) -> dict[str, Any]:
    """The proxies of the first projection that serve the others too: those with one scale for the tensor.

    With a scale for each channel, the scales of one matrix are those of its parts.
    """
    found = {}
    for name in SHARED:
        proxy = getattr(query, name)
        scale = None if proxy is None else proxy.scale()
        if scale is not None and scale.size == 1:
            found[name] = proxy
    return found
