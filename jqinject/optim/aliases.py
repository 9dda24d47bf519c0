"""Optimizers with low-bit states, made of optax's parts."""

from typing import Any

import jax
import optax

from jqinject.optim.block_format import BlockFloat8, BlockTable, dynamic_table, linear_table
from jqinject.optim.low_bit_states import SMALLEST, KeepFloat, float32_of, is_embedding, low_bit_states
from jqinject.optim.rounded_updates import round_stochastically

Rate = optax.ScalarOrSchedule


def adam8bit(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    block_size: int = 256,
    smallest: int = SMALLEST,
    keep_float: KeepFloat = is_embedding,
    rounding_seed: int | None = None,
) -> optax.GradientTransformation:
    """Adam with both moments in 8 bits: 2 bytes of state a parameter instead of 8.

    Args:
        learning_rate: a number or a schedule.
        b1: decay of the first moment.
        b2: decay of the second.
        eps: added to the root of the second moment.
        weight_decay: added to the gradient, times the parameter; for decoupled decay see `adamw8bit`.
        block_size: consecutive numbers that share a scale.
        smallest: numbers that an array must have; smaller ones keep float32 states.
        keep_float: says of a path whether its states stay float32; embeddings by default.
        rounding_seed: round bfloat16 parameters stochastically, with these random numbers; None for to nearest.

    Source: Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization"; torchao's `Adam8bit`.
    Differs from bitsandbytes's, whose `Adam8bit` decouples weight decay as its `AdamW8bit` does.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> state = adam8bit(1e-3).init({"kernel": jnp.ones((64, 64))})
        >>> sum(leaf.nbytes for leaf in jax.tree.leaves(state)) < 2.1 * 64 * 64
        True
    """
    adam = optax.scale_by_adam(b1, b2, eps)
    direction = low_bit_states(adam, _dynamic8(block_size), smallest=smallest, keep_float=keep_float)
    return _chained(learning_rate, rounding_seed, decayed_in_float32(weight_decay), direction)


def adamw8bit(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    block_size: int = 256,
    smallest: int = SMALLEST,
    keep_float: KeepFloat = is_embedding,
    rounding_seed: int | None = None,
) -> optax.GradientTransformation:
    """AdamW with both moments in 8 bits. See `adam8bit`.

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps: see `adam8bit`.
        weight_decay: what a parameter loses at each step, times the learning rate.
        block_size, smallest, keep_float, rounding_seed: see `adam8bit`.

    Example:
        >>> from flax import nnx
        >>> optimizer = nnx.Optimizer(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), adamw8bit(1e-3), wrt=nnx.Param)
    """
    adam = optax.scale_by_adam(b1, b2, eps)
    direction = low_bit_states(adam, _dynamic8(block_size), smallest=smallest, keep_float=keep_float)
    return _chained(learning_rate, rounding_seed, direction, decayed_in_float32(weight_decay))


def adamw4bit(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    block_size: int = 128,
    smallest: int = SMALLEST,
    keep_float: KeepFloat = is_embedding,
    rounding_seed: int | None = None,
) -> optax.GradientTransformation:
    """AdamW with both moments in 4 bits: the second in even steps without 0. See `adamw8bit`.

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps: see `adam8bit`.
        weight_decay: what a parameter loses at each step, times the learning rate; 0 for Adam.
        block_size, smallest, keep_float, rounding_seed: see `adam8bit`.

    Source: Li et al., 2023, "Memory Efficient Optimizers with 4-bit States"; torchao's `AdamW4bit`.
    """
    moments = {
        "mu": BlockTable(dynamic_table(4, True), block_size),
        "nu": BlockTable(linear_table(4), block_size),
    }
    adam = optax.scale_by_adam(b1, b2, eps)
    direction = low_bit_states(adam, moments, smallest=smallest, keep_float=keep_float)
    return _chained(learning_rate, rounding_seed, direction, decayed_in_float32(weight_decay))


