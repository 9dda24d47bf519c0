"""A layer whose contraction follows a scheme: `QuantLinear(..., scheme=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jqinject.dot import QDotGeneral


def contraction_of(
    scheme: Any, layer: str, dot_general: Any, quantizers: Mapping[str, Any], rngs: nnx.Rngs
) -> QDotGeneral:
    """The contraction of a layer that a scheme quantizes.

    Args:
        scheme: a `jqinject.dot.Scheme`.
        layer: the layer's class, for errors.
        dot_general: what was given as `dot_general=`.
        quantizers: what was given for quantizers of operands.
        rngs: for quantizers that draw random numbers.

    Raises:
        ValueError: another contraction was given too, or a quantizer of an operand.
        TypeError: it is not a scheme.
    """
    given = [name for name, quantizer in quantizers.items() if quantizer is not None]
    if dot_general is not jax.lax.dot_general:
        given.append("dot_general")
    if given:
        raise ValueError(
            f"{layer}(scheme=...) quantizes weights, inputs and gradients by itself, got {given[0]} too.\n"
            f"  cure: leave {given[0]} out, or declare it in the scheme: scheme.let(fprop_lhs=..., fprop_rhs=...)"
        )
    return QDotGeneral(scheme, rngs=rngs)
