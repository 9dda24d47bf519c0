"""The weight among a scheme's operands: which of them can be quantized apart from the contraction, and stored."""

from __future__ import annotations

from jqinject.dot.schemes.product_transforms import transform_of
from jqinject.dot.schemes.scheme import AGAIN, GRADIENTS, Kept, SchemeLike, SchemeSpec, role_of
from jqinject.inject import Binding

WEIGHTS = ("weight", "parameter")
CONVOLUTION, RAGGED = "conv_general_dilated", "ragged_dot"


def weight_quantizer(scheme: SchemeLike, operation: str) -> Binding | None:
    """The quantizer that a scheme has for `w`, if it can quantize the parameter in its own shape.

    Args:
        scheme: a `Scheme`.
        operation: "einsum", "dot_general", "conv_general_dilated", ...

    Returns:
        None if `w` is float, or can only be quantized as the contraction sees it; see `why_not_stored`.
    """
    spec = SchemeSpec.of(scheme)
    operand = spec["fprop_rhs"]
    return operand if isinstance(operand, Binding) and not why_not_stored(scheme, operation) else None


def why_not_stored(scheme: SchemeLike, operation: str) -> str:
    """Why the weight of a contraction by a scheme cannot be stored for serving; empty if it can, or is float."""
    spec = SchemeSpec.of(scheme)
    operand = spec["fprop_rhs"]
    if not isinstance(operand, Binding):
        return ""
    if spec.delay:
        return f"in its first {spec.delay} calls in training it is that of another scheme (quant_delay_steps)"
    if spec.fprop.tiles is not None and operation != CONVOLUTION:
        return "its forward contraction is cut into pieces (tile_size=), which have scales of their own"
    if transform_of(operand) is not None:
        return f"{operand.base.__name__} transforms it, as the contraction sees it"
    role = role_of(operand)
    if role == "operand":
        mode = operand.resolve("dequant_mode")
        return "" if mode == "output" else f"its dequant_mode is {mode!r}, so no payload is contracted"
    if role in WEIGHTS:
        return ""
    return f"{operand.base.__name__} quantizes {role}s, as the contraction sees them"


def rounds_weight_again(scheme: SchemeLike) -> bool:
    """Whether a scheme takes another version of `w` backward than the forward product's."""
    spec = SchemeSpec.of(scheme)
    return spec["dgrad_rhs"] is not Kept.FPROP or "conv_gradients" not in spec.flags


def quantizes_backward(scheme: SchemeLike) -> bool:
    """Whether a scheme says how operands of the backward products are rounded."""
    spec = SchemeSpec.of(scheme)
    again = any(spec[name] is not Kept.FPROP for name in AGAIN)
    return again or any(spec[name] is not None for name in GRADIENTS)


def ragged_input_quantizer(scheme: SchemeLike) -> Binding | None:
    """The quantizer of `x` for a ragged contraction by a scheme, whose gradients are those of the dequantized values.

    Raises:
        ValueError: the scheme rounds in tiles, or with quantizers that need the contraction's axes: a contraction
            whose gradients are float does neither.
    """
    spec = SchemeSpec.of(scheme)
    why = why_not_stored(scheme, RAGGED)
    operand = spec["fprop_lhs"]
    if isinstance(operand, Binding):
        row = role_of(operand) == "activation"
        why = why or ("" if row else f"{operand.base.__name__} is not a quantizer of activations")
    if why:
        raise ValueError(
            f"the scheme {spec.name} does not fit a ragged contraction: {why}.\n  cure: a rule before it that names "
            "the parameter, with a scheme of fprop_lhs and fprop_rhs alone, or with weight_quant and input_quant"
        )
    return operand if isinstance(operand, Binding) else None
