"""Scales from the largest magnitude: of earlier steps (delayed scaling), or of the tensor itself (current scaling)."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from jqinject.core._protocols import Stat, View
from jqinject.core.construction import check
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import InnerModule, set_view
from jqinject.core.state.amax_history import AmaxHistory
from jqinject.core.state.record import Part, RecordPart
from jqinject.core.state.variables import GradSlot, GradStat, QuantStat, float_array
from jqinject.core.stats.extremes import AbsMax
from jqinject.core.stats.in_place import in_place
from jqinject.core.stats.two_phase import TwoPhaseStat
from jqinject.core.view import OverTensorView
from jqinject.ops.choose import known_zeros
from jqinject.ops.devices.explicit_axes import sharded_as
from jqinject.ops.devices.processes import on_host
from jqinject.ops.observe import AMAX, SCALE, SEEN, SLOT_SIZE, fork, gathered, over_axis, report
from jqinject.quant_tensor import is_concrete

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
