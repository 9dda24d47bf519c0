"""What a stack of blocks keeps for the backward pass, and what it takes: plain, remat, payloads in few bits.

    python benchmarks/checkpoint_memory.py

A scan over blocks `x -> tanh(x @ w)`, with all layers' weights stacked. `saved` counts the bytes of the arrays that
the forward pass hands to the backward pass, the weights not counted: what the function that `jax.vjp` returns holds.
`temporary` is the working memory of the compiled gradient, as XLA reports it. Ratios are to the inputs of all blocks
in float32, which is what rematerialisation without quantization keeps, and to the plain program's memory.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from _timing import print_table
from jqinject.checkpoint_policies import save_quantized
from jqinject.nn import QuantCheckpoint
from jqinject.quant import Fp8e4m3ActPerTensorCurrent, Int8ActPerTensorFloat


class RunningInt(Int8ActPerTensorFloat):
    """Integers whose scale follows a running maximum."""

    scaling_impl_type = "stats"
    scaling_stats_op = "max"


class RunningInt4(RunningInt):
    """The same in 4 bits."""

    bit_width = 4


VARIANTS: dict[str, tuple[Any, bool]] = {
    # name: (quantizer of what is kept, rematerialised)
    "plain": (None, False),
    "remat": (None, True),
    "QuantCheckpoint, fp8": (Fp8e4m3ActPerTensorCurrent, True),
    "QuantCheckpoint, int8": (RunningInt, True),
    "QuantCheckpoint, int4": (RunningInt4, True),
}


class Block(nnx.Module):
    """`x -> tanh(x @ w)`, behind what keeps its input small."""

    def __init__(self, width: int, quantizer: Any, rngs: nnx.Rngs) -> None:
        self.keep = None if quantizer is None else QuantCheckpoint(quantizer)
        self.dense = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the block's output."""
        return jnp.tanh(self.dense(x if self.keep is None else self.keep(x)))


def make_loss(width: int, depth: int, quantizer: Any, remat: bool) -> tuple[Callable[..., jax.Array], Any]:
    """Return `loss(parameters, x)` of a scanned stack, and its parameters."""

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(width, quantizer, rngs)

    graphdef, parameters, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)

    def run(block: Block, x: jax.Array) -> jax.Array:
        return block(x)

    step = nnx.remat(run, policy=save_quantized if quantizer is not None else None) if remat else run

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        stack = nnx.merge(graphdef, parameters, rest, copy=True)
        scanned = nnx.scan(lambda x, block: step(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return jnp.mean(scanned(x, stack))  # a loss that keeps nothing itself

    return loss, parameters


def saved_bytes(loss: Callable[..., jax.Array], parameters: Any, x: jax.Array) -> int:
    """Return the bytes that the forward pass keeps, but for the weights."""
    pull_back = jax.eval_shape(lambda p, x: jax.vjp(loss, p, x)[1], parameters, x)
    weights = {leaf.shape for leaf in jax.tree.leaves(parameters)}
    kept = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.shape not in weights]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in kept)


def temporary_bytes(loss: Callable[..., jax.Array], parameters: Any, x: jax.Array) -> int:
    """Return the working memory of the compiled gradient."""
    compiled = jax.jit(jax.grad(loss)).lower(parameters, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=512, help="features of a block (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4096, help="rows of a batch (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=8, help="blocks (default: %(default)s)")
    options = parser.parse_args()

    x = jnp.ones((options.batch, options.width))
    inputs = 4 * options.batch * options.width * options.depth
    rows, plain = [], 0
    for name, (quantizer, remat) in VARIANTS.items():
        loss, parameters = make_loss(options.width, options.depth, quantizer, remat)
        saved = saved_bytes(loss, parameters, x)
        temporary = temporary_bytes(loss, parameters, x)
        plain = plain or temporary
        rows.append(
            [
                name,
                f"{saved / 1e6:.1f}",
                f"{saved / inputs:.3f}",
                f"{temporary / 1e6:.1f}",
                f"{temporary / plain:.2f}",
            ]
        )
    title = f"{options.depth} blocks of width {options.width}, batch {options.batch}, {jax.default_backend()}"
    print_table(title, ["MB", "saved", "/ float32 inputs", "temporary", "/ plain"], rows)


if __name__ == "__main__":
    main()
