"""Training, calibrating and measuring."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jqinject.demo.data import Digits
from jqinject.demo.recipes import CALIBRATION_STEPS
from jqinject.quant_tensor import as_array

BATCH = 128


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
