"""What decoupled quantizers do before they round: scales from learned norms, and zero points that are only added.

The scale before rounding comes from a weight's learned norm and its actual one. A2Q and A2Q+ bound the learned norm, so
that the weight's integers are small enough for an accumulator never to overflow.
"""

from collections.abc import Iterable
from dataclasses import InitVar, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core import _protocols, check, component, state
from jqinject.core.scaling.rule import clamp_scale
from jqinject.core.statistics.statistic import finish, reduced, statistic_of
from jqinject.ops import accumulator_bounds as bounds
from jqinject.ops import lean, power, reductions, sharding
from jqinject.quant_tensor import is_concrete


@component.component
class NormParameter(component.InnerModule):
    """Abstract: holds the learned norm g, the parameter `value`, and measures weights.

    g starts at the norm of the one tracked weight. A norm of 0 becomes 2**-64.

    Args:
        scaling_impl: the scale after rounding.
        normalize_stats_impl: the norm, such as `L2Norm`.
        scaling_stats_input_view_shape_impl: its view.
        tracked_parameter_list: the one weight.
        pre_scaling_shape: shape of the norms; None for a scalar.
        restrict_pre_scaling_impl: which values g may take; None for all.
        pre_scaling_min_val: the minimum magnitude of g.

    Raises:
        ValueError: for no weight or several, or a wrong `pre_scaling_shape`.
    """

    scaling_impl: _protocols.Scaling
    normalize_stats_impl: _protocols.Stat
    scaling_stats_input_view_shape_impl: _protocols.View
    tracked_parameter_list: InitVar[Iterable[Any]]
    pre_scaling_shape: check.Shape | None = None
    restrict_pre_scaling_impl: _protocols.Restrict | None = None
    pre_scaling_min_val: check.Minimum | None = None

    def __post_init__(self, tracked_parameter_list: Iterable[Any]) -> None:
        tracked, where = list(tracked_parameter_list), type(self).__name__
        if len(tracked) != 1:
            raise ValueError(
                f"{where} normalizes one weight, got {len(tracked)} in tracked_parameter_list: the norm that it learns "
                "is that of one layer.\n  cure: a quantizer for each layer, weight_quant=MyQuantizer instead of "
                "weight_quant=other.weight_quant"
            )
        weight = tracked[0].get_value() if isinstance(tracked[0], nnx.Variable) else jnp.asarray(tracked[0])
        norm = clamp_scale(self.norm(weight.astype(jnp.float32)), None)
        restrict = self.restrict_pre_scaling_impl
        self.value = state.QuantParam(norm if restrict is None else restrict.restrict_init_tensor(norm))

    def norm(self, weights: jax.Array) -> jax.Array:
        """The norm of weights, of `pre_scaling_shape`."""
        stat = statistic_of(self.normalize_stats_impl, self.scaling_stats_input_view_shape_impl, weights)
        shape, where = self.pre_scaling_shape or (), type(self).__name__
        return check.statistic_shape(stat, shape, where, "pre_scaling_shape")

    def learned_norm(self) -> jax.Array:
        """g."""
        value = self.value.get_value()
        g = value if self.restrict_pre_scaling_impl is None else self.restrict_pre_scaling_impl(value)
        return clamp_scale(g, self.pre_scaling_min_val)


class ParameterPreScalingWeightNorm(NormParameter):
    """Normalizes a weight: `pre_scale = s * norm(w) / g`, so that `w / pre_scale = (g / s) * w / norm(w)`.

    `s` is the scale after rounding (`scaling_impl`), and `g` the learned norm, the parameter `value`; it starts at the
    norm of the weight, so that initially `pre_scale = s`.

    Differs from Brevitas: a norm of 0 becomes 2**-64, so that a weight of zeros is quantized to zeros (there: nan).

    Arguments: see `NormParameter`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import ConstScaling, L2Norm, OverOutputChannelView
        >>> w = jnp.array([[3.0, 4.0]])
        >>> impl = ParameterPreScalingWeightNorm(
        ...     ConstScaling(0.5), L2Norm(stats_reduce_dim=1), OverOutputChannelView(), [w], (1, 1))
        >>> impl.value.get_value().item(), impl(w).item(), impl(2 * w).item()
        (5.0, 0.5, 1.0)
    """

    def __call__(self, weights: jax.Array) -> jax.Array:
        """The scale before rounding, float32."""
        scaled = self.scaling_impl(weights) * self.norm(weights)
        return clamp_scale(power.divide(scaled, self.learned_norm()), None)


