"""Scales from histories of largest magnitudes.

The largest magnitudes of the last steps.

Scales from the largest magnitude: of earlier steps (delayed scaling), or of the tensor itself (current scaling).
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import check
from jqinject.core._protocols import Stat, View
from jqinject.core.checked_arguments import checked_arguments
from jqinject.core.component import Component, InnerModule, assign, set_view
from jqinject.core.state import GradSlot, GradStat, Part, QuantStat, RecordPart, float_array, has_numbers
from jqinject.core.statistics.extremes import AbsMax
from jqinject.core.statistics.statistic import TwoPhaseStat, in_place
from jqinject.core.views import OverTensorView
from jqinject.ops.clamp import known_zeros
from jqinject.ops.observe import AMAX, SCALE, SEEN, SLOT_SIZE, fork, gathered, over_axis, report
from jqinject.ops.processes import on_host
from jqinject.ops.sharding import sharded_as
from jqinject.quant_tensor import is_concrete

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


_TINY = float(jnp.finfo(jnp.float32).tiny)


@dataclass(frozen=True)
class AmaxRule:
    """From a tensor to an amax, and from an amax to a scale: static, compared by value.

    Attributes:
        stats: the magnitude, a stateless component.
        view: its view.
        shape: shape of amax and scale.
        margin: multiplies the scale by `2 ** margin`.
        least: the minimum of the amax.
    """

    stats: Stat
    view: View
    shape: tuple[int, ...]
    margin: float
    least: float = 0.0

    def amax(self, x: jax.Array) -> jax.Array:
        """The magnitude of `x`, float32, in the scale's shape.

        Args:
            x: a tensor without gradient (`stop_gradient`).
        """
        if x.size == 0:
            return jnp.zeros(self.shape, jnp.float32)
        stat, viewed = in_place(self.stats, self.view, jnp.asarray(x).astype(jnp.float32))
        amax = stat.detached(viewed) if isinstance(stat, TwoPhaseStat) else stat(viewed)
        amax = jnp.maximum(amax, self.least) if self.least else amax
        return check.statistic_shape(amax, self.shape, "amax")

    def scale(self, amax: jax.Array, held: jax.Array, threshold: Any) -> jax.Array:
        """`amax * 2 ** margin / threshold`, or `held` if that is not positive and finite.

        Rounded as `1 / (threshold / amax)`, as in Flax and TransformerEngine: with another last bit of the scale, a
        number halfway between two of the format's would be rounded to the other one.
        """
        amax = amax * (2.0**self.margin) if self.margin else amax
        if isinstance(threshold, float) and threshold == 1.0:
            usable, scale = jax.lax.bitwise_and(amax >= _TINY, amax < jnp.inf), amax
        else:
            inverse = threshold / amax
            usable = jax.lax.bitwise_and(inverse >= _TINY, inverse <= 1 / _TINY)
            # The choice keeps compilers from making one division of the two.
            scale = jax.lax.integer_pow(jax.lax.select(usable, inverse, amax), -1)
        return jax.lax.select(usable, scale, sharded_as(jnp.broadcast_to(held, scale.shape), scale))


@checked_arguments
class AmaxScaling(InnerModule):
    """Abstract: a scale from amaxes, and the record of them.

    Outside a step, every call in training mode is a step and enters the history. Within one (`jqinject.value_and_grad`,
    or `jqinject.begin_step` to `jqinject.end_step`), calls only note the largest amax, which enters once at its end.

    Args:
        amax_history: the record; None keeps one step.
        scaling_stats_impl: the magnitude; None means `AbsMax()`.
        scaling_stats_input_view_shape_impl: its view; None means `OverTensorView()`.
        scaling_shape: shape of the scale; `()` for one scale.
        margin: multiplies the scale by `2 ** margin`: headroom before saturation.
        scaling_init: the scale before the first step.
        amax_of_gradient: whether it scales gradients, with `GradStat`s as state.
        axis_name: a named axis (of `shard_map` or `vmap`) that the tensor is spread over; the amax is the maximum.
        scaling_min_val: the minimum of the amax; None for none.

    Attributes:
        record: one Variable with all of the following.
        amax_history: the `AmaxHistory`.
        scale: the scale of the last step, float32, of `scaling_shape`.
        pending: the step so far; along the last axis: amax, 1 if there was one, scale.
        slot: where a backward pass reports; gradients only.
        in_step: whether a step is under way.
    """

    record: QuantStat | GradStat
    scale, pending = Part(), Part()
    slot: GradSlot | None = None
    axis_name: Any = None

    def __init__(
        self,
        amax_history: AmaxHistory | None = None,
        scaling_stats_impl: Stat | None = None,
        scaling_stats_input_view_shape_impl: View | None = None,
        scaling_shape: tuple[int, ...] = (),
        margin: float = 0,
        scaling_init: float = 1.0,
        amax_of_gradient: bool = False,
        axis_name: Any = None,
        scaling_min_val: float | None = None,
    ) -> None:
        where = type(self).__name__
        shape = check.shape(scaling_shape, where, "scaling_shape")
        if not math.isfinite(margin):
            raise ValueError(f"{where}: margin must be finite, got {margin!r}")
        if not (math.isfinite(scaling_init) and scaling_init > 0):
            raise ValueError(f"{where}: scaling_init must be positive and finite, got {scaling_init!r}")
        history = amax_history or AmaxHistory(1, "max", shape, amax_of_gradient)
        steps = history.amax_history.get_value()
        if steps.shape[1:] != shape:
            raise ValueError(
                f"{where}: scaling_shape is {shape}, and the AmaxHistory has amax_shape {steps.shape[1:]}; give both "
                "the same"
            )
        self.history = history.over(None)
        self.rule = AmaxRule(
            scaling_stats_impl or AbsMax(),
            scaling_stats_input_view_shape_impl or OverTensorView(),
            shape,
            float(margin),
            check.minimum(scaling_min_val, where, "scaling_min_val") or 0.0,
        )
        kind = GradStat if amax_of_gradient else QuantStat
        self.record = kind(
            {
                "amax_history": steps,
                "pending": float_array(0.0, (*shape, SLOT_SIZE)),
                "scale": float_array(scaling_init, shape),
            }
        )
        if amax_of_gradient:
            self.slot = GradSlot(float_array(0.0, (*shape, SLOT_SIZE)))
        if axis_name is not None:
            self.axis_name = axis_name
        self.in_step = False
        self.use_running_average = False

    @property
    def amax_history(self) -> AmaxHistory:
        """The amaxes of the last steps."""
        return self.history.over(RecordPart(self.record, "amax_history"))

    @property
    @abstractmethod
    def from_history(self) -> bool:
        """Whether the scale is known before the tensor is."""

    def known_scale(self, threshold: Any) -> jax.Array:
        """The scale known before the tensor, used for a tensor without a usable amax."""
        held = self.scale.get_value()
        return self.rule.scale(self.amax_history.amax(), held, threshold) if self.from_history else held

    def __call__(self, x: jax.Array, threshold: Any = 1.0) -> jax.Array:
        """The scale, float32, without a gradient for `x`; records the amax in training mode.

        Args:
            x: the tensor; an empty one is not recorded.
            threshold: the largest value of a scaled element.
        """
        known = self.known_scale(threshold)
        recorded = not self.use_running_average and x.size > 0
        if self.from_history and not recorded:
            return known
        held = jax.lax.stop_gradient(self.scale.get_value())
        measured = sharded_as(self.rule.amax(jax.lax.stop_gradient(x)), held)
        amax = gathered(over_axis(measured, self.axis_name, held), held)
        scale = known if self.from_history else self.rule.scale(amax, known, threshold)
        if recorded and self.in_step:
            self.collect(report(amax, scale))
        elif recorded:
            self._enter(amax, scale)
        return scale

    # --- calibration

    def has_range(self) -> bool | None:
        """Whether there is an amax for the scale; None if it comes from the tensor. See `StaticRange`."""
        return self.amax_history.has_amax if self.from_history else None

    def begin_calibration(self) -> None:
        """Clear the record; every call is a step."""
        self.amax_history.clear()
        self.in_step = self.use_running_average = False

    def end_calibration(self) -> None:
        """No effect: the scale comes from the history."""

    # --- steps

    def begin_step(self) -> None:
        """Start collecting; discard an unfinished step."""
        self.in_step = True
        self.pending.set_value(known_zeros(self.pending.get_value()))

    def collect(self, seen: jax.Array) -> None:
        """Record (amax, 1, scale) of a call or a backward pass, keeping the maximum."""
        held = self.pending.get_value()
        # The first in a program knows that nothing was seen before; outside a program, do not wait for the device.
        first = is_concrete(held) and not is_concrete(seen) and not on_host(held).any()
        self.pending.set_value(seen if first else jnp.maximum(held, seen))

    def end_step(self) -> None:
        """Commit the step to the history, if it recorded anything."""
        seen = self.pending.get_value()
        self.pending.set_value(known_zeros(seen))
        self.in_step = False
        if not self.use_running_average:
            parts = [part.squeeze(-1) for part in jax.lax.split(seen, (1,) * SLOT_SIZE, seen.ndim - 1)]
            self._enter(parts[AMAX], parts[SCALE], parts[SEEN] > 0)

    def abandon_step(self) -> None:
        """Discard a failed step."""
        self.in_step = False

    def _enter(self, amax: jax.Array, scale: jax.Array, counted: jax.Array | None = None) -> None:
        """Enter a step's amax and scale, where `counted`."""
        if counted is None:
            self.scale.set_value(jnp.broadcast_to(scale, amax.shape))
            self.amax_history.push(amax)
            return
        self.scale.set_value(jax.lax.select(counted, scale, self.scale.get_value()))
        channels = tuple(range(amax.ndim - len(self.rule.shape), amax.ndim))
        self.amax_history.push(amax, jnp.all(counted, axis=channels) if channels else counted)

    def claim_slot(self) -> jax.Array:
        """The slot for one use of a gradient quantizer."""
        assert self.slot is not None, "only gradients have a slot"
        slot = self.slot.get_value()
        if slot.dtype == jnp.float32:  # nobody listens: the backward pass, if there is one, tells
            return slot
        mine, rest = fork(slot)
        self.slot.set_value(rest)
        return mine

    set_view = set_view


