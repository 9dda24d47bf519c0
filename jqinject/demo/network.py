"""The classifier: two convolutions and two dense layers, in float or quantized."""

from typing import Any

import jax
from flax import nnx

from jqinject.demo.recipes import DemoRecipe, Image
from jqinject.nn import QuantConv, QuantLinear, QuantReLU
from jqinject.quant import Int8WeightPerChannelFloat, Int32Bias
from jqinject.quant_tensor import is_quantized, max_pool

CHANNELS, HIDDEN, CLASSES = (16, 32), 64, 10


def _pool(x: object) -> Any:
    """The maximum of every 2 x 2 pixels; a quantized tensor keeps its scale."""
    return max_pool(x, (2, 2), strides=(2, 2)) if is_quantized(x) else nnx.max_pool(x, (2, 2), strides=(2, 2))


class Classifier(nnx.Module):
    """(n, 8, 8, 1) -> (n, 10): convolution, ReLU, pool, twice; dense, ReLU, dense.

    Without a recipe the layers are Flax's own. With one, it determines the quantization of the layers between the first
    and the last. As usual, these two stay at 8 bits, because they see the image and decide the class.
    """

    def __init__(self, recipe: DemoRecipe | None, *, rngs: nnx.Rngs) -> None:
        if recipe is None:
            self.conv1: Any = nnx.Conv(1, CHANNELS[0], (3, 3), rngs=rngs)
            self.conv2: Any = nnx.Conv(CHANNELS[0], CHANNELS[1], (3, 3), rngs=rngs)
            self.dense1: Any = nnx.Linear(2 * 2 * CHANNELS[1], HIDDEN, rngs=rngs)
            self.dense2: Any = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)
            self.relu1 = self.relu2 = self.relu3 = nnx.relu
            return
        edge = {"weight_quant": Int8WeightPerChannelFloat, "bias_quant": Int32Bias, "rngs": rngs}
        inner = {**edge, "weight_quant": recipe.weight}
        self.conv1 = QuantConv(1, CHANNELS[0], (3, 3), input_quant=Image, **edge)
        self.conv2 = QuantConv(CHANNELS[0], CHANNELS[1], (3, 3), **inner)
        self.dense1 = QuantLinear(2 * 2 * CHANNELS[1], HIDDEN, **inner)
        self.dense2 = QuantLinear(HIDDEN, CLASSES, **edge)
        self.relu1, self.relu2, self.relu3 = (
            QuantReLU(recipe.act, return_quant_tensor=True) for _ in range(3)
        )

    def __call__(self, x: jax.Array) -> Any:
        """Class scores."""
        y = self.relu1(self.conv1(x))
        y = self.relu2(self.conv2(_pool(y)))
        y = _pool(y)
        y = self.relu3(self.dense1(y.reshape((y.shape[0], -1))))
        return self.dense2(y)

    def layers(self) -> dict[str, Any]:
        """The layers with weights, by name, input to output."""
        return {name: getattr(self, name) for name in ("conv1", "conv2", "dense1", "dense2")}
