"""What a scheme needs of a layer: features that fill its blocks, random numbers, a weight that can be stored."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jqinject.dot.schemes.product_transforms import PAIRS, SIGNS, transform_of
from jqinject.dot.schemes.quant_operand import PARAMETERS, sampled
from jqinject.dot.schemes.scheme import AGAIN, GRADIENTS, TILES, Kept, SchemeLike, SchemeSpec, role_of
from jqinject.dot.tensors.six_operands import BackwardProduct
from jqinject.inject import Binding

RANDOM_SIGNS = "a transform with random signs"


class MissingRngsError(ValueError):
    """What draws random numbers has none.

    Args:
        where: who draws.
        what: what they are for.
    """

    def __init__(self, where: str, what: str = "stochastic rounding") -> None:
        alternative = (
            "random_signs = False" if what == RANDOM_SIGNS else "rounding to nearest (rng_type=None)"
        )
        super().__init__(
            f"{where}: {what} needs a key, and there are no rngs.\n  cure: {where.partition(':')[0]}(scheme, "
            f"rngs=nnx.Rngs(...)), key=jax.random.key(...) for a function, or {alternative}"
        )


@jax.tree_util.register_static
@dataclass(frozen=True)
class RefusedQuantizer:
    """Replaces the quantizer of a backward pass that cannot be: a forward pass alone does not need it.

    Attributes:
        why: the error.
    """

    why: str

    def __call__(self, *args: Any) -> Any:
        """Raise, as there is a backward pass."""
        raise ValueError(self.why)


def refused_backward(make: Callable[[], BackwardProduct]) -> BackwardProduct:
    """The operands of a backward product, or what refuses it because they lack random numbers.

    Args:
        make: makes the operands.
    """
    try:
        return make()
    except MissingRngsError as error:
        return BackwardProduct(RefusedQuantizer(str(error)))


SUMS = ("inputs, over which y = x w sums", "outputs, over which dx = g w^T sums")


def check_features(scheme: SchemeSpec, inputs: int | None, outputs: int | None, where: str) -> None:
    """Refuse a scheme whose blocks or transforms do not fill the features of a layer.

    How many rows a batch has is known when the layer is called.

    Args:
        scheme: the scheme.
        inputs, outputs: how many numbers the last axis has over which `y = x w`, and `dx = g w^T`, sums; None if that
            is not known beforehand.
        where: the layer, for errors.

    Raises:
        ValueError: a transform, or blocks without padding, do not fill them.

    Example:
        >>> from jqinject.quant import NVFP4Training, Quartet
        >>> check_features(SchemeSpec.of(NVFP4Training), 20, 20, "QuantLinear")
        >>> check_features(SchemeSpec.of(Quartet), 20, 32, "QuantLinear")
        Traceback (most recent call last):
        ValueError: QuantLinear: Quartet.fprop_lhs: pre_transform turns blocks of 32, which do not fill the 20 inputs...
    """
    for spec in scheme.both:
        for names, length, what in zip(PAIRS, (inputs, outputs), SUMS, strict=False):
            if length is None:
                continue
            for name in names:
                why = _misfit(spec[name], length)
                if why:
                    cure = _CURES[why[:3]]
                    raise ValueError(
                        f"{where}: {spec.name}.{name}: {why} the {length} {what}.\n  cure: {cure}"
                    )


_CURES = {
    "pre": "features that are a multiple of it, a Hadamard with another block_size, or a scheme without it",
    "gro": "features that are a multiple of it, another group_size, or group_padding = True",
}


def _misfit(operand: object, length: int) -> str:
    """What does not fill so many numbers; empty if everything does."""
    transform = transform_of(operand)
    size = None if transform is None else transform.block_size
    if size is not None and length % size:
        return f"pre_transform turns blocks of {size}, which do not fill"
    if not isinstance(operand, Binding) or not operand.declares("group_size"):
        return ""
    size = operand.resolve("group_size")
    padded = not operand.declares("group_padding") or operand.resolve("group_padding")
    size = size[0] if isinstance(size, tuple) and size[0] == size[-1] else size
    if isinstance(size, int) and not padded and length % size:
        return f"groups of {size} without group_padding do not fill"
    return ""


def check_convolution(scheme: SchemeSpec, where: str) -> None:
    """Refuse a transform: what a convolution sums over, windows, lies along no axis of its operands.

    Args:
        scheme: of the convolution.
        where: the user's callable.

    Raises:
        TypeError: an operand has a transform.
    """
    for name, operand in scheme.quantizers.items():
        if transform_of(operand) is not None:
            raise TypeError(
                f"{where}: {scheme.name}.{name} declares a pre_transform, which goes along the axis that a product "
                "sums over, and a convolution sums over windows.\n  cure: the scheme without it (hadamard=None), or "
                "a rule that leaves convolutions out"
            )


def check_ragged(scheme: SchemeSpec) -> None:
    """Refuse what mixes rows of several experts: tiles, and a transform along rows.

    Args:
        scheme: of the ragged contraction.

    Raises:
        ValueError: there are tiles.
        TypeError: there is a transform.
    """
    if any(scheme[tiles] is not None for tiles in TILES):
        raise ValueError(
            f"the scheme {scheme.name} cuts sums into pieces (tile_size=), and a ragged contraction is not cut.\n"
            "  cure: a rule before it that names the parameter, with a scheme without tile_size"
        )
    if transform_of(scheme["wgrad_lhs"]) is not None:
        raise TypeError(
            f"{scheme.name}.wgrad_lhs declares a pre_transform, which would mix rows of several experts, and each "
            "has a sum of its own.\n  cure: the scheme without it (hadamard=None), or a rule before it that names "
            "the parameter"
        )


def check_random_numbers(scheme: SchemeSpec, rngs: nnx.Rngs | None, where: str, cure: str) -> None:
    """Refuse a scheme that draws random numbers where there are none.

    Args:
        scheme: the scheme.
        rngs: the random numbers.
        where: who asks, for errors.
        cure: how to give them.

    Raises:
        ValueError: an operand is rounded stochastically, or a transform has random signs, without them.
    """
    if rngs is not None:
        return
    for spec in scheme.both:
        drawn = [flag for flag in SIGNS if spec[flag]]
        drawn += [name for name, operand in sampled(spec).items() if operand is not None and operand.draws]
        if drawn:
            raise ValueError(
                f"{where}: {spec.name}.{drawn[-1]} draws random numbers (stochastic rounding), and there are no rngs.\n"
                f"  cure: {cure}, or a scheme that rounds to nearest"
            )


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
    if spec["tile_size"] is not None and operation != CONVOLUTION:
        return "its forward contraction is cut into pieces (tile_size=), which have scales of their own"
    if transform_of(operand) is not None:
        return f"{operand.base.__name__} transforms it, as the contraction sees it"
    role = role_of(operand)
    if role == "operand":
        mode = operand.resolve("dequant_mode")
        return "" if mode == "output" else f"its dequant_mode is {mode!r}, so no payload is contracted"
    if role in PARAMETERS:
        return ""
    return f"{operand.base.__name__} quantizes {role}s, as the contraction sees them"


def rounds_weight_again(scheme: SchemeLike) -> bool:
    """Whether a scheme takes another version of `w` backward than the forward product's."""
    spec = SchemeSpec.of(scheme)
    return not isinstance(spec["dgrad_rhs"], Kept) or not spec["conv_gradients"]


def quantizes_backward(scheme: SchemeLike) -> bool:
    """Whether a scheme says how operands of the backward products are rounded."""
    spec = SchemeSpec.of(scheme)
    again = not all(isinstance(spec[name], Kept) for name in AGAIN)
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
