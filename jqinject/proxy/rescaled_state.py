"""What a quantizer learned, once the channels of its tensor are multiplied by constants."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core.facts import groups_of
from jqinject.core.state.record import RecordPart
from jqinject.proxy.assembly import borrowed_paths, variables_of, walk

RescaledState: TypeAlias = list[tuple[nnx.Variable[Any] | RecordPart, jax.Array]]


class ChannelFactors:
    """The factors of a tensor's channels; see `jqinject.core.facts.Factors`.

    Args:
        factors: broadcast to the tensor.
        groups: size and axis of the tensor's groups; None without groups.
    """

    def __init__(self, factors: np.ndarray, groups: tuple[int, int] | None) -> None:
        if groups is not None:
            factors = np.expand_dims(factors, groups[1] % factors.ndim + 1)
        self.factors = factors

    def times(self, x: jax.Array) -> jax.Array:
        """Multiply numbers, one per channel, by the magnitudes; a channel of zeros keeps its number."""
        factors = np.where(self.factors == 0, 1, np.abs(self.factors)).astype(np.float32)
        if np.ptp(factors) == 0:
            return x * factors.flat[0]
        if x.ndim != factors.ndim or np.broadcast_shapes(x.shape, factors.shape) != x.shape:
            raise ValueError(f"its numbers, of shape {x.shape}, are not one per channel")
        return x * factors

    def check_signs(self) -> None:
        """Raise if a factor is negative."""
        if np.any(self.factors < 0):
            raise ValueError(
                "a channel is multiplied by a negative number, which mirrors the range of a zero point"
            )


def rescaled_state(
    quantizer: Any, fresh: Any, layers: tuple[Any, ...], factors: np.ndarray | None
) -> RescaledState:
    """Return the learned Variables of a quantizer after the channels of its tensor are multiplied.

    Args:
        quantizer: in use.
        fresh: assembled from the same tensor: what differs from it was learned.
        layers: of the quantizer.
        factors: broadcast to the tensor; None if nothing that is learned can follow.

    Raises:
        ValueError: a component learned something that cannot follow; the text begins with its path.
    """
    if not isinstance(quantizer, nnx.Module):
        return []
    channels = None if factors is None else ChannelFactors(factors, groups_of(quantizer))
    borrowed, untrained = borrowed_paths(quantizer, layers), variables_of(fresh)
    variables = {path: v for path, v in variables_of(quantizer).items() if path not in borrowed}
    learned = {path[:-1] for path, v in variables.items() if not _is_equal(v, untrained.get(path))}
    state: RescaledState = []
    for path in sorted(learned, key=str):
        try:
            changes = _changes(walk(quantizer, path), channels)
        except ValueError as error:
            raise ValueError(
                f"{'.'.join(('tensor_quant', *map(str, path)))}: what it learned or collected cannot follow the "
                f"weight: {error}.\n  cure: fold the batch norm before training and calibration, or take one scale per "
                "output channel; jqinject.reassemble(model) discards what quantizers learned"
            ) from None
        own = ((below[-1], v) for below, v in variables.items() if below[:-1] == path)
        state += [(v, changes.get(name, v.get_value())) for name, v in own]
    return state


def _changes(component: Any, channels: ChannelFactors | None) -> dict[str, jax.Array]:
    """The Variables of a component that change, by name."""
    if getattr(component, "is_scale_free", False):
        return {}
    if channels is None:
        raise ValueError("its tensor is not only multiplied, or several layers share it")
    rescaled = getattr(component, "rescaled", None)
    if rescaled is None:
        raise ValueError(f"{type(component).__name__} does not know how")
    return rescaled(channels)


def _is_equal(variable: Any, other: Any) -> bool:
    if other is None:
        return False
    if isinstance(other, nnx.RngState):
        return True
    return bool(jnp.array_equal(variable.get_value(), other.get_value(), equal_nan=True))
