"""MTCNN: boxes of faces, by three small convolutional networks, each of which looks closer than the one before.

Weights: `facenet_pytorch/data/*.pt` of the package facenet-pytorch. Zhang, Zhang, Li, Qiao: Joint Face Detection and
Alignment Using Multitask Cascaded Convolutional Networks, 2016 (arXiv:1604.02878). `detection.py` has the cascade.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from trained.weights import fill_conv, fill_linear, package_file, read_torch

Outputs = tuple[jax.Array, ...]


class PRelu(nnx.Module):
    """A ReLU with a slope below 0 for each channel."""

    def __init__(self, channels: int):
        self.slope = nnx.Param(jnp.full((channels,), 0.25))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the activation."""
        return jnp.where(x > 0, x, self.slope * x)


def pool(x: jax.Array, window: int) -> jax.Array:
    """Return the maxima of windows two apart; the last one may reach past the edge."""
    edges = [(0, (size - window) % 2) for size in x.shape[1:3]]
    return nnx.max_pool(x, (window, window), (2, 2), edges)


class Net(nnx.Module):
    """Convolutions with pools between, then dense layers: the common part of the three networks.

    Args:
        convs: inputs, outputs and window of each convolution.
        pools: window of the pool after each convolution; 0 for none.
        dense: inputs and outputs of the dense layer after them; None without one.
        heads: sizes of the outputs.
    """

    def __init__(
        self,
        convs: Sequence[tuple[int, int, int]],
        pools: Sequence[int],
        dense: tuple[int, int] | None,
        heads: Sequence[int],
        *,
        rngs: nnx.Rngs,
    ):
        self.pools = tuple(pools)
        self.convs = nnx.List(
            [nnx.Conv(a, b, (window, window), padding="VALID", rngs=rngs) for a, b, window in convs]
        )
        self.prelus = nnx.List([PRelu(outputs) for _, outputs, _ in convs])
        self.dense = None if dense is None else nnx.Linear(*dense, rngs=rngs)
        if dense is not None:
            self.prelus.append(PRelu(dense[1]))
        last = convs[-1][1] if dense is None else dense[1]
        # Without a dense layer the heads are convolutions of one pixel, which a dense layer is along the last axis.
        self.heads = nnx.List([nnx.Linear(last, size, rngs=rngs) for size in heads])

    def __call__(self, x: jax.Array) -> Outputs:
        """Return the logits of no face and face, the corrections of the box, and perhaps landmarks."""
        for number, conv in enumerate(self.convs):
            x = self.prelus[number](conv(x))
            x = pool(x, self.pools[number]) if self.pools[number] else x
        if self.dense is not None:
            x = self.prelus[-1](self.dense(x.transpose(0, 2, 1, 3).reshape(x.shape[0], -1)))
        return tuple(head(x) for head in self.heads)


class Mtcnn(nnx.Module):
    """The three networks: `propose` windows of 12 pixels, `refine` 24 and `output` 48."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.propose = Net([(3, 10, 3), (10, 16, 3), (16, 32, 3)], (2, 0, 0), None, (2, 4), rngs=rngs)
        refine = [(3, 28, 3), (28, 48, 3), (48, 64, 2)]
        self.refine = Net(refine, (3, 3, 0), (576, 128), (2, 4), rngs=rngs)
        output = [(3, 32, 3), (32, 64, 3), (64, 64, 3), (64, 128, 2)]
        self.output = Net(output, (3, 3, 2, 0), (1152, 256), (2, 4, 10), rngs=rngs)

    def __call__(self, small: jax.Array, middle: jax.Array, large: jax.Array) -> tuple[Outputs, ...]:
        """Return the outputs of the three networks, for pictures of at least 12, of 24 and of 48 pixels."""
        return self.propose(small), self.refine(middle), self.output(large)


def load() -> Mtcnn:
    """Return the trained model, in evaluation mode."""
    model = Mtcnn(rngs=nnx.Rngs(0))
    for letter, net, size in (("p", model.propose, 4), ("r", model.refine, 5), ("o", model.output, 6)):
        file = f"data/{letter}net.pt"
        arrays = read_torch(package_file("facenet_pytorch", file, "facenet-pytorch==2.6.0"))
        for number, conv in enumerate(net.convs, start=1):
            fill_conv(conv, arrays, f"conv{number}")
        for number, prelu in enumerate(net.prelus, start=1):
            prelu.slope[...] = arrays[f"prelu{number}.weight"]
        if net.dense is not None:
            fill_linear(net.dense, arrays, f"dense{size - 1}")
        for number, head in enumerate(net.heads, start=1):
            name = f"{'conv' if net.dense is None else 'dense'}{size}_{number}"
            weight, bias = arrays[f"{name}.weight"], arrays[f"{name}.bias"]
            fill_linear(head, {"head.weight": weight.reshape(weight.shape[:2]), "head.bias": bias}, "head")
    model.eval()
    return model
