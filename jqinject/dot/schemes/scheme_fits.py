"""Whether a scheme fits a layer: asked when it is made, before anything is changed."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jqinject.dot.schemes.product_transforms import SIGNS, transform_of
from jqinject.dot.schemes.quant_operand import assembled_for_any
from jqinject.dot.schemes.scheme import PRODUCTS, SchemeSpec
from jqinject.inject import Binding

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
        for names, length, what in zip(PRODUCTS, (inputs, outputs), SUMS, strict=False):
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


def _misfit(operand: Any, length: int) -> str:
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
        drawn = [flag for flag in SIGNS if flag in spec.flags]
        quantizers = {n: assembled_for_any(n, x) for n, x in spec.operands if isinstance(x, Binding)}
        drawn += [name for name, operand in quantizers.items() if operand is not None and operand.draws]
        if drawn:
            raise ValueError(
                f"{where}: {spec.name}.{drawn[-1]} draws random numbers (stochastic rounding), and there are no rngs.\n"
                f"  cure: {cure}, or a scheme that rounds to nearest"
            )
