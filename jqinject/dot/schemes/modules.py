"""Modules that take the place of `lax.dot_general`, `jnp.einsum` and `lax.conv_general_dilated` in Flax's layers."""

from __future__ import annotations

from typing import Any

import jax

from jqinject.dot.geometry.dimensions import checked_dimensions
from jqinject.dot.geometry.labels import Labelling, summed_labels
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.schemes.operand import ScaledOperand
from jqinject.dot.schemes.quantized_conv import quantized_conv
from jqinject.dot.schemes.quantized_dot import QuantizedDotGeneral
from jqinject.dot.schemes.quantized_einsum import einsum_by
from jqinject.dot.schemes.quantized_op import QuantizedOp
from jqinject.dot.schemes.scheme_conv import kernel_of, scheme_conv
from jqinject.dot.schemes.scheme_dot import ExplainedScheme, explain_scheme, scheme_dot_general
from jqinject.dot.tensors.laid_operand import Laid
from jqinject.ops.devices.explicit_axes import asked, laid_as

Axes = tuple[int, ...]


class QDotGeneral(QuantizedOp):
    """Takes the place of `lax.dot_general`, quantized as a configuration says, forward and backward.

    For `nnx.Linear(dot_general=...)`, `nnx.LinearGeneral` and the projections of `nnx.MultiHeadAttention`.

    Each operand has a mode. `TRAIN` quantizes it at every call, `CONVERT` also stores its payload and scale, and
    `SERVE` takes them from there, whatever is handed in; a stored operand has no gradient. No keys are drawn then,
    so that a gradient of the other operand needs `rng_type=None`. The modes are attributes:
    `model.set_attributes(rhs_quant_mode=QuantMode.SERVE)`. All three modes give the same output for the same weights.

    Args:
        config: a `Scheme`, an injector such as `config_v4()`, or a `QuantizedDotGeneral`.
        lhs_quant_mode, rhs_quant_mode: of the left operand (activations, in Flax's layers) and the right one (weights).
        lhs_freezer, rhs_freezer: a `Freezer`, or its arguments, such as `{"shape": (64, 32), "scale_shape": (1, 32)}`,
            so that its variables are there from the start: to load a frozen checkpoint, also abstractly.
        lhs_range: a static range of the left operand: a `CalibratedQuant` with an average, whose range takes the place
            of `calibration`; also what `lhs_range` of the injector assembles. Symmetric.
        rngs: where the keys of stochastic rounding come from; needed to train where gradients are rounded so.

    Raises:
        TypeError: `config` is no configuration, or a mode is no `QuantMode`.
        ValueError: SERVE before CONVERT; a stored operand of another shape; stochastic rounding without `rngs`, when a
            gradient is taken; a static range that has a zero point, or of an operand without bits.

    Source: FJFormer's `QDotGeneral`, AQT's `AqtDotGeneral`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.dot import QuantMode, config_v4
        >>> dot_general = QDotGeneral(config_v4(), rhs_quant_mode=QuantMode.CONVERT)
        >>> layer = nnx.Linear(3, 2, dot_general=dot_general, rngs=nnx.Rngs(0))
        >>> y = layer(jnp.ones((4, 3)))
        >>> layer.set_attributes(rhs_quant_mode=QuantMode.SERVE)
        >>> layer.kernel[...] = jnp.zeros((3, 2))  # nobody looks at it any more
        >>> bool(jnp.all(layer(jnp.ones((4, 3))) == y)), dot_general.rhs_freezer.value.dtype
        (True, dtype('int8'))
    """

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The contraction; arguments as for `lax.dot_general`."""
        dtype = preferred_element_type or jax.numpy.promote_types(lhs.dtype, rhs.dtype)
        if self.scheme is not None:
            return by_scheme(self, lhs, rhs, dimension_numbers, dtype, out_sharding)
        general: QuantizedDotGeneral = self.general
        left, right = self._operands(
            lhs,
            rhs,
            lambda a, b: general.forward_operands(a, b, dimension_numbers),
            _summed(lhs, rhs, dimension_numbers),
        )
        return general(
            left, right, dimension_numbers, precision, dtype, key=self._key(), out_sharding=out_sharding
        )

    def explain(self, lhs: Any, rhs: Any, dimension_numbers: Any) -> ExplainedScheme:
        """What the three products of a scheme contract: payloads, or floats, and why; nothing is computed.

        Args:
            lhs, rhs: arrays, or anything with a shape and a dtype.
            dimension_numbers: as for a call.

        Returns:
            A tuple of `ExplainedProduct`, which prints a line each.

        Raises:
            TypeError: the configuration is no `Scheme`.

        Example:
            >>> import jax.numpy as jnp
            >>> from jqinject.dot import Scheme
            >>> from jqinject.quant import Int8ActDynamicPerRow, Int8GradPerRowDynamic, Int8WeightPerChannelAbsMax
            >>> op = QDotGeneral(
            ...     Scheme.let(
            ...         fprop_lhs=Int8ActDynamicPerRow,
            ...         fprop_rhs=Int8WeightPerChannelAbsMax,
            ...         dgrad_grad=Int8GradPerRowDynamic,
            ...     )
            ... )
            >>> for product in op.explain(jnp.ones((4, 8)), jnp.ones((8, 2)), (((1,), (0,)), ((), ()))):
            ...     print(product.name, product.kind)
            fprop int
            dgrad float
            wgrad float
        """
        if self.scheme is None:
            raise TypeError("QDotGeneral.explain is for a Scheme; this op has another configuration")
        dims = checked_dimensions(tuple(lhs.shape), tuple(rhs.shape), dimension_numbers)
        return explain_scheme(self.scheme, lhs, rhs, dims, jax.numpy.promote_types(lhs.dtype, rhs.dtype))


class QEinsum(QuantizedOp):
    """Takes the place of `jnp.einsum` of two operands; see `QDotGeneral`.

    For `nnx.Einsum(einsum_op=...)`, or called `einsum(equation, lhs, rhs)`. The configuration, the mode and the
    `Freezer` of each operand go with that operand, in whatever order the equation puts them.

    Args:
        config, lhs_quant_mode, rhs_quant_mode, lhs_freezer, rhs_freezer, lhs_range, rngs: as for `QDotGeneral`.

    Raises:
        TypeError, ValueError: as for `QDotGeneral`; an equation of other than two operands.

    Source: FJFormer's `QEinsum`, AQT's `AqtEinsum`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.dot import config_v4
        >>> layer = nnx.Einsum("btd,dnh->btnh", (8, 2, 4), einsum_op=QEinsum(config_v4()), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 3, 8))).shape
        (1, 3, 2, 4)
    """

    def __call__(
        self,
        equation: str,
        lhs: jax.Array,
        rhs: jax.Array,
        *,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The einsum; arguments as for `jnp.einsum`."""

        def contract(a: jax.Array, b: jax.Array, numbers: Any, **options: Any) -> jax.Array:
            dtype = preferred_element_type or jax.numpy.promote_types(lhs.dtype, rhs.dtype)
            if self.scheme is not None:
                return by_scheme(self, a, b, numbers, dtype, **options)
            left, right = self._operands(
                a,
                b,
                lambda u, v: self.general.forward_operands(u, v, numbers),
                _summed(a, b, numbers),
            )
            return self.general(left, right, numbers, precision, dtype, key=self._key(), **options)

        return einsum_by(contract, equation, *self._seen(lhs, rhs), out_sharding)


