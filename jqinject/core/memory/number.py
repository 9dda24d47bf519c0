"""The numbers that memories return, the domain in which they are learned, and affine maps of statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import check
from jqinject.core.component import InnerModule
from jqinject.core.state import QuantParam, QuantStat, float_array


class Number(NamedTuple):
    """What a memory returns.

    Attributes:
        statistic: a statistic; None if there is none.
        stored: a number in the domain in which it is learned; None if there is none.
        collecting: a bool scalar, if there are both: whether the statistic is used.
    """

    statistic: Any = None
    stored: Any = None
    collecting: Any = None


@dataclass(frozen=True)
class _Distance:
    """Distances in floats, learned directly: zero points. See `ScaleRule`."""

    least = None
    stores_statistic = True

    def clamped(self, stat: jax.Array) -> jax.Array:
        """The statistic itself."""
        return stat

    to_stored = from_stored = clamped


DISTANCE = _Distance()


class AffineRescaling(InnerModule):
    """`weight * x + bias`, both learned; without `bias` unless it has an initial value.

    Args:
        shape: shape of the parameters.
        weight_init: initial `affine_weight`.
        bias_init: initial `affine_bias`, or None if absent.
    """

    affine_bias: QuantParam | None = None

    def __init__(self, shape: tuple[int, ...], weight_init: float, bias_init: float | None = None) -> None:
        self.affine_weight = QuantParam(float_array(weight_init, shape))
        if bias_init is not None:
            self.affine_bias = QuantParam(float_array(bias_init, shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        """The mapped number."""
        y = x * self.affine_weight.get_value()
        return y if self.affine_bias is None else y + self.affine_bias.get_value()


def initial_number(init: Any, shape: Any, where: str, names: tuple[str, str]) -> Any:
    """An initial value of a given shape, float32: a NumPy array, or a traced one while its layer is traced.

    Args:
        init: a number or an array.
        shape: None for its own.
        where, names: for errors: the component, and the names of value and shape.

    Raises:
        ValueError: the shapes disagree, or the value is not finite.
    """
    traced, sizes = isinstance(init, jax.core.Tracer), check.optional(check.shape)(shape, where, names[1])
    value = init.astype(jnp.float32) if traced else np.array(init, dtype=np.float32)
    if not (traced or np.all(np.isfinite(value))):
        raise ValueError(f"{where}: {names[0]} must be finite, got {init!r}.")
    if sizes is None or value.shape == sizes:
        return value
    if value.shape != ():
        raise ValueError(
            f"{where}: {names[0]} has shape {value.shape}, {names[1]} is {sizes}. Give a number, or an array of "
            f"exactly that shape: {names[0]}.reshape({sizes})."
        )
    return (jnp if traced else np).full(sizes, value)


def _kept(tracked: list[Any], force_parameter: bool, where: str) -> nnx.List[nnx.Variable[Any]] | None:
    if force_parameter and not tracked:
        raise ValueError(
            f"{where}: force_parameter=True needs a parameter in tracked_parameter_list, got none."
        )
    if len(tracked) < 2 and not force_parameter:
        return None
    return nnx.List([p if isinstance(p, nnx.Variable) else QuantStat(jnp.asarray(p)) for p in tracked])


Broadcastable = Callable[[jax.Array, tuple[int, ...]], jax.Array]
