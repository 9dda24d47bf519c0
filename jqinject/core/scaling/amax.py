"""Scales from the largest magnitude: of earlier steps (delayed scaling), or of the tensor itself (current scaling)."""

import math
from collections.abc import Callable
from dataclasses import InitVar, field
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import _protocols, check, state, views
from jqinject.core.component import InnerModule, component, set_view
from jqinject.core.statistics.extremes import AbsMax
from jqinject.core.statistics.statistic import TwoPhaseStat, in_place
from jqinject.ops import lean, observe, processes, sharding, ste
from jqinject.quant_tensor import is_concrete

_TINY = float(jnp.finfo(jnp.float32).tiny)
_ALGORITHM = check.among(("max", "most_recent"))


def scale_of_amax(amax: jax.Array, last: jax.Array, threshold: Any, margin: float = 0.0) -> jax.Array:
    """Return `amax * 2 ** margin / threshold`, or the `last` scale if that is not positive and finite.

    Rounded as `1 / (threshold / amax)`, as in Flax and TransformerEngine: with another last bit of the scale, a number
    halfway between two of the format's would be rounded to the other one.

    Example:
        >>> scale_of_amax(jnp.float32([896.0, 0.0]), jnp.float32(1.0), 448.0)
        Array([2., 1.], dtype=float32)
    """
    amax = amax * (2.0**margin) if margin else amax
    if isinstance(threshold, float) and threshold == 1.0:
        usable, scale = jax.lax.bitwise_and(amax >= _TINY, amax < jnp.inf), amax
    else:
        inverse = threshold / amax
        # The bounds keep compilers from making one division of the two.
        bounded = jax.lax.clamp(_TINY, inverse, 1 / _TINY)
        usable, scale = bounded == inverse, jax.lax.integer_pow(bounded, -1)
    return jax.lax.select(usable, scale, sharding.sharded_as(jnp.broadcast_to(last, scale.shape), scale))


