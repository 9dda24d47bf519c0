"""Activations that are kept for the backward pass in few bits."""

from typing import Any, Unpack, final

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.nn.base.keywords import QuantCheckpointKeywords
from jqinject.nn.base.quant_layer import QuantLayer
from jqinject.nn.base.slots import ACT, GRAD, hold_proxies, through
from jqinject.ops.packing import saved
from jqinject.quant import QuantizerLike
from jqinject.quant_tensor import (
    FloatQuantTensor,
    as_array,
    is_grouped,
    on_integers,
    on_minifloats,
    pre_round_integers,
)

MOST_BITS = 8


@final
class QuantCheckpoint(QuantLayer[jax.Array]):
    """`y = act_quant(x)`, kept for the backward pass as payload and scale.

    Put it at the beginning of a block that is rematerialised with `jqinject.checkpoint_policies.save_quantized`: what
    the block keeps is then this payload (packed: 8 bits a number, or 4, or 2) and its scale, and the backward pass
    computes the block again from them. The gradient is **not** quantized, it passes straight through, saturated numbers
    included; nothing flows into a learned scale, and a second derivative sees a constant. To quantize the gradient too,
    give a `grad_quant`.

    Without rematerialisation it is a quantizer as a layer, as `QuantIdentity`.

    Args:
        act_quant: quantizer of what is kept, of at most 8 constant bits: an injector, or a proxy to share.
        grad_quant: quantizer of the gradient; None leaves it unchanged.
        rngs: for quantizers that draw random numbers.
        overrides: names of `act_quant`, declared anew, without a prefix; those of `grad_quant` with `grad_`.

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

    act_quant: Any = ACT
    grad_quant: Any = GRAD

    def __init__(
        self,
        act_quant: QuantizerLike,
        *,
        grad_quant: QuantizerLike = None,
        rngs: nnx.Rngs | None = None,
        **overrides: Unpack[QuantCheckpointKeywords],
    ) -> None:
        if act_quant is None:
            raise ValueError(
                "QuantCheckpoint needs an act_quant: without one there is nothing that would be kept small.\n"
                "  cure: QuantCheckpoint(Fp8e4m3ActPerTensorCurrent), or leave the layer out"
            )
        hold_proxies(self, locals(), overrides, rngs)

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
        return through(self.grad_quant, _kept_small(floats, self.act_quant(floats)))


def _kept_small(x: jax.Array, quantized: Any) -> jax.Array:
    if is_grouped(quantized):
        groups = quantized.groups
        return groups.join(_kept_small(groups.split(x), quantized.grouped))
    if on_minifloats(quantized):
        return _kept_floats(x, quantized)
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
    return saved(x, payload, quantized.scale, quantized.zero_point, quantized.grid)


def _kept_floats(x: jax.Array, quantized: FloatQuantTensor) -> jax.Array:
    _check_few_bits(quantized.bit_width)
    form = quantized.format
    assert not form.is_learned, "a learned format has no constant bits"
    floats = form.packed_bits is None and jnp.issubdtype(quantized.q_dtype, jnp.floating)
    return saved(x, quantized.payload() if floats else quantized.codes(), quantized.scale, None, form)


def _check_few_bits(bits: Any) -> None:
    if isinstance(bits, int) and bits <= MOST_BITS:
        return
    learned = "a learned number of bits" if not isinstance(bits, int) else f"{bits} bits"
    raise ValueError(
        f"QuantCheckpoint: act_quant quantizes to {learned}; what is kept has at most {MOST_BITS} constant bits.\n"
        "  cure: bit_width = 8 or less, bit_width_impl_type = 'const'"
    )
