"""Pooling as a layer, on QuantTensors and arrays: maxima, means, and sums that are truncated instead of divided."""

from collections.abc import Sequence
from typing import Any, TypeAlias, Unpack, final

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.nn import base
from jqinject.nn.base import keywords
from jqinject.quant import RoundTo8bit
from jqinject.quant_tensor import (
    IntQuantTensor,
    Operand,
    adaptive_avg_pool,
    as_array,
    avg_pool,
    max_pool,
    on_integers,
)

Padding: TypeAlias = str | Sequence[tuple[int, int]]


class QuantWindowLayer(base.QuantTensorLayer[base.Out]):
    """Abstract: a layer that moves a window over spatial axes.

    Attributes:
        window_shape, strides, padding: of the window, as `nnx.avg_pool` takes them.
        return_quant_tensor: whether what comes out as a QuantTensor stays one.
    """

    window_shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    padding: Padding

    def _init_pool(self, arguments: base.Arguments) -> None:
        """Check the window, then make the quantizers.

        Args:
            arguments: the `locals()` of `__init__`.
        """
        window_shape, strides, padding = (arguments[name] for name in ("window_shape", "strides", "padding"))
        self.window_shape = tuple(window_shape)
        self.strides = None if strides is None else tuple(strides)
        self.padding = padding if isinstance(padding, str) else tuple((low, high) for low, high in padding)
        if any(size < 1 for size in self.window_shape):
            raise ValueError(
                f"{type(self).__name__}: window_shape has a size of at least 1 for each spatial axis, got "
                f"{self.window_shape}"
            )
        if self.strides is not None and len(self.strides) != len(self.window_shape):
            raise ValueError(
                f"{type(self).__name__}: strides {self.strides} and window_shape {self.window_shape} need one entry "
                "each for every spatial axis"
            )
        self._init_layer(arguments)

    def _pooled(self, x: Operand) -> Any:
        """The means of the windows, of an array or a QuantTensor."""
        return avg_pool(x, self.window_shape, self.strides, self.padding)


class QuantPoolLayer(QuantWindowLayer[base.Out]):
    """Abstract: y = output_quant(pool(input_quant(x))), channels last.

    Attributes:
        input_quant, output_quant: proxies, or None.
    """

    input_quant = base.INPUT
    output_quant = base.OUTPUT

    def __init__(
        self,
        window_shape: Sequence[int],
        strides: Sequence[int] | None = None,
        padding: Padding = "VALID",
        *,
        rngs: nnx.Rngs | None = None,
        **more: Unpack[keywords.QuantMaxPoolKeywords],
    ) -> None:
        self._init_pool(locals())

    def __call__(self, x: Any) -> base.Out:
        """The pooled tensor.

        Args:
            x: (*batch, *spatial, channels), float array or QuantTensor.

        Returns:
            (*batch, *pooled, channels): a QuantTensor where one came in or a quantizer made one, unless
            `return_quant_tensor` is False; else an array.

        Raises:
            ValueError: the window has more axes than `x` has spatial ones, or scales vary along one of them.
        """
        y = base.through(self.output_quant, self._pooled(base.through(self.input_quant, x)))
        return y if self.return_quant_tensor else as_array(y)


@final
class QuantMaxPool(QuantPoolLayer[base.Out]):
    """The largest element of every window; scale, zero point and bit width stay.

    Args:
        window_shape: size of the window along every spatial axis.
        strides: its steps; 1 by default, as in Flax.
        padding: "VALID", "SAME", or a (low, high) pair for every spatial axis; padding never wins.
        input_quant, output_quant: quantizers: injectors, proxies to share, or None.
        return_quant_tensor: return a QuantTensor where there is one.
        rngs: for quantizers that draw random numbers.
        more: names that quantizers declare anew: `input_bit_width=4`, `output_...`.

    Raises:
        TypeError: an argument that is not a quantizer of activations, or an override that has no effect.
        ValueError: a window or strides that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> pool = QuantMaxPool((2, 2), (2, 2), input_quant=Int8ActPerTensorFloat)
        >>> y = pool(jnp.arange(16.0).reshape(1, 4, 4, 1))
        >>> y.shape, y.bit_width
        ((1, 2, 2, 1), 8)
    """

    _results: "base.Results[QuantMaxPool[jax.Array], QuantMaxPool[Any]]"

    def _pooled(self, x: Operand) -> Any:
        return max_pool(x, self.window_shape, self.strides, self.padding)


