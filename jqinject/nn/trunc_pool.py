"""Average pooling on integers: sums, then truncation to fewer bits instead of a division."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, final, overload

import jax
from flax import nnx

from jqinject.nn.base.override_keywords import (
    TruncAdaptiveAvgPool2dOverrides,
    TruncAvgPool2dOverrides,
    TruncAvgPoolOverrides,
)
from jqinject.nn.base.quant_layer import Out, QuantLayer
from jqinject.nn.base.slots import TRUNC, hold_proxies
from jqinject.quant import QuantizerLike, RoundTo8bit
from jqinject.quant_tensor import IntQuantTensor, adaptive_avg_pool, as_array, avg_pool, on_integers

_Padding = str | Sequence[tuple[int, int]]


class QuantTruncLayer(QuantLayer[Out]):
    """Abstract: y = trunc_quant(mean(x)), where the integers of the mean are sums.

    Attributes:
        trunc_quant: the proxy, or None.
        return_quant_tensor: whether the output is a QuantTensor.
    """

    trunc_quant: Any = TRUNC
    return_quant_tensor: bool

    def _init_quantizers(
        self,
        trunc_quant: QuantizerLike,
        overrides: Mapping[str, Any],
        return_quant_tensor: bool,
        rngs: nnx.Rngs | None,
    ) -> None:
        vars(self).update(return_quant_tensor=return_quant_tensor)
        hold_proxies(self, {"trunc_quant": trunc_quant}, overrides, rngs)

    @abstractmethod
    def _mean(self, x: Any) -> Any:
        """The pooling, on an array or a QuantTensor."""

    def __call__(self, x: Any) -> Out:
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
            return self._mean(as_array(x))
        y = self._mean(x)
        y = y if self.trunc_quant is None else self.trunc_quant(y)
        return y if self.return_quant_tensor else as_array(y)


@final
class TruncAvgPool(QuantTruncLayer[Out]):
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
        overrides: names of `trunc_quant`, declared anew, without a prefix.

    Raises:
        TypeError: an argument that is not a quantizer of accumulators, or an override that has no effect.

    Example:
        >>> import jax.numpy as jnp
        >>> x = IntQuantTensor.from_int(jnp.arange(8).reshape(1, 8, 1), 1.0, signed=False)
        >>> y = TruncAvgPool((4,), strides=(4,), bit_width=9)(x)  # sums of 10 bits: 6 and 22
        >>> y.int().ravel().tolist(), y.value.ravel().tolist()
        ([3, 11], [1.5, 5.5])
    """

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True] = True, **more: Any
        ) -> TruncAvgPool[IntQuantTensor]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False], **more: Any
        ) -> TruncAvgPool[jax.Array]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> TruncAvgPool[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        window_shape: Sequence[int],
        strides: Sequence[int] | None = None,
        padding: _Padding = "VALID",
        *,
        trunc_quant: QuantizerLike = RoundTo8bit,
        return_quant_tensor: bool = True,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[TruncAvgPoolOverrides],
    ) -> None:
        self.window_shape = tuple(window_shape)
        self.strides = None if strides is None else tuple(strides)
        self.padding: _Padding = padding if isinstance(padding, str) else tuple(padding)
        self._init_quantizers(trunc_quant, overrides, return_quant_tensor, rngs)

    def _mean(self, x: Any) -> Any:
        return avg_pool(x, self.window_shape, self.strides, self.padding)


@final
class TruncAvgPool2d(QuantTruncLayer[Out]):
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
        overrides: names of `trunc_quant`, declared anew, without a prefix.

    Raises:
        TypeError: an argument that is not a quantizer of accumulators, or an override that has no effect.

    Example:
        >>> import jax.numpy as jnp
        >>> x = IntQuantTensor.from_int(jnp.full((1, 4, 4, 3), 200), 0.1, signed=False)
        >>> y = TruncAvgPool2d(2, strides=2)(x)
        >>> y.shape, y.int().max().item(), y.bit_width
        ((1, 2, 2, 3), 200, 8)
    """

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True] = True, **more: Any
        ) -> TruncAvgPool2d[IntQuantTensor]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False], **more: Any
        ) -> TruncAvgPool2d[jax.Array]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> TruncAvgPool2d[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        window_shape: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        padding: _Padding = "VALID",
        *,
        trunc_quant: QuantizerLike = RoundTo8bit,
        return_quant_tensor: bool = True,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[TruncAvgPool2dOverrides],
    ) -> None:
        self.window_shape = _pair(window_shape, "window_shape")
        self.strides = None if strides is None else _pair(strides, "strides")
        self.padding: _Padding = padding if isinstance(padding, str) else tuple(padding)
        self._init_quantizers(trunc_quant, overrides, return_quant_tensor, rngs)

    def _mean(self, x: Any) -> Any:
        return avg_pool(x, self.window_shape, self.strides, self.padding)


@final
class TruncAdaptiveAvgPool2d(QuantTruncLayer[Out]):
    """`TruncAvgPool2d` with windows that leave `output_size` along height and width.

    Source: Brevitas's `TruncAdaptiveAvgPool2d`; differs from Brevitas: channels last, and sizes that do not divide
    are an error, as windows of different size would need different scales.

    Args:
        output_size: height and width of the output; one number for both.
        trunc_quant: quantizer of the sums: an injector, a proxy to share, or None for all bits.
        return_quant_tensor: return an `IntQuantTensor` instead of its value.
        rngs: for quantizers that draw random numbers.
        overrides: names of `trunc_quant`, declared anew, without a prefix.

    Raises:
        TypeError: an argument that is not a quantizer of accumulators, or an override that has no effect.

    Example:
        >>> import jax.numpy as jnp
        >>> x = IntQuantTensor.from_int(jnp.full((1, 6, 4, 3), 7), 0.1, signed=False)
        >>> TruncAdaptiveAvgPool2d(1, bit_width=16)(x).shape
        (1, 1, 1, 3)
    """

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True] = True, **more: Any
        ) -> TruncAdaptiveAvgPool2d[IntQuantTensor]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False], **more: Any
        ) -> TruncAdaptiveAvgPool2d[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: bool, **more: Any
        ) -> TruncAdaptiveAvgPool2d[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        output_size: int | Sequence[int],
        *,
        trunc_quant: QuantizerLike = RoundTo8bit,
        return_quant_tensor: bool = True,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[TruncAdaptiveAvgPool2dOverrides],
    ) -> None:
        self.output_size = _pair(output_size, "output_size")
        self._init_quantizers(trunc_quant, overrides, return_quant_tensor, rngs)

    def _mean(self, x: Any) -> Any:
        return adaptive_avg_pool(x, self.output_size)


def _pair(given: int | Sequence[int], name: str) -> tuple[int, ...]:
    """Height and width; one number for both."""
    pair = (given, given) if isinstance(given, int) else tuple(given)
    if len(pair) != 2 or any(size < 1 for size in pair):
        raise ValueError(f"{name} must be one positive int or two, for height and width, got {given!r}")
    return pair