class QConvGeneralDilated(QuantizedOp):
    """Takes the place of `lax.conv_general_dilated`; see `QDotGeneral` and `jqinject.dot.conv_general_dilated`.

    For `nnx.Conv(conv_general_dilated=...)`. Gradients are those of the float convolution.

    Args:
        config, lhs_quant_mode, rhs_quant_mode, lhs_freezer, rhs_freezer, rngs: as for `QDotGeneral`; of the
            configuration the forward contraction counts. It has no static range: `QuantConv(input_quant=...)` has.

    Source: AQT's `AqtConvGeneralDilated`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.dot import config_v4
        >>> conv = QConvGeneralDilated(config_v4())
        >>> layer = nnx.Conv(3, 8, (3, 3), conv_general_dilated=conv, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 6, 6, 3))).shape
        (2, 6, 6, 8)
    """

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        window_strides: Any,
        padding: Any,
        lhs_dilation: Any = None,
        rhs_dilation: Any = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The convolution; arguments as for `lax.conv_general_dilated`."""
        seen = self._seen(lhs, rhs)
        convolution = Convolution.of(
            seen[0].shape,
            seen[1].shape,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            batch_group_count,
            dtype=preferred_element_type or jax.numpy.promote_types(lhs.dtype, rhs.dtype),
            out_sharding=asked(out_sharding, lhs, rhs),
            **({} if self.general is None else {"contraction": self.general.fwd}),
        )
        if self.scheme is not None:
            y = scheme_conv(self.scheme, convolution, lhs, self._served(*kernel_of(convolution, rhs)))
            return laid_as(y, out_sharding)
        left, right = self._operands(lhs, rhs, convolution.operands)
        assert not (isinstance(left, ScaledOperand) or isinstance(right, ScaledOperand)), (
            "refused when it was made"
        )
        return laid_as(quantized_conv(convolution, left, right, self._key()), out_sharding)


def by_scheme(
    op: QuantizedOp, lhs: jax.Array, rhs: jax.Array, numbers: Any, dtype: Any, out_sharding: Any = None
) -> jax.Array:
    """The contraction of two arrays by the scheme of an op."""
    lhs, rhs = op._seen(lhs, rhs)
    dims = checked_dimensions(tuple(lhs.shape), tuple(rhs.shape), numbers)
    labels = Labelling.of(dims)
    right = op._served(Laid(rhs, labels.rhs), summed_labels(labels.lhs, labels.rhs, labels.out))
    return scheme_dot_general(op.scheme, lhs, right, dims, dtype, out_sharding)


def _summed(lhs: Any, rhs: Any, dimension_numbers: Any) -> tuple[Axes, Axes]:
    (left, right), _ = dimension_numbers
    return tuple(axis % lhs.ndim for axis in left), tuple(axis % rhs.ndim for axis in right)