@final
class QuantAvgPool(QuantPoolLayer[base.Out]):
    """The mean of every window. A QuantTensor's integers are summed: scale / k, bits = ceil(log2((2^b - 1) k)).

    Args:
        window_shape: size of the window along every spatial axis, k in all.
        strides: its steps; 1 by default, as in Flax.
        padding: "VALID", "SAME", or a (low, high) pair for every spatial axis.
        count_include_pad: whether padding counts as zeros in the mean; without it the divisors, and so the scales of
            integers, would differ within one tensor: then a QuantTensor gives a plain array.
        input_quant, output_quant: quantizers: injectors, proxies to share, or None.
        return_quant_tensor: return a QuantTensor where there is one.
        rngs: for quantizers that draw random numbers.
        more: names that quantizers declare anew: `input_bit_width=4`, `output_...`.

    Raises:
        TypeError: an argument that is not a quantizer of activations, or an override that has no effect.
        ValueError: a window or strides that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> pool = QuantAvgPool((2, 2), (2, 2), input_quant=Int8ActPerTensorFloat)
        >>> y = pool(jnp.ones((1, 4, 4, 1)))
        >>> y.shape, y.bit_width
        ((1, 2, 2, 1), 10)
    """

    _results: "base.Results[QuantAvgPool[jax.Array], QuantAvgPool[Any]]"

    def __init__(
        self,
        window_shape: Sequence[int],
        strides: Sequence[int] | None = None,
        padding: Padding = "VALID",
        count_include_pad: bool = True,
        *,
        rngs: nnx.Rngs | None = None,
        **more: Unpack[keywords.QuantAvgPoolKeywords],
    ) -> None:
        self.count_include_pad = count_include_pad
        self._init_pool(locals())

    def _pooled(self, x: Operand) -> Any:
        x = x if on_integers(x) else as_array(x)
        if self.count_include_pad or self.padding == "VALID":
            return super()._pooled(x)
        present = jnp.ones((*x.shape[x.ndim - 1 - len(self.window_shape) : -1], 1), x.dtype)
        return super()._pooled(as_array(x)) / super()._pooled(present)


class QuantTruncLayer(QuantWindowLayer[base.Out]):
    """Abstract: y = trunc_quant(mean(x)), where the integers of the mean are sums.

    Attributes:
        trunc_quant: the proxy, or None.
    """

    trunc_quant = base.TRUNC.by_default(RoundTo8bit)

    def __call__(self, x: Any) -> base.Out:
        """The means of the windows, with the integers of `trunc_quant`.

        Args:
            x: `IntQuantTensor` of shape (*batch, *spatial, channels); an array is pooled in float, without
                `return_quant_tensor`.

        Returns:
            An `IntQuantTensor`, or its value without `return_quant_tensor`, of shape (*batch, *pooled, channels).

        Raises:
            TypeError: `x` is an array, and a QuantTensor is to be returned.
            ValueError: the window does not fit, or scales vary along an axis that is pooled.
        """
        if not on_integers(x):
            if self.return_quant_tensor:
                raise TypeError(
                    f"{type(self).__name__}: expected an IntQuantTensor, whose integers are summed, got "
                    f"{type(x).__name__}.\n  cure: return_quant_tensor=True in the layer before, or "
                    "return_quant_tensor=False here, to pool in float"
                )
            return self._pooled(as_array(x))
        y = base.through(self.trunc_quant, self._pooled(x))
        return y if self.return_quant_tensor else as_array(y)


@final
class TruncAvgPool(QuantTruncLayer[base.Out]):
    """The mean of every window of an `IntQuantTensor`: the sums of its integers, cut to fewer bits by `trunc_quant`.

    For k elements in a window the integers are sums of k and have ceil(log2((2**b - 1) * k)) bits; the scale is that of
    the input divided by k. `trunc_quant` then divides the integers by a power of two and multiplies the scale by it.

    Source: Brevitas's `TruncAvgPool2d`; differs from Brevitas: any number of spatial axes, channels last, and the
    arguments of `nnx.avg_pool`: strides are 1 unless given.

    Args:
        window_shape: size of the window along every spatial axis.
        strides: steps of the window; 1 by default.
        padding: "VALID", "SAME", or a (low, high) pair for every spatial axis; it counts as zeros.
        trunc_quant: quantizer of the sums: an injector, a proxy to share, or None for all bits.
        return_quant_tensor: return an `IntQuantTensor` instead of its value.
        rngs: for quantizers that draw random numbers.
        more: names of `trunc_quant`, declared anew, without a prefix.

    Raises:
        TypeError: an argument that is not a quantizer of accumulators, or an override that has no effect.

    Example:
        >>> import jax.numpy as jnp
        >>> x = IntQuantTensor.from_int(jnp.arange(8).reshape(1, 8, 1), 1.0, signed=False)
        >>> y = TruncAvgPool((4,), strides=(4,), bit_width=9)(x)  # sums of 10 bits: 6 and 22
        >>> y.int().ravel().tolist(), y.value.ravel().tolist()
        ([3, 11], [1.5, 5.5])
    """

    _results: "base.Results[TruncAvgPool[jax.Array], TruncAvgPool[IntQuantTensor]]"

    def __init__(
        self,
        window_shape: Sequence[int],
        strides: Sequence[int] | None = None,
        padding: Padding = "VALID",
        *,
        rngs: nnx.Rngs | None = None,
        **more: Unpack[keywords.TruncAvgPoolKeywords],
    ) -> None:
        self._init_pool(locals())


