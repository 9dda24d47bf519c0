"""Quantized activations: a function, then a quantizer; and activations kept for the backward pass in few bits."""

from collections.abc import Callable
from typing import Any, ClassVar, Unpack, final

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject import quant
from jqinject.inject import Binding
from jqinject.nn import base
from jqinject.nn.base import keywords
from jqinject.ops import packing, tensor_clamp
from jqinject.quant_tensor import (
    AnyQuantTensor,
    as_array,
    is_grouped,
    is_quantized,
    on_integers,
    on_minifloats,
    pre_round_integers,
    relu,
)


class QuantActLayer(base.QuantLayer[base.Out]):
    """Abstract: y = act_quant(f(input_quant(x))).

    Attributes:
        act_quant, input_quant, grad_quant: proxies, or None.
        return_quant_tensor: whether the output is a QuantTensor.
        _function: f, of arrays; private, as tools of Flax wrap public functions of modules.
        keeps_scale: whether the function leaves a QuantTensor its scale, so that it needs no quantizer to return one.
    """

    act_quant = base.ACT
    input_quant = base.INPUT
    grad_quant = base.GRAD
    _function: ClassVar[Callable[[jax.Array], jax.Array]]
    keeps_scale: ClassVar[bool] = False

    def __init__(
        self,
        act_quant: quant.QuantizerLike = quant.Uint8ActPerTensorFloat,
        input_quant: quant.QuantizerLike = None,
        *,
        rngs: nnx.Rngs | None = None,
        **more: Unpack[keywords.QuantReLUKeywords],
    ) -> None:
        self._init_layer(locals())

    def _check_scale_to_return(self) -> None:
        if self.act_quant is None and not self.keeps_scale:
            raise self._no_scale_to_return("a quantizer", "act_quant=...")

    def _activation(self, x: object) -> Any:
        """The activation function, on an array or a QuantTensor."""
        return type(self)._function(as_array(x))

    def _before_quantizer(self, x: jax.Array) -> jax.Array:
        return self._activation(x)

    def __call__(self, x: Any) -> base.Out:
        """The activation function, then the quantizer.

        Args:
            x: float array or QuantTensor, any shape.

        Returns:
            An array of the shape and dtype of `x`, or a QuantTensor with `return_quant_tensor`. Without any quantizer,
            what comes in as an array comes out as one.
        """
        x = base.through(self.input_quant, x)
        quantizes = base.is_on(self.act_quant)
        y = self.act_quant(self._before_quantizer(as_array(x))) if quantizes else self._activation(x)
        if self.grad_quant is not None:
            y = self.grad_quant.on(y)
        return y if self.return_quant_tensor else as_array(y)


