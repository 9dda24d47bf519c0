"""The kinds of state a quantizer has, and how they are made.

| class        | holds                                | who changes it                                    |
|--------------|--------------------------------------|---------------------------------------------------|
| `QuantParam` | learned scale, zero point, bit width | the optimizer; the forward pass once, to fill it  |
| `QuantStat`  | running statistics, step counters    | the forward pass in training mode                 |

`QuantParam` is an `nnx.Param`: optimizers and `nnx.grad` see it. `QuantStat` is not an `nnx.BatchStat`, so
that filters meant for batch normalization leave it alone. Floats are float32 and counters int32, never weakly
typed, so that a quantizer that was assembled again does not retrace a compiled step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class QuantParam(nnx.Param[jax.Array]):
    """A learned quantizer parameter: trained like a weight.

    Example:
        >>> issubclass(QuantParam, nnx.Param)
        True
    """


class QuantStat(nnx.Variable[jax.Array]):
    """A running statistic or counter of a quantizer: changed by the forward pass in training mode, never
    trained.

    Example:
        >>> issubclass(QuantStat, (nnx.Param, nnx.BatchStat))
        False
    """


def float_array(value: Any, shape: tuple[int, ...] = ()) -> jax.Array:
    """A float32 array filled with a number: one transfer, no compiled operation.

    Example:
        >>> float_array(1.0, (2,))
        Array([1., 1.], dtype=float32)
    """
    return jnp.asarray(np.full(shape, value, dtype=np.float32))


def int_array(value: int) -> jax.Array:
    """An int32 scalar.

    Example:
        >>> int_array(3)
        Array(3, dtype=int32)
    """
    return jnp.asarray(np.array(value, dtype=np.int32))
