"""The tensors a weight statistic is taken of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core._protocols import Stat, View
from jqinject.core.state.variables import QuantStat
from jqinject.core.stats.in_place import in_place
from jqinject.core.stats.layout import statistic_and_input
from jqinject.core.stats.search import SearchedStat


def track(
    tracked_parameter_list: Iterable[Any], force_parameter: bool, where: str
) -> nnx.List[nnx.Variable[Any]] | None:
    """The Variables to keep, or None where the tensor given at the call is used.

    One tracked parameter is not kept: its value comes with every call, and a second reference to a layer's
    kernel inside its quantizer would tie the two. Several are kept as the layers' own Variables, so that the
    gradient of a common scale reaches every layer that shares it.

    Args:
        tracked_parameter_list: `nnx.Variable`s, or arrays when built by hand (kept without gradient).
        force_parameter: keep even a single one, and use it when called without a tensor.
        where: name of the component, for errors.

    Raises:
        ValueError: when `force_parameter` has nothing to keep.
    """
    tracked = list(tracked_parameter_list)
    if force_parameter and not tracked:
        raise ValueError(
            f"{where}: force_parameter=True needs a parameter in tracked_parameter_list, got none."
        )
    if len(tracked) < 2 and not force_parameter:
        return None
    return nnx.List([p if isinstance(p, nnx.Variable) else QuantStat(jnp.asarray(p)) for p in tracked])


def tracked_statistic(
    x: jax.Array | None,
    tracked: nnx.List[nnx.Variable[Any]] | None,
    stat: Stat,
    view: View,
    concat_dim: int,
    where: str,
) -> jax.Array:
    """The statistic of the viewed tensor: of `x`, or of all tracked parameters side by side.

    Raises:
        TypeError: when there is neither.
        ValueError: when the views do not fit together.
    """
    if tracked is None or (len(tracked) == 1 and x is not None):
        if x is None:
            raise TypeError(
                f"{where} needs a tensor: call it with the weight, or build it with force_parameter=True."
            )
        stat, viewed = statistic_and_input(stat, view, x.astype(jnp.float32))
        return stat(viewed)
    if isinstance(stat, SearchedStat):
        return stat.of([variable.get_value().astype(jnp.float32) for variable in reversed(tracked)])
    tensors = tuple(variable.get_value().astype(jnp.float32) for variable in reversed(tracked))
    views = [jax.eval_shape(view, tensor) for tensor in tensors]
    if len({v.shape[:concat_dim] + v.shape[concat_dim:][1:] for v in views}) > 1:
        shapes = [tuple(variable.get_value().shape) for variable in tracked]
        raise ValueError(
            f"{where}: parameters of shapes {shapes} share one quantizer, but their views "
            f"{[v.shape for v in reversed(views)]} cannot be joined along axis {concat_dim}. Layers "
            "that share a scale "
            "per channel need the same number of output channels; use a scale per tensor, or two quantizers."
        )
    stat, viewed = in_place(stat, view, tensors, concat_dim)
    return stat(viewed)
