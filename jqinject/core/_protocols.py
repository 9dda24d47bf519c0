"""The architecture of a quantizer on one page.

A quantizer (`TensorQuant`) maps a tensor to a `QuantResult`: the quantized numbers in float, the scale, the
zero point and the bit width. It is put together from components, each of which answers one question:

    bit_width_impl()                     -> b           how many bits?
    int_scaling_impl(b)                  -> t           how many integer steps span the scale?
    scaling_impl(x, t)                   -> s           how many floats is one step?          s = v / t
        scaling_stats_impl(view(x))      -> v               from a statistic of the tensor
        restrict_scaling_impl(v)         -> v               and what may it be?
    zero_point_impl(x, s, b)             -> z           which integer is zero?
    int_quant(s, z, b, x)                -> y           y = (clamp(round(x / s + z), min(b), max(b)) - z) * s
        float_to_int_impl, tensor_clamp_impl                how to round, how to clamp

Components without state are values, equal by their parts: frozen dataclasses, or `Component`s that hold no Variables.
Those with state are `nnx.Module`s, as is a `Component` that holds some (`construction/component.py`). Anything that
fits a protocol can take its place: a class of the user's, built by hand or wired by name. A class of your own without
state should be a frozen dataclass, so that two layers built alike compile once.

What a class alone would not tell, a component states itself, as the facts of `facts.py`.

Intermediate results are float32; `QuantResult.value` has the dtype of `x`. `value = (integer - zero_point) * scale`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax


@runtime_checkable
class KeepsPayload(Protocol):
    """A quantizer that can keep what it rounded, for the contraction that follows."""

    def keeping_payload(self, x: jax.Array, /) -> Any:
        """As a call; the result has the payload beside the value."""
        ...


@runtime_checkable
class PackableResult(Protocol):
    """What a `tensor_quant` may return: it knows which kind of QuantTensor it makes."""

    def quant_tensor(self, *, signed: bool, training: bool) -> Any: ...


class Rounding(Protocol):
    """`float_to_int_impl`: floats to whole numbers, same shape."""

    def __call__(self, x: jax.Array, /) -> jax.Array: ...


class Clamp(Protocol):
    """`tensor_clamp_impl`: clamp between two bounds."""

    def __call__(self, x: jax.Array, /, min_val: Any, max_val: Any) -> jax.Array: ...


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
    """`float_scaling_impl`: which number of a minifloat the scaled value is brought to."""

    def __call__(self, exponent_bit_width: Any, max_mantissa: Any, exponent_bias: Any, /) -> Any: ...


class FloatClampImpl(Protocol):
    """`float_clamp_impl`: where the numbers of a minifloat end."""

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
    """A scaling whose scale changes where a collection ends, before a zero point is searched with it."""

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

    What holds such components (a proxy, a quantized op) answers for them.
    """

    def has_range(self) -> bool | None:
        """Whether data were seen (by every layer of a stack).

        None if nothing is collected: the range is a constant, or that of the given tensor. True where it cannot be
        known: of traced and abstract state.
        """
        ...

    def begin_calibration(self) -> None:
        """Forget what was collected; from now on collect every tensor, all with the same weight unless an averaging was
        named."""
        ...

    def end_calibration(self) -> None:
        """Take what was collected as the range."""
        ...


class StepStatistic(Protocol):
    """A scale that follows what training steps have seen: `jqinject.value_and_grad` opens and closes the steps.

    Attributes:
        in_step: whether a step is under way.
        slot: where a backward pass reports; None if the scale is not that of a gradient.
    """

    in_step: bool
    slot: Any

    def begin_step(self) -> None:
        """From now on collect; forget what an unfinished step has left."""
        ...

    def collect(self, seen: jax.Array) -> None:
        """Note what a call or a backward pass has seen, by maximum."""
        ...

    def end_step(self) -> None:
        """Enter what the step has seen."""
        ...

    def abandon_step(self) -> None:
        """End a step that failed: nothing enters."""
        ...


@runtime_checkable
class TensorQuant(Protocol):
    """`tensor_quant`: the assembled quantizer. It may say every fact below."""

    def __call__(self, x: jax.Array, /) -> PackableResult: ...