@component.component
class InputAwarePreScaling(NormParameter):
    """Abstract: a scale before rounding that prevents accumulator overflow, by the bits and the sign of the input.

    Arguments: see `AccumulatorAwareParameterPreScaling`.
    """

    zero_centered: ClassVar[bool]
    accumulator_bit_width_impl: _protocols.BitWidth = field(kw_only=True)

    def __post_init__(self, tracked_parameter_list: Iterable[Any]) -> None:
        bits = _known(self.accumulator_bit_width_impl())
        if bits is not None and bits < 2:
            raise ValueError(
                f"{type(self).__name__}: a signed accumulator of {bits} bit holds no sum.\n"
                "  cure: accumulator_bit_width = 16, or any from 2 to 32"
            )
        super().__post_init__(tracked_parameter_list)

    def check_input(self, input_bit_width: lean.Bits, input_is_signed: bool) -> None:
        """Refuse an input too wide for the accumulator.

        Raises:
            ValueError: only zero weights would fit.
        """
        width, bits = _known(self.accumulator_bit_width_impl()), _known(input_bit_width)
        if width is None or bits is None or isinstance(input_is_signed, jax.Array):
            return
        if bounds.integer_budget(width, bits, input_is_signed, self.zero_centered):
            return
        least = bits + 1 if self.zero_centered else bits + 2 - int(input_is_signed)
        sign = "signed" if input_is_signed else "unsigned"
        raise ValueError(
            f"{type(self).__name__}: an accumulator of {width} bits is guaranteed to hold the sums of a {bits}-bit "
            f"{sign} input only if every weight is 0.\n  cure: accumulator_bit_width = {least} or more, or an input "
            "of fewer bits"
        )

    def within(self, q: jax.Array, input_bit_width: lean.Bits, input_is_signed: bool) -> jax.Array:
        """Integers that keep the bound exactly: those given, or smaller ones.

        Their magnitudes sum to at most T; if they are centered, positive and negative ones to at most T / 2 each.
        """
        width, centered, shape = self.accumulator_bit_width_impl(), self.zero_centered, self.pre_scaling_shape
        budget = bounds.integer_budget(width, input_bit_width, input_is_signed, zero_centered=centered)
        sizes = (1,) * (q.ndim - len(shape or ())) + (shape or ())
        axes = tuple(axis for axis, size in enumerate(sizes) if size == 1)
        return bounds.within_budget(q, budget, axes, zero_centered=centered)

    def _limited(self, weights: jax.Array, bound: jax.Array) -> jax.Array:
        """`norm(w) / min(g / s, bound)`."""
        steps = power.divide(self.learned_norm(), self.scaling_impl(weights))
        limited = jnp.where(steps > bound, bound, steps)
        return clamp_scale(power.divide(self.norm(weights), limited), self.pre_scaling_min_val)


class AccumulatorAwareParameterPreScaling(InputAwarePreScaling):
    """Weight normalization with a norm bounded to prevent accumulator overflow (A2Q).

    `pre_scale = norm(w) / min(g / s, T)`: `s` is the scale after rounding, `g` the learned norm, the parameter `value`,
    and `T = (2**(P-1) - 1) / 2**(N - signed)` the bound on the sum of magnitudes of a channel's integers, for
    accumulators of P bits and inputs of N. The l1-norm with rounding toward zero keeps it up to float rounding;
    `within` enforces it for any norm and rounding.

    Differs from Brevitas: the bound on the integers is exact (see `within`); a norm of 0 becomes 2**-64.

    Args:
        scaling_impl: the scale after rounding.
        normalize_stats_impl: the norm, `L1Norm`.
        accumulator_bit_width_impl: P.
        scaling_stats_input_view_shape_impl: the view for the norm.
        tracked_parameter_list: the one weight.
        pre_scaling_shape: shape of the result: 1 along the axes that an accumulator sums over; None for a scalar.
        restrict_pre_scaling_impl: which values g may take; None for all.
        pre_scaling_min_val: the minimum magnitude of g and of the result.

    Raises:
        ValueError: for no weight or several, a wrong `pre_scaling_shape`, an accumulator of fewer than 2 bits.

    Example:
        >>> from jqinject.core import BitWidthConst, ConstScaling, L1Norm, OverOutputChannelView
        >>> w = jnp.array([[300.0, -400.0]])
        >>> impl = AccumulatorAwareParameterPreScaling(
        ...     ConstScaling(1.0), L1Norm(stats_reduce_dim=1), OverOutputChannelView(), [w], (1, 1),
        ...     accumulator_bit_width_impl=BitWidthConst(16))
        >>> steps = w / impl(w, 8, True)
        >>> steps.round(2), float(abs(steps).sum())
        (Array([[ 109.71, -146.28]], dtype=float32), 255.9921875)
    """

    zero_centered = False

    def __call__(self, weights: jax.Array, input_bit_width: lean.Bits, input_is_signed: bool) -> jax.Array:
        """The scale before rounding, float32.

        Raises:
            ValueError: the accumulator is too narrow for nonzero weights.
        """
        self.check_input(input_bit_width, input_is_signed)
        width = self.accumulator_bit_width_impl()
        bound = bounds.get_upper_bound_on_l1_norm(width, input_bit_width, input_is_signed)
        return self._limited(weights, bound)


