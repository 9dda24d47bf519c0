"""What is quantized, and how good it is after: the language model, the same with planted outliers, the digits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from byte_lm import ByteLM, Corpus, bits_of_windows, load
from byte_lm.evaluation import log_losses
from flax import nnx

from jqinject.demo import classifier
from jqinject.demo.classifier import Classifier

CHECKPOINT = Path(__file__).parents[1] / "data" / "byte_lm.npz"
CONTEXT, BATCH = 256, 8
OUTLIERS, FACTOR = 0.02, 30.0
DIGITS_EPOCHS, DIGITS_BATCH = 30, 128

Batch = Any


@dataclass(frozen=True)
class Track:
    """A model and its data.

    Attributes:
        name: of the track.
        unit: of the scores.
        model: float.
        path: regular expression of the layers that are quantized.
        calibration: seed -> batches for a recipe.
        training: seed, steps -> batches for training.
        loss: of a model and a batch of `training`.
        learning_rate: of training with the quantizers in the loop.
        scores: of a model, one for each window or image, smaller for better ones.
        text: which data.
    """

    name: str
    unit: str
    model: nnx.Module
    path: str
    calibration: Callable[[int], list[Batch]]
    training: Callable[[int, int], Iterator[Batch]]
    loss: Callable[[Any, Batch], jax.Array]
    learning_rate: float
    scores: Callable[[nnx.Module], np.ndarray]
    text: str

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the matrices that are quantized."""
        found = nnx.to_flat_state(nnx.state(self.model, nnx.Param))
        arrays = {".".join(map(str, keys[:-1])): x[...] for keys, x in found if x[...].ndim > 1}
        chosen = [x.shape for layer, x in arrays.items() if re.fullmatch(self.path, layer)]
        return [(math.prod(shape[:-1]), shape[-1]) for shape in chosen]

    @property
    def weights(self) -> int:
        """How many weights are quantized."""
        return sum(inputs * outputs for inputs, outputs in self.shapes)


def language_track(planted: bool, windows: int, calibration: int, checkpoint: Path = CHECKPOINT) -> Track:
    """The shipped language model; its blocks are quantized, its embedding and its head stay float.

    Args:
        planted: whether some channels of its norms are outliers.
        windows: of the validation text that it is scored on.
        calibration: windows of the training text that recipes see.
        checkpoint: of the model.
    """
    corpus = Corpus.of_standard_library()
    model = load(checkpoint)
    if planted:
        plant_outliers(model)
    held_out = corpus.validation_windows(windows, CONTEXT)

    def batches(seed: int, count: int, kind: int) -> Iterator[jax.Array]:
        return (corpus.batch(i, BATCH, CONTEXT, 1_000 * (1 + seed) + kind) for i in range(count))

    return Track(
        "planted" if planted else "natural",
        "bits/byte",
        model,
        r"blocks\..*",
        lambda seed: [windows[:, :-1] for windows in batches(seed, -(-calibration // BATCH), 0)],
        lambda seed, steps: batches(seed, steps, 1),
        language_loss,
        5e-4,
        partial(bits_of_windows, windows=held_out),
        str(corpus),
    )


def language_loss(model: Any, windows: jax.Array) -> jax.Array:
    """The mean cross-entropy."""
    return log_losses(model, windows).mean()


def plant_outliers(
    model: ByteLM, share: float = OUTLIERS, factor: float = FACTOR, seed: int = 0
) -> np.ndarray:
    """Make some channels of every block's norms large, and divide the weights that read them: in place.

    The float function stays. It flatters methods that find one factor for each channel, as that undoes it exactly.

    Args:
        model: float.
        share: of the channels; at least one.
        factor: of the norms' gains.
        seed: of the choice of channels, the same in every block.

    Returns:
        The channels.
    """
    width = model.size.width
    chosen = np.random.default_rng(seed).choice(width, max(1, round(share * width)), replace=False)
    gains = jnp.ones(width).at[chosen].set(factor)
    for block in model.blocks:
        readers = {
            block.attention_norm: (block.attention.query, block.attention.key, block.attention.value),
            block.mlp_norm: (block.mlp.gate, block.mlp.up),
        }
        for norm, layers in readers.items():
            norm.scale[...] = norm.scale[...] * gains
            for layer in layers:
                layer.kernel[...] = layer.kernel[...] / gains[:, None]
    return chosen


def digits_track(calibration: int) -> Track:
    """The digits classifier of `python -m jqinject`, trained here; its two inner layers are quantized.

    Args:
        calibration: images of the training set that recipes see.
    """
    digits = classifier.load(0)
    model = Classifier(None, rngs=nnx.Rngs(0))
    classifier.train(model, digits, DIGITS_EPOCHS, 2e-3, 0, lambda: None)

    def images(seed: int) -> list[jax.Array]:
        chosen = np.random.default_rng(seed).permutation(len(digits.train_images))[:calibration]
        parts = np.array_split(digits.train_images[chosen], max(1, calibration // DIGITS_BATCH))
        return [jnp.asarray(part) for part in parts]

    def batches(seed: int, steps: int) -> Iterator[Batch]:
        epochs = -(-steps // classifier.steps_of(digits, 1))
        return (
            batch for _, batch in zip(range(steps), classifier.batches(digits, epochs, seed), strict=False)
        )

    def errors(model: Any) -> np.ndarray:
        found = np.asarray(classes(model, jnp.asarray(digits.test_images)))
        return 100.0 * (found != digits.test_labels)

    return Track(
        "digits",
        "% wrong",
        model,
        "conv2|dense1",
        images,
        batches,
        digits_loss,
        2e-4,
        errors,
        "scikit-learn's digits",
    )


@nnx.jit
def classes(model: Any, images: jax.Array) -> jax.Array:
    """The class that the model gives to each image."""
    return jnp.argmax(model(images), axis=-1)


def digits_loss(model: Any, batch: Batch) -> jax.Array:
    """The mean cross-entropy."""
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()
