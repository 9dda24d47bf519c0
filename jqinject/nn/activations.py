"""Quantized activations: an activation function, then a quantizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack, final, overload

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.inject import Binding, ExtendedInjector
from jqinject.nn.base.act_layer import QuantActLayer
from jqinject.nn.base.override_keywords import (
    QuantHardTanhOverrides,
    QuantIdentityOverrides,
    QuantReLUOverrides,
    QuantSigmoidOverrides,
    QuantTanhOverrides,
)
from jqinject.nn.base.quant_layer import Out
from jqinject.ops import tensor_clamp
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8ActPerTensorFloatMinMaxInit,
    QuantizerLike,
    Uint8ActPerTensorFloat,
)
from jqinject.quant_tensor import (
    AnyQuantTensor,
    as_array,
    is_quantized,
    on_integers,
    on_minifloats,
    relu,
)


@final
class QuantIdentity(QuantActLayer[Out]):
    """A quantizer as a layer: y = act_quant(x). Without one, what comes in goes out.

    Args:
        act_quant: quantizer of what flows through: an injector, a proxy to share, or None.
        return_quant_tensor: return an `IntQuantTensor` instead of its value.
        grad_quant: quantizer of the gradient that flows into the result, on its way back.
        rngs: for quantizers that draw random numbers.
        overrides: names of `act_quant`, declared anew, without a prefix; those of `grad_quant` with `grad_`.

    Raises:
        TypeError: an argument that is not a quantizer for activations, or an override that has no effect.
        ValueError: a quantizer that does not say `signed`.

    Example:
        >>> identity = QuantIdentity(bit_width=4, return_quant_tensor=True)
        >>> identity(jnp.array([-0.8, 0.3])).int()
        Array([-8,  3], dtype=int8)
    """

    input_quant = None
    keeps_scale = True

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantIdentity[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantIdentity[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantIdentity[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        act_quant: QuantizerLike = Int8ActPerTensorFloat,
        *,
        return_quant_tensor: bool = False,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[QuantIdentityOverrides],
    ) -> None:
        self._init_quantizers(
            {"act_quant": act_quant, "grad_quant": grad_quant}, overrides, return_quant_tensor, rngs
        )

    def _activation(self, x: Any) -> Any:
        return x


@final
class QuantReLU(QuantActLayer[Out]):
    """y = act_quant(max(x, 0)); by default unsigned 8 bits. Without a quantizer a QuantTensor keeps its scale.

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
        ValueError: a quantizer that does not say `signed`.

    Example:
        >>> QuantReLU(return_quant_tensor=True)(jnp.array([-1.0, 2.55])).int()
        Array([  0, 255], dtype=uint8)
    """

    keeps_scale = True

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantReLU[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantReLU[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantReLU[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        act_quant: QuantizerLike = Uint8ActPerTensorFloat,
        input_quant: QuantizerLike = None,
        *,
        return_quant_tensor: bool = False,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[QuantReLUOverrides],
    ) -> None:
        self._init_quantizers(locals(), overrides, return_quant_tensor, rngs)

    def _activation(self, x: Any) -> Any:
        return relu(x) if is_quantized(x) else jax.nn.relu(x)


@final
class QuantSigmoid(QuantActLayer[Out]):
    """y = act_quant(1 / (1 + exp(-x))); by default unsigned 8 bits.

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
        >>> QuantSigmoid(bit_width=2)(jnp.array([-9.0, 9.0])).round(3)
        Array([0., 1.], dtype=float32)
    """

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantSigmoid[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantSigmoid[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantSigmoid[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        act_quant: QuantizerLike = Uint8ActPerTensorFloat,
        input_quant: QuantizerLike = None,
        *,
        return_quant_tensor: bool = False,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[QuantSigmoidOverrides],
    ) -> None:
        self._init_quantizers(locals(), overrides, return_quant_tensor, rngs)

    def _activation(self, x: Any) -> Any:
        return jax.nn.sigmoid(as_array(x))


@final
class QuantTanh(QuantActLayer[Out]):
    """y = act_quant(tanh(x)); by default signed 8 bits.

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
        >>> QuantTanh(bit_width=2)(jnp.array([-9.0, 0.0])).round(3)
        Array([-1.,  0.], dtype=float32)
    """

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantTanh[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantTanh[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantTanh[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        act_quant: QuantizerLike = Int8ActPerTensorFloat,
        input_quant: QuantizerLike = None,
        *,
        return_quant_tensor: bool = False,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[QuantTanhOverrides],
    ) -> None:
        self._init_quantizers(locals(), overrides, return_quant_tensor, rngs)

    def _activation(self, x: Any) -> Any:
        return jnp.tanh(as_array(x))


@final
class QuantHardTanh(QuantActLayer[Out]):
    """y = act_quant(min(max(x, min_val), max_val)); by default signed 8 bits, the scale learned from the two bounds on.

    A quantizer that clamps already is not clamped twice: where one is on, its own range decides. Without a quantizer a
    QuantTensor keeps its scale; bounds that are not on its grid leave a tensor that is not valid. Source: Brevitas.

    Args:
        act_quant: quantizer of the result: an injector, a proxy to share, or None.
        input_quant: quantizer of what comes in.
        min_val: the lower bound; -1 unless the quantizer declares one.
        max_val: the upper bound; 1 unless the quantizer declares one.
        return_quant_tensor: return an `IntQuantTensor` instead of its value.
        grad_quant: quantizer of the gradient that flows into the result, on its way back.
        rngs: for quantizers that draw random numbers.
        overrides: names of `act_quant`, declared anew, without a prefix; those of `input_quant` with
            `input_`, of `grad_quant` with `grad_`.

    Raises:
        TypeError: an argument that is not a quantizer for activations, or an override that has no effect.
        ValueError: bounds in the wrong order.

    Example:
        >>> QuantHardTanh(bit_width=4)(jnp.array([-3.0, 0.25, 3.0]))
        Array([-1.   ,  0.25 ,  0.875], dtype=float32)
    """

    keeps_scale = True

    if TYPE_CHECKING:

        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[False] = False, **more: Any
        ) -> QuantHardTanh[jax.Array]: ...
        @overload
        def __new__(
            cls, *args: Any, return_quant_tensor: Literal[True], **more: Any
        ) -> QuantHardTanh[AnyQuantTensor]: ...
        @overload
        def __new__(cls, *args: Any, return_quant_tensor: bool, **more: Any) -> QuantHardTanh[Any]: ...
        def __new__(cls, *args: Any, **more: Any) -> Any: ...

    def __init__(
        self,
        act_quant: QuantizerLike = Int8ActPerTensorFloatMinMaxInit,
        input_quant: QuantizerLike = None,
        *,
        min_val: float | None = None,
        max_val: float | None = None,
        return_quant_tensor: bool = False,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[QuantHardTanhOverrides],
    ) -> None:
        binding = _binding(act_quant)
        self.min_val, self.max_val = _bounds(binding, min_val, max_val)
        if not self.min_val < self.max_val:
            raise ValueError(
                f"QuantHardTanh: min_val has to be below max_val, got {self.min_val} and {self.max_val}"
            )
        given: Mapping[str, Any] = overrides
        offered = {"min_val": self.min_val, "max_val": self.max_val}
        if binding is not None:
            asked_for = {"min_val": min_val, "max_val": max_val}
            given = {**{n: offered[n] for n in asked_for if asked_for[n] is not None}, **overrides}
        self._init_quantizers(locals(), given, return_quant_tensor, rngs, offered)

    def _activation(self, x: Any) -> Any:
        value = as_array(x)
        low, high = (jnp.asarray(bound, value.dtype) for bound in (self.min_val, self.max_val))
        clamped = tensor_clamp(value, low, high)
        return x.set(value=clamped) if (on_integers(x) or on_minifloats(x)) else clamped

    def _before_quantizer(self, x: jax.Array) -> jax.Array:
        return x


def _binding(given: Any) -> Binding | None:
    """The binding of an injector; None of what is none."""
    is_injector = isinstance(given, type) and issubclass(given, ExtendedInjector)
    return given if isinstance(given, Binding) else Binding(given) if is_injector else None


def _bounds(binding: Binding | None, min_val: float | None, max_val: float | None) -> tuple[float, float]:
    """Each bound: as given, else as the quantizer declares it itself, else -1 and 1."""

    def bound(name: str, given: float | None, default: float, **known: Any) -> float:
        if given is None and binding is not None and binding.declares(name):
            given = binding.resolve(name, **known)
        return default if given is None else float(given)

    highest = bound("max_val", max_val, 1.0)
    return bound("min_val", min_val, -1.0, max_val=highest), highest
