"""Policies of rematerialisation, for `jax.checkpoint` and `nnx.remat`.

A policy says what the forward pass keeps for the backward pass; the rest is computed again.
"""

from typing import Any

import jax

from jqinject.ops.packing import SAVED_NAMES


def save_quantized(primitive: object, *arguments: object, **parameters: object) -> Any:
    """Keep the payloads and scales of `jqinject.nn.QuantCheckpoint`, and nothing else.

    A block that begins with a `QuantCheckpoint` is then computed again, in the backward pass, from its quantized input:
    one byte a number (8 bits), or half of one (4 bits), instead of four.

    Args:
        primitive, arguments, parameters: what JAX asks about; use the policy by name, `policy=save_quantized`.

    Returns:
        JAX's answer: whether to keep it.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.nn import QuantCheckpoint
        >>> from jqinject.quant import Fp8e4m3ActPerTensorCurrent
        >>> keep = QuantCheckpoint(Fp8e4m3ActPerTensorCurrent)
        >>> block = nnx.remat(lambda keep, x: jnp.tanh(keep(x)), policy=save_quantized)
        >>> nnx.grad(lambda x, keep: block(keep, x).sum())(jnp.zeros(2), keep)
        Array([1., 1.], dtype=float32)
    """
    return _POLICY(primitive, *arguments, **parameters)


_POLICY = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