def adamw_fp8(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    block_size: int = 256,
    smallest: int = SMALLEST,
    keep_float: KeepFloat = is_embedding,
    rounding_seed: int | None = None,
) -> optax.GradientTransformation:
    """AdamW with both moments as e4m3 numbers, scaled in blocks. See `adamw8bit`.

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps: see `adam8bit`.
        weight_decay: what a parameter loses at each step, times the learning rate; 0 for Adam.
        block_size, smallest, keep_float, rounding_seed: see `adam8bit`.

    Source: torchao's `AdamWFp8`.
    """
    moments = {name: BlockFloat8(block_size) for name in ("mu", "nu")}
    adam = optax.scale_by_adam(b1, b2, eps)
    direction = low_bit_states(adam, moments, smallest=smallest, keep_float=keep_float)
    return _chained(learning_rate, rounding_seed, direction, decayed_in_float32(weight_decay))


def lion8bit(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    *,
    block_size: int = 256,
    smallest: int = SMALLEST,
    keep_float: KeepFloat = is_embedding,
    rounding_seed: int | None = None,
) -> optax.GradientTransformation:
    """Lion with its moment in 8 bits: 1 byte of state a parameter.

    Args:
        learning_rate: a number or a schedule.
        b1: weight of the moment in the update.
        b2: decay of the moment.
        weight_decay: what a parameter loses at each step, times the learning rate.
        block_size, smallest, keep_float, rounding_seed: see `adam8bit`.

    Source: bitsandbytes's `Lion8bit`.
    """
    moments = {"mu": BlockTable(dynamic_table(8, True), block_size)}
    direction = low_bit_states(optax.scale_by_lion(b1, b2), moments, smallest=smallest, keep_float=keep_float)
    return _chained(learning_rate, rounding_seed, direction, decayed_in_float32(weight_decay))


def sgd8bit(
    learning_rate: Rate,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    *,
    nesterov: bool = False,
    block_size: int = 256,
    smallest: int = SMALLEST,
    keep_float: KeepFloat = is_embedding,
    rounding_seed: int | None = None,
) -> optax.GradientTransformation:
    """SGD with its momentum in 8 bits: 1 byte of state a parameter.

    Args:
        learning_rate: a number or a schedule.
        momentum: what the sum of gradients keeps at each step.
        weight_decay: added to the gradient, times the parameter.
        nesterov: whether to look ahead.
        block_size, smallest, keep_float, rounding_seed: see `adam8bit`.

    Source: bitsandbytes's `SGD8bit`.
    """
    moments = {"trace": BlockTable(dynamic_table(8, True), block_size)}
    trace = optax.trace(momentum, nesterov)
    direction = low_bit_states(trace, moments, smallest=smallest, keep_float=keep_float)
    return _chained(learning_rate, rounding_seed, decayed_in_float32(weight_decay), direction)


def _dynamic8(block_size: int) -> dict[str, BlockTable]:
    signed, unsigned = (BlockTable(dynamic_table(8, signed), block_size) for signed in (True, False))
    return {"mu": signed, "nu": unsigned}


def _chained(
    learning_rate: Rate, rounding_seed: int | None, *directions: optax.GradientTransformation
) -> optax.GradientTransformation:
    last = () if rounding_seed is None else (round_stochastically(rounding_seed),)
    return optax.chain(*directions, optax.scale_by_learning_rate(learning_rate), *last)


def decayed_in_float32(weight_decay: float) -> optax.GradientTransformation:
    """`optax.add_decayed_weights` whose sums are float32, whatever dtype parameters and gradients have.

    Args:
        weight_decay: what is added of a parameter.
    """
    inner = optax.add_decayed_weights(weight_decay)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return inner.update(jax.tree.map(float32_of, updates), state, jax.tree.map(float32_of, params))

    return optax.GradientTransformation(inner.init, update)
