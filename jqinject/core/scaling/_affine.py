"""A learned affine map of a statistic, before it is restricted."""

from __future__ import annotations

import jax
from flax import nnx

from jqinject.core.state.variables import QuantParam, float_array


class AffineRescaling(nnx.Module):
    """`weight * x + bias`, both learned; without `bias` when no initial value is given.

    Args:
        shape: shape of the parameters.
        weight_init: initial `affine_weight`.
        bias_init: initial `affine_bias`, or None for none.
    """

    affine_bias: QuantParam | None = None

    def __init__(self, shape: tuple[int, ...], weight_init: float, bias_init: float | None = None) -> None:
        self.affine_weight = QuantParam(float_array(weight_init, shape))
        if bias_init is not None:
            self.affine_bias = QuantParam(float_array(bias_init, shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        """The mapped statistic."""
        y = x * self.affine_weight.get_value()
        return y if self.affine_bias is None else y + self.affine_bias.get_value()


def affine_rescaling(
    shape: tuple[int, ...], weight_init: float | None, bias_init: float | None, where: str, what: str
) -> AffineRescaling | None:
    """The affine map that the initial values ask for, or None.

    Raises:
        ValueError: when only the shift is given.
    """
    if weight_init is not None:
        return AffineRescaling(shape, weight_init, bias_init)
    if bias_init is not None:
        raise ValueError(
            f"{where}: {what}_affine_shifting_init={bias_init} needs a factor as well: give "
            f"{what}_affine_rescaling_init=1.0."
        )
    return None
