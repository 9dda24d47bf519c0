"""Modules that take the place of `lax.dot_general`, `jnp.einsum` and `lax.conv_general_dilated` in Flax's layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jqinject.core import CalibratedQuant, warn_if_uncalibrated
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.schemes.contraction import Operand
from jqinject.dot.schemes.operand import QuantizedOperand, ScaledOperand
from jqinject.dot.schemes.quantized_conv import quantized_conv
from jqinject.dot.schemes.quantized_dot import QuantizedDotGeneral
from jqinject.dot.schemes.quantized_einsum import einsum_by
from jqinject.dot.schemes.static_range import checked_range, range_of, scaled
from jqinject.dot.tensors.freezer import Freezer, QuantMode
from jqinject.dot.tensors.jax_functions import assembled
from jqinject.ops.devices.explicit_axes import asked, laid_as

Axes = tuple[int, ...]
Quantize = Callable[[Any, Any], tuple[QuantizedOperand, QuantizedOperand]]


class QuantizedOp(nnx.Module):
    """What the three have in common: a configuration, a mode and a `Freezer` for each operand, random numbers."""

    lhs_quant_mode: QuantMode
    rhs_quant_mode: QuantMode

    def __init__(
        self,
        config: Any,
        *,
        lhs_quant_mode: QuantMode = QuantMode.TRAIN,
        rhs_quant_mode: QuantMode = QuantMode.TRAIN,
        lhs_freezer: Mapping[str, Any] | Freezer | None = None,
        rhs_freezer: Mapping[str, Any] | Freezer | None = None,
        lhs_range: CalibratedQuant | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        general = assembled(config)
        found = range_of(config) if lhs_range is None else lhs_range
        self.lhs_range = nnx.data(checked_range(found, general, type(self).__name__))
        self.general = general
        self.lhs_quant_mode = _checked(lhs_quant_mode, "lhs_quant_mode")
        self.rhs_quant_mode = _checked(rhs_quant_mode, "rhs_quant_mode")
        self.lhs_freezer = _freezer(lhs_freezer)
        self.rhs_freezer = _freezer(rhs_freezer)
        if general.needs_key and rngs is not None:
            # A fork, but named alike wherever it comes from: names are part of the graph.
            self.stream = nnx.RngStream(rngs["stochastic_rounding"](), tag="stochastic_rounding")
        else:
            self.stream = nnx.data(None)

    def _operands(
        self, lhs: Operand, rhs: Operand, quantize: Quantize, summed: tuple[Axes, Axes] = ((), ())
    ) -> tuple[Operand, Operand]:
        """The operands that are contracted: stored ones, ones to be stored, or as they came."""
        if self.lhs_quant_mode is QuantMode.SERVE:
            lhs = self.lhs_freezer.get()
        elif self.lhs_range is not None:
            if self.lhs_range.use_running_average:
                warn_if_uncalibrated(self, lambda: f"{type(self).__name__}.lhs_range", lhs)
            lhs = scaled(lhs, self.lhs_range, self.general)
        if self.rhs_quant_mode is QuantMode.SERVE:
            rhs = self.rhs_freezer.get()
        converts = (self.lhs_quant_mode is QuantMode.CONVERT, self.rhs_quant_mode is QuantMode.CONVERT)
        if any(converts):
            left, right = quantize(lhs, rhs)
            if converts[0]:
                self.lhs_freezer.set(left, summed[0])
                lhs = left
            if converts[1]:
                self.rhs_freezer.set(right, summed[1])
                rhs = right
        return lhs, rhs

    def has_range(self) -> bool | None:
        """Whether the static range of the left operand saw data; None without one. See `core.StaticRange`."""
        if self.lhs_range is None or self.lhs_quant_mode is QuantMode.SERVE:
            return None
        return self.lhs_range.has_range()

    def begin_calibration(self) -> None:
        """From now on collect the range of the left operand anew."""
        if self.lhs_range is not None:
            self.lhs_range.begin_calibration()

    def end_calibration(self) -> None:
        """Nothing: the range is the average."""

    def fresh(self) -> QuantizedOp:
        """Another one like it, with nothing stored and random numbers of its own."""
        other = type(self)(
            self.general,
            lhs_quant_mode=self.lhs_quant_mode,
            rhs_quant_mode=self.rhs_quant_mode,
            lhs_range=None if self.lhs_range is None else nnx.clone(self.lhs_range),
        )
        if self.stream is not None:
            other.stream = nnx.RngStream(self.stream(), tag="stochastic_rounding")
        return other

    def _seen(self, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The operands as the op sees them: what is ignored, as it is served from store, has the stored shape."""
        if self.lhs_quant_mode is QuantMode.SERVE:
            lhs = self.lhs_freezer.placeholder(lhs.dtype)
        if self.rhs_quant_mode is QuantMode.SERVE:
            rhs = self.rhs_freezer.placeholder(rhs.dtype)
        return lhs, rhs

    def _key(self) -> jax.Array | None:
        both = (self.lhs_quant_mode, self.rhs_quant_mode)
        return self.stream() if self.stream is not None and both == (QuantMode.TRAIN,) * 2 else None

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """As the function whose place it takes."""


class QDotGeneral(QuantizedOp):
    """Takes the place of `lax.dot_general`, quantized as a configuration says, forward and backward.

    For `nnx.Linear(dot_general=...)`, `nnx.LinearGeneral` and the projections of `nnx.MultiHeadAttention`.

    Each operand has a mode. `TRAIN` quantizes it at every call, `CONVERT` also stores its payload and scale, and
    `SERVE` takes them from there, whatever is handed in; a stored operand has no gradient. No keys are drawn then,
    so that a gradient of the other operand needs `rng_type=None`. The modes are attributes:
    `model.set_attributes(rhs_quant_mode=QuantMode.SERVE)`. All three modes give the same output for the same weights.

    Args:
        config: an injector such as `config_v4()`, or a `QuantizedDotGeneral`.
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
        >>> from jqinject.dot import config_v4
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
        general: QuantizedDotGeneral = self.general
        dtype = preferred_element_type or jax.numpy.promote_types(lhs.dtype, rhs.dtype)
        left, right = self._operands(
            lhs,
            rhs,
            lambda a, b: general.forward_operands(a, b, dimension_numbers),
            _summed(lhs, rhs, dimension_numbers),
        )
        return general(
            left, right, dimension_numbers, precision, dtype, key=self._key(), out_sharding=out_sharding
        )


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
            contraction=self.general.fwd,
            out_sharding=asked(out_sharding, lhs, rhs),
        )
        left, right = self._operands(lhs, rhs, convolution.operands)
        assert not (isinstance(left, ScaledOperand) or isinstance(right, ScaledOperand)), (
            "refused when it was made"
        )
        return laid_as(quantized_conv(convolution, left, right, self._key()), out_sharding)


def _summed(lhs: Any, rhs: Any, dimension_numbers: Any) -> tuple[Axes, Axes]:
    (left, right), _ = dimension_numbers
    return tuple(axis % lhs.ndim for axis in left), tuple(axis % rhs.ndim for axis in right)


def _checked(mode: Any, name: str) -> QuantMode:
    if isinstance(mode, QuantMode):
        return mode
    raise TypeError(f"{name} must be QuantMode.TRAIN, QuantMode.CONVERT or QuantMode.SERVE, got {mode!r}")


def _freezer(given: Mapping[str, Any] | Freezer | None) -> Freezer:
    return given if isinstance(given, Freezer) else Freezer(**(given or {}))