@final
class QuantIdentity(QuantActLayer[base.Out]):
    """A quantizer as a layer: y = act_quant(x). Without one, what comes in goes out.

    Args:
        act_quant: quantizer of what flows through: an injector, a proxy to share, or None.
        return_quant_tensor: return an `IntQuantTensor` instead of its value.
        grad_quant: quantizer of the gradient that flows into the result, on its way back.
        rngs: for quantizers that draw random numbers.
        more: names of `act_quant`, declared anew, without a prefix; those of `grad_quant` with `grad_`.

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

    _results: "base.Results[QuantIdentity[jax.Array], QuantIdentity[AnyQuantTensor]]"

    def __init__(
        self,
        act_quant: quant.QuantizerLike = quant.Int8ActPerTensorFloat,
        *,
        rngs: nnx.Rngs | None = None,
        **more: Unpack[keywords.QuantIdentityKeywords],
    ) -> None:
        self._init_layer(locals())

    def _activation(self, x: object) -> Any:
        return x


@final
class QuantReLU(QuantActLayer[base.Out]):
    """y = act_quant(max(x, 0)); by default unsigned 8 bits. Without a quantizer a QuantTensor keeps its scale.

    Args:
        act_quant: quantizer of the result: an injector, a proxy to share, or None.
        input_quant: quantizer of what comes in.
        return_quant_tensor: return an `IntQuantTensor` instead of its value.
        grad_quant: quantizer of the gradient that flows into the result, on its way back.
        rngs: for quantizers that draw random numbers.
        more: names of `act_quant`, declared anew, without a prefix; those of `input_quant` with
            `input_`, of `grad_quant` with `grad_`.

    Raises:
        TypeError: an argument that is not a quantizer for activations, or an override that has no effect.
        ValueError: a quantizer that does not say `signed`.

    Example:
        >>> QuantReLU(return_quant_tensor=True)(jnp.array([-1.0, 2.55])).int()
        Array([  0, 255], dtype=uint8)
    """

    keeps_scale = True

    _results: "base.Results[QuantReLU[jax.Array], QuantReLU[AnyQuantTensor]]"

    def _activation(self, x: Any) -> Any:
        return relu(x) if is_quantized(x) else jax.nn.relu(x)


@final
class QuantSigmoid(QuantActLayer[base.Out]):
    """y = act_quant(1 / (1 + exp(-x))); by default unsigned 8 bits.

    Args:
        act_quant: quantizer of the result: an injector, a proxy to share, or None.
        input_quant: quantizer of what comes in.
        return_quant_tensor: return an `IntQuantTensor` instead of its value.
        grad_quant: quantizer of the gradient that flows into the result, on its way back.
        rngs: for quantizers that draw random numbers.
        more: names of `act_quant`, declared anew, without a prefix; those of `input_quant` with
            `input_`, of `grad_quant` with `grad_`.

    Raises:
        TypeError: an argument that is not a quantizer for activations, or an override that has no effect.
        ValueError: `return_quant_tensor` without `act_quant`; a quantizer that does not say `signed`.

    Example:
        >>> QuantSigmoid(bit_width=2)(jnp.array([-9.0, 9.0])).round(3)
        Array([0., 1.], dtype=float32)
    """

    _function = staticmethod(jax.nn.sigmoid)

    _results: "base.Results[QuantSigmoid[jax.Array], QuantSigmoid[AnyQuantTensor]]"


@final
class QuantTanh(QuantActLayer[base.Out]):
    """y = act_quant(tanh(x)); by default signed 8 bits.

    Args:
        act_quant: quantizer of the result: an injector, a proxy to share, or None.
        input_quant: quantizer of what comes in.
        return_quant_tensor: return an `IntQuantTensor` instead of its value.
        grad_quant: quantizer of the gradient that flows into the result, on its way back.
        rngs: for quantizers that draw random numbers.
        more: names of `act_quant`, declared anew, without a prefix; those of `input_quant` with
            `input_`, of `grad_quant` with `grad_`.

    Raises:
        TypeError: an argument that is not a quantizer for activations, or an override that has no effect.
        ValueError: `return_quant_tensor` without `act_quant`; a quantizer that does not say `signed`.

    Example:
        >>> QuantTanh(bit_width=2)(jnp.array([-9.0, 0.0])).round(3)
        Array([-1.,  0.], dtype=float32)
    """

    _function = staticmethod(jnp.tanh)

    _results: "base.Results[QuantTanh[jax.Array], QuantTanh[AnyQuantTensor]]"

    def __init__(
        self,
        act_quant: quant.QuantizerLike = quant.Int8ActPerTensorFloat,
        input_quant: quant.QuantizerLike = None,
        *,
        rngs: nnx.Rngs | None = None,
        **more: Unpack[keywords.QuantReLUKeywords],
    ) -> None:
        self._init_layer(locals())


@final
class QuantHardSwish(QuantActLayer[base.Out]):
    """y = act_quant(x * min(max(x + 3, 0), 6) / 6); by default unsigned 8 bits, which clip its few negative results.

    Args:
        act_quant: quantizer of the result: an injector, a proxy to share, or None.
        input_quant: quantizer of what comes in.
        return_quant_tensor: return an `IntQuantTensor` instead of its value.
        grad_quant: quantizer of the gradient that flows into the result, on its way back.
        rngs: for quantizers that draw random numbers.
        more: names of `act_quant`, declared anew, without a prefix; those of `input_quant` with
            `input_`, of `grad_quant` with `grad_`.

    Raises:
        TypeError: an argument that is not a quantizer for activations, or an override that has no effect.
        ValueError: `return_quant_tensor` without `act_quant`; a quantizer that does not say `signed`.

    Example:
        >>> QuantHardSwish(return_quant_tensor=True)(jnp.array([-1.0, 0.0, 1.0])).int()
        Array([  0,   0, 255], dtype=uint8)
    """

    _function = staticmethod(jax.nn.hard_swish)

    _results: "base.Results[QuantHardSwish[jax.Array], QuantHardSwish[AnyQuantTensor]]"


@final
class QuantHardTanh(QuantActLayer[base.Out]):
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
        more: names of `act_quant`, declared anew, without a prefix; those of `input_quant` with
            `input_`, of `grad_quant` with `grad_`.

    Raises:
        TypeError: an argument that is not a quantizer for activations, or an override that has no effect.
        ValueError: bounds in the wrong order.

    Example:
        >>> QuantHardTanh(bit_width=4)(jnp.array([-3.0, 0.25, 3.0]))
        Array([-1.   ,  0.25 ,  0.875], dtype=float32)
    """

    keeps_scale = True

    _results: "base.Results[QuantHardTanh[jax.Array], QuantHardTanh[AnyQuantTensor]]"

    def __init__(
        self,
        act_quant: quant.QuantizerLike = quant.Int8ActPerTensorFloatMinMaxInit,
        input_quant: quant.QuantizerLike = None,
        *,
        min_val: float | None = None,
        max_val: float | None = None,
        rngs: nnx.Rngs | None = None,
        **more: Unpack[keywords.QuantHardTanhKeywords],
    ) -> None:
        binding = base.binding_of(act_quant)
        self.min_val, self.max_val = _bounds(binding, min_val, max_val)
        if not self.min_val < self.max_val:
            raise ValueError(
                f"QuantHardTanh: min_val has to be below max_val, got {self.min_val} and {self.max_val}"
            )
        explicit = {"min_val": min_val, "max_val": max_val} if binding is not None else {}
        bounds = {name: vars(self)[name] for name, bound in explicit.items() if bound is not None}
        self._init_declared(locals(), {**bounds, **more})

    def _facts(self) -> base.LayerFacts:
        return base.LayerFacts(offered={"act_quant": {"min_val": self.min_val, "max_val": self.max_val}})

    def _activation(self, x: object) -> Any:
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


