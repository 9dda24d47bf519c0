"""The architecture of a quantizer on one page.

A quantizer (`TensorQuant`) maps a tensor to a `QuantResult`: the quantized numbers in float, the scale, the
zero point and the bit width. It is composed of components, each answering one question:

    bit_width_impl()                     -> b           how many bits?
    int_scaling_impl(b)                  -> t           how many integer steps span the scale?
    scaling_impl(x, t)                   -> s           how many floats is one step?          s = v / t
        scaling_stats_impl(view(x))      -> v               from a statistic of the tensor
        restrict_scaling_impl(v)         -> v               and what may it be?
    zero_point_impl(x, s, b)             -> z           which integer is zero?
    int_quant(s, z, b, x)                -> y           y = (clamp(round(x / s + z), min(b), max(b)) - z) * s
        float_to_int_impl, tensor_clamp_impl                how to round, how to clamp
        gradient_mask_impl                                  where the gradient goes, unless the clamp decides

Stateless components are values, compared by their parts: frozen dataclasses, or `Component`s without Variables.
Stateful ones are `nnx.Module`s, as is a `Component` with Variables (`construction/component.py`). Anything that fits a
protocol can be used, built by hand or wired by name. Make your own stateless classes frozen dataclasses, so that
identical layers compile once.

Components describe themselves by the facts of `facts.py`.

Intermediate results are float32; `QuantResult.value` has the dtype of `x`. `value = (integer - zero_point) * scale`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax


@runtime_checkable
class KeepsPayload(Protocol):
    """A quantizer that can keep its integers or floats for the contraction that follows."""

    def keeping_payload(self, x: jax.Array, /) -> Any:
        """Like a call; the result also has the payload."""
        ...


@runtime_checkable
class PackableResult(Protocol):
    """A result of a `tensor_quant` that knows its kind of QuantTensor."""

    def quant_tensor(self, *, signed: bool, training: bool) -> Any: ...


class Rounding(Protocol):
    """`float_to_int_impl`: floats to whole numbers, same shape."""

    def __call__(self, x: jax.Array, /) -> jax.Array: ...


class Clamp(Protocol):
    """`tensor_clamp_impl`: clamp between two bounds."""

    def __call__(self, x: jax.Array, /, min_val: Any, max_val: Any) -> jax.Array: ...


class GradientMask(Protocol):
    """`gradient_mask_impl`: which numbers get the gradient, from their steps before and after rounding."""

    def __call__(self, steps: jax.Array, rounded: jax.Array, /) -> jax.Array: ...


class View(Protocol):
    """`..._input_view_shape_impl`: how a tensor is laid out for a statistic."""

    def __call__(self, x: jax.Array, /) -> jax.Array: ...


class Stat(Protocol):
    """`scaling_stats_impl`: a differentiable statistic of a viewed float32 tensor."""

    def __call__(self, x: jax.Array, /) -> jax.Array: ...


class Restrict(Protocol):
    """`restrict_..._impl`: value -> stored domain (`restrict_init_...`) -> value (call)."""

    def restrict_init_float(self, x: float, /) -> float: ...
    def restrict_init_tensor(self, x: jax.Array, /) -> jax.Array: ...
    def __call__(self, x: jax.Array, /) -> jax.Array: ...


class BitWidth(Protocol):
    """`bit_width_impl`: the bit width."""

    def __call__(self) -> int | jax.Array: ...


class IntScalingImpl(Protocol):
    """`int_scaling_impl`: how many integer steps the scaled value spans."""

    def __call__(self, bit_width: Any, /) -> Any: ...


class FloatScalingImpl(Protocol):
    """`float_scaling_impl`: which minifloat the statistic maps to."""

    def __call__(self, exponent_bit_width: Any, max_mantissa: Any, exponent_bias: Any, /) -> Any: ...


class FloatClampImpl(Protocol):
    """`float_clamp_impl`: clamp to the range of a minifloat."""

    @property
    def saturating(self) -> bool: ...
    @property
    def inf_values(self) -> tuple[str, ...] | None: ...
    @property
    def nan_values(self) -> tuple[str, ...] | None: ...
    @property
    def max_available_float(self) -> float | None: ...
    def __call__(
        self, x: jax.Array, exponent_bit_width: Any, max_mantissa: Any, exponent_bias: Any, /
    ) -> jax.Array: ...


class Scaling(Protocol):
    """`scaling_impl`: float32 scale of a tensor, divided by the number of integer steps (`threshold`)."""

    def __call__(self, x: jax.Array, threshold: Any = None, /) -> jax.Array: ...


@runtime_checkable
class Settles(Protocol):
    """A scaling whose scale changes at the end of a collection, before the zero point is searched."""

    def settle(self, scale: jax.Array, threshold: Any = None, /) -> jax.Array: ...


class ZeroPoint(Protocol):
    """`zero_point_impl`: the integer that stands for zero, as float32."""

    def __call__(self, x: jax.Array, scale: jax.Array, bit_width: Any, /) -> jax.Array: ...


class IntQuantizer(Protocol):
    """`int_quant`: to integers and back, given scale, zero point and bit width."""

    def to_int(self, scale: jax.Array, zero_point: jax.Array, bit_width: Any, x: jax.Array) -> jax.Array: ...
    def min_int(self, bit_width: Any) -> Any: ...
    def max_int(self, bit_width: Any) -> Any: ...
    def __call__(
        self, scale: jax.Array, zero_point: jax.Array, bit_width: Any, x: jax.Array
    ) -> jax.Array: ...


@runtime_checkable
class StaticRange(Protocol):
    """A component whose range is collected from data and kept: scale, zero point or clipping range of activations.

    Containers of such components (a proxy, a quantized op) answer for them.
    """

    def has_range(self) -> bool | None:
        """Whether data was seen (by every layer of a stack).

        None if nothing is collected: the range is constant, or computed from the given tensor. True for traced or
        abstract state.
        """
        ...

    def begin_calibration(self) -> None:
        """Forget what was collected, then collect every tensor, equally weighted unless the user chose an averaging."""
        ...

    def end_calibration(self) -> None:
        """Use what was collected as the range."""
        ...


class StepStatistic(Protocol):
    """A scale that tracks training steps, which `jqinject.value_and_grad` opens and closes.

    Attributes:
        in_step: whether a step is under way.
        slot: where a backward pass reports; None unless the scale is for a gradient.
    """

    in_step: bool
    slot: Any

    def begin_step(self) -> None:
        """Start collecting; discard an unfinished step."""
        ...

    def collect(self, seen: jax.Array) -> None:
        """Record a call's or a backward pass's amax, keeping the maximum."""
        ...

    def end_step(self) -> None:
        """Commit the step."""
        ...

    def abandon_step(self) -> None:
        """Discard a failed step."""
        ...


@runtime_checkable
class TensorQuant(Protocol):
    """`tensor_quant`: the assembled quantizer. It may state every fact of `facts.py`."""

    def __call__(self, x: jax.Array, /) -> PackableResult: ...
