"""Quantized activations: an activation function, then a quantizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack, final

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.inject import Binding
from jqinject.nn.base.keywords import QuantHardTanhKeywords, QuantIdentityKeywords, QuantReLUKeywords
from jqinject.nn.base.quant_layer import Out, QuantLayer, Results
from jqinject.nn.base.slots import ACT, GRAD, INPUT, binding_of, hold_proxies, is_on, through
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


class QuantActLayer(QuantLayer[Out]):
    """Abstract: y = act_quant(f(input_quant(x))).

    Attributes:
        act_quant, input_quant, grad_quant: proxies, or None.
        return_quant_tensor: whether the output is a QuantTensor.
        keeps_scale: whether the function leaves a QuantTensor its scale, so that it needs no quantizer to return one.
    """

    act_quant: Any = ACT
    input_quant: Any = INPUT
    grad_quant: Any = GRAD
    return_quant_tensor: bool
    keeps_scale: ClassVar[bool] = False

    def _init_quantizers(
        self,
        arguments: Mapping[str, Any],
        overrides: Mapping[str, Any],
        return_quant_tensor: bool,
        rngs: nnx.Rngs | None,
        offered: dict[str, Any] | None = None,
    ) -> None:
        if return_quant_tensor and arguments["act_quant"] is None and not self.keeps_scale:
            raise self._no_scale_to_return("a quantizer", "act_quant=...")
        vars(self).update(return_quant_tensor=return_quant_tensor)
        hold_proxies(self, arguments, overrides, rngs, offered=offered)

    def __init__(
        self,
        act_quant: QuantizerLike = Uint8ActPerTensorFloat,
        input_quant: QuantizerLike = None,
        *,
        return_quant_tensor: bool = False,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[QuantReLUKeywords],
    ) -> None:
        self._init_quantizers(locals(), overrides, return_quant_tensor, rngs)

    @abstractmethod
    def _activation(self, x: Any) -> Any:
        """The activation function, on an array or a QuantTensor."""

    def _before_quantizer(self, x: jax.Array) -> jax.Array:
        return self._activation(x)

    def __call__(self, x: Any) -> Out:
        """The activation function, then the quantizer.

        Args:
            x: float array or QuantTensor, any shape.

        Returns:
            An array of the shape and dtype of `x`, or a QuantTensor with `return_quant_tensor`. Without any quantizer,
            what comes in as an array comes out as one.
        """
        x = through(self.input_quant, x)
        quantizes = is_on(self.act_quant)
        y = self.act_quant(self._before_quantizer(as_array(x))) if quantizes else self._activation(x)
        if self.grad_quant is not None:
            y = self.grad_quant.on(y)
        return y if self.return_quant_tensor else as_array(y)


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

    _results: Results[QuantIdentity[jax.Array], QuantIdentity[AnyQuantTensor]]

    def __init__(
        self,
        act_quant: QuantizerLike = Int8ActPerTensorFloat,
        *,
        return_quant_tensor: bool = False,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[QuantIdentityKeywords],
    ) -> None:
        self._init_quantizers(locals(), overrides, return_quant_tensor, rngs)

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

    _results: Results[QuantReLU[jax.Array], QuantReLU[AnyQuantTensor]]

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

    _results: Results[QuantSigmoid[jax.Array], QuantSigmoid[AnyQuantTensor]]

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

    _results: Results[QuantTanh[jax.Array], QuantTanh[AnyQuantTensor]]

    def __init__(
        self,
        act_quant: QuantizerLike = Int8ActPerTensorFloat,
        input_quant: QuantizerLike = None,
        *,
        return_quant_tensor: bool = False,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[QuantReLUKeywords],
    ) -> None:
        self._init_quantizers(locals(), overrides, return_quant_tensor, rngs)

    def _activation(self, x: Any) -> Any:
        return jnp.tanh(as_array(x))


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
        >>> QuantHardSwish(return_quant_tensor=True)(jnp.array([-1.0, 0.0, 1.0])).int()
        Array([  0,   0, 255], dtype=uint8)
    """

    _results: Results[QuantHardSwish[jax.Array], QuantHardSwish[AnyQuantTensor]]

    def _activation(self, x: Any) -> Any:
        return jax.nn.hard_swish(as_array(x))


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

    _results: Results[QuantHardTanh[jax.Array], QuantHardTanh[AnyQuantTensor]]

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
        **overrides: Unpack[QuantHardTanhKeywords],
    ) -> None:
        binding = binding_of(act_quant)
        self.min_val, self.max_val = _bounds(binding, min_val, max_val)
        if not self.min_val < self.max_val:
            raise ValueError(
                f"QuantHardTanh: min_val has to be below max_val, got {self.min_val} and {self.max_val}"
            )
        bounds = {"min_val": self.min_val, "max_val": self.max_val}
        declared: dict[str, Any] = {**overrides}
        if binding is not None:
            given = {"min_val": min_val, "max_val": max_val}
            declared = {name: bounds[name] for name in bounds if given[name] is not None} | declared
        self._init_quantizers(locals(), declared, return_quant_tensor, rngs, bounds)

    def _activation(self, x: Any) -> Any:
        value = as_array(x)
        low, high = (jnp.asarray(bound, value.dtype) for bound in (self.min_val, self.max_val))
        clamped = tensor_clamp(value, low, high)
        return x.set(value=clamped) if (on_integers(x) or on_minifloats(x)) else clamped

    def _before_quantizer(self, x: jax.Array) -> jax.Array:
        return x


def _bounds(binding: Binding | None, min_val: float | None, max_val: float | None) -> tuple[float, float]:
    """Each bound: as given, else as the quantizer declares it itself, else -1 and 1."""

    def bound(name: str, value: float | None, default: float, **context: Any) -> float:
        if value is None and binding is not None and binding.declares(name):
            value = binding.resolve(name, **context)
        return default if value is None else float(value)

    highest = bound("max_val", max_val, 1.0)
    return bound("min_val", min_val, -1.0, max_val=highest), highest
