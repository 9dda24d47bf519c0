"""The classifier of the main job: its digits, its layers, how it is trained, and what is measured of it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jqinject.demo.recipes import CALIBRATION_STEPS, DemoRecipe, Image
from jqinject.nn import QuantConv, QuantLinear, QuantReLU
from jqinject.quant import Int8WeightPerChannelFloat, Int32Bias
from jqinject.quant_tensor import as_array, is_quantized, max_pool

CHANNELS, HIDDEN, CLASSES = (16, 32), 64, 10
BATCH = 128


class Digits(NamedTuple):
    """Images in [0, 1], float32, (n, 8, 8, 1); labels int32, (n,)."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(seed: int) -> Digits:
    """The digits, shuffled and split into 1,347 for training and 450 for testing."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits: Any = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    parts: Any = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
    train, test, train_labels, test_labels = parts
    return Digits(train, train_labels, test, test_labels)


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


def batches(digits: Digits, epochs: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Shuffled full batches of the training set."""
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        order = random.permutation(len(digits.train_labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            yield jnp.asarray(digits.train_images[chosen]), jnp.asarray(digits.train_labels[chosen])


def steps_of(digits: Digits, epochs: int) -> int:
    """How many batches that is."""
    return epochs * (len(digits.train_labels) // BATCH)


def _loss(model: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    scores = as_array(model(images))
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


@nnx.jit
def _train_step(
    model: object, optimizer: nnx.Optimizer[Any], images: jax.Array, labels: jax.Array
) -> jax.Array:
    loss, gradients = nnx.value_and_grad(_loss)(model, images, labels)
    optimizer.update(model, gradients)
    return loss


def train(
    model: Any, digits: Digits, epochs: int, learning_rate: float, seed: int, advance: Callable[[], None]
) -> None:
    """Train with Adam and a cosine schedule; `advance` is called after every step."""
    schedule = optax.cosine_decay_schedule(learning_rate, max(steps_of(digits, epochs), 1))
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
    model.train()
    for images, labels in batches(digits, epochs, seed):
        _train_step(model, optimizer, images, labels)
        advance()


@nnx.jit
def _forward(model: Any, images: jax.Array) -> jax.Array:
    return as_array(model(images))


def calibrate(model: Any, digits: Digits, seed: int) -> None:
    """Collect the activations' statistics from a few batches; no weight changes."""
    model.train()
    for step, (images, _) in enumerate(batches(digits, 2, seed)):
        if step > CALIBRATION_STEPS:
            break
        _forward(model, images)


def accuracy(model: Any, digits: Digits) -> float:
    """The share of the test set that is classified correctly, in evaluation mode."""
    model.eval()
    scores = _forward(model, jnp.asarray(digits.test_images))
    return float(np.mean(np.argmax(np.asarray(scores), axis=-1) == digits.test_labels))


def float_bytes(model: Classifier) -> int:
    """Bytes of weights and biases in float32."""
    return sum(4 * (layer.kernel.size + layer.bias.size) for layer in model.layers().values())


def quantized_bytes(model: Classifier, recipe: DemoRecipe) -> int:
    """Bytes of the integers: weights at their bit width with one float32 scale each, biases in 32 bits."""
    total = 0.0
    for name, layer in model.layers().items():
        bits = 8 if name in ("conv1", "dense2") else recipe.weight_bits
        total += layer.kernel.size * bits / 8 + 4 * layer.weight_quant.scale().size + 4 * layer.bias.size
    return round(total)


def frozen_bytes(model: Classifier) -> int:
    """Bytes of a frozen model's weights and biases: integers (two 4-bit ones to a byte), scales, sums, and biases."""
    parts = [part for layer in model.layers().values() for part in (layer.kernel, layer.bias)]
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(parts))


def weight_sqnr(model: Classifier) -> dict[str, float]:
    """Signal-to-quantization-noise ratio of every layer's weights: 10 log10(sum w^2 / sum (w - w_q)^2), in decibels."""
    return {name: _sqnr(layer) for name, layer in model.layers().items()}


def _sqnr(layer: Any) -> float:
    weight = layer.weight[...]
    noise = float(jnp.sum((weight - as_array(layer.quant_weight())) ** 2))
    return 10 * float(np.log10(float(jnp.sum(weight**2)) / max(noise, 1e-30)))