@component.component
class PreZeroCenterZeroPoint(component.Component):
    """Centers a weight on 0 before it is rounded: `-mean(x) / scale`, the mean of each channel.

    Differs from Brevitas: the mean of no numbers is 0 (there: nan).

    Args:
        stats_reduce_dim: the axis of the view to take the mean along; None for the whole tensor.
        pre_zero_point_stats_input_view_shape_impl: the view.
        pre_zero_point_shape: shape of the result; None for a scalar.
        axis_name: a mapped axis that channels are spread over, or a tuple of them.

    Example:
        >>> from jqinject.core import OverOutputChannelView
        >>> center = PreZeroCenterZeroPoint(1, OverOutputChannelView(), (2, 1))
        >>> center(jnp.array([[1.0, 3.0], [0.0, -1.0]]), jnp.float32(0.5), 8).reshape(-1)
        Array([-4.,  1.], dtype=float32)
    """

    stats_reduce_dim: int | None
    pre_zero_point_stats_input_view_shape_impl: _protocols.View
    pre_zero_point_shape: tuple[int, ...] | None = None
    axis_name: Any = None

    def get_zero_center(self, x: jax.Array) -> jax.Array:
        """The shift that centers `x`: minus the means, float32."""
        view, x = self.pre_zero_point_stats_input_view_shape_impl, x.astype(jnp.float32)
        axes, viewed = reduced(view, self.stats_reduce_dim, x)
        over = reductions.Over(axes, sharding.names_of(self.axis_name))
        mean = finish(over.sum(viewed) / max(over.count(viewed), 1), axes, True)
        where, shape = "PreZeroCenterZeroPoint", self.pre_zero_point_shape or ()
        return -check.statistic_shape(mean, shape, where, "pre_zero_point_shape")

    def __call__(self, x: jax.Array, scale: jax.Array, bit_width: Any = None) -> jax.Array:
        """The zero point, float32, in steps of `scale`."""
        return power.divide(self.get_zero_center(x), scale)


@component.component
class AccumulatorAwareZeroCenterParameterPreScaling(InputAwarePreScaling):
    """Like `AccumulatorAwareParameterPreScaling`, for weights that are first centered on 0 (A2Q+).

    `pre_scale = norm(w - mean(w)) / min(g / s, T)` with `T = (2**P - 2) / (2**N - 1)`: half of it for the positive
    integers of a channel, half for the negative ones; for unsigned inputs about twice what A2Q allows.

    Differs from Brevitas: the bound on the integers is exact (see `within`); a norm of 0 becomes 2**-64, and the
    result is at least norm(w) / 2**26, so that constant weights have finite integers.

    Args:
        pre_zero_point_impl: what centers the weights, `PreZeroCenterZeroPoint`.
        others: see `AccumulatorAwareParameterPreScaling`.

    Raises:
        TypeError: `pre_zero_point_impl` does not center the weights.
        ValueError: for no weight or several, a wrong `pre_scaling_shape`, an accumulator of fewer than 2 bits.

    Example:
        >>> from jqinject.core import BitWidthConst, ConstScaling, L1Norm, OverOutputChannelView
        >>> from jqinject.core import PreZeroCenterZeroPoint
        >>> w, view = jnp.array([[700.0, 0.0]]), OverOutputChannelView()
        >>> center = PreZeroCenterZeroPoint(1, view, (1, 1))
        >>> impl = AccumulatorAwareZeroCenterParameterPreScaling(
        ...     ConstScaling(1.0), L1Norm(stats_reduce_dim=1), view, [w], (1, 1),
        ...     pre_zero_point_impl=center, accumulator_bit_width_impl=BitWidthConst(16))
        >>> ((w + center.get_zero_center(w)) / impl(w, 8, True)).round(1)
        Array([[ 128.5, -128.5]], dtype=float32)
    """

    zero_centered = True
    pre_zero_point_impl: PreZeroCenterZeroPoint = field(kw_only=True)

    def __post_init__(self, tracked_parameter_list: Iterable[Any]) -> None:
        if not isinstance(self.pre_zero_point_impl, PreZeroCenterZeroPoint):
            raise TypeError(
                f"{type(self).__name__} needs weights that are centered on 0, got "
                f"{type(self.pre_zero_point_impl).__name__} as pre_zero_point_impl.\n"
                "  cure: pre_zero_point_impl = PreZeroCenterZeroPoint"
            )
        super().__post_init__(tracked_parameter_list)

    def __call__(self, weights: jax.Array, input_bit_width: lean.Bits, input_is_signed: bool) -> jax.Array:
        """The scale before rounding, float32.

        Raises:
            ValueError: the accumulator is too narrow for nonzero weights.
        """
        self.check_input(input_bit_width, input_is_signed)
        width = self.accumulator_bit_width_impl()
        bound = bounds.get_upper_bound_on_zero_centered_l1_norm(width, input_bit_width)
        pre_scale = self._limited(weights + self.pre_zero_point_impl.get_zero_center(weights), bound)
        # Constant weights leave only the rounding error of their mean, which cannot be divided into steps.
        least = jax.lax.stop_gradient(self.norm(weights)) * 2.0**-26
        return jnp.where(pre_scale < least, least, pre_scale)


def _known(bits: Any) -> int | None:
    """Bits as a Python int; None if traced."""
    return round(float(bits)) if is_concrete(bits) else None