@final
class DelayedScaling(AmaxScaling):
    """The scale from the amaxes of earlier steps: `s = amax_history.amax() * 2 ** margin / threshold`.

    It is known before the tensor, so quantization needs no extra pass over the tensor. Until the history holds a
    positive amax, the scale stays unchanged, initially `scaling_init`. `threshold` is the largest number of the payload
    dtype (448 for `float8_e4m3fn`), passed to the call.

    Arguments: see `AmaxScaling`.

    Raises:
        ValueError: `margin` is not finite, `scaling_init` is not positive, or the shapes of scale and history differ.

    Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; Flax's `fp8_ops`.

    Example:
        >>> scaling = DelayedScaling(AmaxHistory(amax_history_length=2))
        >>> [float(scaling(jnp.array([amax]), 448.0)) for amax in (448.0, 896.0, 448.0, 448.0, 448.0)]
        [1.0, 1.0, 2.0, 2.0, 1.0]
    """

    @property
    def from_history(self) -> bool:
        """Whether the scale is known before the tensor is."""
        return True


@final
class CurrentScaling(AmaxScaling):
    """The scale from the tensor itself: `s = amax * 2 ** margin / threshold`, `amax = max |x|`.

    Amaxes are recorded for inspection only. A tensor of zeros, or with inf or nan, gets the last step's scale,
    initially `scaling_init`.

    Arguments: see `AmaxScaling`.

    Raises:
        ValueError: see `DelayedScaling`.

    Example:
        >>> scaling = CurrentScaling()
        >>> float(scaling(jnp.array([5.0, -896.0]), 448.0)), float(scaling.amax_history.newest)
        (2.0, 896.0)
    """

    @property
    def from_history(self) -> bool:
        """Whether the scale is known before the tensor is."""
        return False