@ste.custom_jvp(0)
def _without_gradient(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    return function(*map(jnp.asarray, arrays))  # of a Python float under `grad`, a Python float is left


def _no_gradient(function: Callable[..., Any], primals: ste.Primals, tangents: ste.Tangents) -> Any:
    results = _without_gradient(function, *primals)
    return results, jax.tree.map(lean.no_change, results)


_without_gradient.defjvp(_no_gradient, symbolic_zeros=True)


@component
class AmaxScaling(InnerModule):
    """A scale from largest magnitudes, `s = amax * 2 ** margin / threshold`, and the record of them.

    `threshold` is the largest number of the payload's format (448 for `float8_e4m3fn`), passed to the call. Delayed,
    `amax` is that of the earlier steps: the scale is known before the tensor, which then needs no extra pass. Else it
    is that of the tensor itself, `max |x|`, and amaxes are recorded for inspection only. Without a positive and finite
    amax the scale is that of the last step, initially `scaling_init`.

    Outside a step, every call in training mode is a step and enters the history. Within one (`jqinject.value_and_grad`,
    or `jqinject.begin_step` to `jqinject.end_step`), calls only note the largest amax, which enters once at its end.

    Args:
        scaling_stats_impl: the magnitude.
        scaling_stats_input_view_shape_impl: its view.
        scaling_shape: shape of the scale; `()` for one scale.
        delayed: whether the scale is that of the earlier steps.
        amax_history_length: the steps remembered.
        amax_compute_algo: what they are reduced to: their "max", or the "most_recent".
        keeps_infinite: let inf and nan in, as TransformerEngine does: the scale then stays as it is until the step is
            forgotten. Otherwise a step with an amax that is not finite leaves the history unchanged.
        margin: multiplies the scale by `2 ** margin`: headroom before saturation.
        scaling_init: the scale before the first step.
        scaling_min_val: the minimum of the amax; None if absent.
        amax_of_gradient: whether it scales gradients, with `GradStat`s as state.
        axis_name: a named axis (of `shard_map` or `vmap`) that the tensor is spread over; the amax is the maximum.

    Attributes:
        record: one Variable with all of the following.
        amax_history: the amax of each step, float32, `(amax_history_length, *scaling_shape)`, zeros at first; a stack
            of layers has further axes in front. Element 0 is the newest, then come the last element and so on backwards
            to the oldest, element 1. (Flax's layout: roll by -1, then write element 0.)
        scale: the scale of the last step, float32, of `scaling_shape`.
        step_amax, step_scale: the largest amax and scale of the step so far; -inf and 0 before the first.
        slot: where a backward pass reports; gradients only.
        in_step: whether a step is under way.

    Raises:
        TypeError, ValueError: an argument is not what its name says.

    Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; Flax's `fp8_ops`. The names are
    TransformerEngine's and Flax's. Differs from both: an inf or nan stays out of the history.

    Example:
        >>> delayed = AmaxScaling(amax_history_length=2)
        >>> [float(delayed(jnp.array([amax]), 448.0)) for amax in (448.0, 896.0, 448.0, 448.0, 448.0)]
        [1.0, 1.0, 2.0, 2.0, 1.0]
        >>> current = AmaxScaling(delayed=False)
        >>> float(current(jnp.array([5.0, -896.0]), 448.0)), float(current.newest)
        (2.0, 896.0)
    """

    scaling_stats_impl: _protocols.Stat = AbsMax()
    scaling_stats_input_view_shape_impl: _protocols.View = views.OverTensorView()
    scaling_shape: tuple[int, ...] = ()
    delayed: bool = True
    amax_history_length: int = 1024
    amax_compute_algo: Annotated[str, _ALGORITHM] = "max"
    keeps_infinite: bool = False
    margin: float = 0.0
    scaling_init: InitVar[float] = 1.0
    scaling_min_val: check.Minimum | None = None
    amax_of_gradient: InitVar[bool] = False
    axis_name: Any = None
    record: state.QuantStat | state.GradStat = field(init=False)
    slot: state.GradSlot | None = field(init=False, default=None)
    in_step: bool = field(init=False, default=False)
    use_running_average: bool = field(init=False, default=False)
    amax_history, scale, step_amax, step_scale = state.Part(), state.Part(), state.Part(), state.Part()

    def __post_init__(self, scaling_init: float, amax_of_gradient: bool) -> None:
        where, cure = "AmaxScaling", "without a history, use delayed = False (the ...Current quantizers)."
        at_least = check.between(1, math.inf, why=f". For a scale from the tensor itself, {cure}")
        length = check.between(-math.inf, 2**20, at_least)
        check.fields(self, margin=check.between(-32, 32), amax_history_length=length)
        if check.number(scaling_init, where, "scaling_init") <= 0:
            raise ValueError(f"{where}: scaling_init must be positive and finite, got {scaling_init!r}")
        shape = self.scaling_shape
        # Of the instance: an attribute that appears later retraces.
        self.in_step = self.use_running_average = False
        of_gradient = check.flag(amax_of_gradient, where, "amax_of_gradient")
        numbers = {
            "amax_history": state.float_array(0.0, (self.amax_history_length, *shape)),
            "scale": state.float_array(scaling_init, shape),
            "step_amax": state.float_array(-np.inf, shape),
            "step_scale": state.float_array(0.0, shape),
        }
        self.record = state.GradStat(numbers) if of_gradient else state.QuantStat(numbers)
        if of_gradient:
            self.slot = state.GradSlot(state.float_array(0.0, (*shape, observe.SLOT_SIZE)))

    set_view = set_view

    @property
    def newest(self) -> jax.Array:
        """The amax of the last step, float32, of `scaling_shape`."""
        return jax.lax.index_in_dim(self.amax_history.get_value(), 0, self._axis, keepdims=False)

    @property
    def _axis(self) -> int:
        """The axis of the steps, counted from the back."""
        return -1 - len(self.scaling_shape)

    def known_scale(self, threshold: object) -> jax.Array:
        """The scale known before the tensor, used for a tensor without a usable amax."""
        last = self.scale.get_value()
        if not self.delayed:
            return last
        most_recent = self.amax_compute_algo == "most_recent"
        amax = self.newest if most_recent else jnp.max(self.amax_history.get_value(), axis=self._axis)
        return scale_of_amax(amax, last, threshold, self.margin)

    def __call__(self, x: jax.Array, threshold: Any = 1.0) -> jax.Array:
        """The scale, float32, without a gradient for `x`; records the amax in training mode.

        Args:
            x: the tensor; an empty one is not recorded.
            threshold: the largest value of a scaled element.
        """
        settled = self.known_scale(threshold)
        if not self._measures(x):
            return settled
        amax = _without_gradient(self._amax, x, self.scale.get_value())
        scale = settled if self.delayed else scale_of_amax(amax, settled, threshold, self.margin)
        self._record(amax, scale)
        return scale

    def encoded(self, x: jax.Array, threshold: float, encode: Callable[..., Any]) -> tuple[jax.Array, Any]:
        """The scale as a call returns it, and `encode(x, scale)`; one derivative rule leaves both without a gradient.

        Args:
            x, threshold: as for a call.
            encode: function of the tensor and its scale.
        """
        encoded = partial(self._encoded, threshold, encode)
        amax, scale, numbers = _without_gradient(encoded, x, self.known_scale(threshold))
        if amax is not None:
            self._record(amax, scale)
        return scale, numbers

    def _encoded(self, threshold: float, encode: Callable[..., Any], x: jax.Array, settled: jax.Array) -> Any:
        if not self._measures(x):
            return None, settled, encode(x, settled)
        amax = self._amax(x, settled)
        scale = settled if self.delayed else scale_of_amax(amax, settled, threshold, self.margin)
        return amax, scale, encode(x, scale)

    def _measures(self, x: jax.Array) -> bool:
        """Whether a call needs the amax of the tensor."""
        return x.size > 0 and not (self.delayed and self.use_running_average)

    def _record(self, amax: jax.Array, scale: jax.Array) -> None:
        """Record a call in training mode, as a step of its own outside a step."""
        if self.in_step and not self.use_running_average:
            self._collect(amax, scale)
        elif not self.use_running_average:
            self.scale.set_value(jnp.broadcast_to(scale, amax.shape))
            self._push(amax)

    def _amax(self, x: jax.Array, holder: jax.Array) -> jax.Array:
        """The magnitude of `x` over all its shards and mapped axes, float32, of `scaling_shape`.

        Args:
            x: the tensor.
            holder: an array of the state, which may be spread over devices and mapped.
        """
        view = self.scaling_stats_input_view_shape_impl
        stat, viewed = in_place(self.scaling_stats_impl, view, x.astype(jnp.float32))
        two_phases = isinstance(stat, TwoPhaseStat)
        amax = stat.statistic(stat.measured(viewed, detached=True)) if two_phases else stat(viewed)
        amax = jnp.maximum(amax, self.scaling_min_val) if self.scaling_min_val else amax
        amax = sharding.sharded_as(check.statistic_shape(amax, holder.shape, "amax"), holder)
        return observe.gathered(observe.over_axis(amax, self.axis_name, holder), holder)

    # --- calibration

    def has_range(self) -> bool | None:
        """Whether there is an amax for the scale (of every layer of a stack); None if it comes from the tensor."""
        steps = self.amax_history.get_value()
        if not self.delayed:
            return None
        axes = tuple(range(self._axis, 0))
        return not state.has_numbers(steps) or bool(np.all(np.any(processes.on_host(steps) > 0, axis=axes)))

    def begin_calibration(self) -> None:
        """Clear the record; every call is a step."""
        self.amax_history.set_value(jnp.zeros_like(self.amax_history.get_value()))
        self.in_step = self.use_running_average = False

    def end_calibration(self) -> None:
        """No effect: the scale comes from the history."""

    # --- steps

    def begin_step(self) -> None:
        """Start collecting; discard an unfinished step."""
        self.in_step = True
        self._forget()

    def _forget(self) -> None:
        self.step_amax.set_value(lean.known_zeros(self.step_amax.get_value(), number=-np.inf))
        self.step_scale.set_value(lean.known_zeros(self.step_scale.get_value()))

    def _collect(self, amax: jax.Array, scale: jax.Array) -> None:
        """Record the amax and scale of a call, keeping the maximum of each."""
        arrays = self.record.get_raw_value()
        amax_so_far, scale_so_far = arrays["step_amax"], arrays["step_scale"]
        # The first in a program knows that nothing was seen before; outside a program, do not wait for the device.
        is_settled = is_concrete(scale_so_far) and not is_concrete(amax)
        if not (is_settled and not processes.on_host(scale_so_far).any()):
            amax, scale = jnp.maximum(amax_so_far, amax), jnp.maximum(scale_so_far, scale)
        scale = jnp.broadcast_to(scale, amax.shape)
        self.record.set_value({**arrays, "step_amax": amax, "step_scale": scale})

    def report(self) -> jax.Array:
        """What `collect` takes: of this step so far, along a new last axis; zeros before the first."""
        amax, scale = self.step_amax.get_value(), self.step_scale.get_value()
        return jnp.stack([amax, scale], axis=-1)

    def collect(self, statistic: jax.Array) -> None:
        """Record what a backward pass reports, keeping the maximum."""
        amax, scale = (part.squeeze(-1) for part in jax.lax.split(statistic, (1, 1), statistic.ndim - 1))
        self._collect(lean.choose(scale > 0, amax, -jnp.inf), scale)

    def end_step(self) -> None:
        """Commit the step to the history, if it recorded anything."""
        amax, scale = self.step_amax.get_value(), self.step_scale.get_value()
        self._forget()
        self.in_step = False
        if not self.use_running_average:
            entered = self._push(amax)
            self.scale.set_value(lean.choose(entered, scale, self.scale.get_value()))

    def abandon_step(self) -> None:
        """Discard a failed step."""
        self.in_step = False

    def _push(self, amax: jax.Array) -> jax.Array:
        """Enter a step's amax in the place of the oldest; return whether it did: per channel, all or none do."""
        steps, length, axis = self.amax_history.get_value(), self.amax_history_length, self._axis
        enters = amax != -jnp.inf if self.keeps_infinite else jax.lax.is_finite(amax)
        enters = jnp.all(enters, axis=tuple(range(axis + 1, 0)), keepdims=True) if axis < -1 else enters
        # Rolled by -1, without the oldest.
        older = jax.lax.concatenate([steps, steps], steps.ndim + axis)
        older = jax.lax.slice_in_dim(older, 2, length + 1, axis=axis)
        if amax.ndim == 0:
            rolled = jax.lax.pad(older, amax, [(1, 0, 0)])
        else:
            rolled = jax.lax.concatenate([jnp.expand_dims(amax, axis), older], steps.ndim + axis)
        enters_all = jnp.expand_dims(enters, axis) if enters.ndim else enters
        self.amax_history.set_value(lean.choose(enters_all, rolled, steps))
        return enters

    def claim_slot(self) -> jax.Array:
        """The slot for one use of a gradient quantizer."""
        assert self.slot is not None, "only gradients have a slot"
        slot = self.slot.get_value()
        if slot.dtype == jnp.float32:  # no listener: a backward pass would warn
            return slot
        mine, rest = observe.fork(slot)
        self.slot.set_value(rest)
        return mine
