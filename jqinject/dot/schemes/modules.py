"""Modules that replace `lax.dot_general`, `jnp.einsum` and `lax.conv_general_dilated` in Flax's layers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import OutSharding, checked_dimensions
from jqinject.dot.geometry.equation import einsum_op
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.kernels.ragged import Ragged
from jqinject.dot.schemes.contraction import Contraction
from jqinject.dot.schemes.quantized_op import QuantizedOp
from jqinject.dot.schemes.scheme import SchemeLike, SchemeSpec
from jqinject.dot.schemes.scheme_dot import ExplainedScheme, explain_scheme
from jqinject.dot.schemes.scheme_fits import check_convolution, check_ragged
from jqinject.dot.tensors.contract import output_dtype
from jqinject.dot.tensors.six_operands import Plan
from jqinject.ops.sharding import asked, with_sharding
from jqinject.quant_tensor import Operand, as_array


def _plan(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: object,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: OutSharding = None,
) -> Plan:
    """The plan of a `dot_general` with these arguments."""
    dims = checked_dimensions(tuple(lhs.shape), tuple(rhs.shape), dimension_numbers)
    return Plan(dims, output_dtype(lhs, rhs, preferred_element_type), out_sharding=out_sharding)


class QDotGeneral(QuantizedOp):
    """Replaces `lax.dot_general`, quantized by a configuration, forward and backward.

    For `nnx.Linear(dot_general=...)`, `nnx.LinearGeneral` and the projections of `nnx.MultiHeadAttention`.

    Each operand has a mode. `TRAIN` quantizes it at every call, `CONVERT` also stores its payload and scale, and
    `SERVE` uses those, ignoring the argument; a stored operand has no gradient. The modes are attributes:
    `model.set_attributes(rhs_quant_mode=QuantMode.SERVE)`. All three modes give the same output for the same weights.

    Args:
        config: a `Scheme`, such as `config_v4()`.
        lhs_quant_mode, rhs_quant_mode: of the left operand (activations, in Flax's layers) and the right one (weights).
        lhs_freezer, rhs_freezer: a `Freezer`, or its arguments, such as `{"shape": (64, 32), "scale_shape": (1, 32)}`,
            which create its variables at once: to load a frozen checkpoint, also abstractly.
        lhs_shape, rhs_shape, dimension_numbers: the shapes of the operands, with any number of rows, and how they meet
            (by default as in `nnx.Linear`): for quantizers that keep state, such as a learned scale or a history.
            Layers of jqinject and `quantize` give them; without them, `jqinject.initialize` completes the module.
        rngs: source of keys for stochastic rounding; needed to train if gradients are rounded stochastically.

    Raises:
        TypeError: `config` is not a configuration, or a mode not a `QuantMode`.
        ValueError: SERVE before CONVERT; a stored operand of another shape; stochastic rounding without `rngs`, when a
            gradient is taken; a call by a scheme that keeps state, without shapes.

    Source: FJFormer's `QDotGeneral`, AQT's `AqtDotGeneral`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.dot import QuantMode
        >>> from jqinject.quant.aqt import config_v4
        >>> dot_general = QDotGeneral(config_v4(), rhs_quant_mode=QuantMode.CONVERT)
        >>> layer = nnx.Linear(3, 2, dot_general=dot_general, rngs=nnx.Rngs(0))
        >>> y = layer(jnp.ones((4, 3)))
        >>> layer.set_attributes(rhs_quant_mode=QuantMode.SERVE)
        >>> layer.kernel[...] = jnp.zeros((3, 2))  # no longer read
        >>> bool(jnp.all(layer(jnp.ones((4, 3))) == y)), dot_general.rhs_freezer.get().form.grid.bit_width
        (True, 8)
        >>> from jqinject.quant import Fp8DelayedTraining
        >>> op = QDotGeneral(Fp8DelayedTraining, lhs_shape=(1, 3), rhs_shape=(3, 2))
        >>> op.fprop_lhs.quant.scale()
        Array(1., dtype=float32)
    """

    def __call__(
        self,
        lhs: Operand,
        rhs: Operand,
        dimension_numbers: object,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: OutSharding = None,
        *,
        unrounded: jax.Array | None = None,
    ) -> jax.Array:
        """The contraction; arguments as for `lax.dot_general`.

        An operand may be a QuantTensor or a `FrozenParam`, which is contracted as it is. `unrounded` is the array that
        a quantized `rhs` was made from, where a scheme rounds it again backward; None takes its dequantized value.
        """
        lhs, rhs = self._seen(lhs, rhs)
        plan = _plan(lhs, rhs, dimension_numbers, preferred_element_type, out_sharding)
        return self._contract(plan, lhs, rhs, unrounded)

    @staticmethod
    def _arguments(lhs: jax.Array, rhs: jax.Array, numbers: object) -> tuple[object, ...]:
        return lhs, rhs, (((lhs.ndim - 1,), (0,)), ((), ())) if numbers is None else numbers

    def explain(self, lhs: Operand, rhs: Operand, dimension_numbers: object) -> ExplainedScheme:
        """Explains what a scheme's three products contract (payloads or floats) and why, without computing.

        Args:
            lhs, rhs: arrays, or anything with a shape and a dtype.
            dimension_numbers: as for a call.

        Returns:
            A tuple of `ExplainedProduct`, printed one per line; `first`, those of a scheme's first calls, if it is
            switched (`quant_delay_steps`).

        Example:
            >>> import jax.numpy as jnp
            >>> from jqinject.dot import Scheme
            >>> from jqinject.quant import Int8DynamicActPerRowAbsMax, Int8DynamicGradPerRowFloat
            >>> from jqinject.quant import Int8WeightPerChannelAbsMax
            >>> op = QDotGeneral(
            ...     Scheme.let(
            ...         fprop_lhs=Int8DynamicActPerRowAbsMax,
            ...         fprop_rhs=Int8WeightPerChannelAbsMax,
            ...         dgrad_grad=Int8DynamicGradPerRowFloat,
            ...     )
            ... )
            >>> for product in op.explain(jnp.ones((4, 8)), jnp.ones((8, 2)), (((1,), (0,)), ((), ()))):
            ...     print(product.name, product.kind)
            fprop int
            dgrad float
            wgrad float
        """
        plan, scheme = _plan(lhs, rhs, dimension_numbers), self.scheme
        products = explain_scheme(self, plan, lhs, rhs)
        if scheme.before is not None:
            products.first = explain_scheme(Contraction(scheme.before, self.where), plan, lhs, rhs)
            products.delay = scheme.delay
        return products


class QEinsum(QuantizedOp):
    """Replaces `jnp.einsum` of two operands; see `QDotGeneral`.

    For `nnx.Einsum(einsum_op=...)`, or called `einsum(equation, lhs, rhs)`. Configuration, mode and `Freezer` belong to
    each operand, in any order of the equation.

    Args:
        config, lhs_quant_mode, rhs_quant_mode, lhs_freezer, rhs_freezer, lhs_shape, rhs_shape, rngs: as for
            `QDotGeneral`.
        equation: beside the shapes.

    Raises:
        TypeError, ValueError: as for `QDotGeneral`; an equation that does not have two operands.

    Source: FJFormer's `QEinsum`, AQT's `AqtEinsum`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.quant.aqt import config_v4
        >>> layer = nnx.Einsum("btd,dnh->btnh", (8, 2, 4), einsum_op=QEinsum(config_v4()), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 3, 8))).shape
        (1, 3, 2, 4)
    """

    def __init__(self, config: SchemeLike, *, equation: str | None = None, **keywords: Any) -> None:
        super().__init__(config, dimension_numbers=equation, **keywords)

    def __call__(self, equation: str, lhs: Operand, rhs: Operand, **keywords: Any) -> jax.Array:
        """The einsum; arguments and keywords as for `jnp.einsum`."""
        return einsum_op(self._dot_general)(equation, *self._seen(lhs, rhs), **keywords)

    def _dot_general(self, lhs: Operand, rhs: Operand, numbers: object, **keywords: Any) -> jax.Array:
        return self._contract(_plan(lhs, rhs, numbers, **keywords), lhs, rhs)

    @staticmethod
    def _arguments(lhs: jax.Array, rhs: jax.Array, numbers: object) -> tuple[object, ...]:
        if numbers is None:
            raise ValueError(
                "QEinsum: equation is missing beside the shapes.\n  cure: equation='bd,df->bf', the one of its calls"
            )
        return numbers, lhs, rhs


class QConvGeneralDilated(QuantizedOp):
    """Replaces `lax.conv_general_dilated`; see `QDotGeneral` and `jqinject.dot.conv_general_dilated`.

    For `nnx.Conv(conv_general_dilated=...)`. With `config_v4()` and similar schemes, gradients are those of the float
    convolution.

    Args:
        config, lhs_quant_mode, rhs_quant_mode, lhs_freezer, rhs_freezer, lhs_shape, rhs_shape, rngs: as for
            `QDotGeneral`; tiles are ignored.
        dimension_numbers: beside the shapes; by default features come last, as in `nnx.Conv`.

    Raises:
        TypeError, ValueError: as for `QDotGeneral`; an operand of the scheme has a `pre_transform`.

    Source: AQT's `AqtConvGeneralDilated`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.quant.aqt import config_v4
        >>> conv = QConvGeneralDilated(config_v4())
        >>> layer = nnx.Conv(3, 8, (3, 3), conv_general_dilated=conv, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 6, 6, 3))).shape
        (2, 6, 6, 8)
    """

    @classmethod
    def _fitted(cls, scheme: SchemeSpec) -> SchemeSpec:
        check_convolution(scheme, cls.__name__)
        return scheme.of_convolution()

    def __call__(
        self,
        lhs: Operand,
        rhs: Operand,
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: object = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: OutSharding = None,
        *,
        unrounded: jax.Array | None = None,
    ) -> jax.Array:
        """The convolution; arguments as for `lax.conv_general_dilated`, and operands as for `QDotGeneral`."""
        left, right = self._seen(lhs, rhs)
        windows = window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers
        convolution = Convolution.of(
            *(left.shape, right.shape, *windows, feature_group_count, batch_group_count),
            dtype=preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype),
            out_sharding=asked(out_sharding, as_array(left), as_array(right)),
            accumulator_dtype=self.scheme["accumulator_dtype"],
        )
        plan = Plan(convolution, convolution.dtype, what="a quantized convolution")
        y = self._contract(plan, left, right, unrounded)
        return with_sharding(y, out_sharding)

    @staticmethod
    def _arguments(lhs: jax.Array, rhs: jax.Array, numbers: object) -> tuple[object, ...]:
        space = lhs.ndim - 2
        if numbers is None:
            last = (0, lhs.ndim - 1, *range(1, lhs.ndim - 1))
            numbers = jax.lax.ConvDimensionNumbers(last, (space + 1, space, *range(space)), last)
        return lhs, rhs, (1,) * space, "SAME", None, None, numbers


class QRaggedDot(QuantizedOp):
    """Replaces `lax.ragged_dot_general`, quantized by a scheme, forward and backward; see `QDotGeneral`.

    Backward products contract dequantized values. Blocks along rows may hold rows of several experts, so a scheme that
    transforms operands along rows (`pre_transform` of `wgrad_lhs` and `wgrad_grad`) is refused.
    """

    @classmethod
    def _fitted(cls, scheme: SchemeSpec) -> SchemeSpec:
        check_ragged(scheme)
        return scheme

    def __call__(
        self,
        lhs: Operand,
        rhs: Operand,
        group_sizes: jax.Array,
        ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        unrounded: jax.Array | None = None,
    ) -> jax.Array:
        """The contraction; arguments as for `lax.ragged_dot_general`.

        Raises:
            ValueError: it has batch axes, or cuts a summed axis into groups.
        """
        dtype = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
        ragged = Ragged.of(lhs, rhs, ragged_dot_dimension_numbers, dtype, precision)
        if ragged is None:
            raise ValueError(
                "a scheme quantizes ragged contractions of rows cut into groups, without batch axes.\n"
                "  cure: a rule before it that names the parameter and keeps it float, or one with weight_quant"
            )
        plan = Plan(ragged, ragged.dtype, what="a ragged contraction by a scheme")
        return self._contract(plan, lhs, rhs, unrounded, group_sizes)

    @staticmethod
    def _arguments(lhs: jax.Array, rhs: jax.Array, numbers: object) -> tuple[object, ...]:
        assert isinstance(numbers, jax.lax.RaggedDotDimensionNumbers)
        experts = rhs.shape[numbers.rhs_group_dimensions[0]]
        return lhs, rhs, jnp.zeros(experts, jnp.int32), numbers
