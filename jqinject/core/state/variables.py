"""The kinds of quantizer state, and how they are made.

| class        | holds                                | who changes it                                    |
|--------------|--------------------------------------|---------------------------------------------------|
| `QuantParam` | learned scale, zero point, bit width | the optimizer; the forward pass once, to fill it  |
| `QuantStat`  | running statistics, step counters    | the forward pass in training mode                 |
| `GradStat`   | amax history and scale of a gradient | `jqinject.value_and_grad`, once per step          |
| `GradSlot`   | zeros; its cotangent carries an amax | nobody; it exists to be differentiated            |
| `Frozen`     | integers or 8-bit floats of a weight | `jqinject.freeze`, a `Freezer` that converts      |

`QuantParam` is an `nnx.Param`: optimizers and `nnx.grad` see it. `QuantStat` is not an `nnx.BatchStat`, so that filters
for batch normalization skip it. Floats are float32, never weakly typed, so that reassembling a quantizer does not
retrace a compiled step. Counters are float32 too, because NNX's tree mode differentiates all that a model holds. They
are exact to 2^24 and stay there: a mean of that many batches is final, and nothing is collected or delayed for longer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.ops.devices.processes import on_host
from jqinject.quant_tensor import is_concrete


class QuantParam(nnx.Param[jax.Array]):
    """A learned quantizer parameter: trained like a weight.

    Example:
        >>> issubclass(QuantParam, nnx.Param)
        True
    """


class _ArrayOrRecord(nnx.Variable[Any]):
    """Abstract: an array, or a dict of arrays (see `jqinject.core.state.record`).

    For a record, `variable["count"]` is a part, `variable[...]` the dict, and `sharding` applies to every part: NNX
    reads it before constructing one for an array.
    """

    def __getitem__(self, index: Any) -> Any:
        held = self.get_raw_value()
        return held if isinstance(held, dict) and index is Ellipsis else super().__getitem__(index)

    def set_raw_value(self, value: Any, **options: Any) -> None:
        """As of an `nnx.Variable`; of a record, `nnx.as_pure` makes an `nnx.State`."""
        super().set_raw_value(dict(value) if isinstance(value, nnx.State) else value, **options)

    @property
    def sharding(self) -> Any:
        """Of the array, or a dict of those of the parts."""
        held = self.get_raw_value()
        if isinstance(held, dict):
            return {name: getattr(part, "sharding", None) for name, part in held.items()}
        return held.sharding


class QuantStat(_ArrayOrRecord):
    """A running statistic or counter of a quantizer: changed by the forward pass in training mode, never
    trained.

    Example:
        >>> issubclass(QuantStat, (nnx.Param, nnx.BatchStat))
        False
    """


class GradStat(_ArrayOrRecord):
    """A statistic of a gradient: changed once per step by `jqinject.value_and_grad`, never by a forward pass.

    Example:
        >>> issubclass(GradStat, (nnx.Param, QuantStat))
        False
    """


class GradSlot(nnx.Variable[jax.Array]):
    """Where a backward pass reports: the cotangent of this Variable.

    Its value is always zero and need not be stored.
    """


class Frozen(nnx.Variable[Any]):
    """The low-bit numbers of a weight, their scale or zero point: served, never trained.

    Example:
        >>> issubclass(Frozen, (nnx.Param, QuantStat))
        False
    """


def float_array(value: Any, shape: tuple[int, ...] = ()) -> jax.Array:
    """A float32 array filled with a number: one transfer, no compilation.

    Example:
        >>> float_array(1.0, (2,))
        Array([1., 1.], dtype=float32)
    """
    return jnp.asarray(np.full(shape, value, dtype=np.float32))


def all_counted(counter: Any) -> bool:
    """Whether a counter (of every layer of a stack) is above 0; True if traced or abstract."""
    return not has_numbers(counter) or bool(np.all(on_host(counter) > 0))


def has_numbers(array: Any) -> bool:
    """Whether an array can be read: neither traced nor abstract."""
    return isinstance(array, jax.Array | np.ndarray) and is_concrete(array)