@final
class TruncAvgPool2d(QuantTruncLayer[base.Out]):
    """`TruncAvgPool` for images: (*batch, height, width, channels).

    Source: Brevitas's `TruncAvgPool2d`; differs from Brevitas: channels last, and the arguments of `nnx.avg_pool`:
    strides are 1 unless given.

    Args:
        window_shape: height and width of the window; one number for both.
        strides: its steps, likewise; 1 by default.
        padding: "VALID", "SAME", or a (low, high) pair for every spatial axis; it counts as zeros.
        trunc_quant: quantizer of the sums: an injector, a proxy to share, or None for all bits.
        return_quant_tensor: return an `IntQuantTensor` instead of its value.
        rngs: for quantizers that draw random numbers.
        more: names of `trunc_quant`, declared anew, without a prefix.

    Raises:
        TypeError: an argument that is not a quantizer of accumulators, or an override that has no effect.

    Example:
        >>> import jax.numpy as jnp
        >>> x = IntQuantTensor.from_int(jnp.full((1, 4, 4, 3), 200), 0.1, signed=False)
        >>> y = TruncAvgPool2d(2, strides=2)(x)
        >>> y.shape, y.int().max().item(), y.bit_width
        ((1, 2, 2, 3), 200, 8)
    """

    _results: "base.Results[TruncAvgPool2d[jax.Array], TruncAvgPool2d[IntQuantTensor]]"

    def __init__(
        self,
        window_shape: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        padding: Padding = "VALID",
        *,
        rngs: nnx.Rngs | None = None,
        **more: Unpack[keywords.TruncAvgPool2dKeywords],
    ) -> None:
        window_shape = _pair(window_shape, "window_shape")
        strides = None if strides is None else _pair(strides, "strides")
        self._init_pool(locals())


@final
class TruncAdaptiveAvgPool2d(QuantTruncLayer[base.Out]):
    """`TruncAvgPool2d` with windows that leave `output_size` along height and width.

    Source: Brevitas's `TruncAdaptiveAvgPool2d`; differs from Brevitas: channels last, and sizes that do not divide
    are an error, as windows of different size would need different scales.

    Args:
        output_size: height and width of the output; one number for both.
        trunc_quant: quantizer of the sums: an injector, a proxy to share, or None for all bits.
        return_quant_tensor: return an `IntQuantTensor` instead of its value.
        rngs: for quantizers that draw random numbers.
        more: names of `trunc_quant`, declared anew, without a prefix.

    Raises:
        TypeError: an argument that is not a quantizer of accumulators, or an override that has no effect.

    Example:
        >>> import jax.numpy as jnp
        >>> x = IntQuantTensor.from_int(jnp.full((1, 6, 4, 3), 7), 0.1, signed=False)
        >>> TruncAdaptiveAvgPool2d(1, bit_width=16)(x).shape
        (1, 1, 1, 3)
    """

    _results: "base.Results[TruncAdaptiveAvgPool2d[jax.Array], TruncAdaptiveAvgPool2d[IntQuantTensor]]"

    def __init__(
        self,
        output_size: int | Sequence[int],
        *,
        rngs: nnx.Rngs | None = None,
        **more: Unpack[keywords.TruncAdaptiveAvgPool2dKeywords],
    ) -> None:
        self.output_size = _pair(output_size, "output_size")
        self._init_layer(locals())

    def _pooled(self, x: Any) -> Any:
        return adaptive_avg_pool(x, self.output_size)


def _pair(sizes: int | Sequence[int], name: str) -> tuple[int, ...]:
    """Height and width; one number for both."""
    pair = (sizes, sizes) if isinstance(sizes, int) else tuple(sizes)
    if len(pair) != 2 or any(size < 1 for size in pair):
        raise ValueError(f"{name} must be one positive int or two, for height and width, got {sizes!r}")
    return pair
