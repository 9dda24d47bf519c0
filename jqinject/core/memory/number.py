"""The numbers that memories return, the domain in which they are learned, and affine maps of statistics.

Arguments of ready-made memories are checked here too.
"""

from __future__ import annotations

import re
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
from jqinject.ops.groups import block_of


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


CHECKS: dict[str, check.Check] = {
    **dict.fromkeys(("scaling_shape", "zero_point_shape"), check.integers),
    **dict.fromkeys(("force_parameter", "quantize_zero_point", "shared_per_row"), check.flag),
    **{f"{of}_stats_input_concat_dim": check.integer for of in ("scaling", "zero_point")},
    "group_dim": check.integer,
    "group_size": lambda size, where, name: block_of(size, where)[0],
    "scaling_gradient_scale": lambda value, where, name: check.positive(
        check.number(value, where, name), where, name
    ),
    "collect_stats_steps": check.between(-float("inf"), check.MOST_STEPS, check.integer),
}
NUMBERS = re.compile(r"(scaling|zero_point)_(affine_.*_init|min_val|stats_momentum)|collected_.*")


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


def taken(memory: Any) -> dict[str, Any]:
    """Take a constructor's arguments out of the attributes that its dataclass has set, and check them.

    Args:
        memory: under construction.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: a number is not finite or out of range.
    """
    arguments, where = dict(vars(memory)), type(memory).__name__
    vars(memory).clear()
    defaults = type(memory)._defaults
    for name, value in arguments.items():
        if value is None and defaults.get(name, 0) is None:
            continue
        if name.endswith("_impl"):
            check.component(value, where, name)
        elif name in CHECKS:
            arguments[name] = CHECKS[name](value, where, name)
        elif value is not None and NUMBERS.fullmatch(name):
            check.number(value, where, name)
    return arguments


Broadcastable = Callable[[jax.Array, tuple[int, ...]], jax.Array]
