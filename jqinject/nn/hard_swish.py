"""The quantized hard swish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, final, overload

import jax
from flax import nnx

from jqinject.nn.base.act_layer import QuantActLayer
from jqinject.nn.base.override_keywords import QuantHardSwishOverrides
from jqinject.nn.base.quant_layer import Out
from jqinject.quant import QuantizerLike, Uint8ActPerTensorFloat
from jqinject.quant_tensor import AnyQuantTensor, as_array


@final
class QuantHardSwish(QuantActLayer[Out]):
    """y = act_quant(x * min(max(x + 3, 0), 6) / 6); by default unsigned 8 bits, which clip its few negative results.

    Args:
        act_quant: quantizer of the result: an injector, a proxy to share, or None.
        input_quant: quantizer of what comes in.
        return_quant_tensor: return an `IntQuantTensor` instead of its value.
        grad_quant: quantizer of the gradient that flows into the result, on its way back.
        rngs: for quantizers that draw random numbers.
        overrides: names of `act_quant`, declared anew, without a prefix; those of `input_quant` with
            `input_`, of `grad_quant` with `grad_`.

    Raises:
        TypeError: an argument that is not a quantizer for activations, or an override that has no effect.
        ValueError: `return_quant_tensor` without `act_quant`; a quantizer that does not say `signed`.

    Example:
        >>> import jax.numpy as jnp
        >>> QuantHardSwish(return_quant_tensor=True)(jnp.array([-1.0, 0.0, 1.0])).int()
        Array([  0,   0, 255], dtype=uint8)
    """

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantHardSwish[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantHardSwish[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantHardSwish[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        act_quant: QuantizerLike = Uint8ActPerTensorFloat,
        input_quant: QuantizerLike = None,
        *,
        return_quant_tensor: bool = False,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[QuantHardSwishOverrides],
    ) -> None:
        self._init_quantizers(locals(), overrides, return_quant_tensor, rngs)

    def _activation(self, x: Any) -> Any:
        return jax.nn.hard_swish(as_array(x))
