"""Trace a stateless quantizer once per shape and dtype and reuse its jaxpr."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.core
from flax import nnx

from jqinject.core import Quantized
from jqinject.core.component import Component


def traced_once(quantizer: Any, x: Any) -> Quantized | None:
    """What a quantizer, which keeps payloads if it can, returns for a tensor of a program that is being traced.

    None if it has state, the tensor is concrete, or the result has numbers that are known before the program runs. A
    model traces its quantizers hundreds of times, each about a millisecond; the equations are the same, and JAX
    inlines them.

    Args:
        quantizer: the quantizer.
        x: a float array.
    """
    is_value = isinstance(quantizer, Component) and not isinstance(quantizer, nnx.Pytree)
    return _traced(quantizer, x) if is_value and isinstance(x, jax.core.Tracer) else None


@partial(jax.jit, static_argnums=0, inline=True)
def _traced(quantizer: Any, x: jax.Array) -> Quantized | None:
    result = getattr(quantizer, "keeping_payload", quantizer)(x)
    traced = isinstance(result, Quantized) and all(
        isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(result)
    )
    return result if traced else None
