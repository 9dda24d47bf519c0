"""A row of the table: a number of the literature, and how jqinject gives it; and ways to measure through its API."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import ArrayLike, NDArray

import jqinject
from jqinject.nn import QuantIdentity, QuantLinear
from tests.literature._reference import NORMAL, Source

Array = NDArray[np.float64]
NUMBERS = 2**20  # of a sample
ROWS = 2**18  # of quantiles


@dataclass(frozen=True)
class Row:
    """A quantity that the literature or theory gives.

    Attributes:
        name: what it is.
        published: the number, as text where its digits are those of a source.
        measure: what jqinject gives.
        tolerance: how far apart they may be.
        why: what the tolerance is of.
        source: where the number comes from.
    """

    name: str
    published: str | float
    measure: Callable[[], float]
    tolerance: float
    why: str
    source: str

    @property
    def printed(self) -> str:
        """The number as text."""
        return self.published if isinstance(self.published, str) else f"{self.published:.6g}"


def activations(quantizer: type, x: ArrayLike) -> Array:
    """What an activation quantizer makes of a tensor, in the way of a user: a layer that does nothing else."""
    layer = QuantIdentity(act_quant=quantizer)
    return np.asarray(layer(jnp.asarray(x, jnp.float32)), np.float64)


def weight_layer(quantizer: type, w: ArrayLike) -> QuantLinear:
    """A layer with a weight, quantized."""
    kernel = jnp.asarray(w, jnp.float32)
    layer = QuantLinear(*kernel.shape, weight_quant=quantizer, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel.set_value(kernel)
    jqinject.reassemble(layer)
    return layer


def weights(quantizer: type, w: ArrayLike) -> Array:
    """What a weight quantizer makes of a matrix."""
    return np.asarray(weight_layer(quantizer, w).quant_weight().value, np.float64)


def error(x: ArrayLike, y: ArrayLike) -> float:
    """The mean squared error."""
    return float(np.mean(np.square(np.asarray(y, np.float64) - np.asarray(x, np.float64))))


def decibels(ratio: float) -> float:
    """A signal-to-noise ratio in dB, from noise over signal."""
    return -10 * math.log10(ratio)


def effective_bits(ratio: float) -> float:
    """The bits of an ideal code of a normal distribution with the same noise over signal: `log2(1 / ratio) / 2`."""
    return -math.log2(ratio) / 2


@cache
def sample(columns: int, seed: int = 0) -> Array:
    """Normally distributed numbers in rows, divided by their root mean square."""
    x = np.random.default_rng(seed).standard_normal((NUMBERS // columns, columns))
    return x / np.sqrt(np.mean(x**2))


@cache
def quantiles(source: Source = NORMAL, columns: int = 512) -> Array:
    """Quantiles of a distribution: a sample without chance, whose tail ends early."""
    return source.quantile((np.arange(ROWS) + 0.5) / ROWS).reshape(-1, columns)
