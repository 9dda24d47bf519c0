"""`Adapter`: the trainable low-rank update of a parameter that a program contracts."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core.component import InnerModule, component
from jqinject.program import call, low_rank_product, policy, tracked_value


@component
class Adapter(InnerModule):
    """The low-rank update of one parameter: `(alpha / rank) * A B`, in `model.op_quant.adapters[path]`.

    Args:
        a: `nnx.LoRAParam`, (*batch, *contracted, rank), the parameter's axes in its own order.
        b: `nnx.LoRAParam`, (*batch, rank, *free).
        dropout: of the input; None without one.
        weight_path: the parameter's path in the model.
        contracted: axes of the parameter that only A has.
        free: axes that only B has; any other is a batch axis of both: experts, layers of a stack.
        scale: alpha / rank.
        base: how the parameter is quantized, for merging; None if it is float.
        lookups: names of the operations that look the parameter's rows up, which read it without the update.
        inside: the parameter takes the update before its quantizer, wherever it is read; else contractions take it
            beside the quantized parameter.
    """

    a: nnx.LoRAParam[jax.Array]
    b: nnx.LoRAParam[jax.Array]
    weight_path: tracked_value.Path
    contracted: tuple[int, ...]
    free: tuple[int, ...]
    scale: float
    base: Any = None
    lookups: tuple[str, ...] = ()
    dropout: nnx.Dropout | None = None
    inside: bool = False

    @property
    def rank(self) -> int:
        """The rank."""
        return self.a.shape[-1]

    def low_rank(self) -> low_rank_product.LowRankProduct:
        """The update in the parameter's axes."""
        ndim = self.a.ndim - 1 + len(self.free)
        a = self.a[...]
        batch = ndim - len(self.contracted) - len(self.free)
        b = jnp.moveaxis(self.b[...], batch, -1)
        return low_rank_product.LowRankProduct(
            _spread(a, ndim, self.contracted, self.free),
            _spread(b, ndim, self.free, self.contracted),
            self.scale,
            "" if self.dropout is None else dropout_name(policy.dotted(self.weight_path)),
        )

    def added_to(self, value: jax.Array) -> jax.Array:
        """The parameter with the update, in its dtype; see `low_rank_sum`."""
        factors = self.low_rank()
        return low_rank_product.low_rank_sum(value, factors.a, factors.b, factors.scale)


def dropout_name(path: str) -> str:
    """The name of the dropout of a parameter's adapter, in statistics and random streams."""
    return f"{path}_dropout"


def with_adapters(model: nnx.Module, program: call.Program) -> call.Program:
    """A traced program whose parameters know their adapters, or have the update in them.

    A frozen parameter's adapter is that of the first of its arrays.

    Args:
        model: an NNX module.
        program: of a call of it.
    """
    quantizers = vars(model).get(policy.HELD)
    left = {} if quantizers is None else dict(quantizers.adapters_by_path())
    inputs = []
    for x in program.inputs:
        adapter = left.pop(policy.dotted(x.weight_path), None) if x.is_weight else None
        if adapter is not None and adapter.inside:
            x = replace(x, value=adapter.added_to(x.value), twins={})
        elif adapter is not None:
            x = replace(x, low_rank=adapter.low_rank(), twins={})
        inputs.append(x)
    return program._replace(inputs=inputs)


def _spread(factor: jax.Array, ndim: int, own: tuple[int, ...], unshared: tuple[int, ...]) -> jax.Array:
    """A factor (*batch, *own, rank) in the axes of the parameter, and the rank.

    Args:
        factor: the factor.
        ndim: axes of the parameter.
        own: axes of the parameter that only this factor has.
        unshared: those that only the other factor has.
    """
    batch = [axis for axis in range(ndim) if axis not in {*own, *unshared}]
    order = [*batch, *own]
    places = [order.index(axis) for axis in sorted(order)]
    return jnp.expand_dims(jnp.transpose(factor, (*places, factor.ndim - 1)), unshared)
