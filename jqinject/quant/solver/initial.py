"""Where a constant or learned scale starts."""

import math
from collections.abc import Sequence
from typing import Any, final

from jqinject.quant.solver.layers import as_tuple


@final
class ScalingConstInit:
    """The declared `scaling_const`.

    Example:
        >>> ScalingConstInit(0.1)()
        0.1
    """

    def __init__(self, scaling_const: Any) -> None:
        self.scaling_const = scaling_const

    def __call__(self) -> Any:
        """The start value."""
        return self.scaling_const


@final
class MinMaxScalingInit:
    """max(|min_val|, |max_val|).

    Args:
        min_val: the least value to represent.
        max_val: the greatest value to represent.

    Raises:
        ValueError: nothing lies between the two.

    Example:
        >>> MinMaxScalingInit(min_val=-2.0, max_val=1.5)()
        2.0
    """

    def __init__(self, min_val: float, max_val: float) -> None:
        if not float(min_val) < float(max_val):
            raise ValueError(
                f"min_val has to be below max_val, got min_val = {min_val} and max_val = {max_val}"
            )
        self.scaling_init = max(abs(float(min_val)), abs(float(max_val)))

    def __call__(self) -> float:
        """The start value."""
        return self.scaling_init


@final
class HeScalingInit:
    """The mean over the tracked weights of sqrt(2 / fan_in).

    fan_in is the number of weights behind one output channel (He et al., 2015, "Delving deep into rectifiers").

    differs from Brevitas: there, axis 0 counts as the output channels of every weight, which for transposed
    convolutions (in, out, ...) is the input's.

    Args:
        tracked_parameter_list: weights (Variables or arrays).
        output_channel_dim: their output channel axis, or axes.

    Example:
        >>> import jax.numpy as jnp
        >>> HeScalingInit([jnp.zeros((8, 3))], output_channel_dim=1)()
        0.5
    """

    def __init__(
        self, tracked_parameter_list: Sequence[Any], output_channel_dim: int | tuple[int, ...] = 0
    ) -> None:
        fans = [
            math.prod(weight.shape)
            // max(math.prod(weight.shape[axis] for axis in as_tuple(output_channel_dim)), 1)
            for weight in tracked_parameter_list
        ]
        self.scaling_init = sum(math.sqrt(2.0 / max(fan, 1)) for fan in fans) / len(fans)

    def __call__(self) -> float:
        """The start value."""
        return self.scaling_init
