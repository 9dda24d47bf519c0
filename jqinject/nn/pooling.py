"""Pooling as a layer, on QuantTensors and arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, final, overload

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.nn.base.override_keywords import QuantAvgPoolOverrides, QuantMaxPoolOverrides
from jqinject.nn.base.quant_layer import Out, QuantLayer
from jqinject.nn.base.slots import INPUT, OUTPUT, hold_proxies
from jqinject.quant import QuantizerLike
from jqinject.quant_tensor import as_array, avg_pool, max_pool, on_integers


class QuantPoolLayer(QuantLayer[Out]):
    """Abstract: y = output_quant(pool(input_quant(x))), channels last.

    Attributes:
        input_quant, output_quant: proxies, or None.
        return_quant_tensor: whether what comes out as a QuantTensor stays one.
    """

    input_quant: Any = INPUT
    output_quant: Any = OUTPUT
    return_quant_tensor: bool

    def _init_pool(
        self,
        window: tuple[Sequence[int], Sequence[int] | None, Any],
        arguments: dict[str, Any],
        overrides: Mapping[str, Any],
        return_quant_tensor: bool,
        rngs: nnx.Rngs | None,
    ) -> None:
        shape, strides, padding = window
        self.window_shape = tuple(shape)
        self.strides = None if strides is None else tuple(strides)
        self.padding = padding if isinstance(padding, str) else tuple(tuple(pair) for pair in padding)
        if not self.window_shape or any(size < 1 for size in self.window_shape):
            raise ValueError(
                f"{type(self).__name__}: window_shape has a size of at least 1 for each spatial axis, got "
                f"{self.window_shape}"
            )
        if self.strides is not None and len(self.strides) != len(self.window_shape):
            raise ValueError(
                f"{type(self).__name__}: strides {self.strides} and window_shape {self.window_shape} need one entry "
                "each for every spatial axis"
            )
        self.return_quant_tensor = return_quant_tensor
        hold_proxies(self, arguments, overrides, rngs)

    @abstractmethod
    def _pool(self, x: Any) -> Any:
        """What the layer computes, of an array or a QuantTensor."""

    def __call__(self, x: Any) -> Out:
        """The pooled tensor.

        Args:
            x: (*batch, *spatial, channels), float array or QuantTensor.

        Returns:
            (*batch, *pooled, channels): a QuantTensor where one came in or a quantizer made one, unless
            `return_quant_tensor` is False; else an array.

        Raises:
            ValueError: the window has more axes than `x` has spatial ones, or scales vary along one of them.
        """
        x = x if self.input_quant is None else self.input_quant(x)
        y = self._pool(x)
        y = y if self.output_quant is None else self.output_quant(y)
        return y if self.return_quant_tensor else as_array(y)


@final
class QuantMaxPool(QuantPoolLayer[Out]):
    """The largest element of every window; scale, zero point and bit width stay.

    Args:
        window_shape: size of the window along every spatial axis.
        strides: its steps; 1 by default, as in Flax.
        padding: "VALID", "SAME", or a (low, high) pair for every spatial axis; padding never wins.
        input_quant, output_quant: quantizers: injectors, proxies to share, or None.
        return_quant_tensor: return a QuantTensor where there is one.
        rngs: for quantizers that draw random numbers.
        overrides: names that quantizers declare anew: `input_bit_width=4`, `output_...`.

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

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False], **more: Any
        ) -> QuantMaxPool[jax.Array]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool = True, **more: Any) -> QuantMaxPool[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        window_shape: Sequence[int],
        strides: Sequence[int] | None = None,
        padding: Any = "VALID",
        *,
        input_quant: QuantizerLike = None,
        output_quant: QuantizerLike = None,
        return_quant_tensor: bool = True,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[QuantMaxPoolOverrides],
    ) -> None:
        arguments = {"input_quant": input_quant, "output_quant": output_quant}
        self._init_pool((window_shape, strides, padding), arguments, overrides, return_quant_tensor, rngs)

    def _pool(self, x: Any) -> Any:
        return max_pool(x, self.window_shape, self.strides, self.padding)


@final
class QuantAvgPool(QuantPoolLayer[Out]):
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
        overrides: names that quantizers declare anew: `input_bit_width=4`, `output_...`.

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

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False], **more: Any
        ) -> QuantAvgPool[jax.Array]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool = True, **more: Any) -> QuantAvgPool[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        window_shape: Sequence[int],
        strides: Sequence[int] | None = None,
        padding: Any = "VALID",
        count_include_pad: bool = True,
        *,
        input_quant: QuantizerLike = None,
        output_quant: QuantizerLike = None,
        return_quant_tensor: bool = True,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[QuantAvgPoolOverrides],
    ) -> None:
        self.count_include_pad = count_include_pad
        arguments = {"input_quant": input_quant, "output_quant": output_quant}
        self._init_pool((window_shape, strides, padding), arguments, overrides, return_quant_tensor, rngs)

    def _pool(self, x: Any) -> Any:
        x = x if on_integers(x) else as_array(x)
        window = (self.window_shape, self.strides, self.padding)
        if self.count_include_pad or self.padding == "VALID":
            return avg_pool(x, *window)
        present = jnp.ones((*x.shape[x.ndim - 1 - len(self.window_shape) : -1], 1), x.dtype)
        return avg_pool(as_array(x), *window) / avg_pool(present, *window)