MOST_BITS = 8


@final
class QuantCheckpoint(base.QuantLayer[jax.Array]):
    """`y = act_quant(x)`, kept for the backward pass as payload and scale.

    Put it at the beginning of a block that is rematerialised with `jqinject.checkpoint_policies.save_quantized`: what
    the block keeps is then this payload (packed: 8 bits a number, or 4, 3 or 2) and its scale, and the backward pass
    computes the block again from them. The gradient is **not** quantized, it passes straight through, saturated numbers
    included; nothing flows into a learned scale, and a second derivative sees a constant. To quantize the gradient too,
    give a `grad_quant`.

    Without rematerialisation it is a quantizer as a layer, as `QuantIdentity`.

    Args:
        act_quant: quantizer of what is kept, of at most 8 constant bits: an injector, or a proxy to share.
        grad_quant: quantizer of the gradient; None leaves it unchanged.
        rngs: for quantizers that draw random numbers.
        more: names of `act_quant`, declared anew, without a prefix; those of `grad_quant` with `grad_`.

    Raises:
        TypeError: an argument that is not a quantizer of its kind, or an override that has no effect.
        ValueError: there is no `act_quant`, or (when called) it does not quantize, or to more than 8 bits, or to a
            learned number of bits.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.checkpoint_policies import save_quantized
        >>> from jqinject.quant import Fp8e4m3ActPerTensorCurrent
        >>> class Block(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.keep = QuantCheckpoint(Fp8e4m3ActPerTensorCurrent)
        ...         self.fc = nnx.Linear(4, 4, rngs=rngs)
        ...     def __call__(self, x):
        ...         return jnp.tanh(self.fc(self.keep(x)))
        >>> block = Block(nnx.Rngs(0))
        >>> remat = nnx.remat(lambda block, x: block(x), policy=save_quantized)
        >>> nnx.grad(lambda block, x: remat(block, x).sum())(block, jnp.ones((2, 4)))["fc"]["bias"].shape
        (4,)
    """

    act_quant = base.ACT
    grad_quant = base.GRAD
    options = ()

    def __init__(
        self,
        act_quant: quant.QuantizerLike,
        *,
        rngs: nnx.Rngs | None = None,
        **more: Unpack[keywords.QuantCheckpointKeywords],
    ) -> None:
        if act_quant is None:
            raise ValueError(
                "QuantCheckpoint needs an act_quant: without one there is nothing that would be kept small.\n"
                "  cure: QuantCheckpoint(Fp8e4m3ActPerTensorCurrent), or leave the layer out"
            )
        self._init_layer(locals())

    def __call__(self, x: Any) -> jax.Array:
        """Quantize, and keep the payload.

        Args:
            x: float array or QuantTensor, any shape.

        Returns:
            The dequantized array, of the shape and dtype of `x`.

        Raises:
            ValueError: `act_quant` does not quantize, or to more than 8 bits, or to a learned number of bits.
        """
        floats = as_array(x)
        return base.through(self.grad_quant, _kept_small(floats, self.act_quant(floats)))


def _kept_small(x: jax.Array, quantized: object) -> jax.Array:
    if is_grouped(quantized):
        groups = quantized.groups
        return groups.join(_kept_small(groups.split(x), quantized.grouped))
    if on_minifloats(quantized):
        _check_few_bits(quantized.bit_width)
        assert not quantized.format.is_learned, "a learned format has no constant bits"
        return packing.saved(x, quantized.narrow_numbers(), quantized.scale, None, quantized.format)
    if not on_integers(quantized):
        raise ValueError(
            "QuantCheckpoint: act_quant is switched off or does not quantize, so nothing would be kept small.\n"
            "  cure: an act_quant of at most 8 bits, such as Fp8e4m3ActPerTensorCurrent or Int8ActPerTensorFloat"
        )
    _check_few_bits(quantized.bit_width)
    # Not `.int()`, which looks at the whole tensor first: a quantizer's own output lies on its grid.
    value = jax.lax.stop_gradient(quantized.value)
    integers = jnp.round(pre_round_integers(value, quantized.scale, quantized.zero_point))
    payload = jax.lax.stop_gradient(integers).astype("int8" if quantized.signed else "uint8")
    return packing.saved(x, payload, quantized.scale, quantized.zero_point, quantized.grid)


def _check_few_bits(bits: object) -> None:
    if isinstance(bits, int) and bits <= MOST_BITS:
        return
    learned = "a learned number of bits" if not isinstance(bits, int) else f"{bits} bits"
    raise ValueError(
        f"QuantCheckpoint: act_quant quantizes to {learned}; what is kept has at most {MOST_BITS} constant bits.\n"
        "  cure: bit_width = 8 or less, bit_width_impl_type = 'const'"
    )
