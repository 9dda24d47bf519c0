"""The largest magnitudes of the last steps."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core.construction import check
from jqinject.core.construction.assign import assign
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.state.record import RecordPart
from jqinject.core.state.variables import GradStat, QuantStat, float_array, has_numbers
from jqinject.ops.devices.processes import on_host

AMAX_COMPUTE_ALGOS = ("max", "most_recent")


@checked_arguments
class AmaxHistory(Component):
    """The amax (`max |x|`) of each of the last `amax_history_length` steps.

    Element 0 is the newest, then come the last element and so on backwards to the oldest, element 1. (Flax's layout:
    roll by -1, then write element 0.)

    Delayed scaling takes a step's scale from it, so the scale is known before the tensor. A step of zeros enters as 0.
    An inf or nan amax leaves the history unchanged, unless it `keeps_infinite`.

    State: `amax_history`, float32, `(amax_history_length, *amax_shape)`, zeros at first; a `QuantStat`, or a `GradStat`
    for a gradient's.

    Args:
        amax_history_length: the steps remembered.
        amax_compute_algo: what `amax()` returns: the "max" of the history, or the "most_recent".
        amax_shape: shape of one amax: `()` per tensor, the scale's shape per channel.
        amax_of_gradient: whether it is for a gradient.
        keeps_infinite: let inf and nan in, as TransformerEngine does: the scale then stays as it is until the step is
            forgotten.

    Raises:
        TypeError: `amax_history_length` is not an integer.
        ValueError: it is below 1, or `amax_compute_algo` is neither of the two.

    Source: Flax's `fp8_ops`; the names are TransformerEngine's and Flax's. Differs from both: an inf or nan stays out.

    Example:
        >>> history = AmaxHistory(amax_history_length=3)
        >>> for amax in (5.0, float("inf"), 2.0):
        ...     history.push(jnp.float32(amax))
        >>> history.amax_history.get_value(), history.amax(), history.newest
        (Array([2., 0., 5.], dtype=float32), Array(5., dtype=float32), Array(2., dtype=float32))
    """

    amax_history: Any
    amax_shape: tuple[int, ...]
    amax_compute_algo: str = "max"
    keeps_infinite: bool = False

    def __init__(
        self,
        amax_history_length: int = 1024,
        amax_compute_algo: str = "max",
        amax_shape: tuple[int, ...] = (),
        amax_of_gradient: bool = False,
        keeps_infinite: bool = False,
    ) -> None:
        length = _history_length(amax_history_length)
        algo = str(amax_compute_algo).lower()
        if algo not in AMAX_COMPUTE_ALGOS:
            raise ValueError(
                f"AmaxHistory: amax_compute_algo must be one of {', '.join(map(repr, AMAX_COMPUTE_ALGOS))}, "
                f"got {amax_compute_algo!r}"
            )
        shape = check.shape(amax_shape, "AmaxHistory", "amax_shape")
        kind = GradStat if amax_of_gradient else QuantStat
        assign(self, amax_history=kind(float_array(0.0, (length, *shape))), amax_shape=shape)
        if algo != self.amax_compute_algo:
            assign(self, amax_compute_algo=algo)
        if keeps_infinite:
            assign(self, keeps_infinite=True)

    def over(self, part: RecordPart | None) -> AmaxHistory:
        """This history with its steps in another component's record; None for its static part alone."""
        held: dict[str, Any] = {"amax_shape": self.amax_shape, "amax_compute_algo": self.amax_compute_algo}
        held |= {"keeps_infinite": True} if self.keeps_infinite else {}
        return AmaxHistory.of_parts(amax_history=part, **held)

    # A stack of layers (built under `nnx.vmap`) has further axes in front, so axes are counted from the back.

    @property
    def _step_axis(self) -> int:
        return -1 - len(self.amax_shape)

    @property
    def newest(self) -> jax.Array:
        """The amax of the last step, float32, `amax_shape`."""
        return jax.lax.index_in_dim(self.amax_history.get_value(), 0, self._step_axis, keepdims=False)

    def amax(self) -> jax.Array:
        """The amax for the scale, float32; 0 before the first step."""
        if self.amax_compute_algo == "most_recent":
            return self.newest
        return jnp.max(self.amax_history.get_value(), axis=self._step_axis)

    @property
    def has_amax(self) -> bool:
        """Whether a positive amax is remembered (by every layer of a stack); True if unknown."""
        held = self.amax_history.get_value()
        if not has_numbers(held):
            return True
        steps = tuple(range(held.ndim + self._step_axis, held.ndim))
        return bool(np.all(np.any(on_host(held) > 0, axis=steps)))

    def clear(self) -> None:
        """Forget all steps."""
        self.amax_history.set_value(jnp.zeros_like(self.amax_history.get_value()))

    def push(self, amax: jax.Array, happened: Any = True) -> None:
        """End a step: this amax replaces the oldest.

        Args:
            amax: the step's amax, of `amax_shape`; per channel, the channels enter together or not at all.
            happened: whether there was such a step; a bool, or one per layer of a stack.
        """
        held = self.amax_history.get_value()
        amax = jnp.asarray(amax).astype(jnp.float32)
        axis = held.ndim + self._step_axis
        channels = tuple(range(axis, amax.ndim))
        finite = jnp.ones_like(amax, bool) if self.keeps_infinite else jax.lax.is_finite(amax)
        enters = jnp.all(finite, axis=channels) if channels else finite
        enters = enters if happened is True else jnp.logical_and(happened, enters)
        # Roll by -1, then overwrite the first.
        length = held.shape[axis]
        kept = [(start, stop) for start, stop in ((2, length), (0, 1)) if start < stop and length > 1]
        older = [jax.lax.slice_in_dim(held, start, stop, axis=axis) for start, stop in kept]
        rolled = jax.lax.concatenate([jnp.expand_dims(amax, axis), *older], axis)
        if enters.ndim:  # a stack of layers
            enters = jnp.broadcast_to(
                enters.reshape(*enters.shape, *(1,) * (held.ndim - enters.ndim)), held.shape
            )
        self.amax_history.set_value(jax.lax.select(enters, rolled, held))


def _history_length(length: Any) -> int:
    try:
        steps = operator.index(length)
    except TypeError:
        raise TypeError(f"AmaxHistory: amax_history_length must be an int, got {length!r}") from None
    if isinstance(length, bool) or steps < 1:
        raise ValueError(
            f"AmaxHistory: amax_history_length must be at least 1, got {length!r}. For a scale from the tensor itself, "
            "without a history, use CurrentScaling (the ...Current quantizers)."
        )
    return steps
